"""A function without Pallas that computes what a kernel of remote copies does, for proofs and for any backend.

All orders of a kernel without a race give the same values, so those of one order are computed: every device gathers the
arguments of all, follows all devices through that order with the memory of each as an array, and takes its own results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit._jax import compat
from shardkit._jax.interpreter import JaxprInterpreter, scan_operands
from shardkit.remote_copies.equations import list_calls
from shardkit.remote_copies.events import KernelEvent
from shardkit.remote_copies.memory import Buffer, BufferView, DevicePlace
from shardkit.remote_copies.orders import Orders
from shardkit.remote_copies.program import (
    DataOperation,
    DataRow,
    DataStack,
    Enter,
    Get,
    KernelProgram,
    Leave,
    Put,
)
from shardkit.remote_copies.proof import prove_calls
from shardkit.remote_copies.rules import add_call
from shardkit.remote_copies.values import Data


def write_out(kernel: Callable[..., Any], *, repeats: int = 2) -> Callable[..., Any]:
    """The kernel as a function of ordinary jax operations, for use inside `jax.shard_map`.

    When it is traced, the orders of its Pallas calls are proved first, as `check_orders` does with `repeats`.

    Args:
        kernel: the function that each device runs, with calls of `pallas_call` inside.
        repeats: how often the function is called in a row in the proof of its orders.

    Raises:
        OrdersError: a kernel that goes wrong in some order.
    """

    @wraps(kernel)
    def written(*args: Any) -> Any:
        program, structure = _trace(kernel, args)
        calls = list_calls(program.jaxpr)
        if calls:
            prove_calls(calls, compat.bound_axes(), repeats)
        return _write(program, structure, args)

    return written


def write_out_proved(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The same of a kernel whose orders were proved before."""

    @wraps(kernel)
    def written(*args: Any) -> Any:
        program, structure = _trace(kernel, args)
        return _write(program, structure, args)

    return written


def _trace(kernel: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, Any]:
    """The program of a kernel, and the structure of its results."""
    with compat.untracked():
        program, results = jax.make_jaxpr(kernel, return_shape=True)(*args)
    return program, jax.tree.structure(results)


def _write(program: Any, structure: Any, args: Sequence[Any]) -> Any:
    """The results of a program with its Pallas calls written out."""
    leaves = _Writer(compat.bound_axes()).run(program, jax.tree.leaves(args))
    return jax.tree.unflatten(structure, leaves)


class _Writer(JaxprInterpreter[Any]):
    """Runs a program on arrays, with the Pallas calls in it written out."""

    def __init__(self, axes: dict[str, int]):
        self.axes = axes

    def constant(self, x: Any) -> Any:
        return x

    def literal(self, atom: Any) -> Any:
        return atom.val

    def scan(self, equation: Any, body: Any, operands: list[Any]) -> Sequence[Any]:
        if not list_calls(body):
            return self.equation(equation, operands)
        consts, carry, arrays = scan_operands(equation, operands)

        def run_body(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            results = self.run(body, [*consts, *carry, *rows])
            return results[: len(carry)], results[len(carry) :]

        length = equation.params["length"]
        carry, stacks = lax.scan(run_body, carry, arrays, length, equation.params["reverse"])
        return [*carry, *stacks]

    def equation(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        if equation.primitive.name != "pallas_call":
            return compat.bind(equation, operands)
        program = KernelProgram(self.axes)
        add_call(program, equation, 0)
        names = tuple(self.axes)
        # Every device computes all devices' memory: what a copy brings is then a slice of an array that is there. A
        # ppermute for each copy would do as well, but a copy to one device is none that all take part in.
        gathered = [lax.all_gather(x, names) for x in operands]
        arguments = []
        for number in range(program.devices):
            arguments.append([x[number] for x in gathered])
        results = run_values(program, arguments)
        device = lax.axis_index(names)
        outputs = []
        for column in zip(*results, strict=True):
            outputs.append(lax.dynamic_index_in_dim(jnp.stack(column), device, 0, keepdims=False))
        return outputs


def run_values(program: KernelProgram, arguments: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The results of one call on every device, from its arguments on every device."""
    values = _Values(program, arguments)
    for number in Orders(program.events).run().order:
        values.happen(number)
    return values.results


class _Values:
    """The memory and the data of all devices in one order."""

    def __init__(self, program: KernelProgram, arguments: Sequence[Sequence[Any]]):
        self.program = program
        self.arguments = arguments
        self.memory: dict[DevicePlace, Any] = {}
        self.data: dict[int, Any] = {}
        self.next = [0] * program.devices
        self.results: list[list[Any]] = [[] for _ in range(program.devices)]

    def happen(self, number: int) -> None:
        """An event, traced with the line of the kernel that it comes from."""
        event = self.program.events[number]
        scope: AbstractContextManager[Any] = nullcontext()
        if event.equation is not None:
            scope = compat.trace_as_equation(event.equation)
        with scope:
            self._happen(event)

    def _happen(self, event: KernelEvent) -> None:
        if event.copy is not None:
            # Its source is the same since the copy started, as no order races.
            copy = event.copy
            self.write(copy.target, copy.written, self.read(copy.source, copy.read))
            return
        if event.role in ("load", "sent"):
            return
        items = self.program.items[event.device]
        while not isinstance(items[self.next[event.device]], int):
            self.operate(items[self.next[event.device]])
            self.next[event.device] += 1
        self.next[event.device] += 1
        self.apply(event.device, event.effect)

    def apply(self, device: int, effect: Any) -> None:
        if isinstance(effect, Get):
            self.data[effect.result.number] = self.read(DevicePlace(device, effect.view.buffer), effect.view)
        elif isinstance(effect, Put):
            place = DevicePlace(device, effect.view.buffer)
            value = self.value(effect.value)
            if effect.adds:
                value = self.read(place, effect.view) + value
            self.write(place, effect.view, value)
        elif isinstance(effect, Enter):
            for buffer, argument in effect.arguments:
                self.memory[DevicePlace(device, buffer)] = self.arguments[device][argument]
            for buffer in effect.others:
                if buffer.dtype is not None:
                    self.memory[DevicePlace(device, buffer)] = _unwritten(buffer)
        elif isinstance(effect, Leave) and effect.results:
            self.results[device] = [self.memory[DevicePlace(device, buffer)] for buffer in effect.results]

    def operate(self, item: Any) -> None:
        if isinstance(item, DataOperation):
            operands = [self.value(x) for x in item.operands]
            for result, x in zip(item.results, compat.bind(item.equation, operands), strict=True):
                self.data[result.number] = x
        elif isinstance(item, DataRow):
            self.data[item.result.number] = self.value(item.array)[item.number]
        elif isinstance(item, DataStack):
            self.data[item.result.number] = jnp.stack([self.value(x) for x in item.rows])

    def value(self, x: Any) -> Any:
        if isinstance(x, Data):
            return self.data[x.number]
        return jnp.asarray(x)

    def read(self, place: DevicePlace, view: BufferView) -> Any:
        starts = [r.start for r in view.ranges]
        stops = [r[-1] + 1 if r else r.start for r in view.ranges]
        x = lax.slice(self.memory[place], starts, stops, [r.step for r in view.ranges])
        return lax.squeeze(x, tuple(view.dropped))

    def write(self, place: DevicePlace, view: BufferView, value: Any) -> None:
        memory = self.memory[place]
        sizes = tuple(len(r) for r in view.ranges)
        value = jnp.reshape(value, sizes).astype(memory.dtype)
        if all(r.step == 1 for r in view.ranges):
            starts = [np.int32(r.start) for r in view.ranges]
            self.memory[place] = lax.dynamic_update_slice(memory, value, starts) if starts else value
        else:
            self.memory[place] = memory.at[np.ix_(*view.ranges)].set(value)


def _unwritten(buffer: Buffer) -> Any:
    """Memory that nothing was written to: NaN, the largest integer or True, which a right kernel does not return."""
    dtype = np.dtype(buffer.dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.full(buffer.shape, jnp.nan, dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.full(buffer.shape, jnp.iinfo(dtype).max, dtype)
    return jnp.ones(buffer.shape, dtype)
