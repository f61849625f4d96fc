"""Tensor parallelism: weights split over devices that see the same batch. The layers are in `layers/linear.py`."""

from __future__ import annotations

from functools import partial

from shardkit._arguments.checks import Axis, axis_names
from shardkit._arguments.typed import typed
from shardkit.plans.dim_rules import DimRules, make_dim_chooser, split_by_rules
from shardkit.plans.plan import Plan, strategy


@typed
def tp(axis: Axis, rules: DimRules, *, sequence: bool = False) -> Plan:
    """Tensor parallelism: leaves stay split over `axis` in the loss, and all devices see the same batch.

    Layout: `params[.., F_a, ..]`, `grads[.., F_a, ..]` at rest, in use and in the update

    Args:
        axis: mesh axis or tuple of axes.
        rules: the dim to split of each leaf. Pass a function of path and shape (it returns None for a leaf that stays
            whole), or a pytree of PartitionSpecs that name `axis`. You get one from `specs_from_rules`, or from flax's
            `nnx.get_partition_spec` and `nn.get_partition_spec` if your parameters have metadata.
        sequence: whether your loss uses `sequence=True`. Each device then uses the whole leaves (gains of norms,
            biases) on its tokens, and the step sums their gradients over `axis` once, not in every layer.

    Returns:
        A plan for `make_train_step`; `chain` joins it with others.

    Raises:
        TypeError: `axis` is not a name or a tuple of names, or `rules` is a tree of something other than specs.
        ValueError: specs that never name `axis`. At trace time: an axis the mesh does not have, a dim the leaf does
            not have, an indivisible dim, or a leaf without a spec.

    Cost: the collectives in your loss. Gradients of split leaves are complete. With `sequence`, one all_reduce over
        `axis` per step sums all other gradients, 2 (n-1)/n of their bytes.

    Example:
        >>> rules = {"up": P(None, "model"), "down": P("model", None)}
        >>> layouts = sk.tp("model", rules).layouts({"up": jnp.ones((4, 8)), "down": jnp.ones((8, 4))}, mesh)
        >>> tuple(layouts["up"].seen), tuple(layouts["down"].seen)
        ((None, 'model'), ('model',))

    Source: Shoeybi et al., Megatron-LM (arXiv:1909.08053), section 3; Korthikanti et al. (arXiv:2205.05198), section
        4.2.2.
    """
    axes = axis_names("tp", axis)
    choose = make_dim_chooser("tp", axes, rules)

    # Without a batch_dim all devices of the axis see the same examples, so the gradient of a whole leaf leaves the loss
    # complete, and equal on all of them: a sum would count it n times. With `sequence` each sees its own tokens, and
    # has a part of the sum: `varies` tells the step to add the parts, once at its end and not in each layer.
    return strategy("tp", axis, rank=0, place=partial(split_by_rules, "tp", axes, choose), varies=sequence, rules=rules)
