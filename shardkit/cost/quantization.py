"""Small dtypes on the wire: the bytes of a quantized message, and how far what arrives is from what was sent.

An array is sent in blocks: each element as a value of a small dtype times a power of two that its block shares, the
scale, which is one byte. The scale of a block whose largest magnitude is M is the smallest power of two for which M is
within the range of the dtype, and at least 2^-100. bfloat16 has the range of float32 and needs no scale.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

from shardkit._arguments import checks
from shardkit._arguments.typed import typed


class Format(NamedTuple):
    """A dtype that is sent."""

    bits: int  # of one element
    largest: float  # the largest magnitude that is used
    mantissa: int | None  # bits of the mantissa after the leading one; None for whole numbers

    @property
    def scaled(self) -> bool:
        """Whether blocks have scales."""
        return self.bits < 16


FORMATS = {
    "bfloat16": Format(16, (2 - 2.0**-7) * 2.0**127, 7),
    "float8_e4m3fn": Format(8, 448.0, 3),
    "float8_e5m2": Format(8, 57344.0, 2),
    "int8": Format(8, 127.0, None),
    "int4": Format(4, 7.0, None),  # without -8, so that the range is symmetric
}
SMALLEST = -100  # exponent of the smallest scale: no subnormals


@partial(typed, only=bool)
def quantized_bytes(elements: int, dtype: str, *, block: int = 256) -> int:
    """Bytes of a quantized message: its values, packed block by block, and one byte for the scale of each block.

    The last block is sent whole. A message shorter than a block is one smaller block.

    Args:
        elements: number of elements in the message. A collective sends one message to each device.
        dtype: "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8" or "int4".
        block: number of elements with a common scale; bfloat16 has no scale.

    Raises:
        ValueError: another dtype, a negative size, or an empty block.

    Example:
        >>> [sk.cost.quantized_bytes(1024, dtype) for dtype in ("bfloat16", "int8", "int4")]
        [2048, 1028, 516]
    """
    [elements] = checks.integers_from_zero("quantized_bytes", elements=elements)
    [block] = checks.integers_from_one("quantized_bytes", block=block)
    checks.one_of("quantized_bytes", "dtype", dtype, tuple(FORMATS))
    wire_format = FORMATS[dtype]
    if not elements or not wire_format.scaled:
        return elements * wire_format.bits // 8
    # 1000 elements of int4 in blocks of 256: four blocks of 128 bytes and a scale each, 516.
    block = min(block, elements)
    blocks = -(-elements // block)
    value_bytes = -(-block * wire_format.bits // 8)
    return blocks * (value_bytes + 1)


@partial(typed, only=bool)
def quantization_error(largest: float, dtype: str, *, n: int = 1) -> float:
    """Bounds the difference between the exact sum of n elements and their sum after sending them in `dtype`.

    One element: let the block's largest magnitude be M, and its scale s. Whole numbers are s apart, so the error is at
    most s/2, with s = 2^ceil(log2(M / largest value)); s < 2 M / largest value, so at most M/127 for int8 and M/7 for
    int4. Floating-point values with m bits of mantissa are an ulp apart, at most 2^(floor(log2 M) - m): the scale is a
    power of two and does not change this. So the error is at most 2^(floor(log2 M) - m - 1), M/2^(m+1) or less. The
    smallest scale is 2^-100: an M below the largest value times 2^-100 counts as this product. An M above the largest
    bfloat16 is sent as the largest bfloat16.

    The sum: n errors E, and the rounding of n-1 additions in float32, in any order: at most
    g n (M + E), g = (n-1) u / (1 - (n-1) u), u = 2^-24 (Higham, 4.4). The cast of the sum to the dtype of the result
    is not included.

    Args:
        largest: largest magnitude in the blocks, M.
        dtype: "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8" or "int4".
        n: number of elements in the sum; 1 for a gather. For two levels, n_2 and n_1 devices: E1 of n_1 elements up to
            M, then E2 of n_2 elements up to n_1 M + E1; together n_2 E1 + E2.

    Returns:
        The bound, in the unit of `largest`.

    Raises:
        ValueError: another dtype, a negative `largest`, or n below 1.

    Example:
        >>> [sk.cost.quantization_error(1.0, dtype) for dtype in ("float8_e4m3fn", "int8", "int4")]
        [0.0625, 0.0078125, 0.125]

    Source: Higham, Accuracy and Stability of Numerical Algorithms (2002), sections 2.1 and 4.2.
    """
    [largest] = checks.at_least_zero("quantization_error", largest=largest)
    [n] = checks.integers_from_one("quantization_error", n=n)
    checks.one_of("quantization_error", "dtype", dtype, tuple(FORMATS))
    wire_format = FORMATS[dtype]
    smallest = 2.0**SMALLEST
    if wire_format.scaled:
        smallest *= wire_format.largest
    most = max(float(largest), smallest)
    element_error = _bound_element_error(most, wire_format)
    additions = (n - 1) * 2.0**-24
    return n * element_error + additions / (1 - additions) * n * (most + element_error)


def _bound_element_error(most: float, wire_format: Format) -> float:
    """The largest rounding error of one element, in a block of magnitudes up to `most`."""
    if wire_format.mantissa is None:
        # The scale is the smallest power of two above most / largest: 2^exponent, or itself where it is one.
        fraction, exponent = math.frexp(most / wire_format.largest)  # the fraction is in [1/2, 1)
        if fraction == 0.5:
            exponent -= 1
        return math.ldexp(0.5, exponent)
    _, exponent = math.frexp(most)
    error = math.ldexp(0.5, exponent - 1 - wire_format.mantissa)
    if wire_format.scaled:
        return error
    return max(error, most - wire_format.largest)  # above its largest value bfloat16 is clipped
