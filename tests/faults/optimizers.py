"""Optimizers on shards: norms, moments, averages, accumulation; iterations of linear algebra."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from corpus.case import floats
from faults.case import planted

SHARD, BATCH, GRID = P("fsdp"), P("dp"), P("r", "c")


def global_clip(a, b):
    squares = (a * a).sum() + (b * b).sum()
    # fault: norm = jnp.sqrt(lax.psum(squares, "c"))
    norm = jnp.sqrt(lax.psum(squares, ("r", "c")))
    scale = 1.0 / jnp.maximum(norm, 1.0)
    return a * scale, b * scale


def global_clip_reference(a, b):
    scale = 1.0 / jnp.maximum(jnp.sqrt((a * a).sum() + (b * b).sum()), 1.0)
    return a * scale, b * scale


def double_counted(a, b):
    """A parameter that is split, and one that all have."""
    # fault: norm = jnp.sqrt(lax.psum((a * a).sum() + (b * b).sum(), "fsdp"))
    norm = jnp.sqrt(lax.psum((a * a).sum(), "fsdp") + (b * b).sum())
    scale = 1.0 / jnp.maximum(norm, 1.0)
    return a * scale, b * scale


def adam(param, grad, m, v):
    grad = lax.pmean(grad, "dp")
    m = 0.875 * m + 0.125 * grad
    # fault: v = 0.75 * v + 0.25 * grad
    v = 0.75 * v + 0.25 * grad * grad
    return param - 0.5 * (m / (1 - 0.875)) / (jnp.sqrt(v / (1 - 0.75)) + 1e-8), m, v


def adam_bias(param, grad, m, v):
    grad = lax.pmean(grad, "dp")
    m, v = 0.875 * m + 0.125 * grad, 0.75 * v + 0.25 * grad * grad
    # fault: m_hat, v_hat = m / (1 - 0.75), v / (1 - 0.875)
    m_hat, v_hat = m / (1 - 0.875), v / (1 - 0.75)
    return param - 0.5 * m_hat / (jnp.sqrt(v_hat) + 1e-8), m, v


def adam_reference(param, grad, m, v):
    grad = grad.reshape(2, 2, 3).mean(0)
    m, v = 0.875 * m + 0.125 * grad, 0.75 * v + 0.25 * grad * grad
    return param - 0.5 * (m / (1 - 0.875)) / (jnp.sqrt(v / (1 - 0.75)) + 1e-8), m, v


def averaged(ema, param, grad):
    grad = sk.reduce_scatter(grad, "fsdp")
    param = param - 0.5 * grad
    # fault: ema = 0.125 * ema + 0.875 * param
    ema = 0.875 * ema + 0.125 * param
    return ema, param


def averaged_reference(ema, param, grad):
    param = param - 0.5 * grad.reshape(2, 4, 3).sum(0)
    return 0.875 * ema + 0.125 * param, param


def accumulation(w, x, y):
    """Gradients of micro-batches, summed, then averaged over devices."""

    def loss(w, x, y):
        return jnp.mean((x @ w - y) ** 2)

    micro = x.shape[0] // 2
    grad = jnp.zeros_like(w)
    for i in range(2):
        rows = slice(i * micro, (i + 1) * micro)
        grad = grad + jax.grad(loss)(sk.vary(w, "dp"), x[rows], y[rows])
    # fault: return lax.pmean(grad, "dp")
    return lax.pmean(grad / 2, "dp")


def accumulation_reference(w, x, y):
    return jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)


def weight_decay(w, grad):
    # fault: total = lax.psum_scatter(grad + 0.5 * lax.all_gather(w, "fsdp", tiled=True), "fsdp", tiled=True)
    total = lax.psum_scatter(grad, "fsdp", tiled=True) + 0.5 * w
    return w - 0.25 * total


def weight_decay_reference(w, grad):
    return w - 0.25 * (grad.reshape(2, 4, 3).sum(0) + 0.5 * w)


def trust_ratio(w, update):
    # fault: size = jnp.sqrt((w * w).sum())
    size = jnp.sqrt(lax.psum((w * w).sum(), "fsdp"))
    step = jnp.sqrt(lax.psum((update * update).sum(), "fsdp"))
    return w - 0.5 * size / step * update


def trust_ratio_reference(w, update):
    return w - 0.5 * jnp.sqrt((w * w).sum()) / jnp.sqrt((update * update).sum()) * update


def factored(grad):
    """Second moments of rows and columns, as Adafactor has them."""
    square = grad * grad
    rows = lax.pmean(square.mean(1), "c")
    # fault: cols = lax.pmean(square.mean(0), "c")
    cols = lax.pmean(square.mean(0), "r")
    total = lax.pmean(square.mean(), ("r", "c"))
    return grad * lax.rsqrt(rows[:, None] * cols[None] / total)


def factored_reference(grad):
    square = grad * grad
    rows, cols = square.mean(1), square.mean(0)
    return grad * lax.rsqrt(rows[:, None] * cols[None] / square.mean())


def momentum(w, velocity, grad):
    # fault: grad = sk.reduce_scatter(grad, "fsdp")
    grad = sk.reduce_scatter(grad, "fsdp", op="mean")
    velocity = 0.875 * velocity + grad
    return w - 0.5 * velocity, velocity


def momentum_reference(w, velocity, grad):
    velocity = 0.875 * velocity + grad.reshape(2, 4, 3).mean(0)
    return w - 0.5 * velocity, velocity


def power_iteration(a, v):
    """Rows of a matrix on each device; two rounds."""
    for _ in range(2):
        part = a @ v
        # fault: norm = jnp.sqrt((part * part).sum())
        norm = jnp.sqrt(lax.psum((part * part).sum(), "dp"))
        v = lax.all_gather(part / norm, "dp", tiled=True)
    return v


def power_iteration_reference(a, v):
    for _ in range(2):
        v = a @ v
        v = v / jnp.sqrt((v * v).sum())
    return v


def k_means(x, labels):
    hot = jax.nn.one_hot(labels, 2)
    sums = lax.psum(hot.T @ x, "dp")
    # fault: counts = hot.sum(0)
    counts = lax.psum(hot.sum(0), "dp")
    return sums / counts[:, None]


def k_means_reference(x, labels):
    hot = jax.nn.one_hot(labels, 2)
    return hot.T @ x / hot.sum(0)[:, None]


def sinkhorn(scores):
    plan = jnp.exp(scores)
    for _ in range(2):
        plan = plan / lax.psum(plan.sum(1, keepdims=True), "c")
        # fault: plan = plan / lax.psum(plan.sum(0, keepdims=True), "c")
        plan = plan / lax.psum(plan.sum(0, keepdims=True), "r")
    return plan


def sinkhorn_reference(scores):
    plan = jnp.exp(scores)
    for _ in range(2):
        plan = plan / plan.sum(1, keepdims=True)
        plan = plan / plan.sum(0, keepdims=True)
    return plan


def gram_step(x):
    """A round of Newton and Schulz, with columns split."""
    gram = lax.psum(x @ x.T, "c")
    # fault: return 1.5 * x - 0.5 * x @ gram[: x.shape[1], : x.shape[1]]
    return 1.5 * x - 0.5 * gram @ x


PAIR = (floats(4, 4), floats(4, 4) + 1)
W, G = floats(4, 3), floats(8, 3)
ADAM = (floats(2, 3), floats(4, 3), floats(2, 3) + 1, floats(2, 3) ** 2)
CASES = [
    planted(global_clip, global_clip_reference, PAIR, (GRID, GRID), (GRID, GRID), r=2, c=2),
    planted(double_counted, global_clip_reference, PAIR, (SHARD, P()), (SHARD, P()), fsdp=2),
    planted(adam, adam_reference, ADAM, (P(), BATCH, P(), P()), P(), dp=2, grad=0),
    planted(adam_bias, adam_reference, ADAM, (P(), BATCH, P(), P()), P(), dp=2, grad=0),
    planted(averaged, averaged_reference, (W, W + 1, G), (SHARD, SHARD, SHARD), (SHARD, SHARD), fsdp=2),
    planted(accumulation, accumulation_reference, (floats(3), G, floats(8)), (P(), BATCH, BATCH), P(), dp=2, grad=0),
    planted(weight_decay, weight_decay_reference, (W, G), (SHARD, SHARD), SHARD, fsdp=2),
    planted(trust_ratio, trust_ratio_reference, (W, W + 1), (SHARD, SHARD), SHARD, fsdp=2),
    planted(factored, factored_reference, PAIR[:1], (GRID,), GRID, r=2, c=2, grad=0),
    planted(momentum, momentum_reference, (W, W + 1, G), (SHARD, SHARD, SHARD), (SHARD, SHARD), fsdp=2),
    planted(power_iteration, power_iteration_reference, (PAIR[0], floats(4)), (BATCH, P()), P(), dp=2, grad=0),
    planted(k_means, k_means_reference, (G, np.array([0, 1, 1, 0, 1, 1, 1, 0])), (BATCH, BATCH), P(), dp=2),
    planted(sinkhorn, sinkhorn_reference, PAIR[:1], (GRID,), GRID, r=2, c=2),
    planted(
        gram_step, lambda x: 1.5 * x - 0.5 * x @ x.T @ x, (floats(2, 4),), (P(None, "c"),), P(None, "c"), c=2
    ),
]  # fmt: skip
