"""Where the backward pass's collectives come from: the forward line, the value on it, and the sentence."""

import json
from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.analysis import explain
from support.planted.divergent import BOTH, MESH, on

pytestmark = pytest.mark.check

X = jax.ShapeDtypeStruct((16, 8), jnp.float32)
W = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def implicit(params, x):
    return jnp.sum((x @ params["w"]) ** 2)


def asked(params, x):
    return jnp.sum((x @ sk.vary(params["w"], BOTH)) ** 2)


def line(function, offset=1):
    return f"test_explain.py:{function.__code__.co_firstlineno + offset} ({function.__qualname__})"


def gradient(loss, params=W, outside=False, check_vma=True):
    """The gradient of a loss over the devices, taken outside or inside shard_map, explained."""
    params = {"w": params} if not isinstance(params, dict) else params
    specs = {"mesh": MESH, "in_specs": (P(), P(BOTH)), "check_vma": check_vma}
    if outside:
        total = jax.shard_map(lambda params, x: sk.all_reduce(loss(params, x), BOTH), out_specs=P(), **specs)
        return explain(jax.grad(total), params, X)
    return explain(jax.shard_map(jax.grad(loss), out_specs=P(), **specs), params, X)


# the answer to "where does this all_reduce come from?"
@pytest.mark.parametrize("outside", [False, True])
def test_an_implicit_cast_pays_with_an_all_reduce(outside):
    (row,) = gradient(implicit, outside=outside)
    assert (row.kind, row.axes, row.n, row.count, row.bytes_in) == ("all_reduce", BOTH, 8, 1, 256)
    assert row.sent == Fraction(2 * 256 * 7, 8)
    assert row.source == line(implicit)
    assert row.value == "params['w']"
    assert row.why == (
        "params['w'] is invariant over 'data', 'model' and is used with x, which varies over them; the "
        "gradient of the cast is a sum."
    )
    assert str(row) == f"all_reduce over 'data', 'model' of 256 bytes, at {line(implicit)}: {row.why}"


def numbered(params, x):
    return jnp.sum(x @ (params["w"] * lax.axis_index(BOTH).astype(jnp.float32)))


def test_a_device_number_is_named_by_its_type_and_line():
    """It is made of no operand, whose name it could have."""
    (row,) = gradient(numbered)
    place = line(numbered).split(" ")[0]
    assert row.why == (
        f"params['w'] is invariant over 'data', 'model' and is used with the float32[] of {place}, which varies over "
        "them; the gradient of the cast is a sum."
    )


def test_a_cast_that_was_asked_for():
    (row,) = gradient(asked)
    assert row.source == line(asked)
    assert row.why == (
        "params['w'] is invariant over 'data', 'model' and is cast there to vary over them; the gradient "
        "of the cast is a sum."
    )


def test_over_one_axis():
    def loss(params, x):
        x = sk.all_reduce(x, "model")
        return jnp.sum(x * params["b"][None])

    (row,) = gradient(loss, {"b": jax.ShapeDtypeStruct((8,), jnp.float32)})
    assert row.axes == ("data",)
    assert row.why == (
        "params['b'] is invariant over 'data' and is used with "
        f"the float32[2,8] of {line(loss, 1).split(' ')[0]}, which varies over it; the gradient of the cast is a sum."
    )


PAYS = {  # a kernel, and what its gradient sends
    "x is gathered over 'model' there and each device uses the whole; its gradient is summed over the devices and "
    "split again.": (lambda x: sk.all_gather(x, "model"), "reduce_scatter"),
    "x is summed over 'model' there and each device keeps a piece; its gradient gathers those of all pieces.": (
        lambda x: sk.reduce_scatter(x, "model"),
        "all_gather",
    ),
    "x is sent along axis 'model' there; its gradient is sent back.": (lambda x: sk.shift(x, "model"), "ppermute"),
    "the pieces of x are exchanged over 'model' there; their gradients are sent back.": (
        lambda x: sk.all_to_all(x, "model", split_dim=1, concat_dim=0),
        "all_to_all",
    ),
}


@pytest.mark.parametrize("why, paid", PAYS.items())
def test_a_collective_pays_with_another(why, paid):
    kernel, kind = paid
    x = jax.ShapeDtypeStruct((64, 8), jnp.float32) if kind == "all_gather" else X
    rows = explain(jax.grad(lambda x: jnp.sum(on(kernel)(x) ** 2)), x)
    assert [(r.kind, r.axes, r.value, r.why) for r in rows] == [(kind, ("model",), "x", why)]


def test_a_sum_pays_with_nothing_and_without_checked_types_with_a_sum():
    summed = on(lambda x: sk.all_reduce(x, "model"), out_specs=P("data"))
    found = explain(jax.grad(lambda x: jnp.sum(summed(x) ** 2)), X)
    assert len(found) == 0 and str(found) == "the backward pass sends nothing"

    def loss(params, x):
        return lax.psum(jnp.sum(x @ params["w"]), "data")

    (row,) = gradient(loss, check_vma=False)
    assert row.kind == "all_reduce" and row.axes == ("data",)
    assert row.why.endswith(" is summed over 'data' there without check_vma, where the gradient of a sum is a sum.")


def scanned(params, x):
    def layer(x, b):
        return jax.checkpoint(lambda x: jnp.tanh(sk.all_gather(x, "model")[:2] @ sk.vary(params["w"], BOTH) + b[None]))(
            x
        ), None

    return jnp.sum(lax.scan(layer, x, params["b"])[0])


# A loop's collectives are counted, and what jax.checkpoint repeats is said to be repeated.
def test_loops_and_remat():
    params = {"w": W, "b": jax.ShapeDtypeStruct((3, 8), jnp.float32)}
    found = gradient(scanned, params)
    assert [(r.kind, r.value, r.count) for r in found] == [
        ("all_gather", "a float32[2,8]", 3),
        ("all_reduce", "params['b']", 3),
        ("all_reduce", "params['w']", 3),
        ("reduce_scatter", "x", 3),
    ]
    assert found.rows[0].why == (
        "jax.checkpoint runs this collective of the forward pass again instead of saving its result."
    )
    assert ", 3 times, at test_explain.py:" in str(found.rows[0])


def test_a_while_runs_an_unknown_number_of_times():
    @jax.custom_vjp
    def identity(x):
        return x

    def backward(_, cotangent):
        return (lax.while_loop(lambda y: jnp.sum(sk.all_reduce(y, BOTH)) < 9, lambda y: y + 1, cotangent),)

    identity.defvjp(lambda x: (x, None), backward)
    (row,) = explain(jax.grad(lambda x: jnp.sum(on(identity)(x))), X)
    assert row.count is None and ", an unknown number of times, at " in str(row)


def test_a_rule_written_by_hand():
    @jax.custom_vjp
    def linear(w, x):
        return x @ w

    def backward(kept, cotangent):
        w, x = kept
        return sk.vary(sk.all_reduce(x.T @ cotangent, "data"), "data"), cotangent @ w.T

    linear.defvjp(lambda w, x: (linear(w, x), (w, x)), backward)
    by_hand, cast = gradient(lambda p, x: jnp.sum(linear(sk.vary(p["w"], BOTH), x)))
    assert (by_hand.axes, cast.axes) == (("data",), BOTH)
    assert by_hand.why == "a custom_vjp backward rule calls it there."
    assert cast.why.startswith("p['w'] is invariant over 'data', 'model' and is cast there")


# Several values on one line, alike in shape: the one is named whose gradient it is.
def test_values_on_one_line_are_told_apart():
    def loss(params, x):
        return jnp.sum((x @ params["c"]) * jnp.tanh(x @ params["a"]) * (x @ params["b"]))

    params = dict.fromkeys("abc", W)
    mapped = jax.shard_map(jax.grad(loss), mesh=MESH, in_specs=(P(), P(BOTH)), out_specs=P())
    body = jax.make_jaxpr(mapped)(params, X).eqns[0].params["jaxpr"]
    sums = [e.outvars[0] for e in body.eqns if e.primitive.name == "psum_invariant"]
    true = [f"params['{'abc'[body.outvars.index(v)]}']" for v in sums]  # the gradients leave in the order of the names
    assert [r.value for r in explain(mapped, params, X)] == true and sorted(true) == [f"params['{n}']" for n in "abc"]


def test_the_rows_as_json():
    found = gradient(implicit)
    (row,) = json.loads(found.to_json())
    assert (row["kind"], row["axes"], row["sent"], row["source"]) == ("all_reduce", [*BOTH], 448.0, line(implicit))
    assert sk.explain is explain and [*found] == [*found.rows]
