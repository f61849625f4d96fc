"""Which losses add over their examples, as their traces tell; what is not understood is never said to add."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import shardkit as sk
from shardkit.on_device.additive import read_loss
from shardkit.on_device.example_states import Rows, any_whole

N, T, D = 4, 3, 5
PARAMS = {"w": np.ones((D, D), "f"), "b": np.ones(D, "f")}
PLACES = np.linspace(0, 1, 64, dtype="f")


@pytest.fixture(autouse=True)
def as_newcomers_write():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def batch_of(n):
    shapes = {"x": (n, T, D), "y": (n, D), "label": (n,), "mask": (n, T)}
    return {name: jax.ShapeDtypeStruct(shape, "i" if name == "label" else "f") for name, shape in shapes.items()}


def read(loss):
    """What is known of `loss(params, batch, keys)`, for N examples and for 2 N."""

    def traced(n):
        def sums(params, batch, keys):
            means = loss(params, batch, keys)
            means = means if isinstance(means, sk.Mean) else sk.Mean(means, 1.0)
            return [jnp.asarray(means.total), jnp.asarray(means.weight)]

        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), n))
        return jax.make_jaxpr(sums)(PARAMS, batch_of(n), keys)

    few, many = traced(N), traced(2 * N)
    whole = len(jax.tree.leaves(PARAMS))
    states = [any_whole(v) if number < whole else Rows(0) for number, v in enumerate(many.jaxpr.invars)]
    return read_loss(few, many, states, 2 * N, ("data",))


def projected(params, batch):
    return jnp.tanh(batch["x"] @ params["w"]) + params["b"]


def mean_of(values):
    return lambda params, batch, keys: sk.Mean.of(values(params, batch, keys))


def flat_labels(params, batch, keys):
    logits = projected(params, batch).reshape(-1, D)
    labels = jnp.broadcast_to(batch["label"][:, None], batch["mask"].shape).reshape(-1)
    picked = jax.nn.log_softmax(logits)[jnp.arange(len(logits)), labels]
    return sk.Mean(-picked.sum(), jnp.float32(picked.size))


def two_views(params, batch, keys):
    both = jnp.concatenate([batch["y"], 2 * batch["y"]]) @ params["w"]
    first, second = jnp.split(both, 2)
    return sk.Mean.of((first - second) ** 2)


def scanned(params, batch, keys):
    def turn(state, x):
        state = jnp.tanh(state @ params["w"] + x)
        return state, state

    return sk.Mean.of(lax.scan(turn, jnp.zeros_like(batch["y"]), batch["x"].swapaxes(0, 1))[1])


def square_of_a_sum(params, batch, keys):
    x = batch["y"].T
    shared = ((0, 1), (1, 0))  # [n, D] beside [D, n]: the result begins with n, which is dim 1 of x
    same = lax.dot_general(jnp.ones(batch["y"].shape), x, (((), ()), shared))
    return sk.Mean(jnp.sum(same.sum(0) ** 2), jnp.float32(len(batch["y"])))


def noisy(params, batch, keys):
    return (sk.dropout(batch["y"], keys, 0.5) + jax.vmap(lambda key: jax.random.normal(key, (D,)))(keys)) @ params["w"]


RIGHT = {
    "a mean": lambda p, b, k: jnp.mean((b["y"] @ p["w"]) ** 2),
    "a mean and a penalty": lambda p, b, k: jnp.mean(b["y"] @ p["w"]) + 0.1 * jnp.sum(p["w"] ** 2),
    "a total and a weighted penalty": lambda p, b, k: sk.Mean(
        jnp.sum(b["y"]) + len(b["y"]) * p["b"].sum(), len(b["y"])
    ),
    "weights": lambda p, b, k: sk.Mean.of(projected(p, b).mean(-1), b["mask"]),
    "flat labels": flat_labels,
    "two views in one call": two_views,
    "a scan over time": scanned,
    "a loop over examples": mean_of(lambda p, b, k: lax.map(lambda x: jnp.sort(x @ p["w"], 0), b["x"])),
    "draws of keys": mean_of(noisy),
    "integer labels": mean_of(
        lambda p, b, k: optax.softmax_cross_entropy_with_integer_labels(projected(p, b)[:, 0], b["label"])
    ),
    "attention": mean_of(lambda p, b, k: jax.nn.softmax(jnp.einsum("btd,bsd->bts", b["x"], projected(p, b)))),
    "a gradient per example": mean_of(lambda p, b, k: jax.vmap(jax.grad(lambda y: jnp.sum((y @ p["w"]) ** 3)))(b["y"])),
    "a convolution": mean_of(  # examples, channels, time
        lambda p, b, k: lax.conv_general_dilated(b["x"].mT, p["w"][:, :, None], (1,), "SAME")
    ),
    "a solve per example": mean_of(lambda p, b, k: jnp.linalg.cholesky(b["x"] @ b["x"].mT + jnp.eye(T))),
    "a count by a loop": lambda p, b, k: sk.Mean(
        b["y"].sum() / len(b["y"]) + p["b"].sum(), lax.fori_loop(0, 3, lambda i, count: count + 1.0, 0.0)
    ),
    "two shared dims in another order": mean_of(  # dims 1 and 0 of the left are dims 0 and 1 of the right
        lambda p, b, k: jnp.einsum("tnd,ntd->nt", b["x"].swapaxes(0, 1), projected(p, b)) ** 2
    ),
    "bits as numbers of another width": mean_of(  # which have another rank
        lambda p, b, k: (
            b["y"] * lax.bitcast_convert_type(p["w"][:, :4].astype(jnp.uint8), jnp.float32)
            + lax.bitcast_convert_type(b["y"], jnp.uint8).mean(-1)
        )
    ),
    "a histogram per example": mean_of(
        lambda p, b, k: jax.vmap(lambda label: jnp.zeros(D).at[label].add(1.0))(b["label"][:, None])
    ),
}
# The words say how examples meet.
WRONG = {
    "pairs every example": mean_of(lambda p, b, k: jnp.diag(jax.nn.log_softmax(b["y"] @ p["w"] @ b["y"].T))),
    "with a sum over all": mean_of(lambda p, b, k: b["y"] - b["y"].mean(0)),
    "takes some of the examples": mean_of(lambda p, b, k: b["y"] - jnp.roll(b["y"], 1, 0)),
    "chooses among the examples": mean_of(lambda p, b, k: lax.top_k(b["y"].mean(-1), 2)[0]),
    "sqrt is applied to a sum": lambda p, b, k: jnp.sqrt(jnp.mean(b["y"] ** 2)),
    "is taken over the examples": lambda p, b, k: jax.nn.logsumexp(b["y"].sum(-1)),
    "the weight does not count them": lambda p, b, k: jnp.sum(b["y"] @ p["w"]),
    "combined with the number of examples": lambda p, b, k: jnp.mean(b["y"]) * jnp.arange(len(b["y"]), dtype="f").max(),
    "gather reads at indices that depend on the number of examples": mean_of(
        lambda p, b, k: jnp.asarray(PLACES)[b["label"].astype("uint32") * len(b["y"])] * b["y"].mean(-1)
    ),
    "a sum over the examples is combined": lambda p, b, k: (
        jnp.mean(b["y"]) * lax.fori_loop(0, len(b["y"]), lambda i, count: count + 1.0, 0.0)
    ),
    "depends on its place in the batch": mean_of(lambda p, b, k: b["y"].mean(-1) * PLACES[: len(b["y"])]),
    # Running sums of zeros are zeros, but those of exponentials grow along the batch: log(1), log(2), ...
    "mul combines an example with a value that depends on its place": mean_of(
        lambda p, b, k: b["y"].mean(-1) * lax.cumlogsumexp(jnp.zeros(len(b["y"])))
    ),
    "by its place in the batch": mean_of(lambda p, b, k: b["y"][b["label"]]),
    "orders the examples": mean_of(lambda p, b, k: jnp.sort(b["y"], 0)[0]),
    "runs over the examples": mean_of(lambda p, b, k: jnp.cumsum(b["y"], 0) ** 2),
    "carries one to the next": mean_of(
        lambda p, b, k: lax.scan(lambda c, x: (c * 0.9 + x,) * 2, jnp.zeros(D), b["y"])[1] ** 2
    ),
    "puts several examples into one row": mean_of(lambda p, b, k: b["y"].reshape(-1, 2 * D).max(-1)),
    "added to a sum over them": lambda p, b, k: sk.Mean(jnp.sum(b["y"]) + jnp.sum(p["w"]), jnp.float32(len(b["y"]))),
    "combines examples with the number of examples": mean_of(lambda p, b, k: jnp.exp(b["y"] / len(b["y"]))),
    "integer_pow is applied to a sum": square_of_a_sum,
    "gt is applied to a sum": lambda p, b, k: lax.cond(b["y"].sum() > 0, lambda: jnp.mean(b["y"]), lambda: 0.0),
    "the examples decide": mean_of(
        lambda p, b, k: lax.while_loop(lambda x: x.sum() > 1, lambda x: x / 2, jnp.abs(b["y"]))
    ),
    "at the place of an example": mean_of(
        lambda p, b, k: jax.vmap(lambda table, label: table[label])(
            jnp.outer(PLACES[: len(b["y"])], p["b"]), b["label"]
        )
    ),
    "runs for every example": mean_of(lambda p, b, k: lax.map(lambda x: lax.map(lambda y: x @ y, b["y"]), b["y"])),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_loss_that_adds_over_its_examples_is_seen_to(name):
    assert read(RIGHT[name]).met is None


@pytest.mark.parametrize("words", WRONG)
def test_where_examples_meet_is_said(words):
    met = read(WRONG[words]).met
    assert words in met.how
    assert "test_additive.py" in met.line or words == "the weight does not count them"


# What alone finds a rule that says too much: programs that nobody chose.
STEPS = {
    "scale": lambda x, p: 2 * x,
    "square": lambda x, p: x**2,
    "matmul": lambda x, p: x @ p["w"],
    "transpose": lambda x, p: x.T,
    "reverse": lambda x, p: x[::-1],
    "roll": lambda x, p: jnp.roll(x, 1, 1),
    "cumsum": lambda x, p: jnp.cumsum(x, 0),
    "cumsum of each": lambda x, p: jnp.cumsum(x, 1),
    "center": lambda x, p: x - x.mean(0),
    "center each": lambda x, p: x - x.mean(1, keepdims=True),
    "maximum": lambda x, p: x - x.max(),
    "sort": lambda x, p: jnp.sort(x, 0),
    "sort of each": lambda x, p: jnp.sort(x, 1),
    "double": lambda x, p: jnp.concatenate([x, x * x])[: len(x)],
    "pairs": lambda x, p: x @ x.T @ x,
    "shape": lambda x, p: x.reshape(-1).reshape(x.shape[1], -1) if x.shape[0] == x.shape[1] else x,
    "first": lambda x, p: x * x[:1],
    "place": lambda x, p: x + jnp.arange(x.shape[0])[:, None],
    "number": lambda x, p: x / len(x),
    "scan": lambda x, p: lax.scan(lambda c, row: (c, jnp.sin(row) + c), jnp.float32(0), x)[1],
    "carry": lambda x, p: lax.scan(lambda c, row: (c + row.sum(), row * c), jnp.float32(0), x)[1],
}
ENDS = {
    "mean": lambda x: sk.Mean.of(x),
    "sum": lambda x: sk.Mean(x.sum(), jnp.float32(1)),
    "root": lambda x: sk.Mean(jnp.sqrt(jnp.sum(x**2)), jnp.float32(len(x))),
    "mean of each": lambda x: sk.Mean.of(x.mean(1)),
    "masked": lambda x: sk.Mean.of(x, (x > 0).astype("f")),
}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=4), st.sampled_from(sorted(ENDS)))
def test_what_is_said_to_add_adds(steps, end):
    """Of 2 N examples the loss is the quotient of the sums of both halves, whenever the trace is said to show it."""

    def loss(params, batch, keys):
        x = batch["y"]
        for name in steps:
            if x.ndim == 2 and (name != "matmul" or x.shape[1] == D):
                x = STEPS[name](x, params)
        return ENDS[end](x)

    if read(loss).met is None:
        y = np.random.default_rng(0).normal(size=(2 * N, D)).astype("f")
        parts = [loss(PARAMS, {"y": part}, None) for part in (y[:N], y[N:])]
        total, weight = (sum(float(x) for x in pair) for pair in zip(*parts, strict=True))
        whole = loss(PARAMS, {"y": y}, None)
        np.testing.assert_allclose(whole.total * weight, total * float(whole.weight), rtol=1e-4, atol=1e-3)
