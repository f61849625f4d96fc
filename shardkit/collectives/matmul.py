"""Matmuls that overlap the all_gather before them, or the reduce_scatter after them, hop by hop.

The two ends of a tensor-parallel block with sequence parallelism: `all_gather_matmul` enters the block,
`matmul_reduce_scatter` leaves it. Backward passes are rings too; residuals are the operands, of which the gathered one
is gathered again. Sums are accumulated in float32 and sent in the dtype of the operands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial, reduce
from operator import add
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardkit import cost
from shardkit._arguments.checks import Axis, divides
from shardkit._arguments.typed import Arrays, typed
from shardkit._jax import backends, compat
from shardkit._jax.compat import bound
from shardkit.collectives._sums import saved_as_dot, wide, wide_zeros
from shardkit.collectives.axes import axis_index, axis_size, vary, vary_like
from shardkit.collectives.basic import all_gather, reduce_scatter
from shardkit.collectives.permute import shift
from shardkit.cost import Links

Impl = Literal["gather", "ring", "bidirectional", "auto"] | Links
_Names = tuple[str, ...]
_Arrays = tuple[jax.Array, ...]


@typed
def all_gather_matmul(x_tD: jax.Array, w_Df: Arrays, axis: Axis, *, impl: Impl = "auto") -> Any:
    """Multiplies the tokens of all devices with this device's columns; sends some tokens while multiplying others.

    Layout: `X[T_a, D] . W[D, F_a] -> Y[T, F_a]`
    Args:
        x_tD: floating-point array [..., t, D], this device's tokens.
        w_Df: array [D, ...] of the same dtype, or a pytree of such arrays (gate and up; query, key and value), for
            which the tokens are gathered once. Any number of column dims.
        axis: axis name or tuple of names.
        impl: "gather": one all_gather, then one matmul. "ring": tokens are sent one way, in n-1 hops. "bidirectional":
            half of them each way (over two devices: as "ring"). The backward pass of both sends tokens up and sums
            down. A `cost.Links`: "ring" where a hop takes no longer than the matmul of its tokens with all columns
            (`cost.ring_from`); else "bidirectional" where it takes no longer than two, over 3 devices or more; else
            "gather". "auto": the same by `cost.links` of the chip that the program is traced for; "gather" where that
            is not in `cost.chips`, as for CPUs and meshes without devices.

    Returns:
        Array [..., T, ...] in the dtype of the operands, or a pytree of them like `w_Df`: a weight's column dims
        replace D. It varies over `axis` and over the axes over which x or w vary.

    Raises:
        ValueError: an unbound axis, another `impl`, operands whose dims do not match.
        TypeError: operands that are not floating-point, or of two dtypes.

    Cost: B (n-1) bytes in n-1 hops, B being x_tD, for every `impl`; the backward pass 2 B (n-1) bytes, in n-1 hops both
    ways at once, or in 2 (n-1) for "gather".

    Example:
        >>> up = lambda x_tD, w_Df: sk.all_gather_matmul(x_tD, w_Df, "model", impl="ring")
        >>> specs = {"in_specs": (P("model"), P(None, "model")), "out_specs": P(None, "model")}
        >>> jax.shard_map(up, mesh=mesh, **specs)(jnp.ones((8, 2)), jnp.ones((2, 16))).shape
        (8, 16)

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
    chosen = _chosen(impl, names, x.size, columns, x.dtype)
    return jax.tree.unflatten(tree, _all_gather_matmul(x, tuple(weights), names, chosen))


@typed
def matmul_reduce_scatter(h_Tf: jax.Array, w_fD: jax.Array, axis: Axis, *, impl: Impl = "auto") -> jax.Array:
    """Multiplies all tokens with this device's rows and sums over devices; sends some sums while computing others.

    Layout: `H[T, F_a] . W[F_a, D] -> Y[T, D] {U_a} -> Y[T_a, D]`
    Args:
        h_Tf: floating-point array [..., T, f], or with as many dims for f as `w_fD` has before D.
        w_fD: array [f, D] or [..., D] of the same dtype.
        axis: axis name or tuple of names.
        impl: "gather": one matmul, then one reduce_scatter; its backward pass is one all_gather and two matmuls.
            "ring": sums are sent one way, in n-1 hops. "bidirectional": half of them each way (over two devices: as
            "ring"). The backward pass of both sends the gradient one way, beside two matmuls per hop. "auto" or a
            `cost.Links`: the rule of all_gather_matmul, with f for the columns and the result for the tokens.

    Returns:
        Array [..., t, D] in the dtype of the operands, to which each hop rounds. It varies over `axis` and over the
        axes over which h or w vary.

    Raises:
        ValueError: an unbound axis, another `impl`, operands whose dims do not match, T that does not divide.
        TypeError: operands that are not floating-point, or of two dtypes.

    Cost: B (n-1) bytes in n-1 hops, B being the result, for every `impl`; the backward pass the same.

    Example:
        >>> down = lambda h_Tf, w_fD: sk.matmul_reduce_scatter(h_Tf, w_fD, "model")
        >>> specs = {"in_specs": (P(None, "model"), P("model")), "out_specs": P("model")}
        >>> print(jax.shard_map(down, mesh=mesh, **specs)(jnp.ones((8, 16)), jnp.ones((16, 2)))[0])
        [16. 16.]

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
    rows = math.prod(h.shape[: at + 1]) // axis_size(names)
    chosen = _chosen(impl, names, rows * w.shape[-1], math.prod(w.shape[:-1]), h.dtype)
    return _matmul_reduce_scatter(h, w, names, chosen)


def _operands(where: str, names: _Names, *arrays: jax.Array) -> list[jax.Array]:
    """The operands, varying over the same axes, so that their gradients need no reduction inside."""
    dtypes = [jnp.result_type(x) for x in arrays]
    if len(set(dtypes)) > 1 or not jnp.issubdtype(dtypes[0], jnp.floating):
        raise TypeError(
            f"{where}: operands must be floating-point and of one dtype; got {', '.join(map(str, dtypes))}. "
            "Cast them to one dtype first."
        )
    return vary(list(arrays), tuple(sorted({*names}.union(*map(compat.varying_axes, arrays)))))


def _chosen(impl: Impl, names: _Names, elements: int, columns: int, dtype: Any) -> str:
    """The implementation: `impl`, or by the rule of all_gather_matmul for messages of so many elements."""
    n = axis_size(names)
    if n == 1:
        return "gather"  # nothing is sent
    if impl == "auto":
        chip = cost.chip_of(backends.device_kind())
        return "gather" if chip is None else _chosen(cost.links(chip), names, elements, columns, dtype)
    if not isinstance(impl, Links):
        return impl
    if not impl.flops or not elements * columns:
        return "gather"
    rule = partial(cost.ring_from, impl.of(names), columns, flops=impl.flops, value_bytes=dtype.itemsize)
    message = elements * dtype.itemsize
    return "ring" if message >= rule() else "bidirectional" if n > 2 and message >= rule(ways=2) else "gather"


# The matmuls after their arguments are checked. `impl` is "gather", "ring" or "bidirectional"; operands vary over the
# same axes.


def _all_gather_matmul_primal(x: jax.Array, ws: _Arrays, names: _Names, impl: str) -> _Arrays:
    at, n, me = x.ndim - 2, axis_size(names), axis_index(names)
    if impl == "gather":
        whole = all_gather(x, names, dim=at)
        return tuple(_dot(whole, w, 1) for w in ws)
    ways = _ways(impl, x.shape[at], n)

    def multiply(k: Any, pieces: Sequence[jax.Array], outs: _Arrays) -> _Arrays:
        for way, piece in zip(ways, pieces, strict=True):
            source = me - way.by * k
            outs = tuple(_put(out, _dot(piece, w, 1), at, source, way.first) for out, w in zip(outs, ws, strict=True))
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


_all_gather_matmul = jax.custom_vjp(_all_gather_matmul_primal, nondiff_argnums=(2, 3))
_all_gather_matmul.defvjp(_all_gather_matmul_forward, _all_gather_matmul_backward)
_matmul_reduce_scatter = jax.custom_vjp(_matmul_reduce_scatter_primal, nondiff_argnums=(2, 3))
_matmul_reduce_scatter.defvjp(_matmul_reduce_scatter_forward, _matmul_reduce_scatter_backward)


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
