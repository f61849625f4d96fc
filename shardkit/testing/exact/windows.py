"""What convolutions, pooling and its gradients mean in the field.

All of them read windows of an array: the places of all windows in the flat array, [windows, elements of one], are
integers, and what is left is a matmul, a sum or a maximum over the last dim. What a window reads from the padding or
between dilated elements is one more element behind the array.

Worked example: windows of 3 over [a, b, c, d] with stride 2 and a zero on each side are the places [[4, 0, 1],
[1, 2, 3]] of [a, b, c, d, 0].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from shardkit.testing.exact.field import Field, UnsupportedError
from shardkit.testing.exact.operands import MeshRules, Operand, elements_at, stacked
from shardkit.testing.exact.values import Exact

# What padding is, by how a window is reduced: what changes no result.
_NEUTRAL = {"add": 0.0, "mul": 1.0, "max": -math.inf, "min": math.inf}


class WindowDim(NamedTuple):
    """Windows along one dim.

    Attributes:
        size: elements of the array.
        windows: how many there are.
        reads: elements of one.
        stride: from one to the next.
        padding: before the first element and behind the last one, negative where elements are cut off.
        spread: how far the array's elements are apart, with nothing between them.
        step: from one element of a window to the next.
    """

    size: int
    windows: int
    reads: int
    stride: int = 1
    padding: tuple[int, int] = (0, 0)
    spread: int = 1
    step: int = 1


def places_of(dims: Sequence[WindowDim]) -> np.ndarray:
    """int64 [windows, elements of one]: places in the flat array, its size for what is none of its elements."""
    places, inside = np.zeros((1, 1), np.int64), np.ones((1, 1), bool)
    for dim in dims:
        at = np.arange(dim.windows)[:, None] * dim.stride + np.arange(dim.reads) * dim.step - dim.padding[0]
        place, between = np.divmod(at, dim.spread)
        here = (place >= 0) & (place < dim.size) & (between == 0)
        shape = len(places) * dim.windows, places.shape[1] * dim.reads
        places = (places[:, None, :, None] * dim.size + place[:, None]).reshape(shape)
        inside = (inside[:, None, :, None] & here[:, None]).reshape(shape)
    return np.where(inside, places, math.prod(dim.size for dim in dims))


def _shaped(x: Exact, lead: int, shape: Sequence[int]) -> Exact:
    """Another shape of the dims behind the first `lead`."""
    return x.moved(lambda part: part.reshape((*part.shape[: 1 + lead], *shape)))


def _flat(x: Exact, lead: int) -> Exact:
    """The dims behind the first `lead` as one."""
    return _shaped(x, lead, [math.prod(x.shape[lead:])])


def _transposed(x: Exact, lead: int, order: Sequence[int]) -> Exact:
    """The dims behind the first `lead` in another order."""
    dims = *range(1 + lead), *(1 + lead + dim for dim in order)
    return x.moved(lambda part: part.transpose(dims))


def _filled(field: Field, x: Exact, filling: float) -> Exact:
    """One element more along the last dim."""
    last = field.lifted(np.full((1,) * len(x.shape), filling, np.float32))
    return stacked(field, [x, last], len(x.shape) - 1)


def _read(field: Field, x: Exact, places: np.ndarray, filling: float) -> Exact:
    """What windows over the last dim read: [..., windows, elements of one]."""
    return _filled(field, x, filling).moved(lambda part: np.take(part, places, -1))


# Convolutions


def convolve(rules: MeshRules, equation: Any, x: Operand, kernel: Operand) -> Exact:
    """conv_general_dilated: a matmul of what windows read, for each group of features and of examples."""
    field, rank, params = rules.field, rules.rank, equation.params
    numbers = params["dimension_numbers"]
    x, kernel = (field.plain(z) for z in rules.exact(x, kernel))
    x, kernel = _transposed(x, rank, numbers.lhs_spec), _transposed(kernel, rank, numbers.rhs_spec)
    result = [equation.outvars[0].aval.shape[dim] for dim in numbers.out_spec]
    examples, channels, *sizes = x.shape[rank:]
    places = _convolved(params, sizes, result[2:], kernel.shape[rank + 2 :])
    of_features, of_examples = params["feature_group_count"], params["batch_group_count"]
    channels, examples = channels // of_features, examples // of_examples  # of a group
    groups, contracted = of_examples * of_features, channels * places.shape[1]

    reads = _read(field, _flat(x, rank + 2), places, 0.0)
    reads = _shaped(reads, rank, (of_examples, examples, of_features, channels, *places.shape))
    reads = _transposed(reads, rank, (0, 2, 1, 4, 3, 5))
    reads = _shaped(reads, rank, (groups, examples * len(places), contracted))
    weights = _shaped(kernel, rank, (groups, result[1] // groups, contracted))
    product = field.matmul(reads, _transposed(weights, rank, (0, 2, 1)))
    product = _shaped(product, rank, (groups, examples, len(places), result[1] // groups))
    product = _shaped(_transposed(product, rank, (1, 0, 3, 2)), rank, result)
    return _transposed(product, rank, np.argsort(numbers.out_spec).tolist())


def _convolved(params: Any, sizes: Sequence[int], windows: Sequence[int], reads: Sequence[int]) -> np.ndarray:
    """The places of a convolution's windows in the dims that it runs over."""
    names = "window_strides", "padding", "lhs_dilation", "rhs_dilation"
    return places_of(
        [WindowDim(*dim) for dim in zip(sizes, windows, reads, *(params[name] for name in names), strict=True)]
    )


# Pooling


def _pooled(equation: Any, array: Any, windows: Any) -> np.ndarray:
    """The places of the windows of a pooling, by the variables of the array and of a value for each window."""
    params, sizes = equation.params, array.aval.shape
    ones = (1,) * len(sizes)
    spreads, steps = params.get("base_dilation", ones), params.get("window_dilation", ones)
    options = params["window_dimensions"], params["window_strides"], params["padding"], spreads, steps
    return places_of([WindowDim(*row) for row in zip(sizes, windows.aval.shape, *options, strict=True)])


def _result(rules: MeshRules, equation: Any, x: Exact) -> Exact:
    return _shaped(x, rules.rank, equation.outvars[0].aval.shape)


def add_windows(rules: MeshRules, equation: Any, x: Exact) -> Exact:
    """reduce_window_sum."""
    places = _pooled(equation, equation.invars[0], equation.outvars[0])
    reads = _read(rules.field, _flat(x, rules.rank), places, _NEUTRAL["add"])
    return _result(rules, equation, rules.field.total(reads, [rules.rank + 1]))


def _multiply_windows(rules: MeshRules, equation: Any, x: Exact) -> Exact:
    places = _pooled(equation, equation.invars[0], equation.outvars[0])
    reads = _read(rules.field, _flat(x, rules.rank), places, _NEUTRAL["mul"])
    product = reads.row(rules.rank + 1, 0)
    for i in range(1, places.shape[1]):
        product = rules.field.mul(product, reads.row(rules.rank + 1, i))
    return _result(rules, equation, product)


def take_extremes(rules: MeshRules, equation: Any, x: Exact) -> Exact:
    """reduce_window_max and reduce_window_min."""
    return _take_extremes(rules, equation, x, "max" if equation.primitive.name == "reduce_window_max" else "min")


def _take_extremes(rules: MeshRules, equation: Any, x: Exact, by: str) -> Exact:
    places = _pooled(equation, equation.invars[0], equation.outvars[0])
    keys = _keys(rules, x, places, _NEUTRAL[by])
    at = keys.argmax(-1) if by == "max" else keys.argmin(-1)
    source = _filled(rules.field, _flat(rules.field.plain(x), rules.rank), _NEUTRAL[by])
    return _result(rules, equation, _elements(rules, source, _chosen(places, at)))


def _keys(rules: MeshRules, x: Operand, places: np.ndarray, filling: float) -> np.ndarray:
    """float64 [..., windows, elements of one]: the order of what windows read."""
    keys = rules.field.key(x) if isinstance(x, Exact) else np.asarray(x, np.float64)
    keys = keys.reshape(*keys.shape[: rules.rank], -1)
    return np.concatenate([keys, np.full((*keys.shape[:-1], 1), filling)], -1)[..., places]


def _chosen(places: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The place of one element [..., windows] of each window."""
    every = np.broadcast_to(places, (*at.shape, places.shape[1]))
    return np.take_along_axis(every, at[..., None], -1)[..., 0]


def _elements(rules: MeshRules, x: Exact, places: np.ndarray) -> Exact:
    """Elements along the last dim, at other places on each device."""
    return x.moved(partial(elements_at, at=places, rank=rules.rank))


def reduce_windows(rules: MeshRules, equation: Any, *operands: Operand) -> Exact:
    """reduce_window by a sum, product, maximum or minimum of a window and the number that it begins with."""
    field, name = rules.field, _reducer(equation.params["jaxpr"])
    if len(operands) != 2 or name not in _NEUTRAL:
        raise UnsupportedError(f"reduce_window by {name}")
    x, first = (z if isinstance(z, Exact) else field.lifted(z) for z in operands)
    first = field.plain(_shaped(first, rules.rank, (1,) * len(equation.outvars[0].aval.shape)))
    if name == "add":
        return field.add(add_windows(rules, equation, x), first)
    if name == "mul":
        return field.mul(_multiply_windows(rules, equation, x), first)
    result = _take_extremes(rules, equation, x, name)
    key, other = field.key(result), field.key(first)
    stays = rules.decide(equation, key >= other if name == "max" else key <= other, result, first)
    return field.where(stays | np.isnan(key), result, first)


def _reducer(body: Any) -> str:
    """The primitive that joins two numbers."""
    joins = len(body.eqns) == 1 and all(v in body.eqns[0].invars for v in body.invars)
    return body.eqns[0].primitive.name if joins else "another function"


# Gradients of pooling


def scatter_to_extremes(rules: MeshRules, equation: Any, source: Operand, x: Operand) -> Exact:
    """select_and_scatter_add: the sum of what is given by all windows whose largest, or smallest, an element is."""
    rank, (given, array) = rules.rank, equation.invars
    places = _pooled(equation, array, given)
    chosen = _first_extremes(rules, equation, x, places)
    size, none = math.prod(array.aval.shape), len(places)
    # An element is the j-th of one window at most: of which one, [j, element].
    windows = np.full((places.shape[1], size + 1), none)
    for j, column in enumerate(places.T):
        windows[j, column] = np.arange(none)
    windows = windows[:, :size]  # but for the padding
    chosen = np.concatenate([chosen, np.full((*chosen.shape[:-1], 1), size)], -1)
    gives = chosen[..., windows] == np.arange(size)
    source = _filled(rules.field, _flat(rules.exact(source)[0], rank), 0.0)
    terms = _elements(rules, source, np.where(gives, windows, none))
    return _result(rules, equation, rules.field.total(terms, [rank]))


def gather_from_extremes(rules: MeshRules, equation: Any, tangents: Operand, x: Operand) -> Exact:
    """select_and_gather_add: the tangent of each window's largest, or smallest, element, of equal ones the first.

    Compilers choose among equal ones as they like: what a proof says of gradients, it says where inputs differ.
    """
    places = _pooled(equation, equation.invars[1], equation.outvars[0])
    chosen = _first_extremes(rules, equation, x, places)
    source = _filled(rules.field, _flat(rules.exact(tangents)[0], rules.rank), 0.0)
    return _result(rules, equation, _elements(rules, source, chosen))


def _first_extremes(rules: MeshRules, equation: Any, x: Operand, places: np.ndarray) -> np.ndarray:
    """int64 [..., windows]: the place of the largest, or smallest, element of each, of equal ones the first.

    Noted as a comparison of all elements of a window with that one, as the gradient of `reduce_max` makes it.
    """
    largest = equation.params["select_prim"].name == "ge"
    filling = _NEUTRAL["max" if largest else "min"]
    keys = _keys(rules, x, places, filling)
    at, best = np.zeros(keys.shape[:-1], int), keys[..., 0]
    for j in range(1, keys.shape[-1]):
        key = keys[..., j]
        stays = best >= key if largest else best <= key
        at, best = np.where(stays, at, j), np.where(stays, best, key)
    chosen = _chosen(places, at)
    if isinstance(x, Exact) and rules.field.coverage is not None:
        source = _filled(rules.field, _flat(rules.field.plain(x), rules.rank), filling)
        every = source.moved(lambda part: np.take(part, places, -1))
        extreme = _elements(rules, source, chosen[..., None])
        rules.decide(equation, at[..., None] == np.arange(places.shape[1]), every, extreme)
    return chosen


# Sums of exps


def cumulate_logs(rules: MeshRules, equation: Any, x: Exact) -> Exact:
    """cumlogsumexp: logarithms of sums of exps, by windows that end, or begin, at each element."""
    field, dim = rules.field, 1 + rules.rank + equation.params["axis"]
    size = x.shape[dim - 1]
    padding = (0, size) if equation.params["reverse"] else (size - 1, 0)
    powers = field.exp(x).moved(lambda part: np.moveaxis(part, dim, -1))
    reads = _read(field, powers, places_of([WindowDim(size, size, size, padding=padding)]), 0.0)
    logs = field.log(field.total(reads, [len(x.shape)]))
    return logs.moved(lambda part: np.moveaxis(part, -1, dim))
