"""A sum of the same bits on every mesh, whatever the number of devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardkit as sk


def tree_sum(blocks):
    """The sum of all global blocks, neighbors first, one float32 addition at a time."""
    while len(blocks) > 1:
        pairs = [a + b for a, b in zip(blocks[0::2], blocks[1::2], strict=False)]
        blocks = pairs + blocks[len(blocks) - len(blocks) % 2 :]
    return blocks[0]


MESHES = [  # sizes, axis, the order of the devices
    ({"a": 1}, "a", [0]),
    ({"a": 2}, "a", [1, 0]),
    ({"a": 3}, "a", [0, 1, 2]),
    ({"a": 5}, "a", [0, 1, 2, 3, 4]),
    ({"a": 4}, "a", [3, 1, 0, 2]),
    ({"a": 8}, "a", [0, 1, 2, 3, 4, 5, 6, 7]),
    ({"a": 2, "b": 4}, ("a", "b"), [5, 1, 2, 7, 4, 0, 6, 3]),
    ({"a": 2, "b": 4}, ("b", "a"), [0, 1, 2, 3, 4, 5, 6, 7]),
]


def on_meshes(blocks, kernel):
    """What the kernel gives on each mesh whose size divides the blocks."""
    for sizes, axis, order in MESHES:
        if len(blocks) % len(order) == 0:
            mesh = Mesh(np.array(jax.devices())[order].reshape(tuple(sizes.values())), tuple(sizes))
            f = jax.shard_map(functools.partial(kernel, axis=axis), mesh=mesh, in_specs=P(axis), out_specs=P())
            yield sizes, axis, np.asarray(jax.jit(f)(blocks))


@pytest.mark.quick("30-bfloat16")
@pytest.mark.parametrize(("count", "dtype"), [(8, "float32"), (24, "float32"), (30, "bfloat16"), (40, "float16")])
@pytest.mark.optimized
def test_the_bits_do_not_depend_on_the_mesh(count, dtype):  # proves F77 in part: no catalogue of operations
    rng = np.random.default_rng(count)
    blocks = (rng.normal(size=(count, 3, 5)) * 10.0 ** rng.integers(-3, 4, (count, 3, 5))).astype(jnp.dtype(dtype))
    wanted = tree_sum(list(blocks.astype(np.float32))).astype(blocks.dtype)
    tried = 0
    for sizes, axis, got in on_meshes(blocks, lambda x, axis: sk.all_reduce(x, axis, deterministic=True)):
        assert got.dtype == blocks.dtype
        assert got.tobytes() == wanted.tobytes(), (sizes, axis)
        tried += 1
    assert tried >= 4
    if count == 8:  # an ordinary sum, of each device's own sum, is not the same everywhere
        plain = on_meshes(blocks, lambda x, axis: sk.all_reduce(jnp.sum(x, 0), axis))
        assert len({got.tobytes() for *_, got in plain}) > 1


@pytest.mark.optimized
def test_products_are_rounded_before_they_are_added():
    """Beside an addition a compiler makes a product part of it, without rounding: on one device but not on two."""
    factors = np.random.default_rng(0).normal(size=(2, 8, 4096)).astype(np.float32)
    wanted = tree_sum(list(factors[0] * factors[1]))
    for sizes, axis, got in on_meshes(
        np.moveaxis(factors, 0, 1), lambda x, axis: sk.all_reduce(x[:, 0] * x[:, 1], axis, deterministic=True)
    ):
        assert got.tobytes() == wanted.tobytes(), (sizes, axis)


def test_mean_trees_integers_and_gradient():
    x = np.arange(16, dtype=np.float32).reshape(8, 2)
    mesh = sk.make_mesh(jax.devices()[:4], a=4)

    def kernel(x):
        tree = {"f": x, "i": x.astype(jnp.int32), "b": x > 3, "none": x[:, :0]}
        return sk.all_reduce(tree, "a", deterministic=True), sk.all_reduce(x, "a", op="mean", deterministic=True)

    total, mean = jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=P("a"), out_specs=P()))(x)
    assert {k: (v.dtype.name, v.tolist()) for k, v in total.items()} == {
        "f": ("float32", [56, 64]),
        "i": ("int32", [56, 64]),
        "b": ("int32", [6, 6]),
        "none": ("float32", []),
    }
    assert mean.tolist() == [7, 8]

    def loss(x):  # each device's own weight on the sum: together 0 + 1 + 2 + 3
        return jnp.sum(sk.all_reduce(x, "a", deterministic=True) ** 2) * sk.axis_index("a").astype(jnp.float32)

    wanted = np.broadcast_to(6 * 2 * x.sum(0), (8, 2))
    gradient = jax.jit(jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=P("a"), out_specs=P("a")))(x)
    np.testing.assert_array_equal(gradient, wanted)
    by_vmap = jax.jit(jax.vmap(jax.grad(loss), axis_name="a"))(x.reshape(4, 2, 2))
    np.testing.assert_array_equal(np.asarray(by_vmap).reshape(8, 2), wanted)
