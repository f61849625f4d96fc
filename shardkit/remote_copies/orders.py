"""Which events happen before which, in all orders at once, without trying them.

A semaphore is waited for only by the core that has it, in the order of its program. So once an event can happen it
stays able to until it does: others only add to what it waits for. Two things follow, by which few runs decide all:

- all orders that go on until nothing can happen contain the same events. One run finds every deadlock;
- the run that leaves out event a and goes on as far as it can contains each event that can happen before a. An event b
  happens after a in every order if and only if it is not in there.

Worked example: device 0 sends x to device 1, which waits for its semaphore and reads.

    0  device 0: starts the copy          after nothing
    1  engine: the source is read         after 0
    2  engine: arrives, counts 8          after 1
    3  device 1: waits for 8              after nothing, and what counts
    4  device 1: reads the target         after 3

The run without 2 is 0, 1: 3 cannot happen, and so 4, which touches what 2 wrote, comes after 2 in every order. If the
semaphore also got 8 from another copy, the run without 2 would contain 3 and 4: a race. Counting vector clocks would
have to guess there which of both the wait took.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from shardkit.remote_copies.events import ENGINES, KernelEvent, Semaphore


@dataclass(frozen=True)
class OrderRun:
    """A run as far as it goes.

    Attributes:
        order: the numbers of the events that happened.
        able: those that could happen next, but were left out.
        counts: what semaphores count at its end.
    """

    order: list[int]
    able: frozenset[int]
    counts: dict[Semaphore, int]


class Orders:
    """All orders of some events."""

    def __init__(self, events: Sequence[KernelEvent]):
        self.events = events
        self._next: list[list[int]] = [[] for _ in events]
        self._first: list[int] = []
        for number, event in enumerate(events):
            if event.after < 0:
                self._first.append(number)
            else:
                self._next[event.after].append(number)
        self._before: dict[int, bytearray] = {}

    def run(self, without: Collection[int] = (), partly: Collection[int] = ()) -> OrderRun:
        """Runs as far as possible without some events.

        Of those that are `partly` there, a copy is under way: its semaphore counts all of its bytes but one. For
        example a wait for 3 bytes goes on when a copy of 1 byte is there and 2 of another copy's 3 bytes are.
        """
        ready = list(reversed(self._first))
        order: list[int] = []
        able: set[int] = set()
        counts: dict[Semaphore, int] = {}
        waiting: dict[Semaphore, int] = {}
        while ready:
            number = ready.pop()
            event = self.events[number]
            if event.wait is not None:
                semaphore, amount, takes = event.wait
                if counts.get(semaphore, 0) < amount:
                    waiting[semaphore] = number
                    continue
            if number in without:
                able.add(number)
                if number in partly and event.role in ENGINES:
                    for semaphore, amount in event.signals:
                        counts[semaphore] = counts.get(semaphore, 0) + amount - 1
                        if semaphore in waiting:
                            ready.append(waiting.pop(semaphore))
                continue
            if event.wait is not None and takes:
                counts[semaphore] -= amount
            order.append(number)
            for semaphore, amount in event.signals:
                counts[semaphore] = counts.get(semaphore, 0) + amount
                if semaphore in waiting:
                    ready.append(waiting.pop(semaphore))
            ready.extend(self._next[number])
        return OrderRun(order, frozenset(able), counts)

    def can_precede(self, first: int, second: int) -> bool:
        """Whether `first` happens before `second` in some order."""
        if second not in self._before:
            happened = bytearray(len(self.events))
            for number in self.run({second}, {second}).order:
                happened[number] = 1
            self._before[second] = happened
        return bool(self._before[second][first])

    def concurrent(self, first: int, second: int) -> bool:
        """Whether an order exists in which both can happen next.

        Of the two runs, take what happened before the other event. Both parts together are a run too, because nothing
        that happens disables another event, and at its end both can happen.
        """
        return self.can_precede(first, second) and self.can_precede(second, first)

    def shortest(self, together: Iterable[int]) -> list[int]:
        """An order after which some concurrent events can happen next, from which no event can be left out."""
        goal = frozenset(together)
        order = self.run(goal, goal).order
        without = set(range(len(self.events))) - set(order)
        without |= goal
        for number in reversed(order):
            if number in without:
                continue
            # What others could do without it stays; leaving it out leaves out all that needs it.
            shorter = self.run(without | {number}, goal)
            if goal <= shorter.able:
                without = set(range(len(self.events))) - set(shorter.order)
        return self.run(without, goal).order
