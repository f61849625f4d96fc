"""Expert parallelism: the experts' weights are split over devices that also split the batch. The layer is `moe`."""

from __future__ import annotations

from shardkit._check import Axis, axis_names, named
from shardkit._typed import typed
from shardkit.partitioning.dim_rules import DimRules, dim_chooser, names_in, stacked
from shardkit.partitioning.plan import Leaf, Placement, Plan, strategy


def _experts_dim(path: str, shape: tuple[int, ...]) -> int | None:
    """The dim that counts the experts of a leaf in "experts": the first, or behind the layers of a stack "layers"."""
    names = path.split(".")
    if "experts" not in names:
        return None
    before = names[: names.index("experts")]
    return int("layers" in before and stacked(".".join(names[before.index("layers") :]), ("layers",)))


@typed
def ep(axis: Axis, rules: DimRules = _experts_dim) -> Plan:
    """Expert parallelism: the experts' weights are split over `axis`, which also splits the batch.

    Tokens travel to the experts, inside `moe`, so the gradients of the experts are complete; all other leaves are whole
    on every device, and their gradients are summed as under data parallelism.

    Layout: `experts[E_a, ..]` at rest, as seen and for the update; `batch[B_a, ..]`; others `grads[...] {U_a} ->
    grads[...]`
    Args:
        axis: mesh axis or tuple of axes.
        rules: `(path, shape) -> dim`, None for a leaf that is not split, or a pytree of PartitionSpecs, as
            `specs_from_rules` makes it. By default the leaves inside a subtree "experts" are split along dim 0, or dim
            1 inside a stack "layers"; in a list of layers dim 0.

    Returns:
        A plan for `make_train_step`; `chain` joins it with others.

    Raises:
        TypeError: `axis` is not a name or a tuple of names, or the tree holds something else than specs.
        ValueError: at trace time, experts that do not divide by the axis, or rules of another tree.

    Cost: an all_reduce of the gradients of all leaves but the experts once a step; a device holds 1/n of the experts.
        What the tokens send is `moe`'s.

    Source: Lepikhin et al., GShard (arXiv:2006.16668), section 3.
    """
    names = axis_names("ep", axis)
    choose = dim_chooser("ep", names, rules)

    def place(leaf: Leaf) -> Placement | str:
        dim = choose(leaf.path, leaf.shape)
        if dim is None:
            return "no experts"
        if leaf.ways == 1:
            return "the axis has one device"
        if leaf.shape[dim] % leaf.ways:
            raise ValueError(
                f"ep: the experts, dim {dim} of leaf {leaf.path}, must be divisible by {named(names)}; got shape "
                f"{leaf.shape} over {leaf.ways} devices. Choose another number of experts or a smaller axis."
            )
        return Placement(dim, rest=True, seen=True, update=True)

    return strategy("ep", axis, rank=0, batch_dim=0, place=place, names=names_in(rules, names))
