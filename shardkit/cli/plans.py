"""From words to what a training run is made of: `data=2 stage=4 --schedule one_f_one_b` to mesh, plan and schedule."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import shardkit as sk
from shardkit import schedules
from shardkit._arguments.checks import either, quoted, spelled
from shardkit._arguments.files import read_file, why
from shardkit.cli.train_options import TrainOptions
from shardkit.meshes.simulated import offer_cpu_devices
from shardkit.models import transformer
from shardkit.planner.candidates import INSIDE, PLANS, grad_fn_of
from shardkit.schedules import Schedule

_LARGEST_FILE = 2**26  # bytes of a schedule; a cell has about ten
_PLANS: dict[str, Callable[[str], sk.Plan]] = {
    **PLANS,
    "zero1": sk.zero1,
    "zero2": partial(sk.zero2, layerwise=("layers",)),
    "ulysses": sk.cp,
    "stage": sk.pp,
}
AXES = (*_PLANS, "model")
_OF_EXAMPLES = ("data", "fsdp", "zero1", "zero2", "expert")  # axes that split the examples of a batch
_BUILDERS = {name: each for name in schedules.__all__ if inspect.isfunction(each := getattr(schedules, name))}
_CHUNKED = tuple(name for name, each in _BUILDERS.items() if "chunks" in inspect.signature(each).parameters)
_OTHER_NAMES = {"1f1b": "one_f_one_b", "zb_h1": "zero_bubble_h1", "zb_v": "zero_bubble_v"}
_PER_STAGE = 4


class PlannedModel(NamedTuple):
    """A transformer on a mesh."""

    config: transformer.Config  # its sizes
    plan: sk.Plan  # how the mesh's axes are used
    schedule: Schedule | None  # that of the pipeline, None without one
    grad_fn: Any  # the GradFn for training
    loss_fn: Any  # the loss for evaluation


def mesh_words(words: tuple[str, ...], where: str = "train") -> dict[str, int]:
    """From `("data=8",)` to `{"data": 8}`, for the command `where`."""
    sizes: dict[str, int] = {}
    for word in words:
        axis, _, size = word.partition("=")
        try:
            count = int(size)
        except ValueError:
            raise ValueError(
                f"{where}: the mesh must be given as AXIS=SIZE; got {word!r}. Write for example data=8."
            ) from None
        if axis not in AXES:
            raise ValueError(
                f"{where}: the axis must be one of {quoted(AXES)}; got {axis!r}. Write for example data=8."
            )
        if axis in sizes:
            raise ValueError(
                f"{where}: axis {axis!r} must be given once; got {' '.join(words)!r}. Remove one of the two."
            )
        sizes[axis] = count
    return sizes


def mesh_of(where: str, words: tuple[str, ...], *, many: bool) -> jax.sharding.Mesh:
    """The mesh of `("data=8",)`, of simulated devices if there are no others; `many` processes have theirs already."""
    sizes = mesh_words(words, where)
    if not many and all(size > 0 for size in sizes.values()):
        offer_cpu_devices(math.prod(sizes.values()))
    return sk.make_mesh(**sizes)


def model_of(o: TrainOptions, sizes: Mapping[str, int]) -> PlannedModel:
    """The transformer of some options, on a mesh of these sizes by axis."""
    if o.sequence and "model" not in sizes:
        raise ValueError(
            f"train: --sequence needs an axis 'model'; the axes are {quoted(sizes)}. Add model=2, or leave the option "
            "out."
        )
    # Without a number of experts, twice the size of axis expert.
    experts = 2 * sizes.get("expert", 0) if o.experts is None else o.experts
    config = transformer.Config(layers=o.layers, dim=o.dim, heads=o.heads, dropout=o.dropout, experts=experts)
    schedule = schedule_of(o, sizes)
    plans = [_PLANS[axis](axis) for axis in sizes if axis != "model"]
    if "model" in sizes:
        rules = transformer.tensor_rules(config, "model", sizes["model"])
        plans.append(sk.tp("model", rules, sequence=o.sequence))
    inside: dict[str, Any] = {axis: axis for axis in (*INSIDE, "ulysses") if axis in sizes}
    axes = transformer.Axes(**inside, sequence=o.sequence)
    if schedule is None:
        loss_fn: Any = transformer.loss_fn(config, axes)
    else:
        pieces = transformer.pieces(config, axes)
        loss_fn = transformer.in_order(sk.pipeline(schedule, "stage").loss(*pieces, layer_numbers=True), axes)
    return PlannedModel(config, sk.chain(*plans), schedule, grad_fn_of(config, axes, schedule), loss_fn)


def schedule_of(o: TrainOptions, sizes: Mapping[str, int]) -> Schedule | None:
    """The schedule of a training run's pipeline, or None where its mesh has no axis "stage"."""
    words = {"schedule": o.schedule, "microbatches": o.microbatches, "chunks": o.chunks}
    given = [f"--{word}" for word, value in words.items() if value is not None]
    if "stage" not in sizes:
        if given:
            raise ValueError(
                f"train: {given[0]} needs an axis 'stage'; the axes are {quoted(sizes)}. Add stage=2, or leave the "
                "option out."
            )
        return None
    stages, examples = sizes["stage"], o.batch // (ways(sizes) * o.accumulate)
    if o.schedule is not None and o.schedule.endswith(".csv"):
        wrong = [word for word in given if word != "--schedule"]
        if wrong:
            raise ValueError(
                f"train: {', '.join(wrong)} must not come with a --schedule file, which holds the whole schedule. "
                "Leave it out."
            )
        schedule = read("train", Path(o.schedule))
    else:
        # The most, up to four per stage, that divide the examples; a multiple of the stages if possible.
        counts = [count for count in range(1, _PER_STAGE * stages + 1) if examples % count == 0]
        most = max(counts, key=lambda count: (count % stages == 0, count))
        count = most if o.microbatches is None else o.microbatches
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
    return schedule


def described(schedule: Schedule) -> str:
    """A schedule in a line: its name, sizes and simulated bubble."""
    s = schedule
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
        text = read_file(file, _LARGEST_FILE).decode()
    except (OSError, ValueError) as error:  # ValueError: no text, or a name with a zero
        raise ValueError(
            f"{where}: {file} must be a schedule as Schedule.to_csv writes it; it cannot be read "
            f"({why(error)}). Check the path."
        ) from error
    return replace(Schedule.from_csv(text), name=file.stem)


def ways(sizes: Mapping[str, int]) -> int:
    """In how many parts a mesh splits the examples of a batch."""
    return int(np.prod([sizes[axis] for axis in _OF_EXAMPLES if axis in sizes]))
