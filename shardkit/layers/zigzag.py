"""The order of a sequence's tokens over the devices: contiguous, or zigzag so that causal attention is balanced."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit._arguments.checks import Axis, at_least, name_axes, quote
from shardkit._arguments.typed import Arrays, typed
from shardkit._jax import compat
from shardkit._jax.compat import bound
from shardkit.collectives import axis_index, axis_size
from shardkit.collectives.permute import permute
from shardkit.layers.matmul import live_axes
from shardkit.on_device.batch import in_plan_order

Order = Literal["contiguous", "zigzag"]


@typed
def zigzag(tree: Arrays, axis: Axis, *, ulysses: Axis | None = None, dim: int = 1, inverse: bool = False) -> Any:
    """Reorders contiguous shards of a sequence (tokens, targets, weights, positions) into zigzag order, or back.

    Layout: `X[.., T_a, ..] -> X[.., T'_a, ..]`, T' the tokens in zigzag order

    Args:
        tree: pytree of arrays; leaves without the dim are unchanged.
        axis: axis name or tuple of names of the ring.
        ulysses: the axis that splits the tokens further, as in `ulysses_attention(..., ring=axis)`.
        dim: the dim of the tokens.
        inverse: True to go from zigzag to contiguous order.

    Returns:
        Arrays of the same shapes.

    Raises:
        ValueError: an unbound axis, axes in another order than the plan's, or an odd number of tokens on each device.

    Cost: this device's bytes in two messages of half of them; on two devices one of the two; on one, nothing.

    Example:
        >>> tokens, zigzag = P(None, "model"), lambda x: sk.layers.zigzag(x, "model")
        >>> reorder = jax.shard_map(zigzag, mesh=mesh, in_specs=tokens, out_specs=tokens)
        >>> reorder(jnp.arange(8)[None]).tolist()
        [[0, 7, 1, 6, 2, 5, 3, 4]]

    Source: the zigzag order of ring-flash-attention; Brandon et al., Striped Attention (arXiv:2311.09431).
    """
    names = _find_axes("zigzag", axis, ulysses)
    chunks = _assign_chunks(names, ulysses)
    if len(chunks) == 1:
        return tree
    names = live_axes("zigzag", names)
    route_of_first = _find_route(chunks, 0, inverse)
    route_of_second = _find_route(chunks, 1, inverse)
    # Whether this device's early chunk is the first half of a contiguous shard, and its late chunk a second half: even
    # chunks are first halves.
    in_order = jnp.asarray(chunks[:, 0] % 2 == 0)[axis_index(names)]

    if not any(_has_dim(x, dim) for x in jax.tree.leaves(tree)):
        raise ValueError(f"zigzag: dim must be a dim of at least one array; got {dim}. Pass the dim of the tokens.")

    # When: call it before the embedding, where a token is one integer without a gradient. After the embedding a token
    # is D floats, which would be sent forward and back.
    #
    # No way back is needed: a loss is a sum over tokens, in any order that tokens, targets, weights and positions
    # share. All of them must be reordered together. If one is left out, nothing fails, and each token is compared with
    # the target of another.
    #
    # Two permutes: in one permute a device sends to one device, but the two halves of a shard may go to two. So one
    # permute sends all first halves, another all second halves, and each device receives one half by each.
    def reorder(x: jax.Array) -> jax.Array:
        if not _has_dim(x, dim):
            return x
        size = halve("zigzag", x.shape[dim])
        first = lax.slice_in_dim(x, 0, size, axis=dim)
        second = lax.slice_in_dim(x, size, 2 * size, axis=dim)
        if inverse:
            first, second = _swap_unless(in_order, first, second)
        first = _send(first, names, route_of_first)
        second = _send(second, names, route_of_second)
        if not inverse:
            first, second = _swap_unless(in_order, first, second)
        return jnp.concatenate([first, second], axis=dim)

    return jax.tree.map(reorder, tree)


def _has_dim(x: Any, dim: int) -> bool:
    return -jnp.ndim(x) <= dim < jnp.ndim(x)


def _find_route(chunks: np.ndarray, half: int, inverse: bool) -> list[tuple[int, int]]:
    """The pairs (source, target) of the first halves (half 0), or second halves (half 1), of all contiguous shards.

    Shard j holds chunks 2j and 2j + 1. On four devices the chunks in zigzag order are 0 7, 1 6, 2 5 and 3 4. The first
    halves are the even chunks: chunk 0 stays on device 0, 6 goes from device 3 to 1, 2 from 1 to 2, 4 from 2 to 3.
    """
    route = []
    for target, pair in enumerate(chunks):
        for chunk in pair:
            if chunk % 2 != half:
                continue
            source = int(chunk) // 2
            if inverse:
                route.append((target, source))
            else:
                route.append((source, target))
    return route


def _send(x: jax.Array, names: tuple[str, ...], route: list[tuple[int, int]]) -> jax.Array:
    if all(source == target for source, target in route):  # on two devices, one of the halves stays
        return x
    return permute(x, names, route)


@typed
def positions(
    tokens_per_device: int, axis: Axis, *, order: Order = "contiguous", ulysses: Axis | None = None
) -> jax.Array:
    """Returns the positions of this device's tokens in the whole sequence, for rotary embeddings and for keys.

    Args:
        tokens_per_device: t, the number of tokens on each device.
        axis: axis name or tuple of names of the ring.
        order: the order of the tokens, as for `ring_attention`.
        ulysses: the axis that splits the tokens further, as in `ulysses_attention(..., ring=axis)`.

    Returns:
        int32 [t], varying over all these axes with more than one device.

    Raises:
        ValueError: an unbound axis, axes in another order than the plan's, an unknown order, or an odd number of tokens
            in zigzag order.

    Cost: nothing is sent.

    Example:
        >>> kernel = lambda: sk.layers.positions(2, "model", order="zigzag")
        >>> jax.shard_map(kernel, mesh=mesh, in_specs=(), out_specs=P("model"))().tolist()
        [0, 7, 1, 6, 2, 5, 3, 4]
    """
    at_least("positions", 0, tokens_per_device=tokens_per_device)
    names = _find_axes("positions", axis, ulysses)
    chunks = _assign_chunks(names, ulysses)
    names = live_axes("positions", names)
    if tokens_per_device * len(chunks) >= 2**31:
        raise ValueError(
            f"positions: positions are int32, so all tokens must be below 2**31; got {tokens_per_device} on each of "
            f"{len(chunks)} devices. Lower tokens_per_device."
        )
    local_t = jnp.arange(tokens_per_device, dtype=jnp.int32)
    if order == "contiguous":
        if len(chunks) == 1:
            return local_t
        return axis_index(names) * tokens_per_device + local_t
    size = halve("positions", tokens_per_device)
    if len(chunks) == 1:
        return local_t
    # Device 1 of 4 with 4 tokens holds chunks 1 and 6 of 2 tokens: starts 2 12, repeated 2 2 12 12, plus 0 1 0 1.
    starts = jnp.asarray(chunks, jnp.int32)[axis_index(names)] * size
    return jnp.repeat(starts, size) + local_t % size


def halve(where: str, tokens: int) -> int:
    """The size of each of a device's two chunks."""
    if tokens % 2:
        raise ValueError(
            f"{where}: zigzag order must have an even number of tokens on each device; got {tokens}. "
            "Pad the sequence to a multiple of twice the devices, or use contiguous order."
        )
    return tokens // 2


def join_token_axes(where: str, ring: Axis, ulysses: Axis) -> tuple[str, ...]:
    """The axes of the ring, then the ulysses axes; refuses axes that the mesh has in another order.

    A plan splits the tokens over axes in the order of the mesh.
    """
    ring_axes = bound(where, ring)
    ulysses_axes = bound(where, ulysses)
    names = bound(where, (*ring_axes, *ulysses_axes))
    mesh_axes = list(compat.bound_axes())
    last_of_ring = max(mesh_axes.index(name) for name in ring_axes)
    first_of_ulysses = min(mesh_axes.index(name) for name in ulysses_axes)
    if last_of_ring > first_of_ulysses:
        raise ValueError(
            f"{where}: the ring's {name_axes(ring_axes)} must come before {name_axes(ulysses_axes)} in the mesh; its "
            f"axes are {quote(mesh_axes)}. Pass the ring's axis first to make_mesh."
        )
    return in_plan_order(where, names)


def _find_axes(where: str, axis: Axis, ulysses: Axis | None) -> tuple[str, ...]:
    """The axes that split the tokens, major first."""
    if ulysses is None:
        return in_plan_order(where, bound(where, axis))
    return join_token_axes(where, axis, ulysses)


def _assign_chunks(names: tuple[str, ...], ulysses: Axis | None) -> np.ndarray:
    """Which two half-shards each of n devices holds in zigzag order, [n, 2].

    On four devices without `ulysses` the rows are 0 7, 1 6, 2 5 and 3 4. With two of them along `ulysses` they are
    0 1, 6 7, 2 3 and 4 5: after the exchange over `ulysses`, the first device of the ring has the early chunks 0 1 and
    the late ones 6 7 for some of the heads.
    """
    n = axis_size(names)
    inner = 1 if ulysses is None else axis_size(ulysses)
    early, late = np.arange(2 * n).reshape(2, -1, inner)
    return np.concatenate([early, late[::-1]], axis=1).reshape(n, 2)


def _swap_unless(in_order: jax.Array, first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.where(in_order, first, second), jnp.where(in_order, second, first)
