"""Repairs of the arithmetic of one device: a factor, the place of elements, a constant, an operator, a function.

`operand_repairs.py` has the repairs that read another variable.

Worked example: `y = x[1:3] / 4.0` with x [4] on two devices. Some repairs, and what they give in place of the result:

    repair_place        of the slice: "a slice from 2 of dim 0"         x[2:4]
    repair_operator     of the div: "mul in place of div"               x[1:3] * 4.0
    repair_factor       of the div: "div times 2, the size of 'a'"      x[1:3] / 4.0 * 2
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from jax import lax

from shardkit._arguments.checks import quote
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
    change_operands,
    change_result,
    is_integer,
    is_mask,
    keep_operands,
    list_subsets,
    replace_item,
    select_sizes,
    trace_equation,
)
from shardkit.testing.exact.rules.operands import Operand

# An array is filled with the number that changes nothing in a sum, a product, a maximum or a minimum.
_FILLINGS = {"zeros": 0.0, "ones": 1.0, "minus infinities": -math.inf, "infinities": math.inf}
# Each start is tried by one more run of the program.
_MOST_STARTS = 8
_FUNCTIONS = (lax.sqrt, lax.rsqrt, lax.exp, lax.log, lax.tanh, lax.square)
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
_NOT_COMMUTATIVE = ("sub", "div", "dot_general", "lt", "le", "gt", "ge")
_BINARY = ("add", "sub", "mul", "div", "max", "min", "and", "or")
_UNARY = ("neg", "sqrt", "exp", "log", "tanh", "logistic", "square", "integer_pow", "abs", "rev", "stop_gradient")


# Factors


def repair_factor(bench: Bench) -> Iterator[Repair]:
    """The result times or divided by the size of an axis or dim, or with the other sign."""
    name = bench.name
    for size, (cost, meaning) in _list_sizes(bench).items():
        if size < 2:
            continue
        yield change_result(cost, f"{name} times {size}, {meaning}", bench.scale, Fraction(size))
        if not is_integer(bench.result):
            yield change_result(cost, f"{name} divided by {size}, {meaning}", bench.scale, Fraction(1, size))
    yield change_result(Cost.RARE, f"minus {name}", bench.scale, Fraction(-1))


def _list_sizes(bench: Bench) -> dict[int, tuple[float, str]]:
    """Sizes by which a result may be wrong, each with its cost and meaning: of axes, of all devices, and of dims.

    A dim counts by its size on a device, and by its size before an axis split it: 4 on a=2 gives 4 and 8.
    """
    sizes: dict[int, tuple[float, str]] = {}
    for axis, n in bench.axes.items():
        if n > 1:
            sizes[n] = Cost.SIZE, f"the size of {axis!r}"
    # Axes come first and dims last, so that a size which is both is explained by the axis, the likelier cause.
    sizes.setdefault(bench.count_devices(bench.axes), (Cost.SIZE, "the number of devices"))
    dims = set(bench.sizes)
    for n in bench.axes.values():
        dims.update(n * size for size in bench.sizes)
    for size in sorted(dims):
        sizes.setdefault(size, (Cost.DIM, "the size of a dim"))
    return sizes


def repair_size(bench: Bench) -> Iterator[Repair]:
    """In place of a constant that is a size, or the root of one, that of another dim or axis.

    Worked example: `q @ k.T * 16**-0.5` with heads of 4 of 16 features. The product should be divided by the root of 4.
    """
    sizes = [size for size in _list_sizes(bench) if size > 1]
    for number, x in enumerate(bench.operands):
        # A constant is a known array. A number of the field follows from an input.
        if isinstance(x, Exact) or x.size != 1 or x.dtype.kind not in "fi":
            continue
        candidates = select_sizes(sizes, x)
        for size, power in _find_powers(x, candidates):
            for other in candidates:
                if other == size:
                    continue
                constant = np.full(x.shape, float(other) ** power, x.dtype)
                words = f"{bench.name} of the size {other} in place of {size}"
                yield change_operands(Cost.DIM, words, bench.rerun_with_operand, number, constant)


def _find_powers(x: np.ndarray, sizes: Sequence[int]) -> list[tuple[int, float]]:
    """The sizes of which a constant is a power, with the power: 0.25 is 16 to the power -0.5."""
    # Of floats only roots of sizes count: 0.25 is one of four, but is often a rate.
    powers: tuple[float, ...] = (1.0,)
    if x.dtype.kind == "f":
        powers = (0.5, -0.5)
    matches = []
    for power, size in itertools.product(powers, sizes):
        # In the dtype of the constant: the root of 3 is another number in float32 than in float64.
        if x.dtype.type(float(size) ** power) == x.item():
            matches.append((size, power))
    return matches


# Places


def repair_place(bench: Bench) -> Iterator[Repair]:
    """Elements from other places of an array, or in another order."""
    name = bench.name
    if name == "slice":
        yield from _repair_slice(bench)
    if name == "concatenate":
        yield from _repair_concatenation(bench)
    if name in ("cumsum", "cumprod"):
        yield from _repair_running(bench)
    # Without it, an array that is not square would not fit the equations behind it.
    if name == "transpose" and bench.operands[0].shape == bench.result.shape:
        yield change_operands(Cost.OPERATOR, f"without {name}", keep_operands)
    if name == "dynamic_slice":
        yield from _repair_dynamic_slice(bench)
    if name in ("gather", "scatter", "dynamic_slice", "dynamic_update_slice"):
        yield from _repair_position(bench)


def _repair_slice(bench: Bench) -> Iterator[Repair]:
    """A slice from other starts; one with strides is no mistake of its start."""
    params = bench.equation.params
    has_strides = any(step > 1 for step in params["strides"] or ())
    if has_strides:
        return
    for dim in range(len(params["start_indices"])):
        yield from _repair_start(bench, dim)


def _repair_start(bench: Bench, dim: int) -> Iterator[Repair]:
    """Another slice of the same size: from another start in a dim, or from the start of this device's part."""
    params = bench.equation.params
    begin = params["start_indices"][dim]
    width = params["limit_indices"][dim] - begin
    size = bench.shape(bench.operands[0])[dim]
    for start in range(min(size - width, _MOST_STARTS) + 1):
        if start != begin:
            yield change_operands(Cost.INDEX, f"a slice from {start} of dim {dim}", _slice_from, bench, dim, start)
    for axis, n in bench.axes.items():
        # The dim must have room for a slice of each device. It may have more: a table of all positions does.
        if n > 1 and n * width <= size:
            place = f"the index along {axis!r}"
            if width > 1:
                place += f" times {width}"
            words = f"a slice from {place} of dim {dim}"
            yield change_operands(Cost.INDEX, words, _slice_of_device, bench, dim, axis, width)


def _slice_from(operands: Operands, bench: Bench, dim: int, start: int) -> Operands:
    params = bench.equation.params
    # Of x[3:5] the start is 3 and the width 2; from the start 4 it is x[4:6].
    begins = params["start_indices"]
    ends = params["limit_indices"]
    width = ends[dim] - begins[dim]
    begins = replace_item(begins, dim, start)
    ends = replace_item(ends, dim, start + width)
    return bench.rerun(operands, start_indices=begins, limit_indices=ends)


def _slice_of_device(operands: Operands, bench: Bench, dim: int, axis: str, width: int) -> Operands:
    # Of x [8] on a=4 with the width 2: x[0:2] on device 0, x[2:4] on device 1, and so on.
    pieces: list[Operand] = []
    for i in range(bench.axes[axis]):
        pieces += _slice_from(operands, bench, dim, i * width)
    return [bench.choose_by_device(axis, pieces)]


def _repair_concatenation(bench: Bench) -> Iterator[Repair]:
    """Two or three arrays in each other order; of more there are too many orders."""
    count = len(bench.operands)
    if not 1 < count < 4:
        return
    in_order = tuple(range(count))
    for order in itertools.permutations(in_order):
        if order != in_order:
            yield change_operands(Cost.OPERAND, "concatenate in another order", _reorder, bench, order)


def _reorder(operands: Operands, bench: Bench, order: Sequence[int]) -> Operands:
    return bench.rerun([operands[number] for number in order])


def _repair_running(bench: Bench) -> Iterator[Repair]:
    """A running sum or product from the other end, and a sum of what is before each element."""
    name = bench.name
    is_reversed = bench.equation.params["reverse"]
    words = f"{name} in the other direction"
    yield change_operands(Cost.OPERATOR, words, bench.rerun_with_param, "reverse", not is_reversed)
    if name == "cumsum":
        words = "cumsum of what is before each element"
        yield Repair(Cost.INDEX, words, _exclude_operand(bench))


def _exclude_operand(bench: Bench) -> EquationChange:
    """Running sums without the element itself: the places where devices' rows begin, and not those where they end.

    Worked example: three devices have 2, 3 and 1 rows. cumsum gives the ends 2, 5, 6; less the counts, 0, 2, 5.
    """
    equation = trace_equation(lax.sub, bench.aval, 2)

    @FunctionChange
    def change(operands: Operands, results: Operands, values: Values) -> Operands:
        return bench.interpreter.step(equation, [results[0], operands[0]])

    return change


def _repair_dynamic_slice(bench: Bench) -> Iterator[Repair]:
    """A device's slice of a sum, where it was taken of this device's term: a sum is missing in front of it."""
    for names in list_subsets(bench.find_varying_axes(bench.operands[0])):
        words = f"dynamic_slice of the sum over {quote(names)}"
        yield change_operands(Cost.SLICE_OF_SUM, words, _sum_first, bench, names)


def _sum_first(operands: Operands, bench: Bench, names: Sequence[str]) -> Operands:
    return bench.rerun_with_operand(operands, 0, bench.reduce(operands[0], names))


def _repair_position(bench: Bench) -> Iterator[Repair]:
    """Indices of a gather, scatter or dynamic slice that are larger or smaller by one, around the end of the array."""
    array = bench.operands[0]
    # Which dim the indices are of is not looked up: in most programs it is the largest.
    size = max(bench.shape(array), default=1)
    for number, x in enumerate(bench.operands):
        # The array itself may hold integers, which are no places.
        if is_integer(x) and x is not array:
            words = f"{bench.name} one place further on"
            yield change_operands(Cost.INDEX, words, _shift_operand, bench, number, 1, size)
            words = f"{bench.name} one place back"
            yield change_operands(Cost.INDEX, words, _shift_operand, bench, number, -1, size)


def _shift_operand(operands: Operands, bench: Bench, number: int, distance: int, size: int | None = None) -> Operands:
    """The results of the equation with operand `number` plus a distance, modulo a size if there is one."""
    x = operands[number]
    x = x + x.dtype.type(distance)
    if size is not None:
        x = x % size
    return bench.rerun_with_operand(operands, number, x)


# Constants


def repair_filling(bench: Bench) -> Iterator[Repair]:
    """Another constant with which an array is filled.

    Worked example: the largest of three neighbours, where the first place has no left one: `jnp.where(i == 0, 0.0,
    left)`. A zero is larger than negative neighbours; minus infinity is larger than none.
    """
    [x] = bench.operands
    # A constant is a known array. A number of the field follows from an input.
    if isinstance(x, Exact) or x.dtype.kind != "f" or x.size > 1:
        return
    for words, number in _FILLINGS.items():
        filling = np.full(x.shape, number, x.dtype)
        yield change_operands(Cost.OPERATOR, f"{words} in place of that constant", bench.rerun_with_operand, 0, filling)


# Operators


def repair_operator(bench: Bench) -> Iterator[Repair]:
    """Another operator, no operator, or the operands in another order."""
    name = bench.name
    for other in _CONFUSED.get(name, ()):
        words = f"{other} in place of {name}"
        primitive = getattr(lax, f"{other}_p")
        yield change_operands(Cost.OPERATOR, words, bench.rerun, primitive)
    if name in _NOT_COMMUTATIVE:
        yield change_operands(Cost.OPERATOR, f"the operands of {name} exchanged", _reorder, bench, (1, 0))
    if name == "dot_general":
        yield from _repair_contraction(bench)
    if name in _BINARY:
        yield from _leave_out_operand(bench)
    if name in _UNARY:
        yield change_operands(Cost.OPERATOR, f"without {name}", keep_operands)
    if is_mask(bench.result):
        yield from _repair_decision(bench)
    # The operands are the mask, what is taken where it is false, and what is taken where it is true.
    if name == "select_n" and len(bench.operands) == 3:
        yield change_operands(Cost.OPERATOR, "select_n as where the mask is false", _take_operand, 1)
        yield change_operands(Cost.OPERATOR, "select_n as where the mask is true", _take_operand, 2)
    if name == "integer_pow":
        for power in sorted({1, 2, 3} - {bench.equation.params["y"]}):
            yield change_operands(Cost.OPERATOR, f"the power {power}", bench.rerun_with_param, "y", power)


def _repair_contraction(bench: Bench) -> Iterator[Repair]:
    """A product with a transposed operand: it sums over another dim of the same size.

    Worked example: `m @ v` for `v @ m`, where m is [3, 3]. The product sums over dim 1 of m in place of dim 0.
    """
    contracted, batched = bench.equation.params["dimension_numbers"]
    for number, ordinal in enumerate(("first", "second")):
        words = f"the {ordinal} operand of dot_general transposed"
        shape = bench.shape(bench.operands[number])
        summed = contracted[number]
        for position, dim in enumerate(summed):
            for other, size in enumerate(shape):
                is_free = other not in summed and other not in batched[number]
                if is_free and size == shape[dim]:
                    dims = replace_item(summed, position, other)
                    numbers = (replace_item(contracted, number, dims), batched)
                    yield change_operands(Cost.OPERATOR, words, bench.rerun_with_param, "dimension_numbers", numbers)


def _leave_out_operand(bench: Bench) -> Iterator[Repair]:
    """One of two operands in place of the result: without the second operand of `a + b` the result is a."""
    for number, missing in ((0, "second"), (1, "first")):
        if bench.shape(bench.operands[number]) == bench.shape(bench.result):
            words = f"without the {missing} operand of {bench.name}"
            yield change_operands(Cost.OPERATOR, words, _take_operand, number)


def _take_operand(operands: Operands, number: int) -> Operands:
    return [operands[number]]


def _repair_decision(bench: Bench) -> Iterator[Repair]:
    """A mask whose bound is off by one, the opposite mask, or no mask."""
    name = bench.name
    if all(is_integer(x) for x in bench.operands):
        for number in range(len(bench.operands)):
            words = f"{name} of an operand plus 1"
            yield change_operands(Cost.INDEX, words, _shift_operand, bench, number, 1)
            words = f"{name} of an operand minus 1"
            yield change_operands(Cost.INDEX, words, _shift_operand, bench, number, -1)
        if len(bench.operands) == 2:  # the other one is a cast of an integer to a boolean
            yield from _repair_end(bench)
    yield change_result(Cost.OPERATOR, f"the opposite of {name}", np.logical_not)
    yield change_result(Cost.OPERATOR, f"a mask that is always true in place of {name}", np.ones_like)
    yield change_result(Cost.OPERATOR, f"a mask that is always false in place of {name}", np.zeros_like)


def _repair_end(bench: Bench) -> Iterator[Repair]:
    """A comparison with the last device in place of the first one, or with the first in place of the last.

    Worked example: `axis_index("a") == 0` on a=4. The repair compares the index with 3.
    """
    for number, x in enumerate(bench.operands):
        if x.size != 1:
            continue
        compared = bench.operands[1 - number]
        for axis in bench.find_varying_axes(compared):
            last = bench.axes[axis] - 1
            for end, other, ordinal in ((0, last, "last"), (last, 0, "first")):
                if x.item() == end:
                    constant = np.full(x.shape, other, x.dtype)
                    words = f"{bench.name} of the {ordinal} device along {axis!r}"
                    yield change_operands(Cost.INDEX, words, bench.rerun_with_operand, number, constant)


# Functions


def repair_function(bench: Bench) -> Iterator[Repair]:
    """Behind the equation a function that is missing, as a root."""
    if not is_float(bench.aval):
        return
    for function in _FUNCTIONS:
        equation = trace_equation(function, bench.aval, 1)
        words = f"the {equation.primitive.name} of {bench.name}"
        yield change_result(Cost.FACTOR, words, _apply_equation, bench, equation)


def _apply_equation(x: Operand, bench: Bench, equation: Any) -> Operand:
    [result] = bench.interpreter.step(equation, [x])
    return result
