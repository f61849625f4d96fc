"""Models that are no transformer: what the trace of their loss says, and the layouts that fit a machine.

The loss is traced on shapes, and nothing is compiled. As for transformers, memory per device is that of float32
parameters and two Adam moments, float32 gradients, copies in the dtype of compute (of layers that are gathered one by
one, of two), and what the backward pass keeps. Compute is the FLOPs of matmuls and convolutions, forward and backward
as traced, over the chips' peak. What is gathered at once is exposed; all else that is sent overlaps with compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardkit import cost
from shardkit._arguments import checks
from shardkit._arguments.typed import Arrays, DType, check_kind, kinds_of, typed
from shardkit.analysis.jaxpr.counts import LossCounts, of_loss
from shardkit.meshes.layout import by_path, local_shape, path_name
from shardkit.meshes.mesh import abstract_mesh
from shardkit.on_device.gradient import LossFn, value_and_grad
from shardkit.on_device.handles import cast_floating
from shardkit.on_device.precision import Precision, precision_of
from shardkit.planner.axes import bandwidth
from shardkit.planner.candidates import Candidate
from shardkit.planner.estimate import check_most, check_shares
from shardkit.plans.dim_rules import is_in_subtrees
from shardkit.plans.plan import Plan
from shardkit.plans.splits import is_layout
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
            self.config()
        return _plans(self.model)[self.layout.plan]

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
    """Counts any model, from the trace of its loss: parameters, FLOPs, and what the backward pass keeps.

    Args:
        loss_fn: as for `value_and_grad`, without carried state: `loss_fn(params, batch, keys)`, of one device.
        params: the parameters, or their shapes.
        batch: a batch, or its shapes, of any number of examples; what is counted is divided by that number.
        compute: the dtype of parameters and batch in the loss; it is bfloat16 with `precision="bf16"`.
        layerwise: stacks of layers, as for `fsdp`; they are left whole where the loss does not gather them one by one.
        iterations: how often each while loop with matmuls runs.

    Returns:
        What `search` takes.

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
        checks.whole("counted", iterations=iterations)
    compute = jnp.dtype(precision_of(Precision(compute=compute)).compute)
    params, batch = jax.eval_shape(lambda *trees: trees, params, batch)
    seen = jax.eval_shape(lambda *trees: cast_floating(trees, compute), params, batch)
    counts = of_loss(loss_fn, seen[0], seen[1], iterations)
    named = by_path("counted", jax.tree_util.tree_leaves_with_path(params))
    leaves = {path: math.prod(x.shape) for path, x in named.items()}
    layers = _layers(loss_fn, params, batch, layerwise)
    return Counted(leaves, layers, counts, compute, params, layerwise)


def _layers(loss_fn: LossFn, params: Any, batch: Any, layerwise: tuple[str, ...]) -> int:
    """The number of layers in some stacks; 0 where they are none, or the loss does not gather them one by one."""
    paths = jax.tree_util.tree_leaves_with_path(params)
    sizes = {(*leaf.shape, 0)[0] for path, leaf in paths if is_in_subtrees(path_name(path), layerwise)}
    if len(sizes) != 1:
        return 0
    plan = fsdp("data", layerwise=layerwise, min_size=1)
    init, step = make_train_step(value_and_grad(loss_fn), optax.sgd(0.1), mesh=abstract_mesh(data=2), plan=plan)
    twice = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]), x.dtype), batch)
    try:
        jax.eval_shape(step, init.abstract(params), twice)
    except Exception:  # a loss that uses lazy leaves as arrays, which jax and libraries refuse in many ways
        return 0
    return min(sizes)


def search_counted(
    model: Counted, chip: cost.Chip, chips: int, batch: int, memory_share: float, efficiency: float, links: Any
) -> list[Candidate]:
    """`planner.search` of a counted model."""
    check_shares(memory_share=memory_share, efficiency=efficiency)
    check_kind("planner", "links", links, kinds_of(cost.Links | None))
    chips, batch = checks.whole("planner", chips=chips, batch=batch)
    check_most(chips=chips, batch=batch)
    if batch % chips:
        raise ValueError(
            f"planner: batch must be divisible by the chips; got {batch} over {chips}. Change the batch or the chips."
        )
    link = cost.Link(0.0, bandwidth(chip, 1, chips, chips)) if links is None else links.of("data")
    seconds = batch * model.counts.step_flops / (chips * chip.flops * efficiency)
    # what jax.checkpoint repeats is none of the model's
    model_flops = batch * min(3 * model.counts.flops, model.counts.step_flops)
    found: list[Any] = []
    for name, plan in _plans(model).items():
        placed = _placed(model, plan, chips)
        for accumulate in (n for n in range(1, batch // chips + 1) if batch // chips % n == 0):
            state, hidden, exposed = _moved(model, name, placed, chips, accumulate)
            messages = 3 * model.layers * accumulate if name == "layerwise" else 2
            times = (seconds, hidden / link.bandwidth + messages * (chips - 1) * link.latency, exposed / link.bandwidth)
            memory = (state, model.counts.kept_bytes * (batch // chips // accumulate), memory_share * chip.hbm_bytes)
            each = CountedCandidate._make((model, Ways(name, chips, accumulate), *memory, *times, 0.0, (), 0.0))
            mfu = model_flops / (each.seconds * chips * chip.flops) if each.seconds else 0.0
            found += [each._replace(mfu=mfu)] if each.fits else []
    order = list(_plans(model))
    return sorted(found, key=lambda c: (c.seconds, c.layout.accumulate, order.index(c.layout.plan)))


def _plans(model: Counted) -> dict[str, Plan]:
    """The plans of a counted model, the simplest first."""
    plans = {"dp": dp("data"), "zero1": zero1("data"), "fsdp": fsdp("data")}
    return plans | ({"layerwise": fsdp("data", layerwise=model.layerwise)} if model.layers else {})


def _placed(model: Counted, plan: Plan, chips: int) -> list[tuple[Any, int, list[int]]]:
    """Of each leaf its layout, its size, and its sizes on a device: at rest, in the update, and of its gradient."""
    mesh: Any = abstract_mesh(data=chips)
    leaves, layouts = (
        jax.tree.leaves(model.params),
        jax.tree.leaves(plan.layouts(model.params, mesh), is_leaf=is_layout),
    )
    return [
        (it, math.prod(x.shape), [math.prod(local_shape(x.shape, s, mesh)) for s in (it.rest, it.update, it.grad)])
        for x, it in zip(leaves, layouts, strict=True)
    ]


def _moved(model: Counted, name: str, placed: Any, chips: int, accumulate: int) -> tuple[float, float, float]:
    """Bytes of state on one device, and bytes that it sends in a step: beside compute, and before or after it."""
    state, hidden, exposed, copy = model.counts.copied_bytes, 0.0, 0.0, model.compute.itemsize
    for layout, size, (rest, update, grad) in placed:
        state += 4 * rest + 8 * update + 4 * grad
        if layout.lazy:
            state += 2 * copy * size / model.layers
        elif copy < 4 or rest < size:
            state += copy * size
        stage = {"dp": 0, "zero1": 1}.get(name, 3) if layout.splits else 0
        volume = partial(cost.zero_volume, size, chips, stage, accumulate=accumulate, layerwise=layout.lazy)
        reduced, both = (volume(parameter_bytes=n, gradient_bytes=4) for n in (0, 4 if stage == 1 else copy))
        hidden += both if layout.lazy else reduced
        exposed += 0 if layout.lazy else both - reduced
    return state, hidden, exposed
