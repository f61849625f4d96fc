"""Inference and adapters: caches, decoding, positions, quantized weights, low-rank updates."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from corpus.case import floats
from faults.case import planted

KEYS, VOCAB, COLS, ROWS, TOKENS = P("sp"), P(None, "tp"), P(None, "tp"), P("tp"), P("sp")


def split_cache(query, keys, values):
    """One query against keys of which each device has some; partial results are rescaled to one maximum."""
    scores = keys @ query
    own = lax.stop_gradient(scores.max())
    powers = jnp.exp(scores - own)
    top = lax.pmax(own, "sp")
    # fault: scale = 1.0
    scale = jnp.exp(own - top)
    total = lax.psum(scale * powers.sum(), "sp")
    return lax.psum(scale * (powers @ values), "sp") / total


def valid_keys(query, keys, values, length):
    """Places at or beyond the length hold nothing yet."""
    own = keys.shape[0]
    # fault: places = jnp.arange(own)
    places = lax.axis_index("sp") * own + jnp.arange(own)
    powers = jnp.where(places < length, jnp.exp(keys @ query), 0.0)
    return lax.psum(powers @ values, "sp") / lax.psum(powers.sum(), "sp")


def valid_keys_reference(query, keys, values, length):
    powers = jnp.where(jnp.arange(8) < length, jnp.exp(keys @ query), 0.0)
    return powers @ values / powers.sum()


def rotated(x):
    """Rotary positions of a split sequence."""
    places = lax.axis_index("sp") * x.shape[0] + jnp.arange(x.shape[0])
    # fault: angles = jnp.float32(places)[:, None] * jnp.array([1.0, 0.25])[None] / lax.axis_size("sp")
    angles = jnp.float32(places)[:, None] * jnp.array([1.0, 0.25])[None]
    a, b = x[:, :2], x[:, 2:]
    return jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)], 1)


def rotated_reference(x):
    angles = jnp.arange(8.0)[:, None] * jnp.array([1.0, 0.25])[None]
    a, b = x[:, :2], x[:, 2:]
    return jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)], 1)


def greedy(h, head, embeddings):
    """The embedding of the likeliest next token."""
    logits = h @ head
    width = logits.shape[1]
    # fault: place = logits.argmax(1)
    place = logits.argmax(1) + lax.axis_index("tp") * width
    best = logits.max(1)
    token = lax.pmin(jnp.where(best == lax.pmax(best, "tp"), place, 1000), "tp")
    return embeddings[token]


def pages(cache, table, query):
    """Pages of a cache, which a table says; each device has some of them."""
    own = cache.shape[0]
    local = table - lax.axis_index("sp") * own
    here = (local >= 0) & (local < own)
    page = cache[jnp.where(here, local, 0)]
    scores = jnp.einsum("pkd,d->pk", page, query)
    # fault: return lax.psum(scores, "sp")
    return lax.psum(jnp.where(here[:, None], scores, 0.0), "sp")


def adapted(x, w, down, up):
    """A low-rank update of a layer whose inputs are split; the rank is not."""
    hidden = lax.psum(x @ down, "tp")
    # fault: update = 2.0 / x.shape[1] * (hidden @ up)
    update = 2.0 / down.shape[1] * (hidden @ up)
    return lax.psum(x @ w, "tp") + update


def adapted_reference(x, w, down, up):
    return x @ w + x @ down @ up


def quantized(x, w):
    """Weights as whole multiples of one scale of all rows of a column."""
    # fault: largest = jnp.abs(w).max(0)
    largest = lax.pmax(jnp.abs(w).max(0), "tp")
    scale = largest / 7.0
    levels = jnp.round(w / scale[None])
    return lax.psum(x @ (levels * scale[None]), "tp")


def quantized_reference(x, w):
    scale = jnp.abs(w).max(0) / 7.0
    return x @ (jnp.round(w / scale[None]) * scale[None])


def accepted(draft, target, tokens):
    """How likely each drafted token is kept: the ratio of both models, at most 1; the vocabulary is split."""
    width = draft.shape[1]
    hot = jax.nn.one_hot(tokens - lax.axis_index("tp") * width, width)
    powers, others = jnp.exp(target), jnp.exp(draft)
    # fault: p = lax.psum((hot * powers).sum(1), "tp") / powers.sum(1)
    p = lax.psum((hot * powers).sum(1), "tp") / lax.psum(powers.sum(1), "tp")
    q = lax.psum((hot * others).sum(1), "tp") / lax.psum(others.sum(1), "tp")
    return jnp.minimum(p / q, 1.0)


def accepted_reference(draft, target, tokens):
    p, q = jax.nn.softmax(target), jax.nn.softmax(draft)
    rows = jnp.arange(3)
    return jnp.minimum(p[rows, tokens] / q[rows, tokens], 1.0)


Q, K, V = floats(3), floats(8, 3), floats(8, 2)
CASES = [
    planted(
        split_cache, lambda q, k, v: jax.nn.softmax(k @ q) @ v, (Q, K, V), (P(), KEYS, KEYS), P(), sp=2
    ),
    planted(
        valid_keys, valid_keys_reference, (Q, K, V, np.int32(5)), (P(), KEYS, KEYS, P()), P(), sp=2
    ),
    planted(rotated, rotated_reference, (floats(8, 4),), (TOKENS,), TOKENS, sp=2),
    planted(
        greedy, lambda h, w, e: e[(h @ w).argmax(1)], (floats(2, 3), floats(3, 4), floats(4, 2)), (P(), VOCAB, P()),
        P(), tp=2, grad=0,
    ),
    planted(
        pages, lambda c, t, q: c[t] @ q, (floats(4, 2, 3), np.array([3, 0, 2]), Q), (KEYS, P(), P()), P(), sp=2
    ),
    planted(
        adapted, adapted_reference, (floats(2, 8), floats(8, 3), floats(8, 2), floats(2, 3)), (COLS, ROWS, ROWS, P()),
        P(), tp=2,
    ),
    planted(quantized, quantized_reference, (floats(2, 4), floats(4, 3)), (COLS, ROWS), P(), tp=2, grad=0),
    planted(
        accepted, accepted_reference, (floats(3, 4), floats(3, 4) + 1, np.array([2, 0, 3])), (VOCAB, VOCAB, P()), P(),
        tp=2, grad=0,
    ),
]  # fmt: skip
