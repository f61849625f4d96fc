"""testing/associative.py: what a prefix scan assumes of a function, proved; numbers that show the difference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardkit as sk

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


def test_a_difference_that_few_numbers_show():
    """Sums that wrap around where both are beyond 1000: no drawn number is."""

    def wrap(a, b):
        return jnp.where((a > 1000) & (b > 1000), a - b, a + b)

    with pytest.raises(AssertionError, match="it is not for all inputs, though it is for 20 drawn ones"):
        sk.testing.assert_associative(wrap, 0.0, ONE)


def test_shapes_alone_are_enough():
    x = jax.ShapeDtypeStruct((2, 2), jnp.float32)
    sk.testing.assert_associative(lambda a, b: b @ a, np.eye(2), x)
