"""What is saved for the backward pass: what the policy names, and never a weight or what follows from weights alone."""

import math
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import shardkit as sk
from shardkit._jax import compat
from shardkit._jax.jaxprs import walk
from shardkit.models import transformer
from shardkit.models.transformer import Axes
from support.refusals import value_error

LAYERS, WIDTH, HIDDEN, LOCAL = 5, 16, 32, 6  # no weight has a dim of 6 examples, or of the 3 of a microbatch
POLICIES = {
    "default": (None, {"x", "matmul"}),
    "full": ("full", {"x"}),
    "dots": ("dots", {"x", "matmul"}),
    "dots_without_batch": ("dots_without_batch", {"x", "matmul"}),
    "names": (("hidden",), {"x", "hidden"}),
    "hostile": (jax.checkpoint_policies.everything_saveable, {"x", "matmul", "hidden"}),
    "callable": (jax.checkpoint_policies.save_any_names_but_these("x"), {"x", "hidden"}),
}


def layer(w, x):
    w = jax.tree.map(lambda leaf: 2 * leaf.astype(jnp.bfloat16), w)  # what follows from weights alone
    h = jnp.einsum("bd,df->bf", x, w["up"])
    h = checkpoint_name(jnp.tanh(h * w["gain"][None]), "hidden")
    return x + jnp.einsum("bf,fd->bd", h, w["down"])


def params():
    shapes = {"up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH), "gain": (LAYERS, HIDDEN)}
    rng = np.random.default_rng(0)
    return {"layers": {name: 0.1 * rng.normal(size=shape).astype("f") for name, shape in shapes.items()}}


def scan_gathered(layer_fn, stacked, x, **options):
    run = sk.gathered(layer_fn, **options)
    return jax.lax.scan(lambda x, w: (run(w, x), None), x, stacked)[0]


RUNS = {
    "gathered": scan_gathered,
    "scan_layers": sk.scan_layers,
    "prefetch": lambda *args, **options: sk.scan_layers(*args, prefetch=True, **options),
    "microbatches": lambda *args, **options: sk.scan_layers(*args, microbatches=2, **options),
    "both": lambda *args, **options: sk.scan_layers(*args, prefetch=True, microbatches=2, **options),
}


def built(run, **options):
    def loss(params, batch, keys):
        return sk.Mean.of(run(layer, params["layers"], batch, **options) ** 2)

    plan = sk.fsdp("d", min_size=1, layerwise=("layers",))
    mesh = sk.make_mesh(jax.devices()[:2], d=2)
    policy = sk.Precision(compute=jnp.bfloat16)
    init, step = sk.make_train_step(sk.value_and_grad(loss), optax.sgd(0.1), mesh=mesh, plan=plan, precision=policy)
    return step, init(params(), jax.random.key(0))


def stacked(jaxpr):
    """Shapes and dtypes of a layer's slice of what the scans over layers stack up."""
    for equation in (site.equation for site in walk(jaxpr) if site.name == "scan"):
        if equation.params["length"] in (LAYERS, LAYERS - 1):
            outs = equation.outvars[compat.scan_parts(equation)[1] :]
            yield from ((v.aval.shape[1:], v.aval.dtype.name) for v in outs)


@pytest.mark.quick(
    "gathered-dots_without_batch", "scan_layers-names", "microbatches-full", "prefetch-callable", "both-hostile"
)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("run", RUNS)
def test_no_policy_saves_weights_or_what_follows_from_them(run, policy):  # proves S66, F19, F20, F49
    remat, expected = POLICIES[policy]
    step, state = built(RUNS[run], remat=remat)
    parts = {tuple(x.shape[1:]) for x in jax.tree.leaves(jax.tree.map(lambda x: x.addressable_data(0), state.params))}
    found = set(stacked(step.trace(state, jnp.ones((2 * LOCAL, WIDTH))).jaxpr.jaxpr))
    saved = {shape for shape, dtype in found if (shape, dtype) not in {(part, "float32") for part in parts}}
    rows = (2, LOCAL // 2) if run in ("microbatches", "both") else (LOCAL,)
    assert saved == {(*rows, WIDTH), (*rows, HIDDEN)} if expected != {"x"} else {(*rows, WIDTH)}


def test_the_count_of_what_is_saved_is_the_policys():  # proves F49
    def count(remat):
        step, state = built(sk.scan_layers, remat=remat)
        return len([s for s, _ in stacked(step.trace(state, jnp.ones((2 * LOCAL, WIDTH))).jaxpr.jaxpr) if LOCAL in s])

    found = {name: count(remat) for name, (remat, _) in POLICIES.items()}
    assert (found["full"], found["names"], found["dots"]) == (1, 2, 2), found
    assert found["hostile"] > 3


# proves F20, F49: the bytes of a layer by hand, of 48 tokens with D = 64, 4 heads and 2 key/value heads of 16, F = 80
@pytest.mark.quick("axes3-48-288-0", "axes4-24-480-4")
@pytest.mark.parametrize(
    "axes, tokens, elements, wide",
    [
        (Axes(), 48, (2 * 64 + 64 + 2 * 32 + 64 + 2 * 80) + 4 * 24, 0),
        (Axes(model="m"), 48, (2 * 64 + 32 + 2 * 16 + 32 + 2 * 40) + 2 * 24, 0),
        (Axes(model="m", sequence=True, impl="gather"), 48, (2 * 32 + 32 + 2 * 16 + 32 + 2 * 40) + 2 * 24, 0),
        (Axes(model="m", sequence=True, impl="ring"), 48, (2 * 32 + 32 + 2 * 16 + 32 + 2 * 40) + 2 * 24, 0),
        (Axes(context="m"), 24, 2 * 64 + 64 + 2 * 32 + 64 + 2 * 80, 4),  # a row's denominator, and no weights
    ],
)
def test_matmuls_in_bfloat16_are_saved_in_bfloat16(axes, tokens, elements, wide):
    config = transformer.Config(vocabulary=64, layers=LAYERS, dim=64, heads=4, kv_heads=2, hidden=80, remat="dots")
    plans = [sk.fsdp("d", min_size=1, layerwise=("layers",))]
    plans += [sk.tp("m", transformer.tensor_rules(config, "m", 2), sequence=axes.sequence)] if axes.model else []
    plans += [sk.cp("m")] if axes.context else []
    mesh = sk.abstract_mesh(d=2, m=2 if len(plans) == 2 else 1)
    grad_fn = sk.value_and_grad(transformer.loss_fn(config, axes))
    init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh, plan=sk.chain(*plans), precision="bf16")
    state = init.abstract(lambda key: transformer.init(key, config))
    batch = dict.fromkeys(("tokens", "targets"), jax.ShapeDtypeStruct((4, 24), jnp.int32))
    found = {"bfloat16": 0, "float32": 0}
    for shape, dtype in stacked(step.trace(state, batch).jaxpr.jaxpr):
        if {12, 24} & set(shape):  # tokens: no weight has such a dim
            found[dtype] += math.prod(shape) * jnp.dtype(dtype).itemsize
    assert found == {"bfloat16": 2 * tokens * elements, "float32": 4 * tokens * wide}


@pytest.mark.quick("dots_without_batch-gathered")
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("remat", ["dots_without_batch", ("hidden",)])
def test_offloading_changes_no_number(run, remat):  # proves F49
    batch = np.random.default_rng(1).normal(size=(2 * LOCAL, WIDTH)).astype("f")
    found = []
    for offload in (False, True):
        step, state = built(RUNS[run], remat=remat, offload=offload)
        found.append(step(state, batch)[0].params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), *found)


@pytest.mark.parametrize("where", ["gathered", "scan_layers"])
def test_mistakes_are_refused(where):
    run = {"gathered": sk.gathered, "scan_layers": lambda fn, **kw: sk.scan_layers(fn, jnp.ones((2, 3)), 0.0, **kw)}
    with value_error(
        f"{where}: remat must be None, one of 'full', 'dots', 'dots_without_batch', a tuple of checkpoint names, or a "
        "policy of jax.checkpoint_policies; got ('a', 3). Pass for example remat='dots'."
    ):
        run[where](lambda w, x: x, remat=("a", 3))


@pytest.mark.skipif(find_spec("libtpu") is None, reason="the TPU compiler is not installed: shardkit[aot]")
@pytest.mark.parametrize("prefetch", [pytest.param(False, marks=pytest.mark.deep), True])
@pytest.mark.deep  # as traced: the tests above
def test_a_tpu_puts_what_is_offloaded_into_the_hosts_memory(prefetch):  # proves F49
    # proves F50 in part: activations, not parameters or the optimizer's state
    layers, tokens, width, hidden = 4, 1024, 256, 1024

    def loss(params, batch, keys):
        options = {"remat": ("hidden",), "offload": True, "prefetch": prefetch}
        return sk.Mean.of(sk.scan_layers(layer, params["layers"], batch, **options) ** 2)

    shapes = {"up": (layers, width, hidden), "down": (layers, hidden, width), "gain": (layers, hidden)}
    given = {"plan": sk.fsdp("d", layerwise=("layers",)), "precision": sk.Precision(compute=jnp.bfloat16)}
    init, step = sk.make_train_step(sk.value_and_grad(loss), optax.sgd(0.1), mesh=sk.abstract_mesh(d=4), **given)
    state = init.abstract({"layers": {k: jax.ShapeDtypeStruct(shape, jnp.float32) for k, shape in shapes.items()}})
    batch = jax.ShapeDtypeStruct((4 * tokens, width), jnp.bfloat16)
    report = sk.aot.compile(step, (state, batch), topology="v5e:2x2")
    assert report.memory.host_temp >= layers * tokens * hidden * 2
