"""Repairs of what one device computes: factors, places, operators, operands, functions, terms."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit._arguments.checks import quoted
from shardkit.testing.exact.numbers.arithmetic import multiply
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.repairs import (
    Bench,
    Change,
    Cost,
    Repair,
    Values,
    change_operands,
    change_result,
    is_integer,
    is_mask,
    keep_operands,
    list_subsets,
    replace_item,
    trace_equation,
)
from shardkit.testing.exact.rules.operands import Operand, lift_operand

# What changes nothing in a sum, a product, a maximum or a minimum: an array is filled with one of them.
_FILLINGS = {"zeros": 0.0, "ones": 1.0, "minus infinities": -math.inf, "infinities": math.inf}
_MOST_STARTS = 8
_MOST_VARIABLES = 6
_FUNCTIONS = (lax.sqrt, lax.rsqrt, lax.exp, lax.log, lax.tanh, lax.square)
_TERMS = (lax.add, lax.sub, lax.mul, lax.div)
# Operators that are taken for each other.
_CONFUSED = {
    "add": ("sub",),
    "sub": ("add",),
    "mul": ("div",),
    "div": ("mul",),
    "max": ("min",),
    "min": ("max",),
    "lt": ("le", "gt", "ge"),
    "le": ("lt", "ge", "gt"),
    "gt": ("ge", "lt", "le"),
    "ge": ("gt", "le", "lt"),
    "eq": ("ne", "le", "ge"),
    "ne": ("eq",),
    "and": ("or",),
    "or": ("and",),
    "rem": ("div",),
    "reduce_sum": ("reduce_max",),
    "reduce_max": ("reduce_min", "reduce_sum"),
    "reduce_min": ("reduce_max",),
    "sqrt": ("rsqrt",),
    "rsqrt": ("sqrt",),
}
_PRIMITIVES = {name: getattr(lax, f"{name}_p") for name in {*_CONFUSED, *itertools.chain(*_CONFUSED.values())}}
_NOT_COMMUTATIVE = ("sub", "div", "dot_general", "lt", "le", "gt", "ge")
_BINARY = ("add", "sub", "mul", "div", "max", "min", "and", "or")
_UNARY = ("neg", "sqrt", "exp", "log", "tanh", "logistic", "square", "integer_pow", "abs", "rev", "stop_gradient")


# Factors


def repair_factor(bench: Bench) -> Iterator[Repair]:
    """Factors that may be missing or too many: sizes of axes and dims, the sign."""
    name = bench.call.name
    for size, (cost, meaning) in _list_sizes(bench).items():
        if size < 2:
            continue
        yield change_result(cost, f"{name} times {size}, {meaning}", bench.scale, Fraction(size))
        if not is_integer(bench.result):
            yield change_result(cost, f"{name} divided by {size}, {meaning}", bench.scale, Fraction(1, size))
    yield change_result(Cost.RARE, f"minus {name}", bench.scale, Fraction(-1))


def _list_sizes(bench: Bench) -> dict[int, tuple[float, str]]:
    """Sizes of axes, then of dims, also of dims as they were before an axis split them."""
    sizes: dict[int, tuple[float, str]] = {}
    for axis, n in bench.axes.items():
        if n > 1:
            sizes[n] = Cost.SIZE, f"the size of {axis!r}"
    sizes.setdefault(math.prod(bench.axes.values()), (Cost.SIZE, "the number of devices"))
    dims = set(bench.sizes)
    for n in bench.axes.values():
        dims.update(n * size for size in bench.sizes)
    for size in sorted(dims):
        sizes.setdefault(size, (Cost.DIM, "the size of a dim"))
    return sizes


def repair_size(bench: Bench) -> Iterator[Repair]:
    """A constant that is the root of the size of a dim, or an integer that is a size: those of another dim or axis.

    Worked example: `q @ k.T * 16**-0.5` with heads of 4 of 16 features: it should be divided by the root of 4.
    """
    name = bench.call.name
    sizes = [size for size in _list_sizes(bench) if size > 1]
    for number, x in enumerate(bench.call.operands):
        # A constant is a known number: what follows from an input is none.
        if isinstance(x, Exact) or x.size != 1 or x.dtype.kind not in "fi":
            continue
        # A float may be a size by chance: 0.25 is one of four, and is often a rate.
        powers = (0.5, -0.5) if x.dtype.kind == "f" else (1.0,)
        for power, size in itertools.product(powers, sizes):
            if x.dtype.type(float(size) ** power) != x.item():
                continue
            for other in sizes:
                if other != size:
                    constant = np.full(x.shape, float(other) ** power, x.dtype)
                    words = f"{name} of the size {other} in place of {size}"
                    yield change_operands(Cost.DIM, words, _replace_operand, bench, number, constant)


def _replace_operand(operands: Sequence[Operand], bench: Bench, number: int, x: Operand) -> Sequence[Operand]:
    return bench.rerun(replace_item(operands, number, x))


# Places


def repair_place(bench: Bench) -> Iterator[Repair]:
    """Elements from other places, or in another order."""
    name = bench.call.name
    params = bench.call.equation.params
    operands = bench.call.operands
    if name == "slice" and not any(step > 1 for step in params["strides"] or ()):
        for dim in range(len(params["start_indices"])):
            yield from _repair_start(bench, dim)
    if name == "concatenate" and 1 < len(operands) < 4:
        in_order = tuple(range(len(operands)))
        for order in itertools.permutations(in_order):
            if order != in_order:
                yield change_operands(Cost.OPERAND, "concatenate in another order", _reorder, bench, order)
    if name in ("cumsum", "cumprod"):
        words = f"{name} in the other direction"
        yield change_operands(Cost.OPERATOR, words, _rerun_with, bench, "reverse", not params["reverse"])
    if name == "cumsum":
        words = "cumsum of what is before each element"
        yield Repair(Cost.INDEX, words, _exclude_operand(bench))
    if name == "transpose" and operands[0].shape == bench.result.shape:
        yield change_operands(Cost.OPERATOR, f"without {name}", keep_operands)
    if name == "dynamic_slice":
        for names in list_subsets(bench.varying_axes(operands[0])):
            words = f"dynamic_slice of the sum over {quoted(names)}"
            yield change_operands(Cost.SLICE_OF_SUM, words, _sum_first, bench, names)
    if name in ("gather", "scatter", "dynamic_slice", "dynamic_update_slice"):
        yield from _repair_position(bench)


def _exclude_operand(bench: Bench) -> Change:
    """Running sums without the element itself: where the rows of a device begin, in place of where they end."""
    aval = bench.call.equation.outvars[0].aval
    equation = trace_equation(lax.sub, aval, 2)

    def change(operands: Sequence[Operand], results: Sequence[Operand], values: Values) -> Sequence[Operand]:
        return bench.interpreter.step(equation, [results[0], operands[0]])

    return change


def _rerun_with(operands: Sequence[Operand], bench: Bench, param: str, value: Any) -> Sequence[Operand]:
    return bench.rerun(operands, **{param: value})


def _reorder(operands: Sequence[Operand], bench: Bench, order: Sequence[int]) -> Sequence[Operand]:
    return bench.rerun([operands[i] for i in order])


def _sum_first(operands: Sequence[Operand], bench: Bench, names: Sequence[str]) -> Sequence[Operand]:
    return bench.rerun([bench.reduce(operands[0], names), *operands[1:]])


def _repair_start(bench: Bench, dim: int) -> Iterator[Repair]:
    """Other slices of the same size: at another place of a dim, or at the place of the device."""
    params = bench.call.equation.params
    begin = params["start_indices"][dim]
    width = params["limit_indices"][dim] - begin
    size = bench.shape(bench.call.operands[0])[dim]
    for start in range(min(size - width, _MOST_STARTS) + 1):
        if start != begin:
            yield change_operands(Cost.INDEX, f"a slice from {start} of dim {dim}", _slice_from, bench, dim, start)
    for axis, n in bench.axes.items():
        # The dim has a slice for each device, and less than one more.
        if n > 1 and n * width <= size < size + width:
            times = f" times {width}" if width > 1 else ""
            words = f"a slice from the index along {axis!r}{times} of dim {dim}"
            yield change_operands(Cost.INDEX, words, _slice_of_device, bench, dim, axis, width)


def _slice_from(operands: Sequence[Operand], bench: Bench, dim: int, start: int) -> Sequence[Operand]:
    params = bench.call.equation.params
    begins = params["start_indices"]
    ends = params["limit_indices"]
    width = ends[dim] - begins[dim]
    begins = replace_item(begins, dim, start)
    ends = replace_item(ends, dim, start + width)
    return bench.rerun(operands, start_indices=begins, limit_indices=ends)


def _slice_of_device(operands: Sequence[Operand], bench: Bench, dim: int, axis: str, width: int) -> list[Operand]:
    pieces: list[Operand] = []
    for i in range(bench.axes[axis]):
        pieces += _slice_from(operands, bench, dim, i * width)
    return [bench.choose_by_device(axis, pieces)]


def _repair_position(bench: Bench) -> Iterator[Repair]:
    """Where an equation reads or writes at integers: one place further on or back, around the end."""
    array = bench.call.operands[0]
    size = max(bench.shape(array), default=1)
    for number, x in enumerate(bench.call.operands):
        if is_integer(x) and x is not array:
            words = f"{bench.call.name} one place further on"
            yield change_operands(Cost.INDEX, words, _shift_operand, bench, number, 1, size)
            words = f"{bench.call.name} one place back"
            yield change_operands(Cost.INDEX, words, _shift_operand, bench, number, -1, size)


def _shift_operand(
    operands: Sequence[Operand], bench: Bench, number: int, distance: int, size: int | None = None
) -> Sequence[Operand]:
    """The equation with an operand of integers plus a constant, modulo a size if there is one."""
    x = operands[number]
    x = x + x.dtype.type(distance)
    if size is not None:
        x = x % size
    return bench.rerun(replace_item(operands, number, x))


# Constants


def repair_filling(bench: Bench) -> Iterator[Repair]:
    """Another constant that an array is filled with.

    Worked example: the largest of three neighbours, `jnp.where(i == 0, 0.0, left)` beyond the first place. A zero is
    larger than negative neighbours; minus infinity is larger than none.
    """
    [x] = bench.call.operands
    # A constant is a known number: what follows from an input is none.
    if isinstance(x, Exact) or x.dtype.kind != "f" or x.size > 1:
        return
    for words, number in _FILLINGS.items():
        filling = np.full(x.shape, number, x.dtype)
        yield change_operands(Cost.OPERATOR, f"{words} in place of that constant", _fill, bench, filling)


def _fill(operands: Sequence[Operand], bench: Bench, filling: np.ndarray) -> Sequence[Operand]:
    return bench.rerun([filling])


# Operators


def repair_operator(bench: Bench) -> Iterator[Repair]:
    """Another operator, none, or its operands in another order."""
    name = bench.call.name
    result = bench.result
    for other in _CONFUSED.get(name, ()):
        words = f"{other} in place of {name}"
        yield change_operands(Cost.OPERATOR, words, bench.rerun, _PRIMITIVES[other])
    if name == "remainder":
        words = "a division in place of its remainder"
        yield change_operands(Cost.OPERATOR, words, _divide, np.floor_divide, result.dtype)
    if name == "floor_divide":
        words = "the remainder in place of the division"
        yield change_operands(Cost.OPERATOR, words, _divide, np.remainder, result.dtype)
    if name in _NOT_COMMUTATIVE:
        yield change_operands(Cost.OPERATOR, f"the operands of {name} exchanged", _reorder, bench, (1, 0))
    if name in _BINARY:
        # Without the second operand of `a + b` the result is a.
        for number, missing in ((0, "second"), (1, "first")):
            if bench.shape(bench.call.operands[number]) == bench.shape(result):
                words = f"without the {missing} operand of {name}"
                yield change_operands(Cost.OPERATOR, words, _take_operand, number)
    if name in _UNARY:
        yield change_operands(Cost.OPERATOR, f"without {name}", keep_operands)
    if is_mask(result):
        yield from _repair_decision(bench)
    if name == "select_n" and len(bench.call.operands) == 3:
        yield change_operands(Cost.OPERATOR, "select_n as where the mask is false", _take_operand, 1)
        yield change_operands(Cost.OPERATOR, "select_n as where the mask is true", _take_operand, 2)
    if name == "integer_pow":
        for power in sorted({1, 2, 3} - {bench.call.equation.params["y"]}):
            yield change_operands(Cost.OPERATOR, f"the power {power}", _rerun_with, bench, "y", power)


def _divide(operands: Sequence[Operand], function: Any, dtype: Any) -> list[Operand]:
    return [function(*operands).astype(dtype)]


def _take_operand(operands: Sequence[Operand], number: int) -> list[Operand]:
    return [operands[number]]


def _repair_decision(bench: Bench) -> Iterator[Repair]:
    """A mask that is one off, the opposite of it, or none."""
    name = bench.call.name
    if all(is_integer(x) for x in bench.call.operands):
        for number in range(len(bench.call.operands)):
            words = f"{name} of an operand plus 1"
            yield change_operands(Cost.INDEX, words, _shift_operand, bench, number, 1)
            words = f"{name} of an operand minus 1"
            yield change_operands(Cost.INDEX, words, _shift_operand, bench, number, -1)
        yield from _repair_end(bench)
    yield change_result(Cost.OPERATOR, f"the opposite of {name}", np.logical_not)
    yield change_result(Cost.OPERATOR, f"a mask that is always true in place of {name}", np.ones_like)
    yield change_result(Cost.OPERATOR, f"a mask that is always false in place of {name}", np.zeros_like)


def _repair_end(bench: Bench) -> Iterator[Repair]:
    """The last device in place of the first one, or the first in place of the last."""
    name = bench.call.name
    for number, x in enumerate(bench.call.operands):
        if x.size != 1:
            continue
        for axis in bench.varying_axes(bench.call.operands[1 - number]):
            last = bench.axes[axis] - 1
            for end, other, words in ((0, last, "last"), (last, 0, "first")):
                if x.item() == end:
                    constant = np.full(x.shape, other, x.dtype)
                    words = f"{name} of the {words} device along {axis!r}"
                    yield change_operands(Cost.INDEX, words, _replace_operand, bench, number, constant)


# Operands


def repair_function(bench: Bench) -> Iterator[Repair]:
    """A function of the result."""
    aval = bench.call.equation.outvars[0].aval
    if not _is_float(aval):
        return
    for function in _FUNCTIONS:
        equation = trace_equation(function, aval, 1)
        words = f"the {equation.primitive.name} of {bench.call.name}"
        yield change_result(Cost.FACTOR, words, _apply_equation, bench, equation)


def _apply_equation(x: Operand, bench: Bench, equation: Any) -> Operand:
    return bench.interpreter.step(equation, [x])[0]


def repair_unread(bench: Bench, readable: Sequence[Any], unread: Set[Any]) -> Iterator[Repair]:
    """A term or a factor that the kernel is given or computes, and that nothing reads: with some dims of the result.

    Worked example: weights [4] of candidates, which `jnp.exp(x @ candidates.T)`, [3, 4], should be divided by.
    """
    aval = bench.call.equation.outvars[0].aval
    if not _is_float(aval):
        return
    shape = bench.shape(bench.result)
    for variable in readable:
        if variable not in unread or getattr(variable.aval, "dtype", None) != aval.dtype:
            continue
        for dims in itertools.combinations(range(len(shape)), len(variable.aval.shape)):
            if variable.aval.shape != tuple(shape[dim] for dim in dims):
                continue
            added = tuple(dim - len(shape) for dim in range(len(shape)) if dim not in dims)
            for function in _TERMS:
                equation = trace_equation(function, aval, 2)
                words = f"{equation.primitive.name} of {bench.call.name} and what nothing reads"
                change = _combine_with(bench, equation, variable, added)
                yield Repair(Cost.UNREAD_FACTOR, words, change, behind=True)


def repair_term(bench: Bench, readable: Sequence[Any]) -> Iterator[Repair]:
    """Another variable that is added to the result, or is its factor."""
    aval = bench.call.equation.outvars[0].aval
    alike = [variable for variable in readable if _is_alike(variable.aval, aval)]
    for variable, function in itertools.product(_select(alike), _TERMS):
        equation = trace_equation(function, aval, 2)
        words = f"{equation.primitive.name} of {bench.call.name} and another value"
        yield Repair(Cost.FACTOR, words, _combine_with(bench, equation, variable), behind=True)


def _combine_with(bench: Bench, equation: Any, variable: Any, added: tuple[int, ...] = ()) -> Change:
    """The result with another variable, which gets dims of size 1 at some places, counted from the end."""

    def change(operands: Sequence[Operand], results: Sequence[Operand], values: Values) -> Sequence[Operand]:
        x = lift_operand(bench.field, values[variable])
        if added:
            x = x.move(lambda part: np.expand_dims(part, added))
        return bench.interpreter.step(equation, [results[0], x])

    return change


def repair_operand(bench: Bench, readable: Sequence[Any], unread: Set[Any]) -> Iterator[Repair]:
    """Another variable in place of an operand, or as its factor.

    What the kernel is given or computes, and nothing reads, is likely to be what should have been read.
    """
    name = bench.call.name
    for number, operand in enumerate(bench.call.equation.invars):
        others = [variable for variable in readable if variable is not operand]
        alike = [variable for variable in others if _is_alike(variable.aval, operand.aval)]
        unread_alike = [variable for variable in alike if variable in unread]
        candidates = _select(alike)
        for variable in unread_alike:
            yield Repair(Cost.UNREAD, f"another operand of {name}", read_instead(bench, number, variable))
        for variable in candidates:
            if variable not in unread:
                yield Repair(Cost.OPERAND, f"another operand of {name}", read_instead(bench, number, variable))
        if name not in ("add", "sub", "mul", "dot_general") or not _is_float(operand.aval):
            continue
        # A factor [t] of an operand [t, d] may be missing, too.
        for variable in others:
            if variable in unread and _is_leading(variable.aval, operand.aval):
                words = f"another factor of {name}"
                yield Repair(Cost.UNREAD_FACTOR, words, _multiply_operand(bench, number, variable))
        if not isinstance(bench.call.operands[number], Exact):
            continue
        # Its own square, too, but not of a literal.
        if not hasattr(operand, "val"):
            candidates = [*candidates, operand]
        for variable in candidates:
            if variable not in unread:
                yield Repair(Cost.FACTOR, f"another factor of {name}", _multiply_operand(bench, number, variable))


def repair_round(bench: Bench, readable: Sequence[Any], rounds: Mapping[Any, Sequence[Any]]) -> Iterator[Repair]:
    """What the rounds before or after made, where a list of what an unrolled loop made becomes an array.

    Worked example: the last of two stages has its first result after tick 1. Of three microbatches, `done[:3]` has what
    the ticks 0, 1 and 2 made, in place of 1, 2 and 3.
    """
    name = bench.call.name
    if name not in ("concatenate", "stack"):
        return
    series = [rounds.get(atom, ()) if not hasattr(atom, "val") else () for atom in bench.call.equation.invars]
    if not series or not series[0] or any(other is not series[0] for other in series):
        return
    positions = [series[0].index(atom) for atom in bench.call.equation.invars]
    for distance, words in ((1, "later"), (-1, "earlier")):
        others = [position + distance for position in positions]
        if min(others) < 0 or max(others) >= len(series[0]):
            continue
        variables = [series[0][other] for other in others]
        if all(variable in readable for variable in variables):
            yield Repair(Cost.INDEX, f"{name} of what rounds one {words} made", _read_all(bench, variables))


def _read_all(bench: Bench, variables: Sequence[Any]) -> Change:
    def change(operands: Sequence[Operand], results: Sequence[Operand], values: Values) -> Sequence[Operand]:
        return bench.rerun([values[variable] for variable in variables])

    return change


def read_instead(bench: Bench, number: int, variable: Any) -> Change:
    """Reads another variable as the operand of this number."""

    def change(operands: Sequence[Operand], results: Sequence[Operand], values: Values) -> Sequence[Operand]:
        return bench.rerun(replace_item(operands, number, values[variable]))

    return change


def _multiply_operand(bench: Bench, number: int, variable: Any) -> Change:
    def change(operands: Sequence[Operand], results: Sequence[Operand], values: Values) -> Sequence[Operand]:
        x = lift_operand(bench.field, operands[number])
        factor = lift_operand(bench.field, values[variable])
        missing = len(x.shape) - len(factor.shape)
        if missing:
            factor = factor.move(lambda part: part.reshape(part.shape + (1,) * missing))
        return bench.rerun(replace_item(operands, number, multiply(bench.field, x, factor)))

    return change


def _is_alike(a: Any, b: Any) -> bool:
    """Whether two types have the same shape and dtype."""
    return getattr(a, "shape", None) == getattr(b, "shape", ()) and getattr(a, "dtype", None) == getattr(b, "dtype", 0)


def _is_float(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.floating))


def _is_leading(a: Any, b: Any) -> bool:
    """Whether an array of floats has the first dims of another one, or all of them."""
    shape = getattr(a, "shape", None)
    if not shape or getattr(a, "dtype", None) != getattr(b, "dtype", None):
        return False
    return shape == b.shape[: len(shape)]


def _select(variables: list[Any]) -> list[Any]:
    """The first and the last ones: inputs, and what was computed just before."""
    return variables if len(variables) <= _MOST_VARIABLES else [*variables[:2], *variables[-4:]]
