"""The memory of a transformer's train step: the buffers that a device holds at its worst moments, one by one.

Of the step that a candidate builds: `models.transformer`, its layers a scan, compute in bfloat16, gradients summed in
float32, Adam. All sizes are of one device. Between steps it holds parameters and two moments, split over fsdp, in
float32, and the batch. In every moment of a step, beside that, of several microbatches: embedding and head gathered in
bfloat16, and sums of gradients in float32. Those of embedding and head are whole, since they are scattered once, after
the last microbatch. What a compiler adds is in `habits.py`.

The moments, of which the largest is the peak:

- head: what all layers saved; the gathered head; the logits in float32 and their gradient in bfloat16.
- layer: what all layers saved; gradients of all layers' parts in float32; the gradient of the logits, or that of the
  head, which is made of it; and the backward pass of one layer.
- update: gradients of all layers' parts; of embedding and head, one after the other, a gradient in float32 and the
  bfloat16 one that it is cast from. Of several microbatches the one in bfloat16 alone: it is added to the sums.

Worked example: one layer of 1,000 elements on fsdp=4. Between steps a device holds 12 bytes of 250 elements. In the
backward pass of the layer there are the gathered weights in bfloat16, 2,000 bytes, and a gradient of its parts, 1,000.
"""

from __future__ import annotations

from typing import NamedTuple

from shardkit import cost
from shardkit.planner.habits import Habits, habits_of
from shardkit.planner.share import Share
from shardkit.planner.sizes import Sizes, count_sizes

# Bytes of an element.
_BF16 = 2
_F32 = 4
_ADAM = 3 * _F32  # a parameter and two moments
_TOKEN = 4 + 4  # a token and its target, as int32


class Bytes(NamedTuple):
    """Bytes of a moment.

    Attributes:
        state: of parameters, their state, copies and gradients.
        activations: of what grows with the batch.
    """

    state: float
    activations: float

    def plus(self, other: Bytes) -> Bytes:
        """Both together."""
        return Bytes(self.state + other.state, self.activations + other.activations)

    @property
    def total(self) -> float:
        """The sum."""
        return self.state + self.activations


def count_held(share: Share) -> float:
    """Bytes between steps, with a step's tokens and targets."""
    sizes = count_sizes(share)
    parameters = share.model.layers * sizes.layer + sizes.tables * sizes.table + sizes.gains
    return _ADAM * parameters / share.layout.fsdp + _TOKEN * share.tokens * share.passes


def count_saved(share: Share, remat: str) -> float:
    """Bytes that one layer saves for its backward pass.

    "full" saves the layer's input. Without recomputation it is also, in bfloat16, queries, keys, values, the weights of
    attention, their product with the values, what attention adds, gate and up; of experts their rows and their outputs.
    "selective" saves no weights of attention and no product with the values, and nothing of experts, whose products are
    none that its policy saves.

    Under "none" without fsdp there is no `jax.checkpoint`, and jax saves what it would itself: also the inputs of the
    norms in float32, two results of each, another product, and four arrays of the activation.
    """
    sizes = count_sizes(share)
    stream = sizes.stream / share.layout.tensor
    if remat == "full":
        return _BF16 * stream
    products = 2 * stream + sizes.queries + 2 * sizes.keys
    if remat == "selective":
        if not sizes.rows:
            products += sizes.inner
        return _BF16 * products
    products += sizes.inner + sizes.rows + sizes.saved_weights + sizes.queries
    saved = _BF16 * products
    if share.layout.fsdp == 1:
        saved += 12 * stream + 2 * sizes.queries + 4 * sizes.inner
    return saved


def find_peak(share: Share, chip: cost.Chip) -> Bytes:
    """The bytes of the worst moment of a step."""
    sizes = count_sizes(share)
    habits = habits_of(chip)
    layer_parts = share.model.layers * sizes.layer / share.layout.fsdp
    is_accumulated = share.passes > 1

    always = count_held(share)
    if share.layout.fsdp > 1:
        always += habits.cast_layer * layer_parts
    if is_accumulated:
        always += _F32 * layer_parts + (_BF16 + _F32) * sizes.tables * sizes.table
    saved = share.model.layers * count_saved(share, share.layout.remat)
    saved += habits.attention_mask * sizes.written_scores
    gradients = _F32 * layer_parts

    # With several microbatches the head is gathered once for all, and counted in `always`.
    gathered_head = 0 if is_accumulated else _BF16 * sizes.table
    head = Bytes(always + gathered_head, saved + (_F32 + _BF16) * sizes.logits)
    layer = Bytes(always + gradients, saved).plus(_wait_for_head(sizes)).plus(_run_backward(share, sizes, habits))
    table_gradients = _BF16 if is_accumulated else _F32 + _BF16
    update = Bytes(always + gradients + table_gradients * sizes.table, 0)
    return max(head, layer, update, key=lambda moment: moment.total)


def _wait_for_head(sizes: Sizes) -> Bytes:
    """What is left of the head while the layers' backward passes run: the smaller of two gradients.

    One of them must be there: the gradient of the head is part of the update, and a product of the logits' gradient.
    """
    head_gradient = Bytes(_F32 * sizes.table, 0)
    logits_gradient = Bytes(0, _BF16 * sizes.logits)
    return min(logits_gradient, head_gradient, key=lambda gradient: gradient.total)


def _run_backward(share: Share, sizes: Sizes, habits: Habits) -> Bytes:
    """The backward pass of one layer, beside what the forward pass saved.

    Its gathered weights, the gradient of its largest matrix before the scatter, what it recomputes, and the larger of
    the gradients of attention's scores and of the feed-forward layer.
    """
    weights = _F32 * sizes.largest
    if share.layout.fsdp > 1:
        weights += _BF16 * sizes.layer
    score_bytes = _BF16 + habits.score_gradient
    if share.layout.remat != "none":
        score_bytes = max(score_bytes, _F32)  # the forward pass again, whose scores are in float32
    feed_forward = (_BF16 + _BF16 / 2) * sizes.inner  # of gate and up, and the product that both are made of
    recomputed = count_saved(share, "none") - count_saved(share, share.layout.remat)
    return Bytes(weights, recomputed + max(score_bytes * sizes.written_scores, feed_forward))
