"""The fastest of all orders, for few actions: branch and bound."""

from __future__ import annotations

import math
from itertools import accumulate, product

from shardkit.schedules.action import Action
from shardkit.schedules.tighten import SLACK, Actions

_MOST = 20_000  # beginnings of orders, a second


class Exhaustion:
    """Every order, action by action in the order of time, except those that another is at least as good as.

    Microbatches are alike: each stage may take them in turn.

    Attributes:
        best: the least makespan; as given, where no order is faster.
        order: the actions of the fastest, in the order of time; None where none is faster.
        left: how many more beginnings would have been tried; above 0, `best` is proved.
    """

    def __init__(self, work: Actions, places: int, best: float):
        self.work, self.places, self.best, self.left = work, places, best, _MOST
        self.order: list[Action] | None = None
        self.next = dict.fromkeys(product("IFW", work.stages), 0)
        self.free = [0.0] * work.p
        # The least time from the begin of an action to the end of its microbatch's last.
        last = [("W", 0), *product("I", work.stages), *product("F", reversed(work.stages))]
        times = accumulate(work.cost[Action(stage, op, 0)] for op, stage in last)
        self.after = dict(zip(last, times, strict=True))
        self.ended: dict[Action, float] = {}
        self.seen: dict[tuple[int, ...], list[list[float]]] = {}
        self._explore(0.0)

    def _explore(self, now: float) -> None:
        """Tries all that may follow, where the last action began at `now`."""
        if len(self.ended) == len(self.work.cost):
            self.best, self.order = max(self.free), list(self.ended)
            return
        self.left -= 1
        ready = self._ready()
        if self.left <= 0 or self._bound(ready, now) >= self.best - SLACK or self._dominated(now):
            return
        for begin, action in ready:
            if begin >= now - SLACK and not self._late(begin, action, ready):
                stage, op, _ = action
                free = self.free[:]
                self.free[self.work.device[stage]] = self.ended[action] = begin + self.work.cost[action]
                self.next[op, stage] += 1
                self._explore(begin)
                self.next[op, stage] -= 1
                del self.ended[action]
                self.free = free

    def _ready(self) -> list[tuple[float, Action]]:
        """What may be next of each stage, and when it would begin."""
        ready = []
        for (op, stage), i in self.next.items():
            device, action = self.work.device[stage], Action(stage, op, i)
            held = sum(self.next["F", other] - self.next["W", other] for other in self.work.chunks[device])
            if i < self.work.m and (op != "F" or held < self.places):
                ready.append((max(self.free[device], self.work.ready(action, self.ended)), action))
        return sorted(each for each in ready if each[0] < math.inf)

    def _bound(self, ready: list[tuple[float, Action]], now: float) -> float:
        """What no order that goes on from here goes below."""
        rest = [0.0] * self.work.p
        for (op, stage), i in self.next.items():
            rest[self.work.device[stage]] += (self.work.m - i) * self.work.cost[Action(stage, op, 0)]
        devices = [max(free, now) + time for free, time in zip(self.free, rest, strict=True) if time]
        chains = [max(begin, now) + self.after.get((each.op, each.stage), 0.0) for begin, each in ready]
        return max([0.0, *devices, *chains])

    def _late(self, begin: float, action: Action, ready: list[tuple[float, Action]]) -> bool:
        """Whether a part of a backward would have fitted in before, on the same device."""
        device = self.work.device[action.stage]
        parts = [(at, each) for at, each in ready if each.op != "F" and self.work.device[each.stage] == device]
        # One without a cost counts as more than the slack: two of them would exclude each other.
        return any(at + max(self.work.cost[each], 2 * SLACK) <= begin + SLACK for at, each in parts)

    def _dominated(self, now: float) -> bool:
        """Whether another order of the same actions was as early in all that matters from here."""
        times = [max(free, now) for free in self.free]
        for op, stage in self.next:
            to = stage + {"F": 1, "I": -1, "W": 0}[op]
            if to != stage and to in self.work.stages:
                times += [self.ended[Action(stage, op, i)] for i in range(self.next[op, to], self.next[op, stage])]
        known = self.seen.setdefault(tuple(self.next.values()), [])
        worse = any(all(old <= new + SLACK for old, new in zip(olds, times, strict=True)) for olds in known)
        known += [] if worse else [times]
        return worse
