"""Operations that only move elements: shapes, slices, gathers and scatters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit._jax import compat
from shardkit.testing.exact.stablehlo.attributes import (
    UnreadableError,
    find_body,
    name_combiner,
    read_dtype,
    read_integer,
    read_integers,
    read_shape,
)
from shardkit.testing.exact.stablehlo.block_reader import BlockReader
from shardkit.testing.exact.stablehlo.undefined import undefined


def _bitcast(reader: BlockReader, operation: Any, x: Any) -> Any:
    """The same bytes in memory, as another shape, layout or dtype.

    Worked example: [2, 3] in the layout {0, 1} to [6] in the layout {0}. A layout names the dims from the one that
    changes fastest, so that the array is stored as its transpose [3, 2]. The six elements of the result are those of
    the transpose, row by row.
    """
    # The dims in the order in which they are stored, the slowest first.
    source = read_integers(operation, "source_layout")[::-1]
    target = read_integers(operation, "result_layout")[::-1]
    shape = read_shape(operation)
    dtype = read_dtype(operation)
    if np.dtype(x.dtype) != np.dtype(dtype):
        x = lax.bitcast_convert_type(x, dtype)
    # Of the example: (1, 0) is the transpose to [3, 2], then follows the reshape to [6]. The last transpose is of a
    # result that is not stored row by row. A step that changes nothing is left out: an equation less to prove.
    if source != tuple(range(len(source))):
        x = lax.transpose(x, source)
    stored_shape = tuple(shape[dim] for dim in target)
    if np.shape(x) != stored_shape:
        x = lax.reshape(x, stored_shape)
    if target != tuple(range(len(target))):
        x = lax.transpose(x, np.argsort(target).tolist())
    return x


def _broadcast(reader: BlockReader, operation: Any, x: Any) -> Any:
    dims = read_integers(operation, "broadcast_dimensions")  # for each dim of x that of the result
    return lax.broadcast_in_dim(x, read_shape(operation), dims)


def _reshape(reader: BlockReader, operation: Any, x: Any) -> Any:
    return lax.reshape(x, read_shape(operation))


def _transpose(reader: BlockReader, operation: Any, x: Any) -> Any:
    return lax.transpose(x, read_integers(operation, "permutation"))


def _reverse(reader: BlockReader, operation: Any, x: Any) -> Any:
    return lax.rev(x, read_integers(operation, "dimensions"))


def _slice(reader: BlockReader, operation: Any, x: Any) -> Any:
    return lax.slice(
        x,
        read_integers(operation, "start_indices"),
        read_integers(operation, "limit_indices"),
        read_integers(operation, "strides"),
    )


def _concatenate(reader: BlockReader, operation: Any, *operands: Any) -> Any:
    return lax.concatenate(operands, read_integer(operation, "dimension"))


def _pad(reader: BlockReader, operation: Any, x: Any, filling: Any) -> Any:
    """Padding before, behind and between elements: [1, 2] with 1, 0 and 2 of 7 is [7, 1, 7, 7, 2]."""
    low = read_integers(operation, "edge_padding_low")
    high = read_integers(operation, "edge_padding_high")
    between = read_integers(operation, "interior_padding")
    padding = list(zip(low, high, between, strict=True))
    return lax.pad(x, filling, padding)


def _slice_dynamically(reader: BlockReader, operation: Any, x: Any, *starts: Any) -> Any:
    # Starts of a module count from the front, and are clamped.
    sizes = read_integers(operation, "slice_sizes")
    return compat.dynamic_slice(x, _as_int32(starts, x.shape), sizes)


def _update_dynamically(reader: BlockReader, operation: Any, x: Any, update: Any, *starts: Any) -> Any:
    return compat.dynamic_update_slice(x, update, _as_int32(starts, x.shape))


def _as_int32(starts: Sequence[Any], shape: Sequence[int]) -> list[Any]:
    """The starts of a slice as int32, which jax takes; each is clamped to its dim if it may be too large for int32.

    Worked example: the start 2**31 in uint32 is beyond the end of a dim of 8, and is clamped to 8. As int32 it would be
    -2**31, before the beginning.
    """
    converted = []
    for start, size in zip(starts, shape, strict=True):
        dtype = np.dtype(start.dtype)
        if not np.can_cast(dtype, np.int32):
            start = lax.clamp(np.zeros((), dtype), start, np.asarray(size, dtype))
        converted.append(lax.convert_element_type(start, np.int32))
    return converted


def _gather(reader: BlockReader, operation: Any, x: Any, indices: Any) -> Any:
    """A gather, whose dimension numbers are those of jax under other names.

    Worked example: the rows 3 and 1 of x [8, 4] have the indices [[3], [1]] and the slice sizes (1, 4). An index is of
    dim 0 (`start_index_map`), which a row loses (`collapsed_slice_dims`); dim 1 of the result is that of the row
    (`offset_dims`): [2, 4].
    """
    dims = compat.hlo_dimensions("Gather", operation.attributes["dimension_numbers"])
    indices = _put_vector_last(indices, dims.index_vector_dim)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(dims.offset_dims),
        collapsed_slice_dims=tuple(dims.collapsed_slice_dims),
        start_index_map=tuple(dims.start_index_map),
        operand_batching_dims=tuple(dims.operand_batching_dims),
        start_indices_batching_dims=tuple(dims.start_indices_batching_dims),
    )
    sizes = read_integers(operation, "slice_sizes")
    # A module clamps indices out of bounds: of 8 rows the index 9 reads row 7. A gather of jax that fills them is a
    # clamped one in a module, and a select behind it.
    clamped = lax.gather(x, indices, numbers, sizes, mode=lax.GatherScatterMode.CLIP)
    if operation.results[0] not in reader.promised:
        return clamped
    # The compiler promised that all indices are in bounds. If one is not, anything may be read there.
    everywhere = reader.vary(np.ones(x.shape, bool))
    mode = lax.GatherScatterMode.FILL_OR_DROP
    is_inside = lax.gather(everywhere, indices, numbers, sizes, mode=mode, fill_value=False)
    unknown = undefined.bind(reader.vary(np.zeros(clamped.shape, clamped.dtype)))
    return lax.select(is_inside, clamped, unknown)


def _put_vector_last(indices: Any, dim: int) -> Any:
    """Indices [..., n] with the n coordinates of a place in the last dim, from indices that have them in dim `dim`.

    Indices of one coordinate may have no such dim: then `dim` is their rank.
    """
    if dim == np.ndim(indices):
        return lax.expand_dims(indices, (dim,))
    return jnp.moveaxis(indices, dim, -1)


def _scatter(reader: BlockReader, operation: Any, *operands: Any) -> Any:
    """A scatter of one array that writes updates, or adds them.

    Worked example, of an add: x = [0, 0, 0] with the indices [[2], [0], [2]] and the updates [5, 6, 7] is [6, 0, 12].
    """
    if len(operands) != 3:  # of n arrays: 2 n + 1
        raise UnreadableError("scatter of several arrays")
    x, indices, updates = operands
    dims = compat.hlo_dimensions("Scatter", operation.attributes["scatter_dimension_numbers"])
    indices = _put_vector_last(indices, dims.index_vector_dim)
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(dims.update_window_dims),
        inserted_window_dims=tuple(dims.inserted_window_dims),
        scatter_dims_to_operand_dims=tuple(dims.scattered_dims_to_operand_dims),
        operand_batching_dims=tuple(dims.input_batching_dims),
        scatter_indices_batching_dims=tuple(dims.scatter_indices_batching_dims),
    )
    name = name_combiner(find_body(operation))
    if name not in _SCATTERS:
        raise UnreadableError("scatter by another function than a sum")
    mode = lax.GatherScatterMode.FILL_OR_DROP  # an update out of bounds is dropped
    return _SCATTERS[name](x, indices, updates, numbers, mode=mode)


_SCATTERS = {"": lax.scatter, "stablehlo.add": lax.scatter_add}


SHAPE_RULES: dict[str, Callable[..., Any]] = {
    "mhlo.bitcast": _bitcast,
    "stablehlo.broadcast_in_dim": _broadcast,
    "stablehlo.reshape": _reshape,
    "stablehlo.transpose": _transpose,
    "stablehlo.reverse": _reverse,
    "stablehlo.slice": _slice,
    "stablehlo.concatenate": _concatenate,
    "stablehlo.pad": _pad,
    "stablehlo.dynamic_slice": _slice_dynamically,
    "stablehlo.dynamic_update_slice": _update_dynamically,
    "stablehlo.gather": _gather,
    "stablehlo.scatter": _scatter,
}
