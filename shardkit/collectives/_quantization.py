"""Float32 arrays as quantized messages, and back: what the compressed collectives send.

Messages are bits, as unsigned integers: the compiler cannot move a conversion across the collective, nor send a dtype
that the chip lacks as a wider one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit.collectives import basic
from shardkit.cost.quantization import FORMATS, SMALLEST

Names = tuple[str, ...]
_BIAS, _NOT_FINITE = 127, 255  # of the exponent field of float32, which is what is sent of a scale
_MAX = float(np.finfo(np.float32).max)


class Message(NamedTuple):
    """What is sent of float32 [n, ...].

    Two arrays: flattened into one they take the TPU compiler twenty times as long, and twice the memory traffic.

    Attributes:
        values: [n, blocks, bytes of a block] in uint8; of bfloat16, [n, ...] in uint16.
        exponents: of the scales, [n, blocks] in uint8; None for bfloat16.
    """

    values: jax.Array
    exponents: jax.Array | None


def gathered(x: jax.Array, names: Names, dtype: str, block: int, replicated: bool) -> jax.Array:
    """Every device's float32 [...] as [n, ...], each from its message, the device's own too."""
    messages = basic.all_gather(encode(x[None], dtype, block), names, replicated=replicated)
    return decode(messages, x.shape, dtype, block)


def summed(x: jax.Array, names: Names, dtype: str, block: int) -> tuple[jax.Array, jax.Array]:
    """Of float32 [n, ...] on every device the sum of this device's chunk, [...]; and what was not sent, [n, ...]."""
    messages = encode(x, dtype, block)
    arrived = basic.all_to_all(messages, names, split_dim=0, concat_dim=0)
    total = jnp.sum(decode(arrived, x.shape[1:], dtype, block), axis=0)
    return total, x - decode(messages, x.shape[1:], dtype, block)


def encode(x: jax.Array, dtype: str, block: int) -> Message:
    """Float32 [n, ...] as n messages."""
    form = FORMATS[dtype]
    if not form.scaled:
        rounded = _rounded(x, form.mantissa)
        # Clipped: an infinity would leave no residual.
        finite = jnp.where(jnp.isfinite(x), jnp.clip(rounded, -form.largest, form.largest), rounded)
        return _sent(Message(lax.bitcast_convert_type(finite.astype(dtype), jnp.uint16), None))
    flat = x.reshape(len(x), -1)
    block = min(block, flat.shape[1])
    blocks = _padded(flat, -flat.shape[1] % block).reshape(len(x), -1, block)
    exponents = _exponents(jnp.max(jnp.abs(blocks), axis=-1), form.largest)
    # Products with powers of two, here and in decode, are exact.
    inverse = lax.bitcast_convert_type((2 * _BIAS - exponents) << 23, jnp.float32)
    values = blocks * inverse[..., None]
    if form.mantissa is None:
        bits = _packed(jnp.round(values).astype(jnp.int32), form.bits)
    else:
        bits = lax.bitcast_convert_type(_rounded(values, form.mantissa).astype(dtype), jnp.uint8)
    return _sent(Message(bits, exponents.astype(jnp.uint8)))


def decode(message: Message, shape: tuple[int, ...], dtype: str, block: int) -> jax.Array:
    """n messages as float32 [n, *shape]; a block that had an element that is not finite is NaN."""
    form, size = FORMATS[dtype], math.prod(shape)
    if message.exponents is None:
        return lax.bitcast_convert_type(message.values, jnp.dtype(dtype)).astype(jnp.float32)
    if form.mantissa is None:
        values = _unpacked(message.values, form.bits)[..., : min(block, size)].astype(jnp.float32)
    else:
        values = lax.bitcast_convert_type(message.values, jnp.dtype(dtype)).astype(jnp.float32)
    exponents = message.exponents.astype(jnp.int32)
    scales = lax.bitcast_convert_type(exponents << 23, jnp.float32)
    scales = jnp.where(exponents == _NOT_FINITE, jnp.nan, scales)[..., None]
    # Clipped: elements near the largest float32 may have been rounded up.
    restored = jnp.clip(values * scales, -_MAX, _MAX)
    return restored.reshape(len(restored), -1)[:, :size].reshape(-1, *shape)


def _padded(x: jax.Array, zeros: int) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, zeros)])


def _exponents(largest: jax.Array, most: float) -> jax.Array:
    """The biased exponent of the smallest power of two s with `largest` at most s `most`; int32.

    The bits of positive floats are ordered, and 2^23 apart for factors of two, so the difference of two of them,
    rounded up to a multiple of 2^23, is the exponent: no division, which some chips round in their own way.
    """
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    above = bits - int(np.float32(most).view(np.int32)) + 2**23 - 1
    exponents = jnp.maximum(above >> 23, SMALLEST) + _BIAS
    return jnp.where(jnp.isfinite(largest), exponents, _NOT_FINITE)


def _rounded(x: jax.Array, mantissa: int | None) -> jax.Array:
    """`x` to the nearest value with so many bits: a cast alone may round twice, and compilers may elide it."""
    assert mantissa is not None
    return lax.reduce_precision(x, 8, mantissa)


def _packed(x: jax.Array, bits: int) -> jax.Array:
    """Whole numbers [..., block] as bytes; of 4 bits, the second half of a block in the upper bits of the first's."""
    if bits == 4:
        half = -(-x.shape[-1] // 2)
        x = x[..., :half] & 15 | _padded(x[..., half:], x.shape[-1] % 2) << 4
    return x.astype(jnp.uint8)


def _unpacked(x: jax.Array, bits: int) -> jax.Array:
    """The whole numbers of bytes; of an odd number of 4 bits with a zero at the end."""
    wide = lax.bitcast_convert_type(x, jnp.int8).astype(jnp.int32)
    return jnp.concatenate([wide << 28 >> 28, wide >> 4], axis=-1) if bits == 4 else wide


def _sent(message: Message) -> Message:
    """The message as it is sent: what is computed from it here must not come from the wider values before it."""
    return lax.optimization_barrier(message)
