"""Linear layers whose weights are split over devices that share their tokens, with or without sequence parallelism.

A block is a `column_linear`, a function of single columns (or heads), and a `row_linear`. Between blocks every device
holds all tokens, or with `sequence=True` a part of them: norms, dropout and the residual stream are then split too.
Every kernel takes `axis=None` for one device without a mesh.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardkit._arguments.checks import Axis, at_least, dim_of, divisor, shapes
from shardkit._arguments.typed import Arrays, typed
from shardkit.collectives import all_gather_matmul, all_reduce, axis_index, matmul_reduce_scatter, vary
from shardkit.collectives.matmul import Impl
from shardkit.layers.matmul import check_split, count_devices, live_axes, matmul


@typed
def column_linear(x: jax.Array, w: Arrays, axis: Axis | None, *, sequence: bool = False, impl: Impl = "auto") -> Any:
    """Multiplies by weights split by columns: each device computes its part of the columns, or heads.

    Layout: `X[T, D] . W[D, F_a] -> Y[T, F_a]`; with `sequence` `X[T_a, D] -> X[T, D]` first

    Args:
        x: tokens, [..., T, D], the same on all devices of `axis`; with `sequence` this device's tokens, [..., t, D].
        w: weights [D, f] or [D, h, K]; or a pytree of them (gate and up; query, key and value), with one gather for
            all.
        axis: axis name or tuple of names; None for one device.
        sequence: True if the tokens are split over `axis`.
        impl: the `impl` of `all_gather_matmul`, with `sequence`.

    Returns:
        [..., T, f] or [..., T, h, K] of all tokens for each weight, in the dtype of x; sums are in float32.

    Raises:
        ValueError: an unbound axis, or an unknown `impl`.

    Cost: nothing forward, and one all_reduce of x's gradient backward. With `sequence` an all_gather of x forward;
        backward another one, for the gradient of w, and a reduce_scatter of x's gradient. To gather once and keep the
        tokens, call `column_linear(all_gather(x, axis, dim=-2), w, axis)`.

    Example:
        >>> kernel = lambda x, w: sk.layers.column_linear(x, w, "model")
        >>> columns, x, w = P(None, "model"), jnp.ones((4, 8)), jnp.ones((8, 16))
        >>> y = jax.shard_map(kernel, mesh=mesh, in_specs=(P(), columns), out_specs=columns)(x, w)
        >>> y.shape, y.sharding.shard_shape(y.shape)
        ((4, 16), (4, 4))

    Source: Shoeybi et al., Megatron-LM (arXiv:1909.08053), section 3; Korthikanti et al. (arXiv:2205.05198), section
        4.2.2.
    """
    for weight in jax.tree.leaves(w):
        shapes("column_linear", x=(x, "..D"), w=(weight, "D.."))
    names = live_axes("column_linear", axis, x, w)
    # With sequence parallelism a device has a part of the tokens and a part of the columns. The tokens are gathered
    # here, where they meet the weights, and once for all of them. Gathered before the norm instead, norm, dropout and
    # residual would be computed by every device for all tokens, and held in memory by every device.
    if sequence and names:
        return all_gather_matmul(x, w, names, impl=impl)
    # If x is whole, the forward pass sends nothing. In the backward pass the transpose of this cast sums the devices'
    # gradients of x, once for all weights: with a cast for each weight, q, k and v would cost three sums. Without the
    # cast the gradient of x would come from this device's columns alone.
    x = vary(x, names)
    return jax.tree.map(lambda weight: matmul(x, weight), w)


@typed
def row_linear(
    h: jax.Array, w: jax.Array, axis: Axis | None, *, sequence: bool = False, impl: Impl = "auto"
) -> jax.Array:
    """Multiplies columns, or heads, by weights split by rows, and sums over the devices.

    Add a bias to the result: if you add it before the sum, it counts n times.

    Layout: `H[T, F_a] . W[F_a, D] -> Y[T, D] {U_a} -> Y[T, D]`; with `sequence` `-> Y[T_a, D]`

    Args:
        h: this device's columns of all tokens, [..., T, f], or heads [..., T, h, K].
        w: weights [f, D], or [h, K, D].
        axis: axis name or tuple of names; None for one device.
        sequence: split the tokens of the result over `axis`; their number must be divisible by n.
        impl: the `impl` of `matmul_reduce_scatter`, with `sequence`.

    Returns:
        [..., T, D], invariant over `axis`; with `sequence` this device's tokens, [..., t, D]. It has the dtype of h,
            and devices add their parts in this dtype. For float32 sums pass `h.astype(jnp.float32)`, and with
            `sequence` a float32 w.

    Raises:
        ValueError: an unbound axis, weights that are invariant over `axis`, an unknown `impl`, or tokens not
            divisible by n.

    Cost: one all_reduce of the result forward, and nothing backward; with `sequence` a reduce_scatter forward and an
        all_gather backward.

    Example:
        >>> kernel = lambda h, w: sk.layers.row_linear(h, w, "model")
        >>> specs = (P(None, "model"), P("model"))
        >>> y = jax.shard_map(kernel, mesh=mesh, in_specs=specs, out_specs=P())(jnp.ones((4, 16)), jnp.ones((16, 8)))
        >>> float(y[0, 0])  # summed over the devices
        16.0

    Source: Shoeybi et al., Megatron-LM (arXiv:1909.08053), section 3; Korthikanti et al. (arXiv:2205.05198), section
        4.2.2.
    """
    if not h.ndim or not 2 <= w.ndim <= h.ndim + 1 or h.shape[1 - w.ndim :] != w.shape[:-1]:
        raise ValueError(
            f"row_linear: w must be [f, D] or [h, K, D], as h is [.., f] or [.., h, K]; got {w.shape} for {h.shape}. "
            f"Pass w with the last dims of h before D, such as ({h.shape[-1] if h.ndim else 8}, D)."
        )
    names = live_axes("row_linear", axis, h, w)
    check_split("row_linear", "w", names, w)
    if sequence and names:
        return matmul_reduce_scatter(h, w, names, impl=impl)
    # Each device has the products of its own rows, partial sums of y. They are summed here, before a bias, a residual
    # or a nonlinearity. A bias that every device adds before the sum would count n times, and the nonlinearity of a sum
    # is not the sum of nonlinearities. With `sequence`, the sum above leaves each device its part of the tokens, which
    # is all that norm and residual need. Without it, y is the same on all devices, and so is its gradient: the backward
    # pass sends nothing.
    y = matmul(h, w, w.ndim - 1)
    if not names:
        return y
    return all_reduce(y, names)


@typed
def local_groups(w_DGK: jax.Array, axis: Axis | None, *, heads: int, kv_heads: int, dim: int = -2) -> jax.Array:
    """Selects the key or value heads for this device's query heads, from weights that are whole on every device.

    Use it for grouped-query attention if the axis does not divide the key/value heads. It returns weights that are
    already split over the axis unchanged, so your model can always call it.

    Layout: `W[D, G, K] -> W[D, g, K]`, the g heads of the groups of query heads `[i H/n, (i+1) H/n)`

    Args:
        w_DGK: weights (or projected tokens) of all key/value heads, or this device's share of them.
        axis: axis name or tuple of names that splits the query heads; None for one device.
        heads: query heads H of the whole layer.
        kv_heads: key/value heads G of the whole layer.
        dim: the dimension of the heads.

    Returns:
        The array with g heads along `dim`. g divides this device's query heads, and query head j uses key/value head j
            // (h / g). You get one head if all query heads are in one group, and in the worst case a copy for each
            query head.

    Raises:
        ValueError: heads not divisible by the axis, key/value heads that do not divide the heads, or a dim of
            another size.

    Cost: nothing forward. Backward one all_reduce of the gradient of w, unless w is varying, as under
        `tp(sequence=True)`: then it is summed once per step.

    Example:
        >>> kernel = lambda w: sk.layers.local_groups(w, "model", heads=8, kv_heads=2)
        >>> heads = jax.shard_map(kernel, mesh=mesh, in_specs=P(), out_specs=P(None, "model"))
        >>> heads(jnp.arange(2)[None, :, None]).ravel().tolist()  # the key/value head of each device
        [0, 0, 1, 1]

    Source: Ainslie et al., GQA (arXiv:2305.13245).
    """
    names = live_axes("local_groups", axis, w_DGK)
    devices = count_devices(names)
    dim = dim_of("local_groups", dim, w_DGK.ndim)
    at_least("local_groups", 1, heads=heads, kv_heads=kv_heads)
    _check_heads("local_groups", devices, heads)
    divisor("local_groups", "kv_heads", kv_heads, "heads", heads)
    size = w_DGK.shape[dim]
    if size * devices == kv_heads:
        return w_DGK
    if size != kv_heads:
        raise ValueError(
            f"local_groups: dim {dim} must hold all key/value heads, or this device's share of them; got size {size} "
            f"for {kv_heads} key/value heads over {devices} devices. Pass the dim of the heads."
        )
    # With 12 query heads in 4 groups of 3, two devices have 6 query heads each. Blocks of gcd(3, 6) = 3 query heads
    # never cross the border of a group, and device 1 takes the groups of query heads 6 and 9: key/value heads 2 and 3.
    group = heads // kv_heads
    local_heads = heads // devices
    block = math.gcd(group, local_heads)
    first = axis_index(names) * local_heads
    query_heads = first + np.arange(0, local_heads, block, dtype=np.int32)
    return jnp.take(w_DGK, query_heads // group, axis=dim, mode="clip")


@typed
def device_major_qkv(
    w: jax.Array, ways: int, *, heads: int, kv_heads: int | None = None, dim: int = -1, inverse: bool = False
) -> jax.Array:
    """Reorders a fused query-key-value weight, so that each shard holds whole heads of all three.

    In the original order the first shard holds queries only. With h = H/n and g = G/n a device's part is [h + 2g, K]:
    `query, key, value = jnp.split(y.reshape(*y.shape[:-1], -1, K), [h, h + g], axis=-2)`.

    Layout: `W[D, (q k v)] -> W[D, (q_0 k_0 v_0 q_1 k_1 v_1 ..)]`, of whole arrays, outside shard_map

    Args:
        w: weight or bias. Its dim `dim` holds H query, G key and G value heads of equal size, in this order.
        ways: number n of devices that will split this dim.
        heads: query heads H.
        kv_heads: key/value heads G; None: as many as query heads.
        dim: the fused dimension.
        inverse: restore the original order.

    Returns:
        An array of the same shape.

    Raises:
        ValueError: heads not divisible by `ways`, or a dim that does not hold H + 2 G heads of equal size.

    Cost: nothing is sent if w is replicated.

    Example:
        >>> qkv = jnp.asarray([[0, 1, 10, 11, 20, 21]])  # two heads of size 1: queries, keys, values
        >>> sk.layers.device_major_qkv(qkv, 2, heads=2).tolist()
        [[0, 10, 20, 1, 11, 21]]
    """
    if kv_heads is None:
        kv_heads = heads
    at_least("device_major_qkv", 1, ways=ways, heads=heads, kv_heads=kv_heads)
    dim = dim_of("device_major_qkv", dim, w.ndim)
    _check_heads("device_major_qkv", ways, heads)
    _check_heads("device_major_qkv", ways, kv_heads, "kv_heads")
    all_heads = heads + 2 * kv_heads
    size = w.shape[dim]
    if size % all_heads:
        raise ValueError(
            f"device_major_qkv: dim {dim} must hold heads + 2 kv_heads heads of equal size; got size {size} for "
            f"{all_heads} heads. Pass the fused dim and its heads."
        )
    columns = np.arange(size).reshape(all_heads, -1)
    query, key, value = np.split(columns, [heads, heads + kv_heads])
    by_device = [part.reshape(ways, -1) for part in (query, key, value)]
    order = np.concatenate(by_device, axis=1).ravel()
    if inverse:
        order = np.argsort(order)
    return jnp.take(w, order, axis=dim)


def _check_heads(where: str, ways: int, heads: int, name: str = "heads") -> None:
    if heads % ways:
        raise ValueError(
            f"{where}: {name} must be divisible by the devices that share them; got {heads} {name} over {ways} "
            "devices. Change the heads, or use fewer devices."
        )
