"""Tensor parallelism: weights split over devices that all see the same batch. The layers are in `layers/linear.py`."""

from __future__ import annotations

import math

from shardkit._check import Axis, axis_names, named
from shardkit._typed import typed
from shardkit.partitioning.dim_rules import DimRules, dim_chooser, names_in
from shardkit.partitioning.plan import Leaf, Placement, Plan, strategy


@typed
def tp(axis: Axis, rules: DimRules, *, sequence: bool = False) -> Plan:
    """Tensor parallelism: leaves stay split over `axis` while the loss uses them, and all devices see the same batch.

    Layout: `params[.., F_a, ..]`, `grads[.., F_a, ..]` at rest, in use and in the update

    Args:
        axis: mesh axis or tuple of axes.
        rules: which dim of a leaf is split: a function of path and shape (None for a leaf that is left whole), or a
            pytree of PartitionSpecs that name `axis`, as `specs_from_rules` makes.
        sequence: the loss uses `sequence=True`. Leaves that are left whole (gains of norms, biases) are then used on
            each device's own tokens: their gradients are summed over `axis` once a step, and not in every layer.

    Returns:
        A plan for `make_train_step`; `chain` joins it with others.

    Raises:
        TypeError: `axis` is not a name or a tuple of names, or the tree holds something else than specs.
        ValueError: specs that never name `axis`; at trace time a dim that a leaf does not have or that does not divide,
            or a leaf without a spec.

    Cost: nothing of split leaves: their gradients are complete. With `sequence`, every other gradient is in the step's
        all_reduce over `axis`, 2 (n-1)/n of their bytes. What the loss sends stands in its kernels.

    Source: Shoeybi et al., Megatron-LM (arXiv:1909.08053), section 3; Korthikanti et al. (arXiv:2205.05198), section
        4.2.2.
    """
    axes = axis_names("tp", axis)
    choose = dim_chooser("tp", axes, rules)

    def place(leaf: Leaf) -> Placement | str:
        if leaf.ways == 1:
            return "the axis has one device"
        at = choose(leaf.path, leaf.shape)
        if at is None:
            return "the rules name no dim"
        size = leaf.shape[at]
        if size % leaf.ways:
            raise ValueError(
                f"tp: dim {at} of leaf {leaf.path} must be divisible by {named(axes)}; got size {size} over "
                f"{leaf.ways} devices. Pad it to {math.ceil(size / leaf.ways) * leaf.ways} (a vocabulary, which the "
                f"loss is told by vocab_cross_entropy(vocabulary={size})), leave the leaf whole (key/value heads), or "
                "use a smaller axis."
            )
        return Placement(at, rest=True, seen=True, update=True)

    return strategy("tp", axis, rank=0, place=place, varies=sequence, names=names_in(rules, axes))
