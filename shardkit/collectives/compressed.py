"""An all_reduce that sends fewer bits, with error feedback: rounding errors are added to the next step's input.

Each device keeps a residual. It sends quantize(x + residual); the new residual is (x + residual) - sent. Scales are
powers of two, so that the difference is exact: sent + new residual equals x + residual in every bit of float32 (above
the subnormals), and over many steps the mean of what is received equals the mean of x. Without a residual, the rounding
errors accumulate.

Source: Seide et al., 1-Bit Stochastic Gradient Descent (2014); Karimireddy et al., Error Feedback Fixes SignSGD (2019).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardkit import _compat
from shardkit._check import Axis, at_least, bound, one_of
from shardkit._kinds import Arrays, DType
from shardkit._typed import typed
from shardkit.collectives.axes import axis_size, vary

# The largest value of each dtype that is sent with a scale for every block; bfloat16 needs none.
_LARGEST = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0}
_DTYPES = (jnp.dtype(jnp.bfloat16), *_LARGEST)


@typed
def init_residual(x: Arrays) -> Any:
    """The initial residual: zeros in float32, with the shapes and varying axes of x.

    It differs between devices, as gradients do before they are reduced: between steps keep it in arrays whose specs
    name the axis, for example `[n, ...]` under `P(axis)`.

    Args:
        x: pytree of arrays, as passed to all_reduce.

    Returns:
        Pytree of float32 arrays of the same shapes.

    Cost: none.

    Example:
        >>> print(sk.compressed.init_residual(jnp.ones(3, jnp.bfloat16)))
        [0. 0. 0.]
    """
    return jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.float32), x)


@partial(typed, where="compressed.all_reduce")
def all_reduce(
    x: Arrays, axis: Axis, residual: Arrays, *, dtype: DType, block: int = 256, compress_result: bool = False
) -> tuple[Any, Any]:
    """Sums each leaf over the devices of `axis`, sent in a small dtype, with error feedback.

    Every device sends each other device its chunk of x + residual, quantized; chunks are summed in float32; the sums
    are gathered in float32, or quantized again.

    Layout: `X[...] {U_a} -> X[...]`
    Args:
        x: pytree of floating-point arrays.
        axis: axis name or tuple of names.
        residual: what has not been sent so far, from init_residual or from the last call.
        dtype: jnp.bfloat16, jnp.float8_e4m3fn or jnp.int8. The last two go in blocks, each with one float32 scale.
        block: elements that share a scale, 1 or more.
        compress_result: gather the sums in `dtype` too. This second rounding, the same on all devices, is in no
            residual: it does not average out over the steps.

    Returns:
        The sums, with the shapes and dtypes of x, invariant over `axis`; and the new residual, which varies over it.
        The derivative is that of the exact sum of x + residual (straight-through), and zero for the new residual. A
        non-finite element makes its block non-finite in both: a step that is skipped must keep its old residual.

    Raises:
        ValueError: an unbound axis, another `dtype`, a block of no elements, or a residual of other shapes.
        TypeError: leaves that are not floating-point.

    Cost: P (n-1)/n (s + 4/block) bytes to n-1 other devices, then 4 P (n-1)/n, or as many again with compress_result.
    P is the number of elements, padded to a multiple of n block, and s the bytes of the dtype; bfloat16 has no scales:
    2 P (n-1)/n, padded to a multiple of n. An all_reduce in float32 sends 8 P (n-1)/n.

    Example:
        >>> def reduce(grads, residual):
        ...     return sk.compressed.all_reduce(grads, "data", residual, dtype=jnp.bfloat16)
        >>> step = jax.shard_map(reduce, mesh=mesh, in_specs=P("data"), out_specs=(P(), P("data")))
        >>> total, residual = step(jnp.array([1.0, 2.001]), jnp.zeros(2))
        >>> print(total, jnp.abs(residual) < 0.01)
        [3.] [ True  True]
    """
    names = bound("compressed.all_reduce", axis)
    small = jnp.dtype(dtype)
    one_of("compressed.all_reduce", "dtype", small.name, [each.name for each in _DTYPES])
    at_least("compressed.all_reduce", 1, block=block)
    leaves, structure = jax.tree.flatten(x)
    shapes = [leaf.shape for leaf in leaves]
    for leaf in leaves:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"compressed.all_reduce: every leaf must be floating-point; got {leaf.dtype}. Use all_reduce for it."
            )
    residuals = jax.tree.leaves(residual)
    structures: list[Any] = [jax.tree.structure(residual), structure]
    if structures[0] != structures[1] or [(r.shape, r.dtype) for r in residuals] != [
        (shape, jnp.float32) for shape in shapes
    ]:
        got = [f"{r.dtype}{list(r.shape)}" for r in residuals]
        raise ValueError(
            "compressed.all_reduce: residual must be a pytree like x of float32 arrays of the same shapes; "
            f"got {', '.join(got) or 'none'} for shapes {', '.join(str(list(shape)) for shape in shapes) or 'none'}. "
            "Create it with init_residual(x)."
        )
    block = block if small in _LARGEST else 1
    both = [
        _leaf(vary(leaf, names), vary(left, names), names, small, block, compress_result)
        for leaf, left in zip(leaves, residuals, strict=True)
    ]
    total, left = (jax.tree.unflatten(structure, [pair[i] for pair in both]) for i in (0, 1))
    return total, left


@partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4, 5))
def _leaf(
    x: jax.Array, residual: jax.Array, names: tuple[str, ...], dtype: Any, block: int, compress_result: bool
) -> tuple[jax.Array, jax.Array]:
    count = axis_size(names)
    if not x.size:  # jax refuses to gather empty arrays
        return jnp.zeros(x.shape, x.dtype), residual
    wanted = (x.astype(jnp.float32) + residual).ravel()
    padded = jnp.pad(wanted, (0, -wanted.size % (count * block)))
    values, scales = _quantized(padded.reshape(count, -1, block), dtype)
    left = wanted - _restored(values, scales).ravel()[: wanted.size]

    def exchange(piece: jax.Array) -> jax.Array:
        return lax.all_to_all(piece, names, 0, 0, tiled=True)

    def gather(piece: jax.Array) -> jax.Array:
        return _compat.all_gather_replicated(piece, names, 0)

    total = jnp.sum(_restored(exchange(values), None if scales is None else exchange(scales)), axis=0)
    if compress_result:
        values, scales = _quantized(total, dtype)
        total = _restored(gather(values), None if scales is None else gather(scales))
    else:
        total = gather(total)
    return total.ravel()[: wanted.size].reshape(x.shape).astype(x.dtype), left.reshape(x.shape)


@_leaf.defjvp
def _leaf_jvp(
    names: tuple[str, ...], dtype: Any, block: int, compress_result: bool, primals: Any, tangents: Any
) -> Any:
    (x, residual), (dx, dresidual) = primals, tangents
    total, left = _leaf(x, residual, names, dtype, block, compress_result)
    return (total, left), (lax.psum(dx + dresidual.astype(dx.dtype), names), jnp.zeros_like(dresidual))


def _quantized(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array | None]:
    """Float32 blocks [..., block] in the small dtype, and their scales [..., 1]."""
    if dtype not in _LARGEST:
        # reduce_precision: compilers may elide a cast to bfloat16 and back. Clipped: an inf has no residual.
        most = float(jnp.finfo(dtype).max)
        rounded = lax.reduce_precision(x, 8, 7)
        return jnp.where(jnp.isfinite(x), jnp.clip(rounded, -most, most), rounded).astype(dtype), None
    scales = _power_of_two(jnp.max(jnp.abs(x), axis=-1, keepdims=True) / _LARGEST[dtype])
    if dtype == jnp.int8:
        return jnp.round(x / scales).astype(dtype), scales
    return lax.optimization_barrier((x / scales).astype(dtype)), scales


def _restored(values: jax.Array, scales: jax.Array | None) -> jax.Array:
    wide = values.astype(jnp.float32)
    return wide if scales is None else wide * scales


def _power_of_two(x: jax.Array) -> jax.Array:
    """The smallest power of two that is at least x, and at least 2^-100 (no subnormals); NaN if x is not finite."""
    bits = lax.bitcast_convert_type(jnp.maximum(x, 2.0**-100), jnp.int32)
    up = lax.bitcast_convert_type((bits + 0x007FFFFF) & ~0x007FFFFF, jnp.float32)
    return jnp.where(jnp.isfinite(x), up, jnp.nan)
