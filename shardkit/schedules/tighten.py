"""Makes an order faster: each action moves to an earlier idle time, and then, from the end on, to a later one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import product

from shardkit.schedules.action import Action, StagePlacement, device_of
from shardkit.schedules.rules import find_needs
from shardkit.schedules.simulate import Costs

Row = list[tuple[float, Action]]  # when the actions of a device begin, in order
Timed = list[Row]  # of each device
Inputs = dict[Action, list[tuple[Action, float]]]  # actions, and how long results are on the way from one to the other

SLACK = 1e-9  # sums of costs that differ by less count as equal


class Actions:
    """The actions of a pipeline with backwards in two halves, and their inputs.

    Attributes:
        p, m, v: devices, microbatches, chunks.
        placement: the placement of the stages.
        stages: the numbers of the stages.
        device: the device of each stage.
        chunks: the stages of each device.
        cost: how long each action takes.
        needs: for each action, the actions that must end before it, and how long their results are on the way.
        needed: for each action, the actions that need it, and how long its result is on the way.
    """

    def __init__(self, p: int, m: int, v: int, placement: StagePlacement, costs: Costs):
        self.p = p
        self.m = m
        self.v = v
        self.placement = placement
        self.stages = range(p * v)
        self.device = [device_of(stage, p, placement) for stage in self.stages]
        self.chunks: list[list[int]] = [[] for _ in range(p)]
        for stage in self.stages:
            self.chunks[self.device[stage]].append(stage)
        self.cost: dict[Action, float] = {}
        self.needs: Inputs = {}
        self.needed: Inputs = {}
        for stage, op, i in product(self.stages, "FIW", range(m)):
            action = Action(stage, op, i)
            self.cost[action] = costs.of[op][stage]
            self.needs[action] = []
            self.needed[action] = []
        last_stage = p * v - 1
        for action in self.cost:
            # No backward is whole here: with () every need of a backward is an I.
            for need in find_needs(action, last_stage, ()):
                moves = self.device[need.stage] != self.device[action.stage]
                delay = costs.communication if moves else 0.0
                self.needs[action].append((need, delay))
                self.needed[need].append((action, delay))

    def find_ready(self, action: Action, ended: Mapping[Action, float]) -> float:
        """When all inputs of an action are on its device; infinite while an input has not begun."""
        arrivals = []
        for need, delay in self.needs[action]:
            arrivals.append(ended.get(need, math.inf) + delay)
        return max(arrivals, default=0.0)

    def run_order(self, actions: Iterable[Action]) -> Timed:
        """When the actions begin, each after its inputs and after the action before it on its device."""
        rows: Timed = [[] for _ in range(self.p)]
        ended: dict[Action, float] = {}
        free = [0.0] * self.p
        for action in actions:
            device = self.device[action.stage]
            begin = max(free[device], self.find_ready(action, ended))
            rows[device].append((begin, action))
            end = begin + self.cost[action]
            ended[action] = end
            free[device] = end
        return rows

    def find_makespan(self, rows: Timed) -> float:
        """When the last action ends."""
        ends = []
        for row in rows:
            if row:
                begin, action = row[-1]
                ends.append(begin + self.cost[action])
        return max(ends)

    def tighten(self, rows: Timed, places: int) -> Timed:
        """The rows after each action has moved to its earliest idle time, and then to the latest that delays nothing.

        A device holds at most `places` chunks, from F to W; read from the end on, from W to F.

        Worked example: two devices, which run one microbatch after the other; every action takes one unit.

            begin      0   1   2   3   4   5   6   7   8   9
            device 0   0F0 .   .   0I0 0W0 0F1 .   .   0I1 0W1
            device 1   .   1F0 1I0 1W0 .   .   1F1 1I1 1W1 .

        First, each action moves to its earliest idle time, with places for two chunks: 0F1 passes 0W0 and 0I0, and the
        actions that need it move too.

            device 0   0F0 0F1 .   0I0 0W0 .   0I1 0W1
            device 1   .   1F0 1I0 1W0 1F1 1I1 1W1 .

        Then, from the end on, each moves to its latest: no action waits for 1W0, which gives way to 1F1, and 0F1 moves
        next to the actions after it. The makespan was 10, then 8, and is 7.

            device 0   0F0 .   0F1 0I0 0W0 0I1 0W1
            device 1   .   1F0 1I0 1F1 1I1 1W0 1W1

        With a place for one chunk 0F1 must wait for the end of 0W0, and the makespan stays 10.
        """
        rows = self._move_earlier(rows, self.needs, ("F", "W"), places)
        mirrored = self._mirror(rows)
        mirrored = self._move_earlier(mirrored, self.needed, ("W", "F"), places)
        return self._mirror(mirrored)

    def _mirror(self, rows: Timed) -> Timed:
        """The rows with time running backwards: an action begins where it ended, counted from the end."""
        makespan = self.find_makespan(rows)
        mirrored = []
        for row in rows:
            mirrored_row = []
            for begin, action in reversed(row):
                mirrored_row.append((makespan - begin - self.cost[action], action))
            mirrored.append(mirrored_row)
        return mirrored

    def _move_earlier(self, rows: Timed, needs: Inputs, in_flight: tuple[str, str], places: int) -> Timed:
        """The rows, after each action, in the order of begins, has moved to the earliest idle time it fits into."""
        rows = list(map(list, rows))
        begins: dict[Action, float] = {}
        for row in rows:
            for begin, action in row:
                begins[action] = begin
        # Sorted before anything moves: the inputs of an action come before it in this order, so they have moved
        # already.
        for action in sorted(begins, key=begins.__getitem__):
            arrivals = []
            for need, delay in needs[action]:
                arrivals.append(begins[need] + self.cost[need] + delay)
            ready = max(arrivals, default=0.0)
            if ready >= begins[action] - SLACK:
                continue
            row = rows[self.device[action.stage]]
            old = row.index((begins[action], action))
            new, begin = self._find_gap(row, old, ready, in_flight, places)
            del row[old]
            row.insert(new, (begin, action))
            begins[action] = begin
        return rows

    def _find_gap(self, row: Row, old: int, ready: float, in_flight: tuple[str, str], places: int) -> tuple[int, float]:
        """The earliest idle time of a device that an action fits into: its place in the row, and its begin.

        Goes from the action's old place to the left, gap by gap, until its inputs are not there yet. `in_flight` are
        the ops that take a place and give it back. An action that takes one keeps it for all that it passes: it goes no
        further than where there are places for it.
        """
        old_begin, action = row[old]
        cost = self.cost[action]
        takes, gives = in_flight
        chunks_in_flight = 0
        if action.op == takes:
            chunks_in_flight = _count_in_flight(row[:old], takes, gives)
        best = (old, old_begin)
        gap_end = old_begin + cost
        for new in range(old, -1, -1):
            gap_begin = 0.0
            if new:
                begin, before = row[new - 1]
                gap_begin = begin + self.cost[before]
            earliest = max(gap_begin, ready)
            if earliest + cost <= gap_end + SLACK:
                # Not the last word: a gap further to the left may fit as well.
                best = (new, earliest)
            if not new or gap_begin <= ready:
                break
            gap_end = begin
            if action.op == takes:
                # What it passes runs with one chunk more in flight.
                peak = chunks_in_flight + 1
                if before.op == takes:
                    chunks_in_flight -= 1
                elif before.op == gives:
                    chunks_in_flight += 1
                    peak += 1
                if peak > places:
                    break
        return best


def _count_in_flight(row: Row, takes: str, gives: str) -> int:
    """How many chunks are in flight after these actions."""
    count = 0
    for _, action in row:
        if action.op == takes:
            count += 1
        elif action.op == gives:
            count -= 1
    return count
