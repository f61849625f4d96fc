"""Losses and their normalization."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from corpus.case import CHANGELOG, MEGATRON, TITAN, TORCH, Case, floats

TARGETS = np.array([3, 7, 0, 5], np.int32)
PADDED = np.array([3, 7, 0, -1], np.int32)
ROWS, CONTEXT = P("data"), P("data", "context")
COLUMNS = P(None, "model")


def of_targets(x, targets, first=0):
    """The elements of the targets, of the columns from `first` on; 0 where they are not among them."""
    return jnp.sum(x * jax.nn.one_hot(targets - first, x.shape[1]), 1)


def cross_entropy(logits, targets):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], 1)[:, 0]


def smoothed(logits, targets):
    logits = logits - lax.stop_gradient(sk.all_reduce(logits.max(1, keepdims=True), "model", op="max"))
    total = sk.all_reduce(jnp.sum(jnp.exp(logits), 1), "model")
    target = sk.all_reduce(of_targets(logits, targets, sk.axis_index("model") * 4), "model")
    # wrong: mean = jnp.mean(logits, 1)
    mean = sk.all_reduce(jnp.mean(logits, 1), "model", op="mean")
    return jnp.log(total) - 0.875 * target - 0.125 * mean


def smoothed_reference(logits, targets):
    target = of_targets(logits, targets)
    return jax.nn.logsumexp(logits, 1) - 0.875 * target - 0.125 * jnp.mean(logits, 1)


def vocabulary(x, w, targets):
    # wrong: logits = sk.all_gather(x @ w, "model", dim=1)
    logits = x @ w
    first = sk.axis_index("model") * logits.shape[1]
    total = sk.all_reduce(jnp.sum(jnp.exp(logits), 1), "model")  # wrong with it
    return jnp.log(total) - sk.all_reduce(of_targets(logits, targets, first), "model")


def predicted(x, w, targets, mask):
    loss = cross_entropy(x @ w, targets)
    # wrong: return sk.all_reduce(jnp.sum(loss * mask) / jnp.sum(mask), "data", op="mean")
    return sk.all_reduce(jnp.sum(loss * mask), "data") / sk.all_reduce(jnp.sum(mask), "data")


def predicted_reference(x, w, targets, mask):
    return jnp.sum(cross_entropy(x @ w, targets) * mask) / jnp.sum(mask)


def sequences(x, mask):
    total, count = jnp.sum(jnp.tanh(x) * mask, 1), jnp.sum(mask, 1)
    # wrong: mean = sk.all_reduce(total / count, "context", op="mean")
    mean = sk.all_reduce(total, "context") / sk.all_reduce(count, "context")
    return sk.all_reduce(jnp.mean(mean), "data", op="mean")


def sequences_reference(x, mask):
    return jnp.mean(jnp.sum(jnp.tanh(x) * mask, 1) / jnp.sum(mask, 1))


def reported(x, mask):
    total, count = sk.all_reduce((jnp.sum(jnp.tanh(x) * mask), jnp.sum(mask)), ("data", "context"))
    # wrong: return total / count * sk.axis_size("context")
    return total / count


def scaled(x, w):
    def loss(w):  # of its tokens, for an average over all devices
        return sk.axis_size("context") * jnp.sum(jnp.tanh(x * w)) / 24

    grads = jax.grad(loss)(sk.vary(w, ("data", "context"))) * sk.axis_size("data")
    # wrong: return sk.all_reduce(sk.all_reduce(grads, "data", op="mean"), "context")
    return sk.all_reduce(grads, ("data", "context"), op="mean")


def chunks(h, w, targets):
    def gradient(carry, chunk):
        h, targets = chunk
        p = jnp.exp(h @ w)
        p /= sk.all_reduce(jnp.sum(p, 1, keepdims=True), "model")
        d = p - jax.nn.one_hot(targets - sk.axis_index("model") * 4, 4)
        # wrong: return carry, d @ w.T
        return carry, sk.all_reduce(d @ w.T, "model")

    return lax.scan(gradient, None, (h.reshape(2, 2, -1), targets.reshape(2, 2)))[1].reshape(h.shape)


def chunks_reference(h, w, targets):
    return jax.grad(lambda h: jnp.sum(cross_entropy(h @ w, targets)))(h)


def padded(x, w, targets):
    loss = cross_entropy(x @ w, targets) * jnp.float32(targets >= 0)
    # wrong: count = sk.all_reduce(jnp.sum(jnp.float32(targets < 8)), "data")
    count = sk.all_reduce(jnp.sum(jnp.float32(targets >= 0)), "data")
    return sk.all_reduce(jnp.sum(loss), "data") / count


def padded_reference(x, w, targets):
    loss = cross_entropy(x @ w, targets) * jnp.float32(targets >= 0)
    return jnp.sum(loss) / jnp.sum(jnp.float32(targets >= 0))


def microbatched(x, mask):
    """Of two microbatches, which have other numbers of tokens."""

    def add(carry, microbatch):
        x, mask = microbatch
        total, count = jnp.sum(jnp.tanh(x) * mask), jnp.sum(mask)
        # wrong: return (carry[0] + total / count, carry[1] + 1), None
        return (carry[0] + total, carry[1] + count), None

    microbatches = x.reshape(2, -1), mask.reshape(2, -1)
    (total, count), _ = lax.scan(add, sk.vary_like((0.0, 0.0), x), microbatches)
    return sk.all_reduce(total, "data") / sk.all_reduce(count, "data")


def next_tokens(x, w, tokens):
    """The target of a shard's last token is the first token of the next shard; the whole's last token has none."""
    last = sk.axis_index("context") == sk.axis_size("context") - 1
    # wrong: beyond = jnp.array([-1])
    beyond = jnp.where(last, -1, sk.shift(tokens[:1], "context", by=-1))
    targets = jnp.concatenate([tokens[1:], beyond])
    valid = jnp.float32(targets >= 0)
    loss = cross_entropy(x @ w, targets) * valid
    return sk.all_reduce(jnp.sum(loss), "context") / sk.all_reduce(jnp.sum(valid), "context")


def uneven(x):
    """Three rows on two devices: the last device has one of them, and padding."""
    rows = jnp.where(sk.axis_index("data") == 1, 1, 2)
    y = jnp.tanh(x) * jnp.float32(jnp.arange(2) < rows)[:, None]
    # wrong: return sk.all_reduce(jnp.sum(y) / (3 * rows), "data", op="mean")
    return sk.all_reduce(jnp.sum(y), "data") / 9


def log_softmax(x):
    return x - jnp.log(sk.all_reduce(jnp.sum(jnp.exp(x), 1, keepdims=True), "model"))


def preferred(x, weight):
    """A loss that is no cross entropy, of log-softmax with a backward pass of its own."""

    def backward(y, g):
        # wrong: return (g,)
        return (g - jnp.exp(y) * sk.all_reduce(jnp.sum(g, 1, keepdims=True), "model"),)

    normalized = jax.custom_vjp(log_softmax)
    normalized.defvjp(lambda x: (log_softmax(x),) * 2, backward)
    return sk.all_reduce(jnp.sum(normalized(x) * weight, 1), "model")


X, W = floats(4, 3), floats(3, 8)
CASES = [
    Case("label smoothing over a device's vocabulary", MEGATRON + "7452", smoothed).against(
        smoothed_reference, (floats(4, 8), TARGETS), (COLUMNS, P()), P()
    ),
    Case("gathered logits in a vocabulary-parallel loss", MEGATRON + "7452", vocabulary).against(
        lambda x, w, targets: cross_entropy(x @ w, targets), (X, W, TARGETS), (P(), COLUMNS, P()), P()
    ),
    Case("multi-token loss over a device's count", MEGATRON + "7452", predicted).against(
        predicted_reference, (X, W, TARGETS, floats(4)), (ROWS, P(), ROWS, ROWS), P()
    ),
    Case("masked loss over a context shard's count", MEGATRON + "7452", sequences).against(
        sequences_reference, (floats(4, 6), floats(6, 4).T ** 2), (CONTEXT, CONTEXT), P()
    ),
    Case("reported loss times the context axis", MEGATRON + "673", reported).against(
        lambda x, mask: jnp.sum(jnp.tanh(x) * mask) / jnp.sum(mask),
        (floats(4, 6), floats(6, 4).T ** 2),
        (CONTEXT, CONTEXT),
        P(),
    ),
    Case("loss scaled for an average that is a sum", MEGATRON + "906", scaled).against(
        lambda x, w: jax.grad(lambda w: jnp.sum(jnp.tanh(x * w)) / 24)(w),
        (floats(4, 6), floats()),
        (CONTEXT, P()),
        P(),
        grad=False,
    ),
    Case("chunked loss keeps partial gradients", TITAN + "3412", chunks).against(
        chunks_reference, (X, W, TARGETS), (P(), COLUMNS, P()), P(), grad=False
    ),
    Case("negative targets count", CHANGELOG, padded).against(padded_reference, (X, W, PADDED), (ROWS, P(), ROWS), P()),
    Case(
        "mean of the means of microbatches", "https://github.com/marin-community/levanter/pull/842", microbatched
    ).against(
        lambda x, mask: jnp.sum(jnp.tanh(x) * mask) / jnp.sum(mask), (floats(8), floats(8) ** 2), (ROWS, ROWS), P()
    ),
    Case(
        "target beyond the end of a shard", "https://github.com/huggingface/transformers/pull/48493", next_tokens
    ).against(
        lambda x, w, tokens: jnp.mean(cross_entropy(x[:-1] @ w, tokens[1:])),
        (X, W, TARGETS),
        (P("context"), P(), P("context")),
        P(),
    ),
    Case("mean of the means of uneven shards", TORCH + "issues/162692", uneven).against(
        lambda x: jnp.mean(jnp.tanh(x[:3])), (X,), (ROWS,), P()
    ),
    Case("log-softmax with cross entropy's gradient", TORCH + "issues/190746", preferred).against(
        lambda x, weight: jnp.sum(jax.nn.log_softmax(x) * weight, 1),
        (floats(4, 8), floats(8, 4).T),
        (COLUMNS, COLUMNS),
        P(),
    ),
]
