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
Axes = tuple[str, ...]


class Way(NamedTuple):
    """One implementation of an operation."""

    kernel: Kernel  # `kernel(x, axes, **options)`, for use inside shard_map
    redops: tuple[str, ...] | None = None  # the reductions that it has; None: all of the operation
    levels: int = 1  # the axes that it needs, at least
    # `(largest, sizes of the axes) -> float`, how far its result may be from the exact one; None: not at all
    bound: Callable[[float, Sequence[int]], float] | None = None
    floating: bool = False  # it needs a floating-point dtype
    # of n devices, where messages go at the same time; None: one after the other, as the census lists them
    hops: Callable[[int], int] | None = None


class Operation(NamedTuple):
    """One operation."""

    name: str  # as in `shardkit.collectives`
    ways: Mapping[str, Way]  # its kernels, by the name of the implementation
    reference: Kernel  # `reference(blocks, **options)`, of `shardkit.testing.reference`
    redops: tuple[str, ...] = ()  # its reductions, the first by default; empty for an operation that reduces nothing
    bus: str | None = None  # its name in nccl-tests, for `cost.bus_factor`; None where that has no such operation
    splits: bool = False  # the size must divide by the number of devices
    gathers: bool = False  # a device begins with its part of the size
    # `options(n, count)`, further arguments of the kernel and of the reference
    options: Callable[[int, int], dict[str, Any]] = lambda n, count: {}

    def arguments(self, redop: str, n: int, count: int) -> dict[str, Any]:
        """The keyword arguments of its kernels and of its reference; the default reduction is not named."""
        return self.options(n, count) | ({"op": redop} if self.redops and redop != self.redops[0] else {})

    def block(self, n: int, count: int) -> int:
        """The elements with which a device begins."""
        return count // n if self.gathers else count

    def elements(self, size: int, n: int, itemsize: int) -> int:
        """The elements of the whole array, rounded down as in nccl-tests; 0 if a device would have none."""
        count = size // itemsize
        return count // n * n if self.splits else count


def _of_leaves(kernel: Kernel) -> Kernel:
    def run(x: jax.Array, axis: Axes, **options: Any) -> Any:
        return jnp.concatenate(kernel(jnp.array_split(x, min(LEAVES, x.size)), axis, **options))

    return run


def _two_level(kernel: Kernel) -> Kernel:
    return lambda x, axis, **options: kernel(x, axis[-1], axis[:-1], **options)


def _uneven(kernel: Kernel, shards: Callable[[int, int], int]) -> Kernel:
    def run(x: jax.Array, axis: Axes, **options: Any) -> Any:
        n = c.axis_size(axis)
        return kernel(x, (shards(len(x), n),) * n, axis, **options)

    return run


def _ragged(x: jax.Array, axis: Axes, *, split_dim: int, concat_dim: int) -> Any:
    n = c.axis_size(axis)
    each = len(x) // n
    counts: Any = np.full((n, n), each)  # known at trace time, and checked there
    return c.ragged_all_to_all(x, counts, axis, rows=len(x), limit=each)


def _summed(dtype: str, largest: float, sizes: Sequence[int]) -> float:
    return quantization_error(largest, dtype, n=math.prod(sizes))


def _twice(dtype: str, largest: float, sizes: Sequence[int]) -> float:
    first = _summed(dtype, largest, sizes)
    return first + quantization_error(math.prod(sizes) * largest + first, dtype)


def _gathered(dtype: str, largest: float, sizes: Sequence[int]) -> float:
    return quantization_error(largest, dtype)


def _outside(dtype: str, largest: float, sizes: Sequence[int]) -> float:
    return quantization_error(sizes[-1] * largest, dtype, n=math.prod(sizes[:-1]))


def _result(kernel: Kernel) -> Kernel:
    """Without the new residual."""
    return lambda x, axis, **options: kernel(x, axis, **options)[0]


def _small(kernel: Kernel, redops: tuple[str, ...] | None, bound: Callable[..., float], dtype: str = "int8") -> Way:
    return Way(partial(kernel, dtype=jnp.dtype(dtype)), redops, 1, partial(bound, dtype), True)


def _compressed(kernel: Kernel, redops: tuple[str, ...] | None, bound: Callable[..., float]) -> dict[str, Way]:
    """In int8, and in each other dtype by name."""
    others = {f"compressed_{name}": _small(kernel, redops, bound, name) for name in FORMATS if name != "int8"}
    return {"compressed": _small(kernel, redops, bound), **others}


_ALL_REDUCE = {
    "lax": Way(c.all_reduce),
    "ring": Way(ring.all_reduce, _SUMS),
    "bidirectional": Way(partial(ring.all_reduce, bidirectional=True), _SUMS, hops=lambda n: 2 * (n // 2)),
    "hierarchical": Way(_two_level(hierarchical.all_reduce), _SUMS, 2),
    "two_step": Way(partial(c.all_reduce_tree, scatter_from=0), _SUMS),
    "deterministic": Way(
        lambda x, axis, **options: c.all_reduce(x[None], axis, deterministic=True, **options), _SUMS, floating=True
    ),
    "leaves": Way(_of_leaves(c.all_reduce)),
    "bucketed": Way(_of_leaves(c.all_reduce_tree), _SUMS),
    **_compressed(_result(compressed.all_reduce), ("sum",), _summed),
    "compressed_twice": _small(partial(_result(compressed.all_reduce), compress_result=True), ("sum",), _twice),
}
_ALL_GATHER = {
    "lax": Way(c.all_gather),
    "ring": Way(ring.all_gather),
    "bidirectional": Way(partial(ring.all_gather, bidirectional=True), hops=lambda n: n // 2),
    "hierarchical": Way(_two_level(hierarchical.all_gather), None, 2),
    "uneven": Way(_uneven(c.all_gather_uneven, lambda rows, n: rows)),
    **_compressed(compressed.all_gather, None, _gathered),
}
_REDUCE_SCATTER = {
    "lax": Way(c.reduce_scatter),
    "ring": Way(ring.reduce_scatter),
    "bidirectional": Way(partial(ring.reduce_scatter, bidirectional=True), hops=lambda n: n // 2),
    "hierarchical": Way(_two_level(hierarchical.reduce_scatter), None, 2),
    "uneven": Way(_uneven(c.reduce_scatter_uneven, lambda rows, n: rows // n)),
    **_compressed(_result(compressed.reduce_scatter), ("sum",), _summed),
    "compressed_hierarchical": _small(
        _result(_two_level(compressed.reduce_scatter_two_level)), ("sum",), _outside
    )._replace(levels=2),
}


_ALL_TO_ALL = {"lax": Way(c.all_to_all), "ragged": Way(_ragged)}
_HALO = Way(c.halo_exchange, hops=lambda n: int(n > 1))  # both sides at the same time
OPERATIONS: Mapping[str, Operation] = MappingProxyType(
    {
        each.name: each
        for each in (
            Operation("all_reduce", _ALL_REDUCE, reference.all_reduce, ("sum", "mean", "max", "min"), "all_reduce"),
            Operation("all_gather", _ALL_GATHER, reference.all_gather, (), "all_gather", True, True),
            Operation("reduce_scatter", _REDUCE_SCATTER, reference.reduce_scatter, _SUMS, "reduce_scatter", True),
            Operation("all_to_all", _ALL_TO_ALL, reference.all_to_all, (), "all_to_all", True)._replace(
                options=lambda n, count: {"split_dim": 0, "concat_dim": 0}
            ),
            Operation("broadcast", {"lax": Way(c.broadcast)}, reference.broadcast, (), "broadcast"),
            Operation("shift", {"lax": Way(c.shift)}, reference.shift, (), "sendrecv"),
            Operation(
                "gather_to_one", {"lax": Way(c.gather_to_one)}, reference.gather_to_one, (), "gather", True, True
            ),
            Operation("prefix_scan", {"lax": Way(c.prefix_scan)}, reference.prefix_scan, ("sum", "max", "min")),
            Operation("halo_exchange", {"lax": _HALO}, reference.halo_exchange)._replace(
                options=lambda n, count: dict.fromkeys(("before", "after"), max(1, count // 8))
            ),
        )
    }
)


def values(dtype: str, devices: int, n: int, count: int) -> np.ndarray:
    """Whole numbers whose sums over n devices are exact in the dtype, in any order: [devices, count], always the same.

    Where n ones are too many, each element is zero on all but as many devices as the dtype can count.
    """
    limit = exact(dtype)
    largest = max(1, min(_LARGEST, limit // n))
    lowest = 0 if dtype.startswith("u") else -largest
    x = np.random.default_rng(0).integers(lowest, largest + 1, (devices, count), np.int16)
    if n > limit:
        x[(np.arange(devices)[:, None] + np.arange(count)[None, :]) % n >= limit] = 0
    return x.astype(jnp.dtype(dtype))


def exact(dtype: str) -> int:
    """The largest n for which all whole numbers up to n are exact; the largest of all stays for `poison`."""
    kind = jnp.dtype(dtype)
    return int(jnp.iinfo(kind).max) - 1 if jnp.issubdtype(kind, jnp.integer) else 2 ** (int(jnp.finfo(kind).nmant) + 1)


def poison(dtype: str) -> Any:
    """What no right result holds: NaN, or the largest whole number of a dtype without one."""
    kind = jnp.dtype(dtype)
    return kind.type(jnp.iinfo(kind).max if jnp.issubdtype(kind, jnp.integer) else np.nan)


def bound(way: Way, dtype: str, redop: str, x: np.ndarray, sizes: Sequence[int]) -> float:
    """How far a result may be from the reference: 0, the rounding of a mean, or of what is sent in a small dtype."""
    n, largest = math.prod(sizes), float(np.abs(x.astype(np.float64)).max(initial=0))
    error = way.bound(largest, sizes) if way.bound else 0.0
    if not error and (redop != "mean" or n & (n - 1) == 0):
        return 0.0
    most = (largest if redop == "mean" else n * largest) + error
    return error + (float(jnp.finfo(dtype).eps) * most if jnp.issubdtype(jnp.dtype(dtype), jnp.floating) else 0.0)
