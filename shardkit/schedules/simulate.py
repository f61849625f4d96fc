"""A schedule with costs: when every action begins and ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, get_args

import numpy as np

from shardkit._arguments import checks
from shardkit.schedules.action import Action, StagePlacement, device_of
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
    """The cost of each action, by op and stage, and of a message to another device."""

    of: dict[str, tuple[float, ...]]
    communication: float


Each = float | Sequence[float]  # a cost: of all chunks of a device, or of each stage


def costs_of(
    where: str,
    stages: int,
    chunks: int,
    forward: Each,
    backward: Each,
    input_grad: Each | None,
    weight_grad: Each | None,
    communication: float,
) -> Costs:
    """The costs of the stages, of those of a device's whole layers or as given; refuses what is no cost."""
    given = {"input_grad": input_grad, "weight_grad": weight_grad, "forward": forward, "backward": backward}
    wanted = {name: cost for name, cost in given.items() if cost is not None or not name.endswith("grad")}
    each = {name: _staged(where, name, cost, stages, chunks) for name, cost in wanted.items()}
    if input_grad is None and weight_grad is None:
        each["input_grad"] = tuple(cost / 2 for cost in each["backward"])
    for name, other in (("input_grad", "weight_grad"), ("weight_grad", "input_grad")):
        if name not in each:
            each[name] = tuple(cost - part for cost, part in zip(each["backward"], each[other], strict=True))
            if min(each[name]) < 0:
                raise ValueError(
                    f"{where}: {other} must be at most backward; got {given[other]} of {backward}. Pass {name} too."
                )
    [communication] = checks.at_least_zero(where, communication=communication)
    ops = {"F": "forward", "B": "backward", "I": "input_grad", "W": "weight_grad"}
    return Costs({op: each[name] for op, name in ops.items()}, communication)


def _staged(where: str, name: str, cost: Each | None, stages: int, chunks: int) -> tuple[float, ...]:
    """A cost of each stage."""
    check: Callable[..., tuple[float, ...]] = checks.at_least_zero if name.endswith("grad") else checks.positive
    cost = cost.tolist() if isinstance(cost, np.ndarray) else cost
    if not isinstance(cost, Sequence):
        [whole] = check(where, **{name: cost})
        return (whole / chunks,) * stages
    if len(cost) != stages:
        raise ValueError(
            f"{where}: {name} must be a number, or one for each of {stages} stages; got {len(cost)}. Pass {stages}."
        )
    return tuple(check(where, **{f"{name}[{stage}]": each})[0] for stage, each in enumerate(cost))


def simulated(
    schedule: Grid,
    forward: Each,
    backward: Each,
    input_grad: Each | None,
    weight_grad: Each | None,
    communication: float,
    overlapped: float | None,
    synchronous: bool,
) -> Timeline:
    """The timeline of a schedule; see `Schedule.simulate`."""
    if not isinstance(synchronous, bool):
        raise TypeError(f"simulate: synchronous must be True or False; got {synchronous!r}. Pass one of them.")
    p, v = schedule.devices, schedule.chunks
    costs, communication = costs_of("simulate", p * v, v, forward, backward, input_grad, weight_grad, communication)
    both = 0.0 if overlapped is None else checks.positive("simulate", overlapped=overlapped)[0] / v

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
                free[device] = start + (both if together else costs[actions[0].op][actions[0].stage])
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
        peak_in_flight=tuple(peak(actions) / schedule.chunks for actions in own),
        spans=spans,
        busy=tuple(busy),
    )


def least(p: int, m: int, v: int, costs: Costs, memory: float | None) -> float:
    """See `Schedule.least_makespan`."""
    # A backward is whole or in two halves, whichever is less; and so is what the stage before waits for.
    there, halves = costs.of["F"], list(zip(costs.of["B"], costs.of["I"], costs.of["W"], strict=True))
    back = [min(whole, first + rest) for whole, first, rest in halves]
    passed = [min(whole, first) for whole, first, _ in halves]
    found = []
    for placement in get_args(StagePlacement) if p > 1 else ("loop",):
        home = [device_of(stage, p, placement) for stage in range(p * v)]
        hops = [costs.communication * (here != after) for here, after in pairwise(home)]
        # From the begin of the forward of a stage to the end of its own backward.
        held = [sum(there[s:]) + sum(passed[s + 1 :]) + back[s] + 2 * sum(hops[s:]) for s in range(p * v)]
        bounds = [held[0]]
        for first in range(p):  # the first stage of each device
            own = [stage for stage in range(p * v) if home[stage] == home[first]]
            work = m * sum(there[stage] + back[stage] for stage in own)
            bounds.append(sum(there[:first]) + sum(hops[:first]) + work)
            if memory is not None:
                bounds.append(m * sum(held[stage] for stage in own) / (memory * v))
        found.append(max(bounds))
    return min(found)


def peak(actions: list[Action]) -> int:
    """The most forwards whose backward has not ended."""
    held = peak = 0
    for action in actions:
        held += action.op == "F"
        peak = max(peak, held)
        held -= action.op in "BW"
    return peak
