"""Which instructions of a compiled program are collectives, and where those that overlap with compute end.

In the module that the compiler scheduled, a collective is:

- a plain instruction, synchronous (TPU, CPU);
- a pair `X-start`, `X-done` (GPU, TPU permutes), or `async-start`, `async-done` around a computation that holds it
  (GPU, and the sparse cores of TPU v6e and 7x); on GPU a pair may still be marked synchronous;
- on TPU, a fusion that ends in a custom call AsyncCollectiveStart, fusions that hold a copy of the collective beside
  the compute that hides it, and one with AsyncCollectiveDone: only the first is counted;
- on TPU, a fusion of an all-reduce and a slice of it, which is a reduce-scatter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shardkit._jax.primitives import KIND_OF_OPCODE
from shardkit.analysis.hlo import proto
from shardkit.analysis.hlo.groups import Groups


@dataclass
class Found:
    """A collective and the scheduled instruction that runs it."""

    computation: proto.Computation
    instruction: proto.Instruction
    carrier: proto.Instruction
    kind: str
    groups: Groups


class Run(NamedTuple):
    """One collective of a computation, and the position of the instruction that starts it where it is asynchronous."""

    found: Found
    start: int | None = None


class Pairs:
    """Finds the collectives of a module's computations."""

    def __init__(self, module: proto.Module):
        self.module = module

    def paired(self, computation: proto.Computation) -> tuple[dict[int, Run | None], list[Found]]:
        """The collectives of a computation, each asynchronous start paired with its end.

        Returns:
            Runs by the position of the instruction that ends them, None where one starts or continues; and the
            collectives without an end.
        """
        runs: dict[int, Run | None] = {}
        started: dict[int, Run] = {}
        carries: dict[int, int] = {}  # what continues a started collective, and its start
        for at, each in enumerate(computation.instructions.values()):
            found = self.collective_of(computation, each)
            start = next((carries[o] for o in each.operands if carries.get(o) in started), None)
            if start is not None and self._continues(each, found, started[start].found):
                carries[each.id] = start
                runs[at] = started.pop(start) if self._ends(each) else None
            elif found and self._starts(each):
                started[each.id], carries[each.id], runs[at] = Run(found, at), each.id, None
            elif found:
                runs[at] = Run(found)
        return runs, [run.found for run in started.values()]

    def collective_of(self, computation: proto.Computation, each: proto.Instruction) -> Found | None:
        """The collective that an instruction is, starts or contains."""
        opcode = each.opcode.removesuffix("-start")
        if opcode in KIND_OF_OPCODE:
            return Found(computation, each, each, KIND_OF_OPCODE[opcode], each.groups or each.pairs)
        if each.opcode not in ("fusion", "async-start"):
            return None
        for call in each.calls:
            inner = self.module.computations[call]
            for other in inner.instructions.values():
                found = self.collective_of(inner, other)
                if found is None and other.opcode == "call":
                    found = self.collective_of(inner, _as_async(other))
                if found:
                    if found.kind == "all_reduce" and 0 < each.shape.bytes < found.instruction.shape.bytes:
                        found.kind = "reduce_scatter"  # the fusion returns only this device's slice
                    found.carrier = each
                    return found
        return None

    def _starts(self, each: proto.Instruction) -> bool:
        if each.opcode == "fusion":
            return self._has_target(each, "AsyncCollectiveStart")
        return each.opcode.endswith("-start")

    def _ends(self, each: proto.Instruction) -> bool:
        return each.opcode.endswith("-done") or self._has_target(each, "AsyncCollectiveDone")

    def _has_target(self, each: proto.Instruction, target: str) -> bool:
        inner = (i for call in each.calls for i in self.module.computations[call].instructions.values())
        return any(i.target == target for i in inner)

    def _continues(self, each: proto.Instruction, found: Found | None, start: Found) -> bool:
        """Whether an instruction that reads a started collective continues or ends it."""
        if each.opcode != "fusion":
            return each.opcode == "get-tuple-element" or each.opcode.endswith(("-update", "-done"))
        if found is None or self._starts(each):
            return False
        copy, first = found.instruction, start.instruction
        return (copy.opcode, copy.shape.dims, found.groups) == (first.opcode, first.shape.dims, start.groups)


def _as_async(call: proto.Instruction) -> proto.Instruction:
    """A call inside an asynchronous computation, as an async-start, so that it is searched too."""
    return proto.Instruction(id=call.id, opcode="async-start", shape=call.shape, calls=call.calls)


def marked_synchronous(each: proto.Instruction) -> bool:
    """Whether the GPU compiler marked a pair as not overlapped."""
    return bool(each.config.get("collective_backend_config", {}).get("is_sync"))
