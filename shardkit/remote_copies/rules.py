"""What each equation of Pallas is as events of the core of a device, and of the engines that copy for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from shardkit._jax import compat
from shardkit._jax.jaxprs import source_line
from shardkit.remote_copies.equations import list_argument_names, unflatten_operands
from shardkit.remote_copies.events import Copy, KernelEvent
from shardkit.remote_copies.memory import READ, WRITE, Buffer, DevicePlace, whole
from shardkit.remote_copies.program import Enter, Get, KernelProgram, Leave, Put
from shardkit.remote_copies.reader import KernelReader, Rule, count


def add_call(program: KernelProgram, equation: Any, call: int) -> None:
    """Adds the events of one `pallas_call` of every device."""
    for device in range(program.devices):
        KernelReader(program, device, call, equation, _RULES).run_call()


def _get(reader: KernelReader, equation: Any, operands: list[Any]) -> list[Any]:
    reference, *indices = operands
    view = reader.find_view(reference, jax.tree.unflatten(equation.params["tree"], indices), equation)
    result = reader.make_data(equation.outvars[0].aval)
    accesses = [view.access(reader.device, READ)]
    text = f"reads {view.buffer.name}"
    reader.add_event(text, source_line(equation), accesses=accesses, effect=Get(view, result), equation=equation)
    return [result]


def _swap(reader: KernelReader, equation: Any, operands: list[Any]) -> list[Any]:
    reference, value, *indices = operands
    view = reader.find_view(reference, jax.tree.unflatten(equation.params["tree"], indices), equation)
    line = source_line(equation)
    result = reader.make_data(equation.outvars[0].aval)
    # A store is a swap whose result nobody uses.
    if not _is_dropped(equation.outvars[0]):
        accesses = [view.access(reader.device, READ)]
        reader.add_event(
            f"reads {view.buffer.name}", line, accesses=accesses, effect=Get(view, result), equation=equation
        )
    accesses = [view.access(reader.device, WRITE)]
    text = f"writes {view.buffer.name}"
    reader.add_event(text, line, accesses=accesses, effect=Put(view, value, adds=False), equation=equation)
    return [result]


def _is_dropped(variable: Any) -> bool:
    return isinstance(variable, compat.private("core.DropVar"))


def _add(reader: KernelReader, equation: Any, operands: list[Any]) -> list[Any]:
    reference, value, *indices = operands
    view = reader.find_view(reference, jax.tree.unflatten(equation.params["tree"], indices), equation)
    accesses = [view.access(reader.device, READ), view.access(reader.device, WRITE)]
    text = f"adds to {view.buffer.name}"
    reader.add_event(
        text, source_line(equation), accesses=accesses, effect=Put(view, value, adds=True), equation=equation
    )
    return []


def _start(reader: KernelReader, equation: Any, operands: list[Any]) -> list[Any]:
    """A copy is three events of an engine after its start, each as late as it likes.

    Its source is read; then, in either order, the semaphore of the source counts, and the target is written and its
    semaphore counts.
    """
    line = source_line(equation)
    if equation.params["add"]:
        raise reader.unsupported("a copy that adds to its target", equation)
    source, target, received, sent, device_id = unflatten_operands(equation.params["tree"], operands)
    if received is None:
        raise reader.unsupported("a copy without a semaphore", equation)
    read = reader.find_view(source, (), equation)
    written = reader.find_view(target, (), equation)
    for view in (read, written):
        if view.buffer in reader.moving_blocks:
            # The compiler copies such a block in before its step and out behind it, and has two places for it.
            raise reader.unsupported(
                f"a copy of {view.buffer.name}, of which each step of the grid sees a block", equation
            )
    device = reader.find_device(device_id, equation.params.get("device_id_type"), equation)
    program = reader.program
    call = reader.call_number
    to = f" to device {device}" if device_id is not None else ""
    name = f"copy of {read.buffer.name}{to}"
    start = reader.add_event(f"starts a {name}", line, role="start")
    event = KernelEvent(reader.device, call, f"{name} reads its source", line, start, role="load")
    event.accesses.append(read.access(reader.device, READ))
    load = program.add(event)
    if sent is not None:
        event = KernelEvent(reader.device, call, f"{name} is sent", line, load, role="sent")
        count(event, reader.find_semaphore(reader.find_view(sent, (), equation), reader.device), read.bytes)
        program.add(event)
    copy = Copy(DevicePlace(reader.device, read.buffer), read, DevicePlace(device, written.buffer), written)
    event = KernelEvent(reader.device, call, f"{name} arrives", line, load, role="arrive", copy=copy, equation=equation)
    event.accesses.append(written.access(device, WRITE))
    count(event, reader.find_semaphore(reader.find_view(received, (), equation), device), read.bytes)
    program.add(event)
    return []


def _wait_for_copy(reader: KernelReader, equation: Any, operands: list[Any]) -> list[Any]:
    _, target, semaphore, _, _ = unflatten_operands(equation.params["tree"], operands)
    amount = reader.find_view(target, (), equation).bytes
    reader.add_wait(reader.find_view(semaphore, (), equation), amount, True, equation)
    return []


def _signal(reader: KernelReader, equation: Any, operands: list[Any]) -> list[Any]:
    tree = equation.params["args_tree"]
    reference, transforms, amount, device_id, core = jax.tree.unflatten(tree, operands)
    if core is not None:
        raise reader.unsupported("several cores", equation)
    device = reader.find_device(device_id, equation.params.get("device_id_type"), equation)
    semaphore = reader.find_semaphore(reader.find_view(reference, transforms, equation), device)
    amount = reader.read_integer(amount, source_line(equation))
    number = reader.add_event(f"signals {semaphore}", source_line(equation))
    count(reader.program.events[number], semaphore, amount)
    return []


def _wait(reader: KernelReader, equation: Any, operands: list[Any]) -> list[Any]:
    reference, transforms, amount, *takes = jax.tree.unflatten(equation.params["args_tree"], operands)
    view = reader.find_view(reference, transforms, equation)
    takes = not takes or bool(takes[0])
    reader.add_wait(view, reader.read_integer(amount, source_line(equation)), takes, equation)
    return []


def _read_semaphore(reader: KernelReader, equation: Any, operands: list[Any]) -> list[Any]:
    raise reader.unsupported("a semaphore_read, whose value depends on the order,", equation)


def _barrier(reader: KernelReader, equation: Any, operands: list[Any]) -> list[Any]:
    """The semaphore that all calls with this collective_id share: it is nobody's at the start and at the end."""
    params = reader.call_equation.params["compiler_params"]
    number = getattr(params, "collective_id", None)
    return [whole(Buffer(("barrier", number), "the barrier semaphore", (), None))]


def _scope(reader: KernelReader, equation: Any, operands: list[Any]) -> list[Any]:
    jaxpr = equation.params["jaxpr"]
    if any(equation.params.get("ref_transforms", ())):
        raise reader.unsupported("a scratch reference with transforms", equation)
    names = list_argument_names(jaxpr)
    site = id(equation)
    reader.allocations[site] = reader.allocations.get(site, 0) + 1
    buffers = []
    arrays = []
    for place, variable in enumerate(jaxpr.invars):
        if isinstance(variable.aval.dtype, np.dtype):
            key: Any = (site, reader.allocations[site], place)
        else:
            key = (site, place)
        buffer = reader.allocate(key, names[place], variable.aval.shape, variable.aval.dtype)
        buffers.append(buffer)
        if buffer.dtype is not None:
            arrays.append(buffer)
        else:
            # The compiler gives a semaphore its place once for the whole kernel, at zero, and so each time it is
            # allocated it is the same. A neighbour may signal it as soon as this device has entered the kernel.
            reader.scoped_semaphores[buffer] = None
    accesses = [whole(buffer).access(reader.device, WRITE) for buffer in arrays]
    line = source_line(equation)
    effect = Enter((), tuple(arrays))
    reader.add_event("enters a run_scoped", line, accesses=accesses, role="enter", effect=effect)
    body = SimpleNamespace(jaxpr=jaxpr, consts=operands)
    results = reader.run(body, [whole(buffer) for buffer in buffers])
    reader.add_event("leaves a run_scoped", line, accesses=list(accesses), role="leave", effect=Leave(()))
    return results


def _axis_index(reader: KernelReader, equation: Any, operands: list[Any]) -> list[Any]:
    names = equation.params["axis_name"]
    if not isinstance(names, tuple):
        names = (names,)
    coordinates = reader.program.coordinates(reader.device)
    number = 0
    for name in names:
        number = number * reader.program.axes[name] + coordinates[name]
    return [np.asarray(number, np.int32)]


def _program_id(reader: KernelReader, equation: Any, operands: list[Any]) -> list[Any]:
    return [np.asarray(reader.position[equation.params["axis"]], np.int32)]


def _num_programs(reader: KernelReader, equation: Any, operands: list[Any]) -> list[Any]:
    grid = reader.call_equation.params["grid_mapping"].grid
    return [np.asarray(grid[equation.params["axis"]], np.int32)]


def _nothing(reader: KernelReader, equation: Any, operands: list[Any]) -> list[Any]:
    return []


_RULES: dict[str, Rule] = {
    "get": _get,
    "swap": _swap,
    "addupdate": _add,
    "dma_start": _start,
    "dma_wait": _wait_for_copy,
    "semaphore_signal": _signal,
    "semaphore_wait": _wait,
    "semaphore_read": _read_semaphore,
    "get_barrier_semaphore": _barrier,
    "run_scoped": _scope,
    "axis_index": _axis_index,
    "program_id": _program_id,
    "num_programs": _num_programs,
    "delay": _nothing,
    "debug_print": _nothing,
    "debug_callback": _nothing,
}
