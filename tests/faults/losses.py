"""Losses: over a split vocabulary, of pairs, of policies, of sequences."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from corpus.case import floats
from faults.case import planted

V, R, S = P(None, "tp"), P("dp"), P(None, "sp")
TARGETS = np.array([3, 7, 0], np.int32)


def nll(logits, targets):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], 1)[:, 0]


def z_loss(h, w, targets):
    logits = h @ w
    top = lax.pmax(lax.stop_gradient(logits.max(1)), "tp")
    sums = jnp.exp(logits - top[:, None]).sum(1)
    log_z = jnp.log(lax.psum(sums, "tp")) + top
    hot = jax.nn.one_hot(targets - lax.axis_index("tp") * logits.shape[1], logits.shape[1])
    picked = lax.psum((logits * hot).sum(1), "tp")
    # fault: penalty = (jnp.log(sums) + top) ** 2
    penalty = log_z**2
    return log_z - picked + 0.01 * penalty


def z_loss_reference(h, w, targets):
    return nll(h @ w, targets) + 0.01 * jax.nn.logsumexp(h @ w, 1) ** 2


def vocab_offset(h, w, targets):
    logits = h @ w
    width = logits.shape[1]
    # fault: start = lax.axis_index("tp") * (width - 1)
    start = lax.axis_index("tp") * width
    local = targets - start
    inside = (local >= 0) & (local < width)
    safe = jnp.where(inside, local, 0)
    picked = jnp.take_along_axis(logits, safe[:, None], 1)[:, 0]
    picked = lax.psum(jnp.where(inside, picked, 0.0), "tp")
    return jnp.log(lax.psum(jnp.exp(logits).sum(1), "tp")) - picked


def vocab_bound(h, w, targets):
    logits = h @ w
    width = logits.shape[1]
    local = targets - lax.axis_index("tp") * width
    # fault: inside = (local >= 0) & (local <= width)
    inside = (local >= 0) & (local < width)
    safe = jnp.clip(local, 0, width - 1)
    picked = jnp.take_along_axis(logits, safe[:, None], 1)[:, 0]
    picked = lax.psum(jnp.where(inside, picked, 0.0), "tp")
    return jnp.log(lax.psum(jnp.exp(logits).sum(1), "tp")) - picked


def label_smoothing(logits, targets):
    n = lax.axis_size("tp")
    width = logits.shape[1]
    log_z = jnp.log(lax.psum(jnp.exp(logits).sum(1), "tp"))
    hot = jax.nn.one_hot(targets - lax.axis_index("tp") * width, width)
    # fault: soft = 0.875 * hot + 0.125 / width
    soft = 0.875 * hot + 0.125 / (width * n)
    return log_z - lax.psum((soft * logits).sum(1), "tp")


def label_smoothing_reference(logits, targets):
    soft = 0.875 * jax.nn.one_hot(targets, 8) + 0.125 / 8
    return -(soft * jax.nn.log_softmax(logits)).sum(1)


def info_nce(a, b):
    keys = lax.all_gather(b, "dp", tiled=True)
    scores = a @ keys.T / 0.5
    rows = jnp.arange(a.shape[0])  # wrong with it
    # fault: labels = rows
    labels = rows + lax.axis_index("dp") * a.shape[0]
    picked = jnp.take_along_axis(scores, labels[:, None], 1)[:, 0]
    losses = jax.nn.logsumexp(scores, 1) - picked
    return lax.pmean(losses.mean(), "dp")


def info_nce_reference(a, b):
    return nll(a @ b.T / 0.5, np.arange(4)).mean()


def clip_loss(a, b, scale):
    all_a, all_b = sk.all_gather((a, b), "dp")
    mine = jnp.sum(a * b, 1) * scale
    by_a = jnp.exp(scale * a @ all_b.T).sum(1)
    # fault: by_b = jnp.exp(scale * b @ all_b.T).sum(1)
    by_b = jnp.exp(scale * b @ all_a.T).sum(1)
    return sk.all_reduce(jnp.mean(jnp.log(by_a) + jnp.log(by_b) - 2 * mine), "dp", op="mean")


def clip_loss_reference(a, b, scale):
    scores = scale * a @ b.T
    return (nll(scores, np.arange(4)) + nll(scores.T, np.arange(4))).mean()


def policy_kl(p, q):
    log_p = p - jnp.log(lax.psum(jnp.exp(p).sum(1, keepdims=True), "tp"))
    # fault: log_q = q - jnp.log(lax.psum(jnp.exp(p).sum(1, keepdims=True), "tp"))
    log_q = q - jnp.log(lax.psum(jnp.exp(q).sum(1, keepdims=True), "tp"))
    return lax.psum((jnp.exp(log_p) * (log_p - log_q)).sum(1), "tp")


def policy_kl_reference(p, q):
    log_p, log_q = jax.nn.log_softmax(p), jax.nn.log_softmax(q)
    return (jnp.exp(log_p) * (log_p - log_q)).sum(1)


def dpo(chosen, rejected, base_chosen, base_rejected, mask):
    def summed(logps):
        return lax.psum((logps * mask).sum(1), "sp")

    margin = summed(chosen) - summed(base_chosen)
    # fault: other = (rejected * mask).sum(1) - summed(base_rejected)
    other = summed(rejected) - summed(base_rejected)
    return -jnp.log(jax.nn.sigmoid(0.1 * (margin - other)))


def dpo_reference(chosen, rejected, base_chosen, base_rejected, mask):
    def summed(logps):
        return (logps * mask).sum(1)

    margin = summed(chosen) - summed(base_chosen) - summed(rejected) + summed(base_rejected)
    return -jax.nn.log_sigmoid(0.1 * margin)


def ppo(logp, old, advantage):
    count = lax.psum(jnp.float32(advantage.shape[0]), "dp")
    mean = lax.psum(advantage.sum(), "dp") / count
    # fault: variance = jnp.mean((advantage - mean) ** 2)
    variance = lax.psum(jnp.sum((advantage - mean) ** 2), "dp") / count
    advantage = (advantage - mean) * lax.rsqrt(variance + 1e-5)
    ratio = jnp.exp(logp - old)
    surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    return -lax.psum(surrogate.sum(), "dp") / count


def ppo_reference(logp, old, advantage):
    centred = advantage - advantage.mean()
    advantage = centred * lax.rsqrt(jnp.mean(centred**2) + 1e-5)
    ratio = jnp.exp(logp - old)
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage).mean()


def next_token(logps, tokens):
    n, i = lax.axis_size("sp"), lax.axis_index("sp")
    # fault: perm = [(j, (j + 1) % n) for j in range(n)]
    perm = [(j, (j - 1) % n) for j in range(n)]
    border = lax.ppermute(tokens[:, :1], "sp", perm)  # wrong with it
    labels = jnp.concatenate([tokens[:, 1:], border], 1)
    picked = jnp.take_along_axis(logps, labels[..., None], 2)[..., 0]
    width = tokens.shape[1]
    keep = i * width + jnp.arange(width) < n * width - 1
    return lax.psum(jnp.where(keep[None], -picked, 0.0).sum(), "sp")


def next_token_reference(logps, tokens):
    return -jnp.take_along_axis(logps[:, :-1], tokens[:, 1:, None], 2).sum()


def last_position(logps, tokens):
    n, i = lax.axis_size("sp"), lax.axis_index("sp")
    border = sk.shift(tokens[:, :1], "sp", by=-1)
    labels = jnp.concatenate([tokens[:, 1:], border], 1)
    hot = jax.nn.one_hot(labels, 5)
    losses = -(hot * logps).sum(2)
    # fault: weights = jnp.ones(2).at[-1].set(jnp.where(i == 0, 0.0, 1.0))
    weights = jnp.ones(2).at[-1].set(jnp.where(i == n - 1, 0.0, 1.0))
    return lax.psum((losses * weights[None]).sum(), "sp")


def masked_mean(loss, mask):
    total = lax.psum((loss * mask).sum(), ("dp", "sp"))
    # fault: count = lax.psum(mask.sum(), "sp") * lax.axis_size("dp")
    count = lax.psum(mask.sum(), ("dp", "sp"))
    return total / count


def dice(x, y):
    p = jax.nn.sigmoid(x)
    both = lax.psum((p * y).sum(), "dp")
    # fault: union = (p.sum() + y.sum()) * lax.axis_size("dp")
    union = lax.psum(p.sum() + y.sum(), "dp")
    return 1 - (2 * both + 1) / (union + 1)


def dice_reference(x, y):
    p = jax.nn.sigmoid(x)
    return 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)


H, W, L = floats(3, 2), floats(2, 8), floats(3, 8)
PAIRS = (floats(4, 3), floats(4, 3) + 1)
LOGPS, TOKENS = floats(2, 4, 5), np.array([[1, 4, 0, 2], [3, 3, 1, 0]], np.int32)
SEEN = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], np.float32)
CASES = [
    planted(z_loss, z_loss_reference, (H, W, TARGETS), (P(), V, P()), P(), tp=4),
    planted(vocab_offset, lambda h, w, t: nll(h @ w, t), (H, W, TARGETS), (P(), V, P()), P(), tp=2),
    planted(vocab_bound, lambda h, w, t: nll(h @ w, t), (H, W, np.array([3, 4, 0])), (P(), V, P()), P(), tp=2),
    planted(label_smoothing, label_smoothing_reference, (L, TARGETS), (V, P()), P(), tp=4),
    planted(info_nce, info_nce_reference, PAIRS, (R, R), P(), dp=2),
    planted(clip_loss, clip_loss_reference, (*PAIRS, np.float32(1)), (R, R, P()), P(), dp=2),
    planted(policy_kl, policy_kl_reference, (L, L + 1), (V, V), P(), tp=2),
    planted(dpo, dpo_reference, [floats(2, 4) + i for i in range(4)] + [SEEN], [S] * 5, P(), sp=2),
    planted(ppo, ppo_reference, [floats(4), floats(4) + 1, floats(4) ** 2], [R] * 3, P(), dp=2),
    planted(next_token, next_token_reference, (LOGPS, TOKENS), (S, S), P(), sp=4),
    planted(last_position, next_token_reference, (LOGPS, TOKENS), (S, S), P(), sp=2),
    planted(masked_mean, lambda x, m: (x * m).sum() / m.sum(), (floats(2, 4), SEEN), [P("dp", "sp")] * 2, P()),
    planted(dice, dice_reference, (floats(4), np.array([1, 0, 0, 1], "f")), (R, R), P(), dp=2),
]
