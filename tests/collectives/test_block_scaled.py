"""Formats of blocks with a scale each, and stochastic rounding: bits, nearest values, bounds, means by enumeration."""

from functools import cache, partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import cost
from shardkit.collectives import compressed, quantization
from shardkit.collectives.quantization import decode, encode
from shardkit.cost.quantization import FORMATS

BLOCK_SCALED = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
SIZE = 77  # the last block is padded
ROWS = 16
# What can be sent of a magnitude, and whether it is the even one of two neighbors.
ELEMENTS = {
    "mxfp8": np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64),
    "mxfp4": np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]),
    "nvfp4": np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]),
}
E4M3_SCALES = ELEMENTS["mxfp8"][1:]
# The largest errors of an element, of the largest magnitude in its block. In "mxfp4" it is 1, in a block whose largest
# magnitude is a bit above 5; in "mxfp8" likewise 1 of 17. In "nvfp4" a scale is up to 9/8 of a sixth of that magnitude.
RELATIVE = {"mxfp8": 1 / 17, "mxfp4": 1 / 5, "nvfp4": 3 / 16}


@cache
def encoded(dtype, drawn=False):
    """Jitted: messages of float32 [n, size]; with `drawn` and a key, stochastically rounded."""
    if drawn:
        return jax.jit(lambda x, key: encode(x, dtype, FORMATS[dtype].block or 16, key))
    return jax.jit(lambda x: encode(x, dtype, FORMATS[dtype].block or 16))


def restore(message, dtype, size):
    return np.asarray(decode(message, (size,), dtype, FORMATS[dtype].block or 16), np.float64)


def sent(x, dtype):
    return restore(encoded(dtype)(x), dtype, x.shape[1])


def blocks_of(x, dtype):
    """[rows, blocks, elements] of [rows, size]; one smaller block if there is not enough for one."""
    block = min(BLOCK_SCALED[dtype], x.shape[1])
    return np.pad(x, ((0, 0), (0, -x.shape[1] % block))).reshape(len(x), -1, block)


def power_of_two(largest, most):
    """The smallest power of two s with largest <= most s, and at least 2^-100."""
    half, exponent = np.frexp(largest / most)
    return 2.0 ** np.maximum(exponent - (half == 0.5), -100)


def choose_scales(blocks, dtype):
    """The smallest scale of each block that leaves none of its elements above the largest value, in float64."""
    largest = np.abs(blocks).max(-1)
    if dtype != "nvfp4":
        return power_of_two(largest, ELEMENTS[dtype][-1])
    message_scales = power_of_two(largest.max(-1, keepdims=True), 6 * 448.0)
    enough = largest[..., None] <= 6 * E4M3_SCALES * message_scales[..., None]
    return E4M3_SCALES[np.argmax(enough, -1)] * message_scales


def by_search(x, dtype):
    """The nearest of all values, each compared, times the scale; of two the one with the even code."""
    blocks = blocks_of(x.astype(np.float64), dtype)
    scales = choose_scales(blocks, dtype)[..., None]
    distances = np.abs(np.abs(blocks / scales)[..., None] - ELEMENTS[dtype])
    near = np.argsort(distances, axis=-1, kind="stable")[..., :2]
    first, second = (np.take_along_axis(distances, near[..., i : i + 1], -1)[..., 0] for i in (0, 1))
    codes = np.where((first == second) & (near[..., 0] % 2 == 1), near[..., 1], near[..., 0])
    values = np.copysign(ELEMENTS[dtype][codes], blocks) * scales
    return values.reshape(len(x), -1)[:, : x.shape[1]]


def draw_rows(seed, exponent, spread, size=SIZE):
    """Rows of magnitudes that differ by up to 2^spread, with a block of zeros; some are halfway between two values."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (ROWS, size)) * 2.0 ** (exponent - rng.integers(0, spread + 1, (ROWS, size)))
    x[::3] = np.round(x[::3] * 2.0 ** (5 - exponent)) * 2.0 ** (exponent - 5)
    x[1::4, :32] = 0
    return x.astype(np.float32)


magnitudes = {"seed": st.integers(0, 99), "exponent": st.integers(-90, 120), "spread": st.integers(0, 24)}


# What alone finds a wrong code or scale: bits that sender and receiver here read alike, and nobody else.
@pytest.mark.parametrize("dtype", BLOCK_SCALED)
@pytest.mark.optimized
def test_the_bits_are_those_of_the_standard_dtypes(dtype):  # proves N70
    x = draw_rows(0, 3, 9)
    x[2, 40], x[3, 40] = np.inf, np.nan
    message = encoded(dtype)(x)
    values, scales = np.asarray(message.values), np.asarray(message.scales)
    count = -(-SIZE // BLOCK_SCALED[dtype])
    if dtype == "mxfp8":
        elements = values.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    else:  # two in a byte: the first half of the block in the lower bits
        codes = np.concatenate([values & 15, values >> 4], -1)
        elements = codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    if dtype == "nvfp4":
        assert scales.shape == (ROWS, count + 4)
        message_scales = np.ascontiguousarray(scales[:, count:]).view("<f4").astype(np.float64)
        factors = np.ascontiguousarray(scales[:, :count]).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        factors = factors * message_scales
    else:
        assert scales.shape == (ROWS, count)
        factors = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    restored = (elements * factors[..., None]).reshape(ROWS, -1)[:, :SIZE]
    np.testing.assert_array_equal(restored, restore(message, dtype, SIZE))
    block = BLOCK_SCALED[dtype]
    wrong = np.zeros((ROWS, SIZE), bool)
    wrong[2:4, 40 // block * block : (40 // block + 1) * block] = True  # the block, and no other of the message
    np.testing.assert_array_equal(np.isnan(restored), wrong)


# What alone finds a scale that clips, a tie that is not rounded to even, and a value near 0 that is rounded twice.
@pytest.mark.parametrize("dtype", BLOCK_SCALED)
@given(**magnitudes)
@example(seed=0, exponent=0, spread=0)
@example(seed=1, exponent=-90, spread=24)
def test_values_are_the_nearest(dtype, seed, exponent, spread):  # proves N70
    x = draw_rows(seed, exponent, spread)
    np.testing.assert_array_equal(sent(x, dtype), by_search(x, dtype))


@pytest.mark.parametrize("dtype", BLOCK_SCALED)
@pytest.mark.parametrize("size", [1, 5, 16, 17, 33])
@pytest.mark.quick("5-nvfp4", "33-mxfp4", "1-mxfp8")
def test_sizes_that_fill_no_block(dtype, size):  # proves N70
    """Padding that is taken for an element, or a smaller block of an odd number of elements."""
    x = draw_rows(size, 0, 6, size)
    np.testing.assert_array_equal(sent(x, dtype), by_search(x, dtype))


@pytest.mark.parametrize("dtype", BLOCK_SCALED)
def test_zeros_and_the_smallest_scales(dtype):  # proves N70
    """A message of zeros has scales that are numbers; what is too small for any scale is sent as zero, drawn or not."""
    smallest = 2.0**-100 * {"mxfp8": 2.0**-9, "mxfp4": 0.5, "nvfp4": 2.0**-10}[dtype]
    x = np.zeros((3, 40), np.float32)
    x[1] = smallest / 2  # a tie, which is rounded to zero
    x[2] = -1.5 * smallest  # likewise to -2 of them
    x[2, 0] = smallest
    np.testing.assert_array_equal(sent(x, dtype), [[0] * 40, [0] * 40, [smallest] + [-2 * smallest] * 39])
    message = encoded(dtype, drawn=True)(x, jax.random.key(0))
    results = restore(message, dtype, 40)
    assert not results[0].any()
    assert set(np.unique(results[1])) == {0, smallest}
    assert set(np.unique(results[2])) == {smallest, -smallest, -2 * smallest}
    tiny = np.full((1, 40), 1e-39, np.float32)  # subnormal
    assert not sent(tiny, dtype).any()


# What alone finds a bound in the documentation that is too small, or too large to be of use.
@pytest.mark.parametrize("dtype", BLOCK_SCALED)
@given(**magnitudes)
@example(seed=0, exponent=0, spread=0)
def test_errors_are_within_their_bounds(dtype, seed, exponent, spread):  # proves N70
    x = draw_rows(seed, exponent, spread)
    errors = np.abs(blocks_of(sent(x, dtype) - x, dtype)).max(-1)
    largest = np.abs(blocks_of(x, dtype).astype(np.float64)).max(-1)
    most = cost.quantization_error(float(largest.max()), dtype)
    assert errors.max() <= most
    assert cost.quantization_error(float(largest.max()), dtype, stochastic=True) == 2 * most
    bounds = RELATIVE[dtype] * largest
    if dtype == "nvfp4":  # a scale that is subnormal in E4M3 is rounded up by up to 2^-9
        message_scales = power_of_two(largest.max(-1, keepdims=True), 6 * 448.0)
        bounds = np.maximum(bounds, largest / 6 + 2.0**-9 * message_scales)
    assert (errors <= bounds).all()


def test_the_bounds_are_reached():  # proves N70
    """The worst blocks: of largest magnitudes just above 17/16, 5 and 6."""
    above = 1 + 2.0**-20
    worst = {"mxfp8": [1.0625 * above], "mxfp4": [5 * above], "nvfp4": [6 * above, 5.625]}
    for dtype, block in worst.items():
        x = np.array([block], np.float32)
        error = np.abs(sent(x, dtype) - x).max()
        assert (1 - 2.0**-10) * RELATIVE[dtype] < error / np.abs(x).max() <= RELATIVE[dtype], dtype


# ---- stochastic rounding


def enumerate_draws(monkeypatch):
    """Gives each row of an array another of the 65536 values that the 16 bits of a draw can have."""

    def all_bits(key, shape, dtype):
        assert dtype == jnp.uint16 and shape[0] == 2**16
        rows = jnp.arange(2**16, dtype=jnp.uint16).reshape(-1, *[1] * (len(shape) - 1))
        return jnp.broadcast_to(rows, shape)

    monkeypatch.setattr(jax.random, "bits", all_bits)


def by_all_draws(x, dtype):
    """The float32 [size] that is sent with each of the 65536 draws: [65536, size]."""
    rows = np.broadcast_to(np.asarray(x, np.float32), (2**16, len(x)))
    block = FORMATS[dtype].block or 16
    message = jax.jit(lambda x: encode(x, dtype, block, jax.random.key(0)))(rows)
    return restore(message, dtype, len(x))


def distances_of(x, results):
    """How far apart the values are that an element is sent as, below and above it; 0 if it is sent as one alone."""
    low, high = results.min(0), results.max(0)
    assert all(len(np.unique(column)) <= 2 for column in results.T)
    assert ((low == high) | (low <= x) & (x <= high)).all()
    return high - low


# What alone finds a bias: a draw that includes 0 or 1, a comparison with the wrong end, a rounded product, a clipped
# element. The mean over all draws is taken, and no sample, so the expectation is exact.
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.optimized
def test_the_mean_over_all_draws_is_the_element(monkeypatch, dtype):  # proves N70
    enumerate_draws(monkeypatch)
    form, rng = FORMATS[dtype], np.random.default_rng(0)
    size = form.block or 16
    # On the way from one value to the next, in steps of 2^-16. In "nvfp4" in units of the scale 11/8 * 2^4: the largest
    # magnitude of the message, 2688, is in another block, and the message's scale is 1.
    if form.mantissa is None:
        low, distance = rng.integers(-form.largest, form.largest, size), 1.0
    elif dtype == "bfloat16":
        low, distance = 2.0 ** rng.integers(-90, 90, size), 2.0**-7
        distance = low * distance
    else:
        values = ELEMENTS.get(dtype, np.arange(123, dtype=np.uint8).view(form.element).astype(np.float64))
        codes = rng.integers(0, len(values) - 1, size)
        low, distance = values[codes], values[codes + 1] - values[codes]
    scale = 22.0 if dtype == "nvfp4" else 0.25
    x = scale * (low + distance * rng.integers(0, 2**16, size) / 2**16)
    if form.mantissa is not None:
        x = x * rng.choice([-1, 1], size)
    if dtype != "bfloat16":
        x[0] = scale * form.largest  # the block's scale; the top of the range is sent as it is
    if dtype == "nvfp4":
        x = np.append(x, [2688.0])
    assert (x.astype(np.float32) == x).all()
    results = by_all_draws(x, dtype)
    distances = distances_of(x, results)
    np.testing.assert_array_equal(results.mean(0), x)
    assert (distances[1:size] > 0).sum() > size // 2


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.quick("bfloat16", "int8", "mxfp8", "mxfp4", "nvfp4")
def test_the_mean_of_any_element_is_within_the_bits_of_a_draw(monkeypatch, dtype):  # proves N70
    """Elements between the steps, of all magnitudes: 2^-17 of the way to the next value; bfloat16 has no such rest."""
    enumerate_draws(monkeypatch)
    rng = np.random.default_rng(1)
    for exponent in (-80, 0, 100):
        x = (rng.normal(size=40) * 2.0 ** (exponent + rng.integers(-12, 3, 40))).astype(np.float32)
        results = by_all_draws(x, dtype)
        distances = distances_of(x, results)
        errors = np.abs(results.mean(0) - x)
        rest = 0.0 if dtype == "bfloat16" else 2.0**-17
        largest_distance = cost.quantization_error(float(np.abs(x).max()), dtype, stochastic=True)
        is_drawn = distances > 0
        assert is_drawn.sum() > 20
        assert (errors[is_drawn] <= rest * distances[is_drawn]).all()
        assert (errors[~is_drawn] <= rest * largest_distance).all()  # so near to a value that no draw decides
        assert np.abs(results - x).max() <= largest_distance


def test_each_draw_has_sixteen_bits():
    """Draws that are not all of the 65536 that the tests above enumerate."""
    draws = np.asarray(quantization._draw(jax.random.key(0), (4096,)), np.float64) * 2**16 - 0.5
    assert (draws == np.round(draws)).all() and draws.min() >= 0 and draws.max() < 2**16
    assert len(np.unique(draws)) > 3500 and draws.max() > 65000


# ---- who draws alike


def halfway(*shape):
    """The same on all devices: halfway between two values, so that each draw decides."""
    x = np.full(shape, 2.5, np.float32)
    x[..., 0] = 6
    return x


def test_devices_leaves_and_roundings_draw_for_themselves(mesh2x4):  # proves N70
    """The devices of the axis must draw differently; along another axis they must draw alike, and the types say so."""
    x = halfway(32)

    @partial(jax.shard_map, mesh=mesh2x4, in_specs=(P(), P()), out_specs=(P(), P("data")))
    def gather(x, key):
        options = {"axis": "model", "dtype": "mxfp4", "replicated": True, "key": key}
        # P() over "data" too: each of its devices must have sent the same.
        whole = compressed.all_gather({"first": x, "second": x}, **options)
        folded = compressed.all_gather(x, **options | {"key": sk.fold_axes(key, "data")})
        return whole, folded

    whole, folded = jax.jit(gather)(x, jax.random.key(0))
    draws = [*np.asarray(whole["first"]).reshape(4, 32), *np.asarray(whole["second"]).reshape(4, 32)]
    draws += [*np.asarray(folded).reshape(8, 32)]
    assert {float(value) for row in draws for value in row} == {2.0, 3.0, 6.0}
    assert len({row.tobytes() for row in draws}) == 16  # 4 devices of 2 leaves, and 8 devices
    again, _ = jax.jit(gather)(x, jax.random.key(0))
    other, _ = jax.jit(gather)(x, jax.random.key(1))
    np.testing.assert_array_equal(again["first"], whole["first"])
    assert (np.asarray(other["first"]) != np.asarray(whole["first"])).any()


# What alone finds draws that depend on how the program runs, and not on the key and the device's place alone.
def test_raw_keys_and_emulated_devices_draw_the_same():  # proves N70
    x = np.random.default_rng(0).normal(size=(6, 40)).astype(np.float32)
    specs = (P(("a", "b")), P())

    def kernel(x, key):
        return compressed.all_reduce(x[0], ("b", "a"), dtype="nvfp4", compress_result=True, key=key)[0]

    mesh = sk.make_mesh(jax.devices()[:6], a=2, b=3)
    run = jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=specs, out_specs=P()))
    total = run(x, jax.random.key(7))
    np.testing.assert_array_equal(run(x, jax.random.PRNGKey(7)), total)
    emulated = sk.testing.emulate(kernel, {"a": 2, "b": 3}, specs, P())
    np.testing.assert_array_equal(emulated(x, jax.random.key(7)), total)


# What alone finds a second rounding with the draws of the first: each is unbiased, both together are not. By a sample:
# its mean is off by 0.016 in one of three, and that of equal draws by 0.25 and 0.125.
def test_two_roundings_have_draws_of_their_own():  # proves N70
    def values(number, largest):
        x = np.full(4096, number, np.float32)
        x[::32] = largest
        return x

    alone, two = sk.make_mesh(jax.devices()[:1], data=1, model=1), sk.make_mesh(jax.devices()[:2], data=2)

    @partial(jax.shard_map, mesh=alone, in_specs=P(), out_specs=P(("data", "model")))
    def scatter(x):
        options = {"dtype": "mxfp4", "inner_dtype": "mxfp8", "key": jax.random.key(0)}
        return compressed.reduce_scatter_two_level(x, "model", "data", **options)[0]

    @partial(jax.shard_map, mesh=two, in_specs=P(), out_specs=P())
    def reduce(x):
        options = {"dtype": "mxfp4", "compress_result": True, "key": jax.random.key(0)}
        return compressed.all_reduce(x, "data", **options)[0]

    # 5.25 is halfway from 5 to 5.5; then 5 is halfway from 4 to 6, and 5.5 three quarters.
    x = values(5.25, 6)
    assert abs(np.asarray(jax.jit(scatter)(x))[x < 6].mean() - 5.25) < 0.05
    # 2.25 is a quarter of the way from 2 to 3; then a sum of 5 is halfway from 4 to 6. Device 0 has the first half.
    x = np.concatenate([values(2.25, 6)] * 2)
    assert abs(np.asarray(jax.jit(reduce)(x))[:4096][x[:4096] < 6].mean() - 4.5) < 0.05


def scatter_twice(x, residual, key):
    return compressed.reduce_scatter_two_level(
        x, "model", "data", residual, dtype="nvfp4", inner_dtype="mxfp8", key=key
    )


SUMS = {
    "all_reduce": lambda x, r, key: compressed.all_reduce(x, ("data", "model"), r, dtype="mxfp4", key=key),
    "all_reduce twice": lambda x, r, key: compressed.all_reduce(
        x, ("data", "model"), r, dtype="nvfp4", compress_result=True, key=key
    ),
    "reduce_scatter": lambda x, r, key: compressed.reduce_scatter(x, ("data", "model"), r, dtype="mxfp8", key=key),
    "two levels": scatter_twice,
    "int8": lambda x, r, key: compressed.all_reduce(x, ("data", "model"), r, dtype=jnp.int8, key=key),
}
EIGHT = P(("data", "model"))


def summed(kernel, mesh, dtype=np.float32):
    """[8, size] and residuals to the sum, the residuals, and the sum without a residual."""

    def device(x, residual, key):
        total, left = kernel(x[0].astype(dtype), residual[0], key)
        alone, none = kernel(x[0].astype(dtype), None, key)
        assert none is None
        return sk.vary(total, ("data", "model"))[None], left[None], sk.vary(alone, ("data", "model"))[None]

    return jax.jit(jax.shard_map(device, mesh=mesh, in_specs=(EIGHT, EIGHT, P()), out_specs=(EIGHT, EIGHT, EIGHT)))


# What alone finds a residual that is not what the drawn message left out, in the first step or in a later one.
@pytest.mark.parametrize("form", SUMS)
@pytest.mark.quick("all_reduce twice", "two levels")
def test_feedback_of_drawn_messages_over_steps(form, mesh2x4):  # proves N70
    rng = np.random.default_rng(0)
    step = summed(SUMS[form], mesh2x4)
    is_scatter = form in ("reduce_scatter", "two levels")
    residual = np.zeros((8, 400), np.float32)
    wanted, received = np.zeros(400), np.zeros(400)
    largest = 0.0
    for number in range(6):
        x = rng.normal(size=(8, 400)).astype(np.float32)
        largest = max(largest, float(np.abs(x + residual).max()))
        totals, residual, _ = (np.asarray(y) for y in step(x, residual, jax.random.key(number)))
        wanted += x.astype(np.float64).sum(0)
        received += totals.reshape(-1) if is_scatter else totals[0].astype(np.float64)
        # All that was sent and all that is still kept is all that was to be sent.
        np.testing.assert_allclose(received + residual.astype(np.float64).sum(0), wanted, atol=1e-4)
        assert np.abs(received - wanted).max() > 1e-3
    # After six steps the sums lack what one step leaves out, and no more.
    assert np.abs(received - wanted).max() < 20 * cost.quantization_error(8 * largest, "mxfp4", stochastic=True)
    assert np.abs(residual).max() <= 8 * cost.quantization_error(8 * largest, "mxfp4", stochastic=True)


def test_halves_and_one_device(mesh2x4):  # proves N70
    """bfloat16 in and out, and an axis of one device: what is sent to nobody is rounded too, as with more of them."""
    x = np.random.default_rng(0).normal(size=(8, 48)).astype(np.float32)
    halves = np.asarray(x.astype(jnp.bfloat16), np.float32)
    zeros = np.zeros_like(x)
    for key in (None, jax.random.key(0)):
        for form in ("all_reduce", "two levels"):
            run = summed(lambda x, r, _, form=form, key=key: SUMS[form](x, r, key), mesh2x4, jnp.bfloat16)
            total, left, _ = run(halves, zeros, jax.random.key(1))
            assert total.dtype == jnp.bfloat16 and left.dtype == np.float32
            sums = (
                np.asarray(total, np.float64).reshape(-1) if form == "two levels" else np.asarray(total[0], np.float64)
            )
            kept = np.asarray(left, np.float64).sum(0)
            np.testing.assert_allclose(sums + kept, halves.sum(0), atol=2.0**-8 * np.abs(sums).max())
    alone = sk.make_mesh(jax.devices()[:1], data=1, model=1)
    for form in SUMS:
        total, left, unfed = (np.asarray(y) for y in summed(SUMS[form], alone)(x[:1], zeros[:1], jax.random.key(0)))
        np.testing.assert_allclose(total + left, x[:1], atol=1e-6)
        np.testing.assert_array_equal(total, unfed)
        assert np.abs(left).max() > 0


# What alone finds a key that is differentiated, or drawn from anew where a backward pass recomputes the messages.
def test_gradients_loops_and_checkpoints_with_a_key(mesh2x4):  # proves N70
    x = np.random.default_rng(0).normal(size=(8, 40)).astype(np.float32)

    def loss(x, key):
        def layer(y, number):
            total, _ = compressed.all_reduce(y, "model", dtype="mxfp4", key=jax.random.fold_in(key, number))
            return sk.vary(total, "model") / 4, jnp.sum(total)

        y, sums = jax.lax.scan(jax.checkpoint(layer), x[0], jnp.arange(2))
        whole = compressed.all_gather(y, "model", dtype="nvfp4", key=key)
        return jnp.sum(whole**2) + jnp.sum(sums)

    def both(x, key):
        value, gradient = jax.value_and_grad(loss)(x, key)
        return sk.vary(value, ("data", "model"))[None], gradient

    options = {"mesh": mesh2x4, "in_specs": (EIGHT, P()), "out_specs": (EIGHT, EIGHT)}
    value, gradient = jax.jit(jax.shard_map(both, **options))(x, jax.random.key(0))
    checked = jax.jit(jax.shard_map(jax.checkpoint(both), **options))(x, jax.random.key(0))
    np.testing.assert_array_equal(value, checked[0])
    np.testing.assert_array_equal(gradient, checked[1])
    forward = jax.jit(
        jax.shard_map(
            lambda x, key: sk.vary(loss(x, key), ("data", "model"))[None],
            mesh=mesh2x4,
            in_specs=(EIGHT, P()),
            out_specs=EIGHT,
        )
    )(x, jax.random.key(0))
    np.testing.assert_array_equal(value, forward)

    # Straight through: the derivative of the exact sums, at the values that were gathered.
    def exact(x, whole):
        def device(x, whole):
            def straight(x):
                y, sums = x[0], 0.0
                for _ in range(2):
                    total = sk.all_reduce(y, "model")
                    y, sums = sk.vary(total, "model") / 4, sums + jnp.sum(total)
                gathered = sk.all_gather(y, "model")
                return jnp.sum(2 * whole[0] * gathered) + sums

            return jax.grad(straight)(x)

        return jax.shard_map(device, mesh=mesh2x4, in_specs=(EIGHT, EIGHT), out_specs=EIGHT)(x, whole)

    def gathered(x, key):
        y = x[0]
        for number in range(2):
            # as the scan above draws
            total, _ = compressed.all_reduce(y, "model", dtype="mxfp4", key=jax.random.fold_in(key, number))
            y = sk.vary(total, "model") / 4
        return compressed.all_gather(y, "model", dtype="nvfp4", key=key)[None]

    whole = jax.jit(jax.shard_map(gathered, mesh=mesh2x4, in_specs=(EIGHT, P()), out_specs=EIGHT))(x, jax.random.key(0))
    np.testing.assert_allclose(gradient, jax.jit(exact)(x, whole), rtol=1e-5)


@pytest.mark.check
def test_bits_for_each_value():  # proves N70
    """The closed form: 8.25, 4.25 and 4.5 bits, and what padding adds."""
    for dtype, bits in {"mxfp8": 8.25, "mxfp4": 4.25, "nvfp4": 4.5}.items():
        message_scale = 4 if dtype == "nvfp4" else 0
        for blocks in (1, 3, 2**16):
            elements = blocks * BLOCK_SCALED[dtype]
            assert 8 * (cost.quantized_bytes(elements, dtype) - message_scale) == bits * elements
            full = cost.quantized_bytes(elements + BLOCK_SCALED[dtype], dtype)
            assert cost.quantized_bytes(elements + 1, dtype) == full
            assert cost.quantized_bytes(elements, dtype, block=BLOCK_SCALED[dtype]) < full
        assert cost.quantized_bytes(5, dtype) == (5 if dtype == "mxfp8" else 3) + 1 + message_scale
