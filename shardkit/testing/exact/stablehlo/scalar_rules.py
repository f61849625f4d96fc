"""Operations of each element: arithmetic, comparisons, constants and conversions."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
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


def _apply_elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
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
        number = value.get_splat_value().value
        x = np.full(shape, number, dtype)
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
    dim = read_integer(operation, "iota_dimension")
    return reader.vary(lax.broadcasted_iota(read_dtype(operation), read_shape(operation), dim))


def _compare(reader: BlockReader, operation: Any, x: Any, y: Any) -> Any:
    """Compares numbers; floats also in IEEE's total order, in which -0 is less than 0, and infinity less than NaN."""
    direction = compat.hlo_text(operation.attributes["comparison_direction"])
    # Integers that are the places of two floats in that order: the floats are compared.
    first, second = [_find_total_order(value) for value in operation.operands]
    if first is not None and second is not None and direction in _ORDERINGS:
        return _compare_in_total_order(direction, reader.values[first], reader.values[second])
    has_type = "compare_type" in operation.attributes
    is_total = has_type and compat.hlo_text(operation.attributes["compare_type"]) == "TOTALORDER"
    if is_total and jnp.issubdtype(x.dtype, jnp.floating):
        if direction not in _ORDERINGS:
            raise UnreadableError(f"stablehlo.compare {direction} in the total order")
        return _compare_in_total_order(direction, x, y)
    return _COMPARISONS[direction](x, y)


def _compare_in_total_order(direction: str, x: Any, y: Any) -> Any:
    # jax has "less" and "at most" of this order alone, so that the operands of the other two change places.
    if direction in ("GT", "GE"):
        x, y = y, x
    if direction in ("LT", "GT"):
        return compat.less_in_total_order(x, y)
    return compat.at_most_in_total_order(x, y)


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
    source_layout = read_integers(bitcast, "source_layout")
    result_layout = read_integers(bitcast, "result_layout")
    if list(number.type.shape) != list(bits.type.shape) or source_layout != result_layout:
        return None
    return number


def _find_xor_mask(value: Any, bits: Any) -> Any:
    """The number m of a value that is `bits ^ m`; None if it is something else."""
    flip = find_definition(value, "stablehlo.xor")
    if flip is None:
        return None
    masks = [operand for operand in flip.operands if operand != bits]
    if len(masks) != 1:
        return None
    return _find_constant(masks[0])


def _is_below_zero(mask: Any, bits: Any) -> bool:
    """Whether a mask is `bits < 0`."""
    test = find_definition(mask, "stablehlo.compare")
    if test is None or test.operands[0] != bits:
        return False
    if compat.hlo_text(test.attributes["comparison_direction"]) != "LT":
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
    readers = [use.owner.operation for use in operation.results[0].uses]
    if not readers:
        return False
    # A select gives the integer of a float's place: a comparison must read it next. Anything else leads to a select.
    if operation.name != "stablehlo.select":
        return all(reader.name in _ORDERING and _serves_order(reader) for reader in readers)
    return all(_compares_floats(reader) for reader in readers)


def _compares_floats(comparison: Any) -> bool:
    """Whether an operation compares two floats in the total order, by their bits."""
    if comparison.name != "stablehlo.compare":
        return False
    if compat.hlo_text(comparison.attributes["comparison_direction"]) not in _ORDERINGS:
        return False
    return all(_find_total_order(value) is not None for value in comparison.operands)


_ORDERING = ("stablehlo.select", "stablehlo.xor", "stablehlo.compare")


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
    return reader.map_function(find_body(operation), np.ndim(operands[0]))(*operands)


def _convert(reader: BlockReader, operation: Any, x: Any) -> Any:
    return lax.convert_element_type(x, read_dtype(operation))


def _reinterpret(reader: BlockReader, operation: Any, x: Any) -> Any:
    return lax.bitcast_convert_type(x, read_dtype(operation))


def _round(reader: BlockReader, operation: Any, x: Any) -> Any:
    exponent = read_integer(operation, "exponent_bits")
    return lax.reduce_precision(x, exponent, read_integer(operation, "mantissa_bits"))


def _keep(reader: BlockReader, operation: Any, *operands: Any) -> Any:
    """Copies and barriers change nothing."""
    return list(operands)


SCALAR_RULES: dict[str, Callable[..., Any]] = {
    "stablehlo.constant": _make_constant,
    "stablehlo.iota": _make_iota,
    "stablehlo.add": _apply_elementwise(lax.add),
    "stablehlo.subtract": _apply_elementwise(lax.sub),
    "stablehlo.multiply": _apply_elementwise(lax.mul),
    "stablehlo.divide": _apply_elementwise(lax.div),
    "stablehlo.remainder": _apply_elementwise(lax.rem),
    "stablehlo.power": _apply_elementwise(lax.pow),
    "stablehlo.maximum": _apply_elementwise(lax.max),
    "stablehlo.minimum": _apply_elementwise(lax.min),
    "stablehlo.negate": _apply_elementwise(lax.neg),
    "stablehlo.abs": _apply_elementwise(lax.abs),
    "stablehlo.sign": _apply_elementwise(lax.sign),
    "stablehlo.floor": _apply_elementwise(lax.floor),
    "stablehlo.ceil": _apply_elementwise(lax.ceil),
    "stablehlo.sqrt": _apply_elementwise(lax.sqrt),
    "stablehlo.rsqrt": _apply_elementwise(lax.rsqrt),
    "stablehlo.cbrt": _apply_elementwise(lax.cbrt),
    "stablehlo.exponential": _apply_elementwise(lax.exp),
    "stablehlo.exponential_minus_one": _apply_elementwise(lax.expm1),
    "stablehlo.log": _apply_elementwise(lax.log),
    "stablehlo.log_plus_one": _apply_elementwise(lax.log1p),
    "stablehlo.logistic": _apply_elementwise(lax.logistic),
    "stablehlo.tanh": _apply_elementwise(lax.tanh),
    "stablehlo.sine": _apply_elementwise(lax.sin),
    "stablehlo.cosine": _apply_elementwise(lax.cos),
    "stablehlo.tan": _apply_elementwise(lax.tan),
    "stablehlo.atan2": _apply_elementwise(lax.atan2),
    "mhlo.erf": _apply_elementwise(lax.erf),
    "stablehlo.round_nearest_afz": _apply_elementwise(
        partial(lax.round, rounding_method=lax.RoundingMethod.AWAY_FROM_ZERO)
    ),
    "stablehlo.round_nearest_even": _apply_elementwise(
        partial(lax.round, rounding_method=lax.RoundingMethod.TO_NEAREST_EVEN)
    ),
    "stablehlo.is_finite": _apply_elementwise(lax.is_finite),
    "stablehlo.and": _apply_elementwise(lax.bitwise_and),
    "stablehlo.or": _apply_elementwise(lax.bitwise_or),
    "stablehlo.xor": _unless_ordered(_apply_elementwise(lax.bitwise_xor)),
    "stablehlo.not": _apply_elementwise(lax.bitwise_not),
    "stablehlo.popcnt": _apply_elementwise(lax.population_count),
    "stablehlo.count_leading_zeros": _apply_elementwise(lax.clz),
    "stablehlo.shift_left": _apply_elementwise(lax.shift_left),
    "stablehlo.shift_right_logical": _apply_elementwise(lax.shift_right_logical),
    "stablehlo.shift_right_arithmetic": _apply_elementwise(lax.shift_right_arithmetic),
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
