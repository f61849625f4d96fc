"""Blocks of sequences, of layers and of fields; gradients that are compressed or squared on their way."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from corpus.case import floats
from faults.case import planted

SEQ, STAGES, BATCH = P("sp"), P("pp"), P("dp")


def sliding(q, k, v):
    """A ring, in which a token sees itself and two before it."""
    n, i = lax.axis_size("sp"), lax.axis_index("sp")
    block = q.shape[0]
    rows = i * block + jnp.arange(block)

    def step(carry, t):
        k, v, total, out = carry
        distance = rows[:, None] - ((i - t) % n * block + jnp.arange(block))[None]
        # fault: powers = jnp.where((distance >= 0) & (distance <= 3), jnp.exp(q @ k.T), 0.0)
        powers = jnp.where((distance >= 0) & (distance < 3), jnp.exp(q @ k.T), 0.0)
        out = out + powers @ v
        k, v = sk.shift((k, v), "sp")
        return (k, v, total + powers.sum(1), out), None

    zeros = sk.vary((jnp.zeros(block), jnp.zeros(v.shape)), "sp")
    (_, _, total, out), _ = lax.scan(step, (k, v, *zeros), jnp.arange(n))
    return out / total[:, None]


def sliding_reference(q, k, v):
    distance = jnp.arange(6)[:, None] - jnp.arange(6)[None]
    powers = jnp.where((distance >= 0) & (distance < 3), jnp.exp(q @ k.T), 0.0)
    return powers @ v / powers.sum(1, keepdims=True)


def segments(q, k, v, numbers):
    """A token sees its own document alone; the numbers of documents travel with the keys."""
    total, out = jnp.zeros((q.shape[0], 1)), jnp.zeros_like(v)
    others = numbers
    for _ in range(lax.axis_size("sp")):
        powers = jnp.where(numbers[:, None] == others[None], jnp.exp(q @ k.T), 0.0)
        total, out = total + powers.sum(1, keepdims=True), out + powers @ v
        # fault: k, v = sk.shift((k, v), "sp")
        k, v, others = sk.shift((k, v, others), "sp")
    return out / total


def segments_reference(q, k, v, numbers):
    powers = jnp.where(numbers[:, None] == numbers[None], jnp.exp(q @ k.T), 0.0)
    return powers @ v / powers.sum(1, keepdims=True)


def merged(q, k, v):
    """Parts of an attention are merged by their totals, partner by partner."""
    powers = jnp.exp(q @ k.T)
    total = powers.sum(1, keepdims=True)
    out = powers @ v / total
    n, distance = lax.axis_size("sp"), 1
    while distance < n:
        other, total_of_other = lax.ppermute((out, total), "sp", [(j, j ^ distance) for j in range(n)])
        both = total + total_of_other
        # fault: out = (out * total_of_other + other * total) / both
        out = (out * total + other * total_of_other) / both
        total, distance = both, 2 * distance
    return out


def interleaved(weights, x):
    """Device i has the layers i and n + i; an array goes round twice."""
    n, i = lax.axis_size("pp"), lax.axis_index("pp")
    y = x
    for tick in range(2 * n):
        # fault: number = i * 2 + tick // n
        number = i + tick // n * n
        new = jnp.tanh(y @ weights[number])
        y = jnp.where(tick % n == i, new, y)
        y = sk.shift(y, "pp")
    return lax.psum(jnp.where(i == 0, y, 0.0), "pp")


def interleaved_reference(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def backwards(weights, x, cotangent):
    """Two stages by hand: activations go on, cotangents back."""
    i = lax.axis_index("pp")
    w = weights[0]
    entering = jnp.where(i == 0, x, sk.shift(jnp.sin(x @ w), "pp", wrap=False))
    slope = jnp.cos(entering @ w)
    ending = cotangent * slope
    # fault: arriving = sk.shift(ending @ w.T, "pp", wrap=False)
    arriving = sk.shift(ending @ w.T, "pp", by=-1, wrap=False)
    return (entering.T @ jnp.where(i == 1, ending, arriving * slope))[None]


def backwards_reference(weights, x, cotangent):
    def run(weights):
        return (cotangent * jnp.sin(jnp.sin(x @ weights[0]) @ weights[1])).sum()

    return jax.grad(run)(weights)


def pooling(x):
    """The largest of three neighbours; there are none beyond the ends."""
    left = sk.shift(x[-1:], "sp", wrap=False)
    right = sk.shift(x[:1], "sp", by=-1, wrap=False)
    i, n = lax.axis_index("sp"), lax.axis_size("sp")
    # fault: left = jnp.where(i == 0, 0.0, left)
    left = jnp.where(i == 0, -jnp.inf, left)
    right = jnp.where(i == n - 1, -jnp.inf, right)
    padded = jnp.concatenate([left, x, right])
    size = x.shape[0]
    return jnp.maximum(jnp.maximum(padded[:size], padded[1 : size + 1]), padded[2:])


def pooling_reference(x):
    padded = jnp.pad(x, 1, constant_values=-jnp.inf)
    return jnp.maximum(jnp.maximum(padded[:-2], padded[1:-1]), padded[2:])


def insulated(x):
    """Nothing flows through the ends: the neighbour of the last is the last itself."""
    i, n = lax.axis_index("sp"), lax.axis_size("sp")
    left = jnp.where(i == 0, x[:1], sk.shift(x[-1:], "sp"))
    # fault: right = jnp.where(i == n - 1, x[:1], sk.shift(x[:1], "sp", by=-1))
    right = jnp.where(i == n - 1, x[-1:], sk.shift(x[:1], "sp", by=-1))
    padded = jnp.concatenate([left, x, right])
    return x + 0.25 * (padded[:-2] - 2.0 * x + padded[2:])


def insulated_reference(x):
    padded = jnp.pad(x, 1, mode="edge")
    return x + 0.25 * (padded[:-2] - 2.0 * x + padded[2:])


def causal_convolution(x, kernel):
    # fault: before = sk.shift(x[:2], "sp", wrap=False)
    before = sk.shift(x[-2:], "sp", wrap=False)
    padded = jnp.concatenate([before, x])
    return sum(kernel[j] * padded[j : j + x.shape[0]] for j in range(3))


def causal_convolution_reference(x, kernel):
    padded = jnp.pad(x, (2, 0))
    return sum(kernel[j] * padded[j : j + 9] for j in range(3))


def spectral(w, u):
    """A weight divided by its largest singular value, about; rows are split."""
    right = lax.psum(w.T @ u, "dp")
    right = right / jnp.sqrt((right * right).sum())
    left = w @ right
    # fault: sigma = jnp.sqrt((left * left).sum())
    sigma = jnp.sqrt(lax.psum((left * left).sum(), "dp"))
    return w / sigma


def spectral_reference(w, u):
    right = w.T @ u
    left = w @ (right / jnp.sqrt((right * right).sum()))
    return w / jnp.sqrt((left * left).sum())


def signs(parameter, gradient, momentum):
    """Lion: the sign of a mean of the gradient and the past."""
    # fault: mixed = 0.75 * momentum + 0.25 * gradient
    mixed = 0.75 * momentum + 0.25 * lax.pmean(gradient, "dp")
    moved = parameter - 0.5 * jnp.sign(mixed)
    return lax.pmean(moved, "dp")


def signs_reference(parameter, gradient, momentum):
    return parameter - 0.5 * jnp.sign(0.75 * momentum + 0.25 * gradient.reshape(3, 2).mean(0))


def scales_of_blocks(x):
    """Each device sends whole levels, and the scale that they are in."""
    scale = jnp.abs(x).max() / 7.0
    levels = jnp.round(x / scale)
    everything = lax.all_gather(levels, "dp")
    # fault: scales = jnp.broadcast_to(scale, everything.shape[:1])
    scales = lax.all_gather(scale, "dp")
    return (everything * scales[:, None]).sum(0)


def scales_of_blocks_reference(x):
    blocks = x.reshape(2, 3)
    scales = jnp.abs(blocks).max(1, keepdims=True) / 7.0
    return (jnp.round(blocks / scales) * scales).sum(0)


Q, K, V = floats(6, 2), floats(6, 2) + 1, floats(6, 3)
CASES = [
    planted(sliding, sliding_reference, (Q, K, V), [SEQ] * 3, SEQ, sp=2, grad=0),
    planted(
        segments, segments_reference, (Q, K, V, np.array([0, 0, 0, 0, 1, 1])), [SEQ] * 4, SEQ, sp=3, grad=0
    ),
    planted(
        merged, lambda q, k, v: jax.nn.softmax(q @ k.T) @ v, (floats(2, 2), floats(8, 2), floats(8, 3)),
        (P(), SEQ, SEQ), P(), sp=4, grad=0,
    ),
    planted(
        interleaved, interleaved_reference, (floats(4, 2, 2), floats(2, 2)), (P(), P()), P(), pp=2, grad=0
    ),
    planted(
        backwards, backwards_reference, (floats(2, 2, 2), floats(3, 2), floats(3, 2) + 1), (STAGES, P(), P()), STAGES,
        pp=2, grad=0,
    ),
    planted(pooling, pooling_reference, (floats(6),), (SEQ,), SEQ, sp=3, grad=0),
    planted(insulated, insulated_reference, (floats(6),), (SEQ,), SEQ, sp=3),
    planted(causal_convolution, causal_convolution_reference, (floats(9), floats(3)), (SEQ, P()), SEQ, sp=3),
    planted(spectral, spectral_reference, (floats(4, 3), floats(4)), (BATCH, BATCH), BATCH, dp=2),
    planted(
        signs, signs_reference, (floats(2), floats(6), floats(2) + 1), (P(), BATCH, P()), P(), dp=3, grad=0
    ),
    planted(scales_of_blocks, scales_of_blocks_reference, (floats(6),), (BATCH,), P(), dp=2, grad=0),
]  # fmt: skip
