"""collectives/basic.py: known numbers, and results typed as equal or varying."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk


def place(f, x, mesh, in_specs, out_specs):
    return np.asarray(jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs))(x))


@pytest.fixture(scope="module")
def four():
    return sk.make_mesh(jax.devices()[:4], i=4)


def test_gathered_rows_times_weights(four):  # proves S44, S52
    rng = np.random.default_rng(1)
    x = rng.normal(size=(64, 128)).astype(np.float32)
    w = rng.normal(size=(128, 32)).astype(np.float32)
    shapes = []

    def layer(x_bD):
        whole = sk.all_gather(x_bD, "i", replicated=True)
        shapes.append((x_bD.shape, whole.shape))
        return whole @ w

    got = place(layer, x, four, P("i"), P())
    assert shapes == [((16, 128), (64, 128))]
    np.testing.assert_array_equal(got, np.asarray(jax.jit(jnp.matmul)(x, w)))

    # activations split over the model axis, joined before the next layer
    hidden = place(lambda h_Bf: sk.all_gather(h_Bf, "i", dim=1, replicated=True) @ w, x, four, P(None, "i"), P())
    np.testing.assert_array_equal(hidden, got)


def test_reduce_scatter_of_four_rows(four):  # proves S45
    rows = np.array([[3, 1, 4, 1], [5, 9, 2, 6], [5, 3, 5, 8], [9, 7, 1, 2]], np.float32)
    got = place(lambda x: sk.reduce_scatter(x[0], "i"), rows, four, P("i"), P("i"))
    np.testing.assert_array_equal(got, [22, 20, 12, 17])


def test_shift_is_roll(four):  # proves S48
    def moved(**options):
        return place(lambda x: sk.shift(x, "i", **options), np.arange(1, 5), four, P("i"), P("i")).tolist()

    assert moved() == np.roll([1, 2, 3, 4], 1).tolist() == [4, 1, 2, 3]
    assert moved(by=-1) == [2, 3, 4, 1]
    assert moved(wrap=False) == [0, 1, 2, 3]
    assert moved(by=-3, wrap=False) == [4, 0, 0, 0]
    assert moved(by=4, wrap=False) == [0, 0, 0, 0]


def test_axis_order_in_a_shard_map_inside_another():
    mesh = sk.make_mesh(row=2, column=4)  # names of its own: jax may remember the order in which axes were bound

    def inner(x):
        return sk.shift(x, ("column", "row"))

    def outer(x):  # binds column first
        return jax.shard_map(inner, in_specs=P("row"), out_specs=P("row"), axis_names={"row"})(x)

    nested = jax.shard_map(outer, mesh=mesh, in_specs=P("column"), out_specs=P("column"), axis_names={"column"})
    assert np.asarray(jax.jit(nested)(np.arange(8))).tolist() == [7, 0, 1, 2, 3, 4, 5, 6]


def test_without_jit(four):  # proves S51
    f = jax.shard_map(lambda x: sk.all_reduce(x, "i"), mesh=four, in_specs=P("i"), out_specs=P())
    assert np.asarray(f(np.arange(8.0, dtype=np.float32))).tolist() == [12, 16]


def test_booleans_and_integers_of_reductions_and_nan_off_the_source(four):
    flags = np.array([True, False, True, True])
    total = place(lambda x: sk.all_reduce(x, "i"), flags, four, P("i"), P())
    assert (total.dtype, total.tolist()) == (np.int32, [3])
    mean = place(lambda x: sk.reduce_scatter(x, "i", op="mean"), flags, four, P(), P("i"))
    assert (mean.dtype, mean.tolist()) == (np.float32, [1, 0, 1, 1])
    either = place(lambda x: sk.all_reduce(x, "i", op="max"), flags, four, P("i"), P())
    assert (either.dtype, either.tolist()) == (np.bool_, [True])
    x = np.float32([np.nan, np.inf, 5, np.nan])
    f = jax.shard_map(lambda v: sk.broadcast(v, "i", source=2), mesh=four, in_specs=P("i"), out_specs=P())
    assert np.asarray(jax.jit(f)(x)).tolist() == [5]
    assert np.asarray(jax.jit(jax.grad(lambda v: 3 * f(v)[0]))(x)).tolist() == [0, 0, 3, 0]


def test_results_that_are_equal_everywhere_are_typed_so(four):  # proves F74
    x = np.arange(8, dtype=np.int32)
    gathered = list(range(8))
    assert place(lambda v: sk.all_gather(v, "i", replicated=True), x, four, P("i"), P()).tolist() == gathered
    for op in ("sum", "mean", "max", "min"):
        assert place(lambda v: sk.all_reduce(v, "i", op=op), x, four, P("i"), P()).shape == (2,)
    assert place(lambda v: sk.broadcast(v, "i"), x, four, P("i"), P()).tolist() == [0, 1]
    for kernel in (sk.all_gather, sk.reduce_scatter, sk.shift, sk.vary):
        with pytest.raises(ValueError, match="out_specs"):
            place(lambda v: kernel(v, "i"), x, four, P(), P())


# proves F78: the same kernels run on one device under vmap with an axis name
def test_kernels_run_under_vmap():
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    over = lambda kernel: jax.jit(jax.vmap(kernel, axis_name="a"))(x).tolist()  # noqa: E731
    assert over(lambda x: sk.all_reduce(x, "a")) == [[12, 16]] * 4
    assert over(lambda x: sk.all_gather(x, "a")) == [list(range(8))] * 4
    assert over(lambda x: sk.reduce_scatter(jnp.concatenate([x, x]), "a")) == [[12], [16], [12], [16]]
    assert over(lambda x: sk.shift(x, "a")) == [[6, 7], [0, 1], [2, 3], [4, 5]]
    assert over(lambda x: sk.broadcast(x, "a", source=2)) == [[4, 5]] * 4
