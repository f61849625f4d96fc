"""Square roots in a proof for all inputs: right forms of one function are equal, and near ones are not."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.testing import assert_equal_for_all_inputs
from shardkit.testing.exact.equality import UnprovableError
from shardkit.testing.exact.interpreter import Interpreter
from shardkit.testing.exact.numbers.arithmetic import invert, multiply, power
from shardkit.testing.exact.numbers.field import Field, Settings
from shardkit.testing.exact.numbers.inputs import draw_input
from shardkit.testing.exact.numbers.logarithms import exp as exact_exp
from shardkit.testing.exact.numbers.orders import find_equal
from shardkit.testing.exact.numbers.square_roots import square_root

sqrt, rsqrt, exp = jnp.sqrt, lax.rsqrt, jnp.exp


def equal(left, right, shape=(4, 4), grad=True):
    count = len(inspect.signature(right).parameters)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32)] * count
    mesh = sk.abstract_mesh(data=2)
    spec = P("data")
    return assert_equal_for_all_inputs(left, right, mesh=mesh, in_specs=spec, out_specs=spec, args=args, grad=grad)


def root(x):  # of one argument by its signature, as jnp.sqrt is not before jax 0.12
    return jnp.sqrt(x)


def mean_square(x):
    return (x * x).mean(-1, keepdims=True) + 1e-6


def norm(x):
    return sqrt((x * x).sum(-1, keepdims=True))


def unit(x):
    return x / norm(x)


def rms_norm(x):
    return x / sqrt(mean_square(x))


def with_backward(backward):
    """rms_norm with a gradient that is written by hand."""

    @jax.custom_vjp
    def function(x):
        return rms_norm(x)

    def forward(x):
        r = rsqrt(mean_square(x))
        return x * r, (x, r)

    function.defvjp(forward, backward)
    return function


def cubed(residuals, g):
    x, r = residuals
    return (r * g - x * r**3 * (g * x).mean(-1, keepdims=True),)


def projected(residuals, g):
    x, r = residuals
    y = x * r
    return (r * (g - y * (g * y).mean(-1, keepdims=True)),)


def not_projected(residuals, g):
    x, r = residuals
    return (r * g - x * r**2 * (g * x).mean(-1, keepdims=True),)


MASK, ORDER = np.array([[1, 0, 1, 0]], bool), np.array([3, 0, 0])
RIGHT = {
    "x / sqrt(x)": (lambda x: x / sqrt(x), root),
    "x rsqrt(x)": (lambda x: x * rsqrt(x), root),
    "rsqrt(x)**2 x": (lambda x: rsqrt(x) ** 2 * x, lambda x: jnp.ones_like(x)),
    "sqrt(1 / x)": (lambda x: sqrt(1 / x), lambda x: rsqrt(x)),
    "sqrt(x y)": (lambda x, y: sqrt(x * y), lambda x, y: sqrt(x) * sqrt(y)),
    "sqrt(x) sqrt(y)": (lambda x, y: sqrt(x) * sqrt(y), lambda x, y: sqrt(x * y)),
    "sqrt(x / y)": (lambda x, y: sqrt(x / y), lambda x, y: sqrt(x) / sqrt(y)),
    "sqrt(x) / sqrt(y)": (lambda x, y: sqrt(x) / sqrt(y), lambda x, y: sqrt(x / y)),
    "sqrt(x y z)": (lambda x, y, z: sqrt(x * y * z), lambda x, y, z: sqrt(x) * (sqrt(y) * sqrt(z))),
    "sqrt(x y) sqrt(x)": (lambda x, y: sqrt(x * y) * sqrt(x), lambda x, y: x * sqrt(y)),
    "a geometric mean": (lambda x, y: sqrt(x * y) / sqrt(x), lambda x, y: sqrt(y)),
    "sums of multiples": (lambda x: x / sqrt(x) + sqrt(x), lambda x: 2 * sqrt(x)),
    "sqrt(4 x)": (lambda x: sqrt(4 * x), lambda x: 2 * sqrt(x)),
    "2 sqrt(x)": (lambda x: 2 * sqrt(x), lambda x: sqrt(4 * x)),
    "the root of a mean": (lambda x: sqrt((x * x).mean(-1)), lambda x: norm(x)[:, 0] / 2),
    "sqrt(exp(2 x))": (lambda x: sqrt(exp(2 * x)), lambda x: exp(x)),
    "rsqrt(exp(x) exp(y))": (lambda x, y: rsqrt(exp(x) * exp(y)), lambda x, y: exp(-(x + y) / 2)),
    "exp(x)**0.3": (lambda x: exp(x) ** 0.3, lambda x: exp(0.3 * x)),
    "exp(x)**0.1": (lambda x: exp(x) ** 0.1, lambda x: exp(x / 10)),
    "sqrt of one of two exps": (
        lambda x, y: sqrt(jnp.where(MASK, exp(x), exp(y))),
        lambda x, y: jnp.where(MASK, exp(x / 2), exp(y / 2)),
    ),
    "sqrt of exps beside each other": (
        lambda x, y: sqrt(jnp.concatenate([exp(x), exp(y)], 1)),
        lambda x, y: exp(jnp.concatenate([x, y], 1) / 2),
    ),
    "sqrt of exps of a table": (lambda x: sqrt(exp(x)[:, ORDER]), lambda x: exp(x / 2)[:, ORDER]),
    "exp(x)**-0.3": (lambda x: exp(x) ** -0.3, lambda x: exp(-0.3 * x)),
    "x**-0.5": (lambda x: x**-0.5, lambda x: 1 / sqrt(x)),
    "x**1.5": (lambda x: x**1.5, lambda x: x * sqrt(x)),
    "x**2.5 / x": (lambda x: x**2.5 / x, lambda x: x**1.5),
    "x**0.25": (lambda x: x**0.25, lambda x: sqrt(sqrt(x))),
    "(x**0.25)**4": (lambda x: (x**0.25) ** 4, lambda x: x),
    "x**0.75": (lambda x: x**0.75, lambda x: sqrt(x) * x**0.25),
    "log(sqrt(x))": (lambda x: jnp.log(sqrt(x)), lambda x: jnp.log(x) / 2),
    "a norm by rsqrt": (lambda x: x * rsqrt(mean_square(x)), rms_norm),
    "a norm by a power": (lambda x: x * mean_square(x) ** -0.5, rms_norm),
    "a gradient with r**3": (with_backward(cubed), rms_norm),
    "a gradient of projections": (with_backward(projected), rms_norm),
    "the norm of what has norm 1": (lambda x: norm(unit(x)), lambda x: jnp.ones_like(x[:, :1])),
    "unit of unit": (lambda x: unit(unit(x)), unit),
    "norms by pieces": (lambda x: sqrt(norm(x[:, :1]) ** 2 + norm(x[:, 1:]) ** 2), norm),
    "a cosine": (
        lambda x, y: (unit(x) * unit(y)).sum(-1),
        lambda x, y: (x * y).sum(-1) / sqrt((x * x).sum(-1) * (y * y).sum(-1)),
    ),
    "a product of matrices": (
        lambda x: unit(x) @ np.ones((4, 2), "f") * norm(x),
        lambda x: x @ np.ones((4, 2), "f"),
    ),
}
WRONG = {
    "sqrt(x**2) is |x|": (lambda x: sqrt(x * x), lambda x: x),
    "sqrt(x**4)": (lambda x: sqrt(x**4), lambda x: x * x * x),
    "sqrt(x**2 y) is |x| sqrt(y)": (lambda x, y: sqrt(x * x * y), lambda x, y: x * sqrt(y)),
    "-x / sqrt(x)": (lambda x: -x / sqrt(x), root),
    "a sum": (lambda x, y: sqrt(x + y), lambda x, y: sqrt(x) + sqrt(y)),
    "the square of a sum": (lambda x, y: (sqrt(x) + sqrt(y)) ** 2, lambda x, y: x + y),
    "sqrt(x) sqrt(y)": (lambda x, y: sqrt(x) * sqrt(y), lambda x, y: x * y),
    "sqrt(x) / sqrt(y)": (lambda x, y: sqrt(x) / sqrt(y), lambda x, y: sqrt(x * y)),
    "rsqrt(x) sqrt(x)": (lambda x: rsqrt(x) * sqrt(x), lambda x: x),
    "sqrt(2 x)": (lambda x: sqrt(2 * x), lambda x: 2 * sqrt(x)),
    "sqrt(16 x)": (lambda x: sqrt(16 * x), lambda x: 2 * sqrt(x)),
    "sqrt(exp(x))": (lambda x: sqrt(exp(x)), lambda x: exp(x)),
    "sqrt(exp(x) + 1)": (lambda x: sqrt(exp(2 * x) + 1), lambda x: exp(x) + 1),
    "sqrt((-exp(x))**2)": (lambda x: sqrt((-exp(x)) ** 2), lambda x: -exp(x)),
    "0 sqrt(-exp(x))": (lambda x: x + 0 * sqrt(-exp(x)), lambda x: x),
    "exp(x)**0.3": (lambda x: exp(x) ** 0.3, lambda x: exp(0.300001 * x)),
    "x**1.5": (lambda x: x**1.5, lambda x: x * x),
    "x**-1.5": (lambda x: x**-1.5, lambda x: x**1.5),
    "x**0.25": (lambda x: x**0.25, root),
    "log(sqrt(x))": (lambda x: jnp.log(sqrt(x)), lambda x: jnp.log(x)),
    "another epsilon": (rms_norm, lambda x: x / sqrt((x * x).mean(-1, keepdims=True))),
    "a gradient with r**2": (with_backward(not_projected), rms_norm),
    # Both sides are numbers where x and y are negative, and of opposite signs: a law of positive numbers is none there.
    "y sqrt(x / y)": (
        lambda x, y: jnp.concatenate([sqrt(x) * sqrt(y), y * sqrt(x / y)], 1),
        lambda x, y: jnp.concatenate([sqrt(x) * sqrt(y), sqrt(x * y)], 1),
    ),
    "y sqrt(x / y), the other way round": (
        lambda x, y: jnp.concatenate([sqrt(x * y), sqrt(x) * sqrt(y)], 1),
        lambda x, y: jnp.concatenate([y * sqrt(x / y), sqrt(x) * sqrt(y)], 1),
    ),
    # In float64 both agree for all inputs that are drawn: not decided, which is no proof.
    "sqrt((x - 90)**2)": (lambda x: sqrt((x - 90) ** 2), lambda x: 90 - x),
}


# proves N49: the laws of square roots, in values and gradients
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_the_same_root(name):
    assert equal(*RIGHT[name]).chance < 1e-12


# Of one element, the square of a root took the root's place in the array itself: its second use was that of log(x).
def test_the_logarithm_of_one_root_is_used_twice():
    def halves(x, y):
        logarithm = jnp.log(sqrt(x))
        return y * logarithm + y * y * logarithm

    args = [jax.ShapeDtypeStruct((), jnp.float32)] * 2
    mesh = sk.abstract_mesh(data=2)
    settings = {"mesh": mesh, "in_specs": P(), "out_specs": P(), "args": args, "grad": False}
    assert assert_equal_for_all_inputs(halves, lambda x, y: (y + y * y) * jnp.log(x) / 2, **settings)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_another_root(name):
    with pytest.raises((AssertionError, UnprovableError), match=r"is not the reference's|not decided: the result"):
        equal(*WRONG[name])


# What the laws of roots alone would not prove: by them 1 / h is h / y, and h**2 / y is not 1 in a sum.
@pytest.mark.parametrize(
    ("left", "right"),
    [
        (lambda x, y: (x + sqrt(y)) / sqrt(y), lambda x, y: x / sqrt(y) + 1),
        (lambda x, y: (x + 1 / sqrt(y)) * sqrt(y), lambda x, y: x * sqrt(y) + 1),
    ],
)
def test_sums_over_roots(left, right):
    equal(left, right, grad=False)


def test_roots_that_a_device_receives():
    """A collective moves ids as it moves numbers: x / sqrt(x) is computed of the neighbour's root."""

    def neighbour(x):
        return lax.ppermute(x, "data", [(0, 1), (1, 0)])

    def swapped(x):
        return jnp.concatenate([x[2:], x[:2]])

    equal(lambda x: neighbour(x) / neighbour(sqrt(x)), lambda x: swapped(sqrt(x)))
    with pytest.raises(AssertionError, match="is not the reference's"):
        equal(lambda x: x / neighbour(sqrt(x)), lambda x: swapped(sqrt(x)))


def test_the_degrees_of_roots():
    """Too low a bound claims too much: that of a product is not lost where a law replaces it."""
    field = Field(Settings(1, 3, laws_of_roots=True))
    x = draw_input(field, "x", (5,))
    tenth = power(field, x, 10)
    root = square_root(field, tenth)
    assert multiply(field, root, root).degree.total >= 10
    inverse = invert(field, root)
    assert sum(weight for _, weight in inverse.degree.inverses.values()) >= 5 * 10
    assert find_equal(field, multiply(field, inverse, tenth), root).all()
    assert square_root(field, invert(field, tenth)).degree.inverses


def test_the_degrees_of_products_of_roots():
    """A product of three roots has the degree of three, and is the root of a product of three numbers."""
    field = Field(Settings(1, 3, laws_of_roots=True))
    roots = [square_root(field, power(field, draw_input(field, name, ()), 2)) for name in "xyz"]
    product = multiply(field, multiply(field, *roots[:2]), roots[2])
    other = square_root(field, power(field, multiply(field, product, product), 1))
    assert find_equal(field, other, product).all()
    assert other.degree.total >= 3
    assert field.laws.roots.degree_of_squares.total >= 3 * 2


def test_numbers_of_divisions_with_the_laws_of_roots():
    """What was divided by before, and what is with the laws, are not one division."""
    field = Field(Settings(1, 3))
    x = draw_input(field, "x", (2,))
    before = invert(field, x).degree
    with_laws = field.with_laws_of_roots()
    after = invert(with_laws, draw_input(with_laws, "x", (2,))).degree
    assert not before.inverses.keys() & after.inverses.keys()


def test_an_exponent_is_the_simplest_rational():
    """0.1 of float32 is a tenth, also in real values, by which comparisons are decided."""
    field = Field(Settings(1, 3, laws_of_roots=True))
    x = draw_input(field, "x", (2,))
    program = jax.make_jaxpr(lambda x: exp(x) ** 0.1)(np.ones(2, np.float32))
    [root] = Interpreter(field).run(program, [x])
    np.testing.assert_allclose(root.real, np.exp(x.real / 10), rtol=1e-14)


# As long as no law of roots is asked for, the root of an exp is one like any other, whatever it was taken of.
def test_powers_without_the_laws_of_roots():
    field = Field(Settings(1, 3))
    x = square_root(field, exact_exp(field, draw_input(field, "x", (2,))))
    assert not x.is_power
