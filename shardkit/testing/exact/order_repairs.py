"""Repairs of the order of two equations: of a function and a reduction over devices, or of two operators.

Worked example: every device has some rows with weights, and the mean of all rows is wanted.

    psum(sums / weights)            wrong: the means of devices, added up
    psum(sums) / psum(weights)      right

Both programs have a psum and a division. No repair of the psum alone, or of the division alone, makes the first program
the second: the two equations change places. So do the operators of `a * (b + c)` and `a * b + c`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from shardkit._arguments.checks import quote
from shardkit._jax.jaxprs import kind_of, mesh_axes
from shardkit._jax.primitives import registered
from shardkit.testing.exact.repairs import Bench, Cost, EquationChange, FunctionChange, Repair, Values, replace_item
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


def repair_order(bench: Bench, definitions: Mapping[Any, Any]) -> Iterator[Repair]:
    """A function and a reduction over devices in the other order.

    The equation is the second of the two: a reduction of a function, or a function of one or two reductions.
    """
    # Reductions first: a mean ends with a division, which would be taken for a function.
    reduction = _find_reduction(bench, bench.call.equation, definitions)
    if reduction is not None:
        yield from _repair_reduction(bench, reduction, definitions)
    elif bench.call.primitive in _FUNCTIONS:
        yield from _repair_function_of_reductions(bench, definitions)


def _repair_reduction(bench: Bench, reduction: _Reduction, definitions: Mapping[Any, Any]) -> Iterator[Repair]:
    """psum(f(x)) -> f(psum(x))."""
    function = _find_definition(reduction.operand, definitions)
    if function is None or function.primitive.name not in _FUNCTIONS:
        return
    noun = "means" if reduction.mean else f"{reduction.operator}s"
    words = f"{function.primitive.name} of {noun} over {quote(reduction.names)}"
    yield Repair(Cost.SUM, words, _reduce_first(bench, function, reduction))


def _repair_function_of_reductions(bench: Bench, definitions: Mapping[Any, Any]) -> Iterator[Repair]:
    """f(psum(x), y) -> psum(f(x, y))."""
    reductions: dict[int, _Reduction] = {}
    for number, atom in enumerate(bench.call.equation.invars):
        definition = _find_definition(atom, definitions)
        if definition is None:
            continue
        reduction = _find_reduction(bench, definition, definitions)
        if reduction is not None:
            reductions[number] = reduction
    if not reductions:
        return
    # Both operands may be reduced, as in psum(sums) / psum(weights). Their quotient is reduced once, as the first one
    # is.
    first = next(iter(reductions.values()))
    noun = "mean" if first.mean else first.operator
    words = f"the {noun} over {quote(first.names)} of {bench.call.name} of what devices have"
    yield Repair(Cost.SUM, words, _reduce_last(bench, reductions))


def repair_parentheses(bench: Bench, definitions: Mapping[Any, Any]) -> Iterator[Repair]:
    """Two operators in the other order, or with an operand of each as the other's.

    Worked example: of `a * (b + c)` the other orders are `a * b + c` and `b + a * c`. Of `a * b / c` the exchanges are
    `a * c / b` and `c * b / a`.
    """
    if bench.call.primitive not in _OPERATORS:
        return
    for number, atom in enumerate(bench.call.equation.invars):
        inner = _find_definition(atom, definitions)
        if inner is None or inner.primitive.name not in _OPERATORS:
            continue
        for inner_number, ordinal in enumerate(("first", "second")):
            words = f"{bench.call.name} of the {ordinal} operand of {inner.primitive.name} alone"
            yield Repair(Cost.PARENTHESES, words, _apply_inside(bench, number, inner, inner_number))
            words = f"the {ordinal} operand of {inner.primitive.name} and that of {bench.call.name} exchanged"
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
    def change(operands: Sequence[Operand], results: Sequence[Operand], values: Values) -> Sequence[Operand]:
        inner_operands = [_read(bench, atom, values) for atom in inner.invars]
        [result] = bench.rerun(replace_item(operands, number, inner_operands[inner_number]))
        return bench.interpreter.step(inner, replace_item(inner_operands, inner_number, result))

    return change


def _exchange_inside(bench: Bench, number: int, inner: Any, inner_number: int) -> EquationChange:
    """Exchanges the other operand of the outer equation with one of the inner equation: a * b / c -> a * c / b."""

    @FunctionChange
    def change(operands: Sequence[Operand], results: Sequence[Operand], values: Values) -> Sequence[Operand]:
        inner_operands = [_read(bench, atom, values) for atom in inner.invars]
        exchanged = replace_item(inner_operands, inner_number, operands[1 - number])
        [result] = bench.interpreter.step(inner, exchanged)
        outer_operands = replace_item(operands, number, result)
        # An operator has two operands, so that 1 - number is the other one.
        return bench.rerun(replace_item(outer_operands, 1 - number, inner_operands[inner_number]))

    return change


def _find_definition(atom: Any, definitions: Mapping[Any, Any]) -> Any | None:
    """The equation that gives a variable, before casts of its varying type; None for a literal or an argument."""
    while not hasattr(atom, "val"):
        equation = definitions.get(atom)
        if equation is None or equation.primitive.name not in _VARYING:
            return equation
        atom = equation.invars[0]
    return None


def _find_reduction(bench: Bench, equation: Any, definitions: Mapping[Any, Any]) -> _Reduction | None:
    """The reduction that an equation is, or the mean whose division it is; None if it is neither."""
    if kind_of(equation) == "all_reduce" and len(equation.invars) == 1:
        operator = registered(equation.primitive.name).reduces or "sum"
        return _Reduction(equation.invars[0], mesh_axes(equation), operator, mean=False)
    if equation.primitive.name != "div":
        return None
    dividend, divisor = equation.invars
    total = None if hasattr(dividend, "val") else definitions.get(dividend)
    if total is None or kind_of(total) != "all_reduce" or len(total.invars) != 1:
        return None
    # jax traces a pmean as a psum, and a division by the number of devices, which is a literal.
    names = mesh_axes(total)
    if getattr(divisor, "val", None) != math.prod(bench.axes.get(name, 1) for name in names):
        return None
    return _Reduction(total.invars[0], names, "sum", mean=True)


def _reduce_first(bench: Bench, function: Any, reduction: _Reduction) -> EquationChange:
    """Reduces the operands of the function, and applies it to them."""

    @FunctionChange
    def change(operands: Sequence[Operand], results: Sequence[Operand], values: Values) -> Sequence[Operand]:
        inner = [_read(bench, atom, values) for atom in function.invars]
        return bench.interpreter.step(function, [_reduce(bench, x, reduction) for x in inner])

    return change


def _reduce_last(bench: Bench, reductions: Mapping[int, _Reduction]) -> EquationChange:
    """Applies the function to its operands before they are reduced, and reduces its result."""

    @FunctionChange
    def change(operands: Sequence[Operand], results: Sequence[Operand], values: Values) -> Sequence[Operand]:
        inner = list(operands)
        for number, reduction in reductions.items():
            inner[number] = _read(bench, reduction.operand, values)
        [result] = bench.rerun(inner)
        return [_reduce(bench, result, next(iter(reductions.values())))]

    return change


def _read(bench: Bench, atom: Any, values: Values) -> Operand:
    """The value of a variable in this run, or that of a literal with a dim of size 1 in front for each axis."""
    if not hasattr(atom, "val"):
        return values[atom]
    literal = np.asarray(atom.val)
    return literal.reshape((1,) * bench.rank + literal.shape)


def _reduce(bench: Bench, x: Operand, reduction: _Reduction) -> Operand:
    """A value reduced over devices; one that is the same on all devices stays as it is."""
    if not set(reduction.names).intersection(bench.varying_axes(x)):
        return x
    x = bench.reduce(x, reduction.names, reduction.operator)
    if reduction.mean:
        x = bench.scale(x, Fraction(1, math.prod(bench.axes[name] for name in reduction.names)))
    return x
