"""Integers that follow from floats: what they decide is noted wherever they go, or a draw shows it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.testing.exact.coverage import Coverage
from shardkit.testing.exact.interpreter import Interpreter
from shardkit.testing.exact.naturals import NaturalFacts
from shardkit.testing.exact.numbers.field import Field, Settings
from shardkit.testing.exact.numbers.inputs import draw_input


def prove(kernel, reference, shape=(24,)):
    args = (jax.ShapeDtypeStruct(shape, jnp.float32),)
    mesh = sk.abstract_mesh(d=2)
    return sk.testing.assert_equal_for_all_inputs(
        kernel, reference, mesh=mesh, in_specs=P(), out_specs=P(), args=args, grad=False
    )


def halve(x):
    """How often x is halved until it is small: about four times in a draw, and as often as one likes for others."""
    return lax.while_loop(lambda c: jnp.abs(c[0]).sum() > 0.1, lambda c: (c[0] / 2, c[1] + 1), (x, 0))[1]


# The rounds of a loop that a float ends were an integer like any other: 60 and 70 were proved alike, without a word.
def test_the_rounds_of_a_loop_that_a_float_ends():
    def double(most):
        return lambda x: jnp.where(halve(x) > most, 2 * x, x)

    proof = prove(double(60), double(70))
    assert any(sentence.startswith("never else than false: gt at test_following.py") for sentence in proof.compared)
    # Negative it is for no input, so that jax's question whether it counts from the end is none.
    table = jnp.arange(40.0)
    proof = prove(lambda x: table[halve(x)] * x, lambda x: x * table[halve(x)])
    assert not any(sentence.startswith("never else") for sentence in proof.compared)


# As the integer that a branch returns which a float chose.
def test_the_integer_of_a_branch_that_a_float_chooses():
    def count(x):
        return lax.cond(x.sum() > 0, lambda: 3, lambda: (x > 0).sum())

    proof = prove(lambda x: jnp.where(count(x) > 30, 2 * x, x), lambda x: x)
    assert any(sentence.startswith("never else than false: gt at test_following.py") for sentence in proof.compared)


WRONG = {
    # `all` of 24 elements and of 23 differ where the last one alone is negative.
    "all": lambda n: lambda x: jnp.where(jnp.all((x > 0)[: n + 1]), x, 2 * x),
    "any": lambda n: lambda x: jnp.where(jnp.any((x > 0)[: n + 1]), x, 2 * x),
    "cast": lambda n: lambda x: jnp.where(((x > 0).sum() // n).astype(bool), x, 2 * x),
    "max": lambda n: lambda x: x * jnp.maximum((x > 0).sum(), 24 - n).astype("f"),
    "min": lambda n: lambda x: x * jnp.minimum((x > 0).sum(), n).astype("f"),
    "clip": lambda n: lambda x: x * jnp.clip((x > 0).sum(), 24 - n, 24).astype("f"),
    "quotient": lambda n: lambda x: x * lax.div((x > 0).sum(), n).astype("f"),
    "remainder": lambda n: lambda x: x * lax.rem((x > 0).sum(), n).astype("f"),
    "sign": lambda n: lambda x: x * jnp.sign((x > 0).sum() - n).astype("f"),
    "sorted mask": lambda n: lambda x: jnp.where(jnp.sort(x > 0)[24 - n], x, 2 * x),
}


# They differ for few inputs alone: 22 or 23 of 24 elements above zero.
@pytest.mark.parametrize("name", WRONG)
def test_a_count_that_is_off_by_one_is_refuted(name):
    with pytest.raises(AssertionError, match="is not the reference's for all inputs"):
        prove(WRONG[name](22), WRONG[name](23))


NOTED = {
    "reduce_or": lambda x: jnp.any(jnp.arange(4) < (x > 0).sum() - 30),
    "convert_element_type": lambda x: ((x > 0).sum() // 30).astype(bool),
    "max": lambda x: jnp.maximum((x > 0).sum(), 30),
    "min": lambda x: jnp.minimum((x > 0).sum(), 30),
    "clamp": lambda x: lax.clamp(0, (x > 0).sum(), 30),
    "div": lambda x: lax.div((x > 0).sum(), 30),
    "rem": lambda x: lax.rem((x > 0).sum(), 30),
    "shift_right_logical": lambda x: lax.shift_right_logical((x > 0).sum(), 7),
    "sign": lambda x: jnp.sign((x > 0).sum() - 30),
    "abs": lambda x: jnp.abs((x > 0).sum() - 30),
    "sort": lambda x: jnp.sort(jnp.arange(4) < (x > 0).sum() - 30),
    # Of counts that go into a shard_map, come out of one, or are stacked by a scan.
    "gt": lambda x: jax.shard_map(lambda count: count > 30, mesh=sk.abstract_mesh(d=2), in_specs=P(), out_specs=P())(
        (x > 0).sum()
    ),
    "ge": lambda x: (
        jax.shard_map(lambda x: (x > 0).sum(), mesh=sk.abstract_mesh(d=2), in_specs=P(), out_specs=P())(x) >= 30
    ),
    "eq": lambda x: lax.scan(lambda c, row: (c, (row > 0).sum()), 0, x[:, None])[1].sum() == 30,
}


def list_open(function):
    """The comparisons of integers that went one way in one draw."""
    field = Field(Settings(2, 3))
    field.coverage = Coverage(identifies=False)
    Interpreter(field).run(jax.make_jaxpr(function)(np.ones(24, "f")), [draw_input(field, "x", (24,))])
    return [decision.what for decision in field.coverage.list_open("integers")]


# What no draw decides otherwise is listed in the certificate: only if it is noted.
@pytest.mark.parametrize("name", NOTED)
def test_what_a_count_decides_is_noted(name):
    assert any(what.startswith(name) for what in list_open(NOTED[name]))


# No input makes a count negative, and the certificate has no line on it.
@pytest.mark.parametrize(
    "function", [lambda n: jnp.maximum(n, 0), lambda n: jnp.minimum(0, n), jnp.abs, lambda n: n < 0]
)
def test_what_no_count_decides_is_not_noted(function):
    assert not list_open(lambda x: function((x > 0).sum()))


# A guard against NaN of finite numbers decides nothing.
def test_a_guard_against_nan_is_not_noted():
    assert not list_open(lambda x: jnp.where(jnp.any(jnp.isnan(x)), 0, x))


# Read from the program, not from the draw: `left` is 5 after four rounds, and -1 after ten.
@pytest.mark.parametrize(
    "function, expected",
    [
        (lambda n: lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 1, c[1] - 1), (n, 9)), [True, False]),
        (lambda n: lax.while_loop(lambda c: c[0] < 9, lambda c: (c[1], c[0] - 1), (n, n)), [False, False]),
        (lambda n: lax.cond(n > 3, lambda: (n + 1, n), lambda: (n * n, -n)), [True, False]),
        (lambda n: lax.scan(lambda c, _: (c + 1, jnp.where(c > 3, c, 0)), n, None, 3), [True, True]),
        (lambda n: [n.astype(jnp.int8), n > 3], [False, True]),
    ],
)
def test_which_integers_are_natural_is_read_from_the_program(function, expected):
    jaxpr = jax.make_jaxpr(function)(1)
    assert NaturalFacts().run(jaxpr, [True]) == expected
