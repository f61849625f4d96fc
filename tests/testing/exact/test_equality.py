"""assert_equal_for_all_inputs: what it says it has proved, the names of leaves, and what it refuses to prove."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.testing import assert_equal_for_all_inputs
from shardkit.testing.exact.certificate import ASSUMED
from shardkit.testing.exact.coverage import Coverage
from shardkit.testing.exact.decision import EQUALITY
from shardkit.testing.exact.draws import STEP, equal
from shardkit.testing.exact.evidence import UnprovableError
from shardkit.testing.exact.interpreter import Interpreter
from shardkit.testing.exact.numbers.errors import RedrawError
from shardkit.testing.exact.numbers.field import Field, Settings
from shardkit.testing.exact.numbers.inputs import draw_input
from shardkit.testing.exact.numbers.tower import PRIMES
from shardkit.testing.exact.size import check_size
from support.refusals import raises, refusals, refused, value_error

MESH = sk.abstract_mesh(data=2)
WHERE = "assert_equal_for_all_inputs"
X = np.ones((4, 2), "f")


def proved(kernel, reference=None, **options):
    layout = {"mesh": MESH, "in_specs": P("data"), "out_specs": P("data"), "args": (X,), "grad": False}
    return assert_equal_for_all_inputs(kernel, reference or kernel, **(layout | options))


def squared(x):
    return x * x


def wave(x):
    return jnp.sin(x) + jnp.tanh(x)


def halve(x, total):
    return lax.while_loop(lambda y: total(y * y) > 0.5, lambda y: y / 2, x)


# A loop that floats end has no gradient backwards: derivatives along an unknown direction are compared in its place.
def test_a_loop_that_floats_end_is_compared_forwards():
    def kernel(x):
        return halve(x, lambda y: lax.psum(y.sum(), "data"))

    def reference(x):
        return halve(x, jnp.sum)

    equality = proved(kernel, reference, grad=True)
    assert equality.what.endswith("values and forward derivatives, because a loop has no known end")
    with pytest.raises(AssertionError, match="the derivative of the result is not the reference's"):
        proved(lambda x: kernel(lax.stop_gradient(x)) + x - lax.stop_gradient(x), reference, grad=True)
    with pytest.raises(ValueError, match="Pure callbacks"):  # jax's own errors of other causes stay
        proved(lambda x: jax.pure_callback(np.sin, x, x), grad=True)


def by_neighbour(x):
    return x / jnp.roll(x, 1, 1) * jnp.roll(x, 1, 1)


def compared(f):
    return lambda x: jnp.maximum(f(x), -x)


# The identity holds but where the divisor is zero: that is said of programs without comparisons, and of others.
@pytest.mark.parametrize("around", (lambda f: f, compared), ids=("no comparison", "compared"))
def test_a_certificate_says_where_zero_divides_on_one_side_alone(around):
    words = "NaN on one side alone where a divisor is zero, or a logarithm's argument"
    assert words in str(proved(around(by_neighbour), around(lambda x: x)))
    assert words not in str(proved(around(by_neighbour)))


# proves N49: a certificate claims no more than was proved, and its chance is the bound of Schwartz and Zippel
def test_what_a_certificate_says():
    found = proved(squared)
    assert found[:3] == ("squared and squared, on mesh data=2, values", ("float32[4, 2]",), 3)
    assert found.uninterpreted == () and found.assumed == ASSUMED
    assert found.chance == pytest.approx((2 / (PRIMES[-1] - 1)) ** 3)
    two = proved(squared, points=1, grad=True)  # one is taken as two, which tell a constant from an unknown
    assert two.what.endswith(", values and gradients") and two.points == 2
    assert two.chance == pytest.approx((2 / (PRIMES[-1] - 1)) ** 2)
    product = proved(lambda x: x * x * x / 7, points=2)
    assert product.what.startswith("<lambda> and <lambda>") and product.chance == pytest.approx(
        (3 / (PRIMES[-1] - 1)) ** 2
    )
    other = proved(wave)
    assert other.uninterpreted == ("sin", "tanh") and str(other).splitlines() == [
        "equal for all inputs: wave and wave, on mesh data=2, values",
        "inputs: float32[4, 2]",
        f"3 points; the chance of a wrong verdict is at most {other.chance:.1g}",
        "uninterpreted: sin, tanh",
        *(f"assumed: {each}" for each in ASSUMED),
    ]
    assert "no function is uninterpreted" in str(found)
    assert json.loads(found.to_json()) == json.loads(json.dumps(found._asdict()))
    logs = proved(lambda x: 0.3 * jnp.log(x))
    assert logs.assumed == (*ASSUMED, "logarithms are of positive numbers")
    assert proved(partial(squared)).what.startswith("partial and partial")


# Arguments and results that are trees: each leaf is an unknown of its own, and is called by its path.
def test_leaves_of_trees_have_names():
    w = {"up": jax.ShapeDtypeStruct((4, 2), jnp.float32), "gain": jax.ShapeDtypeStruct((4,), jnp.float32)}
    args = {"w": w, "n": np.arange(4)}, jax.ShapeDtypeStruct((4,), jnp.float32)

    def kernel(tree, x, of=1.0):
        w = tree["w"]
        return {"y": (w["up"] * x[:, None], w["gain"] * x * of), "n": tree["n"] * 2}

    def proved(kernel, reference):
        mesh, options = MESH, {"in_specs": P("data"), "out_specs": P("data")}
        return assert_equal_for_all_inputs(kernel, reference, mesh=mesh, args=args, **options)

    assert proved(kernel, kernel).shapes == ("int32[4]", "float32[4]", "float32[4, 2]", "float32[4]")
    stopped = lambda tree, x: kernel(jax.tree.map(lax.stop_gradient, tree), x)  # noqa: E731
    for wrong, name in (
        (partial(kernel, of=2.0), "result y.1"),
        (lambda tree, x: kernel(tree, x) | {"n": tree["n"]}, "result n"),
        (stopped, "gradient of argument 0.w.gain"),
    ):
        message = refused(partial(proved, wrong, kernel), AssertionError)
        assert f"the {name} is not the reference's for all inputs" in message


# What the call is refused for, before anything is traced: else an axis that is not there is jax's error, or none.
@pytest.mark.check
def test_a_spec_that_does_not_fit_the_mesh_is_said_in_our_words():
    for specs in ((P("model"), P()), (P(), P("model"))):
        with value_error(
            "assert_equal_for_all_inputs: the spec P('model',) uses axis 'model', which the mesh does not have; its "
            "axes are 'data'. Use one of them, or add the axis to make_mesh."
        ):
            assert_equal_for_all_inputs(jnp.sin, jnp.sin, mesh=MESH, in_specs=specs[0], out_specs=specs[1], args=(X,))


def test_an_untiled_exchange_of_two_dims_has_no_derivative():
    def kernel(x):
        return lax.all_to_all(x, "data", 0, 1)

    options = {"in_specs": P("data"), "out_specs": P("data"), "args": (np.zeros((16, 3), "f"),)}
    mesh = sk.make_mesh(jax.devices()[:4], data=4)

    def reference(x):
        return x.reshape(4, 4, 3).transpose(1, 2, 0).reshape(12, 4)

    kernels = (lambda x: kernel(x).reshape(3, 4)), reference
    assert_equal_for_all_inputs(*kernels, mesh=mesh, grad=False, **options)
    message = refused(lambda: assert_equal_for_all_inputs(*kernels, mesh=mesh, **options))
    assert message.startswith(f"{WHERE}: an untiled all_to_all must have a split_axis that is its concat_axis")
    assert (
        message.endswith("has two axes. Pass tiled=True to it, or grad=False here.") and "test_equality.py:" in message
    )


def test_an_exchange_of_integers_needs_no_derivative():
    """Catches an exchange that is blamed for the error of a function."""

    @jax.custom_vjp
    def scale(x):
        return 2 * x

    def refuse(_, cotangent):
        raise ValueError("scale has no gradient")

    scale.defvjp(lambda x: (2 * x, None), refuse)

    def kernel(x, tokens):
        return scale(x) + lax.all_to_all(tokens, "data", 0, 1).sum().astype(x.dtype)

    x, tokens = np.zeros(4, "f"), np.ones((16, 3), np.int32)
    mesh = sk.make_mesh(jax.devices()[:4], data=4)
    options = {"in_specs": P("data"), "out_specs": P("data"), "args": (x, tokens)}
    with pytest.raises(ValueError, match="scale has no gradient"):
        assert_equal_for_all_inputs(kernel, lambda x, tokens: 2 * x + 12, mesh=mesh, **options)


def test_equal_sentences_of_a_certificate_are_one():
    def kernel(x):
        for _ in range(3):
            x = jnp.where((x > 0).sum() < 100, x * x + x, x)
        return x

    proof = assert_equal_for_all_inputs(
        kernel, kernel, mesh=MESH, in_specs=P(None), out_specs=P(None), args=(np.zeros(3, "f"),), grad=False
    )
    [sentence] = [sentence for sentence in proof.compared if sentence.startswith("never else than true: lt")]
    assert sentence.endswith(" comparisons)") and len(set(proof.compared)) == len(proof.compared)


REAL = "Pass real and imaginary parts as two arrays, or compare floats with assert_matches_reference."
INTEGERS = "Compare integers with assert_matches_reference."
VALUES = {
    f"{WHERE}: inputs must be real; got a complex one. {REAL}": {"args": (X, 1j * X), "kernel": lambda x, y: x},
    f"{WHERE}: at least one input must be an array of floats, for which the proof holds; got 'bool', 'int32'. "
    f"{INTEGERS}": {"args": (np.zeros(4, int), np.zeros(4, bool)), "kernel": lambda x, y: x},
    f"{WHERE}: at least one input must be an array of floats, for which the proof holds; got none. {INTEGERS}": {
        "args": (), "kernel": lambda: jnp.ones(4), "in_specs": (), "out_specs": P(),
    },
    f"{WHERE}: points must be at least 1; got 0. Pass points=1 or more.": {"points": 0, "kernel": squared},
    f"{WHERE}: exps may be nested at most 7 deep, from an input to a result; these programs nest more. Pass a model of "
    "fewer layers: a layer more proves nothing else.": {
        "kernel": lambda x: jnp.exp(jnp.exp(jnp.exp(jnp.exp(jnp.exp(jnp.exp(jnp.exp(jnp.exp(x)))))))),
    },
}  # fmt: skip
TYPES = {
    f"{WHERE}: args must be a tuple of the arguments; got float32[4,2]. Pass args=(x,) for one argument.": {
        "args": X, "kernel": squared,
    },
}  # fmt: skip


@pytest.mark.parametrize(("kind", "message", "change"), refusals(VALUES, TYPES))
def test_what_cannot_be_proved_is_said(kind, message, change):
    assert refused(lambda: proved(**change), kind) == message


# A key is a word here, which jax would take for a number.
def test_random_numbers_that_need_jaxs_own_keys():
    message = refused(lambda: proved(lambda x: x * jax.random.gamma(jax.random.key(0), 2.0)))
    assert message.startswith(
        f"{WHERE}: each operation on a float must have a meaning in a finite field; random_gamma at test_equality.py:"
    )
    assert message.endswith(" has none. Prove the part before it, or compare floats with assert_matches_reference.")


# The bits of a float are unknown integers: which row they mean is too.
def test_a_row_that_the_bits_of_a_float_choose():
    rows = np.arange(4, dtype=np.float32)
    message = refused(lambda: proved(lambda x: x * jnp.asarray(rows)[lax.bitcast_convert_type(x, np.int32)]))
    assert "lt of the bits of floats at test_equality.py:" in message


# Each draw has other numbers, and there is a last one.
def test_a_divisor_that_is_zero_at_every_draw():
    seeds = []

    def side(field, seen):
        seeds.append(field.settings.seed)
        raise RedrawError if len(seeds) < 20 else AssertionError

    with raises(
        UnprovableError,
        "f: a divisor must not be zero for most inputs; at 8 draws one was. Remove a division by a value that is "
        "always zero.",
    ):
        equal("f", "", [], (side, side), 1, STEP)
    assert seeds == list(range(8))


def test_results_of_another_form():
    said = "Check out_specs and the gathers."
    for kernel, reference, wrong in (
        (lambda x: {"y": x}, lambda x: x, "it is {'y': *} and the reference one array"),
        (lambda x: x[:, :1], lambda x: x, "(the whole tree) has shape (4, 1) and the reference (4, 2)"),
        (lambda x: jnp.zeros(x.shape, int) + 1, lambda x: x, "(the whole tree) is int32 and the reference float32"),
    ):
        assert refused(partial(proved, kernel, reference), AssertionError) == (
            f"{WHERE}: on mesh data=2, the result must have the reference's structure, shapes and kinds of dtype; "
            f"{wrong}. {said}"
        )


# proves N49: seconds are counted for every device, round and point; a matmul's by what it sums over
def test_what_would_take_too_long_is_refused_with_its_largest_array():
    big = jax.ShapeDtypeStruct((64, 4096), jnp.float32)

    def step(x):
        return lax.scan(lambda c, _: (c + (x @ c.T) @ x, None), x, length=10)[0]

    traced = jax.make_jaxpr(step)(big)
    # two products of 64 * 64 * 4096 terms, a transpose and a sum, ten times, for 8 primes and 3 points
    products, elements = 2 * 64 * 64 * 4096, 64 * 64 + 3 * 64 * 4096
    seconds = 10 * 8 * 3 * (4e-9 * products + 4e-8 * elements)
    check_size("f", [traced], 3, 2, longest=1.05 * seconds)
    for draws, ordered in ((2, False), (4, True)):
        what = jax.make_jaxpr(lambda x: jnp.maximum(step(x), 0))(big) if ordered else traced
        times = draws if ordered else 1
        check_size("f", [what], 3, draws, longest=1.05 * times * seconds)
        message = refused(lambda: check_size("f", [what], 3, draws, longest=0.95 * times * seconds))
        minutes = f"{times * seconds / 60:,.0f}"
        assert message.startswith(
            "f: shapes must be small, because a proof holds for all values and not for more shapes; these would take "
            f"about {minutes} minutes, the largest array is [4096, 64] at test_equality.py:"
        )
        assert message.endswith(
            "Shrink batch, sequence, widths and layers to a few elements per device, as testing.small does."
        )


# The collective of one device waits for ever for the others: a proof of the numbers alone would pass.
def test_a_collective_that_not_all_devices_come_to():
    def alone(x):
        return lax.cond(lax.axis_index("data") == 0, lambda y: lax.psum(y, "data") * 0 + y, lambda y: y, x)

    def loop(x):
        rounds = lax.axis_index("data") + 1
        return lax.fori_loop(0, rounds, lambda _, y: y + 0 * lax.psum(y, "data"), x)

    # Device 0 asks twice whether to go on, and device 1 three times.
    def question(x):
        rounds = lax.axis_index("data") + 1

        def goes_on(carry):
            return (carry[0] < rounds) & (lax.psum(carry[0], "data") >= 0)

        return lax.while_loop(goes_on, lambda carry: (carry[0] + 1, 1 * carry[1]), (0 * rounds, x))[1]

    for kernel, name in ((alone, "psum"), (loop, "psum"), (question, "psum")):
        message = refused(lambda kernel=kernel: proved(kernel, lambda x: x, check_vma=False), AssertionError)
        assert "the branch at test_equality.py:" in message
        assert message.endswith(f"must be the same along 'data': its {name} waits for all devices")


def test_not_a_number_on_one_device_is_not_replicated():
    def kernel(x, n):
        first = lax.axis_index("data") == 0
        return n.astype("f") * jnp.where(first, 1.0, 0.0) / jnp.where(first, 1.0, 0.0), x

    def reference(x, n):
        return n.astype("f"), x

    options = {"in_specs": (P("data"), P()), "out_specs": (P(), P("data")), "args": (X, np.int32(5))}
    message = refused(lambda: proved(kernel, reference, check_vma=False, **options), AssertionError)
    assert "a result that is replicated along 'data' differs between devices" in message


@pytest.mark.usefixtures("silent_floats")
def test_what_a_float_was_rounded_to_may_be_another_integer():
    field = Field(Settings(2, 3))
    field.coverage = Coverage()
    program = jax.make_jaxpr(lambda x: jnp.where(jnp.floor(x) == 7, 0.0, x))(0.5)
    Interpreter(field).run(program, [draw_input(field, "x", ())])
    [decision] = field.coverage.decisions.values()
    assert decision.kind == EQUALITY and decision.is_open and not decision.is_forced.any()


def test_a_certificate_says_what_was_seen_of_comparisons():
    found = proved(lambda x: jnp.where(x > 1, x, 1.0), lambda x: jnp.maximum(x, 1.0))
    [line] = found.compared
    assert line.startswith("comparisons: at ") and " draws of real inputs" in line
    assert "that a difference on the branches of the first draw was missed" in str(found)
    assert found.assumed[-1].startswith("what hangs on several comparisons at once")
    kept = proved(lambda x: jnp.where(x * x < 0, 1.0, jnp.log(x)), jnp.log)
    assert any("not compared where a number is outside" in line for line in kept.compared)
    with pytest.raises(AssertionError, match="where some inputs are equal"):  # as they are to the constants
        proved(lambda x: jnp.where(x > 1, x, 2.0), lambda x: jnp.where(x >= 1, x, 2.0))
