"""Gradients of what is replicated, and their norms."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from corpus.case import CHANGELOG, MEGATRON, TORCH, Case, floats

ROWS, SEQUENCE, HEADS = P("data"), P("model"), P("data", "model")
JAX = "https://github.com/jax-ml/jax/issues/"


def normed(x):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)


def scaled(y, scale):
    return y * jnp.broadcast_to(scale, y.shape)


def scale_gradient(x, scale, g):
    y = normed(x)
    g = g * (1 - jnp.tanh(scaled(y, scale)) ** 2)
    return sk.all_reduce(jnp.sum(g * y, 0), "model")


def scale_gradient_wrong(x, scale, g):
    y = normed(x)
    g = g * (1 - jnp.tanh(scaled(y, scale)) ** 2)
    return jnp.sum(g * y, 0)  # wrong


def scale_reference(x, scale, g):
    return jax.grad(lambda scale: jnp.sum(g * jnp.tanh(scaled(normed(x), scale))))(scale)


def out_norm(x, scale, g):
    y = normed(x)
    g = g * (1 - jnp.tanh(scaled(y, scale)) ** 2)
    return sk.all_reduce(jnp.sum(g * y, (0, 1)), ("data", "model"))


def out_norm_wrong(x, scale, g):
    y = normed(x)
    g = g * (1 - jnp.tanh(scaled(y, scale)) ** 2)
    return sk.all_reduce(jnp.sum(g * y, (0, 1)), "data")  # wrong


def sinks(sink, weight):
    squares = sk.all_reduce(jnp.sum(sink**2), "model")
    norm = jnp.sqrt(squares + jnp.sum(weight**2))
    return sink / norm, weight / norm


def sinks_wrong(sink, weight):
    squares = sk.all_reduce(jnp.where(sk.axis_index("model") == 0, jnp.sum(sink**2), 0.0), "model")  # wrong
    norm = jnp.sqrt(squares + jnp.sum(weight**2))
    return sink / norm, weight / norm


def clipped(split, whole):
    norm = jnp.sqrt(jnp.sum(split**2) + jnp.sum(whole**2))
    return split / norm, whole / norm


def duplicates(split, whole):
    squares = sk.all_reduce(jnp.sum(split**2), "model") + jnp.sum(whole**2)
    return split / jnp.sqrt(squares), whole / jnp.sqrt(squares)


def duplicates_wrong(split, whole):
    squares = sk.all_reduce(jnp.sum(split**2) + jnp.sum(whole**2), "model")  # wrong
    return split / jnp.sqrt(squares), whole / jnp.sqrt(squares)


def partial_norm(x, g):
    grad = jnp.tanh(x).T @ g
    return jnp.sqrt(jnp.sum(sk.all_reduce(grad, "data") ** 2))


def partial_norm_wrong(x, g):
    grad = jnp.tanh(x).T @ g
    return sk.all_reduce(jnp.sqrt(jnp.sum(grad**2)), "data")  # wrong


def total_inside(w, x):
    return sk.all_reduce(jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(sk.vary(w, "data")), "data")


def total_inside_wrong(w, x):
    return sk.all_reduce(jax.grad(lambda w: sk.all_reduce(jnp.sum(jnp.tanh(x @ w)), "data"))(w), "data")  # wrong


def of_samples(w, x):
    return jax.vmap(lambda x: jax.grad(lambda w: jnp.tanh(w @ x))(sk.vary(w, "data")))(x)


def of_samples_wrong(w, x):
    return jax.vmap(lambda x: jax.grad(lambda w: jnp.tanh(w @ x))(w))(x)  # wrong


def nudged(x, w):
    start = sk.vary(jnp.zeros(x.shape), "data")
    nudge = jax.grad(lambda d: jnp.sum(jnp.tanh((x + d) @ w)))(start)
    return jnp.tanh((x + 0.5 * nudge) @ w)


def nudged_wrong(x, w):
    start = jnp.zeros(x.shape)  # wrong
    nudge = jax.grad(lambda d: jnp.sum(jnp.tanh((x + d) @ w)))(start)  # wrong
    return jnp.tanh((x + 0.5 * nudge) @ w)


def nudged_reference(x, w):
    nudge = jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w)))(x)
    return jnp.tanh((x + 0.5 * lax.stop_gradient(nudge) + 0.5 * (nudge - lax.stop_gradient(nudge))) @ w)


def frozen(x, w):
    whole = sk.all_gather(lax.stop_gradient(w), "data")
    return jnp.tanh(x @ whole)


def frozen_wrong(x, w):
    whole = sk.all_gather(w, "data")  # wrong
    return jnp.tanh(x @ whole)


CASES = [
    Case(
        "norm's gradient of a sequence shard",
        MEGATRON + "1446",
        scale_gradient,
        scale_gradient_wrong,
        scale_reference,
        ((floats(4, 3), floats(3), floats(4, 3) ** 2), (SEQUENCE, P(), SEQUENCE), P()),
        {"model": 2},
        False,
    ),
    Case(
        "output norm's gradient of a device's heads",
        MEGATRON + "7452",
        out_norm,
        out_norm_wrong,
        scale_reference,
        ((floats(4, 2, 3), floats(3), floats(4, 2, 3) ** 2), (HEADS, P(), HEADS), P()),
        {"data": 2, "model": 2},
        False,
    ),
    Case(
        "attention sinks of one device in the norm",
        MEGATRON + "7452",
        sinks,
        sinks_wrong,
        clipped,
        ((floats(4), floats(3)), (SEQUENCE, P()), (SEQUENCE, P())),
        {"model": 2},
    ),
    Case(
        "replicated weights counted often in the norm",
        "https://github.com/ROCm/TransformerEngine/pull/715",
        duplicates,
        duplicates_wrong,
        clipped,
        ((floats(4), floats(3)), (SEQUENCE, P()), (SEQUENCE, P())),
        {"model": 2},
    ),
    Case(
        "sum of the norms of partial gradients",
        TORCH + "pull/159856",
        partial_norm,
        partial_norm_wrong,
        lambda x, g: jnp.sqrt(jnp.sum((jnp.tanh(x).T @ g) ** 2)),
        ((floats(4, 3), floats(4, 2)), (ROWS, ROWS), P()),
        {"data": 2},
    ),
    Case(
        "gradient of a total, summed again",
        JAX + "3970",
        total_inside,
        total_inside_wrong,
        lambda w, x: jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w),
        ((floats(3), floats(4, 3)), (P(), ROWS), P()),
        {"data": 2},
        False,
    ),
    Case(
        "per-sample gradients of replicated parameters",
        JAX + "36886",
        of_samples,
        of_samples_wrong,
        lambda w, x: jax.vmap(jax.grad(lambda w, x: jnp.tanh(w @ x)), (None, 0))(w, x),
        ((floats(3), floats(4, 3)), (P(), ROWS), ROWS),
        {"data": 2},
        False,
    ),
    Case(
        "inner gradient of a constant",
        CHANGELOG,
        nudged,
        nudged_wrong,
        nudged_reference,
        ((floats(4, 3), floats(3) ** 2), (ROWS, P()), ROWS),
        {"data": 2},
    ),
    Case(
        "frozen layer is trained",
        CHANGELOG,
        frozen,
        frozen_wrong,
        lambda x, w: jnp.tanh(x @ lax.stop_gradient(w)),
        ((floats(4, 6), floats(6, 3)), (ROWS, ROWS), ROWS),
        {"data": 2},
    ),
]
