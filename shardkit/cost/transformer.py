"""Parameters and FLOPs of a decoder-only transformer, training time, and model FLOPs utilization.

A multiply-add is two FLOPs; only matrix multiplications are counted. `hidden` is the model width h, `ffn` the width of
the feed-forward layers. Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM (arXiv:2104.04473), section 5.1 and appendix; the variants are counted matrix by matrix.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from shardkit import _check
from shardkit._typed import typed
from shardkit.cost.activations import recomputation
from shardkit.cost.hardware import Chip, chip


class _Matrices(NamedTuple):
    """Weights of one layer's matrices, and the widths of its biases and attention scores."""

    attention: int
    feed_forward: int
    biases: int
    heads_width: int


def _matrices(
    where: str,
    hidden: int,
    heads: int | None,
    kv_heads: int | None,
    head_size: int | None,
    ffn: int | None,
    gated: bool,
) -> _Matrices:
    [hidden] = _check.whole(where, hidden=hidden)
    if heads is None and (kv_heads is not None or head_size is not None):
        raise ValueError(
            f"{where}: kv_heads and head_size need heads; got heads=None, kv_heads={kv_heads}, head_size={head_size}. "
            "Pass heads."
        )
    query = kv = hidden
    if heads is not None:
        kv_heads = heads if kv_heads is None else kv_heads
        heads, kv_heads = _check.whole(where, heads=heads, kv_heads=kv_heads)
        if head_size is None:
            _check.divisor(where, "heads", heads, "hidden", hidden)
            head_size = hidden // heads
        [head_size] = _check.whole(where, head_size=head_size)
        _check.divisor(where, "kv_heads", kv_heads, "heads", heads)
        query, kv = heads * head_size, kv_heads * head_size
    [ffn] = _check.whole(where, ffn=4 * hidden if ffn is None else ffn)
    up = 2 * ffn if gated else ffn
    return _Matrices(
        attention=hidden * (2 * query + 2 * kv),
        feed_forward=hidden * (up + ffn),
        biases=query + 2 * kv + hidden + up + hidden,
        heads_width=query,
    )


@partial(typed, only=bool)
def transformer_parameters(
    *,
    layers: int,
    hidden: int,
    vocabulary: int = 0,
    sequence: int = 0,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_size: int | None = None,
    ffn: int | None = None,
    gated: bool = False,
    biases: bool = True,
    tied: bool = True,
    final_norm: bool = False,
) -> int:
    """The number of parameters of a transformer.

    With the first four arguments it is Megatron-LM's P = 12 l h^2 (1 + 13/(12h) + (V + s)/(12 l h)): biases,
    LayerNorms, learned positions, the embedding tied to the head, and no final norm. A LLaMA is `heads=, kv_heads=,
    ffn=, gated=True, biases=False, tied=False, final_norm=True` without `sequence` (rotary positions have no
    parameters).

    Args:
        layers: number of layers l.
        hidden: model width h.
        vocabulary: number of token values V; 0 leaves the embedding and the head out.
        sequence: learned positions s; 0: none.
        heads: attention heads; None: as many as fill `hidden`.
        kv_heads: key/value heads, a divisor of heads; None: heads.
        head_size: width of a head; None: hidden / heads.
        ffn: width of the feed-forward layers; None: 4 h.
        gated: a third feed-forward matrix (SwiGLU, GeGLU).
        biases: biases on every matrix and in the norms (LayerNorm); False: none, and norms with a gain only (RMSNorm).
        tied: the embedding is the output head.
        final_norm: a norm before the head.

    Returns:
        Number of parameters.

    Raises:
        ValueError: a size below 1, heads that do not divide, or kv_heads or head_size without heads.

    Example:
        >>> sk.cost.transformer_parameters(layers=12, hidden=768, vocabulary=50257, sequence=1024)
        124438272

    Source: Narayanan et al., equation 2 and table 1; Touvron et al., LLaMA (arXiv:2302.13971), section 2.2.
    """
    where = "transformer_parameters"
    layers, hidden = _check.whole(where, layers=layers, hidden=hidden)
    vocabulary, sequence = _check.count(where, vocabulary=vocabulary, sequence=sequence)
    m = _matrices(where, hidden, heads, kv_heads, head_size, ffn, gated)
    norm = 2 * hidden if biases else hidden
    layer = m.attention + m.feed_forward + 2 * norm + (m.biases if biases else 0)
    embeddings = (vocabulary * (1 if tied else 2) + sequence) * hidden
    return layers * layer + embeddings + (norm if final_norm else 0)


@partial(typed, only=bool)
def transformer_flops(
    *,
    layers: int,
    hidden: int,
    sequence: int,
    batch: int = 1,
    vocabulary: int = 0,
    recompute: str | bool = "none",
    heads: int | None = None,
    kv_heads: int | None = None,
    head_size: int | None = None,
    ffn: int | None = None,
    gated: bool = False,
    causal: bool = False,
) -> float:
    """FLOPs of one training step, forward and backward.

    Without recomputation 72 B s l h^2 (1 + s/(6h) + V/(12 l h)), the model FLOPs of
    utilization; with full recomputation, Megatron-LM's 96 B s l h^2 (1 + s/(6h) + V/(16 l h)); with selective
    recomputation, 72 B s l h^2 (1 + s/(3h) + V/(12 l h)), the hardware FLOPs of its paper. That form adds 12 B s^2 h
    per layer, the whole cost of attention's scores forward and backward; the two repeated matmuls are a third of it.
    Backward costs twice forward.

    Args:
        layers, hidden, heads, kv_heads, head_size, ffn, gated: as for `transformer_parameters`.
        sequence: tokens per sequence s.
        batch: sequences per step B.
        vocabulary: number of token values V; 0 leaves the head out.
        recompute: "none", "selective" or "full" (False and True: the first and the last).
        causal: counts half of the scores, as with a kernel that skips masked blocks; the papers count all.

    Returns:
        FLOPs.

    Raises:
        ValueError: as `transformer_parameters`, or an unknown recompute.

    Example:
        >>> f"{sk.cost.transformer_flops(layers=12, hidden=768, sequence=1024, vocabulary=50257):.3g}"
        '8.75e+11'

    Source: Narayanan et al., equation 3; Korthikanti et al. (arXiv:2205.05198), appendix A, for the model FLOPs and
    those of selective recomputation.
    """
    where = "transformer_flops"
    layers, hidden, sequence, batch = _check.whole(where, layers=layers, hidden=hidden, sequence=sequence, batch=batch)
    [vocabulary] = _check.count(where, vocabulary=vocabulary)
    m = _matrices(where, hidden, heads, kv_heads, head_size, ffn, gated)
    recompute = recomputation(where, recompute)
    scores = 4 * sequence * m.heads_width / (2 if causal else 1)
    layer = 2 * (m.attention + m.feed_forward) + scores
    # "selective" as published: the scores' forward and backward, not only their forward
    repeated = {"none": 0, "selective": 3 * scores, "full": layer}[recompute]
    return float(batch * sequence * (layers * (3 * layer + repeated) + 3 * 2 * hidden * vocabulary))


@partial(typed, only=bool)
def training_flops(parameters: float, tokens: float, *, recompute: bool = False) -> float:
    """FLOPs of training without the attention scores: 6 N D, or 8 N D with full recomputation.

    Args:
        parameters: active parameters N per token (not all experts of a mixture).
        tokens: tokens D trained on.
        recompute: whether the backward repeats the forward.

    Returns:
        FLOPs.

    Raises:
        ValueError: a negative number.

    Example:
        >>> sk.cost.training_flops(parameters=7e9, tokens=1e12)
        4.2e+22

    Source: Kaplan et al., Scaling Laws for Neural Language Models (arXiv:2001.08361), section 2.1.
    """
    parameters, tokens = _check.at_least_zero("training_flops", parameters=parameters, tokens=tokens)
    return (8.0 if recompute else 6.0) * parameters * tokens


@partial(typed, only=bool)
def training_time(
    parameters: float, tokens: float, *, chips: int, flops_per_chip: float, recompute: bool = True
) -> float:
    """Seconds of training at an achieved rate: 8 T P / (n X), or 6 T P / (n X) without recomputation.

    Args:
        parameters: number of parameters P.
        tokens: tokens T trained on.
        chips: number of chips n.
        flops_per_chip: achieved FLOP/s X per chip (not its peak), recomputation included.
        recompute: whether activations are recomputed.

    Returns:
        Seconds.

    Raises:
        ValueError: chips below 1, a rate that is not positive, or a negative number.

    Example:
        >>> days = sk.cost.training_time(175e9, 300e9, chips=1024, flops_per_chip=140e12) / 86400
        >>> round(days)
        34

    Source: Narayanan et al., equation 4.
    """
    [chips] = _check.whole("training_time", chips=chips)
    [flops_per_chip] = _check.positive("training_time", flops_per_chip=flops_per_chip)
    return training_flops(parameters, tokens, recompute=recompute) / (chips * flops_per_chip)


def mfu(flops: float, seconds: float, *, peak: float | str | Chip, chips: int = 1) -> float:
    """Model FLOPs utilization: a step's model FLOPs over the peak of the chips.

    Args:
        flops: model FLOPs per step (`transformer_flops` without recomputation); with recomputation the result is
            hardware FLOPs utilization.
        seconds: time of a step.
        peak: FLOP/s of one chip, or a chip or its name.
        chips: number of chips.

    Returns:
        The fraction, without unit.

    Raises:
        ValueError: a time or peak that is not positive, chips below 1, or an unknown chip.

    Example:
        >>> round(sk.cost.mfu(flops=1e15, seconds=0.1, peak="v5p", chips=64), 2)
        0.34

    Source: Chowdhery et al., PaLM (arXiv:2204.02311), section 4.1.
    """
    rate = chip(peak).flops if isinstance(peak, str | Chip) else peak
    [chips] = _check.whole("mfu", chips=chips)
    seconds, rate = _check.positive("mfu", seconds=seconds, peak=rate)
    [flops] = _check.at_least_zero("mfu", flops=flops)
    return flops / (seconds * chips * rate)
