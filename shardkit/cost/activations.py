"""Activation memory of a transformer in training, 16-bit values and one-byte dropout masks.

Symbols of the paper: s sequence, b batch (sequences of one microbatch on one model replica), h hidden, a heads,
L layers, v vocabulary, t tensor-parallel ways, p pipeline stages, m chunks per stage. The layer is GPT's: attention and
a 4h feed-forward, with dropout. Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer
Models (arXiv:2205.05198).
"""

from __future__ import annotations

from functools import partial

from shardkit import _check
from shardkit._typed import typed


def recomputation(where: str, recompute: str | bool) -> str:
    """ "none", "selective" or "full"; False and True mean the first and the last."""
    if isinstance(recompute, bool):
        return "full" if recompute else "none"
    _check.one_of(where, "recompute", recompute, ("none", "selective", "full"))
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
    """Bytes of activations that one layer saves for its backward pass, per device.

    sbh (34 + 5as/h) without parallelism; sbh (10 + 24/t + 5as/(ht)) with tensor parallelism; sbh/t (34 + 5as/h) with
    sequence parallelism too. Selective recomputation drops the 5as/h term (attention's core, as does a fused attention
    kernel); full recomputation saves the layer's input, 2sbh. Keys and values are 4 of the 24; with
    fewer key/value heads proportionally less, but at least one head per device.

    Args:
        batch: sequences of one microbatch.
        sequence: tokens per sequence.
        hidden: model width.
        heads: attention heads.
        kv_heads: key/value heads, a divisor of heads; None: heads.
        tensor: tensor-parallel ways.
        sequence_parallel: whether norms and dropout are sharded over the sequence, on the same axis.
        recompute: "none" (or False), "selective" or "full" (or True).

    Returns:
        Bytes.

    Raises:
        ValueError: a size below 1, kv_heads that do not divide heads, or an unknown recompute.

    Example:
        >>> sk.cost.activation_memory(batch=1, sequence=2048, hidden=1024, heads=16, recompute="full")
        4194304.0
        >>> sk.cost.activation_memory(batch=1, sequence=2048, hidden=1024, heads=16, tensor=8, sequence_parallel=True)
        50855936.0

    Source: Korthikanti et al., equations 1, 2, 4 and table 2.
    """
    where = "activation_memory"
    batch, sequence, hidden, heads, tensor = _check.whole(
        where, batch=batch, sequence=sequence, hidden=hidden, heads=heads, tensor=tensor
    )
    [kv_heads] = _check.whole(where, kv_heads=heads if kv_heads is None else kv_heads)
    _check.divisor(where, "kv_heads", kv_heads, "heads", heads)
    recompute = recomputation(where, recompute)
    sbh = sequence * batch * hidden
    if recompute == "full":
        return 2.0 * sbh
    core = 5 * heads * sequence / hidden if recompute == "none" else 0
    shared = 4 * (heads - min(heads, max(kv_heads, tensor))) / heads
    whole = 10 / tensor if sequence_parallel else 10
    return sbh * (whole + (24 - shared + core) / tensor)


@partial(typed, only=bool)
def model_activation_memory(
    layers: int,
    *,
    batch: int,
    sequence: int,
    hidden: int,
    heads: int,
    kv_heads: int | None = None,
    vocabulary: int = 0,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: str | bool = "none",
    stages: int = 1,
    chunks: int = 1,
    microbatches: int | None = None,
) -> float:
    """Bytes of activations on the first pipeline stage, which has the most.

    The stage has L/p layers and 1F1B has p microbatches in flight there: the activations of L layers for any p, times
    1 + (p-1)/(p m) where m chunks are interleaved. The embedding's dropout mask adds sbh p, and without a pipeline the
    final norm, the head's input and the float32 logits add 4sbh (1 + v/h); both over t under sequence parallelism.

    Args:
        layers: layers of the whole model.
        batch, sequence, hidden, heads, kv_heads, tensor, sequence_parallel, recompute: as for `activation_memory`.
        vocabulary: number of token values; 0 leaves the embedding and the head out.
        stages: pipeline stages; 1 means no pipeline.
        chunks: model chunks per stage of interleaved 1F1B; 1 is plain 1F1B.
        microbatches: microbatches per step; fewer than `stages` need proportionally less. None: at least `stages`.

    Returns:
        Bytes.

    Raises:
        ValueError: a size below 1, layers that do not divide over the stages and chunks, or an unknown recompute.

    Example:
        >>> sk.cost.model_activation_memory(8, batch=1, sequence=2048, hidden=1024, heads=16, recompute="full")
        33554432.0

    Source: Korthikanti et al., equation 5, sections 4.2.3 and 4.3.
    """
    where = "model_activation_memory"
    microbatches = stages if microbatches is None else microbatches
    layers, batch, sequence, hidden, tensor, stages, chunks, microbatches = _check.whole(
        where,
        layers=layers,
        batch=batch,
        sequence=sequence,
        hidden=hidden,
        tensor=tensor,
        stages=stages,
        chunks=chunks,
        microbatches=microbatches,
    )
    [vocabulary] = _check.count(where, vocabulary=vocabulary)
    _check.divisor(where, "stages * chunks", stages * chunks, "layers", layers)
    layer = activation_memory(
        batch=batch,
        sequence=sequence,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        tensor=tensor,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
    )
    filled = min(microbatches, stages) / stages
    interleaved = 1.0 if chunks == 1 else 1 + (stages - 1) / (stages * chunks)
    total = layers * layer * interleaved * filled
    if vocabulary:
        sbh = sequence * batch * hidden
        split = tensor if sequence_parallel else 1
        total += sbh * stages * filled / split
        if stages == 1:
            total += 4 * sbh / split + 4 * sequence * batch * vocabulary / tensor
    return total
