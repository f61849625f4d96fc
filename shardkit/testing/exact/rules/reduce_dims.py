"""Sums, products and extremes over dims, and their running forms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardkit.testing.exact.numbers.arithmetic import add, multiply, sum_dims
from shardkit.testing.exact.numbers.assembly import join_exact, where
from shardkit.testing.exact.numbers.logarithms import to_number
from shardkit.testing.exact.numbers.orders import find_keys
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.rules.operands import Known
from shardkit.testing.exact.rules.scope import Scope


def reduce_sum(scope: Scope, equation: Any, x: Exact) -> Exact:
    """reduce_sum."""
    return sum_dims(scope.field, x, scope.reduced_dims(equation))


def reduce_product(scope: Scope, equation: Any, x: Exact) -> Exact:
    """reduce_prod, one factor after the other."""
    # The last dim first, so that the numbers of the others stay.
    for dim in sorted(scope.reduced_dims(equation), reverse=True):
        shape = x.shape[:dim] + x.shape[dim + 1 :]
        product = scope.field.lift(np.ones(shape, np.float32))
        for i in range(x.shape[dim]):
            product = multiply(scope.field, product, x.row(dim, i))
        x = product
    return x


def reduce_extreme(scope: Scope, equation: Any, x: Exact) -> Exact:
    """reduce_max and reduce_min: the element at the place of the largest, or smallest, key.

    Worked example: `x.max(1)` of x [[a, b, c]] with the keys [[0.3, 2.1, -1.0]]. The largest key is at place 1, so the
    result is [b], with the residues of b: the maximum is one of the elements, and no arithmetic makes it.
    """
    dims = scope.reduced_dims(equation)
    largest = equation.primitive.name == "reduce_max"
    if not math.prod(x.shape[dim] for dim in dims):
        kept_shape = [size for dim, size in enumerate(x.shape) if dim not in dims]
        return scope.field.lift(np.full(kept_shape, -np.inf if largest else np.inf, np.float32))
    # One place for each result, in the reduced dims taken as one.
    keys = find_keys(scope.field, x)
    places = _find_extremes(keys, dims, largest)
    _note_extremes(scope, equation, x, keys, dims, largest)

    def pick(part: np.ndarray) -> np.ndarray:
        part = _flatten_dims(part, [1 + dim for dim in dims])
        places_of_part = np.broadcast_to(places, (len(part), *places.shape))
        extremes = np.take_along_axis(part, places_of_part[..., None], -1)
        return extremes[..., 0]

    return to_number(scope.field, x).move(pick)


def find_place_of_extreme(scope: Scope, equation: Any, x: Exact) -> Known:
    """argmax and argmin."""
    largest = equation.primitive.name == "argmax"
    keys = find_keys(scope.field, x)
    dims = scope.reduced_dims(equation)
    places = _find_extremes(keys, dims, largest)
    _note_extremes(scope, equation, x, keys, dims, largest)
    indices = places.astype(equation.params["index_dtype"])
    return scope.field.marks.add(indices, natural=True)


def _note_extremes(scope: Scope, equation: Any, x: Exact, keys: np.ndarray, dims: Sequence[int], largest: bool) -> None:
    """Notes which elements were the largest, or smallest, along some dims."""
    if math.prod(x.shape[dim] for dim in dims) > 1:
        extremes = keys.max(tuple(dims), keepdims=True) if largest else keys.min(tuple(dims), keepdims=True)
        scope.choose(equation, keys == extremes, x)


def _find_extremes(keys: np.ndarray, dims: Sequence[int], largest: bool) -> np.ndarray:
    """The place of the largest, or smallest, key along some dims, taken as one."""
    keys = _flatten_dims(keys, dims)
    if largest:
        return np.asarray(keys.argmax(-1))
    return np.asarray(keys.argmin(-1))


def _flatten_dims(x: np.ndarray, dims: Sequence[int]) -> np.ndarray:
    """An array with some of its dims as one, after the others."""
    # [*kept dims, product of the reduced dims]
    kept_dims = [dim for dim in range(x.ndim) if dim not in dims]
    x = x.transpose(*kept_dims, *dims)
    kept = len(kept_dims)
    return x.reshape(*x.shape[:kept], math.prod(x.shape[kept:]))


def cumulate(scope: Scope, equation: Any, x: Exact) -> Exact:
    """cumsum, cumprod, cummax and cummin, term by term."""
    dim = scope.rank + equation.params["axis"]
    n = x.shape[dim]
    if not n:
        return x
    x = to_number(scope.field, x)
    terms = [x.row(dim, i) for i in range(n)]
    if equation.params["reverse"]:
        terms.reverse()
    totals = [terms[0]]
    for number, term in enumerate(terms[1:], 1):
        totals.append(_accumulate(scope, equation, totals[-1], term, number))
    if equation.params["reverse"]:
        totals.reverse()
    return join_exact(totals, dim, new=True)


def _accumulate(scope: Scope, equation: Any, total: Exact, term: Exact, number: int) -> Exact:
    """A running sum, product or extreme, with one term more."""
    name = equation.primitive.name
    if name == "cumsum":
        return add(scope.field, total, term)
    if name == "cumprod":
        return multiply(scope.field, total, term)
    before = find_keys(scope.field, total)
    key = find_keys(scope.field, term)
    # Of equal numbers the first one stays; NaN stays, which spreads to all that follow.
    if name == "cummax":
        stays = before >= key
    else:
        stays = before <= key
    scope.choose(equation, stays, term, f" of term {number}")
    return where(stays | np.isnan(before), total, term)
