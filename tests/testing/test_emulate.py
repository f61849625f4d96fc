"""emulate: the same bits as shard_map, on one device; programs against the reference; errors."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.testing import emulate, programs, reference, sharded_arrays
from support.refusals import refused, type_error, value_error
from support.tiers import DEEP
from support.vmapped import under_vmap

FEW = settings(max_examples=25 if DEEP else 10)  # each is compiled four times; the deep tier draws others in every run
AB, BA = ("a", "b"), ("b", "a")
X = np.arange(64, dtype=np.float32).reshape(8, 8)


def on_mesh(kernel, sizes, in_specs, out_specs):
    mesh = sk.make_mesh(jax.devices()[: math.prod(sizes.values())], **sizes)
    return jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def same_bits(got, wanted):
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    assert got.tobytes() == wanted.tobytes()


# proves F73, F78: emulation, shard_map, plain vmap and lists of blocks agree on chains of collectives
@FEW
@given(programs())
def test_random_programs_agree_in_every_bit(program):
    x = program.blocks()
    emulated = emulate(program.kernel, program.sizes, program.spec, program.spec)(x)
    same_bits(emulated, on_mesh(program.kernel, program.sizes, program.spec, program.spec)(x))
    same_bits(jax.jit(under_vmap(program.kernel, program.sizes, (program.spec,), program.spec))(x), emulated)
    assert emulated.dtype == program.reference(x).dtype
    np.testing.assert_array_equal(np.asarray(emulated), program.reference(x))


@FEW
@given(programs(dtypes=("float32",), length=3))
def test_gradients_of_random_programs(program):
    x = program.blocks()

    def vjp(f):
        def pulled(x):
            out, back = jax.vjp(f, x)
            return back(jnp.round(jnp.cos(jnp.arange(out.size, dtype=jnp.float32)) * 3).reshape(out.shape))[0]

        return np.asarray(jax.jit(pulled)(x))

    if any(("op", op) in each.options for each in program.ops for op in ("max", "min")):
        return  # how ties share a derivative depends on the order of reductions
    wanted = vjp(lambda x: program.reference(x, xp=jnp))
    np.testing.assert_array_equal(vjp(emulate(program.kernel, program.sizes, program.spec, program.spec)), wanted)
    np.testing.assert_array_equal(vjp(under_vmap(program.kernel, program.sizes, (program.spec,), program.spec)), wanted)


@given(sharded_arrays())
def test_any_layout_goes_in_and_out(array):
    value, spec, sizes = array
    back = emulate(lambda x: sk.vary(x, tuple(sizes)), sizes, spec, spec)(value)
    same_bits(back, value)
    index = lambda x: jnp.zeros(x.shape, jnp.int32) + sk.axis_index(tuple(sizes))  # noqa: E731
    if all(name in str(spec) for name in sizes):  # only then the result says which device held what
        same_bits(emulate(index, sizes, spec, spec)(value), on_mesh(index, sizes, spec, spec)(value))


def test_pytrees_keys_and_results_equal_along_an_axis():
    def kernel(params, batch, key):
        total = sk.all_reduce(jnp.sum(batch["x"] @ params["w"]), ("data", "model"))
        noise = jax.random.normal(sk.fold_axis(key, "data"), (1,))
        return {"total": total, "rows": batch["x"] * 2}, noise

    sizes = {"data": 2, "model": 4}
    in_specs = (P(), {"x": P(("model", "data"))}, P())
    out_specs = ({"total": P(), "rows": P(("model", "data"))}, P("data"))
    args = {"w": np.ones(3, np.float32)}, {"x": np.arange(48.0, dtype=np.float32).reshape(16, 3)}, jax.random.key(3)
    jax.tree.map(
        same_bits,
        emulate(kernel, sizes, in_specs, out_specs)(*args),
        on_mesh(kernel, sizes, in_specs, out_specs)(*args),
    )


def test_it_is_differentiated_as_the_global_function_and_inside_the_kernel_as_shard_map_does():
    f = emulate(lambda w, x: sk.all_reduce(jnp.sum(w * x), "a", op="mean"), {"a": 4}, (P(), P("a")), P())
    x = np.arange(8.0, dtype=np.float32)
    assert float(jax.grad(f)(jnp.float32(3), x)) == 7
    assert float(jax.jit(f)(jnp.float32(3), x)) == 21

    # The rule of check_vma: the gradient of an equal value is summed over the devices. Plain vmap gives 7.
    def kernel(w, x):
        return sk.all_reduce(jax.grad(lambda w: jnp.sum(w * x))(w), "a", op="mean")

    args = jnp.float32(3), np.arange(8.0, dtype=np.float32)
    assert float(on_mesh(kernel, {"a": 4}, (P(), P("a")), P())(*args)) == 28
    assert float(emulate(kernel, {"a": 4}, (P(), P("a")), P())(*args)) == 28


def every_collective(x):
    """Each of them over a tuple, in both orders: plain vmap refuses half of them."""
    yield lax.psum({"x": x}, BA)["x"], lax.pmax(x, AB), lax.pmean(x, ("a",))
    yield lax.ppermute(x, BA, [(0, 3), (2, 1)]), lax.ppermute(x, "b", [(1, 0)]), lax.pshuffle(x, "a", [1, 0])
    mesh = jax.sharding.get_abstract_mesh()
    yield lax.pcast(jnp.ones(3), AB, to="varying") * mesh.shape["b"] + len(mesh.manual_axes)
    for names in (AB, BA):
        yield lax.all_gather(x, names), lax.all_gather(x, names, axis=1, tiled=True)
        yield lax.all_gather(x, names, to="invarying"), lax.psum_scatter(x, names, scatter_dimension=1)
        yield lax.psum_scatter(x, names, scatter_dimension=0, tiled=True)
        yield lax.all_to_all(x, names, 1, 0), lax.all_to_all(x, names, 1, 1, tiled=True)
        yield lax.axis_index(names), lax.axis_size(names)


def what_they_mean(blocks, device):
    total, zero = sum(blocks), np.zeros_like(blocks[0])
    yield total, np.max(blocks, 0), (blocks[device] + blocks[device ^ 2]) / 2
    yield {3: blocks[0], 1: blocks[2]}.get(device, zero), zero if device % 2 else blocks[device + 1], blocks[device ^ 2]
    yield np.full(3, 4.0)
    for order in ([0, 1, 2, 3], [0, 2, 1, 3]):  # a joint index over ("b", "a") counts "a" first
        ordered, at = [blocks[i] for i in order], order.index(device)
        yield np.stack(ordered), np.concatenate(ordered, 1)
        yield np.stack(ordered), total[:, at]
        yield total[2 * at : 2 * at + 2]
        yield np.stack([x[:, at] for x in ordered]), np.concatenate([x[:, at : at + 1] for x in ordered], 1)
        yield at, 4


# Each entry alone catches a wrong order of the devices in that collective.
def test_the_collectives_of_lax_over_tuples_of_axes_in_any_order():
    def kernel(x):
        return jax.tree.map(lambda y: sk.vary(jnp.asarray(y), AB)[None], list(every_collective(x)))

    x = np.random.default_rng(0).integers(0, 9, (8, 16)).astype(np.float32)
    got = emulate(kernel, {"a": 2, "b": 2}, P(None, AB), P(AB))(x)
    blocks = np.split(x, 4, 1)
    for device in range(4):
        mine = jax.tree.map(lambda y, device=device: y[device], got)
        jax.tree.map(np.testing.assert_array_equal, mine, list(what_they_mean(blocks, device)))
    other = sk.make_mesh(jax.devices()[:4], b=2, a=2)
    jax.eval_shape(jax.shard_map(lambda x: lax.psum(x, BA), mesh=other, in_specs=P(BA), out_specs=P()), np.zeros(4))
    ring = [(i, (i + 1) % 4) for i in range(4)]
    got = emulate(lambda x: lax.ppermute(x, AB, ring), {"a": 2, "b": 2}, P(AB), P(AB))(np.arange(4.0))
    np.testing.assert_array_equal(got, [3, 0, 1, 2])


def softmax_of_all(x):
    """Flash attention around a ring of both axes: casts, a scan, recomputation, a custom derivative."""

    def step(carry, _):
        largest, total, k = carry
        new = jnp.maximum(largest, jnp.max(x @ k.T, -1))
        total = total * jnp.exp(largest - new) + jnp.sum(jax.nn.relu(jnp.exp(x @ k.T - new[:, None])), -1)
        return (new, total, lax.ppermute(k, AB, [(i, (i + 1) % 4) for i in range(4)])), None

    start = lax.pcast((jnp.full(x.shape[0], -jnp.inf), jnp.zeros(x.shape[0])), AB, to="varying")
    return lax.scan(jax.checkpoint(step), (*start, x), None, length=4)[0][1]


@jax.custom_vjp
def summed(x):
    return lax.psum(x, AB)


summed.defvjp(lambda x: (summed(x), x), lambda x, g: (3 * lax.pcast(g, AB, to="varying") + 0 * x,))


def branches_and_loops(x):
    x = lax.cond(lax.pmin(jnp.sum(x), AB) > 1, lambda x: lax.pmean(x, "b") + 0 * x, lambda x: -x, x)
    x = lax.cond(jnp.sum(x) > 1, jnp.sin, lambda x: -x, x)  # each device its own way
    return lax.while_loop(lambda c: lax.pmax(jnp.sum(c), AB) < 99, lambda c: c + 1 + 0 * x, x)


def solved(x):
    """A conjugate gradient whose product is a collective."""
    return jax.scipy.sparse.linalg.cg(lambda v: 2 * v + lax.psum(v, AB), x, maxiter=3)[0]


@pytest.mark.parametrize("kernel", [softmax_of_all, summed, branches_and_loops, solved])
@pytest.mark.optimized
def test_kernels_with_rules_and_loops_of_their_own(kernel):
    sizes, x = {"a": 2, "b": 2}, np.cos(X)
    out = P() if kernel is summed else P(AB)
    emulated, mapped = emulate(kernel, sizes, P(AB), out), on_mesh(kernel, sizes, P(AB), out)
    if kernel is branches_and_loops:  # jax does not differentiate a while loop
        return np.testing.assert_allclose(emulated(x), mapped(x), rtol=1e-6)

    def both(f):
        out, back = jax.vjp(f, x)
        return out, back(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))[0]

    for got, wanted in zip(both(emulated), jax.jit(lambda: both(mapped))(), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_derivatives_of_every_order_and_of_what_is_closed_over():
    f = lambda w: emulate(lambda x: lax.psum(jnp.sum(jax.nn.silu(w * x)), "a"), {"a": 2}, P("a"), P())(X[0] / 64)  # noqa: E731
    plain = lambda w: jnp.sum(jax.nn.silu(w * X[0] / 64))  # noqa: E731
    for derived in (lambda f: jax.jvp(f, (2.0,), (1.0,)), lambda f: jax.hessian(f)(2.0)):
        np.testing.assert_allclose(*(jax.jit(partial(derived, each))() for each in (f, plain)), rtol=1e-5)


def test_none_is_equal_everywhere_and_the_callers_mesh_does_not_matter():
    kernel = lambda tree, y: tree["u"] + tree["v"] + jax.nn.relu(y)  # noqa: E731
    with jax.set_mesh(sk.make_mesh(jax.devices()[:2], other=2)):
        got = emulate(kernel, {"a": 2}, ({"u": None, "v": P()}, None), P())({"u": X, "v": X}, X)
    same_bits(got, 3 * X)
    assert emulate(lambda x: {"x": x, "y": None}, {"a": 2}, None, {"x": P(), "y": None})(X)["y"] is None


def test_errors_in_full():
    def message(kernel, in_specs, out_specs, *args):
        return refused(lambda: emulate(kernel, {"a": 2, "b": 2}, in_specs, out_specs)(*args))

    x = np.arange(4.0, dtype=np.float32)
    assert message(lambda x: {"y": x}, P("b"), P(), x) == (
        "emulate: result y must be equal along axis 'b', which out_specs omit; device 1 differs from device 0 by up "
        "to 2. Reduce it over 'b', or name the axis in out_specs."
    )
    assert message(lambda x: x, P("b"), P("b"), x[:3]) == (
        "emulate: argument 0: dim 0 must be divisible by axis 'b'; got size 3 over 2 devices. Pad dim 0 or choose "
        "another dim."
    )
    assert message(lambda x: x, (P("b"), P()), P("b"), x) == (
        "emulate: in_specs must have one entry for each argument; got 2 for 1 arguments. Add or drop an entry, or pass "
        "one PartitionSpec for all."
    )
    assert message(lambda x: x[0], P("b"), P("b"), x) == (
        "emulate: result (the whole tree): the spec P('b',) has 1 entry for an array of rank 0. Drop an entry."
    )
    assert message(lambda x: lax.all_gather(x, "a", axis_index_groups=[[0], [1]]), P("b"), P(), x) == (
        "emulate: all_gather must run over whole axes; got axis_index_groups ((0,), (1,)). Make the groups an axis of "
        "the mesh."
    )
    psum = lambda x: lax.psum(x, "b", axis_index_groups=[[0], [1]])  # noqa: E731
    assert message(psum, P("b"), P(), x) == (
        f"emulate: jax.shard_map must support what the kernel calls at test_emulate.py:{psum.__code__.co_firstlineno}; "
        "it raises NotImplementedError without a message, as for a psum with axis_index_groups or over an unknown "
        "axis. Use the mesh's axes, 'a', 'b', and make groups an axis of the mesh."
    )
    assert message(lambda x: lax.ppermute(x, BA, [(0, 4)]), P("b"), P(), x) == (
        "emulate: ppermute over 'a', 'b' must name each of its 4 devices at most once as source and once as target; "
        "got ((0, 4),). Remove duplicates and devices that do not exist."
    )
    assert message(lambda x: lax.pbroadcast(x, "b", 1), P("b"), P(), x) == (
        "emulate: a collective must be one of 'all_gather', 'all_gather_invariant', 'all_gather_reduced', "
        "'all_to_all', 'pmax', 'pmin', 'ppermute', 'psum', 'psum_invariant', 'ragged_all_to_all', 'reduce_scatter', "
        "'unreduced_psum', 'unreduced_reduce_scatter'; got pbroadcast. Run the kernel with jax.shard_map on simulated "
        "devices."
    )
    assert message(lambda x: x, ({"u": P()},), P(), {"u": x, "v": x}) == (
        "emulate: in_specs must be a prefix of the arguments; got ({'u': P()},) for PyTreeDef(({'u': *, 'v': *},)). "
        "Pass a spec for each leaf, or one for a subtree."
    )
    assert message(lambda x: x, P("c"), P(), x) == (
        "emulate: argument 0: the spec P('c',) uses axis 'c', which the mesh does not have; its axes are 'a', 'b'. Use "
        "one of them, or add the axis to make_mesh."
    )


def test_specs_that_are_none():
    for specs, got in (((P(), None), "out_specs must be a PartitionSpec, or a pytree of them; got None"),):
        with type_error(
            f"emulate: {got}. Write P('data') for an array that axis 'data' splits, P() for a replicated one."
        ):
            emulate(lambda x: x, {"a": 2}, *specs)(X)
    with pytest.raises(TypeError, match=r"in_specs must be a PartitionSpec, or a pytree of them; got 'a' at 0\.u"):
        emulate(lambda x: x, {"a": 2}, ({"u": "a"},), P())({"u": X})
    with value_error(
        "emulate: mesh_sizes must give one or more axes a positive number of devices; got {}. Write for example "
        "{'data': 2, 'model': 4}."
    ):
        emulate(lambda x: x, {}, P(), P())


def test_nan_equals_nan_tuples_scatter_major_first_and_the_reference_of_uneven_sizes():
    nan = np.float32([np.nan, 1])
    assert np.isnan(emulate(lambda x: x, {"a": 2}, P(), P())(nan)[0])
    x = np.arange(12, dtype=np.int32)
    f = lambda x: sk.reduce_scatter(x, ("b", "a"))  # noqa: E731
    got = emulate(f, {"a": 2, "b": 3}, P(), P(("b", "a")))(x)
    assert got.tolist() == (6 * x).tolist()
    blocks = [np.arange(6.0).reshape(3, 2), 10 + np.arange(6.0).reshape(3, 2)]
    assert reference.all_gather_uneven(blocks, sizes=(1, 3))[1].tolist() == [[0, 1], [10, 11], [12, 13], [14, 15]]
    parts = reference.reduce_scatter_uneven(blocks, sizes=(1, 2))
    assert [p.tolist() for p in parts] == [[[10, 12], [0, 0]], [[14, 16], [18, 20]]]
    assert reference.prefix_scan([np.array([True]), np.array([True])], exclusive=True)[1].tolist() == [1]
    assert reference.prefix_scan([np.int32([3]), np.int32([1])], op="min", exclusive=True)[0].tolist() == [2**31 - 1]
