"""Search: the fastest schedule that is found under given costs and a memory cap; of few actions the fastest of all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import accumulate, product
from operator import attrgetter, itemgetter
from typing import NamedTuple, get_args

from shardkit._arguments import checks
from shardkit.schedules.action import Action, StagePlacement
from shardkit.schedules.base import Schedule, builder, scheduled, sizes
from shardkit.schedules.exhaust import Exhaustion
from shardkit.schedules.interleaved import interleaved
from shardkit.schedules.one_f_one_b import one_f_one_b
from shardkit.schedules.simulate import Each, costs_of, least, peak
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
    forward: Each = 1,
    backward: Each = 2,
    input_grad: Each | None = None,
    weight_grad: Each | None = None,
    communication: float = 0,
) -> Schedule:
    """The schedule of the least makespan among those that are tried, with a backward in two halves or whole.

    Each device begins what is ready, by one of nine rules: input gradients first, or forwards in turn with them; of the
    oldest microbatch, or of the last chunk; weight gradients where nothing else is ready, or as soon as some wait. Two
    chunks are also tried in orders that repeat every six actions, as V-Min and V-Half do; and ZB-H1 and ZB-V. In the
    fastest, actions move into idle time. Up to 16 pieces (p m v), no order of the two halves is faster. Of whole
    backward passes, which may take less time than their halves, 1F1B and interleaved are tried.

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
    costs = costs_of("search", p * v, v, forward, backward, input_grad, weight_grad, communication)
    places = math.floor(memory * v + 1e-9)
    best: tuple[float, StagePlacement, Timed] = (math.inf, "loop", [])
    placements: Sequence[StagePlacement] = get_args(StagePlacement) if v > 1 and p > 1 else ("loop",)
    bound = least(p, m, v, costs, memory) + SLACK
    for placement in placements[::-1]:
        if best[0] <= bound:
            break
        work = Actions(p, m, v, placement, costs)
        found: dict[float, Timed] = {}  # what ends at once is most often the same
        for rows in _tried(work, places):
            found.setdefault(work.makespan(rows), rows)
            if min(found) <= bound:
                break
        for span in sorted(found)[:_TIGHTENED]:
            if best[0] > bound:
                rows = found[span] if span <= bound else work.tightened(found[span], places)
                best = min(best, (work.makespan(rows), placement, rows), key=itemgetter(0))
        if best[0] > bound and p * m * v <= _FEW:
            faster = Exhaustion(work, places, best[0])
            best = (faster.best, placement, work.timed(faster.order)) if faster.order else best
    _, placement, rows = best
    whole = interleaved(p, m, v) if v > 1 else one_f_one_b(p, m)
    line = whole.simulate(forward, backward, input_grad, weight_grad, communication)
    if line.makespan < best[0] - SLACK and max(line.peak_in_flight) <= memory + SLACK:
        return replace(whole, name="search")
    return scheduled("search", [[(action,) for _, action in row] for row in rows], m, placement)


_TIGHTENED = 8  # of what is tried for a placement, the fastest
_PERIOD = 6  # F, I and W of two chunks
_FEW = 16  # pieces, of which all orders are compared


def _tried(work: Actions, places: int) -> Iterator[Timed]:
    """What is tried: when devices with `places` for chunks begin what."""
    orders: list[Iterable[Action]] = []
    if work.v <= 2:
        known = (zero_bubble_h1 if work.v == 1 else zero_bubble_v)(work.p, work.m)
        orders += [known.ticks] if known.placement == work.placement else []
    if work.v == 2 and work.placement == "v":
        orders += repeated(work.p, work.m, places)
    for order in orders:
        rows = work.timed(order)
        if max(peak([action for _, action in row]) for row in rows) <= places:
            yield rows
    for rule in _RULES:
        yield GreedyRun(work, places, rule).rows()


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


# Of 32 the nine that, tightened, made 230 of 240 settings as fast as all of them.
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
        self.work, self.places, self.rule = work, places, rule
        self.ended: dict[Action, float] = {}  # of all that have begun
        self.next = {op: [0] * len(work.stages) for op in "FIW"}  # the microbatch of each stage
        self.order: Timed = [[] for _ in range(work.p)]

    def rows(self) -> Timed:
        """When each device begins its actions, in order."""
        free = [(0.0, d) for d in range(self.work.p)]
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
            end = self.ended[action] = now + self.work.cost[action]
            self.next[action.op][action.stage] += 1
            self.order[d].append((now, action))
            heappush(free, (end, d))
            for other, _ in self.work.needed[action]:
                device = self.work.device[other.stage]
                if device in asleep:
                    asleep.remove(device)
                    heappush(free, (end, device))
        return self.order

    def _chosen(self, d: int, now: float) -> tuple[Action | None, float]:
        """What a device begins now, or None; and when something else will be ready."""
        ready: dict[str, list[Action]] = {"F": [], "I": [], "W": []}
        later = math.inf
        # A place stays free for each later chunk: the microbatch that is ahead of all others can always go on.
        held = sum(self.next["F"][stage] - self.next["W"][stage] for stage in self.work.chunks[d])
        room = self.places - self.work.v + 1 - held
        for number, stage in enumerate(self.work.chunks[d]):
            for op, actions in ready.items():
                i = self.next[op][stage]
                if i == self.work.m or (op == "F" and room + number <= 0):
                    continue
                action = Action(stage, op, i)
                at = self.work.ready(action, self.ended)
                if at <= now + SLACK:
                    actions.append(action)
                elif op != "W":
                    later = min(later, at)
        return self._first(d, ready, now, later), later

    def _first(self, d: int, ready: dict[str, list[Action]], now: float, later: float) -> Action | None:
        rule, turn = self.rule, bool(self.order[d]) and self.order[d][-1][1].op != "F"
        forwards, backs, weights = (ready[op][::-1] for op in "FIW")  # the last chunk first
        forward = next(iter(forwards), None)
        back = min(backs, key=attrgetter("microbatch"), default=None) if rule.oldest else next(iter(backs), None)
        weight = min(weights, key=attrgetter("microbatch"), default=None)
        first = forward if back is None or (forward and rule.in_turn and turn) else back
        waiting = sum(self.next["I"][stage] - self.next["W"][stage] for stage in self.work.chunks[d])
        if first is forward and weight and rule.waiting and waiting > rule.waiting:
            return weight
        if first is None and weight and rule.patient and later < now + self.work.cost[weight]:
            return None
        return first or weight


def repeated(p: int, m: int, places: int) -> Iterator[list[Action]]:
    """Orders for two chunks placed as a V, in which each microbatch repeats those before it, six actions later.

    A pass moves one or two actions later from device to device, always one in V-Min, two there and one back in V-Half,
    and turns after one to six; no two actions of a device may fall together.
    """
    passes = [("F", stage) for stage in range(2 * p)] + [("I", stage) for stage in reversed(range(2 * p))]
    for steps, turns in product(product((1, 2), repeat=4), product(range(1, _PERIOD + 1), repeat=3)):
        gaps = [0]
        for step, turn in zip(steps, (*turns, 0), strict=True):
            gaps += [step] * (p - 1) + [turn]
        at = dict(zip(passes, accumulate(gaps), strict=False))
        if all(_weighed(at, (2 * p - 1 - d, d), places) for d in range(p)):
            timed = [(begin + _PERIOD * i, Action(stage, op, i)) for i in range(m) for (op, stage), begin in at.items()]
            yield [action for _, action in sorted(timed)]


def _weighed(at: dict[tuple[str, int], int], stages: tuple[int, int], places: int) -> bool:
    """Adds the weight gradients of a device's two stages where it is free; False where it is not, or has no places."""
    taken = {at[op, stage] % _PERIOD for op in "FI" for stage in stages}
    if len(taken) < 4:
        return False
    held = 0
    for stage in stages:
        soon = range(at["I", stage] + 1, at["I", stage] + 1 + _PERIOD)
        at["W", stage] = next(begin for begin in soon if begin % _PERIOD not in taken)
        taken.add(at["W", stage] % _PERIOD)
        held += at["W", stage] - at["F", stage]
    return held <= _PERIOD * places
