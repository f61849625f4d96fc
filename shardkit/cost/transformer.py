"""Parameters and FLOPs of a decoder-only transformer, and model FLOPs utilization.

A multiply-add is two FLOPs; only matrix multiplications are counted. `hidden` is the model width h, `ffn` the width of
the feed-forward layers. Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM (arXiv:2104.04473), section 5.1 and appendix; the variants are counted matrix by matrix.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from shardkit._arguments import checks
from shardkit._arguments.typed import typed
from shardkit.cost.activations import recomputation
from shardkit.cost.hardware import Chip, chip


class _Layer(NamedTuple):
    """Counts of one layer."""

    attention: int  # weights of its matrices
    feed_forward: int
    biases: int


def _count_layer(
    where: str, hidden: int, heads: int | None, kv_heads: int | None, ffn: int | None, gated: bool
) -> _Layer:
    """The weights and biases of one layer's matrices."""
    [hidden] = checks.integers_from_one(where, hidden=hidden)
    if heads is None and kv_heads is not None:
        raise ValueError(f"{where}: kv_heads needs heads; got heads=None, kv_heads={kv_heads}. Pass heads.")
    kv_hidden = hidden
    if heads is not None:
        if kv_heads is None:
            kv_heads = heads
        heads, kv_heads = checks.integers_from_one(where, heads=heads, kv_heads=kv_heads)
        checks.divisor(where, "heads", heads, "hidden", hidden)
        checks.divisor(where, "kv_heads", kv_heads, "heads", heads)
        kv_hidden = kv_heads * (hidden // heads)
    if ffn is None:
        ffn = 4 * hidden
    [ffn] = checks.integers_from_one(where, ffn=ffn)
    up = ffn
    if gated:  # two matrices, of which one gates the other
        up = 2 * ffn
    # The biases are those of queries, output and the last feed-forward matrix, of keys and values, and of what goes up.
    return _Layer(
        attention=hidden * (2 * hidden + 2 * kv_hidden),  # queries and output; keys and values
        feed_forward=hidden * (up + ffn),
        biases=3 * hidden + 2 * kv_hidden + up,
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
        ffn: width of the feed-forward layers; None: 4 h.
        gated: a third feed-forward matrix (SwiGLU, GeGLU).
        biases: biases on every matrix and in the norms (LayerNorm); False: none, and norms with a gain only (RMSNorm).
        tied: the embedding is the output head.
        final_norm: a norm before the head.

    Raises:
        ValueError: a size below 1, heads that do not divide, or kv_heads without heads.

    Example:
        >>> sk.cost.transformer_parameters(layers=12, hidden=768, vocabulary=50257, sequence=1024)
        124438272

    Source: Narayanan et al., equation 2 and table 1; Touvron et al., LLaMA (arXiv:2302.13971), section 2.2.
    """
    where = "transformer_parameters"
    layers, hidden = checks.integers_from_one(where, layers=layers, hidden=hidden)
    vocabulary, sequence = checks.integers_from_zero(where, vocabulary=vocabulary, sequence=sequence)
    counts = _count_layer(where, hidden, heads, kv_heads, ffn, gated)
    # A LayerNorm has a gain and a bias, an RMSNorm the gain alone.
    norm = hidden
    if biases:
        norm = 2 * hidden
    layer = counts.attention + counts.feed_forward + 2 * norm
    if biases:
        layer += counts.biases
    tables = 2
    if tied:
        tables = 1
    parameters = layers * layer + (vocabulary * tables + sequence) * hidden
    if final_norm:
        parameters += norm
    return parameters


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
    ffn: int | None = None,
    gated: bool = False,
) -> float:
    """FLOPs of one training step, forward and backward.

    Without recomputation 72 B s l h^2 (1 + s/(6h) + V/(12 l h)), the model FLOPs of
    utilization; with full recomputation, Megatron-LM's 96 B s l h^2 (1 + s/(6h) + V/(16 l h)); with selective
    recomputation, 72 B s l h^2 (1 + s/(3h) + V/(12 l h)), the hardware FLOPs of its paper. That form adds 12 B s^2 h
    per layer, the whole cost of attention's scores forward and backward; the two repeated matmuls are a third of it.
    Backward costs twice forward.

    Args:
        layers, hidden, heads, kv_heads, ffn, gated: as for `transformer_parameters`.
        sequence: tokens per sequence s.
        batch: sequences per step B.
        vocabulary: number of token values V; 0 leaves the head out.
        recompute: "none", "selective" or "full" (False and True: the first and the last).

    Raises:
        ValueError: as `transformer_parameters`, or an unknown recompute.

    Example:
        >>> f"{sk.cost.transformer_flops(layers=12, hidden=768, sequence=1024, vocabulary=50257):.3g}"
        '8.75e+11'

    Source: Narayanan et al., equation 3; Korthikanti et al. (arXiv:2205.05198), appendix A, for the model FLOPs and
    those of selective recomputation.
    """
    where = "transformer_flops"
    layers, hidden, sequence, batch = checks.integers_from_one(
        where, layers=layers, hidden=hidden, sequence=sequence, batch=batch
    )
    [vocabulary] = checks.integers_from_zero(where, vocabulary=vocabulary)
    counts = _count_layer(where, hidden, heads, kv_heads, ffn, gated)
    recompute = recomputation(where, recompute)
    # FLOPs of one token forward; backward takes twice as many.
    # The scores are two matmuls, queries with keys and weights with values, of 2 s h each. As in the papers, a causal
    # mask halves nothing.
    scores = 4 * sequence * hidden
    layer = 2 * (counts.attention + counts.feed_forward) + scores
    head = 2 * hidden * vocabulary
    # "selective" as published: the scores' forward and backward, not only their forward
    repeated = {"none": 0, "selective": 3 * scores, "full": layer}[recompute]
    token = layers * (3 * layer + repeated) + 3 * head
    return float(batch * sequence * token)


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
    if isinstance(peak, str | Chip):
        peak = chip(peak).flops
    [chips] = checks.integers_from_one("mfu", chips=chips)
    seconds, peak = checks.positive("mfu", seconds=seconds, peak=peak)
    [flops] = checks.at_least_zero("mfu", flops=flops)
    return flops / (seconds * chips * peak)
