"""What makes a table of actions a schedule, and the ticks at which an order runs."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import product
from typing import NoReturn, get_args

from shardkit._arguments import checks
from shardkit.schedules.action import OPS, Action, Cell, Rows, StagePlacement, device_of, drawn


def needs(action: Action, last_stage: int, known: Container[Action]) -> list[Action]:
    """The actions that must end before this one begins.

    `known` are the actions of the schedule, which say whether the next stage's backward is whole or split.
    """
    stage, op, i = action
    if op == "F":
        return [Action(stage - 1, "F", i)] if stage else []
    if op == "W":
        return [Action(stage, "I", i)]
    whole = Action(stage + 1, "B", i)
    return [Action(stage, "F", i), *([whole if whole in known else Action(stage + 1, "I", i)] * (stage < last_stage))]


def refuse(name: str, reason: str, rows: Sequence[Sequence[Cell]], device: int, tick: int) -> NoReturn:
    """Raises with the grid and an arrow under the cell."""
    raise ValueError(f"{name}: {reason}\n{drawn(rows, (device, tick))}")


def check(name: str, rows: Rows, placement: StagePlacement) -> None:
    """See `Schedule.check`."""
    checks.one_of(name, "placement", placement, get_args(StagePlacement))
    check_cells(name, rows, placement)
    at = {action: t for row in rows for t, cell in enumerate(row) for action in cell}
    last_stage = max(action.stage for action in at)
    timed = times(name, rows)
    for tick, device in product(range(len(timed[0])), range(len(rows))):
        cell = rows[device][tick : tick + 1]
        if cell and cell[0] != timed[device][tick]:
            # The first cell that has to move later lacks an input.
            wants = ((action, need) for action in cell[0] for need in needs(action, last_stage, at))
            action, late = next((action, need) for action, need in wants if at[need] >= tick)
            reason = (
                f"an action must run after its inputs; got {action} at tick {tick}, and its input {late} at tick "
                f"{at[late]}. Move {action} to tick {at[late] + 1} or later."
            )
            refuse(name, reason, rows, device, tick)


def check_cells(name: str, rows: Rows, placement: StagePlacement) -> None:
    """As `check`, except for when inputs arrive from other devices."""
    everything = {action for row in rows for cell in row for action in cell}
    if not everything:
        raise ValueError(f"{name}: a schedule must have an action; got none. Write for example '0F0,0B0'.")
    seen: dict[Action, int] = {}
    for tick, device in product(range(max(map(len, rows))), range(len(rows))):
        for cell in rows[device][tick : tick + 1]:
            if len(cell) > 1 and (len(cell) > 2 or cell[0].op != "F" or cell[1].op not in "BI"):
                reason = (
                    "a device must run one action per tick, or a forward and then a backward; got "
                    f"{' and '.join(map(str, cell))} on device {device} at tick {tick}. Move one to another tick."
                )
                refuse(name, reason, rows, device, tick)
            for action in cell:
                home = device_of(action.stage, len(rows), placement)
                wrong = _uncounted(action, len(everything)) or _misplaced(action, device, tick, home, seen, everything)
                if wrong:
                    refuse(name, wrong, rows, device, tick)
                seen[action] = tick
    chunks = max(action.stage for action in seen) // len(rows) + 1
    for i, stage in product(range(max(action.microbatch for action in seen) + 1), range(chunks * len(rows))):
        split = any(Action(stage, op, i) in seen for op in "IW")
        for op in "FIW" if split else "FB":
            if Action(stage, op, i) not in seen:
                device = device_of(stage, len(rows), placement)
                reason = f"every stage must run every microbatch; {stage}{op}{i} is missing on device {device}. Add it."
                end = 1 + max((t for t, cell in enumerate(rows[device]) if cell), default=-1)
                refuse(name, reason, rows, device, end)


def _uncounted(action: Action, actions: int) -> str | None:
    """The error of an action whose numbers so many different actions cannot reach; None if they can."""
    for name, number in (("stages", action.stage), ("microbatches", action.microbatch)):
        if number >= actions:
            return (
                f"{name} must be numbered from 0 without a gap; got {action} in a schedule of {actions} actions. "
                "Lower the number."
            )
    return None


def _misplaced(
    action: Action, device: int, tick: int, home: int, seen: dict[Action, int], everything: set[Action]
) -> str | None:
    """The error of an action on `device`, whose stage is on device `home`, after those seen; None if it is legal."""
    stage, op, i = action
    if op not in OPS:
        return f"an op must be one of F, B, I and W; got {op!r} at tick {tick}. Write one of them."
    if home != device:
        return (
            f"each stage must run on one device; got {action} on device {device}, and stage {stage} is on device "
            f"{home}. Move it there."
        )
    if action in seen:
        return f"an action must run once; got {action} at ticks {seen[action]} and {tick}. Drop one."
    for other in {"B": "IW", "I": "B", "W": "B"}.get(op, ""):
        if Action(stage, other, i) in seen:
            return f"a backward must be whole, B, or split, I and W; got {stage}{other}{i} and {action}. Drop one."
    first = Action(stage, {"B": "F", "I": "F", "W": "I"}.get(op, ""), i)
    if first in everything and first not in seen:
        return f"{first.op} must run before {op}; got {action} at tick {tick} before {first}. Swap them."
    return None


def times(name: str, rows: Sequence[Sequence[Cell]]) -> Rows:
    """The table with every cell at its column, or as much later as its inputs need; refuses a deadlock.

    What one device sends to another is there a tick later; inside a cell the forward comes first.
    """
    order = [[(column, cell) for column, cell in enumerate(row) if cell] for row in rows]
    home = {action: device for device, row in enumerate(order) for _, cell in row for action in cell}
    last_stage = max((action.stage for action in home), default=0)
    table: list[list[Cell]] = [[] for _ in rows]
    at: dict[Action, int] = {}
    places = [0] * len(rows)
    waiting: dict[Action, list[int]] = {}  # the devices that wait for an action
    ready = list(range(len(rows)))
    while ready:
        device = ready.pop()
        row = table[device]
        while places[device] < len(order[device]):
            column, cell = order[device][places[device]]
            inputs = [need for action in cell for need in needs(action, last_stage, home) if need not in cell]
            missing = next((need for need in inputs if need not in at), None)
            if missing:
                waiting.setdefault(missing, []).append(device)
                break
            tick = max([column, len(row), *(at[need] + 1 for need in inputs)])
            row += [()] * (tick - len(row)) + [cell]
            places[device] += 1
            for action in cell:
                at[action] = tick
                ready += waiting.pop(action, ())
    if waiting:
        stuck = {device: (*order[device][places[device]], need) for need, those in waiting.items() for device in those}
        _refuse_deadlock(name, rows, stuck, home)
    ticks = max(map(len, table))
    return tuple((*row, *[()] * (ticks - len(row))) for row in table)


def _refuse_deadlock(
    name: str, rows: Sequence[Sequence[Cell]], stuck: dict[int, tuple[int, Cell, Action]], home: dict[Action, int]
) -> NoReturn:
    """Names a cell on a cycle of devices, each of which waits for the next: following any stuck device leads to one."""
    seen: list[int] = []
    device = min(stuck)
    while device not in seen:
        seen.append(device)
        device = home[stuck[device][2]]
    column, cell, need = stuck[device]
    waiting = " and ".join(map(str, cell))
    reason = (
        f"an order must not deadlock; got {waiting} on device {device}, which waits for {need}, which in turn waits "
        f"for {waiting}. Change the order."
    )
    refuse(name, reason, rows, device, column)
