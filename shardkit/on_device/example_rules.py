"""What each primitive makes of rows of examples and of sums over them; `RULES` has a rule for each.

A rule says of a result what it is (`example_states.py`) from what its operands are. What has no rule mixes
examples, as far as anybody knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from shardkit._jax.jaxprs import kind_of
from shardkit._jax.primitives import registered
from shardkit.on_device.example_states import (
    EACH_TURN,
    UNKNOWN,
    Met,
    Pair,
    Rows,
    State,
    Total,
    Whole,
    any_whole,
    beside,
    is_turn,
    join,
)


def of_one_example(pair: Pair, operands: Sequence[State]) -> State:
    """Whatever is computed of the one example of a loop's iteration, and of what is whole, belongs to it."""
    if not all(isinstance(state, Whole) or is_turn(state) for state in operands):
        return pair.met(f"{pair.name} pairs every example with every other")
    plain = all(state.scale == 1 for state in operands if isinstance(state, Whole | Rows))
    scale = 1.0 if plain else _scale_of(pair.name, pair, operands) if pair.name in _ELEMENTWISE else UNKNOWN
    return Rows(EACH_TURN, scale=scale) if scale else pair.met(f"{pair.name} combines examples with their number")


def sent_along(pair: Pair, state: State, result: Any) -> State:
    """What a collective gives over axes whose devices have the same examples, as tensor parallelism and context do."""
    params, name = pair.many.params, pair.name
    if isinstance(state, Whole):
        return any_whole(result, state.scale)
    if kind_of(pair.many) in ("all_reduce", "ppermute"):
        if isinstance(state, Total) and registered(name).reduces in ("maximum", "minimum"):
            return pair.met(f"{name} is applied to a sum over the examples")
        return state
    dims = {params.get(key) for key in ("all_gather_dimension", "scatter_dimension", "split_axis", "concat_axis")}
    if not params.get("tiled", True) or (isinstance(state, Rows) and state.dim in dims):
        return pair.met(f"{name} moves the examples")
    return state


# Elementwise primitives: those that are linear in one operand, or in all together, and all others.
_LINEAR = {"neg", "stop_gradient", "convert_element_type", "reduce_precision", "real", "imag", "conj", "copy_p"}
_SUMS = {"add", "sub", "add_any"}
_ELEMENTWISE = {
    *("abs", "acos", "acosh", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e"),
    *("bitcast_convert_type", "cbrt", "ceil", "clamp", "clz", "complex", "cos", "cosh", "digamma", "div", "eq"),
    *("eq_to", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igammac"),
    *("integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p", "logistic", "lt", "lt_to", "max", "min"),
    *("mul", "mulhi", "ne", "nextafter", "not", "or", "polygamma", "population_count", "pow"),
    *("regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic"),
    *("shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh", "threefry2x32", "xor", "zeta"),
}


def _scale_of(name: str, pair: Pair, states: Sequence[State]) -> float:
    """The scale of an elementwise result."""
    scales: list[float] = [getattr(state, "scale", UNKNOWN) for state in states]
    if UNKNOWN in scales:
        return UNKNOWN
    if name in _LINEAR:
        return scales[0]
    if name == "mul":
        return scales[0] * scales[1]
    if name == "div":
        return scales[0] / scales[1]
    if name == "integer_pow":
        return float(scales[0] ** pair.many.params["y"])
    if name == "square":
        return scales[0] ** 2
    if name in _SUMS or name in ("max", "min", "select_n"):
        values = states[1:] if name == "select_n" else states
        chosen_by_size = name == "select_n" and scales[0] != 1
        kept = {state.scale for state in values if isinstance(state, Whole | Rows) and not _is_zero(state)}
        if len(kept) <= 1 and not chosen_by_size:
            return next(iter(kept), 1.0)
        return UNKNOWN
    return 1.0 if all(scale == 1 for scale in scales) else UNKNOWN


def _is_zero(state: State) -> bool:
    return isinstance(state, Whole) and state.zero


def _elementwise(pair: Pair, operands: list[State]) -> State:
    name = pair.name
    if name == "select_n" and _is_zero(operands[0]):
        return operands[1]
    if any(isinstance(state, Total) for state in operands):
        return _of_totals(pair, operands)
    rows = [state for state in operands if isinstance(state, Rows)]
    scale = _scale_of(name, pair, operands)
    if scale == UNKNOWN:
        if name == "add" and jnp.issubdtype(pair.many.outvars[0].aval.dtype, jnp.integer):  # x[i] adds n to i < 0
            return pair.met("an example is looked up by its place in the batch")
        return pair.met(f"{name} combines examples with their number")
    if any((other.dim, other.copies) != (rows[0].dim, rows[0].copies) for other in rows[1:]):
        return pair.met(f"{name} pairs every example with every other")
    for number, state in enumerate(operands):
        if isinstance(state, Whole) and rows[0].dim in state.differs and len(pair.shape(number)) == len(pair.out):
            return pair.met(f"{name} combines an example with a value that depends on its place in the batch")
    return Rows(rows[0].dim, rows[0].copies, scale)


def _of_totals(pair: Pair, operands: list[State]) -> State:
    """An elementwise operation with sums over the examples: what is linear in them gives such a sum."""
    name = pair.name
    if any(isinstance(state, Rows) for state in operands):
        return pair.met(f"{name} combines each example with a sum over all")
    first, *others = operands
    if name == "convert_element_type" and _rounds(pair.many):
        return pair.met("a sum over the examples is rounded to an integer")
    if name in _LINEAR:
        return first
    if name == "mul":
        factors = [state for state in operands if isinstance(state, Whole)]
        totals = [state for state in operands if isinstance(state, Total)]
        if len(totals) == 1:
            return _scaled(pair, totals[0], factors[0].scale)
    if name == "div" and isinstance(first, Total) and isinstance(others[0], Whole):
        return _scaled(pair, first, others[0].scale and 1 / others[0].scale)
    if name in _SUMS:
        return _sum_of_totals(pair, operands)
    if name == "select_n" and isinstance(first, Whole) and first.scale == 1:
        return _sum_of_totals(pair, others)
    return pair.met(f"{name} is applied to a sum over the examples")


def _rounds(equation: Any) -> bool:
    """Whether a conversion rounds to integers."""
    before, after = equation.invars[0].aval.dtype, equation.params["new_dtype"]
    return jnp.issubdtype(before, jnp.inexact) and not jnp.issubdtype(after, jnp.inexact)


def _scaled(pair: Pair, total: Total, factor: float) -> State:
    if factor == UNKNOWN:
        return pair.met("a sum over the examples is combined with their number")
    return Total(total.scale * factor)


def _sum_of_totals(pair: Pair, states: Sequence[State]) -> State:
    """A sum of sums, and of constants that grow as they do: beside a sum one times n, beside a mean one that stays."""
    scales = {state.scale for state in states if isinstance(state, Total)}
    if len(scales) > 1:
        return pair.met("a mean over the examples is added to a sum over them")
    scale = scales.pop()
    for state in states:
        if isinstance(state, Whole) and not state.zero and state.scale != 2 * scale:
            return pair.met("what does not depend on the examples is added to a sum over them")
    return Total(scale)


def whole_results(pair: Pair, operands: list[State]) -> list[State]:
    """Results that do not depend on the examples, and along which dims their elements differ."""
    name, equation = pair.name, pair.many
    wholes = [state for state in operands if isinstance(state, Whole)]
    if name not in _KEEPS_ELEMENTS and _depends_on_size(pair, wholes):
        return [any_whole(v, UNKNOWN) for v in equation.outvars]
    if name == "iota":
        dim = equation.params["dimension"]
        return [Whole(frozenset({dim}) if pair.out[dim] > 1 else frozenset(), index=dim)]
    if name == "broadcast_in_dim":
        kept = equation.params["broadcast_dimensions"]
        index = None if wholes[0].index is None else kept[wholes[0].index]
        return [replace(wholes[0], differs=frozenset(kept[dim] for dim in wholes[0].differs), index=index)]
    if name == "convert_element_type":
        return list(wholes)
    if name in ("lt", "ge") and wholes[0].index is not None and wholes[1].zero:
        return [Whole(zero=name == "lt")]  # an index is not negative
    if name == "select_n" and wholes[0].zero:
        return [wholes[1]]
    if name in _ELEMENTWISE or name in _LINEAR or name in _SUMS:
        differs = frozenset[int]().union(*(state.differs for state in wholes))
        zero = (name in _LINEAR and wholes[0].zero) or (name == "mul" and any(state.zero for state in wholes))
        return [Whole(differs, _scale_of(name, pair, wholes), zero)] * len(equation.outvars)
    if name == "reshape":
        if not wholes[0].differs:
            return [Whole(scale=wholes[0].scale, zero=wholes[0].zero)]
        before, after = _without_ones(pair.shape(0)), _without_ones(pair.out)
        sizes = [pair.shape(0)[dim] for dim in before]
        if sizes == [pair.out[dim] for dim in after]:  # dims of size 1 came or went
            places = dict(zip(before, after, strict=True))
            index = places.get(wholes[0].index) if wholes[0].index is not None else None
            return [replace(wholes[0], differs=frozenset(places[dim] for dim in wholes[0].differs), index=index)]
        return [any_whole(equation.outvars[0], wholes[0].scale)]
    if name == "transpose":
        order = list(equation.params["permutation"])
        index = None if wholes[0].index is None else order.index(wholes[0].index)
        return [replace(wholes[0], differs=frozenset(order.index(dim) for dim in wholes[0].differs), index=index)]
    if name == "squeeze":
        gone = equation.params["dimensions"]
        return [replace(wholes[0], differs=_shifted(wholes[0].differs, gone), index=None)]
    if name == "reduce_sum":
        return [_sum_of_whole(pair, wholes[0])]
    if name == "dot_general":
        return [_product_of_wholes(pair, wholes[0], wholes[1])]
    if name in _CHANGES_ONE_DIM:
        differs = frozenset[int]().union(*(state.differs for state in wholes))
        changed = {dim for dim in range(len(pair.out)) if pair.shape(0)[dim : dim + 1] != pair.out[dim : dim + 1]}
        scale = wholes[0].scale if len({state.scale for state in wholes}) == 1 else UNKNOWN
        zero = all(state.zero for state in wholes)
        along = equation.params.get("dimension", equation.params.get("axis"))
        if along is not None:
            changed.add(along)
        return [Whole(frozenset() if zero else differs | changed, scale, zero)] * len(equation.outvars)
    if name.startswith(("reduce_max", "reduce_min", "reduce_and", "reduce_or")):
        gone = equation.params["axes"]
        return [Whole(_shifted(wholes[0].differs, gone), wholes[0].scale)]
    scale = 1.0 if all(state.scale == 1 for state in wholes) else UNKNOWN
    return [any_whole(v, scale) for v in equation.outvars]


# What stays as it is where an array has more elements, or has a rule of its own for that.
_KEEPS_ELEMENTS = {
    *(*_ELEMENTWISE, *_LINEAR, *_SUMS),
    *("iota", "broadcast_in_dim", "reshape", "transpose", "squeeze", "reduce_sum", "dot_general"),
}


def _depends_on_size(pair: Pair, wholes: Sequence[Whole]) -> bool:
    """Whether more examples may change a result, as the maximum of an arange or its last element."""
    few = [variable.aval.shape for variable in pair.few.invars]
    grows = any(shape != pair.shape(number) for number, shape in enumerate(few))
    return grows and any(state.differs for state in wholes)


def _product_of_wholes(pair: Pair, left: Whole, right: Whole) -> Whole:
    contract, batch = pair.many.params["dimension_numbers"]
    differs = set()
    for side, state in enumerate((left, right)):
        for dim in state.differs:
            if dim in batch[side]:
                differs.add(list(batch[side]).index(dim))
            elif dim not in contract[side]:
                differs.add(_dot_place(side, dim, contract, batch, (pair.shape(0), pair.shape(1))))
    grows = any(pair.few.invars[0].aval.shape[dim] != pair.shape(0)[dim] for dim in contract[0])
    scale = UNKNOWN if grows else left.scale * right.scale
    return Whole(frozenset(differs), scale, left.zero or right.zero)


def _sum_of_whole(pair: Pair, state: Whole) -> Whole:
    gone, scale = pair.many.params["axes"], state.scale
    few = pair.few.invars[0].aval.shape
    for dim in gone:
        if few[dim] != pair.shape(0)[dim]:
            scale = UNKNOWN if dim in state.differs else scale * pair.shape(0)[dim] / few[dim]
    return Whole(_shifted(state.differs, gone), scale, state.zero)


# Of whole values: elements move or are combined along one dim, and along the others stay as they are.
_CHANGES_ONE_DIM = {"slice", "rev", "pad", "concatenate", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"}


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [dim for dim, size in enumerate(shape) if size != 1]


def _shifted(dims: frozenset[int], gone: Sequence[int]) -> frozenset[int]:
    return frozenset(_shift(dim, gone) for dim in dims if dim not in gone)


def _shift(dim: int, gone: Sequence[int]) -> int:
    """Where a dim is after others have gone."""
    return dim - sum(other < dim for other in gone)


Rule = Callable[[Pair, list[State]], State | list[State]]


def _one_operand(rule: Callable[[Pair, Rows], State]) -> Rule:
    """A rule for an operation that moves or combines the elements of one array; a sum over the examples stays one."""

    def applied(pair: Pair, operands: list[State]) -> State:
        state = operands[0]
        if any(not isinstance(other, Whole) for other in operands[1:]):
            return pair.met(f"{pair.name} is given places that depend on the examples")
        if isinstance(state, Rows):
            return rule(pair, state)
        if isinstance(state, Total) and pair.name in _MOVES_TOTALS:
            return state
        return pair.met(f"{pair.name} is applied to a sum over the examples")

    return applied


_MOVES_TOTALS = {
    "unstack",
    "broadcast_in_dim",
    "reshape",
    "transpose",
    "squeeze",
    "rev",
    "slice",
    "reduce_sum",
    "dynamic_slice",
}


def _broadcast(pair: Pair, rows: Rows) -> State:
    return replace(rows, dim=pair.many.params["broadcast_dimensions"][rows.dim])


def _transpose(pair: Pair, rows: Rows) -> State:
    return replace(rows, dim=list(pair.many.params["permutation"]).index(rows.dim))


def _squeeze(pair: Pair, rows: Rows) -> State:
    return replace(rows, dim=_shift(rows.dim, pair.many.params["dimensions"]))


def _reshape(pair: Pair, rows: Rows) -> State:
    """The dim in which whole examples still follow each other.

    For example, of `[B, T, D]` to `[B * T, D]` it is dim 0, with T rows of an example, and back again. To `[B / 2, 2 *
    T, D]` there is none: two examples share a row.
    """
    old, new = pair.shape(0), pair.out
    before = math.prod(old[: rows.dim])
    blocks = before * rows.copies  # so many times all examples follow each other in the flat array
    outer = 1
    for dim, size in enumerate(new):
        if outer * size % (blocks * pair.examples) == 0 and blocks % outer == 0 and size % pair.examples == 0:
            return Rows(dim, blocks // outer, rows.scale)
        outer *= size
    return pair.met("reshape puts several examples into one row")


def _reduction(pair: Pair, rows: Rows) -> State:
    gone = pair.many.params["axes"]
    if rows.dim not in gone:
        if pair.name == "reduce_prod" and rows.scale != 1:
            return pair.met("reduce_prod combines examples with their number")
        return replace(rows, dim=_shift(rows.dim, gone))
    if pair.name == "reduce_sum":
        return Total(rows.scale)
    return pair.met(f"{pair.name} is taken over the examples")


def _argument(pair: Pair, rows: Rows) -> State:
    gone = pair.many.params["axes"]
    if rows.dim in gone:
        return pair.met(f"{pair.name} is taken over the examples")
    return Rows(_shift(rows.dim, gone), rows.copies)


def _cumulative(pair: Pair, rows: Rows) -> State:
    if pair.many.params["axis"] == rows.dim:
        return pair.met(f"{pair.name} runs over the examples")
    if pair.name in ("cumprod", "cumlogsumexp") and rows.scale != 1:
        return pair.met(f"{pair.name} combines examples with their number")
    return rows


def _reverse(pair: Pair, rows: Rows) -> State:
    if rows.dim in pair.many.params["dimensions"]:
        return pair.met("rev changes the order of the examples")
    return rows


def _slice(pair: Pair, rows: Rows) -> State:
    params = pair.many.params
    start, limit = params["start_indices"][rows.dim], params["limit_indices"][rows.dim]
    stride = params["strides"][rows.dim] if params["strides"] else 1
    return _part(pair, rows, pair.shape(0)[rows.dim], start, limit, stride)


def _part(pair: Pair, rows: Rows, size: int, start: int, limit: int, stride: int = 1) -> State:
    """Some of the copies of all examples; other parts would leave out some examples."""
    length = size // rows.copies
    if stride == 1 and start % length == 0 and limit % length == 0 and limit > start:
        return replace(rows, copies=(limit - start) // length)
    return pair.met(f"{pair.name} takes some of the examples")


def _split(pair: Pair, operands: list[State]) -> list[State]:
    rows, dim = operands[0], pair.many.params["axis"]
    results: list[State] = []
    start = 0
    for size in pair.many.params["sizes"]:
        if not isinstance(rows, Rows) or dim != rows.dim:
            results.append(rows)
        else:
            results.append(_part(pair, rows, pair.shape(0)[dim], start, start + size))
        start += size
    return results


def _dynamic_slice(pair: Pair, rows: Rows) -> State:
    if pair.out[rows.dim] != pair.shape(0)[rows.dim]:
        return pair.met("dynamic_slice takes some of the examples")
    return rows


def _dynamic_update(pair: Pair, operands: list[State]) -> State:
    if any(not isinstance(state, Whole) for state in operands[2:]):
        return pair.met("dynamic_update_slice is given places that depend on the examples")
    rows = [state for state in operands[:2] if isinstance(state, Rows)]
    whole = [state for state in operands[:2] if isinstance(state, Whole)]
    if len(rows) == 0 or any(isinstance(state, Total) for state in operands[:2]):
        return pair.met("dynamic_update_slice is applied to a sum over the examples")
    if rows[0] != rows[-1] or not all(beside(state, rows[0]) for state in whole):
        return pair.met("dynamic_update_slice pairs every example with every other")
    if pair.shape(0)[rows[0].dim] != pair.shape(1)[rows[0].dim]:
        return pair.met("dynamic_update_slice replaces some of the examples")
    return rows[0]


def _pad(pair: Pair, operands: list[State]) -> State:
    rows, value = operands
    if not isinstance(rows, Rows) or not isinstance(value, Whole):
        return pair.met("pad is applied to a sum over the examples")
    if tuple(pair.many.params["padding_config"][rows.dim]) != (0, 0, 0):
        return pair.met("pad adds rows beside the examples")
    return rows if value.zero or value.scale == rows.scale else pair.met("pad combines examples with their number")


def _concatenate(pair: Pair, operands: list[State]) -> State:
    dim = pair.many.params["dimension"]
    if all(isinstance(state, Total) for state in operands):
        return operands[0] if len(set(operands)) == 1 else pair.met("concatenate joins sums over the examples")
    rows = [state for state in operands if isinstance(state, Rows)]
    whole = [state for state in operands if isinstance(state, Whole)]
    last = dim == len(pair.out) - 1
    if len(rows) + len(whole) < len(operands):
        return pair.met("concatenate joins examples and a sum over them")
    first = rows[0]
    if any((state.dim, state.scale) != (first.dim, first.scale) for state in rows):
        return pair.met("concatenate pairs every example with every other")
    if first.dim != dim:
        if all(beside(state, first) for state in whole) and len({state.copies for state in rows}) == 1:
            return first
        # A gather at the index of each example reads its own row: it looks at the columns.
        return replace(
            pair.met("concatenate combines an example with its place in the batch"),
            columns=tuple(operands) if last else (),
        )
    lengths = {pair.shape(number)[dim] // getattr(state, "copies", 1) for number, state in enumerate(operands)}
    if whole or len(lengths) > 1:
        return pair.met("concatenate adds rows beside the examples")
    return replace(first, copies=sum(state.copies for state in rows))


def _dot(pair: Pair, operands: list[State]) -> State:
    (contract, batch), shapes = pair.many.params["dimension_numbers"], (pair.shape(0), pair.shape(1))
    if any(isinstance(state, Total) for state in operands):
        totals = [state for state in operands if isinstance(state, Total)]
        factors = [state for state in operands if isinstance(state, Whole)]
        if len(totals) == 1 and len(factors) == 1:
            return _scaled(pair, totals[0], factors[0].scale)
        return pair.met("dot_general multiplies a sum over the examples by examples")
    scale = math.prod(state.scale for state in operands if isinstance(state, Rows | Whole))
    if scale == UNKNOWN:
        return pair.met("dot_general combines examples with their number")
    results = []
    for side, state in enumerate(operands):
        other = operands[1 - side]
        if not isinstance(state, Rows):
            continue
        for kind, dims in (("batch", batch), ("contract", contract)):
            if state.dim not in dims[side]:
                continue
            partner = dims[1 - side][list(dims[side]).index(state.dim)]
            paired = isinstance(other, Rows) and (other.dim, other.copies) == (partner, state.copies)
            alone = isinstance(other, Whole) and partner not in other.differs
            if not (paired or alone):
                return pair.met("dot_general multiplies examples by others, or by what depends on their place")
            results.append(Total(scale) if kind == "contract" else _dot_row(state, batch, scale))
            break
        else:
            results.append(Rows(_dot_place(side, state.dim, contract, batch, shapes), state.copies, scale))
    if len(set(results)) > 1:
        return pair.met("dot_general pairs every example with every other")
    return results[0]


def _dot_row(state: Rows, batch: Any, scale: float) -> Rows:
    dims = list(batch[0]) if state.dim in batch[0] else list(batch[1])
    return Rows(dims.index(state.dim), state.copies, scale)


def _dot_place(side: int, dim: int, contract: Any, batch: Any, shapes: Any) -> int:
    """Where a dim of one operand of dot_general, neither contracted nor shared, is in the result."""
    place = len(batch[0])
    for number in range(side + 1):
        taken = {*contract[number], *batch[number]}
        free = [each for each in range(len(shapes[number])) if each not in taken]
        if number == side:
            return place + free.index(dim)
        place += len(free)
    raise AssertionError(side)


def _convolution(pair: Pair, operands: list[State]) -> State:
    image, kernel = operands
    numbers = pair.many.params["dimension_numbers"]
    plain = pair.many.params["batch_group_count"] == 1
    if not plain or not isinstance(image, Rows) or not isinstance(kernel, Whole):
        return pair.met("conv_general_dilated combines different examples")
    if image.dim != numbers.lhs_spec[0] or image.scale * kernel.scale == UNKNOWN:
        return pair.met("conv_general_dilated runs over the examples")
    return Rows(numbers.out_spec[0], image.copies, image.scale * kernel.scale)


def _window(pair: Pair, operands: list[State]) -> State:
    rows = operands[0]
    if not isinstance(rows, Rows) or pair.many.params["window_dimensions"][rows.dim] != 1:
        return pair.met(f"{pair.name} runs over the examples")
    return rows


def _sort(pair: Pair, operands: list[State]) -> State:
    rows = [state for state in operands if isinstance(state, Rows)]
    if not rows or rows[0].dim == pair.many.params["dimension"]:
        return pair.met("sort orders the examples")
    return _elementwise(pair, operands)


def _top(pair: Pair, operands: list[State]) -> State:
    rows = operands[0]
    if not isinstance(rows, Rows) or rows.dim == pair.many.params.get("axis", len(pair.shape(0)) - 1) % len(
        pair.shape(0)
    ):
        return pair.met(f"{pair.name} chooses among the examples")
    return Rows(rows.dim, rows.copies)


def _matrices(pair: Pair, operands: list[State]) -> State:
    """Factorizations and solvers: of every matrix in the last two dims."""
    rows = [state for state in operands if isinstance(state, Rows)]
    for number, state in enumerate(operands):
        if isinstance(state, Total):
            return pair.met(f"{pair.name} is applied to a sum over the examples")
        if isinstance(state, Rows) and (state.dim != rows[0].dim or state.dim >= len(pair.shape(number)) - 2):
            return pair.met(f"{pair.name} takes the examples for a matrix")
        if isinstance(state, Whole) and rows[0].dim in state.differs:
            return pair.met(f"{pair.name} combines an example with a value that depends on its place in the batch")
    if any(state.scale != 1 for state in operands if isinstance(state, Rows | Whole)):
        return pair.met(f"{pair.name} combines examples with their number")
    return Rows(rows[0].dim, rows[0].copies)


def _fft(pair: Pair, rows: Rows) -> State:
    if rows.dim >= len(pair.shape(0)) - len(pair.many.params["fft_lengths"]):
        return pair.met("fft runs over the examples")
    return rows


def _random(pair: Pair, operands: list[State]) -> State:
    """Draws of one key for each example; numbers that shape them stand beside the keys."""
    rows = [state for state in operands if isinstance(state, Rows)]
    if len({(state.dim, state.copies) for state in rows}) != 1 or len(rows) + _wholes(operands) < len(operands):
        return pair.met(f"{pair.name} combines examples with others")
    if any(isinstance(state, Whole) and not beside(state, rows[0]) for state in operands):
        return pair.met(f"{pair.name} combines an example with a value that depends on its place in the batch")
    return rows[0]


def _wholes(operands: list[State]) -> int:
    return sum(isinstance(state, Whole) for state in operands)


def _stack(pair: Pair, operands: list[State]) -> State:
    """Arrays side by side along a new dim."""
    axis = pair.many.params["axis"] % len(pair.out)
    joined = operands[0]
    for state in operands[1:]:
        joined = join(pair, joined, state)
    if isinstance(joined, Rows):
        return Rows(joined.dim + (axis <= joined.dim), joined.copies, joined.scale)
    return joined


def _unstack(pair: Pair, rows: Rows) -> State:
    axis = pair.many.params["axis"] % len(pair.shape(0))
    if axis == rows.dim:
        return pair.met("unstack takes the examples apart")
    return Rows(_shift(rows.dim, (axis,)), rows.copies, rows.scale)


def gather(pair: Pair, operands: list[State]) -> State:
    """What is read out of an array: rows at given places, or of each example its own row or its own part."""
    operand, indices = operands
    numbers, sizes = pair.many.params["dimension_numbers"], pair.many.params["slice_sizes"]
    if isinstance(operand, Whole) and isinstance(indices, Whole):
        return any_whole(pair.many.outvars[0], operand.scale if indices.scale == 1 else UNKNOWN)
    columns = indices.columns if isinstance(indices, Met) else ()
    for state in (operand, indices):
        if isinstance(state, Met) and not (state is indices and columns):
            return state
        if isinstance(state, Total):
            return pair.met("gather is applied to a sum over the examples")
    if is_turn(operand) or is_turn(indices):
        return of_one_example(pair, operands)
    if isinstance(indices, Rows) and indices.scale != 1:
        return pair.met("gather combines examples with their number")
    if isinstance(operand, Whole):
        tables = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
        own_table = any(place == getattr(indices, "dim", None) and dim in operand.differs for dim, place in tables)
        if not isinstance(indices, Rows) or operand.scale == UNKNOWN or own_table:
            return pair.met("gather reads at the place of an example in the batch")
        return Rows(_gathered_dim(pair, indices.dim), indices.copies, operand.scale)
    assert isinstance(operand, Rows)
    dim = operand.dim
    if dim in numbers.operand_batching_dims:
        shared = numbers.start_indices_batching_dims[list(numbers.operand_batching_dims).index(dim)]
        same = isinstance(indices, Rows) and (indices.dim, indices.copies) == (shared, operand.copies)
        if same or (isinstance(indices, Whole) and shared not in indices.differs):
            return Rows(_gathered_dim(pair, shared), operand.copies, operand.scale)
        return pair.met("gather reads at the place of an example in the batch")
    if dim not in numbers.start_index_map:
        if isinstance(indices, Whole) and sizes[dim] == pair.shape(0)[dim]:
            gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
            return replace(operand, dim=numbers.offset_dims[_shift(dim, gone)])
        return pair.met("gather pairs every example with every other")
    columns = columns or ((indices,) if len(numbers.start_index_map) == 1 else ())
    place = list(numbers.start_index_map).index(dim)
    if len(columns) == len(numbers.start_index_map) and operand.copies == 1:
        column = columns[place]
        others = [state for number, state in enumerate(columns) if number != place]
        index = column.index if isinstance(column, Whole) else None
        if index is not None and sizes[dim] == 1 and pair.shape(1)[index] == pair.shape(0)[dim]:
            rows = Rows(index)
            if all(state == rows or (isinstance(state, Whole) and beside(state, rows)) for state in others):
                return Rows(_gathered_dim(pair, index), 1, operand.scale)
    return pair.met("gather reads rows of other examples")


def _gathered_dim(pair: Pair, dim: int) -> int:
    """The dim of a gather's result that a dim of its indices becomes."""
    offsets = pair.many.params["dimension_numbers"].offset_dims
    free = [place for place in range(len(pair.out)) if place not in offsets]
    return free[dim]


def _scatter(pair: Pair, operands: list[State]) -> State:
    """A scatter within each example: of its own indices and updates, in the batching dims of all three."""
    numbers = pair.many.params["dimension_numbers"]
    operand, indices, updates = operands
    batching, shared = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    met = pair.met(f"{pair.name} writes values of different examples into one array")
    if not batching:
        return met
    rows = indices if isinstance(indices, Rows) else None
    place = list(shared).index(rows.dim) if rows and rows.dim in shared else 0
    free = [dim for dim in range(len(pair.shape(2))) if dim not in numbers.update_window_dims]
    places = (batching[place], shared[place], free[shared[place]])
    for state, dim in zip((operand, indices, updates), places, strict=True):
        if isinstance(state, Rows) and state != Rows(dim):
            return met
        if isinstance(state, Whole) and not beside(state, Rows(dim)):
            return met
        if isinstance(state, Total | Met):
            return met
    return Rows(batching[place])


RULES: dict[str, Rule] = {
    **dict.fromkeys((*_ELEMENTWISE, *_LINEAR, *_SUMS), _elementwise),
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod"), _one_operand(_reduction)),
    **dict.fromkeys(("reduce_and", "reduce_or", "reduce_xor"), _one_operand(_reduction)),
    **dict.fromkeys(("argmax", "argmin"), _one_operand(_argument)),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _one_operand(_cumulative)),
    **dict.fromkeys(("reduce_window_sum", "reduce_window_max", "reduce_window_min"), _window),
    **dict.fromkeys(("cholesky", "lu", "qr", "householder_product", "svd", "eigh", "triangular_solve"), _matrices),
    **dict.fromkeys(("scatter", "scatter-add", "scatter_add", "scatter_mul", "scatter_min", "scatter_max"), _scatter),
    **dict.fromkeys(("random_wrap", "random_unwrap", "random_bits", "random_split", "random_gamma"), _random),
    "random_fold_in": _elementwise,
    "broadcast_in_dim": _one_operand(_broadcast),
    "transpose": _one_operand(_transpose),
    "squeeze": _one_operand(_squeeze),
    "reshape": _one_operand(_reshape),
    "rev": _one_operand(_reverse),
    "slice": _one_operand(_slice),
    "split": _split,
    "stack": _stack,
    "unstack": _one_operand(_unstack),
    "dynamic_slice": _one_operand(_dynamic_slice),
    "dynamic_update_slice": _dynamic_update,
    "pad": _pad,
    "concatenate": _concatenate,
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "sort": _sort,
    "top_k": _top,
    "fft": _one_operand(_fft),
}
