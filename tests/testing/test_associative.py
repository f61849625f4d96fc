"""testing/associative.py: what a prefix scan assumes of a function, proved; numbers that show the difference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardkit as sk
from support.refusals import type_error, value_error

ONE = jnp.ones(1)
MATRICES = {"keep": jnp.ones((2, 2)), "add": jnp.ones((2, 3))}
EYE = {"keep": np.eye(2), "add": 0.0}


def follow(earlier, later):
    return {"keep": later["keep"] @ earlier["keep"], "add": later["keep"] @ earlier["add"] + later["add"]}


def merge(earlier, later):
    """Two softmax sums with their maxima, as ring attention adds them."""
    top = jnp.maximum(earlier[0], later[0])
    return top, earlier[1] * jnp.exp(earlier[0] - top) + later[1] * jnp.exp(later[0] - top)


def follow_from_right(a, b):
    return {"keep": a["keep"] @ b["keep"], "add": a["keep"] @ b["add"] + a["add"]}


ASSOCIATIVE = {
    "a sum": (lambda a, b: a + b, 0.0, ONE),
    "a maximum": (jnp.maximum, -jnp.inf, ONE),
    "the left one": (
        lambda a, b: {"keep": a["keep"] @ b["keep"], "add": a["keep"] @ b["add"] + a["add"]},
        EYE,
        MATRICES,
    ),
    "a recurrence": (follow, EYE, MATRICES),
    "sums of a softmax": (merge, (-jnp.inf, 0.0), (ONE, ONE)),
}


@pytest.mark.parametrize("name", ASSOCIATIVE)
def test_proved(name):
    proof = sk.testing.assert_associative(*ASSOCIATIVE[name])
    assert proof.chance < 1e-15


def mixed(earlier, later):
    """The recurrence with its matrices in the wrong order, which numbers in place of matrices would not show."""
    return {"keep": earlier["keep"] @ later["keep"], "add": later["keep"] @ earlier["add"] + later["add"]}


REFUTED = {
    "a difference": (
        (lambda a, b: a - b, 0.0, ONE),
        "combine must be associative: of a=[3.], b=[1.], c=[1.] combine(combine(a, b), c) is [1.] and combine(a, "
        "combine(b, c)) is [3.]. ",
    ),
    "a mean": ((lambda a, b: (a + b) / 2, 0.0, ONE), "combine must be associative: of a="),
    "matrices in the wrong order": ((mixed, EYE, MATRICES), "combine must be associative: of a="),
    "a left identity that is none": (
        (lambda a, b: a + b, 1.0, ONE),
        "identity, combined with a value that follows, must leave it as it is: of a=[3.] combine(identity, a) is [4.] "
        "and a is [3.]. ",
    ),
    "a right identity that is none": (
        (lambda a, b: b, 0.0, ONE),
        "identity, combined with a value before it, must leave it as it is: of a=[3.] combine(a, identity) is [0.] and "
        "a is [3.]. ",
    ),
}


@pytest.mark.parametrize("name", REFUTED)
def test_refuted_with_numbers(name):
    arguments, message = REFUTED[name]
    with pytest.raises(AssertionError) as error:
        sk.testing.assert_associative(*arguments)
    assert str(error.value).startswith(f"assert_associative: {message}")


FLAG = (ONE, jnp.zeros(1, bool))
NUMBER = (ONE, jnp.zeros(1, int))


def add_segments(a, b):
    """Sums that begin anew where a flag is set."""
    return jnp.where(b[1], b[0], a[0] + b[0]), a[1] | b[1]


def test_integers_beside_floats():
    """One value for all three would hide each of these; of flags, a set one after one that is not shows the mistake."""
    sk.testing.assert_associative(add_segments, (0.0, False), FLAG)
    sk.testing.assert_associative(lambda a, b: (a[0] + b[0], a[1] + b[1]), (0.0, 0), NUMBER)
    for combine, identity, x in (
        (lambda a, b: (a[0] + b[0], a[1] - b[1]), (0.0, 0), NUMBER),
        (lambda a, b: (a[0] + b[0], jnp.minimum(a[1], b[1])), (0.0, 2), NUMBER),
        (lambda a, b: (jnp.where(b[1], 2 * b[0] - a[0], a[0] + b[0]), a[1] | b[1]), (0.0, False), FLAG),
    ):
        with pytest.raises(AssertionError, match="assert_associative: "):
            sk.testing.assert_associative(combine, identity, x)


def test_refusals():
    with value_error(
        "assert_associative: x must have an array of floats, for all of which a proof holds; got 'int32'. Compare "
        "integers that you draw."
    ):
        sk.testing.assert_associative(lambda a, b: a + b, 0, jnp.zeros(1, jnp.int32))
    with type_error(
        "assert_associative: combine must return a pytree like its arguments, float32[3]; got float32[]. Return the "
        "same shapes and dtypes."
    ):
        sk.testing.assert_associative(lambda a, b: jnp.sum(a + b), 0.0, jnp.ones(3))
    with value_error(
        "assert_associative: a leaf of the identity must be a value of int32[1]; got 0.5. Pass one that this dtype "
        "has, as a number or in a shape that broadcasts."
    ):
        sk.testing.assert_associative(lambda a, b: (a[0], a[1]), (0.0, 0.5), NUMBER)


def test_a_difference_that_few_numbers_show():
    """Sums that wrap around where both are beyond 1000: no drawn number is."""

    def wrap(a, b):
        return jnp.where((a > 1000) & (b > 1000), a - b, a + b)

    with pytest.raises(AssertionError, match="it is not for all inputs, though it is for 20 drawn ones"):
        sk.testing.assert_associative(wrap, 0.0, ONE)


def test_shapes_alone_are_enough():
    x = jax.ShapeDtypeStruct((2, 2), jnp.float32)
    sk.testing.assert_associative(lambda a, b: b @ a, np.eye(2), x)
