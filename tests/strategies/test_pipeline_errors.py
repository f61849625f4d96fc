"""Every error of a pipeline in full wording, and what branches may and may not hold."""

import inspect
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import schedules
from shardkit.on_device.pipelines import PipelineGradFn, PipelineLoss
from shardkit.schedules import Schedule
from shardkit.schedules.stages import Stages
from support import pipelines
from support.pipelines import PIECES, embed, head, make_batch, make_params, mesh_of, pipelined_grad, stage, traced_step
from support.training import recording_sgd

KEY = jax.random.key(0)


def trace(schedule: Schedule, layers: int = 2, examples: int = 4, pieces: Any = PIECES, **how: Any) -> Any:
    """Traces a step; runs nothing."""
    step = traced_step(schedule, layers, pieces, **how)
    return jax.eval_shape(step, make_params(layers), make_batch(examples), sk.example_keys(KEY, examples))


def refused(message: str, error: type[Exception] = ValueError) -> Any:
    return pytest.raises(error, match=rf"^{re.escape(message)}(\n-+\n|$)")  # jax adds a note about its frames


def test_an_unknown_mode():
    rule = "mode must be 'masked' or 'branch'; got 'fast'. Pass for example mode='masked'."
    with refused(f"pipeline.value_and_grad: {rule}"):
        pipelined_grad(*PIECES, schedules.gpipe(2, 2), "stage", mode="fast")
    with refused(f"pipeline.loss: {rule}"):
        pipelines.pipelined_loss(*PIECES, schedules.gpipe(2, 2), "stage", mode="fast")
    with refused(f"pipeline.loss: {rule}"):
        sk.pipeline(schedules.gpipe(2, 2), "stage").loss(*PIECES, mode="fast")


def test_an_illegal_schedule_comes_with_its_grid():
    good = schedules.gpipe(2, 1)
    late = Schedule((good.rows[0][:1], *good.rows[1:]), name="gpipe")
    with refused(
        "gpipe: every stage must run every microbatch; 0B0 is missing on device 0. Add it.\n"
        "tick      0   1   2   3\n"
        "device 0  0F0 .   .   .\n"
        "              ^\n"
        "device 1  .   1F0 1B0 ."
    ):
        pipelined_grad(*PIECES, late, "stage")


@pytest.mark.check
def test_a_plan_with_the_stages_of_another_pipeline():
    """Layers would be where another schedule looks for them."""
    one, two = (sk.pipeline(schedules.lockstep(2, 4, chunks), "stage") for chunks in (1, 2))
    sentence = (
        "pp: the plan of a pipeline must have the stages of its schedule, 2 devices; got the stages of another, 2 "
        "devices, 2 chunks in stage order. Pass the plan of the same pipeline, or chain(pp('stage'), ...)."
    )
    mesh = sk.abstract_mesh(stage=2)
    with refused(sentence):
        sk.make_train_step(one.value_and_grad(*PIECES), optax.sgd(0.1), mesh=mesh, plan=two.plan)
    with refused(sentence):
        sk.make_eval_step(one.loss(*PIECES), mesh=mesh, plan=two.plan)
    again = sk.pipeline(schedules.gpipe(2, 8), "stage")  # other microbatches, the same stages
    sk.make_eval_step(again.loss(*PIECES), mesh=mesh, plan=one.plan)


# Catches a mean of arrays that is summed over the stages, or a message from deep inside the pipeline.
@pytest.mark.parametrize(
    ("aux", "told"),
    [({"a": sk.Mean(np.ones(2, "f"), 1)}, "float32[2] for a"), ({"a": {"b": 1.0}}, "float32[] for a.b")],
)
def test_a_pipelines_means_are_scalars(aux, told):
    pieces = (embed, stage, lambda *args: (head(*args)[0], aux))
    with refused(
        f"pipeline.value_and_grad: the auxiliary means of a pipeline must be scalars by name; got {told}. Return "
        "scalars, or train without a pipeline."
    ):
        trace(schedules.gpipe(2, 2), pieces=pieces)


@pytest.mark.check
def test_a_pipelines_loss_in_place_of_its_gradfn():
    """And the other way round: `value_and_grad` of the loss would lose the stages."""
    pipe, mesh = sk.pipeline(schedules.gpipe(2, 2), "stage"), sk.abstract_mesh(stage=2)
    with refused(
        "make_train_step: grad_fn must be a GradFn; got a PipelineLoss. Pass pipe.value_and_grad(embed, stage, head) "
        "of pipe = sk.pipeline(...).",
        TypeError,
    ):
        sk.make_train_step(pipe.loss(*PIECES), optax.sgd(0.1), mesh=mesh, plan=pipe.plan)
    with refused(
        "make_eval_step: loss_fn must be a loss function; got a PipelineGradFn. Pass pipe.loss(embed, stage, head) of "
        "pipe = sk.pipeline(...).",
        TypeError,
    ):
        sk.make_eval_step(pipe.value_and_grad(*PIECES), mesh=mesh, plan=pipe.plan)


@pytest.mark.check
@pytest.mark.parametrize(
    "message, call",
    {
        "PipelineGradFn: stages must be a Stages; got 'stage'. Pass a shardkit.schedules.stages.Stages.": lambda: (
            PipelineGradFn("stage", lambda *_: None)
        ),
        "PipelineLoss: function must be a function; got None. Pass the function itself.": lambda: PipelineLoss(
            Stages("stage"), None
        ),
        "pipeline: schedule must be a Schedule; got the function 'gpipe'. Pass for example "
        "sk.schedules.gpipe(devices=2, microbatches=4).": lambda: sk.pipeline(schedules.gpipe, "stage"),
        "pipeline.value_and_grad: recompute must be True or False; got 1. Pass for example recompute=True.": lambda: (
            sk.pipeline(schedules.gpipe(2, 2), "stage").value_and_grad(*PIECES, recompute=1)
        ),
    }.items(),
)
def test_a_pipeline_of_something_else(call, message):
    with refused(message, TypeError):
        call()


def test_a_schedule_for_another_number_of_devices():
    grad_fn = pipelined_grad(*PIECES, schedules.gpipe(4, 2), "stage", layer_numbers=True)
    specs = {"in_specs": (P("stage"), P()), "out_specs": P()}
    run = jax.shard_map(
        lambda stack, batch: grad_fn(make_params(4) | {"layers": stack}, batch, None), mesh=mesh_of(2), **specs
    )
    with refused(
        "pipeline.value_and_grad: the schedule must be for the devices of axis 'stage'; it is for 4 and there are 2. "
        "Make one with devices=2."
    ):
        jax.eval_shape(run, make_params(4)["layers"], make_batch(4))


def test_microbatches_that_do_not_divide_the_batch():  # proves S77
    with refused(
        "pipeline.value_and_grad: a device's examples must be divisible by the schedule's microbatches; got 4 examples "
        "for 3 microbatches. Choose another batch or a schedule for other microbatches."
    ):
        trace(schedules.gpipe(2, 3))


@pytest.mark.parametrize(
    ("params", "found"), [({"blocks": jnp.zeros(2)}, "'blocks'"), ([jnp.zeros(2)], "list"), ({}, "none")]
)
@pytest.mark.parametrize(
    ("where", "make"), [("pipeline.value_and_grad", pipelined_grad), ("pipeline.loss", pipelines.pipelined_loss)]
)
def test_parameters_without_a_stack(where, make, params, found):
    fn = make(*PIECES, schedules.gpipe(2, 2), "stage")
    run = jax.shard_map(lambda batch: fn(params, batch, None), mesh=mesh_of(2), in_specs=P(), out_specs=P())
    with refused(
        f"{where}: the parameters must be a mapping with the entry 'layers', the stack; got {found}. Put the "
        "stack of layers under 'layers', and everything else beside it."
    ):
        jax.eval_shape(run, make_batch(2))


@pytest.mark.parametrize(
    ("wrong", "returned"),
    [
        (lambda x: x[..., :3], "float32[2,2,3]"),
        (lambda x: x.astype(jnp.bfloat16), "bfloat16[2,2,4]"),
        (lambda x: (x, x), "float32[2,2,4], float32[2,2,4]"),
    ],
)
def test_a_stage_whose_output_differs_from_its_input(wrong, returned):
    pieces = (embed, lambda layers, x, keys: wrong(stage(layers, x, keys)), head)
    with refused(
        "pipeline.value_and_grad: a stage must return the shapes and dtypes of its input; it was passed "
        f"float32[2,2,4] and returned {returned}. Pad to a common width, or change them in embed or head."
    ):
        trace(schedules.gpipe(2, 2), pieces=pieces)


@pytest.mark.check
def test_a_piece_that_takes_other_arguments():
    with refused(
        "pipeline.loss: stage must take (layers, x, keys); got (layers, x, keys, stats). Take these three: a pipeline "
        "passes no carried state, and batch statistics need a step without one.",
        TypeError,
    ):
        pipelines.pipelined_loss(embed, lambda layers, x, keys, stats: x, head, schedules.gpipe(2, 2), "stage")


def test_layers_in_a_list():
    def one_by_one(layers: Any, x: jax.Array, keys: Any) -> jax.Array:
        for weights in layers:
            x = x @ weights["w"]
        return x

    pipe = sk.pipeline(schedules.gpipe(2, 2), "stage")
    grad_fn = pipe.value_and_grad(lambda shared, batch, keys: batch, one_by_one, lambda shared, x, batch: x.sum())
    init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh_of(2), plan=pipe.plan)
    message = (
        "pipeline.value_and_grad: the layers must be one stack, a pytree of leaves with the layer as dim 0; got a "
        "list of 2. Stack them once, before init, with jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers).\n"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        step.lower(init({"layers": [{"w": jnp.ones((4, 4))}] * 2}, KEY), jnp.ones((4, 4)))


def train_step(schedule: Schedule, plan: Any = None, **how: Any) -> Any:
    grad_fn = pipelined_grad(*PIECES, schedule, "stage", layer_numbers=True, **how)
    return sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh_of(2), plan=plan or sk.pp("stage"))


STAGES = {  # of a stack that does not go with its schedule, or with layers_per_stage=
    "the schedule is for 4 devices; axis 'stage' has 2. Make the mesh with 4 devices there, or the schedule with "
    "devices=2.": (schedules.gpipe(4, 2), 4, {}),
    "the layers of a stack must be divisible by its stages; got 6 layers over 4 stages. Pass layers_per_stage=, or "
    "choose another number of layers or stages.": (schedules.lockstep(2, 2, 2), 6, {}),
} | {
    f"layers_per_stage= must give each of 2 stages at least one layer, 6 in all; got {layers}. Pass 2 "
    "numbers that add up to 6.": (schedules.gpipe(2, 2), 6, {"layers_per_stage": layers})
    for layers in [(1, 2), (6,), (2, 2, 2), (6, 0), (7, -1), (3, 2), (3, 2, 1)]
}


@pytest.mark.parametrize("message, given", STAGES.items())
def test_a_stack_that_does_not_go_with_its_stages(given, message):
    schedule, layers, how = given
    with refused(f"pp: {message}"):
        train_step(schedule, **how)[0](make_params(layers), KEY)


@pytest.mark.parametrize("build", ["train", "eval"])
def test_a_plan_without_pp(build):
    with refused(
        "pp: the plan of a pipeline must have pp('stage'), which assigns layers to stages; got dp('stage'). Pass "
        "chain(pp('stage'), ...)."
    ):
        if build == "train":
            train_step(schedules.gpipe(2, 2), sk.dp("stage"))
        loss = pipelines.pipelined_loss(*PIECES, schedules.gpipe(2, 2), "stage")
        sk.make_eval_step(loss, mesh=mesh_of(2), plan=sk.dp("stage"))


# ---- branches


def line_of(function: Any, text: str) -> str:
    """Where a function of this file has some text, as errors name it."""
    lines, first = inspect.getsourcelines(function)
    [offset] = [i for i, line in enumerate(lines) if text in line]
    return f"{Path(__file__).name}:{first + offset} ({function.__name__})"


def sending(layers: Any, x: jax.Array, keys: Any) -> jax.Array:
    return stage(layers, x, keys) + 0 * sk.shift(x, "model")


def summing(layers: Any, x: jax.Array, keys: Any) -> jax.Array:
    return stage(layers, x, keys) / lax.psum(x, "stage")


@jax.custom_vjp
def plain(x: jax.Array) -> jax.Array:
    return x


plain.defvjp(lambda x: (x, None), lambda _, dx: (lax.pcast(lax.psum(dx, "stage"), "stage", to="varying"),))


def only_backward(layers: Any, x: jax.Array, keys: Any) -> jax.Array:
    return stage(layers, plain(x), keys)


REFUSED = [
    (sending, "ppermute", "model", (sending, "sk.shift")),
    (summing, "all_reduce", "stage", (summing, "lax.psum")),
    (only_backward, "all_reduce", "stage", (only_backward, "plain(x)")),
]


def beside(stage_fn: Any, mode: str, recompute: bool = True) -> Any:
    """A step over stages and `model`, over which only the stage itself sends."""
    schedule = schedules.one_f_one_b(2, 4)
    grad_fn = pipelined_grad(
        embed, stage_fn, head, schedule, "stage", mode=mode, recompute=recompute, layer_numbers=True
    )
    mesh = sk.make_mesh(jax.devices()[:4], stage=2, model=2)
    return sk.make_train_step(grad_fn, recording_sgd(0.5), mesh=mesh, plan=sk.pp("stage"))


@pytest.mark.quick("pipe axis-False", "derivative-True", "ppermute-False")
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize(("stage_fn", "kind", "axis", "line"), REFUSED, ids=["ppermute", "pipe axis", "derivative"])
def test_branches_refuse_what_may_not_run_apart(stage_fn, kind, axis, line, recompute):  # proves F39
    init, step = beside(stage_fn, "branch", recompute)
    state = init(make_params(2), KEY)
    with refused(
        "pipeline.value_and_grad: mode='branch': a stage must hold no ppermute and no collective over axis 'stage', "
        f"because devices take different branches there; got {kind} over '{axis}' at {line_of(*line)}. "
        "Use mode='masked'."
    ):
        step.trace(state, make_batch(4))


def test_evaluation_in_branches_looks_at_the_forward_pass_alone():
    mesh = sk.make_mesh(jax.devices()[:2], stage=2)
    build = lambda fn: sk.make_eval_step(  # noqa: E731
        pipelines.pipelined_loss(embed, fn, head, schedules.gpipe(2, 4), "stage", mode="branch", layer_numbers=True),
        mesh=mesh,
        plan=sk.pp("stage"),
    )
    evaluate = build(only_backward)
    assert np.isfinite(evaluate(make_params(2), make_batch(4))["loss"])
    with refused(
        "pipeline.loss: mode='branch': a stage must hold no ppermute and no collective over axis 'stage', because "
        f"devices take different branches there; got all_reduce over 'stage' at {line_of(summing, 'lax.psum')}. "
        "Use mode='masked'."
    ):
        build(summing)(make_params(2), make_batch(4))


# Alone catches that the older call is gone, says nothing, or builds another pipeline.
def test_the_call_of_0_1_warns_and_gives_the_same():
    params, batch, keys = make_params(2), make_batch(4), sk.example_keys(KEY, 4)
    message = (
        "sk.pipeline_value_and_grad(embed, stage, head, schedule, axis) is deprecated: use "
        "sk.pipeline(schedule, axis).value_and_grad(embed, stage, head)."
    )
    with pytest.warns(DeprecationWarning, match=re.escape(message)):
        older = sk.pipeline_value_and_grad(*PIECES, schedules.gpipe(2, 2), "stage", layer_numbers=True)
    newer = pipelined_grad(*PIECES, schedules.gpipe(2, 2), "stage", layer_numbers=True)
    programs = []
    for grad_fn in (older, newer):

        def total(layers, batch, keys, grad_fn=grad_fn):
            return sk.vary(grad_fn(params | {"layers": layers}, batch, keys)[0].total, "stage")[None]

        specs = {"in_specs": (P("stage"), P(), P()), "out_specs": P("stage")}
        run = jax.shard_map(total, mesh=mesh_of(2), **specs)
        programs.append(str(jax.make_jaxpr(run)(params["layers"], batch, keys)))
    assert programs[0] == programs[1]
    assert "pipeline_value_and_grad" not in sk.__all__


# Alone catches a name of one letter: `at=` has the paths of the arguments, and a text is taken for its letters.
def test_a_lazy_leaf_of_a_stage_is_named_by_its_path():
    mesh = sk.make_mesh(jax.devices()[:4], stage=2, fsdp=2)
    plan = sk.chain(sk.pp("stage"), sk.fsdp("fsdp", layerwise=("layers",), min_size=1))

    def embed(shared, batch, keys):
        return batch @ shared["w"]

    def stage(layers, x, keys):
        return x @ layers["w"][0]

    def head(shared, x, batch):
        return sk.Mean.of(x**2)

    grad_fn = sk.pipeline(schedules.gpipe(2, 2), "stage").value_and_grad(embed, stage, head)
    init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh, plan=plan)
    state = init({"w": jnp.ones((4, 4)), "layers": {"w": jnp.ones((2, 4, 4))}}, KEY)
    with pytest.raises(TypeError, match=r"^layers\.w, which is sharded over 'fsdp', was used before it was gathered\."):
        step(state, jnp.ones((4, 4)))
