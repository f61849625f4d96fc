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
from shardkit.collectives.basic import gather_array, reduce_array, scatter_array
from shardkit.collectives.padding import join_flat, split_flat


@typed
def all_reduce_tree(
    tree: Arrays,
    axis: Axis,
    *,
    bucket_bytes: int = 32 * 2**20,
    op: Literal["sum", "mean"] = "sum",
    scatter_from: float = 8 * 2**20,
) -> Any:
    """Reduces every leaf over the devices of `axis`. It packs leaves into buckets, and sends one collective per bucket.

    It packs leaves of the same dtype and varying axes in the order of the tree. It never splits a leaf: a leaf larger
    than a bucket gets a separate bucket. A reduce_scatter and an all_gather reduce a large bucket, with the same bytes.
    `shardkit bench comm --op all_reduce --impl lax two_step` measures the size from which this is faster.

    Layout: `X[...] {U_a} -> X[...]` for every leaf
    Args:
        tree: pytree of arrays, for example gradients.
        axis: axis name or tuple of names.
        bucket_bytes: largest bucket in bytes per device, 1 or more; with `cost.bucket_bytes` of a link, latency takes a
            tenth of the time.
        op: "sum" or "mean". Booleans count as integers.
        scatter_from: bytes per device from which a bucket is scattered and gathered; 0 for always.
            `cost.scatter_from` of a link finds it, and `bench.links` measures links.

    Returns:
        Arrays of the same shapes, invariant over `axis`: the results of all_reduce, with the same bits if the additions
            are exact.

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

    def reduce_bucket(bucket: jax.Array) -> jax.Array:
        if _count_bytes(bucket) < scatter_from:
            return reduce_array(bucket, names, op=op)
        shard = scatter_array(split_flat(bucket, count), names, 0, op=op)
        shards = gather_array(shard, names, 0, replicated=True)
        return join_flat(shards, bucket.shape)

    # The gradients of a layer's gain and bias are a few KiB each. Sent in one message with the gradients of other
    # layers, they wait once for a link instead of once each. Copying small leaves into the message and out of it costs
    # less than that.
    leaves, structure = jax.tree.flatten(tree)
    leaves = [vary(leaf, names) for leaf in leaves]
    sums: list[Any] = [None] * len(leaves)
    for members in _assign_buckets(leaves, bucket_bytes):
        if len(members) == 1:  # it keeps its shape
            [member] = members
            sums[member] = reduce_bucket(leaves[member])
            continue
        flat_leaves = [leaves[member].ravel() for member in members]
        bucket_sum = reduce_bucket(jnp.concatenate(flat_leaves))
        start = 0
        for member in members:
            leaf = leaves[member]
            end = start + leaf.size
            sums[member] = bucket_sum[start:end].reshape(leaf.shape)
            start = end
    return jax.tree.unflatten(structure, sums)


def _assign_buckets(leaves: list[jax.Array], most_bytes: int) -> Iterator[list[int]]:
    """The indices of the leaves, bucket by bucket.

    float32 leaves of 12, 8, 16 and 4 bytes in buckets of 20 bytes: [0, 1], [2, 3]. A bfloat16 leaf between them goes
    into a bucket of its own dtype: concatenated with float32 it would be widened.
    """
    indices_by_kind: dict[Any, list[int]] = {}
    for index, leaf in enumerate(leaves):
        # A bucket varies over the axes of all its leaves. Beside a leaf that varies over more axes, a complete one
        # would come out as if it were a partial sum over them.
        kind = (leaf.dtype, compat.varying_axes(leaf))
        indices_by_kind.setdefault(kind, []).append(index)
    for indices in indices_by_kind.values():
        sizes = [_count_bytes(leaves[index]) for index in indices]
        start = 0
        for bucket in fill_buckets(sizes, most_bytes):
            yield indices[start : start + len(bucket)]
            start += len(bucket)


def fill_buckets(sizes: Sequence[int], most: int) -> list[list[int]]:
    """The sizes in their order, in buckets of at most `most` bytes; a larger size gets a bucket of its own."""
    buckets: list[list[int]] = []
    for size in sizes:
        if not buckets or sum(buckets[-1]) + size > most:
            buckets.append([])
        buckets[-1].append(size)
    return buckets


def _count_bytes(x: jax.Array) -> int:
    return int(x.size) * x.dtype.itemsize
