"""The operations of `shardkit bench comm`: each with its reference, and the kernels that compute it.

A size is that of nccl-tests, the whole array: what one device ends with after an all_gather or gather, what it begins
with in every other operation. A new kernel is one row of the table of its operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardkit import collectives as c
from shardkit.collectives import compressed, hierarchical, ring
from shardkit.cost import quantization_error
from shardkit.cost.quantization import FORMATS
from shardkit.testing import reference

DTYPES = ("float32", "bfloat16", "float16", "float64", "int32", "int8", "uint8")
LEAVES = 16  # into which "leaves" and "bucketed" split the array
_LARGEST = 127  # of the values: what every small dtype that is sent has a scale for
_SUMS = ("sum", "mean")
Kernel = Callable[..., Any]
Bound = Callable[[float, Sequence[int]], float]
Axes = tuple[str, ...]


class Way(NamedTuple):
    """One implementation of an operation.

    Attributes:
        kernel: `kernel(x, axes, **options)`, for use inside shard_map.
        redops: the reductions that it has; None: all of the operation.
        levels: the axes that it needs, at least.
        bound: `(largest, sizes of the axes) -> float`, how far its result may be from the exact one, for elements up to
            `largest`; None: not at all.
        floating: whether it needs a floating-point dtype.
        hops: of n devices, where messages go at the same time; None: one after the other, as the census lists them.
    """

    kernel: Kernel
    redops: tuple[str, ...] | None = None
    levels: int = 1
    bound: Bound | None = None
    floating: bool = False
    hops: Callable[[int], int] | None = None


def _no_options(n: int, count: int) -> dict[str, Any]:
    return {}


# Worked example, of 4 devices, float32 and a size of 100 bytes: 25 elements. An all_reduce takes all of them on each
# device. An all_gather ends with them on each device, and takes 24, of which a device begins with 6.
class Operation(NamedTuple):
    """One operation.

    Attributes:
        name: as in `shardkit.collectives`.
        ways: its kernels, by the name of the implementation.
        reference: `reference(blocks, **options)`, of `shardkit.testing.reference`.
        redops: its reductions, the first by default; empty for an operation that reduces nothing.
        bus: its name in nccl-tests, for `cost.bus_factor`; None where that has no such operation.
        splits: whether the size must divide by the number of devices.
        gathers: whether a device begins with its part of the size.
        options: `options(n, count)`, further arguments of the kernel and of the reference.
    """

    name: str
    ways: Mapping[str, Way]
    reference: Kernel
    redops: tuple[str, ...] = ()
    bus: str | None = None
    splits: bool = False
    gathers: bool = False
    options: Callable[[int, int], dict[str, Any]] = _no_options

    def arguments(self, redop: str, n: int, count: int) -> dict[str, Any]:
        """The keyword arguments of its kernels and of its reference; the default reduction is not named."""
        arguments = dict(self.options(n, count))
        if self.redops and redop != self.redops[0]:
            arguments["op"] = redop
        return arguments

    def block(self, n: int, count: int) -> int:
        """The elements with which a device begins."""
        if self.gathers:
            return count // n
        return count

    def elements(self, size: int, n: int, itemsize: int) -> int:
        """The elements of the whole array, rounded down as in nccl-tests; 0 if a device would have none."""
        count = size // itemsize
        if self.splits:
            return count // n * n
        return count


# Kernels made of others, so that all of an operation have one signature.


def _by_leaves(kernel: Kernel) -> Kernel:
    """A kernel of pytrees, applied to the array in 16 parts: as many messages, or one if the kernel buckets them."""

    def run(x: jax.Array, axis: Axes, **options: Any) -> Any:
        # An array of fewer elements has fewer parts, so that none is empty.
        leaves = jnp.array_split(x, min(LEAVES, x.size))
        return jnp.concatenate(kernel(leaves, axis, **options))

    return run


def _over_two_levels(kernel: Kernel) -> Kernel:
    """A kernel of an inner and outer axes: the last axis has the fast links, as in `--axis node device`."""

    def run(x: jax.Array, axis: Axes, **options: Any) -> Any:
        *outer, inner = axis
        return kernel(x, inner, tuple(outer), **options)

    return run


def _in_equal_shards(kernel: Kernel, count_rows: Callable[[int, int], int]) -> Kernel:
    """A kernel of uneven shards, given equal ones; `count_rows(rows, n)` are the rows of each."""

    def run(x: jax.Array, axis: Axes, **options: Any) -> Any:
        n = c.axis_size(axis)
        sizes = (count_rows(len(x), n),) * n
        return kernel(x, sizes, axis, **options)

    return run


def _rows_of_shard(rows: int, n: int) -> int:
    """Of a gather, which begins with a shard."""
    return rows


def _rows_of_whole(rows: int, n: int) -> int:
    """Of a scatter, which begins with all shards."""
    return rows // n


def _ragged_all_to_all(x: jax.Array, axis: Axes, *, split_dim: int, concat_dim: int) -> Any:
    """As many rows to each device."""
    n = c.axis_size(axis)
    rows = len(x) // n
    counts: Any = np.full((n, n), rows)  # known at trace time, and checked there
    return c.ragged_all_to_all(x, counts, axis, rows=len(x), limit=rows)


def share_by_zipf(rows: int, n: int) -> np.ndarray:
    """The rows that every device sends to each of n devices: device j gets a share that falls as 1 / (j + 1).

    Worked example: 12 rows for 4 devices, in the ratio 1 : 1/2 : 1/3 : 1/4, are 5.76, 2.88, 1.92 and 1.44 rows. Rounded
    down they are 5, 2, 1, 1; device 0 gets the 3 that are left: 8, 2, 1, 1.
    """
    weights = 1 / np.arange(1, n + 1)
    shares = np.floor(rows * weights / weights.sum()).astype(np.int32)
    shares[0] += rows - shares.sum()
    return shares


def _exchange_by_zipf(x: jax.Array, axis: Axes) -> Any:
    n = c.axis_size(axis)
    shares = share_by_zipf(len(x), n)
    counts: Any = np.tile(shares, (n, 1))
    # The first device receives most, `n` times its share; the results of all others end with zeros.
    return c.ragged_all_to_all(x, counts, axis, rows=n * int(shares[0]), limit=int(shares[0]))


def _refer_to_zipf(blocks: Sequence[Any], *, xp: Any = np) -> list[Any]:
    """What `_exchange_by_zipf` must return on each device."""
    n = len(blocks)
    shares = share_by_zipf(len(blocks[0]), n)
    results = []
    for device in range(n):
        first = shares[:device].sum()
        arrivals = xp.concatenate([block[first : first + shares[device]] for block in blocks])
        results.append(xp.pad(arrivals, (0, n * shares[0] - len(arrivals))))
    return results


def _without_residual(kernel: Kernel) -> Kernel:
    """A kernel that returns its result and a new residual, without that."""

    def run(x: jax.Array, axis: Axes, **options: Any) -> Any:
        result, _ = kernel(x, axis, **options)
        return result

    return run


def _deterministic_all_reduce(x: jax.Array, axis: Axes, **options: Any) -> Any:
    """Of one part on each device."""
    return c.all_reduce(x[None], axis, deterministic=True, **options)


# How far a result may be from the exact one, of elements up to `largest` that are sent in `dtype`. For example the sum
# over 8 devices of elements up to 127, each rounded to int8 once.


def _bound_of_sum(dtype: str, largest: float, sizes: Sequence[int]) -> float:
    return quantization_error(largest, dtype, n=math.prod(sizes))


def _bound_of_sum_sent_again(dtype: str, largest: float, sizes: Sequence[int]) -> float:
    """The sum is rounded too: it has n times the largest element, and the error of the terms."""
    error = _bound_of_sum(dtype, largest, sizes)
    return error + quantization_error(math.prod(sizes) * largest + error, dtype)


def _bound_of_gather(dtype: str, largest: float, sizes: Sequence[int]) -> float:
    return quantization_error(largest, dtype)


def _bound_of_outer_sum(dtype: str, largest: float, sizes: Sequence[int]) -> float:
    """Exact sums over the last axis are rounded, and added over the others."""
    *outer, inner = sizes
    return quantization_error(inner * largest, dtype, n=math.prod(outer))


def _compress(kernel: Kernel, redops: tuple[str, ...] | None, bound: Callable[..., float], dtype: str = "int8") -> Way:
    """A kernel that sends a small dtype."""
    return Way(
        partial(kernel, dtype=dtype),
        redops,
        bound=partial(bound, dtype),
        floating=True,
    )


def _list_compressed(kernel: Kernel, redops: tuple[str, ...] | None, bound: Callable[..., float]) -> dict[str, Way]:
    """The ways "compressed", in int8, and one named after each other dtype."""
    ways = {"compressed": _compress(kernel, redops, bound)}
    for dtype in FORMATS:
        if dtype != "int8":
            ways[f"compressed_{dtype}"] = _compress(kernel, redops, bound, dtype)
    return ways


# Hops of kernels that send both ways round a ring at the same time.


def _half_ring_hops(n: int) -> int:
    # Both ways round, the farthest device is half a ring away: 4 hops of 8 devices, 2 of 5.
    return n // 2


def _two_half_rings_hops(n: int) -> int:
    return 2 * (n // 2)


def _neighbor_hops(n: int) -> int:
    return int(n > 1)


_ALL_REDUCE = {
    "lax": Way(c.all_reduce),
    "ring": Way(ring.all_reduce, _SUMS),
    "bidirectional": Way(partial(ring.all_reduce, bidirectional=True), _SUMS, hops=_two_half_rings_hops),
    "hierarchical": Way(_over_two_levels(hierarchical.all_reduce), _SUMS, levels=2),
    # From 0 bytes on, which is always: a reduce_scatter, then an all_gather.
    "two_step": Way(partial(c.all_reduce_tree, scatter_from=0), _SUMS),
    "deterministic": Way(_deterministic_all_reduce, _SUMS, floating=True),
    "leaves": Way(_by_leaves(c.all_reduce)),
    "bucketed": Way(_by_leaves(c.all_reduce_tree), _SUMS),
    **_list_compressed(_without_residual(compressed.all_reduce), ("sum",), _bound_of_sum),
    "compressed_twice": _compress(
        partial(_without_residual(compressed.all_reduce), compress_result=True), ("sum",), _bound_of_sum_sent_again
    ),
}
_ALL_GATHER = {
    "lax": Way(c.all_gather),
    "ring": Way(ring.all_gather),
    "bidirectional": Way(partial(ring.all_gather, bidirectional=True), hops=_half_ring_hops),
    "hierarchical": Way(_over_two_levels(hierarchical.all_gather), levels=2),
    "uneven": Way(_in_equal_shards(c.all_gather_uneven, _rows_of_shard)),
    **_list_compressed(compressed.all_gather, None, _bound_of_gather),
}
_REDUCE_SCATTER = {
    "lax": Way(c.reduce_scatter),
    "ring": Way(ring.reduce_scatter),
    "bidirectional": Way(partial(ring.reduce_scatter, bidirectional=True), hops=_half_ring_hops),
    "hierarchical": Way(_over_two_levels(hierarchical.reduce_scatter), levels=2),
    "uneven": Way(_in_equal_shards(c.reduce_scatter_uneven, _rows_of_whole)),
    **_list_compressed(_without_residual(compressed.reduce_scatter), ("sum",), _bound_of_sum),
    "compressed_hierarchical": _compress(
        _without_residual(_over_two_levels(compressed.reduce_scatter_two_level)), ("sum",), _bound_of_outer_sum
    )._replace(levels=2),
}
_ALL_TO_ALL = {"lax": Way(c.all_to_all), "ragged": Way(_ragged_all_to_all)}
_HALO = Way(c.halo_exchange, hops=_neighbor_hops)  # both sides at the same time


def _rows_everywhere(n: int, count: int) -> dict[str, Any]:
    return {"split_dim": 0, "concat_dim": 0}


def _eighths(n: int, count: int) -> dict[str, Any]:
    size = max(1, count // 8)
    return {"before": size, "after": size}


_LIST = (
    Operation("all_reduce", _ALL_REDUCE, reference.all_reduce, ("sum", "mean", "max", "min"), bus="all_reduce"),
    Operation("all_gather", _ALL_GATHER, reference.all_gather, bus="all_gather", splits=True, gathers=True),
    Operation("reduce_scatter", _REDUCE_SCATTER, reference.reduce_scatter, _SUMS, bus="reduce_scatter", splits=True),
    Operation("all_to_all", _ALL_TO_ALL, reference.all_to_all, bus="all_to_all", splits=True, options=_rows_everywhere),
    # Experts that tokens choose by popularity: each device has an expert, and the first one is the most popular.
    Operation("ragged_all_to_all", {"lax": Way(_exchange_by_zipf)}, _refer_to_zipf, splits=True),
    Operation("broadcast", {"lax": Way(c.broadcast)}, reference.broadcast, bus="broadcast"),
    Operation("shift", {"lax": Way(c.shift)}, reference.shift, bus="sendrecv"),
    Operation(
        "gather_to_one", {"lax": Way(c.gather_to_one)}, reference.gather_to_one, bus="gather", splits=True, gathers=True
    ),
    Operation("prefix_scan", {"lax": Way(c.prefix_scan)}, reference.prefix_scan, ("sum", "max", "min")),
    Operation("halo_exchange", {"lax": _HALO}, reference.halo_exchange, options=_eighths),
)
OPERATIONS: Mapping[str, Operation] = MappingProxyType({operation.name: operation for operation in _LIST})


def make_values(dtype: str, devices: int, n: int, count: int) -> np.ndarray:
    """Whole numbers whose sums over n devices are exact in the dtype, in any order: [devices, count], always the same.

    Where n ones are too many, each element is zero on all but as many devices as the dtype can count. For example of
    bfloat16, which counts to 256, and 8 devices, elements are -32 to 32; of 512 devices they are -1 to 1, and zero on
    256 of these.
    """
    limit = find_exact_limit(dtype)
    largest = max(1, min(_LARGEST, limit // n))
    lowest = -largest
    if dtype.startswith("u"):
        lowest = 0
    x = np.random.default_rng(0).integers(lowest, largest + 1, (devices, count), np.int16)
    if n > limit:
        # Of n devices beside each other `limit` keep element j: other ones for each j.
        numbers = np.arange(devices)[:, None] + np.arange(count)[None, :]
        x[numbers % n >= limit] = 0
    return x.astype(jnp.dtype(dtype))


def find_exact_limit(dtype: str) -> int:
    """The largest n for which all whole numbers up to n are exact; the largest of all stays for `make_poison`."""
    kind = jnp.dtype(dtype)
    if jnp.issubdtype(kind, jnp.integer):
        return int(jnp.iinfo(kind).max) - 1
    # The first bit is not stored: bfloat16 stores 7, and has all whole numbers up to 2**8.
    mantissa_bits = int(jnp.finfo(kind).nmant)
    return 2 ** (mantissa_bits + 1)


def make_poison(dtype: str) -> Any:
    """A value that no right result contains: NaN, or the largest number of an integer dtype."""
    kind = jnp.dtype(dtype)
    if jnp.issubdtype(kind, jnp.integer):
        return kind.type(jnp.iinfo(kind).max)
    return kind.type(np.nan)


def bound_error(way: Way, dtype: str, redop: str, x: np.ndarray, sizes: Sequence[int]) -> float:
    """How far a result may be from the reference: 0, the rounding of a mean, or of what is sent in a small dtype."""
    n = math.prod(sizes)
    largest = float(np.abs(x.astype(np.float64)).max(initial=0))
    error = 0.0
    if way.bound is not None:
        error = way.bound(largest, sizes)
    # The sums are exact. A mean divides them, and rounds unless n is a power of 2, which changes the exponent alone.
    n_is_power_of_2 = n & (n - 1) == 0
    if not error and (redop != "mean" or n_is_power_of_2):
        return 0.0
    if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        return error
    largest_result = error + n * largest
    if redop == "mean":
        largest_result = error + largest
    return error + float(jnp.finfo(dtype).eps) * largest_result
