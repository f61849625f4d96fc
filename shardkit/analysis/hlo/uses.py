"""Who reads a value of a compiled program, followed through fusions and calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from shardkit.analysis.hlo import proto

# What returns its operand's elements, in another order or another form.
MOVES = {
    *("bitcast", "copy", "copy-start", "copy-done", "transpose", "reshape", "get-tuple-element", "opt-barrier"),
    *("optimization-barrier", "all-gather-done", "all-reduce-done", "collective-permute-done", "async-done"),
}


class Value(NamedTuple):
    """An instruction, its computation, and the fusions and calls around that, the innermost last."""

    computation: proto.Computation
    instruction: proto.Instruction
    around: tuple[tuple[proto.Computation, proto.Instruction], ...] = ()


class CompiledUse(NamedTuple):
    """An instruction that reads a value as its operand `position`."""

    value: Value
    position: int

    @property
    def opcode(self) -> str:
        """What it does."""
        return self.value.instruction.opcode

    @property
    def leaves(self) -> int | None:
        """The element of its computation's result that the value becomes; None where it is read inside."""
        inside = self.value.around or self.value.instruction.id != self.value.computation.root
        return self.position if self.opcode == "tuple" and not inside else None


class Uses:
    """The readers of the values of a module."""

    def __init__(self, module: proto.Module):
        self.module = module
        self.fused: set[int] = set()  # computations that are part of an instruction
        self.loops: dict[int, tuple[proto.Computation, proto.Instruction]] = {}  # the loop of each body
        self._users: dict[int, dict[int, list[tuple[proto.Instruction, int]]]] = {}
        for computation in module.computations.values():
            for each in computation.instructions.values():
                if each.opcode == "while":
                    self.loops[each.calls[0]] = (computation, each)
                elif each.opcode not in ("call", "conditional"):
                    self.fused.update(each.calls)

    def readers(self, computation: proto.Computation, number: int) -> list[tuple[proto.Instruction, int]]:
        """The instructions of a computation that read a value, and as which operand."""
        if computation.id not in self._users:
            users = self._users[computation.id] = {}
            for each in computation.instructions.values():
                for position, operand in enumerate(each.operands):
                    users.setdefault(operand, []).append((each, position))
        return self._users[computation.id].get(number, [])

    def ends(self, value: Value, passes: Callable[[CompiledUse], bool]) -> Iterator[CompiledUse]:
        """Where a value goes: the first readers that do not pass it on, and the root of its computation."""
        seen: set[tuple[int, ...]] = set()
        waiting = [value]
        while waiting:
            value = waiting.pop()
            computation, each, around = value
            key = (computation.id, each.id, *(fusion.id for _, fusion in around))
            if key in seen:
                continue
            seen.add(key)
            if each.id == computation.root:
                if around:
                    waiting.append(Value(*around[-1], around[:-1]))
                else:
                    yield CompiledUse(value, -1)
            for user, position in self.readers(computation, each.id):
                use = CompiledUse(Value(computation, user, around), position)
                if user.opcode in ("fusion", "call"):
                    inner = self.module.computations[user.calls[0]]
                    parameter = inner.parameters.get(position)
                    if parameter is not None:
                        waiting.append(Value(inner, parameter, (*around, (computation, user))))
                elif user.opcode == "tuple" and user.id == computation.root and around:  # a fusion of several results
                    outer, fusion = around[-1]
                    waiting += [
                        Value(outer, element, around[:-1])
                        for element, _ in self.readers(outer, fusion.id)
                        if element.opcode == "get-tuple-element" and element.tuple_index == position
                    ]
                elif user.opcode in MOVES or passes(use):
                    waiting.append(use.value)
                else:
                    yield use

    def made_from(self, value: Value) -> Iterator[proto.Instruction]:
        """Every instruction from which a value is computed, through the fusions around it."""
        seen: set[tuple[int, int]] = set()
        waiting = [value]
        while waiting:
            computation, each, around = waiting.pop()
            if (computation.id, each.id) in seen:
                continue
            seen.add((computation.id, each.id))
            yield each
            if each.opcode == "parameter" and around:
                outer, fusion = around[-1]
                operands = [Value(outer, outer.instructions[fusion.operands[each.parameter]], around[:-1])]
            else:
                operands = [Value(computation, computation.instructions[o], around) for o in each.operands]
            waiting += operands

    def maker(self, value: Value) -> Value:
        """The instruction that computed a value: behind moves, inside the fusion that returns it."""
        computation, each, around = value
        if each.opcode in MOVES - {"get-tuple-element"} and each.operands:
            return self.maker(Value(computation, computation.instructions[each.operands[0]], around))
        if each.opcode in ("fusion", "call"):
            inner = self.module.computations[each.calls[0]]
            return self.maker(Value(inner, inner.instructions[inner.root], (*around, (computation, each))))
        if each.opcode == "parameter" and around:
            outer, fusion = around[-1]
            return self.maker(Value(outer, outer.instructions[fusion.operands[each.parameter]], around[:-1]))
        return value
