"""From a wrong result to its line: what a message says of each kind of mistake, word for word."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.testing import assert_equal_for_all_inputs
from shardkit.testing.exact import derivatives, repairs
from support.refusals import refused

X = jax.ShapeDtypeStruct((6, 4), np.float32)
A, AB, BA, ROWS, ALL = P("a"), P(("a", "b")), P(("b", "a")), P(None, "a"), ("a", "b")
WRONG = "the result is not the reference's for all inputs"
FIRST = "The first value that the reference does not have is that of"


def halves(x):
    return x[:3] + x[3:]


def rows(x):
    return sum(x[i : i + 1] for i in range(6))


def here():
    return lax.axis_index("a")


# "@": the line of the kernel. Each row is one way to tell what is wrong; a message without it leaves one to search.
CASES = {
    "a factor": (
        lambda x: lax.psum(2 * x, "a"), halves, A, P(),
        f"{WRONG}: it is 2 times the reference everywhere. The mistake is at @: with psum_invariant divided by 2, "
        "the size of 'a', it is right.",
    ),
    "a share": (
        lambda x: lax.psum(jnp.sin(x), "a") / 2, lambda x: halves(jnp.sin(x)), A, P(),
        f"{WRONG}: it is 1/2 of the reference everywhere. The mistake is at @: with div times 2, the size of 'a', "
        f"it is right.",
    ),
    "the largest share": (
        lambda x: x / 64, lambda x: x, AB, AB,
        f"{WRONG}: it is 1/64 of the reference everywhere. The mistake is at @: without the second operand of div,"
        " it is right.",
    ),
    "a smaller share": (lambda x: x / 65, lambda x: x, AB, AB, f"{WRONG}. "
        "The mistake is at @: without the second operand of div, it is right."),
    "parentheses": (
        lambda x: jnp.sin(x) * (x + 0.5), lambda x: jnp.sin(x) * x + 0.5, A, A,
        f"{WRONG}. The mistake is at @: with mul of the first operand of add alone, it is right.",
    ),
    "exchanged through a factor": (
        lambda x: 2.0 * jnp.sin(x) / jnp.exp(x), lambda x: 2.0 * jnp.exp(x) / jnp.sin(x), A, A,
        f"{WRONG}. The mistake is at @: with the second operand of mul and that of div exchanged, it is right.",
    ),
    "no end of a ring": (
        lambda x: jnp.sin(x) * jnp.float32(jnp.arange(3) + 1)[:, None],
        lambda x: jnp.sin(x) * np.float32([1, 2, 0, 1, 2, 0])[:, None], A, A,
        f"{WRONG}. The mistake is at @: with add modulo 3, it is right.",
    ),
    "a tuple from the other side": (
        lambda x: jnp.multiply(*sk.shift((x, x[:, :1]), "b")),
        lambda x: jnp.roll(x, -2, 0) * jnp.roll(x[:, :1], -2, 0), P("b"), P("b"),
        f"{WRONG}: it is the reference rolled by 4 along dim 0: devices have each other's pieces. The mistake is at @: "
        "with ppermute the other way round, it is right.",
    ),
    "no wrap backwards": (
        lambda x: jnp.sin(sk.shift(x, "a", by=-1)),
        lambda x: jnp.sin(jnp.concatenate([x[3:], jnp.zeros((3, 4))])), A, A,
        f"{WRONG}, only where 'a' is 1. The mistake is at @: with ppermute from each device to that 1 back, without a "
        "wrap, it is right.",
    ),
    "the sign": (
        lambda x: -x, lambda x: x, AB, AB, f"{WRONG}: it is minus the reference everywhere. "
        "The mistake is at @: without neg, it is right.",
    ),
    "an axis's size": (
        lambda x: jnp.sin(lax.psum(x, ALL) * 3), lambda x: jnp.sin(rows(x)), AB, P(),
        f"{WRONG}: it is 3 times, the size of 'b', a value of the reference. The mistake is at @: with mul divided"
        f" by 3, the size of 'b', it is right.",
    ),
    "a division by a size": (
        lambda x: jnp.sin(lax.psum(x, ALL) / 2), lambda x: jnp.sin(rows(x)), AB, P(),
        f"{WRONG}: it is 1/2 of, by the size of 'a', a value of the reference. The mistake is at @: with div times"
        f" 2, the size of 'a', it is right.",
    ),
    "a division by all": (
        lambda x: jnp.sin(sk.all_reduce(x, ALL, op="mean")), lambda x: jnp.sin(rows(x)), AB, P(),
        f"{WRONG}: it is 1/6 of a value of the reference. The mistake is at @: with div times 6, the number of "
        f"devices, it is right.",
    ),
    "a share of a part": (
        lambda x: jnp.sin(lax.psum(jnp.exp(x) * 5, "a")), lambda x: jnp.sin(halves(jnp.exp(x))), A, P(),
        f"{WRONG}: it is 5 times a value of the reference summed over 'a'. The mistake is at @: without the second"
        f" operand of mul, it is right.",
    ),
    "another's pieces": (
        lambda x: lax.ppermute(x, "a", [(0, 1), (1, 0)]), lambda x: x, A, A,
        f"{WRONG}: it is the reference rolled by 3 along dim 0: devices have each other's pieces. The mistake is "
        "at @: without ppermute, it is right.",
    ),
    "rolled columns": (
        lambda x: jnp.roll(x, 1, 1) * 1, lambda x: x, A, A,
        f"{WRONG}: it is the reference rolled by 1 along dim 1: devices have each other's pieces. The mistake is "
        "at @: with another operand of mul, it is right.",
    ),
    "nothing": (lambda x: 0 * x, lambda x: x, AB, AB, f"{WRONG}: it is zero. "
        "The mistake is at @: without the first operand of mul, it is right."),
    "something": (
        lambda x: 3 * x, lambda x: 0 * x, A, A, f"{WRONG}: the reference's is zero; it comes from mul at @.",
    ),
    "a missing sum, before a function": (
        lambda x: lax.psum(jnp.sin(lax.psum(jnp.sum(x * x), "b")), "a"), lambda x: jnp.sin(jnp.sum(x * x)), AB, P(),
        f"{WRONG}. {FIRST} sin at @, of a value that is the reference's only summed over 'a'.",
    ),
    "both sums": (
        lambda x: lax.psum(jnp.sin(jnp.sum(x * x)), ALL), lambda x: jnp.sin(jnp.sum(x * x)), AB, P(),
        f"{WRONG}. {FIRST} sin at @, of a value that is the reference's only summed over 'b', 'a'."
        f"",
    ),
    "a missing sum, at the end": (
        lambda x: lax.psum(jnp.sum(x * x), "b"), lambda x: jnp.sum(x * x), AB, P(),
        "a result that is replicated along 'a' differs between devices: only summed over 'a' it is a value of the"
        " reference. The mistake is at @: with psum over 'a', 'b' in place of 'b', it is right.",
    ),
    "what varies, before what is wrong alike": (
        lambda x: (5 * lax.psum(jnp.exp(x), "a")) * (7 * x), lambda x: x[:3] * halves(jnp.exp(x)), A, P(),
        "a result that is replicated along 'a' differs between devices: it is 7 times a value of the reference. "
        f"{FIRST} mul at @.",
    ),
    "a false assumption": (
        lambda x: sk.collectives.assume_replicated(3 * x, "a"), lambda x: x[:3], A, P(),
        f"an assume_replicated over 'a' differs between devices: it is 3 times, the size of 'b', a value of the "
        f"reference. {FIRST} mul at @.",
    ),
    "in a branch that one device takes": (
        lambda x: jnp.sin(lax.cond(here(), lambda: 2 * x, lambda: -2 * x)), lambda x: jnp.sin(2 * x), A, A,
        f"{WRONG}, only where 'a' is 0: it is minus a value of the reference. The mistake is at @: with minus mul,"
        f" it is right.",
    ),
    "in a round of a loop that one device makes": (
        lambda x: lax.while_loop(lambda c: c[0] < here(), lambda c: (c[0] + 1, c[1] * 3), (0 * here(), x))[1],
        lambda x: x, A, A,
        f"{WRONG}, only where 'a' is 1: it is 3 times, the size of 'b', a value of the reference. The mistake is "
        "at @: with mul divided by 3, the size of 'b', it is right.",
    ),
    "in a scan": (
        lambda x: lax.scan(lambda c, row: (c + row, c * row), 0 * x[0], x)[1],
        lambda x: lax.scan(lambda c, row: (c + row, 2 * c * row), 0 * x[0], x)[1], ROWS, ROWS,
        f"{WRONG}: it is 1/2 of the reference everywhere. The mistake is at @: with mul times 2, the size of 'a', "
        "it is right.",
    ),
    "a sum of what is known": (
        lambda x: lax.psum(x, "a") / lax.psum((here() + 1).astype("f"), "a"), lambda x: halves(x) / 4, A, P(),
        f"{WRONG}. The mistake is at @: with add plus the index along 'a', it is right.",
    ),
    "axes in another order": (
        lambda x: lax.all_gather(x, ("b", "a"), tiled=True), lambda x: x, AB, P(),
        f"{WRONG}, only at 1 to 4 of dim 0. The mistake is at @: with all_gather over 'a', 'b' in place of 'b', "
        "'a', it is right.",
    ),
    "behind a right product of pieces": (
        lambda x: 5 * jnp.sin(x) + 1, lambda x: jnp.sin(x) + 1, BA, BA,
        f"{WRONG}: it is 5 times a value of the reference. The mistake is at @: without the first operand of mul, "
        f"it is right.",
    ),
    "devices numbered along the other axis first": (
        lambda x: jnp.sin(x) * jnp.float32(lax.axis_index("b") * 2 + here()),
        lambda x: jnp.sin(x) * jnp.arange(6.0)[:, None], AB, AB,
        f"{WRONG}, only where 'a', 'b' is 1 to 4. The mistake is at @: with the number of a device along 'a', 'b' in "
        "place of 'b', 'a', it is right.",
    ),
    "chunks in blocks": (
        lambda x: jnp.sin(x) * jnp.float32(here() * 2 + 1),
        lambda x: jnp.sin(x) * jnp.array([2.0, 2, 2, 3, 3, 3])[:, None], A, A,
        f"{WRONG}, only where 'a' is 0. The mistake is at @: with add in strides along 'a' in place of blocks, it is "
        "right.",
    ),
    "where rows end, not where they begin": (
        lambda x: jnp.cumsum(jnp.sin(x), 0), lambda x: jnp.tri(6, 6, -1) @ jnp.sin(x), ROWS, ROWS,
        f"{WRONG}. The mistake is at @: with cumsum of what is before each element, it is right.",
    ),
    "a zero among largest numbers": (
        lambda x: jnp.maximum(x, jnp.where(here() == 0, 0.0, lax.ppermute(x, "a", [(0, 1)]))),
        lambda x: jnp.concatenate([x[:3], jnp.maximum(x[:3], x[3:])]), A, A,
        f"{WRONG}, only where 'a' is 0. The mistake is at @: with minus infinities in place of that constant, it is "
        "right.",
    ),
    "copies of a device's own number": (
        lambda x: (jnp.broadcast_to(x.sum(0), (2, 4)) * jnp.array([[1.0], [2.0]])).sum(0),
        lambda x: x[:3].sum(0) + 2 * x[3:].sum(0), A, P(),
        "a result that is replicated along 'a' differs between devices. The mistake is at @: with all_gather over 'a' "
        "in place of copies, it is right.",
    ),
    "the root of another dim": (
        lambda x: jnp.sin(x) * 3**-0.5, lambda x: jnp.sin(x) * 4**-0.5, A, A,
        f"{WRONG}. The mistake is at @: with mul of the size 4 in place of 3, it is right.",
    ),
    "the first device for the last": (
        lambda x: jnp.where(lax.axis_index("b") == 0, jnp.sin(x), x),
        lambda x: jnp.concatenate([x[:4], jnp.sin(x[4:])]), P("b"), P("b"),
        f"{WRONG}, only where 'b' is 0 or 2. The mistake is at @: with eq of the last device along 'b', it is right.",
    ),
    "pairs with rows of the same device": (
        lambda x: lax.psum(jnp.square(x @ x.T).sum(), "a"), lambda x: jnp.square(x @ x.T).sum(), A, P(),
        f"{WRONG}. The mistake is at @: with an operand of dot_general that is gathered over 'a', it is right.",
    ),
    "a sum in place of a maximum": (
        lambda x: jnp.sin(lax.psum(x, "a")), lambda x: jnp.sin(jnp.maximum(x[:3], x[3:])), A, P(),
        f"{WRONG}. The mistake is at @: with the maximum over 'a' in place of psum_invariant, it is right.",
    ),
    "a root of a mean": (
        lambda x: jnp.sqrt(lax.pmean(jnp.square(x).sum(), "a")),
        lambda x: (jnp.sqrt(jnp.square(x[:3]).sum()) + jnp.sqrt(jnp.square(x[3:]).sum())) / 2, A, P(),
        f"{WRONG}. The mistake is at @: with the mean over 'a' of sqrt of what devices have, it is right.",
    ),
    "a sum of roots": (
        lambda x: x / lax.psum(jnp.sqrt(jnp.square(x).sum()), "a"),
        lambda x: x / jnp.sqrt(jnp.square(x).sum()), A, A,
        f"{WRONG}. The mistake is at @: with sqrt of sums over 'a', it is right.",
    ),
    "a root of a sum": (
        lambda x: jnp.sqrt(lax.psum(jnp.square(x).sum(), "a")),
        lambda x: jnp.sqrt(jnp.square(x[:3]).sum()) + jnp.sqrt(jnp.square(x[3:]).sum()), A, P(),
        f"{WRONG}. The mistake is at @: with the sum over 'a' of sqrt of what devices have, it is right.",
    ),
}  # fmt: skip


UNTYPED = (
    "a missing sum, at the end",
    "what varies, before what is wrong alike",
    "axes in another order",
    "copies of a device's own number",
)


# proves N49
@pytest.mark.parametrize("name", CASES)
def test_the_message(name):
    kernel, reference, ins, outs, message = CASES[name]
    mesh = sk.abstract_mesh(a=2, b=3)
    vma = name not in UNTYPED
    said = refused(
        lambda: assert_equal_for_all_inputs(
            kernel, reference, mesh=mesh, in_specs=ins, out_specs=outs, args=(X,), grad=False, check_vma=vma
        ),
        AssertionError,
    )
    line = f"test_difference.py:{kernel.__code__.co_firstlineno} (<lambda>)"
    said = said.replace("<lambda>.<locals>.<lambda>", "<lambda>")
    assert said == f"assert_equal_for_all_inputs: on mesh a=2, b=3, {message}".replace("@", line)


def say_wrong(kernel, reference, *args):
    layout = {"mesh": sk.abstract_mesh(a=2), "in_specs": (A,) * len(args), "out_specs": A}
    return refused(
        lambda: assert_equal_for_all_inputs(kernel, reference, args=args, grad=False, **layout), AssertionError
    )


# The search for a factor took the first result that is a number, and there is none.
def test_the_first_unknown_value_may_be_a_mask():
    def kernel(x):
        keep = x >= x.max()
        return jnp.where(keep, x, 0.0) * jnp.sin(x)

    assert f"{FIRST} ge at test_difference.py:" in say_wrong(
        kernel, lambda x: jnp.cumsum(jnp.tanh(x * x + 1.7 * jnp.roll(x, 1))), jax.ShapeDtypeStruct((4,), np.float32)
    )


# Both calls share one jaxpr, and the variables of the run are those of the last call.
def test_a_repair_of_a_function_that_is_called_twice_is_tried():
    @jax.jit
    def product(p, q):
        cosine = jnp.cos(q)
        sine = jnp.sin(p)
        return sine * cosine + sine

    def right(p, q):
        return jnp.sin(p) * jnp.cos(q) + jnp.sin(p)

    def kernel(x, y, z):
        first = product(x, y)
        second = product(z, x)  # on a line of its own: a repair is of all calls of a line
        return first + 2 * second

    shapes = [jax.ShapeDtypeStruct((4,), np.float32)] * 3
    message = say_wrong(kernel, lambda x, y, z: right(y, y) + 2 * right(z, x), *shapes)
    assert "with another operand of sin, it is right" in message


# In round 0 the tags are right, so that the repair of a round is none of the other.
def test_what_is_used_together_travels_together():
    def kernel(x, tags):
        total = jnp.zeros_like(x)
        for _ in range(2):
            total = total + jnp.where(tags[:, None] == tags[None], x[None], 0.0).sum(1)
            x = sk.shift(x, "a")
        return total

    def reference(x, tags):
        return jnp.where(tags[:, None] == tags[None], x[None], 0.0).sum(1)

    line = kernel.__code__.co_firstlineno + 4
    message = say_wrong(kernel, reference, jax.ShapeDtypeStruct((4,), np.float32), np.array([0, 1, 1, 2]))
    assert f"The mistake is at test_difference.py:{line} " in message
    assert "with an operand of broadcast_in_dim that travels along 'a' in each round, it is right" in message


# As a repair of the counter, which all devices have, the line of the loop itself would be named first.
def test_what_a_round_makes_of_the_counter_is_named_before_the_counter():
    def kernel(x):
        def tick(total, t):
            weight = jnp.float32(t + 2)
            return total + weight * x, None

        return lax.scan(tick, jnp.zeros_like(x), jnp.arange(3))[0]

    def reference(x):
        return x * jnp.array([9.0, 9.0, 12.0, 12.0])

    line = kernel.__code__.co_firstlineno + 2
    message = say_wrong(kernel, reference, jax.ShapeDtypeStruct((4,), np.float32))
    assert f"The mistake is at test_difference.py:{line} " in message


# The line adds integers in its remainder, too; and what may be done to `i + 0` is not what may be done to `i + 1`.
def test_rounds_of_a_loop_are_repaired_together():
    def kernel(x):
        i = lax.axis_index("b")
        total = jnp.float32(0)
        for step in range(3):
            total = total + (step + 1.0) * x[(i + step) % 3]
        return total[None]

    def reference(x):
        return jnp.stack([sum((step + 1.0) * x[(i - step) % 3] for step in range(3)) for i in range(3)])

    layout = {"mesh": sk.abstract_mesh(b=3), "in_specs": P(), "out_specs": P("b")}
    args = (jax.ShapeDtypeStruct((3,), np.float32),)
    message = refused(
        lambda: assert_equal_for_all_inputs(kernel, reference, args=args, grad=False, **layout), AssertionError
    )
    assert "with sub in place of add, it is right" in message


def test_an_array_of_rounds_begins_one_later():
    def kernel(x):
        done = []
        for _ in range(4):
            x = jnp.sin(sk.shift(x, "a"))
            done.append(x)
        return jnp.stack(done[:3])

    def reference(x):
        done = []
        for _ in range(4):
            x = jnp.sin(jnp.roll(x, 2))
            done.append(x)
        return jnp.stack(done[1:])

    args = (jax.ShapeDtypeStruct((4,), np.float32),)
    layout = {"mesh": sk.abstract_mesh(a=2), "in_specs": A, "out_specs": ROWS}
    message = refused(
        lambda: assert_equal_for_all_inputs(kernel, reference, args=args, grad=False, **layout), AssertionError
    )
    assert "with stack of what rounds one later made, it is right" in message


# A dim of 200 is no number of int8: that was an error of numpy in place of a message.
@pytest.mark.check
def test_a_dim_may_be_larger_than_an_integer():
    def kernel(x):
        return x + (x > 0).astype(jnp.int8).astype(x.dtype) * jnp.int8(3).astype(x.dtype)

    args = (jax.ShapeDtypeStruct((400,), np.float32),)
    layout = {"mesh": sk.abstract_mesh(a=2), "in_specs": A, "out_specs": A}
    message = refused(
        lambda: assert_equal_for_all_inputs(kernel, lambda x: x, args=args, grad=False, **layout), AssertionError
    )
    assert "with a mask that is always false in place of gt, it is right" in message


# Without it each of hundreds of runs of a search computes all gradients before it comes to the value that is wrong.
@pytest.mark.check
@pytest.mark.parametrize("grad", [True, False])
def test_the_results_come_before_all_derivatives(grad):
    def kernel(x):
        return lax.sin(x)

    def loop(x):
        return lax.while_loop(lambda y: y.sum() < 5, lambda y: y + x, x)

    function = kernel if grad else loop  # whose derivatives are those along an unknown direction
    derived = derivatives.trace_with_derivatives([function], (X,), X, True)
    program = derived.programs[0].jaxpr
    assert len(program.outvars) == 2 and program.eqns[0].outvars == program.outvars[:1]


# A search asks for the same few equations thousands of times.
@pytest.mark.check
def test_an_equation_that_repairs_have_in_common_is_traced_once(monkeypatch):
    repairs.trace_equation(lax.exp, X, 1)
    monkeypatch.setattr(jax, "make_jaxpr", None)
    assert repairs.trace_equation(lax.exp, X, 1).primitive is lax.exp_p
