"""A notation for the order of a device with two chunks, placed as a V."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from shardkit.schedules.action import Action, Cell


def parse_v_order(device: int, devices: int, words: Iterable[str]) -> list[Cell]:
    """The cells of a device, from words.

    "F0" is the next forward of chunk 0, "B1" or "I1" the next backward of chunk 1, "W" the oldest pending
    weight gradient, and "F0 B1" a forward and a backward in one cell.

    Worked example: on device 0 of 2, whose chunks are stages 0 and 3, the words F0 F0 F1 I1 "F1 B0" W are the cells
    0F0 0F1 3F0 3I0 3F1/0B0 3W0.
    """
    stages = {"0": device, "1": 2 * devices - 1 - device}
    forwards: Counter[str] = Counter()
    backwards: Counter[str] = Counter()
    waiting: deque[Action] = deque()  # input gradients, the weight gradients of which are to come

    def make_action(op: str, chunk: str) -> Action:
        if op == "W":
            return waiting.popleft()._replace(op="W")
        # B and I share a count: a backward is whole or split, and the next one is of the next microbatch either way.
        count = forwards if op == "F" else backwards
        action = Action(stages[chunk], op, count[chunk])
        count[chunk] += 1
        if op == "I":
            waiting.append(action)
        return action

    cells = []
    for word in words:
        cell = []
        for part in word.split():
            cell.append(make_action(op=part[0], chunk=part[1:]))
        cells.append(tuple(cell))
    return cells
