"""Primitives that only move elements: what happens to a float is whatever happens to its place.

Such a primitive needs no arithmetic. It is applied, by jax, to an array of integers of the same shape, the places of
the elements; the result says where each element comes from, and so do the parts of an `Exact` move.

Worked example, a gather out of bounds. `x[jnp.array([2, 5])]` reads x of three elements [a, b, c], in the mode "fill":

    places    [0, 1, 2]                    of x in the flat source
    source    [a, b, c, NaN]               one more element behind it, for what is read out of bounds
    gather    of places at [2, 5] is [2, 3]  by jax, with 3 as fill_value
    result    [c, NaN]                     the elements of the source at these places

The NaN is poison (see `values.py`): x + NaN is poison, and it equals no number. So a reference that reads c twice is
refuted, and one that reads out of bounds too is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardkit.testing.exact.numbers.assembly import take_elements
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.rules.binding import bind_primitive
from shardkit.testing.exact.rules.operands import Known, Operand, is_key, require_known
from shardkit.testing.exact.rules.scope import Scope

# Of one operand, behind `lead` other dims


def _reshape(part: np.ndarray, lead: int, equation: Any) -> np.ndarray:
    if equation.primitive.name == "reshape":
        order = equation.params.get("dimensions")
        if order is not None:
            part = part.transpose(*range(lead), *(lead + dim for dim in order))
    return part.reshape((*part.shape[:lead], *equation.outvars[0].aval.shape))


def _transpose(part: np.ndarray, lead: int, equation: Any) -> np.ndarray:
    return part.transpose(*range(lead), *(lead + dim for dim in equation.params["permutation"]))


def _broadcast(part: np.ndarray, lead: int, equation: Any) -> np.ndarray:
    shape = equation.outvars[0].aval.shape
    sizes = [1] * len(shape)
    for dim, size in zip(equation.params["broadcast_dimensions"], part.shape[lead:], strict=True):
        sizes[dim] = size
    part = part.reshape((*part.shape[:lead], *sizes))
    return np.broadcast_to(part, (*part.shape[:lead], *shape))


def _slice(part: np.ndarray, lead: int, equation: Any) -> np.ndarray:
    params = equation.params
    strides = params["strides"] or (1,) * (part.ndim - lead)
    slices = [slice(None)] * lead
    for start, limit, stride in zip(params["start_indices"], params["limit_indices"], strides, strict=True):
        slices.append(slice(start, limit, stride))
    return part[tuple(slices)]


def _reverse(part: np.ndarray, lead: int, equation: Any) -> np.ndarray:
    return np.flip(part, tuple(lead + dim for dim in equation.params["dimensions"]))


MOVES_OF_ONE: dict[str, Callable[[np.ndarray, int, Any], np.ndarray]] = {
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "rev": _reverse,
}


# Of several operands, by places


def _all(n: int) -> range:
    return range(n)


def _first(n: int) -> range:
    return range(1)


def _first_two(n: int) -> range:
    return range(2)


def _all_but_first(n: int) -> range:
    return range(1, n)


# Of n operands of a primitive those that are moved; the others are indices.
MOVED_OPERANDS: dict[str, Callable[[int], range]] = {
    "gather": _first,
    "dynamic_slice": _first,
    "split": _first,
    "pad": _all,
    "tile": _all,
    "dynamic_update_slice": _first_two,
    "select_n": _all_but_first,
}


def move_known(equation: Any, operands: Sequence[Known], rank: int) -> list[Known]:
    """The results of a primitive that moves elements of known arrays."""
    # The operands that are moved in a row, [*lead, elements of all], with one element more for what is out of bounds.
    data = MOVED_OPERANDS[equation.primitive.name](len(operands))
    lead = np.broadcast_shapes(*(operands[i].shape[:rank] for i in data))
    rows = []
    for i in data:
        shape = operands[i].shape[rank:]
        rows.append(np.broadcast_to(operands[i], lead + shape).reshape(*lead, -1))
    # NaN in an array of booleans is True, and in one of integers it is replaced by `_fill_value`.
    rows.append(np.full((*lead, 1), _fill_value(equation), rows[0].dtype))
    source = np.concatenate(rows, -1)[None]
    return [take_elements(source, places, rank)[0] for places in _find_places(equation, operands, data, rank)]


def move_exact(scope: Scope, equation: Any, operands: Sequence[Operand]) -> list[Operand]:
    """The results of a primitive that moves elements of the field."""
    name = equation.primitive.name
    data = MOVED_OPERANDS[name](len(operands))
    for i, x in enumerate(operands):
        if i not in data:
            require_known(x, name)
    places_of_results = _find_places(equation, operands, data, scope.rank)
    sources = [scope.lift_one(operands[i]) for i in data]
    # One element more, [*ones], which is read out of bounds.
    sources.append(scope.field.lift(np.full((1,) * scope.rank, _fill_value(equation))))
    lead = np.broadcast_shapes(*(x.shape[: scope.rank] for x in sources))
    degree = sources[0].degree.plus(*(x.degree for x in sources))

    def flatten(parts: Sequence[np.ndarray]) -> np.ndarray:
        """[components, *lead, elements of all sources]."""
        rows = []
        for part in parts:
            full = np.broadcast_to(part, (len(part), *lead, *part.shape[1 + scope.rank :]))
            rows.append(full.reshape(len(part), *lead, -1))
        return np.concatenate(rows, -1)

    number = flatten([x.number for x in sources])
    facts = flatten([x.facts for x in sources])
    real = flatten([x.real for x in sources])
    # Beside a logarithm all numbers have the factor 1.
    factor = None
    if any(x.factor is not None for x in sources):
        factor = flatten([x.factor_or_ones for x in sources])
    roots = None
    if any(x.roots is not None for x in sources):
        roots = flatten([x.roots_or_zeros for x in sources])
    source = Exact(number, facts, real, factor, degree, roots)
    return [source.move(partial(take_elements, places=places, rank=scope.rank)) for places in places_of_results]


def _fill_value(equation: Any) -> Any:
    """What a gather reads out of bounds: what it is told to, NaN for floats, and an extreme for integers, as in jax."""
    fill_value = equation.params.get("fill_value")
    result = equation.outvars[0].aval
    if fill_value is not None or is_key(result):
        return fill_value or 0
    if not jnp.issubdtype(result.dtype, jnp.integer):
        return np.nan  # True as a boolean
    return jnp.iinfo(result.dtype).min or jnp.iinfo(result.dtype).max


def _find_places(equation: Any, operands: Sequence[Any], data: Sequence[int], rank: int) -> list[np.ndarray]:
    """Where a primitive takes each element of its results from: its place in all operands that are moved, in a row.

    The place behind the last element stands for what is read out of bounds.
    """
    # A pad of x [3] with one filling: places of x are [0, 1, 2], that of the filling is 3.
    start: int = 0
    # Operands that are indices stay as they are; those that are moved become places.
    places = list(operands)
    for number in data:
        shape = operands[number].shape[rank:]
        size = math.prod(shape)
        places[number] = (start + np.arange(size, dtype=np.int32)).reshape((1,) * rank + shape)
        start += size
    name = equation.primitive.name
    if name == "split":
        ends = np.cumsum(equation.params["sizes"])[:-1]
        return list(np.split(places[0], ends, rank + equation.params["axis"]))
    if name == "pad":
        return [_find_padded_places(places[0], places[1], equation.params["padding_config"], rank)]
    if name == "dynamic_slice":
        return [_find_sliced_places(places, equation.params["slice_sizes"], rank)]
    if name == "dynamic_update_slice":
        return [_find_updated_places(places, rank)]
    # A gather or tile of places, by jax itself: there is no second implementation of its rules to be wrong.
    changed = {}
    if name == "gather":
        changed["fill_value"] = start
    return bind_primitive(equation, places, rank, changed, as_typed=False)


def _find_padded_places(x: np.ndarray, filling: np.ndarray, config: Any, rank: int) -> np.ndarray:
    """The places of a pad: low, high and between the elements of each dim; less than none cuts elements off.

    Worked example: [a, b, c] with low -1, high 2 and one between is [_, b, _, c, _, _]. Spread by the step 2 the
    elements stand at -1, 1 and 3: a is cut off, so b and c go to 1 and 3.
    """
    into = [slice(None)] * rank
    taken = [slice(None)] * rank
    shape = list(x.shape[:rank])
    for n, (low, high, between) in zip(x.shape[rank:], config, strict=True):
        # n elements with `between` zeros after each but the last.
        size = low + high + max(n + (n - 1) * between, 0)
        step = between + 1
        # The first element at 0 or behind: the smallest i with low + i step >= 0.
        first = -(low // step) if low < 0 else 0  # of the elements that are kept
        last = min(n, (size - 1 - low) // step + 1)
        count = max(last - first, 0)
        start = low + first * step
        taken.append(slice(first, first + count))
        into.append(slice(start, start + count * step, step))
        shape.append(size)
    result = np.full(shape, filling.reshape(-1)[0])
    result[tuple(into)] = x[tuple(taken)]
    return result


def _find_sliced_places(places: Sequence[np.ndarray], sizes: Sequence[int], rank: int) -> np.ndarray:
    """The places of a dynamic_slice: on each device the window that begins at its start indices."""
    source = places[0].reshape(places[0].shape[rank:])
    lead, windows = _list_windows(source.shape, places[1:], sizes, rank)
    rows = [source[window] for window in windows]
    return np.stack(rows).reshape(*lead, *sizes)


def _find_updated_places(places: Sequence[np.ndarray], rank: int) -> np.ndarray:
    """The places of a dynamic_update_slice: of the operand, but in the window those of the update."""
    source = places[0].reshape(places[0].shape[rank:])
    sizes = places[1].shape[rank:]
    lead, windows = _list_windows(source.shape, places[2:], sizes, rank)
    rows = []
    for window in windows:
        row = source.copy()
        row[window] = places[1].reshape(sizes)
        rows.append(row)
    return np.stack(rows).reshape(*lead, *source.shape)


def _list_windows(
    shape: Sequence[int], starts: Sequence[np.ndarray], sizes: Sequence[int], rank: int
) -> tuple[tuple[int, ...], list[tuple[slice, ...]]]:
    """The dims of the devices, and the window of each, moved so that it lies within the array, as jax does."""
    lead = np.broadcast_shapes((1,) * rank, *(start.shape for start in starts))
    starts = [np.broadcast_to(start, lead) for start in starts]
    # Start indices may differ between devices, and so may windows.
    windows = []
    for device in np.ndindex(*lead):
        window = []
        for start, size, n in zip(starts, sizes, shape, strict=True):
            first = min(max(int(start[device]), 0), n - size)
            window.append(slice(first, first + size))
        windows.append(tuple(window))
    return lead, windows
