"""Models that are no transformer: counts against hands, the compiler and the census; layouts against one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardkit as sk
from shardkit import cost, planner
from shardkit.analysis.jaxpr.counts import flops
from shardkit.models import transformer
from support.refusals import value_error

D = 64


def loss_fn(params, batch, keys):
    """A convolutional network with a stack of layers."""
    numbers = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(batch["x"], params["stem"], (2, 2), "SAME", dimension_numbers=numbers)
    x = jnp.tanh(x).reshape(len(x), -1)
    x = sk.scan_layers(lambda w, x: x + jnp.tanh(x @ w["w"] + w["b"][None]), params["layers"], x)
    return sk.Mean.of(optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], batch["y"]))


def init(key):
    a, b, c = (0.1 * jax.random.normal(each, (3, D, D)) for each in jax.random.split(key, 3))
    return {"stem": a[:, :3, :8].reshape(3, 3, 2, 4), "layers": {"w": b, "b": b[0, :3]}, "head": c[0, :, :32]}


RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=(16, 8, 8, 2)).astype("f"), "y": RNG.integers(0, 32, 16)}
MOMENTS = optax.GradientTransformation(lambda params: (params, params), lambda grads, state, params: (grads, state))
PARAMS = jax.eval_shape(init, jax.random.key(0))


def model(**options):
    return planner.counted(loss_fn, PARAMS, BATCH, **options)


@pytest.mark.check
def test_counts_and_kept_bytes_by_hand():
    found = model()
    assert found.leaves == {"head": D * 32, "layers.b": 3 * D, "layers.w": 3 * D * D, "stem": 72} and found.layers == 3
    # of 12 x 12 pairs of output rows and taps, 11 x 11 meet the input: SAME pads at the end
    stem, dense = 2 * 11 * 11 * 2 * 4, 2 * (3 * D * D + D * 32)
    assert found.counts.flops == stem + dense
    assert found.counts.step_flops == 2 * stem + 3 * dense  # the images have no gradient

    def kept(fn):
        shapes = (jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((2, 8), jnp.float32))
        return planner.counted(lambda params, batch, keys: sk.Mean.of(fn(params, batch)), *shapes).counts[2:]

    assert kept(lambda w, x: jnp.sin(x @ w)) == (4 * 2, 0)  # the cosine, in bfloat16; no arguments
    assert kept(lambda w, x: jnp.sin(x.astype("f") @ w.astype("f"))) == (4 * 4 + 8 * 4, 0)  # x has no gradient
    # a copy that follows from the parameters alone is no example's
    assert kept(lambda w, x: jnp.sin(jnp.sin(x @ w).astype("f") @ w.T.astype("f")))[1] == 8 * 4 * 4
    assert kept(jax.checkpoint(lambda w, x: jnp.sin(x @ w))) == (0, 0)


@pytest.mark.check
def test_a_transformer_counts_as_its_sizes_do():
    config = transformer.Config(layers=2, dim=32, heads=4, kv_heads=2, vocabulary=64)
    params = jax.eval_shape(lambda: transformer.init(jax.random.key(0), config))
    batch = {name: jax.ShapeDtypeStruct((2, 16), jnp.int32) for name in ("tokens", "targets")}
    found = planner.counted(transformer.loss_fn(config), params, batch)
    sizes = planner.Model.of(config)
    assert (found.parameters(), found.counts.flops) == (sizes.parameters(), 16 * sizes.flops(16)) and found.layers == 2


@pytest.mark.check
def test_loops_branches_and_calls():
    w, x = np.ones((8, 8), "f"), np.ones((4, 8), "f")
    one = 2 * 4 * 8 * 8

    def count(fn, iterations=None):
        return flops(jax.make_jaxpr(fn)(w, x).jaxpr, iterations)

    def repeated(w, x):
        return jax.grad(lambda w: jax.checkpoint(lambda w: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w)))(w))(w)

    def loop(w, x):
        return jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ w, x)

    assert count(lambda w, x: jax.lax.fori_loop(0, 5, lambda i, x: x @ w, x)) == 5 * one
    assert count(lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x @ w @ w)) == 2 * one
    assert count(lambda w, x: jax.jit(jax.nn.relu)(jax.jit(lambda w: x @ w)(w))) == one
    assert count(lambda w, x: jax.lax.ragged_dot(x, w[None], np.array([4]))) == one
    assert count(repeated) == (2 + 2 + 3) * one  # forward, again, and backward
    assert count(loop, iterations=7) == 7 * one
    with value_error(
        "counted: a while loop with matmuls must say how often it runs; got iterations=None. Pass iterations=, or "
        "write the loop as a scan."
    ):
        count(loop)


def found_by_plan(**job):
    found = planner.search(model(**job), chip="v5e", chips=8, batch=16)
    assert [each.seconds for each in found] == sorted(each.seconds for each in found) and len(found) == 8
    return {each.layout.plan: each for each in found if each.layout.accumulate == 1}


@pytest.mark.check
def test_state_and_messages_are_those_of_the_step():
    for name, found in found_by_plan(compute=jnp.float32).items():
        mesh = sk.abstract_mesh(**found.layout.axes)
        made, step = sk.make_train_step(sk.value_and_grad(loss_fn), MOMENTS, mesh=mesh, plan=found.plan())
        state = made.abstract(PARAMS)
        held = sk.bytes_per_device((state.params, state.opt_state))
        split, whole = {"dp": (0, 0), "zero1": (8, 0), "fsdp": (12, 4), "layerwise": (12, 4)}[name], 12
        large, small = 3 * D * D + D * 32, 3 * D + 72
        assert held == (whole - split[0] * 7 / 8) * large + whole * small
        gradients, copies = 4 * (large + small), split[1] * large
        if name == "layerwise":
            gradients, copies = 4 * (3 * D * D / 8 + D * 32 + small), 4 * (2 * D * D + D * 32)
        assert found.state_bytes == held + gradients + copies + found.model.counts.copied_bytes
        sent = float(sk.census(step, state, BATCH).sent())
        own = (found.hidden_seconds + found.exposed_seconds) * cost.group_bandwidth("v5e", 2)
        assert own == pytest.approx(sent, abs=32), name  # the loss, its weight, and their like
        assert found.mfu == pytest.approx(16 * model().counts.step_flops / 8 / 197e12 / found.seconds)


# Catches a layout that is not what its name says: each of the four runs, and equals one device.
def test_every_layout_equals_one_device():
    params, grad_fn = init(jax.random.key(0)), sk.value_and_grad(loss_fn)
    found = found_by_plan()
    assert found.keys() == {"dp", "zero1", "fsdp", "layerwise"}
    for each in found.values():
        sk.testing.assert_same_training(
            grad_fn, grad_fn, optax.sgd(0.1), mesh=each.mesh(), plan=each.plan(), params=params, batches=[BATCH]
        )


@pytest.mark.check
def test_without_lazy_leaves_no_layers_and_what_is_refused():
    def whole(params, batch, keys):
        return sk.Mean.of(jnp.einsum("bd,lde->ble", batch, params["layers"]["w"]))

    found = planner.counted(whole, PARAMS, np.ones((2, D)))
    assert found.layers == 0
    place = {"chip": "v5e", "chips": 2, "batch": 4}
    slow = cost.Links(cost.Link(1.0, 1e9))
    assert planner.search(found, **place, links=slow)[0].seconds == pytest.approx(2, rel=1e-3)
    assert planner.table(planner.search(found, **place)).split()[:4] == ["plan", "data", "accumulate", "state"]
    with value_error(
        "planner: config, grad_fn and rules are of a transformer; got a counted model. Pass value_and_grad(loss_fn) "
        "and plan() to make_train_step."
    ):
        planner.search(found, **place)[0].grad_fn()
    with value_error(
        "counted: every array of the batch must have the same number of examples along dim 0; got 2, 4. Pass a batch "
        "as the loss takes it."
    ):
        planner.counted(whole, PARAMS, [np.ones((2, D)), np.ones(4)])
