"""Pairs that an attacker got certified: they differ for few inputs, or by what a primitive does at its edges.

Each has an input for which floats differ, so that it is wrong for sure; and each family has a right pair.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.testing.exact import float_inputs
from shardkit.testing.exact.equality import UnprovableError

relu = jax.nn.relu
SIGNS = np.array([1, -1, 1, -1, -1, 1, 1, -1], np.float32)
TABLE = np.arange(101, dtype=np.float32)
EDITED = np.where(TABLE == 90, 5, TABLE)
CUBE = np.zeros((8, 8, 8), np.float32)
OTHER_CUBE = CUBE.copy()
OTHER_CUBE[3, 5, 2] = 1


def as_integer(x):
    return x.astype(jnp.int32)


def multiply_positive_parts(x):
    """Zero for 255 of 256 inputs."""
    return relu(x * SIGNS.astype(x.dtype)).prod()


def read_cube(cube):
    def read(x):
        places = jnp.argmax(x, -1)
        return jnp.asarray(cube)[places[0], places[1], places[2]]

    return read


def shrink_until(most):
    """x times 0.8 until it is at most 1, or at most so many times."""
    return lambda x: lax.while_loop(lambda c: (c[0] > 1) & (c[1] < most), lambda c: (c[0] * 0.8, c[1] + 1), (x, 0))[0]


def count_positive(least):
    return lambda x: jnp.where((x * SIGNS > 0).sum() > least, x, 0)


def pool(x):
    return lax.reduce_window(x + np.array([60, 0], np.float32), -jnp.inf, lax.max, (2,), (1,), "VALID")


def clamp_by_selects(low, x, high):
    return jnp.where(x > high, high, jnp.where(x < low, low, x))


def take_thirds(functions):
    return lambda x: lax.switch(as_integer(x / 30), functions, x)


def mask_by_sign(x):
    return jnp.where(x * SIGNS > 0, 1.0, 0.0).prod()


def compare_squares(bound):
    def compare(x, w):
        return jnp.arange(5.0)[as_integer(w)], jnp.where(x * x - np.array([1, bound], np.float32) > 0, x, 0)

    return compare


def is_root_a_number(x):
    return jnp.where(jnp.isnan(jnp.sqrt(x - 80)), 0, x)


positive = np.abs(SIGNS) * SIGNS * 5
ROWS = np.zeros((3, 8), np.float32)
ROWS[0, 3] = ROWS[1, 5] = ROWS[2, 2] = 1
WRONG = {
    "a scatter that applies a function": (lambda x: x.at[0].apply(jnp.sin), lambda x: x.at[0].set(0), (np.ones(3),)),
    "a clamp with crossing bounds": (lax.clamp, clamp_by_selects, (3.0, 1.0, 2.0)),
    "a cast that saturates": (lambda x: x.astype(jnp.uint8), lambda x: as_integer(x).astype(jnp.uint8), (-3.0,)),
    "an integer over zero": (
        lambda x: lax.rem(jnp.int32(7), as_integer(x)),
        lambda x: jnp.where(as_integer(x) == 0, 0, lax.rem(jnp.int32(7), as_integer(x))),
        (0.5,),
    ),
    "isnan of a root": (is_root_a_number, lambda x: 0 * x, (90.0,)),
    "isfinite of a root": (lambda x: jnp.where(jnp.isfinite(jnp.sqrt(x - 80)), x, 0), lambda x: 0 * x, (90.0,)),
    "nan_to_num of a root": (lambda x: jnp.nan_to_num(jnp.sqrt(x - 80)), lambda x: 0 * x, (90.0,)),
    "a logarithm of what is seldom negative": (
        lambda x: x.sum(),
        lambda x: x.sum() + 0 * jnp.log(x.sum() + 60),
        (np.array([-40.0, -50.0]),),
    ),
    "pooling": (pool, lambda x: x[:1] + 60, (np.array([1, 80]),)),
    "a table": (lambda x: jnp.asarray(TABLE)[as_integer(x)], lambda x: jnp.asarray(EDITED)[as_integer(x)], (90.5,)),
    "an index beyond the end": (
        lambda x: jnp.asarray(TABLE[:80]).at[as_integer(x)].get(mode="clip"),
        lambda x: jnp.asarray(TABLE[:80]).at[as_integer(x)].get(mode="fill", fill_value=0),
        (90.5,),
    ),
    "a switch": (take_thirds([jnp.sin, jnp.cos, jnp.tanh]), take_thirds([jnp.sin, jnp.cos, jnp.sin]), (80.0,)),
    "a histogram": (
        lambda x: jnp.zeros(80).at[as_integer(x)].add(1),
        lambda x: jnp.zeros(80).at[as_integer(x)].add(1, mode="clip"),
        (90.5,),
    ),
    "eight signs": (mask_by_sign, lambda x: 0 * mask_by_sign(x), (positive,)),
    "a count of signs": (count_positive(7), count_positive(8), (positive,)),
    "an entry of a cube": (read_cube(CUBE), read_cube(OTHER_CUBE), (ROWS,)),
    "the most rounds of a loop": (shrink_until(20), shrink_until(99), (95.0,)),
    "a square beside an index": (compare_squares(6400), compare_squares(8100), (np.array([2, 85]), 1.0)),
    "an integer result": (
        lambda x: (multiply_positive_parts(x) > 0).astype(jnp.int32),
        lambda x: as_integer(0 * x[0]),
        (positive,),
    ),
    "an infinite result": (
        lambda x: jnp.where(multiply_positive_parts(x) > 0, jnp.inf, 0),
        lambda x: 0 * x.sum(),
        (positive,),
    ),
    "a small difference": (
        lambda x: jnp.where(multiply_positive_parts(x) > 0, 1.0005, 1),
        lambda x: 1 + 0 * x.sum(),
        (positive,),
    ),
    "largest of eight pairs": (
        lambda x: jnp.stack([x * SIGNS - 3, 0 * x]).max(0).prod(),
        lambda x: 0 * x.sum(),
        (positive,),
    ),
}


def prove(kernel, reference, args, grad=False):
    return sk.testing.assert_equal_for_all_inputs(
        kernel,
        reference,
        mesh=sk.abstract_mesh(d=2),
        in_specs=P(),
        out_specs=P(),
        args=tuple(np.asarray(x, np.float32) for x in args),
        grad=grad,
    )


# proves N49 in part: what differs for one input in three hundred, or at the edges of a primitive, is not certified
@pytest.mark.parametrize("name", WRONG)
def test_what_differs_for_few_inputs_is_not_proved(name):
    kernel, reference, args = WRONG[name]
    inputs = [jnp.asarray(x, jnp.float32) for x in args]
    values = jax.tree.leaves((kernel(*inputs), reference(*inputs)))
    half = len(values) // 2
    assert not all(np.array_equal(x, y) for x, y in zip(values[:half], values[half:], strict=True))
    with pytest.raises((AssertionError, UnprovableError)):
        prove(kernel, reference, args)


def bits(x, dtype):
    return lax.bitcast_convert_type(x, dtype)


def draw_by_key(impl):
    return lambda x: x + jax.random.normal(jax.random.key(0, impl=impl), x.shape)


def draw_one_by_one(x):
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 4)
    return x + jnp.stack([jax.random.uniform(key, ()) for key in keys])


def draw_together(x):
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 4)
    return x + jax.vmap(lambda key: jax.random.uniform(key, ()))(keys)


VALUES = (np.array([1.25, -2.5, 3, 40.3]),)
# Bits have a width and a sign, and keys a kind.
OF_BITS = {
    "cut to 16 bits": (
        lambda x: bits(bits(x, jnp.uint32).astype(jnp.uint16).astype(jnp.uint32), jnp.float32),
        lambda x: x,
    ),
    "of bfloat16 as those of float32": (
        lambda x: bits(bits(x.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32), jnp.float32),
        lambda x: x,
    ),
    "of float16 as those of bfloat16": (
        lambda x: bits(bits(x.astype(jnp.float16), jnp.uint16), jnp.bfloat16).astype(jnp.float32),
        lambda x: x,
    ),
    "with a sign and without": (
        lambda x: bits(x, jnp.uint32).astype(jnp.float32),
        lambda x: bits(x, jnp.int32).astype(jnp.float32),
    ),
    "in order": (
        lambda x: jnp.where(bits(x, jnp.uint32) > bits(x[::-1], jnp.uint32), x, 0),
        lambda x: jnp.where(bits(x, jnp.int32) > bits(x[::-1], jnp.int32), x, 0),
    ),
    "squared": (lambda x: jnp.where(bits(x, jnp.int32) * bits(x, jnp.int32) >= 0, x, 0), lambda x: x),
    "keys of two kinds": (draw_by_key("rbg"), draw_by_key("threefry2x32")),
    "a batch of keys": (draw_together, draw_one_by_one),
}


@pytest.mark.parametrize("name", OF_BITS)
def test_bits_and_keys_are_of_a_kind(name):
    kernel, reference = OF_BITS[name]
    x = jnp.asarray(VALUES[0], jnp.float32)
    assert not np.array_equal(kernel(x), reference(x))
    with pytest.raises((AssertionError, UnprovableError)):
        prove(kernel, reference, VALUES)


def test_bits_that_are_moved_are_proved():
    def kernel(x):
        words = bits(bits(x, jnp.uint32), jnp.int32)
        return bits(jnp.where(np.array([True, False, True, False]), words[::-1], words[::-1]), jnp.float32)

    assert prove(kernel, lambda x: x[::-1], VALUES)


# Stands for a primitive that jax maps neither together nor in turn: the last one known, ragged_dot, is mapped by now.
def test_a_certificate_says_if_rare_inputs_were_not_looked_for(monkeypatch):
    def kernel(x):
        sizes = jnp.array([1, 0], jnp.int32)
        return relu(x), lax.ragged_dot(x.reshape(1, 1), jnp.ones((2, 1, 1)), sizes)

    for program in (kernel, relu):
        assert "rare inputs" not in str(prove(program, program, (1.0,)))
    monkeypatch.setattr(float_inputs, "_run_all", lambda *_: None)
    assert "rare inputs were not looked for" in str(prove(relu, relu, (1.0,)))


def test_a_mesh_of_devices_hides_no_rare_input():
    """The traced program then has its devices, and floats run it without them."""
    mesh = sk.make_mesh(jax.devices()[:2], data=2)
    x = jax.ShapeDtypeStruct((16,), jnp.float32)
    layout = {"mesh": mesh, "in_specs": P("data"), "out_specs": P("data"), "args": (x,), "grad": False}
    assert "rare inputs" not in str(sk.testing.assert_equal_for_all_inputs(relu, relu, **layout))
    with pytest.raises((AssertionError, UnprovableError)):
        sk.testing.assert_equal_for_all_inputs(
            lambda x: multiply_positive_parts(x)[None] * x, lambda x: 0 * x, **layout
        )


def test_bfloat16_hides_no_rare_input():
    def kernel(x):
        return multiply_positive_parts(x.astype(jnp.bfloat16)).astype(jnp.float32)

    assert kernel(jnp.asarray(positive)) > 0
    with pytest.raises(AssertionError):
        prove(kernel, lambda x: 0 * x.sum(), (positive,))


RIGHT = {
    "a clamp": (lax.clamp, lambda low, x, high: jnp.minimum(jnp.maximum(x, low), high), (3.0, 1.0, 2.0)),
    "a cast that saturates": (
        lambda x: x.astype(jnp.uint8),
        lambda x: (x + 0).astype(jnp.uint8),
        (np.ones(6),),
    ),
    "isfinite of a root": (
        lambda x: jnp.where(jnp.isfinite(jnp.sqrt(x)), x, 0),
        lambda x: jnp.where(jnp.isnan(jnp.sqrt(x)), 0, x),
        (np.ones(6),),
    ),
    "isfinite of a sum": (lambda x: jnp.where(jnp.isfinite(x.sum()), x, 0), lambda x: x, (np.ones(6),)),
    "pooling": (pool, lambda x: jnp.maximum(x[:1] + 60, x[1:]), (np.array([1, 80]),)),
    "an integer over zero": (
        lambda x: lax.rem(jnp.int32(7), as_integer(x)),
        lambda x: jnp.where(as_integer(x) == 0, 7, lax.rem(jnp.int32(7), as_integer(x))),
        (0.5,),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_the_right_one_is_proved(name):
    kernel, reference, args = RIGHT[name]
    assert prove(kernel, reference, args)


@jax.custom_vjp
def square(x):
    return x * x


@jax.custom_vjp
def square_with_a_wrong_entry(x):
    return x * x


def keep(x):
    return x * x, x


square.defvjp(keep, lambda x, g: (g * 2 * x * jnp.asarray(TABLE)[as_integer(x)],))
square_with_a_wrong_entry.defvjp(keep, lambda x, g: (g * 2 * x * jnp.asarray(EDITED)[as_integer(x)],))


def test_a_gradient_that_differs_for_few_inputs_is_not_proved():
    x = jnp.float32(90.5)
    assert jax.grad(square)(x) != jax.grad(square_with_a_wrong_entry)(x)
    with pytest.raises((AssertionError, UnprovableError)):
        prove(square, square_with_a_wrong_entry, (90.5,), grad=True)
    assert prove(square, square, (90.5,), grad=True)


def read_small(table):
    return lambda x: jnp.asarray(table)[as_integer(x)] * 1e-12


def round_to_16_bits(x):
    return jnp.where(multiply_positive_parts(x) > 0, 1.2, 1).astype(jnp.bfloat16)


HIDDEN_BY_SIZE = {
    "small numbers": (read_small(TABLE), read_small(EDITED), (90.5,)),
    "16 bits": (round_to_16_bits, lambda x: (1 + 0 * x.sum()).astype(jnp.bfloat16), (positive,)),
    "a cast to 4 bits": (
        lambda x: x + jnp.full(4, 100.0).astype(jnp.int4).astype(jnp.float32),
        lambda x: x + 4,
        (np.ones(4),),
    ),
}


@pytest.mark.parametrize("name", HIDDEN_BY_SIZE)
def test_what_floats_find_hard_to_see_is_not_proved(name):
    kernel, reference, args = HIDDEN_BY_SIZE[name]
    with pytest.raises((AssertionError, UnprovableError)):
        prove(kernel, reference, args)
