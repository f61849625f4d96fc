"""Functions without a law, as tanh: what the tables say of one is so of its real values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit._jax.primitives import NONLINEAR
from shardkit.testing.exact.interpreter import Interpreter
from shardkit.testing.exact.numbers.field import Field, Settings
from shardkit.testing.exact.numbers.function_table import EVERYWHERE, FUNCTIONS
from shardkit.testing.exact.numbers.functions import apply_function
from shardkit.testing.exact.numbers.orders import find_equal
from shardkit.testing.exact.rules import elementwise
from shardkit.testing.exact.rules.primitive_rules import RULES

# Those that jax has as primitives; log2 is one from jax 0.12 on, and of compiled programs before.
NAMES = sorted(name for name in RULES if RULES[name] is elementwise.function_without_law and hasattr(lax, f"{name}_p"))
OF_TWO = {"atan2", "rem", "nextafter"}
# Of two floats they are a float: nothing is rounded.
EXACT = {"rem", "nextafter"}


def call(name, value):
    arguments = [np.float32(value)]
    if name in OF_TWO:
        arguments.append(np.float32(0.7))
    return getattr(lax, name)(*arguments)


# A constant that counts as exact refutes a program which is right but for rounding, instead of leaving it undecided.
@pytest.mark.parametrize("name", sorted(set(NAMES) - EXACT))
def test_a_constant_of_a_function_is_noted_as_rounded(name):
    inside = {"acosh": 1.3}.get(name, 0.3)
    field = Field(Settings(2, 3))
    Interpreter(field).run(jax.make_jaxpr(lambda: call(name, inside))(), [])
    assert field.notes.rounded == {f"{name} of a constant"}


# A function that the readers of a trace do not know stops the advice on a gradient, and the check of a first step.
def test_the_readers_of_a_trace_know_each_function():
    assert set(NAMES) - NONLINEAR == set()


# A pole that the table does not have makes a proof unsound: 0 * erf_inv(x - x + 1) would be 0.
@pytest.mark.parametrize("value", [-2.0, -1.0, 0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("name", sorted(set(NAMES) - OF_TWO))
def test_the_table_says_where_a_function_is_no_finite_number(name, value):
    function = FUNCTIONS[name]
    in_floats = float(call(name, value))
    field = Field(Settings(2, 3))
    with np.errstate(all="ignore"):
        result = apply_function(field, name, field.lift(np.full(1, value, np.float32)))
    if np.isinf(in_floats):
        assert result.is_truly_infinite.all() or (function.is_nan_at_poles and result.poison.all())
    elif np.isnan(in_floats):
        assert result.poison.all() and (function.domain != EVERYWHERE or function.is_nan_at_poles)
    else:
        np.testing.assert_allclose(result.real[0], in_floats, rtol=1e-5, atol=1e-6)
        assert not result.is_truly_infinite.any()


# Where a gradient is padded, tanh(0) must be zero and not a random number; 0 / acos(1) must be NaN.
@pytest.mark.parametrize("argument", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("name", sorted(set(NAMES) - OF_TWO))
def test_where_a_function_is_zero_or_one_is_known(name, argument):
    value = float(call(name, argument))
    if value not in (0.0, 1.0):
        return
    field = Field(Settings(2, 3))
    result = apply_function(field, name, field.lift(np.full(1, argument, np.float32)))
    assert find_equal(field, result, field.lift(np.full(1, value, np.float32))).all()


def both(function):
    """A quotient that is NaN for all inputs, and zero."""
    return lambda x: 0 / function(x), lambda x: 0 * x


# Each was a random number of which nothing was known, so that zero over it was zero.
@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.arccos(x / x),
        lambda x: jnp.arccosh(x / x),
        lambda x: lax.lgamma(x / x + 1),
        lambda x: lax.rem(x, x),
        lambda x: lax.rem(-x, x),
        lambda x: lax.pow(x / x, x) - 1,
        lambda x: lax.pow(jnp.exp(x), x - x) - 1,
        lambda x: jnp.exp2(x / x) - 2,
        lambda x: jnp.cbrt(x / x) - 1,
    ],
)
def test_what_is_divided_by_a_zero_of_a_function_is_no_number(function):
    kernel, reference = both(function)
    x = np.array([0.5, 2.0, 3.0], np.float32)
    assert np.isnan(kernel(x)).all()
    with pytest.raises(AssertionError):
        sk.testing.assert_equal_for_all_inputs(
            kernel, reference, mesh=sk.abstract_mesh(d=1), in_specs=P(), out_specs=P(), args=(x,), grad=False
        )
