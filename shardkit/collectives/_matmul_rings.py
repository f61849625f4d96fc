"""The matmuls of `matmul.py` after their arguments are checked, and their backward passes, one collective or a ring.

`impl` is "gather", "ring" or "bidirectional"; operands vary over the same axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardkit.collectives._sums import saved_as_dot, wide, wide_zeros
from shardkit.collectives.axes import axis_index, axis_size, vary_like
from shardkit.collectives.basic import all_gather, reduce_scatter
from shardkit.collectives.permute import shift

_Names = tuple[str, ...]
_Arrays = tuple[jax.Array, ...]


def _all_gather_matmul_primal(x: jax.Array, ws: _Arrays, names: _Names, impl: str) -> _Arrays:
    at, n, me = x.ndim - 2, axis_size(names), axis_index(names)
    if impl == "gather":
        whole = all_gather(x, names, dim=at)
        return tuple(_dot(whole, w, 1) for w in ws)
    ways = _ways(impl, x.shape[at], n)

    def multiply(k: Any, pieces: Sequence[jax.Array], outs: _Arrays) -> _Arrays:
        for way, piece in zip(ways, pieces, strict=True):
            place = me - way.by * k, way.first
            outs = tuple(_put(out, _dot(piece, w, 1), at, *place) for out, w in zip(outs, ws, strict=True))
        return outs

    def turn(k: Any, state: Any) -> Any:
        pieces, outs = state
        return _sent(pieces, ways, names), multiply(k, pieces, outs)

    pieces = [lax.slice_in_dim(x, way.first, way.first + way.size, axis=at) for way in ways]
    outs = tuple(vary_like(lax.empty((*x.shape[:at], n, x.shape[at], *w.shape[1:]), x.dtype), x) for w in ws)
    pieces, outs = lax.fori_loop(0, n - 1, turn, (pieces, outs))
    return tuple(_joined(out, at) for out in multiply(n - 1, pieces, outs))


def _all_gather_matmul_forward(x: jax.Array, ws: _Arrays, names: _Names, impl: str) -> Any:
    # Calling the custom_vjp function here would hide its matmuls from the policies of jax.checkpoint.
    return _all_gather_matmul_primal(x, ws, names, impl), (x, ws)


def _all_gather_matmul_backward(names: _Names, impl: str, residuals: Any, dys: _Arrays) -> Any:
    x, ws = residuals
    at, n, me = x.ndim - 2, axis_size(names), axis_index(names)

    def dx(dys: Sequence[jax.Array]) -> jax.Array:
        pairs = zip(dys, ws, strict=True)
        return reduce(add, (_dot(dy, jnp.moveaxis(w, 0, -1), w.ndim - 1, part=True) for dy, w in pairs))

    if impl == "gather":
        whole = all_gather(x, names, dim=at)
        dws = tuple(_outer(whole, dy, at + 1) for dy in dys)
        return reduce_scatter(dx(dys).astype(x.dtype), names, dim=at), dws
    dys = tuple(_split(dy, at, n) for dy in dys)

    def rows_of(source: Any) -> list[jax.Array]:
        return [_take(dy, at, source) for dy in dys]

    def add_dw(dws: _Arrays, piece: jax.Array, source: Any) -> _Arrays:
        return tuple(dw + _outer(piece, dy, at + 1, part=True) for dw, dy in zip(dws, rows_of(source), strict=True))

    def turn(k: Any, state: Any) -> Any:  # shards of x are sent up, sums of dx down
        piece, total, dws = state
        arriving, arrived = shift(piece, names), shift(total, names, by=-1)
        return arriving, _add(arrived, dx(rows_of(me + 2 + k))), add_dw(dws, piece, me - k)

    state = x, dx(rows_of(me + 1)).astype(x.dtype), tuple(map(wide_zeros, ws))
    piece, total, dws = lax.fori_loop(0, n - 1, turn, state)
    return total, tuple(dw.astype(x.dtype) for dw in add_dw(dws, piece, me + 1))


def _matmul_reduce_scatter_primal(h: jax.Array, w: jax.Array, names: _Names, impl: str) -> jax.Array:
    at, n, me = h.ndim - w.ndim, axis_size(names), axis_index(names)
    if impl == "gather":
        return saved_as_dot(reduce_scatter(_dot(h, w, w.ndim - 1), names, dim=at))
    h = _split(h, at, n)
    ways = _ways(impl, h.shape[at + 1], n)

    def part(k: Any, way: _Way) -> jax.Array:
        rows = _take(h, at, me - way.by * (k + 1))
        return _dot(lax.slice_in_dim(rows, way.first, way.first + way.size, axis=at), w, w.ndim - 1, part=True)

    def turn(k: Any, sums: Sequence[jax.Array]) -> list[jax.Array]:
        return [_add(arrived, part(k, way)) for arrived, way in zip(_sent(sums, ways, names), ways, strict=True)]

    sums = lax.fori_loop(1, n, turn, [part(0, way).astype(h.dtype) for way in ways])
    return saved_as_dot(jnp.concatenate(sums, at))


def _matmul_reduce_scatter_forward(h: jax.Array, w: jax.Array, names: _Names, impl: str) -> Any:
    return _matmul_reduce_scatter_primal(h, w, names, impl), (h, w)


def _matmul_reduce_scatter_backward(names: _Names, impl: str, residuals: Any, dy: jax.Array) -> Any:
    h, w = residuals
    at, n, me = h.ndim - w.ndim, axis_size(names), axis_index(names)
    w_transposed = jnp.moveaxis(w, -1, 0)
    if impl == "gather":
        whole = all_gather(dy, names, dim=at)
        return _dot(whole, w_transposed, 1), _outer(h, whole, at + 1)
    h = _split(h, at, n)

    def multiply(k: Any, piece: jax.Array, dh: jax.Array, dw: jax.Array) -> tuple[jax.Array, jax.Array]:
        dh = _put(dh, _dot(piece, w_transposed, 1), at, me - k)
        return dh, dw + _outer(_take(h, at, me - k), piece, at + 1, part=True)

    def turn(k: Any, state: Any) -> Any:
        piece, *gradients = state
        return shift(piece, names), *multiply(k, piece, *gradients)

    piece, *gradients = lax.fori_loop(0, n - 1, turn, (dy, vary_like(lax.empty(h.shape, h.dtype), h), wide_zeros(w)))
    dh, dw = multiply(n - 1, piece, *gradients)
    return _joined(dh, at), dw.astype(h.dtype)


all_gather_matmul = jax.custom_vjp(_all_gather_matmul_primal, nondiff_argnums=(2, 3))
all_gather_matmul.defvjp(_all_gather_matmul_forward, _all_gather_matmul_backward)
matmul_reduce_scatter = jax.custom_vjp(_matmul_reduce_scatter_primal, nondiff_argnums=(2, 3))
matmul_reduce_scatter.defvjp(_matmul_reduce_scatter_forward, _matmul_reduce_scatter_backward)


class _Way(NamedTuple):
    """What is sent in one direction: `size` rows of every shard, from row `first`, by `by` devices per hop."""

    by: int
    first: int
    size: int


def _ways(impl: str, rows: int, n: int) -> list[_Way]:
    half = rows // 2
    if impl == "ring" or n == 2 or not half:
        return [_Way(1, 0, rows)]
    return [_Way(1, 0, half), _Way(-1, half, rows - half)]


def _sent(messages: Sequence[jax.Array], ways: Sequence[_Way], names: _Names) -> list[jax.Array]:
    return [shift(message, names, by=way.by) for message, way in zip(messages, ways, strict=True)]


def _dot(x: jax.Array, y: jax.Array, dims: int, *, part: bool = False) -> jax.Array:
    """Contracts the last `dims` dims of x with the first of y; a part of a longer sum in float32."""
    return jnp.tensordot(x, y, dims, preferred_element_type=wide(x.dtype) if part else x.dtype)


def _outer(x: jax.Array, y: jax.Array, dims: int, *, part: bool = False) -> jax.Array:
    """Contracts the first `dims` dims of both, batch and tokens, for a weight gradient."""
    over = tuple(range(dims))
    return jnp.tensordot(x, y, (over, over), preferred_element_type=wide(x.dtype) if part else x.dtype)


def _add(arrived: jax.Array, part: jax.Array) -> jax.Array:
    # Fused with the matmul that computes `part`, the addition would make that matmul wait for the message.
    part = lax.optimization_barrier(part)
    return (arrived.astype(part.dtype) + part).astype(arrived.dtype)


# Rows are indexed by device, not by row number, so that the compiler sees whole tiles and fuses the access with the
# matmul.


def _split(x: jax.Array, at: int, n: int) -> jax.Array:
    return x.reshape(*x.shape[:at], n, x.shape[at] // n, *x.shape[at + 1 :])


def _joined(x: jax.Array, at: int) -> jax.Array:
    return x.reshape(*x.shape[:at], x.shape[at] * x.shape[at + 1], *x.shape[at + 2 :])


def _take(x: jax.Array, at: int, device: Any) -> jax.Array:
    return lax.dynamic_index_in_dim(x, device % x.shape[at], at, keepdims=False)


def _put(out: jax.Array, rows: jax.Array, at: int, device: Any, first: int = 0) -> jax.Array:
    start = [0] * at + [device % out.shape[at], first] + [0] * (out.ndim - at - 2)
    return lax.dynamic_update_slice(out, jnp.expand_dims(rows.astype(out.dtype), at), start)
