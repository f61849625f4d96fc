"""What gather and scatter make of rows of examples: each example must read and write its own part.

Worked example: `table[tokens]` of a whole table[V, D] and rows tokens[n, T] has rows along dim 0, [n, T, D]: what is
read depends on the example alone. `logits[arange(n), targets]` of rows logits[n, V] gathers at the index of each
example, in the first of two columns of indices: each reads its own row. `x[targets]` of rows x reads those of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardkit.on_device.elementwise_rules import of_one_example
from shardkit.on_device.example_states import (
    UNKNOWN,
    Met,
    Pair,
    Rows,
    State,
    Total,
    Whole,
    any_whole,
    fits_beside,
    is_turn,
    shift_dim,
)


def gather(pair: Pair, operands: list[State]) -> State:
    """What is read out of an array: rows at given places, or of each example its own row or its own part."""
    operand, indices = operands
    if isinstance(operand, Whole) and isinstance(indices, Whole):
        return any_whole(pair.many.outvars[0], operand.scale if indices.scale == 1 else UNKNOWN)
    columns = indices.columns if isinstance(indices, Met) else ()
    if isinstance(operand, Met):
        return operand
    if isinstance(operand, Total):
        return pair.met("gather is applied to a sum over the examples")
    if isinstance(indices, Met) and not columns:
        return indices
    if isinstance(indices, Total):
        return pair.met("gather is applied to a sum over the examples")
    if is_turn(operand) or is_turn(indices):
        return of_one_example(pair, operands)
    if isinstance(indices, Rows) and indices.scale != 1:
        return pair.met("gather combines examples with their number")
    if isinstance(operand, Whole):
        return _read_whole(pair, operand, indices)
    assert isinstance(operand, Rows)
    dims = pair.many.params["dimension_numbers"]
    if operand.dim in dims.operand_batching_dims:
        return _read_own_part(pair, operand, indices)
    if operand.dim not in dims.start_index_map:
        return _read_other_dims(pair, operand, indices)
    if not columns and len(dims.start_index_map) == 1:
        columns = (indices,)
    return _read_own_row(pair, operand, columns)


def _read_whole(pair: Pair, operand: Whole, indices: State) -> State:
    """Of an array that is the same for all examples, at the places of each."""
    dims = pair.many.params["dimension_numbers"]
    pairs = zip(dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True)
    place = getattr(indices, "dim", None)
    # A part of the array for each place in the batch depends on that place.
    differs_by_place = any(shared == place and dim in operand.differs for dim, shared in pairs)
    if not isinstance(indices, Rows) or operand.scale == UNKNOWN or differs_by_place:
        return pair.met("gather reads at the place of an example in the batch")
    return Rows(_result_dim(pair, indices.dim), indices.copies, operand.scale)


def _read_own_part(pair: Pair, operand: Rows, indices: State) -> State:
    """Of rows in a batching dim: each example reads its own, at its own indices or at the same as all."""
    dims = pair.many.params["dimension_numbers"]
    number = list(dims.operand_batching_dims).index(operand.dim)
    shared = dims.start_indices_batching_dims[number]
    of_own = isinstance(indices, Rows) and (indices.dim, indices.copies) == (shared, operand.copies)
    of_all = isinstance(indices, Whole) and shared not in indices.differs
    if not of_own and not of_all:
        return pair.met("gather reads at the place of an example in the batch")
    return Rows(_result_dim(pair, shared), operand.copies, operand.scale)


def _read_other_dims(pair: Pair, operand: Rows, indices: State) -> State:
    """Of rows along a dim that is read whole, at places of other dims."""
    dims = pair.many.params["dimension_numbers"]
    size = pair.many.params["slice_sizes"][operand.dim]
    if not isinstance(indices, Whole) or size != pair.shape(0)[operand.dim]:
        return pair.met("gather pairs every example with every other")
    removed = (*dims.collapsed_slice_dims, *dims.operand_batching_dims)
    return replace(operand, dim=dims.offset_dims[shift_dim(operand.dim, removed)])


def _read_own_row(pair: Pair, operand: Rows, columns: Sequence[State]) -> State:
    """Of rows that are indexed: right where the column of their dim has the index of each example."""
    met = pair.met("gather reads rows of other examples")
    dims = pair.many.params["dimension_numbers"]
    if len(columns) != len(dims.start_index_map) or operand.copies != 1:
        return met
    place = list(dims.start_index_map).index(operand.dim)
    column = columns[place]
    index = column.index if isinstance(column, Whole) else None
    if index is None or pair.many.params["slice_sizes"][operand.dim] != 1:
        return met
    if pair.shape(1)[index] != pair.shape(0)[operand.dim]:
        return met
    # The other columns are of the same example, such as its target, or the same for all.
    rows = Rows(index)
    for number, state in enumerate(columns):
        if number == place or state == rows:
            continue
        if not isinstance(state, Whole) or not fits_beside(state, rows):
            return met
    return Rows(_result_dim(pair, index), 1, operand.scale)


def _result_dim(pair: Pair, dim: int) -> int:
    """The dim of a gather's result that a dim of its indices becomes."""
    offsets = pair.many.params["dimension_numbers"].offset_dims
    free = [place for place in range(len(pair.out)) if place not in offsets]
    return free[dim]


def scatter(pair: Pair, operands: list[State]) -> State:
    """A scatter within each example: of its own indices and updates, in the batching dims of all three."""
    dims = pair.many.params["dimension_numbers"]
    operand, indices, updates = operands
    batching = dims.operand_batching_dims
    shared = dims.scatter_indices_batching_dims
    met = pair.met(f"{pair.name} writes values of different examples into one array")
    if not batching:
        return met
    number = 0
    if isinstance(indices, Rows) and indices.dim in shared:
        number = list(shared).index(indices.dim)
    free = [dim for dim in range(len(pair.shape(2))) if dim not in dims.update_window_dims]
    example_dims = (batching[number], shared[number], free[shared[number]])
    for state, dim in zip((operand, indices, updates), example_dims, strict=True):
        if isinstance(state, Rows) and state != Rows(dim):
            return met
        if isinstance(state, Whole) and not fits_beside(state, Rows(dim)):
            return met
        if isinstance(state, Total | Met):
            return met
    return Rows(batching[number])
