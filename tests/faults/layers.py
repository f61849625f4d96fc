"""Layers whose weights, features or images are split."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from corpus.case import floats
from faults.case import planted

COLS, ROWS, BATCH, GRID = P(None, "tp"), P("tp"), P("dp"), P("r", "c")


def mlp_bias(x, up, up_bias, down, down_bias):
    hidden = jax.nn.relu(x @ up + up_bias[None])
    # fault: return lax.psum(hidden @ down + down_bias[None], "tp")
    return lax.psum(hidden @ down, "tp") + down_bias[None]


def mlp_reference(x, up, up_bias, down, down_bias):
    return jax.nn.relu(x @ up + up_bias[None]) @ down + down_bias[None]


def gated_mlp(x, gate, up, down):
    a, b = x @ gate, x @ up
    # fault: hidden = jax.nn.silu(b) * a
    hidden = jax.nn.silu(a) * b
    return sk.all_reduce(hidden @ down, "tp")


def two_layers(x, w1, w2, w3):
    h = lax.psum(jnp.tanh(x @ w1) @ w2, "tp")
    h = jnp.tanh(h)
    # fault: scattered = lax.psum_scatter(h @ w3, "tp", scatter_dimension=1, tiled=True)
    scattered = h @ w3
    return lax.all_gather(scattered, "tp", axis=1, tiled=True)


def rms_norm(x, gain):
    # fault: mean = jnp.mean(x * x, 1, keepdims=True)
    mean = lax.pmean(jnp.mean(x * x, 1, keepdims=True), "tp")
    return x * lax.rsqrt(mean + 1e-6) * gain[None]


def rms_norm_reference(x, gain):
    return x * lax.rsqrt(jnp.mean(x * x, 1, keepdims=True) + 1e-6) * gain[None]


def layer_norm(x, gain, bias):
    mean = lax.pmean(x.mean(1, keepdims=True), "tp")
    # fault: centred = x - x.mean(1, keepdims=True)
    centred = x - mean
    variance = lax.pmean((centred * centred).mean(1, keepdims=True), "tp")
    return centred * lax.rsqrt(variance + 1e-5) * gain[None] + bias[None]


def layer_norm_width(x, gain, bias):
    # fault: width = x.shape[1]
    width = x.shape[1] * lax.axis_size("tp")
    mean = lax.psum(x.sum(1, keepdims=True), "tp") / width  # wrong with it
    centred = x - mean
    variance = lax.psum((centred**2).sum(1, keepdims=True), "tp") / width  # wrong with it
    return centred * lax.rsqrt(variance + 1e-5) * gain[None] + bias[None]


def layer_norm_reference(x, gain, bias):
    centred = x - x.mean(1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(1, keepdims=True) + 1e-5) * gain[None] + bias[None]


def batch_norm(x):
    mean = lax.pmean(x.mean(0), "dp")
    # fault: square = lax.pmean((x * x).mean(0), "tp")
    square = lax.pmean((x * x).mean(0), "dp")
    return (x - mean[None]) * lax.rsqrt(square - mean**2 + 1e-5)[None]


def batch_norm_reference(x):
    mean = x.mean(0)
    return (x - mean[None]) * lax.rsqrt((x * x).mean(0) - mean**2 + 1e-5)[None]


def merged_variance(x):
    """By the formula of Chan: the squares within devices, and those between them."""
    n = x.shape[0]
    mean, within = x.mean(0), ((x - x.mean(0)[None]) ** 2).sum(0)
    grand = lax.pmean(mean, "dp")
    # fault: between = lax.psum((mean - grand) ** 2, "dp")
    between = lax.psum(n * (mean - grand) ** 2, "dp")
    return (lax.psum(within, "dp") + between) / (n * lax.axis_size("dp"))


def embedding(table, tokens):
    rows = table.shape[0]
    local = tokens - lax.axis_index("tp") * rows
    inside = (local >= 0) & (local < rows)
    found = table[jnp.where(inside, local, 0)]
    # fault: return lax.psum(found, "tp")
    return lax.psum(jnp.where(inside[:, None], found, 0.0), "tp")


def embedding_offset(table, tokens):
    rows = table.shape[0]
    # fault: hot = jax.nn.one_hot(tokens - lax.axis_index("tp") * rows - 1, rows)
    hot = jax.nn.one_hot(tokens - lax.axis_index("tp") * rows, rows)
    return lax.psum(hot @ table, "tp")


def tied_head(table, h):
    logits = h @ table.T
    # fault: return lax.all_gather(logits.T, "tp", axis=0, tiled=True).reshape(2, 4)
    return lax.all_gather(logits, "tp", axis=1, tiled=True)


def summa(a, b):
    n = lax.axis_size("r")
    out = jnp.zeros((a.shape[0], b.shape[1]))
    for k in range(n):
        left = lax.psum(jnp.where(lax.axis_index("c") == k, a, 0.0), "c")
        # fault: right = lax.psum(jnp.where(lax.axis_index("c") == k, b, 0.0), "r")
        right = lax.psum(jnp.where(lax.axis_index("r") == k, b, 0.0), "r")
        out = out + left @ right
    return out


def cannon(a, b):
    n = lax.axis_size("r")
    i, j = lax.axis_index("r"), lax.axis_index("c")
    rows = lax.all_gather(a, "c")
    cols = lax.all_gather(b, "r")
    out = 0.0
    for step in range(n):
        # fault: k = (i + 2 * j + step) % n
        k = (i + j + step) % n
        out = out + rows[k] @ cols[(i + j + step) % n]
    return out


def fsdp(x, w):
    # fault: full = lax.all_gather(w, "dp", axis=1, tiled=True).reshape(4, 4)
    full = lax.all_gather(w, "dp", axis=0, tiled=True)
    return jnp.tanh(x @ full)


def two_axes(x, w):
    part = x @ w
    # fault: total = lax.psum(part, "dp")
    total = lax.psum(part, "tp")
    return jax.nn.relu(total)


def convolution(x, kernel):
    n, i = lax.axis_size("sp"), lax.axis_index("sp")
    left = lax.ppermute(x[-1:], "sp", [(j, (j + 1) % n) for j in range(n)])
    right = lax.ppermute(x[:1], "sp", [(j, (j - 1) % n) for j in range(n)])
    left = jnp.where(i == 0, 0.0, left)
    # fault: right = jnp.where(i == 0, 0.0, right)
    right = jnp.where(i == n - 1, 0.0, right)
    padded = jnp.concatenate([left, x, right])
    return sum(kernel[k] * padded[k : k + x.shape[0]] for k in range(3))


def same_neighbour(x, kernel):
    left = sk.shift(x[-1:], "sp", wrap=False)
    # fault: right = sk.shift(x[-1:], "sp", by=-1, wrap=False)
    right = sk.shift(x[:1], "sp", by=-1, wrap=False)
    padded = jnp.concatenate([left, x, right])
    return sum(kernel[k] * padded[k : k + x.shape[0]] for k in range(3))


def convolution_reference(x, kernel):
    padded = jnp.pad(x, 1)
    return sum(kernel[k] * padded[k : k + 8] for k in range(3))


def capacity(x, experts, w):
    """Each token goes to its expert, if fewer than three stand before it there."""
    hot = jax.nn.one_hot(experts, 2, dtype=jnp.int32)
    counts = lax.all_gather(hot.sum(0), "dp")
    earlier = jnp.arange(lax.axis_size("dp")) < lax.axis_index("dp")
    before = jnp.where(earlier[:, None], counts, 0).sum(0)
    # fault: place = (jnp.cumsum(hot, 0) - hot) * hot
    place = (jnp.cumsum(hot, 0) - hot + before[None]) * hot
    kept = (place.sum(1) < 3) & (experts >= 0)
    return jnp.where(kept[:, None], jnp.einsum("td,tde->te", x, w[experts]), 0.0)


def capacity_reference(x, experts, w):
    hot = jax.nn.one_hot(experts, 2, dtype=jnp.int32)
    kept = ((jnp.cumsum(hot, 0) - hot) * hot).sum(1) < 3
    return jnp.where(kept[:, None], jnp.einsum("td,tde->te", x, w[experts]), 0.0)


def combine(x, gates, w):
    """Every device has an expert; all tokens visit all, weighted by their gates."""
    tokens = lax.all_gather(x, "ep", tiled=True)
    y = jnp.tanh(tokens @ w[0])
    # fault: weight = lax.all_gather(gates, "ep", tiled=True)[:, 0]
    weight = lax.all_gather(gates, "ep", tiled=True)[:, lax.axis_index("ep")]
    return lax.psum_scatter(y * weight[:, None], "ep", scatter_dimension=0, tiled=True)


def combine_reference(x, gates, w):
    return sum(jnp.tanh(x @ w[e]) * gates[:, e, None] for e in range(2))


def owners(x, experts, w):
    per = w.shape[0]
    tokens, places = lax.all_gather((x, experts), "ep", tiled=True)
    # fault: mine = places % per == lax.axis_index("ep")
    mine = places // per == lax.axis_index("ep")
    y = jnp.einsum("td,tde->te", tokens, w[places % per])
    return lax.psum_scatter(jnp.where(mine[:, None], y, 0.0), "ep", scatter_dimension=0, tiled=True)


X, X8, W4 = floats(3, 4), floats(8), floats(4, 4)
GAIN = (floats(4), floats(4) + 1)
CASES = [
    planted(
        mlp_bias, mlp_reference, (floats(2, 3), floats(3, 4), floats(4), floats(4, 3), floats(3)),
        (P(), COLS, ROWS, ROWS, P()), P(), tp=2,
    ),
    planted(
        gated_mlp, lambda x, g, u, d: (jax.nn.silu(x @ g) * (x @ u)) @ d,
        (floats(2, 3), floats(3, 4), floats(3, 4) + 1, floats(4, 3)), (P(), COLS, COLS, ROWS), P(), tp=2,
    ),
    planted(
        two_layers, lambda x, a, b, c: jnp.tanh(jnp.tanh(x @ a) @ b) @ c,
        (floats(2, 3), floats(3, 4), floats(4, 3), floats(3, 8)), (P(), COLS, ROWS, COLS), P(), tp=2, grad=0,
    ),
    planted(rms_norm, rms_norm_reference, (X, GAIN[0]), (COLS, ROWS), COLS, tp=2),
    planted(layer_norm, layer_norm_reference, (X, *GAIN), (COLS, ROWS, ROWS), COLS, tp=2),
    planted(layer_norm_width, layer_norm_reference, (X, *GAIN), (COLS, ROWS, ROWS), COLS, tp=4),
    planted(batch_norm, batch_norm_reference, (floats(4, 4),), (P("dp", "tp"),), P("dp", "tp")),
    planted(merged_variance, lambda x: x.var(0), (floats(6, 2),), (BATCH,), P(), dp=2),
    planted(embedding, lambda t, i: t[i], (floats(8, 2), np.array([3, 7, 0])), (ROWS, P()), P(), tp=4),
    planted(embedding_offset, lambda t, i: t[i], (floats(8, 2), np.array([3, 7, 0])), (ROWS, P()), P(), tp=4),
    planted(tied_head, lambda t, h: h @ t.T, (floats(4, 3), floats(2, 3)), (ROWS, P()), P(), tp=2, grad=0),
    planted(summa, lambda a, b: a @ b, (W4, W4 + 1), (GRID, GRID), GRID, r=2, c=2),
    planted(cannon, lambda a, b: a @ b, (floats(3, 3), floats(3, 3) + 1), (GRID, GRID), GRID, r=3, c=3, grad=0),
    planted(fsdp, lambda x, w: jnp.tanh(x @ w), (floats(2, 4), W4), (P(), BATCH), P(), dp=2, grad=0),
    planted(
        two_axes, lambda x, w: jax.nn.relu(x @ w), (floats(4, 4), floats(4, 3)), (P("dp", "tp"), ROWS), BATCH,
        dp=2, tp=2,
    ),
    planted(convolution, convolution_reference, (X8, floats(3)), (P("sp"), P()), P("sp"), sp=4),
    planted(same_neighbour, convolution_reference, (X8, floats(3)), (P("sp"), P()), P("sp"), sp=4),
    planted(
        capacity, capacity_reference, (floats(8, 2), np.array([0, 0, 1, 0, 0, 1, 0, 1]), floats(2, 2, 2)),
        (BATCH, BATCH, P()), BATCH, dp=2,
    ),
    planted(
        combine, combine_reference, (floats(4, 2), floats(4, 2) + 1, floats(2, 2, 2)), [P("ep")] * 3, P("ep"), ep=2
    ),
    planted(
        owners, lambda x, e, w: jnp.einsum("td,tde->te", x, w[e]),
        (floats(4, 2), np.array([1, 3, 0, 2]), floats(4, 2, 2)), [P("ep")] * 3, P("ep"), ep=2,
    ),
]  # fmt: skip
