"""One message of a compressed collective: float32 values in blocks of a small dtype, each with its scale.

Scales are powers of two, so that what a rounding leaves out is exact: sent + left out equals the value in every bit of
float32 (above the subnormals). `cost.quantization_error` bounds it, `cost.quantized_bytes` is what is sent.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit._arguments.checks import one_of
from shardkit.cost.quantization import FORMATS, SMALLEST

# A scale is sent as the exponent field of a float32.
_BIAS = 127
_NOT_FINITE = 255
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)

# One block on the wire, of int8, whose largest value is 127. The block [3.0, -100.0, 260.0] has the scale 4, the
# smallest power of two with 260 <= 127 * 4. Sent are the whole numbers round(x / 4) = [1, -25, 65] and the exponent of
# the scale, 127 + 2. They are restored as [4.0, -100.0, 260.0], and the residual is [-1.0, 0.0, 0.0]: the next step
# sends 1.0 less.


class QuantizedMessage(NamedTuple):
    """The message of float32 [n, ...].

    It is bits, as unsigned integers, so that the compiler cannot move a conversion across the collective, nor send a
    dtype that the chip lacks as a wider one. It is two arrays, because one flat array takes the TPU compiler twenty
    times as long, and twice the memory traffic.
    """

    values: jax.Array  # [n, blocks, bytes of a block] in uint8; of bfloat16, [n, ...] in uint16
    exponents: jax.Array | None  # of the scales, [n, blocks] in uint8; None for bfloat16


def encode(x: jax.Array, dtype: str, block: int) -> QuantizedMessage:
    """Float32 [n, ...] as n messages."""
    wire_format = FORMATS[dtype]
    if not wire_format.scaled:
        return _encode_bfloat16(x)
    flat = x.reshape(len(x), -1)
    # A shard that is shorter than a block is one block, without padding.
    size = flat.shape[1]
    block = min(block, size)
    blocks = _pad_last(flat, -size % block).reshape(len(x), -1, block)
    largest = jnp.max(jnp.abs(blocks), axis=-1)
    exponents = _choose_exponents(largest, wire_format.largest)
    # Products with powers of two, here and in decode, are exact.
    # 1 / scale, by its bits: for the scale 4 = 2^2 the exponent field is 129, and 254 - 129 = 125 is that of 2^-2.
    inverse = lax.bitcast_convert_type((2 * _BIAS - exponents) << 23, jnp.float32)
    values = blocks * inverse[..., None]
    if wire_format.mantissa is None:
        whole_numbers = jnp.round(values).astype(jnp.int32)
        bits = _pack(whole_numbers, wire_format.bits)
    else:
        rounded = _round_mantissa(values, wire_format.mantissa)
        bits = lax.bitcast_convert_type(rounded.astype(dtype), jnp.uint8)
    return _seal_message(QuantizedMessage(bits, exponents.astype(jnp.uint8)))


def _encode_bfloat16(x: jax.Array) -> QuantizedMessage:
    wire_format = FORMATS["bfloat16"]
    assert wire_format.mantissa is not None
    rounded = _round_mantissa(x, wire_format.mantissa)
    # Clipped: an infinity would leave no residual.
    is_finite = jnp.isfinite(x)
    clipped = jnp.clip(rounded, -wire_format.largest, wire_format.largest)
    values = jnp.where(is_finite, clipped, rounded)
    bits = lax.bitcast_convert_type(values.astype("bfloat16"), jnp.uint16)
    return _seal_message(QuantizedMessage(bits, None))


def decode(message: QuantizedMessage, shape: tuple[int, ...], dtype: str, block: int) -> jax.Array:
    """n messages as float32 [n, *shape]; a block with an element that was not finite becomes NaN."""
    wire_format = FORMATS[dtype]
    if message.exponents is None:
        return _read_floats(message.values, dtype)
    size = math.prod(shape)
    if wire_format.mantissa is None:
        whole_numbers = _unpack(message.values, wire_format.bits)
        values = whole_numbers[..., : min(block, size)].astype(jnp.float32)
    else:
        values = _read_floats(message.values, dtype)
    exponents = message.exponents.astype(jnp.int32)
    scales = lax.bitcast_convert_type(exponents << 23, jnp.float32)
    scales = jnp.where(exponents == _NOT_FINITE, jnp.nan, scales)[..., None]
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


def _choose_exponents(largest: jax.Array, most: float) -> jax.Array:
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
    exponents = jnp.maximum(rounded_up >> 23, SMALLEST) + _BIAS
    return jnp.where(jnp.isfinite(largest), exponents, _NOT_FINITE)


def _round_mantissa(x: jax.Array, mantissa: int) -> jax.Array:
    """`x` rounded to the nearest value with so many bits of mantissa.

    A cast may round twice, and compilers may leave a cast out.
    """
    return lax.reduce_precision(x, 8, mantissa)


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
    """The name of a dtype that can be sent; refuses any other."""
    name = jnp.dtype(dtype).name
    one_of(where, argument, name, tuple(FORMATS))
    return name
