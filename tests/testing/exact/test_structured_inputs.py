"""Pairs that differ where rows are zero or equal, as padding and duplicates are, or where computed numbers are equal.

No normal input has any of this, and users' inputs do. Each pair has an input for which floats differ; the last ones are
right, and stay proved.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.testing.exact.equality import UnprovableError

relu = jax.nn.relu
SPLIT_COLUMNS = (P(), P(None, "d"))
SIGNS = np.array([1, -1, 1, -1, -1, 1, 1, -1], np.float32)
RNG = np.random.default_rng(0)
ONES = np.ones((2, 6), np.float32)
PADDED = np.concatenate([ONES, 0 * ONES])
# A token of zeros, whose logits are all equal.
TOKENS = RNG.normal(size=(4, 8)).astype(np.float32)
TOKENS[1] = 0
WEIGHTS = RNG.normal(size=(8, 12)).astype(np.float32)


def add_squares(x):
    return (x * x).sum(-1)


def find_greedily(take_best):
    """The place of the largest of logits that are split over devices; of equal ones that which `take_best` takes."""

    def find(h, w):
        logits = h @ w
        best = lax.pmax(logits.max(-1), "d")
        place = logits.argmax(-1) + lax.axis_index("d") * logits.shape[-1]
        return take_best(logits.max(-1) == best, place)

    return find


def take_last(is_best, place):
    return lax.pmax(jnp.where(is_best, place, -1), "d")


def take_first(is_best, place):
    return lax.pmin(jnp.where(is_best, place, 99), "d")


def weigh_experts(logits):
    values, places = lax.top_k(logits, 2)
    return (jax.nn.one_hot(places, 12) * jax.nn.softmax(values)[..., None]).sum(1)


def weigh_reversed(h, w):
    return weigh_experts((h @ w)[:, ::-1])[:, ::-1]


def is_positive_for_few(x):
    """For one normal input in 256."""
    return relu(x * SIGNS).prod() > 0


def as_zero(x):
    return (0 * x[0, 0]).astype(jnp.int32)


def multiply_one_row(x):
    return lax.ragged_dot(x[:1].reshape(1, 1), jnp.ones((2, 1, 1)), jnp.array([1, 0], jnp.int32))


def normalize(x, total):
    """x over its norm, and 0 where that is 0."""
    safe = jnp.where(total > 0, total, 1)
    return jnp.where(total > 0, x / jnp.sqrt(safe), 0)


# The kernel, the reference, and inputs for which they differ.
WRONG = {
    "a mask of zero rows": (
        lambda x: jnp.where((x == 0).all(-1), 0, x.sum(-1) + 1).mean(),
        lambda x: (x.sum(-1) + 1).mean(),
        (PADDED,),
    ),
    "a count of rows that are not zero": (
        lambda x: x.sum() / jnp.maximum((jnp.abs(x).max(-1) > 0).astype(jnp.float32).sum(), 1),
        lambda x: x.sum() / 4,
        (PADDED,),
    ),
    "a norm that is zero": (
        lambda x: jnp.where(add_squares(x[0]) > 0, 1, 0),
        lambda x: 1 + as_zero(x),
        (0 * ONES,),
    ),
    "a distance that is zero": (
        lambda x: jnp.where(add_squares(x[0] - x[1]) > 0, 1, 0),
        lambda x: jnp.where(add_squares(x[0] - x[1]) >= 0, 1, 0),
        (ONES,),
    ),
    "rows that are equal": (
        lambda x: jnp.where((x[0] == x[1]).all(), 1.0, 0),
        lambda x: 0 * x[0, 0],
        (ONES,),
    ),
    "the sign of a difference of norms": (
        lambda x: jnp.sign(add_squares(x[0]) - add_squares(x[1])),
        lambda x: jnp.where(add_squares(x[0]) > add_squares(x[1]), 1.0, -1),
        (ONES,),
    ),
    "the sign of what is seldom zero": (
        lambda x: jnp.sign(add_squares(x) - 25),
        lambda x: jnp.where(add_squares(x) > 25, 1.0, -1),
        (np.array([[3, 4, 0]]),),
    ),
    "four squares": (
        lambda x: jnp.where((x * x == np.float32([1, 4, 9, 1])).all(), 1.0, 0),
        lambda x: 0 * x[0],
        (np.array([1, -2, 3, -1]),),
    ),
    "squares beside what floats do not run": (
        lambda x: (jnp.where(x * x == jnp.floor(x * x), x, 0), multiply_one_row(x)),
        lambda x: (0 * x, multiply_one_row(x)),
        (np.array([1, 0.5]),),
    ),
    "a float mask as a condition": (
        lambda x: jnp.where(x.any(), 1.0, 0),
        lambda x: 1 + 0 * x[0, 0],
        (0 * ONES,),
    ),
    "the order of equal losses": (
        lambda x: jnp.argsort(-add_squares(x))[::-1],
        lambda x: jnp.argsort(add_squares(x)),
        (ONES,),
    ),
    "the last of equal logits": (find_greedily(take_last), lambda h, w: jnp.argmax(h @ w, -1), (TOKENS, WEIGHTS)),
    "experts of a token of zeros": (weigh_reversed, lambda h, w: weigh_experts(h @ w), (TOKENS, WEIGHTS)),
    "halves rounded to even": (
        lambda x: jnp.round(add_squares(x) / 2),
        lambda x: lax.round(add_squares(x) / 2),
        (np.array([[1, 0, 2]]),),
    ),
    "squares that are whole": (
        lambda x: jnp.where(x * x == jnp.floor(x * x), x, 0),
        lambda x: 0 * x,
        (np.array([1, 0.5]),),
    ),
    "a root of the wrong sign where it matters": (
        lambda x: jnp.where(x > 0, jnp.sqrt(-x), x),
        lambda x: jnp.where(x > 0, jnp.sqrt(x), x),
        (np.array([1.0, 2.0]),),
    ),
    "beside a result that rounds": (
        lambda x: (jnp.where(is_positive_for_few(x), 1.001, 1), (x**3).sum() - x[0] ** 3),
        lambda x: (1 + 0 * x.sum(), (x[1:] ** 3).sum()),
        (5 * SIGNS,),
    ),
    "positions that bfloat16 does not have": (
        lambda x: jnp.where(jnp.arange(258, dtype=jnp.bfloat16)[256:] <= 256, x, 0),
        lambda x: x * np.float32([1, 0]),
        (np.ones(2),),
    ),
}


RIGHT = {
    "the first of equal logits": (find_greedily(take_first), lambda h, w: jnp.argmax(h @ w, -1), (TOKENS, WEIGHTS)),
    "a norm that may be zero": (
        lambda x: normalize(x, lax.psum(add_squares(x)[:, None], "d") / 2),
        lambda x: normalize(x, add_squares(x)[:, None]),
        (ONES,),
    ),
    "bits of a float16": (
        lambda x: x + lax.bitcast_convert_type(jnp.array([1.5, 2.5], jnp.float16), jnp.uint16).astype("f").sum(),
        lambda x: x + 32512.0,
        (np.ones(2),),
    ),
}


def prove(kernel, reference, args):
    mesh = sk.make_mesh(jax.devices()[:2], d=2)
    shapes = tuple(jax.ShapeDtypeStruct(np.shape(x), jnp.float32) for x in args)
    in_specs = SPLIT_COLUMNS if kernel.__name__ == "find" else P()
    return sk.testing.assert_equal_for_all_inputs(
        kernel, reference, mesh=mesh, in_specs=in_specs, out_specs=P(), args=shapes, grad=False
    )


def evaluate(kernel, args):
    mesh = sk.make_mesh(jax.devices()[:2], d=2)
    in_specs = SPLIT_COLUMNS if kernel.__name__ == "find" else P()
    mapped = jax.shard_map(kernel, mesh=mesh, in_specs=in_specs, out_specs=P())
    return jax.tree.leaves(jax.jit(mapped)(*[jnp.asarray(x, jnp.float32) for x in args]))


# proves N49 in part: padding, duplicates and whole numbers are inputs too
@pytest.mark.parametrize("name", WRONG)
def test_what_differs_for_structured_inputs_is_not_proved(name):
    kernel, reference, args = WRONG[name]
    expected = jax.tree.leaves(reference(*[jnp.asarray(x, jnp.float32) for x in args]))
    results = evaluate(kernel, args)
    assert not all(np.array_equal(x, y, equal_nan=True) for x, y in zip(results, expected, strict=True))
    with pytest.raises((AssertionError, UnprovableError)):
        prove(kernel, reference, args)


@pytest.mark.parametrize("name", RIGHT)
def test_what_holds_for_structured_inputs_is_proved(name):
    kernel, reference, args = RIGHT[name]
    prove(kernel, reference, args)


def test_a_certificate_names_the_lines_that_put_numbers_in_order():
    certificate = prove(find_greedily(take_first), lambda h, w: jnp.argmax(h @ w, -1), (TOKENS, WEIGHTS))
    assert "in order: the places of numbers among others" in str(certificate)
    assert "test_structured_inputs.py" in str(certificate)


def test_random_bits_that_depend_on_how_many_are_drawn():
    """Without `jax_threefry_partitionable` the first of eight words is another than the first of three."""

    def draw(count):
        return lambda x: x + jax.random.uniform(jax.random.key(1), (count,))[:3]

    prove(draw(8), draw(3), (np.ones(3),))
    with jax.threefry_partitionable(False), pytest.raises(AssertionError):
        prove(draw(8), draw(3), (np.ones(3),))
