"""sort and top_k: elements in the order of their keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardkit.testing.exact.numbers.errors import UnsupportedError
from shardkit.testing.exact.numbers.orders import find_keys
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.rules.comparisons import put_nan_last
from shardkit.testing.exact.rules.operands import Operand
from shardkit.testing.exact.rules.scope import Scope

_MOST_COMPARED = 8  # elements of a row that are compared with all others of it


def sort(scope: Scope, equation: Any, *operands: Operand) -> list[Operand]:
    """sort: several arrays in the order of the first `num_keys` of them, numbers of the field by their keys.

    Worked example: `jnp.argsort(x)` of x [c, a, b] with a < b < c sorts two operands, x and [0, 1, 2], by the first.
    The places are [1, 2, 0], so the results are [a, b, c] and [1, 2, 0].
    """
    dim = scope.rank + equation.params["dimension"]
    # An operand that is the same on all devices is sorted in another way on each, if the keys differ between them.
    shapes = [x.shape for x in operands]
    shape = np.broadcast_shapes(*shapes)
    keys = []
    follows_floats = False
    for x in operands[: equation.params["num_keys"]]:
        key = np.asarray(x)
        if isinstance(x, Exact):
            key = find_keys(scope.field, x)
            _note_order(scope, equation, x, key, dim)
            follows_floats = True
        keys.append(np.moveaxis(np.broadcast_to(key, shape), dim, -1))
    keys.reverse()  # numpy's lexsort sorts by the last key first
    places = np.moveaxis(np.lexsort(keys, -1), -1, dim)
    marks = scope.field.marks
    results = []
    for x in operands:
        result = _take_along(x, places, dim, shape)
        # Integers that are sorted by floats follow from these, as the permutation of an argsort does.
        if follows_floats and not isinstance(result, Exact):
            marks.add(result, natural=marks.is_natural(x))
        results.append(result)
    return results


def take_top(scope: Scope, equation: Any, x: Exact) -> list[Operand]:
    """top_k, and approx_top_k as if it missed none: the largest elements, and their places."""
    params = equation.params
    if not params.get("aggregate_to_topk", True):
        raise UnsupportedError("approx_top_k with aggregate_to_topk=False")
    # The dim has another name in either primitive, and none in older versions of top_k, which take the last one.
    dims = len(x.shape) - scope.rank
    dim_of_array = params.get("axis", params.get("reduction_dimension", dims - 1))
    dim = scope.rank + dim_of_array % dims
    keys = find_keys(scope.field, x)
    if not params.get("is_max_k", True):
        keys = -keys
    _note_order(scope, equation, x, keys, dim)
    keys = put_nan_last(keys)  # NaN comes first, as the largest
    # Stable: of equal numbers the first comes first, as in jax.
    descending = np.argsort(-keys, axis=dim, kind="stable")
    places = np.take(descending, range(params["k"]), dim)
    indices = scope.field.marks.add(places.astype(np.int32), natural=True)
    return [_take_along(x, places, dim, x.shape), indices]


def _note_order(scope: Scope, equation: Any, x: Exact, keys: np.ndarray, dim: int) -> None:
    """Notes which elements of a row are larger than which; of a long row, only the largest and the smallest."""
    n = x.shape[dim]
    if n < 2:
        return
    if n > _MOST_COMPARED:
        scope.choose_extremes(equation, x, keys, [dim], True, " largest")
        scope.choose_extremes(equation, x, keys, [dim], False, " smallest")
        return
    # Of [a, b, c] rolled by 1, which is [c, a, b]: whether a > c, b > a and c > b.
    for distance in range(1, n):
        is_larger = keys > np.roll(keys, distance, dim)
        scope.choose(equation, is_larger, x, f" by {distance}")


def sort_by(keys: np.ndarray, x: Operand, dim: int) -> Operand:
    """The elements of an operand along a dim, in the order of their keys."""
    places = np.argsort(keys, dim, kind="stable")
    return _take_along(x, places, dim, keys.shape)


def _take_along(x: Operand, places: np.ndarray, dim: int, shape: Sequence[int]) -> Operand:
    """The elements of an operand of this shape at places along a dim."""
    if not isinstance(x, Exact):
        return np.take_along_axis(np.broadcast_to(x, shape), places, dim)

    def take(part: np.ndarray) -> np.ndarray:
        components = len(part)
        part = np.broadcast_to(part, (components, *shape))
        places_of_part = np.broadcast_to(places, (components, *places.shape))
        return np.take_along_axis(part, places_of_part, dim + 1)

    return x.move(take)
