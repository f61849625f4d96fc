"""Which bytes a layout of a transformer sends in a step: the one place in the planner, axis by axis.

What one collective sends is `cost.wire`, what a ring of attention sends `cost.context_volume`. This module says how
often the step of `models.transformer` issues them, and on arrays of which size. A test compares the sum, to the byte,
with the census of the traced step. Models that are no transformer are counted leaf by leaf, from their plan, by
`plans/traffic.py`; a search of thousands of layouts needs closed forms.
"""

from __future__ import annotations

from typing import NamedTuple

from shardkit import cost
from shardkit.cost.collectives import sent_share
from shardkit.planner.pipelined import run_pipeline
from shardkit.planner.share import Share
from shardkit.planner.sizes import count_sizes

# How often a layer gathers or scatters its activations over tensor ways: four times forward, six backward, and again
# what the backward pass repeats. Experts take the tokens as sequence parallelism splits them, so that attention alone
# does.
_LAYER_EXCHANGES = {"none": 10, "selective": 11, "full": 13}
_ATTENTION_EXCHANGES = {"none": 5, "selective": 6, "full": 7}
_TABLE_EXCHANGES = 4  # embedding and head, forward and backward
_LOSS_SUMS = 2 * 16  # bytes a token over tensor ways: four floats are summed

# Bytes of an element.
_BF16 = 2
_F32 = 4
_I32 = 4


class AxisTraffic(NamedTuple):
    """What a device sends over one axis in a step.

    Attributes:
        sent: bytes.
        messages: one after the other.
    """

    sent: float
    messages: float


def count_traffic(share: Share) -> dict[str, AxisTraffic]:
    """What a device sends in a step, by the axis of `Layout`; an axis of one device sends nothing."""
    return {
        "data": _reduce_gradients(share),
        "fsdp": _gather_and_scatter_parameters(share),
        "tensor": _exchange_activations(share),
        "context": _pass_keys_around(share),
        "expert": _exchange_rows(share),
        "stage": _send_to_next_stage(share),
    }


def _reduce_gradients(share: Share) -> AxisTraffic:
    """Gradients are summed over the devices that hold the same parameters, once a step, in float32.

    Each kind of leaf has other devices: expert ways hold different experts, tensor ways different parts of matrices,
    and the same gains of norms. The loss and the accuracy take 16 bytes; with experts their balance is summed, in each
    layer forward and where it runs again, and the number of rows that were dropped.

    Worked example: 1,000 gradients on data=4 and fsdp=2. Each device holds 500 of them, and an all_reduce over 4 sends
    2 * 3/4 * 4 * 500 = 3,000 bytes.
    """
    layout = share.layout
    sizes = count_sizes(share)
    layers = share.model.layers
    # The devices of a sum, and its bytes on each of them.
    sums = [
        (share.replicas, _F32 * (layers * sizes.matrices + sizes.tables * sizes.table) / layout.fsdp),
        (share.expert_replicas * layout.tensor, _F32 * layers * sizes.experts / layout.fsdp),
        (share.replicas * layout.tensor, _F32 * sizes.gains / layout.fsdp),
        (share.replicas * layout.fsdp * layout.tensor, _count_balance_bytes(share)),
        (share.replicas * layout.fsdp, _count_metric_bytes(share)),
    ]
    sent = 0.0
    for devices, size in sums:
        sent += sent_share("all_reduce", devices) * size
    return AxisTraffic(sent, messages=2 * (share.expert_replicas - 1))


def _count_balance_bytes(share: Share) -> int:
    if not share.model.experts:
        return 0
    runs = share.layer_runs
    if share.layout.remat != "none" or share.layout.fsdp > 1:
        runs *= 2
    dropped = 8
    return runs * 8 * (share.model.experts + 1) + dropped


def _count_metric_bytes(share: Share) -> int:
    metrics = 16
    if share.model.experts:
        metrics += 4 * share.batch * share.passes
    return metrics


class ParameterTraffic(NamedTuple):
    """What a device sends over fsdp ways in a step, in bytes.

    Attributes:
        gathers: of the weights of layers, twice in each microbatch, in bfloat16.
        scatters: of their gradients, in float32.
        tables: of embedding, head and the last norm, gathered before all layers and scattered after them.
    """

    gathers: float
    scatters: float
    tables: float

    @property
    def sent(self) -> float:
        """All of it."""
        return self.gathers + self.scatters + self.tables


def count_parameter_traffic(share: Share) -> ParameterTraffic:
    """What gathers and scatters of parameters send.

    The stack of layers is gathered layer by layer, where a layer uses its weights; all other leaves before the loss.

    Worked example: 1,000 parameters in layers and 100 in tables, on fsdp=4 with one microbatch. A device sends
    3/4 * 2 * 2 * 1,000 = 3,000 bytes for gathers of layers, 3/4 * 4 * 1,000 = 3,000 for scatters, and
    3/4 * (2 + 4) * 100 = 450 for tables.
    """
    sizes = count_sizes(share)
    last_norm = share.model.hidden
    layers = share.model.layers * sizes.layer + sizes.gains - last_norm
    tables = sizes.tables * sizes.table + last_norm
    part = sent_share("reduce_scatter", share.layout.fsdp)  # of the whole array, as an all_gather of its parts
    return ParameterTraffic(
        gathers=part * share.passes * 2 * _BF16 * layers,
        scatters=part * share.passes * _F32 * layers,
        tables=part * (_BF16 + _F32) * tables,
    )


def _gather_and_scatter_parameters(share: Share) -> AxisTraffic:
    messages = 3 * share.layer_runs * (share.layout.fsdp - 1)
    return AxisTraffic(count_parameter_traffic(share).sent, messages)


def _exchange_activations(share: Share) -> AxisTraffic:
    """Sequence parallelism gathers and scatters activations, and sums four floats a token for the loss."""
    ways = share.layout.tensor
    sizes = count_sizes(share)
    exchanges = _TABLE_EXCHANGES + share.model.layers * _count_layer_exchanges(share)
    exchange = sent_share("reduce_scatter", ways)  # of the whole array, as an all_gather of its parts
    sent = share.passes * exchange * (exchanges * _BF16 * sizes.stream + _LOSS_SUMS * share.tokens)
    return AxisTraffic(sent, messages=share.passes * exchanges * (ways - 1))


def _count_layer_exchanges(share: Share) -> int:
    exchanges = _ATTENTION_EXCHANGES if share.model.experts else _LAYER_EXCHANGES
    return exchanges[share.layout.remat]


def _pass_keys_around(share: Share) -> AxisTraffic:
    """Keys and values go round the ring in each layer, forward and backward, and their gradients with them.

    Where remat repeats a layer, the ring runs forward again. Before each microbatch its tokens and targets are brought
    into zigzag order: each device keeps half of its own if there are two.
    """
    ways = share.layout.context
    if ways == 1:
        return AxisTraffic(0.0, 0)
    model = share.model
    volume = cost.context_volume(
        batch=share.batch,
        sequence=share.sequence * ways,
        hidden=model.heads * model.head // share.layout.tensor,
        kv_hidden=model.key_heads * model.head // share.layout.tensor,
        ways=ways,
        gradient_bytes=_F32,
    )
    messages = 3 * ways
    forward_again = 0.0
    if share.layout.remat != "none":
        forward_again = volume.forward
        messages += ways
    batch: float = 2 * _I32 * share.tokens
    if ways == 2:
        batch /= 2
    sent = share.layer_runs * (volume.total + forward_again) + share.passes * batch
    return AxisTraffic(sent, messages=share.layer_runs * messages)


def _exchange_rows(share: Share) -> AxisTraffic:
    """Rows of experts are exchanged twice forward, twice backward, and twice where a layer runs again.

    All places of a capacity are sent, or the rows alone where there are none; what says how many those are is left out.
    """
    ways = share.layout.expert
    if ways == 1:
        return AxisTraffic(0.0, 0)
    tokens = share.tokens // share.layout.tensor
    group = share.sequence // share.layout.tensor  # of tokens that share places
    rows = share.model.rows(tokens, group)  # those that leave a device, as many as one alone would have
    exchanges = 6 if share.recomputes else 4
    sent = exchanges * sent_share("all_to_all", ways) * _BF16 * rows * share.model.hidden
    return AxisTraffic(share.layer_runs * sent, messages=share.layer_runs * exchanges * (ways - 1))


def _send_to_next_stage(share: Share) -> AxisTraffic:
    """At each tick a stage sends its output on, and a gradient back."""
    layout = share.layout
    if layout.stage == 1:
        return AxisTraffic(0.0, 0)
    # All stages send at every tick, those that idle too: the permute is one collective of the masked step.
    sends = 2 * run_pipeline(layout).ticks * layout.accumulate
    return AxisTraffic(sends * count_stage_input(share), messages=sends)


def count_stage_input(share: Share) -> float:
    """Bytes of a microbatch's activations at the border of two stages."""
    return _BF16 * count_sizes(share).stream / share.layout.tensor
