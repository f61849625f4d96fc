"""Orders that become faster: actions that move into idle time, first to an earlier one and then from the end on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import product

from shardkit.schedules.action import Action, StagePlacement, device_of
from shardkit.schedules.rules import needs
from shardkit.schedules.simulate import Costs

Row = list[tuple[float, Action]]  # when the actions of a device begin, in order
Timed = list[Row]  # of each device
Inputs = dict[Action, list[tuple[Action, float]]]  # actions, and how long results are on the way from one to the other

SLACK = 1e-9  # what sums of costs may differ by


class Actions:
    """The actions of a pipeline with backwards in two halves, and what they need.

    Attributes:
        device: the device of each stage.
        chunks: the stages of each device.
        cost: how long each action takes.
        needs: the actions that end before this one begins, and how long their results are on the way.
        needed: the actions that need this one.
    """

    def __init__(self, p: int, m: int, v: int, placement: StagePlacement, costs: Costs):
        self.p, self.m, self.v, self.placement, self.stages = p, m, v, placement, range(p * v)
        self.device = [device_of(stage, p, placement) for stage in self.stages]
        self.chunks = [[stage for stage in self.stages if self.device[stage] == d] for d in range(p)]
        actions = [Action(*each) for each in product(self.stages, "FIW", range(m))]
        self.cost = {action: costs.of[action.op][action.stage] for action in actions}
        self.needs: Inputs = {action: [] for action in actions}
        self.needed: Inputs = {action: [] for action in actions}
        for action in actions:
            for need in needs(action, p * v - 1, ()):
                away = costs.communication * (self.device[need.stage] != self.device[action.stage])
                self.needs[action].append((need, away))
                self.needed[need].append((action, away))

    def ready(self, action: Action, ended: Mapping[Action, float]) -> float:
        """When the inputs of an action are there; infinite while one of them has not begun."""
        return max((ended.get(need, math.inf) + away for need, away in self.needs[action]), default=0.0)

    def timed(self, actions: Iterable[Action]) -> Timed:
        """When they begin, each after its inputs and after those before it on its device."""
        rows: Timed = [[] for _ in range(self.p)]
        ended: dict[Action, float] = {}
        free = [0.0] * self.p
        for action in actions:
            device = self.device[action.stage]
            begin = max(free[device], self.ready(action, ended))
            rows[device].append((begin, action))
            ended[action] = free[device] = begin + self.cost[action]
        return rows

    def makespan(self, rows: Timed) -> float:
        """When the last action ends."""
        return max(begin + self.cost[action] for row in rows for begin, action in row[-1:])

    def tightened(self, rows: Timed, places: int) -> Timed:
        """The rows, after each action has moved to the earliest idle time, and then to the latest before the end.

        A device holds at most `places` chunks, from F to W; read from the end on, from W to F.
        """
        rows = self._earlier(rows, self.needs, ("F", "W"), places)
        return self._mirrored(self._earlier(self._mirrored(rows), self.needed, ("W", "F"), places))

    def _mirrored(self, rows: Timed) -> Timed:
        end = self.makespan(rows)
        return [[(end - begin - self.cost[action], action) for begin, action in reversed(row)] for row in rows]

    def _earlier(self, rows: Timed, needs: Inputs, held: tuple[str, str], places: int) -> Timed:
        at = {action: begin for row in rows for begin, action in row}
        rows = [list(row) for row in rows]
        for action in sorted(at, key=at.__getitem__):
            ready = max((at[need] + self.cost[need] + away for need, away in needs[action]), default=0.0)
            if ready < at[action] - SLACK:
                row = rows[self.device[action.stage]]
                old = row.index((at[action], action))
                new, at[action] = self._gap(row, old, ready, held, places)
                row.insert(new, (at[action], row.pop(old)[1]))
        return rows

    def _gap(self, row: Row, old: int, ready: float, held: tuple[str, str], places: int) -> tuple[int, float]:
        """The earliest idle time of a device that an action fits into: its place in the row, and its begin."""
        now, action = row[old]
        best, until = (old, now), now + self.cost[action]
        takes, gives = held
        there = sum((each.op == takes) - (each.op == gives) for _, each in row[:old]) if action.op == takes else 0
        for new in range(old, -1, -1):
            idle = row[new - 1][0] + self.cost[row[new - 1][1]] if new else 0.0
            begin = max(idle, ready)
            if begin + self.cost[action] <= until + SLACK:
                best = new, begin
            if not new or idle <= ready:
                break
            until, passed = row[new - 1][0], row[new - 1][1].op
            if action.op == takes:
                # What it passes runs with one chunk more in flight.
                there -= (passed == takes) - (passed == gives)
                if there + (passed == takes) + 1 > places:
                    break
        return best
