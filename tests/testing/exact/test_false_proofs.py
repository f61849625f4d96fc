"""Pairs that were proved once, and differ: what the drawn pairs of test_generated.py found, in the smallest form."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.testing.exact.equality import UnprovableError

relu = jax.nn.relu
zeros = jnp.zeros_like
MASK = np.array([[1, 0, 1]], np.float32)


def received(x):
    """The last row of the device before; zeros on the first."""
    return lax.ppermute(x[-1:], "d", [(0, 1)])


def shifted(x):
    return jnp.concatenate([received(x), x[:-1]])


def fill(x, at):
    return jnp.take(x, np.array(at), axis=0, mode="fill")


def next_to(x):
    return jnp.roll(x, 1, 1)


def whole(x):
    return x.astype(jnp.int32)


def share_of_window(x, divide):
    """Of rows of which every element is between two thresholds: NaN for all others."""
    masked = jnp.where((x > 1) & (x < 1.25), jnp.exp(x), 0)
    return divide(masked, masked.sum(1, keepdims=True)).sum(1, keepdims=True) + 0 * x


def share(x):
    return (x * x + 2) / (x * x + 2).sum(1, keepdims=True)


def tower(x):
    for _ in range(7):
        x = jnp.exp(x)
    return x


def lowest(x):
    return jnp.where(MASK > 0, -jnp.inf, x)


def to_bits(x):
    return lax.bitcast_convert_type(x, jnp.int32)


def to_floats(bits):
    return lax.bitcast_convert_type(bits, jnp.float32)


def equal_bits(x):
    return to_bits(x) == to_bits(x)


BELOW = np.tril(np.ones((3, 3), bool), -1)


def factor_rows(x):
    """R of a matrix [3, 3] of three elements."""
    return jnp.linalg.qr(x[:1].T * x[:1] + np.eye(3, dtype="f"), mode="r")


# Of a kernel on two devices, whose rows are split, and a reference that has all of them.
NOWHERE = np.zeros((1, 3), bool)


def exps(x, depth):
    """exp of exp of ..., so many times."""
    for _ in range(depth):
        x = jnp.exp(x)
    return x


def behind_exps(f):
    """`f` beside a branch that is never taken, with four exps inside of a logarithm."""
    return lambda x: jnp.where(NOWHERE, jnp.log(exps(x, 4) + 1), f(x))


def at_a_tie(factor):
    def f(x):
        difference = 3 * x - next_to(x) - 7
        return x + jnp.float32(difference >= 0) * jnp.float32(difference <= 0) * next_to(x) * factor

    return f


def in_a_window(factor):
    return lambda x: x + jnp.float32(x > 1) * jnp.float32(x < 1.03) * next_to(x) * factor


def in_a_narrow_window(factor):
    def f(x):
        difference = 3 * x - next_to(x)
        return x + jnp.float32(difference > 7) * jnp.float32(difference < 7.001) * next_to(x) * factor

    return f


def beyond_floats(x):
    """x, by a comparison of what overflows in every draw."""
    return jnp.where(exps(x * x + 2, 3) > 2, x, x)


def concat(*parts):
    return jnp.concatenate(parts, 1)


def roots_inside(x):
    """A sum of squares of tanh: no input of which few elements are chosen gives it a value that is given."""
    return (jnp.tanh(x) ** 2).sum(1, keepdims=True)


def exps_inside(x):
    return jnp.exp(x).sum(1, keepdims=True)


def at_ties(compare, left, right, factor=1):
    """Which of equal numbers is the larger one tells x from zero, or from another number."""
    return lambda x: jnp.where(compare(left(x), right(x)), factor * x, next_to(x))


def both_ways(far, factor):
    """x in both halves; of those in which `far` is above 1 a multiple."""
    return lambda x: jnp.where(concat(x, far(x)) > 1, concat(x, factor * x), 0)


def beside(x):
    """A large number, and two that are smaller in all draws."""
    return concat(x[:, :1] + 1e4, x[:, 1:])


def first(x):
    return x[:, :1] + 1e4


def bent(x):
    return 5 * jnp.tanh(x) + x * x


greater, at_least = jnp.greater, jnp.greater_equal
SPLIT = {
    # By a law of roots both sides compare the same; where it is of equal numbers no draw has been.
    "a tie by rsqrt": (
        at_ties(greater, lambda x: roots_inside(x) * lax.rsqrt(roots_inside(x)), lambda x: 0.9),
        at_ties(at_least, lambda x: jnp.sqrt(roots_inside(x)), lambda x: 0.9),
    ),
    "a tie by a product of roots": (
        at_ties(greater, lambda x: jnp.sqrt(exps_inside(x) * exps_inside(2 * x)), lambda x: 3),
        at_ties(at_least, lambda x: jnp.sqrt(exps_inside(x)) * jnp.sqrt(exps_inside(2 * x)), lambda x: 3),
    ),
    "a tie by the root of an exp": (
        at_ties(greater, lambda x: jnp.sqrt(jnp.exp(x * next_to(x))), exps_inside),
        at_ties(at_least, lambda x: jnp.exp(x * next_to(x) / 2), exps_inside),
    ),
    "a tie by the root of one of two exps": (
        at_ties(greater, lambda x: jnp.sqrt(jnp.where(MASK > 0, jnp.exp(x * x), jnp.exp(x))), exps_inside),
        at_ties(at_least, lambda x: jnp.where(MASK > 0, jnp.exp(x * x / 2), jnp.exp(x / 2)), exps_inside),
    ),
    "a tie by a power of an exp": (
        at_ties(greater, lambda x: jnp.exp(x * next_to(x)) ** 0.3, exps_inside),
        at_ties(at_least, lambda x: jnp.exp(0.3 * x * next_to(x)), exps_inside),
    ),
    # No number was seen to be equal, beside one that is.
    "equal by a law of roots": (
        lambda x: jnp.where(concat(x / jnp.sqrt(x), 0 * x) == concat(jnp.sqrt(x), 0 * x), 1, 0) + 0 * concat(x, x),
        lambda x: concat(zeros(x), zeros(x) + 1) + 0 * concat(x, x),
    ),
    "equal by a law that is missing": (
        lambda x: jnp.where(concat(jnp.exp2(-x), x) == concat(1 / jnp.exp2(x), x), 1, 0) + 0 * concat(x, x),
        lambda x: concat(zeros(x), zeros(x) + 1) + 0 * concat(x, x),
    ),
    # Ties were met of other elements of the same line, or where nothing was compared.
    "ties of linear elements alone": (
        lambda x: jnp.where(concat(x, jnp.tanh(x) + x * x) > 1, concat(x, x), concat(zeros(x) + 1, zeros(x))),
        lambda x: jnp.where(concat(x, jnp.tanh(x) + x * x) >= 1, concat(x, x), concat(zeros(x) + 1, zeros(x))),
    ),
    "ties of a search": (
        lambda x: jnp.searchsorted(jnp.array([-1.0, 0.7]), jnp.tanh(x) + x * x, side="left").astype(x.dtype) + 0 * x,
        lambda x: jnp.searchsorted(jnp.array([-1.0, 0.7]), jnp.tanh(x) + x * x, side="right").astype(x.dtype) + 0 * x,
    ),
    # Other elements of the same line went both ways.
    "elements that went one way": (both_ways(lambda x: (x / 1e3) ** 4, 1), both_ways(lambda x: (x / 1e3) ** 4, 2)),
    # Which element is the largest, of which another one was in every draw.
    "a maximum": (lambda x: beside(x).max(1, keepdims=True) + 0 * x, lambda x: first(x) + 0 * x),
    "a running maximum": (lambda x: lax.cummax(beside(x), axis=1), lambda x: first(x) + 0 * x),
    "a place": (lambda x: jnp.argmax(beside(x), 1, keepdims=True).astype(x.dtype) + 0 * x, lambda x: 0 * x),
    "a sort": (lambda x: jnp.sort(beside(x), 1), lambda x: concat(jnp.sort(x[:, 1:], 1), first(x))),
    "a long sort": (
        lambda x: jnp.sort(concat(*[beside(x)] * 3), 1)[:, -1:] + 0 * x,
        lambda x: first(x) + 0 * x,
    ),
    "places of a sort": (lambda x: jnp.argsort(beside(x), 1)[:, 2:].astype(x.dtype) + 0 * x, lambda x: 0 * x),
    "the largest two": (
        lambda x: lax.top_k(beside(x), 2)[0],
        lambda x: concat(first(x), x[:, 1:].max(1, keepdims=True)),
    ),
    "a maximum of devices": (
        lambda x: lax.pmax(x + 1e4 * (1 - lax.axis_index("d").astype(x.dtype)), "d") + 0 * x,
        lambda x: jnp.tile(x[:2] + 1e4, (2, 1)) + 0 * x,
    ),
    # Where numbers are rounded to the next integer no draw had been.
    "round half to even": (jnp.round, lambda x: jnp.floor(x + 0.5)),
    "round half away from zero": (lax.round, jnp.round),
    "floor of a sum": (lambda x: jnp.floor(3 * x - next_to(x)), lambda x: jnp.floor(3 * x - next_to(x) + 1e-7)),
    "floor of what is bent": (lambda x: jnp.floor(bent(x)), lambda x: jnp.floor(bent(x) + 1e-7)),
    "ceil of what is bent": (lambda x: jnp.ceil(bent(x)), lambda x: jnp.ceil(bent(x) + 1e-7)),
    "integers of what is bent": (
        lambda x: bent(x).astype(jnp.int32).astype(x.dtype),
        lambda x: (bent(x) + 1e-7).astype(jnp.int32).astype(x.dtype),
    ),
    # Which element, or which branch, follows from an integer that is zero in all draws.
    "a branch by an integer": (
        lambda x: lax.switch((x[0, 0] * 1e-3).astype(jnp.int32), [lambda x: x, lambda x: 2 * x], x),
        lambda x: x,
    ),
    "other branches by an integer": (
        lambda x: lax.switch((x[0, 0] * 1e-3).astype(jnp.int32), [lambda x: x, lambda x: 2 * x], x),
        lambda x: jnp.concatenate(
            [
                lax.switch((x[0, 0] * 1e-3).astype(jnp.int32), [lambda x: x, lambda x: 3 * x], x[:2]),
                lax.switch((x[2, 0] * 1e-3).astype(jnp.int32), [lambda x: x, lambda x: 3 * x], x[2:]),
            ]
        ),
    ),
    "a column by an integer": (
        lambda x: jnp.take(x, (x[0, 0] * 1e-3).astype(jnp.int32), axis=1, mode="clip")[:, None] + 0 * x,
        lambda x: x[:, :1] + 0 * x,
    ),
    # What stands for infinity.
    "exps of huge numbers": (lambda x: jnp.exp(x - 1e10) * jnp.exp(x + 1e10), zeros),
    "logarithms less huge numbers": (lambda x: jnp.log(x) - 1e10, lambda x: jnp.log(2 * x) - 1e11),
    # Nothing was between two constants.
    "another threshold": (lambda x: jnp.where(x > 1, x, 0), lambda x: jnp.where(x > 0.5, x, 0)),
    "between thresholds": (lambda x: jnp.where((x > 1) & (x < 2), x, 0), zeros),
    "a sum of squares": (lambda x: jnp.where(lax.psum((x * x).sum(), "d") > 1, x, 2), lambda x: x),
    "abs": (lambda x: jnp.where(lax.psum(jnp.abs(x).sum(), "d") > 0.25, x, 2), lambda x: x),
    "exp": (lambda x: jnp.where(jnp.exp(x) > 1, x, 2), lambda x: jnp.where(jnp.exp(x) > 2, x, 2)),
    # Decisions were the same by chance.
    "twice as large": (
        lambda x: jnp.where(lax.psum(x.sum(), "d") / 2 <= 0.5, x, 0),
        lambda x: jnp.where(x.sum() <= 0.5, x, 0),
    ),
    "all negative": (lambda x: (x / jnp.where(x > 0, x, 1)).max(1), lambda x: jnp.ones_like(x[:, 0])),
    # No random number was what a rounded one was compared with.
    "floor": (lambda x: jnp.where(jnp.floor(x) == 2, x, 0), zeros),
    "not floor": (lambda x: jnp.where(jnp.floor(x) != 3, x, 0), lambda x: x),
    "int": (lambda x: jnp.where(whole(x) == 0, x, 0), zeros),
    "int, ties": (
        lambda x: jnp.where(x.astype(jnp.int32) > 2, x, 0),
        lambda x: jnp.where(x.astype(jnp.int32) >= 2, x, 0),
    ),
    "equal": (lambda x: jnp.where(x == 2, x, 0), lambda x: jnp.where(x == 3, x, 0)),
    # Ties.
    "> for >=": (lambda x: jnp.where(x > 1.5, x, 0), lambda x: jnp.where(x >= 1.5, x, 0)),
    "> for >= of two": (
        lambda x: jnp.where(x > jnp.roll(x, 1, 1), x, 0),
        lambda x: jnp.where(x >= jnp.roll(x, 1, 1), x, 0),
    ),
    # Few inputs have both: a large element, and a small one beside it.
    "a count times a number": (
        lambda x: (jnp.cumsum(jnp.float32(x > 3), 1) * x)[:, 1:2].sum(1, keepdims=True) + 0 * x,
        lambda x: jnp.maximum((jnp.cumsum(jnp.float32(x > 3), 1) * x)[:, 1:2], 0) + 0 * x,
    ),
    "ties of a product": (
        lambda x: jnp.where(3 * x < 2 * next_to(x) + 1, x, 0),
        lambda x: jnp.where(3 * x <= 2 * next_to(x) + 1, x, 0),
    ),
    "ties of a share": (lambda x: jnp.where(share(x) > 0.25, x, 0), lambda x: jnp.where(share(x) >= 0.25, x, 0)),
    # Behind deep exps the draws in which an element is placed where comparisons change were left out.
    "a tie behind deep exps": (behind_exps(at_a_tie(1)), behind_exps(at_a_tie(2))),
    "a window behind deep exps": (behind_exps(in_a_window(1)), behind_exps(in_a_window(2))),
    # Constants that differ by little: in no draw, and in no order, something was between them.
    "a comparison that always holds": (
        lambda x: jnp.where(x * x + 1 >= 1.000001, x, 0),
        lambda x: jnp.where(x * x + 1 >= 1, x, 0),
    ),
    "a narrow window": (in_a_narrow_window(1), in_a_narrow_window(2)),
    # A root of what is seldom negative, real values beyond floats, and zero weights of a product of matrices.
    "zero times a root": (lambda x: x + 0 * jnp.sqrt(next_to(x) + 4), lambda x: x),
    "zero times a power": (lambda x: x + 0 * (next_to(x) + 6) ** 0.3, lambda x: x),
    "zero times arccos": (lambda x: x + 0 * jnp.arccos(next_to(x) / 6), lambda x: x),
    "zero times log, in orders alone": (lambda x: beyond_floats(x) + 0 * jnp.log(x), beyond_floats),
    "zero weights of log": (lambda x: x + jnp.log(next_to(x)) @ np.zeros((3, 3), "f"), lambda x: x),
    # Some element is outside of a domain for every input.
    "log of deviations": (
        lambda x: x + 0 * jnp.log(x - x.mean(1, keepdims=True)),
        lambda x: x,
    ),
    # What is no number was one.
    "0 log 0": (lambda x: x + MASK * jnp.log(MASK), lambda x: x),
    "0 log of a mask": (lambda x: MASK * jnp.log(MASK * x), lambda x: jnp.where(MASK > 0, jnp.log(x), 0)),
    "relu(x) log relu(x)": (
        lambda x: relu(x) * jnp.log(relu(x)),
        lambda x: jnp.where(x > 0, x * jnp.log(jnp.where(x > 0, x, 1)), 0),
    ),
    "0 rows out of bounds": (lambda x: x + 0 * fill(x, [0, 5]), lambda x: x),
    "rows out of bounds, sent as bits": (lambda x: sk.broadcast(fill(x, [5, 5]), "d", source=0), zeros),
    # NaN has the residues of zero.
    "bits of zero beside those of NaN": (
        lambda x: to_floats(jnp.concatenate([to_bits(0 * x), to_bits(0 * x / (0 * x))]))[:2],
        lambda x: 0 * x / (0 * x),
    ),
    "equal bits of NaN": (lambda x: jnp.where(equal_bits(0 * x / (0 * x)), x, 2 * x), lambda x: 2 * x),
    "bits of NaN less the same": (
        lambda x: to_floats(to_bits(0 * x / (0 * x)) - to_bits(0 * x / (0 * x))),
        lambda x: 0 * x / (0 * x),
    ),
    "NaN for the zeros of a factor": (
        lambda x: jnp.where(BELOW, jnp.nan, factor_rows(x)).T @ factor_rows(x),
        lambda x: jnp.concatenate([factor_rows(rows).T @ factor_rows(rows) for rows in (x[:2], x[2:])]),
    ),
    "a share of rows out of bounds": (lambda x: fill(x, [5, 5]) / fill(x, [5, 5]), jnp.ones_like),
    "0 / 0": (lambda x: x + 0 * x / (0 * x), lambda x: x),
    "inf - inf": (lambda x: jnp.exp(lowest(x) - lowest(x)), jnp.ones_like),
    "0 * inf": (lambda x: x + 0 * jnp.where(MASK > 0, jnp.inf, x), lambda x: x),
    # What is outside of the domain of a function was compared with nothing, and so equal.
    "0 log of a negative number": (lambda x: x + 0 * jnp.log(x), lambda x: x),
    "0 log of what is seldom negative": (lambda x: x + 0 * jnp.log(next_to(x) + 4), lambda x: x),
    "a mask of a logarithm": (
        lambda x: jnp.float32(x > 0) * jnp.log(x),
        lambda x: jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, 1)), 0),
    ),
    # NaN on both sides for almost all inputs, and different numbers for others.
    "NaN outside of a window": (
        lambda x: share_of_window(x, lambda a, b: a / b),
        lambda x: share_of_window(x, lambda a, b: b / a),
    ),
    # Behind more exps than there are primes everything was zero.
    "a logarithm of too many exps": (lambda x: jnp.log(tower(x) + 1), lambda x: jnp.log(tower(x) + 2)),
    # Zeros that a device receives from none.
    "log of what none sent": (lambda x: x + 0 * jnp.log(shifted(x)), lambda x: x),
    "over what none sent": (lambda x: x + 0 / shifted(x), lambda x: x),
}


# Equal numbers that are met where a logarithm has no value show nothing.
def test_ties_outside_of_a_domain_are_not_met():
    def make(compare):
        return lambda x: jnp.where(compare(-x * next_to(x), 1), 1, 2) * jnp.log(x) * jnp.log(next_to(x))

    mesh, args = sk.abstract_mesh(d=2), (jax.ShapeDtypeStruct((4, 3), jnp.float32),)
    with jax.numpy_rank_promotion("allow"), pytest.raises(UnprovableError, match="one side takes equal numbers"):
        sk.testing.assert_equal_for_all_inputs(
            make(greater), make(at_least), mesh=mesh, in_specs=P("d"), out_specs=P("d"), args=args, grad=False
        )


@pytest.mark.parametrize("name", SPLIT)
def test_what_differs_is_not_proved(name):
    kernel, reference = SPLIT[name]
    mesh = sk.abstract_mesh(d=2)
    args = (jax.ShapeDtypeStruct((4, 3), jnp.float32),)
    with jax.numpy_rank_promotion("allow"), pytest.raises((AssertionError, UnprovableError)):
        sk.testing.assert_equal_for_all_inputs(
            kernel, reference, mesh=mesh, in_specs=P("d"), out_specs=P("d"), args=args, grad=False
        )


# NaN is unequal to NaN, and the sides seemed to have rounded other constants: an error of 2e-7 was not decided.
def test_a_constant_that_is_nan_excuses_no_difference():
    def beside_nan(factor):
        return lambda x: jnp.where(NOWHERE, jnp.log(-1 - jnp.arange(3.0)), factor * x)

    mesh, args = sk.abstract_mesh(d=2), (jax.ShapeDtypeStruct((4, 3), jnp.float32),)
    with (
        jax.numpy_rank_promotion("allow"),
        pytest.raises(AssertionError, match="is not the reference's for all inputs"),
    ):
        sk.testing.assert_equal_for_all_inputs(
            beside_nan(3.0000007), beside_nan(3.0), mesh=mesh, in_specs=P("d"), out_specs=P("d"), args=args, grad=False
        )


# What numpy computes of known integers in another way than jax: a bitwise or, a logical shift, a float that is too
# large.
@pytest.mark.parametrize(
    ("known", "mistaken"),
    [
        (lambda: lax.reduce_or(jnp.array([4, 2]), (0,)), 1),
        (lambda: lax.reduce_and(jnp.array([6, 3]), (0,)), 1),
        (lambda: lax.shift_right_logical(jnp.array(-2), jnp.array(1)) // 2**20, -1),
        (lambda: lax.convert_element_type(jnp.full((), 1.5e9) * 2, jnp.int32) // 2**20, -(2**11)),
    ],
)
def test_known_integers_are_those_of_jax(known, mistaken):
    mesh = sk.abstract_mesh(d=2)
    settings = {"mesh": mesh, "in_specs": P("d"), "out_specs": P("d"), "args": (np.ones((4, 3), np.float32),)}
    value = int(known())
    assert value != mistaken
    prove = sk.testing.assert_equal_for_all_inputs
    assert prove(lambda x: x * known().astype("f"), lambda x: x * value, **settings)
    with pytest.raises(AssertionError):
        prove(lambda x: x * known().astype("f"), lambda x: x * mistaken, **settings)


def _hide(y_bD):
    """The smallest of 48 numbers from 2 to 3, which is 2 in every draw."""
    return jnp.min(jnp.clip(y_bD, 2, 3))[None]


def _hide_beside_zeros(y_bD):
    return _hide(y_bD) + 0 * y_bD[0, :1]


def _pool(y_bD):
    clipped = -jnp.clip(y_bD, 2, 3)
    return -_hide(lax.reduce_window(clipped, -jnp.inf, lax.max, y_bD.shape, (1, 1), "VALID"))


HIDDEN = {
    "a select": lambda t, x, y: _hide(jnp.where(x > t, y, 2 * y)),
    "a select, beside what cancels": lambda t, x, y: _hide_beside_zeros(jnp.where(x > t, y, 2 * y)),
    "a branch": lambda t, x, y: _hide(lax.cond(x[0, 0] > t, lambda y: y, lambda y: 2 * y, y)),
    "a sign": lambda t, x, y: _hide(jnp.sign(x - t) * y),
    "a select, before pooling": lambda t, x, y: _pool(jnp.where(x > t, y, 2 * y)),
}


# proves N49 in part: whatever one side alone compares, no result of any draw shows it
@pytest.mark.parametrize("name", HIDDEN)
def test_a_comparison_that_no_result_shows_is_not_decided(name):
    args = (np.ones((16, 3), np.float32), np.ones((16, 3), np.float32))
    settings = {"mesh": sk.abstract_mesh(d=2), "in_specs": P(None, None), "out_specs": P(None), "args": args}
    sides = [partial(HIDDEN[name], threshold) for threshold in (0.5, 0.6)]
    # Among thousands of inputs in floats there may be one that shows it.
    words = "no result of any draw depends on it|for some that a comparison tells apart"
    with pytest.raises((AssertionError, ValueError), match=words):
        sk.testing.assert_equal_for_all_inputs(*sides, grad=False, **settings)


# The square of log(1 + log(exp(x**2))) is 0 where x is, and was a positive number there: the logarithm of a number that
# was a logarithm is 1 modulo the primes for which it has a meaning, and not modulo the highest.
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_tie_behind_nested_logarithms_is_one(depth):
    def nest(x):
        x = x * x
        for _ in range(depth):
            x = jnp.log(1 + jnp.log(jnp.exp(x)))
        return x

    def kernel(x):
        return jnp.argmax(jnp.where(nest(x) ** 2 > 0, nest(x), 7), 0).astype(jnp.float32)

    args = (np.ones((4, 3), np.float32),)
    settings = {"mesh": sk.abstract_mesh(d=2), "in_specs": P(None), "out_specs": P(None), "args": args}
    with pytest.raises(AssertionError, match="where some inputs are equal"):
        sk.testing.assert_equal_for_all_inputs(
            kernel, lambda x: jnp.argmax(nest(x), 0).astype(jnp.float32), grad=False, **settings
        )


# Both branches are the same: the comparison decides nothing, and nothing is hidden.
def test_a_comparison_that_decides_nothing_is_proved():
    def kernel(x):
        return jnp.where(x > 0.5, x, x) * 2

    args = (np.ones(4, np.float32),)
    mesh = sk.abstract_mesh(d=2)
    assert sk.testing.assert_equal_for_all_inputs(
        kernel, lambda x: 2 * x, mesh=mesh, in_specs=P("d"), out_specs=P("d"), args=args
    )


# Where all of x is above 1 the results differ. In every draw some element was not, and the results were -inf or NaN.
def test_what_is_infinite_or_nan_in_every_draw_is_not_decided():
    def add_logarithms(x, rows):
        logs = jnp.log(jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, 1)), 0))
        return jnp.sum(logs[rows])

    args = (np.ones((16, 2), np.float32),)
    settings = {"mesh": sk.abstract_mesh(d=2), "in_specs": P(None), "out_specs": P(), "args": args}
    halves = [lambda x: add_logarithms(x, slice(8)), lambda x: add_logarithms(x, slice(8, 16))]
    words = "1 of 1 elements of the result were NaN or infinite|for some that a comparison tells apart"
    with pytest.raises((AssertionError, ValueError), match=words):
        sk.testing.assert_equal_for_all_inputs(*halves, grad=False, **settings)


def _mask_second(function):
    """A function of x, and of zeros that a mask then takes away: NaN in floats if it is infinite at 0."""

    def masked(x):
        values = jnp.stack([function(x), function(x - x)])
        return jnp.sum(values * np.array([[[1]], [[0]]], np.float32), 0)

    return masked


POLES = {
    "x ** -0.3": (_mask_second(lambda x: (x * x) ** -0.3), lambda x: (x * x) ** -0.3),
    "lgamma": (_mask_second(lax.lgamma), lax.lgamma),
    "log2": (_mask_second(jnp.log2), jnp.log2),
    "digamma": (_mask_second(lax.digamma), lax.digamma),
    "lgamma of -1": (_mask_second(lambda x: lax.lgamma(x - 1)), lambda x: lax.lgamma(x - 1)),
    "lgamma less itself": (lambda x: lax.lgamma(x - x) - lax.lgamma(x - x), zeros),
    "atanh": (lambda x: lax.atanh(x - x + 1) - lax.atanh(x - x + 1), zeros),
    "erf_inv": (lambda x: lax.erf_inv(x - x + 1) * 0, zeros),
}

if jax.__version_info__ < (0, 11):  # digamma(0) is NaN there, and minus infinity in later versions
    POLES["digamma, of which the larger one with 0"] = (lambda x: jnp.maximum(lax.digamma(x - x), 0), zeros)


# What the real value of a draw takes for a pole, and the field does not: infinity would swallow x and 2 x alike.
NO_POLES = {
    "erf that rounds to 1": lambda x: lax.erf_inv(lax.erf(1e4 + x * x)),
    "tanh that rounds to 1": lambda x: jnp.arctanh(jnp.tanh(1e4 + x * x)),
    "an integer because it is large": lambda x: lax.lgamma(-1e17 * (1 + x * x)),
    "zero to a power of unknown sign": lambda x: jnp.power(x - x, 1e-4 - x * x),
}


@pytest.mark.parametrize("name", NO_POLES)
def test_a_pole_is_one_for_all_inputs(name):
    function = NO_POLES[name]
    args = (np.ones((4, 3), np.float32),)
    settings = {"mesh": sk.abstract_mesh(d=2), "in_specs": P("d"), "out_specs": P("d"), "args": args, "grad": False}
    with pytest.raises((AssertionError, UnprovableError)):
        sk.testing.assert_equal_for_all_inputs(lambda x: function(x) + x, lambda x: function(x) + 2 * x, **settings)


# An uninterpreted function was an ordinary number at its poles: what a mask takes away there was 0, and is NaN.
@pytest.mark.parametrize("name", POLES)
def test_a_function_is_infinite_at_its_poles(name):
    args = (np.ones((4, 3), np.float32),)
    settings = {"mesh": sk.abstract_mesh(d=2), "in_specs": P("d"), "out_specs": P("d"), "args": args, "grad": False}
    wrong, right = POLES[name]
    x = jnp.full((4, 3), 0.5)
    assert np.isnan(wrong(x)).all() and np.isfinite(right(x)).all()
    with pytest.raises(AssertionError, match="NaN"):
        sk.testing.assert_equal_for_all_inputs(wrong, right, **settings)
    assert sk.testing.assert_equal_for_all_inputs(right, lambda x: right(x + 0), **settings)


def _rarely_positive(x):
    """Zero unless a whole row is above another: for one normal input of twenty."""
    return jnp.maximum(jnp.min(x[0]) - jnp.max(x[1]), 0)[None]


# The maximum went both ways, but one way only where both were made equal: no draw had it between 0 and the threshold.
@pytest.mark.parametrize("threshold", [0.1, 0.25])
def test_a_rare_branch_is_found_among_thousands_of_inputs(threshold):
    def kernel(x):
        return jnp.where(_rarely_positive(x) > threshold, _rarely_positive(x), 0)

    args = (np.ones((4, 3), np.float32),)
    settings = {"mesh": sk.abstract_mesh(d=2), "in_specs": P(None), "out_specs": P(None), "args": args, "grad": False}
    with pytest.raises(AssertionError, match="for some that a comparison tells apart"):
        sk.testing.assert_equal_for_all_inputs(kernel, _rarely_positive, **settings)
    right = sk.testing.assert_equal_for_all_inputs(_rarely_positive, _rarely_positive, **settings)
    assert right.chance < 1e-15


# A count is not negative, but in int8 128 of them are -128: no draw had so many, and the certificate did not say so.
def test_a_count_in_a_narrow_integer_may_be_negative():
    signs = np.sign(np.random.default_rng(3).normal(size=200)).astype(np.float32)

    def count(x):
        return (x * signs > 0).sum()

    def kernel(x):
        return jnp.where(count(x).astype(jnp.int8) < 0, 2 * x, x) * count(x).astype(x.dtype)

    proof = sk.testing.assert_equal_for_all_inputs(
        kernel,
        lambda x: x * count(x).astype(x.dtype),
        mesh=sk.abstract_mesh(d=1),
        in_specs=P("d"),
        out_specs=P("d"),
        args=(jax.ShapeDtypeStruct((200,), jnp.float32),),
        grad=False,
    )
    assert any(sentence.startswith("never else than false: lt at test_false_proofs.py") for sentence in proof.compared)
