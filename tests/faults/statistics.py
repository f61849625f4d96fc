"""Statistics of what is split: extrema, histograms, sorts, samples."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from corpus.case import floats
from faults.case import planted

PART, COLS = P("dp"), P(None, "tp")


def at_largest(scores, values):
    """The value beside the largest score."""
    top = lax.pmax(scores.max(), "dp")
    # fault: hit = scores == scores.max()
    hit = scores == top
    return lax.psum(jnp.where(hit, values, 0.0).sum(), "dp")


def at_largest_reference(scores, values):
    return jnp.where(scores == scores.max(), values, 0.0).sum()


def top_two(x):
    """The sum of what is among the two largest of a row."""
    local = lax.top_k(x, 2)[0]
    both = lax.all_gather(local, "tp", axis=1, tiled=True)
    # fault: threshold = local[:, -1:]
    threshold = lax.top_k(both, 2)[0][:, -1:]
    return lax.psum(jnp.where(x >= threshold, x, 0.0).sum(1), "tp")


def top_two_reference(x):  # of equal numbers all are among the largest, or none
    threshold = lax.top_k(x, 2)[0][:, -1:]
    return jnp.where(x >= threshold, x, 0.0).sum(1)


def histogram(x, bins):
    """Sums of what falls in each bin, which the batch says."""
    bands = 4
    rows = bins.shape[0]
    first = lax.axis_index("dp") * rows
    # fault: band = (bins + first) % bands
    band = (bins + 0 * first) % bands
    hot = jnp.float32(band[:, None] == jnp.arange(bands)[None])
    return lax.psum(hot.T @ x, "dp")


def histogram_reference(x, bins):
    return jax.nn.one_hot(bins % 4, 4).T @ x


def exchange_sort(x):
    """Neighbours exchange; the left one keeps what is smaller."""
    n, i = lax.axis_size("dp"), lax.axis_index("dp")
    for t in range(n):
        pairs = [(j, j + 1) for j in range(t % 2, n - 1, 2)]
        other = lax.ppermute(x, "dp", pairs + [(b, a) for a, b in pairs])
        paired = (i >= t % 2) & (i < t % 2 + 2 * len(pairs))
        # fault: left = (i - t) % 2 == 1
        left = (i - t) % 2 == 0
        kept = jnp.where(left, jnp.minimum(x, other), jnp.maximum(x, other))
        x = jnp.where(paired, kept, x)
    return x


def median(x):
    every = jnp.sort(lax.all_gather(x, "dp", tiled=True))
    # fault: middle = x.shape[0] // 2
    middle = every.shape[0] // 2
    return every[middle]  # wrong with it


def ranges(x):
    low = lax.pmin(x.min(0), "dp")
    # fault: high = lax.pmax(x.min(0), "dp")
    high = lax.pmax(x.max(0), "dp")
    return (x - low[None]) / (high - low)[None]


def ranges_reference(x):
    return (x - x.min(0)[None]) / (x.max(0) - x.min(0))[None]


def covariance(x, y):
    n = x.shape[0] * lax.axis_size("dp")
    mean_x, mean_y = lax.psum(x.sum(0), "dp") / n, lax.psum(y.sum(0), "dp") / n
    products = lax.psum(x.T @ y, "dp")
    # fault: return (products - jnp.outer(mean_x, mean_y)) / n
    return products / n - jnp.outer(mean_x, mean_y)


def covariance_reference(x, y):
    return x.T @ y / 6 - jnp.outer(x.mean(0), y.mean(0))


def stratified(x, groups):
    """A mean of each group, then of groups."""
    hot = jax.nn.one_hot(groups, 2)
    sums, counts = hot.T @ x, hot.sum(0)
    # fault: means = lax.pmean(sums / counts, "dp")
    means = lax.psum(sums, "dp") / lax.psum(counts, "dp")
    return means.mean()


def stratified_reference(x, groups):
    hot = jax.nn.one_hot(groups, 2)
    return (hot.T @ x / hot.sum(0)).mean()


def moving(x, weights):
    total = sk.all_reduce((x * weights).sum(), "dp")
    # fault: mass = sk.all_reduce(weights, "dp", op="mean").sum()
    mass = sk.all_reduce(weights.sum(), "dp")
    return total / mass


GROUPS = np.array([0, 1, 1, 0, 0, 1])
CASES = [
    planted(at_largest, at_largest_reference, (floats(4), floats(4) + 1), (PART, PART), P(), dp=2, grad=0),
    planted(top_two, top_two_reference, (floats(2, 6),), (COLS,), P(), tp=2, grad=0),
    planted(histogram, histogram_reference, (floats(4, 2), np.array([3, 1, 2, 6])), (PART, PART), P(), dp=2),
    planted(exchange_sort, jnp.sort, (floats(4),), (PART,), PART, dp=4, grad=0),
    planted(median, lambda x: jnp.sort(x)[3], (floats(6),), (PART,), P(), dp=2, grad=0),
    planted(ranges, ranges_reference, (floats(4, 2),), (PART,), PART, dp=2, grad=0),
    planted(covariance, covariance_reference, (floats(6, 2), floats(6, 2) + 1), (PART, PART), P(), dp=3),
    planted(stratified, stratified_reference, (floats(6), GROUPS), (PART, PART), P(), dp=2),
    planted(
        moving, lambda x, w: (x * w).sum() / w.sum(), (floats(4), floats(4) + 1), (PART, PART), P(), dp=2
    ),
]  # fmt: skip
