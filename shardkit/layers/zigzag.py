"""The order of a sequence's tokens over the devices: contiguous, or zigzag so that causal attention is balanced."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit._arguments.checks import Axis, at_least, named, quoted
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
        axis: axis name or tuple of names, the ring's.
        ulysses: the axis that splits the tokens further, as in `ulysses_attention(..., ring=axis)`.
        dim: the dim of the tokens.
        inverse: from zigzag to contiguous order.

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
    names, chunks = _chunks("zigzag", axis, ulysses)
    n = len(chunks)
    if n == 1:
        return tree
    # Even chunks are first halves of contiguous shards, odd ones second halves; every device holds one of each.
    even_first = chunks[:, 0] % 2 == 0
    routes = [[(int(c) // 2, i) for i in range(n) for c in chunks[i] if c % 2 == parity] for parity in (0, 1)]
    if inverse:
        routes = [[(target, source) for source, target in route] for route in routes]
    stays = [all(source == target for source, target in route) for route in routes]  # on two devices, one of them
    in_order = jnp.asarray(even_first)[axis_index(names)]

    if not any(-jnp.ndim(x) <= dim < jnp.ndim(x) for x in jax.tree.leaves(tree)):
        raise ValueError(f"zigzag: dim must be a dim of at least one array; got {dim}. Pass the dim of the tokens.")

    # A loss calls this before its embedding: there a token is an integer, and no gradient; behind it, it is a row of D
    # floats that goes forward and back. Nothing is put back: a loss is a sum over tokens, in any order that targets,
    # weights and positions share. A leaf that is left out is no error, but a loss of each token against the target of
    # another. Two permutes, because the halves of a shard go to two devices, and in one permute a device sends to one:
    # that of all first halves and that of all second ones; each device receives one half by each.
    def reorder(x: jax.Array) -> jax.Array:
        if not -jnp.ndim(x) <= dim < jnp.ndim(x):
            return x
        size = half_of("zigzag", x.shape[dim])
        halves = [lax.slice_in_dim(x, start, start + size, axis=dim) for start in (0, size)]
        sent = _swapped(halves, in_order) if inverse else halves
        got = [half if stay else permute(half, names, to) for half, stay, to in zip(sent, stays, routes, strict=True)]
        return jnp.concatenate(got if inverse else _swapped(got, in_order), axis=dim)

    return jax.tree.map(reorder, tree)


@typed
def positions(
    tokens_per_device: int, axis: Axis, *, order: Order = "contiguous", ulysses: Axis | None = None
) -> jax.Array:
    """The positions of this device's tokens in the whole sequence: for rotary embeddings and for keys.

    Args:
        tokens_per_device: t, the number of tokens on each device.
        axis: axis name or tuple of names, the ring's.
        order: of the tokens, as `ring_attention` takes it.
        ulysses: the axis that splits the tokens further, as in `ulysses_attention(..., ring=axis)`.

    Returns:
        int32 [t], varying over those of the axes that have several devices.

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
    names, chunks = _chunks("positions", axis, ulysses)
    if tokens_per_device * len(chunks) >= 2**31:
        raise ValueError(
            f"positions: positions are int32, so all tokens must be below 2**31; got {tokens_per_device} on each of "
            f"{len(chunks)} devices. Lower tokens_per_device."
        )
    within = jnp.arange(tokens_per_device, dtype=jnp.int32)
    if order == "contiguous":
        return within if len(chunks) == 1 else axis_index(names) * tokens_per_device + within
    size = half_of("positions", tokens_per_device)
    if len(chunks) == 1:
        return within
    starts = jnp.asarray(chunks, jnp.int32)[axis_index(names)] * size
    return jnp.repeat(starts, size) + within % size


def half_of(where: str, tokens: int) -> int:
    """The size of each of a device's two chunks."""
    if tokens % 2:
        raise ValueError(
            f"{where}: zigzag order must have an even number of tokens on each device; got {tokens}. "
            "Pad the sequence to a multiple of twice the devices, or use contiguous order."
        )
    return tokens // 2


def ring_first(where: str, ring: Axis, ulysses: Axis) -> tuple[str, ...]:
    """The axes of both, the ring's first, as they must be ordered in the mesh: a plan splits tokens in mesh order."""
    outer, inner = bound(where, ring), bound(where, ulysses)
    names, known = bound(where, (*outer, *inner)), list(compat.bound_axes())
    if max(map(known.index, outer)) > min(map(known.index, inner)):
        raise ValueError(
            f"{where}: the ring's {named(outer)} must come before {named(inner)} in the mesh; its axes are "
            f"{quoted(known)}. Pass the ring's axis first to make_mesh."
        )
    return in_plan_order(where, names)


def _chunks(where: str, axis: Axis, ulysses: Axis | None) -> tuple[tuple[str, ...], np.ndarray]:
    """The axes of several devices, and which two half-shards each device along them holds in zigzag order, [n, 2]."""
    names = in_plan_order(where, bound(where, axis)) if ulysses is None else ring_first(where, axis, ulysses)
    n, inner = axis_size(names), 1 if ulysses is None else axis_size(ulysses)
    early, late = np.arange(2 * n).reshape(2, -1, inner)
    return live_axes(where, names), np.concatenate([early, late[::-1]], axis=1).reshape(n, 2)


def _swapped(pair: list[jax.Array], in_order: jax.Array) -> list[jax.Array]:
    first, second = pair
    return [jnp.where(in_order, first, second), jnp.where(in_order, second, first)]
