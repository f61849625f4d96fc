"""The operands and results of rules: numbers of the field, or arrays that are known.

Worked example: `jnp.where(mask, x, 0.0)` of an input x and a closed-over mask. x is an Exact, and so is the result; the
mask and 0.0 are known arrays. `x > 0` of the same x is known too, but marked as one that follows from floats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardkit.testing.exact.numbers.assembly import join_arrays, join_exact
from shardkit.testing.exact.numbers.errors import UnsupportedError
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.values import Exact

# Arrays of integers and booleans, of floats that follow from no input, and of keys, a word each.
Known = np.ndarray
Operand = Any  # Exact or Known
# Takes an array and the number of dims that it leaves as they are, and moves elements along the others.
Move = Callable[[Any, int], Any]


def require_known(x: Operand, what: str) -> Known:
    """An operand that says which elements or which branch; refuses numbers of the field."""
    if isinstance(x, Exact):
        raise UnsupportedError(f"{what} that a float decides")
    return x


def lift_operand(field: Field, x: Operand) -> Exact:
    """An operand as numbers of the field."""
    if isinstance(x, Exact):
        return x
    return field.lift(x)


def move_operand(x: Operand, lead: int, move: Move) -> Operand:
    """An operand with its elements at other places: `move(part, lead)` acts on the dims after the first `lead`."""
    if isinstance(x, Exact):
        return x.move(lambda part: move(part, 1 + lead))
    return move(x, lead)


def join_operands(field: Field, operands: Sequence[Operand], dim: int, new: bool = False) -> Operand:
    """Operands stacked along a `new` dim, or concatenated along one of theirs."""
    if not any(isinstance(x, Exact) for x in operands):
        return join_arrays(operands, dim, new)
    arrays = [lift_operand(field, x) for x in operands]
    return join_exact(arrays, dim, new)


def is_key(x: Any) -> bool:
    """Whether an array of jax, or the type of a value, is of keys."""
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.extended))


def known_dtype(dtype: Any) -> Any:
    """The dtype of a known array: floats have at least 32 bits, because rounding is not modelled."""
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        return jnp.float32
    return dtype
