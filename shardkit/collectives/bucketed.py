"""Many small arrays reduced in few collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from shardkit._arguments.checks import Axis, at_least
from shardkit._arguments.typed import Arrays, typed
from shardkit._jax import compat
from shardkit._jax.compat import bound
from shardkit.collectives.axes import axis_size, vary
from shardkit.collectives.basic import all_gather, all_reduce, reduce_scatter
from shardkit.collectives.padding import in_rows


@typed
def all_reduce_tree(
    tree: Arrays,
    axis: Axis,
    *,
    bucket_bytes: int = 32 * 2**20,
    op: Literal["sum", "mean"] = "sum",
    scatter_from: float = 8 * 2**20,
) -> Any:
    """Reduces every leaf over the devices of `axis`, packed into buckets of one collective each.

    Leaves of the same dtype and varying axes are packed in the order of the tree. A leaf is never split: one that is
    larger than a bucket gets its own. A large bucket is reduced by a reduce_scatter and an all_gather, which send the
    same bytes; `shardkit bench comm --op all_reduce --impl lax two_step` measures from which size that is faster.

    Layout: `X[...] {U_a} -> X[...]` for every leaf
    Args:
        tree: pytree of arrays, for example gradients.
        axis: axis name or tuple of names.
        bucket_bytes: largest bucket in bytes per device, 1 or more; `cost.bucket_bytes` of a link is the size of which
            latency takes a tenth of the time.
        op: "sum" or "mean". Booleans count as integers.
        scatter_from: bytes per device from which a bucket is scattered and gathered; 0 for always. `bench.crossovers`
            finds it in measurements ("two_step"), `cost.scatter_from` in the figures of a link.

    Returns:
        Arrays of the same shapes, invariant over `axis`: the results of all_reduce, with the same bits where the
        additions are exact.

    Raises:
        ValueError: an unbound axis, another `op`, or too few bytes.

    Cost: 2 B (n-1)/n bytes in 2 (n-1) hops per bucket, B being all its leaves, padded to a multiple of n elements where
    it is scattered.

    Example:
        >>> grads = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
        >>> reduce = lambda grads: sk.collectives.all_reduce_tree(grads, "data")
        >>> print(jax.shard_map(reduce, mesh=mesh, in_specs=P(), out_specs=P())(grads)["b"])
        [2. 2. 2.]

    Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training (2020).
    """
    names = bound("all_reduce_tree", axis)
    count = axis_size(names)
    at_least("all_reduce_tree", 1, bucket_bytes=bucket_bytes)
    at_least("all_reduce_tree", 0, scatter_from=scatter_from)

    def reduce(bucket: jax.Array) -> jax.Array:
        if _bytes(bucket) < scatter_from:
            return all_reduce(bucket, names, op=op)
        whole = all_gather(reduce_scatter(in_rows(bucket, count), names, op=op), names, replicated=True)
        return whole.reshape(-1)[: bucket.size].reshape(bucket.shape)

    leaves, structure = jax.tree.flatten(tree)
    leaves = [vary(leaf, names) for leaf in leaves]
    out: list[Any] = [None] * len(leaves)
    for places in _buckets(leaves, bucket_bytes):
        if len(places) == 1:
            out[places[0]] = reduce(leaves[places[0]])
            continue
        packed = reduce(jnp.concatenate([leaves[i].ravel() for i in places]))
        start = 0
        for i in places:
            out[i] = packed[start : start + leaves[i].size].reshape(leaves[i].shape)
            start += leaves[i].size
    return jax.tree.unflatten(structure, out)


def _buckets(leaves: list[jax.Array], most: int) -> Iterator[list[int]]:
    """The indices of the leaves, bucket by bucket."""
    kinds: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        kinds.setdefault((leaf.dtype, compat.varying_axes(leaf)), []).append(i)
    for places in kinds.values():
        start = 0
        for bucket in filled([_bytes(leaves[i]) for i in places], most):
            yield places[start : start + len(bucket)]
            start += len(bucket)


def filled(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Sizes in their order, in buckets of at most so many bytes; a larger one has its own."""
    buckets: list[list[int]] = []
    for size in sizes:
        if not buckets or sum(buckets[-1]) + size > most:
            buckets.append([])
        buckets[-1].append(size)
    return buckets


def _bytes(x: jax.Array) -> int:
    return int(x.size) * x.dtype.itemsize
