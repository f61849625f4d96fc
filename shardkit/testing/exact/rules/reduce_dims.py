"""Sums, products and extremes over dims, and their running forms."""

from __future__ import annotations

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
    # From the last dim on, so that the numbers of the others stay.
    for dim in sorted(scope.reduced_dims(equation), reverse=True):
        result = scope.field.lift(np.ones(x.shape[:dim] + x.shape[dim + 1 :], np.float32))
        for i in range(x.shape[dim]):
            result = multiply(scope.field, result, x.row(dim, i))
        x = result
    return x


def reduce_extreme(scope: Scope, equation: Any, x: Exact) -> Exact:
    """reduce_max and reduce_min: the element at the place of the largest, or smallest, key."""
    dims = scope.reduced_dims(equation)
    largest = equation.primitive.name == "reduce_max"
    # One place for each result, in the reduced dims taken as one.
    places = _find_extremes(find_keys(scope.field, x), dims, largest)

    def pick(part: np.ndarray) -> np.ndarray:
        part = _flatten_dims(part, [1 + dim for dim in dims])
        chosen = np.broadcast_to(places, (len(part), *places.shape))[..., None]
        return np.take_along_axis(part, chosen, -1)[..., 0]

    return to_number(scope.field, x).move(pick)


def find_place_of_extreme(scope: Scope, equation: Any, x: Exact) -> Known:
    """argmax and argmin."""
    largest = equation.primitive.name == "argmax"
    places = _find_extremes(find_keys(scope.field, x), scope.reduced_dims(equation), largest)
    return scope.field.marks.add(places.astype(equation.params["index_dtype"]), natural=True)


def _find_extremes(keys: np.ndarray, dims: Sequence[int], largest: bool) -> np.ndarray:
    """The place of the largest, or smallest, key along some dims, taken as one."""
    keys = _flatten_dims(keys, dims)
    if largest:
        return np.asarray(keys.argmax(-1))
    return np.asarray(keys.argmin(-1))


def _flatten_dims(x: np.ndarray, dims: Sequence[int]) -> np.ndarray:
    """An array with some of its dims as one, behind the others."""
    # [*others, product of the reduced dims]
    others = [dim for dim in range(x.ndim) if dim not in dims]
    x = x.transpose(*others, *dims)
    return x.reshape(*x.shape[: len(others)], -1)


def cumulate(scope: Scope, equation: Any, x: Exact) -> Exact:
    """cumsum, cumprod, cummax and cummin, term by term."""
    name = equation.primitive.name
    dim = scope.rank + equation.params["axis"]
    n = x.shape[dim]
    if not n:
        return x
    x = to_number(scope.field, x)
    order = range(n)
    if equation.params["reverse"]:
        order = range(n - 1, -1, -1)
    # By number of the place, because a reverse one begins at the end.
    results: dict[int, Exact] = {}
    total: Exact | None = None
    for i in order:
        term = x.row(dim, i)
        total = term if total is None else _accumulate(scope, name, total, term)
        results[i] = total
    return join_exact([results[i] for i in range(n)], dim, new=True)


def _accumulate(scope: Scope, name: str, total: Exact, term: Exact) -> Exact:
    """A running sum, product or extreme, with one term more."""
    if name == "cumsum":
        return add(scope.field, total, term)
    if name == "cumprod":
        return multiply(scope.field, total, term)
    before = find_keys(scope.field, total)
    key = find_keys(scope.field, term)
    # Of equal numbers the first one stays; NaN stays, which spreads to all that follow.
    stays = before >= key if name == "cummax" else before <= key
    return where(stays | np.isnan(before), total, term)
