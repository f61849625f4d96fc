"""Search for a fast schedule under given costs and a memory cap; for few actions, it finds the fastest of all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from heapq import heappop, heappush
from itertools import accumulate, product
from operator import attrgetter
from typing import NamedTuple

from shardkit._arguments import checks
from shardkit.schedules.action import Action, StagePlacement
from shardkit.schedules.base import Schedule, build_schedule, builder, check_sizes
from shardkit.schedules.exhaust import Exhaustion
from shardkit.schedules.interleaved import interleaved
from shardkit.schedules.one_f_one_b import one_f_one_b
from shardkit.schedules.simulate import StageCost, count_peak, find_costs, find_least_makespan
from shardkit.schedules.tighten import SLACK, Actions, Timed
from shardkit.schedules.zero_bubble_h1 import zero_bubble_h1
from shardkit.schedules.zero_bubble_v import zero_bubble_v


@builder
def search(
    devices: int,
    microbatches: int,
    chunks: int = 1,
    *,
    memory: float | None = None,
    forward: StageCost = 1,
    backward: StageCost = 2,
    input_grad: StageCost | None = None,
    weight_grad: StageCost | None = None,
    communication: float = 0,
) -> Schedule:
    """Tries many schedules, with the backward in two halves or whole, and returns the one with the least makespan.

    Each device begins an action that is ready, by one of nine rules: input gradients first, or in turn with forwards;
    of the oldest microbatch, or of the last chunk; weight gradients if nothing else is ready, or as soon as some wait.
    For two chunks it also tries orders that repeat every six actions, as in V-Min and V-Half, and ZB-H1 and ZB-V. In
    the fastest schedule it moves actions into idle time. Up to 16 pieces (p m v), no order of the two halves is faster.
    A whole backward may take less time than its halves, so it also tries 1F1B and interleaved.

    Args:
        devices: number p of pipeline devices.
        microbatches: microbatches m per step.
        chunks: model stages v per device.
        memory: the most microbatches in flight on a device, from F to the end of W; a chunk counts 1/v. None: p, as in
            1F1B.
        forward, backward, input_grad, weight_grad, communication: costs, as for `Schedule.simulate`.

    Returns:
        A Schedule. Its `least_makespan` tells you how much faster another schedule could be at most.

    Raises:
        ValueError: a size below 1, a memory below 1, or costs as for `simulate`.

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
    p, m, v = check_sizes("search", devices=devices, microbatches=microbatches, chunks=chunks)
    if memory is None:
        memory = float(p)
    (memory,) = checks.positive("search", memory=memory)
    if memory < 1:
        raise ValueError(
            f"search: memory must hold one microbatch, all chunks of a device; got {memory}. Pass memory=1 or more."
        )
    costs = find_costs("search", p * v, v, forward, backward, input_grad, weight_grad, communication)
    places = math.floor(memory * v + 1e-9)
    # With the slack, an order that differs from the bound by rounding alone ends the search.
    bound = find_least_makespan(p, m, v, costs, memory) + SLACK
    placements: list[StagePlacement] = ["loop"]
    if v > 1 and p > 1:
        # The V first: if it reaches the bound, as ZB-V may, the loop is not tried at all.
        placements.insert(0, "v")
    best = _Candidate(math.inf, "loop", [])
    for placement in placements:
        if best.makespan <= bound:
            break
        work = Actions(p, m, v, placement, costs)
        best = _search_placement(work, places, bound, best)

    unsplit = interleaved(p, m, v) if v > 1 else one_f_one_b(p, m)
    timeline = unsplit.simulate(forward, backward, input_grad, weight_grad, communication)
    if timeline.makespan < best.makespan - SLACK and max(timeline.peak_in_flight) <= memory + SLACK:
        return replace(unsplit, name="search")
    orders = []
    for row in best.rows:
        order = [(action,) for _, action in row]
        orders.append(order)
    return build_schedule("search", orders, m, best.placement)


_TIGHTENED = 8  # how many of the fastest orders of a placement are tightened
_PERIOD = 6  # F, I and W of two chunks
_FEW = 16  # pieces, of which all orders are compared


class _Candidate(NamedTuple):
    """When devices begin their actions, and the makespan."""

    makespan: float
    placement: StagePlacement
    rows: Timed


def _search_placement(work: Actions, places: int, bound: float, best: _Candidate) -> _Candidate:
    """The better of `best` and the best candidate with this placement; stops when the bound is reached."""
    rows_by_makespan: dict[float, Timed] = {}  # orders with the same makespan are mostly the same order
    for rows in _try_orders(work, places):
        rows_by_makespan.setdefault(work.find_makespan(rows), rows)
        # No further order can be faster.
        if min(rows_by_makespan) <= bound:
            break
    for makespan in sorted(rows_by_makespan)[:_TIGHTENED]:
        if best.makespan <= bound:
            break
        rows = rows_by_makespan[makespan]
        # An order at the bound cannot become faster.
        if makespan > bound:
            rows = work.tighten(rows, places)
        candidate = _Candidate(work.find_makespan(rows), work.placement, rows)
        if candidate.makespan < best.makespan:
            best = candidate
    if best.makespan > bound and work.p * work.m * work.v <= _FEW:
        exhaustion = Exhaustion(work, places, best.makespan)
        if exhaustion.order:
            best = _Candidate(exhaustion.best, work.placement, work.run_order(exhaustion.order))
    return best


def _try_orders(work: Actions, places: int) -> Iterator[Timed]:
    """The orders that are tried, as begin times, for devices with `places` for chunks in flight."""
    for order in _find_known_orders(work, places):
        rows = work.run_order(order)
        # ZB-H1 and ZB-V know of no cap, and a repeating order keeps to it on average alone: those with a higher peak
        # are left out here. A greedy run keeps to the cap by itself.
        if _find_peak(rows) <= places:
            yield rows
    for rule in _RULES:
        yield GreedyRun(work, places, rule).run()


def _find_peak(rows: Timed) -> int:
    """The most chunks that any device holds at once."""
    peak = 0
    for row in rows:
        actions = [action for _, action in row]
        peak = max(peak, count_peak(actions))
    return peak


def _find_known_orders(work: Actions, places: int) -> Iterator[Iterable[Action]]:
    """The published orders of this placement, for one or two chunks."""
    if work.v == 1:
        yield zero_bubble_h1(work.p, work.m).ticks
    if work.v == 2:
        schedule = zero_bubble_v(work.p, work.m)
        # On one device the schedule is called a loop.
        if schedule.placement == work.placement:
            yield schedule.ticks
        if work.placement == "v":
            yield from find_repeating_orders(work.p, work.m, places)


class Preference(NamedTuple):
    """A rule that chooses among the actions that are ready on a device.

    Attributes:
        oldest: whether the input gradient of the oldest microbatch goes first; else the one of the last chunk.
        in_turn: whether after a backward a forward goes before the next backward.
        waiting: if more weight gradients than this wait, one goes before a forward; 0: never.
        patient: whether a weight gradient does not begin if another action will be ready before it ends.
    """

    oldest: bool
    in_turn: bool
    waiting: int
    patient: bool


# Nine of 32 rules: after tightening they were as fast as all 32 in 230 of 240 settings.
_RULES = (
    Preference(True, True, 0, False),
    Preference(False, True, 1, False),
    Preference(False, False, 2, True),
    Preference(True, True, 1, True),
    Preference(False, True, 2, False),
    Preference(True, False, 0, False),
    Preference(True, True, 1, False),
    Preference(False, True, 1, True),
    Preference(False, False, 1, False),
)


class GreedyRun:
    """One run of a rule: which device begins which action, and when."""

    def __init__(self, work: Actions, places: int, rule: Preference):
        self._work = work
        self._places = places
        self._rule = rule
        self._ended: dict[Action, float] = {}  # the end of each action that has begun
        self._next = {op: [0] * len(work.stages) for op in "FIW"}  # the microbatch of each stage
        self._rows: Timed = [[] for _ in range(work.p)]

    def run(self) -> Timed:
        """When each device begins its actions, in order.

        A device that has ended an action chooses the next. If none is ready, it chooses again when one will be. If it
        does not know when, because no input of its actions has begun, it sleeps until another device begins one.
        """
        free = [(0.0, device) for device in range(self._work.p)]
        asleep: set[int] = set()
        while free:
            # The device that is free first: all actions that begin before this time have been chosen, so their ends are
            # known.
            time, device = heappop(free)
            action, later = self._choose(device, time)
            if action is None and later < math.inf:
                heappush(free, (later, device))
            elif action is None:
                asleep.add(device)
            else:
                heappush(free, (self._begin(device, action, time), device))
                # Only devices that may have waited for this action: the others would ask in vain.
                for following, _ in self._work.needed[action]:
                    waiting = self._work.device[following.stage]
                    if waiting in asleep:
                        asleep.remove(waiting)
                        # Its result may still be on the way then. The device asks again, and learns when it arrives.
                        heappush(free, (self._ended[action], waiting))
        return self._rows

    def _begin(self, device: int, action: Action, now: float) -> float:
        """Notes an action that begins now; returns when it ends."""
        end = now + self._work.cost[action]
        self._ended[action] = end
        self._next[action.op][action.stage] += 1
        self._rows[device].append((now, action))
        return end

    def _choose(self, device: int, now: float) -> tuple[Action | None, float]:
        """The action that a device begins now, or None; and when its next other action will be ready."""
        ready: dict[str, list[Action]] = {"F": [], "I": [], "W": []}
        later = math.inf
        # A place stays free for each later chunk, so that the first microbatch of all can always go on.
        room = self._places - self._work.v + 1 - self._count_between(device, "F", "W")
        for number, stage in enumerate(self._work.chunks[device]):
            for op, actions in ready.items():
                i = self._next[op][stage]
                has_place = op != "F" or room + number > 0
                if i == self._work.m or not has_place:
                    continue
                action = Action(stage, op, i)
                begin = self._work.find_ready(action, self._ended)
                if begin <= now + SLACK:
                    actions.append(action)
                elif op != "W":
                    later = min(later, begin)
        return self._prefer(device, ready, now, later), later

    def _count_between(self, device: int, first: str, last: str) -> int:
        """How many microbatches of a device's chunks have begun one op, and not yet another."""
        count = 0
        for stage in self._work.chunks[device]:
            count += self._next[first][stage] - self._next[last][stage]
        return count

    def _prefer(self, device: int, ready: dict[str, list[Action]], now: float, later: float) -> Action | None:
        """The ready action that the rule begins; None if it waits."""
        rule = self._rule
        forward = _find_last(ready["F"])
        input_gradient = _find_oldest(ready["I"]) if rule.oldest else _find_last(ready["I"])
        weight_gradient = _find_oldest(ready["W"])
        # Other devices wait for a forward or an input gradient, and none for a weight gradient.
        first = input_gradient
        if first is None or (forward and rule.in_turn and self._has_run_backward(device)):
            first = forward
        if weight_gradient is None:
            return first
        if first is None or first.op == "F":
            # A chunk keeps its place until W: some weight gradients now make room for further forwards.
            waiting = self._count_between(device, "I", "W")
            if rule.waiting and waiting > rule.waiting:
                return weight_gradient
        if first is not None:
            return first
        # An action for which other devices wait will be ready before W would end, and would begin late.
        if rule.patient and later < now + self._work.cost[weight_gradient]:
            return None
        return weight_gradient

    def _has_run_backward(self, device: int) -> bool:
        """Whether the last action of a device was a part of a backward."""
        row = self._rows[device]
        if not row:
            return False
        _, action = row[-1]
        return action.op != "F"


def _find_last(actions: list[Action]) -> Action | None:
    """The action of the last chunk; None if there are no actions."""
    return actions[-1] if actions else None


def _find_oldest(actions: list[Action]) -> Action | None:
    """The action of the lowest microbatch, and of these the last chunk's; None if there are no actions."""
    return min(reversed(actions), key=attrgetter("microbatch"), default=None)


def find_repeating_orders(p: int, m: int, places: int) -> Iterator[list[Action]]:
    """Orders for two chunks placed as a V, in which each microbatch does the same as the one before, six actions later.

    A microbatch reaches the next device one or two actions later: always one in V-Min; two on the way there and one on
    the way back in V-Half. At the ends of the V it turns after one to six actions. No two actions of a device may fall
    on the same time.

    Worked example: two devices, all steps and turns of one. The first microbatch is on stages 0 1 2 3 at times 0 1 2 3,
    and back on 3 2 1 0 at times 4 5 6 7. Device 0, which has stages 0 and 3, is busy at 0, 3, 4 and 7. Modulo six these
    are 0, 3, 4 and 1, all different: the second microbatch may follow at 6, 9, 10 and 13. The two weight gradients take
    the next free times: 5 after 4, and 8 after 7.
    """
    stages = range(2 * p)
    passes = [*product("F", stages), *product("I", reversed(stages))]
    # A microbatch passes the devices four times: forward there and back, then its gradient there and back. `steps` has
    # the time from device to device on each of these ways, `turns` the time at each of the three ends between them.
    all_steps = product((1, 2), repeat=4)
    all_turns = product(range(1, _PERIOD + 1), repeat=3)
    for steps, turns in product(all_steps, all_turns):
        # With two devices, all steps and turns of one: the gaps 0, 1 1, 1 1, 1 1, 1, whose sums are the times 0 to 7.
        gaps = [0]
        for number, step in enumerate(steps):
            gaps += [step] * (p - 1)
            gaps += turns[number : number + 1]  # none after the last way
        begins = dict(zip(passes, accumulate(gaps), strict=True))
        if _add_weight_gradients(begins, p, places):
            yield _repeat(begins, m)


def _repeat(begins: dict[tuple[str, int], int], m: int) -> list[Action]:
    """The order of m microbatches, each a period after the one before it."""
    timed = []
    for i in range(m):
        for (op, stage), begin in begins.items():
            timed.append((begin + _PERIOD * i, Action(stage, op, i)))
    return [action for _, action in sorted(timed)]


def _add_weight_gradients(begins: dict[tuple[str, int], int], p: int, places: int) -> bool:
    """Adds the weight gradients of all stages, device by device; False if those of a device do not fit."""
    for d in range(p):
        if not _add_on_device(begins, (2 * p - 1 - d, d), places):
            return False
    return True


def _add_on_device(begins: dict[tuple[str, int], int], stages: tuple[int, int], places: int) -> bool:
    """Adds the weight gradients of a device's two stages; False if actions collide, or too many are in flight."""
    taken = set()  # of the ticks of a period
    for stage in stages:
        taken.add(begins["F", stage] % _PERIOD)
        taken.add(begins["I", stage] % _PERIOD)
    if len(taken) < 4:
        return False
    in_flight = 0
    for stage in stages:
        begin = begins["I", stage] + 1
        # Four of the six times are taken, so there is one for each of the two weight gradients.
        while begin % _PERIOD in taken:
            begin += 1
        begins["W", stage] = begin
        taken.add(begin % _PERIOD)
        in_flight += begin - begins["F", stage]
    # A microbatch comes once a period, so this sum over the period is the average of chunks in flight, without the tick
    # of each W. So it leaves out only orders that cannot fit: `_try_orders` counts the peak.
    return in_flight <= _PERIOD * places
