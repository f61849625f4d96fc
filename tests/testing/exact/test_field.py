"""The arithmetic of a proof against Python's integers, fact by fact: a bound that is too low proves what is wrong."""

import itertools
from fractions import Fraction

import numpy as np
import pytest

from shardkit.testing.exact.field import SEEDS, Field, RedrawError, TooDeepError, UnknownValueError
from shardkit.testing.exact.tower import LEVELS, PRIMES, logarithm
from shardkit.testing.exact.values import (
    CONSTANT,
    HUGE,
    INPUT,
    NOT_A_NUMBER,
    OUTSIDE,
    TRULY,
    Degree,
    facts,
    simplest,
)

pytestmark = [pytest.mark.check, pytest.mark.usefixtures("silent_floats")]

FIELD = Field(2, 7)
X, Y = FIELD.drawn("x", (2, 3)), FIELD.drawn("y", (2, 3))
ORDERS = range(4)
ONE, LARGE, LITTLE = (FIELD.lifted(np.float32([[v] * 3] * 2)) for v in (1, 1e9, -1e9))
POSITIVE, NEGATIVE = X.signed(1), Y.signed(-1)


def prime_of(component):
    return PRIMES[component // FIELD.points]


def by_hand(function, *operands):
    """The numbers that a function of integers has, modulo the prime of each component."""
    rows = []
    for i in range(len(FIELD.moduli)):
        values = [[int(v) for v in x.number[i].reshape(-1)] for x in operands]
        rows.append([function(*each) % prime_of(i) for each in zip(*values, strict=True)])
    return np.array(rows, np.uint64).reshape(operands[0].number.shape)


def residue(ratio, p):
    return ratio.numerator * pow(ratio.denominator, -1, p) % p


# Each is one line of the arithmetic; the components of every prime and point are looked at.
def test_sums_products_powers_and_inverses_are_those_of_the_integers():
    for got, wanted in (
        (FIELD.add(X, Y), by_hand(lambda x, y: x + y, X, Y)),
        (FIELD.sub(X, Y), by_hand(lambda x, y: x - y, X, Y)),
        (FIELD.negative(X), by_hand(lambda x: -x, X)),
        (FIELD.mul(X, Y), by_hand(lambda x, y: x * y, X, Y)),
        (FIELD.where(np.array([[True], [False]]), X, Y), np.stack([X.number[:, 0], Y.number[:, 1]], 1)),
    ):
        np.testing.assert_array_equal(got.number, wanted)
    for n in (0, 1, 2, 5, 12):
        np.testing.assert_array_equal(FIELD.power(X.number, n), by_hand(lambda x, n=n: x**n, X))
    for x in (X, FIELD.drawn("one", (1,)), FIELD.drawn("five", (5,)), FIELD.drawn("none", (0,))):
        found = FIELD.inverse(x)
        np.testing.assert_array_equal(found.number * x.number % FIELD.p(x.number), np.ones_like(x.number))


def test_sums_over_dims_and_products_of_matrices_are_those_of_the_integers():
    for dims, keep in itertools.product(((0,), (1,), (0, 1)), (False, True)):
        behind = tuple(dim + 1 for dim in dims)
        wanted = X.number.astype(object).sum(behind, keepdims=True) % FIELD.p(X.number).astype(object)
        wanted = wanted if keep else wanted.squeeze(behind)
        found = FIELD.total(X, dims, keep)
        np.testing.assert_array_equal(found.number.astype(object), wanted)
        assert found.degree == X.degree
    a, b = FIELD.drawn("a", (2, 3, 5)), FIELD.drawn("b", (2, 5, 2))
    wanted = np.matmul(a.number.astype(object), b.number.astype(object)) % FIELD.p(a.number).astype(object)
    np.testing.assert_array_equal(FIELD.matmul(a, b).number.astype(object), wanted)
    assert FIELD.matmul(a, FIELD.drawn("none", (2, 5, 0))).shape == (2, 3, 0)


CONSTANTS = [(0.0, 1, 0), (1 / 3, 1, 0), (-0.1, -1, 0), (1e-5, 1, 0), (3.0, 1, 0), (1e9, 1, 1), (-1e30, -1, -1)]


def test_constants_are_the_rationals_that_they_stand_for():
    values = np.float32([value for value, _, _ in CONSTANTS])
    found = FIELD.lifted(values)
    for i, (value, sign, infinite) in enumerate(CONSTANTS):
        ratio = simplest(float(np.float32(value)), np.float32)
        assert found.number[:, i].tolist() == [residue(ratio, prime_of(k)) for k in range(len(FIELD.moduli))]
        assert (found.sign[i], found.infinite[i], found.used[:, i].tolist()) == (sign, infinite, [0, 0])
    third = FIELD.mul(FIELD.lifted(np.float32([1 / 3])), FIELD.lifted(np.float32([3])))
    assert (third.number == 1).all() and not found.degree.total
    assert [simplest(v, np.float32) for v in (0.125, float(np.float32(1e-5)))] == [Fraction(1, 8), Fraction(1, 100_000)]
    assert simplest(float(np.float32(1.2345678)), np.float32) == Fraction(float(np.float32(1.2345678)))
    whole = FIELD.lifted(np.array([-2, 2**30, True], np.int64))
    assert whole.infinite.tolist() == [0, 0, 0] and whole.sign.tolist() == [-1, 1, 1]  # an integer is none
    assert [int(n) for n in whole.number[:, 0]] == [prime_of(k) - 2 for k in range(len(FIELD.moduli))]
    low, high = (FIELD.lifted(np.float32([v])) for v in (-np.inf, np.inf))
    np.testing.assert_array_equal((low.number + high.number) % FIELD.p(low.number), 0)
    assert (low.low.all(), high.low.any(), FIELD.lifted(np.zeros((0, 2))).shape) == (True, False, (0, 2))


# A sign that is too sure decides a comparison that could go both ways, and a mask that is wrong is proved.
@pytest.mark.parametrize(
    ("operation", "signs"),
    [
        (lambda x, y: FIELD.add(x, y), {"++": 1, "--": -1, "+-": 0, "+0": 0, "00": 0}),
        (lambda x, y: FIELD.sub(x, y), {"++": 0, "--": 0, "+-": 1, "-+": -1, "+0": 0}),
        (lambda x, y: FIELD.mul(x, y), {"++": 1, "--": 1, "+-": -1, "-+": -1, "+0": 0, "00": 0}),
        (
            lambda x, y: FIELD.matmul(x, y.moved(lambda part: part.swapaxes(-1, -2))),
            {"++": 1, "--": 1, "+-": -1, "-+": -1, "+0": 0, "0-": 0, "00": 0},
        ),
        (lambda x, y: FIELD.inverse(x), {"+0": 1, "-0": -1, "00": 0}),
        (lambda x, y: FIELD.negative(x), {"+0": -1, "-0": 1, "00": 0}),
        (lambda x, y: FIELD.total(x, [1]), {"+0": 1, "-0": -1, "00": 0}),
        (lambda x, y: FIELD.exp(x), {"-0": 1, "00": 1}),
        (lambda x, y: Field(2, 7).plain(FIELD.log(x)), {"+0": 0}),
        (lambda x, y: FIELD.opaque("f", x), {"+0": 0}),
        (lambda x, y: FIELD.opaque("f", x, y, sign=1), {"-0": 1}),
    ],
)
def test_signs_that_are_known(operation, signs):
    of = {"+": 1, "-": -1, "0": 0}
    for both, sign in signs.items():
        found = operation(X.signed(of[both[0]]), Y.signed(of[both[1]]))
        assert (found.sign == sign).all(), both
    mixed = FIELD.where(np.array([[True], [False]]), POSITIVE, NEGATIVE)
    assert FIELD.where(np.array([[True], [False]]), POSITIVE, NEGATIVE).sign[:, 0].tolist() == [1, -1]
    assert FIELD.total(mixed, [1]).sign.tolist() == [1, -1] and FIELD.total(mixed, [0]).sign.tolist() == [0] * 3


def test_what_is_infinite_and_what_is_no_longer():
    for found, infinite in (
        (FIELD.add(LITTLE, X), -1),
        (FIELD.add(LITTLE, LITTLE), -1),
        (FIELD.add(LARGE, LITTLE), 0),
        (FIELD.negative(LITTLE), 1),
        (FIELD.mul(LITTLE, POSITIVE), -1),
        (FIELD.mul(LITTLE, NEGATIVE), 1),
        (FIELD.mul(LITTLE, LITTLE), 1),
        (FIELD.mul(X, LITTLE), 0),  # of unknown sign
        (FIELD.mul(LITTLE, FIELD.lifted(np.float32([[0]]))), 0),
        (FIELD.inverse(LITTLE), 0),
        (FIELD.total(LITTLE, [1]), -1),
        (FIELD.total(FIELD.where(np.array([True, False, False]), LITTLE, X), [1]), -1),
        (FIELD.total(FIELD.where(np.array([True, False, False]), LITTLE, LARGE), [1]), 0),
        (FIELD.total(FIELD.where(np.array([True, False, False]), X, LARGE), [1]), 1),
        (FIELD.exp(LITTLE), 0),
    ):
        assert (found.infinite == infinite).all()
    assert not FIELD.exp(LITTLE).number.any() and FIELD.exp(LARGE).number.all()
    same = FIELD.same(FIELD.where(np.array([True, False, False]), LITTLE, X), X)
    assert same[0].tolist() == [False, True, True]
    # As results they are numbers: -1e9 exp(x) is not -1e9 exp(y).
    assert not FIELD.same(LITTLE, FIELD.add(LITTLE, X)).any()
    truly = FIELD.lifted(np.float32([[-np.inf] * 3] * 2))
    assert FIELD.same(truly, FIELD.add(truly, X)).all()


def one(value):
    return FIELD.lifted(np.float32([[value]]))


# What each must be in floats, and is: a number, infinite, or none.
def test_what_is_no_number():
    up, down, nan, zero = one(np.inf), one(-np.inf), one(np.nan), one(0)
    unknown = X.moved(lambda part: part[:, :1, :1])
    for value, poison, infinite in (
        (FIELD.add(up, down), NOT_A_NUMBER, 0),
        (FIELD.sub(up, up), NOT_A_NUMBER, 0),
        (FIELD.add(up, unknown), 0, TRULY),
        (FIELD.add(down, one(1e30)), 0, -TRULY),
        (FIELD.mul(zero, up), NOT_A_NUMBER, 0),
        (FIELD.mul(zero, nan), NOT_A_NUMBER, 0),
        (FIELD.mul(zero, FIELD.inverse(zero)), NOT_A_NUMBER, 0),
        (FIELD.mul(one(-2), up), 0, -TRULY),
        (FIELD.mul(one(1e30), zero), 0, 0),
        (FIELD.inverse(zero), 0, TRULY),
        (FIELD.inverse(down), 0, 0),
        (FIELD.exp(down), 0, 0),
        (FIELD.exp(up), 0, TRULY),
        (FIELD.log(zero), 0, -TRULY),
        (FIELD.log(FIELD.negative(FIELD.exp(unknown))), NOT_A_NUMBER, 0),
        (FIELD.to_the(down, 2), 0, TRULY),
        (FIELD.to_the(down, 3), 0, -TRULY),
        (FIELD.to_the(down, -1), 0, 0),
        (FIELD.to_the(nan, 0), 0, 0),
        (FIELD.opaque("tanh", up), 0, 0),
        (FIELD.opaque("sin", up), NOT_A_NUMBER, 0),
        (FIELD.opaque("tanh", nan), NOT_A_NUMBER, 0),
        (FIELD.total(FIELD.where(np.array([[True, False]]), up, down), [1]), NOT_A_NUMBER, 0),
        (FIELD.total(FIELD.where(np.array([[True, False]]), up, unknown), [1]), 0, TRULY),
        (FIELD.matmul(FIELD.where(np.array([[True, False]]), up, one(1)), ones(2)), 0, TRULY),
        (FIELD.matmul(FIELD.where(np.array([[True, False]]), up, down), ones(2)), NOT_A_NUMBER, 0),
        (FIELD.matmul(FIELD.where(np.array([[True, False]]), up, zero), FIELD.sub(ones(2), ones(2))), NOT_A_NUMBER, 0),
        (FIELD.where(np.array([[False]]), nan, unknown), 0, 0),
    ):
        assert (value.poison.reshape(-1)[0], value.infinite.reshape(-1)[0]) == (poison, infinite)
    assert not FIELD.inverse(down).number.any() and np.isnan(FIELD.key(nan)).all()
    assert FIELD.same(nan, FIELD.add(up, down)).all() and not FIELD.same(nan, unknown).any()
    assert not FIELD.same(up, down).any() and not FIELD.same(up, one(1e30)).any()


def ones(n):
    return FIELD.lifted(np.ones((n, 1), np.float32))


def test_what_is_outside_of_a_functions_domain_in_a_draw_is_not_compared():
    below = Field(2, 7)
    x = below.drawn("x", (50,))
    outside = below.log(x).poison == OUTSIDE
    np.testing.assert_array_equal(outside, x.real[0] < 0)
    np.testing.assert_array_equal(below.root(x).poison == OUTSIDE, x.real[0] < 0)
    assert below.same(below.log(x), below.log(below.negative(x))).all() and outside.any() and not outside.all()
    ordered = Field(2, 7, order=0)  # in an order nothing is drawn: logarithms are of positive numbers
    assert not ordered.log(ordered.drawn("x", (50,))).poison.any()
    alike = Field(2, 7, kind="zero")
    assert (alike.inverse(alike.drawn("x", (3,))).poison == OUTSIDE).all()


def test_the_real_values_of_a_draw_are_those_of_floats():
    field = Field(2, 7)
    x, y = field.drawn("x", (2, 3)), field.drawn("y", (2, 3))
    a, b = x.real[0], y.real[0]
    for value, wanted in (
        (field.add(x, y), a + b),
        (field.mul(x, field.negative(y)), -a * b),
        (field.inverse(x), 1 / a),
        (field.exp(x), np.exp(a)),
        (field.plain(field.log(field.exp(x))), a),
        (field.to_the(x, -3), a**-3.0),
        (field.total(x, [1]), a.sum(1)),
        (field.matmul(x, y.moved(lambda part: part.swapaxes(-1, -2))), a @ b.T),
        (field.opaque("tanh", x), np.tanh(a)),
        (field.opaque("atan2", x, y), np.arctan2(a, b)),
        (field.of_bits(field.bits(x)), a),
        (field.lifted(np.float32([0.1, 1 / 3])), np.array([0.1, 1 / 3])),
    ):
        np.testing.assert_allclose(value.real[0], wanted, rtol=1e-13)
    kinds = {
        kind: Field(2, 7, kind=kind).drawn("x", (64,)) for kind in ("positive", "unit", "wide", "alike", "repeated")
    }
    assert (kinds["positive"].real > 0).all() and np.abs(kinds["wide"].real).max() > 20
    assert ((kinds["unit"].real > 0) & (kinds["unit"].real < 1)).all()
    assert len(np.unique(kinds["alike"].number, axis=1).T) == 1
    repeated = kinds["repeated"]
    zero = repeated.real[0] == 0
    assert zero.any() and not repeated.number[:, zero].any() and len(np.unique(repeated.real)) < 60
    with pytest.raises(UnknownValueError):
        field.key(field.exp(field.exp(field.lifted(np.float32([100.0])))))


def test_the_square_of_a_root_is_what_it_is_of():
    field = Field(2, 7, order=0)
    x = field.drawn("x", (3,))
    root = field.root(x)
    assert field.same(field.to_the(root, 2), x).all() and field.same(field.to_the(root, 4), field.to_the(x, 2)).all()
    assert field.same(field.to_the(root, -2), field.inverse(x)).all()
    assert field.same(field.to_the(root, 3), field.mul(x, root)).all()
    assert not field.same(field.mul(root, field.root(field.negative(x))), x).any()


def test_the_primes_that_exps_use_up():
    field = Field(2, 7)
    once, twice = field.exp(X), field.exp(field.exp(X))
    assert (once.used[0] == 1).all() and (twice.used[0] == 2).all()
    for found in (
        field.add(once, twice),
        field.sub(X, twice),
        field.mul(twice, once),
        field.inverse(twice),
        field.opaque("f", once, twice),
        field.matmul(once, twice.moved(lambda part: part.swapaxes(-1, -2))),
        field.total(twice, [1]),
        field.bits(twice),
    ):
        assert (found.used[0] == 2).all() and not found.used[1].any()
    assert field.add(field.log(once), field.log(twice)).used[:, 0, 0].tolist() == [0, 2]
    logs = field.log(twice)
    assert (logs.used[0] == 0).all() and (logs.used[1] == 2).all()
    assert (field.exp(logs).used[0] == 2).all()  # exp(log x) is x again
    assert not field.logs and (field.plain(logs).used[0] == 1).all() and field.logs
    assert field.exp(LITTLE).used[0].tolist() == [[0] * 3] * 2  # a zero
    valid = Field(2, 7).valid(np.array([0, 3], np.int8))
    assert valid[:, 0].all() and valid[:, 1].tolist() == [False] * 6 + [True] * (2 * LEVELS - 6)
    assert field.valid(np.array([0]))[:, 0].tolist() == [True] * (2 * LEVELS - 2) + [False] * 2


def test_exps_and_logarithms_keep_their_laws_and_no_other():
    field = Field(2, 7, order=0)
    both = field.exp(field.add(X, Y)), field.mul(field.exp(X), field.exp(Y))
    assert field.same(*both).all()
    valid = field.valid(both[0].used[0])
    np.testing.assert_array_equal(both[0].number[valid], both[1].number[valid])
    assert field.same(field.exp(field.log(X)), X).all()
    product = field.log(field.mul(X, Y))
    assert field.same(product, field.add(field.log(X), field.log(Y))).all()
    assert not field.same(product, field.add(field.log(X), field.log(X))).any()
    assert field.same(
        field.mul(field.log(X), field.lifted(np.float32([[-3]]))),
        field.log(field.inverse(field.mul(X, field.mul(X, X)))),
    ).all()
    plain = field.plain(field.where(np.array([True, False, False]), field.log(ONE), X))
    np.testing.assert_array_equal(plain.number[:, :, 1:], X.number[:, :, 1:])
    assert not plain.number[:, :, 0].any() and not field.logs  # no logarithm became a number yet: those of 1 are zero
    third = field.mul(field.log(field.exp(X)), field.lifted(np.float32([[1 / 3]])))
    assert field.logs and field.same(third, field.mul(X, field.lifted(np.float32([[1 / 3]])))).all()
    assert field.plain(field.log(field.lifted(np.float32([2, 2])))).number[0].all()  # that of 2 is not
    for level in (0, 3):
        p, q = PRIMES[level : level + 2]
        for power in (1, 5, p - 1):
            assert logarithm(level, pow(4, power, q)) == power


def test_the_bound_is_that_of_the_largest_prime_that_is_compared():
    field = Field(1, 3)
    x = field.drawn("x", (5,))
    assert field.variety == PRIMES[-1] - 1
    # A polynomial of this degree is one at every power: the bound must say so.
    power = field.exp(x)
    order = PRIMES[-2]
    assert all(pow(int(value), order, PRIMES[-1]) == 1 for value in power.number[-1])
    assert Field(1, 3).chance(Degree(order)) < 1 and field.chance(Degree(order)) == 1
    assert field.variety == PRIMES[-2] - 1
    # What a logarithm becomes has no component of the largest prime.
    field.plain(field.log(x))
    assert field.variety == PRIMES[-3] - 1
    only_logs = Field(1, 3)
    only_logs.plain(only_logs.log(only_logs.drawn("x", (5,))))
    assert only_logs.variety == PRIMES[-2] - 1


def test_points_that_are_drawn_again_are_more_chances():
    field = Field(2, 3)
    often = Degree(1, {1: (1, PRIMES[0] // 16)})  # a divisor that is zero at one in eight draws of two points
    rare = Degree(1 + PRIMES[0] // 16)
    assert field.chance(often) == pytest.approx(field.chance(rare) / (1 - 2 * 2 / 16), rel=1e-3)
    always = Degree(1, {1: (1, PRIMES[0])})
    assert field.chance(always) == pytest.approx(SEEDS * ((1 + PRIMES[0]) / (PRIMES[-1] - 1)) ** 2)


def test_the_square_of_a_root_has_the_degree_of_what_it_is_the_root_of():
    field = Field(1, 3)
    tenth = field.to_the(field.drawn("x", (5,)), 10)
    assert field.to_the(field.root(tenth), 2).degree.total >= 10


def test_degrees_bound_the_chance_of_a_wrong_verdict():
    """Too low a bound claims too much."""
    field = Field(1, 3)
    x, y = field.drawn("x", (5,)), field.drawn("y", (5,))
    square = field.mul(x, x)
    assert [each.degree.total for each in (x, ONE, field.add(square, y), field.add(y, square))] == [1, 0, 2, 2]
    assert (
        field.mul(square, y).degree.total == 3
        and field.matmul(x.moved(lambda part: part[:, None]), square.moved(lambda part: part[:, :, None])).degree.total
        == 3
    )
    once = field.inverse(square)  # five divisors of degree 2
    assert once.degree == Degree(1, {1: (1, 10)}) and field.inverse(field.lifted(np.float32(2))).degree == CONSTANT
    cubed = field.mul(once, field.mul(once, field.inverse(y))).degree
    assert cubed == Degree(3, {1: (2, 10), 2: (1, 5)}) and cubed.to_the(2) == Degree(6, {1: (4, 10), 2: (2, 5)})
    assert once.degree.plus(cubed) == cubed.plus(once.degree) == cubed
    assert field.chance(cubed) == pytest.approx((3 + 2 * 10 + 5) / (PRIMES[-1] - 1), rel=1e-5)
    assert Field(3, 3).chance(cubed) == pytest.approx((28 / (PRIMES[-1] - 1)) ** 3, rel=1e-5)
    assert field.chance(Degree(2 * PRIMES[-1])) == 1
    assert field.exp(square).degree == field.opaque("f", square).degree == field.log(x).degree == INPUT
    assert (
        field.exp(field.lifted(np.float32(2))).degree == CONSTANT
        and field.exp(field.add(field.log(square), x)).degree.total == 3
    )
    assert field.plain(field.log(square)).degree.total == 2 and field.where(np.ones(5, bool), x, square).degree == INPUT
    masked = field.where(np.arange(5) > 2, x, square)
    assert masked.degree.total == 2 and field.where(np.zeros(5, bool), square, x).degree == INPUT
    first = field.bits(square)
    assert first.degree == INPUT and field.of_bits(first).degree.total == 2
    field.bits(x)
    assert field.of_bits(first).degree.total == 2  # of all that were ever sent as bits


def test_bits_come_back_and_others_are_no_number():
    field = Field(2, 7)
    sent = field.bits(POSITIVE)
    back = field.of_bits(sent)
    np.testing.assert_array_equal(back.number, X.number)
    np.testing.assert_array_equal(back.facts, POSITIVE.facts)
    zero = field.of_bits(field.lifted(np.zeros((2, 3), np.int32)))
    assert not zero.number.any() and not zero.facts.any()
    other = field.of_bits(field.add(sent, field.lifted(np.ones((1, 1), np.int32))))
    assert not (other.number == X.number).all(0).any() and field.uninterpreted == {"of bits"}
    assert not (sent.number == field.bits(Y).number).all(0).any()


def test_functions_are_told_apart_by_name_by_arguments_and_by_their_order():
    field = Field(2, 7)
    f = field.opaque("f", X, Y)
    assert field.same(f, field.opaque("f", X, Y)).all() and field.uninterpreted == {"f"}
    for other in (field.opaque("f", Y, X), field.opaque("g", X, Y), field.opaque("f", X, X), field.opaque("f", X)):
        assert not field.same(f, other).any()
    # the points and the primes have values of their own
    assert len(np.unique(X.number[:2].reshape(-1))) == 12 and len(np.unique(f.number[:, 0, 0])) == 2 * LEVELS
    assert not (Field(2, 8).drawn("x", (2, 3)).number == X.number).any(0).any()
    assert (X.number > 0).all() and (X.number < FIELD.p(X.number)).all()


def keys(order, *values):
    field = Field(2, 7, order=order)
    return [field.key(x) for x in values], field


def test_the_four_orders_turn_round_every_comparison_that_is_not_decided():
    """A comparison that goes one way in all orders leaves a branch out of the proof."""
    x, y = X, Y
    above = []
    for order in ORDERS:
        (a, b, minus_a, minus_b, positive, negative, zero), field = keys(
            order, x, y, FIELD.negative(x), FIELD.negative(y), POSITIVE, NEGATIVE, FIELD.sub(x, x)
        )
        assert field.compared == 7
        np.testing.assert_array_equal(a > b, minus_b > minus_a)
        np.testing.assert_array_equal(a, -minus_a)
        assert (positive > 0).all() and (negative < 0).all() and (zero == 0).all()
        above.append(np.stack([a > b, a > 0, larger_of_two_positive(order)]))
    assert np.any(above, 0).all() and not np.all(above, 0).any()


# Else two comparisons of one number stay alike in all orders.
def test_unknown_signs_are_drawn_anew_every_four_orders():
    signs = np.stack([keys(order, X)[0][0] > 0 for order in range(0, 64, 4)])
    assert signs.any(0).all() and not signs.all(0).any()


def larger_of_two_positive(order):
    (a, b), _ = keys(order, POSITIVE, Y.signed(1))
    return a > b


def test_constants_stand_in_their_own_order_and_infinity_outside():
    values = np.float32([-1e9, -7, -0.5, 0, 1e-3, 1 / 3, 0.5, 2, 1000, 1e9])
    for order in ORDERS:
        [found], _ = keys(order, FIELD.lifted(values))
        assert (np.diff(found) > 0).all() and found[3] == 0
        [unknown], _ = keys(order, FIELD.drawn("many", (50,)))
        assert (found[0] < unknown).all() and (unknown < found[-1]).all() and (unknown != 0).all()
    with pytest.raises(TooDeepError):
        FIELD.key(X.signed(0).moved(lambda part: part + np.int8(LEVELS - 1) if part.dtype == np.int8 else part))


def test_a_divisor_that_is_zero_at_one_point_alone_is_drawn_again():
    field = Field(2, 7)
    always = np.zeros((2 * LEVELS, 1), np.uint64)
    once = np.ones((2 * LEVELS, 2), np.uint64)
    once[5, 1] = 0
    with pytest.raises(RedrawError):
        field.inverted(once, np.zeros(2, np.int8))
    meaningless = field.inverted(once, np.full(2, 3, np.int8))  # that component has no meaning after three exps
    np.testing.assert_array_equal(np.delete(meaningless, 5, 0), np.delete(once, 5, 0))
    zero = field.inverted(np.concatenate([always, once[:, :1]], 1), np.zeros(2, np.int8))
    np.testing.assert_array_equal(zero[:, 0], field.salt("1/0") % field.moduli)
    np.testing.assert_array_equal(zero[:, 1], 1)


def test_a_whole_number_a_mask_and_what_is_neither():
    for values, wanted in (
        ([3.0, 3.0], 3), ([-64.0], -64), ([65.0], None), ([0.5], None), ([1.0, 2.0], None), ([0.0], 0), ([], None)
    ):  # fmt: skip
        assert FIELD.whole(FIELD.lifted(np.float32(values))) == wanted
    assert FIELD.whole(X) is None and FIELD.whole(FIELD.log(ONE)) is None
    field = Field(2, 7, order=0)
    masked = field.mul(field.log(X), field.lifted(np.float32([[1, 0, 1]])))
    assert masked.factor is not None and not field.logs
    np.testing.assert_array_equal(masked.factor, np.where([True, False, True], X.number, np.uint64(1)))
    assert masked.degree == INPUT


# Above all, below all, or among them about one that was compared: what lies between two constants is met.
def test_unknown_numbers_stand_on_every_side_of_constants():
    places = set()
    for order in range(24):
        field = Field(2, 7, order=order)
        field.centres = (float(np.log(0.8)), float(np.log(1.2)))
        positive = field.exp(field.drawn("x", ()))
        low, high = (field.key(field.lifted(np.float32(value))) for value in (0.8, 1.2))
        assert low < high
        places.add((bool(field.key(positive) > low), bool(field.key(positive) > high)))
    assert places == {(False, False), (True, False), (True, True)}


def test_facts_have_a_row_each():
    assert facts((2,), -1, TRULY, 2, 3, OUTSIDE).tolist() == [[-1] * 2, [2] * 2, [2] * 2, [3] * 2, [2] * 2]
    assert (HUGE, TRULY, NOT_A_NUMBER, OUTSIDE) == (1, 2, 1, 2)
