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


def test_normalisation_with_means_of_the_moments(four):  # proves S43, T8
    x = np.random.default_rng(0).normal(3, 2, (8, 6)).astype(np.float32)

    def moments_reduced(x_b):
        mean = sk.all_reduce(x_b.mean(0, keepdims=True), "i", op="mean")
        variance = sk.all_reduce(((x_b - mean) ** 2).mean(0, keepdims=True), "i", op="mean")
        return (x_b - mean) / jnp.sqrt(variance)

    def elementwise(x_b):  # the tutorials' version: over two devices everything becomes +-1
        mean = sk.all_reduce(x_b, "i", op="mean")
        return (x_b - mean) / jnp.sqrt(sk.all_reduce((x_b - mean) ** 2, "i", op="mean"))

    right = (x - x.mean(0)) / x.std(0)
    np.testing.assert_allclose(place(moments_reduced, x, four, P("i"), P("i")), right, rtol=2e-5, atol=2e-6)
    two = sk.make_mesh(jax.devices()[:2], i=2)
    wrong = place(elementwise, x, two, P("i"), P("i"))
    np.testing.assert_allclose(np.abs(wrong), 1, rtol=1e-5)
    assert np.abs(wrong - right).max() > 0.5


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


def test_collectives_from_shifts(four):  # proves S49
    x = np.random.default_rng(2).integers(-9, 9, (16, 4)).astype(np.float32)

    def gathered(piece):
        pieces = [piece]
        for _ in range(3):
            pieces.append(sk.shift(pieces[-1], "i"))
        order = (sk.axis_index("i") - jnp.arange(4)) % 4  # from whom piece k has come
        return jnp.zeros_like(jnp.stack(pieces)).at[order].set(jnp.stack(pieces)).reshape(-1, 4)

    def scattered(whole):
        parts = whole.reshape(4, -1, 4)
        here = sk.axis_index("i")
        total = jnp.take(parts, (here - 1) % 4, axis=0)
        for hop in range(3):
            total = sk.shift(total, "i") + jnp.take(parts, (here - 2 - hop) % 4, axis=0)
        return total

    for ring, kernel in ((gathered, sk.all_gather), (scattered, sk.reduce_scatter)):
        by_lax = place(lambda v, kernel=kernel: kernel(v, "i"), x, four, P("i"), P("i"))
        np.testing.assert_array_equal(place(ring, x, four, P("i"), P("i")), by_lax)


def test_index_over_each_axis():  # proves S50, F9
    mesh = sk.make_mesh(i=4, j=2)
    axes = ["i", "j", ("i", "j"), ("j", "i")]

    def indices(x):
        rows = jnp.stack([sk.axis_index(axis) for axis in axes])
        return rows[:, None] + x.astype(jnp.int32)

    got = place(indices, np.zeros((1, 8), np.int8), mesh, P(None, ("i", "j")), P(None, ("i", "j")))
    assert [d.id for d in mesh.devices.flat] == list(range(8))
    assert got.tolist() == [
        [0, 0, 1, 1, 2, 2, 3, 3],
        [0, 1, 0, 1, 0, 1, 0, 1],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0, 4, 1, 5, 2, 6, 3, 7],
    ]


def test_the_first_axis_of_a_tuple_is_major(mesh2x4):
    x = np.arange(8)
    both = P(("data", "model"))
    gathered = place(lambda v: sk.all_gather(v, ("model", "data"), replicated=True), x, mesh2x4, both, P())
    assert gathered.tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    other = P(("model", "data"))
    shifted = place(lambda v: sk.shift(v, ("model", "data")), x, mesh2x4, other, other)
    assert shifted.tolist() == [7, 0, 1, 2, 3, 4, 5, 6]
    for source in range(8):
        sent = place(lambda v: sk.broadcast(v, ("model", "data"), source=source), x, mesh2x4, both, P())
        assert sent.tolist() == [gathered[source]]


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


def test_equal_values_are_equal_copies(four):
    def of(kernel, *axis):
        return place(kernel, np.float32([6, 7, 8, 9]), four, P(), P(*axis)).tolist()

    assert of(lambda x: sk.all_reduce(x, "i")) == [24, 28, 32, 36]
    assert of(lambda x: sk.all_reduce(x, "i", op="mean")) == [6, 7, 8, 9]
    assert of(lambda x: sk.reduce_scatter(x, "i"), "i") == [24, 28, 32, 36]
    assert of(lambda x: sk.all_gather(x[:1], "i", replicated=True)) == [6, 6, 6, 6]


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
    over = lambda kernel: jax.vmap(kernel, axis_name="a")(x).tolist()  # noqa: E731
    assert over(lambda x: sk.all_reduce(x, "a")) == [[12, 16]] * 4
    assert over(lambda x: sk.all_gather(x, "a")) == [list(range(8))] * 4
    assert over(lambda x: sk.reduce_scatter(jnp.concatenate([x, x]), "a")) == [[12], [16], [12], [16]]
    assert over(lambda x: sk.shift(x, "a")) == [[6, 7], [0, 1], [2, 3], [4, 5]]
    assert over(lambda x: sk.broadcast(x, "a", source=2)) == [[4, 5]] * 4
