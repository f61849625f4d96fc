"""Layouts with stages, context or experts, as the smaller problem that each of their devices has.

`estimate` knows data, fsdp and tensor ways. The other axes are brought back to them:

- A stage is a model of layers / stages, whose embedding and head every stage holds, with the pipeline's microbatches in
  the place of accumulated ones. It saves the stage's input of every microbatch in flight, recomputes the rest, so that
  a microbatch costs a forward more, and idles as the simulated schedule does where ticks are synchronous. What it sends
  to the next stage is exposed.
- Context ways are data ways of a batch that is so many times larger, in sequences that are as many times shorter.
  Attention still sees whole sequences: its products are added, and what the ring sends is exposed where they are shorter.
- Expert ways are data ways, over which experts are split and not reduced. The four exchanges of a layer are exposed.

Of an axis that is none of "data", "fsdp" and "tensor" a chip sends over one dimension of the torus, or over the links
that `cost.chip` gives for its host and between hosts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from shardkit import cost
from shardkit.planner.candidates import Candidate, Layout
from shardkit.planner.model import Model
from shardkit.schedules import interleaved, one_f_one_b

# What one device has of a layout: its model, its data, fsdp and tensor ways, the batch and the tokens of a sequence.
Smaller = Callable[[Model, Layout, int, int], Candidate]


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
            f"a sequence must be divisible by tensor ways and by 2 * context; got {sequence} tokens over {parts} parts. "
            "Choose another sequence or fewer ways."
        )
    if expert > 1 and (not model.experts or model.experts % expert):
        return f"expert must divide the experts; got {expert} for {model.experts} experts. Choose fewer ways."
    return ""


def beside(
    model: Model,
    layout: Layout,
    chip: cost.Chip,
    batch: int,
    sequence: int,
    *,
    rate: float,
    forward: float,
    links: cost.Links | None,
    smaller: Smaller,
) -> Candidate:
    """The estimate of a layout with stages, context or experts, from that of one device's smaller problem.

    `rate` is the FLOP/s that matmuls reach, `forward` the seconds of a step's forward on one device.
    """

    def wire(axis: str, ways: int, stride: int, sent: float, messages: int) -> float:
        """Seconds along an axis whose neighbours are `stride` chips apart; latency counts as far as it was measured."""
        if links is not None:
            return messages * links.of(axis).latency + sent / links.of(axis).bandwidth
        if chip.torus or stride * ways <= chip.host:
            return sent / cost.group_bandwidth(chip)
        return sent / min(chip.link_bandwidth, chip.network_bandwidth * max(1, chip.host // stride))

    context, stage, tensor = layout.context, layout.stage, layout.tensor
    local, passes = batch // layout.parts, layout.accumulate * layout.microbatches
    part = model._replace(layers=model.layers // stage)
    inner = Layout(layout.data * context * layout.expert, layout.fsdp, tensor, passes, layout.remat)
    found = smaller(part, inner, batch * context, sequence // context)

    # attention sees whole sequences: two products forward, four backward, and two that remat repeats
    tokens, width = local * sequence // context, model.heads * model.head
    products = (6 if layout.remat == "none" else 8) * 2 * tokens * sequence * width / tensor / rate
    compute = found.compute_seconds + products * (1 - 1 / context) * part.layers * passes
    by_axis, exposed = dict(found.by_axis), found.exposed_seconds
    if context > 1:
        ring = cost.context_volume(
            batch=local,
            sequence=sequence,
            hidden=width // tensor,
            kv_hidden=(model.kv_heads or model.heads) * model.head // tensor,
            ways=context,
            gradient_bytes=4,
        )
        around = wire("context", context, tensor, ring.total, 3 * context)
        by_axis["context"] = around * part.layers * passes
        exposed += max(0.0, around - products) * part.layers * passes
    if layout.expert > 1:
        sent = cost.expert_volume(tokens=tokens, hidden=model.hidden, ways=layout.expert, top_k=model.top_k).total
        exchange = wire("expert", layout.expert, tensor * context, sent, 4 * (layout.expert - 1))
        by_axis["expert"] = exchange * part.layers * passes
        exposed += by_axis["expert"]
    kept, idle = found.activation_bytes, 0.0
    if stage > 1:
        idle, ticks, inputs = _pipelined(stage, layout.microbatches, layout.chunks)
        value = 2 * tokens * model.hidden / tensor
        kept += inputs * value
        moves = 2 * ticks * layout.accumulate
        by_axis["stage"] = wire("stage", stage, layout.chips // stage, moves * value, moves)
        exposed = exposed * (1 + idle) + by_axis["stage"]
        compute = (compute + forward) * (1 + idle)  # the backward of a stage begins with its forward
    return found._replace(
        model=model,
        layout=layout,
        activation_bytes=kept,
        compute_seconds=compute,
        exposed_seconds=exposed,
        by_axis=tuple(by_axis.items()),
        bubble=idle,
    )


@lru_cache(maxsize=4096)
def _pipelined(stages: int, microbatches: int, chunks: int) -> tuple[float, int, int]:
    """Idle time over work where ticks are synchronous, the number of ticks, and the stage inputs that are held."""
    schedule = interleaved(stages, microbatches, chunks) if chunks > 1 else one_f_one_b(stages, microbatches)
    return schedule.simulate(1, 3, synchronous=True).bubble, max(map(len, schedule.rows)), schedule.slots().inputs
