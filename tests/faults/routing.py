"""Tokens and where they go: experts, split vocabularies, samplers."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from corpus.case import floats
from faults.case import planted

BATCH, EXPERTS, VOCAB = P("dp"), P("ep"), P(None, "tp")


def dispatched(x, gates, slots, w):
    """Tokens travel to their experts and back; `slots` says with one-hots which place of which expert each has."""
    slots = slots.astype(jnp.float32)
    full = jnp.einsum("tec,td->ecd", slots, x)
    arrived = lax.all_to_all(full, "ep", 0, 1, tiled=True)
    y = jnp.tanh(jnp.einsum("ecd,edf->ecf", arrived, w))
    returned = lax.all_to_all(y, "ep", 1, 0, tiled=True)
    # fault: return jnp.einsum("tec,ecf->tf", slots, returned)
    return jnp.einsum("tec,ecf->tf", slots * gates[:, None, None], returned)


def dispatched_reference(x, gates, slots, w):
    hot = slots.sum(2).astype(jnp.float32)
    return jnp.einsum("te,tef->tf", hot * gates[:, None], jnp.tanh(jnp.einsum("td,edf->tef", x, w)))


def balance(logits):
    """What experts are asked, times how surely: means of all tokens, multiplied."""
    probabilities = jax.nn.softmax(logits)
    chosen = jax.nn.one_hot(logits.argmax(1), 4)
    # fault: asked = chosen.mean(0)
    asked = lax.pmean(chosen.mean(0), "dp")
    surely = lax.pmean(probabilities.mean(0), "dp")
    return 4.0 * (asked * surely).sum()


def balance_reference(logits):
    return 4.0 * (jax.nn.one_hot(logits.argmax(1), 4).mean(0) * jax.nn.softmax(logits).mean(0)).sum()


def two_experts(x, router, w):
    """The two likeliest of four experts; each device has two, and the weights of the chosen ones sum to one."""
    logits = x @ router
    everything = lax.all_gather(logits, "ep", axis=1, tiled=True)
    second = jnp.sort(everything, 1)[:, -2:-1]
    powers = jnp.where(logits >= second, jnp.exp(logits), 0.0)
    # fault: total = powers.sum(1, keepdims=True)
    total = lax.psum(powers.sum(1, keepdims=True), "ep")
    y = jnp.einsum("td,edf->tef", x, w)
    return lax.psum(jnp.einsum("te,tef->tf", powers / total, y), "ep")


def two_experts_reference(x, router, w):
    logits = x @ router
    powers = jnp.where(logits >= jnp.sort(logits, 1)[:, -2:-1], jnp.exp(logits), 0.0)
    return jnp.einsum("te,tef->tf", powers / powers.sum(1, keepdims=True), jnp.einsum("td,edf->tef", x, w))


def bias_of_load(bias, probabilities):
    """A bias of the router grows where an expert has less than its share."""
    # fault: load = probabilities.sum(0)
    load = lax.psum(probabilities.sum(0), "dp")
    missing = load.mean() - load
    return bias + 0.1 * lax.psum(missing, "dp") / lax.axis_size("dp")


def bias_of_load_reference(bias, probabilities):
    load = probabilities.sum(0)
    return bias + 0.1 * (load.mean() - load)


def ignored_labels(h, head, labels):
    """A label of -1 counts for nothing."""
    logits = h @ head
    width = logits.shape[1]
    place = labels - lax.axis_index("tp") * width
    inside = (place >= 0) & (place < width)
    chosen = jnp.take_along_axis(logits, jnp.where(inside, place, 0)[:, None], 1)[:, 0]
    label = lax.psum(jnp.where(inside, chosen, 0.0), "tp")
    total = jnp.log(lax.psum(jnp.exp(logits).sum(1), "tp"))
    # fault: valid = (labels >= 0) & inside
    valid = labels >= 0
    return jnp.where(valid, total - label, 0.0).sum() / 2.0


def ignored_labels_reference(h, head, labels):
    loss = -jnp.take_along_axis(jax.nn.log_softmax(h @ head), jnp.maximum(labels, 0)[:, None], 1)[:, 0]
    return jnp.where(labels >= 0, loss, 0.0).sum() / 2.0


def capped_logits(h, head):
    """Logits are bounded before anything is computed of them."""
    raw = h @ head
    logits = 5.0 * jnp.tanh(raw / 5.0)
    top = lax.pmax(lax.stop_gradient(logits).max(1), "tp")
    # fault: powers = jnp.exp(raw - top[:, None])
    powers = jnp.exp(logits - top[:, None])
    return jnp.log(lax.psum(powers.sum(1), "tp")) + top


def chunks_of_tokens(h, head):
    """Few tokens at a time, so that few logits are held."""

    def chunk(total, rows):
        logits = rows @ head
        own = lax.stop_gradient(logits).max(1)
        top = lax.pmax(own, "tp")
        powers = lax.psum(jnp.exp(logits - top[:, None]).sum(1), "tp")
        # fault: return total + (jnp.log(powers) + own).sum(), None
        return total + (jnp.log(powers) + top).sum(), None

    zero = lax.pcast(jnp.float32(0), "tp", to="varying")
    return lax.pmean(lax.scan(chunk, zero, h.reshape(2, 2, -1))[0], "tp")


def gradient_of_logits(logits, labels):
    width = logits.shape[1]
    powers = jnp.exp(logits)
    probabilities = powers / lax.psum(powers.sum(1, keepdims=True), "tp")
    # fault: hot = jax.nn.one_hot(labels, width)
    hot = jax.nn.one_hot(labels - lax.axis_index("tp") * width, width)
    return (probabilities - hot) / logits.shape[0]


def gumbel(logits, noise, embeddings):
    """The largest of logits and noise is a sample; noise is drawn for all of the vocabulary."""
    width = logits.shape[1]
    start = lax.axis_index("tp") * width
    # fault: part = noise[:, :width]
    part = lax.dynamic_slice_in_dim(noise, start, width, 1)
    scores = logits + part
    best = scores.max(1)
    place = jnp.where(best == lax.pmax(best, "tp"), scores.argmax(1) + start, 1000)
    return embeddings[lax.pmin(place, "tp")]


def largest_two(logits):
    """The two largest of each row, wherever they are."""
    some = jnp.sort(logits, 1)[:, -2:]
    candidates = lax.all_gather(some, "tp", axis=1, tiled=True)
    # fault: best = candidates[:, :2]
    best = jnp.sort(candidates, 1)[:, -2:]
    return lax.pmean(jnp.exp(best).sum(1), "tp")


SLOTS = np.zeros((4, 2, 2), np.int32)
for token, slot in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
    SLOTS[token][slot] = 1
LABELS = np.array([5, -1, 2])
CASES = [
    planted(
        dispatched, dispatched_reference,
        (floats(8, 2), floats(8), np.concatenate([SLOTS, SLOTS[::-1]]), floats(2, 2, 3)), [EXPERTS] * 4, EXPERTS, ep=2,
    ),
    planted(balance, balance_reference, (floats(6, 4),), (BATCH,), P(), dp=2),
    planted(
        two_experts, two_experts_reference, (floats(3, 2), floats(2, 4), floats(4, 2, 2)),
        (P(), P(None, "ep"), EXPERTS), P(), ep=2, grad=0,
    ),
    planted(bias_of_load, bias_of_load_reference, (floats(3), floats(4, 3)), (P(), BATCH), P(), dp=2),
    planted(
        ignored_labels, ignored_labels_reference, (floats(3, 2), floats(2, 6), LABELS), (P(), VOCAB, P()), P(), tp=2
    ),
    planted(
        capped_logits, lambda h, w: jax.nn.logsumexp(5.0 * jnp.tanh(h @ w / 5.0), 1), (floats(2, 3), floats(3, 4)),
        (P(), VOCAB), P(), tp=2,
    ),
    planted(
        chunks_of_tokens, lambda h, w: jax.nn.logsumexp(h @ w, 1).sum(), (floats(4, 3), floats(3, 4)), (P(), VOCAB),
        P(), tp=2, grad=0,
    ),
    planted(
        gradient_of_logits, lambda x, i: (jax.nn.softmax(x) - jax.nn.one_hot(i, 6)) / 3, (floats(3, 6), LABELS + 1),
        (VOCAB, P()), VOCAB, tp=3,
    ),
    planted(
        gumbel, lambda x, n, e: e[(x + n).argmax(1)], (floats(2, 4), floats(2, 4) + 1, floats(4, 2)),
        (VOCAB, P(), P()), P(), tp=2, grad=0,
    ),
    planted(largest_two, lambda x: jnp.exp(jnp.sort(x, 1)[:, -2:]).sum(1), (floats(2, 6),), (VOCAB,), P(), tp=2),
]  # fmt: skip
