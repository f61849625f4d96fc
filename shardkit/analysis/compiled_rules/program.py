"""A step as the rules on a compiled program see it: as traced and as compiled, and what the compiler logged."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from shardkit._arguments.checks import quote
from shardkit._jax import backends, compat
from shardkit._jax.jaxprs import own_line
from shardkit.analysis.hlo import aot, proto
from shardkit.analysis.hlo.collectives import CompiledRow, collectives_of
from shardkit.analysis.hlo.memory import Memory, memory_of
from shardkit.analysis.hlo.topology import parse_topology
from shardkit.analysis.hlo.uses import Uses
from shardkit.analysis.jaxpr.census import mesh_sizes
from shardkit.analysis.jaxpr.step import StepLeaf, leaves_of
from shardkit.analysis.rules.program import TracedProgram, in_one_sentence

# Known by its text: the partitioner says so in its log, and the compiled program has no mark of it.
_REPLICATED = "Involuntary full rematerialization"


@dataclass(frozen=True, kw_only=True)
class CompiledProgram(TracedProgram):
    """A traced and compiled program, which all rules can read."""

    mesh: dict[str, int]  # names and sizes of the mesh axes
    devices: int  # devices that run it
    module: proto.Module  # the compiled program
    memory: Memory  # bytes per device
    # every collective as compiled; `rows` names an argument's by the line that uses it
    compiled: tuple[CompiledRow, ...]
    log: tuple[str, ...]  # the compiler's lines on values that it replicates
    placed: tuple[bool, ...]  # for each argument of the program that it uses, whether it is passed with a sharding
    held: tuple[Any, ...]  # for each argument, its sharding in the compiled program; None where that is not known
    versions: Mapping[str, str]  # of jax and the compiler
    target: str  # the absent chips that it is compiled for; "" for the devices of this process

    @cached_property
    def leaves(self) -> list[StepLeaf]:
        """The arrays among the arguments."""
        return leaves_of(self.step)

    @cached_property
    def rows(self) -> tuple[CompiledRow, ...]:
        """Every collective as compiled."""
        rows = []
        for row in self.compiled:
            if not row.source:
                row = replace(row, source=self.line_of(row.op_name))
            rows.append(row)
        return tuple(rows)

    def line_of(self, name: str) -> str:
        """The first line that uses an argument, by the compiler's name for it; "" if it is none."""
        numbered = re.fullmatch(r"Arg_(\d+)\.\d+", name)  # the TPU compiler's: "Arg_2.3" is the third
        if numbered is not None and self.passed is not None:
            return self.passed[int(numbered[1])].source
        for leaf in self.leaves:
            if name in (leaf.name, leaf.argument):
                return leaf.source
        return ""

    @cached_property
    def passed(self) -> list[StepLeaf] | None:
        """The leaves that the program uses, in the order of its arguments; None where that is not known."""
        leaves = list(itertools.compress(self.leaves, compat.arguments_used(self.step.jaxpr)))
        if self.step.lower is not None or len(leaves) != len(self.placed):
            return None
        return leaves

    @cached_property
    def uses(self) -> Uses:
        """Who reads which value of the compiled program."""
        return Uses(self.module)

    def collectives(self, *kinds: str) -> Iterator[tuple[CompiledRow, proto.Computation, proto.Instruction]]:
        """Compiled collectives of these kinds that move at least `small` bytes, and their instructions."""
        rows = {}
        for row in self.rows:
            is_large = max(row.bytes_in, row.bytes_out) >= self.small
            if row.kind in kinds and row.n > 1 and is_large:
                rows[row.name] = row
        for computation in self.module.computations.values():
            if computation.id in self.uses.fused:
                continue
            for instruction in computation.instructions.values():
                if instruction.name in rows:
                    yield rows[instruction.name], computation, instruction


def compiled_program(where: str, traced: TracedProgram, built: aot.Built | None, target: str | None) -> CompiledProgram:
    """One call, compiled for the devices of this process, or `built` already for the chips of `target`."""
    if built is None or target is None:
        return _compile_here(where, traced)
    return _read_built(where, traced, built, target)


def _compile_here(where: str, traced: TracedProgram) -> CompiledProgram:
    step = traced.step
    with in_one_sentence(where, "traced and compiled"), backends.capture_log(_REPLICATED) as log:
        lowered = step.lowered
        compiled = lowered.compile()
    executable: Any = compiled.runtime_executable()
    return _read_program(
        traced,
        lowered,
        executable.hlo_modules()[0].as_serialized_hlo_module_proto(),
        sizes=mesh_sizes(step.jaxpr, step.args),
        memory=memory_of(executable),
        log=log,
        held=tuple(compiled.in_tree.flatten_up_to(compiled.input_shardings)),  # type: ignore[attr-defined]
        versions={"jax": jax.__version__},
        target="",
    )


def _read_built(where: str, traced: TracedProgram, built: aot.Built, target: str) -> CompiledProgram:
    if built.module is None:
        raise RuntimeError(
            f"{where}: the program must fit the memory of {target}; its compiler says "
            f"{built.answer['message'].splitlines()[0]} Pass more or larger chips as target=, or smaller arguments."
        )
    step = traced.step
    return _read_program(
        traced,
        step.traced.lower(lowering_platforms=(parse_topology(target).platform,)),
        built.module,
        sizes=mesh_sizes(step.jaxpr, step.args) or built.sizes,
        memory=Memory(**built.answer["memory"]),
        log=built.answer["log"],
        held=(),
        versions=built.answer["versions"],
        target=target,
    )


def _read_program(
    traced: TracedProgram,
    lowered: Any,
    serialized: bytes,
    *,
    sizes: dict[str, int],
    memory: Memory,
    log: Sequence[str],
    held: tuple[Any, ...],
    versions: Mapping[str, str],
    target: str,
) -> CompiledProgram:
    """Reads a compiled program: `serialized` is its module, `lowered` the program before compilation."""
    lowered_sizes, partitions = backends.lowered_mesh(lowered)
    if not sizes:
        sizes = lowered_sizes
    if partitions > 1 and math.prod(sizes.values()) != partitions:  # a mesh without names
        sizes = {"devices": partitions}
    module = proto.read(serialized, _find_line_of_stack)
    lines = [line for line in log if _REPLICATED in line]
    return CompiledProgram(
        traced.step,
        traced.large,
        traced.small,
        traced.capacity,
        mesh=sizes,
        devices=partitions,
        module=module,
        memory=memory,
        compiled=collectives_of(module, sizes),
        log=tuple(dict.fromkeys(lines)),
        placed=tuple(backends.lowered_arguments(lowered)),
        held=held,
        versions=versions,
        target=target,
    )


def _find_line_of_stack(frames: Sequence[proto.Frame]) -> str:
    """The user's own line that led to an instruction, else the innermost outside shardkit's kernels."""
    return own_line(frames) or proto.outside_kernels(frames)


def describe_rows(rows: Iterable[CompiledRow]) -> str:
    """Collectives of one kind and place in words, as "all_gather over 'data' of 64 bytes"."""
    rows = list(rows)
    first = rows[0]
    text = f"{first.kind} over {quote(first.axes)} of"
    if len(rows) == 1:
        return f"{text} {first.bytes_in:,} bytes"
    total = sum(row.bytes_in for row in rows)
    return f"{len(rows)} x {text} {total:,} bytes in all"
