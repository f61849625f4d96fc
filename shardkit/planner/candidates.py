"""A candidate: a layout, its estimate, and the mesh, the plan and the GradFn that run it."""

from __future__ import annotations

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
from shardkit.planner.layout import INSIDE, Layout
from shardkit.planner.model import NAMES_IN_CONFIG, Model
from shardkit.plans.plan import Plan, chain
from shardkit.schedules import Schedule
from shardkit.strategies.context import cp
from shardkit.strategies.data import dp
from shardkit.strategies.expert import ep
from shardkit.strategies.pipeline import pipeline
from shardkit.strategies.tensor import tp
from shardkit.strategies.zero import fsdp

# The sizes that models.transformer has as they are by default.
_DEFAULT_SIZES = ("gated", "head_size", "expert_ffn", "shared", "dense", "attention", "extra")
_REMAT_OF_CONFIG = {"none": None, "selective": "dots_without_batch", "full": "full"}
# The plan of each mesh axis that needs no more than its name, of parameters with a stack "layers".
_PLANS: Mapping[str, Callable[[str], Plan]] = MappingProxyType(
    {"data": dp, "fsdp": partial(fsdp, layerwise=("layers",)), "expert": ep, "context": cp}
)


class Candidate(NamedTuple):
    """A layout and its estimate, per device and step, and what runs it.

    Attributes:
        model: the sizes of the model.
        layout: the layout.
        state_bytes: parameters, optimizer state and gradients, and gathered layers.
        activation_bytes: residuals of the backward.
        usable_bytes: the usable share of the chip's memory.
        compute_seconds: time of compute.
        hidden_seconds: time on the wire while the device computes.
        exposed_seconds: time on the wire while it waits.
        mfu: model FLOPs utilization, a fraction; attention is counted without a mask, with `kernel` half of it.
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
        return self.compute_seconds + self.exposed_seconds

    def mesh(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """The mesh of the layout, over these devices or all; `sk.abstract_mesh(**layout.axes)` needs none."""
        return make_mesh(devices, **self.layout.axes)

    def plan(self, rules: Any = None) -> Plan:
        """The plan of the layout: dp, fsdp, ep and cp over their axes, tp over "model", and a pipeline's over "stage".

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
        # `chain` orders the strategies of a leaf itself: tensor, expert and stage ways split it before fsdp does.
        plans = [_PLANS[axis](axis) for axis in layout.axes if axis in _PLANS]
        if layout.tensor > 1:
            if rules is None:
                rules = transformer.tensor_rules(self.config(), "model", layout.tensor)
            plans.append(tp("model", rules, sequence=True))
        # `pp("stage")` alone would have one stage on each device, and a schedule with chunks has several.
        schedule = layout.schedule
        if schedule is not None:
            plans.append(pipeline(schedule, "stage").plan)
        return chain(*plans)

    def config(self) -> transformer.Config:
        """The sizes and the recomputation, for `models.transformer`; "selective" saves no matmul of attention.

        Raises:
            ValueError: a model that `models.transformer` is not.
        """
        model = self.model
        wrong = []
        for name in _DEFAULT_SIZES:
            value = getattr(model, name)
            if value != Model._field_defaults[name]:
                wrong.append(f"{name}={value!r}")
        if wrong:
            raise ValueError(
                "planner: models.transformer has three feed-forward matrices, heads of size hidden / heads, equal "
                f"layers and no biases; got a Model with {', '.join(wrong)}. Pass plan(rules) of your own model to "
                "make_train_step."
            )
        sizes: dict[str, Any] = {field: getattr(model, name) for name, field in NAMES_IN_CONFIG.items()}
        sizes["top_k"] = model.top_k
        if model.experts:
            sizes |= {"experts": model.experts, "capacity": model.capacity}
        sizes["remat"] = _REMAT_OF_CONFIG[self.layout.remat]
        return transformer.Config(**sizes, hidden=model.width, prefetch=self.layout.prefetch)

    def grad_fn(self) -> GradFn:
        """The GradFn of `models.transformer` in this layout; its batch has "tokens" and "targets"."""
        config = self.config()  # refuses what is no transformer
        inside: dict[str, Any] = {axis: axis for axis in INSIDE if axis in self.layout.axes}
        impl: Any = self.layout.impl
        axes = transformer.Axes(**inside, sequence="model" in inside, kernel=self.model.kernel, impl=impl)
        return grad_fn_of(config, axes, self.layout.schedule)


def grad_fn_of(config: transformer.Config, axes: transformer.Axes, schedule: Schedule | None) -> GradFn:
    """The GradFn of `models.transformer` over these axes, of a pipeline over "stage" if there is a schedule."""
    if schedule is None:
        return value_and_grad(transformer.loss_fn(config, axes))
    pieces = transformer.pieces(config, axes)
    grad_fn = pipeline(schedule, "stage").value_and_grad(*pieces, layer_numbers=True)
    return transformer.in_order(grad_fn, axes)


def list_candidates(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates as a list; refuses all else."""
    check_kind("planner", "candidates", candidates, (ITERABLE,))
    listed = list(candidates)
    for candidate in listed:
        if not isinstance(candidate, Candidate):
            raise TypeError(
                f"planner: candidates must be of type Candidate; got {candidate!r}. Pass a result of search or "
                "estimate."
            )
    return listed
