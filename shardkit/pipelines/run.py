"""The loop of a pipeline over ticks: on each device the microbatches of its stages, by the table of a schedule.

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

Where embedding and head are spread, all devices run them together in some ticks: the table's `ends` say in which. If
these are not all ticks of a segment, the end stands in a branch, which all devices take in the same ticks. A buffer is
"crowded" where in some tick a device has no free slot in it: an arrival that the device does not need is then dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit._arguments.checks import Axis
from shardkit._jax.compat import varying_axes
from shardkit._jax.jaxprs import RunShare
from shardkit.collectives import shift
from shardkit.collectives._sums import typed_zeros, wide_zeros
from shardkit.on_device.batch import take_row
from shardkit.on_device.handles import strip_handles
from shardkit.pipelines.ops import CommonEnd, Leaves, LoopState, Ops, Sums, TickRow, write_slot
from shardkit.schedules.table import ENDS, FIELDS, RingMove, Segment, Table


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

    def run(self, layers: Leaves, device: Any) -> Sums:
        """All ticks of this device; `layers` are the parts of the stack, `[chunks, layers, ...]`."""
        state = self._allocate_state(layers)
        all_ticks = self._read_table(device)
        for segments, times in _find_rounds(self.table.segments):
            ticks = _slice_ticks(all_ticks, segments[0].begin, times * _count_ticks(segments))
            run_round = partial(self._run_round, segments, times)
            if times == 1:
                state, _ = run_round(state, ticks)
            else:
                state, _ = lax.scan(run_round, state, _reshape_by_round(ticks, times))
        return state.sums

    def _read_table(self, device: Any) -> _Ticks:
        """This device's rows of all ticks."""
        # A constant of the program, in as few bytes as hold its numbers, of which a device reads its rows once.
        smallest_dtype = np.min_scalar_type(self.table.rows.max())
        table = jnp.asarray(self.table.rows.astype(smallest_dtype))
        fields = lax.dynamic_index_in_dim(table, device, 1, keepdims=False).astype(jnp.int32)
        ends = None
        if self.ops.find_common is not None:
            # For each tick, which microbatch all devices embed together, and for which they run the head.
            ends = jnp.asarray(self.table.ends)
        return _Ticks(fields, ends)

    def _allocate_state(self, layers: Leaves) -> LoopState:
        """Buffers with as many slots as the table needs, and sums, all of zeros."""
        pieces = self.ops.pieces
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
        weight_residuals = []
        if self.ops.halves is not None:
            weight_residuals = self.ops.halves.residuals
        counts = self.table.buffers
        return LoopState(
            inputs=_allocate_slots(counts["inputs"], pieces.x),
            saved=_allocate_slots(counts["saved"], saved),
            cotangents=_allocate_slots(counts["cotangents"], cotangents),
            kept=_allocate_slots(counts["kept"], weight_residuals),
            sums=sums,
        )

    def _run_round(
        self, segments: Sequence[Segment], times: int, state: LoopState, ticks: _Ticks
    ) -> tuple[LoopState, None]:
        """The ticks of consecutive segments, once; `times` says how often the program runs them."""
        for segment in segments:
            segment_ticks = _slice_ticks(ticks, segment.begin - segments[0].begin, segment.ticks)
            shares = self._find_shares(segment, _count_ticks(segments), times)
            state = self._run_segment(segment, shares, state, segment_ticks)
        return state, None

    def _run_segment(self, segment: Segment, shares: dict[str, RunShare], state: LoopState, ticks: _Ticks) -> LoopState:
        """All ticks of a segment: a scan.

        The row of a tick names the slots for what it sends, and `_run_tick` writes them at the start of the next tick:
        the slots are shifted by one. In the first tick nothing has arrived, and slot 0 is written with its own content;
        what the last tick sends is written after the scan.

        Worked example: three ticks, of which one move sends to the slots 2, 0 and 1. The slots are [0, 2, 0, 1]: at the
        start of the ticks 0, 2 and 0 are written, and 1 after the last.
        """
        slot_fields = [FIELDS.index(move.field) for move in segment.moves]
        nothing_yet = jnp.zeros((1, len(slot_fields)), jnp.int32)
        slots = jnp.concatenate([nothing_yet, ticks.fields[:, np.array(slot_fields, int)]])
        arrivals = []
        for move in segment.moves:
            arrivals.append(take_row(getattr(state, move.buffer), 0))
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

        results: dict[str, Leaves] = {}  # what can be sent, by the buffer of the device that receives it
        if "F" in segment.ops:
            # The backward pass starts after the forward pass: otherwise their temporary memory would add up.
            state, results["inputs"] = _compute_before_the_rest(self.ops.forward(state, tick_row))
        if "B" in segment.ops or "I" in segment.ops:
            state, results["cotangents"] = self._run_backward(segment, state, tick_row)
        if "W" in segment.ops and self.ops.halves is not None:
            state = self.ops.weight_gradient(state, tick_row)
        received = []
        for move in segment.moves:
            received.append(self._send(results[move.buffer], move))
        return (state, received), None

    def _run_backward(self, segment: Segment, state: LoopState, tick: TickRow) -> tuple[LoopState, Leaves]:
        """I where the segment has it and the stage can be cut into halves, else B."""
        if "I" in segment.ops and self.ops.halves is not None:
            return self.ops.input_gradient(state, tick, some_run_both="B" in segment.ops)
        return self.ops.backward(state, tick)

    def _write_arrivals(
        self, state: LoopState, segment: Segment, arrivals: list[Leaves], slots: jax.Array
    ) -> LoopState:
        """The state with the arrivals written into their slots."""
        for number, (move, leaves) in enumerate(zip(segment.moves, arrivals, strict=True)):
            buffers = getattr(state, move.buffer)
            slot = slots[number]
            if move.buffer in self.table.crowded:
                buffers = _write_needed(buffers, slot, leaves, last=self.table.buffers[move.buffer] - 1)
            else:
                buffers = write_slot(buffers, slot, leaves)
            state = state._replace(**{move.buffer: buffers})  # type: ignore[arg-type]
        return state

    def _send(self, leaves: Leaves, move: RingMove) -> Leaves:
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


def _allocate_slots(count: int, leaves: Sequence[Any]) -> Leaves:
    return [typed_zeros(x, shape=(count, *x.shape)) for x in leaves]


def _write_needed(buffers: Leaves, slot: Any, leaves: Leaves, last: int) -> Leaves:
    """The buffers after an arrival: a slot number beyond the last says that no op reads it, and it is dropped."""
    is_needed = slot <= last
    slot = jnp.minimum(slot, last)  # an arrival that is dropped leaves the content of the last slot as it is
    content = []
    for new, old in zip(leaves, take_row(buffers, slot), strict=True):
        content.append(jnp.where(is_needed, new, old))
    return write_slot(buffers, slot, content)


def _name_fields(tick: _Ticks, shares: dict[str, RunShare]) -> TickRow:
    """A row of the table as numbers by name: which chunk and microbatch F runs, the slots to read, and so on."""
    fields = {}
    for number, field in enumerate(FIELDS):
        fields[field] = tick.fields[number]
    common_ends = {}
    if tick.ends is not None:
        for end, share in shares.items():
            common_ends[end] = CommonEnd(tick.ends[ENDS.index(end)], share)
    return TickRow(fields, common_ends)


def _count_ticks(segments: Sequence[Segment]) -> int:
    return sum(segment.ticks for segment in segments)


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
        for number, result in zip(numbers, results, strict=True):
            leaves[number] = result
    return jax.tree.unflatten(structure, leaves)
