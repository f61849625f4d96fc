"""Quantized messages: their bytes, their rounding against NumPy's, and an error that nearly reaches its bound."""

from functools import cache, partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given

from shardkit import cost
from shardkit.collectives.quantization import decode, encode
from shardkit.cost.quantization import FORMATS
from support.refusals import value_error

ROWS, SIZE, BLOCK = 32, 300, 64  # the last block of a row is padded


@cache
def sent(dtype, size=SIZE, block=BLOCK):
    return jax.jit(lambda x: decode(encode(x, dtype, block), (size,), dtype, block))


def blocks_of(x, block=BLOCK):
    return np.pad(x, ((0, 0), (0, -x.shape[1] % block))).reshape(-1, block)


def by_numpy(x, dtype, block=BLOCK):
    """The nearest value of the dtype times the block's power of two, in float64."""
    form, blocks = FORMATS[dtype], blocks_of(x, block).astype(np.float64)
    half, exponent = np.frexp(np.abs(blocks).max(1, keepdims=True) / form.largest)
    scales = 2.0 ** (exponent - (half == 0.5)) if form.scaled else 1.0
    small = np.rint(blocks / scales) if form.mantissa is None else (blocks / scales).astype(np.float32)
    return (small.astype(form.element).astype(np.float64) * scales).reshape(len(x), -1)[:, : x.shape[1]]


WITH_POWERS_OF_TWO = [name for name, form in FORMATS.items() if not form.two_scales]  # "nvfp4": test_block_scaled.py


@pytest.mark.parametrize("dtype", WITH_POWERS_OF_TWO)
@pytest.mark.optimized
def test_values_are_the_nearest_of_the_dtype(dtype):
    """A wrong scale, a rounding in two steps, or the wrong half of a packed byte."""
    x = np.random.default_rng(0).uniform(-1, 1, (ROWS, SIZE)).astype(np.float32)
    x[1:] *= 2.0 ** np.arange(1 - ROWS // 2, ROWS // 2, dtype=np.float32)[:, None]
    most = np.float32(min(FORMATS[dtype].largest, 2.0**15))
    x[0] *= most / 2
    x[0, ::BLOCK] = most  # the largest value of the dtype, and just above it
    x[0, BLOCK] = np.nextafter(most, np.float32(np.inf))
    np.testing.assert_array_equal(np.asarray(sent(dtype)(x), np.float64), by_numpy(x, dtype))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "mxfp8"])
@pytest.mark.optimized
def test_small_values_are_rounded_once(dtype):
    """Below the normal numbers of the dtype: first to its mantissa and then to what is there, some came out wrong."""
    form = FORMATS[dtype]
    distance = 2.0 ** (form.smallest_exponent - form.mantissa)
    halves = np.arange(0.5, 8, dtype=np.float32)
    x = np.concatenate([halves * (1 + sign * 2.0**-7) for sign in (-1, 0, 1)]) * distance
    x = np.append(x, form.largest).astype(np.float32)[None]
    np.testing.assert_array_equal(np.asarray(sent(dtype, x.size, 64)(x)), by_numpy(x, dtype))


@pytest.mark.parametrize("dtype", FORMATS)
@given(seed=st.integers(0, 99), exponent=st.integers(-140, 127), spread=st.integers(0, 20))
@example(seed=0, exponent=127, spread=0)
@example(seed=0, exponent=-140, spread=0)
def test_the_error_is_within_its_bound_and_close_to_it(dtype, seed, exponent, spread):
    """A bound that is too small fails for some block, and one that is too large is never nearly reached."""
    rng = np.random.default_rng(seed)
    wide = np.ldexp(rng.uniform(-2, 2, (ROWS, SIZE)), exponent - rng.integers(0, spread + 1, (ROWS, 1)))
    x = np.clip(wide, -3.4028234e38, 3.4028234e38).astype(np.float32)
    errors = np.abs(np.asarray(sent(dtype)(x), np.float64) - x)
    largest = np.abs(blocks_of(x)).max(1)
    bounds = np.array([cost.quantization_error(float(each), dtype) for each in largest])
    reached = (blocks_of(errors).max(1) / bounds).max()
    assert reached <= 1
    if -60 < exponent < 120:
        assert reached > 0.98


@pytest.mark.check
def test_the_bound_in_known_numbers():
    bound = cost.quantization_error
    assert [bound(448.0, "float8_e4m3fn"), bound(57344.0, "float8_e5m2")] == [16, 4096]
    assert [bound(127.0, "int8"), bound(127.5, "int8"), bound(7.0, "int4")] == [0.5, 1, 0.5]
    assert bound(1.0, "bfloat16") == 2**-8
    assert bound(0.0, "int8") == bound(1e-40, "int8") == 2.0**-101  # the smallest scale
    four = bound(1.0, "int8", n=4)
    assert 4 * 2**-7 < four < 4 * 2**-7 + 13 * 2**-24  # and three additions in float32


@pytest.mark.check
@pytest.mark.parametrize("dtype", FORMATS)
def test_the_bytes_of_a_message_are_the_closed_form(dtype):
    blocks = ((1, 256), (7, 256), (256, 256), (257, 256), (300, 7), (5, 1), (1024, 64))
    fixed = FORMATS[dtype].block
    if fixed:
        blocks = ((size, fixed) for size in (1, 7, 16, 17, 31, 32, 33, 256, 257, 1024))
    for size, block in blocks:
        x = jax.ShapeDtypeStruct((3, size), np.float32)
        message = jax.eval_shape(partial(encode, dtype=dtype, block=block), x)
        held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(message))
        assert held == 3 * cost.quantized_bytes(size, dtype, block=block), (size, block)
        assert all(jnp.issubdtype(leaf.dtype, jnp.unsignedinteger) for leaf in jax.tree.leaves(message))
    assert cost.quantized_bytes(0, dtype) == 0
    values = 2 * cost.quantized_bytes(2**20, "int4") - cost.quantized_bytes(2**20, "int8")
    assert values == 2**20 // 256  # half the bytes, except for the scales


@pytest.mark.parametrize("size", [1, 7, 9])
def test_short_and_odd_messages_of_int4(size):
    """The second half of an odd block has one value less than the first."""
    x = np.resize(np.arange(-7, 8, dtype=np.float32), (1, size))
    np.testing.assert_array_equal(sent("int4", size, 256)(x), x)
    np.testing.assert_array_equal(sent("int4", size, 3)(x), x)


@pytest.mark.check
@pytest.mark.parametrize("of", [cost.quantization_error, cost.quantized_bytes])
def test_another_dtype_is_refused(of):
    with value_error(
        f"{of.__name__}: dtype must be 'bfloat16', 'float8_e4m3fn', 'float8_e5m2', 'int8', 'int4', 'mxfp8', 'mxfp4' or "
        "'nvfp4'; got 'int2'. Pass for example dtype='bfloat16'."
    ):
        of(8, "int2")
