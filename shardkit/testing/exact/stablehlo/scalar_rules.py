"""Operations of each element: arithmetic, comparisons, constants and conversions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit._jax import compat
from shardkit.testing.exact.stablehlo.attributes import (
    UnreadableError,
    find_body,
    find_definition,
    find_dtype,
    is_float,
    read_constant,
    read_dtype,
    read_integer,
    read_integers,
    read_shape,
)
from shardkit.testing.exact.stablehlo.block_reader import BlockReader


def _ignore_attributes(function: Callable[..., Any]) -> Callable[..., Any]:
    """A rule that applies a function to the operands alone."""

    def apply(reader: BlockReader, operation: Any, *operands: Any) -> Any:
        return function(*operands)

    return apply


def _make_constant(reader: BlockReader, operation: Any) -> Any:
    """A constant array, of one number for all elements (a splat) or of a list."""
    value = operation.attributes["value"]
    shape = read_shape(operation)
    dtype = read_dtype(operation)
    if value.is_splat:
        x = np.full(shape, read_constant(operation), dtype)
    elif np.dtype(dtype).isbuiltin != _OF_NUMPY:
        x = _read_printed(str(value), dtype).reshape(shape)
    else:
        x = np.asarray(value, dtype).reshape(shape)
    return reader.vary(x)


_OF_NUMPY = 1  # bfloat16, int4 and the floats of 8 bits are dtypes of another package


def _read_printed(text: str, dtype: Any) -> np.ndarray:
    """The numbers of a constant as MLIR prints it: of some dtypes jaxlib gives no buffer.

    Worked example, in bfloat16: `dense<[1.0, -2.5, 0x7F80]> : tensor<3xbf16>` is 1, -2.5 and infinity, of which 7f80
    are the bits. Of more than a hundred numbers the bytes are printed, the low one first: `dense<"0x803F20C0...">`.
    """
    bits = np.dtype(f"u{np.dtype(dtype).itemsize}")
    printed, _, _ = text.removeprefix("dense<").partition(">")
    if printed.startswith('"0x'):
        return np.frombuffer(bytes.fromhex(printed[3:-1]), bits).view(dtype)
    numbers = []
    for word in re.findall(r"[^\[\], ]+", printed):
        if word.startswith("0x"):
            numbers.append(np.asarray(int(word, 16), bits).view(dtype))
        else:
            numbers.append(np.asarray(float(word)).astype(dtype))
    return np.asarray(numbers, dtype)


def _make_iota(reader: BlockReader, operation: Any) -> Any:
    """The index of each element along one dim: of [2, 3] along dim 1, [[0, 1, 2], [0, 1, 2]]."""
    dim = read_integer(operation, "iota_dimension")
    indices = lax.broadcasted_iota(read_dtype(operation), read_shape(operation), dim)
    return reader.vary(indices)


def _compare(reader: BlockReader, operation: Any, x: Any, y: Any) -> Any:
    """Compares numbers; floats also in IEEE's total order, in which -0 is less than 0, and infinity less than NaN."""
    direction = _read_direction(operation)
    if _compares_floats(operation.operation):
        # Integers that are the places of two floats in the total order: the floats are compared.
        first, second = map(_find_total_order, operation.operands)
        return _compare_in_total_order(direction, reader.values[first], reader.values[second])
    is_total = False
    if "compare_type" in operation.attributes:
        is_total = compat.hlo_text(operation.attributes["compare_type"]) == "TOTALORDER"
    if is_total and jnp.issubdtype(x.dtype, jnp.floating):
        if direction not in _ORDERINGS:
            raise UnreadableError(f"stablehlo.compare {direction} in the total order")
        return _compare_in_total_order(direction, x, y)
    return _COMPARISONS[direction](x, y)


def _read_direction(comparison: Any) -> str:
    """A comparison's question, as "LT"."""
    return compat.hlo_text(comparison.attributes["comparison_direction"])


def _compare_in_total_order(direction: str, x: Any, y: Any) -> Any:
    # jax has "less" and "at most" of this order alone, so that the operands of the other two change places.
    if direction == "LT":
        return compat.less_in_total_order(x, y)
    if direction == "GT":
        return compat.less_in_total_order(y, x)
    if direction == "LE":
        return compat.at_most_in_total_order(x, y)
    return compat.at_most_in_total_order(y, x)


_ORDERINGS = ("LT", "LE", "GT", "GE")
_COMPARISONS = {"EQ": lax.eq, "NE": lax.ne, "LT": lax.lt, "LE": lax.le, "GT": lax.gt, "GE": lax.ge}


def _find_total_order(value: Any) -> Any:
    """The float whose place in IEEE's total order an integer is; None if the integer is something else.

    A compiler for CPUs writes the order of floats by their bits, as signed integers. Of the bits b of x it compares b
    where b is not negative, and b ^ 0x7fffffff where b is negative. Worked example:

        x       b               the integer
        2.0      0x40000000      0x40000000 =  1073741824
        1.0      0x3f800000      0x3f800000 =  1065353216
        -1.0    -0x40800000     -0x3f800001 = -1065353217
        -2.0    -0x40000000     -0x40000001 = -1073741825
    """
    # select(bits < 0, bits ^ 0x7fffffff, bits), where the bits are a bitcast of the float
    select = find_definition(value, "stablehlo.select")
    if select is None:
        return None
    is_negative, flipped, bits = select.operands
    bitcast = find_definition(bits, "mhlo.bitcast", "stablehlo.bitcast_convert")
    mask = _find_xor_mask(flipped, bits)
    if bitcast is None or mask is None or not _is_below_zero(is_negative, bits):
        return None
    number = bitcast.operands[0]
    integer = find_dtype(bits.type)
    if not is_float(number) or not jnp.issubdtype(integer, jnp.signedinteger):
        return None
    if mask != jnp.iinfo(integer).max:
        return None
    # An `mhlo.bitcast` may change the shape or the layout too: then the float's elements are at other places.
    if list(number.type.shape) != list(bits.type.shape):
        return None
    if read_integers(bitcast, "source_layout") != read_integers(bitcast, "result_layout"):
        return None
    return number


def _find_xor_mask(value: Any, bits: Any) -> Any:
    """The number m of a value that is `bits ^ m`; None if it is something else."""
    flip = find_definition(value, "stablehlo.xor")
    if flip is None:
        return None
    # The mask may be either operand. `bits ^ bits` has none.
    masks = [operand for operand in flip.operands if operand != bits]
    if len(masks) != 1:
        return None
    return _find_constant(masks[0])


def _is_below_zero(mask: Any, bits: Any) -> bool:
    """Whether a mask is `bits < 0`."""
    test = find_definition(mask, "stablehlo.compare")
    if test is None or test.operands[0] != bits:
        return False
    if _read_direction(test) != "LT":
        return False
    return bool(_find_constant(test.operands[1]) == 0)


def _find_constant(value: Any) -> Any:
    """The number of a constant value; None if it is no constant, or its elements differ."""
    constant = find_definition(value, "stablehlo.constant")
    if constant is None:
        return None
    return read_constant(constant)


def _unless_ordered(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A rule of an operation by which a compiler may put floats in order, as `_find_total_order` describes.

    The comparison of two floats in the total order does not read such an operation, but the two floats. So its result
    is zeros that nothing reads. Without them it would be computed all the same, if it stands in a loop, and then it has
    no meaning: it computes with the bits of floats.
    """

    def apply(reader: BlockReader, operation: Any, *operands: Any) -> Any:
        if _serves_order(operation.operation):
            return reader.vary(np.zeros(read_shape(operation), read_dtype(operation)))
        return rule(reader, operation, *operands)

    return apply


def _serves_order(operation: Any) -> bool:
    """Whether an operation only serves to compare floats by `_find_total_order`: all paths from it end there.

    Worked example: `bits ^ 0x7fffffff` is read by a select, which is read by a comparison of two such selects.
    """
    users = [use.owner.operation for use in operation.results[0].uses]
    if not users:
        return False
    # A select gives the integer of a float's place: a comparison must read it next. Anything else leads to a select.
    if operation.name == "stablehlo.select":
        return all(map(_compares_floats, users))
    for user in users:
        if user.name not in _STEPS_OF_ORDER or not _serves_order(user):
            return False
    return True


def _compares_floats(operation: Any) -> bool:
    """Whether an operation compares two floats in the total order, by their bits."""
    if operation.name != "stablehlo.compare":
        return False
    # Equality of bits is no order: -0 and 0 are other bits, and equal floats.
    if _read_direction(operation) not in _ORDERINGS:
        return False
    places = map(_find_total_order, operation.operands)
    return all(place is not None for place in places)


# What a compiler writes the order of floats with.
_STEPS_OF_ORDER = ("stablehlo.select", "stablehlo.xor", "stablehlo.compare")


def _select(reader: BlockReader, operation: Any, which: Any, yes: Any, no: Any) -> Any:
    """One of two arrays by a mask, element by element; a scalar mask chooses for all elements."""
    if np.ndim(which) == 0 and np.ndim(yes):
        which = lax.broadcast(which, np.shape(yes))
    # jax takes the case of False first.
    return lax.select_n(which, no, yes)


def _clamp(reader: BlockReader, operation: Any, low: Any, x: Any, high: Any) -> Any:
    return lax.clamp(low, x, high)


def _map_elements(reader: BlockReader, operation: Any, *operands: Any) -> Any:
    """The function of a region, applied to each element."""
    rank = np.ndim(operands[0])
    function = reader.map_function(find_body(operation), rank)
    return function(*operands)


def _convert(reader: BlockReader, operation: Any, x: Any) -> Any:
    return lax.convert_element_type(x, read_dtype(operation))


def _reinterpret(reader: BlockReader, operation: Any, x: Any) -> Any:
    """The same bits as another dtype."""
    return lax.bitcast_convert_type(x, read_dtype(operation))


def _round(reader: BlockReader, operation: Any, x: Any) -> Any:
    """Rounds to fewer bits, in the same dtype."""
    exponent_bits = read_integer(operation, "exponent_bits")
    mantissa_bits = read_integer(operation, "mantissa_bits")
    return lax.reduce_precision(x, exponent_bits, mantissa_bits)


def _keep(reader: BlockReader, operation: Any, *operands: Any) -> Any:
    """Copies and barriers change nothing."""
    return list(operands)


def _round_half_away(x: Any) -> Any:
    """0.5 becomes 1, and -2.5 becomes -3."""
    return lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO)


def _round_half_to_even(x: Any) -> Any:
    """0.5 becomes 0, and 1.5 becomes 2."""
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


# Operations that are functions of their operands alone.
_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "stablehlo.add": lax.add,
    "stablehlo.subtract": lax.sub,
    "stablehlo.multiply": lax.mul,
    "stablehlo.divide": lax.div,
    "stablehlo.remainder": lax.rem,
    "stablehlo.power": lax.pow,
    "stablehlo.maximum": lax.max,
    "stablehlo.minimum": lax.min,
    "stablehlo.negate": lax.neg,
    "stablehlo.abs": lax.abs,
    "stablehlo.sign": lax.sign,
    "stablehlo.floor": lax.floor,
    "stablehlo.ceil": lax.ceil,
    "stablehlo.sqrt": lax.sqrt,
    "stablehlo.rsqrt": lax.rsqrt,
    "stablehlo.cbrt": lax.cbrt,
    "stablehlo.exponential": lax.exp,
    "stablehlo.exponential_minus_one": lax.expm1,
    "stablehlo.log": lax.log,
    "stablehlo.log_plus_one": lax.log1p,
    "stablehlo.logistic": lax.logistic,
    "stablehlo.tanh": lax.tanh,
    "stablehlo.sine": lax.sin,
    "stablehlo.cosine": lax.cos,
    "stablehlo.tan": lax.tan,
    "stablehlo.atan2": lax.atan2,
    "mhlo.erf": lax.erf,
    "stablehlo.round_nearest_afz": _round_half_away,
    "stablehlo.round_nearest_even": _round_half_to_even,
    "stablehlo.is_finite": lax.is_finite,
    "stablehlo.and": lax.bitwise_and,
    "stablehlo.or": lax.bitwise_or,
    "stablehlo.not": lax.bitwise_not,
    "stablehlo.popcnt": lax.population_count,
    "stablehlo.count_leading_zeros": lax.clz,
    "stablehlo.shift_left": lax.shift_left,
    "stablehlo.shift_right_logical": lax.shift_right_logical,
    "stablehlo.shift_right_arithmetic": lax.shift_right_arithmetic,
}

SCALAR_RULES: dict[str, Callable[..., Any]] = {
    "stablehlo.constant": _make_constant,
    "stablehlo.iota": _make_iota,
    "stablehlo.xor": _unless_ordered(_ignore_attributes(lax.bitwise_xor)),
    "stablehlo.compare": _unless_ordered(_compare),
    "stablehlo.select": _unless_ordered(_select),
    "stablehlo.clamp": _clamp,
    "stablehlo.convert": _convert,
    "stablehlo.bitcast_convert": _reinterpret,
    "stablehlo.reduce_precision": _round,
    "mhlo.copy": _keep,
    "stablehlo.optimization_barrier": _keep,
    "stablehlo.map": _map_elements,
}
for _name, _function in _ELEMENTWISE.items():
    SCALAR_RULES[_name] = _ignore_attributes(_function)
