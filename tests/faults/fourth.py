"""A fourth set, all of it written before any of its results was seen: each kernel is of a family that is in no other.

At first try 12 of 16 lines were named first. Of `shared_keys` no equation stands on the line: what reads it is named.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from corpus.case import floats
from faults.case import planted

SEQ, ROWS, COLS, CHANNELS = P("sp"), P("dp"), P(None, "tp"), P(None, ("group", "tp"))


def sinks(q, k, v, sink):
    """A ring of keys with a learned sink, a logit that takes part in each softmax and has no value."""
    total = jnp.exp(sink) * jnp.ones((q.shape[0], 1))
    out = jnp.zeros((q.shape[0], v.shape[1]))
    for _ in range(lax.axis_size("sp")):
        # fault: powers = jnp.exp(q @ k.T) + jnp.exp(sink)
        powers = jnp.exp(q @ k.T)
        total, out = total + powers.sum(1, keepdims=True), out + powers @ v
        k, v = sk.shift((k, v), "sp")
    return out / total


def sinks_reference(q, k, v, sink):
    powers = jnp.exp(q @ k.T)
    return powers @ v / (powers.sum(1, keepdims=True) + jnp.exp(sink))


def shared_keys(q_thd, k_td, v_td):
    """Ulysses with one head of keys: queries are exchanged by head, keys and values are gathered."""
    q = lax.all_to_all(q_thd, "sp", 1, 0, tiled=True)
    # fault: k, v = k_td, v_td
    k, v = lax.all_gather((k_td, v_td), "sp", tiled=True)
    powers = jnp.exp(jnp.einsum("thd,sd->hts", q, k))
    weights = powers / powers.sum(2, keepdims=True)
    out = jnp.einsum("hts,sd->thd", weights, v)
    return lax.all_to_all(out, "sp", 0, 1, tiled=True)


def shared_keys_reference(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("thd,sd->hts", q, k), 2)
    return jnp.einsum("hts,sd->thd", weights, v)


def returned(x, gates, w):
    """Every token visits the expert of each device: sent by all_to_all, scaled, sent back, and put together."""
    n = lax.axis_size("ep")
    sent = jnp.einsum("te,td->etd", gates, x)
    arrived = lax.all_to_all(sent, "ep", 0, 0)
    out = jnp.tanh(arrived @ w[0])
    home = lax.all_to_all(out, "ep", 0, 0)
    # fault: return jnp.einsum("te,etd->td", gates, home) / n
    return jnp.einsum("te,etd->td", gates, home) + 0.0 * n


def returned_reference(x, gates, w):
    out = jnp.tanh(jnp.einsum("te,td,edf->etf", gates, x, w))
    return jnp.einsum("te,etf->tf", gates, out)


def split_groups(x, gain):
    """A norm of groups of four channels; a device has half of a group's channels, two devices have a group."""
    count = 2 * x.shape[1]
    mean = lax.psum(x.sum(1, keepdims=True), "tp") / count
    centred = x - mean
    # fault: spread = (centred * centred).sum(1, keepdims=True) / x.shape[1]
    spread = lax.psum((centred * centred).sum(1, keepdims=True), "tp") / count
    return gain[None] * centred / jnp.sqrt(spread + 0.1)


def split_groups_reference(x, gain):
    y = x.reshape(-1, 2, 4)
    y = (y - y.mean(2, keepdims=True)) / jnp.sqrt(y.var(2, keepdims=True) + 0.1)
    return gain[None] * y.reshape(-1, 8)


def focal(logits, targets):
    """Cross entropy of a split vocabulary, in which easy tokens weigh less."""
    size = logits.shape[1]
    places = targets - lax.axis_index("tp") * size
    here = (places >= 0) & (places < size)
    powers = jnp.exp(logits)
    total = lax.psum(powers.sum(1), "tp")
    picked = jnp.take_along_axis(powers, jnp.clip(places, 0, size - 1)[:, None], 1)[:, 0]
    share = lax.psum(jnp.where(here, picked, 0.0), "tp") / total
    # fault: return -((1 - picked / total) ** 2 * jnp.log(share)).mean()
    return -((1 - share) ** 2 * jnp.log(share)).mean()


def focal_reference(logits, targets):
    share = jnp.take_along_axis(jax.nn.softmax(logits, 1), targets[:, None], 1)[:, 0]
    return -((1 - share) ** 2 * jnp.log(share)).mean()


def sharded_moments(w, gradient, first, second):
    """A step of Adam in which a device has the moments of some rows, and gathers the new weights."""
    i, rows = lax.axis_index("dp"), first.shape[0]
    slopes = lax.psum_scatter(gradient[0], "dp", tiled=True) / lax.axis_size("dp")
    first = 0.75 * first + 0.25 * slopes
    second = 0.5 * second + 0.5 * slopes * slopes
    step = first / (jnp.sqrt(second) + 0.125)
    # fault: mine = lax.dynamic_slice_in_dim(w, i, rows)
    mine = lax.dynamic_slice_in_dim(w, i * rows, rows)
    return lax.all_gather(mine - 0.5 * step, "dp", tiled=True), first, second


def sharded_moments_reference(w, gradient, first, second):
    slopes = gradient.mean(0)
    first = 0.75 * first + 0.25 * slopes
    second = 0.5 * second + 0.5 * slopes * slopes
    return w - 0.5 * first / (jnp.sqrt(second) + 0.125), first, second


def skipped(x, w):
    """A pipeline of two stages with a long skip: the input of the first stage is added behind the second."""
    i = lax.axis_index("pp")
    hidden = jnp.tanh(x @ w[0])
    arriving = lax.ppermute(hidden, "pp", [(0, 1)])
    kept = lax.ppermute(x, "pp", [(0, 1)])
    # fault: out = jnp.tanh(arriving @ w[0]) + arriving
    out = jnp.tanh(arriving @ w[0]) + kept
    return lax.psum(jnp.where(i == 1, out, 0.0), "pp")


def skipped_reference(x, w):
    return jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]) + x


def selective(x, decay, b, c):
    """A state space of which inputs choose the decay; a device begins with the state of the one before it."""
    states, state, factor = [], jnp.zeros_like(b[0]), jnp.ones_like(b[0])
    factors = []
    for t in range(x.shape[0]):
        state = decay[t] * state + b[t] * x[t]
        factor = factor * decay[t]
        states.append(state)
        factors.append(factor)
    end, whole = lax.all_gather((state, factor), "sp")
    carry = jnp.zeros_like(state)
    for j in range(lax.axis_size("sp") - 1):
        # fault: after = whole[j] * (carry + end[j])
        after = whole[j] * carry + end[j]
        carry = jnp.where(j < lax.axis_index("sp"), after, carry)
    return jnp.stack([((s + f * carry) * c[t]).sum() for t, (s, f) in enumerate(zip(states, factors, strict=True))])


def selective_reference(x, decay, b, c):
    state, outs = jnp.zeros_like(b[0]), []
    for t in range(6):
        state = decay[t] * state + b[t] * x[t]
        outs.append((state * c[t]).sum())
    return jnp.stack(outs)


def best_two(scores, values):
    """The values of the best two of all scores, of which each device offers two."""
    size = scores.shape[0]
    tops, places = lax.top_k(scores, 2)
    # fault: places = places + lax.axis_index("dp") * 2
    places = places + lax.axis_index("dp") * size
    tops, places = lax.all_gather((tops, places), "dp", tiled=True)
    chosen = places[lax.top_k(tops, 2)[1]]
    return lax.all_gather(values, "dp", tiled=True)[chosen]


def best_two_reference(scores, values):
    return values[lax.top_k(scores, 2)[1]]


def running_statistics(x, mean, var):
    """Batch norm over all devices, and the statistics that it hands on; the variance is that of a sample."""
    count = x.shape[0] * lax.axis_size("dp")
    now = lax.pmean(x.mean(0), "dp")
    spread = lax.pmean((x * x).mean(0), "dp") - now * now
    y = (x - now[None]) / jnp.sqrt(spread + 0.1)[None]
    # fault: sample = spread * x.shape[0] / (x.shape[0] - 1)
    sample = spread * count / (count - 1)
    return y, 0.75 * mean + 0.25 * now, 0.75 * var + 0.25 * sample


def running_statistics_reference(x, mean, var):
    y = (x - x.mean(0)[None]) / jnp.sqrt(x.var(0) + 0.1)[None]
    return y, 0.75 * mean + 0.25 * x.mean(0), 0.75 * var + 0.25 * x.var(0, ddof=1)


def dilated(x, kernel):
    """A convolution that reads every second place, so that two places beyond a block are needed on both sides."""
    before = sk.shift(x[-2:], "sp", wrap=False)
    # fault: after = sk.shift(x[:2], "sp", by=-1)
    after = sk.shift(x[:2], "sp", by=-1, wrap=False)
    wide = jnp.concatenate([before, x, after])
    size = x.shape[0]
    return kernel[0] * wide[:size] + kernel[1] * wide[2 : size + 2] + kernel[2] * wide[4:]


def dilated_reference(x, kernel):
    wide = jnp.concatenate([jnp.zeros(2), x, jnp.zeros(2)])
    return kernel[0] * wide[:-4] + kernel[1] * wide[2:-2] + kernel[2] * wide[4:]


def clipped(grads, shared):
    """Gradients are clipped by their norm: those of experts are split, those of the router are everywhere alike."""
    # fault: square = lax.psum((grads * grads).sum(), "ep") + (shared * shared).sum() * lax.axis_size("ep")
    square = lax.psum((grads * grads).sum(), "ep") + (shared * shared).sum()
    factor = jnp.minimum(1.0, 0.5 / jnp.sqrt(square))
    return grads * factor, shared * factor


def clipped_reference(grads, shared):
    factor = jnp.minimum(1.0, 0.5 / jnp.sqrt((grads * grads).sum() + (shared * shared).sum()))
    return grads * factor, shared * factor


def spectrum(x_rc, filters):
    """Rows are transformed, then columns after a transposition by all_to_all, then filtered where they are."""
    turn = jnp.array([[1.0, 1.0], [1.0, -1.0]])
    width = x_rc.shape[1]
    across = x_rc @ jnp.kron(jnp.eye(width // 2), turn)
    y = lax.all_to_all(across, "sp", 1, 0, tiled=True)
    height = y.shape[0]
    down = jnp.kron(jnp.eye(height // 2), turn) @ y
    # fault: down = down * lax.dynamic_slice_in_dim(filters, 0, y.shape[1])[None]
    down = down * lax.dynamic_slice_in_dim(filters, lax.axis_index("sp") * y.shape[1], y.shape[1])[None]
    return lax.all_to_all(down, "sp", 0, 1, tiled=True)


def spectrum_reference(x, filters):
    turn = jnp.kron(jnp.eye(2), jnp.array([[1.0, 1.0], [1.0, -1.0]]))
    return (turn @ (x @ turn)) * filters[None]


def packed(losses, documents):
    """The mean over documents of the mean over each one's tokens; a document may end on the next device."""
    hits = jnp.float32(documents[None] == jnp.arange(3)[:, None])
    sums = lax.psum(hits @ losses, "sp")
    # fault: counts = hits.sum(1)
    counts = lax.psum(hits.sum(1), "sp")
    return (sums / jnp.maximum(counts, 1.0)).sum() / 3


def packed_reference(losses, documents):
    hits = jnp.float32(documents[None] == jnp.arange(3)[:, None])
    return (hits @ losses / hits.sum(1)).mean()


def scaled(w, x, y, scale):
    """Gradients of a loss times a scale, which is taken out again before the weights are changed."""
    residual = x @ w - y
    slopes = x.T @ (scale * residual)
    slopes = lax.psum(slopes, "dp") / (x.shape[0] * lax.axis_size("dp"))
    # fault: return w - 0.5 * slopes - 0.25 * w / scale
    return w - 0.5 * slopes / scale - 0.25 * w


def scaled_reference(w, x, y, scale):
    return w - 0.5 * (x.T @ (x @ w - y)) / len(y) - 0.25 * w


def noisy(x, key):
    """Uniform noise for rows, of which each one folds its number among all rows into the key."""
    size = x.shape[0]
    # fault: numbers = lax.axis_index("dp") + jnp.arange(size)
    numbers = lax.axis_index("dp") * size + jnp.arange(size)
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(numbers)
    noise = jax.vmap(lambda k: jax.random.bernoulli(k, 0.5, (x.shape[1],)))(keys)
    return jnp.where(noise, 2 * x, 0.0)


def noisy_reference(x, key):
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(4))
    noise = jax.vmap(lambda k: jax.random.bernoulli(k, 0.5, (4,)))(keys)
    return jnp.where(noise, 2 * x, 0.0)


Q, V = floats(4, 2), floats(4, 3)
TARGETS, DOCUMENTS = np.array([2, 0, 3]), np.array([0, 0, 0, 1, 1, 2])
CASES = [
    planted(sinks, sinks_reference, (Q, Q + 1, V, floats()), (SEQ, SEQ, SEQ, P()), SEQ, sp=2),
    planted(shared_keys, shared_keys_reference, (floats(4, 2, 2), Q, Q + 1), [SEQ] * 3, SEQ, sp=2),
    planted(returned, returned_reference, (Q, floats(4, 2) + 1, floats(2, 2, 2)), [P("ep")] * 3, P("ep"), ep=2),
    planted(
        split_groups, split_groups_reference, (floats(2, 8), floats(8)), (CHANNELS, P(("group", "tp"))), CHANNELS,
        group=2, tp=2,
    ),
    planted(focal, focal_reference, (floats(3, 4), TARGETS), (COLS, P()), P(), tp=2),
    planted(
        sharded_moments, sharded_moments_reference, (Q, floats(2, 4, 2), Q + 1, Q * Q + 1), (P(), ROWS, ROWS, ROWS),
        (P(), ROWS, ROWS), dp=2, grad=0,
    ),
    planted(skipped, skipped_reference, (floats(2, 3), floats(2, 3, 3)), (P(), P("pp")), P(), pp=2),
    planted(
        selective, selective_reference, (floats(6), floats(6, 2), floats(6, 2) + 1, floats(6, 2) - 1), [SEQ] * 4, SEQ,
        sp=3, grad=0,
    ),
    planted(best_two, best_two_reference, (floats(6), floats(6, 2)), (ROWS, ROWS), P(), dp=2, grad=0),
    planted(
        running_statistics, running_statistics_reference, (V, floats(3), np.float32([1, 2, 3])), (ROWS, P(), P()),
        (ROWS, P(), P()), dp=2,
    ),
    planted(dilated, dilated_reference, (floats(6), floats(3)), (SEQ, P()), SEQ, sp=3),
    planted(clipped, clipped_reference, (floats(4, 2), floats(3)), (P("ep"), P()), (P("ep"), P()), ep=2),
    planted(spectrum, spectrum_reference, (floats(4, 4), floats(4)), (SEQ, P()), SEQ, sp=2),
    planted(packed, packed_reference, (floats(6), DOCUMENTS), (SEQ, SEQ), P(), sp=3),
    planted(
        scaled, scaled_reference, (floats(3), V, floats(4), np.float32(8)), (P(), ROWS, ROWS, P()), P(), dp=2, grad=0
    ),
    planted(noisy, noisy_reference, (floats(4, 4), jax.random.key(0)), (ROWS, P()), ROWS, dp=2),
]  # fmt: skip
