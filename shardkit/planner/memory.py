"""The memory of a transformer's train step: the buffers that a device holds at its worst moments, one by one.

Of the step that a candidate builds: `models.transformer`, its layers a scan, compute in bfloat16, gradients summed in
float32, Adam. All sizes are of one device; parts are over fsdp. Between steps it holds parameters and two moments in
parts, float32, and the batch; in every moment of a step, beside that:
- on TPUs with fsdp the parts of all layers in bfloat16: the compiler casts them once, before the loops over layers;
- of several microbatches, embedding and head gathered in bfloat16, and sums of gradients in float32: those of
  embedding and head are whole, since they are scattered once, after the last microbatch.

The moments, of which the largest is the peak:
- head: what all layers saved; the gathered head; the logits in float32 and their gradient in bfloat16.
- layer: what all layers saved; gradients of the parts of all layers, float32; the logits' gradient, or that of the head
  if it is smaller: the compiler waits with the matmul between the two; and the backward pass of one layer: its gathered
  weights, the gradient of its largest matrix before the scatter, what it recomputes, and the larger of the gradients of
  attention's scores and of the feed-forward layer. On GPUs, all the while, attention's mask as booleans and its
  constant in float32, each as many as the scores: they stand in front of the loops.
- update: gradients of the parts of all layers; of embedding and head a gradient in float32 and the bfloat16 one that it
  is cast from, on TPUs one after the other, with the logits' gradient that waits; on GPUs both, and a scattered one. Of
  several microbatches, the one in bfloat16 alone: it is added to the sums.

A layer saves its input under "full"; else also, in bfloat16, queries, keys, values, the weights of attention, their
product with the values (both not under "selective", and the weights not of a ring), what attention adds, gate and up;
of experts, which compute rows of tokens, those and their outputs, and nothing under "selective".
Without fsdp, jax saves under "none" what it would itself: also the inputs of the norms in float32, two results of each,
another product, and four arrays of the activation.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from shardkit import cost
from shardkit.planner.candidates import Layout
from shardkit.planner.model import Model

Bytes = tuple[float, float]  # of parameters, their state, copies and gradients; and of what grows with the batch


class Sizes(NamedTuple):
    """Elements on one device, whole over fsdp."""

    matrices: float  # of one layer, without experts
    experts: float  # of one layer, which tensor ways do not split
    largest: float  # of these
    gains: float  # of all norms and routers, which tensor ways do not split
    tables: int  # embedding and head, or one
    table: float  # each of them
    tokens: float  # of a microbatch
    width: float  # tokens times the model's width
    heads: float  # queries
    keys: float  # or values
    wide: float  # gate and up, or up; of the experts' rows
    routed: float  # rows of experts, times the model's width
    scores: float  # of attention
    weights: float  # of these, what it saves: a ring computes its weights again
    logits: float

    @property
    def layer(self) -> float:
        """All matrices of one layer."""
        return self.matrices + self.experts


def sizes_of(model: Model, layout: Layout, batch: int, sequence: int, ring: bool = False) -> Sizes:
    """The sizes for `batch` sequences on a device; of a `ring`, `sequence` is a device's part of one."""
    return _sizes(model, layout.tensor, layout.expert, batch, sequence, ring)


@lru_cache(maxsize=4096)  # many layouts of a search have the same
def _sizes(model: Model, tensor: int, expert: int, batch: int, sequence: int, ring: bool) -> Sizes:
    tokens, hidden, inner = batch * sequence, model.hidden, 2 if model.gated else 1
    scores = tokens * sequence * model.heads / tensor
    used, experts = model.layer()
    wide: float
    largest: float
    rows = 0
    if experts:
        each = model.width if model.expert_ffn is None else model.expert_ffn
        # experts are whole over tensor ways, whose devices have tokens of their own
        rows = model.rows(tokens // tensor, sequence // tensor, expert)
        wide = (rows + tokens * model.shared / tensor) * each * inner
        largest = model.experts / expert * hidden * each
    else:
        wide, largest = tokens * model.width * inner / tensor, hidden * model.width / tensor
    return Sizes(
        (used - 2 * hidden - hidden * model.experts) / tensor,
        experts / expert,
        largest,
        (2 * model.layers + 1) * hidden + model.layers * hidden * model.experts,
        1 if model.tied else 2,
        model.vocabulary * hidden / tensor,
        tokens,
        tokens * hidden,
        tokens * model.heads * model.head / tensor,
        tokens * (model.kv_heads or model.heads) * model.head / tensor,
        wide,
        rows * hidden,
        scores,
        0 if ring else scores,
        tokens * model.vocabulary / tensor,
    )


def held(model: Model, layout: Layout, batch: int, sequence: int) -> float:
    """Bytes between steps, with a step's tokens and targets; `batch` is of a microbatch on a device."""
    size = sizes_of(model, layout, batch, sequence)
    parts = (model.layers * size.layer + size.tables * size.table + size.gains) / layout.fsdp
    return 12 * parts + 8 * size.tokens * layout.accumulate


def saved(size: Sizes, layout: Layout, remat: str) -> float:
    """Bytes that one layer saves for its backward pass."""
    stream = size.width / layout.tensor
    if remat == "full":
        return 2 * stream
    # products of rows with the matrix of their expert are none that "selective" saves
    wide = 0 if size.routed and remat == "selective" else size.wide + size.routed
    matmuls = 2 * (2 * stream + size.heads + 2 * size.keys + wide)
    own = 12 * stream + 2 * size.heads + 4 * size.wide if layout.fsdp == 1 else 0
    return matmuls + (0 if remat == "selective" else 2 * (size.weights + size.heads) + own)


def peak(model: Model, layout: Layout, chip: cost.Chip, batch: int, sequence: int, *, ring: bool = False) -> Bytes:
    """The bytes of the worst moment of a step; `ring` as for `sizes_of`."""
    fsdp, accumulate = layout.fsdp, layout.accumulate
    size = sizes_of(model, layout, batch, sequence, ring)
    parts, table, tpu = model.layers * size.layer / fsdp, size.table, bool(chip.torus)
    always = held(model, layout, batch, sequence) + (2 * parts if tpu and fsdp > 1 else 0)
    if accumulate > 1:
        always += 4 * parts + (2 + 4) * size.tables * table
    kept = model.layers * saved(size, layout, layout.remat) + (0 if tpu else 5 * size.scores)
    head = (always + (0 if accumulate > 1 else 2 * table), kept + 6 * size.logits)
    weights, activations = _backward(size, tpu, layout)
    waiting = min((0, 2 * size.logits), (4 * table, 0), key=sum)
    layer = (always + 4 * parts + weights + waiting[0], kept + activations + waiting[1])
    together = ((4 * size.tables + 2 + 4 / fsdp) * table, 0)
    apart = ((6 if accumulate == 1 else 2) * table, 2 * size.logits)
    state, activations = apart if tpu or accumulate > 1 else together
    return max(head, layer, (always + 4 * parts + state, activations), key=sum)


def _backward(size: Sizes, tpu: bool, layout: Layout) -> Bytes:
    """The backward pass of one layer, beside what the forward pass saved."""
    weights = (2 * size.layer if layout.fsdp > 1 else 0) + 4 * size.largest
    # beside the scores' gradient, a GPU writes that of their weights in float32, and copies saved ones out of the stack
    scores = (2 if tpu else 8 if layout.remat == "none" else 6) * size.scores
    if layout.remat != "none":  # the forward pass again, whose scores are in float32
        scores = max(scores, 4 * size.scores)
    again = saved(size, layout, "none") - saved(size, layout, layout.remat)
    return weights, again + max(scores, 3 * size.wide)
