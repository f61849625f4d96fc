"""Compressed collectives: what is sent and what is kept are together exact, and over steps nothing is lost."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import cost
from shardkit.analysis import census
from shardkit.analysis.hlo import aot
from shardkit.collectives import compressed
from shardkit.cost.quantization import FORMATS
from shardkit.testing import reference
from support.blocks import ROWS, Kernel, cases, check
from support.compilers import gpu, tpu
from support.tiers import covered
from support.vmapped import under_vmap

DTYPES = [jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8, jnp.int4]
BLOCK_SCALED = ["mxfp8", "mxfp4", "nvfp4"]
MOST = {"float8_e4m3fn": 448, "float8_e5m2": 57344, "int8": 127, "int4": 7, "mxfp8": 448, "mxfp4": 6}
SOME = [DTYPES[i] for i in (0, 1, 4)]


def name_of(dtype):
    return dtype if dtype in BLOCK_SCALED else jnp.dtype(dtype).name


def in_blocks(dtype, block):
    """The arguments for a dtype; a format has blocks of its own."""
    return {"dtype": dtype} if dtype in BLOCK_SCALED else {"dtype": dtype, "block": block}


def mapped(n, axis="a", **options):
    """x and residual, [n, ...] each, to the sum and the new residual, [n, ...]."""
    sizes = {"a": n} if axis == "a" else {"a": 2, "b": n // 2}
    mesh = sk.make_mesh(jax.devices()[:n], **sizes)

    def device(x, residual):
        x, residual = jax.tree.map(lambda leaf: leaf[0], (x, residual))
        total, residual = compressed.all_reduce(x, axis, residual, **options)
        return total, jax.tree.map(lambda leaf: leaf[None], residual)

    spec = P(axis)
    return jax.jit(jax.shard_map(device, mesh=mesh, in_specs=spec, out_specs=(P(), spec)))


def values(n, size=700, dtype="float32"):
    rng = np.random.default_rng(size)
    x = rng.normal(size=(n, size)) * 10.0 ** rng.integers(-6, 3, (n, size))
    return x.astype(jnp.dtype(dtype)), (rng.normal(size=(n, size)) * 1e-3).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES + BLOCK_SCALED)
@pytest.mark.optimized
def test_sent_and_kept_are_together_exact(dtype):  # proves F12, N70
    """On one device the sum is what was sent: in float32 it and the residual add up, bit for bit."""
    step = mapped(1, **in_blocks(dtype, 64))
    x, residual = values(1)
    for turn in range(4):
        wanted = x + residual
        sent, residual = (np.asarray(y) for y in step(x, residual))
        assert (sent[None] + residual).tobytes() == wanted.tobytes(), turn
        np.testing.assert_array_equal(sent[None].astype(np.float64) + residual, wanted.astype(np.float64))
        assert np.abs(residual).max() > 0
        form = FORMATS[name_of(dtype)]
        rows = form.block or 64
        blocks = np.pad(sent, (0, -sent.size % rows)).reshape(-1, rows)
        if dtype == jnp.bfloat16:
            np.testing.assert_array_equal(sent.astype(jnp.bfloat16).astype(np.float32), sent)
        elif dtype == "nvfp4":  # whose scales are held in test_block_scaled.py
            assert all(len(np.unique(np.abs(block))) <= 8 for block in blocks)
        else:  # few different values: sent really went through the small dtype
            for block in blocks:
                steps = block / np.float32(2 ** np.ceil(np.log2(np.abs(block).max() / MOST[name_of(dtype)])))
                np.testing.assert_array_equal(steps.astype(form.element).astype(np.float32), steps)
        x = np.roll(x, 1) * np.float32(-1.7)


@pytest.mark.quick("bfloat16-8-axis1", "int4-3-a", "nvfp4-3-a", "mxfp4-8-axis1")
@pytest.mark.parametrize(("n", "axis"), [(3, "a"), (8, ("b", "a"))])
@pytest.mark.parametrize("dtype", SOME + BLOCK_SCALED)
def test_the_sum(n, axis, dtype):
    """What arrived and what was kept are what was meant, after a second rounding too; and the error is bounded."""
    x, residual = values(n)
    order = np.arange(n).reshape(2, -1).T.ravel() if axis == ("b", "a") else np.arange(n)
    exact, name = (x + residual).astype(np.float64), name_of(dtype)
    bound = cost.quantization_error(np.abs(exact).max(), name, n=n)
    for compress_result in (False, True):
        step = mapped(n, axis, dtype=dtype, compress_result=compress_result)
        total, left = (np.asarray(y, np.float64) for y in step(x[order], residual[order]))
        np.testing.assert_allclose(total + left.sum(0), exact.sum(0), rtol=1e-6, atol=2e-6 * np.abs(exact).max())
        second = cost.quantization_error(n * np.abs(exact).max() + bound, name) if compress_result else 0
        assert 0 < np.abs(total - exact.sum(0)).max() <= bound + second


SCATTERS = {
    "one level": (lambda x, r, **o: compressed.reduce_scatter(x, ("data", "model"), r, dim=1, **o), 1),
    "slow links": (lambda x, r, **o: compressed.reduce_scatter_two_level(x, "model", "data", r, dim=1, **o), 2),
    "two levels": (
        lambda x, r, **o: compressed.reduce_scatter_two_level(x, "model", "data", r, dim=1, inner_dtype=jnp.int8, **o),
        2,
    ),
}
on_cases = covered(
    [{"case": row._replace(shape=(3, 2))} for row in (ROWS[3], ROWS[5], ROWS[7])], case=cases(shapes=[(3, 2), (2,)])
)


@pytest.mark.parametrize("form", SCATTERS)
def test_scatters_lose_nothing_and_keep_the_order_of_the_shards(form, mesh2x4):
    """A residual at the wrong place, a level whose rounding is forgotten, and shards in the order (inner, outer)."""
    kernel, levels = SCATTERS[form]
    spec = P(("data", "model"))
    x, residual = (each.reshape(8, 3, 40, 5) for each in values(8, 600))

    @partial(jax.shard_map, mesh=mesh2x4, in_specs=(spec, spec), out_specs=((P(None, spec[0]), spec), P(None, spec[0])))
    def both(x, residual):
        shard, left = kernel(x[0], residual[0], dtype=jnp.int4)
        alone, none = kernel(x[0], None, dtype=jnp.int4)
        assert none is None
        return (shard, left[None]), alone

    (total, left), alone = jax.jit(both)(x, residual)
    exact, unfed = (each.astype(np.float64) for each in (x + residual, x))
    largest = np.abs(exact).max()
    np.testing.assert_allclose(total + np.asarray(left, np.float64).sum(0), exact.sum(0), atol=4e-6 * largest)
    assert np.abs(total - exact.sum(0)).max() > 1e-3 * largest
    bound = cost.quantization_error(largest, "int4", n=8)
    if levels == 2:
        inner = cost.quantization_error(largest, "int8", n=4)
        bound = 2 * inner + cost.quantization_error(4 * largest + inner, "int4", n=2)
    for got, wanted in ((total, exact.sum(0)), (alone, unfed.sum(0))):
        assert got.shape == wanted.shape and np.abs(got - wanted).max() <= bound


def test_a_sum_of_equal_errors_comes_close_to_the_bound():
    x = np.tile(np.random.default_rng(0).uniform(-1, 1, 2048).astype(np.float32), (4, 1))
    for dtype in (jnp.int4, jnp.float8_e5m2):
        total = np.asarray(mapped(4, dtype=dtype)(x, np.zeros_like(x))[0], np.float64)
        bound = cost.quantization_error(np.abs(x).max(), name_of(dtype), n=4)
        assert 0.98 * bound < np.abs(total - x.astype(np.float64).sum(0)).max() <= bound


@pytest.mark.quick("1", "2")
@on_cases
def test_gathers_and_scatters_are_the_plain_ones_where_nothing_is_rounded(case):
    """Blocks of multiples of 30 are exact: values, dtypes and the straight-through derivatives of all forms."""

    def of_floats(kernel, plain):  # which refuses other leaves
        def run(tree):
            whole = jax.tree.map(plain, tree)
            return jax.tree.map(lambda x, y: kernel(x) if jnp.issubdtype(x.dtype, jnp.floating) else y, tree, whole)

        return run

    def gather(dim, dtype, replicated):
        options = {"axis": case.axis, "dim": dim}
        kernel = partial(compressed.all_gather, dtype=dtype, replicated=replicated, **options)
        return Kernel(
            of_floats(kernel, partial(sk.all_gather, **options)), partial(reference.all_gather, dim=dim), case.shape
        )

    def scatter(dim, kernel):
        plain = partial(sk.reduce_scatter, axis=case.axis, dim=dim)
        run = of_floats(lambda x: kernel(x, dim=dim)[0], plain)
        return Kernel(run, partial(reference.reduce_scatter, dim=dim), case.enlarged(dim))

    kernels = [
        gather(0, jnp.int8, False),
        gather(case.dims[-1], jnp.float8_e4m3fn, True),
        scatter(case.dims[-1], partial(compressed.reduce_scatter, axis=case.axis, dtype=jnp.int8)),
        scatter(0, partial(compressed.reduce_scatter, axis=case.axis, dtype=jnp.bfloat16)),
    ]
    if len(case.names) > 1:
        levels = {"inner": case.names[1:], "outer": case.names[0], "dtype": jnp.bfloat16}
        for inner_dtype in (None, jnp.int8):
            kernel = partial(compressed.reduce_scatter_two_level, inner_dtype=inner_dtype, **levels)
            kernels.append(scatter(0, kernel))
    check(case, *kernels)


@pytest.mark.quick("bfloat16", "int4", "mxfp8", "mxfp4", "nvfp4")
@pytest.mark.parametrize("dtype", DTYPES + BLOCK_SCALED)
def test_the_bias_fades_with_feedback_and_stays_without(dtype):  # proves F12, N70
    n, steps = 4, 64
    x = np.linspace(0.1, 1.3, n * 60, dtype=np.float32).reshape(n, 60)
    exact = x.astype(np.float64).sum(0)
    # whose second rounding is kept too
    step = mapped(n, dtype=dtype, compress_result=dtype in (jnp.int8, jnp.int4, "mxfp8", "nvfp4"))

    def biases(feedback):
        residual, total, seen = np.zeros_like(x), 0, []
        for turn in range(1, steps + 1):
            out, left = step(x, residual)
            total = total + np.asarray(out, np.float64)
            seen.append(np.abs(total / turn - exact).max())
            residual = np.asarray(left) if feedback else residual
        return seen

    fed, unfed = biases(True), biases(False)
    assert fed[0] == unfed[0] > 1e-4
    np.testing.assert_allclose(unfed[-1], unfed[0], rtol=1e-3)
    assert fed[-1] < 4 * unfed[0] / steps  # the error of the sum stays that of one step, so the mean's falls as 1/steps


@pytest.mark.quick(
    *("bfloat16-1", "bfloat16-3", "int8-2", "int4-5", "float8_e4m3fn-3", "float8_e5m2-8"),
    *("mxfp8-1", "mxfp8-3", "mxfp4-5", "mxfp4-8", "nvfp4-2", "nvfp4-8"),
)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("dtype", DTYPES + BLOCK_SCALED)
def test_cost_and_bits_on_the_wire(n, dtype):  # proves N70
    size, name, options = 701, name_of(dtype), in_blocks(dtype, 32)
    block = options.get("block")
    args = [jax.ShapeDtypeStruct((n, size), np.float32)] * 2
    chunk = -(-size // n)
    message = cost.quantized_bytes(chunk, name, block=block)
    for compress_result, second in ((False, 4 * chunk), (True, message)):
        found = census(mapped(n, **options, compress_result=compress_result), *args)
        assert found.sent(kind="all_to_all") == (n - 1) * message
        assert found.sent() == (n - 1) * (message + second)
        assert found.count(kind="all_to_all") == (1 if name == "bfloat16" else 2)
    gathered = census(on_wire(lambda x, r: compressed.all_gather(x, "a", **options), n), args[0], args[1])
    assert gathered.sent() == (n - 1) * cost.quantized_bytes(size, name, block=block)
    padded = jax.ShapeDtypeStruct((n, n * chunk), np.float32)
    scattered = census(on_wire(lambda x, r: compressed.reduce_scatter(x, "a", **options)[0], n), padded, padded)
    assert scattered.sent() == (n - 1) * message
    # A sum of bfloat16 is gathered in it.
    half = jax.ShapeDtypeStruct((n, size), jnp.bfloat16)
    assert census(mapped(n, dtype=dtype), half, args[1]).sent(kind="all_gather") == (n - 1) * 2 * chunk


def on_wire(kernel, n, **sizes):
    mesh = sk.abstract_mesh(**(sizes or {"a": n}))
    options = {"mesh": mesh, "in_specs": P(tuple(mesh.shape)), "out_specs": P(tuple(mesh.shape))}
    return jax.shard_map(lambda *args: jax.tree.map(lambda y: y[None], kernel(*(x[0] for x in args))), **options)


@pytest.mark.parametrize(("inner", "outer"), [(4, 2), (2, 3), (1, 2), (4, 1)])
def test_cost_of_two_levels(inner, outer):
    """The slow axis carries a message of 1/(I O) of the elements, and so does no other form."""
    x = jax.ShapeDtypeStruct((inner * outer, 24, 50), np.float32)

    def sent(inner_dtype, residual):
        def kernel(x, r):
            r = r if residual else None
            options = {"dtype": jnp.int4, "inner_dtype": inner_dtype}
            return compressed.reduce_scatter_two_level(x, "inner", "outer", r, **options)[0]

        found = census(on_wire(kernel, 0, outer=outer, inner=inner), x, x)
        return found.sent(axis="inner"), found.sent(axis="outer")

    slow = (outer - 1) * cost.quantized_bytes(1200 // (inner * outer), "int4")
    for residual in (True, False):
        assert sent(None, residual) == (4 * 1200 * (inner - 1) / inner, slow)
        assert sent(jnp.int8, residual) == ((inner - 1) * cost.quantized_bytes(1200 // inner, "int8"), slow)


def test_trees_dtypes_and_types():
    x = {"w": np.ones((2, 3, 4), jnp.bfloat16), "s": [np.full((2,), 3, np.float32), np.zeros((2, 0), np.float32)]}
    mesh = sk.make_mesh(jax.devices()[:2], a=2)

    def device(x):
        x = jax.tree.map(lambda leaf: leaf[0], x)
        residual = jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.float32), x)
        # a loop carries the residual: its type does not change
        return jax.lax.scan(
            lambda left, _: compressed.all_reduce(x, "a", left, dtype=jnp.int8)[::-1], residual, None, length=2
        )[1]

    total = jax.jit(jax.shard_map(device, mesh=mesh, in_specs=P("a"), out_specs=P()))(x)
    assert total["w"].dtype == jnp.bfloat16 and total["w"].shape == (2, 3, 4)
    np.testing.assert_array_equal(total["w"].astype(np.float32), 2)
    assert [leaf.shape for leaf in total["s"]] == [(2,), (2, 0)]
    np.testing.assert_array_equal(total["s"][0], 6)


def test_gathers_of_trees():
    """Every float dtype comes back as it was, empty leaves too; devices agree in every bit, also on their own shard."""
    rng = np.random.default_rng(0)
    x = {
        "h": [rng.normal(size=(4, 3, 5)).astype(each) for each in (jnp.bfloat16, np.float16, np.float32)],
        "empty": np.zeros((4, 3, 0), np.float32),
    }

    def device(x):
        x = jax.tree.map(lambda leaf: leaf[0], x)
        return jax.tree.map(lambda y: y[None], compressed.all_gather(x, "a", dim=1, dtype=jnp.int4, block=4))

    mesh = sk.make_mesh(jax.devices()[:4], a=4)
    out = jax.jit(jax.shard_map(device, mesh=mesh, in_specs=P("a"), out_specs=P("a")))(x)
    assert [leaf.shape for leaf in jax.tree.leaves(out)] == [(4, 3, 0), *[(4, 3, 20)] * 3]
    for got, given in zip(out["h"], x["h"], strict=True):
        assert got.dtype == given.dtype
        pieces = np.asarray(got, np.float32)
        np.testing.assert_array_equal(pieces, np.broadcast_to(pieces[0], pieces.shape))
        whole = given.astype(np.float32).transpose(1, 0, 2).reshape(3, 20)
        error = np.abs(pieces[0] - whole)
        assert 0 < error.max() <= cost.quantization_error(np.abs(whole).max(), "int4") * (1 + 2**-6)


@pytest.mark.optimized
def test_what_is_not_finite_shows():
    for dtype in DTYPES + BLOCK_SCALED:
        options = in_blocks(dtype, 2)
        rows = options.get("block", FORMATS[name_of(dtype)].block)
        step = mapped(2, **options)
        for bad in (np.inf, -np.inf, np.nan):
            x = np.full((2, 4 * rows), 6, np.float32)  # two chunks of two blocks, of what all dtypes have
            x[1, rows] = bad
            total, residual = step(x, np.zeros_like(x))
            assert not np.isfinite(total[rows]) and not np.isfinite(residual[1, rows])
            np.testing.assert_array_equal(total[:rows], 12)
            np.testing.assert_array_equal(total[2 * rows :], 12)
            np.testing.assert_array_equal(residual[0], 0)
        # close to the largest float32: what would be rounded up to infinity is not, and the rest is kept
        huge = np.full((2, 4), 3.4e38, np.float32) * np.array([[1], [0]], np.float32)
        total, residual = step(huge, np.zeros_like(huge))
        assert np.isfinite(total).all() and (np.asarray(total) + np.asarray(residual).sum(0) == huge[0]).all()


@pytest.mark.quick("bfloat16", "nvfp4")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int4, "nvfp4"])
def test_gradient_is_that_of_the_exact_sum(dtype):  # proves N70
    weights = np.array([1.0, 10, 100], np.float32)
    x, residual = values(3, 6)

    def loss(x, residual):
        total, left = compressed.all_reduce(x, "a", residual, dtype=dtype)
        return jnp.sum(total) * jnp.asarray(weights)[sk.axis_index("a")] + 0 * jnp.sum(left)

    both = partial(jax.grad, argnums=(0, 1))
    mesh = sk.make_mesh(jax.devices()[:3], a=3)
    on_mesh = jax.shard_map(both(loss), mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    for gradient in (jax.jit(on_mesh)(x, residual), jax.jit(jax.vmap(both(loss), axis_name="a"))(x, residual)):
        for leaf in gradient:
            np.testing.assert_array_equal(leaf, np.full((3, 6), 111))
    by_vmap = jax.jit(jax.vmap(lambda x, r: compressed.all_reduce(x, "a", r, dtype=dtype), axis_name="a"))
    for got, wanted in zip(by_vmap(x, residual), mapped(3, dtype=dtype)(x, residual), strict=True):
        np.testing.assert_array_equal(got, np.broadcast_to(wanted, got.shape))


@pytest.mark.quick("axis1")
@pytest.mark.parametrize("axis", ["a", ("b", "a")])
def test_under_vmap_the_same(axis):
    """A kernel that names axes in a way that only shard_map takes; the sums have the same bits."""
    sizes, spec = {"a": 2, "b": 3}, P(("b", "a"))
    x = np.random.default_rng(0).normal(size=(36, 4)).astype(np.float32)

    def kernel(x):
        shard = compressed.reduce_scatter(x, axis, dtype=jnp.int4, block=4)[0]
        return compressed.all_gather(shard, axis, dim=1, dtype=jnp.float8_e5m2)

    on_mesh = jax.shard_map(kernel, mesh=sk.make_mesh(jax.devices()[:6], **sizes), in_specs=spec, out_specs=spec)
    np.testing.assert_array_equal(under_vmap(kernel, sizes, [spec], spec)(x), jax.jit(on_mesh)(x))


def weights_and_gradients(topology):
    """A quantized gather of weights and reduction of gradients, compiled: the report."""
    mesh = sk.abstract_mesh(node=2, gpu=4)
    both, sharded = P(("node", "gpu")), NamedSharding(mesh, P(("node", "gpu")))

    @partial(jax.shard_map, mesh=mesh, in_specs=both, out_specs=both)
    def device(w, g):
        whole = compressed.all_gather(w, ("node", "gpu"), dtype=jnp.float8_e4m3fn)
        options = {"dtype": jnp.int4, "inner_dtype": jnp.int8}
        shard, left = compressed.reduce_scatter_two_level(g, "gpu", "node", jnp.zeros_like(g, jnp.float32), **options)
        options = {"dtype": "nvfp4", "inner_dtype": "mxfp4", "key": jax.random.key(0)}
        drawn = compressed.reduce_scatter_two_level(g, "gpu", "node", **options)[0]
        return whole, shard, left, drawn

    args = [jax.ShapeDtypeStruct((64, 512), jnp.bfloat16, sharding=sharded)]
    args.append(jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=sharded))
    return aot.compile(device, args, topology=topology)


@pytest.mark.parametrize("topology", [pytest.param("v5e:2x4", marks=tpu), pytest.param("h100:1x1x8", marks=gpu)])
def test_a_chip_sends_the_small_bits(topology):  # proves N70
    """The compiler does not widen what is sent, nor move the conversion before the wire."""
    report = weights_and_gradients(topology)
    expected = {  # by elements on a device: a shard of w; g over gpu=4; the partial sums over node=2
        ("all_gather", "gpu"): 7 * cost.quantized_bytes(8 * 512, "float8_e4m3fn"),
        ("all_to_all", "gpu"): 3 * sum(cost.quantized_bytes(64 * 512 // 4, dtype) for dtype in ("int8", "mxfp4")),
        ("all_to_all", "node"): sum(cost.quantized_bytes(64 * 512 // 8, dtype) for dtype in ("int4", "nvfp4")),
    }
    for (kind, axis), sent in expected.items():
        assert report.sent(kind=kind, axis=axis) == report.census.sent(kind=kind, axis=axis) == sent
