"""Functions without a law, as tanh: what the tables say of one is so of its real values."""

import jax
import numpy as np
import pytest
from jax import lax

from shardkit._jax.primitives import NONLINEAR
from shardkit.testing.exact.interpreter import Interpreter
from shardkit.testing.exact.numbers.field import Field, Settings
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


# Where a gradient is padded, tanh(0) must be zero and not a random number.
@pytest.mark.parametrize("name", sorted(set(NAMES) - OF_TWO))
def test_what_a_function_is_at_zero_is_known(name):
    value = float(call(name, 0.0))
    if value not in (0.0, 1.0):
        return
    field = Field(Settings(2, 3))
    zero = field.lift(np.zeros(1, np.float32))
    result = apply_function(field, name, zero)
    assert find_equal(field, result, field.lift(np.full(1, value, np.float32))).all()
