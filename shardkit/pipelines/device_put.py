"""A pipeline of several programs: every stage is a separate program on its own devices.

Microbatches move with `jax.device_put`, and overlap because jax dispatches programs asynchronously. Stages may differ
in width, code and parameters; idle stages run nothing. In every step one Python process dispatches M programs per
stage and the moves between them: for stages of a millisecond or more.

Shards must have the same shape on both sides of a move, and both meshes equally many devices. Then each device sends
its shard to one other device. With other shapes jax would copy through the host and block, so that nothing overlaps;
between processes it would refuse the move.

Source: Huang et al., GPipe (arXiv:1811.06965); Xhebraj et al., JaxPP (arXiv:2412.14374).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import combinations
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit._arguments.checks import divisor, format_sizes, integers_from_one
from shardkit._arguments.typed import short, typed
from shardkit.meshes.layout import check_spec, local_shape_of, path_name
from shardkit.on_device.batch import split_microbatches, take_microbatch
from shardkit.pipelines import stage_programs
from shardkit.pipelines.stage_programs import Stage, Station, fit_specs
from shardkit.schedules import one_f_one_b
from shardkit.schedules.action import Action

Specs = PartitionSpec | Sequence[Any]
REPLICATED = PartitionSpec()


@typed
def device_put_pipeline(
    stages: Sequence[Stage], meshes: Sequence[Mesh], *, specs: Specs = REPLICATED, param_specs: Specs = REPLICATED
) -> Callable[..., list[jax.Array]]:
    """Builds the forward pass of a pipeline with each stage on a separate sub-mesh.

    Layout: `X[B, ..] -> X_i[B/M, ..]` on mesh 0, `Y_i[B/M, ..]` from mesh s to mesh s + 1

    Args:
        stages: a function `stage(params, x) -> y` for each stage. It runs inside shard_map over its mesh, and may use
            collectives over the axes of this mesh. x is an array, or for the first stage a pytree of arrays.
        meshes: the mesh of each stage, as `submeshes` returns them.
        specs: layout of the input of each stage and of the last output: one spec, or a list with one entry more than
            stages. For a leaf of lower rank the spec is truncated.
        param_specs: layout of the parameters: one spec, or a list with one entry per stage, a spec or a pytree of specs
            that is a prefix of its parameters.

    Returns:
        `forward(params, batch, *, microbatches)`. Pass the parameters as a list with an entry for each stage, which you
            place on its mesh with `shard`, and the batch as a pytree of host arrays that share dim 0. You get a list
            with the last stage's y for each microbatch, in order, without blocking.

    Raises:
        ValueError: not one mesh per stage, meshes that share a device or differ in size, a list of specs of another
            length or with an unknown axis; at the call microbatches that do not divide the batch, arrays that do not
            share dim 0, an indivisible dim, or a value whose shards would have another shape on the next mesh.

    Cost: a device sends its shard of Y_i to one device of the next mesh, at each of S - 1 boundaries, M times.
        Inside a mesh only the stage communicates. A step takes S + M - 1 times the slowest stage.

    Example:
        >>> meshes = sk.submeshes(mesh, "data")
        >>> from shardkit.pipelines.device_put import device_put_pipeline
        >>> forward = device_put_pipeline([lambda w, x: x * w, lambda w, x: x + w], meshes)
        >>> params = [sk.shard(jnp.float32(w), part, P()) for w, part in zip((3, 1), meshes)]
        >>> [y.tolist() for y in forward(params, np.arange(4, dtype=np.float32), microbatches=2)]
        [[1.0, 4.0], [7.0, 10.0]]

    Source: Huang et al., GPipe (arXiv:1811.06965), for the order.
    """
    where = "device_put_pipeline"
    stations = build_stations(where, stages, meshes, specs, param_specs)
    programs = [stage_programs.build_forward(station) for station in stations]

    def forward(params: Sequence[Any], batch: Any, *, microbatches: int) -> list[jax.Array]:
        outputs = []
        for x in _split_batch(where, batch, microbatches):
            for s, program in enumerate(programs):
                x = _move_input(where, stations, s, x)
                x = program(params[s], x)
            outputs.append(x)
        return outputs

    return forward


@typed
def device_put_value_and_grad(
    stages: Sequence[Stage],
    loss: Callable[[jax.Array, Any], Any],
    meshes: Sequence[Mesh],
    *,
    specs: Specs = REPLICATED,
    param_specs: Specs = REPLICATED,
) -> Callable[..., tuple[jax.Array, dict[str, jax.Array], list[Any]]]:
    """Builds loss and gradients of a pipeline with each stage on a separate sub-mesh, in the order of 1F1B.

    Every stage is a program of its own, so stages may differ in code, width and parameters. For stages that are alike,
    on one mesh, call `pipeline(...).value_and_grad`, which is one program for all devices.

    Layout: `X_i[B/M, ..]` on mesh 0, `Y_i[B/M, ..]` from mesh s to s + 1, `dY_i[B/M, ..]` from mesh s + 1 to s;
        `grads[...] {U_a} -> grads[...]` on each mesh

    Args:
        stages: a function `stage(params, x) -> y` for each of the S stages. It runs inside shard_map over its mesh, on
            this device's shards, and may use collectives over the axes of this mesh. x is an array, or for the first
            stage a pytree of arrays; between stages it is one floating-point array, [examples, ...].
        loss: `loss(y, targets)` of this device's shards of the last output and of the targets. It returns what a loss
            of `value_and_grad` does: a scalar (a mean over equally many examples), a `Mean(total, weight)`, or either
            with a dict of auxiliary ones.
        meshes: the mesh of each stage, with equally many devices, as `submeshes` returns them.
        specs: layout of the input of each stage and of the last output: one PartitionSpec, or a list of S + 1. For an
            array of lower rank the spec is truncated. Targets are split as the last output.
        param_specs: layout of the parameters: one PartitionSpec, or a list of S, each a spec or a pytree of specs that
            is a prefix of the parameters of its stage.

    Returns:
        A function `(params, batch, targets, *, microbatches) -> (loss, aux, grads)`. Pass params as a list with an
            entry for each stage, which you place on its mesh with `shard`; batch and targets as pytrees of host arrays
            that share dim 0, the B examples; and microbatches, M, a divisor of B. The loss is a float32 scalar, the
            mean over the batch; aux is a dict of such means; grads is a list with the gradients of each stage, in the
            shapes and layouts of its parameters, float32. The call does not wait for the devices.

    Raises:
        TypeError: an entry of `meshes` that is no mesh; at trace time a loss that returns anything else, as
            `value_and_grad`.
        ValueError: not one mesh per stage, meshes that share a device or differ in size, a list of specs of another
            length or with an unknown axis. At the call: microbatches that do not divide the batch, arrays that do not
            share dim 0, an indivisible dim, or a value whose shards would have another shape on the next mesh.

    Cost: per microbatch a device sends its shard of Y_i forward, and of dY_i back, at each of S - 1 boundaries: in all
        2 M (S - 1) messages of B/M examples' activations, in their own dtype. In each stage, once per step, an
        all_reduce of its gradients in float32 over the axes that split examples but not the leaf; after the last stage
        an all_reduce of 8 bytes per mean and microbatch. A stage runs forward twice, because it saves only its input:
        stage s holds the inputs of at most S - s microbatches, and of one that has arrived.

    Example:
        >>> meshes, x = sk.submeshes(mesh, "data"), np.ones(4, np.float32)
        >>> stages, loss = [lambda w, x: x * w, lambda w, x: x + w], lambda y, targets: jnp.mean(y - targets)
        >>> params = [sk.shard(jnp.float32(w), part, P()) for w, part in zip((3, 1), meshes)]
        >>> value, aux, grads = sk.device_put_value_and_grad(stages, loss, meshes)(params, x, 0 * x, microbatches=2)
        >>> float(value), [float(grad) for grad in grads]
        (4.0, [1.0, 1.0])

    Source: Narayanan et al., PipeDream (SOSP 2019), for the order; Xhebraj et al., JaxPP (arXiv:2412.14374), for
        programs of their own.
    """
    where = "device_put_value_and_grad"
    stations = build_stations(where, stages, meshes, specs, param_specs)
    programs = _StepPrograms(where, stations, loss)

    def run(
        params: Sequence[Any], batch: Any, targets: Any, *, microbatches: int
    ) -> tuple[jax.Array, dict[str, jax.Array], list[Any]]:
        pairs = _split_batch(where, (batch, targets), microbatches)
        return programs.run(params, pairs)

    return run


class _StepPrograms:
    """The programs of a step's stages, and the order in which one step dispatches them."""

    def __init__(self, where: str, stations: Sequence[Station], loss: Callable[[jax.Array, Any], Any]):
        self._where = where
        self._stations = stations
        self._forwards = []
        self._backwards = []
        self._zeros = []
        self._finishes = []
        for s, station in enumerate(stations):
            self._forwards.append(stage_programs.build_forward(station))
            self._backwards.append(stage_programs.build_backward(station, first=s == 0))
            self._zeros.append(stage_programs.build_zeros(station))
            self._finishes.append(stage_programs.build_finish(station))
        self._head = stage_programs.build_head(stations[-1], loss)

    def run(self, params: Sequence[Any], pairs: Sequence[Any]) -> tuple[jax.Array, dict[str, jax.Array], list[Any]]:
        """The loss, the auxiliary values and the gradients, of pairs of a microbatch and its targets.

        The order of dispatch is that of the table, tick by tick: a device runs its programs in the order in which they
        were dispatched, so that this is 1F1B on each of them.

        Worked example: two stages, two microbatches. F of stage 0 takes x_0 and its y moves to mesh 1; then F of stage
        0 takes x_1, while mesh 1 runs F of stage 1 and the head, which leaves dy_0 there; B of stage 1 takes the saved
        input and dy_0, adds to its sums, and its dx moves to mesh 0 as dy_0 of stage 0.
        """
        stations = self._stations
        last = len(stations) - 1
        inputs: dict[tuple[int, int], Any] = {}  # by stage and microbatch, from F to B
        cotangents: dict[tuple[int, int], jax.Array] = {}
        means = []
        sums = []
        for make_zeros, stage_params in zip(self._zeros, params, strict=True):
            sums.append(make_zeros(stage_params))
        for s, op, i in _order_actions(len(stations), len(pairs)):
            if op == "F":
                x, targets = pairs[i]
                if s == 0:
                    inputs[s, i] = _move_input(self._where, stations, s, x)
                y = self._forwards[s](params[s], inputs[s, i])
                if s < last:
                    inputs[s + 1, i] = _move_input(self._where, stations, s + 1, y)
                else:
                    targets = _put(targets, stations[s].leaving, stations[s].mesh)
                    mean, cotangents[s, i] = self._head(y, targets)
                    means.append(mean)
            else:
                # Popped: B is the last reader of the input and of its cotangent. Nothing here holds them any longer,
                # and the device frees them behind this program, which bounds the inputs in flight as 1F1B does.
                sums[s], dx = self._backwards[s](params[s], inputs.pop((s, i)), cotangents.pop((s, i)), sums[s])
                if s > 0:
                    cotangents[s - 1, i] = _put(dx, stations[s - 1].leaving, stations[s - 1].mesh)
        # The heads ran on the last mesh, and so do their averages. Each mesh divides its own sums, by a copy of the
        # weight.
        weight, averages = stage_programs.compute_averages(means)
        weights = [_put(weight, REPLICATED, station.mesh) for station in stations]
        grads = []
        for divide, stage_sums, stage_weight in zip(self._finishes, sums, weights, strict=True):
            grads.append(divide(stage_sums, stage_weight))
        return averages.pop("loss"), averages, grads


@cache
def _order_actions(stages: int, microbatches: int) -> tuple[Action, ...]:
    """The actions of 1F1B, tick by tick."""
    return tuple(one_f_one_b(stages, microbatches).ticks)


def build_stations(
    where: str, stages: Sequence[Stage], meshes: Sequence[Mesh], specs: Specs, param_specs: Specs
) -> list[Station]:
    """The stations, after all checks that do not need shapes."""
    _check_meshes(where, len(stages), meshes)
    borders = _expand_specs(where, "specs", specs, len(stages) + 1)
    params = _expand_specs(where, "param_specs", param_specs, len(stages))
    stations = []
    for s, (stage, mesh) in enumerate(zip(stages, meshes, strict=True)):
        entering = borders[s]
        leaving = borders[s + 1]
        for spec in (entering, leaving):
            check_spec(f"{where}: stage {s}", spec, mesh, len(spec))
        for spec in jax.tree.leaves(params[s], is_leaf=lambda x: isinstance(x, PartitionSpec)):
            check_spec(f"{where}: the parameters of stage {s}", spec, mesh, len(spec))
        kernel = partial(stage_programs.run_checked, f"{where}: the output of stage {s}", stage, leaving, mesh)
        stations.append(Station(kernel, mesh, entering, leaving, params[s]))
    return stations


def _check_meshes(where: str, count: int, meshes: Sequence[Mesh]) -> None:
    """Refuses meshes that are not one per stage, of equal size and of different devices."""
    if not count or len(meshes) != count:
        raise ValueError(
            f"{where}: there must be one mesh per stage, and at least one; got stages={count}, "
            f"meshes={len(meshes)}. Split a mesh with submeshes along an axis of that size."
        )
    for mesh in meshes:
        if not isinstance(mesh, Mesh):
            raise TypeError(
                f"{where}: meshes must be meshes of devices; got {short(mesh)}. Split a mesh with submeshes."
            )
    sizes = [mesh.size for mesh in meshes]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"{where}: all meshes must have the same number of devices, because each device sends to one of the next "
            f"mesh; got {', '.join(map(str, sizes))}. Split one mesh with submeshes."
        )
    for (a, mesh_a), (b, mesh_b) in combinations(enumerate(meshes), 2):
        shared_devices = set(mesh_a.devices.flat) & set(mesh_b.devices.flat)
        if shared_devices:
            shared = sorted(device.id for device in shared_devices)
            raise ValueError(
                f"{where}: no two meshes may share a device; stages {a} and {b} share {', '.join(map(str, shared))}. "
                "Split one mesh with submeshes."
            )


def _expand_specs(where: str, name: str, specs: Specs, count: int) -> list[Any]:
    """A list of so many specs: the list that was passed, or one spec for all."""
    if isinstance(specs, PartitionSpec):
        return [specs] * count
    if len(specs) != count:
        raise ValueError(
            f"{where}: {name} must be one spec or a list of {count}; got a list of {len(specs)}. "
            "Pass one per stage, and in specs one more for the output of the last."
        )
    return list(specs)


def _split_batch(where: str, batch: Any, microbatches: int) -> list[Any]:
    """The microbatches of a batch, as views of host arrays."""
    integers_from_one(where, microbatches=microbatches)
    shapes = []
    counts = set()
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        shape = np.shape(x)
        shapes.append(f"{path_name(path)}: {shape}")
        if shape:  # scalars belong to every microbatch
            counts.add(shape[0])
    if len(counts) != 1:
        raise ValueError(
            f"{where}: every array of the batch must have the same number of examples along dim 0; got "
            f"{', '.join(shapes) or 'no array'}. Pass arrays that share dim 0."
        )
    divisor(where, "microbatches", microbatches, "the batch", counts.pop())
    stacked = split_microbatches(jax.tree.map(np.asarray, batch), microbatches)
    return [take_microbatch(stacked, i) for i in range(microbatches)]


def _put(tree: Any, spec: PartitionSpec, mesh: Mesh) -> Any:
    """The arrays on a mesh, in this layout."""
    shardings = jax.tree.map(partial(NamedSharding, mesh), fit_specs(spec, tree))
    return jax.device_put(tree, shardings)


def _move_input(where: str, stations: Sequence[Station], s: int, tree: Any) -> Any:
    """The input of stage s, on its mesh; refuses a move that changes the shape of its shards."""
    # With shards of one shape on both sides a move is one copy from each device to one of the next mesh. With others
    # device_put would cut and join them on the way, and send more.
    subject = f"{where}: the input of stage {s}"
    spec = stations[s].entering
    target = stations[s].mesh
    source = target
    if s > 0:
        source = stations[s - 1].mesh
    for x in jax.tree.leaves(tree):
        leaf_spec = fit_specs(spec, x)
        source_shape = local_shape_of(subject, x.shape, leaf_spec, source)
        target_shape = local_shape_of(subject, x.shape, leaf_spec, target)
        if source_shape != target_shape:
            raise ValueError(
                f"{subject} must have shards of one shape on both sides of the move; with {spec} they are "
                f"{source_shape} on {format_sizes(source.shape.items())} and {target_shape} on "
                f"{format_sizes(target.shape.items())}. Give all meshes the same axis sizes, or choose another spec."
            )
    return _put(tree, spec, target)
