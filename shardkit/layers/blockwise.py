"""Attention block by block: tiles on one device, blocks of keys around a ring, one derivative for both.

Scores exist for one tile at a time: the backward pass recomputes them from queries, keys, values, the result and the
logarithm of each query's denominator. Tokens are dim -2 of every array.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardkit._jax.pallas import uses_tpu_kernels
from shardkit.collectives import axis_index, axis_size, shift
from shardkit.collectives._sums import save_as_dot, wide_zeros
from shardkit.layers.attention import (
    MASKED,
    attention_gradients,
    compute_scores,
    has_positions,
    inner_product,
    make_mask,
)
from shardkit.layers.attention_kernel import TileForm, attend_tile, tile_gradients
from shardkit.layers.zigzag import Order


class Form(NamedTuple):
    """The static options of an attention."""

    names: tuple[str, ...]  # the axes of the ring; () for none
    causal: bool  # whether a token attends only to itself and to earlier tokens
    order: Order  # of the tokens along the ring
    block: int | None  # the size of a tile, None for whole blocks
    scale: float  # factor of the scores
    window: int | None = None  # how many tokens a token attends to, if labels have positions
    kernel: bool = False  # whether a tile is computed by the kernel for TPUs, where there is one


class Softmax(NamedTuple):
    """The running softmax of queries after some of the keys, float32."""

    maximum: jax.Array  # the largest score so far, [b, G, R, t, 1]
    total: jax.Array  # the sum of exp(score - maximum), [b, G, R, t, 1]
    sum: jax.Array  # the sum of exp(score - maximum) times the values, [b, G, R, t, K]

    @classmethod
    def empty(cls, q: jax.Array) -> Softmax:
        """Before the first key."""
        column = wide_zeros(q[..., :1])
        return cls(column + MASKED, column, wide_zeros(q))

    def update(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, scale: float) -> Softmax:
        """The softmax after another block of keys.

        Before a query has seen any key, a fully masked block adds weights of exp(0) = 1, because its largest score is
        MASKED itself. The next block with an allowed key has a larger maximum, and the decay exp(MASKED - maximum) = 0
        removes them.
        """
        scores = compute_scores(q, k, mask, scale)
        maximum = jnp.maximum(self.maximum, scores.max(-1, keepdims=True))
        weights = jnp.exp(scores - maximum)
        decay = jnp.exp(self.maximum - maximum)
        block_sum = jnp.einsum("bGRts,bGsK->bGRtK", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        total = self.total * decay + weights.sum(-1, keepdims=True)
        return Softmax(maximum, total, self.sum * decay + block_sum)

    def join(self, y: jax.Array, maximum: jax.Array, total: jax.Array) -> Softmax:
        """The softmax after another block of keys, of which `y` is the result of a softmax over this block alone."""
        new_maximum = jnp.maximum(self.maximum, maximum)
        decay = jnp.exp(self.maximum - new_maximum)
        new_total = total * jnp.exp(maximum - new_maximum)
        block_sum = y.astype(jnp.float32) * new_total
        return Softmax(new_maximum, self.total * decay + new_total, self.sum * decay + block_sum)

    def result(self) -> tuple[jax.Array, jax.Array]:
        """The result [b, G, R, t, K], and the logarithm of its denominator [b, G, R, t, 1]."""
        return self.sum / self.total, self.maximum + jnp.log(self.total)


class Tile(NamedTuple):
    """A square of the matrix of scores: `size` queries by `size` keys; `ahead` is as in `make_mask`."""

    query: Any  # the index of its first query on this device
    key: Any  # the index of its first key in the block that is here
    size: int
    ahead: Any = None


class TileInputs(NamedTuple):
    """The rows and columns of arrays that a tile is computed from."""

    k: jax.Array  # [b, G, size, K]
    v: jax.Array  # [b, G, size, K]
    mask: jax.Array | None
    of_queries: Any  # the rows of the queries, and of further arrays with a row for each query
    documents: tuple[jax.Array, jax.Array] | None  # of the queries and of the keys, [b, size] each


_Keys = tuple[jax.Array, jax.Array, jax.Array | None]  # a block of keys, values and labels
_Visit = Callable[[Any, _Keys, Tile], Any]  # visit(carry, keys, tile) -> carry


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend(
    q_bGRtK: jax.Array, k_bGtK: jax.Array, v_bGtK: jax.Array, labels_btC: jax.Array | None, form: Form
) -> jax.Array:
    """The attention of this device's queries to all keys, [b, G, R, t, K]; all arrays vary over the same axes."""
    return _forward(q_bGRtK, k_bGtK, v_bGtK, labels_btC, form)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, labels: jax.Array | None, form: Form
) -> tuple[jax.Array, tuple[Any, ...]]:
    kernel = form.kernel and uses_tpu_kernels()

    def visit(softmax: Softmax, keys: _Keys, tile: Tile) -> Softmax:
        inputs = _take_tile(keys, tile, labels, (q, softmax), form.window)
        queries, rows = inputs.of_queries

        def update() -> Softmax:
            if kernel:
                block = attend_tile(queries, inputs.k, inputs.v, inputs.documents, _tile_form(tile, form))
                updated_rows = rows.join(*block)
            else:
                updated_rows = rows.update(queries, inputs.k, inputs.v, inputs.mask, form.scale)
            return _put(softmax, updated_rows, tile.query)

        return _skip_if_masked(labels, inputs.mask, update, softmax)

    softmax = _visit_all_keys(visit, Softmax.empty(q), (k, v, labels), form)
    y, log_total = softmax.result()
    y = save_as_dot(y.astype(q.dtype))
    log_total = save_as_dot(log_total)
    return y, (q, k, v, labels, y, log_total)


def _backward(form: Form, residuals: tuple[Any, ...], dy: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, labels, y, log_total = residuals
    kernel = form.kernel and uses_tpu_kernels()
    y_dy = inner_product(y, dy)

    def visit(grads: Any, keys: _Keys, tile: Tile) -> Any:
        inputs = _take_tile(keys, tile, labels, (q, log_total, dy, y_dy), form.window)
        queries, log_total_rows, dy_rows, y_dy_rows = inputs.of_queries

        def add_gradients() -> Any:
            arrays = (queries, inputs.k, inputs.v)
            if kernel:
                tile_form = _tile_form(tile, form)
                dq, dk, dv = tile_gradients(*arrays, log_total_rows, dy_rows, y_dy_rows, inputs.documents, tile_form)
            else:
                scores = compute_scores(queries, inputs.k, inputs.mask, form.scale)
                weights = jnp.exp(scores - log_total_rows)
                dq, dk, dv = attention_gradients(
                    *arrays, weights, dy_rows, y_dy_rows, scale=form.scale, partial_sums=True
                )
            of_queries, of_keys = grads
            of_queries = _add(of_queries, dq, tile.query)
            of_keys = _add(of_keys, (dk, dv), tile.key)
            return of_queries, of_keys

        return _skip_if_masked(labels, inputs.mask, add_gradients, grads)

    # The gradient of a block of keys is a sum over the queries of all devices. So the gradient goes round the ring with
    # its block, and each device adds the part of its own queries. If each device kept the part of its queries instead,
    # the parts of one block would be on n devices, and a reduce_scatter of n blocks of float32 would have to follow.
    def pass_on(grads: Any) -> Any:
        of_queries, of_keys = grads
        if form.names:
            of_keys = shift(of_keys, form.names)
        return of_queries, of_keys

    zeros = (wide_zeros(q), (wide_zeros(k), wide_zeros(v)))
    grads = _visit_all_keys(visit, zeros, (k, v, labels), form, pass_on)
    # After the last visit the gradients are one hop from home: device i has those of the keys of device i + 1. Without
    # this hop each device would return its neighbour's gradients, of the right shape.
    dq, (dk, dv) = pass_on(grads)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


attend.defvjp(_forward, _backward)


def _skip_if_masked(labels: jax.Array | None, mask: Any, compute: Callable[[], Any], unchanged: Any) -> Any:
    """Skips a tile in which no query sees a key, if labels have positions: then only the data tells which tiles."""
    if not has_positions(labels):
        return compute()
    return lax.cond(jnp.any(mask), compute, lambda: unchanged)


def _keep(carry: Any) -> Any:
    return carry


def _visit_all_keys(
    visit: _Visit,
    carry: Any,
    keys: _Keys,
    form: Form,
    pass_on: Callable[[Any], Any] = _keep,
) -> Any:
    """Visits the keys of this device, then the keys of every other device, while the next keys arrive.

    `pass_on` is applied to the carry before the keys of another device are visited.
    """
    visit = partial(_visit_in_tiles, visit, form.block)
    n = axis_size(form.names) if form.names else 1
    # The first send stands before the loop, and each turn sends the keys of the next turn before it visits its own:
    # they travel while it computes. Sent in the turn that visits them, the matmuls would wait for every hop. Keys go
    # round and queries stay, because the running softmax belongs to a query: if queries travelled, its three float32
    # arrays would travel with them. Where key/value heads are shared, keys are also the smaller arrays.
    arriving = keys if n == 1 else shift(keys, form.names)
    for tile in _own_tiles(keys, form):
        carry = visit(carry, keys, tile)
    if n == 1:
        return carry
    device = axis_index(form.names)

    def visit_arrived(step: Any, keys: _Keys, carry: Any) -> Any:
        carry = pass_on(carry)
        return _visit_block_of_another_device(visit, form, keys, carry, step, device)

    def turn(step: Any, state: Any) -> Any:
        keys, carry = state
        arriving = shift(keys, form.names)
        return arriving, visit_arrived(step, keys, carry)

    # n - 1 hops bring the keys of all other devices; the last turn stands outside the loop, for it sends no keys on.
    keys, carry = lax.fori_loop(1, n - 1, turn, (arriving, carry))
    return visit_arrived(n - 1, keys, carry)


def _own_tiles(keys: _Keys, form: Form) -> list[Tile]:
    """The tiles of this device's queries and its own keys."""
    t = keys[0].shape[-2]
    if not form.causal:
        return [Tile(0, 0, t)]
    if form.order == "contiguous":
        return [Tile(0, 0, t, ahead=0)]
    half = t // 2
    early = Tile(0, 0, half, ahead=0)
    late = Tile(half, half, half, ahead=0)
    late_to_early = Tile(half, 0, half)  # no mask: every late query is behind every early key
    return [early, late, late_to_early]


def _visit_block_of_another_device(
    visit: _Visit, form: Form, keys: _Keys, carry: Any, step: Any, device: jax.Array
) -> Any:
    """Visits the keys that arrived after `step` hops: those of device number `device - step`, modulo n."""
    # One hop of zigzag order, with 4 devices and 16 tokens. Device i holds chunks i and 7 - i of two tokens each:
    #
    #     device 0: 0 1 | 14 15     device 1: 2 3 | 12 13     device 2: 4 5 | 10 11     device 3: 6 7 | 8 9
    #
    # On device 1, step 1 brings the keys of device 0, which is before it. Of the four pairs of halves two are needed,
    # both without a mask, and two are masked as a whole:
    #
    #     late queries 12 13 with early keys 0 1: all seen          early queries 2 3 with early keys 0 1: all seen
    #     late queries 12 13 with late keys 14 15: none             early queries 2 3 with late keys 14 15: none
    #
    # Step 2 brings the keys of device 3, which is after it, 6 7 | 8 9. Late queries 12 13 see the early keys 6 7, and
    # also the late keys 8 9; early queries 2 3 see nothing. On every device and in every step it is two pairs of
    # halves, of which only one starts at an index that depends on the device: equal work, without a branch.
    t = keys[0].shape[-2]
    half = t // 2
    is_before = step <= device
    if not form.causal:
        return visit(carry, keys, Tile(0, 0, t))
    if form.order == "contiguous":
        return lax.cond(is_before, lambda: visit(carry, keys, Tile(0, 0, t)), lambda: carry)
    carry = visit(carry, keys, Tile(half, 0, half))
    start = jnp.where(is_before, 0, half)
    return visit(carry, keys, Tile(start, start, half))


def _visit_in_tiles(visit: _Visit, block: int | None, carry: Any, keys: _Keys, tile: Tile) -> Any:
    """Visits a tile whole, or in blocks one after another; blocks above the diagonal are skipped.

    For example, the blocks of a causal tile of three by three, as (row, column):
    (0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2).
    """
    if block is None or block >= tile.size:
        return visit(carry, keys, tile)
    causal = tile.ahead is not None
    rows = tile.size // block
    blocks = rows * (rows + 1) // 2 if causal else rows * rows

    def visit_block(_: Any, state: Any) -> Any:
        row, column, carry = state
        ahead = tile.ahead + (row - column) * block if causal else None
        carry = visit(carry, keys, Tile(tile.query + row * block, tile.key + column * block, block, ahead))
        last_column = row if causal else rows - 1
        row_ends = column == last_column
        next_row = jnp.where(row_ends, row + 1, row)
        next_column = jnp.where(row_ends, 0, column + 1)
        return next_row, next_column, carry

    zero = jnp.int32(0)
    _, _, carry = lax.fori_loop(0, blocks, visit_block, (zero, zero, carry))
    return carry


def _take_tile(keys: _Keys, tile: Tile, labels: jax.Array | None, of_queries: Any, window: int | None) -> TileInputs:
    """The keys and values of a tile, its mask, and its rows of `of_queries`, a tuple that begins with the queries."""
    k, v, k_labels = _cut(keys, tile.key, tile.size)
    of_queries, q_labels = _cut((of_queries, labels), tile.query, tile.size)
    mask = make_mask(of_queries[0], k, tile.ahead, q_labels, k_labels, window)
    documents = None
    if q_labels is not None:
        documents = (q_labels[..., 0], k_labels[..., 0])
    return TileInputs(k, v, mask, of_queries, documents)


def _tile_form(tile: Tile, form: Form) -> TileForm:
    """The options of a tile for the kernel; without blocks a causal one begins with the same query and key."""
    assert tile.ahead in (None, 0), tile.ahead
    return TileForm(causal=tile.ahead == 0, scale=form.scale)


def _cut(tree: Any, start: Any, size: int) -> Any:
    """`size` tokens of every array, from `start` on."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size, -2), tree)


def _put(tree: Any, rows: Any, start: Any) -> Any:
    """The arrays with `rows` in place of the tokens from `start` on."""
    return jax.tree.map(lambda x, new: lax.dynamic_update_slice_in_dim(x, new, start, -2), tree, rows)


def _add(tree: Any, terms: Any, start: Any) -> Any:
    """The arrays with `terms` added to the tokens from `start` on."""
    size = jax.tree.leaves(terms)[0].shape[-2]
    sums = jax.tree.map(jnp.add, _cut(tree, start, size), terms)
    return _put(tree, sums, start)
