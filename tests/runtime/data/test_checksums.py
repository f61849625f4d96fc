"""Checksums: the same on every mesh and in pieces of any size, and another one with every bit that flips."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardkit as sk
from shardkit.on_device.checksum import checksum, checksum_of_part
from shardkit.runtime.checkpoint.record import FORMAT
from shardkit.runtime.data import checksums as module
from shardkit.runtime.data.checksums import checksums


def by_numpy(x: np.ndarray) -> int:
    """The checksum of an array of 32 bits an element, by NumPy."""

    def mixed(x: np.ndarray) -> np.ndarray:
        x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
        x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
        return x ^ (x >> 16)

    return int(
        np.sum(mixed(x.reshape(-1).view(np.uint32) ^ mixed(np.arange(x.size, dtype=np.uint32))), dtype=np.uint32)
    )


def test_a_checksum_is_the_same_on_every_mesh_and_sees_every_bit():
    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    mesh = sk.make_mesh(data=2, model=4)
    specs = [PartitionSpec(), PartitionSpec("data"), PartitionSpec("model", "data"), PartitionSpec(None, "model")]
    arrays = {str(spec): jax.device_put(x, NamedSharding(mesh, spec)) for spec in specs}
    assert set(checksums(arrays).values()) == {by_numpy(x)}
    minus, swapped = x.copy(), x.copy()  # both keep the sum of all words
    minus[[1, 5], [2, 7]] *= -1
    swapped[[3, 4]] = x[[4, 3]]
    others = {name: jax.device_put(y, arrays[str(specs[2])].sharding) for name, y in (("-", minus), ("<>", swapped))}
    assert checksums(others) == {"-": by_numpy(minus), "<>": by_numpy(swapped)}
    assert len({by_numpy(x), by_numpy(minus), by_numpy(swapped)}) == 3
    for dtype in ("bfloat16", "float8_e4m3fn", "int16", "bool", "complex64"):
        y = np.asarray(jnp.asarray([1, 0, 1], dtype))
        raw = y.view(np.uint8)
        seen = set()
        for byte in range(raw.size):
            for bit in range(1 if dtype == "bool" else 8):
                flipped = raw.copy()
                flipped[byte] ^= 1 << bit
                each = jax.device_put(flipped.view(y.dtype), NamedSharding(mesh, PartitionSpec()))
                seen.add(checksums({"x": each})["x"])
        assert checksums({"x": jax.device_put(y, NamedSharding(mesh, PartitionSpec()))})["x"] not in seen


def test_the_format_moves_with_the_checksum():
    """A reader with other checksums would call every leaf damaged."""
    array = jnp.arange(6, dtype=jnp.float32).reshape(2, 3)
    assert (FORMAT, int(checksum(array))) == (2, by_numpy(np.asarray(array)))
    assert by_numpy(np.arange(6, dtype=np.float32)) == 3757635346


# A piece at the end of a dim, which reaches back, would count words twice; complex words have a dim in front.
@pytest.mark.parametrize(
    "dtype", ["float32", *(pytest.param(x, marks=pytest.mark.deep) for x in ("complex64", "int8"))]
)
def test_pieces_of_any_size_have_the_checksum_of_the_whole(dtype):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3, 7)) * 9).astype(dtype)
    found = jax.jit(lambda x: [checksum_of_part(x, (0, 0, 0), x.shape, piece) for piece in (2, 50)])(x)
    assert [int(each) for each in found] == [int(checksum(x))] * 2


# Alone, a part would have the places of the first, and each of several copies would count.
def test_parts_on_any_mesh_add_up(monkeypatch):
    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    specs = {"whole": PartitionSpec(), "rows": PartitionSpec("data"), "both": PartitionSpec("model", "data")}
    mesh = sk.make_mesh(data=2, model=4)
    arrays = {name: jax.device_put(x, NamedSharding(mesh, spec)) for name, spec in specs.items()}
    monkeypatch.setattr(module, "PIECE", 6)
    assert checksums(arrays) == dict.fromkeys(specs, int(checksum(jnp.asarray(x))))
