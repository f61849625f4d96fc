"""A secondary shard: what crosses the slow links once, what is kept, and ZeRO++, which compresses it too."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import aot
from shardkit.cost import quantized_bytes
from shardkit.models import transformer
from support import conformance
from support.compilers import gpu, tpu
from support.refusals import refused
from support.training import lenient

DIM, LAYERS = 256, 4
LOW = sk.Precision(compute=jnp.bfloat16, reduce=jnp.bfloat16)
AXES = ("node", "gpu")
BY_LAYER = {"layerwise": ("layers",), "min_size": 1}
INT8, INT4 = sk.algorithms.compressed(jnp.int8), sk.algorithms.compressed(jnp.int4)
OPTIONS = {
    "two levels": {"gather": sk.algorithms.hierarchical("gpu"), "reduce": sk.algorithms.hierarchical("gpu")},
    "secondary": {"secondary": "gpu"},
    "ZeRO++": {"secondary": "gpu", "gather": INT8, "reduce": INT4},
}


def step_of(name, *, prefetch=False):
    """The training step of a stack over two nodes of four devices, and its arguments."""
    mesh = sk.abstract_mesh(node=2, gpu=4)

    def loss_fn(params, batch, keys):
        layer = lambda w, x: jnp.tanh(x @ w["up"]) @ w["down"]  # noqa: E731
        return jnp.mean(sk.scan_layers(layer, params["layers"], batch, prefetch=prefetch).astype(jnp.float32) ** 2)

    plan = sk.fsdp(AXES, **BY_LAYER, **OPTIONS[name])
    init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.sgd(0.1), mesh=mesh, plan=plan, precision=LOW)
    leaf = jax.ShapeDtypeStruct((LAYERS, DIM, DIM), jnp.float32)
    batch = jax.ShapeDtypeStruct((64, DIM), jnp.float32, sharding=NamedSharding(mesh, P(AXES)))
    return step, (init.abstract({"layers": {"up": leaf, "down": leaf}}), batch)


def crossing(found):
    """What weights and gradients send over the slow axis, in units of one pass over the weights in bfloat16."""
    unit = 2 * LAYERS * DIM * DIM * 2 // 4 // 2  # two leaves; 1/4 of them, of which the other node has half
    return sum(found.sent(kind=kind, axis="node") for kind in ("all_gather", "reduce_scatter", "all_to_all")) / unit


def scales():
    """Bytes of the scales, gathered and reduced, in the same units."""
    each = [quantized_bytes(DIM * DIM // 8, dtype) for dtype in ("int8", "int4")]
    bare = [DIM * DIM // 8, DIM * DIM // 16]
    return (sum(each) - sum(bare)) / (DIM * DIM * 2 // 8)


# proves N3: a gather more, one that is not kept, or a dequantization before the wire would change these figures
@tpu
@pytest.mark.deep  # as written: the closed forms above
@pytest.mark.parametrize("prefetch", [False, True])
def test_a_tpu_sends_a_quarter_of_the_bytes_over_the_slow_links(prefetch):
    found = aot.compile(*step_of("ZeRO++", prefetch=prefetch), topology="v5e:2x4")
    assert crossing(found) == crossing(found.census) == 0.75 + scales()


@gpu
@pytest.mark.parametrize("prefetch", [pytest.param(False, marks=pytest.mark.deep), True])
def test_a_gpu_sends_a_quarter_of_the_bytes_over_the_slow_links(prefetch):
    found = aot.compile(*step_of("ZeRO++", prefetch=prefetch), topology="h100:1x1x8")
    assert crossing(found) == crossing(found.census) == 0.75 + scales()


def test_two_levels_send_three_passes_and_a_secondary_shard_saves_one():
    """What ZeRO++ is compared with."""
    found = {}
    for name in OPTIONS:
        step, args = step_of(name)
        found[name] = crossing(sk.census(step, *args))
    assert found == {"two levels": 3, "secondary": 2, "ZeRO++": 0.75 + scales()}


@pytest.mark.check
@pytest.mark.parametrize(
    ("axis", "options", "got"),
    [
        (AXES, {"secondary": "gpu"}, "secondary='gpu' for the axes 'node', 'gpu' and layerwise=()"),
        (AXES, {**BY_LAYER, "secondary": AXES}, "secondary='node', 'gpu' for the axes 'node', 'gpu' and"),
        ("gpu", {**BY_LAYER, "secondary": "gpu"}, "secondary='gpu' for the axes 'gpu' and layerwise=('layers',)"),
        (AXES, {**BY_LAYER, "secondary": "tray"}, "secondary='tray' for the axes 'node', 'gpu' and"),
    ],
)
def test_a_secondary_shard_is_over_some_axes(axis, options, got):
    message = refused(lambda: sk.fsdp(axis, **options))
    assert got in message
    assert message.startswith("fsdp: secondary must be some of the axes, and not all, for the weights that layerwise")
    assert message.endswith("Pass for example fsdp(('node', 'gpu'), layerwise=('layers',), secondary='gpu').")


@pytest.mark.check
def test_an_algorithm_is_for_the_axes_beside_the_secondary_ones():
    """Its check once asked for all axes, and refused what runs; and spoke of axes that the user had passed."""
    assert refused(lambda: sk.fsdp(AXES, **BY_LAYER, secondary="gpu", gather=sk.algorithms.hierarchical("gpu"))) == (
        "fsdp: gather= must run over the axes beside secondary='gpu', which are 'node'; got hierarchical('gpu'). Pass "
        "an algorithm for these axes, or leave out secondary=."
    )
    whole = sk.algorithms.ring()._replace(reduce_scatter=None)
    assert "reduce= must be an Algorithm with reduce_scatter" in refused(
        lambda: sk.fsdp(AXES, **BY_LAYER, secondary="gpu", reduce=whole)
    )


@pytest.mark.parametrize("prefetch", [False, True])
def test_two_levels_beside_a_secondary_shard(prefetch):
    """Racks of nodes of GPUs: numbers and bytes, of two layers, the shortest stack in which one is gathered ahead.

    One level over racks and nodes would send twice as much over racks.
    """
    two_levels = sk.algorithms.hierarchical("node")
    options = {**BY_LAYER, "secondary": "gpu", "gather": two_levels, "reduce": two_levels}

    def loss_fn(params, batch, keys):
        layer = lambda w, x: jnp.tanh(x @ w)  # noqa: E731
        return jnp.mean(sk.scan_layers(layer, params["layers"], batch, prefetch=prefetch) ** 2)

    params = {"layers": jnp.linspace(-1, 1, 2 * 16 * 16).reshape(2, 16, 16)}
    batches = [jnp.sin(jnp.arange(8.0 * 16) + step).reshape(8, 16) for step in range(2)]
    grad_fn = sk.value_and_grad(loss_fn)
    plan = sk.fsdp(("rack", "node", "gpu"), **options)
    row = sk.testing.Row({"rack": 2, "node": 2, "gpu": 2}, plan, optimizer=optax.sgd(0.1))
    sk.testing.prove(grad_fn, grad_fn, rows=[row], params=params, batches=batches)
    init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=sk.make_mesh(**row.mesh), plan=plan)
    counted = sk.census(step, init(params, jax.random.key(0)), batches[0])
    half = 2 * 16 * 16 * 4 // 2  # of all weights, in float32: what a GPU keeps for the backward pass
    sent = {axis: counted.sent(axis=axis, kind="all_gather") for axis in row.mesh}
    # Over racks its eighth, over nodes what both racks have; over GPUs a half, in the forward and in the backward pass,
    # which begins with the last layer: prefetched, that is still there.
    again = half // 2 if prefetch else half
    assert sent == {"rack": half // 4, "node": half // 2, "gpu": half + again}


@pytest.mark.check
def test_the_description_tells_what_is_kept_and_by_what_it_is_sent():
    leaf = {"layers": jax.ShapeDtypeStruct((2, 64, 64), jnp.float32)}
    mesh = sk.abstract_mesh(node=2, gpu=4)
    text = sk.fsdp(AXES, **BY_LAYER, **OPTIONS["ZeRO++"]).describe(leaf, mesh)
    assert (
        "fsdp('node', 'gpu') splits dim 1, passed lazily to the loss, its parts over 'gpu' kept for the backward pass, "
        "gathered by compressed(int8), gradient reduced by compressed(int4)" in text
    )


@pytest.mark.deep
def test_the_transformer_reaches_the_same_loss():
    """Compression must cost next to nothing in the loss: that of one batch falls from 3.5 to 0.058, and to 0.062."""
    config, steps = replace(conformance.TRANSFORMER, dropout=0.0), 60
    mesh = sk.make_mesh(jax.devices()[:8], node=2, gpu=4)

    def final(options):
        grad_fn = sk.value_and_grad(transformer.loss_fn(config))
        plan = sk.fsdp(AXES, **BY_LAYER, **options)
        init, step = sk.make_train_step(grad_fn, lenient(optax.adam(1e-2)), mesh=mesh, plan=plan)
        state = init(lambda key: transformer.init(key, config), jax.random.key(0))
        batch, losses = conformance.text_batch(0), []
        for _ in range(steps):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        return losses

    exact, small = final({}), final(OPTIONS["ZeRO++"])
    assert exact[-1] < exact[0] / 30
    np.testing.assert_allclose(small, exact, atol=0.03 * exact[0])
