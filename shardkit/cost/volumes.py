"""Bytes that one device sends under each kind of model parallelism.

`batch` is the sequences that a model replica processes at once, `value_bytes` the bytes of a value on the wire. All
counts are of bandwidth-optimal collectives, as in `wire`.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from shardkit._arguments import checks
from shardkit._arguments.typed import typed
from shardkit.cost.activations import recomputation
from shardkit.cost.collectives import sent_share


class Volume(NamedTuple):
    """Bytes that one device sends.

    Attributes:
        forward: in the forward pass.
        backward: in the backward pass, with what recomputation repeats.
    """

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """The sum, bytes."""
        return self.forward + self.backward


@partial(typed, only=bool)
def tensor_volume(
    *,
    batch: int,
    sequence: int,
    hidden: int,
    ways: int,
    sequence_parallel: bool = False,
    regather: bool = False,
    recompute: str | bool = "none",
    value_bytes: float = 2,
) -> Volume:
    """Bytes one device sends for one layer under Megatron's tensor parallelism.

    Two all_reduces of the activations forward and two backward. Under sequence parallelism each becomes an all_gather
    and a reduce_scatter: four and four a layer, and the same bytes. Full recomputation repeats the forward; selective
    recomputation repeats only attention's core, which sends nothing.

    Args:
        batch: sequences of a microbatch.
        sequence: tokens per sequence.
        hidden: model width.
        ways: tensor-parallel ways.
        sequence_parallel: all_gather and reduce_scatter in place of all_reduce.
        regather: sequence parallelism saves only the shard of each block's input and gathers it again for the weight
            gradient: two more all_gathers backward.
        recompute: "none", "selective" or "full" (False and True: the first and the last).
        value_bytes: bytes per value.

    Raises:
        ValueError: a size below 1, value_bytes that are not positive, an unknown recompute, or `regather` without
            sequence parallelism.

    Example:
        >>> sk.cost.tensor_volume(batch=1, sequence=1024, hidden=512, ways=4)
        Volume(forward=3145728.0, backward=3145728.0)

    Source: Shoeybi et al., Megatron-LM (arXiv:1909.08053), section 3; Korthikanti et al. (arXiv:2205.05198), section
    4.2.2.
    """
    where = "tensor_volume"
    batch, sequence, hidden, ways = checks.integers_from_one(
        where, batch=batch, sequence=sequence, hidden=hidden, ways=ways
    )
    [value_bytes] = checks.positive(where, value_bytes=value_bytes)
    recompute = recomputation(where, recompute)
    if regather and not sequence_parallel:
        raise ValueError(
            "tensor_volume: regather must go with sequence_parallel; got regather=True and sequence_parallel=False. "
            "Without it the input is whole on every device: set regather=False."
        )
    all_reduce = sent_share("all_reduce", ways) * (batch * sequence * hidden * value_bytes)
    forward = 2 * all_reduce
    backward = 2 * all_reduce
    if recompute == "full":
        backward += forward
    elif regather:  # under full recomputation the repeated forward gathers the inputs anyway
        backward += all_reduce  # two all_gathers, each half an all_reduce
    return Volume(forward, backward)


def context_volume(
    *,
    batch: int,
    sequence: int,
    hidden: int,
    ways: int,
    method: str = "ring",
    kv_hidden: int | None = None,
    value_bytes: float = 2,
    gradient_bytes: float | None = None,
) -> Volume:
    """Bytes that one device sends for one attention layer with the sequence sharded over `ways` devices.

    With local queries of q = b s/n h bytes, keys and values of kv = 2 b s/n h_kv bytes: "ring": kv passes n-1 times
    forward; backward kv passes n-1 times again and its gradient n times, back to its owner. "all_gather": kv is
    gathered forward and again backward, and its gradient scattered: (n-1) kv each. "ulysses": one all_to_all of
    queries, keys, values and output each way, (n-1)/n (2 q + kv).

    Args:
        batch: sequences of a microbatch.
        sequence: tokens per whole sequence.
        hidden: width of queries and output (heads times head size).
        ways: devices that share a sequence.
        method: "ring", "all_gather" or "ulysses".
        kv_hidden: width of keys, and of values (less than `hidden` with grouped-query attention); None: `hidden`.
        value_bytes: bytes per value.
        gradient_bytes: bytes per value of the gradients on the ring (4 for `ring_attention`, which accumulates in
            float32); None: `value_bytes`.

    Raises:
        ValueError: a size below 1, value_bytes or gradient_bytes that are not positive, or an unknown method.

    Example:
        >>> sk.cost.context_volume(batch=1, sequence=1024, hidden=512, ways=4, method="ulysses")
        Volume(forward=786432.0, backward=786432.0)

    Source: Liu et al., Ring Attention (arXiv:2310.01889); Jacobs et al., DeepSpeed Ulysses (arXiv:2309.14509), section
    3.2.
    """
    where = "context_volume"
    if kv_hidden is None:
        kv_hidden = hidden
    checks.one_of(where, "method", method, ("ring", "all_gather", "ulysses"))
    batch, sequence, hidden, ways, kv_hidden = checks.integers_from_one(
        where, batch=batch, sequence=sequence, hidden=hidden, ways=ways, kv_hidden=kv_hidden
    )
    if gradient_bytes is None:
        gradient_bytes = value_bytes
    value_bytes, gradient_bytes = checks.positive(where, value_bytes=value_bytes, gradient_bytes=gradient_bytes)
    if ways == 1:
        return Volume(0.0, 0.0)
    token_bytes = batch * sequence / ways * value_bytes  # of this device's tokens, per channel
    q = token_bytes * hidden
    kv = 2 * token_bytes * kv_hidden
    if method == "ring":
        # n hops and not n-1, because a gradient must come home to the device that has the keys.
        kv_gradients = ways * kv * gradient_bytes / value_bytes
        return Volume((ways - 1) * kv, (ways - 1) * kv + kv_gradients)
    if method == "all_gather":
        return Volume((ways - 1) * kv, 2 * (ways - 1) * kv)
    exchanged = sent_share("all_to_all", ways) * (2 * q + kv)  # queries and output; keys and values
    return Volume(exchanged, exchanged)


def expert_volume(
    *, tokens: int, hidden: int, ways: int, top_k: int = 1, capacity_factor: float = 1.0, value_bytes: float = 2
) -> Volume:
    """Bytes that one device sends for one mixture-of-experts layer: dispatch and combine, forward and backward.

    Each is an all_to_all of tokens * top_k * capacity_factor * hidden values, padding to the capacity included.

    Args:
        tokens: tokens on one device.
        hidden: model width.
        ways: devices that share the experts.
        top_k: experts per token.
        capacity_factor: slots over routed tokens; 1 for a balanced router without padding.
        value_bytes: bytes per value.

    Raises:
        ValueError: a size below 1, or a capacity factor or value_bytes that are not positive.

    Example:
        >>> sk.cost.expert_volume(tokens=1024, hidden=512, ways=4, top_k=2)
        Volume(forward=3145728.0, backward=3145728.0)

    Source: Lepikhin et al., GShard (arXiv:2006.16668), section 3.
    """
    where = "expert_volume"
    tokens, hidden, ways, top_k = checks.integers_from_one(where, tokens=tokens, hidden=hidden, ways=ways, top_k=top_k)
    capacity_factor, value_bytes = checks.positive(where, capacity_factor=capacity_factor, value_bytes=value_bytes)
    rows = tokens * top_k * capacity_factor
    exchanged = sent_share("all_to_all", ways) * rows * hidden * value_bytes
    return Volume(2 * exchanged, 2 * exchanged)  # dispatch and combine
