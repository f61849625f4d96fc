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
    field = scope.field
    # The last dim first, so that the numbers of the others stay.
    for dim in sorted(scope.reduced_dims(equation), reverse=True):
        shape = x.shape[:dim] + x.shape[dim + 1 :]
        product = field.lift(np.ones(shape, np.float32))
        for i in range(x.shape[dim]):
            product = multiply(field, product, x.row(dim, i))
        x = product
    return x


def reduce_extreme(scope: Scope, equation: Any, x: Exact) -> Exact:
    """reduce_max and reduce_min: the element at the place of the largest, or smallest, key.

    Worked example: `x.max(1)` of x [[a, b, c]] with the keys [[0.3, 2.1, -1.0]]. The largest key is at place 1, so the
    result is [b], with the residues of b: the maximum is one of the elements, and no arithmetic makes it.
    """
    field = scope.field
    dims = scope.reduced_dims(equation)
    largest = equation.primitive.name == "reduce_max"
    if not math.prod(x.shape[dim] for dim in dims):
        return field.lift(_reduce_nothing(x.shape, dims, largest))
    # One place for each result, in the reduced dims taken as one.
    keys = find_keys(field, x)
    places = _find_extremes(keys, dims, largest)
    scope.choose_extremes(equation, x, keys, dims, largest)
    dims_of_part = [1 + dim for dim in dims]  # behind the components

    def pick(part: np.ndarray) -> np.ndarray:
        part = _flatten_dims(part, dims_of_part)
        places_of_part = np.broadcast_to(places, (len(part), *places.shape))
        extremes = np.take_along_axis(part, places_of_part[..., None], -1)
        return extremes[..., 0]

    return to_number(field, x).move(pick)


def _reduce_nothing(shape: Sequence[int], dims: Sequence[int], largest: bool) -> np.ndarray:
    """The largest element of none, which is minus infinity, or the smallest of none."""
    kept_shape = [size for dim, size in enumerate(shape) if dim not in dims]
    extreme = -np.inf
    if not largest:
        extreme = np.inf
    return np.full(kept_shape, extreme, np.float32)


def find_place_of_extreme(scope: Scope, equation: Any, x: Exact) -> Known:
    """argmax and argmin."""
    largest = equation.primitive.name == "argmax"
    keys = find_keys(scope.field, x)
    dims = scope.reduced_dims(equation)
    places = _find_extremes(keys, dims, largest)
    scope.choose_extremes(equation, x, keys, dims, largest)
    indices = places.astype(equation.params["index_dtype"])
    return scope.field.marks.add(indices, natural=True)


def _find_extremes(keys: np.ndarray, dims: Sequence[int], largest: bool) -> np.ndarray:
    """The place of the largest, or smallest, key along some dims, taken as one."""
    keys = _flatten_dims(keys, dims)
    if largest:
        return np.asarray(keys.argmax(-1))
    return np.asarray(keys.argmin(-1))


def _flatten_dims(x: np.ndarray, dims: Sequence[int]) -> np.ndarray:
    """An array with some of its dims as one, after the others: [*kept dims, product of the dims].

    Worked example: [2, 3, 4, 5] with the dims 0 and 2 as one is [3, 5, 8].
    """
    kept_dims = [dim for dim in range(x.ndim) if dim not in dims]
    x = x.transpose(*kept_dims, *dims)
    shape = x.shape[: len(kept_dims)]
    size = math.prod(x.shape[len(kept_dims) :])
    return x.reshape(*shape, size)


def cumulate(scope: Scope, equation: Any, x: Exact) -> Exact:
    """cumsum, cumprod, cummax and cummin, term by term."""
    dim = scope.rank + equation.params["axis"]
    n = x.shape[dim]
    if not n:
        return x
    x = to_number(scope.field, x)
    terms = [x.row(dim, i) for i in range(n)]
    backwards = equation.params["reverse"]
    if backwards:
        terms.reverse()
    total = terms[0]
    totals = [total]
    for number in range(1, n):
        total = _accumulate(scope, equation, total, terms[number], number)
        totals.append(total)
    if backwards:
        totals.reverse()
    return join_exact(totals, dim, new=True)


def _accumulate(scope: Scope, equation: Any, total: Exact, term: Exact, number: int) -> Exact:
    """A running sum, product or extreme, with one term more."""
    field = scope.field
    name = equation.primitive.name
    if name == "cumsum":
        return add(field, total, term)
    if name == "cumprod":
        return multiply(field, total, term)
    key_of_total = find_keys(field, total)
    key_of_term = find_keys(field, term)
    # Of equal numbers the first one stays; NaN stays, which spreads to all that follow.
    if name == "cummax":
        stays = key_of_total >= key_of_term
    else:
        stays = key_of_total <= key_of_term
    scope.choose(equation, stays, term, f" of term {number}")
    return where(stays | np.isnan(key_of_total), total, term)
