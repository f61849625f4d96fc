"""Search: the fastest schedule that some rules of thumb find, under given costs and a memory cap."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import product
from typing import NamedTuple, get_args

from shardkit._arguments import checks
from shardkit.schedules.action import Action, Cell, StagePlacement, device_of
from shardkit.schedules.base import Schedule, builder, scheduled, sizes
from shardkit.schedules.simulate import Costs, costs_of
from shardkit.schedules.zero_bubble_h1 import zero_bubble_h1
from shardkit.schedules.zero_bubble_v import zero_bubble_v


@builder
def search(
    devices: int,
    microbatches: int,
    chunks: int = 1,
    *,
    memory: float | None = None,
    forward: float = 1,
    backward: float = 2,
    input_grad: float | None = None,
    weight_grad: float | None = None,
    communication: float = 0,
) -> Schedule:
    """The schedule of the least makespan, among those that rules of thumb make, with a backward in two halves.

    Each device begins what is ready, by a rule: input gradients first, or forwards in turn with them; of the oldest
    microbatch, or of the last chunk; weight gradients where nothing else is ready, or as soon as some wait. 32 rules
    are tried for each placement of the stages, and with two chunks orders that repeat every six actions, as V-Min does;
    and ZB-H1 or ZB-V.

    Args:
        devices: number p of pipeline devices.
        microbatches: microbatches m per step.
        chunks: model stages v per device.
        memory: the most microbatches in flight on a device, from F to the end of W, where a chunk counts 1/v; None: p,
            as many as 1F1B has.
        forward, backward, input_grad, weight_grad, communication: costs, as for `Schedule.simulate`.

    Returns:
        A Schedule. Its `least_makespan` says how much faster another could be at most.

    Raises:
        ValueError: a size below 1, a memory below 1, or costs as `simulate` refuses them.

    Cost: a second for 8 devices, 32 microbatches and two chunks; in proportion to their product.

    Example:
        >>> found = sk.schedules.search(8, 8, chunks=2)
        >>> found.simulate().makespan, found.least_makespan()
        (27.5, 27.5)
        >>> sk.schedules.zero_bubble_v(8, 8).simulate().makespan
        31.0

    Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv:2401.10241), section 3, for the rules; Qi et al.,
    Pipeline Parallelism with Controllable Memory (arXiv:2405.15362), for orders that repeat.
    """
    p, m, v = sizes("search", devices=devices, microbatches=microbatches, chunks=chunks)
    memory = float(p) if memory is None else memory
    [memory] = checks.positive("search", memory=memory)
    if memory < 1:
        raise ValueError(
            f"search: memory must hold one microbatch, all chunks of a device; got {memory}. Pass memory=1 or more."
        )
    costs = costs_of("search", v, forward, backward, input_grad, weight_grad, communication)
    best: tuple[float, Schedule | None] = (math.inf, None)
    for placement, orders, least in _orders(p, m, v, math.floor(memory * v + 1e-9), costs):
        if least >= best[0]:
            continue
        found = scheduled("search", orders, m, placement)
        line = found.simulate(forward, backward, input_grad, weight_grad, communication)
        if line.makespan < best[0] - 1e-9 and max(line.peak_in_flight) <= memory + 1e-9:
            best = line.makespan, found
    assert best[1] is not None, "the rules keep to any memory from 1"
    return best[1]


Orders = list[list[Cell]]  # the cells of each device


def _orders(p: int, m: int, v: int, places: int, costs: Costs) -> Iterator[tuple[StagePlacement, Orders, float]]:
    """What is tried: the placement of stages, orders for devices with `places` for chunks, and a least makespan."""
    placements: Sequence[StagePlacement] = get_args(StagePlacement) if v > 1 and p > 1 else ("loop",)
    for placement in placements:
        for rule in product((True, False), (True, False), (0, 1, 2, 4), (False, True)):
            run = GreedyRun(p, m, v, places, placement, costs, Preference(*rule))
            yield placement, run.orders(), run.makespan
    if v <= 2:
        known = zero_bubble_h1(p, m) if v == 1 else zero_bubble_v(p, m)
        yield known.placement, [[cell for cell in row if cell] for row in known.rows], 0.0
    if v == 2 and p > 1:
        for orders in repeated(p, m, places):
            yield "v", orders, 0.0


class Preference(NamedTuple):
    """What a device does first of all that is ready.

    Attributes:
        oldest: of input gradients, that of the oldest microbatch; else that of the last chunk.
        in_turn: after a backward, a forward goes before another one.
        waiting: a weight gradient goes before a forward where more than so many wait; 0: never.
        patient: a weight gradient does not begin where something else will be ready before it ends.
    """

    oldest: bool
    in_turn: bool
    waiting: int
    patient: bool


class GreedyRun:
    """One run of a rule: which device begins which action, and when.

    It counts by stage and microbatch: with `rules.needs`, which makes actions, a search took three times as long.
    """

    def __init__(self, p: int, m: int, v: int, places: int, placement: StagePlacement, costs: Costs, rule: Preference):
        self.m, self.places, self.costs, self.rule, self.last = m, places, costs, rule, p * v - 1
        self.device = [device_of(stage, p, placement) for stage in range(p * v)]
        self.chunks = [[stage for stage in range(p * v) if self.device[stage] == d] for d in range(p)]
        # When an action has ended, for those that have begun; and the microbatch that is next. Both by op and stage.
        self.ended = {op: [[math.inf] * m for _ in range(p * v)] for op in "FIW"}
        self.next = {op: [0] * (p * v) for op in "FIW"}
        self.held = [0] * p
        self.order: Orders = [[] for _ in range(p)]
        self.makespan = 0.0

    def orders(self) -> Orders:
        """The actions of each device, in the order in which they begin."""
        free = [(0.0, d) for d in range(len(self.order))]
        asleep: set[int] = set()
        while free:
            now, d = heappop(free)
            action, later = self._chosen(d, now)
            if action is None:
                if later < math.inf:
                    heappush(free, (later, d))
                else:
                    asleep.add(d)
                continue
            stage, op, i = action
            end = now + self.costs.of[op]
            self.ended[op][stage][i] = end
            self.next[op][stage] += 1
            self.held[d] += {"F": 1, "I": 0, "W": -1}[op]
            self.order[d].append((action,))
            self.makespan = max(self.makespan, end)
            heappush(free, (end, d))
            stage += {"F": 1, "I": -1, "W": 0}[op]
            if 0 <= stage <= self.last and self.device[stage] in asleep:
                asleep.remove(self.device[stage])
                heappush(free, (end, self.device[stage]))
        return self.order

    def _chosen(self, d: int, now: float) -> tuple[Action | None, float]:
        """What a device begins now, or None; and when something else will be ready."""
        ready: dict[str, list[Action]] = {"F": [], "I": [], "W": []}
        later = math.inf
        # A place stays free for each later chunk: the microbatch that is ahead of all others can always go on.
        room = self.places - len(self.chunks[d]) + 1 - self.held[d]
        for number, stage in enumerate(self.chunks[d]):
            for op, actions in ready.items():
                i = self.next[op][stage]
                if i == self.m or (op == "F" and room + number <= 0):
                    continue
                at = self._ready_at(stage, op, i)
                if at <= now + 1e-9:
                    actions.append(Action(stage, op, i))
                elif op != "W":
                    later = min(later, at)
        return self._first(d, ready, now, later), later

    def _first(self, d: int, ready: dict[str, list[Action]], now: float, later: float) -> Action | None:
        rule, turn = self.rule, bool(self.order[d]) and self.order[d][-1][0].op != "F"
        forward = ready["F"][-1] if ready["F"] else None  # of the last chunk
        back = min(ready["I"], key=_by_age if rule.oldest else _by_stage, default=None)
        weight = min(ready["W"], key=_by_age, default=None)
        first = forward if back is None or (forward and rule.in_turn and turn) else back
        if first is forward and weight and rule.waiting and self._waiting(d) > rule.waiting:
            return weight
        if first is None and weight and rule.patient and later < now + self.costs.of["W"]:
            return None
        return first or weight

    def _waiting(self, d: int) -> int:
        """Weight gradients of a device that are ready."""
        return sum(self.next["I"][stage] - self.next["W"][stage] for stage in self.chunks[d])

    def _ready_at(self, stage: int, op: str, i: int) -> float:
        """When the inputs of an action are there; infinite while one of them has not begun."""
        if op == "W":
            return self.ended["I"][stage][i]
        own = 0.0 if op == "F" else self.ended["F"][stage][i]
        other = stage - 1 if op == "F" else stage + 1
        if not 0 <= other <= self.last:
            return own
        away = self.costs.communication if self.device[other] != self.device[stage] else 0.0
        return max(own, self.ended[op][other][i] + away)


def _by_age(action: Action) -> tuple[int, int]:
    return action.microbatch, -action.stage


def _by_stage(action: Action) -> tuple[int, int]:
    return -action.stage, action.microbatch


_PERIOD = 6  # F, I and W of two chunks


def repeated(p: int, m: int, places: int) -> Iterator[Orders]:
    """Orders for two chunks placed as a V, in which each microbatch repeats those before it, six actions later.

    A pass moves one or two actions later from device to device, and turns after one to three; no two actions of a
    device may fall together. Weight gradients take what is free.
    """
    for steps in product((1, 2), repeat=4):
        for turns in product((1, 2, 3), repeat=3):
            places_of = [_actions(p, d, steps, turns) for d in range(p)]
            if any(len({at % _PERIOD for at in each}) < 4 for each in places_of):
                continue
            orders: Orders = []
            most = 0
            for d, (f0, f1, i1, i0) in enumerate(places_of):
                taken = {at % _PERIOD for at in (f0, f1, i1, i0)}
                open_at = [at for at in range(_PERIOD) if at not in taken]
                w1 = min(at for at in range(i1 + 1, i1 + 1 + _PERIOD) if at % _PERIOD in open_at)
                w0 = min(
                    at for at in range(i0 + 1, i0 + 1 + _PERIOD) if at % _PERIOD in open_at and (at - w1) % _PERIOD
                )
                most = max(most, w1 - f1 + w0 - f0)
                passes = [(f0, d, "F"), (i0, d, "I"), (w0, d, "W")]
                passes += [(f1, 2 * p - 1 - d, "F"), (i1, 2 * p - 1 - d, "I"), (w1, 2 * p - 1 - d, "W")]
                timed = [(at + _PERIOD * i, Action(stage, op, i)) for i in range(m) for at, stage, op in passes]
                orders.append([(action,) for _, action in sorted(timed)])
            if most <= _PERIOD * places:
                yield orders


def _actions(p: int, d: int, steps: Sequence[int], turns: Sequence[int]) -> tuple[int, int, int, int]:
    """When device d has the forwards of its two chunks, and the input gradients of the second and the first."""
    down, up = d, p - 1 - d
    first = down * steps[0]
    second = (p - 1) * steps[0] + turns[0] + up * steps[1]
    back = (p - 1) * (steps[0] + steps[1]) + turns[0] + turns[1] + down * steps[2]
    end = (p - 1) * sum(steps[:3]) + sum(turns) + up * steps[3]
    return first, second, back, end
