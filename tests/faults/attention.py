"""Attention: rings, grouped heads, windows, and states in its place."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from corpus.case import floats
from faults.case import planted

SEQ, HEADS = P("sp"), P(None, "tp")


def softmax_attention(q, k, v, bias=0.0):
    return jax.nn.softmax(q @ k.T + bias) @ v


def causal(q, k, v):
    n = len(q)
    return softmax_attention(q, k, v, jnp.where(np.tril(np.ones((n, n), bool)), 0.0, -1e30))


def ring(q, k, v):
    n, i = lax.axis_size("sp"), lax.axis_index("sp")
    block = q.shape[0]
    rows = i * block + jnp.arange(block)
    total, out = jnp.zeros((block, 1)), jnp.zeros_like(v)
    for step in range(n):
        # fault: source = (i + step) % n
        source = (i - step) % n
        cols = source * block + jnp.arange(block)
        seen = rows[:, None] >= cols[None]
        p = jnp.where(seen, jnp.exp(q @ k.T), 0.0)
        total, out = total + p.sum(1, keepdims=True), out + p @ v
        k, v = lax.ppermute((k, v), "sp", [(j, (j + 1) % n) for j in range(n)])
    return out / total


def ring_diagonal(q, k, v):
    n, i = lax.axis_size("sp"), lax.axis_index("sp")
    block = q.shape[0]
    places = jnp.arange(block)

    def step(carry, t):
        k, v, total, out = carry
        cols = (i - t) % n * block + places
        # fault: seen = (i * block + places)[:, None] > cols[None]
        seen = (i * block + places)[:, None] >= cols[None]
        p = jnp.where(seen, jnp.exp(q @ k.T), 0.0)
        out = out + p @ v
        k, v = sk.shift((k, v), "sp")
        return (k, v, total + p.sum(1), out), None

    zeros = sk.vary((jnp.zeros(block), jnp.zeros(v.shape)), "sp")
    (_, _, total, out), _ = lax.scan(step, (k, v, *zeros), jnp.arange(n))
    return out / total[:, None]


def online_softmax(q, k, v):
    n = lax.axis_size("sp")
    top = jnp.max(q @ k.T, 1, keepdims=True)
    p = jnp.exp(q @ k.T - top)
    total, out = p.sum(1, keepdims=True), p @ v
    for _ in range(n - 1):
        k, v = sk.shift((k, v), "sp")
        scores = q @ k.T
        new = jnp.maximum(top, scores.max(1, keepdims=True))
        p, scale = jnp.exp(scores - new), jnp.exp(top - new)
        # fault: total = total + p.sum(1, keepdims=True)
        total = total * scale + p.sum(1, keepdims=True)
        out, top = out * scale + p @ v, new
    return out / total


def flash_decoding(q, k, v):
    scores = q @ k.T
    top = scores.max(1, keepdims=True)
    p = jnp.exp(scores - top)
    total, out = p.sum(1, keepdims=True), p @ v
    largest = lax.pmax(top, "sp")
    # fault: scale = jnp.exp(largest - top)
    scale = jnp.exp(top - largest)
    return lax.psum(out * scale, "sp") / lax.psum(total * scale, "sp")


def grouped(q, k, v):
    """Six heads of queries, two each for a head of keys, of which a device has all."""
    heads = q.shape[1]
    mine = lax.axis_index("tp") * heads + jnp.arange(heads)
    # fault: shared = mine % k.shape[1]
    shared = mine // 2
    k, v = k[:, shared], v[:, shared]
    weights = jax.nn.softmax(jnp.einsum("thd,shd->hts", q, k))
    return jnp.einsum("hts,shd->thd", weights, v)


def grouped_reference(q, k, v):
    k, v = jnp.repeat(k, 2, 1), jnp.repeat(v, 2, 1)
    return jnp.einsum("hts,shd->thd", jax.nn.softmax(jnp.einsum("thd,shd->hts", q, k)), v)


def ulysses(q, k, v):
    q, k, v = (lax.all_to_all(x, "sp", 1, 0, tiled=True) for x in (q, k, v))
    weights = jax.nn.softmax(jnp.einsum("thd,shd->hts", q, k))
    out = jnp.einsum("hts,shd->thd", weights, v)
    # fault: return lax.all_to_all(out, "sp", 0, 1, tiled=True)[:, ::-1]
    return lax.all_to_all(out, "sp", 0, 1, tiled=True)


def ulysses_reference(q, k, v):
    return jnp.einsum("hts,shd->thd", jax.nn.softmax(jnp.einsum("thd,shd->hts", q, k)), v)


def rope(x, table):
    """A rotation by a table of cosines and sines, a row for each position."""
    block = x.shape[0]
    # fault: places = jnp.arange(block)
    places = lax.axis_index("sp") * block + jnp.arange(block)
    cos, sin = table[places, 0][:, None], table[places, 1][:, None]
    a, b = jnp.split(x, 2, 1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], 1)


def rope_reference(x, table):
    cos, sin = table[:, :1], table[:, 1:]
    a, b = jnp.split(x, 2, 1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], 1)


def window(q, k, v):
    block, i = q.shape[0], lax.axis_index("sp")
    k, v = lax.all_gather((k, v), "sp", tiled=True)
    rows, cols = i * block + jnp.arange(block), jnp.arange(k.shape[0])
    back = rows[:, None] - cols[None]
    # fault: seen = (back >= 0) & (back <= 2)
    seen = (back >= 0) & (back < 2)
    return softmax_attention(q, k, v, jnp.where(seen, 0.0, -1e30))


def window_reference(q, k, v):
    back = np.arange(6)[:, None] - np.arange(6)[None]
    return softmax_attention(q, k, v, jnp.where((back >= 0) & (back < 2), 0.0, -1e30))


def alibi(q, k, v):
    heads = q.shape[1]
    # fault: slopes = 2.0 ** -jnp.float32(jnp.arange(heads) + 1)
    slopes = 2.0 ** -jnp.float32(lax.axis_index("tp") * heads + jnp.arange(heads) + 1)
    back = jnp.float32(jnp.arange(3)[:, None] - jnp.arange(3)[None])
    scores = jnp.einsum("thd,shd->hts", q, k) - slopes[:, None, None] * back[None]
    return jnp.einsum("hts,shd->thd", jax.nn.softmax(scores), v)


def alibi_reference(q, k, v):
    back = jnp.float32(jnp.arange(3)[:, None] - jnp.arange(3)[None])
    slopes = 2.0 ** -jnp.arange(1.0, 5.0)
    scores = jnp.einsum("thd,shd->hts", q, k) - slopes[:, None, None] * back[None]
    return jnp.einsum("hts,shd->thd", jax.nn.softmax(scores), v)


def padding_mask(q, k, v, mask):
    k, v, mask = lax.all_gather((k, v, mask), "sp", tiled=True)
    scores = q @ k.T
    # fault: weights = jax.nn.softmax(scores) * mask[None]
    weights = jnp.exp(scores) * mask[None] / (jnp.exp(scores) * mask[None]).sum(1, keepdims=True)
    return weights @ v


def padding_reference(q, k, v, mask):
    weights = jnp.exp(q @ k.T) * mask[None]
    return weights @ v / weights.sum(1, keepdims=True)


def linear_attention(q, k, v):
    """The state before a block is the sum of those of all blocks before it."""
    state = k.T @ v
    states = lax.all_gather(state, "sp")
    # fault: earlier = jnp.arange(lax.axis_size("sp")) <= lax.axis_index("sp")
    earlier = jnp.arange(lax.axis_size("sp")) < lax.axis_index("sp")
    before = jnp.where(earlier[:, None, None], states, 0.0).sum(0)
    inner = jnp.tril(q @ k.T) @ v
    return inner + q @ before


def linear_attention_reference(q, k, v):
    def step(state, row):
        q, k, v = row
        state = state + jnp.outer(k, v)
        return state, q @ state

    return lax.scan(step, jnp.zeros((q.shape[1], v.shape[1])), (q, k, v))[1]


QKV = (floats(4, 2), floats(4, 2) + 1, floats(4, 2) - 1)
Q3, K3, V3 = floats(3, 4, 2), floats(3, 2, 2), floats(3, 2, 2) + 1
CASES = [
    planted(ring, causal, QKV, [SEQ] * 3, SEQ, sp=4),
    planted(ring_diagonal, causal, QKV, [SEQ] * 3, SEQ, sp=2),
    planted(online_softmax, softmax_attention, QKV, [SEQ] * 3, SEQ, sp=2),
    planted(flash_decoding, softmax_attention, QKV, (P(), SEQ, SEQ), P(), sp=2, grad=0),
    planted(grouped, grouped_reference, (Q3, K3, V3), (HEADS, P(), P()), HEADS, tp=2),
    planted(ulysses, ulysses_reference, [floats(4, 4, 2) + i for i in range(3)], [SEQ] * 3, SEQ, sp=2),
    planted(rope, rope_reference, (floats(4, 4), floats(4, 2)), (SEQ, P()), SEQ, sp=2),
    planted(window, window_reference, [floats(6, 2) + i for i in range(3)], [SEQ] * 3, SEQ, sp=3, grad=0),
    planted(alibi, alibi_reference, [floats(3, 4, 2) + i for i in range(3)], [HEADS] * 3, HEADS, tp=2),
    planted(padding_mask, padding_reference, (*QKV, np.array([1, 1, 0, 1], "f")), [SEQ] * 4, SEQ, sp=2, grad=0),
    planted(linear_attention, linear_attention_reference, QKV, [SEQ] * 3, SEQ, sp=2),
]
