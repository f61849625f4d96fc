"""Attention over sequences whose tokens are sharded: by a ring of keys and values, or by heads.

| | every device computes | sent forward | sent backward |
|---|---|---|---|
| `ring_attention`, contiguous, causal | 4 to 4n half-chunk pairs | (n-1) kv | (n-1) kv + n dkv |
| `ring_attention`, zigzag, causal | 2n+1 half-chunk pairs | (n-1) kv | (n-1) kv + n dkv |
| `ulysses_attention` | H/n heads, all tokens | (n-1)/n (2 q + kv) | the same |

q, kv: bytes of this device's queries, and of its keys and values; dkv: kv in float32. A half-chunk pair is half of a
device's queries with half of a device's keys.

In zigzag order the sequence is split into 2n chunks, of which device i holds chunks i and 2n-1-i: an early one, whose
queries see few keys, and a late one, whose queries see many. `zigzag` reorders a batch, `positions` returns the
positions of its tokens; a loss summed over tokens is the same in both orders.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from shardkit._arguments.checks import Axis, finite, name_axes
from shardkit._arguments.typed import typed
from shardkit._jax.compat import bound
from shardkit.collectives import all_gather, all_to_all, axis_size
from shardkit.layers.attention import check_shapes, choose_scale, join_heads, split_heads
from shardkit.layers.attention_kernel import check_kernel
from shardkit.layers.blockwise import Form, attend
from shardkit.layers.matmul import vary_alike
from shardkit.layers.scores import has_positions, make_labels
from shardkit.layers.zigzag import Order, halve, join_token_axes
from shardkit.on_device.batch import in_plan_order


@typed
def ring_attention(
    q_btHK: jax.Array,
    k_btGK: jax.Array,
    v_btGK: jax.Array,
    axis: Axis,
    *,
    causal: bool = True,
    order: Order = "contiguous",
    segments_bt: jax.Array | None = None,
    positions_bt: jax.Array | None = None,
    window: int | None = None,
    block: int | None = None,
    scale: float | None = None,
    kernel: bool = False,
) -> jax.Array:
    """Attention over a sequence with its tokens split over `axis`: keys and values pass around a ring.

    Each device processes one block of keys after another with an online softmax, while the next block arrives. The
    backward pass is a ring too: it recomputes the scores from q, k, v, the result and one number per query.

    Under `causal`, device i does not need the blocks of later devices. In contiguous order it skips them. The last
    device skips none and is the slowest: 4n half-chunk pairs. In zigzag order every device has the same work, 3 pairs
    with its block and 2 with every other block, 2n+1 in all, without a branch.

    Layout: `Q[b, T_a, H, K], K[b, T_a, G, K], V[b, T_a, G, K] -> Y[b, T_a, H, K]`

    Args:
        q_btHK: this device's queries.
        k_btGK: its keys. H/G query heads share each of the G key/value heads; each is sent once.
        v_btGK: its values.
        axis: axis name or tuple of names; the ring runs along the joint index.
        causal: a token attends to itself and to earlier tokens only.
        order: the tokens of device i: "contiguous": the i-th of n chunks; "zigzag": chunks i and 2n-1-i of 2n.
        segments_bt: int32 numbers of the documents packed into each sequence; a token attends to its document only.
        positions_bt, window: as for `dot_attention`. With positions the tokens may be in any order, such as the order
            of `deal`, and tiles without a visible pair are skipped.
        block: size of the tiles of queries and keys, which are processed in sequence; None: whole chunks.
        scale: factor of the scores; None: 1/sqrt(K).
        kernel: as for `dot_attention`; the result of each block of keys is rounded to the dtype of the queries. That
            for GPUs has the same documents for queries and keys: in a ring of several devices segments are refused.

    Returns:
        Array of the shape and dtype of the queries.

    Raises:
        ValueError: an unbound axis, axes in another order than the plan's, an unknown order, an odd number of tokens
            per device in zigzag order, a block that does not divide a chunk, inconsistent shapes, positions in zigzag
            order, or what the kernel does not compute.

    Cost: forward n-1 times this device's keys, values, segments and positions, in n-1 hops; backward the same, and n
        times the gradients of its keys and values in float32. An axis of one device sends nothing.

    Example:
        >>> x, tokens = jax.random.normal(jax.random.key(0), (1, 16, 4, 8)), P(None, "model")
        >>> kernel = lambda q, k, v: sk.layers.ring_attention(q, k, v, "model")
        >>> y = jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=tokens, out_specs=tokens))(x, x, x)
        >>> bool(jnp.allclose(y, sk.layers.dot_attention(x, x, x), atol=1e-5))
        True

    Source: Liu et al., Ring Attention (arXiv:2310.01889); Dao, FlashAttention-2 (arXiv:2307.08691).
    """
    finite("ring_attention", scale=scale)
    names = in_plan_order("ring_attention", bound("ring_attention", axis))
    check_shapes("ring_attention", q_btHK, k_btGK, v_btGK, segments_bt)
    labels = make_labels("ring_attention", q_btHK, segments_bt, positions_bt, window, causal)
    form = Form(names, causal, order, block, choose_scale(q_btHK, scale), window, kernel)
    return _attend_in_ring("ring_attention", q_btHK, k_btGK, v_btGK, labels, form)


@typed
def ulysses_attention(
    q_btHK: jax.Array,
    k_btGK: jax.Array,
    v_btGK: jax.Array,
    axis: Axis,
    *,
    ring: Axis | None = None,
    causal: bool = True,
    order: Order = "contiguous",
    segments_bt: jax.Array | None = None,
    positions_bt: jax.Array | None = None,
    window: int | None = None,
    block: int | None = None,
    scale: float | None = None,
    kernel: bool = False,
) -> jax.Array:
    """Attention over a sequence with its tokens split over `axis`: it reshards by heads, and back.

    With `ring` the tokens are split over (ring, axis): after the exchange over `axis` each device holds H/n heads of
    its ring's share of the tokens, and `ring_attention` does the rest.

    Layout: `Q[b, T_a, H, K] -> Q[b, T, H_a, K]`, attention, `Y[b, T, H_a, K] -> Y[b, T_a, H, K]`

    Args:
        q_btHK: this device's queries; n must divide H.
        k_btGK: its keys. If n does not divide G, each head is repeated until it does: lcm(G, n) heads are sent.
        v_btGK: its values, repeated as the keys.
        axis: axis name or tuple of names.
        ring: a second axis (or tuple) for the ring. It must come before `axis` in the mesh.
        order: the order of the tokens along the ring; `zigzag(batch, ring, ulysses=axis)` reorders a batch.
        causal, segments_bt, positions_bt, window, block, scale, kernel: as for `ring_attention`.

    Returns:
        Array of the shape and dtype of the queries.

    Raises:
        ValueError: an unbound axis, axes in another order than the plan's, heads not divisible by n, zigzag order
            without a ring, a ring that comes after `axis` in the mesh, a block that does not divide a chunk,
            inconsistent shapes, or what the kernel does not compute.

    Cost: (n-1)/n of this device's queries, keys, values and result, forward and again backward, each in an all_to_all;
        n-1 times the segments and positions. A ring adds the cost of `ring_attention`, for n times the tokens and 1/n
        of the heads. An axis of one device sends nothing.

    Example:
        >>> x, tokens = jax.random.normal(jax.random.key(0), (1, 16, 4, 8)), P(None, ("data", "model"))
        >>> kernel = lambda q, k, v: sk.layers.ulysses_attention(q, k, v, "model", ring="data")
        >>> y = jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=tokens, out_specs=tokens))(x, x, x)
        >>> bool(jnp.allclose(y, sk.layers.dot_attention(x, x, x), atol=1e-5))
        True

    Source: Jacobs et al., DeepSpeed Ulysses (arXiv:2309.14509); Fang and Zhao (arXiv:2405.07719) for both combined.
    """
    where = "ulysses_attention"
    finite(where, scale=scale)
    names = in_plan_order(where, bound(where, axis))
    check_shapes(where, q_btHK, k_btGK, v_btGK, segments_bt)
    n = axis_size(names)
    heads = q_btHK.shape[2]
    groups = k_btGK.shape[2]
    if heads % n:
        raise ValueError(
            f"{where}: heads must be divisible by {name_axes(names)}; got {heads} heads over {n} devices. "
            "Use fewer devices, or ring_attention."
        )
    if ring is None and order == "zigzag":
        raise ValueError(
            f"{where}: order 'zigzag' must go with a ring; got ring=None. Leave it out: every device attends "
            "over all tokens, and the work is balanced."
        )
    ring_names: tuple[str, ...] = ()
    if ring is not None:
        ring_names = join_token_axes(where, ring, axis)[: -len(names)]
    labels = make_labels(where, q_btHK, segments_bt, positions_bt, window, causal)
    form = Form(ring_names, causal, order, block, choose_scale(q_btHK, scale), window, kernel)
    if n == 1:
        return _attend_in_ring(where, q_btHK, k_btGK, v_btGK, labels, form)
    repeats = math.lcm(groups, n) // groups
    if repeats > 1:
        k_btGK = jnp.repeat(k_btGK, repeats, axis=2)
        v_btGK = jnp.repeat(v_btGK, repeats, axis=2)
    # A device has some tokens of all heads, and gets all tokens of some heads. Attention then runs on whole sequences,
    # and its result goes back. Worked example: 8 tokens and 4 heads on 2 devices. A device has q[b, 4, 4, K]; it keeps
    # two heads of its tokens, sends the other two, and then has q[b, 8, 2, K].
    #
    # The exchange stands after the projections and rotary positions, which act on single tokens. Before the projections
    # there are no heads, and each head needs the whole width D of its tokens. Queries, keys and values share one
    # exchange, because each exchange costs a latency. It is its own transpose: the backward pass sends as much.
    q_bThK, k_bTgK, v_bTgK = all_to_all((q_btHK, k_btGK, v_btGK), names, split_dim=2, concat_dim=1)
    # Labels belong to tokens and have no heads: every device needs the labels of all tokens that it now has.
    if labels is not None:
        labels = all_gather(labels, names, dim=1)
    y_bThK = _attend_in_ring(where, q_bThK, k_bTgK, v_bTgK, labels, form)
    # The way back stands before the output projection, which sums over all heads of a token. After the projection the
    # devices would have partial sums of every token, and an all_reduce of [b, T, D] would have to add them.
    return all_to_all(y_bThK, names, split_dim=1, concat_dim=2)


def _attend_in_ring(
    where: str, q_btHK: jax.Array, k_btGK: jax.Array, v_btGK: jax.Array, labels: jax.Array | None, form: Form
) -> jax.Array:
    """Attention of this device's queries over the keys of the ring `form.names`; without a ring, over its own keys."""
    if has_positions(labels):  # the data decides which tiles are seen: no order of the tokens is assumed
        if form.order != "contiguous":
            raise ValueError(
                f"{where}: positions say where each token stands, so the order must be left out; got {form.order!r} "
                "too. Pass one of them."
            )
        form = form._replace(causal=False)
    chunk = _check_block(where, form, q_btHK.shape[1])
    if form.names and axis_size(form.names) == 1:  # an array on one device does not vary
        form = form._replace(names=())
    if form.kernel:
        check_kernel(
            where,
            (q_btHK, k_btGK, v_btGK),
            chunk,
            positions=has_positions(labels),
            block=form.block,
            documents_in_ring=labels is not None and form.names != (),
        )
    q_btHK, k_btGK, v_btGK, labels = vary_alike(q_btHK, k_btGK, v_btGK, labels, over=form.names)
    q, k, v, labels = split_heads(q_btHK, k_btGK, v_btGK, labels)
    return join_heads(attend(q, k, v, labels, form))


def _check_block(where: str, form: Form, tokens: int) -> int:
    """The tokens of a chunk; refuses a block that does not divide them."""
    chunk = halve(where, tokens) if form.order == "zigzag" else tokens
    if form.block is not None and (form.block < 1 or chunk % form.block):
        raise ValueError(
            f"{where}: block must divide the tokens of a chunk; got block {form.block} for chunks of {chunk} tokens. "
            "Choose a divisor, or leave it out."
        )
    return chunk
