"""The rules of gather and scatter: each example must read and write its own part of an array.

Worked examples, with n examples:

- `table[tokens]` of a whole table[V, D] and rows tokens[n, T] is rows along dim 0, [n, T, D]: each example reads at its
  own tokens, and the table is the same for all.
- `logits[arange(n), targets]` of rows logits[n, V] has indices of two columns, [n, 2]. The first column is the index of
  the example, so that each example reads its own row. The result is rows, [n].
- `x[targets]` of rows x[n, D] reads the rows of other examples: examples meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardkit.on_device.elementwise_rules import combine_one_example
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
    """The state of `operand[indices]`: rows, if each example reads a whole array, or its own part of rows."""
    operand, indices = operands
    if isinstance(operand, Whole) and isinstance(indices, Whole):
        # With more examples, indices that depend on their number may read other elements.
        scale = operand.scale if indices.scale == 1 else UNKNOWN
        return any_whole(pair.many.outvars[0], scale)

    # Where examples met before, the earlier line is the one to report. Indices [n, 2] of `logits[arange(n), targets]`
    # have met too, since arange(n) was concatenated with rows. Their `columns` say what was concatenated, by which
    # `_read_own_row` finds that the examples do not meet here: these go on.
    columns = indices.columns if isinstance(indices, Met) else ()
    if isinstance(operand, Met):
        return operand
    if isinstance(indices, Met) and not columns:
        return indices
    if isinstance(operand, Total) or isinstance(indices, Total):
        return pair.met("gather is applied to a sum over the examples")

    if is_turn(operand) or is_turn(indices):
        return combine_one_example(pair, operands)
    if isinstance(indices, Rows) and indices.scale != 1:
        # With more examples, an example would read at another index.
        return pair.met("gather reads at indices that depend on the number of examples")
    if isinstance(operand, Whole):
        return _read_whole(pair, operand, indices)

    # The operand is rows. What is right depends on how the gather uses the dim of the examples: as a batching dim, as a
    # dim that it does not index, or as an indexed dim.
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
    """Reads an array that is the same for all examples, at the indices of each example."""
    met = pair.met("gather reads at the place of an example in the batch")
    if not isinstance(indices, Rows) or operand.scale == UNKNOWN:
        return met
    # Under vmap over table[n, V] and labels[n], example i reads table[i, labels[i]]. If the rows of the table differ,
    # what an example reads depends on its place in the batch.
    dims = pair.many.params["dimension_numbers"]
    shared_dims = zip(dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True)
    for dim, index_dim in shared_dims:
        if index_dim == indices.dim and dim in operand.differs:
            return met
    return Rows(_find_result_dim(pair, indices.dim), indices.copies, operand.scale)


def _read_own_part(pair: Pair, operand: Rows, indices: State) -> State:
    """Reads rows along a batching dim: each example reads its own part, at its own indices or at indices of all."""
    dims = pair.many.params["dimension_numbers"]
    number = list(dims.operand_batching_dims).index(operand.dim)
    shared = dims.start_indices_batching_dims[number]
    indices_of_each = isinstance(indices, Rows) and (indices.dim, indices.copies) == (shared, operand.copies)
    indices_of_all = isinstance(indices, Whole) and shared not in indices.differs
    if not indices_of_each and not indices_of_all:
        return pair.met("gather reads at the place of an example in the batch")
    return Rows(_find_result_dim(pair, shared), operand.copies, operand.scale)


def _read_other_dims(pair: Pair, operand: Rows, indices: State) -> State:
    """Reads rows at the same indices into other dims; the dim of the examples must be read whole."""
    dims = pair.many.params["dimension_numbers"]
    size = pair.many.params["slice_sizes"][operand.dim]
    if not isinstance(indices, Whole) or size != pair.shape(0)[operand.dim]:
        return pair.met("gather pairs every example with every other")
    removed = (*dims.collapsed_slice_dims, *dims.operand_batching_dims)
    return replace(operand, dim=dims.offset_dims[shift_dim(operand.dim, removed)])


def _read_own_row(pair: Pair, operand: Rows, columns: Sequence[State]) -> State:
    """Reads rows whose dim of examples is indexed: the column of that dim must have the example's own index."""
    # Worked example: `logits[arange(n), targets]` of rows logits[n, V] along dim 0. `start_index_map` is (0, 1), so
    # that column 0 indexes the examples. It is Whole with `index` 0: element i is i. Column 1, the targets, is rows.
    met = pair.met("gather reads rows of other examples")
    dims = pair.many.params["dimension_numbers"]
    if len(columns) != len(dims.start_index_map) or operand.copies != 1:
        return met
    place = list(dims.start_index_map).index(operand.dim)
    column = columns[place]
    if not isinstance(column, Whole) or column.index is None:
        return met
    index = column.index
    reads_one_row = pair.many.params["slice_sizes"][operand.dim] == 1
    reads_all_examples = pair.shape(1)[index] == pair.shape(0)[operand.dim]
    if not reads_one_row or not reads_all_examples:
        return met
    # The other columns must belong to the same example, such as its target, or be the same for all examples.
    rows = Rows(index)
    for number, state in enumerate(columns):
        if number == place or state == rows:
            continue
        if not isinstance(state, Whole) or not fits_beside(state, rows):
            return met
    return Rows(_find_result_dim(pair, index), 1, operand.scale)


def _find_result_dim(pair: Pair, dim: int) -> int:
    """The dim of a gather's result that a dim of its indices becomes."""
    offset_dims = pair.many.params["dimension_numbers"].offset_dims
    index_dims = [result_dim for result_dim in range(len(pair.out)) if result_dim not in offset_dims]
    return index_dims[dim]


def scatter(pair: Pair, operands: list[State]) -> State:
    """A scatter within each example, as under vmap: array, indices and updates have the examples as a batching dim."""
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
    # The dims of the updates are those of the window, and those of the indices, in order.
    update_dims = range(len(pair.shape(2)))
    index_dims = [dim for dim in update_dims if dim not in dims.update_window_dims]
    example_dims = (batching[number], shared[number], index_dims[shared[number]])
    for state, dim in zip((operand, indices, updates), example_dims, strict=True):
        if isinstance(state, Rows) and state != Rows(dim):
            return met
        if isinstance(state, Whole) and not fits_beside(state, Rows(dim)):
            return met
        if isinstance(state, Total | Met):
            return met
    return Rows(batching[number])
