"""Casts, and roundings to whole numbers.

Rounding to another float is not modelled: a cast from float32 to bfloat16 changes nothing. Rounding to an integer is,
but the integer does not follow from residues, which have no size. In a draw it is the integer of the real value, a
constant of this draw; which integer it is depends on the input as the outcome of a comparison does. An order has no
real values: there it is an uninterpreted function.

Worked example: `floor(x)` where x was drawn as 3.7 is the constant 3. Both programs have the same 3, if they floor the
same number; if one floors x and the other x + 1e-9, a draw shows no difference, but an order does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit.testing.exact.crossings import JUMP_TO
from shardkit.testing.exact.numbers.arithmetic import negate
from shardkit.testing.exact.numbers.assembly import where
from shardkit.testing.exact.numbers.functions import apply_function
from shardkit.testing.exact.numbers.inputs import choose_compared_integers
from shardkit.testing.exact.numbers.logarithms import to_number
from shardkit.testing.exact.numbers.orders import find_equal, find_keys
from shardkit.testing.exact.numbers.same_keys import recall_keys
from shardkit.testing.exact.numbers.values import INPUT, Exact
from shardkit.testing.exact.rules.operands import Operand
from shardkit.testing.exact.rules.scope import Scope

# Distances from a jump, relative to the size of a value. Of a value that is nearer than this the field is asked whether
# it is at the jump.
_NEAR = 1e-6
# If it is not, and nearer than this, it may be on either side of the jump: float64 does not tell.
_ROUNDING = 1e-12
_LARGE = 2**31 - 1  # a bound of integers that no count or index reaches
_ROUND: dict[str, Callable[..., Any]] = {"floor": np.floor, "ceil": np.ceil, "round": np.rint}


def convert(scope: Scope, equation: Any, x: Exact) -> Operand:
    """convert_element_type: a cast to integers rounds real values, one to booleans is a comparison."""
    field = scope.field
    new_dtype = equation.params["new_dtype"]
    if np.dtype(new_dtype).kind == "b":
        zero = scope.constant(0, like=x)
        return scope.decide(equation, find_keys(field, x) != 0, x, zero)
    # A cast among floats, or of integers that are in the field (as bits), keeps the numbers.
    is_float = jnp.issubdtype(equation.invars[0].aval.dtype, jnp.floating)
    if not is_float or not jnp.issubdtype(new_dtype, jnp.integer):
        return x
    x = to_number(field, x)
    if x.degree.total and field.settings.order is not None:
        return _truncate_in_an_order(scope, x)
    # Known from here on, and marked: which integer it is follows from the draw.
    integers = _round_real(scope, equation, x, "to an integer", np.trunc)
    return field.marks.add(_saturate(scope, equation, x, integers).astype(new_dtype))


def _saturate(scope: Scope, equation: Any, x: Exact, integers: np.ndarray) -> np.ndarray:
    """Integers within the range of a dtype: of uint8, -3 becomes 0 and 300 becomes 255, as XLA casts floats.

    Small bounds are comparisons. That a number is beyond those of int32 is overflow, of which a proof says nothing.
    """
    info = jnp.iinfo(equation.params["new_dtype"])
    low = int(info.min)
    high = int(info.max)
    if low > -_LARGE:
        bound = scope.constant(low, like=x)
        is_below = scope.decide(equation, integers < low, x, bound, " from below")
        integers = np.where(is_below, low, integers)
    if high < _LARGE:
        bound = scope.constant(high, like=x)
        is_above = scope.decide(equation, integers > high, x, bound, " from above")
        integers = np.where(is_above, high, integers)
    return np.clip(integers, low, high)


def round_to_whole(scope: Scope, equation: Any, x: Exact) -> Exact:
    """floor, ceil and round."""
    field = scope.field
    name = equation.primitive.name
    x = to_number(field, x)
    if x.degree.total and field.settings.order is not None:
        return _round_in_an_order(scope, name, x)
    function = _ROUND[name]
    if equation.params.get("rounding_method") == lax.RoundingMethod.AWAY_FROM_ZERO:
        function = _round_away
    integers = _round_real(scope, equation, x, name, function)
    # In another draw it is another constant, perhaps of another sign: it counts as an input.
    constant = field.lift(integers).as_unknown(INPUT)
    # NaN and infinity stay as they are.
    return where((x.poison > 0) | x.is_truly_infinite, x, constant)


def _round_away(x: np.ndarray) -> np.ndarray:
    """Rounded, halves away from zero."""
    return np.trunc(x + np.copysign(0.5, x))


def _round_real(scope: Scope, equation: Any, x: Exact, name: str, function: Callable[..., Any]) -> np.ndarray:
    """The integers to which real values are rounded; whether a value next to a jump is at the jump, the field says.

    Worked example: floor of (x / 3) * 3, where x was drawn as 3. The real value may be 2.9999999, next to the jump at
    3. The number of the field is 3, so that the integer is 3; of another number it is 2.
    """
    field = scope.field
    if x.degree.total:
        field.notes.uninterpreted.add(name)
    find_keys(field, x)  # refuses values beyond floats
    real = recall_keys(field, x.number, x.real[0])
    real = np.where(np.isfinite(real), real, 0.0)
    # floor, ceil and trunc jump at integers, round halfway between them.
    jump = np.rint(real)
    if name == "round":
        jump = np.floor(real) + 0.5
    number_of_jump = field.lift(jump)
    size = np.maximum(np.abs(real), 1)
    distance = np.abs(real - jump)
    is_at_jump = (distance < _NEAR * size) & find_equal(field, x, number_of_jump)
    integers = function(np.where(is_at_jump, jump, real))
    if field.coverage is not None:
        line = scope.line(equation)
        field.coverage.note_jump(field, equation, x, number_of_jump)
        if field.coverage.differences is not None:
            # Integers that are compared with 3 tell more where x jumps to 3 than where it jumps to the nearest one.
            for integer in choose_compared_integers(field):
                jump_to_integer = integer - 0.5 if name == "round" else integer
                constant = field.lift(np.full(real.shape, jump_to_integer))
                field.coverage.note_jump(field, equation, x, constant, f"{JUMP_TO}{integer:g}")
        may_be_beyond = ~is_at_jump & (distance < _ROUNDING * size) & (x.poison == 0)
        field.coverage.note_coincidence(field, equation, line, may_be_beyond)
        field.coverage.note_rounding(field, equation, line, x, integers)
    return integers


def _round_in_an_order(scope: Scope, name: str, x: Exact) -> Exact:
    """An uninterpreted function; ceil(x) is -floor(-x)."""
    field = scope.field
    if name == "ceil":
        return negate(field, apply_function(field, "floor", negate(field, x)))
    return apply_function(field, name, x)


def _truncate_in_an_order(scope: Scope, x: Exact) -> Exact:
    """floor(x), or ceil(x) where x is negative."""
    down = _round_in_an_order(scope, "floor", x)
    up = _round_in_an_order(scope, "ceil", x)
    return where(find_keys(scope.field, x) < 0, up, down)
