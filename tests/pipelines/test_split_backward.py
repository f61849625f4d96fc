"""A backward pass in two halves: the same numbers, no matmul and no collective twice, few residuals."""

import inspect
from functools import partial
from itertools import compress, pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit._jax import compat
from shardkit._jax.jaxprs import walk
from shardkit.layers.linear import column_linear, row_linear
from shardkit.models import blocks, transformer
from shardkit.on_device.handles import Handle
from shardkit.pipelines.split_backward import TwoHalves
from shardkit.plans.splits import Cut
from shardkit.remat.recompute import POLICIES, LayerPasses, Traced, WantedGradients, is_differentiable
from support.conformance import weights

LAYERS, TOKENS, WIDTH, HIDDEN = 3, 24, 32, 80
CONFIG = transformer.Config(layers=LAYERS, dim=WIDTH, heads=2, kv_heads=1, hidden=HIDDEN)
RNG = np.random.default_rng(0)


def draw(*shape):
    return (0.3 * RNG.normal(size=shape)).astype(np.float32)


GAIN = 1 + draw(WIDTH)


def mlp(w, x):
    h = jax.nn.gelu(jnp.einsum("btd,df->btf", x, w["up"]) + w["bias"][None, None])
    return x + jnp.einsum("btf,fd->btd", h, w["down"])


def normed(w, x):  # the layers share a gain that the function closes over
    return mlp(w, x * GAIN[None, None] / (1 + jnp.abs(x).max(-1, keepdims=True)))


def block(w, x):
    x = x + blocks.attention(w, blocks.rms_norm(x, w["attention_norm"]), CONFIG)
    return x + blocks.mlp(w, blocks.rms_norm(x, w["mlp_norm"]))


MLP = {"up": draw(LAYERS, WIDTH, HIDDEN), "bias": draw(LAYERS, HIDDEN), "down": draw(LAYERS, HIDDEN, WIDTH)}
LAYER_FNS = {
    "mlp": (mlp, lambda: MLP),
    "normed": (normed, lambda: MLP),
    "transformer": (block, lambda: weights(CONFIG, 0)["layers"]),
}
X = draw(2, TOKENS, WIDTH)


def unrolled(layer):
    def stage(w, x):
        for i in range(LAYERS):
            x = layer(jax.tree.map(lambda leaf: leaf[i], w), x)
        return x

    return stage


def scanned(layer, **options):
    return lambda w, x: sk.scan_layers(layer, w, x, **options)


STAGES = {
    "unrolled": unrolled,
    "scan": scanned,
    "remat full": lambda layer: scanned(layer, remat="full"),
    "remat dots": lambda layer: scanned(layer, remat="dots"),
    "microbatches": lambda layer: scanned(layer, microbatches=2),
}
WAYS = [*((how, None) for how in STAGES), ("unrolled", "full"), ("scan", "dots")]


def backward_of(stage, weights, x, policy=None):
    """A stage's backward pass as the pipeline calls it: a function of flat arrays, and what `TwoHalves` is to know."""
    leaves, inputs = jax.tree.leaves(weights), jax.tree.leaves(x)
    layer = Traced(stage, weights, x)
    examples = (leaves, layer.constants, inputs)
    wanted = WantedGradients(*([is_differentiable(leaf) for leaf in each] for each in examples))
    passes = LayerPasses(layer, policy, 1, examples, wanted)
    y, saved = jax.jit(passes.forward)(*examples)
    dy = [jnp.cos(leaf) for leaf in y if is_differentiable(leaf)]
    args = [leaves, layer.constants, saved, dy]
    cuts = np.cumsum([0, *map(len, args)])

    def fn(*flat):
        grads, dx = passes.backward(*(list(flat[a:b]) for a, b in pairwise(cuts)))
        return [*grads, *dx]

    grads, dx = jax.eval_shape(passes.backward, *args)
    first = [False] * len(grads) + [True] * len(dx)
    flat = [leaf for each in args for leaf in each]
    return fn, flat, first, [i < cuts[2] for i in range(len(flat))]


def halves_of(split, lasting):
    def second(args, residuals):
        return split.second(*compress(args, lasting), residuals=residuals)

    return split.first, second


def dots(fn, *args):
    return sum(site.times for site in walk(jax.make_jaxpr(fn)(*args).jaxpr) if site.name == "dot_general")


def compiled(fn, *args):
    """The results of a function, and its FLOPs as the compiler counts them."""
    program = jax.jit(fn).lower(*args).compile()
    return program(*args), program.cost_analysis()["flops"]


def check(fn, args, first, lasting):
    """The laws of every split; returns it, with the matmuls of the whole, the first and the second half."""
    split = TwoHalves(fn, args, first, lasting)
    one, two = halves_of(split, lasting)
    (found, residuals), ahead = compiled(one, *args)
    others, later = compiled(two, args, residuals)
    expected, all_of_it = compiled(fn, *args)
    assert ahead + later <= 1.02 * all_of_it
    given = {True: iter(found), False: iter(others)}
    for want, flag in zip(expected, first, strict=True):
        got = next(given[flag])
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(np.asarray(want)).max())

    assert [(k.shape, k.dtype) for k in split.residuals] == [(k.shape, k.dtype) for k in residuals]
    assert len({id(k) for k in one(*args)[1]}) == len(residuals)
    weights = {x.shape for x in compress(args, lasting)}
    assert not weights & {s for k in residuals for s in (k.shape, k.shape[1:], k.shape[::-1])}
    counts = [dots(fn, *args), dots(one, *args), dots(two, args, residuals)]
    assert counts[1] + counts[2] == counts[0]
    assert not split.uncut and split.why == ""
    return split, counts


# The plain layer in microbatches, and the others in a loop and recomputed.
@pytest.mark.quick("mlp-microbatches-None", "normed-unrolled-full", "transformer-scan-dots")
@pytest.mark.parametrize(("how", "policy"), WAYS)
@pytest.mark.parametrize("name", ["mlp", "normed", "transformer"])
@pytest.mark.optimized
def test_both_halves_are_the_whole_and_nothing_runs_twice(name, how, policy):  # proves F38
    layer, weights = LAYER_FNS[name]
    _, (whole, first, second) = check(*backward_of(STAGES[how](layer), weights(), X, policy and POLICIES[policy]))
    matmuls = {"mlp": 2, "normed": 2, "transformer": 7}[name] * LAYERS  # one for the gradient of each weight
    assert second == matmuls * (2 if how == "microbatches" else 1)
    if name != "transformer" and policy is None and how in ("unrolled", "scan"):
        assert first == second == whole / 2


def test_residuals_of_an_mlp_are_what_its_matmuls_multiply():  # proves F38
    one = jax.tree.map(lambda leaf: leaf[0], MLP)
    split, _ = check(*backward_of(mlp, one, X))
    wide, narrow = (2, TOKENS, HIDDEN), (2, TOKENS, WIDTH)
    assert sorted(k.shape for k in split.residuals) == [narrow, narrow, wide, wide]
    stacked, _ = check(*backward_of(scanned(mlp), MLP, X))
    assert sorted(k.shape for k in stacked.residuals) == sorted(
        (LAYERS, *shape) for shape in (narrow, narrow, wide, wide)
    )


def test_half_precision_integers_and_keys():  # proves F38, F45
    def layer(w, stream):
        x, keys, count = stream
        w, number = w
        h = jnp.einsum("btd,df->btf", x, w["up"]) + w["bias"][None, None]
        h = sk.dropout(jax.nn.gelu(h), sk.fold_keys(keys, number), 0.5)
        return x + jnp.einsum("btf,fd->btd", h, w["down"]) * (number + 1).astype(x.dtype), keys, count + number

    stack = (jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), MLP), jnp.arange(LAYERS))
    stream = (X.astype(jnp.bfloat16), jax.random.split(jax.random.key(1), 2), jnp.arange(2))
    fn, args, first, lasting = backward_of(scanned(layer), stack, stream)
    split = TwoHalves(fn, args, first, lasting)
    one, two = halves_of(split, lasting)
    found, residuals = jax.jit(one)(*args)
    *grads, dx = jax.jit(fn)(*args)
    for got, want in zip([*jax.jit(two)(args, residuals), *found], [*grads, dx], strict=True):
        assert got.dtype == want.dtype == jnp.bfloat16
        assert bool((got == want).all())


def test_carries_of_the_second_half_stay_carries():  # proves F38
    def fn(w, x, dy):
        def body(carry, x):
            count, dx, total = carry
            dx = jnp.tanh(dx @ w.T)
            return (count + 1, dx, total + count * (x.T @ dx)), None

        (_, dx, total), _ = jax.lax.scan(body, (jnp.float32(0), dy, jnp.zeros((8, 8))), x, reverse=True)
        return [dx, total]

    args = [draw(8, 8), draw(5, 4, 8), draw(4, 8)]
    split, counts = check(fn, args, [True, False], [True, False, False])
    assert counts == [10, 5, 5]
    assert sorted(k.shape for k in split.residuals) == [
        (5, 4, 8),
        (5, 4, 8),
    ]  # x, and dx of every round; no count, no total


def tensor_parallel(w, x, **how):
    def layer(w, x):
        h = jax.nn.gelu(column_linear(x, w["up"], "model", **how) + w["bias"][None, None])
        return x + row_linear(h, w["down"], "model", **how)

    return sk.scan_layers(layer, w, x)


def sharded(w, x, **how):
    def handle(leaf, dim):
        return Handle(leaf, None, (Cut(dim, ("data",)),), (), leaf.dtype, leaf.dtype, False)

    return sk.scan_layers(mlp, w | {"up": handle(w["up"], -2), "down": handle(w["down"], -1)}, x, **how)


TP = {"up": P(None, None, "model"), "bias": P(None, "model"), "down": P(None, "model")}
FSDP = {"up": P(None, "data"), "bias": P(), "down": P(None, None, "data")}
SHARDED = {  # stage, layouts of weights and activations, what a layer sends in the second half
    "tensor parallel": (tensor_parallel, TP, P("data"), {}),
    # For the gradient of the column-parallel weight, its input is gathered once more.
    "gathered": (partial(tensor_parallel, sequence=True, impl="gather"), TP, P("data", "model"), {"all_gather": 1}),
    "ring": (partial(tensor_parallel, sequence=True, impl="ring"), TP, P("data", "model"), {"ppermute": 1}),
    "fsdp": (sharded, FSDP, P("data"), {"reduce_scatter": 2}),
    "prefetched": (partial(sharded, prefetch=True), FSDP, P("data"), {"reduce_scatter": 2}),
}


@pytest.mark.quick("fsdp")
@pytest.mark.parametrize("name", SHARDED)
def test_collectives_of_weight_gradients_wait_for_the_second_half(name):  # proves F38, F24, F20
    stage, specs, x_spec, later = SHARDED[name]
    mesh = sk.make_mesh(jax.devices()[:4], data=2, model=2)

    def program(half):
        def kernel(w, x):
            fn, args, first, lasting = backward_of(stage, sk.vary(w, ("data",)), x)
            split = TwoHalves(fn, args, first, lasting)
            one, two = halves_of(split, lasting)
            assert not split.uncut
            if half == "whole":
                found = fn(*args)
            else:
                dx, residuals = one(*args)
                assert [compat.varying_axes(k) for k in residuals] == [compat.varying_axes(k) for k in split.residuals]
                found = dx if half == "first" else [*two(args, residuals), *dx]
            return [sk.vary(x, ("data", "model"))[None] for x in found]

        return jax.shard_map(kernel, mesh=mesh, in_specs=(specs, x_spec), out_specs=P(("data", "model")))

    whole, first, both = (program(half) for half in ("whole", "first", "both"))
    for got, want in zip(jax.jit(both)(MLP, X), jax.jit(whole)(MLP, X), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(np.asarray(want)).max())
    sent = [sk.census(fn, MLP, X) for fn in (whole, first, both)]
    assert sent[0].compare(sent[2]) == ""
    kinds = {row.kind for row in sent[0].rows}
    assert kinds >= later.keys()
    for kind in kinds:
        assert sent[0].count(kind=kind) - sent[1].count(kind=kind) == LAYERS * later.get(kind, 0)


def stubborn(w, x, dy):
    def body(state):
        i, dx, dw = state
        dx = dx @ w.T
        return i + 1, dx, dw + x.T @ dx

    _, dx, dw = jax.lax.while_loop(lambda state: state[0] < 3, body, (0, dy, jnp.zeros_like(w)))
    return [dx, dw.T]


def test_what_cannot_be_cut_is_named():  # proves F38
    args = [jnp.asarray(draw(*shape)) for shape in ((8, 8), (4, 8), (4, 8))]  # run by jax alone, for the same bits
    split = TwoHalves(stubborn, args, [True, False], [True, False, False])
    line = inspect.getsourcelines(stubborn)[1] + 6
    assert split.uncut
    assert split.why == (
        "TwoHalves: the second results must have equations of their own, which the first results do not need; got "
        f"`while` at test_split_backward.py:{line} (stubborn), which both need. Split it, or run the function unsplit."
    )
    first, residuals = split.first(*args)
    for got, want in zip([*first, *split.second(args[0], residuals=residuals)], stubborn(*args), strict=True):
        np.testing.assert_array_equal(got, want)

    inside = TwoHalves(
        lambda w, xs, dy: list(jax.lax.scan(lambda dy, x: tuple(stubborn(w, x, dy)), dy, xs)),
        [args[0], draw(3, 4, 8), args[2]],
        [True, False],
        [True, False, False],
    )
    assert inside.uncut and inside.why == split.why


def test_without_gradients_of_weights_nothing_is_left():  # proves F38
    split = TwoHalves(
        lambda w, dy: [dy @ w.T, jnp.zeros_like(w)], [draw(8, 8), draw(4, 8)], [True, False], [True, False]
    )
    assert split.uncut and split.residuals == []
    assert split.why == (
        "TwoHalves: the second results must have equations of their own, which the first results do not need; got none "
        "that compute anything. Run the function unsplit."
    )


def test_what_acts_on_the_host_runs_once_in_the_first_half():  # proves F38
    """Nothing needs its results: it has none."""
    seen = []

    def fn(w, dy):
        jax.debug.callback(lambda: seen.append("called"))
        return [dy @ w.T, dy.T @ dy]

    args = [draw(8, 8), draw(4, 8)]
    split = TwoHalves(fn, args, [True, False], [True, False])
    for half, calls in ((lambda: split.first(*args)[1], 1), (lambda: split.second(args[0], residuals=residuals), 1)):
        residuals = jax.block_until_ready(jax.jit(half)())
        jax.effects_barrier()
        assert len(seen) == calls
