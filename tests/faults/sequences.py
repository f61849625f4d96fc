"""Recurrences, scans and pipelines over devices."""

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from corpus.case import floats
from faults.case import planted

SEQ, STAGE = P("sp"), P("pp")


def recurrence(decay, x):
    def step(h, row):
        h = row[0] * h + row[1]
        return h, h

    return lax.scan(step, 0 * x[0], (decay, x))[1]


def state_space(decay, x):
    """A block from a state of zero, and what the blocks before it leave behind."""
    n, i = lax.axis_size("sp"), lax.axis_index("sp")
    kept = jnp.cumprod(decay, 0)
    local = jnp.stack([x[0], decay[1] * x[0] + x[1]])
    last, decays = lax.all_gather((local[-1], kept[-1]), "sp")
    state = jnp.zeros(x.shape[1:])
    for j in range(n):
        # fault: state = jnp.where(j < i, state + decays[j] * last[j], state)
        state = jnp.where(j < i, decays[j] * state + last[j], state)
    return local + kept * state[None]


def doubling(x):
    """Sums of all before, by strides that double."""
    n, i = lax.axis_size("sp"), lax.axis_index("sp")
    total = x.sum(0)
    stride = 1
    while stride < n:
        other = lax.ppermute(total, "sp", [(j, (j + stride) % n) for j in range(n)])
        # fault: total = jnp.where(i > stride, total + other, total)
        total = jnp.where(i >= stride, total + other, total)
        stride *= 2
    return jnp.cumsum(x, 0) + (total - x.sum(0))[None]


def inclusive(x):
    n, i = lax.axis_size("sp"), lax.axis_index("sp")
    sums = lax.all_gather(x.sum(0), "sp")
    # fault: mask = jnp.float32(jnp.arange(n) <= i)[:, None]
    mask = jnp.float32(jnp.arange(n) < i)[:, None]
    return jnp.cumsum(x, 0) + (sums * mask).sum(0)[None]


def carried(x):
    """One device after another adds the sum before it to its rows."""
    n, i = lax.axis_size("sp"), lax.axis_index("sp")
    rows = jnp.cumsum(x, 0)
    carry = jnp.zeros_like(x[0])
    for step in range(n - 1):
        passed = lax.ppermute(carry + rows[-1], "sp", [(j, j + 1) for j in range(n - 1)])
        # fault: carry = jnp.where(i == step, passed, carry)
        carry = jnp.where(i == step + 1, passed, carry)
    return rows + carry[None]


def advantages(rewards, values):
    """From the last to the first; after the last there is nothing."""
    n, i = lax.axis_size("sp"), lax.axis_index("sp")
    following = sk.shift(values[0], "sp", by=-1)
    # fault: following = following * jnp.float32(i < n)
    following = following * jnp.float32(i < n - 1)
    delta = rewards + 0.5 * jnp.concatenate([values[1:], following[None]]) - values
    all_delta = lax.all_gather(delta, "sp", tiled=True)
    whole = recurrence(jnp.full((*all_delta.shape,), 0.25), all_delta[::-1])[::-1]
    return lax.dynamic_slice_in_dim(whole, i * len(rewards), len(rewards))


def advantages_reference(rewards, values):
    delta = rewards + 0.5 * jnp.concatenate([values[1:], 0 * values[:1]]) - values
    return recurrence(jnp.full((*delta.shape,), 0.25), delta[::-1])[::-1]


def discounted(rewards):
    n, i = lax.axis_size("sp"), lax.axis_index("sp")
    block = len(rewards)
    back = recurrence(jnp.full(rewards.shape, 0.5), rewards[::-1])[::-1]
    heads = lax.all_gather(back[0], "sp")
    later = 0.0
    for j in range(n):
        # fault: weight = jnp.where(j > i, 0.5 ** jnp.float32((j - i) * block), 0.0)
        weight = jnp.where(j > i, 0.5 ** jnp.float32((j - i - 1) * block), 0.0)
        later = later + weight * heads[j]
    return back + jnp.array([0.25, 0.5])[:, None] * jnp.broadcast_to(later, (2, rewards.shape[1]))


def discounted_reference(rewards):
    return recurrence(jnp.full(rewards.shape, 0.5), rewards[::-1])[::-1]


def pipeline(w, x):
    """Stages pass activations on; those of the last are the result."""
    n, i = lax.axis_size("pp"), lax.axis_index("pp")
    micro = x.shape[0]
    state, outs = jnp.zeros_like(x[0]), jnp.zeros_like(x)
    state, outs = sk.vary((state, outs), "pp")
    for t in range(micro + n - 1):
        feed = x[min(t, micro - 1)]
        state = jnp.where(i == 0, feed, state)
        state = jnp.tanh(state @ w[0])
        if t >= n - 1:
            # fault: outs = outs.at[(t - n) % micro].set(state)
            outs = outs.at[t - (n - 1)].set(state)
        state = sk.shift(state, "pp")
    return lax.psum(jnp.where(i == n - 1, outs, 0.0), "pp")


def pipeline_end(w, x):
    n, i = lax.axis_size("pp"), lax.axis_index("pp")
    for _ in range(n):
        x = jnp.tanh(x @ w[0])
        x = lax.ppermute(x, "pp", [(j, (j + 1) % n) for j in range(n)])
    # fault: return lax.psum(jnp.where(i == n - 1, x, 0.0), "pp")
    return lax.psum(jnp.where(i == 0, x, 0.0), "pp")


def pipeline_reference(w, x):
    for i in range(len(w)):
        x = jnp.tanh(x @ w[i])
    return x


def reversed_chain(w, x):
    n = lax.axis_size("pp")
    i = lax.axis_index("pp")
    held = sk.vary(x, "pp")
    for stage in range(n):
        # fault: held = jnp.where(i == n - 1 - stage, jnp.tanh(held @ w[0]), held)
        held = jnp.where(i == stage, jnp.tanh(held @ w[0]), held)
        held = lax.psum(jnp.where(i == stage, held, 0.0), "pp")
    return held


def stencil(x):
    """Two rounds of a mean of three rows, on a circle."""
    for _ in range(2):
        left, right = sk.shift(x[-1:], "sp"), sk.shift(x[:1], "sp", by=-1)
        # fault: padded = jnp.concatenate([right, x, left])
        padded = jnp.concatenate([left, x, right])
        x = (padded[:-2] + 2 * padded[1:-1] + padded[2:]) / 4
    return x


def stencil_reference(x):
    for _ in range(2):
        x = (jnp.roll(x, 1, 0) + 2 * x + jnp.roll(x, -1, 0)) / 4
    return x


S42, S82 = floats(4, 2), floats(8, 2)
PIPE = (floats(2, 2, 2), floats(3, 2, 2))
CASES = [
    planted(state_space, recurrence, (S82, S82 + 1), (SEQ, SEQ), SEQ, sp=4, grad=0),
    planted(doubling, lambda x: jnp.cumsum(x, 0), (S82,), (SEQ,), SEQ, sp=4),
    planted(inclusive, lambda x: jnp.cumsum(x, 0), (S82,), (SEQ,), SEQ, sp=4),
    planted(carried, lambda x: jnp.cumsum(x, 0), (S82,), (SEQ,), SEQ, sp=4),
    planted(advantages, advantages_reference, (S42, S42 + 1), (SEQ, SEQ), SEQ, sp=2),
    planted(discounted, discounted_reference, (S82,), (SEQ,), SEQ, sp=4),
    planted(pipeline, pipeline_reference, PIPE, (STAGE, P()), P(), pp=2),
    planted(pipeline_end, pipeline_reference, PIPE, (STAGE, P()), P(), pp=2),
    planted(reversed_chain, pipeline_reference, PIPE, (STAGE, P()), P(), pp=2),
    planted(stencil, stencil_reference, (S82,), (SEQ,), SEQ, sp=4),
]
