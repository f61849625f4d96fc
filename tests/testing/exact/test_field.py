"""The arithmetic of a proof against Python's integers, fact by fact: a bound that is too low proves what is wrong."""

import itertools
from fractions import Fraction

import numpy as np
import pytest

from shardkit.testing.exact.coverage import ALONE
from shardkit.testing.exact.crossings import DIVISOR, Crossings, Differences
from shardkit.testing.exact.decision import DecisionPlace
from shardkit.testing.exact.numbers.arithmetic import add, invert, matmul, multiply, negate, power, subtract, sum_dims
from shardkit.testing.exact.numbers.assembly import where
from shardkit.testing.exact.numbers.bits import from_bits, to_bits
from shardkit.testing.exact.numbers.constants import simplest
from shardkit.testing.exact.numbers.errors import NestedLogarithmsError, RedrawError, TooDeepError, UnknownValueError
from shardkit.testing.exact.numbers.field import SEEDS, Field, Settings
from shardkit.testing.exact.numbers.functions import apply_function
from shardkit.testing.exact.numbers.inputs import draw_input
from shardkit.testing.exact.numbers.logarithms import exp, find_whole_number, log, to_number
from shardkit.testing.exact.numbers.orders import find_equal, find_keys
from shardkit.testing.exact.numbers.square_roots import square_root
from shardkit.testing.exact.numbers.tower import LEVELS, PRIMES, find_logarithms
from shardkit.testing.exact.numbers.values import (
    CONSTANT,
    HUGE,
    INPUT,
    NOT_A_NUMBER,
    OUTSIDE,
    TRULY,
    Degree,
    build_facts,
)

pytestmark = [pytest.mark.check, pytest.mark.usefixtures("silent_floats")]

FIELD = Field(Settings(2, 7))
X, Y = draw_input(FIELD, "x", (2, 3)), draw_input(FIELD, "y", (2, 3))
ORDERS = range(4)
ONE, LARGE, LITTLE = (FIELD.lift(np.float32([[v] * 3] * 2)) for v in (1, 1e9, -1e9))
POSITIVE, NEGATIVE = X.with_sign(1), Y.with_sign(-1)


def prime_of(component):
    return PRIMES[component // FIELD.settings.points]


def by_hand(function, *operands):
    """The numbers that a function of integers has, modulo the prime of each component."""
    rows = []
    for i in range(len(FIELD.residues.moduli)):
        values = [[int(v) for v in x.number[i].reshape(-1)] for x in operands]
        rows.append([function(*each) % prime_of(i) for each in zip(*values, strict=True)])
    return np.array(rows, np.uint64).reshape(operands[0].number.shape)


def residue(ratio, p):
    return ratio.numerator * pow(ratio.denominator, -1, p) % p


# What hangs on a narrow window was drawn in one of a thousand elements.
def test_inputs_near_constants_are_between_two_of_them():
    field = Field(Settings(1, 0, kind="near"))
    field.choices.centres = (np.log(3), np.log(3.001))
    x = draw_input(field, "x", (4, 16)).real
    assert ((x > 3) & (x < 3.001)).sum() >= 3


# A minimum of clipped rows is between its bounds if all rows are: of rows drawn on their own, in one of hundreds.
def test_similar_inputs_differ_by_little_along_some_dims():
    spreads = []
    for seed in range(16):
        x = draw_input(Field(Settings(1, seed, kind="similar")), "x", (4, 3)).real[0]
        scale = np.maximum(np.abs(x).max(), 1)
        spreads.append((np.ptp(x, 0).max() / scale, np.ptp(x, 1).max() / scale))
    rows, columns = np.array(spreads).T < 0.5
    assert rows.sum() >= 4 and columns.sum() >= 4 and (rows & columns).sum() >= 1
    assert not (rows & columns).all()


# A comparison that one side alone makes is solved for as often as all others together, a divisor less often.
def test_crossings_prefer_comparisons_of_one_side():
    crossings, foreign = Crossings(), DecisionPlace(0, 9, "")
    places = [DecisionPlace(0, number, "") for number in range(10)] + [
        DecisionPlace(0, number, DIVISOR) for number in range(10, 20)
    ]
    for seed in range(40):
        field = Field(Settings(1, seed, kind="any", crossed=True))
        x = draw_input(field, "x", (2, 3))
        moved = crossings.move(field, [])
        other = field.like()
        other.choices.elements = (moved,)
        differences = Differences(), Differences()
        for y, noted in zip((x, draw_input(other, "x", (2, 3))), differences, strict=True):
            for place in places:
                noted.note(place, field, y, field.lift(np.zeros((1, 1), "f")))
        crossings.solve(field, moved, *differences, {(foreign.side, foreign.equation)})
    divisors = sum(count for place, count in crossings.crossed.items() if place.part == DIVISOR)
    assert crossings.crossed[foreign] >= 15 and 2 <= divisors <= 12


# Each is one line of the arithmetic; the components of every prime and point are looked at.
def test_sums_products_powers_and_inverses_are_those_of_the_integers():
    for got, wanted in (
        (add(FIELD, X, Y), by_hand(lambda x, y: x + y, X, Y)),
        (subtract(FIELD, X, Y), by_hand(lambda x, y: x - y, X, Y)),
        (negate(FIELD, X), by_hand(lambda x: -x, X)),
        (multiply(FIELD, X, Y), by_hand(lambda x, y: x * y, X, Y)),
        (where(np.array([[True], [False]]), X, Y), np.stack([X.number[:, 0], Y.number[:, 1]], 1)),
    ):
        np.testing.assert_array_equal(got.number, wanted)
    for n in (0, 1, 2, 5, 12):
        np.testing.assert_array_equal(FIELD.residues.power(X.number, n), by_hand(lambda x, n=n: x**n, X))
    for x in (X, draw_input(FIELD, "one", (1,)), draw_input(FIELD, "five", (5,)), draw_input(FIELD, "none", (0,))):
        found = invert(FIELD, x)
        np.testing.assert_array_equal(
            found.number * x.number % FIELD.residues.primes_of(x.number), np.ones_like(x.number)
        )


def test_sums_over_dims_and_products_of_matrices_are_those_of_the_integers():
    for dims, keep in itertools.product(((0,), (1,), (0, 1)), (False, True)):
        behind = tuple(dim + 1 for dim in dims)
        wanted = X.number.astype(object).sum(behind, keepdims=True) % FIELD.residues.primes_of(X.number).astype(object)
        wanted = wanted if keep else wanted.squeeze(behind)
        found = sum_dims(FIELD, X, dims, keep)
        np.testing.assert_array_equal(found.number.astype(object), wanted)
        assert found.degree == X.degree
    a, b = draw_input(FIELD, "a", (2, 3, 5)), draw_input(FIELD, "b", (2, 5, 2))
    wanted = np.matmul(a.number.astype(object), b.number.astype(object)) % FIELD.residues.primes_of(a.number).astype(
        object
    )
    np.testing.assert_array_equal(matmul(FIELD, a, b).number.astype(object), wanted)
    assert matmul(FIELD, a, draw_input(FIELD, "none", (2, 5, 0))).shape == (2, 3, 0)


CONSTANTS = [(0.0, 1, 0), (1 / 3, 1, 0), (-0.1, -1, 0), (1e-5, 1, 0), (3.0, 1, 0), (1e9, 1, 1), (-1e30, -1, -1)]


def test_constants_are_the_rationals_that_they_stand_for():
    values = np.float32([value for value, _, _ in CONSTANTS])
    found = FIELD.lift(values)
    for i, (value, sign, infinite) in enumerate(CONSTANTS):
        ratio = simplest(float(np.float32(value)), np.float32)
        assert found.number[:, i].tolist() == [residue(ratio, prime_of(k)) for k in range(len(FIELD.residues.moduli))]
        assert (found.sign[i], found.infinite[i], found.both_used[:, i].tolist()) == (sign, infinite, [0, 0])
    third = multiply(FIELD, FIELD.lift(np.float32([1 / 3])), FIELD.lift(np.float32([3])))
    assert (third.number == 1).all() and not found.degree.total
    assert [simplest(v, np.float32) for v in (0.125, float(np.float32(1e-5)))] == [Fraction(1, 8), Fraction(1, 100_000)]
    assert simplest(float(np.float32(1.2345678)), np.float32) == Fraction(float(np.float32(1.2345678)))
    whole = FIELD.lift(np.array([-2, 2**30, True], np.int64))
    assert whole.infinite.tolist() == [0, 0, 0] and whole.sign.tolist() == [-1, 1, 1]  # an integer is none
    assert [int(n) for n in whole.number[:, 0]] == [prime_of(k) - 2 for k in range(len(FIELD.residues.moduli))]
    low, high = (FIELD.lift(np.float32([v])) for v in (-np.inf, np.inf))
    np.testing.assert_array_equal((low.number + high.number) % FIELD.residues.primes_of(low.number), 0)
    assert (low.is_low.all(), high.is_low.any(), FIELD.lift(np.zeros((0, 2))).shape) == (True, False, (0, 2))


# A sign that is too sure decides a comparison that could go both ways, and a mask that is wrong is proved.
@pytest.mark.parametrize(
    ("operation", "signs"),
    [
        (lambda x, y: add(FIELD, x, y), {"++": 1, "--": -1, "+-": 0, "+0": 0, "00": 0}),
        (lambda x, y: subtract(FIELD, x, y), {"++": 0, "--": 0, "+-": 1, "-+": -1, "+0": 0}),
        (lambda x, y: multiply(FIELD, x, y), {"++": 1, "--": 1, "+-": -1, "-+": -1, "+0": 0, "00": 0}),
        (
            lambda x, y: matmul(FIELD, x, y.move(lambda part: part.swapaxes(-1, -2))),
            {"++": 1, "--": 1, "+-": -1, "-+": -1, "+0": 0, "0-": 0, "00": 0},
        ),
        (lambda x, y: invert(FIELD, x), {"+0": 1, "-0": -1, "00": 0}),
        (lambda x, y: negate(FIELD, x), {"+0": -1, "-0": 1, "00": 0}),
        (lambda x, y: sum_dims(FIELD, x, [1]), {"+0": 1, "-0": -1, "00": 0}),
        (lambda x, y: exp(FIELD, x), {"-0": 1, "00": 1}),
        (lambda x, y: to_number(Field(Settings(2, 7)), log(FIELD, x)), {"+0": 0}),
        (lambda x, y: apply_function(FIELD, "f", x), {"+0": 0}),
        (lambda x, y: apply_function(FIELD, "f", x, y, sign=1), {"-0": 1}),
    ],
)
def test_signs_that_are_known(operation, signs):
    of = {"+": 1, "-": -1, "0": 0}
    for both, sign in signs.items():
        found = operation(X.with_sign(of[both[0]]), Y.with_sign(of[both[1]]))
        assert (found.sign == sign).all(), both
    mixed = where(np.array([[True], [False]]), POSITIVE, NEGATIVE)
    assert where(np.array([[True], [False]]), POSITIVE, NEGATIVE).sign[:, 0].tolist() == [1, -1]
    assert sum_dims(FIELD, mixed, [1]).sign.tolist() == [1, -1] and sum_dims(FIELD, mixed, [0]).sign.tolist() == [0] * 3


def test_what_is_infinite_and_what_is_no_longer():
    for found, infinite in (
        (add(FIELD, LITTLE, X), -1),
        (add(FIELD, LITTLE, LITTLE), -1),
        (add(FIELD, LARGE, LITTLE), 0),
        (negate(FIELD, LITTLE), 1),
        (multiply(FIELD, LITTLE, POSITIVE), -1),
        (multiply(FIELD, LITTLE, NEGATIVE), 1),
        (multiply(FIELD, LITTLE, LITTLE), 1),
        (multiply(FIELD, X, LITTLE), 0),  # of unknown sign
        (multiply(FIELD, LITTLE, FIELD.lift(np.float32([[0]]))), 0),
        (invert(FIELD, LITTLE), 0),
        (sum_dims(FIELD, LITTLE, [1]), -1),
        (sum_dims(FIELD, where(np.array([True, False, False]), LITTLE, X), [1]), -1),
        (sum_dims(FIELD, where(np.array([True, False, False]), LITTLE, LARGE), [1]), 0),
        (sum_dims(FIELD, where(np.array([True, False, False]), X, LARGE), [1]), 1),
        (exp(FIELD, LITTLE), 0),
    ):
        assert (found.infinite == infinite).all()
    assert not exp(FIELD, LITTLE).number.any() and exp(FIELD, LARGE).number.all()
    same = find_equal(FIELD, where(np.array([True, False, False]), LITTLE, X), X)
    assert same[0].tolist() == [False, True, True]
    # As results they are numbers: -1e9 exp(x) is not -1e9 exp(y).
    assert not find_equal(FIELD, LITTLE, add(FIELD, LITTLE, X)).any()
    truly = FIELD.lift(np.float32([[-np.inf] * 3] * 2))
    assert find_equal(FIELD, truly, add(FIELD, truly, X)).all()


def one(value):
    return FIELD.lift(np.float32([[value]]))


# What each must be in floats, and is: a number, infinite, or none.
def test_what_is_no_number():
    up, down, nan, zero = one(np.inf), one(-np.inf), one(np.nan), one(0)
    unknown = X.move(lambda part: part[:, :1, :1])
    for value, poison, infinite in (
        (add(FIELD, up, down), NOT_A_NUMBER, 0),
        (subtract(FIELD, up, up), NOT_A_NUMBER, 0),
        (add(FIELD, up, unknown), 0, TRULY),
        (add(FIELD, down, one(1e30)), 0, -TRULY),
        (multiply(FIELD, zero, up), NOT_A_NUMBER, 0),
        (multiply(FIELD, zero, nan), NOT_A_NUMBER, 0),
        (multiply(FIELD, zero, invert(FIELD, zero)), NOT_A_NUMBER, 0),
        (multiply(FIELD, one(-2), up), 0, -TRULY),
        (multiply(FIELD, one(1e30), zero), 0, 0),
        (invert(FIELD, zero), 0, TRULY),
        (invert(FIELD, down), 0, 0),
        (exp(FIELD, down), 0, 0),
        (exp(FIELD, up), 0, TRULY),
        (log(FIELD, zero), 0, -TRULY),
        (log(FIELD, negate(FIELD, exp(FIELD, unknown))), NOT_A_NUMBER, 0),
        (power(FIELD, down, 2), 0, TRULY),
        (power(FIELD, down, 3), 0, -TRULY),
        (power(FIELD, down, -1), 0, 0),
        (power(FIELD, nan, 0), 0, 0),
        (apply_function(FIELD, "tanh", up), 0, 0),
        (apply_function(FIELD, "sin", up), NOT_A_NUMBER, 0),
        (apply_function(FIELD, "tanh", nan), NOT_A_NUMBER, 0),
        (sum_dims(FIELD, where(np.array([[True, False]]), up, down), [1]), NOT_A_NUMBER, 0),
        (sum_dims(FIELD, where(np.array([[True, False]]), up, unknown), [1]), 0, TRULY),
        (matmul(FIELD, where(np.array([[True, False]]), up, one(1)), ones(2)), 0, TRULY),
        (matmul(FIELD, where(np.array([[True, False]]), up, down), ones(2)), NOT_A_NUMBER, 0),
        (matmul(FIELD, where(np.array([[True, False]]), up, zero), subtract(FIELD, ones(2), ones(2))), NOT_A_NUMBER, 0),
        (where(np.array([[False]]), nan, unknown), 0, 0),
    ):
        assert (value.poison.reshape(-1)[0], value.infinite.reshape(-1)[0]) == (poison, infinite)
    assert not invert(FIELD, down).number.any() and np.isnan(find_keys(FIELD, nan)).all()
    assert find_equal(FIELD, nan, add(FIELD, up, down)).all() and not find_equal(FIELD, nan, unknown).any()
    assert not find_equal(FIELD, up, down).any() and not find_equal(FIELD, up, one(1e30)).any()


def ones(n):
    return FIELD.lift(np.ones((n, 1), np.float32))


def test_what_is_outside_of_a_functions_domain_in_a_draw_is_not_compared():
    below = Field(Settings(2, 7))
    x = draw_input(below, "x", (50,))
    outside = log(below, x).poison == OUTSIDE
    np.testing.assert_array_equal(outside, x.real[0] < 0)
    np.testing.assert_array_equal(square_root(below, x).poison == OUTSIDE, x.real[0] < 0)
    assert find_equal(below, log(below, x), log(below, negate(below, x))).all() and outside.any() and not outside.all()
    ordered = Field(Settings(2, 7, order=0))  # in an order nothing is drawn: logarithms are of positive numbers
    assert not log(ordered, draw_input(ordered, "x", (50,))).poison.any()
    alike = Field(Settings(2, 7, kind="zero"))
    assert (invert(alike, draw_input(alike, "x", (3,))).poison == OUTSIDE).all()


def test_the_real_values_of_a_draw_are_those_of_floats():
    field = Field(Settings(2, 7))
    x, y = draw_input(field, "x", (2, 3)), draw_input(field, "y", (2, 3))
    a, b = x.real[0], y.real[0]
    for value, wanted in (
        (add(field, x, y), a + b),
        (multiply(field, x, negate(field, y)), -a * b),
        (invert(field, x), 1 / a),
        (exp(field, x), np.exp(a)),
        (to_number(field, log(field, exp(field, x))), a),
        (power(field, x, -3), a**-3.0),
        (sum_dims(field, x, [1]), a.sum(1)),
        (matmul(field, x, y.move(lambda part: part.swapaxes(-1, -2))), a @ b.T),
        (apply_function(field, "tanh", x), np.tanh(a)),
        (apply_function(field, "atan2", x, y), np.arctan2(a, b)),
        (from_bits(field, to_bits(field, x, "float32"), "float32"), a),
        (field.lift(np.float32([0.1, 1 / 3])), np.array([0.1, 1 / 3])),
    ):
        np.testing.assert_allclose(value.real[0], wanted, rtol=1e-13)
    kinds = {
        kind: draw_input(Field(Settings(2, 7, kind=kind)), "x", (64,))
        for kind in ("positive", "unit", "wide", "alike", "repeated")
    }
    assert (kinds["positive"].real > 0).all() and np.abs(kinds["wide"].real).max() > 20
    assert ((kinds["unit"].real > 0) & (kinds["unit"].real < 1)).all()
    assert len(np.unique(kinds["alike"].number, axis=1).T) == 1
    repeated = kinds["repeated"]
    zero = repeated.real[0] == 0
    assert zero.any() and not repeated.number[:, zero].any() and len(np.unique(repeated.real)) < 60
    with pytest.raises(UnknownValueError):
        find_keys(field, exp(field, exp(field, field.lift(np.float32([100.0])))))


def test_the_square_of_a_root_is_what_it_is_of():
    field = Field(Settings(2, 7, order=0))
    x = draw_input(field, "x", (3,))
    root = square_root(field, x)
    assert (
        find_equal(field, power(field, root, 2), x).all()
        and find_equal(field, power(field, root, 4), power(field, x, 2)).all()
    )
    assert find_equal(field, power(field, root, -2), invert(field, x)).all()
    assert find_equal(field, power(field, root, 3), multiply(field, x, root)).all()
    assert not find_equal(field, multiply(field, root, square_root(field, negate(field, x))), x).any()


# A comparison with zero missed the tie: the square of such a logarithm was a positive number for x = 0.
def test_the_logarithm_of_a_one_that_was_computed_from_a_logarithm_is_zero():
    field = Field(Settings(2, 7, log_depth=4))
    is_zero = np.array([[True, False, False], [False, True, False]])
    x = where(is_zero, field.lift(np.zeros((2, 3), np.float32)), X)
    for _ in range(3):
        x = log(field, add(field, log(field, exp(field, x)), field.lift(np.ones((1, 1), np.float32))))
        assert (field.is_zero(multiply(field, x, x)) == is_zero).all() and field.notes.logs
    # a log(x y) - a log(x) - a log(y) + 1 is 1, but modulo the highest prime.
    field = Field(Settings(2, 7, kind="positive"))
    a, x, y = (draw_input(field, name, (2, 3)) for name in ("a", "x", "y"))
    total = field.lift(np.ones((1, 1), np.float32))
    for sign, z in ((1, multiply(field, x, y)), (-1, x), (-1, y)):
        term = multiply(field, a, log(field, z))
        total = add(field, total, term if sign > 0 else negate(field, term))
    assert not (total.number == 1).all() and field.is_zero(to_number(field, log(field, total))).all()


# Each took the same highest prime, so that two forms of log(log(x) + 1) y differed in the next one.
def test_each_logarithm_of_a_logarithm_takes_a_prime():
    field = Field(Settings(2, 7, kind="positive", log_depth=2))
    x, y = (draw_input(field, name, (2, 3)) for name in ("x", "y"))
    one = field.lift(np.ones((1, 1), np.float32))
    log_of_product = multiply(field, log(field, multiply(field, x, y)), y)
    sum_of_logs = add(field, multiply(field, log(field, x), y), multiply(field, log(field, y), y))
    forms = []
    for inner in (log_of_product, sum_of_logs):
        assert inner.degree.log_depth == 1
        outer = multiply(field, log(field, add(field, inner, one)), y)
        assert outer.degree.log_depth == 2 and exp(field, outer).degree.log_depth == 1
        assert apply_function(field, "f", y, outer).degree.log_depth == invert(field, outer).degree.log_depth == 2
        forms.append(outer)
    first, second = forms
    assert find_equal(field, first, second).all() and field.end_level == LEVELS - 2
    differ = (first.number != second.number).any((1, 2))
    assert differ.tolist() == [False] * 2 * (LEVELS - 2) + [True] * 4
    assert (find_keys(field, first) == find_keys(field, second)).all()
    with pytest.raises(NestedLogarithmsError):
        multiply(field, log(field, first), y)


def test_the_primes_that_exps_use_up():
    field = Field(Settings(2, 7))
    once, twice = exp(field, X), exp(field, exp(field, X))
    assert (once.used == 1).all() and (twice.used == 2).all()
    for found in (
        add(field, once, twice),
        subtract(field, X, twice),
        multiply(field, twice, once),
        invert(field, twice),
        apply_function(field, "f", once, twice),
        matmul(field, once, twice.move(lambda part: part.swapaxes(-1, -2))),
        sum_dims(field, twice, [1]),
        to_bits(field, twice, "float32"),
    ):
        assert (found.used == 2).all() and not found.factor_used.any()
    assert add(field, log(field, once), log(field, twice)).both_used[:, 0, 0].tolist() == [0, 2]
    logs = log(field, twice)
    assert (logs.used == 0).all() and (logs.factor_used == 2).all()
    assert (exp(field, logs).used == 2).all()  # exp(log x) is x again
    assert not field.notes.logs and (to_number(field, logs).used == 1).all() and field.notes.logs
    assert exp(field, LITTLE).used.tolist() == [[0] * 3] * 2  # a zero
    valid = Field(Settings(2, 7)).valid(np.array([0, 3], np.int8))
    assert valid[:, 0].all() and valid[:, 1].tolist() == [False] * 6 + [True] * (2 * LEVELS - 6)
    assert field.valid(np.array([0]))[:, 0].tolist() == [True] * (2 * LEVELS - 2) + [False] * 2


def test_exps_and_logarithms_keep_their_laws_and_no_other():
    field = Field(Settings(2, 7, order=0))
    both = exp(field, add(field, X, Y)), multiply(field, exp(field, X), exp(field, Y))
    assert find_equal(field, *both).all()
    valid = field.valid(both[0].used)
    np.testing.assert_array_equal(both[0].number[valid], both[1].number[valid])
    assert find_equal(field, exp(field, log(field, X)), X).all()
    product = log(field, multiply(field, X, Y))
    assert find_equal(field, product, add(field, log(field, X), log(field, Y))).all()
    assert not find_equal(field, product, add(field, log(field, X), log(field, X))).any()
    assert find_equal(
        field,
        multiply(field, log(field, X), field.lift(np.float32([[-3]]))),
        log(field, invert(field, multiply(field, X, multiply(field, X, X)))),
    ).all()
    plain = to_number(field, where(np.array([True, False, False]), log(field, ONE), X))
    np.testing.assert_array_equal(plain.number[:, :, 1:], X.number[:, :, 1:])
    # No logarithm became a number yet: those of 1 are zero.
    assert not plain.number[:, :, 0].any() and not field.notes.logs
    third = multiply(field, log(field, exp(field, X)), field.lift(np.float32([[1 / 3]])))
    assert field.notes.logs and find_equal(field, third, multiply(field, X, field.lift(np.float32([[1 / 3]])))).all()
    assert to_number(field, log(field, field.lift(np.float32([2, 2])))).number[0].all()  # that of 2 is not
    for level in (0, 3, LEVELS - 2):
        p, q = PRIMES[level : level + 2]
        exponents = [1, 5, p - 1, 5, 0, *range(2**19 - 40, 2**19 + 40)]  # more than are searched for at a time
        powers = np.array([pow(4, exponent, q) for exponent in exponents], np.uint64)
        assert find_logarithms(level, powers.reshape(5, -1)).ravel().tolist() == exponents


def test_the_bound_is_that_of_the_largest_prime_that_is_compared():
    field = Field(Settings(1, 3))
    x = draw_input(field, "x", (5,))
    assert field.variety == PRIMES[-1] - 1
    # A polynomial of this degree is one at every power: the bound must say so.
    power = exp(field, x)
    order = PRIMES[-2]
    assert all(pow(int(value), order, PRIMES[-1]) == 1 for value in power.number[-1])
    assert Field(Settings(1, 3)).chance(Degree(order)) < 1 and field.chance(Degree(order)) == 1
    assert field.variety == PRIMES[-2] - 1
    # What a logarithm becomes has no component of the largest prime.
    to_number(field, log(field, x))
    assert field.variety == PRIMES[-3] - 1
    only_logs = Field(Settings(1, 3))
    to_number(only_logs, log(only_logs, draw_input(only_logs, "x", (5,))))
    assert only_logs.variety == PRIMES[-2] - 1


def test_points_that_are_drawn_again_are_more_chances():
    field = Field(Settings(2, 3))
    often = Degree(1, {1: (1, PRIMES[0] // 16)})  # a divisor that is zero at one in eight draws of two points
    rare = Degree(1 + PRIMES[0] // 16)
    assert field.chance(often) == pytest.approx(field.chance(rare) / (1 - 2 * 2 / 16), rel=1e-3)
    always = Degree(1, {1: (1, PRIMES[0])})
    assert field.chance(always) == pytest.approx(SEEDS * ((1 + PRIMES[0]) / (PRIMES[-1] - 1)) ** 2)


def test_the_square_of_a_root_has_the_degree_of_what_it_is_the_root_of():
    field = Field(Settings(1, 3))
    tenth = power(field, draw_input(field, "x", (5,)), 10)
    assert power(field, square_root(field, tenth), 2).degree.total >= 10


def test_degrees_bound_the_chance_of_a_wrong_verdict():
    """Too low a bound claims too much."""
    field = Field(Settings(1, 3))
    x, y = draw_input(field, "x", (5,)), draw_input(field, "y", (5,))
    square = multiply(field, x, x)
    assert [each.degree.total for each in (x, ONE, add(field, square, y), add(field, y, square))] == [1, 0, 2, 2]
    assert (
        multiply(field, square, y).degree.total == 3
        and matmul(field, x.move(lambda part: part[:, None]), square.move(lambda part: part[:, :, None])).degree.total
        == 3
    )
    once = invert(field, square)  # five divisors of degree 2
    assert once.degree == Degree(1, {1: (1, 10)}) and invert(field, field.lift(np.float32(2))).degree == CONSTANT
    cubed = multiply(field, once, multiply(field, once, invert(field, y))).degree
    assert cubed == Degree(3, {1: (2, 10), 2: (1, 5)}) and cubed.to_the(2) == Degree(6, {1: (4, 10), 2: (2, 5)})
    assert once.degree.plus(cubed) == cubed.plus(once.degree) == cubed
    assert field.chance(cubed) == pytest.approx((3 + 2 * 10 + 5) / (PRIMES[-1] - 1), rel=1e-5)
    assert Field(Settings(3, 3)).chance(cubed) == pytest.approx((28 / (PRIMES[-1] - 1)) ** 3, rel=1e-5)
    assert field.chance(Degree(2 * PRIMES[-1])) == 1
    assert exp(field, square).degree == apply_function(field, "f", square).degree == log(field, x).degree == INPUT
    assert (
        exp(field, field.lift(np.float32(2))).degree == CONSTANT
        and exp(field, add(field, log(field, square), x)).degree.total == 3
    )
    assert to_number(field, log(field, square)).degree.total == 2 and where(np.ones(5, bool), x, square).degree == INPUT
    masked = where(np.arange(5) > 2, x, square)
    assert masked.degree.total == 2 and where(np.zeros(5, bool), square, x).degree == INPUT
    first = to_bits(field, square, "float32")
    assert first.degree == INPUT and from_bits(field, first, "float32").degree.total == 2
    to_bits(field, x, "float32")
    assert from_bits(field, first, "float32").degree.total == 2  # of all that were ever sent as bits


def test_bits_come_back_and_others_are_no_number():
    field = Field(Settings(2, 7))
    sent = to_bits(field, POSITIVE, "float32")
    back = from_bits(field, sent, "float32")
    np.testing.assert_array_equal(back.number, X.number)
    np.testing.assert_array_equal(back.facts, POSITIVE.facts)
    zero = from_bits(field, field.lift(np.zeros((2, 3), np.int32)), "float32")
    assert not zero.number.any() and not zero.facts.any()
    other = from_bits(field, add(field, sent, field.lift(np.ones((1, 1), np.int32))), "float32")
    assert not (other.number == X.number).all(0).any() and field.notes.uninterpreted == {"of bits"}
    assert not (sent.number == to_bits(field, Y, "float32").number).all(0).any()


def test_functions_are_told_apart_by_name_by_arguments_and_by_their_order():
    field = Field(Settings(2, 7))
    f = apply_function(field, "f", X, Y)
    assert find_equal(field, f, apply_function(field, "f", X, Y)).all() and field.notes.uninterpreted == {"f"}
    for other in (
        apply_function(field, "f", Y, X),
        apply_function(field, "g", X, Y),
        apply_function(field, "f", X, X),
        apply_function(field, "f", X),
    ):
        assert not find_equal(field, f, other).any()
    # the points and the primes have values of their own
    assert len(np.unique(X.number[:2].reshape(-1))) == 12 and len(np.unique(f.number[:, 0, 0])) == 2 * LEVELS
    assert not (draw_input(Field(Settings(2, 8)), "x", (2, 3)).number == X.number).any(0).any()
    assert (X.number > 0).all() and (X.number < FIELD.residues.primes_of(X.number)).all()


def keys(order, *values):
    field = Field(Settings(2, 7, order=order))
    return [find_keys(field, x) for x in values], field


def test_the_four_orders_turn_round_every_comparison_that_is_not_decided():
    """A comparison that goes one way in all orders leaves a branch out of the proof."""
    x, y = X, Y
    above = []
    for order in ORDERS:
        (a, b, minus_a, minus_b, positive, negative, zero), field = keys(
            order, x, y, negate(FIELD, x), negate(FIELD, y), POSITIVE, NEGATIVE, subtract(FIELD, x, x)
        )
        assert field.notes.compared == 7
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
    (a, b), _ = keys(order, POSITIVE, Y.with_sign(1))
    return a > b


def test_constants_stand_in_their_own_order_and_infinity_outside():
    values = np.float32([-1e9, -7, -0.5, 0, 1e-3, 1 / 3, 0.5, 2, 1000, 1e9])
    for order in ORDERS:
        [found], _ = keys(order, FIELD.lift(values))
        assert (np.diff(found) > 0).all() and found[3] == 0
        [unknown], _ = keys(order, draw_input(FIELD, "many", (50,)))
        assert (found[0] < unknown).all() and (unknown < found[-1]).all() and (unknown != 0).all()
    with pytest.raises(TooDeepError):
        find_keys(
            FIELD, X.with_sign(0).move(lambda part: part + np.int8(LEVELS - 1) if part.dtype == np.int8 else part)
        )


def test_a_divisor_that_is_zero_at_one_point_alone_is_drawn_again():
    field = Field(Settings(2, 7))
    always = np.zeros((2 * LEVELS, 1), np.uint64)
    once = np.ones((2 * LEVELS, 2), np.uint64)
    once[5, 1] = 0
    with pytest.raises(RedrawError):
        field.invert_residues(once, np.zeros(2, np.int8))
    meaningless = field.invert_residues(once, np.full(2, 3, np.int8))  # that component has no meaning after three exps
    np.testing.assert_array_equal(np.delete(meaningless, 5, 0), np.delete(once, 5, 0))
    zero = field.invert_residues(np.concatenate([always, once[:, :1]], 1), np.zeros(2, np.int8))
    np.testing.assert_array_equal(zero[:, 0], field.residues.salt("1/0") % field.residues.moduli)
    np.testing.assert_array_equal(zero[:, 1], 1)


def test_a_whole_number_a_mask_and_what_is_neither():
    for values, wanted in (
        ([3.0, 3.0], 3), ([-64.0], -64), ([65.0], None), ([0.5], None), ([1.0, 2.0], None), ([0.0], 0), ([], None)
    ):  # fmt: skip
        assert find_whole_number(FIELD, FIELD.lift(np.float32(values))) == wanted
    assert find_whole_number(FIELD, X) is None and find_whole_number(FIELD, log(FIELD, ONE)) is None
    field = Field(Settings(2, 7, order=0))
    masked = multiply(field, log(field, X), field.lift(np.float32([[1, 0, 1]])))
    assert masked.factor is not None and not field.notes.logs
    np.testing.assert_array_equal(masked.factor, np.where([True, False, True], X.number, np.uint64(1)))
    assert masked.degree == INPUT


# Above all, below all, or among them about one that was compared: what lies between two constants is met.
def test_unknown_numbers_stand_on_every_side_of_constants():
    places = set()
    for order in range(24):
        field = Field(Settings(2, 7, order=order))
        field.choices.centres = (float(np.log(0.8)), float(np.log(1.2)))
        positive = exp(field, draw_input(field, "x", ()))
        low, high = (find_keys(field, field.lift(np.float32(value))) for value in (0.8, 1.2))
        assert low < high
        places.add((bool(find_keys(field, positive) > low), bool(find_keys(field, positive) > high)))
    assert places == {(False, False), (True, False), (True, True)}


def test_facts_have_a_row_each():
    rows = build_facts((2,), -1, TRULY, 2, 3, OUTSIDE, never_zero=1)
    assert rows.tolist() == [[-1] * 2, [1] * 2, [2] * 2, [2] * 2, [3] * 2, [2] * 2]
    assert (HUGE, TRULY, NOT_A_NUMBER, OUTSIDE) == (1, 2, 1, 2)


def test_notes_of_another_field():
    """What the run of one side noted in a field of its own is noted here too: of an exp, how few values it has."""
    field, other = Field(Settings(1, 3)), Field(Settings(1, 3))
    exp(other, draw_input(other, "x", (2,)))
    field.add_notes(other, [ALONE])
    assert field.notes.exps
    assert field.variety == other.variety
