"""Activation memory of a transformer in training, 16-bit values and one-byte dropout masks.

Symbols of the paper: s sequence, b batch (sequences of one microbatch on one model replica), h hidden, a heads,
L layers, v vocabulary, t tensor-parallel ways, p pipeline stages. The layer is GPT's: attention and
a 4h feed-forward, with dropout. Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer
Models (arXiv:2205.05198).
"""

from __future__ import annotations

from functools import partial

from shardkit._arguments import checks
from shardkit._arguments.typed import typed


def recomputation(where: str, recompute: str | bool) -> str:
    """ "none", "selective" or "full"; False and True mean the first and the last."""
    if recompute is True:
        return "full"
    if recompute is False:
        return "none"
    checks.one_of(where, "recompute", recompute, ("none", "selective", "full"))
    return recompute


@partial(typed, only=bool)
def activation_memory(
    *,
    batch: int,
    sequence: int,
    hidden: int,
    heads: int,
    kv_heads: int | None = None,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: str | bool = "none",
) -> float:
    """Returns the bytes of activations one layer saves for its backward pass, per device.

    sbh (34 + 5as/h) without parallelism; sbh (10 + 24/t + 5as/(ht)) with tensor parallelism; sbh/t (34 + 5as/h) with
    sequence parallelism too. Selective recomputation, or a fused attention kernel, drops the 5as/h term (attention's
    core); full recomputation saves the layer's input, 2sbh. Keys and values are 4 of the 24; with fewer key/value heads
    proportionally less, but at least one head per device.

    Args:
        batch: sequences of one microbatch.
        sequence: tokens per sequence.
        hidden: model width.
        heads: attention heads.
        kv_heads: key/value heads, a divisor of heads; None: heads.
        tensor: tensor-parallel ways.
        sequence_parallel: whether norms and dropout are sharded over the sequence, on the same axis.
        recompute: "none" (or False), "selective" or "full" (or True).

    Raises:
        ValueError: a size below 1, heads not divisible by kv_heads, or an unknown recompute.

    Example:
        >>> sk.cost.activation_memory(batch=1, sequence=2048, hidden=1024, heads=16, recompute="full")
        4194304.0
        >>> sk.cost.activation_memory(batch=1, sequence=2048, hidden=1024, heads=16, tensor=8, sequence_parallel=True)
        50855936.0

    Source: Korthikanti et al., equations 1, 2, 4 and table 2.
    """
    where = "activation_memory"
    batch, sequence, hidden, heads, tensor = checks.integers_from_one(
        where, batch=batch, sequence=sequence, hidden=hidden, heads=heads, tensor=tensor
    )
    if kv_heads is None:
        kv_heads = heads
    [kv_heads] = checks.integers_from_one(where, kv_heads=kv_heads)
    checks.divisor(where, "kv_heads", kv_heads, "heads", heads)
    recompute = recomputation(where, recompute)
    sbh = sequence * batch * hidden
    if recompute == "full":
        return 2.0 * sbh
    # In units of sbh bytes, as in the paper: 10 for norms, dropout and the inputs of both blocks; 24 for what a tensor
    # axis splits; 5as/h for attention's scores.
    norms: float = 10
    if sequence_parallel:
        norms /= tensor
    scores: float = 0
    if recompute == "none":
        scores = 5 * heads * sequence / hidden
    # Keys and values are 4 of the 24. Two key/value heads of eight save 3 of these 4; over four devices, each of which
    # has at least one head, they save 2.
    kept_kv_heads = min(heads, max(kv_heads, tensor))
    saved_kv = 4 * (heads - kept_kv_heads) / heads
    return sbh * (norms + (24 - saved_kv + scores) / tensor)
