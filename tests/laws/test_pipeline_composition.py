"""Pipelines inside a training step, beside every other plan, against one device.

This is the list of plans for pipelines, as support/conformance.py holds those of losses: a new strategy that stands
beside `pp` is one row here.
"""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardkit as sk
from shardkit import schedules
from support.conformance import BATCH, ModelRow, PlanRow, padding
from support.layouts import mesh_of
from support.pipelines import PIECES, make_batch, make_params, pipelined_grad, pipelined_loss, traced_step, unpipelined
from support.ring_model import TOKENS, D, batch, params, pieces, tp
from support.training import KEY, check, expected, recording_sgd

pytestmark = pytest.mark.optimized

MODEL = ModelRow("pipelined", params, batch, lambda axis: unpipelined(pieces(axis)))


class Row(NamedTuple):
    """A schedule over axis "stage", beside which plans, on which mesh; the axis that the stage itself uses."""

    schedule: Any
    sizes: dict[str, int]
    plans: tuple[sk.Plan, ...] = ()
    axis: str | None = None
    how: dict[str, Any] = {}  # noqa: RUF012

    def beside(self, *plans: sk.Plan, axis: str | None = None, **how: Any) -> Any:
        return Row(self.schedule, self.sizes, plans, axis, how)

    @property
    def plan(self) -> sk.Plan:
        return sk.chain(*self.plans, sk.pp("stage"))

    def mesh(self) -> Any:
        return mesh_of(**self.sizes)

    @property
    def grad_fn(self) -> Any:
        return pipelined_grad(*pieces(self.axis), self.schedule, "stage", layer_numbers=True, **self.how)

    def step(self, optimizer: Any = None, **options: Any) -> sk.TrainStep:
        optimizer = optimizer or recording_sgd(0.1)
        return sk.make_train_step(self.grad_fn, optimizer, mesh=self.mesh(), plan=self.plan, **options)


LAYERWISE: Any = {"min_size": 1, "layerwise": ("layers",)}
dp, each = sk.dp("data"), sk.fsdp("fsdp", **LAYERWISE)
PAIR = {"data": 2, "stage": 2, "fsdp": 2}
FEW = {
    "tp by rings, fsdp layerwise": Row(schedules.lockstep(2, 4, 2), {"fsdp": 2, "stage": 2, "model": 2}).beside(
        each, tp(), axis="model"
    ),
    "every axis of one device": Row(schedules.lockstep(1, 4), {"stage": 1, "fsdp": 1, "model": 1}).beside(
        each, tp(), axis="model"
    ),
}
REST = {
    "unequal, interleaved": Row(schedules.interleaved(2, 4, 2), {"stage": 2}, how={"layers_per_stage": (1, 3, 2, 2)}),
    "fsdp layerwise in branches": Row(schedules.zero_bubble_v(2, 4), PAIR).beside(dp, each, mode="branch"),
    "fsdp, padded": Row(schedules.lockstep(2, 4, 2), {"stage": 2, "fsdp": 4}).beside(
        sk.fsdp("fsdp", **padding(4), layerwise=("layers",)), layers_per_stage=(1, 1, 4, 2)
    ),
    "zero2": Row(schedules.dualpipe_v(2, 4), {"zero": 2, "stage": 2, "data": 2}, (dp, sk.zero2("zero", min_size=1))),
    "tp, zero1, saved": Row(schedules.breadth_first(2, 4, 2), {"zero": 2, "model": 2, "stage": 2}).beside(
        tp(), sk.zero1("zero", min_size=1), axis="model", recompute=False
    ),
    "unequal, placed as a V": Row(schedules.zero_bubble_v(2, 4), {"stage": 2, "data": 2}).beside(
        dp, layers_per_stage=(3, 1, 1, 3), recompute=False
    ),
    "unequal, tp and fsdp": Row(schedules.lockstep(2, 4), {"fsdp": 2, "stage": 2, "model": 2}).beside(
        each, tp(), axis="model", layers_per_stage=(3, 5)
    ),
    "unequal, in branches": Row(schedules.one_f_one_b(4, 4), {"stage": 4}).beside(
        mode="branch", recompute=False, layers_per_stage=(1, 3, 2, 2)
    ),
    "stages over two axes": Row(schedules.lockstep(4, 4), {"a": 2, "stage": 4}, (sk.dp("a"),)),
}


def rows() -> Any:
    marked = [(name, row, ()) for name, row in FEW.items()]
    marked += [(name, row, pytest.mark.deep) for name, row in REST.items()]
    return [pytest.param(row, id=name.replace(" ", "_"), marks=marks) for name, row, marks in marked]


# proves S80, F36, F37, F38, F41, F42, F53, F54, F56, F58, F59: unequal weights and dropout on
@pytest.mark.parametrize("row", rows())
def test_every_law_holds(row):
    check(PlanRow("pipeline", row.sizes, lambda: row.plan), MODEL, grad_fn=row.grad_fn)


def first() -> Any:
    """The first step of one device."""
    return expected(MODEL, "adamw", 1e-5).steps[0]


# proves F41: evaluation lays the stages out as training does
@pytest.mark.quick("unequal, interleaved")
@pytest.mark.parametrize("name", ["tp by rings, fsdp layerwise", "unequal, interleaved"])
def test_evaluation_is_the_loss_without_dropout(name):
    row = (FEW | REST)[name]
    how = row.how | {"layer_numbers": True}
    init, _ = row.step()
    loss = pipelined_loss(*pieces(row.axis), row.schedule, "stage", **how)
    metrics = sk.make_eval_step(loss, mesh=row.mesh(), plan=row.plan)(init(params(), KEY).params, batch(0))
    mean, aux = jax.jit(unpipelined(pieces()))(params(), batch(0), None)
    np.testing.assert_allclose(metrics["loss"], mean.total / mean.weight, rtol=1e-6)
    np.testing.assert_allclose(metrics["accuracy"], aux["accuracy"].total / aux["accuracy"].weight, rtol=1e-6)


def test_accumulation_beside_a_pipeline_warns_and_is_right():  # proves S86
    row = Row(schedules.lockstep(2, 4), {"stage": 2, "data": 2}, (dp,))
    with pytest.warns(UserWarning) as caught:
        init, step = row.step(accumulate=2)
    assert [str(warning.message) for warning in caught] == [
        "make_train_step: accumulate=2 fills and drains the pipeline 2 times per step. Give the schedule 2 times as "
        "many microbatches instead."
    ]
    state, metrics = step(init(params(), KEY), batch(0))
    np.testing.assert_allclose(metrics["loss"], first().loss, rtol=1e-5)
    chex.assert_trees_all_close(sk.unpadded(state.opt_state), first().grads, rtol=1e-4, atol=1e-6)


def test_activations_travel_in_bf16_and_gradients_are_float32():  # proves S88
    row = Row(schedules.lockstep(2, 4), {"stage": 2})
    init, step = row.step(precision="bf16")
    state = init(params(), KEY)
    sent = sk.census(step, state, batch(0)).select(kind="ppermute")
    assert {row.bytes_in for row in sent} == {BATCH // 4 * TOKENS * D * 2}
    state, metrics = step(state, batch(0))
    np.testing.assert_allclose(metrics["loss"], first().loss, rtol=2e-2)
    for got, want in zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(first().grads), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=0.1 * np.max(np.abs(want)))
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), make_params(2))
    low_head = lambda shared, x, batch: jnp.sum(x.astype(jnp.float32)) / x.size  # noqa: E731
    low_pieces = (lambda shared, batch, keys: shared["embed"][batch["tokens"]], PIECES[1], low_head)
    step = traced_step(schedules.lockstep(2, 4), 2, low_pieces)
    *_, grads = jax.eval_shape(step, low, make_batch(4), sk.example_keys(KEY, 4))
    assert {grad.dtype for grad in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


# proves F41: the weight of a mean over equally many examples is a number, the same on all devices, its total is not
@pytest.mark.parametrize("mode", ["branch", pytest.param("masked", marks=pytest.mark.deep)])
def test_a_loss_without_weights_beside_data_parallelism(mode):
    embed, stage, _ = pieces()
    head = lambda shared, x, batch: sk.Mean.of(jnp.square(x @ shared["out"]))  # noqa: E731
    grad_fn = pipelined_grad(embed, stage, head, schedules.lockstep(2, 4), "stage", mode=mode, layer_numbers=True)
    options = {"mesh": mesh_of(data=2, stage=2), "plan": sk.chain(dp, sk.pp("stage"))}
    alone = sk.value_and_grad(unpipelined((embed, stage, head)))
    sk.testing.assert_same_training(grad_fn, alone, optax.sgd(0.1), params=params(), batches=[batch(0)], **options)
