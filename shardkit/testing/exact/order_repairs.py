"""Repairs of the order of two steps: a function of what devices reduce, or what they reduce of a function; parentheses.

Worked example: every device has some rows, and a mean is wanted where rows have weights.

    psum(sums / weights)            the means of devices, added up
    psum(sums) / psum(weights)      the mean of all rows

Both have a psum and a division, and no repair of one of these gives the other program: the two change places. So do
the operators of `a * (b + c)` and `a * b + c`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from shardkit._arguments.checks import quoted
from shardkit._jax.jaxprs import kind_of, mesh_axes
from shardkit._jax.primitives import registered
from shardkit.testing.exact.repairs import Bench, Change, Cost, Repair, Values, replace_item
from shardkit.testing.exact.rules.operands import Operand

# Sums do not pass through these. They do through a product with what all devices have.
_FUNCTIONS = ("abs", "div", "exp", "integer_pow", "log", "log1p", "logistic", "mul", "rsqrt", "sqrt", "square", "tanh")
_VARYING = ("pvary", "pcast")
_OPERATORS = ("add", "sub", "mul", "div")


class _Reduction(NamedTuple):
    """A reduction over devices, or a mean, as the equation of a value.

    Attributes:
        operand: the variable that is reduced.
        names: the axes.
        operator: "sum", "maximum" or "minimum".
        mean: whether the sum is divided by the number of devices.
    """

    operand: Any
    names: tuple[str, ...]
    operator: str
    mean: bool


def repair_order(bench: Bench, definitions: Mapping[Any, Any]) -> Iterator[Repair]:
    """A function and a reduction in the other order."""
    equation = bench.call.equation
    reduction = _find_reduction(bench, equation, definitions)
    if reduction is not None:
        function = _find_definition(reduction.operand, definitions)
        if function is not None and function.primitive.name in _FUNCTIONS:
            verb = "means" if reduction.mean else f"{reduction.operator}s"
            words = f"{function.primitive.name} of {verb} over {quoted(reduction.names)}"
            yield Repair(Cost.SUM, words, _reduce_first(bench, function, reduction))
    elif bench.call.primitive in _FUNCTIONS:
        reductions = {}
        for number, atom in enumerate(equation.invars):
            definition = _find_definition(atom, definitions)
            source = None if definition is None else _find_reduction(bench, definition, definitions)
            if source is not None:
                reductions[number] = source
        if reductions:
            source = next(iter(reductions.values()))
            verb = "mean" if source.mean else source.operator
            words = f"the {verb} over {quoted(source.names)} of {bench.call.name} of what devices have"
            yield Repair(Cost.SUM, words, _reduce_last(bench, reductions))


def repair_parentheses(bench: Bench, definitions: Mapping[Any, Any]) -> Iterator[Repair]:
    """Two operators in the other order, or of each other's operands.

    Of `a * (b + c)` the programs `a * b + c` and `b + a * c`; of `a * b / c` those with c for b, and for a.
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


def _apply_inside(bench: Bench, number: int, inner: Any, inner_number: int) -> Change:
    """The equation of one operand of an equation before it, which comes behind it now."""

    def change(operands: Sequence[Operand], results: Sequence[Operand], values: Values) -> Sequence[Operand]:
        inner_operands = [_read(bench, atom, values) for atom in inner.invars]
        [result] = bench.rerun(replace_item(operands, number, inner_operands[inner_number]))
        return bench.interpreter.step(inner, replace_item(inner_operands, inner_number, result))

    return change


def _exchange_inside(bench: Bench, number: int, inner: Any, inner_number: int) -> Change:
    """The equation and one before it, with an operand of each as the other's."""

    def change(operands: Sequence[Operand], results: Sequence[Operand], values: Values) -> Sequence[Operand]:
        inner_operands = [_read(bench, atom, values) for atom in inner.invars]
        exchanged = replace_item(inner_operands, inner_number, operands[1 - number])
        [result] = bench.interpreter.step(inner, exchanged)
        outer_operands = replace_item(operands, number, result)
        return bench.rerun(replace_item(outer_operands, 1 - number, inner_operands[inner_number]))

    return change


def _find_definition(atom: Any, definitions: Mapping[Any, Any]) -> Any | None:
    """The equation of a variable, behind casts of what all devices have to what may differ; None for a literal."""
    while not hasattr(atom, "val"):
        equation = definitions.get(atom)
        if equation is None or equation.primitive.name not in _VARYING:
            return equation
        atom = equation.invars[0]
    return None


def _find_reduction(bench: Bench, equation: Any, definitions: Mapping[Any, Any]) -> _Reduction | None:
    """The reduction that an equation is, or the mean that it ends."""
    if kind_of(equation) == "all_reduce" and len(equation.invars) == 1:
        operator = registered(equation.primitive.name).reduces or "sum"
        return _Reduction(equation.invars[0], mesh_axes(equation), operator, mean=False)
    if equation.primitive.name != "div":
        return None
    dividend, divisor = equation.invars
    total = None if hasattr(dividend, "val") else definitions.get(dividend)
    if total is None or kind_of(total) != "all_reduce" or len(total.invars) != 1:
        return None
    names = mesh_axes(total)
    if getattr(divisor, "val", None) != math.prod(bench.axes.get(name, 1) for name in names):
        return None
    return _Reduction(total.invars[0], names, "sum", mean=True)


def _reduce_first(bench: Bench, function: Any, reduction: _Reduction) -> Change:
    """The function of its reduced operands."""

    def change(operands: Sequence[Operand], results: Sequence[Operand], values: Values) -> Sequence[Operand]:
        inner = [_read(bench, atom, values) for atom in function.invars]
        return bench.interpreter.step(function, [_reduce(bench, x, reduction) for x in inner])

    return change


def _reduce_last(bench: Bench, reductions: Mapping[int, _Reduction]) -> Change:
    """The reduction of the function, of operands before they are reduced."""

    def change(operands: Sequence[Operand], results: Sequence[Operand], values: Values) -> Sequence[Operand]:
        inner = list(operands)
        for number, reduction in reductions.items():
            inner[number] = _read(bench, reduction.operand, values)
        [result] = bench.rerun(inner)
        return [_reduce(bench, result, next(iter(reductions.values())))]

    return change


def _read(bench: Bench, atom: Any, values: Values) -> Operand:
    """What a variable is in this run, or a literal."""
    if not hasattr(atom, "val"):
        return values[atom]
    literal = np.asarray(atom.val)
    return literal.reshape((1,) * bench.rank + literal.shape)


def _reduce(bench: Bench, x: Operand, reduction: _Reduction) -> Operand:
    """What devices have of a value, reduced; a value that is the same on all devices stays what it is."""
    if not set(reduction.names).intersection(bench.varying_axes(x)):
        return x
    x = bench.reduce(x, reduction.names, reduction.operator)
    if reduction.mean:
        x = bench.scale(x, Fraction(1, math.prod(bench.axes[name] for name in reduction.names)))
    return x
