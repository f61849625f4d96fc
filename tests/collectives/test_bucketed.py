"""Buckets: the values of plain all_reduce in every bit, and as few collectives as the sizes allow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import cost
from shardkit.analysis import census
from shardkit.collectives import all_reduce_tree

MESHES = [({"a": 8}, "a"), ({"a": 3, "b": 2}, "a"), ({"a": 2, "b": 4}, ("b", "a")), ({"a": 1}, "a")]


def tree(salt):
    rng = np.random.default_rng(salt)

    def leaf(shape, dtype):
        return rng.integers(-8, 9, shape).astype(jnp.dtype(dtype))

    return {
        "a": leaf((3, 4), "float32"),
        "b": [leaf((), "float32"), leaf((7,), "float32"), leaf((5,), "int32"), leaf((2, 2), "bool")],
        "c": leaf((33,), "bfloat16"),
        "d": leaf((0, 3), "float32"),
        "e": leaf((64,), "float32"),
    }


def stacked(count):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *[tree(i) for i in range(count)])


def mapped(kernel, sizes, out_specs):
    mesh = sk.make_mesh(jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)
    spec = P(tuple(sizes))
    return jax.shard_map(
        lambda x: kernel(jax.tree.map(lambda leaf: leaf[0], x)), mesh=mesh, in_specs=spec, out_specs=out_specs
    )


@pytest.mark.quick("sizes3-a", "sizes2-axis2")
@pytest.mark.parametrize(("sizes", "axis"), MESHES)
def test_bitwise_the_plain_reduction(sizes, axis):
    names = (axis,) if isinstance(axis, str) else axis
    other = tuple(name for name in sizes if name not in names)
    x = stacked(int(np.prod(list(sizes.values()))))

    def kernel(x):
        """Plain reductions, and buckets of every kind, in one program."""
        out = []
        for op in ("sum", "mean"):
            out.append(sk.all_reduce(x, axis, op=op))
            for most, scatter_from in ((2**20, 2**20), (2**20, 0), (64, 100), (1, 30)):
                out.append(all_reduce_tree(x, axis, op=op, bucket_bytes=most, scatter_from=scatter_from))
        return jax.tree.map(lambda y: y[None] if other else y, out)

    sums = jax.jit(mapped(kernel, sizes, P(other) if other else P()))(x)
    for plain, *bucketed in (sums[:5], sums[5:]):
        for each in bucketed:
            assert jax.tree.structure(each) == jax.tree.structure(plain)
            for got, wanted in zip(jax.tree.leaves(each), jax.tree.leaves(plain), strict=True):
                assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
                np.testing.assert_array_equal(got, wanted)


def test_gradient_is_that_of_the_sum():
    sizes, x = {"a": 4}, stacked(4)
    x = {"a": x["a"], "e": x["e"]}

    def loss(x):
        total = all_reduce_tree(x, "a", bucket_bytes=300, scatter_from=200)
        return jnp.sum(total["a"] ** 2) + jnp.sum(total["e"] ** 3)

    gradient = jax.jit(mapped(lambda x: jax.tree.map(lambda g: g[None], jax.grad(loss)(x)), sizes, P("a")))(x)
    np.testing.assert_array_equal(gradient["a"], np.broadcast_to(2 * x["a"].sum(0), (4, 3, 4)))
    np.testing.assert_array_equal(gradient["e"], np.broadcast_to(3 * x["e"].sum(0) ** 2, (4, 64)))


def rows(n, shapes, dtype="float32", **options):
    """The collectives over `a` that arrays of these shapes take on n devices."""
    mesh = sk.make_mesh(jax.devices()[:n], a=n)
    x = [jax.ShapeDtypeStruct((n, *shape), dtype) for shape in shapes]

    def kernel(x):
        return all_reduce_tree([leaf[0] for leaf in x], "a", **options)

    found = census(jax.shard_map(kernel, mesh=mesh, in_specs=P("a"), out_specs=P()), x)
    return [(row.kind, row.bytes_in) for row in found.rows], found.sent()


def test_how_leaves_are_packed():
    shapes = [(10,), (5, 2), (), (100,), (3,)]
    assert rows(4, shapes)[0] == [("all_reduce", 4 * 124)]
    assert rows(4, shapes, bucket_bytes=80)[0] == [("all_reduce", b) for b in (80, 4, 400, 12)]
    assert rows(4, shapes, bucket_bytes=1)[0] == [("all_reduce", b) for b in (40, 40, 4, 400, 12)]
    pair = [("reduce_scatter", 400), ("all_gather", 100)]
    assert rows(4, shapes, bucket_bytes=80, scatter_from=400)[0] == [
        *[("all_reduce", 80), ("all_reduce", 4)],
        *pair,
        ("all_reduce", 12),
    ]
    large = [(2**20,), (2**20 - 1,), (1,)]  # 8 MiB: from here on the pair
    assert [kind for kind, _ in rows(4, large)[0]] == ["reduce_scatter", "all_gather"]
    assert [kind for kind, _ in rows(4, large[:2])[0]] == ["all_reduce"]
    assert rows(4, [])[0] == []


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_cost(n):
    shapes = [(10,), (5, 2), ()]  # 21 elements
    assert rows(n, shapes)[1] * n == 2 * 84 * (n - 1)
    padded = 4 * -(-21 // n) * n
    assert rows(n, shapes, scatter_from=0)[1] * n == 2 * padded * (n - 1)


def test_varying_types_are_not_mixed():
    """A leaf that is equal over another axis stays so, beside one that is not."""
    mesh = sk.make_mesh(a=2, b=4)

    def kernel(x, y):
        return all_reduce_tree((x, y), "a")

    f = jax.shard_map(kernel, mesh=mesh, in_specs=(P("a"), P(("a", "b"))), out_specs=(P(), P("b")))
    x, y = jax.jit(f)(np.arange(2.0, dtype=np.float32), np.arange(8.0, dtype=np.float32))
    assert (x.tolist(), y.tolist()) == ([1], [4, 6, 8, 10])
    assert census(f, jax.ShapeDtypeStruct((2,), "float32"), jax.ShapeDtypeStruct((8,), "float32")).count() == 2


@pytest.mark.check
def test_the_sizes_of_a_link_can_be_passed():
    """Over two devices a scatter never pays, over eight from its crossover on."""
    link = cost.Link(1e-6, 1e9)  # 8 devices: 8,800 bytes; buckets of 72,000 bytes
    for n, shape, kinds in ((2, (25600,), {"all_reduce"}), (8, (25600,), {"reduce_scatter", "all_gather"})):
        sizes = {"bucket_bytes": cost.bucket_bytes(link, n), "scatter_from": cost.scatter_from(link, n)}

        def kernel(x, sizes=sizes):
            return all_reduce_tree([x, x], "a", **sizes)

        on_n = jax.shard_map(kernel, mesh=sk.abstract_mesh(a=n), in_specs=P(), out_specs=P())
        found = sk.census(on_n, jax.ShapeDtypeStruct(shape, "float32"))
        assert {row.kind for row in found.rows} == kinds and found.count() == 2 * len(kinds)
