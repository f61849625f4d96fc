"""Which dtype is used where, and the float16 loss scale that all devices change together."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardkit as sk
from shardkit.analysis import census
from shardkit.on_device.precision import BFLOAT16, FLOAT16, LossScale, next_loss_scale, precision_of
from shardkit.steps.state import check_trainable
from shardkit.steps.step import NonFiniteError
from support.refusals import type_error, value_error

KEY = jax.random.key(0)
BY_LAYER = {"min_size": 1, "layerwise": ("layers",)}
PLANS = {"dp": sk.dp("d"), "zero1": sk.zero1("d", min_size=1), "zero2": sk.zero2("d", min_size=1)}
PLANS |= {"zero2 layerwise": sk.zero2("d", **BY_LAYER), "fsdp": sk.fsdp("d", min_size=1)}
PLANS |= {"fsdp layerwise": sk.fsdp("d", **BY_LAYER)}


def recording(seen):
    def update(grads, state, params=None):
        seen["grads"] = grads["weight"].dtype
        seen["params"] = params["weight"].dtype
        return jax.tree.map(lambda g: -0.125 * g, grads), state

    return optax.GradientTransformation(lambda p: (), update)


def loss_seeing(seen):
    def loss_fn(params, batch, keys):
        seen.update({"weight": params["weight"].dtype, "x": batch["x"].dtype, "label": batch["label"].dtype})
        logits = (batch["x"] @ params["weight"]).astype(jnp.float32)
        return sk.Mean.of(optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]))

    return loss_fn


def params():
    return {"weight": jax.random.normal(KEY, (8, 4))}


def batch(scale=1.0):
    rng = np.random.default_rng(0)
    return {
        "x": (scale * rng.normal(size=(16, 8))).astype(np.float32),
        "label": rng.integers(0, 4, 16).astype(np.int32),
    }


# proves S88, F47
@pytest.mark.quick("None-float32-2", "fp16-float16-2", "precision4-bfloat16-2")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("precision", "compute"),
    [(None, jnp.float32), ("no", jnp.float32), ("bf16", jnp.bfloat16), ("fp16", jnp.float16), (BFLOAT16, jnp.bfloat16)],
)
def test_dtypes(precision, compute, accumulate, data8):
    seen = {}
    init, step = built(data8, recording(seen), seen=seen, precision=precision, accumulate=accumulate)
    state, metrics = step(init(params(), KEY), batch())
    assert (seen["weight"], seen["x"], seen["label"]) == (compute, compute, jnp.int32)
    assert (seen["grads"], seen["params"]) == (jnp.float32, jnp.float32)
    assert metrics["loss"].dtype == metrics["weight"].dtype == jnp.float32
    assert state.params["weight"].dtype == jnp.float32


def built(mesh, optimizer=None, seen=None, **options):
    """Init and step of data parallelism with that precision."""
    grad_fn = sk.value_and_grad(loss_seeing({} if seen is None else seen))
    return sk.make_train_step(grad_fn, optimizer or optax.sgd(0.5), mesh=mesh, plan=sk.dp("data"), **options)


def train(precision, steps=3, mesh=None, **options):
    init, step = built(mesh or sk.make_mesh(data=8), precision=precision, **options)
    state = init(params(), KEY)
    for _ in range(steps):
        state, metrics = step(state, batch())
    return state, metrics


# proves S88, S89: low precision changes the numbers by its rounding and no more
@pytest.mark.quick("precision0-0.02")
@pytest.mark.parametrize(("precision", "tolerance"), [(BFLOAT16, 2e-2), (FLOAT16._replace(loss_scale=2.0**10), 3e-3)])
def test_low_precision_stays_near_float32(precision, tolerance):
    state, metrics = train(precision)
    exact, exact_metrics = train(None)
    np.testing.assert_allclose(metrics["loss"], exact_metrics["loss"], rtol=tolerance)
    gap = np.max(np.abs(np.asarray(state.params["weight"]) - np.asarray(exact.params["weight"])))
    assert 0 < gap < tolerance * np.max(np.abs(exact.params["weight"]))


# A power of two only moves the exponent; the products of the backward pass differ by where float16 underflows.
@pytest.mark.optimized
def test_a_fixed_scale_does_not_change_the_update_and_is_exact_in_float32():
    small, _ = train(FLOAT16._replace(loss_scale=1.0))
    large, metrics = train(FLOAT16._replace(loss_scale=1024.0))
    np.testing.assert_allclose(small.params["weight"], large.params["weight"], rtol=1e-3, atol=1e-4)
    assert float(metrics["loss_scale"]) == float(large.loss_scale.scale) == 1024.0
    plain, _ = train(None)
    scaled, _ = train(sk.Precision(loss_scale=2.0**10))
    np.testing.assert_array_equal(plain.params["weight"], scaled.params["weight"])


# proves S89, F48, F56
def test_the_dynamic_scale_falls_on_overflow_and_the_step_is_skipped(data8):
    init, step = built(data8, optimizer=optax.sgd(0.5, momentum=0.9), precision=FLOAT16._replace(growth_interval=2))
    state = init(params(), KEY)
    assert float(state.loss_scale.scale) == 2.0**15
    before = jax.device_get((state.params, state.opt_state))
    state, metrics = step(state, batch(scale=100.0))  # gradients of 100 times 2**15 overflow float16
    assert not bool(metrics["finite"]) and np.isfinite(metrics["loss"])
    assert float(metrics["loss_scale"]) == 2.0**15 and float(state.loss_scale.scale) == 2.0**14
    jax.tree.map(np.testing.assert_array_equal, jax.device_get((state.params, state.opt_state)), before)
    scales, skipped = [], 0
    for _ in range(12):
        state, metrics = step(state, batch())
        scales.append(float(state.loss_scale.scale))
        skipped += not bool(metrics["finite"])
    assert {b / a for a, b in itertools.pairwise(scales)} <= {0.5, 1.0, 2.0}
    assert len(set(scales)) > 1 and skipped < 12
    assert not np.array_equal(np.asarray(state.params["weight"]), before[0]["weight"])


def test_stopping_leaves_the_dynamic_scale_its_overflows(data8):
    init, step = built(data8, precision="fp16", nonfinite="stop")
    state, metrics = step(init(params(), KEY), batch(scale=100.0))
    assert not bool(metrics["finite"]) and float(state.loss_scale.scale) == 2.0**14
    broken = batch()
    broken["x"][0] = np.nan
    with pytest.raises(NonFiniteError):
        step(state, broken)


def test_the_scale_doubles_after_the_growth_interval_and_never_falls_below_one():
    policy = FLOAT16._replace(growth_interval=3)
    state = LossScale(jnp.float32(1.0), jnp.int32(0))
    seen = []
    for finite in [True, True, True, True, False, False, False]:
        state = next_loss_scale(policy, state, jnp.bool_(finite))
        seen.append((float(state.scale), int(state.good_steps)))
    assert seen == [(1.0, 1), (1.0, 2), (2.0, 0), (2.0, 1), (1.0, 0), (1.0, 0), (1.0, 0)]


def test_the_scale_stays_where_it_can_be_divided_out():
    """It doubled up to infinity, with which every later step was skipped; from 2**127 on all gradients were zero."""
    policy = sk.Precision(loss_scale="dynamic", growth_interval=1)
    state = LossScale(jnp.float32(2.0**63), jnp.int32(0))
    for _ in range(3):
        state = next_loss_scale(policy, state, jnp.bool_(True))
        assert float(state.scale) == 2.0**64 and float(state.scale * 2.0**63) < float("inf")
    assert float(next_loss_scale(policy, state, jnp.bool_(False)).scale) == 2.0**63


def test_the_reduction_runs_in_the_reduce_dtype(data8):
    for reduce, size in [(jnp.float32, 4), (jnp.bfloat16, 2)]:
        init, step = built(data8, precision=BFLOAT16._replace(reduce=reduce))
        rows = census(step, init(params(), KEY), batch()).rows
        assert [row.bytes_in for row in rows] == [8, 8 * 4 * size]  # total and weight, then the gradient


@pytest.mark.parametrize("scale", [3.0, 0, -2, "static", 2.0**65, 2.0**-65, 10**400, float("nan"), float("inf")])
def test_a_scale_that_is_no_power_of_two_is_refused(scale):
    with value_error(
        "Precision: loss_scale must be None, 'dynamic' or a power of two from 2**-64 to 2**64, so that scaling is "
        f"exact; got {scale!r}. Pass for example 1024.0."
    ):
        precision_of(sk.Precision(loss_scale=scale))


@pytest.mark.parametrize("field", ["param", "compute", "reduce", "output", "master"])
@pytest.mark.parametrize("wrong", [jnp.int32, "int8", bool, "float33", None, 3])
@pytest.mark.check
def test_a_dtype_that_is_no_float_is_refused(field, wrong):
    if field == "master" and wrong is None:
        return  # no master copy
    with value_error(
        f"Precision: {field} must be a floating-point dtype; got {wrong!r}. Pass for example jnp.bfloat16."
    ):
        precision_of(sk.Precision(**{field: wrong}))


# Catches a step that says float64 and holds no more than float32.
@pytest.mark.check
def test_float64_is_refused():
    with value_error(
        "Precision: reduce must be at most float32, because microbatches and means are summed in float32; got float64. "
        "Pass jnp.float32."
    ):
        precision_of(sk.Precision(reduce=np.float64))
    check_trainable({"w": np.float64([1.0])})  # jax makes a float32 of it
    message = (
        "init: a step sums over devices in float32, and would round float64 values; leaf w is float64. Pass "
        "jax.tree.map(jnp.float32, params), or leave jax_enable_x64 off."
    )
    with jax.enable_x64(True), type_error(message):
        check_trainable({"w": np.float64([1.0]), "b": 0.5})


def test_a_loss_that_overflows_the_output_alone_is_finite(data8):
    """Only the float32 loss decides on finiteness, and the optimizer gets it uncast."""
    given = []
    optimizer = optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(),
        lambda grads, state, params=None, *, value: (
            given.append(value.dtype) or jax.tree.map(lambda g: -g, grads),
            state,
        ),
    )
    policy = sk.Precision(output=jnp.float16)
    loss_fn = lambda params, batch, keys: sk.Mean.of(1e6 * batch * params)  # noqa: E731
    init, step = sk.make_train_step(
        sk.value_and_grad(loss_fn), optimizer, mesh=data8, plan=sk.dp("data"), precision=policy, nonfinite="skip"
    )
    state, metrics = step(init(jnp.float32(1), jax.random.key(0)), jnp.ones(8))
    assert bool(metrics["finite"]) and np.isinf(metrics["loss"]) and metrics["loss"].dtype == jnp.float16
    assert float(state.params) == 1 - 1e6 and given == [jnp.float32]


@pytest.mark.check
def test_the_weight_is_a_count_whatever_the_output_dtype():
    """257 tokens are 256 in bfloat16."""
    policy, data = sk.Precision(output=jnp.bfloat16), jax.ShapeDtypeStruct((514,), jnp.float32)
    grad_fn = sk.value_and_grad(lambda params, batch, keys: sk.Mean.of(batch * params))
    mesh = sk.abstract_mesh(data=2)
    init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh, plan=sk.dp("data"), precision=policy)
    _, metrics = jax.eval_shape(step, init.abstract(jax.ShapeDtypeStruct((), jnp.float32)), data)
    assert {name: x.dtype for name, x in metrics.items()} == {"loss": jnp.bfloat16, "weight": jnp.float32}


# 256 + 1 + 1 + 1 is 259, which bfloat16 does not know: gradients are sums in the dtype of reductions, wherever they are
# scattered.
@pytest.mark.quick("dp", "fsdp layerwise")
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.optimized
def test_gradients_are_summed_in_the_dtype_of_reductions(plan):
    def loss_fn(params, x, keys):
        add = sk.gathered(lambda w, x: jnp.sum(x[:, None] * w))
        return sk.Mean(add(params["layers"], x).astype(jnp.float32), jnp.float32(len(x)))

    mesh = sk.make_mesh(jax.devices()[:4], d=4)
    policy = sk.Precision(compute=jnp.bfloat16, reduce=jnp.float32)
    init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.sgd(1.0), mesh=mesh, plan=plan, precision=policy)
    x = np.array([256, 1, 1, 1], np.float32)
    state, _ = step(init({"layers": np.zeros((1, 8), np.float32)}, jax.random.key(0)), x)
    np.testing.assert_array_equal(state.params["layers"], np.full((1, 8), -259 / 4, np.float32))


@pytest.mark.optimized
def test_gradients_of_microbatches_are_summed_in_float32():
    """In bfloat16 256 + 1 is 256."""
    low = sk.Precision(param=jnp.bfloat16, compute=jnp.bfloat16, master=jnp.float32)
    init, step = sk.make_train_step(
        sk.value_and_grad(lambda params, batch, keys: sk.Mean.of(batch * params["w"])),
        optax.sgd(1.0),
        mesh=sk.make_mesh(jax.devices()[:1], data=1),
        plan=sk.dp("data"),
        precision=low,
        accumulate=8,
    )
    state, _ = step(init({"w": jnp.zeros(())}, KEY), np.array([256, *7 * [1]], np.float32))
    assert float(jax.tree.leaves(state.opt_state)[0]) == -263 / 8


@pytest.mark.parametrize("nonfinite", ["skip", "stop"])
def test_a_gradient_that_is_infinite_on_one_device_is_seen_by_all(nonfinite, data8):
    """The loss is finite, and so is every other device's piece of the gradient."""
    root = sk.value_and_grad(lambda params, batch, keys: sk.Mean.of(batch * jnp.sum(jnp.sqrt(params["w"]))))
    init, step = sk.make_train_step(
        root, optax.sgd(0.1), mesh=data8, plan=sk.fsdp("data", min_size=1), nonfinite=nonfinite
    )
    state, batch = init({"w": np.arange(16, dtype=np.float32)}, KEY), np.ones(8, np.float32)
    if nonfinite == "stop":
        with pytest.raises(NonFiniteError):
            step(state, batch)
        return
    state, metrics = step(state, batch)
    assert jnp.isfinite(metrics["loss"]) and not metrics["finite"]
    np.testing.assert_array_equal(state.params["w"], np.arange(16))
