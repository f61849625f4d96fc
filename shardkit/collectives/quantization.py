"""One message of a compressed collective: float32 values in blocks of a small dtype, each with its scale.

Scales are powers of two, or have four bits, so that what a rounding to nearest leaves out is exact: sent + left out
equals the value in every bit of float32 (above the subnormals). `cost.quantization_error` bounds it,
`cost.quantized_bytes` is what is sent.

The elements and scales of "mxfp8", "mxfp4" and "nvfp4" have the bits of their standards. Those of 4 bits are computed
with integers and float32: not every compiler has their dtype.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit._arguments.checks import one_of
from shardkit._arguments.typed import DType
from shardkit.cost.quantization import FORMATS, LARGEST_E4M3, SMALLEST, Format

# A scale is sent as the exponent field of a float32: the dtype E8M0.
_BIAS = 127
_NOT_FINITE = 255
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)

# A scale of "nvfp4" is of E4M3: an exponent from -6 on, and a significand of eighths. With all bits set it is NaN.
_E4M3_NAN = 0x7F
_E4M3_SMALLEST_EXPONENT = -6

# The magnitudes of E2M1, the elements of "mxfp4" and "nvfp4": the place here is the code, plus 8 for a sign.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# One block on the wire, of int8, whose largest value is 127. The block [3.0, -100.0, 260.0] has the scale 4, the
# smallest power of two with 260 <= 127 * 4. Sent are the whole numbers round(x / 4) = [1, -25, 65] and the exponent of
# the scale, 127 + 2. They are restored as [4.0, -100.0, 260.0], and the residual is [-1.0, 0.0, 0.0]: the next step
# sends 1.0 less.
#
# The same block in "mxfp4", whose largest value is 6, has the scale 64, with 260 <= 6 * 64. Divided by it the block is
# [0.05, -1.56, 4.06]: sent are the codes of 0, -1.5 and 4, restored are [0.0, -96.0, 256.0].
#
# In "nvfp4" the scale is at least 260 / 6 = 43.3. With the message's scale 1/8 that is 346.7 eighths, and the next
# number of E4M3 is 352, so the scale is 44. Divided by it the block is [0.07, -2.27, 5.91], restored are [0, -88, 264].


# A dtype of jax, or a format of blocks with a scale each, which is none.
WireDType = DType | Literal["mxfp8", "mxfp4", "nvfp4"]


class QuantizedMessage(NamedTuple):
    """The message of float32 [n, ...].

    It is bits, as unsigned integers, so that the compiler cannot move a conversion across the collective, nor send a
    dtype that the chip lacks as a wider one. It is two arrays, because one flat array takes the TPU compiler twenty
    times as long, and twice the memory traffic.
    """

    values: jax.Array  # [n, blocks, bytes of a block] in uint8; of bfloat16, [n, ...] in uint16
    # [n, blocks] in uint8; of "nvfp4" [n, blocks + 4], with the message's own scale at the end; None for bfloat16
    scales: jax.Array | None


class _Scales(NamedTuple):
    """The scales of blocks: a scale is `unit` / `inverse`."""

    bits: jax.Array  # as they are sent
    inverse: jax.Array  # powers of two, [n, blocks]
    unit: jax.Array  # 1; of "nvfp4" 1/8 to 15/8; [n, blocks]


def encode(x: jax.Array, dtype: str, block: int, key: jax.Array | None = None) -> QuantizedMessage:
    """Float32 [n, ...] as n messages, rounded to nearest, or with a key stochastically."""
    wire_format = FORMATS[dtype]
    if not wire_format.scaled:
        return _encode_bfloat16(x, key)
    flat = x.reshape(len(x), -1)
    # A shard that is shorter than a block is one block, without padding.
    size = flat.shape[1]
    block = min(block, size)
    blocks = _pad_last(flat, -size % block).reshape(len(x), -1, block)
    largest = jnp.max(jnp.abs(blocks), axis=-1)
    scales = _choose_scales(largest, wire_format)
    # Products with powers of two, here and in decode, are exact.
    values = blocks * scales.inverse[..., None]
    draws = _draw(key, values.shape)
    if wire_format.mantissa is None:
        whole_numbers = _round(values, draws).astype(jnp.int32)
        bits = _pack(whole_numbers, wire_format.bits)
    elif wire_format.bits == 4:
        codes = _round_to_e2m1(values, scales.unit[..., None], draws).astype(jnp.int32)
        bits = _pack(codes, wire_format.bits)
    else:
        rounded = _round_floats(values, wire_format, draws)
        bits = lax.bitcast_convert_type(rounded.astype(wire_format.element), jnp.uint8)
    return _seal_message(QuantizedMessage(bits, scales.bits))


def _encode_bfloat16(x: jax.Array, key: jax.Array | None) -> QuantizedMessage:
    wire_format = FORMATS["bfloat16"]
    assert wire_format.mantissa is not None
    if key is None:
        # A cast may round twice, and compilers may leave a cast out.
        rounded = lax.reduce_precision(x, 8, wire_format.mantissa)
    else:
        # The upper half of a float32 is a bfloat16. A draw that is added to the lower half carries into the upper one
        # as often as the lower half says: of 65536 draws 0x4000 carry where it is 0x4000, a quarter of the way.
        draws = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
        sums = lax.bitcast_convert_type(x, jnp.uint32) + draws
        rounded = lax.bitcast_convert_type(sums & jnp.uint32(0xFFFF0000), jnp.float32)
    # Clipped: an infinity would leave no residual.
    is_finite = jnp.isfinite(x)
    clipped = jnp.clip(rounded, -wire_format.largest, wire_format.largest)
    values = jnp.where(is_finite, clipped, x)
    bits = lax.bitcast_convert_type(values.astype("bfloat16"), jnp.uint16)
    return _seal_message(QuantizedMessage(bits, None))


def decode(message: QuantizedMessage, shape: tuple[int, ...], dtype: str, block: int) -> jax.Array:
    """n messages as float32 [n, *shape]; a block with an element that was not finite becomes NaN."""
    wire_format = FORMATS[dtype]
    if message.scales is None:
        return _read_floats(message.values, wire_format.element)
    size = math.prod(shape)
    if wire_format.bits == 8 and wire_format.mantissa is not None:
        values = _read_floats(message.values, wire_format.element)
    else:
        numbers = _unpack(message.values, wire_format.bits)[..., : min(block, size)]
        if wire_format.mantissa is None:
            values = numbers.astype(jnp.float32)
        else:
            values = _read_e2m1(numbers)
    scales = _read_scales(message.scales, wire_format)[..., None]
    # Clipped: elements near the largest float32 may have been rounded up.
    restored = jnp.clip(values * scales, -_LARGEST_FLOAT32, _LARGEST_FLOAT32)
    flat = restored.reshape(len(restored), -1)
    return flat[:, :size].reshape(-1, *shape)


def _read_floats(bits: jax.Array, dtype: str) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.dtype(dtype)).astype(jnp.float32)


def _pad_last(x: jax.Array, zeros: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[-1] = (0, zeros)
    return jnp.pad(x, widths)


def _choose_scales(largest: jax.Array, wire_format: Format) -> _Scales:
    """The smallest scales of blocks with these largest magnitudes, [n, blocks]."""
    if wire_format.two_scales:
        return _choose_two_scales(largest, wire_format)
    exponents = _choose_exponents(largest, wire_format.largest)
    # 1 / scale, by its bits: for the scale 4 = 2^2 the exponent field is 129, and 254 - 129 = 125 is that of 2^-2.
    return _Scales(exponents.astype(jnp.uint8), _power_of_two(2 * _BIAS - exponents), jnp.ones_like(largest))


def _choose_two_scales(largest: jax.Array, wire_format: Format) -> _Scales:
    """A scale of float32 for each message, a power of two, and scales of E4M3 for its blocks.

    A message's scale that is no power of two would use the range of E4M3 better by a factor below two, of 2^18. Its
    products with other numbers would have to be rounded, and no residual would be exact.

    Worked example: the largest magnitude is 10000, that of a block 260. 10000 <= 6 * 448 * 4, so the scale of the
    message is 4. In units of it the block's largest magnitude is 65, and its scale at least 65 / 6 = 10.83. E4M3 has
    the exponent 3 there, and steps of 1: the scale is k/8 * 2^3 with k = 11.
    """
    most = wire_format.largest
    is_finite = jnp.isfinite(largest)
    # A block that is not finite does not take the others with it.
    largest_of_message = jnp.max(jnp.where(is_finite, largest, 0.0), axis=-1, keepdims=True)
    message_exponents = _choose_exponents(largest_of_message, most * LARGEST_E4M3)
    units = largest * _power_of_two(2 * _BIAS - message_exponents)
    # The smallest exponent with which 15 eighths are enough. With a smaller one they are not, so it needs more than 7.
    exponents = _choose_exponents(units, most * 15 / 8, _E4M3_SMALLEST_EXPONENT) - _BIAS
    eighths_of_largest = units * _power_of_two(_BIAS + 3 - exponents)
    # Rounded up by comparisons: a division by 6 is rounded, by some chips in their own way.
    eighths = jnp.ones_like(exponents)
    for number in range(1, 15):
        eighths = eighths + (eighths_of_largest > most * number).astype(jnp.int32)
    # The exponent field is one more where the significand is 8/8 or above, which adds the leading one of 8 = 0b1000.
    # Worked example: 11/8 * 2^3 is (3 + 6) * 8 + 11 = 0b1010011, of exponent field 3 + 7 and mantissa 0b011.
    bits = ((exponents - _E4M3_SMALLEST_EXPONENT) << 3) + eighths
    bits = jnp.where(is_finite, bits, _E4M3_NAN).astype(jnp.uint8)
    message_bits = lax.bitcast_convert_type(_power_of_two(message_exponents), jnp.uint8)
    sent = jnp.concatenate([bits, message_bits.reshape(len(bits), -1)], axis=-1)
    inverse = _power_of_two(2 * _BIAS - message_exponents - exponents)
    return _Scales(sent, inverse, eighths.astype(jnp.float32) / 8)


def _read_scales(bits: jax.Array, wire_format: Format) -> jax.Array:
    """The scales of the blocks in float32, [n, blocks]; NaN for a block that was not finite."""
    if wire_format.two_scales:
        message_scales = lax.bitcast_convert_type(bits[:, -4:], jnp.float32)
        return _read_floats(bits[:, :-4], "float8_e4m3fn") * message_scales[:, None]
    exponents = bits.astype(jnp.int32)
    return jnp.where(exponents == _NOT_FINITE, jnp.nan, _power_of_two(exponents))


def _choose_exponents(largest: jax.Array, most: float, smallest: int = SMALLEST) -> jax.Array:
    """The biased exponent of the smallest power of two s with `largest` at most s `most`; int32.

    Read as integers, positive floats have the same order, and a factor of two is a difference of 2^23. So the
    difference of two floats, rounded up to a multiple of 2^23, is the exponent of the least power of two that is not
    below their quotient. There is no division, which some chips round in their own way.

    Worked example: `largest` 260 and `most` 127. 260 / 127 is a bit above 2, so the difference of the bits is a bit
    above 2^23. Rounded up it is 2 * 2^23: the scale is 2^2 = 4.
    """
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    most_bits = int(np.float32(most).view(np.int32))
    rounded_up = bits - most_bits + 2**23 - 1
    exponents = jnp.maximum(rounded_up >> 23, smallest) + _BIAS
    return jnp.where(jnp.isfinite(largest), exponents, _NOT_FINITE)


def _power_of_two(biased_exponents: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(biased_exponents << 23, jnp.float32)


def _draw(key: jax.Array | None, shape: tuple[int, ...]) -> jax.Array | None:
    """Numbers between 0 and 1 in float32: the middles of 2^16 equal intervals, each as likely; None without a key.

    A number that is p of the way from one value to the next is rounded up if its draw is below p. Where p is a multiple
    of 2^-16, as many draws are, and the mean of what is sent is the number itself; else it is within 2^-17 of the way.
    With sixteen bits the products and sums of draws in this file are exact in float32.
    """
    if key is None:
        return None
    bits = jax.random.bits(key, shape, jnp.uint16)
    return (bits.astype(jnp.float32) + 0.5) * 2.0**-16


def _round(x: jax.Array, draws: jax.Array | None) -> jax.Array:
    """Whole numbers: the nearest ones, of two the even one; or with draws those below or above."""
    if draws is None:
        return jnp.round(x)
    below = jnp.floor(x)
    return below + (x - below > draws).astype(jnp.float32)


def _round_floats(x: jax.Array, wire_format: Format, draws: jax.Array | None) -> jax.Array:
    """Floats within the range of a format, as values of it.

    Not by a cast, which may round twice, and which compilers may leave out; nor by `reduce_precision` and a cast: near
    0, where a format has fewer bits, they round one after the other.

    Worked example in E4M3: 10.6 has the exponent 3, where values are 2^(3 - 3) apart, and becomes 11. 0.01 has the
    exponent -7. Values there are 2^-9 apart, as those of the smallest exponent, -6: 0.01 is 5.12 of these distances,
    and becomes 5 of them.
    """
    assert wire_format.mantissa is not None
    magnitude_bits = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    exponents = jnp.maximum((magnitude_bits >> 23) - _BIAS, wire_format.smallest_exponent)
    distance_exponents = exponents - wire_format.mantissa
    whole_numbers = _round(x * _power_of_two(_BIAS - distance_exponents), draws)
    return whole_numbers * _power_of_two(_BIAS + distance_exponents)


def _round_to_e2m1(x: jax.Array, unit: jax.Array, draws: jax.Array | None) -> jax.Array:
    """The codes of x / unit in E2M1, as float32.

    Compared with products, which are exact: a quotient would be rounded.

    Worked example: x = 2.4 in units of 11/8. 2.4 is above 11/8 times 0.25, 0.75 and 1.25, the middles of the first four
    values, and below 11/8 times 1.75. So it has the code 3, of 1.5, and becomes 2.0625. With the draw 0.4 it is also
    compared with 1.5 + 0.4 * (2 - 1.5) = 1.7 units, which are 2.34: it is above, and becomes 2 units, 2.75.
    """
    magnitude = jnp.abs(x)
    codes = jnp.zeros_like(x)
    for code in range(1, len(_E2M1)):
        low = _E2M1[code - 1]
        distance = _E2M1[code] - low
        if draws is not None:
            is_above = magnitude > (low + distance * draws) * unit
        elif code % 2 == 0:  # in the middle, the value with the even code
            is_above = magnitude >= (low + distance / 2) * unit
        else:
            is_above = magnitude > (low + distance / 2) * unit
        codes = codes + is_above.astype(jnp.float32)
    return codes + 8 * (x < 0).astype(jnp.float32)


def _read_e2m1(codes: jax.Array) -> jax.Array:
    """The values of codes in float32; of the integers only the lower four bits count."""
    magnitude_codes = (codes & 7).astype(jnp.float32)
    # 0, 1/2, 1, 3/2, then 2 and 3, then 4 and 6.
    magnitudes = jnp.where(magnitude_codes < 4, magnitude_codes / 2, magnitude_codes - 2)
    magnitudes = jnp.where(magnitude_codes < 6, magnitudes, 2 * magnitude_codes - 8)
    return jnp.where((codes & 8) == 0, magnitudes, -magnitudes)


def _pack(x: jax.Array, bits: int) -> jax.Array:
    """Whole numbers [..., block] as bytes. Of 4 bits, a byte has one number of the first half and one of the second.

    Worked example: the block [1, 2, 3, 4] becomes the bytes [1 + 16 * 3, 2 + 16 * 4].
    """
    if bits == 4:
        block = x.shape[-1]
        half = math.ceil(block / 2)
        low = x[..., :half] & 15
        high = _pad_last(x[..., half:], block % 2) << 4
        x = low | high
    return x.astype(jnp.uint8)


def _unpack(x: jax.Array, bits: int) -> jax.Array:
    """The whole numbers of bytes. A block with an odd number of 4-bit numbers gets a zero at the end."""
    wide = lax.bitcast_convert_type(x, jnp.int8).astype(jnp.int32)
    if bits != 4:
        return wide
    # Shifted up and down again, the lower four bits get the sign of their highest.
    # Worked example: of the byte 0x1f the lower bits 1111 are -1, and the upper ones 1.
    low = wide << 28 >> 28
    high = wide >> 4
    return jnp.concatenate([low, high], axis=-1)


def _seal_message(message: QuantizedMessage) -> QuantizedMessage:
    """The message behind a barrier: the sender too must decode the sent bits, and not reuse its wider values."""
    return lax.optimization_barrier(message)


def check_dtype(where: str, argument: str, dtype: Any) -> str:
    """The name of a dtype or format that can be sent; refuses any other."""
    if isinstance(dtype, str) and dtype in FORMATS:
        return dtype
    name = jnp.dtype(dtype).name
    one_of(where, argument, name, tuple(FORMATS))
    return name
