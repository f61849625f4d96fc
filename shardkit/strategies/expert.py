"""Expert parallelism: the experts' weights are split over devices that also split the batch. The layer is `moe`."""

from __future__ import annotations

from shardkit._arguments.checks import Axis, axis_names, named
from shardkit._arguments.typed import typed
from shardkit.plans.dim_rules import DimRules, choose_in_subtree, make_dim_chooser
from shardkit.plans.plan import Plan, strategy
from shardkit.plans.splits import Leaf, Split

BY_NAME = choose_in_subtree("experts", stack="layers")  # the names that users most often give; others pass rules


@typed
def ep(axis: Axis, rules: DimRules = BY_NAME) -> Plan:
    """Expert parallelism: the experts' weights are split over `axis`, which also splits the batch.

    Inside `moe` tokens are sent to the experts, so the gradients of the experts are complete. All other leaves are
    whole on every device, and their gradients are summed as under data parallelism.

    Layout: `experts[E_a, ..]` at rest, as seen and for the update; `batch[B_a, ..]`; others `grads[...] {U_a} ->
    grads[...]`

    Args:
        axis: mesh axis or tuple of axes.
        rules: `(path, shape) -> dim`, None for a leaf that is not split, or a pytree of PartitionSpecs, such as
            `specs_from_rules` returns. By default the leaves in a subtree "experts" are split along dim 0, or along dim
            1 inside a stack "layers"; in a list of layers along dim 0.

    Returns:
        A plan for `make_train_step`; `chain` joins it with others.

    Raises:
        TypeError: `axis` is not a name or a tuple of names, or `rules` is a tree of anything but specs.
        ValueError: at trace time, experts that the axis does not divide, or rules of another tree.

    Cost: one all_reduce per step of the gradients of all leaves except the experts, and what `moe` sends. A device
        holds 1/n of the experts.

    Example:
        >>> params = {"experts": {"up": jnp.ones((8, 4, 4))}, "router": jnp.ones((4, 8))}
        >>> layouts = sk.ep("model").layouts(params, mesh)
        >>> tuple(layouts["experts"]["up"].rest), tuple(layouts["router"].rest)
        (('model',), ())

    Source: Lepikhin et al., GShard (arXiv:2006.16668), section 3.
    """
    names = axis_names("ep", axis)
    choose = make_dim_chooser("ep", names, rules)

    def place(leaf: Leaf) -> Split | str:
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
        return Split(dim)

    return strategy("ep", axis, rank=0, batch_dim=0, place=place, rules=rules)
