"""Gradients of what is replicated, and their norms."""

import jax
import jax.numpy as jnp
import numpy as np
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
    # wrong: return jnp.sum(g * y, 0)
    return sk.all_reduce(jnp.sum(g * y, 0), "model")


def scale_reference(x, scale, g):
    return jax.grad(lambda scale: jnp.sum(g * jnp.tanh(scaled(normed(x), scale))))(scale)


def out_norm(x, scale, g):
    y = normed(x)
    g = g * (1 - jnp.tanh(scaled(y, scale)) ** 2)
    # wrong: return sk.all_reduce(jnp.sum(g * y, (0, 1)), "data")
    return sk.all_reduce(jnp.sum(g * y, (0, 1)), ("data", "model"))


def sinks(sink, weight):
    # wrong: squares = sk.all_reduce(jnp.where(sk.axis_index("model") == 0, jnp.sum(sink**2), 0.0), "model")
    squares = sk.all_reduce(jnp.sum(sink**2), "model")
    norm = jnp.sqrt(squares + jnp.sum(weight**2))
    return sink / norm, weight / norm


def clipped(split, whole):
    norm = jnp.sqrt(jnp.sum(split**2) + jnp.sum(whole**2))
    return split / norm, whole / norm


def duplicates(split, whole):
    # wrong: squares = sk.all_reduce(jnp.sum(split**2) + jnp.sum(whole**2), "model")
    squares = sk.all_reduce(jnp.sum(split**2), "model") + jnp.sum(whole**2)
    return split / jnp.sqrt(squares), whole / jnp.sqrt(squares)


def partial_norm(x, g):
    grad = jnp.tanh(x).T @ g
    # wrong: return sk.all_reduce(jnp.sqrt(jnp.sum(grad**2)), "data")
    return jnp.sqrt(jnp.sum(sk.all_reduce(grad, "data") ** 2))


def total_inside(w, x):
    # wrong: return sk.all_reduce(jax.grad(lambda w: sk.all_reduce(jnp.sum(jnp.tanh(x @ w)), "data"))(w), "data")
    return sk.all_reduce(jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(sk.vary(w, "data")), "data")


def of_samples(w, x):
    # wrong: return jax.vmap(lambda x: jax.grad(lambda w: jnp.tanh(w @ x))(w))(x)
    return jax.vmap(lambda x: jax.grad(lambda w: jnp.tanh(w @ x))(sk.vary(w, "data")))(x)


def nudged(x, w):
    # wrong: start = jnp.zeros(x.shape)
    start = sk.vary(jnp.zeros(x.shape), "data")
    nudge = jax.grad(lambda d: jnp.sum(jnp.tanh((x + d) @ w)))(start)  # wrong with it
    return jnp.tanh((x + 0.5 * nudge) @ w)


def nudged_reference(x, w):
    nudge = jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w)))(x)
    return jnp.tanh((x + 0.5 * lax.stop_gradient(nudge) + 0.5 * (nudge - lax.stop_gradient(nudge))) @ w)


def frozen(x, w):
    # wrong: whole = sk.all_gather(w, "data")
    whole = sk.all_gather(lax.stop_gradient(w), "data")
    return jnp.tanh(x @ whole)


def unit(grad):
    # wrong: norm = jnp.sqrt(sk.all_reduce((jnp.sqrt(jnp.sum(grad**2)) + 1e-6) ** 2, "data"))
    norm = jnp.sqrt(sk.all_reduce(jnp.sum(grad**2), "data")) + 1e-6
    return grad / norm


def owned(expert, shared):
    # wrong: norm = sk.all_reduce(jnp.sqrt(jnp.sum(expert**2) + jnp.sum(shared**2)), "model", op="mean")
    norm = jnp.sqrt(sk.all_reduce(jnp.sum(expert**2), "model") + jnp.sum(shared**2))
    return expert / norm, shared / norm


def tied(x, g):
    """Of an embedding that two stages use: after each has reduce-scattered its buffer, they have other parts of it."""
    grad = jnp.tanh(x).T @ g
    # wrong: grad = jnp.where(sk.axis_index("data") == sk.axis_index("stage"), sk.all_reduce(grad, "data"), grad)
    grad = sk.all_reduce(grad, "data")
    return sk.all_reduce(grad, "stage")


def accumulated(w, x):
    def add(total, x):
        grad = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(sk.vary(w, "data"))
        # wrong: return grad, None
        return total + grad, None

    total, _ = lax.scan(add, sk.vary(jnp.zeros_like(w), "data"), x.reshape(2, 2, -1))
    return sk.all_reduce(total, "data")


def column_sums(rows):
    return jnp.sum(rows, 0, keepdims=True)


def batch_norm_gradient(x, mask, g):
    """Of the rows that are there: devices have other numbers of them."""
    own = jnp.sum(mask)
    count = sk.all_reduce(own, "data")
    mean = sk.all_reduce(column_sums(x * mask), "data") / count
    inverse = lax.rsqrt(sk.all_reduce(column_sums((x - mean) ** 2 * mask), "data") / count + 1e-5)
    y = (x - mean) * inverse
    sums = jnp.stack([column_sums(g * mask), column_sums(g * y * mask)])
    # wrong: means = sk.all_reduce(sums / own, "data", op="mean")
    means = sk.all_reduce(sums, "data") / count
    return inverse * mask * (g - means[0] - y * means[1])


def batch_norm_reference(x, mask, g):
    count = jnp.sum(mask)
    mean = column_sums(x * mask) / count
    inverse = lax.rsqrt(column_sums((x - mean) ** 2 * mask) / count + 1e-5)
    y = (x - mean) * inverse
    return inverse * mask * (g - column_sums(g * mask) / count - y * column_sums(g * y * mask) / count)


def gain_gradient(x, g):
    grad = jnp.sum(g * x, 0)  # of this device's tokens, in bfloat16
    # wrong: grad = sk.all_reduce(grad, "model").astype(jnp.float32)
    grad = sk.all_reduce(grad.astype(jnp.float32), "model")
    return sk.all_reduce(grad, "data")


def gain_reference(x, g):
    return jnp.sum((g * x).astype(jnp.float32), 0)


CASES = [
    Case("norm's gradient of a sequence shard", MEGATRON + "1446", scale_gradient).against(
        scale_reference, (floats(4, 3), floats(3), floats(4, 3) ** 2), (SEQUENCE, P(), SEQUENCE), P(), grad=False
    ),
    Case("output norm's gradient of a device's heads", MEGATRON + "7452", out_norm).against(
        scale_reference, (floats(4, 2, 3), floats(3), floats(4, 2, 3) ** 2), (HEADS, P(), HEADS), P(), grad=False
    ),
    Case("attention sinks of one device in the norm", MEGATRON + "7452", sinks).against(
        clipped, (floats(4), floats(3)), (SEQUENCE, P()), (SEQUENCE, P())
    ),
    Case(
        "replicated weights counted often in the norm", "https://github.com/ROCm/TransformerEngine/pull/715", duplicates
    ).against(clipped, (floats(4), floats(3)), (SEQUENCE, P()), (SEQUENCE, P())),
    Case("sum of the norms of partial gradients", TORCH + "pull/159856", partial_norm).against(
        lambda x, g: jnp.sqrt(jnp.sum((jnp.tanh(x).T @ g) ** 2)), (floats(4, 3), floats(4, 2)), (ROWS, ROWS), P()
    ),
    Case("gradient of a total, summed again", JAX + "3970", total_inside).against(
        lambda w, x: jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w),
        (floats(3), floats(4, 3)),
        (P(), ROWS),
        P(),
        grad=False,
    ),
    Case("per-sample gradients of replicated parameters", JAX + "36886", of_samples).against(
        lambda w, x: jax.vmap(jax.grad(lambda w, x: jnp.tanh(w @ x)), (None, 0))(w, x),
        (floats(3), floats(4, 3)),
        (P(), ROWS),
        ROWS,
        grad=False,
    ),
    Case("inner gradient of a constant", CHANGELOG, nudged).against(
        nudged_reference, (floats(4, 3), floats(3) ** 2), (ROWS, P()), ROWS
    ),
    Case("frozen layer is trained", CHANGELOG, frozen).against(
        lambda x, w: jnp.tanh(x @ lax.stop_gradient(w)), (floats(4, 6), floats(6, 3)), (ROWS, ROWS), ROWS
    ),
    Case("epsilon added on each device", TORCH + "issues/149768", unit).against(
        lambda grad: grad / (jnp.sqrt(jnp.sum(grad**2)) + 1e-6), (floats(4),), (ROWS,), ROWS
    ),
    Case("norms of other experts averaged", "https://github.com/deepspeedai/DeepSpeed/issues/8475", owned).against(
        clipped, (floats(4), floats(3)), (SEQUENCE, P()), (SEQUENCE, P())
    ),
    Case("tied embedding's gradient after a reduce-scatter", MEGATRON + "844", tied).against(
        lambda x, g: jnp.tanh(x).T @ g,
        (floats(8, 3), floats(8, 2)),
        (P(("data", "stage")), P(("data", "stage"))),
        P(),
        grad=False,
    ),
    Case("last microbatch's gradient alone", "https://github.com/NVIDIA-NeMo/Automodel/pull/3530", accumulated).against(
        lambda w, x: jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w),
        (floats(3), floats(8, 3)),
        (P(), ROWS),
        P(),
        grad=False,
    ),
    Case("batch norm's backward pass averages means", TORCH + "pull/36382", batch_norm_gradient).against(
        batch_norm_reference,
        (floats(8, 3), np.array([[1]] * 6 + [[0]] * 2, np.float32), floats(8, 3) ** 2),
        (ROWS, ROWS, ROWS),
        ROWS,
        grad=False,
    ),
    Case("gradient summed in bfloat16 over tensor parallelism", TORCH + "issues/190626", gain_gradient).against(
        gain_reference,
        (floats(8, 3).astype(jnp.bfloat16), floats(8, 3).astype(jnp.bfloat16) ** 2),
        (P(("data", "model")), P(("data", "model"))),
        P(),
        grad=False,
    ),
]
