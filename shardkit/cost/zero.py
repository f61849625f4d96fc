"""ZeRO: memory and bytes sent per device at each stage.

Stage 0 is data parallelism; stage 1 shards the optimizer state, stage 2 the gradients too, stage 3 the parameters too.
Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (arXiv:1910.02054).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from shardkit._arguments import checks
from shardkit._arguments.typed import typed
from shardkit.cost.collectives import sent_share


class ZeroMemory(NamedTuple):
    """Bytes of model state per device, while gradients exist.

    Attributes:
        parameters: the compute copy.
        gradients: gradients.
        optimizer: master copy and moments.
    """

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """The sum, bytes."""
        return sum(self)


def zero_breakdown(
    parameters: float,
    ways: int,
    stage: int,
    *,
    parameter_bytes: float = 2,
    gradient_bytes: float = 2,
    optimizer_bytes: float = 12,
) -> ZeroMemory:
    """Bytes of parameters, gradients and optimizer state per device: each whole, or 1/ways of it.

    Args:
        parameters, ways, stage, parameter_bytes, gradient_bytes, optimizer_bytes: as for `zero_memory`.

    Raises:
        ValueError: as for `zero_memory`.

    Example:
        >>> from shardkit.cost.zero import zero_breakdown
        >>> zero_breakdown(1e9, 8, stage=1)
        ZeroMemory(parameters=2000000000.0, gradients=2000000000.0, optimizer=1500000000.0)

    Source: ZeRO, section 5 and figure 1.
    """
    where = "zero_memory"
    checks.one_of(where, "stage", stage, (0, 1, 2, 3))
    [ways] = checks.integers_from_one(where, ways=ways)
    parameters, parameter_bytes, gradient_bytes, optimizer_bytes = checks.at_least_zero(
        where,
        parameters=parameters,
        parameter_bytes=parameter_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=optimizer_bytes,
    )
    optimizer_ways = 1
    gradient_ways = 1
    parameter_ways = 1
    if stage >= 1:
        optimizer_ways = ways
    if stage >= 2:
        gradient_ways = ways
    if stage >= 3:
        parameter_ways = ways
    return ZeroMemory(
        parameters=parameters * parameter_bytes / parameter_ways,
        gradients=parameters * gradient_bytes / gradient_ways,
        optimizer=parameters * optimizer_bytes / optimizer_ways,
    )


def zero_memory(
    parameters: float,
    ways: int,
    stage: int,
    *,
    parameter_bytes: float = 2,
    gradient_bytes: float = 2,
    optimizer_bytes: float = 12,
) -> float:
    """Bytes of parameters, gradients and optimizer state per device, together.

    (2 + 2 + 12) P at stage 0; 4 P + 12 P/n at 1; 2 P + 14 P/n at 2; 16 P/n at 3, for P parameters over n ways.
    For activations see `activation_memory`.

    Args:
        parameters: number of parameters.
        ways: number of devices holding parts of the state.
        stage: 0, 1, 2 or 3.
        parameter_bytes: bytes per parameter of the compute copy (bfloat16: 2).
        gradient_bytes: bytes per parameter of the gradients.
        optimizer_bytes: bytes per parameter of the optimizer (Adam: float32 master copy and two moments, 12).

    Raises:
        ValueError: another stage, ways below 1, or a negative number of parameters or bytes.

    Example:
        >>> [sk.cost.zero_memory(1e9, 8, stage) / 1e9 for stage in range(4)]
        [16.0, 5.5, 3.75, 2.0]

    Source: ZeRO, figure 1 and table 1.
    """
    return zero_breakdown(
        parameters,
        ways,
        stage,
        parameter_bytes=parameter_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=optimizer_bytes,
    ).total


@partial(typed, only=bool)
def zero_volume(
    parameters: float,
    ways: int,
    stage: int,
    *,
    accumulate: int = 1,
    layerwise: bool = True,
    regather: bool = True,
    layer_major: bool = False,
    parameter_bytes: float = 2,
    gradient_bytes: float = 2,
) -> float:
    """Bytes one device sends per step by bandwidth-optimal collectives, with k microbatches accumulated.

    In units of the parameters' bytes times (n-1)/n: stage 0: 2 (one all_reduce of gradients); stage 1: 2
    (reduce_scatter of gradients, all_gather of parameters); stage 2: k + 1, because sharded gradients are reduced in
    every microbatch; stage 3, layer by layer: 3 k (two gathers and a reduction per microbatch), 2 k if the gathered
    layers are saved for the backward; stage 3 with the whole tree gathered once per step: 2. Layer by layer, with all
    microbatches through a layer before the next: 3 at stage 3 (2 if saved) and 2 at stage 2, for any k.

    Args:
        parameters, ways, stage: as for `zero_memory`.
        accumulate: microbatches k per step.
        layerwise: stage 3 gathers each layer when the loss uses it; False: the whole tree once per step.
        regather: stage 3, layer by layer: gathers again for the backward; False: saves the gathered layers.
        layer_major: stages 2 and 3, layer by layer: all microbatches pass a layer before the next one starts.
        parameter_bytes: bytes per parameter, gathered.
        gradient_bytes: bytes per parameter, reduced.

    Raises:
        ValueError: another stage, ways or accumulate below 1, or a negative number of parameters or bytes.

    Example:
        >>> [sk.cost.zero_volume(1e9, 8, stage, accumulate=4) / 1e9 for stage in range(4)]
        [3.5, 3.5, 8.75, 21.0]

    Source: ZeRO, section 7 (2 Psi, 2 Psi, 3 Psi); accumulation follows from what each stage may keep.
    """
    where = "zero_volume"
    checks.one_of(where, "stage", stage, (0, 1, 2, 3))
    ways, accumulate = checks.integers_from_one(where, ways=ways, accumulate=accumulate)
    parameters, parameter_bytes, gradient_bytes = checks.at_least_zero(
        where, parameters=parameters, parameter_bytes=parameter_bytes, gradient_bytes=gradient_bytes
    )
    # (n-1)/n, for a gather too: its operand is a piece, and `share` is of the whole array.
    share = sent_share("reduce_scatter", ways)
    reduction = share * parameters * gradient_bytes
    gather = share * parameters * parameter_bytes
    passes = accumulate  # through a layer, one for each microbatch
    if layer_major:
        passes = 1
    if stage == 0:
        return 2 * reduction  # an all_reduce
    if stage == 1 or (stage == 3 and not layerwise):
        return reduction + gather
    if stage == 2:
        return passes * reduction + gather
    gathers = 1  # forward
    if regather:
        gathers = 2  # and again backward
    return passes * (reduction + gathers * gather)
