"""Vocabulary-parallel embedding and cross-entropy: against one device, what is sent and held, and what is ignored."""

import math
from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit._jax import compat
from shardkit._jax.jaxprs import walk
from shardkit.layers.vocabulary import vocab_cross_entropy_and_hits
from shardkit.testing import assert_matches_reference, covering
from support.layouts import MODEL_MESHES as MESHES
from support.layouts import mesh_of
from support.refusals import value_error
from support.tiers import covered

B, T, D = 4, 120, 6  # 120 tokens divide by every axis
DTYPES = ["float32", "bfloat16"]
OPTIONS = [{}, {"z_loss": 1e-2}, {"label_smoothing": 0.1}, {"z_loss": 0.1, "label_smoothing": 0.3}]
DRAWN = {"mesh": st.sampled_from(MESHES), "dtype": st.sampled_from(DTYPES), "sequence": st.booleans()}
DRAWN |= {"width": st.integers(1, 3), "seed": st.integers(0, 9), "options": st.sampled_from(OPTIONS)}
# Every mesh in both forms, with and without sequence parallelism.
ROWS = [
    row | {"dtype": DTYPES[i // 2 % 2], "width": 1 + i % 3, "seed": i, "options": OPTIONS[i % 4]}
    for i, row in enumerate(covering({"mesh": MESHES, "sequence": [False, True]}))
]


def rows(sizes):
    return "data" if "data" in sizes else None


def drawn(width, dtype, seed):
    """Head, tokens or targets (some of them negative) and what the head is applied to."""
    rng = np.random.default_rng(seed)
    vocabulary = 120 * width
    x = rng.normal(size=(B, T, D)).astype(dtype)
    head = rng.normal(size=(D, vocabulary)).astype(dtype)
    targets = rng.integers(-20, vocabulary, size=(B, T)).astype(np.int32)
    return x, head, targets


def cross_entropy(x, head, targets, z_loss=0.0, label_smoothing=0.0):
    """Whole logits on one device."""
    logits = jnp.einsum("bTD,DV->bTV", x, head, preferred_element_type=jnp.float32)
    whole = jax.nn.log_softmax(logits)
    right = jnp.take_along_axis(whole, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    nats = -(1 - label_smoothing) * right - label_smoothing * jnp.mean(whole, axis=-1)
    nats = nats + z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
    hits = (jnp.argmax(logits, axis=-1) == targets) & (targets >= 0)
    return jnp.where(targets < 0, 0, nats), hits


@pytest.mark.quick("0", "1", "7")
@covered(ROWS, **{name: each for name, each in DRAWN.items() if name != "options"})
def test_the_embedding_is_that_of_one_device(mesh, dtype, sequence, width, seed):  # proves F27
    sizes, axis = mesh
    _, head, tokens = drawn(width, dtype, seed)
    options = {"mesh": mesh_of(**sizes), "args": (tokens, head.T), "eager": False, "summands": B * T}
    assert_matches_reference(
        lambda tokens, table: sk.layers.vocab_embed(tokens, table, axis, sequence=sequence),
        jax.jit(lambda tokens, table: jnp.where((tokens < 0)[..., None], 0, table[tokens])),
        in_specs=(P(rows(sizes)), P(axis)),
        out_specs=P(rows(sizes), axis if sequence else None),
        **options,
    )


@pytest.mark.quick("0", "1", "7")
@covered(ROWS, **DRAWN)
def test_the_cross_entropy_is_that_of_whole_logits(mesh, dtype, sequence, width, seed, options):  # proves F27
    sizes, axis = mesh
    args = drawn(width, dtype, seed)
    assert_matches_reference(
        lambda *args: vocab_cross_entropy_and_hits(*args, axis, sequence=sequence, **options),
        jax.jit(lambda *args: cross_entropy(*args, **options)),
        mesh=mesh_of(**sizes),
        in_specs=(P(rows(sizes), axis if sequence else None), P(None, axis), P(rows(sizes))),
        out_specs=P(rows(sizes)),  # typed as equal over the axis
        args=args,
        eager=False,
    )


@jax.jit
def whole(*args):
    """Values, hits and values alone, of a vocabulary that is not split."""
    options = {"z_loss": 0.1, "label_smoothing": 0.3}
    both = vocab_cross_entropy_and_hits(*args, None, **options)
    return both, sk.layers.vocab_cross_entropy(*args, None, **options), cross_entropy(*args, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_text_takes_a_whole_vocabulary(dtype):  # proves F27
    (nats, hits), alone, wanted = whole(*drawn(2, dtype, 0))
    np.testing.assert_array_equal(nats, alone)
    np.testing.assert_array_equal(hits, wanted[1])
    np.testing.assert_allclose(nats, wanted[0], rtol=1e-5, atol=1e-6)


def on_four(fn, sequence=False):
    """`fn(x, head, targets, axis)` over four devices that split the vocabulary."""
    tokens = P(None, "model") if sequence else P()
    options = {"mesh": sk.make_mesh(jax.devices()[:4], model=4), "in_specs": (tokens, P(None, "model"), P())}
    mapped = jax.shard_map(lambda *args: fn(*args, "model", sequence=sequence), out_specs=P(), **options)
    return jax.jit(mapped)


@pytest.mark.parametrize("sequence", [False, True])
def test_an_ignored_token_counts_for_nothing_whatever_it_holds(sequence):  # proves F27
    x, head, targets = drawn(1, "float32", 1)
    ignored = targets < 0
    assert jnp.any(ignored)
    x = jnp.where(ignored[..., None], jnp.nan, x)
    f = on_four(sk.layers.vocab_cross_entropy, sequence)
    nats = f(x, head, targets)
    dx, dhead = jax.jit(jax.grad(lambda x, head: jnp.sum(f(x, head, targets)), (0, 1)))(x, head)
    assert not np.any(np.asarray(nats)[ignored]) and not np.any(np.asarray(dx)[ignored])
    assert np.all(np.isfinite(nats)) and np.all(np.isfinite(dx)) and np.all(np.isfinite(dhead))
    zero = jnp.where(ignored[..., None], 0, x)
    wanted = jax.jit(jax.grad(lambda head: jnp.sum(cross_entropy(zero, head, targets)[0])))(head)
    np.testing.assert_allclose(dhead, wanted, rtol=1e-4, atol=1e-5)


def test_large_logits_do_not_overflow_unknown_targets_show_and_the_first_of_equals_is_predicted():  # proves F27
    x, head, targets = drawn(1, "float32", 2)
    nats = on_four(sk.layers.vocab_cross_entropy)(1e4 * x, head, targets)
    np.testing.assert_allclose(nats, jax.jit(cross_entropy)(1e4 * x, head, targets)[0], rtol=1e-4, atol=1e-2)
    targets[0, 0] = 120
    nats = on_four(sk.layers.vocab_cross_entropy)(x, head, targets)
    assert np.isnan(nats[0, 0]) and np.all(np.isfinite(np.asarray(nats).ravel()[1:]))
    x, head, _ = drawn(1, "float32", 3)
    targets = np.tile(np.arange(T, dtype=np.int32), (B, 1))
    hits = on_four(vocab_cross_entropy_and_hits)(x, np.zeros_like(head), targets)[1]
    np.testing.assert_array_equal(hits, targets == 0)


# ---- what is sent, and what is held


def traced(fn, sequence, n, dtype=jnp.bfloat16):
    """A function of x, head and targets on n devices, and its global arguments."""
    specs = (P(None, "model") if sequence else P(), P(None, "model"), P())
    shapes = [((B, T, D), dtype), ((D, 120), dtype), ((B, T), jnp.int32)]
    f = jax.shard_map(fn, mesh=sk.abstract_mesh(model=n), in_specs=specs, out_specs=specs[:2])
    return f, [jax.ShapeDtypeStruct(*each) for each in shapes]


@pytest.mark.parametrize("options, columns", [({}, 2), ({"label_smoothing": 0.1}, 3)])
@pytest.mark.parametrize("sequence", [False, True])
def test_the_cross_entropy_sends_a_few_bytes_a_token(sequence, options, columns):  # proves F27
    def gradients(x, head, targets):
        loss = lambda x, head: jnp.sum(  # noqa: E731
            sk.layers.vocab_cross_entropy(x, head, targets, "model", sequence=sequence, **options)
        )
        return jax.grad(loss, (0, 1))(x, head)

    f, args = traced(gradients, sequence, 4)
    rows = [(row.kind, row.bytes_in, row.backward) for row in sk.census(f, *args).rows]
    activations = B * T * D * 2
    statistics = [("all_reduce", 4 * B * T, False), ("all_reduce", 4 * columns * B * T, False)]
    if sequence:
        assert rows == [("all_gather", activations // 4, False), *statistics, ("reduce_scatter", activations, True)]
    else:
        assert rows == [*statistics, ("all_reduce", activations, True)]


@pytest.mark.parametrize("sequence", [False, True])
def test_the_embedding_sends_its_result(sequence):
    def gradients(x, head, tokens):
        embed = lambda table: sk.layers.vocab_embed(tokens, table, "model", sequence=sequence)  # noqa: E731
        return x, jax.vjp(embed, head.T)[1](x)[0].T

    f, args = traced(gradients, sequence, 4)
    rows = [(row.kind, row.bytes_in, row.backward) for row in sk.census(f, *args).rows]
    activations = B * T * D * 2
    if sequence:
        assert rows == [("reduce_scatter", activations, False), ("all_gather", activations // 4, True)]
    else:
        assert rows == [("all_reduce", activations, False)]


def shapes(jaxpr):
    return (v.aval.shape for site in walk(jaxpr) for v in site.equation.outvars)


def test_no_device_ever_holds_whole_logits_and_keeps_its_own_once():  # proves F27
    def gradients(x, head, targets):
        loss = lambda x, head: jnp.sum(  # noqa: E731
            vocab_cross_entropy_and_hits(x, head, targets, "model", label_smoothing=0.1, z_loss=0.1)[0]
        )
        return jax.grad(loss, (0, 1))(x, head)

    f, args = traced(gradients, False, 4)
    (program,) = [e for e in jax.make_jaxpr(f)(*args).jaxpr.eqns if e.primitive.name == "shard_map"]
    inside = {math.prod(shape) for _, jaxpr in compat.inner_jaxprs(program) for shape in shapes(jaxpr)}
    assert max(inside) == B * T * 120 // 4

    x, head, targets = drawn(1, "bfloat16", 0)
    kept = jax.vjp(lambda x, head: sk.layers.vocab_cross_entropy(x, head, targets, None), x, head)[1]
    logits = [each for each in jax.tree.leaves(kept) if each.shape == (B, T, 120)]
    assert [each.dtype for each in logits] == [jnp.float32]


def test_one_device_sends_nothing():
    for sequence in (False, True):
        mesh = sk.abstract_mesh(model=1)
        f = jax.shard_map(
            lambda x, head, targets: (
                sk.layers.vocab_cross_entropy(x, head, targets, "model", sequence=sequence),
                sk.layers.vocab_embed(targets, head.T, "model", sequence=sequence),
            ),
            mesh=mesh,
            in_specs=P(),
            out_specs=P(),
        )
        assert not sk.census(f, *drawn(1, "float32", 0)).rows


def test_targets_of_part_of_the_tokens_are_refused():
    x, head, targets = drawn(1, "float32", 0)
    with value_error(
        "vocab_cross_entropy: there must be one target for each token; got targets of shape (4, 30) for tokens of "
        "shape (4, 120) after the gather. Pass the targets of all tokens, and sequence=True where x holds a part of "
        "them."
    ):
        on_four(sk.layers.vocab_cross_entropy, sequence=True)(x, head, targets[:, :30])
    with value_error(
        "vocab_cross_entropy_and_hits: there must be one target for each token; got targets of shape (4, 120) for "
        "tokens of shape (4, 30). Pass the targets of all tokens, and sequence=True where x holds a part of them."
    ):
        vocab_cross_entropy_and_hits(x[:, :30], head, targets, None)


# Columns of padding, which a split needs, were classes: each of logit 0 or, once it is trained, of any other.
def test_columns_of_padding_are_no_classes():
    options = {"z_loss": 0.1, "label_smoothing": 0.3}
    x, head, targets = jax.device_get(drawn(1, "float32", 0))
    targets = np.where(targets < 109, targets, -1)
    head = np.where(
        np.arange(120) < 109, head, np.float32(50)
    )  # the largest of all logits, in the last of four devices' columns
    split = jax.shard_map(
        partial(vocab_cross_entropy_and_hits, axis="model", sequence=True, vocabulary=109, **options),
        mesh=sk.make_mesh(data=2, model=4),
        in_specs=(P("data", "model"), P(None, "model"), P("data")),
        out_specs=P("data"),
    )
    forms = {
        "split": split,
        "one device": partial(vocab_cross_entropy_and_hits, axis=None, vocabulary=109, **options),
        "without padding": lambda x, head, targets: cross_entropy(x, head[:, :109], targets, **options),
    }

    @jax.jit
    def every(x, head):
        vjps = [jax.vjp(lambda x, head, f=f: f(x, head, targets), x, head, has_aux=True) for f in forms.values()]
        return [(nats, hits, backward(jnp.cos(nats))) for nats, backward, hits in vjps]

    *found, wanted = every(x, head)
    for each in found:
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), each, wanted)
        assert not np.any(each[2][1][:, 109:])
    beyond = sk.layers.vocab_cross_entropy(x[:1, :1], head, np.array([[110]]), None, vocabulary=109)
    assert np.isnan(beyond).all()  # a target that is padding


@pytest.mark.check
@pytest.mark.parametrize("vocabulary", [0, 121])
def test_a_vocabulary_that_the_head_does_not_hold_is_refused(vocabulary):
    shapes = [jax.ShapeDtypeStruct(*each) for each in (((2, D), "float32"), ((D, 120), "float32"), ((2,), "int32"))]
    with value_error(
        "vocab_cross_entropy: vocabulary must be at least 1 and at most the 120 columns of the head; got "
        f"{vocabulary}. Pass the number of classes."
    ):
        jax.eval_shape(lambda *args: sk.layers.vocab_cross_entropy(*args, None, vocabulary=vocabulary), *shapes)
