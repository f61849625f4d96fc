"""Operations over dims, which have a region that combines or compares two elements.

Worked example: `reduce(%x, %zero) dimensions = [0] ({ (%a, %b): return add %a, %b })` of x [8, 3]. The region is an
add, so that the operation is a reduce_sum of x over dim 0, plus the start %zero. A region of any other function, as
that of an argmax, is applied to one element after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit.testing.exact.stablehlo.attributes import (
    UnreadableError,
    find_body,
    name_combiner,
    read_integer,
    read_integers,
    read_numbers,
    read_pairs,
    read_shape,
)
from shardkit.testing.exact.stablehlo.block_reader import BlockReader


def _reduce(reader: BlockReader, operation: Any, *operands: Any) -> Any:
    """A reduction of some arrays together, from a start for each."""
    count = len(operands) // 2
    arrays = operands[:count]
    starts = operands[count:]
    dims = read_integers(operation, "dimensions")
    body = find_body(operation)
    name = None
    if count == 1:
        name = name_combiner(body)
    if name not in REDUCTIONS:
        return _fold(reader, body, arrays, starts, dims)
    reduced = REDUCTIONS[name](arrays[0], dims)
    # The start is one term more. Mostly it is the neutral element, but a module may begin with any number.
    start = lax.broadcast(starts[0], read_shape(operation))
    return _COMBINERS[name](reduced, start)


def _fold(
    reader: BlockReader, body: Any, arrays: Sequence[Any], starts: Sequence[Any], dims: Sequence[int]
) -> list[Any]:
    """A reduction by any function: elements of the reduced dims one after the other, those of other dims at once.

    Worked example: the argmax of x [2, 3] over dim 1 is a reduction of x and of the places 0, 1, 2 together. The region
    takes the largest number so far with its place, and one more element with its place. It is run three times, on
    arrays [2].
    """
    rows = [_put_dims_last(x, dims) for x in arrays]  # [..., n]
    *shape, count = rows[0].shape
    combine = reader.map_function(body, len(shape))
    results = [lax.broadcast(start, shape) for start in starts]
    for place in range(count):
        elements = [lax.index_in_dim(x, place, len(shape), keepdims=False) for x in rows]
        results = combine(*results, *elements)
    return results


def _put_dims_last(x: Any, dims: Sequence[int]) -> Any:
    """[..., n]: some dims as one, behind all others. Of [2, 3, 4] the dims 0 and 1 become [4, 6]."""
    kept = [dim for dim in range(np.ndim(x)) if dim not in dims]
    x = lax.transpose(x, [*kept, *dims])
    shape = x.shape[: len(kept)]
    count = math.prod(x.shape[len(kept) :])
    return lax.reshape(x, (*shape, count))


def _reduce_dims(primitive: Any) -> Callable[..., Any]:
    """A reduction of lax as a function of an array and dims."""

    def reduce(x: Any, dims: Sequence[int]) -> Any:
        return primitive(x, axes=tuple(dims))

    return reduce


REDUCTIONS = {
    "stablehlo.add": _reduce_dims(lax.reduce_sum),
    "stablehlo.multiply": _reduce_dims(lax.reduce_prod),
    "stablehlo.maximum": _reduce_dims(lax.reduce_max),
    "stablehlo.minimum": _reduce_dims(lax.reduce_min),
    "stablehlo.and": _reduce_dims(lax.reduce_and),
    "stablehlo.or": _reduce_dims(lax.reduce_or),
}


def _reduce_windows(reader: BlockReader, operation: Any, *operands: Any) -> Any:
    """A reduction of windows, as of pooling: by lax from the neutral element, then combined with the start.

    jax has primitives only for windows that begin with the neutral element, as -inf for a maximum.
    """
    if len(operands) != 2:
        raise UnreadableError("reduce_window of several arrays")
    x, start = operands
    name = name_combiner(find_body(operation))
    rank = np.ndim(x)
    window = read_integers(operation, "window_dimensions")
    strides = read_integers(operation, "window_strides", (1,) * rank)
    padding = read_numbers(operation, "padding", np.zeros((rank, 2), int))
    base = read_integers(operation, "base_dilations", (1,) * rank)
    dilation = read_integers(operation, "window_dilations", (1,) * rank)
    if name not in _WINDOWS:
        raise UnreadableError("reduce_window by another function")
    # jax recognizes the primitive by the neutral element and the function, and pads with that element.
    reduced = lax.reduce_window(
        x,
        _WINDOWS[name](x.dtype),
        _COMBINERS[name],
        window,
        strides,
        read_pairs(padding),
        base,
        dilation,
    )
    return _COMBINERS[name](reduced, lax.broadcast(start, np.shape(reduced)))


def _make_zero(dtype: Any) -> Any:
    return np.zeros((), dtype)


def _make_least(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return np.asarray(-np.inf, dtype)
    return np.asarray(jnp.iinfo(dtype).min, dtype)


def _make_largest(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return np.asarray(np.inf, dtype)
    return np.asarray(jnp.iinfo(dtype).max, dtype)


_WINDOWS = {"stablehlo.add": _make_zero, "stablehlo.maximum": _make_least, "stablehlo.minimum": _make_largest}
_COMBINERS = {
    "stablehlo.add": lax.add,
    "stablehlo.multiply": lax.mul,
    "stablehlo.maximum": lax.max,
    "stablehlo.minimum": lax.min,
    "stablehlo.and": lax.bitwise_and,
    "stablehlo.or": lax.bitwise_or,
}


def _sort(reader: BlockReader, operation: Any, *operands: Any) -> Any:
    """A sort by any comparison: the place of an element is the number of elements that come before it.

    Worked example: [3, 1, 2] by `<`. Before 3 come two elements, before 1 none, before 2 one: places [2, 0, 1]. Of two
    elements of which neither comes before the other, the first stays first.
    """
    dim = read_integer(operation, "dimension")
    size = np.shape(operands[0])[dim]
    comes_before = reader.map_function(find_body(operation), np.ndim(operands[0]) + 1)
    arrays = [jnp.moveaxis(x, dim, -1) for x in operands]  # [..., n]
    shape = (*arrays[0].shape, size)
    rank = len(shape)
    # [..., i, j]: all pairs of elements i and j.
    along_i = tuple(range(rank - 1))
    along_j = (*range(rank - 2), rank - 1)
    pairs_ji = []
    pairs_ij = []
    for x in arrays:
        x_i = lax.broadcast_in_dim(x, shape, along_i)
        x_j = lax.broadcast_in_dim(x, shape, along_j)
        # The comparison takes two elements of each array, one array after the other: a_j, a_i, b_j, b_i.
        pairs_ji += [x_j, x_i]
        pairs_ij += [x_i, x_j]
    (is_j_first,) = comes_before(*pairs_ji)
    (is_i_first,) = comes_before(*pairs_ij)
    j = lax.broadcasted_iota(np.int32, shape, rank - 1)
    i = lax.broadcasted_iota(np.int32, shape, rank - 2)
    is_j_earlier = j < i
    is_j_counted = is_j_first | (~is_i_first & is_j_earlier)
    places = lax.reduce_sum(lax.convert_element_type(is_j_counted, np.int32), axes=(rank - 1,))
    # At place p is the element i whose place is p. [..., p, i]: whether it is there.
    p = lax.broadcasted_iota(np.int32, shape, rank - 2)
    is_at_p = p == lax.broadcast_in_dim(places, shape, along_j)
    order = lax.argmax(is_at_p, rank - 1, np.int32)
    results = []
    for x in arrays:
        ordered = jnp.take_along_axis(x, order, -1, mode="clip")
        results.append(jnp.moveaxis(ordered, -1, dim))
    return results


REDUCTION_RULES: dict[str, Callable[..., Any]] = {
    "stablehlo.reduce": _reduce,
    "stablehlo.reduce_window": _reduce_windows,
    "stablehlo.sort": _sort,
}
