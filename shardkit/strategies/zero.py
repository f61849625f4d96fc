"""ZeRO: optimizer state, gradients and parameters split over the devices that split the batch.

| plan | at rest a device holds | gradients | sent a step, in parameter bytes x (n-1)/n |
|---|---|---|---|
| `dp` | all | all | 2 |
| `zero1` | parameters, 1/n of the optimizer state | all | 2 |
| `zero2` | parameters, 1/n of the optimizer state | 1/n | k + 1 |
| `fsdp` | 1/n of everything | all | 2, gathered once a step |
| `fsdp(layerwise=...)` | 1/n of everything | 1/n | 3k, 2k or 3 |

Layer by layer, `gathered(keep=True)` sends 2k, and `scan_layers(microbatches=k)`, all microbatches through a layer
before the next, 3.

k is the number of microbatches (`accumulate`): what gathers or reduces inside the loss does so in every one. With
`uneven="pad"` a leaf counts with its padding, both held and sent.

Source: Rajbhandari et al., ZeRO (SC 2020); Zhao et al., PyTorch FSDP (VLDB 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

from shardkit._check import Axis, at_least, axis_names, named
from shardkit._typed import typed
from shardkit.partitioning.dim_rules import DimRules, dim_chooser, inside, names_in, stacked
from shardkit.partitioning.plan import Leaf, Placement, Plan, strategy

MIN_SIZE = 1024
Handled = Literal["loss", "entry"] | None
Uneven = Literal["replicate", "refuse", "pad"]


@typed
def zero1(axis: Axis, *, min_size: int = MIN_SIZE, rules: DimRules | None = None, uneven: Uneven = "replicate") -> Plan:
    """ZeRO-1: the optimizer state is split; parameters and gradients are whole on every device.

    Layout: `grads[D, ..] {U_a} -> grads[D_a, ..]`, and after the update `params[D_a, ..] -> params[D, ..]`

    Args:
        axis: mesh axis or tuple of axes, which also split the batch.
        min_size: leaves of fewer elements are not split.
        rules: which dim of a leaf is split: a function of path and shape (None for a leaf that is left whole), or a
            pytree of PartitionSpecs that name `axis`, as `specs_from_rules` makes; by default the largest that divides.
        uneven: what becomes of a leaf of which no dim divides: "replicate" keeps it whole, "refuse" is an error, "pad"
            holds and sends it with zeros at the end of the dim that this lengthens least; see `unpadded`.

    Returns:
        A plan for `make_train_step`; `chain` joins it with others.

    Raises:
        TypeError: `axis` is not a name or a tuple of names.
        ValueError: an unknown `uneven`; at trace time a leaf that does not divide, where that is refused, a chosen dim
            that cannot be padded, or a name that no leaf has.

    Cost: a reduce_scatter of every gradient and an all_gather of every updated parameter once a step, 2 (n-1)/n of the
        parameters' bytes, whatever the accumulation. A device holds 1/n of the optimizer state.

    Source: Rajbhandari et al., ZeRO (SC 2020), section 5.1.
    """
    at_least("zero1", 0, min_size=min_size)
    choose = _chooser("zero1", axis, min_size, rules, uneven, ())

    def place(leaf: Leaf) -> Placement | str:
        at = choose(leaf)
        if isinstance(at, str):
            return at
        return Placement(at, rest=False, seen=False, update=True, pad=uneven == "pad")

    return strategy("zero1", axis, rank=2, batch_dim=0, place=place, names=names_in(rules, axis))


@typed
def zero2(
    axis: Axis,
    *,
    layerwise: tuple[str, ...] = (),
    min_size: int = MIN_SIZE,
    rules: DimRules | None = None,
    uneven: Uneven = "replicate",
) -> Plan:
    """ZeRO-2: optimizer state and gradients are split; each gradient is scattered inside the backward pass.

    Accumulation then never holds a whole gradient: the sums over microbatches are of parts.

    Layout: in each microbatch `grads[D, ..] {U_a} -> grads[D_a, ..]`; in the end `params[D_a, ..] -> params[D, ..]`

    Args:
        axis: mesh axis or tuple of axes, which also split the batch.
        layerwise: names of subtrees, such as "layers", whose leaves reach the loss as handles: `gathered` opens them in
            each layer, so that a stack's gradients are scattered layer by layer. Their dim 0, the layer, is not split;
            in a list of layers it may be.
        min_size: leaves of fewer elements are not split.
        rules: which dim of a leaf is split: a function of path and shape (None for a leaf that is left whole), or a
            pytree of PartitionSpecs that name `axis`, as `specs_from_rules` makes; by default the largest that divides.
        uneven: what becomes of a leaf of which no dim divides: "replicate" keeps it whole, "refuse" is an error, "pad"
            holds and sends it with zeros at the end of the dim that this lengthens least; see `unpadded`.

    Returns:
        A plan for `make_train_step`; `chain` joins it with others.

    Raises:
        TypeError: `axis` is not a name or a tuple of names; at trace time a handle that is used unopened.
        ValueError: an unknown `uneven`; at trace time a leaf that does not divide, where that is refused, a chosen dim
            that cannot be padded, or a name that no leaf has.

    Cost: a reduce_scatter of every gradient in each microbatch and an all_gather of every updated parameter once a
        step: (k + 1) (n-1)/n of the parameters' bytes with k microbatches. A device holds 1/n of gradients and state.

    Source: Rajbhandari et al., ZeRO (SC 2020), section 5.2.
    """
    at_least("zero2", 0, min_size=min_size)
    choose = _chooser("zero2", axis, min_size, rules, uneven, layerwise)

    def place(leaf: Leaf) -> Placement | str:
        at = choose(leaf)
        if isinstance(at, str):
            return at
        handle: Handled = "loss" if inside(leaf.path, layerwise) else "entry"
        return Placement(at, rest=False, seen=False, update=True, handle=handle, pad=uneven == "pad")

    return strategy("zero2", axis, rank=2, batch_dim=0, place=place, names=(*layerwise, *names_in(rules, axis)))


@typed
def fsdp(
    axis: Axis,
    *,
    layerwise: tuple[str, ...] = (),
    min_size: int = MIN_SIZE,
    rules: DimRules | None = None,
    uneven: Uneven = "replicate",
) -> Plan:
    """ZeRO-3, fully sharded data parallelism: parameters, gradients and optimizer state at rest in parts.

    Layout: `params[D_a, ..] -> params[D, ..]` to be used, `grads[D, ..] {U_a} -> grads[D_a, ..]`

    Args:
        axis: mesh axis or tuple of axes, which also split the batch.
        layerwise: names of subtrees, such as "layers", whose leaves reach the loss as handles: `gathered` gathers them
            in each layer, so that no more than a layer is ever whole. Their dim 0, the layer, is not split; in a list
            of layers it may be. All other leaves are gathered once, at the start of the step, and kept.
        min_size: leaves of fewer elements are not split.
        rules: which dim of a leaf is split: a function of path and shape (None for a leaf that is left whole), or a
            pytree of PartitionSpecs that name `axis`, as `specs_from_rules` makes; by default the largest that divides.
        uneven: what becomes of a leaf of which no dim divides: "replicate" keeps it whole, "refuse" is an error, "pad"
            holds and sends it with zeros at the end of the dim that this lengthens least; see `unpadded`.

    Returns:
        A plan for `make_train_step`; `chain` joins it with others, `chain(dp("replica"), fsdp("shard"))` for instance
        (hybrid sharding: parts are summed over the replicas after they were scattered, so the slow axis carries 1/n).

    Raises:
        TypeError: `axis` is not a name or a tuple of names; at trace time a handle that is used unopened.
        ValueError: an unknown `uneven`; at trace time a leaf that does not divide, where that is refused, a chosen dim
            that cannot be padded, or a name that no leaf has.

    Cost: of whole leaves an all_gather and a reduce_scatter once a step, 2 (n-1)/n of their bytes, whatever the
        accumulation; of layer-wise ones two gathers and a reduce_scatter in each microbatch, 3 k (n-1)/n, or 2 k with
        `gathered(keep=True)`. Gathers are in the compute dtype, reductions in the reduce dtype.

    Source: Rajbhandari et al., ZeRO (SC 2020), section 5.3; Zhao et al., PyTorch FSDP (VLDB 2023).
    """
    at_least("fsdp", 0, min_size=min_size)
    choose = _chooser("fsdp", axis, min_size, rules, uneven, layerwise)

    def place(leaf: Leaf) -> Placement | str:
        at = choose(leaf)
        if isinstance(at, str):
            return at
        handle: Handled = "loss" if inside(leaf.path, layerwise) else None
        return Placement(at, rest=True, seen=False, update=True, handle=handle, pad=uneven == "pad")

    return strategy("fsdp", axis, rank=1, batch_dim=0, place=place, names=(*layerwise, *names_in(rules, axis)))


def _chooser(
    name: str, axis: Axis, min_size: int, rules: DimRules | None, uneven: str, layerwise: tuple[str, ...]
) -> Callable[[Leaf], int | str]:
    """Which dim of a leaf is split, or why none."""
    axes = axis_names(name, axis)
    if uneven not in get_args(Uneven):
        raise ValueError(f"{name}: uneven must be 'replicate', 'refuse' or 'pad'; got {uneven!r}. Choose one of them.")
    if isinstance(layerwise, str):
        raise TypeError(
            f"{name}: layerwise must be a tuple of names; got {layerwise!r}. Write layerwise=({layerwise!r},)."
        )
    dim = None if rules is None else dim_chooser(name, axes, rules)

    def choose(leaf: Leaf) -> int | str:
        size = math.prod(leaf.shape)
        first = 1 if stacked(leaf.path, layerwise) else 0  # the dim that scan takes off
        if leaf.ways == 1:
            return "the axis has one device"
        if not leaf.shape:
            return "a scalar, which has no dim"
        if size < min_size:
            return f"{size:,} elements, fewer than min_size={min_size:,}"
        pads = [] if uneven != "pad" else [d for d, rows in enumerate(leaf.shape) if rows and d not in leaf.split]
        fits = [
            d for d, rows in enumerate(leaf.shape) if d >= first and (d in pads or (rows and rows % leaf.ways == 0))
        ]

        def longer(d: int) -> tuple[float, int]:  # by how much padding lengthens a dim; the largest of equals
            return -(-leaf.shape[d] // leaf.ways) * leaf.ways / leaf.shape[d], -leaf.shape[d]

        at = dim(leaf.path, leaf.shape) if dim else min(fits, key=longer, default=None)
        if dim and at is None:
            return "no dim was chosen"
        if at is None or at not in fits:
            if dim or uneven == "refuse":
                what = f"dim {at}" if dim else "one dim"
                rule, remedy = "", "Pass uneven='pad' or uneven='replicate'."
                if dim:
                    remedy = "Choose another dim, or pass uneven='pad'."
                if dim and uneven == "pad":
                    rule = " or one that can be padded, which a dim that another strategy splits or a layer's cannot"
                    remedy = "Choose another dim."
                raise ValueError(
                    f"{name}: {what} of leaf {leaf.path} must be divisible by {named(axes)}{rule}; got shape "
                    f"{leaf.shape} over {leaf.ways} devices. {remedy}"
                )
            if uneven == "pad":
                return "no dim is left to pad"
            return f"no dim{' but the layer' if first else ''} divides by {leaf.ways}"
        return at

    return choose
