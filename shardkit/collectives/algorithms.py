"""The collective algorithms with which a strategy gathers weights and reduces gradients.

Each function here returns an Algorithm for the arguments `gather=` and `reduce=` of `dp`, `zero1`, `zero2` and `fsdp`.
Write your own as `Algorithm(name, all_reduce=..., ...)`, with functions that have the signatures of those in `basic`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import cache, partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from shardkit._arguments.checks import Axis, at_least, axis_names, name_axes, quote
from shardkit._arguments.typed import typed
from shardkit.collectives import basic, bucketed
from shardkit.collectives import compressed as quantized
from shardkit.collectives import hierarchical as two_level
from shardkit.collectives import ring as rings
from shardkit.collectives.axes import axis_size
from shardkit.collectives.quantization import WireDType, check_dtype
from shardkit.collectives.tables.table import Op, SendTable
from shardkit.cost.collectives import wire
from shardkit.cost.quantization import choose_block, quantized_bytes

_KERNELS = ("all_gather", "reduce_scatter", "all_reduce")
__all__ = ["Algorithm", "bucket", "compressed", "hierarchical", "ring", "table"]

Ways = Mapping[str, int]
Sent = dict[tuple[str, ...], Fraction]


class Algorithm(NamedTuple):
    """A collective algorithm that strategies use instead of `all_gather`, `reduce_scatter` and `all_reduce`.

    A function may be None if your strategy does not need it: `gather=` needs `all_gather`; `reduce=` needs
    `reduce_scatter` in zero1, zero2 and fsdp, and `all_reduce` in dp. Its `all_reduce` sums the leaves that zero1,
    zero2 and fsdp leave whole; if it has none, the plain all_reduce does.

    Attributes:
        name: its name in descriptions of a plan.
        all_gather: `(x, axes, *, dim, replicated) -> whole`; with `replicated=True` invariant over the axes.
        reduce_scatter: `(x, axes, *, dim) -> part`.
        all_reduce: `(leaves, axes) -> sums`, invariant over the axes, of a list of arrays at once.
        fits: `(where, axes) -> None`; it raises an error for axes over which the algorithm cannot run.
        cost: the bytes that one device sends: `(kernel, elements, itemsize, ways) -> {axes: bytes}`, for the kernel's
            name, the elements of each operand on one device, their bytes each, and the sizes of the axes by name.
        feedback: whether its reductions, of float32, return `(sums, left)`. `left` has the form of the operands, and is
            the part that this device has left out of the sums. The state keeps it, and the next step adds it to the
            gradient.
    """

    name: str
    all_gather: Callable[..., Any] | None = None
    reduce_scatter: Callable[..., Any] | None = None
    all_reduce: Callable[..., Any] | None = None
    fits: Callable[[str, tuple[str, ...]], None] | None = None
    cost: Callable[[str, Sequence[int], int, Ways], Sent] | None = None
    feedback: bool = False

    def __str__(self) -> str:
        return self.name

    def check(self, where: str, argument: str, kernel: str, axes: tuple[str, ...]) -> None:
        """Refuses it for a strategy that uses this kernel over these axes."""
        if getattr(self, kernel) is None:
            kernels = [name for name in _KERNELS if getattr(self, name) is not None]
            raise ValueError(
                f"{where}: {argument}= must be an Algorithm with {kernel}; got {self}, which has {quote(kernels)}. "
                "Pass for example sk.algorithms.ring()."
            )
        if self.fits is not None:
            self.fits(where, axes)


def _count_plain_bytes(kernel: str, elements: Sequence[int], itemsize: int, ways: Ways) -> Sent:
    traffic = wire(kernel, sum(elements) * itemsize, math.prod(ways.values()))
    return {tuple(ways): traffic.sent}


def _count_padded_bytes(kernel: str, elements: Sequence[int], itemsize: int, ways: Ways) -> Sent:
    """The bytes of a ring: of plain collectives, with each array of an all_reduce padded to a multiple of n."""
    if kernel == "all_reduce":
        elements = _pad_sizes(elements, math.prod(ways.values()))
    return _count_plain_bytes(kernel, elements, itemsize, ways)


def _pad_sizes(sizes: Sequence[int], multiple: int) -> list[int]:
    return [_round_up(size, multiple) for size in sizes]


def _divide_sizes(sizes: Sequence[int], parts: int) -> list[int]:
    return [size // parts for size in sizes]


def _round_up(size: int, multiple: int) -> int:
    return size + -size % multiple


def _count_devices(ways: Ways, axes: Iterable[str]) -> int:
    return math.prod(ways[axis] for axis in axes)


# An Algorithm is called at the seam, inside the step's shard_map: all_gather gathers leaves, the others reduce their
# gradients. The types must come out as those of the plain collectives, so that the seam sums nothing twice: a gather
# that is asked for a replicated result, and every all_reduce, returns an invariant array.
#
# A plan gathers only arrays along dims that it has split and checked, so PLAIN calls `gather_array`, which checks no
# arguments.
PLAIN = Algorithm("plain", basic.gather_array, basic.reduce_scatter, basic.all_reduce, cost=_count_plain_bytes)
"""The collectives of jax: what a strategy uses where none is named."""


@typed
def ring(*, bidirectional: bool = False) -> Algorithm:
    """Every message goes to a neighbor; see `sk.ring`.

    Args:
        bidirectional: send both ways at once.

    Returns:
        An Algorithm for any axis.

    Cost: the bytes of the plain collectives, in n-1 hops each.

    Example:
        >>> plan = sk.dp("data", reduce=sk.algorithms.ring())
        >>> print(plan.strategies[0].reduce)
        ring()
    """
    name = "ring()"
    if bidirectional:
        name = "ring(bidirectional=True)"
    return Algorithm(
        name,
        all_gather=partial(rings.all_gather, bidirectional=bidirectional),
        reduce_scatter=partial(rings.reduce_scatter, bidirectional=bidirectional),
        all_reduce=partial(rings.all_reduce, bidirectional=bidirectional, replicated=True),
        cost=_count_padded_bytes,
    )


@typed
def hierarchical(inner: Axis) -> Algorithm:
    """Two levels: few bytes go over the slow links; see `sk.hierarchical`.

    Args:
        inner: the axis (or axes) of the fast links. The strategy's other axes belong to the slow links, and must come
            before it.

    Returns:
        An Algorithm for strategies over several axes, such as `dp(("node", "gpu"))`.

    Raises:
        ValueError: from the strategy, if its axes do not end in `inner`, or are no more than `inner`.

    Cost: for B bytes, I devices inside and O outside, an all_reduce sends 2 B (I-1)/I bytes inside and 2 (B/I) (O-1)/O
        outside, a gather or scatter half of each.

    Example:
        >>> plan = sk.dp(("data", "model"), reduce=sk.algorithms.hierarchical("model"))
        >>> print(plan.strategies[0].reduce)
        hierarchical('model')
    """
    fast_axes = axis_names("hierarchical", inner)
    name = f"hierarchical({quote(fast_axes)})"

    def make_kernel(kind: str) -> Callable[..., Any]:
        one_level_kernel = getattr(basic, kind)
        two_level_kernel = getattr(two_level, kind)

        def run(x: Any, axes: tuple[str, ...], **options: Any) -> Any:
            fast, slow = _separate_levels(axes, fast_axes)
            if not fast or not slow:  # the mesh has one device along all axes of a level
                return one_level_kernel(x, axes, **options)
            return two_level_kernel(x, fast, slow, **options)

        return run

    return Algorithm(
        name,
        all_gather=make_kernel("all_gather"),
        reduce_scatter=make_kernel("reduce_scatter"),
        all_reduce=make_kernel("all_reduce"),
        fits=partial(_check_ends_in, name, fast_axes),
        cost=partial(_count_two_level_bytes, fast_axes),
    )


def _count_two_level_bytes(
    fast_axes: tuple[str, ...],
    kernel: str,
    elements: Sequence[int],
    itemsize: int,
    ways: Ways,
) -> Sent:
    """The bytes of a collective in two levels: over the slow axes, and over the fast axes.

    Worked example: 800 float32 elements on each device, on 2 machines ("node") of 4 devices ("gpu").

        reduce_scatter   "gpu"    800 elements, 3/4 of 3200 bytes = 2400
                         "node"   of each device's 200 sums, 1/2 of 800 bytes = 400
        all_gather       "node"   a shard of 800 elements goes to 1 other machine: 3200 bytes
                         "gpu"    the shards of both machines go to 3 other devices: 3 * 6400 = 19200 bytes
    """
    fast, slow = _separate_levels(tuple(ways), fast_axes)
    if not fast or not slow:
        return _count_plain_bytes(kernel, elements, itemsize, ways)
    fast_ways = {axis: ways[axis] for axis in fast}
    slow_ways = {axis: ways[axis] for axis in slow}
    if kernel == "all_gather":  # over the slow links first; then the fast links carry the shards of all machines
        machines = _count_devices(ways, slow)
        columns = [size * machines for size in elements]
        slow_bytes = _count_plain_bytes(kernel, elements, itemsize, slow_ways)
        return slow_bytes | _count_plain_bytes(kernel, columns, itemsize, fast_ways)
    devices = _count_devices(ways, fast)  # of one machine
    if kernel == "all_reduce":
        elements = _pad_sizes(elements, devices)
    shards = _divide_sizes(elements, devices)
    fast_bytes = _count_plain_bytes(kernel, elements, itemsize, fast_ways)
    return fast_bytes | _count_plain_bytes(kernel, shards, itemsize, slow_ways)


@typed
def table(build: Callable[[Op, int], SendTable], *, name: str = "own") -> Algorithm:
    """Tables of messages; see `sk.tables`.

    Args:
        build: `build(op, devices) -> SendTable` for each of "all_gather", "reduce_scatter" and "all_reduce" that the
            strategy uses, as the functions of `sk.tables` are.
        name: its name in descriptions of a plan.

    Returns:
        An Algorithm for any axis for which `build` makes tables.

    Raises:
        ValueError: at trace time: errors of `build`, or a table that is wrong or for something else.

    Cost: the `traffic` of its tables, each array padded to a multiple of its chunks.

    Example:
        >>> plan = sk.fsdp("data", gather=sk.algorithms.table(sk.tables.bruck, name="bruck"))
        >>> print(plan.strategies[0].gather)
        table(bruck)
    """
    # A step calls it for each leaf.
    build_once = cache(build)

    def make_kernel(kind: Op) -> Callable[..., Any]:
        kernel = getattr(basic, kind)

        def run(x: Any, axes: tuple[str, ...], **options: Any) -> Any:
            send_table = build_once(kind, axis_size(axes))
            if not isinstance(send_table, SendTable):
                raise TypeError(
                    f"table: build must return a SendTable; got {send_table!r} for {kind!r} over {axis_size(axes)} "
                    "devices. Return for example sk.tables.bruck(op, devices)."
                )
            return kernel(x, axes, table=send_table, **options)

        return run

    def count_bytes(kernel: str, elements: Sequence[int], itemsize: int, ways: Ways) -> Sent:
        n = math.prod(ways.values())
        send_table = build_once(cast(Op, kernel), n)
        # The table's chunks are pieces of a shard, or of the array for an all_reduce; each shard is padded to them.
        if kernel == "all_reduce":
            operand = _pad_sizes(elements, send_table.chunks)
        elif kernel == "all_gather":  # its operand is a shard already
            operand = _pad_sizes(elements, send_table.chunks // n)
        else:
            shards = _divide_sizes(elements, n)
            operand = [n * size for size in _pad_sizes(shards, send_table.chunks // n)]
        traffic = send_table.traffic(sum(operand) * itemsize)
        return {tuple(ways): traffic.sent}

    return Algorithm(
        f"table({name})",
        all_gather=make_kernel("all_gather"),
        reduce_scatter=make_kernel("reduce_scatter"),
        all_reduce=make_kernel("all_reduce"),
        cost=count_bytes,
    )


@typed
def bucket(*, bucket_bytes: int = 32 * 2**20, scatter_from: float = 8 * 2**20) -> Algorithm:
    """Many small gradients in few messages; see `sk.collectives.all_reduce_tree`.

    Args:
        bucket_bytes: largest bucket in bytes per device, 1 or more.
        scatter_from: bytes per device from which a bucket is scattered and gathered; 0 for always.

    Returns:
        An Algorithm for `dp`.

    Raises:
        ValueError: too few bytes.

    Cost: the bytes of an all_reduce, padded to a multiple of n elements per bucket, in one collective per bucket.

    Example:
        >>> plan = sk.dp("data", reduce=sk.algorithms.bucket(bucket_bytes=2**20))
        >>> print(plan.strategies[0].reduce)
        bucket(1,048,576 bytes)
    """
    at_least("bucket", 1, bucket_bytes=bucket_bytes)
    at_least("bucket", 0, scatter_from=scatter_from)
    reduce = partial(bucketed.all_reduce_tree, bucket_bytes=bucket_bytes, scatter_from=scatter_from)

    def count_bytes(kernel: str, elements: Sequence[int], itemsize: int, ways: Ways) -> Sent:
        # The buckets are filled as all_reduce_tree fills them. A large one is scattered, and padded for that.
        n = math.prod(ways.values())
        leaf_bytes = [size * itemsize for size in elements]
        sent_bytes = []
        for sizes in bucketed.fill_buckets(leaf_bytes, bucket_bytes):
            total = sum(sizes)
            if total >= scatter_from:
                total = _round_up(total, n * itemsize)
            sent_bytes.append(total)
        return _count_plain_bytes(kernel, sent_bytes, 1, ways)

    return Algorithm(f"bucket({bucket_bytes:,} bytes)", all_reduce=reduce, cost=count_bytes)


@typed
def compressed(
    dtype: WireDType,
    *,
    block: int | None = None,
    compress_result: bool = False,
    feedback: bool = False,
    inner: Axis | None = None,
    inner_dtype: WireDType | None = None,
) -> Algorithm:
    """Weights or gradients sent in a small dtype, block by block; see `sk.compressed`. All are rounded to nearest.

    Args:
        dtype: jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8, jnp.int4, "mxfp8", "mxfp4" or "nvfp4".
        block: elements that share a scale, 1 or more; by default 256. "mxfp8" and "mxfp4" have 32, "nvfp4" has 16, and
            no other.
        compress_result: in an all_reduce, gather the sums in `dtype` too.
        feedback: keep what the sums leave out in the residuals of the TrainState, and add it to the gradients
            of the next step. So over many steps nothing is left out. Use it for gradients that are reduced once per
            step, in float32: in dp, and in zero1 and fsdp without `layerwise`. A skipped step keeps the old residuals;
            under nonfinite="keep" a residual that is not finite stays.
        inner: the axis (or axes) of the fast links, for a reduce_scatter in two levels as in ZeRO++. It compresses sums
            over the strategy's other axes; they must come before it.
        inner_dtype: the dtype inside; None: float32. It needs `inner`.

    Returns:
        An Algorithm; with feedback for `reduce=` only. A step raises an error at trace time for weights that are not
            floating-point.

    Raises:
        ValueError: another dtype, an empty block or one of another size than the format's, or `inner_dtype` without
            `inner`; from the strategy, axes that do not end in `inner`.

    Cost: for messages of Q = `cost.quantized_bytes` of what is sent to one device, Q (n-1); an all_reduce sends its
        sums too. Feedback sends nothing more, and each device holds a float32 residual for every gradient before its
        reduction: whole under dp and zero1.

    Example:
        >>> small = sk.algorithms.compressed(jnp.int8)
        >>> plan = sk.fsdp("data", gather=small, reduce=sk.algorithms.compressed(jnp.int4))
        >>> print(plan.strategies[0].gather, plan.strategies[0].reduce)
        compressed(int8) compressed(int4)

    Source: Wang et al., ZeRO++ (arXiv:2306.10209), sections 3.1 and 3.3; for feedback Seide et al., 1-Bit Stochastic
    Gradient Descent (2014), and Karimireddy et al., Error Feedback Fixes SignSGD (2019).
    """
    dtype_name = check_dtype("compressed", "dtype", dtype)
    inner_name = None
    if inner_dtype is not None:
        inner_name = check_dtype("compressed", "inner_dtype", inner_dtype)
        if inner is None:
            raise ValueError(
                f"compressed: inner_dtype={inner_name} needs an inner axis, over which it is sent; got inner=None. "
                "Pass inner=, the axis of the fast links, or leave out inner_dtype."
            )
    choose_block("compressed", dtype_name, block)
    if inner_name is not None:
        choose_block("compressed", inner_name, block)
    fast_axes: tuple[str, ...] = ()
    if inner is not None:
        fast_axes = axis_names("compressed", inner)
    name = _describe_compression(dtype_name, fast_axes, inner_name, feedback)
    options: dict[str, Any] = {"dtype": dtype, "block": block}

    def make_residual(x: Any) -> Any:
        # A step adds the residual of the last one to the gradient before it gets here, in float32.
        if not feedback:
            return None
        return jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.float32), x)

    def keep_residual(results: tuple[Any, Any]) -> Any:
        """The sums and the new residual; without feedback the sums alone."""
        if feedback:
            return results
        sums, _ = results
        return sums

    def reduce_scatter(x: Any, axes: tuple[str, ...], *, dim: int) -> Any:
        fast, slow = _separate_levels(axes, fast_axes)
        residual = make_residual(x)
        if not fast or not slow:
            results = quantized.reduce_scatter(x, axes, residual, dim=dim, **options)
        else:
            results = quantized.reduce_scatter_two_level(
                x, fast, slow, residual, dim=dim, inner_dtype=inner_dtype, **options
            )
        return keep_residual(results)

    def all_reduce(leaves: Any, axes: tuple[str, ...]) -> Any:
        residual = make_residual(leaves)
        results = quantized.all_reduce(leaves, axes, residual, compress_result=compress_result, **options)
        return keep_residual(results)

    def count_message_bytes(sizes: Sequence[int], wire_dtype: str | None) -> int:
        """The bytes that go to one device, for arrays of these many elements; without a dtype in float32."""
        if wire_dtype is None:
            return 4 * sum(sizes)
        return sum(quantized_bytes(size, wire_dtype, block=block) for size in sizes)

    def count_bytes(kernel: str, elements: Sequence[int], itemsize: int, ways: Ways) -> Sent:
        n = math.prod(ways.values())
        axes = tuple(ways)
        if kernel == "all_gather":
            return {axes: Fraction((n - 1) * count_message_bytes(elements, dtype_name))}
        if kernel == "all_reduce":
            shards = _divide_sizes(_pad_sizes(elements, n), n)
            addend_bytes = count_message_bytes(shards, dtype_name)
            sum_bytes = sum(shards) * itemsize
            if compress_result:
                sum_bytes = addend_bytes
            return {axes: Fraction((n - 1) * (addend_bytes + sum_bytes))}
        shards = _divide_sizes(elements, n)
        fast, slow = _separate_levels(axes, fast_axes)
        if not fast or not slow:
            return {axes: Fraction((n - 1) * count_message_bytes(shards, dtype_name))}
        # Inside a machine each device sums 1/devices of the elements; over the slow links it sends 1/n of them.
        devices = _count_devices(ways, fast)
        machines = _count_devices(ways, slow)
        inner_shards = _divide_sizes(elements, devices)
        fast_bytes = (devices - 1) * count_message_bytes(inner_shards, inner_name)
        slow_bytes = (machines - 1) * count_message_bytes(shards, dtype_name)
        return {fast: Fraction(fast_bytes), slow: Fraction(slow_bytes)}

    # What a gather leaves out of a weight is no part of a sum, to which the next step could add it.
    all_gather = None
    if not feedback:
        all_gather = partial(quantized.all_gather, **options)
    fits = None
    if fast_axes:
        fits = partial(_check_ends_in, name, fast_axes)
    return Algorithm(
        name,
        all_gather=all_gather,
        reduce_scatter=reduce_scatter,
        all_reduce=all_reduce,
        fits=fits,
        cost=count_bytes,
        feedback=feedback,
    )


def _describe_compression(dtype: str, fast_axes: tuple[str, ...], inner_dtype: str | None, feedback: bool) -> str:
    """`compressed(int4, inner='model' in int8) with feedback`."""
    inner = ""
    if fast_axes:
        inner = f", inner={quote(fast_axes)}"
    if inner_dtype is not None:
        inner += f" in {inner_dtype}"
    description = f"compressed({dtype}{inner})"
    if feedback:
        description += " with feedback"
    return description


def _separate_levels(axes: tuple[str, ...], fast_axes: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes of fast links, and the axes of slow links; an axis of one device may be missing in `axes`."""
    fast = tuple(axis for axis in axes if axis in fast_axes)
    slow = tuple(axis for axis in axes if axis not in fast_axes)
    return fast, slow


def _check_ends_in(name: str, fast_axes: tuple[str, ...], where: str, axes: tuple[str, ...]) -> None:
    """Refuses axes that do not end in the fast ones: shards are numbered with the devices of a machine fastest."""
    if axes[-len(fast_axes) :] != fast_axes or len(axes) == len(fast_axes):
        raise ValueError(
            f"{where}: {name} needs the axes of slow links, then {name_axes(fast_axes)}; got {quote(axes)}. Pass for "
            f"example axis=('node', {quote(fast_axes)})."
        )
