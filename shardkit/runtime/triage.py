"""Finds NaN and infinity: recomputes the gradient of a step, inspected before the cross-device reduction.

After an all_reduce a NaN is on all devices; before it, it is on the device where it occurred.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from shardkit._arguments.checks import Axis, at_least, format_sizes, mesh_in_context
from shardkit._arguments.typed import Arrays, typed
from shardkit.collectives import axis_index
from shardkit.meshes.layout import path_name, spec_axes, table
from shardkit.meshes.rng import step_key
from shardkit.on_device.batch import batch_specs
from shardkit.on_device.gradient import GradFn
from shardkit.on_device.local_step import local_gradients
from shardkit.on_device.mean_sums import global_means
from shardkit.on_device.metrics import metrics_of
from shardkit.on_device.microbatches import Microbatches
from shardkit.on_device.precision import Precision, precision_of
from shardkit.on_device.seam import enter
from shardkit.pipelines.stages import fit_plan
from shardkit.plans.axis_types import auto_mesh, wrap_for_explicit_axes
from shardkit.plans.manual import JitByLayouts, manual_axes
from shardkit.plans.plan import Plan
from shardkit.plans.splits import map_layouts
from shardkit.plans.storage import stored_array
from shardkit.runtime.data.reading import from_every_device, on_mesh
from shardkit.steps.arguments import check_function
from shardkit.steps.carry import Carried, check_carried, reads_carried
from shardkit.steps.state import TrainState

_REPLICATED = PartitionSpec()
# Leaves in the text: one NaN often reaches all gradients of a model.
_PRINTED = 40


class NonFinite(NamedTuple):
    """A leaf that is not finite on some devices.

    Attributes:
        path: the leaf.
        coordinates: where, by mesh axis; without the axes along which all devices have the same number of such values,
            so that {} is everywhere.
        values: number of values per device that are not finite.
        first: the global index of the first of them, as stored on the devices.
    """

    path: str
    coordinates: dict[str, int]
    values: int
    first: tuple[int, ...]


class TriageReport(NamedTuple):
    """What `triage` found; `print` it.

    Attributes:
        rows: what is not finite in "params", "carried" (where the loss reads it), "batch", "means" (the loss and other
            means) and "grads", in this order, before the cross-device reduction.
        loss: the loss of the whole batch.
        weight: its weight, by which the total was divided.
    """

    rows: tuple[NonFinite, ...]
    loss: float
    weight: float

    @property
    def example(self) -> int | None:
        """The first example of the global batch with a value that is not finite; None if all are finite."""
        examples = []
        for row in self.rows:
            if row.path.startswith("batch") and row.first:
                examples.append(row.first[0])
        return min(examples, default=None)

    def __str__(self) -> str:
        lines = [f"loss {self.loss:g}, weight {self.weight:g}"]
        if self.weight == 0:
            lines.append("the weights of all examples sum to 0, so all gradients are 0")
        if not self.rows:
            lines.append("all values are finite before the cross-device reduction")
            return "\n".join(lines)
        lines.append("not finite before the cross-device reduction:")
        cells = [("leaf", "where", "values", "first")]
        for row in self.rows[:_PRINTED]:
            where = "everywhere"
            if row.coordinates:
                where = format_sizes(row.coordinates.items())
            first = ""
            if row.first:
                first = str(list(row.first))
            cells.append((row.path, where, str(row.values), first))
        lines.append(table(cells))
        if len(self.rows) > _PRINTED:
            lines.append(f"and {len(self.rows) - _PRINTED} more")
        if self.example is not None:
            lines.append(f"first example of the batch with such a value: {self.example}")
        return "\n".join(lines)


@typed
def nonfinite(tree: Arrays, mesh: Mesh | None = None) -> list[NonFinite]:
    """Finds the leaves with NaN or infinity, and their devices. Call it in every process of the mesh.

    Args:
        tree: pytree of global arrays over one mesh; integers, booleans and keys are always finite.
        mesh: the expected mesh of the tree; by default the mesh of its first leaf.

    Returns:
        A NonFinite for each leaf and place in the mesh, the same on every process; empty on a process outside the mesh.

    Raises:
        TypeError: a leaf other than an array over the mesh.

    Cost: 4 (1 + rank) (n-1) bytes per floating-point leaf over the n devices of the mesh, in one all_gather.

    Example:
        >>> x = np.float32([1, 2, np.nan, 4])
        >>> sk.runtime.nonfinite(sk.runtime.from_full({"x": x}, mesh, P("data")))
        [NonFinite(path='x', coordinates={'data': 1}, values=1, first=(2,))]
    """
    mesh, leaves = on_mesh("nonfinite", tree, mesh)
    leaves = [(path, x) for path, x in leaves if _can_be_nonfinite(x)]
    if mesh is None or not leaves:
        return []
    arrays = [x for _, x in leaves]
    specs = tuple(x.sharding.spec for x in arrays)
    results = observations(arrays, mesh=mesh, specs=specs)
    if not results[0].addressable_shards:
        return []
    rows: list[NonFinite] = []
    for (path, _), observation in zip(leaves, results, strict=True):
        rows += _locate(path, observation, mesh.shape)
    return rows


@typed
def triage(
    grad_fn: GradFn,
    *,
    mesh: Mesh | None = None,
    plan: Plan,
    precision: Precision | str | None = None,
    accumulate: int = 1,
    manual: Axis | None = None,
) -> Callable[[TrainState, Any], TriageReport]:
    """Builds `run(state, batch) -> TriageReport`. It looks for NaN in a step's gradient, before devices sum it.

    It repeats the step's dropout, so pass the state from before the step. The state of a NonFiniteError counts the step
    as taken: pass `state._replace(step=state.step - 1)`.

    The collectives of your loss run here too, and spread a NaN. So a row means all devices along the axes of tp, cp and
    ep, and along the axes of gradients that are reduced layer by layer (fsdp and zero2).

    Args:
        grad_fn: as for `make_train_step`.
        precision: as for `make_train_step`: it reads the batch in the compute dtype, and gradients with the loss scale.
        manual: as for `make_train_step`: `coordinates` are along these axes; nothing is reduced over them yet.
        mesh, plan, accumulate: as for `make_train_step`.

    Returns:
        A function that does not donate its arguments. Call it in every process of the mesh; all get the same
            TriageReport.

    Raises:
        ValueError: as `make_train_step`.

    Cost: the cost of the GradFn and of the gathers of `rest - seen`, an all_reduce of 8 bytes for each mean, and an
        all_gather over the mesh's n devices of 4 (1 + rank) bytes for each floating-point leaf.

    Example:
        >>> grad_fn = sk.value_and_grad(lambda params, batch, keys: jnp.mean(params["w"] * batch))
        >>> init, _ = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh, plan=sk.dp("data"))
        >>> state = init({"w": jnp.float32(1)}, jax.random.key(0))
        >>> print(sk.runtime.triage(grad_fn, mesh=mesh, plan=sk.dp("data"))(state, np.float32([1, 2, 3, 4])))
        loss 2.5, weight 2
        all values are finite before the cross-device reduction
    """
    mesh = mesh_in_context("triage", mesh)
    check_function("triage", grad_fn)
    at_least("triage", 1, accumulate=accumulate)
    plan = fit_plan(plan, grad_fn, accumulate)
    plan.check(mesh)
    caller_mesh = mesh
    mesh = auto_mesh(mesh)
    policy = precision_of(precision)
    axes = manual_axes("triage", manual, plan, mesh)
    sizes = {axis: size for axis, size in mesh.shape.items() if axis in axes}
    reads = reads_carried(grad_fn)

    def inspect(plan: Plan, state: TrainState, batch: Any) -> tuple[jax.Array, jax.Array, Any]:
        placement = plan.placement(state.params, mesh)
        layouts = placement.layouts
        microbatches = Microbatches(accumulate)
        specs = batch_specs(batch, placement.batch, mesh, accumulate)
        # As the step has it: in float16 a gradient may be infinite because of its loss scale alone.
        scale = jnp.float32(1)
        if state.loss_scale:
            scale = state.loss_scale.scale
        carried_tree = None
        if reads:
            check_carried("triage", reads, None, state.carried)
            carried_tree = state.carried
        carried = Carried("triage", carried_tree, state.params, placement)

        def per_device(params: Any, kept: Any, batch: Any, key: jax.Array, scale: jax.Array) -> Any:
            entered = enter(params, placement, policy)
            run = grad_fn
            if reads:
                run = carried.bind(grad_fn, kept, policy)
            batch, means, grads = local_gradients(run, entered, batch, key, scale, placement, policy, microbatches)
            inspected = {
                "params": map_layouts(_observe_param, layouts, params),
                "carried": jax.tree.map(_observe_carried, carried.storage, kept),
                "batch": jax.tree.map(_observe_batch, specs, batch),
                "means": jax.tree.map(_observe, means),
                "grads": map_layouts(_observe_grad, layouts, grads),
            }
            metrics = metrics_of(global_means(means, plan.batch_axes, plan.stage_axes))
            # What each device has observed is gathered, not reduced: a sum over devices would say that there is a NaN,
            # and no longer where. Of the gradient it is observed above, before `leave` would send it everywhere.
            observed = from_every_device(inspected, tuple(sizes))
            return metrics["loss"], metrics["weight"], observed

        on_mesh = jax.shard_map(
            per_device,
            mesh=mesh,
            in_specs=(placement.rest, carried.specs, specs, _REPLICATED, _REPLICATED),
            out_specs=_REPLICATED,
            axis_names=set(sizes),
        )
        return on_mesh(state.params, carried.tree, batch, step_key(state.key, state.step), scale)

    def build(plan: Plan, _: Any) -> Any:
        return jax.jit(wrap_for_explicit_axes(partial(inspect, plan), caller_mesh))

    compiled = JitByLayouts(build, plan, axes, lambda state: state.params)
    return Triage(compiled, sizes)


class Triage:
    """`run(state, batch) -> TriageReport`, as `triage` builds it."""

    def __init__(self, compiled: JitByLayouts, sizes: Mapping[str, int]):
        self._compiled = compiled
        self._sizes = sizes

    def __call__(self, state: TrainState, batch: Any) -> TriageReport:
        """What is not finite."""
        # The gradient does not need the optimizer's state, often the largest part of a TrainState.
        loss, weight, inspected = self._compiled(state._replace(opt_state=None), batch)
        # jit sorts a dict by its keys; the report is ordered from causes to consequences.
        rows: list[NonFinite] = []
        for name in ("params", "carried", "batch", "means", "grads"):
            for path, observation in jax.tree_util.tree_leaves_with_path({name: inspected[name]}):
                rows += _locate(path_name(path), observation, self._sizes)
        return TriageReport(tuple(rows), float(loss), float(weight))

    def trace(self, state: TrainState, batch: Any) -> Any:
        """The program of one call, as a jaxpr."""
        return self._compiled.trace(state._replace(opt_state=None), batch)


@partial(jax.jit, static_argnames=("mesh", "specs"))
def observations(leaves: list[jax.Array], *, mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> list[jax.Array]:
    """For each leaf, per device: int32 [devices, 1 + rank], the count of non-finite values and the first global index.

    Cost: an all_gather of 4 (1 + rank) bytes per leaf.
    """

    def per_device(leaves: list[jax.Array]) -> list[jax.Array]:
        local = []
        for x, spec in zip(leaves, specs, strict=True):
            local.append(_observe(x, spec))
        return from_every_device(local, mesh.axis_names)

    return jax.shard_map(per_device, mesh=mesh, in_specs=(list(specs),), out_specs=_REPLICATED)(leaves)


def _can_be_nonfinite(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _observe(x: jax.Array, spec: PartitionSpec = _REPLICATED) -> jax.Array | None:
    """The count of non-finite values in a device's shard, and the global index of the first; None if none can be.

    For example a shard [1, NaN, NaN] of device 2 along an axis that splits dim 0: [2, 7], two values, the first at 7.
    """
    if not _can_be_nonfinite(x):
        return None
    # argmax raises for an array without elements.
    if not x.size:
        return jnp.zeros(1 + x.ndim, jnp.int32)
    # argmax gives the first True; where there is none, the count beside it is 0.
    is_bad = ~jnp.isfinite(x).reshape(-1)
    count = jnp.sum(is_bad, dtype=jnp.int32)
    first_bad = jnp.unravel_index(jnp.argmax(is_bad).astype(jnp.int32), x.shape)
    index = [position.astype(jnp.int32) for position in first_bad]
    for dim, axes in enumerate(spec_axes(spec)):
        if axes:  # from the index in the shard to the index in the array
            index[dim] += axis_index(axes).astype(jnp.int32) * jnp.int32(x.shape[dim])
    return jnp.stack([count, *index])


def _observe_param(layout: Any, x: Any) -> jax.Array | None:
    return _observe(stored_array(x), layout.rest)


def _observe_grad(layout: Any, x: jax.Array) -> jax.Array | None:
    return _observe(x, layout.grad)


def _observe_carried(storage: Any, x: Any) -> jax.Array | None:
    return _observe(stored_array(x), storage.spec)


def _observe_batch(spec: PartitionSpec, x: jax.Array) -> jax.Array | None:
    return _observe(x, spec)


def _locate(path: str, observation: Any, sizes: Mapping[str, int]) -> Iterator[NonFinite]:
    """The places where a leaf is not finite, from the observations of all devices along the axes of `sizes`.

    An axis along which all counts are equal is left out of the coordinates: the value is on all of its devices.
    """
    names = tuple(sizes)
    # [*sizes of the axes, 1 + rank]: the count, and the index of the first such value.
    by_device = np.asarray(observation).reshape(*sizes.values(), -1)
    counts = by_device[..., 0]
    differing_axes = []
    for number in range(counts.ndim):
        # [0] and not 0: the axis stays, of size 1, and all of its counts are compared with the first.
        first_counts = counts.take([0], axis=number)
        if (counts != first_counts).any():
            differing_axes.append(number)
    firsts: dict[tuple[int, ...], tuple[int, ...]] = {}
    values: dict[tuple[int, ...], int] = {}
    for device in map(tuple, np.argwhere(counts)):
        place = tuple(int(device[number]) for number in differing_axes)
        first = tuple(map(int, by_device[device][1:]))
        # Several devices may be one place, along the axes that are left out: the smallest of their indices counts.
        firsts[place] = min(firsts.get(place, first), first)
        values[place] = int(counts[device])
    for place, first in firsts.items():
        coordinates = {}
        for number, index in zip(differing_axes, place, strict=True):
            coordinates[names[number]] = index
        yield NonFinite(path, coordinates, values[place], first)
