"""The reference transformer as a pipeline, dense and with experts, on meshes of eight devices: one device's numbers."""

import dataclasses
import itertools
import math
import re
from functools import cache

import jax
import numpy as np
import optax
import pytest

import shardkit as sk
from shardkit import schedules
from shardkit.models import transformer
from support import conformance
from support.conformance import BATCH, MESH_CONFIGS, MESH_MODELS, mesh_rows, one_form
from support.layouts import mesh_of
from support.pipelines import EVERY_SCHEDULE, pipelined_grad, pipelined_loss
from support.refusals import refused, unbound_axis
from support.training import KEY, check

pytestmark = pytest.mark.optimized

MICROBATCHES = 4
ONE_CHUNK = [build for build in EVERY_SCHEDULE.values() if build(2, MICROBATCHES).chunks == 1]
TWO_CHUNKS = [build for build in EVERY_SCHEDULE.values() if build not in ONE_CHUNK]
CONFIGS = {name: dataclasses.replace(config, layers=4) for name, config in MESH_CONFIGS.items()}


@cache
def one_device(name, ways):
    """The model on one device; with experts in the pipeline's microbatches, on whose tokens a router's losses are."""
    config = CONFIGS[name]
    batch = next(model.batch for model in MESH_MODELS if model.name == name)
    plain = transformer.loss_fn(dataclasses.replace(config, microbatches=MICROBATCHES if config.experts else 1))
    order = np.arange(BATCH).reshape(ways, MICROBATCHES, -1).swapaxes(0, 1).ravel()

    def loss(params, batch, keys):
        return plain(params, {name: x[order] for name, x in batch.items()}, None if keys is None else keys[order])

    return conformance.ModelRow(
        name,
        lambda: conformance.weights(config),
        batch,
        lambda _: loss if config.experts else transformer.loss_fn(config),
    )


def ways(row):
    return math.prod(row.sizes.get(axis, 1) for axis in ("data", "fsdp", "expert"))


def pipelined(row, stages):
    """The row's mesh and plan with a pipeline beside it."""
    axes = dataclasses.replace(row.model_axis, stage="stage")
    name = f"stage={stages} {row.name}"
    plan = lambda: sk.chain(row.plan(), sk.pp("stage"))  # noqa: E731
    return conformance.PlanRow(name, {"stage": stages} | row.sizes, plan, axes)


def functions(row, config, schedule, **options):
    model = (*transformer.pieces(config, row.model_axis), schedule, "stage")
    grad_fn = pipelined_grad(*model, layer_numbers=True, **options)
    loss = pipelined_loss(*model, layer_numbers=True)
    return transformer.in_order(grad_fn, row.model_axis), transformer.in_order(loss, row.model_axis)


def cases():
    """The schedules take turns, so that each meets every other axis; so do what the backward pass begins with."""
    for name in CONFIGS:
        turns = {2: itertools.cycle([*ONE_CHUNK, *TWO_CHUNKS]), 4: itertools.cycle(ONE_CHUNK)}
        saved = itertools.cycle((True, True, False))
        for stages in (2, 4):
            for row in (pipelined(row, stages) for row in one_form(mesh_rows(name, 8 // stages))):
                schedule = next(turns[stages])(stages, MICROBATCHES)
                label = f"{name}-{row.name}-{schedule.name}".replace(" ", "_").replace("=", "")
                yield pytest.param(name, row, schedule, next(saved), id=label)


@pytest.mark.deep  # the covering list holds two stages beside every other option
@pytest.mark.parametrize(("name", "row", "schedule", "recompute"), list(cases()))
def test_every_mesh_of_eight(name, row, schedule, recompute):
    grad_fn, _ = functions(row, CONFIGS[name], schedule, recompute=recompute)
    check(row, one_device(name, ways(row)), grad_fn=grad_fn)


ROWS = {row.name: row for name in CONFIGS for row in (pipelined(row, 2) for row in mesh_rows(name, 4))}
DENSE, EXPERTS = ROWS["stage=2 context=4"], ROWS["stage=2 context=2 expert=2"]


def built(row, name, schedule, *, traced=False):
    """The state, an abstract one where it is only traced, the step and the evaluation of a pipeline."""
    grad_fn, loss = functions(row, CONFIGS[name], schedule)
    options = {"mesh": mesh_of(**row.sizes), "plan": row.plan()}
    init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), **options)
    params = one_device(name, ways(row)).params()
    return init.abstract(params) if traced else init(params, KEY), step, sk.make_eval_step(loss, **options)


@pytest.mark.deep  # of a smaller model: test_pipeline_composition.py
@pytest.mark.parametrize(("name", "row"), [("dense", DENSE), ("experts", EXPERTS)], ids=["dense", "experts"])
def test_the_evaluation_is_that_of_one_device(name, row):
    model = one_device(name, ways(row))
    state, _, evaluate = built(row, name, schedules.interleaved(2, MICROBATCHES, 2))
    metrics = evaluate(state.params, model.batch(0))
    mean, aux = jax.jit(model.loss(None))(model.params(), model.batch(0), None)
    for key, want in {"loss": mean, **aux}.items():
        np.testing.assert_allclose(metrics[key], want.total / want.weight, rtol=1e-5)


def test_the_batch_is_brought_into_order_once_a_step():
    state, step, evaluate = built(DENSE, "dense", schedules.lockstep(2, MICROBATCHES), traced=True)
    batch = one_device("dense", 1).batch(0)
    for census in (sk.census(step, state, batch), sk.census(evaluate, state.params, batch)):
        counts = [row.count for row in census.rows if row.source.startswith("zigzag.py")]
        assert counts == [1] * 2 * len(batch), [row.source for row in census.rows]


def test_a_mixture_of_experts_that_would_sum_over_other_microbatches_is_refused():
    row = EXPERTS._replace(model_axis=dataclasses.replace(EXPERTS.model_axis, stage=None))
    state, step, _ = built(row, "experts", schedules.lockstep(2, MICROBATCHES), traced=True)
    assert re.fullmatch(
        r"pipeline.value_and_grad: a stage must hold no collective over axis 'stage', because its devices "
        r"run different microbatches; got all_reduce over 'context', 'expert', 'stage' at \S+:\d+ \(\S+\)\. "
        r"Leave that axis out, as moe\(\.\.\., stage='stage'\) does\.",
        refused(lambda: step.lower(state, one_device("experts", 2).batch(0))),
    )


def test_a_routers_losses_leave_the_axis_of_the_pipeline_out():
    logits = np.random.default_rng(0).normal(size=(2, 32, 4)).astype(np.float32)
    mesh = sk.make_mesh(stage=2, data=4)

    def losses(logits_NE, stage=None):
        routing = sk.layers.route(logits_NE, top_k=2)
        stats = sk.layers.routing_stats(logits_NE, routing, stage=stage)
        return stats.balance_loss[None], stats.z_loss[None]

    ours = jax.shard_map(
        lambda x: losses(x[0], "stage"), mesh=mesh, in_specs=jax.P("stage", "data"), out_specs=jax.P("stage")
    )
    for got, *each in zip(jax.jit(ours)(logits), *map(jax.jit(losses), logits), strict=True):
        np.testing.assert_allclose(got, np.concatenate(each), rtol=1e-6)
    with unbound_axis(
        "routing_stats: axis 'stage' is not bound here, because no shard_map surrounds this call. Call it inside "
        "jax.shard_map over a mesh with that axis."
    ):
        jax.eval_shape(lambda logits: losses(logits, "stage"), logits[0])
