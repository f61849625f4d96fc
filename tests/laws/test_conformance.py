"""The laws that every plan obeys with every model, against one device with plain jax and optax."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import shardkit as sk
from support import conformance
from support.conformance import BATCH, MODELS, PLANS
from support.training import KEY, OPTIMIZERS, check, expected


def cases():
    for row in PLANS:
        for model in MODELS:
            if row.model_axis and model.name != "softmax":
                continue  # test_meshes.py holds the transformer to the laws over every axis
            yield pytest.param(row, model, id=f"{row.name}-{model.name}".replace(" ", "_"))


# proves S58, S59, S60, S63, S92, F14, F15, F53, F57, F59, F60
@pytest.mark.parametrize(("row", "model"), list(cases()))
def test_loss_gradients_and_one_sgd_step_equal_one_device(row, model):
    check(row, model, "sgd", 1)


# proves S92, F53, F55
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("adafactor", marks=pytest.mark.deep)])
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
