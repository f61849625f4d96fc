"""Repairs of what an equation reads: another variable of the program, as an operand, a factor or a term.

Worked example: a router computes the weights of experts, and nothing reads them. The result should be multiplied by the
weights (`repair_unread`), or a later equation reads another array of their shape in their place (`repair_operand`).

A variable is known by its type, its aval, when repairs are listed. Its value is read when a repair is tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax import lax

from shardkit._jax.jaxprs import kind_of
from shardkit.testing._compare import is_float
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.repairs import (
    Bench,
    Cost,
    EquationChange,
    FunctionChange,
    Operands,
    Repair,
    Values,
    is_literal,
    is_mask,
    trace_equation,
)
from shardkit.testing.exact.rules.operands import Operand, lift_operand

# Each variable is tried by one more run of the program, for each operand and in several ways.
_MOST_VARIABLES = 6
_TERMS = (lax.add, lax.sub, lax.mul, lax.div)
# Equations of which an operand may lack a factor.
_WITH_FACTORS = ("add", "sub", "mul", "dot_general")


# Terms and factors of a result


def repair_unread(bench: Bench) -> Iterator[Repair]:
    """Behind the equation a term or a factor that no equation of the kernel reads, with some dims of the result.

    Worked example: the weights [4] of candidates, by which `jnp.exp(x @ candidates.T)`, [3, 4], should be divided.
    """
    if not is_float(bench.aval):
        return
    shape = bench.shape(bench.result)
    for variable in bench.variables.readable:
        if variable not in bench.variables.unread or getattr(variable.aval, "dtype", None) != bench.aval.dtype:
            continue
        for added in _list_added_dims(variable.aval.shape, shape):
            for function in _TERMS:
                equation = trace_equation(function, bench.aval, 2)
                words = f"{equation.primitive.name} of {bench.name} and what nothing reads"
                change = _combine_result(bench, equation, variable, added)
                yield Repair(Cost.UNREAD_FACTOR, words, change, behind=True)


def _list_added_dims(shape: tuple[int, ...], target: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The dims, counted from the end, that an array lacks to broadcast against a target: one tuple for each way.

    Worked example: [4] against [3, 4] lacks dim -2: [(-2,)]. Against [4, 4] it may lack either: [(-1,), (-2,)].
    """
    ways = []
    rank = len(target)
    for dims in itertools.combinations(range(rank), len(shape)):
        if shape == tuple(target[dim] for dim in dims):
            added = [dim - rank for dim in range(rank) if dim not in dims]
            ways.append(tuple(added))
    return ways


def repair_joined_mask(bench: Bench) -> Iterator[Repair]:
    """A mask that is true only where another mask of the program is true too, or also where that one is.

    Worked example: the pairs of one label, `labels[:, None] == labels[None]`, without each row itself.
    """
    if is_mask(bench.result):
        for equation, variable in _list_terms(bench, (lax.bitwise_and, lax.bitwise_or)):
            words = f"{equation.primitive.name} of {bench.name} and another mask"
            yield Repair(Cost.OPERAND, words, _combine_result(bench, equation, variable), behind=True)


def repair_term(bench: Bench) -> Iterator[Repair]:
    """Behind the equation a sum, difference, product or quotient of the result and another variable of its type."""
    for equation, variable in _list_terms(bench, _TERMS):
        words = f"{equation.primitive.name} of {bench.name} and another value"
        yield Repair(Cost.FACTOR, words, _combine_result(bench, equation, variable), behind=True)


def _list_terms(bench: Bench, functions: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """The equations of functions of the result and another variable of its type, each with the variable."""
    for variable in _select(_find_alike(bench.variables.readable, bench.aval)):
        for function in functions:
            yield trace_equation(function, bench.aval, 2), variable


def _combine_result(bench: Bench, equation: Any, variable: Any, added: tuple[int, ...] = ()) -> EquationChange:
    """The function of the result and another variable, which gets dims `added` of size 1, counted from the end."""

    @FunctionChange
    def change(operands: Operands, results: Operands, values: Values) -> Operands:
        term = _add_dims(bench, values[variable], added)
        return bench.interpreter.step(equation, [results[0], term])

    return change


def _add_dims(bench: Bench, x: Operand, added: tuple[int, ...]) -> Operand:
    """An array with further dims of size 1.

    Worked example: a factor [2] + [4] on two devices with `added` (-1,) is [2] + [4, 1].
    """
    if not added:
        return x
    # Counted from the end, the dims are the same ones behind the components of a part and the dims of the mesh.
    return lift_operand(bench.field, x).move(lambda part: np.expand_dims(part, added))


# Operands


def repair_operand(bench: Bench) -> Iterator[Repair]:
    """Another variable in place of an operand, or as a factor of an operand.

    A variable that no equation reads is likely to be the one that should be read.

    Worked example: `shifted = ppermute(x)`, and behind it `y = x * 2`, where nothing reads `shifted`. The likeliest
    repair of the mul reads `shifted` in place of x.
    """
    for number, operand in enumerate(bench.equation.invars):
        variables = [variable for variable in bench.variables.readable if variable is not operand]
        alike = _find_alike(variables, operand.aval)
        yield from _replace_operand(bench, number, alike)
        if bench.name in _WITH_FACTORS and is_float(operand.aval):
            yield from _repair_factor_of_operand(bench, number, variables, alike)


def _replace_operand(bench: Bench, number: int, alike: list[Any]) -> Iterator[Repair]:
    """Variables of an operand's type in its place: all unread ones, and some of the others."""
    unread = bench.variables.unread
    words = f"another operand of {bench.name}"
    for variable in alike:
        if variable in unread:
            yield Repair(Cost.UNREAD, words, read_instead(bench, number, variable))
    for variable in _select(alike):
        if variable not in unread:
            yield Repair(Cost.OPERAND, words, read_instead(bench, number, variable))


def read_instead(bench: Bench, number: int, variable: Any) -> EquationChange:
    """Reads another variable as operand `number`."""

    @FunctionChange
    def change(operands: Operands, results: Operands, values: Values) -> Operands:
        return bench.rerun_with_operand(operands, number, values[variable])

    return change


def _repair_factor_of_operand(bench: Bench, number: int, variables: list[Any], alike: list[Any]) -> Iterator[Repair]:
    """Variables as factors of an operand: unread ones with some of its dims, and others of its type."""
    operand = bench.equation.invars[number]
    unread = bench.variables.unread
    words = f"another factor of {bench.name}"
    product = trace_equation(lax.mul, operand.aval, 2)
    for variable in variables:
        if variable in unread and _is_leading(variable.aval, operand.aval):
            # A factor [t] of an operand [t, d] becomes [t, 1].
            missing = len(operand.aval.shape) - len(variable.aval.shape)
            added = tuple(range(-missing, 0))
            change = _combine_operand(bench, number, product, variable, added)
            yield Repair(Cost.UNREAD_FACTOR, words, change)
    # A constant or an integer is seldom the operand that lacks a factor.
    if not isinstance(bench.operands[number], Exact):
        return
    factors = _select(alike)
    # The operand may be its own factor, as in a square. The square of a literal is another literal.
    if not is_literal(operand):
        factors = [*factors, operand]
    for variable in factors:
        if variable not in unread:
            yield Repair(Cost.FACTOR, words, _combine_operand(bench, number, product, variable))


def repair_unread_operand(bench: Bench) -> Iterator[Repair]:
    """Before a collective a factor or a term of its operand that no equation of the kernel reads.

    Worked example: `all_gather(h)` for `all_gather(reset * h)`. Behind the all_gather a device has all rows of h, and
    of the reset its own alone.
    """
    if kind_of(bench.equation) is None:
        return
    for number, operand in enumerate(bench.equation.invars):
        if not is_float(operand.aval):
            continue
        for variable in _find_alike(bench.variables.readable, operand.aval):
            if variable not in bench.variables.unread:
                continue
            for function in _TERMS:
                equation = trace_equation(function, operand.aval, 2)
                words = f"{bench.name} of {equation.primitive.name} of its operand and what nothing reads"
                yield Repair(Cost.UNREAD_FACTOR, words, _combine_operand(bench, number, equation, variable))


def _combine_operand(
    bench: Bench, number: int, equation: Any, variable: Any, added: tuple[int, ...] = ()
) -> EquationChange:
    """Reads the function of operand `number` and another variable, with dims `added`, in place of that operand."""

    @FunctionChange
    def change(operands: Operands, results: Operands, values: Values) -> Operands:
        factor = _add_dims(bench, values[variable], added)
        [combined] = bench.interpreter.step(equation, [operands[number], factor])
        return bench.rerun_with_operand(operands, number, combined)

    return change


# Rounds of a loop


def repair_round(bench: Bench) -> Iterator[Repair]:
    """The arrays of the rounds before or after, where the arrays of an unrolled loop's rounds are stacked.

    Worked example: the last of two stages has its first result after tick 1. Of three microbatches, `done[:3]` has the
    results of the ticks 0, 1 and 2, in place of 1, 2 and 3.
    """
    name = bench.name
    if name not in ("concatenate", "stack"):
        return
    operands = bench.equation.invars
    series = _find_series(bench, operands)
    if not series:
        return
    for distance, words in ((1, "later"), (-1, "earlier")):
        variables = _move_along(series, operands, distance)
        # An equation can read only what stands before it: the rounds behind it are not there yet.
        if variables and all(variable in bench.variables.readable for variable in variables):
            yield Repair(Cost.INDEX, f"{name} of what rounds one {words} made", _read_all(bench, variables))


def _find_series(bench: Bench, atoms: Sequence[Any]) -> Sequence[Any]:
    """The variables of all rounds of an unrolled loop, of which each atom is one; empty if that is not so."""
    rounds = bench.variables.rounds
    series: Sequence[Any] | None = None
    for atom in atoms:
        if is_literal(atom) or atom not in rounds:
            return ()
        if series is not None and rounds[atom] is not series:
            return ()
        series = rounds[atom]
    return series or ()


def _move_along(series: Sequence[Any], variables: Sequence[Any], distance: int) -> list[Any]:
    """The variables that stand so far behind others in a series; empty if one of them would be beyond its ends."""
    moved = []
    for variable in variables:
        position = series.index(variable) + distance
        if not 0 <= position < len(series):
            return []
        moved.append(series[position])
    return moved


def _read_all(bench: Bench, variables: Sequence[Any]) -> EquationChange:
    """Reads other variables as all operands."""

    @FunctionChange
    def change(operands: Operands, results: Operands, values: Values) -> Operands:
        return bench.rerun([values[variable] for variable in variables])

    return change


# Types of variables


def _find_alike(variables: Sequence[Any], aval: Any) -> list[Any]:
    """The variables that are arrays of the shape and dtype of a type."""
    # A token has no shape.
    if not hasattr(aval, "shape"):
        return []
    alike = []
    for variable in variables:
        shape = getattr(variable.aval, "shape", None)
        if shape == aval.shape and variable.aval.dtype == aval.dtype:
            alike.append(variable)
    return alike


def _is_leading(a: Any, b: Any) -> bool:
    """Whether the type a has the dtype of b, and the first dims of b or all of them."""
    shape = getattr(a, "shape", None)
    if not shape or getattr(a, "dtype", None) != getattr(b, "dtype", None):
        return False
    return shape == b.shape[: len(shape)]


def _select(variables: list[Any]) -> list[Any]:
    """The first two and the last four of many variables: inputs, and results of the equations just before."""
    if len(variables) <= _MOST_VARIABLES:
        return variables
    return [*variables[:2], *variables[-4:]]
