"""What the planner returns: a layout, a candidate, and the table of candidates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from shardkit._arguments.typed import ITERABLE, check_kind
from shardkit.meshes.mesh import make_mesh
from shardkit.models import transformer
from shardkit.on_device.gradient import GradFn, value_and_grad
from shardkit.planner.model import Model
from shardkit.plans.plan import Plan, chain
from shardkit.schedules import Schedule, interleaved, one_f_one_b
from shardkit.strategies.context import cp
from shardkit.strategies.data import dp
from shardkit.strategies.expert import ep
from shardkit.strategies.pipeline import pipeline
from shardkit.strategies.tensor import tp
from shardkit.strategies.zero import fsdp

# The sizes that models.transformer has as they are by default.
_OURS = ("gated", "head_size", "expert_ffn", "shared", "dense", "attention", "extra")
REMAT = ("none", "selective", "full")
INSIDE = ("model", "context", "expert", "stage")  # mesh axes over which the model itself communicates
# The plan of each mesh axis that needs no more than its name, of parameters with a stack "layers".
PLANS: Mapping[str, Callable[[str], Plan]] = MappingProxyType(
    {"data": dp, "fsdp": partial(fsdp, layerwise=("layers",)), "expert": ep, "context": cp}
)


class Layout(NamedTuple):
    """The mesh sizes and the recomputation of a plan.

    Attributes:
        data: data-parallel ways, which replicate the state.
        fsdp: ways over which parameters, gradients and optimizer state are sharded, layer by layer.
        tensor: tensor-parallel ways, with sequence parallelism.
        accumulate: microbatches per step.
        remat: what the backward recomputes: "none", "selective" (the attention scores) or "full" (each layer).
        context: ways over which each sequence is split, with ring attention in zigzag order.
        expert: ways over which the experts are split; they split the batch too.
        stage: stages of a pipeline, which runs 1F1B and recomputes each stage from its input.
        chunks: chunks of layers on each stage, which the pipeline interleaves.
        microbatches: microbatches of the pipeline, of each of the `accumulate` ones.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    accumulate: int = 1
    remat: str = "none"
    context: int = 1
    expert: int = 1
    stage: int = 1
    chunks: int = 1
    microbatches: int = 1

    @property
    def chips(self) -> int:
        """Number of chips."""
        return math.prod(self._ways().values())

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the mesh axes, without those of size 1 (but one axis at least); the last has the nearest chips."""
        return {name: size for name, size in self._ways().items() if size > 1} or {"data": 1}

    @property
    def parts(self) -> int:
        """Into how many parts the examples of a step are split: over devices, and one after the other."""
        return self.data * self.fsdp * self.expert * self.accumulate * self.microbatches

    @property
    def schedule(self) -> Schedule | None:
        """The pipeline's schedule; None without stages."""
        if self.stage == 1:
            return None
        if self.chunks == 1:
            return one_f_one_b(self.stage, self.microbatches)
        return interleaved(self.stage, self.microbatches, self.chunks)

    def _ways(self) -> dict[str, int]:
        return {
            "stage": self.stage,
            "data": self.data,
            "fsdp": self.fsdp,
            "expert": self.expert,
            "context": self.context,
            "model": self.tensor,
        }

    def __str__(self) -> str:
        return " ".join(f"{name}={getattr(self, name)}" for name in columns([self]))


_SELDOM = ("context", "expert", "stage", "chunks", "microbatches")


def columns(layouts: Sequence[Layout]) -> list[str]:
    """The fields by which layouts are shown: without axes that all of them do without."""
    names = layouts[0]._fields if layouts else Layout._fields
    return [name for name in names if name not in _SELDOM or any(getattr(each, name) > 1 for each in layouts)]


class Candidate(NamedTuple):
    """A layout and its estimate, per device and step, and what runs it.

    Attributes:
        model: the sizes of the model.
        layout: the layout.
        state_bytes: parameters, optimizer state and gradients, and gathered layers.
        activation_bytes: residuals of the backward.
        usable_bytes: the usable share of the chip's memory.
        compute_seconds: time of compute.
        hidden_seconds: time of FSDP and data-parallel communication, which can overlap with compute.
        exposed_seconds: time of what a layer or a stage waits for, which cannot: of tensor ways, experts, stages, and
            of a ring that takes longer than its attention.
        mfu: model FLOPs utilization, a fraction.
        by_axis: (axis of the layout, seconds on its wire, hidden or not).
        bubble: what the pipeline wastes over its work, a fraction; it is part of the compute and exposed seconds.
    """

    model: Model
    layout: Layout
    state_bytes: float
    activation_bytes: float
    usable_bytes: float
    compute_seconds: float
    hidden_seconds: float
    exposed_seconds: float
    mfu: float
    by_axis: tuple[tuple[str, float], ...] = ()
    bubble: float = 0.0

    @property
    def bytes(self) -> float:
        """Bytes of memory in total."""
        return self.state_bytes + self.activation_bytes

    @property
    def fits(self) -> bool:
        """Whether the bytes are at most the usable ones."""
        return self.bytes <= self.usable_bytes

    @property
    def seconds(self) -> float:
        """Seconds per step."""
        return max(self.compute_seconds, self.hidden_seconds) + self.exposed_seconds

    def mesh(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """The mesh of the layout, over these devices or all; `sk.abstract_mesh(**layout.axes)` needs none."""
        return make_mesh(devices, **self.layout.axes)

    def plan(self, rules: Any = None) -> Plan:
        """The plan of the layout: that of `PLANS` for each axis, tp over "model", and the pipeline's over "stage".

        Args:
            rules: as for `tp`, of a model of your own; None: those of `models.transformer`.

        Example:
            >>> model = sk.planner.Model(layers=4, hidden=64, heads=4, vocabulary=256)
            >>> best = sk.planner.search(model, chip="v5e", chips=8, batch=16, sequence=128)[0]
            >>> init, step = sk.make_train_step(
            ...     best.grad_fn(),
            ...     optax.adamw(3e-4),
            ...     mesh=best.mesh(),
            ...     plan=best.plan(),
            ...     accumulate=best.layout.accumulate,
            ...     precision="bf16",
            ... )
            >>> state = init(lambda key: sk.models.transformer.init(key, best.config()), jax.random.key(0))
        """
        layout = self.layout
        plans = [PLANS[axis](axis) for axis in layout.axes if axis in PLANS]
        if layout.tensor > 1:
            rules = transformer.tensor_rules(self.config(), "model", layout.tensor) if rules is None else rules
            plans.append(tp("model", rules, sequence=True))
        if layout.schedule is not None:
            plans.append(pipeline(layout.schedule, "stage").plan)
        return chain(*plans)

    def config(self) -> transformer.Config:
        """The sizes and the recomputation, for `models.transformer`; "selective" saves no matmul of attention.

        Raises:
            ValueError: a model that `models.transformer` is not.
        """
        model = self.model
        ours = {name: Model._field_defaults[name] for name in _OURS}
        if wrong := [f"{name}={getattr(model, name)!r}" for name in ours if getattr(model, name) != ours[name]]:
            raise ValueError(
                "planner: models.transformer has three feed-forward matrices, heads of size hidden / heads, equal "
                f"layers and no biases; got a Model with {', '.join(wrong)}. Pass plan(rules) of your own model to "
                "make_train_step."
            )
        return transformer.Config(
            vocabulary=model.vocabulary,
            layers=model.layers,
            dim=model.hidden,
            heads=model.heads,
            kv_heads=model.kv_heads,
            hidden=model.width,
            tied=model.tied,
            experts=model.experts,
            top_k=model.top_k,
            capacity=model.capacity if model.experts else None,
            remat={"none": None, "selective": "dots_without_batch", "full": "full"}[self.layout.remat],
        )

    def grad_fn(self) -> GradFn:
        """The GradFn of `models.transformer` in this layout; its batch has "tokens" and "targets"."""
        inside: dict[str, Any] = {axis: axis for axis in INSIDE if axis in self.layout.axes}
        return grad_fn_of(self.config(), transformer.Axes(**inside, sequence="model" in inside), self.layout.schedule)


def grad_fn_of(config: transformer.Config, axes: transformer.Axes, schedule: Schedule | None) -> GradFn:
    """The GradFn of `models.transformer` over these axes, of a pipeline over "stage" if there is a schedule."""
    if schedule is None:
        return value_and_grad(transformer.loss_fn(config, axes))
    pieces = transformer.pieces(config, axes)
    return transformer.in_order(pipeline(schedule, "stage").value_and_grad(*pieces, layer_numbers=True), axes)


def of_kind(model: Model, *layouts: Layout) -> None:
    """Refuses anything but a Model and Layouts."""
    if not isinstance(model, Model):
        raise TypeError(
            f"planner: model must be a Model; got {model!r}. Pass for example planner.Model(layers=8, hidden=64, "
            "heads=4, vocabulary=256)."
        )
    for layout in layouts:
        if not isinstance(layout, Layout):
            raise TypeError(
                f"planner: layout must be a Layout; got {layout!r}. Pass for example planner.Layout(fsdp=8, tensor=2)."
            )


def listed(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates as a list; refuses all else."""
    check_kind("planner", "candidates", candidates, (ITERABLE,))
    candidates = list(candidates)
    for each in candidates:
        if not isinstance(each, Candidate):
            raise TypeError(
                f"planner: candidates must be of type Candidate; got {each!r}. Pass what search or estimate returned."
            )
    return candidates


def table(candidates: Iterable[Candidate], *, names: Iterable[str] = ()) -> str:
    """Candidates as aligned text: memory in GB (10^9 bytes) per device, times in ms per step, MFU in percent.

    Args:
        candidates: the rows, in order.
        names: a name for each row; empty: no column of names.

    Returns:
        The text.

    Raises:
        ValueError: names that are not one per candidate.

    Example:
        >>> model = sk.planner.Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256)
        >>> found = sk.planner.search(model, chip="v5e", chips=64, batch=256, sequence=4096)
        >>> print(sk.planner.table(found[:2]))
        data  fsdp  tensor  accumulate ...
    """
    check_kind("planner", "names", names, (ITERABLE,))
    candidates, names = listed(candidates), list(names)
    if names and len(names) != len(candidates):
        raise ValueError(
            f"planner: names must be one per candidate; got {len(names)} for {len(candidates)}. Pass as many, or none."
        )
    shown = columns([each.layout for each in candidates])
    figures = ["state GB", "activations GB", "compute ms", "hidden ms", "exposed ms", "step ms", "MFU %"]
    rows = [[*([""] if names else []), *shown, *figures]]
    for i, c in enumerate(candidates):
        times = (c.compute_seconds, c.hidden_seconds, c.exposed_seconds, c.seconds)
        rows.append(
            ([names[i]] if names else [])
            + [str(getattr(c.layout, name)) for name in shown]
            + [gigabytes(c.state_bytes), gigabytes(c.activation_bytes)]
            + [_milliseconds(seconds) for seconds in times]
            + [f"{100 * c.mfu:.1f}"]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)


def gigabytes(size: float) -> str:
    """Bytes in GB, with two decimals."""
    return f"{size / 1e9:.2f}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}" if seconds >= 1e-4 or not seconds else f"{1e3 * seconds:.2g}"
