"""emulate: the same bits as shard_map, on one device; programs against the reference; errors."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.testing import emulate, programs, reference, sharded_arrays


def on_mesh(kernel, sizes, in_specs, out_specs):
    mesh = sk.make_mesh(jax.devices()[: math.prod(sizes.values())], **sizes)
    return jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def same_bits(got, wanted):
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    assert got.tobytes() == wanted.tobytes()


# proves F73, F78: emulation, shard_map and lists of blocks agree on chains of collectives
@given(programs())
def test_random_programs_agree_in_every_bit(program):
    x = program.blocks()
    emulated = emulate(program.kernel, program.sizes, program.spec, program.spec)(x)
    same_bits(emulated, on_mesh(program.kernel, program.sizes, program.spec, program.spec)(x))
    assert emulated.dtype == program.reference(x).dtype
    np.testing.assert_array_equal(np.asarray(emulated), program.reference(x))


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


def test_it_is_differentiated_as_the_global_function():
    f = emulate(lambda w, x: sk.all_reduce(jnp.sum(w * x), "a", op="mean"), {"a": 4}, (P(), P("a")), P())
    x = np.arange(8.0, dtype=np.float32)
    assert float(jax.grad(f)(jnp.float32(3), x)) == 7
    assert float(jax.jit(f)(jnp.float32(3), x)) == 21


def test_a_gradient_inside_the_kernel_is_that_of_one_device():
    """The documented difference: check_vma sums the gradient of an equal value, vmap does not."""

    def kernel(w, x):
        return sk.all_reduce(jax.grad(lambda w: jnp.sum(w * x))(w), "a", op="mean")

    args = jnp.float32(3), np.arange(8.0, dtype=np.float32)
    assert float(on_mesh(kernel, {"a": 4}, (P(), P("a")), P())(*args)) == 28
    assert float(emulate(kernel, {"a": 4}, (P(), P("a")), P())(*args)) == 7


def test_errors_in_full():
    def message(kernel, in_specs, out_specs, *args):
        with pytest.raises(ValueError) as error:
            emulate(kernel, {"a": 2, "b": 2}, in_specs, out_specs)(*args)
        return str(error.value)

    x = np.arange(4.0, dtype=np.float32)
    assert message(lambda x: {"y": x}, P("b"), P(), x) == (
        "emulate: result y must be equal on all devices of axis 'b', because out_specs do not split it there; device 1 "
        "differs from device 0 by up to 2. Reduce it over 'b', or name the axis in out_specs."
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
        "emulate: result (the whole tree): the spec P('b',) has 1 entries for an array of rank 0. Drop an entry."
    )
    assert message(lambda x: x, P("c"), P(), x) == (
        "emulate: argument 0: the spec P('c',) uses axis 'c', which the mesh does not have; its axes are 'a', 'b'. Use "
        "one of them, or add the axis to make_mesh."
    )


def test_nan_equals_nan_and_tuples_scatter_major_first():
    nan = np.float32([np.nan, 1])
    assert np.isnan(emulate(lambda x: x, {"a": 2}, P(), P())(nan)[0])
    x = np.arange(12, dtype=np.int32)
    f = lambda x: sk.reduce_scatter(x, ("b", "a"))  # noqa: E731
    got = emulate(f, {"a": 2, "b": 3}, P(), P(("b", "a")))(x)
    assert got.tolist() == (6 * x).tolist()


def test_the_reference_of_uneven_sizes():
    blocks = [np.arange(6.0).reshape(3, 2), 10 + np.arange(6.0).reshape(3, 2)]
    assert reference.all_gather_uneven(blocks, sizes=(1, 3))[1].tolist() == [[0, 1], [10, 11], [12, 13], [14, 15]]
    parts = reference.reduce_scatter_uneven(blocks, sizes=(1, 2))
    assert [p.tolist() for p in parts] == [[[10, 12], [0, 0]], [[14, 16], [18, 20]]]
    assert reference.scan([np.array([True]), np.array([True])], exclusive=True)[1].tolist() == [1]
    assert reference.scan([np.int32([3]), np.int32([1])], op="min", exclusive=True)[0].tolist() == [2**31 - 1]
