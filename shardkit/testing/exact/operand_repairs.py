"""Repairs of what an equation reads: another variable of the program, as an operand, a factor or a term.

Worked example: a router computes the weights of experts, and nothing reads them. The result should be multiplied by the
weights (`repair_unread`), or a later equation reads another array of their shape in their place (`repair_operand`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
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
    Repair,
    Values,
    is_mask,
    replace_item,
    trace_equation,
)
from shardkit.testing.exact.rules.operands import Operand, lift_operand

# Each variable is tried by one more run of the program, for each operand and in several ways.
_MOST_VARIABLES = 6
_TERMS = (lax.add, lax.sub, lax.mul, lax.div)
# Equations of which an operand may lack a factor.
_WITH_FACTORS = ("add", "sub", "mul", "dot_general")


def repair_unread(bench: Bench, readable: Sequence[Any], unread: Set[Any]) -> Iterator[Repair]:
    """Behind the equation a term or a factor that no equation of the kernel reads, with some dims of the result.

    Worked example: the weights [4] of candidates, by which `jnp.exp(x @ candidates.T)`, [3, 4], should be divided.
    """
    aval = bench.call.equation.outvars[0].aval
    if not is_float(aval):
        return
    shape = bench.shape(bench.result)
    for variable in readable:
        if variable not in unread or getattr(variable.aval, "dtype", None) != aval.dtype:
            continue
        for added in _list_added_dims(variable.aval.shape, shape):
            for function in _TERMS:
                equation = trace_equation(function, aval, 2)
                words = f"{equation.primitive.name} of {bench.call.name} and what nothing reads"
                change = _combine_result(bench, equation, variable, added)
                yield Repair(Cost.UNREAD_FACTOR, words, change, behind=True)


def repair_unread_operand(bench: Bench, readable: Sequence[Any], unread: Set[Any]) -> Iterator[Repair]:
    """Before a collective a factor or a term of its operand that no equation of the kernel reads.

    Worked example: `all_gather(h)` for `all_gather(reset * h)`. Behind the all_gather a device has all rows of h, and
    of the reset its own alone.
    """
    if kind_of(bench.call.equation) is None:
        return
    for number, operand in enumerate(bench.call.equation.invars):
        if not is_float(operand.aval):
            continue
        for variable in readable:
            if variable not in unread or not _is_alike(variable.aval, operand.aval):
                continue
            for function in _TERMS:
                equation = trace_equation(function, operand.aval, 2)
                words = f"{bench.call.name} of {equation.primitive.name} of its operand and what nothing reads"
                yield Repair(Cost.UNREAD_FACTOR, words, _combine_operand(bench, number, equation, variable))


def repair_joined_mask(bench: Bench, readable: Sequence[Any]) -> Iterator[Repair]:
    """A mask that is true only where another mask of the program is true too, or also where that one is.

    Worked example: the pairs of one label, `labels[:, None] == labels[None]`, without each row itself.
    """
    if not is_mask(bench.result):
        return
    aval = bench.call.equation.outvars[0].aval
    alike = [variable for variable in readable if _is_alike(variable.aval, aval)]
    for variable, function in itertools.product(_select(alike), (lax.bitwise_and, lax.bitwise_or)):
        equation = trace_equation(function, aval, 2)
        words = f"{equation.primitive.name} of {bench.call.name} and another mask"
        yield Repair(Cost.OPERAND, words, _combine_result(bench, equation, variable), behind=True)


def _list_added_dims(shape: tuple[int, ...], target: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The dims, counted from the end, that an array lacks to broadcast against a target: one tuple for each way.

    Worked example: [4] against [3, 4] lacks dim -2: [(-2,)]. Against [4, 4] it may lack either: [(-1,), (-2,)].
    """
    ways = []
    rank = len(target)
    for dims in itertools.combinations(range(rank), len(shape)):
        if shape == tuple(target[dim] for dim in dims):
            ways.append(tuple(dim - rank for dim in range(rank) if dim not in dims))
    return ways


def repair_term(bench: Bench, readable: Sequence[Any]) -> Iterator[Repair]:
    """Behind the equation a sum, difference, product or quotient of the result and another variable of its type."""
    aval = bench.call.equation.outvars[0].aval
    alike = [variable for variable in readable if _is_alike(variable.aval, aval)]
    for variable, function in itertools.product(_select(alike), _TERMS):
        equation = trace_equation(function, aval, 2)
        words = f"{equation.primitive.name} of {bench.call.name} and another value"
        yield Repair(Cost.FACTOR, words, _combine_result(bench, equation, variable), behind=True)


def _combine_result(bench: Bench, equation: Any, variable: Any, added: tuple[int, ...] = ()) -> EquationChange:
    """The function of the result and another variable, which gets dims `added` of size 1, counted from the end."""

    @FunctionChange
    def change(operands: Sequence[Operand], results: Sequence[Operand], values: Values) -> Sequence[Operand]:
        return bench.interpreter.step(equation, [results[0], _add_dims(bench, values[variable], added)])

    return change


def _combine_operand(
    bench: Bench, number: int, equation: Any, variable: Any, added: tuple[int, ...] = ()
) -> EquationChange:
    """Reads the function of operand `number` and another variable, with dims `added`, in place of that operand."""

    @FunctionChange
    def change(operands: Sequence[Operand], results: Sequence[Operand], values: Values) -> Sequence[Operand]:
        another = _add_dims(bench, values[variable], added)
        [combined] = bench.interpreter.step(equation, [operands[number], another])
        return bench.rerun(replace_item(operands, number, combined))

    return change


def _add_dims(bench: Bench, x: Operand, added: tuple[int, ...]) -> Operand:
    """An array with further dims of size 1.

    Counted from the end, the dims are the same ones behind the components of a part and the dims of the mesh.
    """
    if not added:
        return x
    return lift_operand(bench.field, x).move(lambda part: np.expand_dims(part, added))


def repair_operand(bench: Bench, readable: Sequence[Any], unread: Set[Any]) -> Iterator[Repair]:
    """Another variable in place of an operand, or as a factor of an operand.

    A variable that no equation reads is likely to be the one that should be read.

    Worked example: `shifted = ppermute(x)`, and behind it `y = x * 2`, where nothing reads `shifted`. The likeliest
    repair of the mul reads `shifted` in place of x.
    """
    for number, operand in enumerate(bench.call.equation.invars):
        others = [variable for variable in readable if variable is not operand]
        alike = [variable for variable in others if _is_alike(variable.aval, operand.aval)]
        yield from _replace_operand(bench, number, alike, unread)
        if bench.call.name in _WITH_FACTORS and is_float(operand.aval):
            yield from _repair_factor_of_operand(bench, number, others, alike, unread)


def _replace_operand(bench: Bench, number: int, alike: list[Any], unread: Set[Any]) -> Iterator[Repair]:
    """Variables of an operand's type in its place: all unread ones, and some of the others."""
    words = f"another operand of {bench.call.name}"
    for variable in alike:
        if variable in unread:
            yield Repair(Cost.UNREAD, words, read_instead(bench, number, variable))
    for variable in _select(alike):
        if variable not in unread:
            yield Repair(Cost.OPERAND, words, read_instead(bench, number, variable))


def _repair_factor_of_operand(
    bench: Bench, number: int, others: list[Any], alike: list[Any], unread: Set[Any]
) -> Iterator[Repair]:
    """Variables as factors of an operand: unread ones with some of its dims, and others of its type."""
    operand = bench.call.equation.invars[number]
    words = f"another factor of {bench.call.name}"
    product = trace_equation(lax.mul, operand.aval, 2)
    # An unread factor [t] of an operand [t, d] may be missing.
    for variable in others:
        if variable in unread and _is_leading(variable.aval, operand.aval):
            # A factor [t] of an operand [t, d] becomes [t, 1].
            missing = len(operand.aval.shape) - len(variable.aval.shape)
            added = tuple(range(-missing, 0))
            yield Repair(Cost.UNREAD_FACTOR, words, _combine_operand(bench, number, product, variable, added))
    if not isinstance(bench.call.operands[number], Exact):
        return
    candidates = _select(alike)
    # The operand may be its own factor, as in a square. The square of a literal is another literal.
    is_literal = hasattr(operand, "val")
    if not is_literal:
        candidates = [*candidates, operand]
    for variable in candidates:
        if variable not in unread:
            yield Repair(Cost.FACTOR, words, _combine_operand(bench, number, product, variable))


def repair_round(bench: Bench, readable: Sequence[Any], rounds: Mapping[Any, Sequence[Any]]) -> Iterator[Repair]:
    """The arrays of the rounds before or after, where the arrays of an unrolled loop's rounds are stacked.

    Worked example: the last of two stages has its first result after tick 1. Of three microbatches, `done[:3]` has the
    results of the ticks 0, 1 and 2, in place of 1, 2 and 3.
    """
    name = bench.call.name
    if name not in ("concatenate", "stack"):
        return
    operands = bench.call.equation.invars
    series = _find_series(operands, rounds)
    if not series:
        return
    for distance, words in ((1, "later"), (-1, "earlier")):
        variables = _move_along(series, operands, distance)
        # An equation can read only what stands before it: the rounds behind it are not there yet.
        if variables and all(variable in readable for variable in variables):
            yield Repair(Cost.INDEX, f"{name} of what rounds one {words} made", _read_all(bench, variables))


def _move_along(series: Sequence[Any], variables: Sequence[Any], distance: int) -> list[Any]:
    """The variables that stand so far behind others in a series; empty if one of them would be beyond its ends."""
    moved = []
    for variable in variables:
        position = series.index(variable) + distance
        if not 0 <= position < len(series):
            return []
        moved.append(series[position])
    return moved


def _find_series(atoms: Sequence[Any], rounds: Mapping[Any, Sequence[Any]]) -> Sequence[Any]:
    """The variables of all rounds of an unrolled loop, of which each atom is one; empty if that is not so."""
    series: Sequence[Any] | None = None
    for atom in atoms:
        is_literal = hasattr(atom, "val")
        if is_literal or atom not in rounds:
            return ()
        if series is not None and rounds[atom] is not series:
            return ()
        series = rounds[atom]
    return series or ()


def _read_all(bench: Bench, variables: Sequence[Any]) -> EquationChange:
    """Reads other variables as all operands."""

    @FunctionChange
    def change(operands: Sequence[Operand], results: Sequence[Operand], values: Values) -> Sequence[Operand]:
        return bench.rerun([values[variable] for variable in variables])

    return change


def read_instead(bench: Bench, number: int, variable: Any) -> EquationChange:
    """Reads another variable as operand `number`."""

    @FunctionChange
    def change(operands: Sequence[Operand], results: Sequence[Operand], values: Values) -> Sequence[Operand]:
        return bench.rerun(replace_item(operands, number, values[variable]))

    return change


def _is_alike(a: Any, b: Any) -> bool:
    """Whether two types are arrays of the same shape and dtype."""
    are_arrays = hasattr(a, "shape") and hasattr(b, "shape")
    return are_arrays and a.shape == b.shape and a.dtype == b.dtype


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
