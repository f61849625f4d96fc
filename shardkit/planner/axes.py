"""Layouts with stages, context or experts: the smaller problem that each of their devices has, and what they add.

`memory` and `work` know data, fsdp and tensor ways. The other axes are brought back to them:

- A stage is a model of layers / stages, whose embedding and head every stage holds, with the pipeline's microbatches in
  the place of accumulated ones. It saves the stage's input of every microbatch in flight and recomputes the rest, so
  that a microbatch costs a forward more, and computes at each tick what any stage does (`mode="masked"`). What it sends
  to the next stage is exposed.
- Context ways are data ways of a batch that is so many times larger, in sequences that are as many times shorter.
  Attention still sees whole sequences: its products are added, and what the ring sends is exposed as far as it takes
  longer than they do.
- Expert ways are data ways, over which experts are split and not reduced. The exchanges of a layer are exposed.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import zip_longest
from typing import Any, NamedTuple

from shardkit import cost
from shardkit.planner import work
from shardkit.planner.candidates import Candidate, Layout
from shardkit.planner.model import Model
from shardkit.schedules import interleaved, one_f_one_b


class Small(NamedTuple):
    """What one device of a layout has: data, fsdp and tensor ways alone, but for its part of the experts."""

    model: Model
    layout: Layout
    batch: int
    sequence: int


def one_device(model: Model, layout: Layout, batch: int, sequence: int) -> Small:
    """The smaller problem of a layout."""
    context = layout.context
    if layout.stage * context * layout.expert == 1:
        return Small(model, layout, batch, sequence)
    passes = layout.accumulate * layout.microbatches
    ways = Layout(layout.data * context, layout.fsdp, layout.tensor, passes, layout.remat, expert=layout.expert)
    dense = model.dense if layout.stage == 1 else 0  # a stage's layers are taken to be alike
    stage = model._replace(layers=model.layers // layout.stage, dense=dense)
    return Small(stage, ways, batch * context, sequence // context)


def why_not(model: Model, layout: Layout, sequence: int) -> str:
    """Why the layout does not divide the model or the sequence, as a sentence; "" if it does."""
    context, expert, stage = layout.context, layout.expert, layout.stage
    if model.layers % (stage * layout.chunks):
        return (
            f"stage * chunks must divide the layers; got {stage} * {layout.chunks} for {model.layers} layers. Choose "
            "fewer stages or chunks."
        )
    if stage == 1 and (layout.chunks, layout.microbatches) != (1, 1):
        return (
            f"chunks and microbatches must be 1 without stages; got chunks={layout.chunks}, "
            f"microbatches={layout.microbatches}. Pass stages, or accumulate={layout.microbatches}."
        )
    parts = layout.tensor * (2 * context if context > 1 else 1)  # zigzag order has two parts a device
    if parts > 1 and sequence % parts:
        return (
            f"a sequence must be divisible by tensor ways and by 2 * context; got {sequence} tokens over {parts} parts."
            " Choose another sequence or fewer ways."
        )
    if expert > 1 and (not model.experts or model.experts % expert or model.dense == model.layers):
        return f"expert must divide the experts; got {expert} for {model.experts} experts. Choose fewer ways."
    return ""


def with_axes(
    found: Candidate, small: Small, chip: cost.Chip, efficiency: float, links: cost.Links | None
) -> Candidate:
    """The estimate of a layout, from that of the smaller problem, with what stages, context and experts add."""
    model, layout = found.model, found.layout
    context, stage, tensor, expert = layout.context, layout.stage, layout.tensor, layout.expert
    local = small.batch // small.layout.parts  # sequences of a microbatch on a device
    tokens = local * small.sequence
    times = small.model.layers * small.layout.accumulate  # layers that a device runs

    def wire(axis: str, stride: int, sent: float, messages: int) -> float:
        """Seconds along an axis whose neighbours are `stride` chips apart; latency counts where it was measured."""
        if links is not None:
            return messages * links.of(axis).latency + sent / links.of(axis).bandwidth
        return sent / bandwidth(chip, stride, layout.axes[axis], layout.chips, permute=axis != "expert")

    # what a device's tokens compare with tokens of one device, and with those of all of them
    once = work.attention(small.model, small.layout, chip, local, small.sequence, efficiency)
    attention = once * context
    width, keys = model.heads * model.head // tensor, (model.kv_heads or model.heads) * model.head // tensor
    compute = found.compute_seconds + (attention - once) * times
    exposed, kept, idle, by_axis = found.exposed_seconds, found.activation_bytes, 0.0, dict(found.by_axis)
    if context > 1:
        sizes: dict[str, Any] = {"batch": local, "sequence": small.sequence * context, "ways": context}
        ring = cost.context_volume(**sizes, hidden=width, kv_hidden=keys, gradient_bytes=4)
        around = wire("context", tensor, ring.total, 3 * context)
        by_axis["context"] = around * times
        exposed += max(0.0, around - attention) * times
    if expert > 1:
        again = layout.remat != "none" or layout.fsdp > 1 or stage > 1
        sent = work.exchanged(small.model, small.layout, local, small.sequence, again=again)
        by_axis["expert"] = wire("expert", tensor * context, sent, (6 if again else 4) * (expert - 1)) * times
        exposed += by_axis["expert"]
    if stage > 1:
        idle, ticks, inputs = _pipelined(stage, layout.microbatches, layout.chunks)
        value = 2 * tokens * model.hidden / tensor
        kept += inputs * value
        forward = tokens * small.model.flops(small.sequence * context) / (tensor * chip.flops * efficiency)
        compute = (compute + forward * small.layout.accumulate) * (1 + idle)
        moves = 2 * ticks * layout.accumulate
        by_axis["stage"] = wire("stage", layout.chips // stage, moves * value, moves)
        exposed = exposed * (1 + idle) + by_axis["stage"]
    return found._replace(
        activation_bytes=kept,
        compute_seconds=compute,
        exposed_seconds=exposed,
        by_axis=tuple(by_axis.items()),
        bubble=idle,
    )


def bandwidth(chip: cost.Chip, stride: int, ways: int, chips: int, permute: bool = False) -> float:
    """Bytes/s that a chip sends in a group of so many ways, whose neighbours are `stride` chips apart.

    As for `aot`: a permute takes one direction of one link, or one network adapter.
    """
    if chip.torus:
        side = chips ** (1 / chip.torus)
        dims = math.ceil(math.log(ways, side) - 1e-9) if ways > 1 else 1
        return chip.link_bandwidth if permute else cost.group_bandwidth(chip, min(dims, chip.torus))
    if stride * ways <= chip.host:
        return chip.link_bandwidth
    together = 1 if permute else max(1, chip.host // stride)
    return min(chip.link_bandwidth, chip.network_bandwidth * together)


@lru_cache(maxsize=4096)
def _pipelined(stages: int, microbatches: int, chunks: int) -> tuple[float, int, int]:
    """Wasted time over work, the number of ticks, and the stage inputs that are held.

    At each tick all devices compute what any of them does, a forward or a backward that begins with one, or both.
    """
    schedule = interleaved(stages, microbatches, chunks) if chunks > 1 else one_f_one_b(stages, microbatches)
    seconds = ticks = 0
    for cells in zip_longest(*schedule.rows, fillvalue=()):
        done = {action.op for cell in cells for action in cell}
        seconds += ("F" in done) + 3 * ("B" in done)
        ticks += 1
    return seconds / (4 * microbatches * chunks) - 1, ticks, schedule.slots().inputs
