"""The rules of primitives that move, join or take apart elements: rows stay rows while an example's row stays whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from shardkit.on_device.example_states import (
    Pair,
    Rows,
    State,
    Total,
    Whole,
    are_all,
    fits_beside,
    join,
    select,
    shift_dim,
)

Rule = Callable[[Pair, list[State]], State | list[State]]
_MOVES_TOTALS = {
    *("unstack", "broadcast_in_dim", "reshape", "transpose", "squeeze", "rev", "slice", "reduce_sum", "dynamic_slice"),
}


def wrap_one_operand(rule: Callable[[Pair, Rows], State]) -> Rule:
    """Wraps a rule for rows of one array: further operands are indices, and a sum over the examples may be moved."""

    def apply_rule(pair: Pair, operands: list[State]) -> State:
        state, *places = operands
        if not are_all(places, Whole):
            return pair.met(f"{pair.name} is given places that depend on the examples")
        if isinstance(state, Rows):
            return rule(pair, state)
        if isinstance(state, Total) and pair.name in _MOVES_TOTALS:
            return state
        return pair.met(f"{pair.name} is applied to a sum over the examples")

    return apply_rule


def broadcast(pair: Pair, rows: Rows) -> State:
    """New dims beside the examples."""
    return replace(rows, dim=pair.many.params["broadcast_dimensions"][rows.dim])


def transpose(pair: Pair, rows: Rows) -> State:
    """The examples along another dim."""
    return replace(rows, dim=list(pair.many.params["permutation"]).index(rows.dim))


def squeeze(pair: Pair, rows: Rows) -> State:
    """Without some dims of size 1."""
    return replace(rows, dim=shift_dim(rows.dim, pair.many.params["dimensions"]))


def reshape(pair: Pair, rows: Rows) -> State:
    """The dim of the result along which whole examples still follow each other.

    Worked examples, of B examples:

    - `[B, T, D]` to `[B * T, D]`: dim 0, with T rows for each example; and back again.
    - `[2, B, D]` with examples along dim 1, to `[2 * B, D]`: dim 0, with two copies of all examples.
    - `[B, T, D]` to `[B / 2, 2 * T, D]`: no dim, because two examples share a row.
    """
    size_before = math.prod(pair.shape(0)[: rows.dim])
    blocks = size_before * rows.copies  # how often all examples follow each other in the flat array
    # For `[2, B, D]` to `[2 * B, D]` with the examples along dim 1: `blocks` is 2, dim 0 of the result has 2 B rows, so
    # it has two whole blocks of examples, and `copies` becomes 2.
    outer = 1
    for dim, size in enumerate(pair.out):
        has_whole_blocks = outer * size % (blocks * pair.examples) == 0 and blocks % outer == 0
        if has_whole_blocks and size % pair.examples == 0:
            return Rows(dim, blocks // outer, rows.scale)
        outer *= size
    return pair.met("reshape puts several examples into one row")


def reverse(pair: Pair, rows: Rows) -> State:
    """Rows stay rows unless the dim of the examples is reversed."""
    if rows.dim in pair.many.params["dimensions"]:
        return pair.met("rev changes the order of the examples")
    return rows


def take_slice(pair: Pair, rows: Rows) -> State:
    """All examples, or some of their copies."""
    params = pair.many.params
    start = params["start_indices"][rows.dim]
    limit = params["limit_indices"][rows.dim]
    stride = params["strides"][rows.dim] if params["strides"] else 1
    return _take_copies(pair, rows, pair.shape(0)[rows.dim], start, limit, stride)


def _take_copies(pair: Pair, rows: Rows, size: int, start: int, limit: int, stride: int = 1) -> State:
    """Rows stay rows if whole copies of all examples are taken: of two copies of 4 examples rows 4 to 8, not 2 to 6."""
    length = size // rows.copies
    if stride == 1 and start % length == 0 and limit % length == 0 and limit > start:
        return replace(rows, copies=(limit - start) // length)
    return pair.met(f"{pair.name} takes some of the examples")


def split(pair: Pair, operands: list[State]) -> list[State]:
    """Each part of the split is a slice of the array."""
    rows = operands[0]
    dim = pair.many.params["axis"]
    results: list[State] = []
    start = 0
    for size in pair.many.params["sizes"]:
        if isinstance(rows, Rows) and dim == rows.dim:
            results.append(_take_copies(pair, rows, pair.shape(0)[dim], start, start + size))
        else:
            results.append(rows)
        start += size
    return results


def dynamic_slice(pair: Pair, rows: Rows) -> State:
    """Rows stay rows if the slice has all examples."""
    if pair.out[rows.dim] != pair.shape(0)[rows.dim]:
        return pair.met("dynamic_slice takes some of the examples")
    return rows


def dynamic_update(pair: Pair, operands: list[State]) -> State:
    """Rows of examples written into others of the same examples."""
    arrays = operands[:2]
    places = operands[2:]
    if not are_all(places, Whole):
        return pair.met("dynamic_update_slice is given places that depend on the examples")
    rows = select(arrays, Rows)
    wholes = select(arrays, Whole)
    if not rows or select(arrays, Total):
        return pair.met("dynamic_update_slice is applied to a sum over the examples")
    if rows[0] != rows[-1] or not all(fits_beside(state, rows[0]) for state in wholes):
        return pair.met("dynamic_update_slice pairs every example with every other")
    if pair.shape(0)[rows[0].dim] != pair.shape(1)[rows[0].dim]:
        return pair.met("dynamic_update_slice replaces some of the examples")
    return rows[0]


def pad(pair: Pair, operands: list[State]) -> State:
    """Rows stay rows unless the dim of the examples is padded."""
    rows, value = operands
    if not isinstance(rows, Rows) or not isinstance(value, Whole):
        return pair.met("pad is applied to a sum over the examples")
    if tuple(pair.many.params["padding_config"][rows.dim]) != (0, 0, 0):
        return pair.met("pad adds rows beside the examples")
    if not value.zero and value.scale != rows.scale:
        return pair.met("pad combines examples with the number of examples")
    return rows


def concatenate(pair: Pair, operands: list[State]) -> State:
    """Arrays one after the other along a dim."""
    dim = pair.many.params["dimension"]
    if are_all(operands, Total):
        if len(set(operands)) > 1:
            return pair.met("concatenate joins sums over the examples")
        return operands[0]
    rows = select(operands, Rows)
    wholes = select(operands, Whole)
    if len(rows) + len(wholes) < len(operands):
        return pair.met("concatenate joins examples and a sum over them")
    first = rows[0]
    for state in rows:
        if (state.dim, state.scale) != (first.dim, first.scale):
            return pair.met("concatenate pairs every example with every other")
    if first.dim == dim:
        return _concatenate_copies(pair, operands, rows, wholes, dim)
    same_copies = all(state.copies == first.copies for state in rows)
    if same_copies and all(fits_beside(state, first) for state in wholes):
        return first
    met = pair.met("concatenate combines an example with its place in the batch")
    if dim != len(pair.out) - 1:
        return met
    # Perhaps these are the indices of `logits[arange(n), targets]`: only `gather` can tell, from the columns.
    return replace(met, columns=tuple(operands))


def _concatenate_copies(pair: Pair, operands: list[State], rows: list[Rows], wholes: list[Whole], dim: int) -> State:
    """Views of all examples one after the other: `[n, 8]` and `[n, 8]` along dim 0 are two copies of n rows."""
    lengths = set()
    for number, state in enumerate(operands):
        lengths.add(pair.shape(number)[dim] // getattr(state, "copies", 1))
    if wholes or len(lengths) > 1:
        return pair.met("concatenate adds rows beside the examples")
    return replace(rows[0], copies=sum(state.copies for state in rows))


def stack(pair: Pair, operands: list[State]) -> State:
    """Arrays side by side along a new dim."""
    axis = pair.many.params["axis"] % len(pair.out)
    # An element of the result is one of any operand, as the result of a condition is one of any branch.
    joined = operands[0]
    for state in operands[1:]:
        joined = join(pair, joined, state)
    if not isinstance(joined, Rows):
        return joined
    # A new dim before the examples moves them by one.
    dim = joined.dim + 1 if axis <= joined.dim else joined.dim
    return Rows(dim, joined.copies, joined.scale)


def unstack(pair: Pair, rows: Rows) -> State:
    """Arrays that stood side by side along a dim."""
    axis = pair.many.params["axis"] % len(pair.shape(0))
    if axis == rows.dim:
        return pair.met("unstack takes the examples apart")
    return Rows(shift_dim(rows.dim, (axis,)), rows.copies, rows.scale)
