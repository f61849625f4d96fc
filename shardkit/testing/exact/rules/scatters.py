"""scatter and scatter-add: updates that are written, or added, to elements of an array at integer indices.

A scatter is the transpose of a gather: an update is written to the place from which a gather with the same indices
reads. So jax's own gather, applied to an array that has its own place at each element, tells where each update goes.

Worked example: `x.at[jnp.array([2, 0, 5])].add(u)` with x of three elements. The gather reads [2, 0, 3] from the places
[0, 1, 2]: 3 is the fill value, because index 5 is out of bounds. u_0 is added to x_2, u_1 to x_0, and u_2 to one more
element after x, which is dropped.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit.testing.exact.numbers.errors import UnsupportedError
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.logarithms import to_number
from shardkit.testing.exact.numbers.values import (
    INFINITE,
    NEVER_ZERO,
    NOT_A_NUMBER,
    OUTSIDE,
    POISON,
    SIGN,
    TRULY,
    USED,
    Exact,
)
from shardkit.testing.exact.rules.operands import Known, Operand, require_known
from shardkit.testing.exact.rules.scope import Scope


class _Writing(NamedTuple):
    """Where updates go, on each device.

    Attributes:
        lead: the sizes of the mesh dims.
        shape: the shape of the operand on one device.
        places: int [devices, updates], places in the flat operand; its size for updates that are out of bounds.
    """

    lead: tuple[int, ...]
    shape: tuple[int, ...]
    places: np.ndarray

    def write(self, old: np.ndarray, new: np.ndarray, adds: bool) -> np.ndarray:
        """A part [components, ...] of an operand, with the same part of the updates written into it, or added."""
        old = self._flatten(old)
        new = self._flatten(new)
        # One more element after the operand gets the updates that are out of bounds, and is dropped.
        outside = np.zeros((*old.shape[:2], 1), old.dtype)
        result = np.concatenate([old, outside], -1)
        devices = np.arange(len(self.places))[:, None]
        if adds:
            # Places may repeat: add.at adds all of them, where an assignment would keep one.
            np.add.at(result, (slice(None), devices, self.places), new)  # type: ignore[arg-type]
        else:
            result[:, devices, self.places] = new
        result = result[..., :-1]
        return result.reshape(len(old), *self.lead, *self.shape)

    def _flatten(self, part: np.ndarray) -> np.ndarray:
        """[components, devices, elements], with a row for each device, also where all have the same."""
        shape = part.shape[1 + len(self.lead) :]
        part = np.broadcast_to(part, (len(part), *self.lead, *shape))
        return part.reshape(len(part), len(self.places), -1)


def scatter(scope: Scope, equation: Any, operand: Operand, indices: Known, updates: Operand) -> Exact:
    """scatter and scatter-add."""
    adds = equation.primitive.name in ("scatter-add", "scatter_add")
    # `x.at[0].apply(jnp.sin)` is a scatter too, of a function of the old element in place of an update.
    if not adds and not _writes_its_update(equation.params["update_jaxpr"]):
        raise UnsupportedError("scatter of a function, as `.at[...].apply`")
    indices = require_known(indices, equation.primitive.name)
    field = scope.field
    old = to_number(field, scope.lift_one(operand))
    new = to_number(field, scope.lift_one(updates))
    writing = _find_writing(scope, equation, old, indices, new)
    number = writing.write(old.number, new.number, adds)
    real = writing.write(old.real, new.real, adds)
    if adds:
        number = number % field.residues.primes_of(number)
        facts = _add_facts(field, writing, old, new)
    else:  # an element that is written has the facts of its update
        facts = writing.write(old.facts, new.facts, False)
    degree = old.degree.plus(new.degree)
    return field.settle(Exact(number, facts, real, degree=degree))


def _writes_its_update(body: Any) -> bool:
    """Whether a scatter writes its updates as they are: its body, of old and new elements, returns the new ones."""
    if body is None:  # jax leaves it out
        return True
    jaxpr = getattr(body, "jaxpr", body)
    return not jaxpr.eqns and jaxpr.outvars[0] is jaxpr.invars[1]


def _find_writing(scope: Scope, equation: Any, operand: Exact, indices: Known, updates: Exact) -> _Writing:
    """Finds where the updates go: jax gathers the places of all elements, with the dimension numbers of the scatter.

    Worked example: `x.at[jnp.array([3, 1])].set(rows)` of x[5, 3] and rows[2, 3]. The places of the elements of x are
    [[0, 1, 2], [3, 4, 5], ...]. The gather of rows 3 and 1 is [[9, 10, 11], [3, 4, 5]]: the first row of updates goes
    to the places 9, 10 and 11 of the flat x.
    """
    rank = scope.rank
    numbers = equation.params["dimension_numbers"]
    shape = operand.shape[rank:]
    size = math.prod(shape)
    window_sizes = _find_window_sizes(numbers, shape, equation.invars[2].aval.shape)
    gather_numbers = lax.GatherDimensionNumbers(
        offset_dims=numbers.update_window_dims,
        collapsed_slice_dims=numbers.inserted_window_dims,
        start_index_map=numbers.scatter_dims_to_operand_dims,
        operand_batching_dims=numbers.operand_batching_dims,
        start_indices_batching_dims=numbers.scatter_indices_batching_dims,
    )
    places_of_elements = jnp.arange(size, dtype=jnp.int32).reshape(shape)
    mode = "fill"  # an update that is out of bounds gets the place `size`, which is dropped
    if equation.params["mode"] == lax.GatherScatterMode.CLIP:
        mode = "clip"

    def read_places(indices_of_device: Any) -> Any:
        starts = jnp.asarray(indices_of_device)
        return lax.gather(places_of_elements, starts, gather_numbers, window_sizes, mode=mode, fill_value=size)

    # If operand, indices or updates differ between devices, there is a row of places for each device.
    lead = np.broadcast_shapes(operand.shape[:rank], indices.shape[:rank], updates.shape[:rank])
    devices = math.prod(lead)
    index_shape = indices.shape[rank:]
    indices = np.broadcast_to(indices, lead + index_shape)
    indices = indices.reshape(devices, *index_shape)
    places = np.asarray(jax.vmap(read_places)(indices))
    return _Writing(lead, shape, places.reshape(devices, -1))


def _find_window_sizes(numbers: Any, shape: tuple[int, ...], update_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The size of one update's window along each dim of the operand.

    Worked example: `x.at[i].set(row)` of x[5, 3]. Dim 0 is indexed, and the update does not have it: an inserted window
    dim, of size 1. Dim 1 is dim 0 of the row. So the window is (1, 3).
    """
    missing_dims = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window_dims = [dim for dim in range(len(shape)) if dim not in missing_dims]
    sizes = [1] * len(shape)
    for dim, update_dim in zip(window_dims, numbers.update_window_dims, strict=True):
        sizes[dim] = update_shape[update_dim]
    return tuple(sizes)


def _add_facts(field: Field, writing: _Writing, old: Exact, new: Exact) -> np.ndarray:
    """The facts of the sums of a scatter-add."""
    facts = writing.write(old.facts, new.facts, False)
    # Nothing here tells which updates reach an element: a sign is known only if all numbers have it.
    facts[SIGN] = (old.sign == 1).all() and (new.sign == 1).all()
    facts[NEVER_ZERO] = facts[SIGN] * old.never_zero.all()
    facts[USED] = max(old.used.max(initial=0), new.used.max(initial=0))
    infinite = writing.write(_as_part(old.infinite), _as_part(new.infinite), True)
    facts[INFINITE] = np.sign(infinite[0])
    if not old.special and not new.special:
        return facts

    def has_term(marked_old: np.ndarray, marked_new: np.ndarray) -> np.ndarray:
        """Whether a sum has at least one marked term: counts how many marks go to each element."""
        counts = writing.write(_as_part(marked_old), _as_part(marked_new), True)
        return np.asarray(counts[0] > 0)

    # A sum is infinite if one of its terms is, and NaN if its terms are infinite with both signs.
    plus = has_term(old.infinite == TRULY, new.infinite == TRULY)
    minus = has_term(old.infinite == -TRULY, new.infinite == -TRULY)
    facts[INFINITE] = np.where(plus, TRULY, 0) + np.where(minus, -TRULY, 0)
    poison = np.where(plus & minus, field.undefined, 0)
    for code in (NOT_A_NUMBER, OUTSIDE):
        has_code = has_term(old.poison == code, new.poison == code)
        poison = np.maximum(poison, np.where(has_code, code, 0))
    facts[POISON] = poison
    return facts


def _as_part(x: np.ndarray) -> np.ndarray:
    """int64 [1, ...]: a fact [...] as a part of one component, in numbers wide enough for sums."""
    return x[None].astype(np.int64)
