"""The loop that runs every table of a schedule: the same program on every device.

A tick is forward, backward and weight gradient, each where some device runs it then, followed by the moves to the
neighbors. Every device reads its own column of the table; `ops.py` holds what it computes.
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
from shardkit.collectives import shift
from shardkit.collectives._sums import typed_zeros, wide_zeros
from shardkit.on_device.handles import parts
from shardkit.pipelines.ops import Ops, State, Sums, write
from shardkit.schedules.table import FIELDS, Segment, Table


class Executor(NamedTuple):
    """Runs a table.

    Attributes:
        table: ticks, ops and slots.
        ops: what a device computes.
        axis: the pipe axis; None for one device.
        wrap: whether the last device's neighbor is the first.
    """

    table: Table
    ops: Ops
    axis: Axis | None
    wrap: bool

    def run(self, layers: list[jax.Array], device: Any) -> Sums:
        """All ticks of this device; `layers` are the parts of the stack, `[chunks, layers, ...]`."""
        slots, p, train, split = self.table.slots, self.ops.pieces, self.ops.train, self.ops.split
        buffers = (
            (slots.inputs, p.x),
            (slots.saved, [*p.forward.out[1], *p.x] if self.ops.saves else []),
            (slots.cotangents, p.moving.split(p.x)[0]),
            (slots.kept, split.residuals if split else []),
        )
        means = p.head_backward.out[0] if train else p.head.out
        wide = partial(jax.tree.map, wide_zeros)
        learned = (layers, parts(self.ops.shared)) if train else ([], [])
        sums = Sums(wide(learned[0]), wide(learned[1]), wide(means))
        inputs, saved, cotangents, residuals = (
            [typed_zeros(x, shape=(count + 1, *x.shape)) for x in leaves] for count, leaves in buffers
        )
        state = State(inputs, saved, cotangents, residuals, sums)
        # A constant of the program, in as few bytes as hold its numbers, of which a device reads its column once.
        rows = jnp.asarray(self.table.rows.astype(np.min_scalar_type(self.table.rows.max())))
        mine = lax.dynamic_index_in_dim(rows, device, 1, keepdims=False).astype(jnp.int32)
        for segments, times in _rounds(self.table.segments):
            begin, ticks = segments[0].begin, sum(segment.ticks for segment in segments)
            rows = mine[begin : begin + times * ticks].reshape(times, ticks, -1)
            once = partial(self._round, segments)
            state, _ = once(state, rows[0]) if times == 1 else lax.scan(once, state, rows)
        return state.sums

    def _round(self, segments: Sequence[Segment], state: State, rows: jax.Array) -> tuple[State, None]:
        for segment in segments:
            at = segment.begin - segments[0].begin
            here = rows[at : at + segment.ticks]
            nowhere = [getattr(self.table.slots, _buffer(field)) for field in segment.moves]
            columns = np.array([FIELDS.index(field) for field in segment.moves], int)
            places = jnp.concatenate([jnp.array([nowhere], jnp.int32), here[:, columns]])
            none = [[typed_zeros(x) for x in self._moved(field)] for field in segment.moves]
            (state, moved), _ = lax.scan(partial(self._tick, segment), (state, none), (here, places[:-1]))
            state = _arrived(state, segment, moved, places[-1])
        return state, None

    def _moved(self, field: str) -> list[Any]:
        """The arrays that a move sends."""
        return self.ops.pieces.x if _buffer(field) == "inputs" else self.ops.pieces.moving.split(self.ops.pieces.x)[0]

    def _tick(self, segment: Segment, carry: Any, row: Any) -> tuple[Any, None]:
        # What moved at the end of a tick is written to its slot at the start of the next: a buffer that is written
        # before it is read is updated in place, where the compiler would otherwise copy it.
        (state, moved), (row, places) = carry, row
        state = _arrived(state, segment, moved, places)
        at = {field: row[k] for k, field in enumerate(FIELDS)}
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
        return (state, [self._sent(results[_buffer(field)], field) for field in segment.moves]), None

    def _sent(self, leaves: list[jax.Array], field: str) -> list[jax.Array]:
        """What a neighbor, or the device itself, receives."""
        side = field.split("_")[-1]
        if side == "self" or self.axis is None:
            return leaves
        return list(shift(leaves, self.axis, by=1 if side == "left" else -1, wrap=self.wrap))


def _rounds(segments: Sequence[Segment]) -> Iterator[tuple[Sequence[Segment], int]]:
    """Runs of segments that repeat, and how often: the program holds a run once.

    On one or two devices a segment has only a few ticks, and the program would grow with the microbatches.
    """
    kinds = [(segment.ops, segment.ticks, segment.moves) for segment in segments]
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


def _buffer(field: str) -> str:
    """The buffer that a move fills."""
    return f"{field.split('_')[0]}s"


def _arrived(state: State, segment: Segment, moved: list[list[jax.Array]], places: jax.Array) -> State:
    """The state with what has moved, in its slots."""
    for k, (field, leaves) in enumerate(zip(segment.moves, moved, strict=True)):
        name = _buffer(field)
        state = state._replace(**{name: write(getattr(state, name), places[k], leaves)})  # type: ignore[arg-type]
    return state


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
