"""Repairs of the order of two equations: of a function and a reduction over devices, or of two operators.

Worked example: every device has some rows with weights, and the mean of all rows is wanted.

    psum(sums / weights)            wrong: the means of devices, added up
    psum(sums) / psum(weights)      right

Both programs have a psum and a division. No repair of the psum alone, or of the division alone, makes the first program
the second: the two equations change places. So do the operators of `a * (b + c)` and `a * b + c`.

The equation of a repair is the second of the two, which stands behind the other: the psum of the first program above,
the mul of `a * (b + c)`. The first one is looked up by the variable that the second one reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from shardkit._arguments.checks import quote
from shardkit._jax.jaxprs import kind_of, mesh_axes
from shardkit._jax.primitives import registered
from shardkit.testing.exact.repairs import (
    Bench,
    Cost,
    EquationChange,
    FunctionChange,
    Operands,
    Repair,
    Values,
    is_literal,
    replace_item,
)
from shardkit.testing.exact.rules.operands import Operand

# A sum of these functions is not the function of a sum. (Of "mul" it is, if all devices have the same factor.)
_FUNCTIONS = ("abs", "div", "exp", "integer_pow", "log", "log1p", "logistic", "mul", "rsqrt", "sqrt", "square", "tanh")
# They change no value, and often stand between the two equations: definitions are looked up behind them.
_VARYING = ("pvary", "pcast")
_OPERATORS = ("add", "sub", "mul", "div")


class _Reduction(NamedTuple):
    """A reduction over devices, or a mean, that a value is.

    Attributes:
        operand: the variable that is reduced.
        names: the axes of the reduction.
        operator: "sum", "maximum" or "minimum".
        mean: whether the sum is divided by the number of devices.
    """

    operand: Any
    names: tuple[str, ...]
    operator: str
    mean: bool


# A function and a reduction


def repair_order(bench: Bench) -> Iterator[Repair]:
    """A function and a reduction over devices in the other order.

    The equation is the second of the two: a reduction of a function, or a function of one or two reductions.
    """
    # Reductions first: a mean ends with a division, which would be taken for a function.
    reduction = _find_reduction(bench, bench.equation)
    if reduction is not None:
        yield from _repair_reduction(bench, reduction)
    elif bench.call.primitive in _FUNCTIONS:
        yield from _repair_function_of_reductions(bench)


def _repair_reduction(bench: Bench, reduction: _Reduction) -> Iterator[Repair]:
    """psum(f(x)) -> f(psum(x))."""
    function = _find_definition(bench, reduction.operand)
    if function is None or function.primitive.name not in _FUNCTIONS:
        return
    noun = "means" if reduction.mean else f"{reduction.operator}s"
    words = f"{function.primitive.name} of {noun} over {quote(reduction.names)}"
    yield Repair(Cost.SUM, words, _reduce_first(bench, function, reduction))


def _repair_function_of_reductions(bench: Bench) -> Iterator[Repair]:
    """f(psum(x), y) -> psum(f(x, y))."""
    reductions: dict[int, _Reduction] = {}
    for number, atom in enumerate(bench.equation.invars):
        definition = _find_definition(bench, atom)
        if definition is None:
            continue
        reduction = _find_reduction(bench, definition)
        if reduction is not None:
            reductions[number] = reduction
    if not reductions:
        return
    # Both operands may be reduced, as in psum(sums) / psum(weights). Their quotient is reduced once, as the first one
    # is.
    first = next(iter(reductions.values()))
    noun = "mean" if first.mean else first.operator
    words = f"the {noun} over {quote(first.names)} of {bench.name} of what devices have"
    yield Repair(Cost.SUM, words, _reduce_last(bench, reductions, first))


def _find_reduction(bench: Bench, equation: Any) -> _Reduction | None:
    """The reduction that an equation is, or the mean whose division it is; None if it is neither.

    Worked example: on data=4 jax traces `pmean(x, "data")` as `total = psum(x); y = div total 4.0`. The div is the mean
    of x, while `div total 3.0` is none.
    """
    if _is_all_reduce(equation):
        operator = registered(equation.primitive.name).reduces or "sum"
        return _Reduction(equation.invars[0], mesh_axes(equation), operator, mean=False)
    if equation.primitive.name != "div":
        return None
    dividend, divisor = equation.invars
    if is_literal(dividend):
        return None
    total = bench.variables.definitions.get(dividend)
    if total is None or not _is_all_reduce(total):
        return None
    names = mesh_axes(total)
    if getattr(divisor, "val", None) != bench.count_devices(names):
        return None
    return _Reduction(total.invars[0], names, "sum", mean=True)


def _is_all_reduce(equation: Any) -> bool:
    """Whether an equation reduces one array over devices."""
    return kind_of(equation) == "all_reduce" and len(equation.invars) == 1


def _reduce_first(bench: Bench, function: Any, reduction: _Reduction) -> EquationChange:
    """Reduces the operands of the function, and applies it to them."""

    @FunctionChange
    def change(operands: Operands, results: Operands, values: Values) -> Operands:
        reduced = []
        for atom in function.invars:
            x = _read(bench, atom, values)
            reduced.append(_reduce(bench, x, reduction))
        return bench.interpreter.step(function, reduced)

    return change


def _reduce_last(bench: Bench, reductions: Mapping[int, _Reduction], last: _Reduction) -> EquationChange:
    """Applies the function to its operands before `reductions`, by their numbers, and reduces its result by `last`."""

    @FunctionChange
    def change(operands: Operands, results: Operands, values: Values) -> Operands:
        terms = list(operands)
        for number, reduction in reductions.items():
            terms[number] = _read(bench, reduction.operand, values)
        [result] = bench.rerun(terms)
        return [_reduce(bench, result, last)]

    return change


def _reduce(bench: Bench, x: Operand, reduction: _Reduction) -> Operand:
    """A value reduced over devices; one that is the same on all devices stays as it is."""
    varying = bench.find_varying_axes(x)
    if set(reduction.names).isdisjoint(varying):
        return x
    if reduction.mean:
        return bench.average(x, reduction.names)
    return bench.reduce(x, reduction.names, reduction.operator)


# Two operators


def repair_parentheses(bench: Bench) -> Iterator[Repair]:
    """Two operators in the other order, or with an operand of each as the other's.

    Worked example: of `a * (b + c)` the other orders are `a * b + c` and `b + a * c`. Of `a * b / c` the exchanges are
    `a * c / b` and `c * b / a`.
    """
    if bench.call.primitive not in _OPERATORS:
        return
    for number, atom in enumerate(bench.equation.invars):
        inner = _find_definition(bench, atom)
        if inner is None or inner.primitive.name not in _OPERATORS:
            continue
        for inner_number, ordinal in enumerate(("first", "second")):
            words = f"{bench.name} of the {ordinal} operand of {inner.primitive.name} alone"
            yield Repair(Cost.PARENTHESES, words, _apply_inside(bench, number, inner, inner_number))
            words = f"the {ordinal} operand of {inner.primitive.name} and that of {bench.name} exchanged"
            yield Repair(Cost.PARENTHESES, words, _exchange_inside(bench, number, inner, inner_number))


def _apply_inside(bench: Bench, number: int, inner: Any, inner_number: int) -> EquationChange:
    """Applies the equation to one operand of the inner equation, then the inner one: a * (b + c) -> a * b + c.

    Args:
        bench: the tools for the outer equation.
        number: the operand of the outer equation that the inner equation gives.
        inner: the inner equation.
        inner_number: the operand of the inner equation.
    """

    @FunctionChange
    def change(operands: Operands, results: Operands, values: Values) -> Operands:
        # Of a * (b + c): b and c.
        inner_operands = _read_operands(bench, inner, values)
        # a * b
        [result] = bench.rerun_with_operand(operands, number, inner_operands[inner_number])
        # a * b + c
        return bench.interpreter.step(inner, replace_item(inner_operands, inner_number, result))

    return change


def _exchange_inside(bench: Bench, number: int, inner: Any, inner_number: int) -> EquationChange:
    """Exchanges the other operand of the outer equation with one of the inner equation: a * b / c -> a * c / b."""
    # An operator has two operands, so that 1 - number is the other one.
    other_number = 1 - number

    @FunctionChange
    def change(operands: Operands, results: Operands, values: Values) -> Operands:
        # Of a * b / c: a and b.
        inner_operands = _read_operands(bench, inner, values)
        # a * c
        exchanged = replace_item(inner_operands, inner_number, operands[other_number])
        [result] = bench.interpreter.step(inner, exchanged)
        # a * c / b
        outer_operands = replace_item(operands, number, result)
        return bench.rerun_with_operand(outer_operands, other_number, inner_operands[inner_number])

    return change


# The first of the two equations


def _find_definition(bench: Bench, atom: Any) -> Any | None:
    """The equation that gives a variable, before casts of its varying type; None for a literal or an argument."""
    while not is_literal(atom):
        equation = bench.variables.definitions.get(atom)
        if equation is None or equation.primitive.name not in _VARYING:
            return equation
        atom = equation.invars[0]
    return None


def _read_operands(bench: Bench, equation: Any, values: Values) -> list[Operand]:
    """The operands of an equation in this run."""
    return [_read(bench, atom, values) for atom in equation.invars]


def _read(bench: Bench, atom: Any, values: Values) -> Operand:
    """The value of a variable in this run, or that of a literal with a dim of size 1 in front for each axis."""
    if not is_literal(atom):
        return values[atom]
    literal = np.asarray(atom.val)
    return literal.reshape((1,) * bench.rank + literal.shape)
