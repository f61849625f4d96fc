"""A notation for the order of a device with two chunks, placed as a V."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from shardkit.schedules.action import Action, Cell


def v_order(device: int, stages: int, words: Iterable[str]) -> list[Cell]:
    """The cells of a device, from words.

    "F0" is the next forward of chunk 0, "B1" or "I1" the next backward of chunk 1, "W" the oldest pending
    weight gradient, and "F0 B1" a forward and a backward in one cell.
    """
    stage = {"0": device, "1": 2 * stages - 1 - device}
    forwards: Counter[str] = Counter()
    backwards: Counter[str] = Counter()
    waiting: deque[Action] = deque()

    def action(op: str, chunk: str = "") -> Action:
        if op == "W":
            return waiting.popleft()._replace(op="W")
        count = forwards if op == "F" else backwards
        made = Action(stage[chunk], op, count[chunk])
        count[chunk] += 1
        if op == "I":
            waiting.append(made)
        return made

    return [tuple(action(*part) for part in word.split()) for word in words]
