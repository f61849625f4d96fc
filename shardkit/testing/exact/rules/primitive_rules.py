"""The table of all rules, by the name of the primitive, and the function that applies them to an equation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardkit.testing.exact.numbers.errors import UnsupportedError
from shardkit.testing.exact.numbers.values import OUTSIDE, Exact
from shardkit.testing.exact.rules import (
    comparisons,
    contractions,
    elementwise,
    linear_algebra,
    reduce_dims,
    rounding,
    scatters,
    sorting,
    windows,
)
from shardkit.testing.exact.rules.movement import MOVED_OPERANDS, MOVES_OF_ONE, move_exact
from shardkit.testing.exact.rules.operands import Operand, join_operands
from shardkit.testing.exact.rules.scope import Scope

# Primitives that put floats in order.
ORDERED = {
    "max",
    "min",
    "clamp",
    "abs",
    "sign",
    "sort",
    "top_k",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "reduce_max",
    "reduce_min",
    "argmax",
    "argmin",
    "cummax",
    "cummin",
    "pmax",
    "pmin",
    "reduce_window_max",
    "reduce_window_min",
    "reduce_window",
    "select_and_scatter_add",
    "select_and_gather_add",
}
# Primitives that are refused, with the reason, and what has a meaning in their place.
_WITHOUT_MEANING = {
    "fft": "whose numbers are complex (a product with matrices of cosines and sines has one)",
    "eig": "whose values may be complex (eigh of a symmetric matrix has one)",
    "schur": "which is one of many (eigh of a symmetric matrix has a meaning)",
    "hessenberg": "which is one of many (qr has a meaning)",
    "geqrf": "a form of qr that its library chooses (qr has a meaning)",
    "geqp3": "whose order of columns follows from floats (qr has a meaning)",
    "householder_product": "of a form of qr that its library chooses (qr has a meaning)",
}
# A rule is a function of the scope, the equation and its operands, which returns the result or a list of them.
#
# Worked example, `b = logistic a` in a shard_map over data=2, where a is float32[4] on each device. `apply_rule` gets a
# scope with one mesh dim in front, the equation, and an Exact of the shape [2] + [4]. The table names
# `elementwise.logistic`, which computes 1 / (1 + exp(-a)) by the arithmetic of the field. The result is an Exact of the
# same shape: residues that have used up one prime, for the exp, and beside them real values between 0 and 1.
RULES: dict[str, Callable[..., Any]] = {
    # sums, products and quotients
    "add": elementwise.add,
    "add_any": elementwise.add,
    "sub": elementwise.subtract,
    "neg": elementwise.negate,
    "mul": elementwise.multiply,
    "div": elementwise.divide,
    "square": elementwise.square,
    "integer_pow": elementwise.integer_power,
    "pow": elementwise.power,
    "sqrt": elementwise.root,
    "rsqrt": elementwise.root,
    # exps and logarithms
    "exp": elementwise.exp,
    "log": elementwise.log,
    "log1p": elementwise.log_plus_one,
    "expm1": elementwise.exp_minus_one,
    "one_minus_square": elementwise.one_minus_square,
    "logistic": elementwise.logistic,
    # functions without a law
    "tanh": elementwise.function_without_law,
    "sin": elementwise.function_without_law,
    "cos": elementwise.function_without_law,
    "tan": elementwise.function_without_law,
    "asin": elementwise.function_without_law,
    "acos": elementwise.function_without_law,
    "atan": elementwise.function_without_law,
    "sinh": elementwise.function_without_law,
    "cosh": elementwise.function_without_law,
    "asinh": elementwise.function_without_law,
    "acosh": elementwise.function_without_law,
    "atanh": elementwise.function_without_law,
    "atan2": elementwise.function_without_law,
    "erf": elementwise.function_without_law,
    "erfc": elementwise.function_without_law,
    "erf_inv": elementwise.function_without_law,
    "cbrt": elementwise.function_without_law,
    "exp2": elementwise.function_without_law,
    "log2": elementwise.function_without_law,
    "rem": elementwise.function_without_law,
    "lgamma": elementwise.function_without_law,
    "digamma": elementwise.function_without_law,
    "nextafter": elementwise.function_without_law,
    # bits and casts
    "is_finite": elementwise.is_finite,
    "bitcast_convert_type": elementwise.bitcast,
    "convert_element_type": rounding.convert,
    "floor": rounding.round_to_whole,
    "ceil": rounding.round_to_whole,
    "round": rounding.round_to_whole,
    # comparisons
    "eq": comparisons.compare_equal,
    "ne": comparisons.compare_equal,
    "lt": comparisons.compare,
    "le": comparisons.compare,
    "gt": comparisons.compare,
    "ge": comparisons.compare,
    "lt_to": comparisons.compare_totally,
    "le_to": comparisons.compare_totally,
    "max": comparisons.take_extreme,
    "min": comparisons.take_extreme,
    "abs": comparisons.absolute,
    "sign": comparisons.find_sign,
    "clamp": comparisons.clamp,
    "select_n": comparisons.select,
    "sort": sorting.sort,
    "top_k": sorting.take_top,
    "approx_top_k": sorting.take_top,
    # over dims
    "reduce_sum": reduce_dims.reduce_sum,
    "reduce_prod": reduce_dims.reduce_product,
    "reduce_max": reduce_dims.reduce_extreme,
    "reduce_min": reduce_dims.reduce_extreme,
    "argmax": reduce_dims.find_place_of_extreme,
    "argmin": reduce_dims.find_place_of_extreme,
    "cumsum": reduce_dims.cumulate,
    "cumprod": reduce_dims.cumulate,
    "cummax": reduce_dims.cumulate,
    "cummin": reduce_dims.cumulate,
    "cumlogsumexp": windows.cumulate_logs,
    "dot_general": contractions.dot_general,
    "ragged_dot_general": contractions.ragged_dot,
    # places; what only moves elements is in MOVED_OPERANDS and MOVES_OF_ONE
    "scatter": scatters.scatter,
    "scatter-add": scatters.scatter,
    "scatter_add": scatters.scatter,
    # windows
    "conv_general_dilated": windows.convolve,
    "reduce_window": windows.reduce_windows,
    "reduce_window_sum": windows.add_windows,
    "reduce_window_max": windows.take_extremes,
    "reduce_window_min": windows.take_extremes,
    "select_and_scatter_add": windows.scatter_to_extremes,
    "select_and_gather_add": windows.gather_from_extremes,
    # linear algebra
    "triangular_solve": linear_algebra.solve_triangular,
    "tridiagonal_solve": linear_algebra.solve_tridiagonal,
    "lu": linear_algebra.factor_lu,
    "cholesky": linear_algebra.factor_cholesky,
    "qr": linear_algebra.factor_qr,
    "eigh": linear_algebra.factor_symmetric,
    "svd": linear_algebra.factor_singular,
}


# What may be done with the bits of a float as an integer, beside moving them. Their words have neither size nor sign,
# so a cast, an order or a product would be another one than in floats.
_OF_BITS = {"bitcast_convert_type", "eq", "ne", "select_n", "add", "sub", "reduce_sum", "scatter", "scatter-add"}
# NaN equals no float, and NaN less NaN is NaN. But the bits of NaN may be equal, and their difference is then 0.
_COMPARES_BITS = {"eq", "ne", "sub"}


def _is_bits(variable: Any, x: Operand) -> bool:
    """Whether an operand has words of bits: integers without a real value."""
    if not isinstance(x, Exact) or jnp.issubdtype(variable.aval.dtype, jnp.floating):
        return False
    return bool((np.isnan(x.real[0]) & (x.poison == 0)).any())


def _is_bits_of_nan(variable: Any, x: Operand) -> bool:
    """Whether an operand has integers that are the bits of NaN."""
    if not isinstance(x, Exact) or jnp.issubdtype(variable.aval.dtype, jnp.floating):
        return False
    return bool(x.poison.any())


def apply_rule(scope: Scope, equation: Any, operands: Sequence[Operand]) -> list[Operand]:
    """The results of an equation of which at least one operand is in the field."""
    results = _move_elements(scope, equation, operands)
    if results is not None:
        return results
    rule = RULES.get(equation.primitive.name)
    if rule is None or _has_complex(equation):
        raise UnsupportedError(_describe_refusal(equation))
    _refuse_bits(scope, equation, operands)
    results = rule(scope, equation, *operands)
    if not isinstance(results, list):  # most primitives have one result
        results = [results]
    # The first line with a value outside of a function's domain, as log(-1), is named by a certificate: such values of
    # later lines follow from it.
    if not scope.field.notes.outside and any(_is_outside(x) for x in results):
        scope.field.notes.outside = scope.line(equation)
    return results


def _refuse_bits(scope: Scope, equation: Any, operands: Sequence[Operand]) -> None:
    """Refuses words of bits as operands of a primitive that would take them for numbers, as a product does."""
    # Without a bitcast in the run so far there are no words to look for.
    if not scope.field.laws.numbers_of_bits:
        return
    name = equation.primitive.name
    for variable, operand in zip(equation.invars, operands, strict=True):
        if name not in _OF_BITS and _is_bits(variable, operand):
            raise UnsupportedError(f"{name} of the bits of floats")
        if name in _COMPARES_BITS and _is_bits_of_nan(variable, operand):
            raise UnsupportedError(f"{name} of the bits of NaN")


def _move_elements(scope: Scope, equation: Any, operands: Sequence[Operand]) -> list[Operand] | None:
    """The results of a primitive that moves or joins elements, without arithmetic; None for any other one."""
    name = equation.primitive.name
    if name in MOVES_OF_ONE and len(operands) == 1:
        move = MOVES_OF_ONE[name]
        lead = 1 + scope.rank
        return [operands[0].move(lambda part: move(part, lead, equation))]
    if name == "unstack":
        [x] = operands
        dim = scope.rank + equation.params["axis"]
        return [x.row(dim, i) for i in range(x.shape[dim])]
    if name == "concatenate":
        dim = scope.rank + equation.params["dimension"]
        return [join_operands(scope.field, operands, dim)]
    if name == "stack":
        dim = scope.rank + equation.params["axis"]
        return [join_operands(scope.field, operands, dim, new=True)]
    # A select of one of two arrays has a rule: numpy's where.
    chooses_one_of_two = name == "select_n" and len(operands) == 3
    if name in MOVED_OPERANDS and not chooses_one_of_two:
        return move_exact(scope, equation, operands)
    return None


def _is_outside(x: Operand) -> bool:
    """Whether an element is outside of the domain of a function."""
    return isinstance(x, Exact) and x.special and bool((x.poison == OUTSIDE).any())


def _has_complex(equation: Any) -> bool:
    """Whether an operand or a result is of complex numbers."""
    for variable in (*equation.invars, *equation.outvars):
        if _is_complex(variable.aval.dtype):
            return True
    return False


@cache
def _is_complex(dtype: Any) -> bool:
    """Whether a dtype is of complex numbers, asked of jax once."""
    return bool(jnp.issubdtype(dtype, jnp.complexfloating))


def _describe_refusal(equation: Any) -> str:
    """What has no meaning, and for what reason."""
    name = equation.primitive.name
    if name in _WITHOUT_MEANING:
        return f"{name}, {_WITHOUT_MEANING[name]},"
    if _has_complex(equation):
        return f"{name} of complex numbers, which two real arrays in their place would have,"
    return name
