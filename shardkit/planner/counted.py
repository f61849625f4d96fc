"""Models that are no transformer: what the trace of their loss says, and the layouts that fit a machine.

The loss is traced on shapes, and nothing is compiled. As for transformers, memory per device is that of float32
parameters and two Adam moments, float32 gradients, copies in the dtype of compute (of layers that are gathered one by
one, of two), and what the backward pass keeps. Compute is the FLOPs of matmuls and convolutions, forward and backward
as traced, over the chips' peak. What is sent is counted leaf by leaf from the plan, by `plans/traffic.py`: what is
gathered at once is exposed; all else overlaps with compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardkit._arguments import checks
from shardkit._arguments.typed import Arrays, DType, typed
from shardkit.analysis.jaxpr.counts import LossCounts, of_loss
from shardkit.collectives.algorithms import Sent
from shardkit.meshes.layout import by_path, local_shape, path_name
from shardkit.meshes.mesh import abstract_mesh
from shardkit.on_device.gradient import LossFn, value_and_grad
from shardkit.on_device.handles import cast_floating
from shardkit.on_device.precision import Precision, precision_of
from shardkit.planner.candidates import Candidate
from shardkit.planner.estimate import check_at_most_a_billion, check_machine
from shardkit.planner.habits import habits_of
from shardkit.planner.layout import Layout
from shardkit.planner.machine import Machine
from shardkit.planner.overlap import hide_layers
from shardkit.plans.dim_rules import is_in_subtrees
from shardkit.plans.plan import Plan
from shardkit.plans.splits import LeafLayout, is_layout
from shardkit.plans.traffic import PlanTraffic, ValueBytes, plan_traffic
from shardkit.steps.builder import make_train_step
from shardkit.strategies.data import dp
from shardkit.strategies.zero import fsdp, zero1


class Counted(NamedTuple):
    """What the trace of a loss says of its model; `counted` makes it.

    Attributes:
        leaves: the number of parameters of each leaf, by path.
        layers: the number of layers that the loss gathers one by one; 0: it does not.
        counts: `flops` of the forward pass, `step_flops` of the whole and `kept_bytes` of activations, per example.
        compute: the dtype of compute.
        params: the shapes of the parameters.
        layerwise: the subtrees with these layers.
    """

    leaves: dict[str, int]
    layers: int
    counts: LossCounts
    compute: Any
    params: Any
    layerwise: tuple[str, ...]

    def parameters(self) -> int:
        """The number of parameters."""
        return sum(self.leaves.values())


class Ways(NamedTuple):
    """A layout of a counted model.

    Attributes:
        plan: "dp", "zero1", "fsdp", or "layerwise", which is fsdp layer by layer.
        data: the devices, all of them along one axis.
        accumulate: microbatches per step.
    """

    plan: str
    data: int
    accumulate: int

    @property
    def axes(self) -> dict[str, int]:
        """The size of the mesh axis "data"."""
        return {"data": self.data}

    def __str__(self) -> str:
        return f"plan={self.plan} data={self.data} accumulate={self.accumulate}"


class CountedCandidate(Candidate):
    """A layout of a counted model, and its estimate."""

    model: Any
    layout: Any

    def plan(self, rules: Any = None) -> Plan:
        """The plan of the layout, over the axis "data"; it takes no rules."""
        if rules is not None:
            self.config()  # which refuses them
        return _list_plans(self.model)[self.layout.plan]

    def config(self) -> Any:
        """Refused, and with it `grad_fn` and rules."""
        raise ValueError(
            "planner: config, grad_fn and rules are of a transformer; got a counted model. Pass "
            "value_and_grad(loss_fn) and plan() to make_train_step."
        )


@typed
def counted(
    loss_fn: Callable[..., Any],
    params: Arrays,
    batch: Arrays,
    *,
    compute: DType = jnp.bfloat16,
    layerwise: tuple[str, ...] = ("layers",),
    iterations: int | None = None,
) -> Counted:
    """Counts any model, from the trace of its loss: parameters, FLOPs, and the memory of the backward pass.

    Args:
        loss_fn: as for `value_and_grad`, without carried state: `loss_fn(params, batch, keys)`, of one device.
        params: the parameters, or their shapes.
        batch: a batch, or its shapes, with any number of examples; the counts are divided by this number.
        compute: the dtype of parameters and batch in the loss; pass bfloat16 if you train with `precision="bf16"`.
        layerwise: stacks of layers, as for `fsdp`. They stay whole if your loss does not gather them one by one.
        iterations: the number of iterations of each while loop with matmuls.

    Returns:
        A model for `search`.

    Raises:
        ValueError: arrays of the batch with different numbers of examples; a while loop with matmuls, and no
            `iterations`; another dtype than a float of at most 32 bits.

    Example:
        >>> loss_fn = lambda params, batch, keys: sk.Mean.of(jnp.tanh(batch @ params["w"]))
        >>> params, batch = {"w": jnp.ones((64, 8))}, jnp.ones((32, 64))
        >>> model = sk.planner.counted(loss_fn, params, batch)
        >>> model.parameters(), model.counts.flops
        (512, 1024.0)
        >>> best = sk.planner.search(model, chip="v5e", chips=8, batch=64)[0]
        >>> print(best.layout, best.plan())
        plan=dp data=8 accumulate=1 dp('data')
    """
    if iterations is not None:
        checks.integers_from_one("counted", iterations=iterations)
    compute = jnp.dtype(precision_of(Precision(compute=compute)).compute)
    params, batch = jax.eval_shape(lambda *trees: trees, params, batch)
    params_in_loss, batch_in_loss = jax.eval_shape(lambda *trees: cast_floating(trees, compute), params, batch)
    counts = of_loss(loss_fn, params_in_loss, batch_in_loss, iterations)
    leaves = by_path("counted", jax.tree_util.tree_leaves_with_path(params))
    sizes = {}
    for path, leaf in leaves.items():
        sizes[path] = math.prod(leaf.shape)
    layers = _count_layers(loss_fn, params, batch, layerwise)
    return Counted(sizes, layers, counts, compute, params, layerwise)


def _count_layers(loss_fn: LossFn, params: Any, batch: Any, layerwise: tuple[str, ...]) -> int:
    """The number of layers in some stacks; 0 where they are none, or the loss does not gather them one by one."""
    lengths = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if is_in_subtrees(path_name(path), layerwise):
            lengths.add(leaf.shape[0] if leaf.shape else 0)
    if len(lengths) != 1:
        return 0
    plan = fsdp("data", layerwise=layerwise, min_size=1)
    init, step = make_train_step(value_and_grad(loss_fn), optax.sgd(0.1), mesh=abstract_mesh(data=2), plan=plan)

    # Two devices, each with as many examples as the loss was given.
    def double(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]), x.dtype)

    batches = jax.tree.map(double, batch)
    try:
        jax.eval_shape(step, init.abstract(params), batches)
    except Exception:  # a loss that uses lazy leaves as arrays, which jax and libraries refuse in many ways
        return 0
    return min(lengths)


def search_counted(model: Counted, machine: Machine, chips: int, batch: int) -> list[Candidate]:
    """`planner.search` of a counted model."""
    check_machine(machine)
    chips, batch = checks.integers_from_one("planner", chips=chips, batch=batch)
    check_at_most_a_billion(chips=chips, batch=batch)
    if batch % chips:
        raise ValueError(
            f"planner: batch must be divisible by the chips; got {batch} over {chips}. Change the batch or the chips."
        )
    examples = batch // chips
    candidates: list[Any] = []
    plans = _list_plans(model)
    for name, plan in plans.items():
        state = _count_state(model, plan, chips)
        # Only what is gathered layer by layer is sent for each microbatch.
        traffic = _count_traffic(model, plan, chips, accumulate=1)
        for accumulate in range(1, examples + 1):
            if examples % accumulate:
                continue
            if name == "layerwise":
                traffic = _count_traffic(model, plan, chips, accumulate)
            candidate = _estimate(model, machine, Ways(name, chips, accumulate), examples, state, traffic)
            if candidate.fits:
                candidates.append(candidate)
    order = list(plans)

    def fastest_first(candidate: Any) -> tuple[float, int, int]:
        layout = candidate.layout
        return candidate.seconds, layout.accumulate, order.index(layout.plan)

    return sorted(candidates, key=fastest_first)


def _estimate(model: Counted, machine: Machine, ways: Ways, examples: int, state: float, traffic: PlanTraffic) -> Any:
    """The estimate of one layout, with this many examples per step on a device, which holds `state` bytes."""
    # All devices are one group along "data".
    link = machine.find_link(Layout(data=ways.data), "data")
    transfers = 2  # a sum of gradients is a scatter and a gather; a whole tree is gathered once and scattered once
    if ways.plan == "layerwise":
        transfers = 3 * model.layers * ways.accumulate  # two gathers and a scatter
    gathered_by_layer = _sum_bytes(traffic.opened)
    reduced = _sum_bytes(traffic.reduced)
    sent = _sum_bytes(traffic.gathered) + gathered_by_layer + reduced
    wire = link.seconds(sent, transfers * (ways.data - 1))
    peak = machine.chip.flops
    compute = examples * model.counts.step_flops / (peak * machine.efficiency)
    # What is sent layer by layer hides behind the neighbours' compute, as far as the compiler lets it.
    hidden = 0.0
    if ways.plan == "layerwise" and sent:
        per_byte = wire / sent
        overlap = habits_of(machine.chip).overlap
        hidden = hide_layers(overlap, per_byte * gathered_by_layer, per_byte * reduced, compute)
    fields: dict[str, Any] = {"model": model, "layout": ways}
    candidate: Any = CountedCandidate(
        **fields,
        state_bytes=state,
        activation_bytes=model.counts.kept_bytes * (examples // ways.accumulate),
        usable_bytes=machine.usable_bytes,
        compute_seconds=compute,
        hidden_seconds=hidden,
        exposed_seconds=wire - hidden,
        mfu=0.0,
    )
    if candidate.seconds:
        # What jax.checkpoint repeats is none of the model's.
        model_flops = examples * min(3 * model.counts.flops, model.counts.step_flops)
        candidate = candidate._replace(mfu=model_flops / (candidate.seconds * peak))
    return candidate


def _list_plans(model: Counted) -> dict[str, Plan]:
    """The plans of a counted model, the simplest first."""
    plans = {"dp": dp("data"), "zero1": zero1("data"), "fsdp": fsdp("data")}
    if model.layers:
        plans["layerwise"] = fsdp("data", layerwise=model.layerwise)
    return plans


def _count_traffic(model: Counted, plan: Plan, data: int, accumulate: int) -> PlanTraffic:
    """What a device sends in a step: gathers in the dtype of compute, of zero1 after the update in float32."""
    mesh: Any = abstract_mesh(data=data)
    return plan_traffic(
        plan,
        model.params,
        mesh,
        accumulate=accumulate,
        value_bytes=ValueBytes(compute=model.compute.itemsize),
    )


def _sum_bytes(sent: Sent) -> float:
    return float(sum(sent.values()))


def _count_state(model: Counted, plan: Plan, data: int) -> float:
    """Bytes of parameters, optimizer state, gradients and copies on one device."""
    mesh: Any = abstract_mesh(data=data)
    layouts: list[LeafLayout] = jax.tree.leaves(plan.layouts(model.params, mesh), is_leaf=is_layout)
    copy = model.compute.itemsize
    state: float = model.counts.copied_bytes
    for leaf, layout in zip(jax.tree.leaves(model.params), layouts, strict=True):
        size = math.prod(leaf.shape)
        parameter = math.prod(local_shape(leaf.shape, layout.rest, mesh))
        update = math.prod(local_shape(leaf.shape, layout.update, mesh))
        gradient = math.prod(local_shape(leaf.shape, layout.grad, mesh))
        # In float32: the parameter, two moments of Adam, and the gradient.
        state += 4 * parameter + 8 * update + 4 * gradient
        if layout.lazy:
            state += 2 * copy * size / model.layers  # two layers, one of which is gathered beside the other's compute
        # A copy in another dtype, or a gathered one. Without either, the loss reads the parameter itself.
        elif copy < 4 or parameter < size:
            state += copy * size
    return state
