"""Extrema, booleans, broadcasts, prefix sums, halos and gathers: against lists of blocks, forward and gradient."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.testing import reference
from support.blocks import Kernel, check, on_cases
from support.refusals import type_error, value_error


def on_devices(kernel, blocks, axis="a", **sizes):
    """The kernel on blocks[i] at device i; what the devices get, stacked in the order of the mesh."""
    sizes = sizes or {"a": len(blocks)}
    mesh = sk.make_mesh(jax.devices()[: len(blocks)], **sizes)
    spec = P(tuple(sizes))
    device = jax.shard_map(lambda x: kernel(x[0], axis)[None], mesh=mesh, in_specs=spec, out_specs=spec)
    return np.asarray(jax.jit(device)(blocks))


@on_cases
def test_extremum_and_its_gradient(case):
    def kernel(op):  # the blocks hold five different values, so that ties are common
        means = partial(reference.all_reduce, op=op)
        return Kernel(partial(sk.all_reduce, axis=case.axis, op=op), means, linear=False)

    check(case, kernel("max"), kernel("min"))


@on_cases
def test_booleans(case):
    def kernel(op):
        run = lambda tree: sk.all_reduce(jax.tree.map(lambda x: x.astype(bool), tree), case.axis, op=op)  # noqa: E731
        meaning = lambda blocks, xp: reference.all_reduce([x.astype(bool) for x in blocks], op=op, xp=xp)  # noqa: E731
        return Kernel(run, meaning, gradient=False)

    check(case, kernel("any"), kernel("all"))


@on_cases
def test_prefix_scan(case):
    def kernel(op, exclusive):
        run = partial(sk.collectives.prefix_scan, axis=case.axis, op=op, exclusive=exclusive)
        return Kernel(run, partial(reference.prefix_scan, op=op, exclusive=exclusive), gradient=op == "sum")

    check(case, *[kernel(op, exclusive) for op in ("sum", "max", "min") for exclusive in (False, True)])


def follow(earlier, later):
    """Two changes `x -> a x + b` in a row, as one: not commutative."""
    return {"a": later["a"] * earlier["a"], "b": later["a"] * earlier["b"] + later["b"]}


IDENTITY = {"a": 1, "b": 0}
DIRECTIONS = [(exclusive, reverse) for exclusive in (False, True) for reverse in (False, True)]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("exclusive, reverse", DIRECTIONS)
def test_a_scan_with_a_function_for_all_inputs(n, exclusive, reverse):
    """Equal to the changes one after the other, with gradients; "b" is larger than "a"."""

    def run(x):
        x = jax.tree.map(lambda leaf: leaf[0], x)
        y = sk.collectives.prefix_scan(x, "a", follow, IDENTITY, exclusive=exclusive, reverse=reverse)
        return jax.tree.map(lambda leaf: leaf[None], y)

    def run_in_a_row(x):
        blocks = [jax.tree.map(lambda leaf, i=i: leaf[i], x) for i in range(n)]
        neutral = jax.tree.map(lambda leaf, value: jnp.full(leaf.shape, float(value)), blocks[0], IDENTITY)
        options = {"exclusive": exclusive, "reverse": reverse}
        return jax.tree.map(lambda *rows: jnp.stack(rows), *reference.prefix_scan(blocks, follow, neutral, **options))

    x = {"a": jnp.ones((n, 1)), "b": jnp.ones((n, 3))}
    sk.testing.assert_equal_for_all_inputs(
        run, run_in_a_row, mesh=sk.abstract_mesh(a=n), in_specs=P("a"), out_specs=P("a"), args=(x,)
    )


@on_cases
def test_a_scan_in_reverse(case):
    def kernel(op, exclusive):
        options = {"op": op, "exclusive": exclusive, "reverse": True}
        run = partial(sk.collectives.prefix_scan, axis=case.axis, **options)
        return Kernel(run, partial(reference.prefix_scan, **options), gradient=op == "sum")

    check(case, kernel("sum", False), kernel("max", True))


def test_what_nobody_sends_is_not_combined():
    """A quotient by the zeros that arrive at the first device would make its gradient NaN, though it is not used."""

    def divide(earlier, later):
        return (earlier[0] * later[0], earlier[1] / later[0] + later[1] / earlier[0])

    def loss(x, axis):
        product, _ = sk.collectives.prefix_scan((x, x), axis, divide, (1.0, 0.0))
        return jnp.sum(product)

    x = np.array([[2.0], [3.0], [5.0]], np.float32)
    assert on_devices(lambda x, axis: jax.grad(loss)(x, axis), x).ravel().tolist() == [1 + 3 + 15, 2 + 10, 6]


REFUSED_SCANS = {
    "prefix_scan: combine must go with an identity, and without op; got no identity. Pass combine and identity, and no "
    "op.": {"combine": follow},
    "prefix_scan: combine must go with an identity, and without op; got op='max'. Pass combine and identity, and no "
    "op.": {"combine": follow, "identity": IDENTITY, "op": "max"},
    "prefix_scan: identity must go with combine; got none. Pass combine too.": {"identity": IDENTITY},
    "prefix_scan: identity must be a pytree like x, PyTreeDef({'a': *, 'b': *}); got PyTreeDef(*). Pass a number or an "
    "array for each leaf.": {"combine": follow, "identity": 0},
}


@pytest.mark.parametrize("message, options", REFUSED_SCANS.items())
def test_refused_scans(message, options):
    x = np.ones((2, 3), np.float32)
    with value_error(message):
        on_devices(lambda x, axis: sk.collectives.prefix_scan({"a": x, "b": x}, axis, **options)["a"], x)


@pytest.mark.parametrize("identity", [0.5, -np.inf, -(2**40), np.zeros(2)])
def test_an_identity_that_the_dtype_has_not_is_refused(identity):
    x = np.ones((2, 1), np.int32)
    with pytest.raises(ValueError, match=r"^prefix_scan: a leaf of the identity must be a value of int32\[1\]; got "):
        on_devices(lambda x, axis: sk.collectives.prefix_scan(x, axis, jnp.maximum, identity, exclusive=True), x)


def test_a_combine_of_other_shapes_is_refused():
    x = np.ones((2, 3), np.float32)
    with type_error(
        "prefix_scan: combine must return a pytree like its arguments, float32[3]; got float32[]. Return the same "
        "shapes and dtypes."
    ):
        on_devices(lambda x, axis: sk.collectives.prefix_scan(x, axis, lambda a, b: jnp.sum(a + b), 0), x)


@on_cases
def test_halo_exchange(case):
    def kernel(before, after, dim, wrap):
        options = {"dim": dim, "before": before, "after": after, "wrap": wrap}
        return Kernel(
            partial(sk.collectives.halo_exchange, axis=case.axis, **options),
            partial(reference.halo_exchange, **options),
        )

    # of a neighbor less than all, all, and more than one neighbor
    sizes = {(0, 0, 0), (1, 0, 1), (0, 5, -1), (3, 2, 0), (2, 3, -1)}
    check(case, *[kernel(*each, wrap) for each in sizes for wrap in (False, True)])


@on_cases
def test_gather_to_one(case):
    def kernel(target, dim):
        options = {"dim": dim, "target": target}
        return Kernel(
            partial(sk.collectives.gather_to_one, axis=case.axis, **options),
            partial(reference.gather_to_one, **options),
        )

    check(case, *[kernel(target, dim) for target in {0, case.count - 1} for dim in (0, -1)])


def grad_of(kernel, weights):
    return lambda x, axis: jax.grad(lambda x: jnp.sum(kernel(x, axis) * jnp.asarray(weights)[sk.axis_index(axis)]))(x)


def test_a_tie_is_shared_and_gradient_of_a_running_max():
    x = np.array([[1.0, 7], [5, 7], [5, 7], [2, 7]], np.float32)
    got = on_devices(lambda x, axis: jax.grad(lambda x: jnp.sum(sk.all_reduce(x, axis, op="max")) * 3)(x), x)
    assert got.tolist() == [[0, 0.75], [1.5, 0.75], [1.5, 0.75], [0, 0.75]]
    # forward mode and second derivatives: max(x)^2 has curvature 2, shared along both derivatives
    curvature = jax.hessian(lambda x: sk.all_reduce(x, "a", op="max")[0] ** 2)
    assert on_devices(lambda x, axis: curvature(x)[0], x[:, :1]).ravel().tolist() == [0, 1, 1, 0]
    x = np.array([3.0, 1, 4, 2, 9], np.float32)
    weights = np.array([1.0, 10, 100, 1000, 10000], np.float32)
    got = on_devices(grad_of(partial(sk.collectives.prefix_scan, op="max"), weights), x)
    assert got.tolist() == [11, 0, 1100, 0, 10000]
    got = on_devices(grad_of(partial(sk.collectives.prefix_scan, op="max", exclusive=True), weights), x)
    assert got.tolist() == [110, 0, 11000, 0, 0]


@pytest.mark.quick("bool", "bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "bool"])
def test_a_broadcast_keeps_every_bit(dtype):
    source = np.array([-0.0, 0.0, np.inf, np.nan, -1, 3], np.float32)
    source = (source > 0) if dtype == "bool" else np.nan_to_num(source, posinf=9) if dtype == "int32" else source
    source = source.astype(jnp.dtype(dtype))
    blocks = np.stack([source, ~source if dtype == "bool" else np.full_like(source, 1), source])
    for place, order in ((0, [0, 1, 1]), (2, [1, 1, 0])):
        got = on_devices(partial(sk.broadcast, source=place), blocks[order])
        assert got.dtype == source.dtype
        assert [row.tobytes() for row in got] == [source.tobytes()] * 3
        by_vmap = jax.vmap(lambda x, place=place: sk.broadcast(x, "a", source=place), axis_name="a")(blocks[order])
        assert [row.tobytes() for row in np.asarray(by_vmap)] == [source.tobytes()] * 3


def test_integers_beside_floats_in_a_derivative():
    """What has no derivative is not asked for one: an index computed from a differentiated value."""

    def loss(x, axis):
        best = sk.broadcast(jnp.argmax(x), axis)
        longest = sk.all_reduce(best, axis, op="max")
        return jnp.sum(jnp.where(jnp.arange(3) == longest, x, 0) ** 2)

    x = np.array([[1.0, 5, 2], [3, 4, 6]], np.float32)
    assert on_devices(lambda x, axis: jax.grad(loss)(x, axis), x).tolist() == [[0, 10, 0], [0, 8, 0]]


KERNELS = {
    "all_reduce max": partial(sk.all_reduce, op="max"),
    "prefix_scan": sk.collectives.prefix_scan,
    "prefix_scan exclusive": partial(sk.collectives.prefix_scan, exclusive=True),
    "halo_exchange": partial(sk.collectives.halo_exchange, before=3, after=2),
    "gather_to_one": partial(sk.collectives.gather_to_one, target=1),
    "broadcast": partial(sk.broadcast, source=1),
}


@pytest.mark.parametrize("name", KERNELS)
def test_under_vmap_the_same(name):
    x = np.random.default_rng(0).integers(-4, 5, (3, 2, 2)).astype(np.float32)
    weights = np.array([1.0, 2, 3], np.float32)

    def both(x, axis):  # different uses of the result on each device
        out = KERNELS[name](x, axis)
        return jnp.concatenate([out.ravel(), grad_of(KERNELS[name], weights)(x, axis).ravel()])

    by_vmap = jax.jit(jax.vmap(lambda x: both(x, "a"), axis_name="a"))(x)
    np.testing.assert_array_equal(by_vmap, on_devices(both, x))
    # two axes, the second named first
    x = np.arange(24, dtype=np.float32).reshape(6, 4)
    nested = jax.vmap(jax.vmap(lambda x: KERNELS[name](x, ("b", "a")), axis_name="b"), axis_name="a")
    wanted = on_devices(KERNELS[name], x, ("b", "a"), a=2, b=3)
    np.testing.assert_array_equal(np.asarray(jax.jit(nested)(x.reshape(2, 3, 4))).reshape(wanted.shape), wanted)
