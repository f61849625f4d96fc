"""The GradFn and the loss of a pipeline: on each device the microbatches of its stages, by the table of a schedule.

In a tick a device runs at most a forward pass (F) and then a backward pass: B, or one of its halves, I (the gradient of
the inputs) or W (that of the weights). `1F0` is stage 1, F, microbatch 0. All devices run the same program, so each
traces every op that some device runs in that tick, followed by the moves to the neighbors. A device reads its own
column of the table; `ops.py` holds what it computes.

Worked example: 1F1B on two devices with three microbatches, and its tick 4.

    tick      0   1   2   3   4   5   6   7
    device 0  0F0 0F1 .   0B0 0F2 0B1 .   0B2
    device 1  .   1F0 1B0 1F1 1B1 1F2 1B2 .

Ticks 3 to 5 are one segment: in each of them some device runs F and some device B, outputs move to the right and
cotangents to the left. The program of the segment is a scan over its three rows of the table. In tick 4

    device    at the start writes                computes              sends at the end
    0         nothing of use: device 1 ran no B  y of 0F2              y to device 1, for slot 0 of its inputs
    1         nothing of use: device 0 ran no F  the loss, dx of 1B1   dx to device 0, for slot 0 of its cotangents

At the start of tick 5 device 0 writes dx to its slot 0 and reads it for 0B1, and device 1 writes y to its slot 0 and
reads it for 1F2. Both devices send and receive both ways in every tick: what nobody needs goes to a slot that is free.

In the words of Megatron a chunk is a virtual stage, I is dgrad and W wgrad. Examples are split into microbatches, the
stack is reshaped by chunk, leaves are partitioned into floats and others, and a backward pass is cut into halves, I and
W.

Embedding and head are "spread" where the plan of their leaves lays them out over the pipe axis: then all devices run
them together, each with its part, and not the first and the last stage alone. The table's `ends` say in which ticks. If
these are not all ticks of a segment, the end stands in a branch, which all devices take in the same ticks. A buffer is
"crowded" where in some tick a device has no free slot in it: an arrival that the device does not need is then dropped.
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

from shardkit._arguments.checks import Axis, name_axes, quote
from shardkit._jax.compat import bound, eval_shape, varying_axes
from shardkit._jax.jaxprs import RunShare
from shardkit.collectives import axis_index, axis_size, shift, vary
from shardkit.collectives._sums import typed_zeros, wide_zeros
from shardkit.layers.matmul import live_axes
from shardkit.on_device.batch import split_microbatches, take_microbatch, take_row
from shardkit.on_device.gradient import is_loss_alone
from shardkit.on_device.handles import is_handle, open_before_loss, reduce_to_part, strip_handles, unseal_handles
from shardkit.on_device.means import Mean
from shardkit.on_device.pipelines import PipelineGradFn, PipelineLoss
from shardkit.on_device.trained import TrainedLeaves, check_trained
from shardkit.pipelines.divergent import refuse_divergent, refuse_mixed
from shardkit.pipelines.in_sequence import compute_in_sequence, count_layers, find_starts
from shardkit.pipelines.ops import Branched, CommonEnd, LoopState, Masked, Ops, Sums, TickRow, write_slot
from shardkit.pipelines.pieces import PieceArguments, Pieces, StagedModel
from shardkit.pipelines.split_backward import TwoHalves
from shardkit.schedules import Schedule
from shardkit.schedules.action import device_of
from shardkit.schedules.stages import Stages
from shardkit.schedules.table import ENDS, FIELDS, RingMove, Segment, Table

Mode = Literal["masked", "branch"]


def build_grad_fn(
    model: StagedModel, schedule: Schedule, stages: Stages, mode: Mode, recompute: bool, trained: Any = None
) -> PipelineGradFn:
    """The GradFn of a model in pieces."""
    check_trained(trained)
    model.check()
    run = StagedRun(model, schedule, stages, mode, recompute)

    def grad_fn(params: Any, batch: Any, keys: Any, *, scale: Any = 1) -> tuple[Mean, Mapping[str, Any], Any]:
        # Leaves that are opened just before the loss; `_reduce_opened` takes their gradients back to the parts.
        opened = open_before_loss(params)
        if is_loss_alone():  # asked by what compares the loss with one device's (`gradient.loss_alone`): no gradients
            means = dict(compute_in_sequence(model, schedule, stages, opened, batch, keys))
            return means.pop("loss"), means, jax.tree.map(jnp.zeros_like, strip_handles(params))
        sums = run.sum_microbatches(opened, batch, keys, scale)
        stack_grads = _join_chunks(sums.layers, strip_handles(opened[stages.stack]))
        grads = sums.shared | {stages.stack: stack_grads}
        grads = jax.tree.map(_reduce_opened, params, grads, is_leaf=is_handle)
        means = dict(sums.means)
        leaves = TrainedLeaves({name: grads[name] for name in params}, trained)
        # The gradients of the trained leaves as they are, and zeros for frozen ones.
        return means.pop("loss"), means, leaves.with_zeros(leaves.select())

    return PipelineGradFn(stages, grad_fn, schedule)


def _join_chunks(sums: Sequence[jax.Array], stack: Any) -> Any:
    """Sums `[chunks, layers, ...]` as the stack `[chunks * layers, ...]` that they are the gradients of."""
    leaves, tree = jax.tree.flatten(stack)
    grads = []
    for total, leaf in zip(sums, leaves, strict=True):
        grads.append(total.reshape(leaf.shape))
    return jax.tree.unflatten(tree, grads)


def _reduce_opened(node: Any, grad: Any) -> Any:
    """The gradient of a leaf as it leaves the GradFn: that of its part, if it was opened before the loss."""
    if is_handle(node) and node.opened_before_loss:
        return reduce_to_part(node, grad)
    return grad


def build_loss(model: StagedModel, schedule: Schedule, stages: Stages, mode: Mode) -> PipelineLoss:
    """The loss of a model in pieces, by the forward actions of the schedule."""
    model.check()
    forward = schedule.forward()
    run = StagedRun(model, forward, stages, mode, train=False)

    # The step has opened the leaves that are opened before the loss.
    def loss(params: Any, batch: Any, keys: Any) -> tuple[Mean, dict[str, Mean]]:
        means = dict(run.sum_microbatches(params, batch, keys).means)
        return means.pop("loss"), means

    return PipelineLoss(stages, loss, forward)


class _DeviceInputs(NamedTuple):
    """This device's layers and examples, and which layers each stage of the model has."""

    stacks: Any  # its part of the stack, `[chunks, layers, ...]`
    microbatches: Any  # batch and keys, `[microbatches, examples, ...]`
    starts: np.ndarray  # for each stage of the model the index of its first layer
    counts: np.ndarray  # and its number of layers

    def find_arguments(self, stage: Any, chunk: Any, microbatch: Any) -> PieceArguments:
        """The arguments of the pieces for a stage, which is this chunk of the device, and a microbatch."""
        batch, keys = take_microbatch(self.microbatches, microbatch)
        layers = take_microbatch(self.stacks, chunk)
        return PieceArguments(layers, jnp.asarray(self.starts)[stage], jnp.asarray(self.counts)[stage], batch, keys)

    def find_common(self, microbatch: Any) -> PieceArguments:
        """The arguments of embed and head where all devices run them together.

        All devices pass the same number, so that the collectives of embed and of head meet.
        """
        return self.find_arguments(0, 0, microbatch)


class _Pipe(NamedTuple):
    """The pipe axis, as a device sees it."""

    names: tuple[str, ...]  # the mesh axes that it is made of
    live: tuple[str, ...]  # those of several devices, or over which an array varies; () where nothing is sent
    device: jax.Array  # the place of this device along it
    is_spread: bool  # whether all devices run embedding and head together, each with its part of the shared leaves


class StagedRun(NamedTuple):
    """A model in pieces, and how it is run."""

    model: StagedModel  # the pieces
    schedule: Schedule  # which device runs what in which tick
    stages: Stages  # which layers are where
    mode: Mode  # in an op of another device, a device computes too and discards it ("masked"), or waits ("branch")
    recompute: bool = False  # whether backward passes compute their residuals again
    train: bool = True  # whether there are backward passes

    def sum_microbatches(self, params: Any, batch: Any, keys: Any, scale: Any = 1) -> Sums:
        """The sums over all microbatches on this device."""
        pipe = self._find_pipe(params, (batch, keys))
        layers, shared = self._mark_varying(params, pipe)
        counts = count_layers(self.stages, self.schedule.devices, layers)
        inputs = self._arrange_inputs(layers, counts, (batch, keys))
        pieces = self._trace_pieces(inputs, shared, pipe)
        self._check_collectives(pieces, pipe)
        table = self.schedule.table(saved=not self.recompute, spread=pipe.is_spread)
        halves = self._find_halves(pieces, table)
        ops = self._make_ops(pieces, inputs, shared, scale, halves, pipe)
        wraps = self.schedule.chunks > 1 and self.schedule.placement == "loop"
        runner = TableRunner(table, ops, pipe.live or None, wraps)
        return runner.run(jax.tree.leaves(strip_handles(inputs.stacks)), pipe.device)

    def _find_pipe(self, params: Any, examples: Any) -> _Pipe:
        """The pipe axis, after a check of what does not fit the schedule."""
        where = self.model.where
        names = bound(where, self.stages.axis)
        self._check(names, params, examples)
        live = live_axes(where, names, *jax.tree.leaves(params))
        device = axis_index(names) if live else jnp.int32(0)
        return _Pipe(names, live, device, self.stages.spread is not None and bool(live))

    def _mark_varying(self, params: Any, pipe: _Pipe) -> tuple[Any, dict[str, Any]]:
        """The stack of layers and the shared leaves, marked as varying over the pipe.

        So their gradients stay sums of this device, which the step reduces once after the last tick: jax would reduce
        that of an unmarked leaf in every tick. Where embedding and head are spread, no shared leaf is marked: a spread
        leaf is a part already, and embedding and head have to return the same on all devices, which they would not do
        by their types if they read a marked leaf.
        """
        shared = unseal_handles(dict(params))
        layers = vary(shared.pop(self.stages.stack), pipe.live)
        if not pipe.is_spread:
            shared = vary(shared, pipe.live)
        return layers, shared

    def _trace_pieces(self, inputs: _DeviceInputs, shared: Any, pipe: _Pipe) -> Pieces:
        """The pieces, traced for the arguments of any stage and microbatch."""
        zero = vary(jnp.int32(0), pipe.live)
        common = None
        owner = None
        if pipe.is_spread:
            common = eval_shape(inputs.find_common, jnp.int32(0))
            # The device of the last stage: the heads read its output.
            owner = device_of(self._last_stage, self.schedule.devices, self.schedule.placement)
        example = eval_shape(inputs.find_arguments, zero, zero, zero)
        return Pieces(self.model, shared, example, pipe.live, int(inputs.counts.min()), common, owner)

    def _make_ops(
        self, pieces: Pieces, inputs: _DeviceInputs, shared: Any, scale: Any, halves: TwoHalves | None, pipe: _Pipe
    ) -> Ops:
        return Ops(
            pieces=pieces,
            find_arguments=inputs.find_arguments,
            shared=shared,
            scale=jnp.asarray(scale, jnp.float32),
            last=self._last_stage,
            saves=self.train and not self.recompute,
            train=self.train,
            halves=halves,
            exclusion=Branched() if self.mode == "branch" else Masked(),
            find_common=inputs.find_common if pipe.is_spread else None,
        )

    @property
    def _last_stage(self) -> int:
        return self.schedule.devices * self.schedule.chunks - 1

    def _arrange_inputs(self, layers: Any, counts: tuple[int, ...], examples: Any) -> _DeviceInputs:
        """Layers by chunk, and batch and keys by microbatch; `counts` are the numbers of layers of all stages."""
        chunks = self.schedule.chunks

        def reshape_by_chunk(leaf: jax.Array) -> jax.Array:
            return leaf.reshape(chunks, leaf.shape[0] // chunks, *leaf.shape[1:])

        microbatches = split_microbatches(examples, self.schedule.microbatches)
        stacks = jax.tree.map(reshape_by_chunk, layers)
        return _DeviceInputs(stacks, microbatches, find_starts(counts), np.array(counts, np.int32))

    def _check(self, names: tuple[str, ...], params: Any, examples: Any) -> None:
        """Refuses a mesh, parameters or examples that the schedule does not fit."""
        where = self.model.where
        count = self.schedule.microbatches
        if axis_size(names) != self.schedule.devices:
            raise ValueError(
                f"{where}: the schedule must be for the devices of {name_axes(names)}; it is for "
                f"{self.schedule.devices} and there are {axis_size(names)}. Make one with devices={axis_size(names)}."
            )
        stack = self.stages.stack
        if not isinstance(params, Mapping) or stack not in params:
            got = quote(params) if isinstance(params, Mapping) else type(params).__name__
            raise ValueError(
                f"{where}: the parameters must be a mapping with the entry {stack!r}, the stack; got {got}. Put the "
                f"stack of layers under {stack!r}, and everything else beside it."
            )
        arrays = [leaf for leaf in jax.tree.leaves(examples) if leaf.ndim]
        sizes = sorted({x.shape[0] for x in arrays})
        if any(size % count for size in sizes):
            raise ValueError(
                f"{where}: a device's examples must be divisible by the schedule's microbatches; got "
                f"{', '.join(map(str, sizes))} examples for {count} microbatches. Choose another batch or a schedule "
                "for other microbatches."
            )

    def _check_collectives(self, pieces: Pieces, pipe: _Pipe) -> None:
        """Refuses collectives of the pieces that would wait for devices that do something else, or mix microbatches.

        In a branch the other devices do something else. Masked, all devices meet, each with another microbatch.
        Branches beside spread ends are refused before.
        """
        if self.mode == "branch":
            if self.train:
                traced = [pieces.embed, pieces.forward, pieces.backward, pieces.embed_backward, pieces.head_backward]
            else:
                traced = [pieces.embed, pieces.stage, pieces.head]
            jaxprs = [piece.jaxpr for piece in traced]
            refuse_divergent(f"{self.model.where}: mode='branch'", jaxprs, pipe.names, "Use mode='masked'.")
        elif pipe.live:
            traced = [pieces.stage]
            if self.stages.spread is None:
                traced += [pieces.embed, pieces.head_backward if self.train else pieces.head]
            refuse_mixed(self.model.where, [piece.jaxpr for piece in traced], pipe.names)

    def _find_halves(self, pieces: Pieces, table: Table) -> TwoHalves | None:
        """The two halves of a backward pass, where the schedule has I and W, and the stage can be cut."""
        if not self.train or not any("I" in segment.ops for segment in table.segments):
            return None
        halves = pieces.halves
        if not halves.uncut:
            return halves
        warnings.warn(
            f"{self.model.where}: the schedule splits backward passes, but those of this stage run whole, in place of "
            f"I. {halves.why}",
            stacklevel=4,
        )
        return None


class _Ticks(NamedTuple):
    """What a device reads of the table in some ticks, each with the tick as dim 0."""

    fields: jax.Array  # int32 [ticks, fields], this device's rows, by `FIELDS`
    # int32 [ticks, ends], by `ENDS`, the same on all devices; None where no ends are run by all devices together
    ends: jax.Array | None


class TableRunner(NamedTuple):
    """Runs a table."""

    table: Table  # ticks, ops and slots
    ops: Ops  # what a device computes
    axis: Axis | None  # the pipe axis; None for one device
    wraps: bool  # whether the last device's neighbor is the first

    def run(self, layers: list[jax.Array], device: Any) -> Sums:
        """All ticks of this device; `layers` are the parts of the stack, `[chunks, layers, ...]`."""
        state = self._allocate_state(layers)
        # A constant of the program, in as few bytes as hold its numbers, of which a device reads its rows once.
        table = jnp.asarray(self.table.rows.astype(np.min_scalar_type(self.table.rows.max())))
        fields = lax.dynamic_index_in_dim(table, device, 1, keepdims=False).astype(jnp.int32)
        # Spread: for each tick, which microbatch all devices embed together, and for which they run the head.
        ends = jnp.asarray(self.table.ends) if self.ops.find_common else None
        all_ticks = _Ticks(fields, ends)
        for segments, times in _find_rounds(self.table.segments):
            length = sum(segment.ticks for segment in segments)
            ticks = _slice_ticks(all_ticks, segments[0].begin, times * length)
            run_round = partial(self._run_round, segments, times)
            if times == 1:
                state, _ = run_round(state, ticks)
            else:
                state, _ = lax.scan(run_round, state, _reshape_by_round(ticks, times))
        return state.sums

    def _allocate_state(self, layers: list[jax.Array]) -> LoopState:
        """Buffers with as many slots as the table needs, and sums, all of zeros."""
        counts = self.table.buffers
        pieces = self.ops.pieces

        def allocate(count: int, leaves: Sequence[Any]) -> list[jax.Array]:
            return [typed_zeros(x, shape=(count, *x.shape)) for x in leaves]

        zeros_like = partial(jax.tree.map, wide_zeros)
        if self.ops.train:
            means, _, _ = pieces.head_backward.out
            sums = Sums(zeros_like(layers), zeros_like(strip_handles(self.ops.shared)), zeros_like(means))
        else:
            sums = Sums([], [], zeros_like(pieces.head.out))
        saved = []
        if self.ops.saves:
            _, residuals = pieces.forward.out
            saved = [*residuals, *pieces.x]
        cotangents, _ = pieces.differentiable.partition(pieces.x)
        weight_residuals = self.ops.halves.residuals if self.ops.halves else []
        return LoopState(
            inputs=allocate(counts["inputs"], pieces.x),
            saved=allocate(counts["saved"], saved),
            cotangents=allocate(counts["cotangents"], cotangents),
            kept=allocate(counts["kept"], weight_residuals),
            sums=sums,
        )

    def _run_round(
        self, segments: Sequence[Segment], times: int, state: LoopState, ticks: _Ticks
    ) -> tuple[LoopState, None]:
        """The ticks of consecutive segments, once; `times` says how often the program runs them."""
        length = sum(segment.ticks for segment in segments)
        for segment in segments:
            ticks_of_segment = _slice_ticks(ticks, segment.begin - segments[0].begin, segment.ticks)
            shares = self._find_shares(segment, length, times)
            state = self._run_segment(segment, shares, state, ticks_of_segment)
        return state, None

    def _run_segment(self, segment: Segment, shares: dict[str, RunShare], state: LoopState, ticks: _Ticks) -> LoopState:
        """All ticks of a segment: a scan."""
        # The row of a tick names the slots for what it sends, and `_run_tick` writes them at the start of the next
        # tick: the slots are shifted by one. In the first tick nothing has arrived, and slot 0 is written with its own
        # content; what the last tick sends is written after the scan.
        #
        # Worked example: three ticks, of which one move sends to the slots 2, 0 and 1. The slots are [0, 2, 0, 1]: at
        # the start of the ticks 0, 2 and 0 are written, and 1 after the last.
        numbers_of_fields = np.array([FIELDS.index(move.field) for move in segment.moves], int)
        nothing_yet = jnp.zeros((1, len(numbers_of_fields)), jnp.int32)
        slots = jnp.concatenate([nothing_yet, ticks.fields[:, numbers_of_fields]])
        arrivals = [take_row(getattr(state, move.buffer), 0) for move in segment.moves]
        run_tick = partial(self._run_tick, segment, shares)
        (state, arrivals), _ = lax.scan(run_tick, (state, arrivals), (ticks, slots[:-1]))
        return self._write_arrivals(state, segment, arrivals, slots[-1])

    def _find_shares(self, segment: Segment, length: int, times: int) -> dict[str, RunShare]:
        """Which pieces all devices run together in ticks of a segment, and in how many of its ticks.

        Readers of the program, as a census, cannot see how often a branch is taken: they are told.

        The segment is in a round of `length` ticks, which runs `times` times.
        """
        if self.ops.find_common is None:
            return {}
        ticks: list[int] = []
        for number in range(times):
            begin = segment.begin + number * length
            ticks += range(begin, begin + segment.ticks)
        counts = (self.table.ends[ticks] >= 0).sum(axis=0)
        shares = {}
        for end, count in zip(ENDS, counts, strict=True):
            if count:
                shares[end] = RunShare(int(count), len(ticks))
        return shares

    def _run_tick(
        self, segment: Segment, shares: dict[str, RunShare], carry: Any, tick_and_slots: tuple[_Ticks, jax.Array]
    ) -> tuple[Any, None]:
        """One tick: writes what has arrived to its slots, computes, and sends."""
        state, arrivals = carry
        tick, slots = tick_and_slots
        # What moved at the end of a tick is written to its slot at the start of the next: a buffer that is written
        # before it is read is updated in place, where the compiler would otherwise copy it.
        state = self._write_arrivals(state, segment, arrivals, slots)
        tick_row = _name_fields(tick, shares)

        results: dict[str, list[jax.Array]] = {}  # what can be sent, by the buffer of the device that receives it
        if "F" in segment.ops:
            # The backward pass starts after the forward pass: otherwise their temporary memory would add up.
            state, results["inputs"] = _compute_before_the_rest(self.ops.forward(state, tick_row))
        if "B" in segment.ops or "I" in segment.ops:
            state, results["cotangents"] = self._run_backward(segment, state, tick_row)
        if self.ops.halves and "W" in segment.ops:
            state = self.ops.weight_gradient(state, tick_row)
        received = []
        for move in segment.moves:
            received.append(self._send(results[move.buffer], move))
        return (state, received), None

    def _run_backward(self, segment: Segment, state: LoopState, tick: TickRow) -> tuple[LoopState, list[jax.Array]]:
        """I where the segment has it and the stage can be cut into halves, else B."""
        if self.ops.halves and "I" in segment.ops:
            return self.ops.input_gradient(state, tick, some_run_both="B" in segment.ops)
        return self.ops.backward(state, tick)

    def _write_arrivals(
        self, state: LoopState, segment: Segment, arrivals: list[list[jax.Array]], slots: jax.Array
    ) -> LoopState:
        """The state with the arrivals written into their slots."""
        for k, (move, leaves) in enumerate(zip(segment.moves, arrivals, strict=True)):
            buffers = getattr(state, move.buffer)
            slot = slots[k]
            if move.buffer in self.table.crowded:
                # A slot number beyond the last says that no op reads this arrival: the last slot keeps its content.
                last = self.table.buffers[move.buffer] - 1
                arrives = slot <= last
                slot = jnp.minimum(slot, last)
                before = take_row(buffers, slot)
                slot_leaves = []
                for new, old in zip(leaves, before, strict=True):
                    slot_leaves.append(jnp.where(arrives, new, old))
                leaves = slot_leaves
            state = state._replace(**{move.buffer: write_slot(buffers, slot, leaves)})  # type: ignore[arg-type]
        return state

    def _send(self, leaves: list[jax.Array], move: RingMove) -> list[jax.Array]:
        """Moves the results of a tick to a neighbor, or keeps them; returns what this device receives."""
        if not move.shift or self.axis is None:
            return leaves
        # Every device sends in every tick of the segment, also if it has nothing to send: a ppermute is one call of all
        # devices. Inside an op, which some devices skip under mode="branch", the devices that run it would wait for the
        # others for ever. An arrival that nobody needs goes to a free slot, or is dropped. The ppermute stands at the
        # end of the tick because nothing in this tick reads it: the result of F may be under way while B computes. jax
        # never differentiates this ppermute: the backward pass of a stage ends at its inputs, and the table says in
        # which tick the cotangents move to the neighbor.
        return list(shift(leaves, self.axis, by=move.shift, wrap=self.wraps))


def _name_fields(tick: _Ticks, shares: dict[str, RunShare]) -> TickRow:
    """A row of the table as numbers by name: which chunk and microbatch F runs, the slots to read, and so on."""
    fields = {field: tick.fields[k] for k, field in enumerate(FIELDS)}
    common_ends = {}
    if tick.ends is not None:
        for end, share in shares.items():
            common_ends[end] = CommonEnd(tick.ends[ENDS.index(end)], share)
    return TickRow(fields, common_ends)


def _slice_ticks(ticks: _Ticks, begin: int, count: int) -> _Ticks:
    return jax.tree.map(lambda x: x[begin : begin + count], ticks)


def _reshape_by_round(ticks: _Ticks, times: int) -> _Ticks:
    """`[times * ticks, fields]` as `[times, ticks, fields]`: one entry for each round."""
    return jax.tree.map(lambda x: x.reshape(times, -1, x.shape[-1]), ticks)


def _find_rounds(segments: Sequence[Segment]) -> Iterator[tuple[Sequence[Segment], int]]:
    """Runs of segments that repeat, and how often: the program holds a run once.

    On one or two devices a segment has only a few ticks, and the program would grow with the microbatches.

    Worked example: segments of the kinds F B F B F B W give (F B, 3 times), then (W, once).
    """
    kinds = []
    for segment in segments:
        kinds.append((segment.ops, segment.ticks, segment.moves))
    begin = 0
    while begin < len(kinds):
        best_width = 1
        best_times = 1
        # Neighbors of one kind are one segment already: the shortest run that repeats has two.
        for width in range(2, (len(kinds) - begin) // 2 + 1):
            times = _count_repeats(kinds[begin:], width)
            if times > 1 and width * times > best_width * best_times:
                best_width = width
                best_times = times
        yield segments[begin : begin + best_width], best_times
        begin += best_width * best_times


def _count_repeats(kinds: Sequence[Any], width: int) -> int:
    """How often a sequence begins with its first `width` elements, one run after the other."""
    first = kinds[:width]
    times = 1
    while kinds[times * width : (times + 1) * width] == first:
        times += 1
    return times


def _compute_before_the_rest(tree: Any) -> Any:
    """The tree after a barrier: what comes after it starts when the whole tree is computed."""
    leaves, structure = jax.tree.flatten(tree)
    numbers_by_axes: dict[frozenset[str], list[int]] = {}
    for number, leaf in enumerate(leaves):
        numbers_by_axes.setdefault(frozenset(varying_axes(leaf)), []).append(number)
    for numbers in numbers_by_axes.values():  # one barrier for all would type each as varying over the axes of all
        results = lax.optimization_barrier([leaves[number] for number in numbers])
        for number, leaf in zip(numbers, results, strict=True):
            leaves[number] = leaf
    return jax.tree.unflatten(structure, leaves)
