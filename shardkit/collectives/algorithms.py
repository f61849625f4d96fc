"""The collective algorithms with which a strategy gathers weights and reduces gradients.

Each function here returns an Algorithm for the arguments `gather=` and `reduce=` of `dp`, `zero1`, `zero2` and `fsdp`.
Write your own as `Algorithm(name, all_reduce=..., ...)`, with functions that have the signatures of those in `basic`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache, partial
from typing import Any, NamedTuple, cast, get_args

import jax.numpy as jnp

from shardkit._arguments.checks import Axis, at_least, axis_names, named, one_of, quoted
from shardkit._arguments.typed import DType, typed
from shardkit.collectives import basic, bucketed
from shardkit.collectives import compressed as quantized
from shardkit.collectives import hierarchical as two_level
from shardkit.collectives import ring as rings
from shardkit.collectives.axes import axis_size
from shardkit.collectives.tables.table import Op, SendTable
from shardkit.cost.collectives import wire
from shardkit.cost.quantization import FORMATS, quantized_bytes

_KERNELS = ("all_gather", "reduce_scatter", "all_reduce")
__all__ = ["PLAIN", "Algorithm", "bucket", "compressed", "hierarchical", "ring", "table"]

Ways = Mapping[str, int]
Sent = dict[tuple[str, ...], Fraction]


class Algorithm(NamedTuple):
    """A collective algorithm that strategies use instead of `all_gather`, `reduce_scatter` and `all_reduce`.

    A function may be None where no strategy needs it: `gather=` needs `all_gather`, `reduce=` needs `reduce_scatter` in
    zero1, zero2 and fsdp, and `all_reduce` in dp. Leaves that zero1, zero2 and fsdp leave whole are summed by its
    `all_reduce`, or by the plain one if it has none.

    Attributes:
        name: as descriptions of a plan print it.
        all_gather: `(x, axes, *, dim, replicated) -> whole`; with `replicated=True` invariant over the axes.
        reduce_scatter: `(x, axes, *, dim) -> part`.
        all_reduce: `(leaves, axes) -> sums`, invariant over the axes, of a list of arrays at once.
        fits: refuses axes over which it cannot run, in one sentence: `(where, axes) -> None`.
        cost: what one device sends: `(kernel, elements, itemsize, ways) -> {axes: bytes}`, for the kernel's name, the
            elements of each operand on one device, their bytes each, and the sizes of the axes by name.
        feedback: whether its reductions, of float32, return `(sums, left)`: `left`, like the operands, is what this
            device has left out of the sums. The state keeps it, and the next step adds it to the gradient.
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
            has = [name for name in _KERNELS if getattr(self, name)]
            raise ValueError(
                f"{where}: {argument}= must be an Algorithm with {kernel}; got {self}, which has {quoted(has)}. Pass "
                "for example sk.algorithms.ring()."
            )
        if self.fits:
            self.fits(where, axes)


def _plain_cost(kernel: str, elements: Sequence[int], itemsize: int, ways: Ways) -> Sent:
    return {tuple(ways): wire(kernel, sum(elements) * itemsize, math.prod(ways.values())).sent}


PLAIN = Algorithm("plain", basic.all_gather, basic.reduce_scatter, basic.all_reduce, cost=_plain_cost)
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
    kernels = (partial(getattr(rings, name), bidirectional=bidirectional) for name in _KERNELS)
    gather, scatter, reduce = kernels
    name = f"ring({'bidirectional=True' * bidirectional})"
    return Algorithm(name, gather, scatter, partial(reduce, replicated=True), cost=_padded_cost)


@typed
def hierarchical(inner: Axis) -> Algorithm:
    """In two levels, of which the one over slow links sends few bytes; see `sk.hierarchical`.

    Args:
        inner: the axis (or axes) of the fast links; the strategy's other axes are those of the slow ones, and must come
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
    fast = axis_names("hierarchical", inner)
    name = f"hierarchical({quoted(fast)})"

    def kernel(kind: str) -> Callable[..., Any]:
        def run(x: Any, axes: tuple[str, ...], **options: Any) -> Any:
            here, slow = _levels(axes, fast)
            if not here or not slow:
                return getattr(basic, kind)(x, axes, **options)
            return getattr(two_level, kind)(x, here, slow, **options)

        return run

    gather, scatter, reduce = map(kernel, _KERNELS)

    def cost(kernel: str, elements: Sequence[int], itemsize: int, ways: Ways) -> Sent:
        inside, outside = ({axis: ways[axis] for axis in axes} for axes in _levels(tuple(ways), fast))
        if not inside or not outside:
            return _plain_cost(kernel, elements, itemsize, ways)
        n = math.prod(inside.values())
        if kernel == "all_gather":
            slow = _plain_cost(kernel, elements, itemsize, outside)
            return slow | _plain_cost(kernel, [e * math.prod(outside.values()) for e in elements], itemsize, inside)
        padded = [-(-e // n) * n for e in elements] if kernel == "all_reduce" else elements
        slow = _plain_cost(kernel, [e // n for e in padded], itemsize, outside)
        return _plain_cost(kernel, padded, itemsize, inside) | slow

    return Algorithm(name, gather, scatter, reduce, partial(_ends_in, name, fast), cost)


@typed
def table(build: Callable[[Op, int], SendTable], *, name: str = "own") -> Algorithm:
    """By tables: which device sends what to which; see `sk.tables`.

    Args:
        build: `build(op, devices) -> SendTable` for each of "all_gather", "reduce_scatter" and "all_reduce" that the
            strategy uses, as the functions of `sk.tables` are.
        name: as descriptions of a plan print it.

    Returns:
        An Algorithm for any axis of which `build` makes tables.

    Raises:
        ValueError: where a step is traced, from `build`, or a table that is wrong or for something else.

    Cost: the `traffic` of its tables, each array padded to a multiple of its chunks.

    Example:
        >>> plan = sk.fsdp("data", gather=sk.algorithms.table(sk.tables.bruck, name="bruck"))
        >>> print(plan.strategies[0].gather)
        table(bruck)
    """
    made = cache(build)

    def kernel(kind: Op) -> Callable[..., Any]:
        def run(x: Any, axes: tuple[str, ...], **options: Any) -> Any:
            found = made(kind, axis_size(axes))
            if not isinstance(found, SendTable):
                raise TypeError(
                    f"table: build must return a SendTable; got {found!r} for {kind!r} over {axis_size(axes)} devices. "
                    "Return for example sk.tables.bruck(op, devices)."
                )
            return getattr(basic, kind)(x, axes, table=found, **options)

        return run

    def cost(kernel: str, elements: Sequence[int], itemsize: int, ways: Ways) -> Sent:
        n = math.prod(ways.values())
        of = made(cast(Op, kernel), n)
        shards, each = (1, of.chunks) if kernel == "all_reduce" else (n, of.chunks // n)
        own = [e if kernel == "all_gather" else e // shards for e in elements]
        padded = sum(-(-e // each) * each for e in own) * (1 if kernel == "all_gather" else shards)
        return {tuple(ways): of.traffic(padded * itemsize).sent}

    gather, scatter, reduce = map(kernel, get_args(Op))
    return Algorithm(f"table({name})", gather, scatter, reduce, cost=cost)


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

    def cost(kernel: str, elements: Sequence[int], itemsize: int, ways: Ways) -> Sent:
        n = math.prod(ways.values())
        buckets = [sum(each) for each in bucketed.filled([e * itemsize for e in elements], bucket_bytes)]
        padded = [-(-b // (n * itemsize)) * n * itemsize if b >= scatter_from else b for b in buckets]
        return _plain_cost(kernel, padded, 1, ways)

    return Algorithm(f"bucket({bucket_bytes:,} bytes)", all_reduce=reduce, cost=cost)


@typed
def compressed(
    dtype: DType,
    *,
    block: int = 256,
    compress_result: bool = False,
    feedback: bool = False,
    inner: Axis | None = None,
    inner_dtype: DType | None = None,
) -> Algorithm:
    """Weights or gradients sent in a small dtype, block by block; see `sk.compressed`.

    Args:
        dtype: jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8 or jnp.int4.
        block: elements that share a scale, 1 or more.
        compress_result: in an all_reduce, gather the sums in `dtype` too.
        feedback: keep what the sums leave out in the residuals of the TrainState, and add it to the gradients of the
            next step, so that over many steps nothing is left out. For gradients that are reduced once per step, in
            float32: those of dp, and of zero1 and fsdp without `layerwise`. A skipped step keeps the old residuals;
            under nonfinite="keep" one that is not finite stays.
        inner: the axis (or axes) of the fast links, for a reduce_scatter in two levels as in ZeRO++; the strategy's
            other axes, over which the sums are compressed, must come before it.
        inner_dtype: the dtype inside; None: float32. It needs `inner`.

    Returns:
        An Algorithm; with feedback for `reduce=` only. Weights that are not floating-point are refused where the step
            is traced.

    Raises:
        ValueError: another dtype, an empty block, or `inner_dtype` without `inner`; from the strategy, axes that do not
            end in `inner`.

    Cost: for messages of Q = `cost.quantized_bytes` of what is sent to one device, Q (n-1); an all_reduce sends its
        sums too. Feedback sends nothing more, and each device holds a residual in float32 of every gradient, as it is
        before the reduction: whole under dp and zero1.

    Example:
        >>> small = sk.algorithms.compressed(jnp.int8)
        >>> plan = sk.fsdp("data", gather=small, reduce=sk.algorithms.compressed(jnp.int4))
        >>> print(plan.strategies[0].gather, plan.strategies[0].reduce)
        compressed(int8) compressed(int4)

    Source: Wang et al., ZeRO++ (arXiv:2306.10209), sections 3.1 and 3.3; for feedback Seide et al., 1-Bit Stochastic
    Gradient Descent (2014), and Karimireddy et al., Error Feedback Fixes SignSGD (2019).
    """
    name, inside = jnp.dtype(dtype).name, None if inner_dtype is None else jnp.dtype(inner_dtype).name
    one_of("compressed", "dtype", name, tuple(FORMATS))
    if inside is not None:
        one_of("compressed", "inner_dtype", inside, tuple(FORMATS))
        if inner is None:
            raise ValueError(
                f"compressed: inner_dtype={inside} needs an inner axis, over which it is sent; got inner=None. "
                "Pass inner=, the axis of the fast links, or leave out inner_dtype."
            )
    at_least("compressed", 1, block=block)
    fast = () if inner is None else axis_names("compressed", inner)
    options: dict[str, Any] = {"dtype": dtype, "block": block}
    text = f"compressed({name}{f', inner={quoted(fast)}' if fast else ''}{f' in {inside}' if inside else ''})"
    text += " with feedback" * feedback

    def reduce_scatter(x: Any, axes: tuple[str, ...], *, dim: int) -> Any:
        (here, slow), zero = _levels(axes, fast), quantized.init_residual(x) if feedback else None
        if not here or not slow:
            out = quantized.reduce_scatter(x, axes, zero, dim=dim, **options)
        else:
            levels: dict[str, Any] = {"inner": here, "outer": slow, "inner_dtype": inner_dtype}
            out = quantized.reduce_scatter_two_level(x, residual=zero, dim=dim, **levels, **options)
        return out if feedback else out[0]

    def all_reduce(leaves: Any, axes: tuple[str, ...]) -> Any:
        zero = quantized.init_residual(leaves) if feedback else None
        out = quantized.all_reduce(leaves, axes, zero, compress_result=compress_result, **options)
        return out if feedback else out[0]

    def message(elements: int, dtype: str | None = name) -> int:
        return 4 * elements if dtype is None else quantized_bytes(elements, dtype, block=block)

    def cost(kernel: str, elements: Sequence[int], itemsize: int, ways: Ways) -> Sent:
        n = math.prod(ways.values())
        if kernel == "all_gather":
            return {tuple(ways): Fraction((n - 1) * sum(message(e) for e in elements))}
        if kernel == "all_reduce":
            parts = [-(-e // n) for e in elements]
            sums = [message(e) if compress_result else e * itemsize for e in parts]
            return {tuple(ways): Fraction((n - 1) * (sum(message(e) for e in parts) + sum(sums)))}
        here, slow = _levels(tuple(ways), fast)
        if not here or not slow:
            return {tuple(ways): Fraction((n - 1) * sum(message(e // n) for e in elements))}
        i, o = (math.prod(ways[axis] for axis in axes) for axes in (here, slow))
        return {
            here: Fraction((i - 1) * sum(message(e // i, inside) for e in elements)),
            slow: Fraction((o - 1) * sum(message(e // n) for e in elements)),
        }

    gather = None if feedback else partial(quantized.all_gather, **options)
    fits = partial(_ends_in, text, fast) if fast else None
    return Algorithm(text, gather, reduce_scatter, all_reduce, fits, cost, feedback)


def _levels(axes: tuple[str, ...], fast: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes of fast links, and the others; an axis of one device may be missing."""
    return tuple(axis for axis in axes if axis in fast), tuple(axis for axis in axes if axis not in fast)


def _ends_in(name: str, fast: tuple[str, ...], where: str, axes: tuple[str, ...]) -> None:
    if axes[-len(fast) :] != fast or len(axes) == len(fast):
        raise ValueError(
            f"{where}: {name} needs the axes of slow links, then {named(fast)}; got {quoted(axes)}. Pass for example "
            f"axis=('node', {quoted(fast)})."
        )


def _padded_cost(kernel: str, elements: Sequence[int], itemsize: int, ways: Ways) -> Sent:
    """The bytes of plain collectives, of an all_reduce padded to a multiple of the devices."""
    n = math.prod(ways.values())
    return _plain_cost(kernel, [-(-e // n) * n if kernel == "all_reduce" else e for e in elements], itemsize, ways)
