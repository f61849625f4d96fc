"""The memory of a transformer's train step: the buffers that a device holds at its worst moments, one by one.

Of the step that a candidate builds (`models.transformer`, its layers a scan; compute in bfloat16; gradients summed in
float32; Adam). M is the matrices of a layer and E an embedding or head on a device, whole over fsdp; n its tokens in a
microbatch; S = batch heads n_sequence^2 its attention scores; tensor ways split all of M, E and S, and the tokens between
blocks.

Held between steps: parameters and two moments, float32 over fsdp; the batch.

Held in every moment of the step, beside that:
- the cast of the layers' parts to bfloat16, which the compiler makes once, in front of the loops over layers;
- of several microbatches: embedding and head gathered in bfloat16, and sums of gradients in float32, which for embedding
  and head are whole: they are scattered once, after the last microbatch.

Moments, of which the largest is the peak:
- head: what all layers saved; the gathered head; logits in float32 and their gradient in bfloat16.
- layer: what all layers saved; the gradients of the layers' parts in float32; the smaller of the logits' gradient in
  bfloat16 and the head's gradient, for which the compiler waits with the matmul that makes the other; and one layer's
  backward pass: gathered weights, a matrix's gradient before it is scattered, what it recomputes, and scores.
- update: the gradients of the layers' parts; of embedding and head, a float32 gradient and the bfloat16 one that it is
  cast from.

A layer saves its input under "full"; else the results of its matmuls in bfloat16: queries, keys, values, the attention
weights (S), their product with the values, what attention adds, gate and up. "selective" is without S and the product.
"""

from __future__ import annotations

from typing import NamedTuple

from shardkit import cost
from shardkit.planner.candidates import Layout, Model


class Bytes(NamedTuple):
    """The bytes of a moment: of weights, their state and their gradients, and of what grows with the batch."""

    state: float
    activations: float


class Sizes(NamedTuple):
    """Elements on one device, whole over fsdp."""

    matrices: float  # of one layer
    gains: float  # of all norms
    table: float  # embedding or head
    tables: int  # how many of them
    tokens: float  # in a microbatch
    width: float  # tokens times model width, all tokens
    heads: float  # the same of queries
    keys: float  # of keys, or values
    wide: float  # of the feed-forward layer
    scores: float  # of attention
    logits: float

    @property
    def parameters(self) -> float:
        """Without the layers."""
        return self.tables * self.table


def sizes_of(model: Model, tensor: int, batch: int, sequence: int) -> Sizes:
    """The sizes for `batch` sequences on a device."""
    tokens = batch * sequence
    kv = (model.kv_heads or model.heads) / model.heads
    return Sizes(
        matrices=(model.parameters(1, 0) - 3 * model.hidden) / tensor,
        gains=(2 * model.layers + 1) * model.hidden,
        table=model.vocabulary * model.hidden / tensor,
        tables=1 if model.tied else 2,
        tokens=tokens,
        width=tokens * model.hidden,
        heads=tokens * model.hidden / tensor,
        keys=tokens * model.hidden * kv / tensor,
        wide=tokens * model.width / tensor,
        scores=tokens * sequence * model.heads / tensor,
        logits=tokens * model.vocabulary / tensor,
    )


def held(model: Model, layout: Layout, batch: int, sequence: int) -> float:
    """Bytes between steps, with a step's tokens and targets; `batch` is of a microbatch on a device."""
    size = sizes_of(model, layout.tensor, batch, sequence)
    parts = (model.layers * size.matrices + size.tables * size.table + size.gains) / layout.fsdp
    return 12 * parts + 8 * size.tokens * layout.accumulate


def saved(size: Sizes, tensor: int, remat: str) -> float:
    """Bytes that one layer saves for its backward pass."""
    stream = size.width / tensor
    if remat == "full":
        return 2 * stream
    matmuls = 2 * (2 * stream + size.heads + 2 * size.keys + 2 * size.wide)
    return matmuls + (0 if remat == "selective" else 2 * (size.scores + size.heads))


def peak(model: Model, layout: Layout, chip: cost.Chip, batch: int, sequence: int) -> Bytes:
    """The bytes of the worst moment of a step."""
    _, fsdp, tensor, accumulate, remat = layout
    size = sizes_of(model, tensor, batch, sequence)
    layers = model.layers * size.matrices / fsdp
    always, mask = held(model, layout, batch, sequence), 0.0
    if chip.torus:
        always += 2 * layers
    else:
        mask = 5 * size.scores
    if accumulate > 1:
        always += 4 * layers + (2 + 4) * size.tables * size.table
    residuals = model.layers * saved(size, tensor, remat) + mask
    head = Bytes(always + (0 if accumulate > 1 else 2 * size.table), residuals + 6 * size.logits)
    weights, activations = _layer(size, chip, tensor, fsdp, remat)
    waiting = min(Bytes(0, 2 * size.logits), Bytes(4 * size.table, 0), key=sum)
    layer = Bytes(always + 4 * layers + weights + waiting.state, residuals + activations + waiting.activations)
    update = Bytes(always + 4 * layers + 6 * size.table, 2 * size.logits)
    if not chip.torus and accumulate == 1:
        update = Bytes(always + 4 * layers + (10 + 4 / fsdp) * size.table, 0)
    return max(head, layer, update, key=sum)


def _layer(size: Sizes, chip: cost.Chip, tensor: int, fsdp: int, remat: str) -> Bytes:
    """One layer's backward pass, beside what the forward pass saved."""
    weights = (2 * size.matrices if fsdp > 1 else 0) + 4 * size.matrices / 3
    # the TPU's compiler multiplies and scales the scores' gradient in one loop, that of GPUs in three
    scores = (2 if chip.torus else 8) * size.scores
    feed_forward = 2 * 3 * size.wide
    if remat == "none":
        return Bytes(weights, max(scores, feed_forward))
    again = saved(size, tensor, "none") - saved(size, tensor, remat)
    return Bytes(weights, again + max(4 * size.scores, scores, feed_forward))
