"""From pipeline options, `--schedule interleaved --chunks 2`, to a schedule and the functions of a training run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

import shardkit as sk
from shardkit import schedules
from shardkit._check import either, quoted, spelled
from shardkit.models import transformer
from shardkit.schedules import Schedule

_BUILDERS = {name: each for name in schedules.__all__ if inspect.isfunction(each := getattr(schedules, name))}
_CHUNKED = tuple(name for name, each in _BUILDERS.items() if "chunks" in inspect.signature(each).parameters)
_OTHER_NAMES = {"1f1b": "one_f_one_b", "zb_h1": "zero_bubble_h1", "zb_v": "zero_bubble_v"}
# Axes that split the examples of a batch.
_OF_EXAMPLES = ("data", "fsdp", "zero1", "zero2", "expert")
_PER_STAGE = 4


@dataclass(frozen=True)
class Pipeline:
    """How a pipeline runs: its schedule, and the options of `Pipeline.value_and_grad`."""

    schedule: Schedule
    mode: Literal["masked", "branch"]
    recompute: bool

    def __str__(self) -> str:
        s = self.schedule
        chunks = f" x {s.chunks} chunks" if s.chunks > 1 else ""
        bubble = s.simulate(synchronous=True).bubble
        sizes = f"{s.devices} stages{chunks}, {s.microbatches} microbatches"
        return f"{s.name}, {sizes}; simulated bubble {bubble:.1%} of the work"


def named(where: str, name: str, devices: int, microbatches: int, chunks: int | None) -> Schedule:
    """The schedule of that name."""
    name = spelled(where, "schedule", name, tuple(_BUILDERS), _OTHER_NAMES)
    build = _BUILDERS[name]
    if name in _CHUNKED:
        return build(devices, microbatches, 1 if chunks is None else chunks)
    if chunks is not None:
        raise ValueError(
            f"{where}: schedule {name!r} does not take chunks; got {chunks}. Leave --chunks out, or choose "
            f"{either([*map(repr, _CHUNKED)])}."
        )
    return build(devices, microbatches)


def read(where: str, file: Path) -> Schedule:
    """Reads a schedule from a CSV file; its name is that of the file."""
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{where}: {file} must be a file that --to-csv wrote; it cannot be read ({type(error).__name__}). Check "
            "the path."
        ) from error
    return replace(Schedule.from_csv(text), name=file.stem)


def pipeline_of(options: Any, sizes: Mapping[str, int]) -> Pipeline | None:
    """The pipeline of a training run, or None where its mesh has no axis "stage".

    Args:
        options: of `shardkit train`.
        sizes: the mesh's axes.
    """
    o = options
    words = {"schedule": o.schedule, "microbatches": o.microbatches, "chunks": o.chunks}
    given = [f"--{word}" for word, value in words.items() if value is not None]
    given += ["--mode"] * (o.mode != "masked") + ["--no-recompute"] * (not o.recompute)
    if "stage" not in sizes:
        if given:
            raise ValueError(
                f"train: {given[0]} needs an axis 'stage'; the axes are {quoted(sizes)}. Add stage=2, or leave the "
                "option out."
            )
        return None
    stages, examples = sizes["stage"], o.batch // (_ways(sizes) * o.accumulate)
    if o.schedule is not None and o.schedule.endswith(".csv"):
        wrong = [word for word in given if word in ("--microbatches", "--chunks")]
        if wrong:
            raise ValueError(
                f"train: {', '.join(wrong)} must not come with a --schedule file, which holds the whole schedule. "
                "Leave it out."
            )
        schedule = read("train", Path(o.schedule))
    else:
        count = _most(examples, stages) if o.microbatches is None else o.microbatches
        schedule = named("train", o.schedule or "lockstep", stages, count, o.chunks)
    if schedule.devices != stages:
        raise ValueError(
            f"train: the schedule must be for the devices of axis 'stage'; got a schedule for {schedule.devices} over "
            f"{stages} devices. Write stage={schedule.devices}, or pass another schedule."
        )
    if examples % schedule.microbatches:
        raise ValueError(
            f"train: the microbatches must divide the examples of a device; got {schedule.microbatches} microbatches "
            f"for {examples} examples. Change --microbatches or --batch."
        )
    if o.layers % (stages * schedule.chunks):
        raise ValueError(
            f"train: the layers must be divisible by stages x chunks; got {o.layers} layers for {stages} x "
            f"{schedule.chunks}. Change --layers, or use fewer stages or chunks."
        )
    return Pipeline(schedule, o.mode, o.recompute)


def functions(config: transformer.Config, axes: transformer.Axes, pipeline: Pipeline | None) -> tuple[Any, Any]:
    """The GradFn for training and the loss for evaluation."""
    if pipeline is None or axes.stage is None:
        loss_fn = transformer.loss_fn(config, axes)
        return sk.value_and_grad(loss_fn), loss_fn
    pieces, pipe = transformer.pieces(config, axes), sk.pipeline(pipeline.schedule, "stage")
    how: dict[str, Any] = {"mode": pipeline.mode, "layer_numbers": True}
    grad_fn = pipe.value_and_grad(*pieces, recompute=pipeline.recompute, **how)
    return transformer.in_order(grad_fn, axes), transformer.in_order(pipe.loss(*pieces, **how), axes)


def plain_loss(
    config: transformer.Config, options: Any, sizes: Mapping[str, int], pipeline: Pipeline | None
) -> Callable[..., Any]:
    """The loss of the whole batch on one device.

    With experts it uses the run's own microbatches, because the router's losses are computed per microbatch, over all
    devices.
    """
    count = options.accumulate * (pipeline.schedule.microbatches if pipeline else 1)
    if not config.experts or count == 1:
        return transformer.loss_fn(config)
    loss_fn, ways = transformer.loss_fn(replace(config, microbatches=count)), _ways(sizes)

    def loss(params: Any, batch: Any, keys: jax.Array) -> Any:
        order = np.arange(options.batch).reshape(ways, count, -1).swapaxes(0, 1).ravel()
        return loss_fn(params, {name: x[order] for name, x in batch.items()}, keys[order])

    return loss


def _ways(sizes: Mapping[str, int]) -> int:
    return int(np.prod([sizes[axis] for axis in _OF_EXAMPLES if axis in sizes]))


def _most(examples: int, stages: int) -> int:
    """The most microbatches, up to four per stage, that divide the examples; a multiple of the stages if possible."""
    counts = [count for count in range(1, _PER_STAGE * stages + 1) if examples % count == 0]
    return max(counts, key=lambda count: (count % stages == 0, count))
