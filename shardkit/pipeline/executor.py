"""The one loop that runs every table of a schedule, the same program on every device.

A tick is: forward, backward, weight gradient, as far as some device does them then, and the moves to the neighbours.
Every device reads its own column of the table. Where it has nothing to do, it either computes all the same and leaves
the result out (masked), or takes an empty branch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit._check import Axis
from shardkit._compat import varying_axes
from shardkit.collectives import shift
from shardkit.collectives._sums import typed_zeros, wide_zeros
from shardkit.partitioning.handles import parts
from shardkit.pipeline.pieces import Given, Pieces
from shardkit.schedules.table import FIELDS, Segment, Table

Rows = dict[str, jax.Array]


class Sums(NamedTuple):
    """What a step adds up, in float32: gradients of the layers `[chunks, layers, ...]`, of shared leaves, and means."""

    layers: list[jax.Array]
    shared: Any
    means: Any


class State(NamedTuple):
    """What goes from tick to tick. Each buffer is a list of arrays `[slots + 1, ...]`; the last slot is for rubbish."""

    inputs: list[jax.Array]
    saved: list[jax.Array]
    cotangents: list[jax.Array]
    kept: list[jax.Array]
    sums: Sums


class Executor:
    """Runs a table.

    Args:
        table: which ticks, ops and slots.
        pieces: embedding, stage and head.
        given: what the pieces are given for a stage, a chunk and a microbatch.
        shared: the entries of the parameters beside the layers.
        scale: the loss scale.
        last: number of the last stage.
        axis: the pipe axis; None for one device.
        wrap: the last device's neighbour is the first.
        saved: the forward pass saves what the backward pass needs.
        branch: devices take branches; otherwise masked.
        train: with a backward pass.

    Attributes:
        unsplit: the table has I and W, and the stage's backward pass cannot be cut into them.
    """

    def __init__(
        self,
        table: Table,
        pieces: Pieces,
        given: Callable[[Any, Any, Any], Given],
        shared: Any,
        scale: Any,
        *,
        last: int,
        axis: Axis | None,
        wrap: bool,
        saved: bool,
        branch: bool,
        train: bool,
    ):
        self.table, self.pieces, self.given, self.shared, self.scale = table, pieces, given, shared, scale
        self.last, self.axis, self.wrap = last, axis, wrap
        self.saved, self.branch, self.train = saved, branch, train
        ops = {op for segment in table.segments for op in segment.ops}
        self.unsplit = train and "I" in ops and pieces.split.whole
        self.split = pieces.split if train and "I" in ops and not self.unsplit else None

    def run(self, layers: list[jax.Array], device: Any) -> Sums:
        """All ticks of this device; `layers` are the parts of the stack, `[chunks, layers, ...]`."""
        slots, p = self.table.slots, self.pieces
        saves = [*p.forward.out[1], *p.x] if self.saved and self.train else []
        buffers = (
            (slots.inputs, p.x),
            (slots.saved, saves),
            (slots.cotangents, p.moving.split(p.x)[0]),
            (slots.kept, self.split.kept if self.split else []),
        )
        means = p.head_backward.out[0] if self.train else p.head.out
        zeros = partial(jax.tree.map, wide_zeros)
        learned = (layers, parts(self.shared)) if self.train else ([], [])
        sums = Sums(zeros(learned[0]), zeros(learned[1]), zeros(means))
        inputs, saved, cotangents, kept = (
            [typed_zeros(leaf, shape=(count + 1, *leaf.shape)) for leaf in leaves] for count, leaves in buffers
        )
        state = State(inputs, saved, cotangents, kept, sums)
        mine = lax.dynamic_index_in_dim(jnp.asarray(self.table.rows), device, 1, keepdims=False)
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
        """The arrays that a move takes."""
        return self.pieces.x if _buffer(field) == "inputs" else self.pieces.moving.split(self.pieces.x)[0]

    def _tick(self, segment: Segment, carry: Any, row: Any) -> tuple[Any, None]:
        # What moved at the end of a tick is put in its slot at the begin of the next: written before anything is read,
        # each buffer stays in its place, where the compiler would copy it otherwise.
        (state, moved), (row, places) = carry, row
        state = _arrived(state, segment, moved, places)
        at = {field: row[k] for k, field in enumerate(FIELDS)}
        results: dict[str, list[jax.Array]] = {}
        if "F" in segment.ops:
            # Not before the forward is over: what the two hold while they compute would add up.
            state, results["inputs"] = _complete(self._forward(state, at))
        if self.train and {"B", "I"} & set(segment.ops):
            state, results["cotangents"] = self._backward(state, at, segment.ops)
        if "W" in segment.ops and self.split:
            state = self._weight(state, at)
        return (state, [self._sent(results[_buffer(field)], field) for field in segment.moves]), None

    def _sent(self, leaves: list[jax.Array], field: str) -> list[jax.Array]:
        """What a neighbour, or the device itself, receives by a move."""
        side = field.split("_")[-1]
        if side == "self" or self.axis is None:
            return leaves
        return list(shift(leaves, self.axis, by=1 if side == "left" else -1, wrap=self.wrap))

    def _forward(self, state: State, at: Rows) -> tuple[State, list[jax.Array]]:
        given = self._given(at, "forward")
        x = _read(state.inputs, at["forward_input"])
        saving = self.saved and self.train

        def run() -> Any:
            first = self._first(at, "forward")
            here = self._choose(first, lambda: self.pieces.embed(self.shared, given), lambda: x, self.pieces.embed)
            return self.pieces.forward(given, here) if saving else (self.pieces.stage(given, here), [])

        y, residuals = self._when(at["forward_on"] > 0, run)
        if saving:
            state = state._replace(saved=_write(state.saved, at["forward_saved"], [*residuals, *y]))
        if not self.train:
            last = (at["forward_stage"] == self.last) & (at["forward_on"] > 0)
            head = self.pieces.head
            means = state.sums.means
            means = self._choose(last, lambda: _plus(means, head(self.shared, given, y)), lambda: means, head)
            state = state._replace(sums=state.sums._replace(means=means))
        return state, y

    def _backward(self, state: State, at: Rows, ops: str) -> tuple[State, list[jax.Array]]:
        p, given, on = self.pieces, self._given(at, "backward"), at["backward_on"]
        again = _read(state.inputs, at["backward_input"])
        saved = _read(state.saved, at["backward_saved"])
        waiting = _read(state.cotangents, at["backward_cotangent"])
        splits = self.split if "I" in ops else None

        def run(sums: Sums) -> Any:
            first = self._first(at, "backward")
            if self.saved:
                residuals, y = saved[: -len(p.x)], saved[-len(p.x) :]
            else:
                x = self._choose(first, lambda: p.embed(self.shared, given), lambda: again, p.embed)
                y, residuals = p.forward(given, x)

            def finish() -> Any:
                means, grads, dy = p.head_backward(self.shared, given, y, self.scale)
                return _plus(sums.means, means), _plus(sums.shared, grads), dy

            last = (at["backward_stage"] == self.last) & (on > 0)
            go_on = lambda: (sums.means, sums.shared, waiting)  # noqa: E731
            means, shared, dy = self._choose(last, finish, go_on, p.head_backward)
            layers, kept = sums.layers, list[jax.Array]()
            if splits is None:
                grads, dx = p.backward(given, residuals, dy)
                layers = self._added(layers, grads, at["backward_chunk"], on > 0)
            else:
                dx, kept = splits.first(*jax.tree.leaves((given, residuals, dy)))
                if "B" in ops:
                    layers = self._second(layers, given, kept, at["backward_chunk"], on == 1)
            embed_grads = lambda: _plus(shared, p.embed_backward(self.shared, given, dx))  # noqa: E731
            shared = self._choose(first, embed_grads, lambda: shared, p.embed_backward)
            return Sums(layers, shared, means), dx, kept

        def skip(sums: Sums) -> Any:
            kept = splits.kept if splits else []
            return sums, [typed_zeros(x) for x in p.moving.split(p.x)[0]], [typed_zeros(x) for x in kept]

        sums, dx, kept = lax.cond(on > 0, run, skip, state.sums) if self.branch else run(state.sums)
        state = state._replace(sums=sums)
        if splits:
            state = state._replace(kept=_write(state.kept, at["backward_kept"], kept))
        return state, dx

    def _weight(self, state: State, at: Rows) -> State:
        given, kept = self._given(at, "weight"), _read(state.kept, at["weight_kept"])
        on = at["weight_on"] > 0
        layers = self._second(state.sums.layers, given, kept, at["weight_chunk"], on)
        return state._replace(sums=state.sums._replace(layers=layers))

    def _second(self, layers: list[jax.Array], given: Given, kept: list[jax.Array], chunk: Any, on: Any) -> Any:
        """The sums with the gradients of the weights, from what the first half of a backward pass kept."""

        def run(layers: list[jax.Array]) -> list[jax.Array]:
            assert self.split
            return self._added(layers, self.split.second(*jax.tree.leaves(given), kept=kept), chunk, on)

        return lax.cond(on, run, lambda layers: layers, layers) if self.branch else run(layers)

    def _added(self, layers: list[jax.Array], grads: list[jax.Array], chunk: Any, on: Any) -> list[jax.Array]:
        """The sums with a stage's gradients added to its chunk."""
        out = []
        for total, grad in zip(layers, grads, strict=True):
            here = 0 if total.shape[0] == 1 else chunk
            new = total[here] + grad.astype(total.dtype)
            # Chosen, not multiplied: what is left out may be NaN.
            new = new if self.branch else jnp.where(on, new, total[here])
            out.append(lax.dynamic_update_index_in_dim(total, new, here, 0))
        return out

    def _given(self, at: Rows, op: str) -> Given:
        return self.given(*(at[f"{op}_{what}"] for what in ("stage", "chunk", "microbatch")))

    def _first(self, at: Rows, op: str) -> Any:
        return (at[f"{op}_stage"] == 0) & (at[f"{op}_on"] > 0)

    def _when(self, on: Any, run: Callable[[], Any]) -> Any:
        """`run()` where on; elsewhere zeros, or rubbish."""
        if not self.branch:
            return run()
        shapes = jax.eval_shape(run)
        return lax.cond(on, run, lambda: jax.tree.map(typed_zeros, shapes))

    def _choose(self, on: Any, run: Callable[[], Any], otherwise: Callable[[], Any], piece: Any) -> Any:
        """`run()` where on, else `otherwise()`: by a branch where devices may, else both are computed."""
        if self.branch or piece.silent:
            return lax.cond(on, run, otherwise)
        return jax.tree.map(partial(jnp.where, on), run(), otherwise())


def _rounds(segments: Sequence[Segment]) -> Iterator[tuple[Sequence[Segment], int]]:
    """The segments, some at a time, and how often these come: the program of a round is written once.

    On one or two devices there is a segment for every few ticks, and without rounds the program would grow with the
    microbatches.
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
    """The buffer into which a move goes."""
    return f"{field.split('_')[0]}s"


def _arrived(state: State, segment: Segment, moved: list[list[jax.Array]], places: jax.Array) -> State:
    """The state with what has moved in its slots."""
    for k, (field, leaves) in enumerate(zip(segment.moves, moved, strict=True)):
        name = _buffer(field)
        state = state._replace(**{name: _write(getattr(state, name), places[k], leaves)})  # type: ignore[arg-type]
    return state


def _plus(sums: Any, more: Any) -> Any:
    return jax.tree.map(lambda total, x: total + x.astype(total.dtype), sums, more)


def _complete(tree: Any) -> Any:
    """A barrier: what comes after it begins when all of the tree is there."""
    leaves, structure = jax.tree.flatten(tree)
    places: dict[frozenset[str], list[int]] = {}
    for k, leaf in enumerate(leaves):
        places.setdefault(frozenset(varying_axes(leaf)), []).append(k)
    for alike in places.values():  # through one barrier all would come to vary over the axes of any
        for k, leaf in zip(alike, lax.optimization_barrier([leaves[k] for k in alike]), strict=True):
            leaves[k] = leaf
    return jax.tree.unflatten(structure, leaves)


def _read(buffers: list[jax.Array], slot: Any) -> list[jax.Array]:
    return [lax.dynamic_index_in_dim(buffer, slot, 0, keepdims=False) for buffer in buffers]


def _write(buffers: list[jax.Array], slot: Any, leaves: list[jax.Array]) -> list[jax.Array]:
    return [lax.dynamic_update_index_in_dim(b, x, slot, 0) for b, x in zip(buffers, leaves, strict=True)]
