"""Documents in any order: their masks as data, and blocks dealt so that every device has as much to attend over."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.layers.documents import count_pairs
from support.refusals import refused

RNG, T = np.random.default_rng(0), 32_768
LENGTHS = {
    "one": [T],
    "equal": [1024] * 32,
    "tiny": [7] * 5000,
    "long, then short": [T // 2] + [128] * (T // 256),
    "short, then long": [128] * (T // 256) + [T // 2],
    "halves": [T // 2, T // 4, T // 8, T // 16, T // 16],
    "lognormal": np.maximum(1, RNG.lognormal(6, 1.5, 4000)).astype(int),
    "pareto": np.maximum(1, (RNG.pareto(1.1, 4000) + 1) * 64).astype(int),
    "uniform": RNG.integers(1, 8192, 100),
    "two kinds": RNG.permutation([64] * 400 + [8192] * 3),
}


def packed(lengths, tokens=T):
    found = np.repeat(np.arange(len(lengths)), lengths)[:tokens]
    return np.concatenate([found, np.full(tokens - len(found), len(lengths))]).astype(np.int32)


# proves N47
@pytest.mark.check
@pytest.mark.parametrize("window", [None, 1024])
@pytest.mark.parametrize("kind", LENGTHS)
def test_pairs_are_within_three_percent_of_even(kind, window):
    segments, n = packed(LENGTHS[kind]), 8
    places = np.arange(T)
    first = np.searchsorted(segments, segments)  # of its document
    seen = np.minimum(places - first + 1, window or T)
    np.testing.assert_array_equal(count_pairs(segments, window), seen)
    [order] = sk.layers.deal(segments[None], n, window=window)
    assert sorted(order) == [*places]
    held = order.reshape(n, -1, 128)
    assert (np.diff(held, axis=-1) == 1).all() and (held[..., 0] % 128 == 0).all()
    assert seen[order].reshape(n, -1).sum(1).max() <= 1.03 * seen.sum() / n


# Catches a mask by place on the device, by documents alone, a window that counts otherwise, and a tile that is skipped
# though one of its queries sees one of its keys.
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("form", "sizes"), [("ring", (4,)), ("ulysses", (4,)), ("both", (2, 2)), ("ring", (1,))])
def test_attention_in_any_order_is_that_in_order(form, sizes, window):
    n, names = int(np.prod(sizes)), ("ring", "model")[-len(sizes) :] if form != "ring" else ("ring",)
    segments = np.stack([packed(lengths, 32) for lengths in ([3, 20, 9], [32])])
    order = sk.layers.deal(segments, n, block=4, window=window)
    q, k, v, dy = (RNG.normal(size=(2, 32, heads, 8)).astype("f") for heads in (4, 4, 4, 4))
    given = {"segments_bt": jnp.asarray(segments), "window": window}

    def in_order(q, k, v):
        return sk.layers.dot_attention(q, k, v, positions_bt=jnp.broadcast_to(jnp.arange(32), (2, 32)), **given)

    order = order.astype([np.int32, np.uint16][n % 2])  # differences of unsigned ones have no sign

    def dealt(x):
        return np.take_along_axis(x, order.reshape(*order.shape, *[1] * (x.ndim - 2)), 1)

    def kernel(q, k, v, segments, places):
        how = {"segments_bt": segments, "positions_bt": places, "window": window, "block": 4}
        if form == "ring":
            return sk.layers.ring_attention(q, k, v, "ring", **how)
        return sk.layers.ulysses_attention(q, k, v, "model", ring="ring" if form == "both" else None, **how)

    mesh, tokens = sk.make_mesh(jax.devices()[:n], **dict(zip(names, sizes, strict=True))), P(None, names)
    mapped = jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=tokens, out_specs=tokens))
    y, back = jax.vjp(lambda *qkv: mapped(*qkv, dealt(segments), order), *map(dealt, (q, k, v)))
    wanted, wanted_back = jax.vjp(jax.jit(in_order), q, k, v)
    for found, right in zip((y, *back(dealt(dy))), (wanted, *wanted_back(dy)), strict=True):
        np.testing.assert_allclose(found, dealt(np.asarray(right)), rtol=1e-4, atol=1e-5)
    if window:  # a window of all is none, and one of five is not
        whole = jax.jit(partial(sk.layers.dot_attention, segments_bt=given["segments_bt"]))(q, k, v)
        assert np.abs(wanted - whole).max() > 0.1


def test_what_is_refused():
    x, unmasked = jnp.ones((1, 8, 2, 4)), {"positions_bt": jnp.arange(8)[None], "causal": False}
    wrong = {
        "dot_attention: a window must be at least 1 and go with positions; got window=2 and no positions. Pass "
        "positions_bt, of tokens in order jnp.broadcast_to(jnp.arange(t), (b, t)).": {"window": 2},
        "dot_attention: positions must hold a place for each token of a causal attention; got int32[1,8] for 1 x 8 "
        "tokens, and causal=False. Pass them as int32 [b, t], or leave them out.": unmasked,
    }
    for sentence, options in wrong.items():
        assert refused(lambda: sk.layers.dot_attention(x, x, x, **options)) == sentence
    with pytest.raises(ValueError, match=r"^deal: segments must be .* with T divisible by devices times block, 3 x 4"):
        sk.layers.deal(np.zeros((1, 32), int), 3, block=4)
