"""The program of a candidate, as a module that a training script imports."""

from __future__ import annotations

from collections.abc import Mapping

from shardkit._arguments import checks
from shardkit.models import transformer
from shardkit.planner.candidates import Candidate, list_candidates
from shardkit.planner.counted import CountedCandidate
from shardkit.planner.layout import INSIDE, Layout


def source_of(
    candidate: Candidate,
    *,
    batch: int = 0,
    sequence: int = 0,
    options: Mapping[str, bool | int | float | str] | None = None,
) -> str:
    """Writes the Python source of a layout: mesh, configuration, schedule, plan and train step.

    Args:
        candidate: a candidate of `search` or `estimate`, of a counted model or of a model that `models.transformer`
            runs.
        batch: sequences per step of a transformer, over all devices.
        sequence: tokens per sequence of a transformer.
        options: compiler options, such as the result of `aot.tune`; the source contains them.

    Returns:
        The source of a module. For a transformer it has `train_step(optimizer, mesh=None)`, which returns a TrainStep,
            and `make()`, which returns the step with the shapes of its arguments for `shardkit aot` and
            `audit`. For a counted model it has `train_step(loss_fn, optimizer, mesh=None)`.

    Raises:
        TypeError: options that are not a mapping of names to plain values.
        ValueError: sizes that `models.transformer` cannot run.

    Example:
        >>> model = sk.planner.Model(layers=4, hidden=64, heads=4, vocabulary=256)
        >>> best = sk.planner.search(model, chip="v5e", chips=8, batch=16, sequence=128)[0]
        >>> from shardkit.planner.source import source_of
        >>> print(source_of(best, batch=16, sequence=128))
        \"\"\"data=...
    """
    # For its check: what is no candidate is refused with a sentence.
    [candidate] = list_candidates([candidate])
    if isinstance(candidate, CountedCandidate):
        source = _write_counted(candidate)
    else:
        batch, sequence = checks.integers_from_one("planner", batch=batch, sequence=sequence)
        source = _write_transformer(candidate, batch, sequence)
    return source + _write_options(options)


def _write_counted(candidate: CountedCandidate) -> str:
    layout = candidate.layout
    plan = f'sk.{layout.plan}("data")'
    if layout.plan == "layerwise":
        plan = f'sk.fsdp("data", layerwise={candidate.model.layerwise!r})'
    return _COUNTED.format(layout=layout, plan=plan, data=layout.data, accumulate=layout.accumulate)


def _write_transformer(candidate: Candidate, batch: int, sequence: int) -> str:
    layout = candidate.layout
    pipeline = ""
    gradient = "sk.value_and_grad(transformer.loss_fn(CONFIG, AXES))"
    schedule = layout.schedule
    if schedule is not None:
        pipeline = f'PIPELINE = sk.pipeline({_write_schedule(schedule.name, layout)}, "stage")\n'
        pieces = "*transformer.pieces(CONFIG, AXES), layer_numbers=True"
        gradient = f"transformer.in_order(PIPELINE.value_and_grad({pieces}), AXES)"
    return _MODULE.format(
        layout=layout,
        config=_write_config(candidate.config()),
        axes=_write_axes(layout, candidate.model.kernel),
        mesh=", ".join(f"{axis}={size}" for axis, size in layout.axes.items()),
        plan=_write_plan(layout),
        pipeline=pipeline,
        gradient=gradient,
        accumulate=layout.accumulate,
        batch=batch,
        sequence=sequence,
    )


def _write_config(config: transformer.Config) -> str:
    """The configuration, without the sizes that are as by default."""
    default = transformer.Config()
    sizes = []
    for name in vars(default):
        value = getattr(config, name)
        if value != getattr(default, name):
            sizes.append(f"{name}={value!r}")
    lines = ",\n    ".join(sizes)
    return f"transformer.Config(\n    {lines},\n)"


# The axes of the model are those of `Candidate.grad_fn`, written out; data and fsdp ways are the plan's alone.
def _write_axes(layout: Layout, kernel: bool) -> str:
    axes = [f"{axis}={axis!r}" for axis in INSIDE if axis in layout.axes]
    if "model" in layout.axes:
        axes.append("sequence=True")
    if kernel:
        axes.append("kernel=True")
    if layout.impl != "auto":
        axes.append(f"impl={layout.impl!r}")
    return f"transformer.Axes({', '.join(axes)})"


def _write_plan(layout: Layout) -> str:
    plans = []
    for axis, size in layout.axes.items():
        plans.append(_PLANS[axis].format(ways=size))
    if len(plans) == 1:
        return plans[0]
    lines = ",\n    ".join(plans)
    return f"sk.chain(\n    {lines},\n)"


def _write_schedule(name: str, layout: Layout) -> str:
    sizes = [layout.stage, layout.microbatches]
    if layout.chunks > 1:
        sizes.append(layout.chunks)
    return f"sk.schedules.{name}({', '.join(str(size) for size in sizes)})"


def _write_options(options: Mapping[str, bool | int | float | str] | None) -> str:
    """The lines of a module that name options of the compiler."""
    checked = checks.compiler_options("planner", {} if options is None else options)
    if not checked:
        return ""
    lines = "".join(f"    {name!r}: {value!r},\n" for name, value in checked.items())
    return _OPTIONS.format(lines=lines)


_PLANS = {
    "data": 'sk.dp("data")',
    "fsdp": 'sk.fsdp("fsdp", layerwise=("layers",))',
    "expert": 'sk.ep("expert")',
    "context": 'sk.cp("context")',
    "model": 'sk.tp("model", transformer.tensor_rules(CONFIG, "model", {ways}), sequence=True)',
    "stage": "PIPELINE.plan",
}
_MODULE = '''"""{layout}"""

import jax
import jax.numpy as jnp
import optax

import shardkit as sk
from shardkit.models import transformer

CONFIG = {config}
AXES = {axes}
MESH = dict({mesh})  # the last axis has the nearest chips
{pipeline}PLAN = {plan}
ACCUMULATE = {accumulate}  # microbatches per step
BATCH, SEQUENCE = {batch}, {sequence}  # sequences per step over all devices, and their tokens


def grad_fn():
    """The loss with its gradient, for `make_train_step`; a batch is {{"tokens": ..., "targets": ...}}, int32."""
    return {gradient}


def train_step(optimizer, mesh=None):
    """`init` and `step` over all devices, or over a mesh of your own with these axes."""
    mesh = sk.make_mesh(**MESH) if mesh is None else mesh
    return sk.make_train_step(
        grad_fn(), optimizer, mesh=mesh, plan=PLAN, accumulate=ACCUMULATE, precision="bf16"
    )


def make():
    """The step with the shapes of its arguments, for `shardkit aot` and `audit`: no device is needed."""
    init, step = train_step(optax.adamw(3e-4), sk.abstract_mesh(**MESH))
    state = init.abstract(lambda key: transformer.init(key, CONFIG))
    tokens = jax.ShapeDtypeStruct((BATCH, SEQUENCE), jnp.int32)
    return step, state, {{"tokens": tokens, "targets": tokens}}
'''

_COUNTED = '''"""{layout}"""

import shardkit as sk

MESH = dict(data={data})
PLAN = {plan}
ACCUMULATE = {accumulate}  # microbatches per step


def train_step(loss_fn, optimizer, mesh=None):
    """`init` and `step` over all devices, or over a mesh of your own with these axes."""
    mesh = sk.make_mesh(**MESH) if mesh is None else mesh
    return sk.make_train_step(
        sk.value_and_grad(loss_fn), optimizer, mesh=mesh, plan=PLAN, accumulate=ACCUMULATE, precision="bf16"
    )
'''

_OPTIONS = """
# Options of the compiler, as `sk.aot.compile` takes them. A job gets them in its environment before jax starts, each as
# --name=value: those of TPUs in LIBTPU_INIT_ARGS, those of GPUs in XLA_FLAGS.
COMPILER_OPTIONS = {{
{lines}}}
"""
