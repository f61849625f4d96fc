"""ZeRO: optimizer state, gradients and parameters split over the devices that split the batch.

| plan | a device holds at rest | gradients | sent per step, in parameter bytes x (n-1)/n |
|---|---|---|---|
| `dp` | all | all | 2 |
| `zero1` | parameters, 1/n of the optimizer state | all | 2 |
| `zero1(layerwise=...)` | parameters, 1/n of the optimizer state | 1/n if k is 1, otherwise all | 2 |
| `zero2` | parameters, 1/n of the optimizer state | 1/n | k + 1 |
| `fsdp` | 1/n of everything | all | 2, gathered once per step |
| `fsdp(layerwise=...)` | 1/n of everything | 1/n | 3k, 2k or 3 |

k is the number of microbatches (`accumulate`): what the loss gathers or reduces is sent in each of them. Layer by
layer, `gathered(keep=True)` sends 2k, and `scan_layers(microbatches=k)`, which runs all microbatches through a layer
before the next, sends 3. With `uneven="pad"` a leaf counts with its padding, in memory and when sent.

The options are the same for all three:

- `layerwise` names subtrees of lazy leaves, such as "layers": `gathered` and `scan_layers` gather (zero1 and zero2:
  scatter the gradients of) one layer at a time, so that no more than a layer is whole at once. Dim 0 of a stack, the
  layer, is not split; in a list of layers dim 0 may be.
- `rules` chooses the dim of each leaf, as a function of path and shape (None: leave the leaf whole), or as a pytree of
  PartitionSpecs that name `axis`, such as `specs_from_rules` returns. Without rules it is a dim that divides and
  over which collectives are fast: the largest, but of three or more dims not the last, and none between the first and
  the last two.
- `gather` and `reduce` are the algorithms of the collectives, such as `sk.algorithms.ring()`. ZeRO++ is
  `fsdp(("node", "gpu"), layerwise=..., gather=compressed(int8), secondary="gpu", reduce=compressed(int4))`.
- `uneven` says what to do with a leaf of which no dim divides: "replicate" leaves it whole, "refuse" raises, and "pad"
  stores and sends it with zeros at the end of the dim that grows least; `unpadded` removes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

from shardkit._arguments.checks import Axis, at_least, axis_names, named, quoted
from shardkit._arguments.typed import typed
from shardkit.collectives.algorithms import PLAIN, Algorithm
from shardkit.plans.dim_rules import DimRules, dim0_counts_layers, dim_chooser, in_subtrees
from shardkit.plans.placement import Gather, Leaf, Scatter, Split
from shardkit.plans.plan import Plan, strategy

MIN_SIZE = 1024
Uneven = Literal["replicate", "refuse", "pad"]


@typed
def zero1(
    axis: Axis,
    *,
    layerwise: tuple[str, ...] = (),
    min_size: int = MIN_SIZE,
    rules: DimRules | None = None,
    uneven: Uneven = "replicate",
    gather: Algorithm = PLAIN,
    reduce: Algorithm = PLAIN,
) -> Plan:
    """ZeRO-1: the optimizer state is split; parameters and gradients are whole on every device.

    Layout: `grads[D, ..] {U_a} -> grads[D_a, ..]`, and after the update `params[D_a, ..] -> params[D, ..]`

    Args:
        axis: mesh axis or tuple of axes, which also split the batch.
        layerwise: subtrees, such as "layers", whose gradients are scattered layer by layer, by `gathered` or
            `scan_layers`, in a step of one microbatch, so that they are never whole.
        min_size: leaves with fewer elements stay whole.
        rules: which dim of a leaf is split: `(path, shape) -> dim` or None, or a pytree of PartitionSpecs.
        uneven: what to do with a leaf of which no dim divides: "replicate", "refuse" or "pad".
        gather: the algorithm that gathers parameters.
        reduce: the algorithm that reduces gradients.

    Returns:
        A plan for `make_train_step`; `chain` joins it with others.

    Raises:
        TypeError: `axis` is not a name or a tuple of names; at trace time a lazy leaf that is used unopened.
        ValueError: an unknown `uneven`; at trace time a leaf that does not divide, with `uneven="refuse"`, a chosen dim
            that cannot be padded, or a name that matches no leaf; an algorithm without the collective, or that cannot
            run over `axis`.

    Cost: a reduce_scatter of every gradient and an all_gather of every updated parameter once per step, 2 (n-1)/n of
        the parameters' bytes, whatever the accumulation. A device holds 1/n of the optimizer state.

    Example:
        >>> layout = sk.zero1("data").layouts({"w": jnp.ones((64, 32))}, mesh)["w"]
        >>> tuple(layout.rest), tuple(layout.update)
        ((), ('data',))

    Source: Rajbhandari et al., ZeRO (SC 2020), section 5.1.
    """
    options = _Choice(layerwise, min_size, rules, uneven, gather, reduce)
    return _zero(_ZERO1, axis, options)


@typed
def zero2(
    axis: Axis,
    *,
    layerwise: tuple[str, ...] = (),
    min_size: int = MIN_SIZE,
    rules: DimRules | None = None,
    uneven: Uneven = "replicate",
    gather: Algorithm = PLAIN,
    reduce: Algorithm = PLAIN,
) -> Plan:
    """ZeRO-2: optimizer state and gradients are split; each gradient is scattered inside the backward pass.

    Accumulation therefore never holds a whole gradient: it sums parts.

    Layout: in each microbatch `grads[D, ..] {U_a} -> grads[D_a, ..]`; in the end `params[D_a, ..] -> params[D, ..]`

    Args:
        axis: mesh axis or tuple of axes, which also split the batch.
        layerwise: subtrees, such as "layers", whose gradients are scattered layer by layer, by `gathered`.
        min_size, rules, uneven, gather, reduce: as for `zero1`.

    Returns:
        A plan for `make_train_step`; `chain` joins it with others.

    Raises:
        TypeError, ValueError: as for `zero1`.

    Cost: a reduce_scatter of every gradient in each of k microbatches and an all_gather of every updated parameter once
        per step: (k + 1) (n-1)/n of the parameters' bytes. A device holds 1/n of gradients and optimizer state.

    Example:
        >>> layout = sk.zero2("data").layouts({"w": jnp.ones((64, 32))}, mesh)["w"]
        >>> tuple(layout.rest), tuple(layout.grad), tuple(layout.update)
        ((), ('data',), ('data',))

    Source: Rajbhandari et al., ZeRO (SC 2020), section 5.2.
    """
    options = _Choice(layerwise, min_size, rules, uneven, gather, reduce)
    return _zero(_ZERO2, axis, options)


@typed
def fsdp(
    axis: Axis,
    *,
    layerwise: tuple[str, ...] = (),
    min_size: int = MIN_SIZE,
    rules: DimRules | None = None,
    uneven: Uneven = "replicate",
    gather: Algorithm = PLAIN,
    reduce: Algorithm = PLAIN,
    secondary: Axis | None = None,
) -> Plan:
    """ZeRO-3, fully sharded data parallelism: parameters, gradients and optimizer state are split.

    Layout: `params[D_a, ..] -> params[D, ..]` to be used, `grads[D, ..] {U_a} -> grads[D_a, ..]`

    Args:
        axis: mesh axis or tuple of axes, which also split the batch.
        layerwise: subtrees, such as "layers", that the loss gathers layer by layer, by `gathered` or `scan_layers`. All
            other leaves are gathered once, at the start of the step.
        min_size, rules, uneven, gather, reduce: as for `zero1`.
        secondary: some of the axes, those of the fast links. A layer's weights are gathered over the other axes in the
            forward pass alone; the backward pass gathers them again from the parts over these, which it kept in the
            compute dtype. `gather` and `reduce` are then the algorithms of the other axes.

    Returns:
        A plan for `make_train_step`; `chain` joins it with others. `chain(dp("replica"), fsdp("shard"))` is hybrid
            sharding: parts are summed over the replicas after the scatter, so the slow axis carries 1/n.

    Raises:
        TypeError: as for `zero1`.
        ValueError: as for `zero1`; a `secondary` that is not some of the axes, or without `layerwise`.

    Cost: for leaves gathered once per step an all_gather and a reduce_scatter, 2 (n-1)/n of their bytes, whatever the
        accumulation; for layer-wise ones two gathers and a reduce_scatter in each of k microbatches, 3 k (n-1)/n, or
        2 k with `gathered(keep=True)`. Gathers are in the compute dtype, reductions in the reduce dtype. With
        `secondary` over I of n devices, what fsdp over I devices sends, and over the others one gather and one
        reduce_scatter of 1/I of the bytes; a device keeps 1/I of the weights until the backward pass.

    Example:
        >>> params = {"embed": jnp.ones((64, 32)), "layers": jnp.ones((4, 32, 32))}
        >>> layouts = sk.fsdp("data", layerwise=("layers",)).layouts(params, mesh)
        >>> tuple(layouts["embed"].rest), tuple(layouts["layers"].rest)
        (('data',), (None, 'data'))
        >>> small = {"gather": sk.algorithms.compressed(jnp.int8), "reduce": sk.algorithms.compressed(jnp.int4)}
        >>> plan = sk.fsdp(("data", "model"), layerwise=("layers",), secondary="model", **small)  # ZeRO++
        >>> tuple(plan.layouts(params, mesh)["layers"].rest)
        (None, ('model', 'data'))

    Source: Rajbhandari et al., ZeRO (SC 2020), section 5.3; Zhao et al., PyTorch FSDP (VLDB 2023); Wang et al., ZeRO++
        (arXiv:2306.10209), for `secondary`.
    """
    fast = () if secondary is None else axis_names("fsdp", secondary)
    axes = axis_names("fsdp", axis)
    if fast and (not set(fast) < set(axes) or not layerwise):
        raise ValueError(
            "fsdp: secondary must be some of the axes, and not all, for the weights that layerwise names; got "
            f"secondary={quoted(fast)} for the axes {quoted(axes)} and layerwise={layerwise!r}. Pass for example "
            "fsdp(('node', 'gpu'), layerwise=('layers',), secondary='gpu')."
        )
    options = _Choice(layerwise, min_size, rules, uneven, gather, reduce)
    return _zero(_FSDP, axis, options, secondary=fast)


class _Choice(NamedTuple):
    """What the user chooses; the docstring of this file says what each means."""

    layerwise: tuple[str, ...]
    min_size: int
    rules: DimRules | None
    uneven: Uneven
    gather: Algorithm
    reduce: Algorithm


class _Level(NamedTuple):
    """When one of the three gathers a leaf and scatters its gradient: `whole`, or layer by layer."""

    name: str
    rank: int
    whole: tuple[Gather, Scatter]
    layer: tuple[Gather, Scatter]
    once: bool = False


_ZERO1 = _Level("zero1", 2, whole=("update", "step"), layer=("update", "layer"), once=True)
_ZERO2 = _Level("zero2", 2, whole=("update", "microbatch"), layer=("update", "layer"))
_FSDP = _Level("fsdp", 1, whole=("step", "step"), layer=("layer", "layer"))


def _zero(level: _Level, axis: Axis, options: _Choice, secondary: tuple[str, ...] = ()) -> Plan:
    name, (layerwise, min_size, rules, uneven, gather, reduce) = level.name, options
    at_least(name, 0, min_size=min_size)
    axes = axis_names(name, axis)
    choose = _chooser(name, axes, options)

    def place(leaf: Leaf) -> Split | str:
        at = choose(leaf)
        if isinstance(at, str):
            return at
        times = level.layer if in_subtrees(leaf.path, layerwise) else level.whole
        by_layer = dim0_counts_layers(leaf.path, layerwise)
        return Split(at, *times, level.once, uneven == "pad", by_layer, secondary=secondary)

    others = tuple(axis for axis in axes if axis not in secondary)
    gather.check(name, "gather", "all_gather", others)
    reduce.check(name, "reduce", "reduce_scatter", others)
    return strategy(
        name,
        axis,
        rank=level.rank,
        batch_dim=0,
        place=place,
        names=layerwise,
        rules=rules,
        gather=gather,
        reduce=reduce,
    )


def _chooser(name: str, axes: tuple[str, ...], options: _Choice) -> Callable[[Leaf], int | str]:
    """Which dim of a leaf is split, or why none."""
    layerwise, min_size, rules, uneven, *_ = options
    dim = None if rules is None else dim_chooser(name, axes, rules)

    def choose(leaf: Leaf) -> int | str:
        size = math.prod(leaf.shape)
        first = 1 if leaf.stack or dim0_counts_layers(leaf.path, layerwise) else 0  # scan removes dim 0
        if leaf.ways == 1:
            return "the axis has one device"
        if not leaf.shape:
            return "a scalar, which has no dim"
        if size < min_size:
            return f"{size:,} element{'s' * (size != 1)}, fewer than min_size={min_size:,}"
        fixed = leaf.split | leaf.automatic
        pads = [] if uneven != "pad" else [d for d, rows in enumerate(leaf.shape) if rows and d not in fixed]
        divide = [d for d, rows in enumerate(leaf.shape) if rows and rows % leaf.ways == 0]
        fits = [d for d in range(first, len(leaf.shape)) if d in pads or d in divide]

        def price(d: int) -> tuple[bool, float, bool, bool, int]:
            """What splitting a dim costs: the factor by which padding lengthens it, then what collectives need."""
            # The TPU compiler runs a reduce_scatter over a dim in the middle as an all_reduce, of twice the bytes. Over
            # the last dim of a stack, parts are less contiguous: on CPU a reduce_scatter takes 1.4 times as long.
            middle, last = first < d < len(leaf.shape) - 2, 2 <= d == len(leaf.shape) - 1
            factor = -(-leaf.shape[d] // leaf.ways) * leaf.ways / leaf.shape[d]
            return d in leaf.automatic, factor, middle, last, -leaf.shape[d]

        at = dim(leaf.path, leaf.shape) if dim else min(fits, key=price, default=None)
        if at in fits:
            return at
        if dim and at is None:
            return "no dim was chosen"
        if dim or uneven == "refuse":
            rule, remedy = "", "Choose another dim, or pass uneven='pad'."
            if not dim:
                remedy = "Pass uneven='pad' or uneven='replicate'."
            elif uneven == "pad":
                rule = " or one that can be padded, which a layer dim, or a dim that another strategy splits, cannot"
                remedy = "Choose another dim."
            raise ValueError(
                f"{name}: {f'dim {at}' if dim else 'one dim'} of leaf {leaf.path} must be divisible by {named(axes)}"
                f"{rule}; got shape {leaf.shape} over {leaf.ways} devices. {remedy}"
            )
        if uneven == "pad":
            return "no dim is left to pad"
        return f"no dim{' except the layer' if first else ''} divides by {leaf.ways}"

    return choose
