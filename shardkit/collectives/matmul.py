"""Matmuls that hide the gather before them, or the reduce_scatter after them, hop by hop.

The two halves of a tensor-parallel block whose activations are split by tokens outside it: `all_gather_matmul` into the
block, `matmul_reduce_scatter` out of it. Backward passes are rings too; they keep the operands, a device's own tokens
among them, and gather again what was gathered. Sums are made in float32, and sent in the dtype of the operands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

from shardkit import _compat
from shardkit._check import Axis, bound, divides
from shardkit._kinds import Arrays
from shardkit._typed import typed
from shardkit.collectives._sums import saved_as_dot, varying_like, wide, wide_zeros
from shardkit.collectives.basic import all_gather, axis_index, axis_size, reduce_scatter, shift, vary

Impl = Literal["gather", "ring", "bidirectional", "auto"]
HIDING_COLUMNS = 4400  # TPU v5e: bfloat16 columns whose matmul lasts one hop of its rows, 197 TFLOP/s over 45 GB/s
_Names = tuple[str, ...]
_Arrays = tuple[jax.Array, ...]


@typed
def all_gather_matmul(x_tD: jax.Array, w_Df: Arrays, axis: Axis, *, impl: Impl = "auto") -> Any:
    """Multiplies the tokens of all devices with this device's columns; tokens travel while others are multiplied.

    Layout: `X[T_a, D] . W[D, F_a] -> Y[T, F_a]`
    Args:
        x_tD: floating-point array [..., t, D], this device's tokens.
        w_Df: array [D, ...] of the same dtype, or a pytree of such arrays (gate and up; query, key and value), for
            which the tokens are gathered once. Any number of column dims will do.
        axis: axis name or tuple of names.
        impl: "gather": one all_gather, then one matmul. "ring": tokens go round one way, in n-1 hops. "bidirectional":
            half of them go each way (over two devices: as "ring"). The backward pass of both sends the tokens up while
            sums come down. "auto": with c the columns on this device, of all weights, times 2 / itemsize: "ring" from
            c = 4400, where one hop is hidden on TPU v5e; "bidirectional" from c = 2200, over 3 devices or more; else
            "gather".

    Returns:
        Array [..., T, ...] in the dtype of the operands, or a pytree of them as `w_Df`: a weight's column dims stand in
        the place of D. Typed as varying over `axis` and over whatever x or w vary over.

    Raises:
        ValueError: an unbound axis, another `impl`, operands whose dims do not match.
        TypeError: operands that are not floating-point, or of two dtypes.

    Cost: B (n-1) bytes in n-1 hops, B being x_tD, whatever `impl`; the backward pass 2 B (n-1) bytes, in n-1 hops both
    ways at once, or in 2 (n-1) for "gather".

    Source: Wang et al., Overlap Communication with Dependent Computation via Decomposition (ASPLOS 2023).
    """
    where = "all_gather_matmul"
    names = bound(where, axis)
    weights, tree = jax.tree.flatten(w_Df)
    for w in weights:
        if jnp.ndim(x_tD) < 2 or jnp.ndim(w) < 1 or x_tD.shape[-1] != w.shape[0]:
            raise ValueError(
                f"{where}: the last dim of x [..., t, D] must be dim 0 of w [D, ...]; "
                f"got shapes {jnp.shape(x_tD)} and {jnp.shape(w)}. Reshape or transpose one of them."
            )
    x, *weights = _operands(where, names, x_tD, *weights)
    columns = sum(math.prod(w.shape[1:]) for w in weights)
    chosen = _chosen(where, impl, columns, x.dtype, axis_size(names))
    return jax.tree.unflatten(tree, _all_gather_matmul(x, tuple(weights), names, chosen))


@typed
def matmul_reduce_scatter(h_Tf: jax.Array, w_fD: jax.Array, axis: Axis, *, impl: Impl = "auto") -> jax.Array:
    """Multiplies all tokens with this device's rows and sums over devices; sums travel while others are made.

    Layout: `H[T, F_a] . W[F_a, D] -> Y[T, D] {U_a} -> Y[T_a, D]`
    Args:
        h_Tf: floating-point array [..., T, f], or with as many dims in the place of f as `w_fD` has before D.
        w_fD: array [f, D] or [..., D] of the same dtype.
        axis: axis name or tuple of names.
        impl: "gather": one matmul, then one reduce_scatter; its backward pass is one all_gather and two matmuls.
            "ring": sums go round one way, in n-1 hops. "bidirectional": half of them go each way (over two devices: as
            "ring"). The backward pass of both sends the gradient one way, beside two matmuls a hop. "auto": the rule of
            all_gather_matmul, f in the place of its columns.

    Returns:
        Array [..., t, D] in the dtype of the operands, which each hop rounds to. Typed as varying over `axis` and over
        whatever h or w vary over.

    Raises:
        ValueError: an unbound axis, another `impl`, operands whose dims do not match, T that does not divide.
        TypeError: operands that are not floating-point, or of two dtypes.

    Cost: B (n-1) bytes in n-1 hops, B being the result, whatever `impl`; the backward pass the same.

    Source: Wang et al., Overlap Communication with Dependent Computation via Decomposition (ASPLOS 2023).
    """
    where = "matmul_reduce_scatter"
    names = bound(where, axis)
    at = jnp.ndim(h_Tf) - jnp.ndim(w_fD)
    if at < 0 or jnp.ndim(w_fD) < 2 or h_Tf.shape[at + 1 :] != w_fD.shape[:-1]:
        raise ValueError(
            f"{where}: the dims of h [..., T, f] after T must be those of w [f, D] before D; "
            f"got shapes {jnp.shape(h_Tf)} and {jnp.shape(w_fD)}. Reshape or transpose one of them."
        )
    divides(where, at, h_Tf.shape[at], names, axis_size(names))
    h, w = _operands(where, names, h_Tf, w_fD)
    chosen = _chosen(where, impl, math.prod(w.shape[:-1]), h.dtype, axis_size(names))
    return _matmul_reduce_scatter(h, w, names, chosen)


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
    outs = tuple(varying_like(lax.empty((*x.shape[:at], n, x.shape[at], *w.shape[1:]), x.dtype), x) for w in ws)
    pieces, outs = lax.fori_loop(0, n - 1, turn, (pieces, outs))
    return tuple(_joined(out, at) for out in multiply(n - 1, pieces, outs))


def _all_gather_matmul_forward(x: jax.Array, ws: _Arrays, names: _Names, impl: str) -> Any:
    # A call of the function that has this rule would hide its matmuls from the policies of jax.checkpoint.
    return _all_gather_matmul_primal(x, ws, names, impl), (x, ws)


def _all_gather_matmul_backward(names: _Names, impl: str, kept: Any, dys: _Arrays) -> Any:
    x, ws = kept
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

    def turn(k: Any, state: Any) -> Any:  # pieces of x go up while sums of dx come down
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


def _matmul_reduce_scatter_backward(names: _Names, impl: str, kept: Any, dy: jax.Array) -> Any:
    h, w = kept
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

    piece, *gradients = lax.fori_loop(0, n - 1, turn, (dy, varying_like(lax.empty(h.shape, h.dtype), h), wide_zeros(w)))
    dh, dw = multiply(n - 1, piece, *gradients)
    return _joined(dh, at), dw.astype(h.dtype)


_all_gather_matmul = jax.custom_vjp(_all_gather_matmul_primal, nondiff_argnums=(2, 3))
_all_gather_matmul.defvjp(_all_gather_matmul_forward, _all_gather_matmul_backward)
_matmul_reduce_scatter = jax.custom_vjp(_matmul_reduce_scatter_primal, nondiff_argnums=(2, 3))
_matmul_reduce_scatter.defvjp(_matmul_reduce_scatter_forward, _matmul_reduce_scatter_backward)


class _Way(NamedTuple):
    """What goes in one direction: `size` rows of every piece, from row `first` on, `by` places a hop."""

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
    """Contracts the last `dims` dims of x with the first of y; of a part of a longer sum, in float32."""
    return jnp.tensordot(x, y, dims, preferred_element_type=wide(x.dtype) if part else x.dtype)


def _outer(x: jax.Array, y: jax.Array, dims: int, *, part: bool = False) -> jax.Array:
    """Contracts the first `dims` dims of both: the batch and the tokens, for the gradient of a weight."""
    over = tuple(range(dims))
    return jnp.tensordot(x, y, (over, over), preferred_element_type=wide(x.dtype) if part else x.dtype)


def _add(arrived: jax.Array, part: jax.Array) -> jax.Array:
    # Fused with the matmul that makes the part, the addition would make it wait for the message.
    part = lax.optimization_barrier(part)
    return (arrived.astype(part.dtype) + part).astype(arrived.dtype)


# Rows are found by their device and not by their number, so that the compiler sees whole tiles and fuses the access
# with the matmul.


def _split(x: jax.Array, at: int, n: int) -> jax.Array:
    return x.reshape(*x.shape[:at], n, x.shape[at] // n, *x.shape[at + 1 :])


def _joined(x: jax.Array, at: int) -> jax.Array:
    return x.reshape(*x.shape[:at], x.shape[at] * x.shape[at + 1], *x.shape[at + 2 :])


def _take(x: jax.Array, at: int, device: Any) -> jax.Array:
    return lax.dynamic_index_in_dim(x, device % x.shape[at], at, keepdims=False)


def _put(out: jax.Array, rows: jax.Array, at: int, device: Any, first: int = 0) -> jax.Array:
    start = [0] * at + [device % out.shape[at], first] + [0] * (out.ndim - at - 2)
    return lax.dynamic_update_slice(out, jnp.expand_dims(rows.astype(out.dtype), at), start)


def _operands(where: str, names: _Names, *arrays: jax.Array) -> list[jax.Array]:
    """The operands, varying over the same axes: gradients then need no sum inside."""
    dtypes = [jnp.result_type(x) for x in arrays]
    if len(set(dtypes)) > 1 or not jnp.issubdtype(dtypes[0], jnp.floating):
        raise TypeError(
            f"{where}: operands must be floating-point and of one dtype; got {', '.join(map(str, dtypes))}. "
            "Cast them first."
        )
    return vary(list(arrays), tuple(sorted({*names}.union(*map(_compat.varying_axes, arrays)))))


def _chosen(where: str, impl: str, columns: int, dtype: Any, n: int) -> str:
    """The implementation: the one asked for, or by the rule of all_gather_matmul; over one device nothing travels."""
    if impl not in get_args(Impl):
        raise ValueError(
            f"{where}: impl must be 'gather', 'ring', 'bidirectional' or 'auto'; got {impl!r}. Choose one of them."
        )
    if impl != "auto" or n == 1:
        return impl if n > 1 else "gather"
    hidden = 2 * columns / dtype.itemsize / HIDING_COLUMNS
    return "ring" if hidden >= 1 else "bidirectional" if hidden >= 0.5 and n > 2 else "gather"
