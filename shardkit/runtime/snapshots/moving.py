"""The collectives of snapshots: pieces to the neighbour host, and messages and missing pieces to all processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit.collectives import all_reduce, vary

_CHUNK = 2**24  # bytes of missing pieces that are sent at a time
_SHORTEST = 256  # bytes of a message: few lengths are few programs


@cache
def to_neighbour(mesh: Mesh, specs: tuple[PartitionSpec, ...], targets: tuple[int, ...]) -> Callable[..., Any]:
    """A program that gives each device the shards of the device whose target it is, in a new dim 0 of devices."""
    axes, pairs = mesh.axis_names, list(enumerate(targets))

    def one(x: jax.Array) -> jax.Array:
        return lax.ppermute(vary(x, axes), axes, pairs)[None]

    def send(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(map(one, arrays))

    return jax.jit(jax.shard_map(send, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(axes)))


def exchange(message: bytes) -> list[bytes]:
    """The messages of all processes, by process; every process must call it.

    Cost: two all_gathers: of 4 bytes, and of the longest message, rounded up to a power of two.
    """
    if jax.process_count() == 1:
        return [message]
    sizes = multihost_utils.process_allgather(np.array([len(message)], np.uint32)).reshape(-1)
    longest = max(int(sizes.max()) - 1, _SHORTEST - 1)
    padded = np.zeros(1 << longest.bit_length(), np.uint8)
    padded[: len(message)] = np.frombuffer(message, np.uint8)
    every = multihost_utils.process_allgather(padded)
    return [every[process, :size].tobytes() for process, size in enumerate(sizes.tolist())]


def to_all(
    sizes: Sequence[int], own: Mapping[int, Callable[[], np.ndarray]], wanted: set[int], chunk: int = _CHUNK
) -> dict[int, np.ndarray]:
    """Byte arrays of one process each, on every process that wants them; every process must call it.

    Args:
        sizes: the bytes of each array, the same on every process.
        own: those that this process sends; each array is in exactly one process's.
        wanted: those that this process wants.
        chunk: the bytes that are sent at a time, on devices twice as many.

    Cost: an all_reduce of all bytes, over one device of each process.
    """
    starts = np.concatenate([[0], np.cumsum(np.array(sizes, np.int64))])
    total = int(starts[-1])
    chunk = min(chunk, -(-total // 4) * 4)
    found = {index: np.empty(sizes[index], np.uint8) for index in wanted}
    for begin in range(0, total, chunk or 1):
        end = min(begin + chunk, total)
        first, last = int(np.searchsorted(starts, begin, "right")) - 1, int(np.searchsorted(starts, end, "left"))
        mine = np.zeros(chunk, np.uint8)
        parts = []
        for index in range(first, last):
            a, b = max(begin, int(starts[index])), min(end, int(starts[index + 1]))
            if a < b:
                parts.append((index, slice(a - begin, b - begin), slice(a - starts[index], b - starts[index])))
        for index, here, there in parts:
            if index in own:
                mine[here] = own[index]()[there]
        theirs = _summed(mine)
        for index, here, there in parts:
            if index in wanted:
                found[index][there] = theirs[here]
    return found


def _summed(mine: np.ndarray) -> np.ndarray:
    """The sum over all processes of bytes that only one of them has not zero."""
    mesh, program = _sum_over_processes()
    sharding = NamedSharding(mesh, PartitionSpec("process"))
    words = jax.make_array_from_process_local_data(sharding, mine.view(np.uint32)[None], (mesh.size, mine.size // 4))
    return np.asarray(program(words).addressable_data(0)).view(np.uint8)


@cache
def _sum_over_processes() -> tuple[Mesh, Callable[[jax.Array], jax.Array]]:
    first = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([first[process] for process in sorted(first)]), ("process",))
    spec = PartitionSpec("process")

    def program(words: jax.Array) -> jax.Array:
        return all_reduce(jnp.squeeze(words, 0), "process")

    return mesh, jax.jit(jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=PartitionSpec()))
