"""The readers of a value in a compiled program, followed through fusions and calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from shardkit.analysis.hlo import proto

# Instructions that return their operand's elements, in another order or another form.
MOVES = {
    "bitcast",
    "copy",
    "copy-start",
    "copy-done",
    "transpose",
    "reshape",
    "get-tuple-element",
    "opt-barrier",
    "optimization-barrier",
    "all-gather-done",
    "all-reduce-done",
    "collective-permute-done",
    "async-done",
}


class Value(NamedTuple):
    """The result of an instruction, in its computation.

    Attributes:
        computation: the computation.
        instruction: the instruction.
        callers: the fusions and calls that run the computation, each with its own computation, the innermost last.
    """

    computation: proto.Computation
    instruction: proto.Instruction
    callers: tuple[tuple[proto.Computation, proto.Instruction], ...] = ()


class CompiledUse(NamedTuple):
    """An instruction that reads a value as its operand `position`."""

    value: Value
    position: int

    @property
    def opcode(self) -> str:
        """The opcode of the instruction."""
        return self.value.instruction.opcode

    @property
    def element(self) -> int | None:
        """The element of its computation's result that the value becomes; None where it is read inside."""
        is_inside = self.value.callers or self.value.instruction.id != self.value.computation.root
        if self.opcode != "tuple" or is_inside:
            return None
        return self.position


class Uses:
    """The readers of the values of a module."""

    def __init__(self, module: proto.Module):
        self.module = module
        self.fused: set[int] = set()  # computations that are part of an instruction
        self.loops: dict[int, tuple[proto.Computation, proto.Instruction]] = {}  # the loop of each body
        self._readers: dict[int, dict[int, list[tuple[proto.Instruction, int]]]] = {}
        for computation in module.computations.values():
            for instruction in computation.instructions.values():
                if instruction.opcode == "while":
                    self.loops[instruction.calls[0]] = (computation, instruction)
                # These two run a computation by itself; that of a fusion or a reduction is part of the instruction.
                elif instruction.opcode not in ("call", "conditional"):
                    self.fused.update(instruction.calls)

    def readers(self, computation: proto.Computation, number: int) -> list[tuple[proto.Instruction, int]]:
        """The instructions of a computation that read a value, and as which operand."""
        if computation.id not in self._readers:
            readers: dict[int, list[tuple[proto.Instruction, int]]] = {}
            for instruction in computation.instructions.values():
                for position, operand in enumerate(instruction.operands):
                    readers.setdefault(operand, []).append((instruction, position))
            self._readers[computation.id] = readers
        return self._readers[computation.id].get(number, [])

    def find_ends(self, value: Value, passes: Callable[[CompiledUse], bool]) -> Iterator[CompiledUse]:
        """Where a value goes: the first readers that do not pass it on, and the root of its computation.

        For example the gathered weight in

            %w = all-gather(%shard)
            %t = transpose(%w)
            %y = fusion(%x, %t), calls=%fused      in which   %fused = { dot(%p0, %p1), add(...) }

        goes through the transpose into the fusion, as its %p1. Its end there is the dot, as operand 1.
        """
        visited: set[tuple[int, ...]] = set()
        waiting = [value]
        while waiting:
            value = waiting.pop()
            computation, instruction, callers = value
            # With the fusions around it, because two of them may run the same computation on other operands.
            fusions = [fusion.id for _, fusion in callers]
            key = (computation.id, instruction.id, *fusions)
            if key in visited:
                continue
            visited.add(key)
            if instruction.id == computation.root:
                if callers:
                    waiting.append(_leave(value))
                else:
                    # -1: nothing reads it here. It is what its computation returns, of a loop the next carry.
                    yield CompiledUse(value, -1)
            for reader, position in self.readers(computation, instruction.id):
                use = CompiledUse(Value(computation, reader, callers), position)
                if reader.opcode in ("fusion", "call"):
                    waiting += self._enter(use)
                elif reader.opcode == "tuple" and reader.id == computation.root and callers:
                    waiting += self._leave_by_element(use)
                elif reader.opcode in MOVES or passes(use):
                    waiting.append(use.value)
                else:
                    yield use

    def _enter(self, use: CompiledUse) -> list[Value]:
        """The parameter that a value is inside the fusion or call that reads it."""
        computation, fusion, callers = use.value
        inner = self.module.computations[fusion.calls[0]]
        parameter = inner.parameters.get(use.position)
        if parameter is None:
            return []
        return [Value(inner, parameter, (*callers, (computation, fusion)))]

    def _leave_by_element(self, use: CompiledUse) -> list[Value]:
        """The elements that are taken from the tuple of a fusion, in which a value is one."""
        callers = use.value.callers
        outer, fusion = callers[-1]
        elements = []
        # A fusion of several results ends in tuple(%a, %b), position 0 and 1. What was %b inside is outside what
        # get-tuple-element(%fusion), index=1 reads; what index=0 reads has nothing to do with it.
        for reader, _ in self.readers(outer, fusion.id):
            if reader.opcode == "get-tuple-element" and reader.tuple_index == use.position:
                elements.append(Value(outer, reader, callers[:-1]))
        return elements

    def find_sources(self, value: Value) -> Iterator[proto.Instruction]:
        """Every instruction from which a value is computed, through the fusions around it."""
        visited: set[tuple[int, int]] = set()
        waiting = [value]
        while waiting:
            value = waiting.pop()
            computation, instruction, callers = value
            if (computation.id, instruction.id) in visited:
                continue
            visited.add((computation.id, instruction.id))
            yield instruction
            if instruction.opcode == "parameter" and callers:
                waiting.append(_argument(value))
            else:
                for operand in instruction.operands:
                    waiting.append(Value(computation, computation.instructions[operand], callers))

    def find_maker(self, value: Value) -> Value:
        """The instruction that computed a value: behind moves, inside the fusion that returns it."""
        computation, instruction, callers = value
        # An element of a tuple is an end: its operand is the whole tuple, as of a loop, and says not what became this
        # element of it.
        if instruction.opcode in MOVES - {"get-tuple-element"} and instruction.operands:
            operand = computation.instructions[instruction.operands[0]]
            return self.find_maker(Value(computation, operand, callers))
        if instruction.opcode in ("fusion", "call"):
            inner = self.module.computations[instruction.calls[0]]
            root = inner.instructions[inner.root]
            return self.find_maker(Value(inner, root, (*callers, (computation, instruction))))
        if instruction.opcode == "parameter" and callers:
            return self.find_maker(_argument(value))
        return value


def _leave(value: Value) -> Value:
    """The fusion or call that returns a value, in the computation around it."""
    outer, fusion = value.callers[-1]
    return Value(outer, fusion, value.callers[:-1])


def _argument(parameter: Value) -> Value:
    """The operand that a fusion or call passes as this parameter."""
    outer, fusion = parameter.callers[-1]
    operand = fusion.operands[parameter.instruction.parameter]
    return Value(outer, outer.instructions[operand], parameter.callers[:-1])
