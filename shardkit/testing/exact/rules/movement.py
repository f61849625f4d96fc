"""Primitives that only move elements, as a gather or a pad.

Such a primitive needs no arithmetic. jax applies it to integers: to an array of the same shape that has at each element
the place of that element. The result says for each of its elements from which place it comes, and the numbers of the
field are taken from these places.

Worked example, a gather out of bounds. `x[jnp.array([2, 5])]` reads x of three elements [a, b, c], in the mode "fill":

    places    [0, 1, 2]                    of x in the flat source
    source    [a, b, c, NaN]               x and one element more, which is read out of bounds
    gather    of places at [2, 5] is [2, 3]  by jax, with 3 as fill_value
    result    [c, NaN]                     the elements of the source at these places

The NaN is poison (see `values.py`): x + NaN is poison, and it equals no number. So a program that reads c twice is not
equal to this one, and a program that reads out of bounds at the same place is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardkit.testing.exact.numbers.assembly import join_parts, take_elements
from shardkit.testing.exact.rules.binding import bind_primitive
from shardkit.testing.exact.rules.operands import Known, Operand, is_key, require_known
from shardkit.testing.exact.rules.scope import Scope

# Movements of one operand, whose dims begin after `lead` other dims: of a known array after those of the mesh, and of a
# part of an `Exact` after the components and those of the mesh. numpy has these movements itself: they need no places.


def _reshape(part: np.ndarray, lead: int, equation: Any) -> np.ndarray:
    if equation.primitive.name == "reshape":
        order = equation.params.get("dimensions")
        if order is not None:
            part = _permute(part, lead, order)
    return part.reshape((*part.shape[:lead], *equation.outvars[0].aval.shape))


def _transpose(part: np.ndarray, lead: int, equation: Any) -> np.ndarray:
    return _permute(part, lead, equation.params["permutation"])


def _permute(part: np.ndarray, lead: int, order: Sequence[int]) -> np.ndarray:
    dims = [lead + dim for dim in order]
    return part.transpose(*range(lead), *dims)


def _broadcast(part: np.ndarray, lead: int, equation: Any) -> np.ndarray:
    shape = equation.outvars[0].aval.shape
    front = part.shape[:lead]
    # A row [3] along dim 1 of a result [2, 3] is [1, 3] first.
    sizes = [1] * len(shape)
    for dim, size in zip(equation.params["broadcast_dimensions"], part.shape[lead:], strict=True):
        sizes[dim] = size
    part = part.reshape((*front, *sizes))
    return np.broadcast_to(part, (*front, *shape))


def _slice(part: np.ndarray, lead: int, equation: Any) -> np.ndarray:
    starts = equation.params["start_indices"]
    limits = equation.params["limit_indices"]
    strides = equation.params["strides"] or (1,) * len(starts)
    slices = [slice(None)] * lead
    for start, limit, stride in zip(starts, limits, strides, strict=True):
        slices.append(slice(start, limit, stride))
    return part[tuple(slices)]


def _reverse(part: np.ndarray, lead: int, equation: Any) -> np.ndarray:
    dims = [lead + dim for dim in equation.params["dimensions"]]
    return np.flip(part, tuple(dims))


MOVES_OF_ONE: dict[str, Callable[[np.ndarray, int, Any], np.ndarray]] = {
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "rev": _reverse,
}


# Movements by the places of elements, also of several operands


# Which operands of a primitive are moved, as a slice of its operands; the others are indices.
MOVED_OPERANDS: dict[str, slice] = {
    "gather": slice(0, 1),
    "dynamic_slice": slice(0, 1),
    "split": slice(0, 1),
    "pad": slice(None),
    "tile": slice(None),
    "dynamic_update_slice": slice(0, 2),
    "select_n": slice(1, None),
}


def _list_moved(name: str, operands: Sequence[Any]) -> range:
    """The numbers of the operands that are moved."""
    return range(len(operands))[MOVED_OPERANDS[name]]


def move_known(equation: Any, operands: Sequence[Known], rank: int) -> list[Known]:
    """The results of a primitive that moves elements of known arrays."""
    moved = _list_moved(equation.primitive.name, operands)
    sources = [operands[number] for number in moved]
    # One more element, [*ones], which is read out of bounds.
    ones = (1,) * rank
    sources.append(np.full(ones, _find_fill_value(equation), sources[0].dtype))
    lead = _find_lead(sources, rank)
    parts = [x[None] for x in sources]  # a known array is a part of one component
    source = _flatten_parts(parts, lead)
    results = []
    for places in _find_places(equation, operands, moved, rank):
        [result] = take_elements(source, places, rank)
        results.append(result)
    return results


def move_exact(scope: Scope, equation: Any, operands: Sequence[Operand]) -> list[Operand]:
    """The results of a primitive that moves elements of the field."""
    name = equation.primitive.name
    rank = scope.rank
    moved = _list_moved(name, operands)
    for number, x in enumerate(operands):
        if number not in moved:
            require_known(x, name)
    places_of_results = _find_places(equation, operands, moved, rank)
    sources = [scope.lift_one(operands[number]) for number in moved]
    # NaN as a filling does no harm: any power of NaN is NaN.
    fill_value = _find_fill_value(equation)
    is_power = bool(np.isnan(fill_value)) and all(x.is_power for x in sources)
    # One more element, [*ones], which is read out of bounds.
    ones = (1,) * rank
    sources.append(scope.field.lift(np.full(ones, fill_value)))
    lead = _find_lead(sources, rank)
    source = join_parts(sources, partial(_flatten_parts, lead=lead), is_power)
    results = []
    for places in places_of_results:
        results.append(source.move(partial(take_elements, places=places, rank=rank)))
    return results


def _find_lead(sources: Sequence[Operand], rank: int) -> tuple[int, ...]:
    """The sizes of the mesh dims of several arrays together: 1 where none of them differs between devices."""
    shapes = [x.shape[:rank] for x in sources]
    return np.broadcast_shapes(*shapes)


def _flatten_parts(parts: Sequence[np.ndarray], lead: tuple[int, ...]) -> np.ndarray:
    """[components, *lead, elements of all]: the parts of several arrays in a row, for a mesh of the shape `lead`."""
    rank = len(lead)
    rows = []
    for part in parts:
        components = len(part)
        if part.shape[1 : 1 + rank] != lead:
            part = np.broadcast_to(part, (components, *lead, *part.shape[1 + rank :]))
        rows.append(part.reshape(components, *lead, -1))
    return np.concatenate(rows, -1)


def _find_fill_value(equation: Any) -> Any:
    """The value that a gather reads out of bounds in jax: `fill_value`, or NaN for floats, an extreme for integers."""
    fill_value = equation.params.get("fill_value")
    result = equation.outvars[0].aval
    if fill_value is not None or is_key(result):
        return fill_value or 0
    if not jnp.issubdtype(result.dtype, jnp.integer):
        return np.nan  # True as a boolean
    info = jnp.iinfo(result.dtype)
    return info.min or info.max  # the largest one of unsigned integers


def _find_places(equation: Any, operands: Sequence[Any], moved: Sequence[int], rank: int) -> list[np.ndarray]:
    """For each element of a primitive's results, the place of its source: all moved operands are flat, in a row.

    The place after the last element stands for a read out of bounds.
    """
    # Operands that are indices stay as they are; moved operands become arrays of places. Worked example: a pad of x [3]
    # with one filling. The places of x are [0, 1, 2], the place of the filling is 3.
    places = list(operands)
    ones = (1,) * rank
    total = 0
    for number in moved:
        shape = operands[number].shape[rank:]
        end = total + math.prod(shape)
        places_of_operand = np.arange(total, end, dtype=np.int32)
        places[number] = places_of_operand.reshape(ones + shape)
        total = end
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
        changed["fill_value"] = total
    return bind_primitive(equation, places, rank, changed, as_typed=False)


def _find_padded_places(x: np.ndarray, filling: np.ndarray, config: Any, rank: int) -> np.ndarray:
    """The places of a pad, which fills before, after and between the elements of each dim; below 0 it cuts elements.

    Worked example: [a, b, c] with low -1, high 2 and one between is [_, b, _, c, _, _]. Spread by the step 2 the
    elements stand at -1, 1 and 3: a is cut off, so b and c go to 1 and 3.
    """
    sources = [slice(None)] * rank  # the elements that are kept
    targets = [slice(None)] * rank  # where these stand in the result
    shape = list(x.shape[:rank])
    for n, (low, high, between) in zip(x.shape[rank:], config, strict=True):
        # n elements with `between` fillings after each but the last.
        size = low + high + max(n + (n - 1) * between, 0)
        step = between + 1
        # Element i goes to low + i step, and is kept if that is one of 0 to size - 1.
        first = 0
        if low < 0:
            first = -(low // step)
        end = min(n, (size - 1 - low) // step + 1)
        count = max(end - first, 0)
        start = low + first * step
        sources.append(slice(first, first + count))
        targets.append(slice(start, start + count * step, step))
        shape.append(size)
    result = np.full(shape, filling.reshape(-1)[0])
    result[tuple(targets)] = x[tuple(sources)]
    return result


def _find_sliced_places(places: Sequence[np.ndarray], sizes: Sequence[int], rank: int) -> np.ndarray:
    """The places of a dynamic_slice: on each device the window that begins at its start indices."""
    source, *starts = places
    source = source.reshape(source.shape[rank:])
    lead, windows = _list_windows(source.shape, starts, sizes, rank)
    rows = [source[window] for window in windows]
    return np.stack(rows).reshape(*lead, *sizes)


def _find_updated_places(places: Sequence[np.ndarray], rank: int) -> np.ndarray:
    """The places of a dynamic_update_slice: of the update inside the window, of the operand elsewhere."""
    source, update, *starts = places
    source = source.reshape(source.shape[rank:])
    update = update.reshape(update.shape[rank:])
    lead, windows = _list_windows(source.shape, starts, update.shape, rank)
    rows = []
    for window in windows:
        row = source.copy()
        row[window] = update
        rows.append(row)
    return np.stack(rows).reshape(*lead, *source.shape)


def _list_windows(
    shape: Sequence[int], starts: Sequence[np.ndarray], sizes: Sequence[int], rank: int
) -> tuple[tuple[int, ...], list[tuple[slice, ...]]]:
    """The dims of the mesh, and the window of each device, moved so that it lies within the array, as jax does.

    Worked example: a window of 3 in an array of 4 that starts at 2 on one device and at 0 on the other: the slices are
    1 to 4, because 2 to 5 would end outside, and 0 to 3.
    """
    lead: tuple[int, ...] = (1,) * rank
    for start in starts:
        lead = np.broadcast_shapes(lead, start.shape)
    starts_on_devices = [np.broadcast_to(start, lead) for start in starts]
    windows = []
    for device in np.ndindex(*lead):
        window = []
        for start, size, n in zip(starts_on_devices, sizes, shape, strict=True):
            first = min(max(int(start[device]), 0), n - size)
            window.append(slice(first, first + size))
        windows.append(tuple(window))
    return lead, windows
