"""Communication by hand: rings, trees, compression, federated rounds, pipelines."""

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from corpus.case import floats
from faults.case import planted

SHARD, GRID, STAGES = P("dp"), P(("outer", "inner")), P("pp")


def ring_sum(x):
    """Scattered sums round a ring, then the sums round it again."""
    n, i = lax.axis_size("dp"), lax.axis_index("dp")
    onward = [(j, (j + 1) % n) for j in range(n)]
    pieces = x.reshape(n, -1)
    travelling = pieces[i]
    for step in range(1, n):
        travelling = lax.ppermute(travelling, "dp", onward)
        # fault: travelling = travelling + pieces[(i + step) % n]
        travelling = travelling + pieces[(i - step) % n]
    out = jnp.zeros_like(pieces)
    for step in range(n):
        out = out.at[(i + 1 - step) % n].set(travelling)
        travelling = lax.ppermute(travelling, "dp", onward)
    return out.reshape(x.shape)


def doubling_hops(x):
    """Partners at distances 1, 2, ... exchange their sums."""
    n, distance = lax.axis_size("dp"), 1
    while distance < n:
        partners = [(j, j ^ distance) for j in range(n)]
        # fault: x = x + lax.ppermute(x, "dp", [(j, j ^ 1) for j in range(n)])
        x = x + lax.ppermute(x, "dp", partners)
        distance *= 2
    return x


def hierarchical(x):
    """Scattered within a host, summed between hosts, gathered within them."""
    part = lax.psum_scatter(x, "inner", tiled=True)
    # fault: part = lax.psum(part, "inner")
    part = lax.psum(part, "outer")
    return lax.all_gather(part, "inner", tiled=True)


def low_rank(gradient, right):
    """A rank-one factor of the mean gradient, as PowerSGD sends it."""
    n = lax.axis_size("dp")
    left = lax.psum(gradient @ right, "dp") / n
    left = left / jnp.sqrt((left * left).sum())
    # fault: back = gradient.T @ left
    back = lax.psum(gradient.T @ left, "dp") / n
    return left[:, None] * back[None]


def low_rank_reference(gradient, right):
    mean = gradient.reshape(2, 3, 2).mean(0)
    left = mean @ right
    left = left / jnp.sqrt((left * left).sum())
    return left[:, None] * (mean.T @ left)[None]


def error_feedback(gradient, error):
    """What a device does not send it keeps for the next step."""
    wanted = gradient + error
    sent = jnp.where(jnp.abs(wanted) > 0.5, wanted, 0.0)
    # fault: kept = gradient - sent
    kept = wanted - sent
    return lax.pmean(sent, "dp"), kept


def error_feedback_reference(gradient, error):
    wanted = gradient + error
    sent = jnp.where(jnp.abs(wanted) > 0.5, wanted, 0.0)
    return sent.reshape(2, 3).mean(0), wanted - sent


def outer_momentum(start, worker, velocity):
    """A round of DiLoCo: the mean of the workers' moves is the gradient of an outer step."""
    moved = start - worker
    # fault: gradient = lax.psum(moved, "dp")
    gradient = lax.pmean(moved, "dp")
    velocity = 0.75 * velocity + gradient
    return start - 0.5 * (gradient + 0.75 * velocity), velocity


def outer_momentum_reference(start, worker, velocity):
    gradient = start - worker.reshape(2, 3).mean(0)
    velocity = 0.75 * velocity + gradient
    return start - 0.5 * (gradient + 0.75 * velocity), velocity


def gossip(x):
    n = lax.axis_size("dp")
    left = lax.ppermute(x, "dp", [(j, (j + 1) % n) for j in range(n)])
    right = lax.ppermute(x, "dp", [(j, (j - 1) % n) for j in range(n)])
    # fault: return 0.5 * x + 0.25 * left + 0.25 * left
    return 0.5 * x + 0.25 * left + 0.25 * right


def pipelined(weights, batch):
    """Two stages and three microbatches: a device gets what the one before it computed a tick ago."""
    n, i = lax.axis_size("pp"), lax.axis_index("pp")
    arriving = jnp.zeros_like(batch[0])
    done = []
    for tick in range(batch.shape[0] + n - 1):
        entering = batch[min(tick, batch.shape[0] - 1)]
        x = jnp.where(i == 0, entering, arriving)
        y = jnp.tanh(x @ weights[0])
        done.append(y)
        arriving = lax.ppermute(y, "pp", [(j, j + 1) for j in range(n - 1)])
    # fault: last = jnp.stack(done[: batch.shape[0]])
    last = jnp.stack(done[n - 1 :])
    return lax.psum(jnp.where(i == n - 1, last, 0.0), "pp")


G = floats(6, 2)
CASES = [
    planted(ring_sum, lambda x: x.reshape(3, 6).sum(0), (floats(18),), (SHARD,), P(), dp=3, grad=0),
    planted(doubling_hops, lambda x: x.reshape(4, 2).sum(0), (floats(8),), (SHARD,), P(), dp=4, grad=0),
    planted(hierarchical, lambda x: x.reshape(4, 4).sum(0), (floats(16),), (GRID,), P(), outer=2, inner=2, grad=0),
    planted(low_rank, low_rank_reference, (G, floats(2)), (SHARD, P()), P(), dp=2, grad=0),
    planted(
        error_feedback, error_feedback_reference, (floats(6), floats(6) + 1), (SHARD, SHARD), (P(), SHARD), dp=2
    ),
    planted(
        outer_momentum, outer_momentum_reference, (floats(3), floats(6), floats(3) + 1), (P(), SHARD, P()), (P(), P()),
        dp=2,
    ),
    planted(
        gossip, lambda x: 0.5 * x + 0.25 * jnp.roll(x, 2) + 0.25 * jnp.roll(x, -2), (floats(8),), (SHARD,), SHARD, dp=4
    ),
    planted(
        pipelined, lambda w, b: jnp.tanh(jnp.tanh(b @ w[0]) @ w[1]), (floats(2, 2, 2), floats(3, 1, 2)), (STAGES, P()),
        P(), pp=2,
    ),
]  # fmt: skip
