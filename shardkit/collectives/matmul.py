"""Matmuls that overlap the all_gather before them, or the reduce_scatter after them, hop by hop.

The two ends of a tensor-parallel block with sequence parallelism: `all_gather_matmul` enters the block,
`matmul_reduce_scatter` leaves it. Backward passes are rings too; residuals are the operands, of which the gathered one
is gathered again. Sums are accumulated in float32 and sent in the dtype of the operands.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from shardkit import cost
from shardkit._arguments.checks import Axis, bound, divides
from shardkit._arguments.kinds import Arrays
from shardkit._arguments.typed import typed
from shardkit._jax import backends, compat
from shardkit.collectives import _matmul_rings
from shardkit.collectives.axes import axis_size, vary
from shardkit.cost import Links

Impl = Literal["gather", "ring", "bidirectional", "auto"] | Links
_Names = tuple[str, ...]


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
    return jax.tree.unflatten(tree, _matmul_rings.all_gather_matmul(x, tuple(weights), names, chosen))


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
    return _matmul_rings.matmul_reduce_scatter(h, w, names, chosen)


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
