"""The laws that every plan obeys with every model, against one device with plain jax and optax."""

from __future__ import annotations

from functools import cache

import conformance
import jax
import numpy as np
import optax
import pytest
from conformance import BATCH, MODELS, PLANS

import shardkit as sk

KEY = jax.random.key(7)


def recording_sgd(rate: float) -> optax.GradientTransformation:
    """SGD that keeps the gradient it was given, so that gradients are compared themselves."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jax.numpy.zeros_like, params),
        lambda grads, state, params=None: (jax.tree.map(lambda g: -rate * g, grads), grads),
    )


def lenient(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """optax itself promotes an integer count; everything around it stays strict."""

    def update(grads, state, params=None):
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.update(grads, state, params)

    return optax.GradientTransformation(optimizer.init, update)


OPTIMIZERS = {
    "sgd": lambda: recording_sgd(0.5),
    "adamw": lambda: lenient(optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3))),
    # With its usual epsilon, 1e-8, Adam makes much of the rounding of a small gradient: of layers as deep as four, one
    # device summing in microbatches is then 4e-5 off itself, and with 1e-6 still 2e-5.
    "calm adamw": lambda: lenient(optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3, eps=1e-5))),
    "adafactor": lambda: lenient(optax.adafactor(1e-2, min_dim_size_to_factor=4)),
}
# Adam divides a leaf whose true gradient is zero by its own rounding noise: it may move by the rate in every step.
ZERO_LEAF = {"sgd": 1e-6, "adamw": 3 * 1e-3, "calm adamw": 3 * 1e-3, "adafactor": 3 * 1e-2}


@cache
def expected(model: conformance.ModelRow, optimizer: str, steps: int) -> conformance.Reference:
    return conformance.reference(model, OPTIMIZERS[optimizer](), steps, KEY)


def cases():
    for row in PLANS:
        for model in MODELS:
            if row.model_axis and model.name != "softmax":
                continue  # test_meshes.py holds the transformer to the laws over every axis
            yield pytest.param(row, model, id=f"{row.name}-{model.name}".replace(" ", "_"))


def built(row, model, optimizer, grad_fn=None, **options):
    grad_fn = grad_fn or sk.value_and_grad(model.loss(row.model_axis))
    mesh = conformance.make_mesh(row)
    return sk.make_train_step(grad_fn, OPTIMIZERS[optimizer](), mesh=mesh, plan=row.plan(), **options)


def check(row, model, optimizer, steps, **options):
    init, step = built(row, model, optimizer, **options)
    state = init(model.params(), KEY)
    want = expected(model, optimizer, steps)
    for index in range(steps):
        state, metrics = step(state, model.batch(index))
        np.testing.assert_allclose(metrics["loss"], want.losses[index], rtol=1e-5)
        for name, value in want.metrics[index].items():
            np.testing.assert_allclose(metrics[name], value, rtol=1e-5)
        if optimizer == "sgd" and index == 0:
            conformance.assert_close(sk.unpadded(state.opt_state), want.grads, 1e-5, model.zero_leaves, 1e-6)
    conformance.assert_close(sk.unpadded(state.params), want.params, 1e-5, model.zero_leaves, ZERO_LEAF[optimizer])
    assert_replicas_agree(state)


def assert_replicas_agree(state):
    """Devices that hold the same piece of a leaf hold the same bits."""
    for leaf in jax.tree.leaves((state.params, state.opt_state)):
        pieces = {}
        for shard in leaf.addressable_shards:
            bits = np.asarray(shard.data).tobytes()
            assert pieces.setdefault(str(shard.index), bits) == bits


# proves S58, S59, S60, S63, S92, F14, F15, F53, F57, F59, F60
@pytest.mark.parametrize(("row", "model"), list(cases()))
def test_loss_gradients_and_one_sgd_step_equal_one_device(row, model):
    check(row, model, "sgd", 1)


# proves S92, F53, F55
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("adafactor", marks=pytest.mark.sweep)])
@pytest.mark.parametrize(("row", "model"), list(cases()))
def test_three_optimizer_steps_equal_one_device(row, model, optimizer):
    check(row, model, optimizer, 3)


def accumulations():
    for row in PLANS:
        ways = int(np.prod([size for axis, size in row.sizes.items() if axis not in ("spare", row.model_axis)]))
        for k in range(2, BATCH // ways + 1):
            if BATCH // ways % k == 0:
                yield pytest.param(row, k, id=f"{row.name}-{k}".replace(" ", "_"))


# proves S86, S87, F45, F58: unequal weights and dropout on, and the effective batch stays what it is
@pytest.mark.parametrize(("row", "accumulate"), list(accumulations()))
def test_every_accumulation_equals_one_device(row, accumulate):
    check(row, MODELS[0], "sgd", 2, accumulate=accumulate)


# proves S86
@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulated_transformer_equals_one_device(accumulate):
    row = next(r for r in PLANS if r.name == "dp4")
    check(row, MODELS[1], "adamw", 3, accumulate=accumulate)


# proves S61: the jit + NamedSharding path gives the same update
def test_automatic_partitioning_gives_the_same_step(data8):
    model = MODELS[0]
    want = expected(model, "sgd", 1)
    params = sk.shard(model.params(), data8, jax.P())
    batch = sk.shard(model.batch(0), data8, jax.P("data"))
    keys = sk.example_keys(sk.step_key(KEY, 0), BATCH)

    @jax.jit
    def step(params, batch):
        def mean(params):
            loss, _ = model.loss(None)(params, batch, keys)
            return loss.total / loss.weight

        return jax.tree.map(lambda p, g: p - 0.5 * g, params, jax.grad(mean)(params))

    conformance.assert_close(step(params, batch), want.params, 1e-5, model.zero_leaves, 1e-6)


# proves S10: the disabled configuration is one device and no difference
def test_disabled_config_equals_the_undistributed_step():
    mesh = sk.DistributedConfig(enabled=False).mesh()
    model = MODELS[0]
    grad_fn = sk.value_and_grad(model.loss(None))
    init, step = sk.make_train_step(grad_fn, OPTIMIZERS["sgd"](), mesh=mesh, plan=sk.dp("data"))
    state, _ = step(init(model.params(), KEY), model.batch(0))
    conformance.assert_close(state.params, expected(model, "sgd", 1).params, 1e-6, model.zero_leaves, 1e-6)
    assert mesh.size == 1
