"""What is wrong with the events of a kernel: races, deadlocks, copies not awaited, semaphores that are not zero."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from shardkit.remote_copies.events import ENGINES, KernelEvent, Semaphore
from shardkit.remote_copies.memory import READ, WRITE, Access, DevicePlace, conflict
from shardkit.remote_copies.orders import OrderRun, Orders


@dataclass(frozen=True)
class Mistake:
    """A mistake.

    Attributes:
        kind: "deadlock", "race", "not awaited", "not entered", "read early" or "not zero".
        text: what goes wrong, with lines and devices.
        order: the events of an order after which it does, none of which can be left out, as text; empty if it does in
            every order.
    """

    kind: str
    text: str
    order: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.order:
            return f"{self.kind}: {self.text}"
        steps = "\n".join(f"    {number + 1}. {step}" for number, step in enumerate(self.order))
        return f"{self.kind}: {self.text}, as in this order:\n{steps}"


def judge(orders: Orders) -> list[Mistake]:
    """All mistakes, one of a kind for each pair of lines."""
    run = orders.run()
    deadlocks = _find_deadlock(orders, run)
    races = _find_races(orders, run.order)
    if deadlocks:
        return deadlocks + races
    return races + _find_counts(run)


def _find_deadlock(orders: Orders, run: OrderRun) -> list[Mistake]:
    happened = frozenset(run.order)
    stuck = []
    for number, event in enumerate(orders.events):
        if number in happened or event.wait is None:
            continue
        if event.after < 0 or event.after in happened:
            stuck.append(event)
    if not stuck:
        return []
    texts = []
    for event in stuck:
        assert event.wait is not None
        semaphore = event.wait.semaphore
        texts.append(
            f"{event}, which counts {run.counts.get(semaphore, 0)}{_name_signals(orders, happened, semaphore)}"
        )
    return [Mistake("deadlock", "; ".join(texts))]


def _name_signals(orders: Orders, happened: frozenset[int], semaphore: Semaphore) -> str:
    """Who would signal a semaphore, and cannot."""
    devices = set()
    for number, event in enumerate(orders.events):
        if number in happened:
            continue
        for counted, _ in event.signals:
            if counted == semaphore:
                devices.add(event.device)
    if not devices:
        return " and nobody signals"
    return " and waits for device " + " and ".join(str(device) for device in sorted(devices))


def _find_counts(run: OrderRun) -> list[Mistake]:
    mistakes = []
    for semaphore, count in run.counts.items():
        if count:
            mistakes.append(Mistake("not zero", f"{semaphore} counts {count} at the exit"))
    return mistakes


def _find_races(orders: Orders, order: list[int]) -> list[Mistake]:
    """Pairs of accesses of one place that some orders swap."""
    happened = frozenset(order)
    touched: dict[DevicePlace, list[tuple[int, Access]]] = defaultdict(list)
    shared = set()
    for number, event in enumerate(orders.events):
        if number not in happened:
            continue
        for access in event.accesses:
            touched[access.place].append((number, access))
            if event.role not in ("core", "enter", "leave") or access.place.device != event.device:
                shared.add(access.place)
    # Of several pairs of the same lines the earliest is reported, whose order is the shortest.
    position = {number: at for at, number in enumerate(order)}
    pairs: list[tuple[int, int, int, DevicePlace, str]] = []
    for place in shared:
        accesses = touched[place]
        for at, (first, one) in enumerate(accesses):
            for second, other in accesses[at + 1 :]:
                earlier, later = orders.events[first], orders.events[second]
                if first == second or _in_program_order(earlier, later) or not conflict(one, other):
                    continue
                kind = _name_kind(earlier, one, later, other)
                pairs.append((max(position[first], position[second]), first, second, place, kind))
    pairs.sort(key=lambda pair: pair[:3])
    mistakes: list[Mistake] = []
    reported: set[tuple[str, str, str]] = set()
    for _, first, second, place, kind in pairs:
        earlier, later = orders.events[first], orders.events[second]
        one_line, other_line = sorted((earlier.line + earlier.role, later.line + later.role))
        key = (kind, one_line, other_line)
        if key not in reported and orders.concurrent(first, second):
            reported.add(key)
            mistakes.append(_describe(orders, kind, first, second, place))
    return mistakes


def _in_program_order(first: KernelEvent, second: KernelEvent) -> bool:
    return first.device == second.device and first.role not in ENGINES and second.role not in ENGINES


def _name_kind(first: KernelEvent, one: Access, second: KernelEvent, other: Access) -> str:
    roles = {first.role, second.role}
    # An access of memory whose device has not entered the kernel, or has left it.
    if "leave" in roles:
        return "not awaited"
    if "enter" in roles:
        return "not entered"
    if "arrive" in roles and {one.kind, other.kind} == {READ, WRITE}:
        return "read early"
    return "race"


def _describe(orders: Orders, kind: str, first: int, second: int, place: DevicePlace) -> Mistake:
    earlier, later = orders.events[first], orders.events[second]
    text = f"{earlier} and {later} touch {place.buffer.name} of device {place.device}, in either order"
    order = [str(orders.events[number]) for number in orders.shortest((first, second))]
    order.append(f"{earlier}, and at the same time {later}")
    return Mistake(kind, text, tuple(order))
