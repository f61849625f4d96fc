"""A schedule with costs: when every action begins and ends."""

from __future__ import annotations

from typing import NamedTuple

from shardkit._arguments import checks
from shardkit.schedules.action import Action
from shardkit.schedules.grid import Grid


class Timeline(NamedTuple):
    """A simulated step. Of the three bubbles a zero-bubble schedule has only the last at zero.

    Attributes:
        makespan: from the first action to the end of the last, in the unit of the costs.
        bubble: idle time over work, (makespan - work) / work, where work is the compute time of the busiest device:
            Megatron's convention, `cost.bubble(of="ideal")`.
        bubble_of_total: the share of the makespan in which that device idles, 1 - work / makespan: GPipe's convention,
            `cost.bubble(of="total")`.
        bubble_of_span: the most that a device idles between its first action and its last, over work: the bubble if the
            optimizer does not wait for all devices.
        peak_in_flight: for each device, the most microbatches between the begin of F and the end of B or W; a chunk
            counts as 1/v.
        spans: for each action, its begin and its end.
        busy: for each device, its compute time.
    """

    makespan: float
    bubble: float
    bubble_of_total: float
    bubble_of_span: float
    peak_in_flight: tuple[float, ...]
    spans: dict[Action, tuple[float, float]]
    busy: tuple[float, ...]

    def __str__(self) -> str:
        peaks = ", ".join(f"{peak:g}" for peak in self.peak_in_flight)
        return (
            f"makespan {self.makespan:g}; idle {self.bubble:.1%} of the work, {self.bubble_of_total:.1%} of the "
            f"makespan, {self.bubble_of_span:.1%} within a device's span; microbatches in flight {peaks}"
        )


class Costs(NamedTuple):
    """The cost of each action of one chunk, by op, and of a message to another device."""

    of: dict[str, float]
    communication: float


def costs_of(
    where: str,
    chunks: int,
    forward: float,
    backward: float,
    input_grad: float | None,
    weight_grad: float | None,
    communication: float,
) -> Costs:
    """The costs of a chunk, of those of a device's whole layers; refuses what is no cost."""
    for name, cost in (("input_grad", input_grad), ("weight_grad", weight_grad)):
        if cost is not None:
            checks.at_least_zero(where, **{name: cost})
    forward, backward = checks.positive(where, forward=forward, backward=backward)
    if input_grad is None:
        input_grad = backward / 2 if weight_grad is None else backward - weight_grad
    if weight_grad is None:
        weight_grad = backward - input_grad
    input_grad, weight_grad, communication = checks.at_least_zero(
        where, input_grad=input_grad, weight_grad=weight_grad, communication=communication
    )
    whole = {"F": forward, "B": backward, "I": input_grad, "W": weight_grad}
    return Costs({op: cost / chunks for op, cost in whole.items()}, communication)


def simulated(
    schedule: Grid,
    forward: float,
    backward: float,
    input_grad: float | None,
    weight_grad: float | None,
    communication: float,
    overlapped: float | None,
    synchronous: bool,
) -> Timeline:
    """The timeline of a schedule; see `Schedule.simulate`."""
    if not isinstance(synchronous, bool):
        raise TypeError(f"simulate: synchronous must be True or False; got {synchronous!r}. Pass one of them.")
    each = costs_of("simulate", schedule.chunks, forward, backward, input_grad, weight_grad, communication)
    costs, communication = each.of, each.communication
    both = costs["F"] + costs["B"]
    if overlapped is not None:
        both = checks.positive("simulate", overlapped=overlapped)[0] / schedule.chunks

    spans: dict[Action, tuple[float, float]] = {}
    free: list[float] = [0] * schedule.devices
    own: list[list[Action]] = [[] for _ in free]  # the actions of each device, in order
    for tick in range(max(map(len, schedule.rows))):
        if synchronous and tick:
            free = [max(free) + communication] * schedule.devices
        for device, row in enumerate(schedule.rows):
            cell = row[tick] if tick < len(row) else ()
            together = overlapped is not None and len(cell) == 2
            # In the order of ticks every input comes before what needs it.
            for actions in [cell] if together else [(action,) for action in cell]:
                start = free[device]
                for need in (need for action in actions for need in schedule.needs(action) if need not in actions):
                    away = not synchronous and schedule.device(need.stage) != device
                    start = max(start, spans[need][1] + communication * away)
                free[device] = start + (both if together else costs[actions[0].op])
                spans.update(dict.fromkeys(actions, (start, free[device])))
                own[device] += actions

    makespan = max(end for _, end in spans.values())
    # Actions that run together count once.
    busy = [sum(end - begin for begin, end in {spans[action] for action in actions}) for actions in own]
    work = max(busy)
    lasts = [max(spans[a][1] for a in actions) - min(spans[a][0] for a in actions) for actions in own]
    return Timeline(
        makespan=makespan,
        bubble=(makespan - work) / work,
        bubble_of_total=(makespan - work) / makespan,
        bubble_of_span=max(last - time for last, time in zip(lasts, busy, strict=True)) / work,
        peak_in_flight=tuple(_peak(actions) / schedule.chunks for actions in own),
        spans=spans,
        busy=tuple(busy),
    )


def least(schedule: Grid, costs: Costs, memory: float | None) -> float:
    """See `Schedule.least_makespan`."""
    p, m, v = schedule.devices, schedule.microbatches, schedule.chunks
    there, back, rest = costs.of["F"], costs.of["I"], costs.of["B"] - costs.of["I"]
    hop = costs.communication if p > 1 else 0.0
    work = m * v * (there + costs.of["B"]) + (p - 1) * (there + hop)
    # along a V no message is sent where it turns
    through = p * v * (there + back) + rest + 2 * v * (p - 1) * hop
    if memory is None:
        return max(work, through)
    # A chunk is held while its microbatch goes through all later stages and back, at least; the first device's are held
    # longest, in a loop those of stages 0, p, 2p, along a V those of 0, 2p - 1, 2p: the V holds less.
    held = 0.0
    for chunk in range(v):
        later = p * v - (chunk * p if chunk % 2 == 0 else (chunk + 1) * p - 1)
        held += later * (there + back) + rest
    return max(work, through, m * held / (memory * v))


def _peak(actions: list[Action]) -> int:
    """The most forwards whose backward has not ended."""
    held = peak = 0
    for action in actions:
        held += action.op == "F"
        peak = max(peak, held)
        held -= action.op in "BW"
    return peak
