"""The stack of a pipeline in stage order: optimizers, plans and checkpoints see the layers as one device has them."""

import re
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import schedules
from shardkit.analysis.hlo.differences import compiled
from shardkit.on_device.pipelines import PipelineGradFn, PipelineLoss
from shardkit.pipelines.stages import fit_plan
from shardkit.plans.storage import Padded
from shardkit.schedules.stages import Stages
from support import optimizers, pipelines
from support.layouts import Specs, mesh_of, specs
from support.pipelines import pipelined_grad
from support.refusals import value_error
from support.tiers import DEEP
from support.training import past_a_nan
from support.trees import assert_close, assert_laid_out

pytestmark = pytest.mark.usefixtures("any_promotion")
BATCH, D, F = 8, 6, 4
UNEVEN = (1, 3, 1, 2)
OPTIMIZERS = dict(optimizers.OPTIMIZERS)
STAGES = {
    "one chunk": (12, Stages("stage", 2)),
    "loop, 2 chunks": (12, Stages("stage", 2, 2)),
    "loop, 3 chunks": (12, Stages("stage", 2, 3)),
    "v, 1 chunk": (12, Stages("stage", 2, 1, "v")),
    "v, 2 chunks": (12, Stages("stage", 2, 2, "v")),
    "v, 3 chunks": (12, Stages("stage", 2, 3, "v")),
    "v, 2 chunks of 4 devices": (8, Stages("stage", 4, 2, "v")),
    "uneven": (7, Stages("stage", 4, layers_per_stage=UNEVEN)),
    "uneven, loop": (7, Stages("stage", 2, 2, layers_per_stage=UNEVEN)),
    "uneven, v": (7, Stages("stage", 2, 2, "v", UNEVEN)),
    "uneven on one device": (7, Stages("stage", 1, 4, layers_per_stage=UNEVEN)),
}
NAMES = ["adamw", "lamb", "adafactor", "novograd", "sm3", "add_noise", "clip_by_global_norm"]


def make_params(layers):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32) * np.float32(0.5)  # noqa: E731
    return {"layers": {"w": draw(layers, D, F), "b": draw(layers, F)}, "out": draw(F)}


def make_batch(step=0):
    rng = np.random.default_rng(step)
    weights = rng.integers(0, 3, BATCH).astype("f")  # unequal on the devices that split the batch
    return {"x": rng.normal(size=(BATCH, D)).astype("f"), "y": rng.normal(size=BATCH).astype("f"), "weights": weights}


def layer_loss(natural, w, b, out, batch, model=None):
    """One layer's part of the loss of every example; it depends on the number of the layer in the original order."""
    y = jnp.tanh(batch["x"] @ w + b) @ out
    y = y if model is None else sk.all_reduce(y, model)
    return (y - batch["y"]) ** 2 * (1 + jnp.cos(natural * 1.0))


def make_grad_fn(layers, stages, model=None):
    """What a pipeline looks like from outside: each device makes its own rows' part of the loss, without a message."""
    rows = jnp.asarray(stages.rows(layers) or range(layers)).reshape(stages.devices, -1)

    def loss(params, batch, keys):
        here = sk.axis_index("stage")

        def total(stack, out):
            parts = jax.vmap(lambda n, w, b: layer_loss(n, w, b, out, batch, model))(rows[here], stack["w"], stack["b"])
            # What a loss does with rows of zeros is its own affair: here it has a gradient there, which must be lost.
            zeros = 7 * (jnp.sum(stack["w"], (1, 2)) + jnp.sum(stack["b"], 1))
            zeros = zeros if model is None else sk.all_reduce(zeros, model)
            return jnp.sum(jnp.where(rows[here][:, None] < 0, zeros[:, None], parts * batch["weights"]).astype("f"))

        weight = jnp.where(here == 0, jnp.sum(batch["weights"].astype("f")), 0)
        return sk.Mean(*sk.vary((sk.gathered(total)(params["layers"], params["out"]), weight), "stage"))

    return PipelineGradFn(stages, sk.value_and_grad(loss)), PipelineLoss(stages, loss)


@cache
def one_device(name, layers, steps=3):
    """Loss, parameters and optimizer state after some steps without a mesh."""
    optimizer = optax.with_extra_args_support(OPTIMIZERS[name]())
    params = make_params(layers)
    state = optimizer.init(params)

    def mean(params, batch):
        parts = jax.vmap(lambda n, w, b: layer_loss(n, w, b, params["out"], batch))(
            jnp.arange(layers), params["layers"]["w"], params["layers"]["b"]
        )
        return jnp.sum(parts * batch["weights"]) / jnp.sum(batch["weights"])

    @jax.jit
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(mean)(params, batch)
        updates, state = optimizer.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state, loss

    for index in range(steps):
        params, state, loss = step(params, state, make_batch(index))
    return params, state, loss


def staged(*sizes):
    """A GradFn of nothing, with these stages."""
    return PipelineGradFn(Stages("stage", *sizes), lambda params, batch, keys, *, scale=1: None)


def make(case, name="momentum", *plans, sizes=None, model=None, **options):
    layers, stages = STAGES[case]
    mesh = mesh_of(**(sizes or {"stage": stages.devices}))
    grad_fn, _ = make_grad_fn(layers, stages, model)
    plan = sk.chain(*plans, sk.pp("stage"))
    return sk.make_train_step(grad_fn, OPTIMIZERS[name](), mesh=mesh, plan=plan, **options)


def assert_zeros(tree):
    """Rows that are no layer's hold zeros."""
    for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Padded)):
        if isinstance(x, Padded):
            assert not np.asarray(x.array)[np.array(x.rows) < 0].any()


def check(case, name="momentum", *plans, **options):
    """Three steps against one device, for loss, parameters and everything that the optimizer keeps."""
    layers = STAGES[case][0]
    wanted, opt_state, loss = one_device(name, layers)
    init, step = make(case, name, *plans, **options)
    state = init(make_params(layers), jax.random.key(0))
    for index in range(3):
        state, metrics = step(state, make_batch(index))
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    assert_close(sk.unpadded(state.params), wanted)
    for x, y in zip(jax.tree.leaves(sk.unpadded(state.opt_state)), jax.tree.leaves(opt_state), strict=True):
        assert x.shape == y.shape
        if jnp.issubdtype(y.dtype, jnp.floating):
            np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * np.abs(np.asarray(y)).max())
    assert_zeros((state.params, state.opt_state))
    return state


# ---- rows


def test_rows_in_the_order_of_the_layers_are_none():
    assert Stages("stage", 2, 2, "loop", UNEVEN).rows(7) == (0, -1, -1, 4, -1, -1, 1, 2, 3, 5, 6, -1)
    natural = [Stages("a", 4), Stages("a", 4, 1, "v"), Stages("a", 1, 4), Stages("a", 1, 4, "v"), Stages("a", 2, 1)]
    assert [stages.rows(8) for stages in (*natural, Stages("a", 2, layers_per_stage=(4, 4)))] == [()] * 6


@pytest.mark.parametrize("case", STAGES)
def test_each_layer_has_one_row_on_the_device_of_its_stage(case):  # proves F37
    layers, stages = STAGES[case]
    rows = stages.rows(layers) or tuple(range(layers))
    assert sorted(row for row in rows if row >= 0) == list(range(layers))
    schedule = SimpleNamespace(devices=stages.devices, chunks=stages.chunks, placement=stages.placement)
    assert Stages.of(schedule, "stage", stages.layers_per_stage) == stages
    starts = np.cumsum([0, *stages.layers_of(layers)])
    held = np.array(rows).reshape(stages.devices, stages.chunks, -1)
    device = sk.schedules.base.device_of
    for stage, first in enumerate(starts[:-1]):
        row = held[device(stage, stages.devices, stages.placement), stage // stages.devices]
        assert [n for n in row if n >= 0] == list(range(first, starts[stage + 1]))


@pytest.mark.quick("uneven on one device", "v, 3 chunks")
@pytest.mark.parametrize("case", STAGES)
def test_a_stack_goes_out_and_comes_back(case):
    layers, stages = STAGES[case]
    init, _ = make(case)
    params = make_params(layers)
    state, made = init(params, jax.random.key(0)), init(lambda key: make_params(layers), jax.random.key(0))
    w, rows = state.params["layers"]["w"], stages.rows(layers)
    assert isinstance(w, Padded) == bool(rows) and w.shape == (layers, D, F)
    assert_close(sk.unpadded(state.params), params, 0)
    assert_close(sk.unpadded(made.params), params, 0)
    assert_close(sk.unpadded(init(state.params, jax.random.key(0)).params), params, 0)  # a state's parameters
    np.testing.assert_array_equal(np.asarray(w), params["layers"]["w"])
    held = np.asarray(w.array if rows else w)
    assert [np.flatnonzero((params["layers"]["w"] == x).all((1, 2))) for x in held if x.any()] == [
        n for n in rows or range(layers) if n >= 0
    ]
    assert_laid_out(state, init.abstract(params))


# ---- numbers


@pytest.mark.quick("v, 1 chunk", "uneven, v")
@pytest.mark.parametrize("case", STAGES)
def test_three_steps_are_those_of_one_device(case):  # proves F37, F42, F54
    check(case)


@pytest.mark.quick("novograd-v, 2 chunks", "clip_by_global_norm-uneven, loop", "adafactor-uneven, loop")
@pytest.mark.parametrize("case", ["uneven, loop", "v, 2 chunks"])
@pytest.mark.parametrize("name", NAMES)
def test_the_optimizer_is_indifferent_to_stages(name, case):  # proves F53, F54, F55
    check(case, name)


COMPOSED = {
    "dp": ((sk.dp("d"),), {"d": 2, "stage": 2}),
    "fsdp": ((sk.fsdp("d", min_size=1, layerwise=("layers",)),), {"d": 2, "stage": 2}),
    "fsdp of the rows": ((sk.fsdp("d", min_size=1, rules=lambda path, shape: 0),), {"d": 2, "stage": 2}),
    "fsdp padded": ((sk.fsdp("d", min_size=1, layerwise=("layers",), uneven="pad"),), {"d": 4, "stage": 2}),
    "zero1 of the rows": ((sk.zero1("d", min_size=1, rules=lambda path, shape: 0),), {"d": 2, "stage": 2}),
    "zero2": ((sk.zero2("d", min_size=1, layerwise=("layers",)),), {"d": 2, "stage": 2}),
    "fsdp and tp": (
        (sk.fsdp("d", min_size=1, layerwise=("layers",)), sk.tp("model", lambda path, shape: len(shape) - 1)),
        {"d": 2, "stage": 2, "model": 2},
    ),
}


@pytest.mark.quick("zero1 of the rows-loop, 2 chunks")
@pytest.mark.parametrize("case", ["loop, 2 chunks", "uneven, v"])
@pytest.mark.parametrize("beside", COMPOSED)
def test_other_plans_share_the_leaves(beside, case):  # proves F59
    plans, sizes = COMPOSED[beside]
    state = check(case, "adamw", *plans, sizes=sizes, model="model" if "model" in sizes else None)
    assert state.params["layers"]["w"].array.sharding.spec[0] in ("stage", ("stage", "d"))


# XLA's partitioner ended with an internal error: it fails on a gather of rows whose other dims are split two ways.
def test_uneven_stages_of_leaves_that_are_split_over_two_more_axes():
    grad_fn = pipelined_grad(
        *pipelines.PIECES, schedules.lockstep(2, 2), "stage", layer_numbers=True, layers_per_stage=(1, 2)
    )
    plan = sk.chain(sk.pp("stage"), sk.fsdp("fsdp", min_size=1), sk.zero1("zero", min_size=1))
    options = {"mesh": mesh_of(fsdp=2, zero=2, stage=2), "plan": plan}
    init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), **options)
    assert step.lower(init.abstract(pipelines.make_params(3, 8)), pipelines.make_batch(8)).compile()


# Catches rows beyond the fewest that are traced, and compiled, one by one: 26 CPU seconds for eight of them, not 13.
def test_a_stage_is_traced_as_often_for_many_layers_as_for_few():
    def calls(most):
        embed, stage, head = pipelines.PIECES
        called = []
        counted = lambda *args: called.append(1) or stage(*args)  # noqa: E731
        sizes = {"layer_numbers": True, "layers_per_stage": (1, most)}
        grad_fn = pipelined_grad(embed, counted, head, schedules.zero_bubble_h1(2, 2), "stage", **sizes)
        init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh_of(stage=2), plan=sk.pp("stage"))
        step.lower(init.abstract(pipelines.make_params(1 + most, 8)), pipelines.make_batch(8))
        return len(called)

    assert calls(2) == calls(6)


def test_a_master_copy_and_a_loss_scale_go_with_it():  # proves F47, F48
    low = sk.Precision(compute=jnp.bfloat16, param=jnp.bfloat16, master=jnp.float32, loss_scale="dynamic")
    for case in ("v, 2 chunks", "uneven, loop") if DEEP else ("uneven, loop",):
        layers, stages = STAGES[case]
        flat = Stages("stage", 1)
        options = {"plan": sk.pp("stage"), "precision": low, "nonfinite": "skip"}
        alone = sk.make_train_step(make_grad_fn(layers, flat)[0], optax.adam(1e-2), mesh=mesh_of(stage=1), **options)
        made = (make(case, "adam", precision=low, nonfinite="skip"), alone)
        states = [past_a_nan(each, make_params(layers), make_batch, 0) for each in made]
        copy = states[0].opt_state.copy
        assert copy["layers"]["w"].rows == stages.rows(layers)
        assert_close(sk.unpadded(copy), states[1].opt_state.copy, 4e-3)
        assert_close(
            sk.unpadded(states[0].params), jax.tree.map(lambda x: x.astype(jnp.bfloat16), sk.unpadded(copy)), 0
        )


def test_evaluation_and_accumulation_know_the_stages():  # proves F58
    case = "v, 2 chunks"
    layers, stages = STAGES[case]
    _, loss = make_grad_fn(layers, stages)
    with pytest.warns(UserWarning, match="accumulate=2 fills and drains the pipeline 2 times per step"):
        init, step = make(case, accumulate=2)
    state = init(make_params(layers), jax.random.key(0))
    evaluate = sk.make_eval_step(loss, mesh=mesh_of(stage=2), plan=sk.pp("stage"))
    found = evaluate(state.params, make_batch())
    np.testing.assert_allclose(found["loss"], one_device("momentum", layers, 1)[2], rtol=1e-6)
    state, _ = step(state, make_batch())
    assert_close(sk.unpadded(state.params), one_device("momentum", layers, 1)[0])


def by_layer(change):
    """A transformation that tells layers by their place in the stack, and keeps no array."""

    def update(updates, state, params=None):
        return {**updates, "layers": jax.tree.map(change, updates["layers"])}, state

    return optax.chain(
        optax.sgd(0.1, momentum=0.9), optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    )


OPTIMIZERS |= {
    "the first layers frozen": lambda: by_layer(lambda g: g.at[:2].set(0)),
    "another rate for each layer": lambda: by_layer(
        lambda g: g * (0.8 ** jnp.arange(g.shape[0], dtype=g.dtype)).reshape(-1, *[1] * (g.ndim - 1))
    ),
}


@pytest.mark.parametrize("name", ["the first layers frozen", "another rate for each layer"])
def test_an_optimizer_that_tells_layers_by_their_place_sees_them_in_order(name):  # proves F53
    check("v, 2 chunks", name)


FORMS = {  # a state of the first, in the step of the second: what its first leaf is said to be
    ("loop, 2 chunks", "one chunk"): (
        "stored with its rows in the order of stages (0, 1, 2, 6, 7, 8, 3, 4, ...), and must be in its original form"
    ),
    ("one chunk", "loop, 2 chunks"): (
        "stored in its original form, and must be with its rows in the order of stages (0, 1, 2, 6, 7, 8, 3, 4, ...)"
    ),
    ("loop, 2 chunks", "v, 2 chunks"): (
        "stored with its rows in the order of stages (0, 1, 2, 6, 7, 8, 3, 4, ...), and must be with its rows in the "
        "order of stages (0, 1, 2, 9, 10, 11, 3, 4, ...)"
    ),
}


@pytest.mark.parametrize(("has", "wants"), FORMS)
def test_a_state_of_other_stages_is_refused(has, wants):
    """It was taken as it lies: the layers stood in another order."""
    layers, stages = STAGES[wants]
    state = make(has)[0](make_params(layers), jax.random.key(0))
    with value_error(
        f"step: the parameters must be stored as this plan stores them; leaf layers.b is {FORMS[has, wants]}. Pass "
        "unpadded(...) of them to init, or to an evaluation with a plan that pads nothing."
    ):
        make(wants)[1](state, make_batch())
    _, loss = make_grad_fn(layers, stages)
    with pytest.raises(ValueError, match="evaluate: the parameters must be stored"):
        sk.make_eval_step(loss, mesh=mesh_of(stage=2), plan=sk.pp("stage"))(state.params, make_batch())
    init, step = make(wants)
    step(init(sk.unpadded(state.params), jax.random.key(0)), make_batch())


def test_an_optimizer_state_of_other_stages_is_refused():
    """Beside the right parameters: each layer would be given another one's momentum."""
    has, wants = "loop, 2 chunks", "v, 2 chunks"
    states = {case: make(case)[0](make_params(STAGES[case][0]), jax.random.key(0)) for case in (has, wants)}
    with value_error(
        "step: the optimizer state must be stored as this plan stores them; leaf 0.trace.layers.b is "
        f"{FORMS[has, wants]}. Pass unpadded(...) of them to init, or to an evaluation with a plan that pads nothing."
    ):
        make(wants)[1](states[wants]._replace(opt_state=states[has].opt_state), make_batch())


# ---- what is held and sent


@pytest.mark.parametrize("case", ["one chunk", "loop, 3 chunks", "uneven, v"])
def test_a_device_holds_its_own_stages_and_sends_nothing_of_them(case):
    layers, stages = STAGES[case]
    mesh = sk.abstract_mesh(stage=2)
    made = sk.make_train_step(make_grad_fn(layers, stages)[0], optax.adam(1e-3), mesh=mesh, plan=sk.pp("stage"))
    state = made.init.abstract(make_params(layers))
    held = 4 * (len(stages.rows(layers) or range(layers)) // 2 * (D + 1) * F + F)
    assert (sk.bytes_per_device(state.params), sk.bytes_per_device(state.opt_state)) == (held, 2 * held + 4)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_batch())
    assert sk.census(made.step, state, batch).sent() == 4 * F + 8  # the shared leaf, and the loss with its weight


@pytest.mark.quick("adafactor-True")
@pytest.mark.parametrize("name, moves", [("adamw", False), ("novograd", False), ("adafactor", True)])
def test_rows_move_for_an_optimizer_alone_that_keeps_other_arrays(name, moves):  # proves F54, F55
    sent = []
    for case in ("one chunk", "v, 2 chunks"):
        init, step = make(case, name)
        found = compiled(step, init(make_params(12), jax.random.key(0)), make_batch())
        sent.append(sum(row.total for row in found.rows))
    assert sent[1] - sent[0] > 4 * 12 * D * F if moves else sent[1] == sent[0]


@pytest.mark.parametrize("case", [pytest.param("loop, 2 chunks", marks=pytest.mark.deep), "uneven, v"])
@pytest.mark.optimized
def test_a_step_writes_in_place(case):  # proves F51
    init, step = make(case, "adamw")
    state = init(make_params(STAGES[case][0]), jax.random.key(0))
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state._replace(key=None)))
    assert step.lower(state, make_batch()).compile().memory_analysis().alias_size_in_bytes == held
    new, _ = step(state, make_batch())
    assert all(x.is_deleted() for x in jax.tree.leaves((state.params, state.opt_state)))
    for a, b in zip(jax.tree.leaves(new.params), jax.tree.leaves(state.params), strict=True):
        assert a.sharding == b.sharding


def test_a_saved_state_is_the_same_on_every_mesh():  # proves F61, F62
    saved = []
    names = ("adamw", "adafactor") if DEEP else ("adafactor",)
    for case in ("one chunk", "loop, 3 chunks", "v, 2 chunks"):
        for name in names:
            state = check(case, name)
            saved.append((name, jax.tree.map(np.asarray, sk.unpadded(state._replace(key=None)))))
    for name in names:
        first, *others = [tree for other, tree in saved if other == name]
        for tree in others:
            assert_close(tree.params, first.params, 1e-6)
            assert jax.tree.structure(tree) == jax.tree.structure(first)
    moved = make("uneven on one device")[0](make_params(7), jax.random.key(0))
    taken = make("uneven, v")[0](moved.params, jax.random.key(0))
    np.testing.assert_array_equal(np.asarray(taken.params["layers"]["b"]), np.asarray(moved.params["layers"]["b"]))


# ---- layouts


def test_alone_it_is_one_stage_a_device():
    stack = P("stage")
    found = specs(sk.pp("stage").layouts(make_params(12), sk.abstract_mesh(stage=4)))
    assert found["layers"]["w"] == found["layers"]["b"] == Specs(stack, stack, stack)
    assert found["out"] == Specs(P(), P(), P())
    single = specs(sk.pp("stage").layouts(make_params(12), sk.abstract_mesh(stage=1)))
    assert single["layers"]["w"] == Specs(P(), P(), P())


@pytest.mark.check
def test_the_plan_of_a_pipeline_has_its_stages():
    """Whatever becomes of the GradFn: a function that wraps it has no stages, and was trained on a wrong order."""
    schedule, sizes = schedules.lockstep(2, 4, 2), {"layers_per_stage": UNEVEN}
    pipe = sk.pipeline(schedule, "stage", **sizes)
    grad_fn = pipe.value_and_grad(*pipelines.PIECES, layer_numbers=True)
    calls = lambda params, batch, keys, *, scale=1: grad_fn(params, batch, keys, scale=scale)  # noqa: E731
    same = pipelined_grad(*pipelines.PIECES, schedule, "stage", layer_numbers=True, **sizes)
    params, traced = jax.eval_shape(lambda: pipelines.make_params(7)), []
    for each, plan, traces in (
        (grad_fn, pipe.plan, False),
        (grad_fn, sk.pp("stage"), False),
        (replace(grad_fn, function=calls), sk.pp(("stage",)), False),
        (same, sk.pp("stage"), True),
        (calls, pipe.plan, True),
    ):
        made = sk.make_train_step(each, optax.sgd(0.1), mesh=sk.abstract_mesh(stage=2), plan=plan)
        state = made.init.abstract(params)
        assert state.params["layers"]["w"].rows == (0, -1, -1, 4, -1, -1, 1, 2, 3, 5, 6, -1)
        if traces:
            traced.append(re.sub("0x[0-9a-f]+", "", str(made.step.trace(state, pipelines.make_batch(8)).jaxpr)))
    assert traced[0] == traced[1]
    assert "stages of 1, 3, 1, 2 layers" in sk.describe(pipe.plan, params, sk.abstract_mesh(stage=2))


def test_a_plan_says_what_it_does_with_a_stack():
    mesh, params = sk.abstract_mesh(stage=2, d=2), make_params(12)
    plan = sk.chain(sk.zero1("d", min_size=1), sk.pp("stage"))
    assert sk.describe(fit_plan(plan, staged(2, 3)), params, mesh).splitlines() == [
        "leaf      shape       at rest     bytes/device  update             bytes/device  why",
        "layers.b  [12, 4]     ('stage',)  96            (('stage', 'd'),)  48            "
        "pp('stage') splits dim 0, 3 chunks in stage order; zero1('d') splits dim 0",
        "layers.w  [12, 6, 4]  ('stage',)  576           (('stage', 'd'),)  288           "
        "pp('stage') splits dim 0, 3 chunks in stage order; zero1('d') splits dim 0",
        "out       [4]         whole       16            ('d',)             8             "
        "pp('stage'): not in the stack 'layers'; zero1('d') splits dim 0",
        "pp('stage') + zero1('d'): 688 bytes per device at rest, 344 per gradient or optimizer moment",
    ]
    uneven = fit_plan(sk.pp("stage"), staged(2, 2, "v", UNEVEN))
    assert sk.describe(uneven, make_params(7), mesh).splitlines()[1] == (
        "layers.b  [7, 4]     ('stage',)  96            ('stage',)  96            "
        "pp('stage') splits dim 0, 2 chunks in stage order, placed as a V, stages of 1, 3, 1, 2 layers"
    )
    assert "pp('stage') splits dim 0\n" in sk.describe(sk.pp("stage"), params, mesh)
    assert "pp('stage'): the axis has one device" in sk.describe(sk.pp("stage"), params, sk.abstract_mesh(stage=1))


@pytest.mark.parametrize(
    "message, call",
    {
        "pp: dim 0 of a leaf of the stack must be its layers, split over axis 'stage' only; leaf layers has no "
        "dims. Move it out of 'layers', or split another dim.": lambda: sk.pp("stage").layouts(
            {"layers": jnp.float32(1)}, sk.abstract_mesh(stage=2)
        ),
        "pp: dim 0 of a leaf of the stack must be its layers, split over axis 'stage' only; leaf layers.b is split "
        "on dim 0 by another strategy. Move it out of 'layers', or split another dim.": lambda: sk.chain(
            sk.ep("expert", lambda path, shape: 0), sk.pp("stage")
        ).layouts(make_params(12), sk.abstract_mesh(stage=2, expert=2)),
    }.items(),
)
def test_what_does_not_fit_is_refused(call, message):
    with value_error(message):
        call()


def test_description_says_how_often_a_stage_gathers_its_weights():
    mesh = sk.make_mesh(stage=2, fsdp=4)
    params = {"layers": {"weight": jnp.zeros((4, 8, 8))}, "out": jnp.zeros((8, 8))}
    for layerwise, how in ((("layers",), "at every tick, forward and backward"), ((), "once a step")):
        plan = sk.chain(sk.pp("stage"), sk.fsdp("fsdp", min_size=1, layerwise=layerwise))
        (line,) = [line for line in sk.describe(plan, params, mesh).splitlines() if line.startswith("layers.weight")]
        assert line.endswith(f"pp('stage') splits dim 0; fsdp('fsdp') splits dim 1, gathered {how}")


# What the loss of a step refuses, the head of a pipeline could return: a sum in bfloat16.
def test_a_head_that_sums_in_16_bits_is_refused():
    def round_total(shared, x, batch):
        loss, _ = pipelines.head(shared, x, batch)
        return sk.Mean(loss.total.astype(jnp.bfloat16), loss.weight)

    step = pipelines.traced_step(schedules.gpipe(2, 2), 2, (pipelines.embed, pipelines.stage, round_total))
    keys = sk.example_keys(jax.random.key(0), 4)
    with pytest.raises(TypeError, match="Mean: the total must be float32, because bfloat16 rounds a sum"):
        jax.eval_shape(step, pipelines.make_params(2), pipelines.make_batch(4), keys)
