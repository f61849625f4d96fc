"""Collective matmuls: against plain matmuls on whole arrays, in what they send and keep, and as compiled for chips."""

import inspect
import re

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks import ring_matmul
from shardkit import cost, testing
from support.compilers import gpu, tpu
from support.refusals import raises, refusals
from support.tiers import covered
from support.vmapped import under_vmap

SIZES = [1, 2, 3, 4, 5, 8]
IMPLS = ["gather", "ring", "bidirectional", "auto"]
EXPLICIT = IMPLS[:3]


def line(n):
    return sk.make_mesh(jax.devices()[:n], a=n)


def whole(shape, dtype="float32", seed=0):
    """Whole numbers, so small that every sum is exact in bfloat16 too."""
    return np.random.default_rng([seed, *shape]).integers(-2, 3, shape).astype(jnp.dtype(dtype))


def plain(x, w):
    """Contracts the last dims of x with the first of w, as many as w has besides its last."""
    dims = w.ndim - 1
    return jnp.tensordot(x, w, dims, preferred_element_type=jnp.float32).astype(x.dtype)


def gather_form(x_TD, w_DF):
    return jax.tree.map(lambda w: jnp.tensordot(x_TD, w, 1, preferred_element_type=jnp.float32).astype(w.dtype), w_DF)


def on(mesh, kernel, in_specs, out_specs):
    return jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def into(mesh, axis="a", batch=(), **options):
    """all_gather_matmul from and to whole arrays, its leading dims split by the axes in `batch`."""
    return on(
        mesh,
        lambda x, w: sk.all_gather_matmul(x, w, axis, **options),
        (P(*batch, axis), P(None, axis)),
        P(*batch, None, axis),
    )


def out_of(mesh, axis="a", batch=(), **options):
    """matmul_reduce_scatter from and to whole arrays."""
    return on(
        mesh,
        lambda h, w: sk.matmul_reduce_scatter(h, w, axis, **options),
        (P(*batch, None, axis), P(axis)),
        P(*batch, axis),
    )


def assert_same(*cases, seed=1):
    """Values and gradients of (got, wanted, args) in every bit; one program for all."""

    @jax.jit
    def both(args, cotangents):
        pairs = []
        for (got, wanted, _), arrays, cotangent in zip(cases, args, cotangents, strict=True):
            for f in (got, wanted):
                y, back = jax.vjp(f, *arrays)
                pairs.append((y, back(cotangent)))
        return pairs[::2], pairs[1::2]

    args = [arrays for *_, arrays in cases]
    cotangents = [
        jax.tree.map(
            lambda y: np.random.default_rng(seed).integers(-1, 2, y.shape).astype(y.dtype),
            jax.eval_shape(wanted, *arrays),
        )
        for _, wanted, arrays in cases
    ]
    got, wanted = both(args, cotangents)
    for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert g.dtype == e.dtype
        np.testing.assert_array_equal(np.asarray(g), np.asarray(e))


# ---- values and gradients


# proves F26, S44
@pytest.mark.quick("3")  # testing/exact/test_kernels.py proves each form on four devices
@pytest.mark.parametrize("n", SIZES)
def test_they_equal_plain_matmuls(n):
    mesh = line(n)
    columns, rows = (whole((3 * n, 4)), whole((4, 2 * n))), (whole((3 * n, 2 * n)), whole((2 * n, 5)))
    assert_same(
        *[(into(mesh, impl=impl), gather_form, columns) for impl in IMPLS],
        *[(out_of(mesh, impl=impl), plain, rows) for impl in IMPLS],
    )


ROWS = [
    row | {"n": [3, 4, 2, 8][i % 4], "rows": 1 + i % 4, "columns": [[(3,), ()], [()], [(2, 2)], [(), (), (3,)]][i % 4]}
    for i, row in enumerate(
        testing.covering({"impl": EXPLICIT, "dtype": ["float32", "bfloat16", "float16"], "batch": [(), (2,), (1, 3)]})
    )
]


# proves F26
@pytest.mark.quick("0", "5", "6", "1", "8")
@covered(
    ROWS,
    n=st.sampled_from(SIZES),
    impl=st.sampled_from(EXPLICIT),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    batch=st.sampled_from([(), (2,), (1, 3)]),
    rows=st.integers(1, 4),
    columns=st.lists(st.sampled_from([(), (3,), (2, 2)]), min_size=1, max_size=3),
)
def test_batch_dims_column_dims_and_several_weights(n, impl, dtype, batch, rows, columns):
    mesh, free = line(n), [None] * len(batch)
    x = whole((*batch, n * rows, 3), dtype)
    w = {f"w{i}": whole((3, n, *more), dtype, i) for i, more in enumerate(columns)}
    h, w_fD = whole((*batch, n * rows, n, *columns[0]), dtype), whole((n, *columns[0], 5), dtype)
    assert_same(
        (into(mesh, batch=free, impl=impl), gather_form, (x, w)),
        (out_of(mesh, batch=free, impl=impl), plain, (h, w_fD)),
    )


@pytest.mark.quick("axis3")
@pytest.mark.parametrize("axis", ["a", "b", ("a", "b"), ("b", "a")])
def test_tuples_of_axes_and_a_batch_over_another_axis(axis):
    """A weight that is the same on all of "data" gets the sum of its gradients."""
    mesh = sk.make_mesh(data=2, a=2, b=2)
    n = 2 if isinstance(axis, str) else 4
    kinds = [{"batch": ("data",), "impl": impl} for impl in EXPLICIT]
    columns, rows = (whole((2, 3 * n, 4)), whole((4, 2 * n))), (whole((2, 3 * n, 2 * n)), whole((2 * n, 5)))
    assert_same(
        *[(into(mesh, axis, **options), gather_form, columns) for options in kinds],
        *[(out_of(mesh, axis, **options), plain, rows) for options in kinds],
    )


def test_a_weight_that_is_whole_everywhere():
    """Typed as equal over the axis, it is treated as that many copies."""

    def kernel(impl):
        return on(line(4), lambda x, w: sk.all_gather_matmul(x, w, "a", impl=impl), (P("a"), P()), P(None, "a"))

    args = whole((8, 3)), whole((3, 2))
    assert_same(*[(kernel(impl), lambda x, w: jnp.tile(x @ w, (1, 4)), args) for impl in EXPLICIT])


def block(impl, x_tD, w):
    """A feed-forward block with a gate: the two column weights share one gather."""
    up, gate = sk.all_gather_matmul(x_tD, (w["up"], w["gate"]), "a", impl=impl)
    return x_tD + sk.matmul_reduce_scatter(up * jnp.maximum(gate, 0), w["down"], "a", impl=impl)


# proves F26: under scan and jax.checkpoint, as a layer uses them
@pytest.mark.quick("4-gather", "3-ring")
@pytest.mark.parametrize("impl", EXPLICIT)
@pytest.mark.parametrize("n", [3, 4])
def test_gradients_through_a_scan_of_recomputed_layers(n, impl):
    specs = {"up": P(None, None, "a"), "gate": P(None, None, "a"), "down": P(None, "a")}
    weights = {"up": whole((2, 3, n)), "gate": whole((2, 3, n), seed=1), "down": whole((2, n, 3))}
    x = whole((2 * n, 3))

    def stack(layer, x, weights):
        return jax.lax.scan(jax.checkpoint(lambda x, w: (layer(x, w), None)), x, weights)[0]

    def plain_block(x, w):
        return x + (x @ w["up"] * jnp.maximum(x @ w["gate"], 0)) @ w["down"]

    got = on(line(n), lambda x, w: stack(lambda x, w: block(impl, x, w), x, w), (P("a"), specs), P("a"))
    assert_same((got, lambda x, w: stack(plain_block, x, w), (x, weights)))


def test_eagerly_and_on_one_device():
    x, w = whole((8, 3)), whole((3, 4))
    specs = (P("a"), P(None, "a")), P(None, "a")

    def kernel(x, w, impl="ring"):
        return sk.all_gather_matmul(x, w, "a", impl=impl)

    eager = jax.shard_map(kernel, mesh=line(4), in_specs=specs[0], out_specs=specs[1])(x, w)
    np.testing.assert_array_equal(eager, x @ w)
    for impl in EXPLICIT:
        mapped = under_vmap(lambda x, w, impl=impl: kernel(x, w, impl), {"a": 4}, *specs)
        np.testing.assert_array_equal(jax.jit(mapped)(x, w), x @ w)


@pytest.mark.quick("gather", "ring")
@pytest.mark.parametrize("impl", EXPLICIT)
def test_bfloat16_is_summed_in_float32(impl):
    """One rounding of what is not sent; of what is sent one a hop, and none of the matmul's own sums."""
    n, rng = 8, np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(jnp.bfloat16)  # noqa: E731
    wide = lambda x: np.asarray(x, np.float32)  # noqa: E731
    x, w, dy = draw(8 * n, 512), draw(512, n), draw(8 * n, n)
    y, back = jax.vjp(into(line(n), impl=impl), x, w)
    np.testing.assert_allclose(wide(y), wide(x) @ wide(w), rtol=2**-8, atol=1e-3)
    np.testing.assert_allclose(wide(back(dy)[1]), wide(x).T @ wide(dy), rtol=2**-8, atol=1e-3)
    h, w = draw(2 * n, 512 * n), draw(512 * n, 4)
    y, expected = wide(out_of(line(n), impl=impl)(h, w)), wide(h) @ wide(w)
    assert np.abs(y - expected).max() < n * 2**-9 * np.abs(expected).max()


# ---- what is sent and kept


def counted(f, *shapes, dtype="bfloat16"):
    return sk.census(f, *(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))


def backward(f):
    """The backward pass with the forward pass that it needs."""
    return lambda *args: jax.vjp(f, *args)[1](jnp.ones_like(f(*args)))


# proves F26, F76: the closed forms of the docstrings
@pytest.mark.quick("1-ring", "2-bidirectional", "3-ring", "5-bidirectional", "5-gather", "8-gather")
@pytest.mark.parametrize("impl", EXPLICIT)
@pytest.mark.parametrize("n", SIZES)
def test_what_they_send(n, impl):
    t, D, f = 6, 4, 3
    piece = t * D * 2  # bytes of x_tD, and of the result that is scattered
    sent, hops = cost.wire("all_gather", piece, n)
    assert (sent, hops) == (piece * (n - 1), n - 1)
    messages = 2 if impl == "bidirectional" and n > 2 else 1
    for make, shapes, back in [
        (into, ((n * t, D), (D, n * f)), 2),  # tokens again, and sums
        (out_of, ((n * t, n * f), (n * f, D)), 1),
    ]:
        forward = counted(make(line(n), impl=impl), *shapes)
        assert forward.sent() == sent
        both = counted(backward(make(line(n), impl=impl)), *shapes)
        assert sum(r.total for r in both.rows if r.backward) == back * sent
        ringed = impl != "gather" and n > 1
        assert ({r.kind for r in both.rows} == {"ppermute"}) == ringed
        assert forward.count() == (messages * hops if ringed else 1)  # none after the last matmul
        assert sum(r.count for r in both.rows if r.backward) == back * (hops if ringed else 1)


@pytest.mark.parametrize(
    "text, kernel",
    {
        "B (n-1) bytes in n-1 hops, B being x_tD, for every `impl`; the backward pass 2 B (n-1) bytes, in n-1 hops "
        'both ways at once, or in 2 (n-1) for "gather".': sk.all_gather_matmul,
        "B (n-1) bytes in n-1 hops, B being the result, for every `impl`; the backward pass the "
        "same.": sk.matmul_reduce_scatter,
    }.items(),
)
def test_the_docstrings_say_so(kernel, text):
    stated = re.search(r"Cost: (.+?)(?=\n\n|\Z)", inspect.getdoc(kernel), re.DOTALL).group(1)
    assert " ".join(stated.split()) == text
    for argument in inspect.signature(kernel).parameters:
        assert f"{argument}:" in kernel.__doc__


def test_one_gather_serves_several_weights():
    n, D = 4, 8
    shapes = {"q": (D, n, 2), "k": (D, n), "v": (D, n)}
    w = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()}
    for impl in EXPLICIT:
        found = sk.census(into(line(n), impl=impl), jax.ShapeDtypeStruct((n * 6, D), jnp.float32), w)
        assert found.sent() == 6 * D * 4 * (n - 1)


# proves F26: the backward pass keeps no gathered operand
@pytest.mark.parametrize("impl", EXPLICIT)
def test_only_the_operands_are_kept(impl):
    kept = []

    def residuals(kernel):
        def device(*args):
            y, back = jax.vjp(lambda *args: kernel(*args, "a", impl=impl), *args)
            kept.append(sorted(leaf.shape for leaf in jax.tree.leaves(back)))
            return y

        return device

    jax.eval_shape(
        on(line(4), residuals(sk.all_gather_matmul), (P("a"), P(None, "a")), P(None, "a")),
        *(whole((24, 5)), whole((5, 28))),
    )
    jax.eval_shape(
        on(line(4), residuals(sk.matmul_reduce_scatter), (P(None, "a"), P("a")), P("a")),
        *(whole((24, 28)), whole((28, 5))),
    )
    assert kept == [[(5, 7), (6, 5)], [(7, 5), (24, 7)]]


def impl_of(found):
    return {("all_gather", 1): "gather", ("reduce_scatter", 1): "gather", ("ppermute", 1): "ring"}.get(
        (found.rows[0].kind, len(found.rows)), "bidirectional"
    )


@pytest.mark.parametrize(
    "n, dtype, columns, impl",
    [
        (1, "bfloat16", [9000], "gather"),
        (2, "bfloat16", [4399], "gather"),  # no second way round
        (2, "bfloat16", [4400], "ring"),
        (3, "bfloat16", [2199], "gather"),
        (3, "bfloat16", [2200], "bidirectional"),
        (8, "bfloat16", [4399], "bidirectional"),
        (8, "bfloat16", [4400], "ring"),
        (8, "bfloat16", [4000, 400], "ring"),
        (8, "float32", [4400], "bidirectional"),
        (8, "float32", [8800], "ring"),
        (8, "float32", [4399], "gather"),
    ],
)
def test_links_choose_by_columns_dtype_and_devices(n, dtype, columns, impl):
    links = cost.Links(cost.Link(latency=0.0, bandwidth=1.0), flops=4400.0)
    x = jax.ShapeDtypeStruct((2 * n, 8), dtype)
    w = [jax.ShapeDtypeStruct((8, n * f), dtype) for f in columns]
    assert impl_of(sk.census(into(line(n), impl=links), x, w)) == impl
    f = sum(columns)
    assert impl_of(counted(out_of(line(n), impl=links), (2 * n, n * f), (n * f, 8), dtype=dtype)) == impl


# A message of 2 x 512 bfloat16 has 2 KiB: its hop takes 2 us + 2 us, its matmul with 1024 columns 2 us.
@pytest.mark.parametrize(
    ("columns", "axes", "impl"),
    [
        (1023, (), "gather"),
        (1024, (), "bidirectional"),
        (2048, (), "ring"),
        (2048, (("a", cost.Link(2e-6, 0.9e9)),), "bidirectional"),  # a slower link of this axis
        (1024, (("b", cost.Link(2e-6, 0.9e9)),), "bidirectional"),
    ],
)
def test_links_choose_by_the_latency_of_messages_too(columns, axes, impl):
    links = cost.Links(cost.Link(2e-6, 1.024e9), flops=1.048576e12, axes=axes)
    x, w = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((8, 512), (512, 4 * columns)))
    assert impl_of(sk.census(into(line(4), impl=links), x, [w])) == impl
    found = counted(out_of(line(4), impl=links), (8, 4 * columns), (4 * columns, 512), dtype="bfloat16")
    assert impl_of(found) == impl


# Each form is the best of a kernel and a pass by the compiler (`benchmarks/results/matmul_forms.jsonl`): over
# four devices, of tokens of a device, width and columns.
@pytest.mark.parametrize(
    ("kind", "sizes", "into_forms", "out_forms"),
    [
        ("TPU v5 lite", (2048, 8192, 28672), ("ring", "ring"), ("ring", "gather")),
        ("TPU v5 lite", (512, 4096, 14336), ("bidirectional", "gather"), ("ring", "gather")),
        ("TPU v5p", (4096, 4096, 6144), ("gather", "gather"), ("gather", "gather")),
        ("NVIDIA H100 80GB HBM3", (2048, 8192, 28672), ("ring", "gather"), ("ring", "gather")),
        ("NVIDIA H100 80GB HBM3", (4096, 4096, 6144), ("ring", "gather"), ("ring", "ring")),
        ("NVIDIA B200", (512, 2048, 4096), ("gather", "gather"), ("gather", "gather")),  # messages of latency
    ],
)
def test_auto_takes_the_fastest_form_of_each_pass_on_the_chip(kind, sizes, into_forms, out_forms):
    mesh = of_kind(kind)
    tokens, width, columns = sizes
    x, w = (4 * tokens, width), (width, columns)
    h, v = (4 * tokens, columns), (columns, width)
    assert impl_of(counted(into(mesh), x, w)) == into_forms[0]
    assert impl_of(counted(out_of(mesh), h, v)) == out_forms[0]
    for form, f, shapes in ((into_forms[1], into(mesh), (x, w)), (out_forms[1], out_of(mesh), (h, v))):
        kinds = {row.kind for row in counted(backward(f), *shapes).rows if row.backward}
        assert (kinds == {"ppermute"}) == (form == "ring")


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA H100 PCIe", "TPU v9"])
def test_auto_claims_nothing_of_chips_without_figures(kind):
    x, w = ((8, 2**25), (2**25, 2**17))
    assert impl_of(counted(into(of_kind(kind)), x, w, dtype="bfloat16")) == "gather"
    known = cost.Links(cost.Link(0.0, 45e9))  # the link alone does not tell how long a matmul takes
    assert impl_of(counted(into(of_kind(kind), impl=known), x, w, dtype="bfloat16")) == "gather"


def of_kind(kind):
    """A mesh of four devices that jax calls so."""
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=1, platform=kind[:3].lower())
    types = (jax.sharding.AxisType.Auto,)
    return jax.sharding.AbstractMesh((4,), ("a",), axis_types=types, abstract_device=device)


def test_lint_finds_nothing():
    for impl in EXPLICIT:
        f = on(line(4), lambda x, w, impl=impl: block(impl, x, w), (P("a"), SPECS), P("a"))
        w = {"up": whole((3, 4)), "gate": whole((3, 4)), "down": whole((4, 3))}
        assert sk.lint(lambda x, w, f=f: jax.grad(lambda w: f(x, w).sum())(w), whole((8, 3)), w) == []


SPECS = {"up": P(None, "a"), "gate": P(None, "a"), "down": P("a")}


# ---- errors

FAST = "impl must be 'gather', 'ring', 'bidirectional', 'auto' or a Links; got 'fast'. Pass for example impl='gather'."
ERRORS = refusals(
    {
        f"all_gather_matmul: {FAST}": lambda x, w: sk.all_gather_matmul(x, w, "a", impl="fast"),
        f"matmul_reduce_scatter: {FAST}": lambda x, w: sk.matmul_reduce_scatter(
            jnp.tile(x, (4, 1)), w, "a", impl="fast"
        ),
        "all_gather_matmul: the last dim of x [..., t, D] must be dim 0 of w [D, ...]; got shapes (3, 5) and (2, 5). "
        "Reshape or transpose one of them.": lambda x, w: sk.all_gather_matmul(x, {"ok": w, "bad": w.T}, "a"),
        "all_gather_matmul: the last dim of x [..., t, D] must be dim 0 of w [D, ...]; got shapes (5,) and (5, 2). "
        "Reshape or transpose one of them.": lambda x, w: sk.all_gather_matmul(x[0], w, "a"),
        "matmul_reduce_scatter: the dims of h [..., T, f] after T must be those of w [f, D] before D; got shapes (3, "
        "5) and (2, 5). Reshape or transpose one of them.": lambda x, w: sk.matmul_reduce_scatter(x, w.T, "a"),
        "matmul_reduce_scatter: the dims of h [..., T, f] after T must be those of w [f, D] before D; got shapes (3, "
        "5) and (1, 5, 2). Reshape or transpose one of them.": lambda x, w: sk.matmul_reduce_scatter(x, w[None], "a"),
        "matmul_reduce_scatter: dim 0 must be divisible by axis 'a'; got size 3 over 4 devices. "
        "Pad dim 0 or choose another dim.": lambda x, w: sk.matmul_reduce_scatter(x, w, "a"),
    },
    {
        "all_gather_matmul: operands must be floating-point and of one dtype; got bfloat16, float32. "
        "Cast them to one dtype first.": lambda x, w: sk.all_gather_matmul(x.astype(jnp.bfloat16), w, "a"),
        "matmul_reduce_scatter: operands must be floating-point and of one dtype; got int32, int32. Cast them to one "
        "dtype first.": lambda x, w: sk.matmul_reduce_scatter(jnp.ones((4, 5), jnp.int32), w.astype(jnp.int32), "a"),
    },
)


@pytest.mark.parametrize("kind, message, kernel", ERRORS)
def test_bad_input(kind, kernel, message):
    with raises(kind, message):
        jax.eval_shape(on(line(4), kernel, (P("a"), P()), P("a")), whole((12, 5)), whole((5, 2)))


# ---- compiled for chips that are not there


def compiled(form, topology):
    with jax.numpy_dtype_promotion("standard"):
        return ring_matmul.compile_form(form, topology)


# proves F26, F86
@pytest.mark.deep  # it compiles for long, and the census counts the hops
@tpu
def test_on_a_tpu_every_hop_is_hidden_in_less_memory_than_the_gather_needs():
    report = compiled("bidirectional", "v5e:2x4")
    assert {row.kind for row in report.rows} == {"ppermute"} and report.count() == 7 * (2 + 2 + 1 + 2)
    assert all(row.asynchronous and row.hidden_flops for row in report.rows)
    assert report.exposed_seconds < 1e-4  # "gather": 9.8e-4
    assert report.memory.temp < 300e6  # "gather": 476e6


# proves F26, F86
@gpu
@pytest.mark.parametrize("form", ["ring", "bidirectional"])
def test_on_a_gpu_every_hop_runs_beside_compute(form):
    report = compiled(form, "h100:1x1x8")
    assert {row.kind for row in report.rows} == {"ppermute"}
    assert all(row.asynchronous for row in report.rows)
