"""Small dtypes on the wire: the bytes of a quantized message, and how far what arrives is from what was sent.

An array is sent in blocks: each element as a value of a small dtype times a number that its block shares, the scale,
which is one byte. As a rule it is a power of two: for a block whose largest magnitude is M the smallest one for which M
is within the range of the dtype, and at least 2^-100. bfloat16 has the range of float32 and needs no scale.

"mxfp8" and "mxfp4" are the formats MXFP8 (with elements of E4M3) and MXFP4 of the Open Compute Project, in which 32
elements share a power of two. In NVIDIA's "nvfp4" 16 elements share a scale of E4M3, and a message has a scale in
float32 too. A receiver needs to know what the bits mean, not how the sender chose a scale: here it is rounded up, so
that no element is beyond the range of the dtype. A clipped element has a larger error, and no rounding of it is
unbiased.

Source: OCP Microscaling Formats (MX) Specification, version 1.0 (2023), sections 5 and 6; NVIDIA, Pretraining Large
Language Models with NVFP4 (arXiv:2509.25149), appendix B; for scales that are rounded up Mishra et al., Recipes for
Pre-training LLMs with MXFP8 (arXiv:2506.08027).
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

from shardkit._arguments import checks
from shardkit._arguments.typed import typed


class Format(NamedTuple):
    """A format that is sent."""

    bits: int  # of one element
    largest: float  # the largest magnitude of an element that is used
    mantissa: int | None  # bits of the mantissa after the leading one; None for whole numbers
    element: str  # the dtype of the elements
    smallest_exponent: int = 0  # of the normal numbers of the elements; below it they are as far apart as there
    block: int | None = None  # elements that share a scale, where the format fixes it
    two_scales: bool = False  # whether a block's scale is of E4M3, and the message has one of float32

    @property
    def scaled(self) -> bool:
        """Whether blocks have scales."""
        return self.bits < 16


FORMATS = {
    "bfloat16": Format(16, (2 - 2.0**-7) * 2.0**127, 7, "bfloat16", -126),
    "float8_e4m3fn": Format(8, 448.0, 3, "float8_e4m3fn", -6),
    "float8_e5m2": Format(8, 57344.0, 2, "float8_e5m2", -14),
    "int8": Format(8, 127.0, None, "int8"),
    "int4": Format(4, 7.0, None, "int4"),  # without -8, so that the range is symmetric
    "mxfp8": Format(8, 448.0, 3, "float8_e4m3fn", -6, block=32),
    "mxfp4": Format(4, 6.0, 1, "float4_e2m1fn", 0, block=32),
    "nvfp4": Format(4, 6.0, 1, "float4_e2m1fn", 0, block=16, two_scales=True),
}
SMALLEST = -100  # exponent of the smallest scale, and of the smallest float32 scale of "nvfp4": no subnormals
LARGEST_E4M3 = 448.0  # of the scales of the blocks of "nvfp4"
_BLOCK = 256  # elements that share a scale, where the format leaves it open
_BYTES_OF_MESSAGE_SCALE = 4


def choose_block(where: str, dtype: str, block: int | None) -> int:
    """The number of elements that share a scale: `block`, or that of the format; refuses another than its own."""
    fixed = FORMATS[dtype].block
    checks.at_least(where, 1, block=block)
    if block is None:
        return fixed or _BLOCK
    if fixed is not None and block != fixed:
        raise ValueError(
            f"{where}: {dtype} must have blocks of {fixed} elements; got block={block}. Leave out block=, or pass "
            "another dtype, such as jnp.int8."
        )
    return block


@partial(typed, only=bool)
def quantized_bytes(elements: int, dtype: str, *, block: int | None = None) -> int:
    """Bytes of a quantized message: its values, packed block by block, and one byte for the scale of each block.

    The last block is sent whole. A message shorter than a block is one smaller block. "nvfp4" has four bytes more, the
    scale of the message.

    Args:
        elements: number of elements in the message. A collective sends one message to each device.
        dtype: "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int4", "mxfp8", "mxfp4" or "nvfp4".
        block: number of elements with a common scale, by default 256. "mxfp8" and "mxfp4" have 32, "nvfp4" has 16, and
            no other; bfloat16 has no scale.

    Raises:
        ValueError: another dtype, a negative size, an empty block, or a block that is not that of the format.

    Example:
        >>> [sk.cost.quantized_bytes(1024, dtype) for dtype in ("bfloat16", "int8", "int4")]
        [2048, 1028, 516]
        >>> [sk.cost.quantized_bytes(1024, dtype) for dtype in ("mxfp8", "mxfp4", "nvfp4")]
        [1056, 544, 580]
    """
    [elements] = checks.integers_from_zero("quantized_bytes", elements=elements)
    if block is not None:
        [block] = checks.integers_from_one("quantized_bytes", block=block)
    checks.one_of("quantized_bytes", "dtype", dtype, tuple(FORMATS))
    block = choose_block("quantized_bytes", dtype, block)
    wire_format = FORMATS[dtype]
    if not elements or not wire_format.scaled:
        return elements * wire_format.bits // 8
    # 1000 elements of int4 in blocks of 256: four blocks of 128 bytes and a scale each, 516.
    block = min(block, elements)
    blocks = -(-elements // block)
    value_bytes = -(-block * wire_format.bits // 8)
    message_bytes = blocks * (value_bytes + 1)
    if wire_format.two_scales:
        message_bytes += _BYTES_OF_MESSAGE_SCALE
    return message_bytes


@partial(typed, only=bool)
def quantization_error(largest: float, dtype: str, *, n: int = 1, stochastic: bool = False) -> float:
    """Bounds the difference between the exact sum of n elements and their sum after sending them in `dtype`.

    One element: let the block's largest magnitude be M, and its scale s. Whole numbers are s apart, so the error is at
    most s/2, with s = 2^ceil(log2(M / largest value)); s < 2 M / largest value, so at most M/127 for int8 and M/7 for
    int4. Floating-point values with m bits of mantissa are an ulp apart, at most 2^(floor(log2 M) - m): the scale is a
    power of two and does not change this. So the error is at most 2^(floor(log2 M) - m - 1), M/2^(m+1) or less. The
    smallest scale is 2^-100: an M below the largest value times 2^-100 counts as this product. An M above the largest
    bfloat16 is sent as the largest bfloat16. The scale s of "nvfp4" is M/6 with four bits, rounded up, and the largest
    values are 2 s apart: the error is at most s, below 3/16 M.

    Rounded stochastically, an element is sent as either value beside it: the error is twice as large.

    The sum: n errors E, and the rounding of n-1 additions in float32, in any order: at most
    g n (M + E), g = (n-1) u / (1 - (n-1) u), u = 2^-24 (Higham, 4.4). The cast of the sum to the dtype of the result
    is not included.

    Args:
        largest: largest magnitude in the blocks, M; for "nvfp4" in the messages.
        dtype: "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int4", "mxfp8", "mxfp4" or "nvfp4".
        n: number of elements in the sum; 1 for a gather. For two levels, n_2 and n_1 devices: E1 of n_1 elements up to
            M, then E2 of n_2 elements up to n_1 M + E1; together n_2 E1 + E2.
        stochastic: whether a collective with `key=` rounds them.

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
    most = max(float(largest), _find_smallest_magnitude(wire_format))
    element_error = _bound_element_error(most, wire_format, stochastic)
    additions = (n - 1) * 2.0**-24
    return n * element_error + additions / (1 - additions) * n * (most + element_error)


def _find_smallest_magnitude(wire_format: Format) -> float:
    """The magnitude below which scales become no smaller, or lose bits."""
    smallest = 2.0**SMALLEST
    if not wire_format.scaled:
        return smallest
    if wire_format.two_scales:
        smallest *= 2.0**-6  # the smallest scale of E4M3 that has four bits
    return smallest * wire_format.largest


def _bound_element_error(most: float, wire_format: Format, stochastic: bool) -> float:
    """The largest rounding error of one element, in a block of magnitudes up to `most`."""
    # The nearest of two values is at most half of their distance away, and either of them the whole.
    part_of_distance = 1.0 if stochastic else 0.5
    error = part_of_distance * _find_distance(most, wire_format)
    if wire_format.scaled:
        return error
    return max(error, most - wire_format.largest)  # above its largest value bfloat16 is clipped


def _find_distance(most: float, wire_format: Format) -> float:
    """How far apart the largest values are that a block of magnitudes up to `most` is sent as."""
    if wire_format.mantissa is None:
        # The scale is the smallest power of two above most / largest: 2^exponent, or itself where it is one.
        fraction, exponent = math.frexp(most / wire_format.largest)  # the fraction is in [1/2, 1)
        if fraction == 0.5:
            exponent -= 1
        return math.ldexp(1.0, exponent)
    if wire_format.two_scales:
        # The scale has four bits: k/16 times a power of two, for k of 8 to 16. Worked example: 2.75 is 6 * 0.4583, and
        # 0.4583 = 14.67/16 * 2^-1. So k is 15 and the scale 15/32: 4 and 6 times it are 2 * 15/32 apart.
        fraction, exponent = math.frexp(most / wire_format.largest)
        scale = math.ldexp(math.ceil(fraction * 16) / 16, exponent)
        return 2 * scale
    _, exponent = math.frexp(most)
    return math.ldexp(1.0, exponent - 1 - wire_format.mantissa)
