"""The fastest of all orders, for few actions: branch and bound."""

from __future__ import annotations

import math
from itertools import product

from shardkit.schedules.action import Action
from shardkit.schedules.tighten import SLACK, Actions

_MOST = 20_000  # beginnings of orders that are tried: about a second
_NEXT_STAGE = {"F": 1, "I": -1, "W": 0}  # from a stage to the one that uses its result


class Exhaustion:
    """Tries every order, action by action in the order of time, except orders that cannot be better than another.

    Microbatches are alike, so each stage takes them in the order of their numbers.

    Attributes:
        best: the least makespan; the one that was passed if no order is faster.
        order: the actions of the fastest order, in the order of time; None if no order is faster.
        remaining: how many more beginnings could have been tried; above 0, all orders were tried, and `best` is proved.
    """

    def __init__(self, work: Actions, places: int, best: float):
        self.best = best
        self.order: list[Action] | None = None
        self.remaining = _MOST
        self._work = work
        self._places = places
        # The beginning of an order that is being tried: the next microbatch of each op and stage, when each device is
        # free, and when each action ends.
        self._next = dict.fromkeys(product("IFW", work.stages), 0)
        self._free = [0.0] * work.p
        self._ended: dict[Action, float] = {}
        # The beginnings that have been tried. The key has the number of actions of each op and stage; the value has,
        # for each beginning with these actions, the times that matter later.
        self._tried: dict[tuple[int, ...], list[list[float]]] = {}
        self._after = _find_times_to_the_end(work)
        self._explore(0.0)

    def _explore(self, now: float) -> None:
        """Tries all actions that may come next, after the last action began at `now`."""
        if len(self._ended) == len(self._work.cost):
            self.best = max(self._free)
            # A dict keeps the order in which its keys were added: that of the begins.
            self.order = list(self._ended)
            return
        self.remaining -= 1
        if self.remaining <= 0:
            return
        ready = self._find_ready()
        if self._find_bound(ready, now) >= self.best - SLACK or self._is_dominated(now):
            return
        for begin, action in ready:
            # Orders are written in the order of time: an action that would begin before the last one comes earlier in
            # another order.
            if begin >= now - SLACK and not self._comes_late(begin, action, ready):
                self._try(begin, action)

    def _try(self, begin: float, action: Action) -> None:
        """Explores the orders in which this action comes next, and then takes it back."""
        stage, op, _ = action
        free = self._free[:]
        end = begin + self._work.cost[action]
        self._free[self._work.device[stage]] = end
        self._ended[action] = end
        self._next[op, stage] += 1
        self._explore(begin)
        self._next[op, stage] -= 1
        del self._ended[action]
        self._free = free

    def _find_ready(self) -> list[tuple[float, Action]]:
        """The actions that may come next, one for each op and stage, and when they would begin."""
        ready = []
        for (op, stage), i in self._next.items():
            if i == self._work.m:
                continue
            device = self._work.device[stage]
            # Only F takes a place, so a microbatch that is here can always go back.
            if op == "F" and self._count_in_flight(device) >= self._places:
                continue
            action = Action(stage, op, i)
            begin = max(self._free[device], self._work.find_ready(action, self._ended))
            if begin < math.inf:
                ready.append((begin, action))
        # The earliest first: a fast order that is found soon lets the bound end more of the others.
        return sorted(ready)

    def _count_in_flight(self, device: int) -> int:
        """How many chunks a device holds, from F to W."""
        in_flight = 0
        for stage in self._work.chunks[device]:
            in_flight += self._next["F", stage] - self._next["W", stage]
        return in_flight

    def _find_bound(self, ready: list[tuple[float, Action]], now: float) -> float:
        """A lower bound of the makespan of every order with this beginning.

        Each device must still do its remaining work, and each microbatch must still go the rest of its way.
        """
        work_left = [0.0] * self._work.p
        for (op, stage), i in self._next.items():
            work_left[self._work.device[stage]] += (self._work.m - i) * self._work.cost[Action(stage, op, 0)]
        bounds = [0.0]
        for free, time in zip(self._free, work_left, strict=True):
            if time:
                bounds.append(max(free, now) + time)
        for begin, action in ready:
            bounds.append(max(begin, now) + self._after.get((action.op, action.stage), 0.0))
        return max(bounds)

    def _comes_late(self, begin: float, action: Action, ready: list[tuple[float, Action]]) -> bool:
        """Whether another part of a backward would fit in before this action, on the same device."""
        device = self._work.device[action.stage]
        for ready_begin, backward in ready:
            # A forward takes a place, so a device may do better to wait. Half of a backward takes none, and to run it
            # in idle time never does harm.
            if backward.op == "F" or self._work.device[backward.stage] != device:
                continue
            # An action of cost 0 counts as longer than the slack: otherwise two of them would exclude each other.
            cost = max(self._work.cost[backward], 2 * SLACK)
            if ready_begin + cost <= begin + SLACK:
                return True
        return False

    def _is_dominated(self, now: float) -> bool:
        """Whether another order of the same actions was at least as early in all times that matter later.

        These are the times at which devices are free, and the ends of actions whose results are not used yet.
        """
        times = [max(free, now) for free in self._free]
        for op, stage in self._next:
            target = stage + _NEXT_STAGE[op]
            if target != stage and target in self._work.stages:
                for i in range(self._next[op, target], self._next[op, stage]):
                    times.append(self._ended[Action(stage, op, i)])
        tried = self._tried.setdefault(tuple(self._next.values()), [])
        if any(_is_no_later(earlier_times, times) for earlier_times in tried):
            return True
        tried.append(times)
        return False


def _is_no_later(times: list[float], later_times: list[float]) -> bool:
    """Whether each time is at most the other one in its place."""
    for time, later_time in zip(times, later_times, strict=True):
        if time > later_time + SLACK:
            return False
    return True


def _find_times_to_the_end(work: Actions) -> dict[tuple[str, int], float]:
    """For each op and stage, the least time from the begin of the action to the end of its microbatch's last action.

    Worked example: two stages, each action of one unit. The way of a microbatch is F0 F1 I1 I0 W0, so that F0 has 5,
    F1 4, I1 3, I0 2 and W0 1.
    """
    way_back = [("W", 0), *product("I", work.stages), *product("F", reversed(work.stages))]
    times = {}
    total = 0.0
    for op, stage in way_back:
        total += work.cost[Action(stage, op, 0)]
        times[op, stage] = total
    return times
