"""Expert parallelism: the experts' weights are split over devices that also split the batch. The layer is `moe`."""

from __future__ import annotations

from shardkit._arguments.checks import Axis, axis_names, name_axes
from shardkit._arguments.typed import typed
from shardkit.plans.dim_rules import DimRules, choose_in_subtree, make_dim_chooser
from shardkit.plans.plan import Plan, strategy
from shardkit.plans.splits import Leaf, Split

BY_NAME = choose_in_subtree("experts", stack="layers")  # the names that users most often give; others pass rules


@typed
def ep(axis: Axis, rules: DimRules = BY_NAME) -> Plan:
    """Expert parallelism: `axis` splits the experts and the batch.

    `moe` sends each token to its experts, so the gradients of the experts are complete. All other leaves are whole on
    every device, and the step sums their gradients as under `dp`.

    Layout: `experts[E_a, ..]` at rest, as seen and for the update; `batch[B_a, ..]`; others `grads[...] {U_a} ->
    grads[...]`

    Args:
        axis: mesh axis or tuple of axes.
        rules: the dim to split of each leaf: a function `(path, shape) -> dim` or None, or a pytree of PartitionSpecs,
            as from `specs_from_rules`. By default all leaves in a subtree "experts" are split along dim 0, and inside a
            stack "layers" along dim 1.

    Returns:
        A plan for `make_train_step`; `chain` joins it with others.

    Raises:
        TypeError: `axis` is not a name or a tuple of names, or `rules` is a tree of something other than specs.
        ValueError: at trace time, a number of experts that the axis does not divide, or rules with another tree.

    Cost: one all_reduce per step of the gradients of all leaves except the experts, and the collectives of `moe`. A
        device holds 1/n of the experts.

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
        # Refused, not left whole: `moe` takes the leaves that it gets for this device's part of the experts.
        if leaf.shape[dim] % leaf.ways:
            raise ValueError(
                f"ep: the experts, dim {dim} of leaf {leaf.path}, must be divisible by {name_axes(names)}; got shape "
                f"{leaf.shape} over {leaf.ways} devices. Choose another number of experts or a smaller axis."
            )
        # By default a Split is never gathered, and its gradient never summed over its axes: tokens of all devices come
        # to the experts, so the gradient of a part is complete. To sum it over `axis` would mix different experts.
        return Split(dim)

    # Rank 0: the loss works on this part, so others split what is left of it. batch_dim=0: the axis splits the examples
    # too, and the leaves that stay whole have their gradients summed over it.
    return strategy("ep", axis, rank=0, batch_dim=0, place=place, rules=rules)
