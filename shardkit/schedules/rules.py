"""The rules that make a table of actions a schedule, and the ticks at which an order runs."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import product
from typing import NamedTuple, NoReturn, get_args

from shardkit._arguments import checks
from shardkit.schedules.action import (
    OPS,
    Action,
    Cell,
    Rows,
    StagePlacement,
    count_ticks,
    device_of,
    draw_grid,
    walk_cells,
)

# For an op, the op of the same stage and microbatch that must come before it, and the ops that it excludes.
_BEFORE = {"B": "F", "I": "F", "W": "I"}
_EXCLUDES = {"B": "IW", "I": "B", "W": "B"}


def find_needs(action: Action, last_stage: int, actions: Container[Action]) -> list[Action]:
    """The actions that must end before this one begins.

    `actions` are all actions of the schedule: they tell whether the next stage's backward is whole or split.

    Worked example: in a schedule of three stages, 1F0 needs 0F0; 1B0 needs 1F0 and 2B0, or 2I0 where that is split;
    2B0 needs 2F0 alone; 1W0 needs 1I0.
    """
    stage, op, i = action
    if op == "F":
        return [Action(stage - 1, "F", i)] if stage else []
    if op == "W":
        return [Action(stage, "I", i)]
    needs = [Action(stage, "F", i)]
    if stage < last_stage:
        backward = Action(stage + 1, "B", i)
        needs.append(backward if backward in actions else Action(stage + 1, "I", i))
    return needs


def _find_last_stage(actions: Iterable[Action]) -> int:
    return max((action.stage for action in actions), default=0)


def refuse(name: str, reason: str, rows: Sequence[Sequence[Cell]], device: int, tick: int) -> NoReturn:
    """Raises with the grid and an arrow under the cell."""
    raise ValueError(f"{name}: {reason}\n{draw_grid(rows, (device, tick))}")


def check(name: str, rows: Rows, placement: StagePlacement) -> None:
    """See `Schedule.check`."""
    checks.one_of(name, "placement", placement, get_args(StagePlacement))
    check_cells(name, rows, placement)
    # It moves a cell to the right only if an input is not there yet: a table that is right comes back unchanged.
    timed = find_ticks(name, rows)
    for tick, device, cell in walk_cells(rows):
        if cell != timed[device][tick]:
            # The first cell that has to move later lacks an input.
            _refuse_late_input(name, rows, device, tick)


def _refuse_late_input(name: str, rows: Rows, device: int, tick: int) -> None:
    """Names an action of a cell that begins before one of its inputs has ended, and the input."""
    ticks: dict[Action, int] = {}
    for cell_tick, _, cell in walk_cells(rows):
        ticks.update(dict.fromkeys(cell, cell_tick))
    last_stage = _find_last_stage(ticks)
    for action in rows[device][tick]:
        for need in find_needs(action, last_stage, ticks):
            if ticks[need] >= tick:
                reason = (
                    f"an action must run after its inputs; got {action} at tick {tick}, and its input {need} at tick "
                    f"{ticks[need]}. Move {action} to tick {ticks[need] + 1} or later."
                )
                refuse(name, reason, rows, device, tick)


def check_cells(name: str, rows: Rows, placement: StagePlacement) -> None:
    """All checks of `check` but one: that inputs from other devices arrive in time."""
    actions: set[Action] = set()
    for row in rows:
        for cell in row:
            actions.update(cell)
    if not actions:
        raise ValueError(f"{name}: a schedule must have an action; got none. Write for example '0F0,0B0'.")
    tick_of: dict[Action, int] = {}  # the tick of every action up to here
    # Tick by tick over all devices: of two equal actions the later one is refused.
    for tick, device, cell in walk_cells(rows):
        reason = _find_wrong_pair(cell, device, tick)
        if reason is not None:
            refuse(name, reason, rows, device, tick)
        for action in cell:
            home = device_of(action.stage, len(rows), placement)
            reason = _find_gap(action, len(actions))
            if reason is None:
                reason = _find_misplacement(action, device, tick, home, tick_of, actions)
            if reason is not None:
                refuse(name, reason, rows, device, tick)
            tick_of[action] = tick
    _check_complete(name, rows, placement, tick_of)


def _check_complete(name: str, rows: Rows, placement: StagePlacement, ticks: dict[Action, int]) -> None:
    """Refuses a table in which a stage leaves out a microbatch."""
    devices = len(rows)
    microbatches = max(action.microbatch for action in ticks) + 1
    chunks = _find_last_stage(ticks) // devices + 1
    for i, stage in product(range(microbatches), range(chunks * devices)):
        is_split = Action(stage, "I", i) in ticks or Action(stage, "W", i) in ticks
        for op in "FIW" if is_split else "FB":
            if Action(stage, op, i) in ticks:
                continue
            device = device_of(stage, devices, placement)
            reason = f"every stage must run every microbatch; {stage}{op}{i} is missing on device {device}. Add it."
            # The arrow points after the device's last action, where there is room for the missing one.
            after = 0
            for tick, cell in enumerate(rows[device]):
                if cell:
                    after = tick + 1
            refuse(name, reason, rows, device, after)


def _find_wrong_pair(cell: Cell, device: int, tick: int) -> str | None:
    """The error of a cell with several actions that are not a forward and then a backward; None if it is legal."""
    ops = [action.op for action in cell]
    if len(ops) < 2 or ops in (["F", "B"], ["F", "I"]):
        return None
    return (
        "a device must run one action per tick, or a forward and then a backward; got "
        f"{' and '.join(map(str, cell))} on device {device} at tick {tick}. Move one to another tick."
    )


def _find_gap(action: Action, actions: int) -> str | None:
    """The error of an action whose number is too high for a schedule of so many actions; None if it is not."""
    for name, number in (("stages", action.stage), ("microbatches", action.microbatch)):
        if number >= actions:
            return (
                f"{name} must be numbered from 0 without a gap; got {action} in a schedule of {actions} actions. "
                "Lower the number."
            )
    return None


def _find_misplacement(
    action: Action, device: int, tick: int, home: int, tick_of: dict[Action, int], actions: set[Action]
) -> str | None:
    """The error of an action on `device`, whose stage is on device `home`, after those of `tick_of`; None if legal."""
    stage, op, i = action
    if op not in OPS:
        return f"an op must be one of F, B, I and W; got {op!r} at tick {tick}. Write one of them."
    if home != device:
        return (
            f"each stage must run on one device; got {action} on device {device}, and stage {stage} is on device "
            f"{home}. Move it there."
        )
    if action in tick_of:
        return f"an action must run once; got {action} at ticks {tick_of[action]} and {tick}. Drop one."
    for excluded_op in _EXCLUDES.get(op, ""):
        excluded = Action(stage, excluded_op, i)
        if excluded in tick_of:
            return f"a backward must be whole, B, or split, I and W; got {excluded} and {action}. Drop one."
    before = Action(stage, _BEFORE.get(op, ""), i)
    if before in actions and before not in tick_of:
        return f"{before.op} must run before {op}; got {action} at tick {tick} before {before}. Swap them."
    return None


class _Waiting(NamedTuple):
    """A cell that cannot begin."""

    column: int  # its column in the row
    cell: Cell
    need: Action  # an input of it that has not begun


def find_ticks(name: str, rows: Sequence[Sequence[Cell]]) -> Rows:
    """The table with every cell at its column, or as much later as its inputs need; refuses a deadlock.

    A result is on another device a tick later. Inside a cell the forward comes first.

    A device runs along its order until a cell lacks an input, and then sleeps. The device that runs this input wakes it
    up. If no device is awake and some still sleep, they wait for each other: a deadlock.
    """
    orders = []
    home: dict[Action, int] = {}
    for device, row in enumerate(rows):
        order = []
        for column, cell in enumerate(row):
            if cell:
                order.append((column, cell))
                home.update(dict.fromkeys(cell, device))
        orders.append(order)
    last_stage = _find_last_stage(home)
    table: list[list[Cell]] = [[] for _ in rows]
    ticks: dict[Action, int] = {}
    next_cells = [0] * len(rows)  # how far along its order each device is
    waiting: dict[Action, list[int]] = {}  # the devices that wait for an action
    awake = list(range(len(rows)))
    while awake:
        device = awake.pop()
        row = table[device]
        while next_cells[device] < len(orders[device]):
            column, cell = orders[device][next_cells[device]]
            inputs = _find_inputs(cell, last_stage, home)
            missing = [need for need in inputs if need not in ticks]
            if missing:
                # One missing input is enough: once awake, the device asks for the others again.
                waiting.setdefault(missing[0], []).append(device)
                break
            tick = max(column, len(row))
            for need in inputs:
                tick = max(tick, ticks[need] + 1)
            row += [()] * (tick - len(row))
            row.append(cell)
            next_cells[device] += 1
            for action in cell:
                ticks[action] = tick
                awake += waiting.pop(action, ())
    if waiting:
        stuck = {}
        for need, devices in waiting.items():
            for device in devices:
                column, cell = orders[device][next_cells[device]]
                stuck[device] = _Waiting(column, cell, need)
        _refuse_deadlock(name, rows, stuck, home)
    length = count_ticks(table)
    rows_of_one_length = []
    for row in table:
        row += [()] * (length - len(row))
        rows_of_one_length.append(tuple(row))
    return tuple(rows_of_one_length)


def _find_inputs(cell: Cell, last_stage: int, actions: Container[Action]) -> list[Action]:
    """The actions that must end before a cell begins: the needs of its actions, except actions of the cell itself."""
    inputs = []
    for action in cell:
        for need in find_needs(action, last_stage, actions):
            if need not in cell:
                inputs.append(need)
    return inputs


def _refuse_deadlock(
    name: str, rows: Sequence[Sequence[Cell]], stuck: dict[int, _Waiting], home: dict[Action, int]
) -> NoReturn:
    """Names a cell on a cycle of devices that wait for each other: to follow any stuck device leads into a cycle."""
    visited: list[int] = []
    device = min(stuck)
    while device not in visited:
        visited.append(device)
        device = home[stuck[device].need]
    column, cell, need = stuck[device]
    waiting = " and ".join(map(str, cell))
    reason = (
        f"an order must not deadlock; got {waiting} on device {device}, which waits for {need}, which in turn waits "
        f"for {waiting}. Change the order."
    )
    refuse(name, reason, rows, device, column)
