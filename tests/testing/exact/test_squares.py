"""Squares that one side alone compares with zero: they are zero at a point, and cross it nowhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.testing.exact.evidence import UndecidedError

MASK = np.array([[True, False]])
CENTRES = np.array([[0.5, 0.7]], np.float32)

KEPT = {
    "square": lambda x: jnp.where((x - 0.5) ** 2 > 0, x, 7),
    "product": lambda x: jnp.where((x - 0.5) * (0.5 - x) * -1 > 0, x, 7),
    "of itself": lambda x: jnp.where((x - 0.5) * (x - 0.5) > 0, x, 7),
    "turned": lambda x: jnp.where((x - 0.5) ** 4 <= 0, 7, x),
    "unequal": lambda x: jnp.where((x - 0.5) ** 2 != 0, x, 7),
    "two inputs": lambda x: jnp.where((x - 2 * x[:, ::-1] + 1) ** 2 > 0, x, 7),
    "of a square": lambda x: jnp.where(((x - 0.5) ** 2) ** 2 > 0, x, 7),
    "scaled": lambda x: jnp.where((x - 0.5) ** 2 * jnp.exp(x) > 0, x, 7),
    "by a quotient": lambda x: jnp.where((x - 0.5) ** 2 / jnp.exp(x) > 0, x, 7),
    "of a root": lambda x: jnp.where(jnp.sqrt((x - 0.5) ** 2) > 0, x, 7),
    "of an array": lambda x: jnp.where(jnp.power(x - 0.5, 2.0) > 0, x, 7),
    "cubed": lambda x: jnp.where(((x - 0.5) ** 2) ** 3 > 0, x, 7),
    "of the larger": lambda x: jnp.where(jnp.maximum((x - 0.5) ** 2, -1) > 0, x, 7),
    "of the smaller": lambda x: jnp.where(jnp.minimum(jnp.exp(x), (x - 0.5) ** 2) > 0, x, 7),
    "scattered": lambda x: jnp.where(jnp.zeros((2, 2)).at[:].add((x - 0.5) ** 2) > 0, x, 7),
    "negative": lambda x: jnp.where(-((x - 0.5) ** 2) < 0, x, 7),
    "beside a masked exp": lambda x: jnp.where(jnp.exp(jnp.where(MASK, x, -jnp.inf)) + (x - 0.5) ** 2 > 0, x, 7),
    "of a root alone": lambda x: jnp.where(jnp.sqrt(x) > 0, x, jnp.where(x < 0, x, 7)),
    "of a sum with a constant": lambda x: jnp.where(jnp.stack([x, jnp.full_like(x, 0.3)]).sum(0) ** 2 > 0, x, 7),
    "times zero": lambda x: jnp.where(0 * jnp.exp(x) + (x - 0.5) ** 2 > 0, x, 7),
    "with a sum": lambda x: jnp.where((x - 0.5) ** 2 + abs(x - 0.5) > 0, x, 7),
}


def prove(kernel, reference):
    return sk.testing.assert_equal_for_all_inputs(
        kernel,
        reference,
        mesh=sk.abstract_mesh(data=2),
        in_specs=P("data"),
        out_specs=P("data"),
        args=(np.zeros((4, 2), np.float32),),
        grad=False,
    )


# Catches a comparison that counts as decided because a square is never below zero: the kernels give 7 where it is zero.
@pytest.mark.parametrize("name", KEPT)
def test_the_zero_of_a_square_is_met(name):
    with pytest.raises(AssertionError, match="is not the reference's for all inputs"):
        prove(KEPT[name], lambda x: x)


# Catches a false alarm: the same guard on both sides, one that changes nothing, and a square that is never zero.
@pytest.mark.parametrize(
    ("kernel", "reference"),
    [
        (lambda x: jnp.where((x - 0.5) ** 2 > 0, x, 7), lambda x: jnp.where((x - 0.5) * (x - 0.5) > 0, x, 7)),
        (lambda x: jnp.where((x - 0.5) ** 2 > 0, x - 0.5, 0), lambda x: x - 0.5),
        (lambda x: jnp.where(jnp.exp(x) ** 2 > 0, x, 7), lambda x: x),
        (lambda x: jnp.where(x**2 + 1e-6 > 0, x, 7), lambda x: x),
        (lambda x: jnp.where(jnp.mean(jnp.exp(x) + x**2) > 0, x, 7), lambda x: x),
        (lambda x: jnp.where(1 / jnp.sqrt(x**2 + 1) > 0, x, 7), lambda x: x),
        (lambda x: jnp.where(jnp.maximum(x, 1) > 0, x, 7), lambda x: x),
        (lambda x: jnp.where(jnp.minimum(jnp.exp(x), 1 + x**2) > 0, x, 7), lambda x: x),
        (lambda x: jnp.where(-jnp.exp(x) < 0, x, 7), lambda x: x),
        (lambda x: jnp.where(jnp.exp(x) * (1 + x**2) / jnp.exp(x[::-1]) > 0, x, 7), lambda x: x),
        (lambda x: jnp.where(jnp.exp(x) @ jnp.exp(x.T) @ jnp.exp(x) > 0, x, 7), lambda x: x),
        (lambda x: jnp.where(jnp.sqrt(jnp.exp(x)) ** 3 > 0, x, 7), lambda x: x),
        (lambda x: jnp.where(jax.nn.sigmoid(x) > 0, x, 7), lambda x: x),
        (lambda x: jnp.where(jnp.ones((2, 2)).at[0].add(x[0] ** 2) > 0, x, 7), lambda x: x),
    ],
)
def test_a_guard_that_changes_nothing_is_proved(kernel, reference):
    assert prove(kernel, reference).chance < 1e-15


# Catches a proof where no draw has met the zero: log(2) has no residue.
def test_a_zero_that_no_draw_meets_is_not_decided():
    with pytest.raises(UndecidedError, match="one side alone asks whether a number of one sign is zero"):
        prove(lambda x: jnp.where((jnp.exp(x) - 2) ** 2 > 0, x, 7), lambda x: x)


# Catches the same for numbers that are zero only where several elements meet.
@pytest.mark.parametrize(
    "guard",
    [
        lambda x: jnp.var(x, 1, keepdims=True),
        lambda x: jnp.sum((x - CENTRES) ** 2, 1, keepdims=True),
        lambda x: (x - CENTRES) ** 2 @ np.array([[1.0], [2.0]], np.float32),
    ],
)
def test_a_zero_of_several_elements_is_no_proof(guard):
    with pytest.raises((AssertionError, UndecidedError)):
        prove(lambda x: jnp.where(guard(x) > 0, x, 7), lambda x: x)


def keep_long_rows(is_long):
    return lambda x: jnp.where(is_long(jnp.sum(x * x, 1, keepdims=True)), x, 0)


# Catches a false alarm for a guard that compares a norm with zero on one side, and its square on the other.
def test_a_norm_and_its_square_are_compared_alike():
    proof = prove(keep_long_rows(lambda n: n > 0), keep_long_rows(lambda n: jnp.sqrt(n) > 0))
    assert proof.chance < 1e-15
