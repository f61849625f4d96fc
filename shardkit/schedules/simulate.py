"""A schedule with costs: when every action begins and ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, get_args

import numpy as np

from shardkit._arguments import checks
from shardkit.schedules.action import Action, Cell, StagePlacement, count_ticks, device_of
from shardkit.schedules.grid import Grid


class Timeline(NamedTuple):
    """A simulated step. For a zero-bubble schedule only the last of the three bubbles is zero.

    Attributes:
        makespan: from the first action to the end of the last, in the unit of the costs.
        bubble: idle time over work, (makespan - work) / work. Work is the compute time of the busiest device. This is
            Megatron's convention, `cost.bubble(of="ideal")`.
        bubble_of_total: the share of the makespan in which this device idles, 1 - work / makespan. This is GPipe's
            convention, `cost.bubble(of="total")`.
        bubble_of_span: the longest idle time of a device between its first action and its last, over work. This is the
            bubble if the optimizer does not wait for all devices.
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


StageCost = float | Sequence[float]  # a cost: of all chunks of a device, or of each stage
Span = tuple[float, float]


def find_costs(
    where: str,
    stages: int,
    chunks: int,
    forward: StageCost,
    backward: StageCost,
    input_grad: StageCost | None,
    weight_grad: StageCost | None,
    communication: float,
) -> Costs:
    """The costs of each stage, from costs of a device or of each stage; refuses costs that are none.

    Worked example: with two chunks, forward 1 and backward 2, a stage has F 0.5, B 1, and I and W 0.5 each. With
    input_grad 1.3 as well, I is 0.65, and W is the rest of B, 0.35.
    """
    inputs = None
    weights = None
    if input_grad is not None:
        inputs = _split_by_stage(where, "input_grad", input_grad, stages, chunks, checks.at_least_zero)
    if weight_grad is not None:
        weights = _split_by_stage(where, "weight_grad", weight_grad, stages, chunks, checks.at_least_zero)
    forwards = _split_by_stage(where, "forward", forward, stages, chunks, checks.positive)
    backwards = _split_by_stage(where, "backward", backward, stages, chunks, checks.positive)
    if inputs is None and weights is None:
        inputs = tuple(cost / 2 for cost in backwards)
    if inputs is None:
        assert weights is not None
        inputs = _subtract(where, "input_grad", backwards, "weight_grad", weights, weight_grad, backward)
    if weights is None:
        weights = _subtract(where, "weight_grad", backwards, "input_grad", inputs, input_grad, backward)
    (communication,) = checks.at_least_zero(where, communication=communication)
    return Costs({"F": forwards, "B": backwards, "I": inputs, "W": weights}, communication)


def _split_by_stage(
    where: str, name: str, cost: StageCost, stages: int, chunks: int, check: Callable[..., tuple[float, ...]]
) -> tuple[float, ...]:
    """A cost of each stage."""
    if isinstance(cost, np.ndarray):
        cost = cost.tolist()
    if not isinstance(cost, Sequence):
        (device_cost,) = check(where, **{name: cost})
        return (device_cost / chunks,) * stages
    if len(cost) != stages:
        raise ValueError(
            f"{where}: {name} must be a number, or one for each of {stages} stages; got {len(cost)}. Pass {stages}."
        )
    costs: list[float] = []
    for stage, stage_cost in enumerate(cost):
        costs += check(where, **{f"{name}[{stage}]": stage_cost})
    return tuple(costs)


def _subtract(
    where: str,
    name: str,
    backward: tuple[float, ...],
    part_name: str,
    part: tuple[float, ...],
    passed_part: StageCost | None,
    passed_backward: StageCost,
) -> tuple[float, ...]:
    """The cost of one part of a backward pass: the whole minus the other part."""
    costs = tuple(cost - part_cost for cost, part_cost in zip(backward, part, strict=True))
    if min(costs) < 0:
        raise ValueError(
            f"{where}: {part_name} must be at most backward; got {passed_part} of {passed_backward}. Pass {name} too."
        )
    return costs


def simulate(
    schedule: Grid,
    forward: StageCost,
    backward: StageCost,
    input_grad: StageCost | None,
    weight_grad: StageCost | None,
    communication: float,
    overlapped: float | None,
    synchronous: bool,
) -> Timeline:
    """The timeline of a schedule; see `Schedule.simulate`."""
    if not isinstance(synchronous, bool):
        raise TypeError(f"simulate: synchronous must be True or False; got {synchronous!r}. Pass one of them.")
    p = schedule.devices
    v = schedule.chunks
    costs = find_costs("simulate", p * v, v, forward, backward, input_grad, weight_grad, communication)
    pair_cost = None
    if overlapped is not None:
        (overlapped,) = checks.positive("simulate", overlapped=overlapped)
        pair_cost = overlapped / v
    run = _Run(schedule, costs, pair_cost, synchronous)
    for tick in range(count_ticks(schedule.rows)):
        run.run_tick(tick)
    return _summarize(schedule, run.spans, run.device_actions)


class _Run:
    """A schedule on the clock, tick by tick: in the order of ticks every input comes before the action that needs it.

    Args:
        schedule: the table.
        costs: the cost of each action.
        pair_cost: the cost of a forward and a backward that share a cell and run together; None: one after the other.
        synchronous: whether the devices wait for each other at the end of every tick.

    Attributes:
        spans: begin and end of each action.
        device_actions: the actions of each device, in order.
    """

    def __init__(self, schedule: Grid, costs: Costs, pair_cost: float | None, synchronous: bool):
        self._schedule = schedule
        self._costs = costs
        self._pair_cost = pair_cost
        self._synchronous = synchronous
        self._free: list[float] = [0] * schedule.devices  # when each device has ended its last action
        self.spans: dict[Action, Span] = {}
        self.device_actions: list[list[Action]] = [[] for _ in range(schedule.devices)]

    def run_tick(self, tick: int) -> None:
        """Runs the cells of all devices in a tick."""
        if self._synchronous and tick:
            # All devices meet in the sends between two ticks. Before the first tick there are none.
            self._free = [max(self._free) + self._costs.communication] * self._schedule.devices
        for device, row in enumerate(self._schedule.rows):
            if tick < len(row):
                self._run_cell(device, row[tick])

    def _run_cell(self, device: int, cell: Cell) -> None:
        if self._pair_cost is not None and len(cell) == 2:
            self._run_together(device, cell, self._pair_cost)
            return
        for action in cell:
            self._run_together(device, (action,), self._costs.of[action.op][action.stage])

    def _run_together(self, device: int, actions: Cell, cost: float) -> None:
        begin = self._free[device]
        for action in actions:
            for need in self._schedule.needs(action):
                # The last stage may have a microbatch's forward and its backward in one cell: they share a begin.
                if need not in actions:
                    begin = max(begin, self._find_arrival(need, device))
        end = begin + cost
        self._free[device] = end
        self.spans.update(dict.fromkeys(actions, (begin, end)))
        self.device_actions[device] += actions

    def _find_arrival(self, action: Action, device: int) -> float:
        """When the result of an action is on a device. In a synchronous run the end of a tick has sent it."""
        _, end = self.spans[action]
        if self._synchronous or self._schedule.device(action.stage) == device:
            return end
        return end + self._costs.communication


def _summarize(schedule: Grid, spans: dict[Action, Span], device_actions: list[list[Action]]) -> Timeline:
    makespan = 0.0
    busy = []
    idle_within = []
    peaks = []
    for actions in device_actions:
        device_spans = {spans[action] for action in actions}  # actions that run together count once
        compute = sum(end - begin for begin, end in device_spans)
        first, _ = spans[actions[0]]
        _, last = spans[actions[-1]]
        makespan = max(makespan, last)
        busy.append(compute)
        idle_within.append(last - first - compute)
        peaks.append(count_peak(actions) / schedule.chunks)
    work = max(busy)
    return Timeline(
        makespan=makespan,
        bubble=(makespan - work) / work,
        bubble_of_total=(makespan - work) / makespan,
        bubble_of_span=max(idle_within) / work,
        peak_in_flight=tuple(peaks),
        spans=spans,
        busy=tuple(busy),
    )


def find_least_makespan(p: int, m: int, v: int, costs: Costs, memory: float | None) -> float:
    """See `Schedule.least_makespan`."""
    placements: Sequence[StagePlacement] = get_args(StagePlacement) if p > 1 else ("loop",)
    return min(_bound_makespan(p, m, v, placement, costs, memory) for placement in placements)


def _bound_makespan(p: int, m: int, v: int, placement: StagePlacement, costs: Costs, memory: float | None) -> float:
    """A lower bound of the makespan of every schedule with this placement.

    Worked example: p = 2, m = 4, v = 1, F = I = W = 1, no communication. One microbatch there and back takes 5: F, F, I
    of stage 1, I and W of stage 0. The first device works 4 (1 + 2) = 12 from the begin on; the second works as long
    after the first F, until 13. With memory for one microbatch, each is in flight for 5 on the first device, one after
    the other: 20.
    """
    forward = costs.of["F"]
    # A backward is whole or in two halves, whichever is faster. The stage before waits for the whole, or for I alone.
    backward = []
    awaited = []
    for unsplit, input_grad, weight_grad in zip(costs.of["B"], costs.of["I"], costs.of["W"], strict=True):
        backward.append(min(unsplit, input_grad + weight_grad))
        awaited.append(min(unsplit, input_grad))
    stages = range(p * v)
    devices = [device_of(stage, p, placement) for stage in stages]
    hops = []  # the time from each stage to the next; nothing is sent between stages of one device
    for device, next_device in pairwise(devices):
        hops.append(0.0 if device == next_device else costs.communication)
    # From the begin of the forward of a stage to the end of its own backward.
    in_flight = []
    for stage in stages:
        compute = sum(forward[stage:]) + sum(awaited[stage + 1 :]) + backward[stage]
        in_flight.append(compute + 2 * sum(hops[stage:]))
    work_of_microbatch = [0.0] * p
    time_in_flight = [0.0] * p
    for stage, device in enumerate(devices):
        work_of_microbatch[device] += forward[stage] + backward[stage]
        time_in_flight[device] += in_flight[stage]
    bounds = [in_flight[0]]
    # In a loop and in a V, the first stage of device d is stage d.
    for device in range(p):
        arrival = sum(forward[:device]) + sum(hops[:device])
        bounds.append(arrival + m * work_of_microbatch[device])
        if memory is not None:
            bounds.append(m * time_in_flight[device] / (memory * v))
    return max(bounds)


def count_peak(actions: list[Action]) -> int:
    """The most forwards whose backward has not ended."""
    in_flight = 0
    peak = 0
    for action in actions:
        if action.op == "F":
            in_flight += 1
        peak = max(peak, in_flight)
        if action.op in "BW":
            in_flight -= 1
    return peak
