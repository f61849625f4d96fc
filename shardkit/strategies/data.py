"""Data parallelism: every device has the whole model and a share of the examples."""

from __future__ import annotations

from shardkit._arguments.checks import Axis, axis_names
from shardkit._arguments.typed import typed
from shardkit.collectives.algorithms import PLAIN, Algorithm
from shardkit.plans.plan import Plan, strategy


@typed
def dp(axis: Axis, *, reduce: Algorithm = PLAIN) -> Plan:
    """Data parallelism over `axis`: all parameters on each device, a part of the batch, one sum of gradients per step.

    Layout: `batch[B_a, ..]`, `params[...]`, `grads[...] {U_a} -> grads[...]`

    Args:
        axis: mesh axis or tuple of axes.
        reduce: the algorithm that sums gradients, such as `sk.algorithms.hierarchical("gpu")`.

    Returns:
        A plan for `make_train_step`; `chain` joins it with others.

    Raises:
        TypeError: `axis` is not a name or a tuple of names.
        ValueError: an axis named twice; an algorithm without `all_reduce`, or that cannot run over `axis`.

    Cost: one all_reduce of every gradient per step, 2 (n-1)/n of the parameters' bytes in the reduce dtype, whatever
        the accumulation. Each device holds all parameters, gradients and optimizer state.

    Example:
        >>> tuple(sk.dp("data").layouts({"w": jnp.ones(8)}, mesh)["w"].rest)
        ()
        >>> tuple(sk.dp("data").batch_spec(mesh))
        ('data',)

    Source: Li et al., PyTorch Distributed (VLDB 2020), the baseline.
    """
    # `strategy` checks only that the algorithm runs over these axes. That it has an all_reduce is checked here: without
    # it zero1, zero2 and fsdp sum the leaves that they leave whole by the plain one, but `dp` leaves every leaf whole.
    reduce.check("dp", "reduce", "all_reduce", axis_names("dp", axis))
    # Without a rule `place` no leaf is split. Every gradient is then a sum over this device's examples alone, and the
    # step sums it over the devices once, at its end: in each microbatch it would send the same bytes again.
    return strategy("dp", axis, batch_dim=0, reduce=reduce)
