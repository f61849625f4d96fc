"""Experts that choose, losses of documents, samplers, and penalties, with what they read split."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from corpus.case import floats
from faults.case import planted

BATCH, EXPERTS, VOCAB = P("dp"), P("ep"), P(None, "tp")


def experts_choose(x, router, w):
    """Each expert takes the two tokens of all that suit it best."""
    scores = jax.nn.sigmoid(x @ router)
    # fault: everything = scores
    everything = lax.all_gather(scores, "dp", tiled=True)
    bound = jnp.sort(everything, 0)[-2]
    gates = jnp.where(scores >= bound[None], scores, 0.0)
    return jnp.einsum("te,td,edf->tf", gates, x, w)


def experts_choose_reference(x, router, w):
    scores = jax.nn.sigmoid(x @ router)
    gates = jnp.where(scores >= jnp.sort(scores, 0)[-2][None], scores, 0.0)
    return jnp.einsum("te,td,edf->tf", gates, x, w)


def shared_expert(x, gates, w, shared):
    """All devices have an expert, and all the same shared one."""
    y = gates[:, :1] * jnp.tanh(x @ w[0])
    # fault: return lax.psum(y + x @ shared, "ep")
    return lax.psum(y, "ep") + x @ shared


def shared_expert_reference(x, gates, w, shared):
    return sum(gates[:, e, None] * jnp.tanh(x @ w[e]) for e in range(2)) + x @ shared


def offsets(counts, x):
    """Where the rows of each device begin among all: behind those of the devices before it."""
    everything = lax.all_gather(counts, "ep", tiled=True)
    # fault: begins = jnp.cumsum(everything)
    begins = jnp.cumsum(everything) - everything
    start = begins[lax.axis_index("ep")]
    places = start + jnp.arange(x.shape[0])
    valid = jnp.arange(x.shape[0]) < counts[0]
    out = jnp.zeros((6, x.shape[1])).at[jnp.where(valid, places, 6)].add(x, mode="drop")
    return lax.psum(out, "ep")


def nodes_of_experts(x, experts, w):
    """Experts are split over nodes, and over the devices of each."""
    # fault: mine = lax.axis_index("local") * lax.axis_size("node") + lax.axis_index("node")
    mine = lax.axis_index("node") * lax.axis_size("local") + lax.axis_index("local")
    y = jnp.where((experts == mine)[:, None], x @ w[0], 0.0)
    return lax.psum(y, ("node", "local"))


def padded_embedding(table, tokens):
    """The token 0 is padding, and has no embedding."""
    rows = table.shape[0]
    local = tokens - lax.axis_index("tp") * rows
    inside = (local >= 0) & (local < rows)
    found = table[jnp.where(inside, local, 0)]
    # fault: known = inside & (local != 0)
    known = inside & (tokens != 0)
    return lax.psum(jnp.where(known[:, None], found, 0.0), "tp")


def right_labels(logits, labels, weights):
    """The weight of rows in which no logit is larger than that of the label."""
    width = logits.shape[1]
    # fault: best = logits.max(1)
    best = lax.pmax(logits.max(1), "tp")
    hot = jax.nn.one_hot(labels - lax.axis_index("tp") * width, width)
    hit = jnp.where(logits == best[:, None], hot, 0.0).sum(1)
    return lax.psum((hit * weights).sum(), "tp")


def right_labels_reference(logits, labels, weights):
    of_label = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    return jnp.where(of_label == logits.max(1), weights, 0.0).sum()


def distilled(student, teacher):
    """How far a student is from its teacher."""
    total_of_student = jnp.log(lax.psum(jnp.exp(student).sum(1, keepdims=True), "tp"))
    total_of_teacher = jnp.log(lax.psum(jnp.exp(teacher).sum(1, keepdims=True), "tp"))
    p = student - total_of_student
    # fault: q = teacher - total_of_student
    q = teacher - total_of_teacher
    return lax.psum((jnp.exp(q) * (q - p)).sum(), "tp")


def distilled_reference(student, teacher):
    p, q = jax.nn.log_softmax(student), jax.nn.log_softmax(teacher)
    return (jnp.exp(q) * (q - p)).sum()


def documents(losses, numbers):
    """The mean of the means of documents, of which tokens are on all devices."""
    sums = lax.psum(jax.ops.segment_sum(losses, numbers, 3), "dp")
    # fault: counts = jax.ops.segment_sum(jnp.ones_like(losses), numbers, 3)
    counts = lax.psum(jax.ops.segment_sum(jnp.ones_like(losses), numbers, 3), "dp")
    return lax.pmean((sums / counts).mean(), "dp")


def smallest_share(logits, values):
    """Tokens that are less than a fifth as likely as the likeliest are never sampled."""
    # fault: largest = logits.max()
    largest = lax.pmax(logits.max(), "tp")
    powers = jnp.where(logits >= largest + jnp.log(0.2), jnp.exp(logits), 0.0)
    return lax.psum(powers @ values, "tp") / lax.psum(powers.sum(), "tp")


def smallest_share_reference(logits, values):
    powers = jnp.where(logits >= logits.max() + jnp.log(0.2), jnp.exp(logits), 0.0)
    return powers @ values / powers.sum()


def inverse(weights, uniform):
    """How many running sums are below a uniform number: the place of a sample."""
    sums = lax.all_gather(weights.sum(), "tp")
    # fault: before = jnp.where(jnp.arange(sums.size) <= lax.axis_index("tp"), sums, 0.0).sum()
    before = jnp.where(jnp.arange(sums.size) < lax.axis_index("tp"), sums, 0.0).sum()
    running = before + jnp.cumsum(weights)
    below = (running < uniform * sums.sum()).sum()
    return lax.psum(below.astype(jnp.float32), "tp")


def penalty(logits, tokens):
    """A token that was there before is less likely, by how often."""
    width = logits.shape[0]
    places = lax.axis_index("tp") * width + jnp.arange(width)
    counts = (tokens[:, None] == places[None]).sum(0)
    # fault: lower = logits - 0.5 * (counts > 0).astype(jnp.float32)
    lower = logits - 0.5 * counts.astype(jnp.float32)
    return lower - jnp.log(lax.psum(jnp.exp(lower).sum(), "tp"))


def penalty_reference(logits, tokens):
    counts = (tokens[:, None] == jnp.arange(6)[None]).sum(0).astype(jnp.float32)
    return jax.nn.log_softmax(logits - 0.5 * counts)


CASES = [
    planted(
        experts_choose, experts_choose_reference, (floats(6, 2), floats(2, 2) + 1, floats(2, 2, 3)),
        (BATCH, P(), P()), BATCH, dp=2, grad=0,
    ),
    planted(
        shared_expert, shared_expert_reference, (floats(3, 2), floats(3, 2) + 1, floats(2, 2, 3), floats(2, 3)),
        (P(), P(None, "ep"), EXPERTS, P()), P(), ep=2,
    ),
    planted(
        offsets, lambda c, x: x[jnp.array([0, 1, 2, 3, 6, 7])], (np.array([3, 1, 2]), floats(9, 2)),
        (EXPERTS, EXPERTS), P(), ep=3,
    ),
    planted(
        nodes_of_experts, lambda x, e, w: jnp.einsum("td,tdf->tf", x, w[e]),
        (floats(4, 2), np.array([1, 5, 2, 3]), floats(6, 2, 2)), (P(), P(), P(("node", "local"))), P(),
        node=2, local=3,
    ),
    planted(
        padded_embedding, lambda t, i: jnp.where((i != 0)[:, None], t[i], 0.0),
        (floats(6, 2), np.array([0, 3, 4, 2])), (P("tp"), P()), P(), tp=2,
    ),
    planted(
        right_labels, right_labels_reference, (floats(4, 4), np.array([3, 0, 2, 2]), floats(4)),
        (VOCAB, P(), P()), P(), tp=2, grad=0,
    ),
    planted(distilled, distilled_reference, (floats(2, 4), floats(2, 4) + 1), (VOCAB, VOCAB), P(), tp=2),
    planted(
        documents,
        lambda x, i: (jax.ops.segment_sum(x, i, 3) / jax.ops.segment_sum(jnp.ones_like(x), i, 3)).mean(),
        (floats(8), np.array([0, 0, 1, 2, 1, 2, 2, 0])), (BATCH, BATCH), P(), dp=2,
    ),
    planted(
        smallest_share, smallest_share_reference, (floats(6), floats(6, 2)), (P("tp"), P("tp")), P(), tp=2, grad=0
    ),
    planted(
        inverse, lambda w, u: (jnp.cumsum(w) < u * w.sum()).sum().astype(jnp.float32), (floats(6), floats()),
        (P("tp"), P()), P(), tp=2, grad=0,
    ),
    planted(penalty, penalty_reference, (floats(6), np.array([2, 5, 2])), (P("tp"), P()), P("tp"), tp=2),
]  # fmt: skip
