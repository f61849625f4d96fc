"""Context parallelism: the tokens of every sequence are split. `layers/context_attention.py` attends across devices."""

from __future__ import annotations

from shardkit._arguments.checks import Axis
from shardkit._arguments.typed import typed
from shardkit.plans.plan import Plan, strategy


@typed
def cp(axis: Axis) -> Plan:
    """Context parallelism over `axis`: the tokens, dim 1 of the batch, are split; parameters are whole.

    In your loss, attend across devices with `ring_attention` or `ulysses_attention`, and take the positions of a
    device's tokens from `layers.positions`. The first call of a step refuses a loss that mixes a device's own tokens.
    Leaves of the batch without a dim 1 stay whole, and so do the keys, one for each example.

    Layout: `batch[B, T_a, ..]`, `params[...]`, `grads[...] {U_a} -> grads[...]`

    Args:
        axis: mesh axis or tuple of axes.

    Returns:
        A plan for `make_train_step`; `chain` joins it with others.

    Raises:
        TypeError: `axis` is not a name or a tuple of names.
        ValueError: an axis named twice.

    Cost: one all_reduce of every gradient per step, as `dp`, and the collectives of the attention.

    Example:
        >>> plan = sk.chain(sk.dp("data"), sk.cp("model"))
        >>> tuple(plan.batch_spec(mesh))
        ('data', 'model')

    Source: Liu et al., Ring Attention (arXiv:2310.01889).
    """
    # Dim 1 of the batch has the tokens. Without a rule `place` all leaves stay whole, and each device has their
    # gradients for its tokens alone: the step sums them over `axis`, as it does for the examples of `dp`.
    return strategy("cp", axis, batch_dim=1)
