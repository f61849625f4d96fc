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

from shardkit.collectives import axis_index, axis_size, shift
from shardkit.collectives._sums import save_as_dot, wide_zeros
from shardkit.layers.attention import MASKED, allowed, gradients, inner, placed, scores_of
from shardkit.layers.zigzag import Order


class Form(NamedTuple):
    """The static options of an attention."""

    names: tuple[str, ...]  # the axes of the ring; () for none
    causal: bool  # whether a token attends only to itself and to earlier ones
    order: Order  # of the tokens along the ring
    block: int | None  # the size of a tile, None for whole blocks
    scale: float  # factor of the scores
    window: int | None = None  # how many tokens one attends to, where labels have places


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

    def updated(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, scale: float) -> Softmax:
        """After another block of keys. What a fully masked block adds, the next block's rescaling removes."""
        scores = scores_of(q, k, mask, scale)
        maximum = jnp.maximum(self.maximum, scores.max(-1, keepdims=True))
        weights, decay = jnp.exp(scores - maximum), jnp.exp(self.maximum - maximum)
        found = jnp.einsum("bGRts,bGsK->bGRtK", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return Softmax(maximum, self.total * decay + weights.sum(-1, keepdims=True), self.sum * decay + found)

    def result(self) -> tuple[jax.Array, jax.Array]:
        """The result [b, G, R, t, K], and the logarithm of its denominator [b, G, R, t, 1]."""
        return self.sum / self.total, self.maximum + jnp.log(self.total)


class Visit(NamedTuple):
    """The scores of `size` queries from `rows` on and `size` keys from `columns` on; `ahead` as in `allowed`."""

    rows: Any
    columns: Any
    size: int
    ahead: Any = None


_Keys = tuple[jax.Array, jax.Array, jax.Array | None]  # a block of keys, values and labels


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend(
    q_bGRtK: jax.Array, k_bGtK: jax.Array, v_bGtK: jax.Array, labels_btC: jax.Array | None, form: Form
) -> jax.Array:
    """The attention of this device's queries to all keys, [b, G, R, t, K]; all arrays vary over the same axes."""
    return _forward(q_bGRtK, k_bGtK, v_bGtK, labels_btC, form)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, labels: jax.Array | None, form: Form
) -> tuple[jax.Array, tuple[Any, ...]]:
    def visit(seen: Softmax, keys: _Keys, at: Visit) -> Softmax:
        k, v, mask, (rows, part) = _tile(keys, at, labels, (q, seen), form.window)
        return _unless_masked(
            labels, mask, lambda: _put(seen, part.updated(rows, k, v, mask, form.scale), at.rows), seen
        )

    y, log_total = _round(visit, Softmax.empty(q), (k, v, labels), form).result()
    y, log_total = save_as_dot(y.astype(q.dtype)), save_as_dot(log_total)
    return y, (q, k, v, labels, y, log_total)


def _backward(form: Form, residuals: tuple[Any, ...], dy: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, labels, y, log_total = residuals
    y_dy = inner(y, dy)

    def visit(grads: Any, keys: _Keys, at: Visit) -> Any:
        k, v, mask, (rows, log, *cotangents) = _tile(keys, at, labels, (q, log_total, dy, y_dy), form.window)

        def added() -> Any:
            weights = jnp.exp(scores_of(rows, k, mask, form.scale) - log)
            dq, dk, dv = gradients(rows, k, v, weights, *cotangents, scale=form.scale, partial_sums=True)
            return _add(grads[0], dq, at.rows), _add(grads[1], (dk, dv), at.columns)

        return _unless_masked(labels, mask, added, grads)

    def pass_on(grads: Any) -> Any:  # gradients of keys and values move along with them
        return grads[0], shift(grads[1], form.names) if form.names else grads[1]

    grads = _round(visit, (wide_zeros(q), (wide_zeros(k), wide_zeros(v))), (k, v, labels), form, pass_on)
    dq, (dk, dv) = pass_on(grads)  # to the device that holds these keys
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


attend.defvjp(_forward, _backward)


def _unless_masked(labels: jax.Array | None, mask: Any, visited: Callable[[], Any], before: Any) -> Any:
    """A tile in which no query sees a key is skipped, where only the data tells."""
    return lax.cond(jnp.any(mask), visited, lambda: before) if placed(labels) else visited()


def _round(
    visit: Callable[[Any, _Keys, Visit], Any],
    carry: Any,
    keys: _Keys,
    form: Form,
    pass_on: Callable[[Any], Any] = lambda carry: carry,
) -> Any:
    """Visits this device's own keys, then those of every other device, while the next ones arrive."""
    names, causal, order, block, *_ = form
    t = keys[0].shape[-2]
    half = t // 2
    visit = partial(_in_tiles, visit, block)
    if causal and order == "zigzag":
        own = [Visit(0, 0, half, 0), Visit(half, half, half, 0), Visit(half, 0, half)]
    else:
        own = [Visit(0, 0, t, 0 if causal else None)]
    n = axis_size(names) if names else 1
    # The first send stands before the loop, and each turn sends the keys of the next: they travel while it computes.
    # Sent in the turn that visits them, the matmuls would wait. Keys go round; queries and the sums of softmax stay.
    arriving = keys if n == 1 else shift(keys, names)
    for at in own:
        carry = visit(carry, keys, at)
    if n == 1:
        return carry
    me = axis_index(names)

    def others(step: Any, keys: _Keys, carry: Any) -> Any:
        carry = pass_on(carry)
        before = step <= me  # the keys are those of device me - step, modulo n
        if not causal:
            return visit(carry, keys, Visit(0, 0, t))
        if order == "contiguous":
            return lax.cond(before, lambda: visit(carry, keys, Visit(0, 0, t)), lambda: carry)
        # Late queries see the early keys of every device; also, early queries see the early keys of a device before
        # this one, and late queries the late keys of a device after it.
        carry = visit(carry, keys, Visit(half, 0, half))
        start = jnp.where(before, 0, half)
        return visit(carry, keys, Visit(start, start, half))

    def body(step: Any, both: Any) -> Any:
        keys, carry = both
        return shift(keys, names), others(step, keys, carry)

    keys, carry = lax.fori_loop(1, n - 1, body, (arriving, carry))
    return others(n - 1, keys, carry)


def _in_tiles(visit: Callable[[Any, _Keys, Visit], Any], block: int | None, carry: Any, keys: _Keys, at: Visit) -> Any:
    """One visit, or one per tile; tiles above the diagonal are skipped."""
    if block is None or block >= at.size:
        return visit(carry, keys, at)
    causal, count = at.ahead is not None, at.size // block
    tiles = count * (count + 1) // 2 if causal else count * count

    def tile(_: Any, state: Any) -> Any:
        row, column, carry = state
        ahead = at.ahead + (row - column) * block if causal else None
        carry = visit(carry, keys, Visit(at.rows + row * block, at.columns + column * block, block, ahead))
        ends = column == (row if causal else count - 1)
        return jnp.where(ends, row + 1, row), jnp.where(ends, 0, column + 1), carry

    zero = jnp.int32(0)
    return lax.fori_loop(0, tiles, tile, (zero, zero, carry))[2]


def _tile(
    keys: _Keys, at: Visit, labels: jax.Array | None, of_queries: Any, window: int | None
) -> tuple[jax.Array, jax.Array, jax.Array | None, Any]:
    """The keys and values of a visit, its mask, and the rows of queries and of what belongs to them."""
    k, v, k_labels = _cut(keys, at.columns, at.size)
    rows, q_labels = _cut((of_queries, labels), at.rows, at.size)
    return k, v, allowed(rows[0], k, at.ahead, q_labels, k_labels, window), rows


def _cut(tree: Any, start: Any, size: int) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size, -2), tree)


def _put(tree: Any, part: Any, start: Any) -> Any:
    return jax.tree.map(lambda x, new: lax.dynamic_update_slice_in_dim(x, new, start, -2), tree, part)


def _add(tree: Any, part: Any, start: Any) -> Any:
    size = jax.tree.leaves(part)[0].shape[-2]
    return _put(tree, jax.tree.map(jnp.add, _cut(tree, start, size), part), start)
