"""strategies/context.py: ring and Ulysses attention against one device, what they send, and what they compute."""

import math
from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import cost
from shardkit._jax import compat
from shardkit._jax.jaxprs import walk
from shardkit.analysis import census
from shardkit.testing import covering
from support.layouts import mesh_of
from support.refusals import value_error
from support.tiers import covered
from support.vmapped import under_vmap

SIZES = [1, 2, 3, 4, 8]


def drawn(b, T, H, G, K, *, packed=False, dtype=np.float32, seed=0):
    """Queries, keys, values and, if packed, the numbers of three documents."""
    rng = np.random.default_rng(seed)
    arrays = [rng.normal(size=(b, T, heads, K)).astype(dtype) for heads in (H, G, G)]
    return [*arrays, np.sort(rng.integers(0, 3, (b, T)), axis=1).astype(np.int32) if packed else None]


def natural(attend, order, axis, ulysses=None):
    """A kernel on contiguous shards, whatever the order in which it attends."""

    def kernel(q, k, v, segments=None):
        if order == "contiguous":
            return attend(q, k, v, order=order, segments_bt=segments)
        q, k, v, segments = sk.layers.zigzag((q, k, v, segments), axis, ulysses=ulysses)
        y = attend(q, k, v, order=order, segments_bt=segments)
        return sk.layers.zigzag(y, axis, ulysses=ulysses, inverse=True)

    return kernel


def over_ring(order="contiguous", axis="c", **options):
    return natural(partial(sk.layers.ring_attention, axis=axis, **options), order, axis)


def reference(**options):
    return lambda q, k, v, segments=None: sk.layers.dot_attention(q, k, v, segments_bt=segments, **options)


def assert_equal(kernel, reference, mesh, spec, args, relative=1e-5):
    """Results and gradients, each within `relative` of its largest element."""
    cotangent = np.random.default_rng(9).normal(size=args[0].shape).astype(args[0].dtype)
    arrays, rest = [x for x in args if x is not None][:3], args[3:]

    @partial(jax.jit, static_argnums=0)
    def both(f, arrays):
        y, backward = jax.vjp(lambda *x: f(*x, *rest), *arrays)
        return y, *backward(cotangent)

    got = both(jax.shard_map(kernel, mesh=mesh, in_specs=spec, out_specs=spec), arrays)
    for x, wanted in zip(got, both(reference, arrays), strict=True):
        assert x.dtype == wanted.dtype
        x, wanted = (np.asarray(a, np.float64) for a in (x, wanted))
        np.testing.assert_allclose(x, wanted, rtol=0, atol=relative * np.abs(wanted).max())


def by_hand(q, k, v, causal, segments):
    """Attention of one head of one example, in float64, row by row."""
    rows = []
    for t in range(len(q)):
        seen = [s for s in range(len(k)) if (s <= t or not causal) and (segments is None or segments[s] == segments[t])]
        scores = np.exp(k[seen].astype(np.float64) @ q[t] / math.sqrt(q.shape[-1]))
        rows.append(scores @ v[seen] / scores.sum())
    return np.stack(rows)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_is_attention(causal, packed):
    q, k, v, segments = drawn(2, 7, 4, 2, 3, packed=packed)
    got = sk.layers.dot_attention(q, k, v, causal=causal, segments_bt=segments)
    for b in range(2):
        for head in range(4):
            numbers = None if segments is None else np.asarray(segments[b])
            one = [np.asarray(x) for x in (q[b, :, head], k[b, :, head // 2], v[b, :, head // 2])]
            np.testing.assert_allclose(got[b, :, head], by_hand(*one, causal, numbers), rtol=1e-5, atol=1e-6)


# proves F30, F32
@pytest.mark.quick("1-zigzag-True", "3-zigzag-True")  # testing/exact/test_kernels.py proves it without a mask
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_ring_attention_is_attention(n, order, causal):
    args = drawn(2, 4 * n, 4, 2, 8, packed=n % 2 == 0)
    assert_equal(over_ring(order, causal=causal), reference(causal=causal), mesh_of(c=n), P(None, "c"), args)


@pytest.mark.deep  # every operation is compiled separately
def test_ring_attention_runs_eagerly():
    spec = P(None, "c")
    q, k, v, _ = drawn(1, 4, 1, 1, 2)
    attend = lambda *x: sk.layers.ring_attention(*x, "c", order="zigzag", causal=False)  # noqa: E731
    eagerly = jax.shard_map(attend, mesh=mesh_of(c=2), in_specs=spec, out_specs=spec)
    np.testing.assert_allclose(eagerly(q, k, v), reference(causal=False)(q, k, v), rtol=1e-5, atol=1e-6)


FACTORS = {
    "sizes": [
        {name: sizes[name] for name in order}
        for sizes in [{"c": c, "data": d} for c, d in ((2, 3), (4, 2), (1, 2), (2, 1), (3, 2), (5, 1), (4, 1))]
        for order in (("c", "data"), ("data", "c"))
    ],
    "order": ["contiguous", "zigzag"],
    "causal": [True, False],
    "block": [None, 1, 2],
    "scale": [None, 0.3],
    "packed": [True, False],
    "heads": [(4, 2), (1, 1), (2, 1), (3, 3)],
    "dtype": ["float32", "bfloat16"],
}


# proves F30, F32
@pytest.mark.quick("0", "1", "8", "10")
@covered(
    covering(FACTORS | {"sizes": FACTORS["sizes"][:3], "heads": FACTORS["heads"][:2]}),
    **{name: st.sampled_from(values) for name, values in FACTORS.items()},
)
def test_ring_attention_on_any_mesh(sizes, order, causal, block, scale, packed, heads, dtype):
    options = {"causal": causal, "scale": scale}
    shape = (sizes["data"], sizes["c"] * (2 if block is None else 4), *heads, 3)
    assert_equal(
        over_ring(order, block=block, **options),
        reference(**options),
        mesh_of(**sizes),
        P("data", "c"),
        drawn(*shape, packed=packed, dtype=dtype),
        relative=1e-5 if dtype == "float32" else 0.03,
    )


# proves F30
def test_a_ring_over_two_axes_beside_a_third():
    mesh, spec = mesh_of(d=2, c=2, e=2), P("d", ("e", "c"))
    assert_equal(over_ring("zigzag", axis=("e", "c")), reference(), mesh, spec, drawn(2, 16, 2, 1, 4, packed=True))


# proves F31
@pytest.mark.quick("2-3-zigzag")
@pytest.mark.parametrize(
    "ring, ulysses, order",
    [*((None, n, "contiguous") for n in (1, 3, 4)), (2, 2, "contiguous"), *((2, n, "zigzag") for n in (1, 3, 4))],
)
def test_ulysses_attention_alone_and_with_a_ring(ring, ulysses, order):
    kv_heads = {1: 2, 2: 4, 3: 2, 4: 6}[ulysses]  # as many as devices, more, fewer, and no multiple either way
    args = drawn(2, 4 * (ring or 1) * ulysses, 12, kv_heads, 4, packed=ulysses % 2 == 0)
    axes = {} if ring is None else {"ring": "r"}
    kernel = natural(partial(sk.layers.ulysses_attention, axis="u", block=2, **axes), order, "r", "u")
    assert_equal(kernel, reference(), mesh_of(r=ring or 1, u=ulysses), P(None, ("r", "u")), args)


def test_under_vmap():
    q, k, v, segments = drawn(2, 8, 2, 1, 4, packed=True)
    heads = lambda k: np.repeat(k, 2, axis=2)  # noqa: E731
    wanted = jax.jit(reference())(q, k, v, segments)
    for kernel in (
        over_ring(),
        over_ring("zigzag"),
        lambda *x: sk.layers.ulysses_attention(*x[:3], "c", segments_bt=x[3]),
    ):
        mapped = under_vmap(kernel, {"c": 2}, (P(None, "c"),) * 4, P(None, "c"))
        got = jax.jit(mapped)(q, heads(k), heads(v), segments)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


# proves F32: positions and loss under the permutation
@pytest.mark.parametrize(("sizes", "ulysses"), [({"c": n}, None) for n in SIZES] + [({"c": 2, "u": 3}, "u")])
def test_zigzag_and_positions_agree(sizes, ulysses):
    mesh, axes = mesh_of(**sizes), tuple(sizes)
    n = math.prod(sizes.values())
    on = lambda kernel, *args: jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=P(axes), out_specs=P(axes)))(*args)  # noqa: E731
    natural_order = np.arange(4 * n, dtype=np.int32)
    np.testing.assert_array_equal(on(lambda x: x * 0 + sk.layers.positions(4, axes), natural_order), natural_order)

    def permuted(x):
        standing = sk.layers.positions(4, "c", order="zigzag", ulysses=ulysses)
        moved = sk.layers.zigzag(x, "c", ulysses=ulysses, dim=0)
        return moved, standing, sk.layers.zigzag(moved, "c", ulysses=ulysses, dim=-1, inverse=True)

    moved, standing, back = on(permuted, natural_order)
    np.testing.assert_array_equal(moved, standing)
    np.testing.assert_array_equal(back, natural_order)
    if ulysses is None:
        chunks = np.split(natural_order, 2 * n)
        np.testing.assert_array_equal(
            moved, np.concatenate([[chunks[i], chunks[-1 - i]] for i in range(n)]).reshape(-1)
        )
    else:  # the tokens of a device of the ring, over all its devices of the other axis, are its two chunks
        chunks = np.split(natural_order, 4)
        np.testing.assert_array_equal(moved, np.concatenate([chunks[i] for i in (0, 3, 1, 2)]))


@pytest.mark.check
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("sizes", "several"), [({"c": 1, "u": 2}, "u"), ({"c": 2, "u": 1}, "c")], ids="uc")
def test_positions_do_not_vary_over_an_axis_of_one_device(sizes, several, order):
    """A plan's batch does not: positions that did made the model's totals differ from its weights."""
    kernel = lambda: sk.layers.positions(4, "c", order=order, ulysses="u")  # noqa: E731
    mapped = jax.shard_map(kernel, mesh=mesh_of(**sizes), in_specs=(), out_specs=P(several))
    assert jax.eval_shape(mapped).shape == (8,)


def test_zigzag_takes_batches():
    batch = {"tokens": np.arange(16).reshape(2, 8), "weight": np.arange(2), "x": np.arange(32.0).reshape(2, 8, 2)}
    specs = {"tokens": P(None, "c"), "weight": P(), "x": P(None, "c")}
    out = jax.jit(
        jax.shard_map(lambda b: sk.layers.zigzag(b, "c"), mesh=mesh_of(c=2), in_specs=(specs,), out_specs=specs)
    )(batch)
    order = [0, 1, 6, 7, 2, 3, 4, 5]
    np.testing.assert_array_equal(out["weight"], batch["weight"])
    np.testing.assert_array_equal(out["tokens"], batch["tokens"][:, order])
    np.testing.assert_array_equal(out["x"], batch["x"][:, order])


def tiny(attend, tokens=16):
    """One attention layer, its parameters and a batch."""
    (x, *_), segments = drawn(4, tokens, 2, 2, 4), np.zeros((4, tokens), np.int32)

    def loss(params, batch, keys):
        qkv = [batch["x"] * params[name] for name in "qkv"]
        return sk.Mean.of(attend(*qkv, batch["segments"]))

    return sk.value_and_grad(loss), dict.fromkeys("qkv", np.ones((1, 1, 1, 4), "f")), {"x": x, "segments": segments}


@pytest.mark.parametrize(
    "attend",
    [over_ring("zigzag", axis="c"), lambda q, k, v, s: sk.layers.ulysses_attention(q, k, v, "c", segments_bt=s)],
    ids=["zigzag", "ulysses"],
)
def test_an_axis_of_one_device_sends_nothing(attend):
    grad_fn, params, batch = tiny(attend)
    plan = sk.chain(sk.dp("data"), sk.cp("c"))
    init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh_of(data=2, c=1), plan=plan)
    found = census(step, init.abstract(params), batch)
    assert found.count(axis="data") and not found.select(axis="c")


def test_cp_splits_tokens_and_no_leaf():
    plan, mesh, params = sk.cp("c"), mesh_of(c=4), {"embed": jnp.zeros((11, 8)), "q": jnp.zeros((8, 4, 4))}
    assert str(plan) == "cp('c')" and plan.batch_spec(mesh) == P(None, "c")
    assert all(each.rest == each.seen == each.update == P() for each in plan.layouts(params, mesh).values())


def step_census(n, H, G, K, b, t, dtype, packed=False, kernel=None, mesh=None):
    """The census of the kernel alone and of it with its backward pass."""
    mesh, kernel = mesh or sk.abstract_mesh(c=n), kernel or over_ring()
    args = [jax.ShapeDtypeStruct((b, n * t, heads, K), dtype) for heads in (H, G, G)]
    args += [jax.ShapeDtypeStruct((b, n * t), np.int32)] if packed else []
    spec = P(None, tuple(mesh.axis_names))
    mapped = jax.shard_map(kernel, mesh=mesh, in_specs=spec, out_specs=spec)

    def both(q, k, v, *segments):
        y, backward = jax.vjp(lambda *x: mapped(*x, *segments), q, k, v)
        return backward(y)

    return census(mapped, *args), census(both, *args)


# proves F30, F76: the published volumes
@pytest.mark.quick("1-bfloat16-contiguous", "3-bfloat16-contiguous", "3-float32-zigzag", "64-float32-contiguous")
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n", [1, 2, 3, 64])
def test_what_a_ring_sends(n, dtype, order):
    b, t, H, G, K = 2, 4, 6, 3, 5
    kernel = lambda q, k, v: sk.layers.ring_attention(q, k, v, "c", order=order)  # noqa: E731
    forward, both = step_census(n, H, G, K, b, t, dtype, kernel=kernel)
    width = jnp.dtype(dtype).itemsize
    volume = cost.context_volume(
        batch=b, sequence=n * t, hidden=H * K, kv_hidden=G * K, ways=n, value_bytes=width, gradient_bytes=4
    )
    assert float(forward.sent()) == volume.forward
    assert float(both.sent()) == volume.total
    assert {row.kind for row in both.rows} <= {"ppermute"}
    assert forward.count() == 2 * (n - 1) and both.count() == (2 * (n - 1) + 2 * (n - 1) + 2 * n if n > 1 else 0)


def test_what_segments_and_the_permutation_send():
    n, b, t = 4, 2, 6
    plain, packed = (step_census(n, 2, 1, 4, b, t, "float32", packed=each)[1] for each in (False, True))
    assert packed.sent() - plain.sent() == 2 * (n - 1) * b * t * 4
    for n, share, messages in ((1, 0, 0), (2, 1 / 2, 1), (3, 1, 2), (8, 1, 2)):
        spec = P(None, "c")
        move = jax.shard_map(
            lambda x: sk.layers.zigzag(x, "c"), mesh=sk.abstract_mesh(c=n), in_specs=spec, out_specs=spec
        )
        found = census(move, jax.ShapeDtypeStruct((b, n * t), np.int32))
        assert float(found.sent()) == share * b * t * 4
        assert found.count() == messages


# proves F31, F76: the published volumes
@pytest.mark.quick("1-bfloat16", "3-float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n", [1, 3, 4])
def test_what_ulysses_sends(n, dtype):
    b, t, H, G, K = 2, 4, 12, 6, 5
    kernel = lambda q, k, v, *s: sk.layers.ulysses_attention(q, k, v, "c", segments_bt=s[0] if s else None)  # noqa: E731
    forward, both = step_census(n, H, G, K, b, t, dtype, kernel=kernel)
    options = {"batch": b, "sequence": n * t, "hidden": H * K, "kv_hidden": math.lcm(G, n) * K, "ways": n}
    volume = cost.context_volume(method="ulysses", value_bytes=jnp.dtype(dtype).itemsize, **options)
    assert float(forward.sent()) == volume.forward and float(both.sent()) == volume.total
    assert {row.kind for row in both.rows} <= {"all_to_all"}
    packed, _ = step_census(n, H, G, K, b, t, dtype, packed=True, kernel=kernel)
    assert packed.sent() - forward.sent() == (n - 1) * b * t * 4


def test_what_both_send():
    b, t, H, K, ring, ulysses = 2, 4, 8, 4, 3, 4
    mesh = sk.abstract_mesh(r=ring, u=ulysses)
    kernel = lambda q, k, v: sk.layers.ulysses_attention(q, k, v, "u", ring="r", order="zigzag")  # noqa: E731
    _, both = step_census(ring * ulysses, H, H, K, b, t, "float32", kernel=kernel, mesh=mesh)
    sizes = {"batch": b, "value_bytes": 4}
    around = cost.context_volume(**sizes, sequence=ring * ulysses * t, hidden=H // ulysses * K, ways=ring)
    across = cost.context_volume(**sizes, sequence=ulysses * t, hidden=H * K, ways=ulysses, method="ulysses")
    assert float(both.sent(axis="r")) == around.total and float(both.sent(axis="u")) == across.total


def dot_flops(jaxpr, choose=max):
    """FLOPs of the matmuls, loops times their length, of a branch the one that `choose` prefers; and their dtypes."""
    total, dtypes = 0, set()
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "dot_general":
            ((left, _), _) = equation.params["dimension_numbers"]
            contracted = math.prod(equation.invars[0].aval.shape[d] for d in left)
            total += 2 * equation.outvars[0].aval.size * contracted
            dtypes.add(str(equation.outvars[0].aval.dtype))
        inner = [dot_flops(sub, choose) for _, sub in compat.inner_jaxprs(equation)]
        if inner:
            times = equation.params["length"] if name == "scan" else 1
            total += times * (choose if name == "cond" else sum)(flops for flops, _ in inner)
            dtypes |= set().union(*(each for _, each in inner))
    return total, dtypes


def flops_of(n, order, choose=max, dtype="float32", block=None, t=8):
    b, H, G, K = 1, 4, 2, 4
    kernel = lambda q, k, v: sk.layers.ring_attention(q, k, v, "c", order=order, block=block)  # noqa: E731
    mapped = jax.shard_map(kernel, mesh=sk.abstract_mesh(c=n), in_specs=P(None, "c"), out_specs=P(None, "c"))
    args = [jax.ShapeDtypeStruct((b, n * t, heads, K), dtype) for heads in (H, G, G)]
    backward = lambda *x: jax.vjp(mapped, *x)[1](jnp.zeros(args[0].shape, dtype))  # noqa: E731
    one = 2 * b * H * (t // 2) ** 2 * K  # a matmul of a half-chunk pair
    forward, dtypes = dot_flops(jax.make_jaxpr(mapped)(*args).jaxpr, choose)
    both, more = dot_flops(jax.make_jaxpr(backward)(*args).jaxpr, choose)
    return forward / one, both / one, dtypes | more


# proves F32: every device does the same, and it is half of what the last one does in contiguous order
@pytest.mark.quick("3")
@pytest.mark.parametrize("n", [1, 3, 64])
def test_half_chunk_pairs(n):
    pairs = 2 * n + 1
    assert flops_of(n, "zigzag")[:2] == (2 * pairs, 7 * pairs)  # two matmuls a pair forward, five backward
    assert flops_of(n, "zigzag", min)[:2] == (2 * pairs, 7 * pairs)  # there is no branch
    assert flops_of(n, "contiguous")[:2] == (2 * 4 * n, 7 * 4 * n)  # the last device
    assert flops_of(n, "contiguous", min)[:2] == (2 * 4, 7 * 4)  # the first


def test_tiles_above_the_diagonal_are_left_out_and_bfloat16_is_summed_in_float32():
    # four tiles in a half-chunk pair, of which a diagonal one needs three
    assert flops_of(4, "zigzag", block=2)[0] == 2 * (2 * 3 / 4 + 1 + 6)
    assert flops_of(1, "contiguous", block=2)[0] == 2 * 4 * 10 / 16
    assert flops_of(4, "zigzag", dtype="bfloat16")[2] == {"float32"}
    assert flops_of(4, "contiguous", dtype="bfloat16")[2] == {"float32"}


def test_bfloat16_gradients_on_one_device():  # proves F32
    """Two matmuls forward, four backward, all of bfloat16 operands; the softmax between them is float32."""
    x = drawn(2, 64, 4, 2, 16, dtype=jnp.bfloat16)[:3]
    back = lambda *x: jax.vjp(sk.layers.dot_attention, *x)[1](jnp.ones_like(x[0]))  # noqa: E731
    dots = [s.equation for s in walk(jax.make_jaxpr(back)(*x).jaxpr) if s.name == "dot_general"]
    assert len(dots) == 6
    assert {v.aval.dtype.name for e in dots for v in e.invars} == {"bfloat16"}
    run = jax.jit(back)
    exact = run(*(each.astype(jnp.float32) for each in x))
    for found, expected in zip(run(*x), exact, strict=True):
        np.testing.assert_allclose(found.astype(jnp.float32), expected, atol=2**-7 * float(jnp.abs(expected).max()))


# proves F32: what is skipped is never computed, or NaN would spread
@pytest.mark.quick("zigzag")
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.optimized
def test_skipped_blocks_are_not_computed(order):
    q, k, v, _ = drawn(1, 32, 2, 2, 4)
    v[:, 24:] = np.nan
    mapped = jax.jit(jax.shard_map(over_ring(order), mesh=mesh_of(c=4), in_specs=P(None, "c"), out_specs=P(None, "c")))
    finite = np.isfinite(mapped(q, k, v)).all(axis=(0, 2, 3))
    np.testing.assert_array_equal(finite, np.arange(32) < 24)
    assert ("conditional" in mapped.lower(q, k, v).compile().as_text()) == (order == "contiguous")


def test_the_backward_pass_keeps_no_scores():
    kept = []

    def kernel(q, k, v):
        y, backward = jax.vjp(lambda *x: sk.layers.ring_attention(*x, "c", order="zigzag", block=8), q, k, v)
        kept.extend(x.size for x in jax.tree.leaves(backward))
        return y

    b, t, H, G, K = 1, 64, 4, 2, 8
    args = [jax.ShapeDtypeStruct((b, 4 * t, heads, K), np.float32) for heads in (H, G, G)]
    spec = P(None, "c")
    jax.eval_shape(jax.shard_map(kernel, mesh=sk.abstract_mesh(c=4), in_specs=spec, out_specs=spec), *args)
    assert sum(kept) == b * t * (2 * H * K + 2 * G * K + H)  # queries and result, keys and values, denominators


def tokens(t=4, H=2, G=2, b=1, K=2):
    return jnp.zeros((b, t, H, K)), jnp.zeros((b, t, G, K)), jnp.zeros((b, t, G, K))


EVEN = "zigzag order must have an even number of tokens on each device; got"
PAD = "Pad the sequence to a multiple of twice the devices, or use contiguous order."
SHARDED = {
    "ring_attention: order must be 'contiguous' or 'zigzag'; got 'striped'. "
    "Pass for example order='contiguous'.": lambda: sk.layers.ring_attention(*tokens(), "c", order="striped"),
    f"ring_attention: {EVEN} 5. {PAD}": lambda: sk.layers.ring_attention(*tokens(t=5), "c", order="zigzag"),
    "ring_attention: block must divide the tokens of a chunk; got block 2 for chunks of 3 tokens. "
    "Choose a divisor, or leave it out.": lambda: sk.layers.ring_attention(*tokens(t=6), "c", order="zigzag", block=2),
    "ring_attention: kv heads must divide heads; got 3 and 4. Change one of them.": lambda: sk.layers.ring_attention(
        *tokens(H=4, G=3), "c"
    ),
    "ring_attention: keys and values must be [b, t, G, K] for queries [b, t, H, K]; got queries (1, 4, 2, 2), "
    "keys (1, 4, 2, 2), values (1, 3, 2, 2). Give all three the same b, t and K.": lambda: sk.layers.ring_attention(
        *tokens()[:2], jnp.zeros((1, 3, 2, 2)), "c"
    ),
    "ring_attention: segments must hold one document number per token; got shape (4,) for 1 x 4 tokens. "
    "Pass them as [b, t].": lambda: sk.layers.ring_attention(*tokens(), "c", segments_bt=jnp.zeros((4,), jnp.int32)),
    "ulysses_attention: heads must be divisible by axis 'u'; got 3 heads over 2 devices. "
    "Use fewer devices, or ring_attention.": lambda: sk.layers.ulysses_attention(*tokens(H=3, G=3), "u"),
    "ulysses_attention: order 'zigzag' must go with a ring; got ring=None. Leave it out: every device attends over all "
    "tokens, and the work is balanced.": lambda: sk.layers.ulysses_attention(*tokens(), "u", order="zigzag"),
    "ulysses_attention: axis 'u' is used twice in ('u', 'u'). Name each axis once.": lambda: (
        sk.layers.ulysses_attention(*tokens(), "u", ring="u")
    ),
    "ulysses_attention: the ring's axis 'u' must come before axis 'c' in the mesh; its axes are 'c', 'u'. "
    "Pass the ring's axis first to make_mesh.": lambda: sk.layers.ulysses_attention(*tokens(), "c", ring="u"),
    f"zigzag: {EVEN} 3. {PAD}": lambda: sk.layers.zigzag(jnp.zeros((1, 3)), "c"),
    f"positions: {EVEN} 3. {PAD}": lambda: sk.layers.positions(3, "c", order="zigzag"),
}


@pytest.mark.parametrize("message, call", SHARDED.items())
def test_bad_input(call, message):
    with value_error(message):
        jax.eval_shape(jax.shard_map(call, mesh=mesh_of(c=2, u=2), in_specs=(), out_specs=P("c")))


@pytest.mark.check
def test_every_axis_of_the_ring_comes_first():
    """Not only one of them: in between, the positions would be of another order than the plan's."""
    ring = partial(sk.layers.positions, 4, ("a", "c"), ulysses="b")
    mapped = jax.shard_map(ring, mesh=sk.abstract_mesh(a=2, b=2, c=2), in_specs=(), out_specs=P(("a", "b", "c")))
    with value_error(
        "positions: the ring's axes 'a', 'c' must come before axis 'b' in the mesh; its axes are 'a', 'b', 'c'. "
        "Pass the ring's axis first to make_mesh."
    ):
        jax.eval_shape(mapped)


def test_a_sequence_that_does_not_divide():
    grad_fn, params, batch = tiny(over_ring(), tokens=6)
    init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh_of(c=4), plan=sk.cp("c"))
    with value_error(
        "make_train_step: batch dim 1 must be divisible by axis 'c'; leaf segments has size 6 over 4 devices. "
        "Choose another size, or pad with examples of weight 0."
    ):
        step(init(params, jax.random.key(0)), batch)


ORDERED = {
    "positions": lambda axes, x: sk.layers.positions(x.shape[1], axes),
    "zigzag": lambda axes, x: sk.layers.zigzag(x, axes),
    "ring_attention": lambda axes, x: sk.layers.ring_attention(x, x, x, axes),
    "ulysses_attention": lambda axes, x: sk.layers.ulysses_attention(x, x, x, axes),
}


# The same axes in another order give each device another device's place in the sequence.
@pytest.mark.check
@pytest.mark.parametrize("name", ORDERED)
@pytest.mark.parametrize("given", [("a", "b"), ("b", "a")])
@pytest.mark.parametrize("plan", ["mesh", ("a", "b"), ("b", "a")])
def test_the_axes_of_a_sequence_stand_in_the_order_of_the_plan(name, given, plan):
    mesh = sk.make_mesh(data=2, a=2, b=2)
    order = ("a", "b") if plan == "mesh" else plan
    parts = (sk.cp("b"), sk.cp("a")) if plan == "mesh" else (sk.cp(plan),)

    def loss_fn(p, x, keys):
        return sk.Mean.of(ORDERED[name](given, x).astype(jnp.float32))

    evaluate = sk.make_eval_step(loss_fn, mesh=mesh, plan=sk.chain(sk.dp("data"), *parts))
    run = lambda: jax.eval_shape(evaluate, {"w": np.ones(1, np.float32)}, np.ones((2, 16, 4, 2), np.float32))  # noqa: E731
    if given == order:
        run()
        return
    with value_error(
        f"{name}: the axes must be in the order in which the plan splits the tokens, {order[0]!r}, {order[1]!r}; "
        f"got {given[0]!r}, {given[1]!r}. Name them in that order."
    ):
        run()


@pytest.mark.check
def test_a_ring_inside_a_heads_axis_stands_in_the_order_of_the_plan():
    mesh = sk.make_mesh(jax.devices()[:8], r=2, s=2, u=2)
    loss_fn = lambda p, x, keys: sk.Mean.of(sk.layers.ulysses_attention(x, x, x, "u", ring=("r", "s")))  # noqa: E731
    params, x = {"w": np.ones(1, np.float32)}, np.ones((2, 16, 4, 2), np.float32)
    jax.eval_shape(sk.make_eval_step(loss_fn, mesh=mesh, plan=sk.cp(("r", "s", "u"))), params, x)
    with value_error(
        "ulysses_attention: the axes must be in the order in which the plan splits the tokens, 's', 'r', 'u'; got "
        "'r', 's', 'u'. Name them in that order."
    ):
        jax.eval_shape(sk.make_eval_step(loss_fn, mesh=mesh, plan=sk.cp(("s", "r", "u"))), params, x)
