"""The GradFn and the loss of a pipeline: on each device the microbatches of its stages, by the table of a schedule.

Every device runs the same loop. A tick is forward, backward and weight gradient, each where some device runs it then,
followed by the moves to the neighbors. A device reads its own column of the table; `ops.py` holds what it computes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit._arguments.checks import Axis, named, quoted
from shardkit._jax.compat import bound, eval_shape, varying_axes
from shardkit.collectives import axis_index, axis_size, shift, vary
from shardkit.collectives._sums import typed_zeros, wide_zeros
from shardkit.layers.matmul import live_axes
from shardkit.on_device.batch import row, split_microbatches, take_microbatch
from shardkit.on_device.handles import is_handle, parts, reduce_to_part, unseal_handles, with_parts
from shardkit.on_device.means import Mean
from shardkit.on_device.pipelines import PipelineGradFn, PipelineLoss
from shardkit.on_device.trained import TrainedLeaves, check_trained
from shardkit.pipelines.divergent import refuse_divergent, refuse_mixed
from shardkit.pipelines.ops import BRANCHED, MASKED, LoopState, Ops, Sums, write
from shardkit.pipelines.pieces import Given, Pieces, StagedModel
from shardkit.pipelines.split_backward import TwoHalves
from shardkit.schedules import Schedule, Stages
from shardkit.schedules.action import device_of
from shardkit.schedules.table import ENDS, FIELDS, Segment, Table, buffer_of

Mode = Literal["masked", "branch"]


def gradient_of(
    model: StagedModel, schedule: Schedule, stages: Stages, mode: Mode, recompute: bool, trained: Any = None
) -> PipelineGradFn:
    """The GradFn of a model in pieces."""
    check_trained(trained)
    model.check()
    execution = Execution(model, schedule, stages, mode, recompute)

    def grad_fn(params: Any, batch: Any, keys: Any, *, scale: Any = 1) -> tuple[Mean, Mapping[str, Any], Any]:
        opened = with_parts(params, parts(params))
        sums = execution.sums(opened, batch, keys, scale)
        layers = jax.tree.leaves(parts(opened["layers"]))
        stack = [total.reshape(leaf.shape) for total, leaf in zip(sums.layers, layers, strict=True)]
        grads = sums.shared | {"layers": jax.tree.unflatten(jax.tree.structure(parts(opened["layers"])), stack)}
        grads = jax.tree.map(_left, params, grads, is_leaf=is_handle)
        means = dict(sums.means)
        leaves = TrainedLeaves({name: grads[name] for name in params}, trained)
        return means.pop("loss"), means, leaves.with_zeros(leaves.select())

    return PipelineGradFn(stages, grad_fn, schedule)


def loss_of(model: StagedModel, schedule: Schedule, stages: Stages, mode: Mode) -> PipelineLoss:
    """The loss of a model in pieces, by the forward actions of the schedule."""
    model.check()
    forward = schedule.forward()
    execution = Execution(model, forward, stages, mode, train=False)

    def loss(params: Any, batch: Any, keys: Any) -> tuple[Mean, dict[str, Mean]]:
        means = dict(execution.sums(params, batch, keys).means)
        return means.pop("loss"), means

    return PipelineLoss(stages, loss, forward)


def _left(node: Any, grad: Any) -> Any:
    """The gradient of a leaf as it leaves the GradFn: of a lazy leaf with `entry`, that of its part."""
    return reduce_to_part(node, grad) if is_handle(node) and node.entry else grad


class Execution(NamedTuple):
    """A model in pieces and how it is run."""

    model: StagedModel  # the pieces
    schedule: Schedule  # the table
    stages: Stages  # which layers are where
    mode: Mode  # what a device does in an op that is another's: "masked" the same, "branch" nothing
    recompute: bool = False  # whether backward passes compute their residuals again
    train: bool = True  # whether there are backward passes

    def sums(self, params: Any, batch: Any, keys: Any, scale: Any = 1) -> Sums:
        """The sums over all microbatches on this device."""
        where, p, v = self.model.where, self.schedule.devices, self.schedule.chunks
        names = bound(where, self.stages.axis)
        self._check(names, params, (batch, keys))
        live = live_axes(where, names, *jax.tree.leaves(params))
        device = axis_index(names) if live else jnp.int32(0)
        spread = self.stages.spread is not None and bool(live)
        shared = unseal_handles(dict(params))
        layers = vary(shared.pop("layers"), live)
        if not spread:
            shared = vary(shared, live)  # gradients stay unreduced until the step sums them
        rows = jax.tree.leaves(layers)[0].shape[0]
        each = self.stages.layers_per_stage or self.stages.layers_of(rows * p)
        microbatches = split_microbatches((batch, keys), self.schedule.microbatches)
        starts, counts = np.concatenate([[0], np.cumsum(each)[:-1]]).astype(np.int32), np.array(each, np.int32)
        stacks = jax.tree.map(lambda leaf: leaf.reshape(v, rows // v, *leaf.shape[1:]), layers)

        def given(stage: Any, chunk: Any, microbatch: Any) -> Given:
            batch, keys = take_microbatch(microbatches, microbatch)
            layers = take_microbatch(stacks, chunk)
            return Given(layers, jnp.asarray(starts)[stage], jnp.asarray(counts)[stage], batch, keys)

        def common(microbatch: Any) -> Given:
            # Its number is the same on all devices, so that they meet in the collectives of embed and head.
            return given(0, 0, microbatch)

        zero = vary(jnp.int32(0), live)
        together: tuple[Any, ...] = ()
        if spread:
            together = eval_shape(common, jnp.int32(0)), device_of(p * v - 1, p, self.schedule.placement)
        pieces = Pieces(self.model, shared, eval_shape(given, zero, zero, zero), live, min(each), *together)
        self._check_collectives(pieces, names, bool(live))
        table = self.schedule.table(saved=not self.recompute, spread=spread)
        ops = Ops(
            pieces,
            given,
            shared,
            jnp.asarray(scale, jnp.float32),
            last=p * v - 1,
            saves=self.train and not self.recompute,
            train=self.train,
            split=self._split(pieces, table),
            exclusion=BRANCHED if self.mode == "branch" else MASKED,
            common=common if spread else None,
        )
        executor = Executor(table, ops, live or None, wrap=v > 1 and self.schedule.placement == "loop")
        return executor.run(jax.tree.leaves(parts(stacks)), device)

    def _check(self, names: tuple[str, ...], params: Any, examples: Any) -> None:
        """Refuses a mesh, parameters or examples that the schedule does not fit."""
        where, count = self.model.where, self.schedule.microbatches
        if axis_size(names) != self.schedule.devices:
            raise ValueError(
                f"{where}: the schedule must be for the devices of {named(names)}; it is for {self.schedule.devices} "
                f"and there are {axis_size(names)}. Make one with devices={axis_size(names)}."
            )
        if not isinstance(params, Mapping) or "layers" not in params:
            found = quoted(params) if isinstance(params, Mapping) else type(params).__name__
            raise ValueError(
                f"{where}: the parameters must be a mapping with the entry 'layers', the stack; got {found}. Put the "
                "stack of layers under 'layers', and everything else beside it."
            )
        sizes = sorted({leaf.shape[0] for leaf in jax.tree.leaves(examples) if leaf.ndim})
        if any(size % count for size in sizes):
            raise ValueError(
                f"{where}: a device's examples must be divisible by the schedule's microbatches; got "
                f"{', '.join(map(str, sizes))} examples for {count} microbatches. Choose another batch or a schedule "
                "for other microbatches."
            )

    def _check_collectives(self, pieces: Pieces, names: tuple[str, ...], several: bool) -> None:
        """Refuses collectives of the pieces that would wait for devices that do something else."""
        if self.mode == "branch":
            traced = [pieces.embed, *([pieces.forward, pieces.backward] if self.train else [pieces.stage])]
            traced += [pieces.embed_backward, pieces.head_backward] if self.train else [pieces.head]
            where = f"{self.model.where}: mode='branch'"
            refuse_divergent(where, [t.jaxpr for t in traced], names, "Use mode='masked'.")
        elif several:
            ends = [pieces.embed, pieces.head_backward if self.train else pieces.head]
            traced = [pieces.stage, *([] if self.stages.spread is not None else ends)]
            refuse_mixed(self.model.where, [t.jaxpr for t in traced], names)

    def _split(self, pieces: Pieces, table: Table) -> TwoHalves | None:
        """The two halves of a backward pass, where the schedule and the stage have them."""
        if not self.train or not any("I" in segment.ops for segment in table.segments):
            return None
        if not pieces.split.whole:
            return pieces.split
        warnings.warn(
            f"{self.model.where}: the schedule splits backward passes, but those of this stage run whole, in place of "
            f"I. {pieces.split.why}",
            stacklevel=4,
        )
        return None


class Executor(NamedTuple):
    """Runs a table."""

    table: Table  # ticks, ops and slots
    ops: Ops  # what a device computes
    axis: Axis | None  # the pipe axis; None for one device
    wrap: bool  # whether the last device's neighbor is the first

    def run(self, layers: list[jax.Array], device: Any) -> Sums:
        """All ticks of this device; `layers` are the parts of the stack, `[chunks, layers, ...]`."""
        state = self._first_state(layers)
        # A constant of the program, in as few bytes as hold its numbers, of which a device reads its column once.
        table = jnp.asarray(self.table.rows.astype(np.min_scalar_type(self.table.rows.max())))
        column = lax.dynamic_index_in_dim(table, device, 1, keepdims=False).astype(jnp.int32)
        ends = jnp.asarray(self.table.ends) if self.ops.common else None
        for segments, times in _rounds(self.table.segments):
            begin, ticks = segments[0].begin, sum(segment.ticks for segment in segments)
            rows = _part((column, ends), begin, times * ticks)
            run_round = partial(self._round, segments)
            if times == 1:
                state, _ = run_round(state, rows)
            else:
                state, _ = lax.scan(run_round, state, _repeated(rows, times))
        return state.sums

    def _first_state(self, layers: list[jax.Array]) -> LoopState:
        """Buffers with as many slots as the table needs, and sums, all of zeros."""
        slots, pieces, split = self.table.buffers, self.ops.pieces, self.ops.split

        def allocate(count: int, leaves: Sequence[Any]) -> list[jax.Array]:
            return [typed_zeros(x, shape=(count, *x.shape)) for x in leaves]

        zeros_like = partial(jax.tree.map, wide_zeros)
        if self.ops.train:
            means = pieces.head_backward.out[0]
            sums = Sums(zeros_like(layers), zeros_like(parts(self.ops.shared)), zeros_like(means))
        else:
            sums = Sums([], [], zeros_like(pieces.head.out))
        saved = [*pieces.forward.out[1], *pieces.x] if self.ops.saves else []
        moving, _ = pieces.moving.split(pieces.x)
        return LoopState(
            allocate(slots["inputs"], pieces.x),
            allocate(slots["saved"], saved),
            allocate(slots["cotangents"], moving),
            allocate(slots["kept"], split.residuals if split else []),
            sums,
        )

    def _round(self, segments: Sequence[Segment], state: LoopState, rows: Any) -> tuple[LoopState, None]:
        for segment in segments:
            at = segment.begin - segments[0].begin
            here, ends = _part(rows, at, segment.ticks)
            columns = np.array([FIELDS.index(field) for field in segment.moves], int)
            # In the first tick nothing has arrived: slot 0 is written with what is in it.
            places = jnp.concatenate([jnp.zeros((1, len(columns)), jnp.int32), here[:, columns]])
            none = [row(getattr(state, buffer_of(field)), 0) for field in segment.moves]
            (state, moved), _ = lax.scan(partial(self._tick, segment), (state, none), (here, ends, places[:-1]))
            state = self._arrived(state, segment, moved, places[-1])
        return state, None

    def _tick(self, segment: Segment, carry: Any, here: Any) -> tuple[Any, None]:
        # What moved at the end of a tick is written to its slot at the start of the next: a buffer that is written
        # before it is read is updated in place, where the compiler would otherwise copy it.
        (state, moved), (fields, ends, places) = carry, here
        state = self._arrived(state, segment, moved, places)
        at = {field: fields[k] for k, field in enumerate(FIELDS)}
        if ends is not None:
            at |= {end: ends[ENDS.index(end)] for end in segment.ends}
        results: dict[str, list[jax.Array]] = {}
        if "F" in segment.ops:
            # The backward pass starts after the forward pass: their temporary memory would add up.
            state, results["inputs"] = _complete(self.ops.forward(state, at))
        if self.ops.split and "I" in segment.ops:
            state, results["cotangents"] = self.ops.input_gradient(state, at, whole="B" in segment.ops)
        elif self.ops.train and {"B", "I"} & set(segment.ops):
            state, results["cotangents"] = self.ops.backward(state, at)
        if self.ops.split and "W" in segment.ops:
            state = self.ops.weight_gradient(state, at)
        return (state, [self._sent(results[buffer_of(field)], field) for field in segment.moves]), None

    def _arrived(
        self, state: LoopState, segment: Segment, moved: list[list[jax.Array]], places: jax.Array
    ) -> LoopState:
        """The state with what has moved, in its slots."""
        for k, (field, leaves) in enumerate(zip(segment.moves, moved, strict=True)):
            name = buffer_of(field)
            buffers, place = getattr(state, name), places[k]
            if name in self.table.crowded:
                last = self.table.buffers[name] - 1
                arrives, place = place <= last, jnp.minimum(place, last)
                pairs = zip(leaves, row(buffers, place), strict=True)
                leaves = [jnp.where(arrives, new, old) for new, old in pairs]
            state = state._replace(**{name: write(buffers, place, leaves)})  # type: ignore[arg-type]
        return state

    def _sent(self, leaves: list[jax.Array], field: str) -> list[jax.Array]:
        """What a neighbor, or the device itself, receives."""
        side = field.split("_")[-1]
        if side == "self" or self.axis is None:
            return leaves
        # Every device sends in every tick of the segment, also one that has nothing to send: a ppermute is one call of
        # all devices, and inside an op, which under mode="branch" some of them skip, those that run it would wait for
        # the others for ever. What is sent in vain goes to a free slot, or nowhere. It stands at the end of the tick
        # because nothing of this tick reads it: what F returns may be under way while B computes. It is no part of what
        # the backward pass of a stage differentiates: cotangents go back by moves of the table, when that says so.
        return list(shift(leaves, self.axis, by=1 if side == "left" else -1, wrap=self.wrap))


def _part(rows: Any, begin: int, ticks: int) -> Any:
    return jax.tree.map(lambda x: x[begin : begin + ticks], rows)


def _repeated(rows: Any, times: int) -> Any:
    return jax.tree.map(lambda x: x.reshape(times, -1, x.shape[-1]), rows)


def _rounds(segments: Sequence[Segment]) -> Iterator[tuple[Sequence[Segment], int]]:
    """Runs of segments that repeat, and how often: the program holds a run once.

    On one or two devices a segment has only a few ticks, and the program would grow with the microbatches.
    """
    kinds = [(segment.ops, segment.ticks, segment.moves, segment.ends) for segment in segments]
    at = 0
    while at < len(kinds):
        width, times = 1, 1
        for size in range(2, (len(kinds) - at) // 2 + 1):
            count = 1
            while kinds[at + count * size : at + (count + 1) * size] == kinds[at : at + size]:
                count += 1
            if count > 1 and count * size > times * width:
                width, times = size, count
        yield segments[at : at + width], times
        at += times * width


def _complete(tree: Any) -> Any:
    """A barrier: what comes after it starts when the whole tree is computed."""
    leaves, structure = jax.tree.flatten(tree)
    places: dict[frozenset[str], list[int]] = {}
    for k, leaf in enumerate(leaves):
        places.setdefault(frozenset(varying_axes(leaf)), []).append(k)
    for alike in places.values():  # one barrier would type all of them as varying over the axes of any
        for k, leaf in zip(alike, lax.optimization_barrier([leaves[k] for k in alike]), strict=True):
            leaves[k] = leaf
    return jax.tree.unflatten(structure, leaves)
