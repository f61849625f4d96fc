"""Returns, values, populations and ensembles of reinforcement learning and search."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from corpus.case import floats
from faults.case import planted

TIME, BATCH, ACTIONS, MEMBERS = P("sp"), P("dp"), P(None, "tp"), P("dp")
DISCOUNT = 0.5


def _backwards(rewards, after):
    """Discounted sums from the last step to the first."""
    sums = []
    for t in range(rewards.shape[0] - 1, -1, -1):
        after = rewards[t] + DISCOUNT * after
        sums.append(after)
    return jnp.stack(sums[::-1])


def discounted_rewards(rewards):
    """Each device has some steps; what comes after them is what the later devices have."""
    n, i, steps = lax.axis_size("sp"), lax.axis_index("sp"), rewards.shape[0]
    own = _backwards(rewards, 0.0)
    firsts = lax.all_gather(own[0], "sp")
    distances = jnp.arange(n) - i - 1
    # fault: weights = jnp.where(distances >= 0, DISCOUNT ** jnp.float32(distances), 0.0)
    weights = jnp.where(distances >= 0, DISCOUNT ** jnp.float32(distances * steps), 0.0)
    after = (weights * firsts).sum()
    left = jnp.arange(steps, 0, -1)
    return own + DISCOUNT ** jnp.float32(left) * after


def estimated_advantages(rewards, values):
    following = sk.shift(values[:1], "sp", by=-1, wrap=False)
    # fault: later = jnp.concatenate([values[1:], values[:1]])
    later = jnp.concatenate([values[1:], following])
    return rewards + DISCOUNT * later - values


def estimated_advantages_reference(rewards, values):
    return rewards + DISCOUNT * jnp.concatenate([values[1:], jnp.zeros(1)]) - values


def bootstrapped(rewards, scores):
    """The value of the best action, of which each device has some."""
    # fault: best = scores.max(1)
    best = lax.pmax(scores.max(1), "tp")
    return rewards + DISCOUNT * best


def soft_value(scores, temperature):
    scaled = scores / temperature
    top = lax.pmax(lax.stop_gradient(scaled.max(1)), "tp")
    sums = lax.psum(jnp.exp(scaled - top[:, None]).sum(1), "tp")
    # fault: return temperature * jnp.log(sums) + top
    return temperature * (jnp.log(sums) + top)


def leave_one_out(rewards):
    """Each sample's baseline is the mean of the others."""
    count = rewards.shape[0] * lax.axis_size("dp")
    total = lax.psum(rewards.sum(), "dp")
    # fault: baseline = (total - rewards) / count
    baseline = (total - rewards) / (count - 1)
    return rewards - baseline


def leave_one_out_reference(rewards):
    return rewards - (rewards.sum() - rewards) / 3


def evolution(noise, fitness):
    """Noise weighted by how fit it made, against the mean."""
    # fault: mean = fitness.mean()
    mean = lax.pmean(fitness.mean(), "dp")
    weights = fitness - mean
    return lax.psum(weights @ noise, "dp") / (fitness.shape[0] * lax.axis_size("dp"))


def ensemble_variance(weights, x):
    """Each device has some members."""
    members = jnp.tanh(weights @ x)
    n = members.shape[0] * lax.axis_size("dp")
    mean = lax.psum(members.sum(0), "dp") / n
    # fault: spread = lax.psum((members**2).sum(0), "dp") / n - mean
    spread = lax.psum((members**2).sum(0), "dp") / n - mean**2
    return mean, spread


def ensemble_variance_reference(weights, x):
    members = jnp.tanh(weights @ x)
    return members.mean(0), (members**2).mean(0) - members.mean(0) ** 2


def selected_actions(scores, actions, weights):
    """The mean of what the scores of the taken actions are, weighted; devices have ranges of the actions."""
    width = scores.shape[1]
    first = lax.axis_index("tp") * width
    hot = jax.nn.one_hot(actions - first, width)
    # fault: taken = lax.psum((hot * scores).sum(), "tp")
    taken = lax.psum((hot * scores).sum(1), "tp")
    return (weights * taken).sum() / weights.sum()


def selected_actions_reference(scores, actions, weights):
    taken = jnp.take_along_axis(scores, actions[:, None], 1)[:, 0]
    return (weights * taken).sum() / weights.sum()


R, Q = floats(6), floats(3, 4)
CASES = [
    planted(discounted_rewards, lambda r: _backwards(r, 0.0), (R,), (TIME,), TIME, sp=3),
    planted(estimated_advantages, estimated_advantages_reference, (R, R + 1), (TIME, TIME), TIME, sp=3),
    planted(bootstrapped, lambda r, q: r + DISCOUNT * q.max(1), (floats(3), Q), (P(), ACTIONS), P(), tp=2, grad=0),
    planted(
        soft_value, lambda q, t: t * jax.nn.logsumexp(q / t, 1), (Q, np.float32(2)), (ACTIONS, P()), P(), tp=2, grad=0
    ),
    planted(leave_one_out, leave_one_out_reference, (floats(4),), (BATCH,), BATCH, dp=2),
    planted(
        evolution, lambda e, f: (f - f.mean()) @ e / 4, (floats(4, 3), floats(4)), (BATCH, BATCH), P(), dp=2
    ),
    planted(
        ensemble_variance, ensemble_variance_reference, (floats(4, 2, 3), floats(3)), (MEMBERS, P()), (P(), P()), dp=2
    ),
    planted(
        selected_actions, selected_actions_reference, (Q, np.array([3, 0, 2]), floats(3) ** 2), (ACTIONS, P(), P()),
        P(), tp=2,
    ),
]  # fmt: skip
