"""Reads a kernel for one device: which events its core and its copies are, in the order of its program.

Control and indices are integers that a device knows, so what a device does never depends on when something arrives. A
kernel in which it does (a `semaphore_read` or data that decides a branch or an index) is refused by its line.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shardkit._jax import compat
from shardkit._jax.interpreter import JaxprInterpreter, scan_operands, while_operands
from shardkit._jax.jaxprs import source_line
from shardkit.remote_copies.equations import has_device_barrier, list_argument_names
from shardkit.remote_copies.events import KernelEvent, Semaphore, UnknownOrdersError, Wait
from shardkit.remote_copies.memory import COUNT, WRITE, Access, Buffer, BufferView, DevicePlace, whole
from shardkit.remote_copies.program import DataOperation, DataRow, DataStack, Enter, KernelProgram, Leave
from shardkit.remote_copies.values import Data, compute_integers, computes_integers, is_known

# What an equation of Pallas is as events: from the reader, the equation and its operands to its results.
Rule = Callable[[Any, Any, list[Any]], list[Any]]
_MOST_ROUNDS = 100_000  # of a while loop


class KernelReader(JaxprInterpreter[Any]):
    """Runs the kernel of one device; a value is a known integer, `Data`, or a `BufferView` of memory."""

    def __init__(self, program: KernelProgram, device: int, call: int, equation: Any, rules: Mapping[str, Rule]):
        self.rules = rules
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
            raise self.unsupported("a grid whose size is not known")
        arrays = mapping.num_index_operands + mapping.num_inputs
        buffers = []
        names = list_argument_names(jaxpr)
        for place, variable in enumerate(jaxpr.invars):
            shape, dtype = variable.aval.shape, variable.aval.dtype
            block = place - mapping.num_index_operands
            if 0 <= block < len(mapping.block_mappings):
                array = mapping.block_mappings[block].array_aval
                shape, dtype = array.shape, array.dtype
            buffers.append(self.allocate(place, names[place], shape, dtype))
        for source, result in params["input_output_aliases"]:
            buffers[arrays + result] = buffers[source]
        arguments = tuple((buffer, place) for place, buffer in enumerate(buffers[:arrays]))
        others = tuple(buffer for buffer in buffers[arrays:] if buffer not in buffers[:arrays])
        entered = self._enter(tuple(dict.fromkeys(buffers)), Enter(arguments, others))
        if has_device_barrier(self.call_equation):
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

    def allocate(self, site: Any, name: str, shape: Sequence[int], dtype: Any) -> Buffer:
        semaphore = not isinstance(dtype, np.dtype)
        return Buffer((self.call_number, site), name, tuple(shape), None if semaphore else dtype)

    # Memory that a device has not yet, or no longer, is memory of something else: whoever touches it before `enter` or
    # after `leave` races with that. Without a barrier at the start a neighbour's copy may do so.
    def _enter(self, buffers: tuple[Buffer, ...], effect: Any) -> int:
        accesses = [whole(buffer).access(self.device, WRITE) for buffer in buffers]
        return self.add_event("enters the kernel", self.line, accesses=accesses, role="enter", effect=effect)

    def _leave(self, buffers: tuple[Buffer, ...], effect: Any) -> None:
        accesses = [whole(buffer).access(self.device, WRITE) for buffer in buffers]
        self.add_event("leaves the kernel", self.line, accesses=accesses, role="leave", effect=effect)

    def _wait_for_all_devices(self) -> None:
        """The barrier that Pallas puts before a kernel: each device goes on when all have entered."""
        barrier = Buffer(("device barrier", self.call_number), "the barrier before the kernel", (), None)
        for device in range(self.program.devices):
            semaphore = Semaphore(device, barrier, ())
            number = self.add_event(f"signals {semaphore}", self.line)
            count(self.program.events[number], semaphore, 1)
        self.add_wait(whole(barrier), self.program.devices, True, self.call_equation)

    def _block(self, mapping: Any, view: BufferView) -> BufferView:
        """The part of an array that a step of the grid sees. It is read in place."""
        if mapping.has_trivial_window():
            return view
        self.moving_blocks.add(view.buffer)
        places = self.run(mapping.index_map_jaxpr, [np.asarray(i, np.int32) for i in self.position])
        indices: list[int | range] = []
        for dim, (block, place) in enumerate(zip(mapping.block_shape, places, strict=True)):
            start = self.read_integer(place, self.line)
            size = getattr(block, "block_size", None)
            if size is None:
                indices.append(start)
                continue
            if view.shape[dim] % size:
                raise self.unsupported("a block that does not divide its array")
            indices.append(range(start * size, (start + 1) * size))
        return view.take(indices)

    # Equations

    def constant(self, x: Any) -> Any:
        return x if isinstance(x, BufferView | Data) else np.asarray(x)

    def literal(self, atom: Any) -> Any:
        return np.asarray(atom.val, atom.aval.dtype)

    def equation(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        rule = self.rules.get(equation.primitive.name)
        if rule is not None:
            return rule(self, equation, operands)
        for x in operands:
            if isinstance(x, BufferView):
                raise self.unsupported(f"the operation {equation.primitive.name} on memory", equation)
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
                raise self.unsupported("a loop whose end depends on data", equation)
            if not more:
                return carry
            carry = self.run(body, [*for_body, *carry])
        raise self.unsupported(f"a loop of more than {_MOST_ROUNDS} rounds", equation)

    # Data

    def make_data(self, aval: Any) -> Data:
        return Data(next(self.program.numbers), tuple(aval.shape), aval.dtype)

    def _operate(self, equation: Any, operands: Sequence[Any]) -> list[Data]:
        """Results of an equation on data, of loops and branches too unless they touch memory."""
        for x in operands:
            if isinstance(x, BufferView):
                raise self.unsupported("a branch that data decides", equation)
        if compat.acts(equation):
            raise self.unsupported(f"the operation {equation.primitive.name}", equation)
        results = tuple(self.make_data(variable.aval) for variable in equation.outvars)
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
        result = self.make_data(variable.aval)
        self.program.items[self.device].append(DataStack(tuple(rows), result))
        return result

    def read_integer(self, x: Any, line: str) -> int:
        if is_known(x) and np.ndim(x) == 0:
            return int(x)
        if isinstance(x, int):
            return x
        raise UnknownOrdersError(
            f"{line}: an index, an amount or a device that depends on data or on what a semaphore counts; the "
            "orders of a kernel are known only if its integers are. Compute it of axis_index, program_id and counters."
        )

    # Memory and semaphores

    def add_event(self, text: str, line: str, **fields: Any) -> int:
        event = KernelEvent(self.device, self.call_number, text, line, self.program.last[self.device], **fields)
        return self.program.add_to_core(event)

    def find_view(self, reference: Any, transforms: Sequence[Any], equation: Any) -> BufferView:
        """The memory that a reference with indexers names."""
        inner = getattr(reference, "transforms", None)
        if inner is not None:
            reference, transforms = reference.ref, (*inner, *transforms)
        view: BufferView = reference
        for transform in transforms:
            if not hasattr(transform, "indices"):
                raise self.unsupported("a reference that is reshaped or read as another dtype", equation)
            indices: list[int | range] = []
            for index in transform.indices:
                if hasattr(index, "stride"):
                    start, size = (self.read_integer(x, source_line(equation)) for x in (index.start, index.size))
                    indices.append(range(start, start + size * index.stride, index.stride)[:size])
                else:
                    indices.append(self.read_integer(index, source_line(equation)))
            try:
                view = view.take(indices)
            except IndexError as error:
                line = source_line(equation)
                raise IndexError(
                    f"{line}: a kernel must stay inside its memory; device {self.device} takes {error}. Check "
                    "the index."
                ) from None
        return view

    def add_wait(self, view: BufferView, amount: int, takes: bool, equation: Any) -> None:
        """Adds a wait of the core for a semaphore of its own, from which it takes what it waited for, or not."""
        semaphore = self.find_semaphore(view, self.device)
        text = f"waits for {amount} of {semaphore}"
        self.add_event(text, source_line(equation), wait=Wait(semaphore, amount, takes), role="wait")

    def find_semaphore(self, view: BufferView, device: int) -> Semaphore:
        return Semaphore(device, view.buffer, tuple(r[0] for r in view.ranges))

    def find_device(self, device_id: Any, kind: Any, equation: Any) -> int:
        """The device that an operation names; without a name its own."""
        line = source_line(equation)
        if device_id is None:
            return self.device
        coordinates = self.program.coordinates(self.device)
        if isinstance(device_id, dict):
            for axis, place in device_id.items():
                if axis not in coordinates:
                    raise self.unsupported(f"a device named by {axis!r}, which is no axis of the mesh", equation)
                coordinates[axis] = self.read_integer(place, line)
            return self.program.device_at(coordinates, line)
        places = device_id if isinstance(device_id, tuple | list) else (device_id,)
        if kind is not None and kind.value == "logical" and len(places) == 1:
            number = self.read_integer(places[0], line)
            if not 0 <= number < self.program.devices:
                raise IndexError(f"{line} names the device {number} of {self.program.devices}")
            return number
        if len(places) != len(coordinates):
            raise self.unsupported(f"a device named by {len(places)} of {len(coordinates)} coordinates", equation)
        named = {axis: self.read_integer(place, line) for axis, place in zip(coordinates, places, strict=True)}
        return self.program.device_at(named, line)

    def unsupported(self, what: str, equation: Any = None) -> UnknownOrdersError:
        line = self.line if equation is None else source_line(equation)
        return UnknownOrdersError(
            f"{line}: the orders of a kernel with {what} are not known. Write it otherwise, or run it in jax's "
            "interpreter."
        )


def count(event: KernelEvent, semaphore: Semaphore, amount: int) -> None:
    """Makes a semaphore count when an event happens."""
    event.signals.append((semaphore, amount))
    place = tuple(range(i, i + 1) for i in semaphore.element)
    event.accesses.append(Access(DevicePlace(semaphore.device, semaphore.buffer), place, COUNT))
