"""What the planner found is what runs: mesh, plan and configuration of a candidate, proved against one device."""

import jax
import numpy as np
import optax
import pytest

import shardkit as sk
from shardkit import planner
from shardkit.models import transformer
from shardkit.planner import Layout, Model
from shardkit.testing import Row
from shardkit.testing.exact.law import equal_for_all_inputs
from shardkit.testing.one_device import Reference, Training
from shardkit.testing.program import Program
from support.refusals import value_error

SGD = optax.sgd(0.1)


# Catches a plan, mesh or configuration that is not the layout's; the exact proof needs no compiler.
@pytest.mark.quick("data=2 fsdp=2 tensor=2 accumulate=2 remat=full")
@pytest.mark.parametrize("layout", [Layout(2, 2, 2, 2, "full"), Layout(1, 4, remat="selective"), Layout()], ids=str)
def test_what_was_found_is_what_runs(layout):
    model = Model(layers=2, hidden=16, heads=4, kv_heads=2, ffn=32, vocabulary=32)
    found = planner.estimate(model, layout, chip="v5e", batch=8, sequence=8)
    assert dict(found.mesh(jax.devices()[: layout.chips]).shape) == layout.axes
    assert found.config().remat == {"none": None, "selective": "dots_without_batch"}.get(layout.remat, layout.remat)
    assert set(found.plan().batch_axes) == set(layout.axes) - {"model"}
    row = Row(layout.axes, found.plan(), accumulate=layout.accumulate)
    params = transformer.init(jax.random.key(0), found.config())
    assert sum(x.size for x in jax.tree.leaves(params)) == model.parameters()
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, 32, (8, 8)).astype(np.int32) for name in ("tokens", "targets")}
    given = Training(sk.value_and_grad(transformer.loss_fn(found.config())), SGD, params, (batch,), jax.random.key(1))
    program = Program.of(row, found.grad_fn(), SGD, params, [batch], jax.random.key(1))
    assert equal_for_all_inputs(program, Reference((), given)) is None


def test_a_model_that_the_transformer_is_not_has_a_plan_by_rules_alone():
    model = Model(layers=2, hidden=16, heads=4, vocabulary=32, gated=False)
    found = planner.estimate(model, Layout(tensor=2), chip="v5e", batch=8, sequence=8)
    assert found.plan(lambda path, shape: None).strategies
    with value_error(
        "planner: models.transformer has three feed-forward matrices, heads of size hidden / heads, equal layers and "
        "no biases; got a Model with gated=False. Pass plan(rules) of your own model to make_train_step."
    ):
        found.plan()
