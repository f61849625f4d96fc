"""Reads a kernel for one device: which events its core and its copies are, in the order of its program.

Control and indices are integers that a device knows, so what a device does never depends on when something arrives. A
kernel in which it does (a `semaphore_read` or data that decides a branch or an index) is refused by its line.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np

from shardkit._jax import compat
from shardkit._jax.interpreter import JaxprInterpreter, scan_operands, while_operands
from shardkit._jax.jaxprs import source_line, walk
from shardkit.testing.kernels.events import Copy, KernelEvent, Semaphore, UnknownOrdersError, Wait
from shardkit.testing.kernels.memory import COUNT, READ, WRITE, Access, Buffer, BufferView, DevicePlace, whole
from shardkit.testing.kernels.values import Data, compute_integers, computes_integers, is_known

_MOST_ROUNDS = 100_000  # of a while loop


class DataOperation(NamedTuple):
    """An equation on data, which touches no memory that others see."""

    equation: Any
    operands: tuple[Any, ...]
    results: tuple[Data, ...]


class DataRow(NamedTuple):
    """A row of an array that a scan goes over."""

    array: Any
    number: int
    result: Data


class DataStack(NamedTuple):
    """The array of what the rounds of a scan give."""

    rows: tuple[Any, ...]
    result: Data


class Get(NamedTuple):
    """A read of memory."""

    view: BufferView
    result: Data


class Put(NamedTuple):
    """A write to memory, `adds` what is there."""

    view: BufferView
    value: Any
    adds: bool


class Enter(NamedTuple):
    """Arguments of a call, which its memory holds at its start, and the memory that holds nothing yet."""

    arguments: tuple[tuple[Buffer, int], ...]
    others: tuple[Buffer, ...]


class Leave(NamedTuple):
    """The memory that holds the results of a call at its end."""

    results: tuple[Buffer, ...]


class KernelProgram:
    """The events of all devices, and the items of each: its own events, by number, and its operations between them."""

    def __init__(self, axes: Mapping[str, int]):
        self.axes = dict(axes)
        self.devices = int(np.prod(list(axes.values()), dtype=int))
        self.events: list[KernelEvent] = []
        self.items: list[list[Any]] = [[] for _ in range(self.devices)]
        self.last = [-1] * self.devices  # the newest event of each core
        self.numbers = itertools.count()

    def add(self, event: KernelEvent) -> int:
        """Adds an event of an engine."""
        self.events.append(event)
        return len(self.events) - 1

    def add_to_core(self, event: KernelEvent) -> int:
        """Adds the next event of a device's core."""
        number = self.add(event)
        self.last[event.device] = number
        self.items[event.device].append(number)
        return number

    def coordinates(self, device: int) -> dict[str, int]:
        """Where a device is in the mesh."""
        places = np.unravel_index(device, tuple(self.axes.values()))
        return dict(zip(self.axes, (int(place) for place in places), strict=True))

    def device_at(self, coordinates: Mapping[str, int], line: str) -> int:
        """The device at coordinates."""
        number = 0
        for axis, size in self.axes.items():
            if not 0 <= coordinates[axis] < size:
                raise IndexError(f"{line} names the device {coordinates[axis]} of {size} along {axis!r}")
            number = number * size + coordinates[axis]
        return number


def add_call(program: KernelProgram, equation: Any, call: int) -> None:
    """Adds the events of one `pallas_call` of every device."""
    for device in range(program.devices):
        _Reader(program, device, call, equation).run_call()


class _Reader(JaxprInterpreter[Any]):
    """Runs the kernel of one device; a value is a known integer, `Data`, or a `BufferView` of memory."""

    def __init__(self, program: KernelProgram, device: int, call: int, equation: Any):
        self.program = program
        self.device = device
        self.call_number = call
        self.call_equation = equation
        self.line = source_line(equation)
        self.position: tuple[int, ...] = ()
        self.allocations: dict[int, int] = {}
        self.scoped_semaphores: dict[Buffer, None] = {}
        self.moving_blocks: set[Buffer] = set()  # arrays of which each step of the grid sees another block

    # The call

    def run_call(self) -> None:
        params = self.call_equation.params
        mapping = params["grid_mapping"]
        jaxpr = params["jaxpr"]
        if mapping.num_dynamic_grid_bounds:
            raise self._unsupported("a grid whose size is not known")
        arrays = mapping.num_index_operands + mapping.num_inputs
        buffers = []
        names = _argument_names(jaxpr)
        for place, variable in enumerate(jaxpr.invars):
            shape, dtype = variable.aval.shape, variable.aval.dtype
            block = place - mapping.num_index_operands
            if 0 <= block < len(mapping.block_mappings):
                array = mapping.block_mappings[block].array_aval
                shape, dtype = array.shape, array.dtype
            buffers.append(self._allocate(place, names[place], shape, dtype))
        for source, result in params["input_output_aliases"]:
            buffers[arrays + result] = buffers[source]
        arguments = tuple((buffer, place) for place, buffer in enumerate(buffers[:arrays]))
        others = tuple(buffer for buffer in buffers[arrays:] if buffer not in buffers[:arrays])
        entered = self._enter(tuple(dict.fromkeys(buffers)), Enter(arguments, others))
        if _has_device_barrier(self.call_equation):
            self._wait_for_all_devices()
        for self.position in itertools.product(*(range(size) for size in mapping.grid)):
            references = []
            for place, buffer in enumerate(buffers):
                block = place - mapping.num_index_operands
                view = whole(buffer)
                if 0 <= block < len(mapping.block_mappings):
                    view = self._block(mapping.block_mappings[block], view)
                references.append(view)
            self.run(jaxpr, references)
        results = tuple(buffers[arrays : arrays + mapping.num_outputs])
        for buffer in self.scoped_semaphores:
            self.program.events[entered].accesses.append(whole(buffer).access(self.device, WRITE))
        self._leave(tuple(dict.fromkeys([*buffers, *self.scoped_semaphores])), Leave(results))

    def _allocate(self, site: Any, name: str, shape: Sequence[int], dtype: Any) -> Buffer:
        semaphore = not isinstance(dtype, np.dtype)
        return Buffer((self.call_number, site), name, tuple(shape), None if semaphore else dtype)

    # Memory that a device has not yet, or no longer, is memory of something else: whoever touches it before `enter` or
    # after `leave` races with that. Without a barrier at the start a neighbour's copy may do so.
    def _enter(self, buffers: tuple[Buffer, ...], effect: Any) -> int:
        accesses = [whole(buffer).access(self.device, WRITE) for buffer in buffers]
        return self._happen("enters the kernel", self.line, accesses=accesses, role="enter", effect=effect)

    def _leave(self, buffers: tuple[Buffer, ...], effect: Any) -> None:
        accesses = [whole(buffer).access(self.device, WRITE) for buffer in buffers]
        self._happen("leaves the kernel", self.line, accesses=accesses, role="leave", effect=effect)

    def _wait_for_all_devices(self) -> None:
        """The barrier that Pallas puts before a kernel: each device goes on when all have entered."""
        barrier = Buffer(("device barrier", self.call_number), "the barrier before the kernel", (), None)
        for device in range(self.program.devices):
            semaphore = Semaphore(device, barrier, ())
            number = self._happen(f"signals {semaphore}", self.line)
            _count(self.program.events[number], semaphore, 1)
        _add_wait(self, whole(barrier), self.program.devices, True, self.call_equation)

    def _block(self, mapping: Any, view: BufferView) -> BufferView:
        """The part of an array that a step of the grid sees. It is read in place."""
        if mapping.has_trivial_window():
            return view
        self.moving_blocks.add(view.buffer)
        places = self.run(mapping.index_map_jaxpr, [np.asarray(i, np.int32) for i in self.position])
        indices: list[int | range] = []
        for dim, (block, place) in enumerate(zip(mapping.block_shape, places, strict=True)):
            start = self._integer(place, self.line)
            size = getattr(block, "block_size", None)
            if size is None:
                indices.append(start)
                continue
            if view.shape[dim] % size:
                raise self._unsupported("a block that does not divide its array")
            indices.append(range(start * size, (start + 1) * size))
        return view.take(indices)

    # Equations

    def constant(self, x: Any) -> Any:
        return x if isinstance(x, BufferView | Data) else np.asarray(x)

    def literal(self, atom: Any) -> Any:
        return np.asarray(atom.val, atom.aval.dtype)

    def equation(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        rule = _RULES.get(equation.primitive.name)
        if rule is not None:
            return rule(self, equation, operands)
        for x in operands:
            if isinstance(x, BufferView):
                raise self._unsupported(f"the operation {equation.primitive.name} on memory", equation)
        if computes_integers(equation, operands):
            return compute_integers(equation, operands)
        return self._operate(equation, operands)

    def cond(self, equation: Any, branches: list[Any], operands: list[Any]) -> Sequence[Any]:
        index, *arguments = operands
        if is_known(index):
            return self.run(branches[min(max(int(index), 0), len(branches) - 1)], arguments)
        return self._operate(equation, operands)

    def scan(self, equation: Any, body: Any, operands: list[Any]) -> Sequence[Any]:
        consts, carry, arrays = scan_operands(equation, operands)
        length = equation.params["length"]
        order = range(length)
        if equation.params["reverse"]:
            order = order[::-1]
        columns: list[list[Any]] = [[None] * length for _ in range(len(equation.outvars) - len(carry))]
        for index in order:
            rows = [self._row(array, index) for array in arrays]
            results = self.run(body, [*consts, *carry, *rows])
            carry = results[: len(carry)]
            for column, x in zip(columns, results[len(carry) :], strict=True):
                column[index] = x
        stacks = []
        for column, variable in zip(columns, equation.outvars[len(carry) :], strict=True):
            stacks.append(self._stack(column, variable))
        return [*carry, *stacks]

    def while_loop(self, equation: Any, test: Any, body: Any, operands: list[Any]) -> Sequence[Any]:
        for_test, for_body, carry = while_operands(equation, operands)
        for _ in range(_MOST_ROUNDS):
            (more,) = self.run(test, [*for_test, *carry])
            if not is_known(more):
                raise self._unsupported("a loop whose end depends on data", equation)
            if not more:
                return carry
            carry = self.run(body, [*for_body, *carry])
        raise self._unsupported(f"a loop of more than {_MOST_ROUNDS} rounds", equation)

    # Data

    def _data(self, aval: Any) -> Data:
        return Data(next(self.program.numbers), tuple(aval.shape), aval.dtype)

    def _operate(self, equation: Any, operands: Sequence[Any]) -> list[Data]:
        """Results of an equation on data, of loops and branches too unless they touch memory."""
        for x in operands:
            if isinstance(x, BufferView):
                raise self._unsupported("a branch that data decides", equation)
        if compat.acts(equation):
            raise self._unsupported(f"the operation {equation.primitive.name}", equation)
        results = tuple(self._data(variable.aval) for variable in equation.outvars)
        self.program.items[self.device].append(DataOperation(equation, tuple(operands), results))
        return list(results)

    def _row(self, array: Any, index: int) -> Any:
        if is_known(array):
            return np.asarray(array[index])
        result = Data(next(self.program.numbers), array.shape[1:], array.dtype)
        self.program.items[self.device].append(DataRow(array, index, result))
        return result

    def _stack(self, rows: list[Any], variable: Any) -> Any:
        if all(is_known(row) for row in rows):
            return np.asarray(rows, variable.aval.dtype).reshape(variable.aval.shape)
        result = self._data(variable.aval)
        self.program.items[self.device].append(DataStack(tuple(rows), result))
        return result

    def _integer(self, x: Any, line: str) -> int:
        if is_known(x) and np.ndim(x) == 0:
            return int(x)
        if isinstance(x, int):
            return x
        raise UnknownOrdersError(
            f"{line}: an index, an amount or a device that depends on data or on what a semaphore counts; the "
            "orders of a kernel are known only if its integers are. Compute it of axis_index, program_id and counters."
        )

    # Memory and semaphores

    def _happen(self, text: str, line: str, **fields: Any) -> int:
        event = KernelEvent(self.device, self.call_number, text, line, self.program.last[self.device], **fields)
        return self.program.add_to_core(event)

    def _view(self, reference: Any, transforms: Sequence[Any], equation: Any) -> BufferView:
        """The memory that a reference with indexers names."""
        inner = getattr(reference, "transforms", None)
        if inner is not None:
            reference, transforms = reference.ref, (*inner, *transforms)
        view: BufferView = reference
        for transform in transforms:
            if not hasattr(transform, "indices"):
                raise self._unsupported("a reference that is reshaped or read as another dtype", equation)
            indices: list[int | range] = []
            for index in transform.indices:
                if hasattr(index, "stride"):
                    start, size = (self._integer(x, source_line(equation)) for x in (index.start, index.size))
                    indices.append(range(start, start + size * index.stride, index.stride)[:size])
                else:
                    indices.append(self._integer(index, source_line(equation)))
            try:
                view = view.take(indices)
            except IndexError as error:
                line = source_line(equation)
                raise IndexError(
                    f"{line}: a kernel must stay inside its memory; device {self.device} takes {error}. Check "
                    "the index."
                ) from None
        return view

    def _semaphore(self, view: BufferView, device: int) -> Semaphore:
        return Semaphore(device, view.buffer, tuple(r[0] for r in view.ranges))

    def _device(self, device_id: Any, kind: Any, equation: Any) -> int:
        """The device that an operation names; without a name its own."""
        line = source_line(equation)
        if device_id is None:
            return self.device
        coordinates = self.program.coordinates(self.device)
        if isinstance(device_id, dict):
            for axis, place in device_id.items():
                if axis not in coordinates:
                    raise self._unsupported(f"a device named by {axis!r}, which is no axis of the mesh", equation)
                coordinates[axis] = self._integer(place, line)
            return self.program.device_at(coordinates, line)
        places = device_id if isinstance(device_id, tuple | list) else (device_id,)
        if kind is not None and kind.value == "logical" and len(places) == 1:
            number = self._integer(places[0], line)
            if not 0 <= number < self.program.devices:
                raise IndexError(f"{line} names the device {number} of {self.program.devices}")
            return number
        if len(places) != len(coordinates):
            raise self._unsupported(f"a device named by {len(places)} of {len(coordinates)} coordinates", equation)
        named = {axis: self._integer(place, line) for axis, place in zip(coordinates, places, strict=True)}
        return self.program.device_at(named, line)

    def _unsupported(self, what: str, equation: Any = None) -> UnknownOrdersError:
        line = self.line if equation is None else source_line(equation)
        return UnknownOrdersError(
            f"{line}: the orders of a kernel with {what} are not known. Write it otherwise, or run it in jax's "
            "interpreter."
        )


def _argument_names(jaxpr: Any) -> list[str]:
    names = getattr(jaxpr.debug_info, "arg_names", None) or ()
    argument_names = [f"argument {place}" for place in range(len(jaxpr.invars))]
    for place, name in enumerate(names[: len(argument_names)]):
        if name:
            argument_names[place] = str(name)
    return argument_names


# Rules: what an equation of Pallas is as events.


def _get(reader: _Reader, equation: Any, operands: list[Any]) -> list[Any]:
    reference, *indices = operands
    view = reader._view(reference, jax.tree.unflatten(equation.params["tree"], indices), equation)
    result = reader._data(equation.outvars[0].aval)
    accesses = [view.access(reader.device, READ)]
    text = f"reads {view.buffer.name}"
    reader._happen(text, source_line(equation), accesses=accesses, effect=Get(view, result), equation=equation)
    return [result]


def _swap(reader: _Reader, equation: Any, operands: list[Any]) -> list[Any]:
    reference, value, *indices = operands
    view = reader._view(reference, jax.tree.unflatten(equation.params["tree"], indices), equation)
    line = source_line(equation)
    result = reader._data(equation.outvars[0].aval)
    # A store is a swap whose result nobody uses.
    if not _is_dropped(equation.outvars[0]):
        accesses = [view.access(reader.device, READ)]
        reader._happen(
            f"reads {view.buffer.name}", line, accesses=accesses, effect=Get(view, result), equation=equation
        )
    accesses = [view.access(reader.device, WRITE)]
    text = f"writes {view.buffer.name}"
    reader._happen(text, line, accesses=accesses, effect=Put(view, value, adds=False), equation=equation)
    return [result]


def _is_dropped(variable: Any) -> bool:
    return isinstance(variable, compat.private("core.DropVar"))


def _add(reader: _Reader, equation: Any, operands: list[Any]) -> list[Any]:
    reference, value, *indices = operands
    view = reader._view(reference, jax.tree.unflatten(equation.params["tree"], indices), equation)
    accesses = [view.access(reader.device, READ), view.access(reader.device, WRITE)]
    text = f"adds to {view.buffer.name}"
    reader._happen(
        text, source_line(equation), accesses=accesses, effect=Put(view, value, adds=True), equation=equation
    )
    return []


def _unflatten(tree: Any, operands: list[Any]) -> Any:
    if hasattr(tree, "unflatten"):
        return tree.unflatten(operands)
    return jax.tree.unflatten(tree, operands)


def _start(reader: _Reader, equation: Any, operands: list[Any]) -> list[Any]:
    """A copy is three events of an engine after its start, each as late as it likes.

    Its source is read; then, in either order, the semaphore of the source counts, and the target is written and its
    semaphore counts.
    """
    line = source_line(equation)
    if equation.params["add"]:
        raise reader._unsupported("a copy that adds to its target", equation)
    source, target, received, sent, device_id = _unflatten(equation.params["tree"], operands)
    if received is None:
        raise reader._unsupported("a copy without a semaphore", equation)
    read = reader._view(source, (), equation)
    written = reader._view(target, (), equation)
    for view in (read, written):
        if view.buffer in reader.moving_blocks:
            # The compiler copies such a block in before its step and out behind it, and has two places for it.
            raise reader._unsupported(
                f"a copy of {view.buffer.name}, of which each step of the grid sees a block", equation
            )
    device = reader._device(device_id, equation.params.get("device_id_type"), equation)
    program = reader.program
    call = reader.call_number
    to = f" to device {device}" if device_id is not None else ""
    name = f"copy of {read.buffer.name}{to}"
    start = reader._happen(f"starts a {name}", line, role="start")
    event = KernelEvent(reader.device, call, f"{name} reads its source", line, start, role="load")
    event.accesses.append(read.access(reader.device, READ))
    load = program.add(event)
    if sent is not None:
        event = KernelEvent(reader.device, call, f"{name} is sent", line, load, role="sent")
        _count(event, reader._semaphore(reader._view(sent, (), equation), reader.device), read.bytes)
        program.add(event)
    copy = Copy(DevicePlace(reader.device, read.buffer), read, DevicePlace(device, written.buffer), written)
    event = KernelEvent(reader.device, call, f"{name} arrives", line, load, role="arrive", copy=copy, equation=equation)
    event.accesses.append(written.access(device, WRITE))
    _count(event, reader._semaphore(reader._view(received, (), equation), device), read.bytes)
    program.add(event)
    return []


def _count(event: KernelEvent, semaphore: Semaphore, amount: int) -> None:
    event.signals.append((semaphore, amount))
    place = tuple(range(i, i + 1) for i in semaphore.element)
    event.accesses.append(Access(DevicePlace(semaphore.device, semaphore.buffer), place, COUNT))


def _wait_for_copy(reader: _Reader, equation: Any, operands: list[Any]) -> list[Any]:
    _, target, semaphore, _, _ = _unflatten(equation.params["tree"], operands)
    amount = reader._view(target, (), equation).bytes
    _add_wait(reader, reader._view(semaphore, (), equation), amount, True, equation)
    return []


def _signal(reader: _Reader, equation: Any, operands: list[Any]) -> list[Any]:
    tree = equation.params["args_tree"]
    reference, transforms, amount, device_id, core = jax.tree.unflatten(tree, operands)
    if core is not None:
        raise reader._unsupported("several cores", equation)
    device = reader._device(device_id, equation.params.get("device_id_type"), equation)
    semaphore = reader._semaphore(reader._view(reference, transforms, equation), device)
    amount = reader._integer(amount, source_line(equation))
    number = reader._happen(f"signals {semaphore}", source_line(equation))
    _count(reader.program.events[number], semaphore, amount)
    return []


def _wait(reader: _Reader, equation: Any, operands: list[Any]) -> list[Any]:
    reference, transforms, amount, *takes = jax.tree.unflatten(equation.params["args_tree"], operands)
    view = reader._view(reference, transforms, equation)
    takes = not takes or bool(takes[0])
    _add_wait(reader, view, reader._integer(amount, source_line(equation)), takes, equation)
    return []


def _add_wait(reader: _Reader, view: BufferView, amount: int, takes: bool, equation: Any) -> None:
    semaphore = reader._semaphore(view, reader.device)
    text = f"waits for {amount} of {semaphore}"
    reader._happen(text, source_line(equation), wait=Wait(semaphore, amount, takes), role="wait")


def _read_semaphore(reader: _Reader, equation: Any, operands: list[Any]) -> list[Any]:
    raise reader._unsupported("a semaphore_read, whose value depends on the order,", equation)


def _has_device_barrier(call: Any) -> bool:
    """Whether Pallas puts a barrier of all devices before a kernel.

    It does so before a kernel that communicates and has no barrier of its own. With a `collective_id` the kernel says
    that it has one, and with `skip_device_barrier` that it needs none.
    """
    params = call.params["compiler_params"]
    if getattr(params, "collective_id", None) is not None or getattr(params, "skip_device_barrier", False):
        return False
    sites = list(walk(call.params["jaxpr"]))
    if any(site.name == "get_barrier_semaphore" for site in sites):
        return False
    return any(_names_device(site.equation) for site in sites)


def _names_device(equation: Any) -> bool:
    """Whether an equation sends a copy or a signal to a device that it names."""
    if equation.primitive.name == "dma_start":
        *_, device_id = _unflatten(equation.params["tree"], equation.invars)
        return device_id is not None
    if equation.primitive.name == "semaphore_signal":
        *_, device_id, _ = jax.tree.unflatten(equation.params["args_tree"], equation.invars)
        return device_id is not None
    return False


def _barrier(reader: _Reader, equation: Any, operands: list[Any]) -> list[Any]:
    """The semaphore that all calls with this collective_id share: it is nobody's at the start and at the end."""
    params = reader.call_equation.params["compiler_params"]
    number = getattr(params, "collective_id", None)
    return [whole(Buffer(("barrier", number), "the barrier semaphore", (), None))]


def _scope(reader: _Reader, equation: Any, operands: list[Any]) -> list[Any]:
    jaxpr = equation.params["jaxpr"]
    if any(equation.params.get("ref_transforms", ())):
        raise reader._unsupported("a scratch reference with transforms", equation)
    names = _argument_names(jaxpr)
    site = id(equation)
    reader.allocations[site] = reader.allocations.get(site, 0) + 1
    buffers = []
    arrays = []
    for place, variable in enumerate(jaxpr.invars):
        if isinstance(variable.aval.dtype, np.dtype):
            key: Any = (site, reader.allocations[site], place)
        else:
            key = (site, place)
        buffer = reader._allocate(key, names[place], variable.aval.shape, variable.aval.dtype)
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
    reader._happen("enters a run_scoped", line, accesses=accesses, role="enter", effect=effect)
    body = SimpleNamespace(jaxpr=jaxpr, consts=operands)
    results = reader.run(body, [whole(buffer) for buffer in buffers])
    reader._happen("leaves a run_scoped", line, accesses=list(accesses), role="leave", effect=Leave(()))
    return results


def _axis_index(reader: _Reader, equation: Any, operands: list[Any]) -> list[Any]:
    names = equation.params["axis_name"]
    if not isinstance(names, tuple):
        names = (names,)
    coordinates = reader.program.coordinates(reader.device)
    number = 0
    for name in names:
        number = number * reader.program.axes[name] + coordinates[name]
    return [np.asarray(number, np.int32)]


def _program_id(reader: _Reader, equation: Any, operands: list[Any]) -> list[Any]:
    return [np.asarray(reader.position[equation.params["axis"]], np.int32)]


def _num_programs(reader: _Reader, equation: Any, operands: list[Any]) -> list[Any]:
    grid = reader.call_equation.params["grid_mapping"].grid
    return [np.asarray(grid[equation.params["axis"]], np.int32)]


def _nothing(reader: _Reader, equation: Any, operands: list[Any]) -> list[Any]:
    return []


_RULES: dict[str, Any] = {
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
