"""The time of what a step sends: the seconds of each axis, and those that its compute hides.

A collective hides behind the compute that stands between its start and its end. Which ones start early is the
compiler's affair (`Overlap` in `habits.py`). Whatever it does, some never hide:

- Embedding and head are gathered before the first layer and scattered after the last one.
- A matmul waits for the gather of its operand over tensor ways, and an expert for its rows.
- Sums over data ways wait for the last gradient. Only the optimizer runs beside them.

Worked example: eight H100, a layer with 3 ms of compute and 1 ms of gathers and scatters. Nearly half of the compute,
1.35 ms, stands between starts and ends, so that all is hidden. With 2 ms on the wire, 0.65 ms of it are exposed.
"""

from __future__ import annotations

from shardkit.planner.habits import Overlap, habits_of
from shardkit.planner.machine import Machine
from shardkit.planner.operations import time_attention, time_update
from shardkit.planner.share import Share
from shardkit.planner.traffic import count_parameter_traffic, count_traffic

_F32 = 4  # bytes of a gradient as the step as written sums it


def time_traffic(share: Share, machine: Machine) -> dict[str, float]:
    """Seconds on the wire, by the axis of `Layout`, of what the compiled step sends."""
    habits = habits_of(machine.chip)
    layout = share.layout
    seconds = {}
    for axis, traffic in count_traffic(share).items():
        if not traffic.sent:
            seconds[axis] = 0.0
            continue
        sent = traffic.sent
        if axis == "data" and layout.fsdp == 1 and share.passes == 1:
            sent *= habits.gradient_sum / _F32
        if axis == "fsdp" and machine.count_dims(layout, axis) == 3:
            sent += (habits.scatter - 1) * count_parameter_traffic(share).scatters
        seconds[axis] = machine.find_link(layout, axis).seconds(sent, traffic.messages)
    return seconds


def hide_layers(overlap: Overlap, gathers: float, scatters: float, compute: float) -> float:
    """Of the seconds of layers' gathers and scatters, those that compute hides."""
    hideable = 0.0
    if overlap.gathers:
        hideable += gathers
    if overlap.scatters:
        hideable += scatters
    return min(hideable, overlap.compute * compute)


def hide_traffic(share: Share, machine: Machine, seconds: dict[str, float], compute: float) -> float:
    """Of the seconds on the wire, by axis, those that the compute of a step hides."""
    overlap = habits_of(machine.chip).overlap
    parameters = count_parameter_traffic(share)
    hidden = 0.0
    if parameters.sent:
        per_byte = seconds["fsdp"] / parameters.sent
        hidden = hide_layers(overlap, per_byte * parameters.gathers, per_byte * parameters.scatters, compute)
    if overlap.sums:
        hidden += min(seconds["data"], time_update(share, machine))
    if share.layout.context > 1:
        # Keys and values of the next part travel while the scores of this one are computed.
        attention = share.layer_runs * time_attention(share, machine)
        hidden += min(seconds["context"], attention)
    return hidden
