"""assume_replicated: what it means in every transformation, and that a false one is found."""

import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.collectives import ring
from shardkit.testing import assert_matches_reference, emulate
from support.refusals import refused, value_error

EXAMPLE = Path(__file__).parents[2] / "examples" / "recursive_halving.py"
MESH = sk.abstract_mesh(a=4, b=2)
RING = [(i, (i + 1) % 4) for i in range(4)]
X = np.random.default_rng(0).integers(-4, 5, (8, 3)).astype("f")


def moments(x):
    """The sum over a of x and of its squares, by three messages round a ring, of integers: equal in every order."""
    tree = {"sum": x, "square": x**2}
    total, moving = tree, tree
    for _ in range(3):
        moving = jax.tree.map(lambda y: lax.ppermute(y, "a", RING), moving)
        total = jax.tree.map(jnp.add, total, moving)
    return sk.collectives.assume_replicated(total, "a")


def in_control_flow(x):
    """Through scan, cond, checkpoint and vmap: 2 (sum of x)^2 row by row, and the squares."""

    def row(carry, x):
        y = jax.checkpoint(jax.vmap(moments))(x + sk.vary(carry, "a"))
        return carry, lax.cond(carry < 1, lambda y: y["sum"] ** 2 * 2 + y["square"], lambda y: y["sum"], y)

    return lax.scan(row, jnp.float32(0), x)[1]


def written_plainly(x):
    parts = x.reshape(4, -1, 3)
    return 2 * parts.sum(0) ** 2 + (parts**2).sum(0)


# Catches a type that out_specs refuse, and a transpose that counts a cotangent n times or not at all.
def test_it_is_invariant_and_its_gradient_is_exact():
    mesh = sk.make_mesh(a=4, b=2)
    specs = {"in_specs": P("a"), "out_specs": P()}
    assert_matches_reference(in_control_flow, written_plainly, mesh=mesh, args=(X,), eager=False, **specs)

    def gradient(f):
        return jax.jit(jax.grad(lambda x: jnp.sum(f(x) * X[:2])))(X)

    emulated = emulate(in_control_flow, {"a": 4, "b": 2}, **specs)
    np.testing.assert_array_equal(emulated(X), written_plainly(X))
    np.testing.assert_array_equal(gradient(emulated), gradient(written_plainly))

    def inside(x):  # a gradient taken on each device, of an invariant loss
        return jax.grad(lambda x: jnp.sum(in_control_flow(x) * X[:2]))(x)

    kernel = jax.jit(jax.shard_map(inside, mesh=mesh, in_specs=P("a"), out_specs=P("a")))
    np.testing.assert_array_equal(kernel(X), gradient(written_plainly))


@pytest.mark.check
def test_only_axes_over_which_a_leaf_varies_are_cast():
    both = lambda x, y: sk.collectives.assume_replicated((x, y), ("b", "a"))  # noqa: E731
    specs = {"mesh": MESH, "in_specs": (P("a"), P()), "out_specs": P()}
    text = str(jax.make_jaxpr(jax.shard_map(both, **specs))(X, X))
    assert text.count("assume_replicated") == 1 and "assume_replicated[axes=('a',)]" in text
    x = X.reshape(4, 2, 3)
    under = jax.make_jaxpr(jax.vmap(lambda x: sk.collectives.assume_replicated(x, "a"), axis_name="a"))(x)
    assert not under.eqns


# Catches a census that does not know it, a lint that takes its result for varying, and a line that is lost.
@pytest.mark.check
def test_the_program_readers_know_it():
    def decided(x):  # all devices take the same branch
        total = moments(x)["sum"]
        return lax.cond(jnp.sum(total) > 0, lambda: sk.all_reduce(x, "a"), lambda: total)

    assert not sk.lint(jax.shard_map(decided, mesh=MESH, in_specs=P("a"), out_specs=P()), X)

    def gradient(w, x):
        return jax.grad(lambda w: ring.all_reduce(jnp.sum(x * w), "a", replicated=True) ** 2)(w)

    kernel = jax.shard_map(gradient, mesh=MESH, in_specs=(P(), P("a")), out_specs=P())
    arguments = np.float32(1), X
    assert {row.kind for row in sk.census(kernel, *arguments).rows if not row.backward} == {"ppermute"}
    assert [(reason.kind, reason.value) for reason in sk.explain(kernel, *arguments)] == [("all_reduce", "w")]


def swapped(x):
    """Devices 2 and 3 exchange among themselves: they never see devices 0 and 1."""
    x = x + lax.ppermute(x, "b", [(0, 1), (1, 0), (2, 3), (3, 2)])
    return sk.collectives.assume_replicated(x, ("a", "b"))


# Catches an emulate that runs the cast without comparing, or that only compares outside of loops and derivatives.
@pytest.mark.parametrize("within", ["plain", "a loop", "a gradient"])
def test_emulate_finds_values_that_differ(within):
    def kernel(x):
        if within == "a loop":
            return lax.scan(lambda carry, x: (carry, swapped(x)), 0, x)[1]
        return swapped(x)

    f = emulate(kernel, {"a": 2, "b": 4}, P("b"), P())
    run = jax.grad(lambda x: jnp.sum(f(x))) if within == "a gradient" else f
    run(np.ones((8, 3), "f"))  # equal here
    line = f"test_replicated.py:{swapped.__code__.co_firstlineno + 3} (swapped)"
    with value_error(
        f"emulate: assume_replicated needs the same bits on all devices along axis 'b'; at {line} device 2 differs "
        "from device 0 by up to 24. Complete the exchange over 'b', or leave the value varying."
    ):
        run(np.arange(24, dtype="f").reshape(8, 3))


# Catches an assertion that reads one replica of a result: device 0's, which is right here up to rounding.
def test_the_replicas_of_a_result_are_compared():
    mesh = sk.make_mesh(jax.devices()[:2], a=2)

    def almost(x):
        total = x + sk.shift(x, "a")
        return sk.collectives.assume_replicated(
            jnp.where(sk.axis_index("a") == 1, jnp.nextafter(total, 9 * total), total), "a"
        )

    options = {"mesh": mesh, "in_specs": P("a"), "out_specs": P(), "args": (np.float32([1, 2]),), "eager": False}
    assert refused(lambda: assert_matches_reference(almost, lambda x: x[:1] + x[1:], **options), AssertionError) == (
        "assert_matches_reference: on mesh a=2, under jit, the result must have the same bits on all devices that hold "
        "it; devices 0 and 1 differ. Look for an assume_replicated of a value, or a cond with a predicate, that "
        "differs."
    )


def test_the_example_runs_and_a_wrong_partner_is_found(tmp_path):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    text, doubling = EXAMPLE.read_text(), EXAMPLE.read_text().rindex("i ^ hop")
    wrong = tmp_path / "wrong.py"
    wrong.write_text(text[:doubling] + "i ^ min(hop, n // 4)" + text[doubling + len("i ^ hop") :])
    all_reduce = runpy.run_path(str(wrong))["all_reduce"]
    kernel, x = lambda x: all_reduce(x, "data"), np.arange(64, dtype="f")
    specs = {"in_specs": P("data"), "out_specs": P()}
    with pytest.raises(ValueError, match=r"along axis 'data'; at wrong.py:\d+ \(all_reduce\) device 4 differs from"):
        emulate(kernel, {"data": 8}, **specs)(x)
    with pytest.raises(AssertionError, match="the result must have the same bits on all devices that hold it"):
        assert_matches_reference(
            kernel, lambda x: x.reshape(8, 8).sum(0), mesh=sk.make_mesh(data=8), args=(x,), eager=False, **specs
        )
