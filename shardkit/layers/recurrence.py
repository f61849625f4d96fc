"""Linear recurrences over a sequence whose tokens are split: linear attention, Mamba-2, RWKV, DeltaNet.

A device does not wait for the state of the device before it. It first computes how its tokens change any state, which
is a matrix and a sum, `S -> E S + F`; these changes are combined along the axis by `prefix_scan`, and only then each
device runs its tokens from the state that they begin with.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardkit._arguments.checks import Axis, integers_from_one, shapes
from shardkit._arguments.typed import typed
from shardkit._jax.compat import bound
from shardkit.collectives.axes import axis_size, vary_like
from shardkit.collectives.permute import shift_array
from shardkit.collectives.shapes import prefix_scan
from shardkit.on_device.batch import in_plan_order


class _Tokens(NamedTuple):
    """Arrays of the tokens in chunks of C, float32: [b, H, chunks, C, ..].

    Worked example: 6 tokens in chunks of 4 are 2 chunks; the last two tokens of the second one are zeros, which change
    no state.
    """

    q: jax.Array  # [.., C, K]
    k: jax.Array  # [.., C, K]
    v: jax.Array  # [.., C, V]
    log_decay: jax.Array  # [.., C, K], or [.., C, 1] for one number a head
    erase: tuple[jax.Array, jax.Array] | None  # [.., C, K] each
    document: jax.Array  # int [.., C]: how many documents begin in the chunk up to a token; 0: that of the chunk before


class _Change(NamedTuple):
    """What tokens do to a state [K, V] before them: `keep * S + add`, or `keep @ S + add`."""

    keep: jax.Array  # [.., 1, 1] or [.., K, 1], as log_decay has; with `erase` a matrix [.., K, K]
    add: jax.Array  # [.., K, V]


@typed
def linear_recurrence(
    q_btHK: jax.Array,
    k_btHK: jax.Array,
    v_btHV: jax.Array,
    axis: Axis | None,
    *,
    log_decay: jax.Array | None = None,
    erase: tuple[jax.Array, jax.Array] | None = None,
    bonus_HK: jax.Array | None = None,
    segments_bt: jax.Array | None = None,
    chunk: int = 64,
) -> jax.Array:
    """Runs a linear recurrence over the tokens of a sequence that is split over `axis`, in contiguous order.

    Each head has a state S [K, V], zero before the first token. A token decays it, erases from it, adds to it, and
    reads it:

        S = exp(log_decay)[:, None] * S - outer(a, b @ S) + outer(k, v)      with (a, b) = erase
        y = q @ S

    Layout: `Q[b, t_a, H, K], K[b, t_a, H, K], V[b, t_a, H, V] -> Y[b, t_a, H, V]`

    Models by their arguments, `beta` being [b, t, H, 1]:

    - linear attention: q, k, v alone;
    - Mamba-2, with its C, B, x, dt and A: `C, B, dt * x` in place of q, k, v, with B and C repeated for each head of a
      group, and log_decay dt * A, [b, t, H]; retention: log_decay [b, t, H];
    - gated linear attention: log_decay [b, t, H, K];
    - RWKV-6: log_decay [b, t, H, K] and bonus_HK; RWKV-7, with its kappa and a: log_decay [b, t, H, K] and
      erase=(kappa * a, kappa);
    - DeltaNet: `k * beta` in place of k, and erase=(k * beta, k); gated: log_decay [b, t, H], and
      erase=(jnp.exp(log_decay)[..., None] * k * beta, k).

    Args:
        q_btHK: what each token reads.
        k_btHK: where each token writes.
        v_btHV: what it writes.
        axis: axis name or tuple of names over which the tokens are split; None: all tokens are here.
        log_decay: logarithm of what remains of the state, at most 0: one number a head, [b, t, H], or one for each row
            of the state, [b, t, H, K]. None: all remains.
        erase: a pair (a, b) of arrays [b, t, H, K]; None: nothing is erased.
        bonus_HK: a token reads the state before it writes, and its own value `(q * bonus * k).sum() * v` beside it.
        segments_bt: int32 numbers of the documents packed into each sequence, whose tokens are next to each other. The
            state is zero at the begin of each.
        chunk: tokens that are computed at once, rounded up to a power of two. With a log_decay for each row, time and
            memory grow with it, and 16 is a good choice.

    Returns:
        Array of the shape of v_btHV and of its dtype. States are float32; what is not multiplied into a state is
            multiplied in jax's default precision.

    Raises:
        TypeError: an `erase` that is no pair.
        ValueError: an unbound axis, axes in another order than the plan's, or inconsistent shapes.

    Cost: forward s b H K (K + V) floats with erase, else s b H (K V + K) or s b H (K V + 1), in
        s = 1 + ceil(log2(n-1)) steps, for any number of tokens; the backward pass as much. With segments another b
        integers in one step. An axis of one device sends nothing.

    Example:
        >>> x, tokens = jax.random.normal(jax.random.key(0), (1, 16, 4, 8)), P(None, "model")
        >>> kernel = lambda q, k, v: sk.layers.linear_recurrence(q, k, v, "model", chunk=2)
        >>> y = jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=tokens, out_specs=tokens))(x, x, x)
        >>> bool(jnp.allclose(y, sk.layers.linear_recurrence(x, x, x, None), atol=1e-4))
        True

    Source: Yang et al., Gated Delta Networks (arXiv:2412.06464), for the form by chunks; Dao and Gu, Mamba-2
        (arXiv:2405.21060); Peng et al., RWKV-6 (arXiv:2404.05892); Blelloch, Prefix Sums and Their Applications (1990),
        for the scan of recurrences.
    """
    where = "linear_recurrence"
    integers_from_one(where, chunk=chunk)
    _check_shapes(q_btHK, k_btHK, v_btHV, log_decay, erase, bonus_HK, segments_bt)
    names: tuple[str, ...] = ()
    if axis is not None:
        names = in_plan_order(where, bound(where, axis))
    count = axis_size(names) if names else 1
    begins_bt = _find_begins(segments_bt, q_btHK, names, count)
    tokens = _cut_into_chunks(q_btHK, k_btHK, v_btHV, log_decay, erase, begins_bt, chunk)
    reads, values, changes = _summarize_chunks(tokens, bonus_HK)
    state = _zero_state(changes)
    if count > 1:
        state = _find_first_state(changes, names)
    # The state before each chunk, one after the other: everything that could be computed without it is computed.
    states = _run_chunks(changes, state)
    y = values + reads @ states
    return _join_chunks(y, v_btHV)


def _check_shapes(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array | None,
    erase: tuple[jax.Array, jax.Array] | None,
    bonus: jax.Array | None,
    segments: jax.Array | None,
) -> None:
    arrays = {"q": (q, "btHK"), "k": (k, "btHK"), "v": (v, "btHV")}
    if log_decay is not None:
        arrays["log_decay"] = (log_decay, "btHK"[: max(3, log_decay.ndim)])
    if erase is not None:
        if not isinstance(erase, tuple | list) or len(erase) != 2 or any(x is None for x in erase):
            raise TypeError(
                f"linear_recurrence: erase must be a pair (a, b) of arrays [b, t, H, K]; got {type(erase).__name__}. "
                "Pass erase=(a, b)."
            )
        a, b = erase
        arrays |= {"erase[0]": (a, "btHK"), "erase[1]": (b, "btHK")}
    if bonus is not None:
        arrays["bonus"] = (bonus, "HK")
    if segments is not None:
        arrays["segments"] = (segments, "bt")
    shapes("linear_recurrence", **arrays)
    if not q.shape[1]:
        raise ValueError("linear_recurrence: there must be at least one token; got none. Pass q with t of 1 or more.")


def _find_begins(segments_bt: jax.Array | None, q: jax.Array, names: tuple[str, ...], count: int) -> jax.Array:
    """Where a token is the first one of its document: bool [b, t]."""
    if segments_bt is None:
        return jnp.zeros(q.shape[:2], bool)
    before = segments_bt[:, -1:]  # of the first token of all: any number does, since there is no state before it
    if count > 1:
        # The last document of the device before. It is one number a sequence, and is needed before any state: a device
        # that guessed it would keep the state of another document.
        before = shift_array(before, names, wrap=False)
    return segments_bt != jnp.concatenate([before, segments_bt[:, :-1]], 1)


def _cut_into_chunks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array | None,
    erase: tuple[jax.Array, jax.Array] | None,
    begins_bt: jax.Array,
    chunk: int,
) -> _Tokens:
    if log_decay is None:
        log_decay = jnp.zeros(q.shape[:3], jnp.float32)
    if log_decay.ndim == 3:
        log_decay = log_decay[..., None]
    # The state before a document is not read; so the decay of its first token, which may be anything, is left out.
    log_decay = jnp.where(begins_bt[..., None, None], 0.0, log_decay)
    # A power of two, for the inverse of a triangle: of 5 tokens in chunks of 64, one chunk of 8.
    chunk = 1 << (min(chunk, q.shape[1]) - 1).bit_length()
    document = jnp.cumsum(_split(begins_bt[..., None, None].astype(jnp.int32), chunk), 3)[..., 0]
    chunked_erase = None
    if erase is not None:
        a, b = erase
        chunked_erase = (_split_floats(a, chunk), _split_floats(b, chunk))
    return _Tokens(
        _split_floats(q, chunk),
        _split_floats(k, chunk),
        _split_floats(v, chunk),
        _split_floats(log_decay, chunk),
        chunked_erase,
        document,
    )


def _split_floats(x: jax.Array, chunk: int) -> jax.Array:
    return _split(x.astype(jnp.float32), chunk)


def _split(x: jax.Array, chunk: int) -> jax.Array:
    """[b, t, H, ..] as [b, H, chunks, C, ..], padded with zeros."""
    b, t, heads, *rest = x.shape
    chunks = math.ceil(t / chunk)
    widths = [(0, 0)] * x.ndim
    widths[1] = (0, chunks * chunk - t)
    x = jnp.pad(x, widths).reshape(b, chunks, chunk, heads, *rest)
    return jnp.moveaxis(x, 3, 1)


def _join_chunks(y: jax.Array, like: jax.Array) -> jax.Array:
    """[b, H, chunks, C, V] as [b, t, H, V]."""
    b, heads, chunks, chunk, width = y.shape
    y = jnp.moveaxis(y, 1, 3).reshape(b, chunks * chunk, heads, width)
    return y[:, : like.shape[1]].astype(like.dtype)


# One chunk of tokens 1 to C, with the state S_0 before it. Unrolled, token i leaves
#
#   S_i = D(i, 0) S_0 + sum over j <= i of D(i, j) (k_j v_j - a_j u_j),     u_j = b_j S_{j-1},
#
# where D(i, j) is the decay of the tokens after j up to i (`_Decays`). The u_j are the solution of a triangular system
# of equations, which puts the same into u_j:
#
#   u_i + sum over j < i of (b_i D(i-1, j) a_j) u_j = b_i D(i-1, 0) S_0 + sum over j < i of (b_i D(i-1, j) k_j) v_j
#
# Both sides are linear in S_0. So everything of the chunk is computed as a matrix for S_0 beside what is added to it:
# u = u_matrix S_0 + u_sum, then y = reads S_0 + values, and the state after it, `keep` and `add`.
#
# Worked example: a decay of 1/2 in each token, without erasing, and the chunk of two tokens k_1 v_1 = 4, k_2 v_2 = 6:
# S_2 = 1/4 S_0 + 1/2 * 4 + 6, that is keep = 1/4 and add = 8.
def _summarize_chunks(tokens: _Tokens, bonus_HK: jax.Array | None) -> tuple[jax.Array, jax.Array, _Change]:
    """What each chunk reads of the state before it, [.., C, K], and of its own tokens, [.., C, V], and its change."""
    decays = _sum_decays(tokens.log_decay)
    of_chunk_before = tokens.document == 0  # [.., C]: no document has begun
    same = tokens.document[..., :, None] == tokens.document[..., None, :]
    earlier = jnp.tril(same, -1)
    up_to = jnp.tril(same)
    in_last = tokens.document == tokens.document[..., -1:]  # whose values remain at the end

    # Whether y reads the state after its token, or before it.
    since_start, between, read_mask = decays.to_token, decays.between, up_to
    if bonus_HK is not None:
        since_start, between, read_mask = decays.before_token, decays.between_before, earlier
    reads = _decay_rows(tokens.q, since_start, of_chunk_before)
    values = _contract(tokens.q, tokens.k, between, read_mask) @ tokens.v
    if bonus_HK is not None:
        bonus = bonus_HK.astype(jnp.float32)[None, :, None, None, :]
        own = (tokens.q * bonus * tokens.k).sum(-1, keepdims=True)
        values = values + own * tokens.v
    last = decays.to_token[..., -1:, :]
    keep = _transpose(_decay_rows(jnp.ones_like(last), last, of_chunk_before[..., -1:]))
    add = _transpose(_decay_rows(tokens.k, decays.to_end, in_last)) @ tokens.v
    if tokens.erase is None:
        return reads, values, _Change(keep, add)

    a, b = tokens.erase
    width = tokens.k.shape[-1]
    system = _contract(b, a, decays.between_before, earlier)  # without the ones of its diagonal
    right_side = jnp.concatenate(
        [
            _decay_rows(b, decays.before_token, of_chunk_before),
            _contract(b, tokens.k, decays.between_before, earlier) @ tokens.v,
        ],
        -1,
    )
    u = _invert_unit_triangle(system) @ right_side
    u_matrix, u_sum = u[..., :width], u[..., width:]
    read_erased = _contract(tokens.q, a, between, read_mask)
    end_erased = _transpose(_decay_rows(a, decays.to_end, in_last))
    diagonal = keep * jnp.eye(width, dtype=jnp.float32)[None, None, None]
    change = _Change(diagonal - end_erased @ u_matrix, add - end_erased @ u_sum)
    return reads - read_erased @ u_matrix, values - read_erased @ u_sum, change


def _invert_unit_triangle(lower: jax.Array) -> jax.Array:
    """The inverse of a matrix [.., C, C] with ones on its diagonal, `lower` below it and zeros above; C a power of 2.

    By matmuls alone, which TPUs and GPUs do faster than one row after the other, and as stable as these. Blocks on the
    diagonal grow from 1 to C. Two inverses next to each other are the diagonal of the next one:

        inverse of [[A, 0], [B, D]]  is  [[A', 0], [-D' B A', D']],  with the inverses A' and D'

    Worked example: of 1 0 / 3 1 the blocks are A = D = 1, B = 3, and the inverse is 1 0 / -3 1.
    """
    size = lower.shape[-1]
    inverses = jnp.ones((*lower.shape[:-2], size, 1, 1), lower.dtype)  # [.., blocks, s, s]
    block = 1
    while block < size:
        pairs = size // (2 * block)
        # [.., pairs, 2, s, pairs, 2, s]; of each pair on the diagonal its lower left block
        parts = lower.reshape(*lower.shape[:-2], pairs, 2, block, pairs, 2, block)
        below = jnp.moveaxis(jnp.diagonal(parts[..., 1, :, :, 0, :], axis1=-4, axis2=-2), -1, -3)
        upper, last = inverses[..., 0::2, :, :], inverses[..., 1::2, :, :]
        top = jnp.concatenate([upper, jnp.zeros_like(upper)], -1)
        corner = _multiply_exactly(_multiply_exactly(last, below), upper)
        bottom = jnp.concatenate([-corner, last], -1)
        inverses = jnp.concatenate([top, bottom], -2)
        block *= 2
    return inverses[..., 0, :, :]


def _transpose(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)


def _decay_rows(x: jax.Array, log_decay: jax.Array, mask: jax.Array) -> jax.Array:
    """The rows [.., C, K] where the mask [.., C] is True, times their decay; zeros elsewhere."""
    return jnp.where(mask[..., None], x * jnp.exp(log_decay), 0.0)


class _Decays(NamedTuple):
    """Sums of log_decay within a chunk, over the tokens from one to another: [.., C, D], and [.., C, C, D] for pairs.

    Each is a sum of its own tokens alone, and no difference of running sums: after a log_decay of -1e30, which is how a
    model forgets everything, a difference would have lost the tokens beside it, and of -inf it would be NaN.

    Worked example: for log_decay 1, 2, 4 `to_token` is 1, 3, 7, `before_token` 0, 1, 3, and `to_end` 6, 4, 0. In
    `between` the pair of tokens 2 and 0 has 2 + 4; in `between_before`, to the token before it, 2.
    """

    to_token: jax.Array  # from the begin of the chunk
    before_token: jax.Array  # without the token itself
    to_end: jax.Array  # after the token
    between: jax.Array  # of tokens i and j: after j, up to i; 0 where j is not before i
    between_before: jax.Array  # after j, up to i - 1


def _sum_decays(log_decay: jax.Array) -> _Decays:
    to_token = jnp.cumsum(log_decay, -2)
    first = jnp.zeros_like(log_decay[..., :1, :])
    before_token = jnp.concatenate([first, to_token[..., :-1, :]], -2)
    from_token = lax.cumsum(log_decay, log_decay.ndim - 2, reverse=True)
    to_end = jnp.concatenate([from_token[..., 1:, :], first], -2)
    size = log_decay.shape[-2]
    is_after = jnp.tril(jnp.ones((size, size), bool), -1)
    is_after = is_after.reshape((1,) * (log_decay.ndim - 2) + (size, size, 1))
    terms = jnp.where(is_after, log_decay[..., :, None, :], 0.0)
    between = jnp.cumsum(terms, -3)
    between_before = jnp.concatenate([jnp.zeros_like(between[..., :1, :, :]), between[..., :-1, :, :]], -3)
    return _Decays(to_token, before_token, to_end, between, between_before)


def _contract(x: jax.Array, y: jax.Array, between: jax.Array, mask: jax.Array) -> jax.Array:
    """The products of rows i of x and j of y where the mask [.., C, C] is True, with the decay between them."""
    decay = jnp.exp(between)
    if decay.shape[-1] == 1:  # one number a head: a plain matmul
        products = (x @ _transpose(y)) * decay[..., 0]
    else:
        products = jnp.einsum("...ik,...jk,...ijk->...ij", x, y, decay)
    return jnp.where(mask, products, 0.0)


def _apply(change: _Change, state: jax.Array) -> jax.Array:
    """The state [.., K, V] after a change."""
    return _multiply_keep(change.keep, state) + change.add


def _multiply_keep(keep: jax.Array, x: jax.Array) -> jax.Array:
    if keep.shape[-1] == 1:
        return keep * x
    return _multiply_exactly(keep, x)


def _multiply_exactly(x: jax.Array, y: jax.Array) -> jax.Array:
    """A matmul in float32: by default TPUs and some GPUs round its operands, and a state passes through many."""
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)


def _follow(earlier: _Change, later: _Change) -> _Change:
    """Both changes as one: `later(earlier(S)) = later.keep (earlier.keep S + earlier.add) + later.add`."""
    return _Change(_multiply_keep(later.keep, earlier.keep), _apply(later, earlier.add))


def _zero_state(changes: _Change) -> jax.Array:
    """The state before the first token, [b, H, K, V]."""
    add = changes.add[:, :, 0]
    return vary_like(jnp.zeros_like(add), add)


def _find_first_state(changes: _Change, names: tuple[str, ...]) -> jax.Array:
    """The state that the devices before this one leave, [b, H, K, V]."""
    by_chunk = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 2, 0), changes)
    first_change = jax.tree.map(lambda leaf: leaf[0], by_chunk)
    other_changes = jax.tree.map(lambda leaf: leaf[1:], by_chunk)
    own_change, _ = lax.scan(lambda total, change: (_follow(total, change), None), first_change, other_changes)
    # No collective stands inside the loop over chunks: whatever the number of tokens, a device sends one change. It is
    # sent before the loop over states and not as a state after it, or each device would wait for all before it.
    rows, columns = own_change.keep.shape[-2:]
    keep_all = jnp.ones((rows, 1), jnp.float32)
    if columns > 1:
        keep_all = jnp.eye(rows, dtype=jnp.float32)
    earlier = prefix_scan(own_change, names, _follow, _Change(keep_all, jnp.float32(0)), exclusive=True)
    return earlier.add


def _run_chunks(changes: _Change, state: jax.Array) -> jax.Array:
    """The states before each chunk, [b, H, chunks, K, V]."""

    def run(state: jax.Array, change: _Change) -> tuple[jax.Array, jax.Array]:
        return _apply(change, state), state

    by_chunk: Any = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 2, 0), changes)
    _, states = lax.scan(run, state, by_chunk)
    return jnp.moveaxis(states, 0, 2)
