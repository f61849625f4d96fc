"""Every kernel of collectives/ and layers/ equals plain code for all inputs, with its gradients."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import collectives, layers
from shardkit.layers.vocabulary import vocab_cross_entropy_and_hits
from shardkit.testing import assert_equal_for_all_inputs

x_48 = np.zeros((8, 4), np.float32)


class Case(NamedTuple):
    """A kernel over axis "a" of four devices, or "b" and "a" of two and two, and the same without a mesh."""

    kernel: Any
    reference: Any
    ins: Any = P()
    outs: Any = P()
    args: tuple[Any, ...] = (x_48,)
    sizes: Any = {"a": 4}  # noqa: RUF012 (a constant)

    def over(self, ins: Any, outs: Any, *args_and_sizes: Any, **sizes: Any) -> Any:
        return Case(self.kernel, self.reference, ins, outs, *args_and_sizes, **sizes)


def blocks(x: Any) -> Any:
    """[4, rows of a device, ...]."""
    return x.reshape(4, -1, *x.shape[1:])


def transposed(x: Any) -> Any:
    """An all_to_all of rows and columns."""
    return blocks(x).reshape(4, 2, 4, 1).transpose(2, 0, 1, 3).reshape(4 * 8, 1)


def attention(q: Any, k: Any, v: Any, causal: bool = True) -> Any:
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / 2
    if causal:
        scores = jnp.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores, -1), v)


def near(q: Any, k: Any, v: Any, segments: Any, places: Any) -> Any:
    """Attention to the three tokens before, of the same document, itself included; the tokens in another order."""
    behind = places[:, :, None] - places[:, None]
    seen = (segments[:, :, None] == segments[:, None]) & (behind >= 0) & (behind < 3)
    scores = jnp.where(seen[:, None], jnp.einsum("bthk,bshk->bhts", q, k) / 2, -jnp.inf)
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores, -1), v)


def seen_near(attend: Any) -> Any:
    return lambda q, k, v, segments, places: attend(q, k, v, segments_bt=segments, positions_bt=places, window=3)


def larger_share(x: Any) -> Any:
    """5/7 of four devices, of numbers that are sent beside a sum."""
    sums = sk.all_reduce(jnp.stack([jnp.sum(x), jnp.float32(5), jnp.float32(2)]), "a")
    return jnp.maximum(sums[1] / 7, sums[2] / 7)


def cross_entropy(x: Any, head: Any, targets: Any) -> Any:
    logits = x @ head
    chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jax.nn.logsumexp(logits, -1) - chosen


def smoothed(x: Any, head: Any, targets: Any) -> Any:
    logs = jax.nn.logsumexp(x @ head, -1)
    return 0.9 * cross_entropy(x, head, targets) + 0.1 * (logs - (x @ head).mean(-1)) + 0.01 * logs**2


def twice(head: Any) -> Any:
    return jnp.repeat(head.reshape(3, 4, 2), 2, 1).reshape(3, 16)


def hits_of(nats: Any, hits: Any) -> Any:
    return nats, hits.astype(nats.dtype)


def mixture(places: int, x: Any, router: Any, w: Any, weights: Any) -> Any:
    """Two experts for each token of positive weight; each has so many places in a sequence, first choices first."""
    gates, chosen = jax.lax.top_k(jax.nn.softmax(x @ router), 2)
    sent = jax.nn.one_hot(chosen, 4, dtype=int) * (weights > 0).astype(int)[..., None, None]  # [b, t, 2, E]
    in_order = sent.swapaxes(1, 2).reshape(len(x), -1, 4)
    kept = in_order * (jnp.cumsum(in_order, 1) <= places).astype(int)
    kept = kept.reshape(len(x), 2, -1, 4).swapaxes(1, 2)
    shares = gates / gates.sum(-1, keepdims=True)
    return jnp.einsum("btk,btke,bted->btd", shares, kept.astype("f"), jnp.tanh(jnp.einsum("btd,edf->btef", x, w)))


ROWS, COLUMNS = P("a"), P(None, "a")
TWO = {"b": 2, "a": 2}
BOTH = P(("b", "a"))
QKV = tuple(np.zeros((1, 8, 4, 4), np.float32) for _ in range(3))
GAIN = np.zeros(4, np.float32)
TARGETS = np.array([[0, 3, 5, 7]])
DEALT = np.array([[5, 0, 3, 6, 1, 7, 2, 4]])
DOCUMENTS = (*QKV, np.array([[0, 0, 0, 0, 1, 1, 1, 2]])[0][DEALT], DEALT)
LOGITS = (np.zeros((1, 4, 3), np.float32), np.zeros((3, 8), np.float32), TARGETS)

CASES = {
    "all_reduce": Case(lambda x: sk.all_reduce(x, "a"), lambda x: blocks(x).sum(0)).over(ROWS, P()),
    "all_reduce mean": Case(lambda x: sk.all_reduce(x, "a", op="mean"), lambda x: blocks(x).mean(0)).over(ROWS, P()),
    "all_reduce max": Case(lambda x: sk.all_reduce(x, "a", op="max"), lambda x: blocks(x).max(0)).over(ROWS, P()),
    "deterministic": Case(lambda x: sk.all_reduce(x, "a", deterministic=True), lambda x: x.sum(0)).over(ROWS, P()),
    "all_gather": Case(lambda x: sk.all_gather(x, "a", replicated=True), lambda x: x).over(ROWS, P()),
    "all_gather varying": Case(lambda x: sk.all_gather(x, "a"), lambda x: jnp.tile(x, (4, 1))).over(ROWS, ROWS),
    "reduce_scatter": Case(lambda x: sk.reduce_scatter(x, "a", dim=1), lambda x: blocks(x).sum(0)).over(ROWS, COLUMNS),
    "all_to_all": Case(lambda x: sk.all_to_all(x, "a", split_dim=1, concat_dim=0), transposed).over(ROWS, ROWS),
    "reduce_scatter of booleans": Case(
        lambda x: sk.reduce_scatter(x > 0, "a", dim=1).astype("f"), lambda x: (blocks(x) > 0).sum(0).astype("f")
    ).over(ROWS, COLUMNS),
    "shift": Case(lambda x: sk.shift(x, "a"), lambda x: jnp.roll(x, 2, 0)).over(ROWS, ROWS),
    "shift without wrap": Case(
        lambda x: sk.shift(x, "a", by=-1, wrap=False), lambda x: jnp.concatenate([x[2:], 0 * x[:2]])
    ).over(ROWS, ROWS),
    "broadcast": Case(lambda x: sk.broadcast(x, "a", source=2), lambda x: x[4:6]).over(ROWS, P()),
    "halo_exchange": Case(
        lambda x: collectives.halo_exchange(x, "a", wrap=True),
        lambda x: jnp.concatenate([jnp.take(x, np.arange(2 * i - 1, 2 * i + 3) % 8, 0) for i in range(4)]),
    ).over(ROWS, ROWS),
    "prefix_scan": Case(
        lambda x: collectives.prefix_scan(x, "a"), lambda x: jnp.cumsum(blocks(x), 0).reshape(x.shape)
    ).over(ROWS, ROWS),
    "all_reduce_tree": Case(
        lambda x: collectives.all_reduce_tree({"x": x, "y": x[0]}, "a", bucket_bytes=8)["x"], lambda x: blocks(x).sum(0)
    ).over(ROWS, P()),
    "hierarchical": Case(lambda x: sk.hierarchical.all_reduce(x, "a", "b"), lambda x: blocks(x).sum(0)).over(
        BOTH, P(), sizes=TWO
    ),
    # Counts, compared where they are known and where they came with a sum of unknowns.
    "the larger share": Case(
        lambda x: x * jnp.max(sk.all_reduce(jnp.array([5.0, 2.0]) / 7.0, "a")) / larger_share(x), lambda x: x
    ).over(ROWS, ROWS),
    "two axes": Case(lambda x: sk.all_gather(x, ("b", "a"), replicated=True), lambda x: x).over(BOTH, P(), sizes=TWO),
    "ring attention": Case(partial(layers.ring_attention, axis="a"), attention).over(COLUMNS, COLUMNS, QKV),
    "ring attention, zigzag": Case(
        lambda *qkv: layers.zigzag(
            layers.ring_attention(*layers.zigzag(qkv, "a"), "a", order="zigzag"), "a", inverse=True
        ),
        attention,
    ).over(COLUMNS, COLUMNS, QKV, {"a": 2}),
    "ring attention, all": Case(
        partial(layers.ring_attention, axis="a", causal=False), partial(attention, causal=False)
    ).over(COLUMNS, COLUMNS, QKV),
    # Of each key and value two devices make gradients.
    "ring attention, keys for all heads": Case(
        partial(layers.ring_attention, axis="a"),
        lambda q, k, v: jnp.concatenate([attention(half, k, v) for half in jnp.split(q, 2, 2)], 2),
    ).over((P(None, "a", "b"), COLUMNS, COLUMNS), P(None, "a", "b"), (QKV[0], *(x[:, :, :2] for x in QKV[1:])), TWO),
    "ulysses": Case(partial(layers.ulysses_attention, axis="a"), attention).over(COLUMNS, COLUMNS, QKV),
    "ulysses inside a ring, zigzag": Case(
        lambda *qkv: layers.zigzag(
            layers.ulysses_attention(*layers.zigzag(qkv, "b", ulysses="a"), "a", ring="b", order="zigzag"),
            "b",
            ulysses="a",
            inverse=True,
        ),
        attention,
    ).over(P(None, ("b", "a")), P(None, ("b", "a")), QKV, TWO),
    "ring attention, dealt": Case(seen_near(partial(layers.ring_attention, axis="a")), near).over(
        COLUMNS, COLUMNS, DOCUMENTS
    ),
    "ulysses, dealt": Case(seen_near(partial(layers.ulysses_attention, axis="a")), near).over(
        COLUMNS, COLUMNS, DOCUMENTS
    ),
    "vocab_cross_entropy": Case(partial(layers.vocab_cross_entropy, axis="a"), cross_entropy).over(
        (P(), COLUMNS, P()), P(), LOGITS
    ),
    "vocab_cross_entropy_and_hits, each column twice": Case(
        lambda x, head, targets: hits_of(
            *vocab_cross_entropy_and_hits(x, jnp.concatenate([head, head], 1), targets, axis="a")
        ),
        lambda x, head, targets: hits_of(
            cross_entropy(x, twice(head), targets), jnp.argmax(x @ twice(head), -1) == targets
        ),
    ).over((P(), COLUMNS, P()), P(), LOGITS),
    "vocab_cross_entropy, smoothed": Case(
        partial(layers.vocab_cross_entropy, axis="a", label_smoothing=0.1, z_loss=0.01), smoothed
    ).over((P(), COLUMNS, P()), P(), LOGITS),
    "vocab_embed": Case(partial(layers.vocab_embed, axis="a"), lambda t, w: w[t]).over(
        (P(), ROWS), P(), (TARGETS, x_48)
    ),
    "sharded_rms_norm": Case(
        partial(layers.sharded_rms_norm, axis="a"),
        lambda x, gain: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain[None],
    ).over((COLUMNS, ROWS), COLUMNS, (x_48, GAIN)),
    "sharded_layer_norm": Case(
        partial(layers.sharded_layer_norm, axis="a"),
        lambda x, gain, bias: layers.sharded_layer_norm(x, gain, bias, None),
    ).over((COLUMNS, ROWS, ROWS), COLUMNS, (x_48, GAIN, GAIN)),
}
TOKENS = (np.zeros((4, 4, 3), np.float32), np.zeros((3, 4), np.float32), np.zeros((4, 3, 3), np.float32))
WAYS = [("capacity", layers.Capacity(0.5), 1), ("dropless", layers.Dropless(), 8)]
WAYS += [(f"dropless, {impl}", layers.Dropless(impl=impl), 8) for impl in ("gather", "ring")]
for name, routing, places in WAYS:
    CASES[f"moe, {name}"] = Case(
        lambda x, router, w, weights, routing=routing: layers.moe(
            x, router, w, lambda w, x, dot: jnp.tanh(dot(x, w)), "a", routing=routing, weights=weights
        )[0],
        partial(mixture, places),
    ).over((ROWS, P(), ROWS, ROWS), ROWS, (*TOKENS, np.zeros((4, 4), np.float32)))
for both in (False, True):
    way = "bidirectional ring" if both else "ring"
    CASES |= {
        f"{way} all_gather": Case(
            partial(sk.ring.all_gather, axis="a", bidirectional=both, replicated=True), lambda x: x
        ).over(ROWS, P()),
        f"{way} reduce_scatter": Case(
            partial(sk.ring.reduce_scatter, axis="a", dim=1, bidirectional=both), lambda x: blocks(x).sum(0)
        ).over(ROWS, COLUMNS),
        f"{way} all_reduce": Case(
            partial(sk.ring.all_reduce, axis="a", bidirectional=both, replicated=True), lambda x: blocks(x).sum(0)
        ).over(ROWS, P()),
    }
for impl in ("gather", "ring", "bidirectional"):
    weights = np.zeros((4, 8), np.float32)
    CASES |= {
        f"all_gather_matmul, {impl}": Case(partial(sk.all_gather_matmul, axis="a", impl=impl), jnp.matmul).over(
            (ROWS, COLUMNS), COLUMNS, (x_48, weights)
        ),
        f"matmul_reduce_scatter, {impl}": Case(partial(sk.matmul_reduce_scatter, axis="a", impl=impl), jnp.matmul).over(
            (COLUMNS, ROWS), ROWS, (x_48, weights)
        ),
    }


# proves N49
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_equals_plain_code(name):
    case = CASES[name]
    n = int(np.prod(list(case.sizes.values())))
    mesh = sk.make_mesh(jax.devices()[:n], **case.sizes)
    found = assert_equal_for_all_inputs(
        case.kernel, case.reference, mesh=mesh, in_specs=case.ins, out_specs=case.outs, args=case.args
    )
    assert found.chance < 1e-12
