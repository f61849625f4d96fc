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

from shardkit._jax.pallas import kernel_platform
from shardkit.collectives import axis_index, shift
from shardkit.collectives._sums import save_as_dot, wide_zeros
from shardkit.layers.attention_kernel import attend_tile, tile_gradients
from shardkit.layers.matmul import count_devices
from shardkit.layers.scores import (
    MASKED,
    attention_gradients,
    compute_scores,
    has_positions,
    inner_product,
    make_mask,
)
from shardkit.layers.tiles import Tile, TileForm, list_arrived_tiles, list_own_tiles
from shardkit.layers.zigzag import Order


class Form(NamedTuple):
    """The static options of an attention."""

    names: tuple[str, ...]  # the axes of the ring; () for none
    causal: bool  # whether a token attends only to itself and to earlier tokens
    order: Order  # of the tokens along the ring
    block: int | None  # the size of a tile, None for whole blocks
    scale: float  # factor of the scores
    window: int | None = None  # how many tokens a token attends to, if labels have positions
    kernel: bool = False  # whether a tile is computed by the kernel of the platform, where there is one


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

    def join(self, y: jax.Array, log_total: jax.Array) -> Softmax:
        """The softmax after another block of keys, whose own has the result `y` and `log_total` as `result` has."""
        maximum = jnp.maximum(self.maximum, log_total)
        decay = jnp.exp(self.maximum - maximum)
        total = jnp.exp(log_total - maximum)
        return Softmax(maximum, self.total * decay + total, self.sum * decay + y.astype(jnp.float32) * total)

    def result(self) -> tuple[jax.Array, jax.Array]:
        """The result [b, G, R, t, K], and the logarithm of its denominator [b, G, R, t, 1]."""
        return self.sum / self.total, self.maximum + jnp.log(self.total)


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
    kernel = form.kernel and kernel_platform() is not None

    def visit(softmax: Softmax, keys: _Keys, tile: Tile) -> Softmax:
        tile_k, tile_v, k_labels = _cut(keys, tile.key, tile.size)
        tile_q, tile_softmax, q_labels = _cut((q, softmax, labels), tile.query, tile.size)
        if kernel:
            documents = _take_documents(q_labels, k_labels)
            y, log_total = attend_tile(tile_q, tile_k, tile_v, documents, _tile_form(tile, form))
            return _put(softmax, tile_softmax.join(y, log_total), tile.query)
        mask = make_mask(tile_q, tile_k, tile.ahead, q_labels, k_labels, form.window)

        def update() -> Softmax:
            updated = tile_softmax.update(tile_q, tile_k, tile_v, mask, form.scale)
            return _put(softmax, updated, tile.query)

        return _skip_if_masked(labels, mask, update, softmax)

    if kernel and not form.names:
        # One tile has all keys, in zigzag order too, which on one device is that of the sequence. Nothing is joined: a
        # join would multiply y by its total, and `result` divide it.
        one_tile = TileForm(form.causal, form.scale)
        y, log_total = attend_tile(q, k, v, _take_documents(labels, labels), one_tile)
    else:
        softmax = _visit_all_keys(visit, Softmax.empty(q), (k, v, labels), form)
        y, log_total = softmax.result()
    y = save_as_dot(y.astype(q.dtype))
    log_total = save_as_dot(log_total)
    return y, (q, k, v, labels, y, log_total)


def _backward(form: Form, residuals: tuple[Any, ...], dy: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, labels, y, log_total = residuals
    kernel = form.kernel and kernel_platform() is not None
    if kernel and not form.names:
        form = form._replace(order="contiguous")  # one tile, as in the forward pass
    rows = (q, log_total, dy, inner_product(y, dy))

    def visit(grads: Any, keys: _Keys, tile: Tile) -> Any:
        tile_k, tile_v, k_labels = _cut(keys, tile.key, tile.size)
        tile_rows, q_labels = _cut((rows, labels), tile.query, tile.size)
        tile_q, tile_log_total, tile_dy, tile_y_dy = tile_rows
        arrays = (tile_q, tile_k, tile_v)
        if kernel:
            documents = _take_documents(q_labels, k_labels)
            tile_form = _tile_form(tile, form)
            tile_grads = tile_gradients(*arrays, tile_log_total, tile_dy, tile_y_dy, documents, tile_form)
            return _add_gradients(grads, tile_grads, tile)
        mask = make_mask(tile_q, tile_k, tile.ahead, q_labels, k_labels, form.window)

        def add_gradients() -> Any:
            scores = compute_scores(tile_q, tile_k, mask, form.scale)
            weights = jnp.exp(scores - tile_log_total)
            tile_grads = attention_gradients(*arrays, weights, tile_dy, tile_y_dy, scale=form.scale, partial_sums=True)
            return _add_gradients(grads, tile_grads, tile)

        return _skip_if_masked(labels, mask, add_gradients, grads)

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


def _add_gradients(grads: Any, tile_grads: tuple[jax.Array, jax.Array, jax.Array], tile: Tile) -> Any:
    """The gradients (of queries, of keys and values), with those of a tile added to its rows."""
    of_queries, of_keys = grads
    dq, dk, dv = tile_grads
    of_queries = _add(of_queries, dq, tile.query)
    of_keys = _add(of_keys, (dk, dv), tile.key)
    return of_queries, of_keys


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
    n = count_devices(form.names)
    # The first send stands before the loop, and each turn sends the keys of the next turn before it visits its own:
    # they travel while it computes. Sent in the turn that visits them, the matmuls would wait for every hop. Keys go
    # round and queries stay, because the running softmax belongs to a query: if queries travelled, its three float32
    # arrays would travel with them. Where key/value heads are shared, keys are also the smaller arrays.
    arriving = keys if n == 1 else shift(keys, form.names)
    for tile in list_own_tiles(keys[0].shape[-2], form.causal, form.order):
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


def _visit_block_of_another_device(
    visit: _Visit, form: Form, keys: _Keys, carry: Any, step: Any, device: jax.Array
) -> Any:
    """Visits the keys that arrived after `step` hops: those of device number `device - step`, modulo n."""
    t = keys[0].shape[-2]
    is_before = step <= device
    if not form.causal:
        return visit(carry, keys, Tile(0, 0, t))
    if form.order == "contiguous":
        return lax.cond(is_before, lambda: visit(carry, keys, Tile(0, 0, t)), lambda: carry)
    start = jnp.where(is_before, 0, t // 2)
    for tile in list_arrived_tiles(t, start):
        carry = visit(carry, keys, tile)
    return carry


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


def _take_documents(q_labels: jax.Array | None, k_labels: jax.Array | None) -> tuple[jax.Array, jax.Array] | None:
    """The documents of a tile's queries and of its keys, [b, size] each."""
    if q_labels is None or k_labels is None:
        return None
    return q_labels[..., 0], k_labels[..., 0]


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
