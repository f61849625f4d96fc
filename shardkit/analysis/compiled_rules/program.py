"""A step as the rules on a compiled program see it: as traced and as compiled, and what the compiler logged."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from shardkit._arguments.checks import quoted
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

_REPLICATED = "Involuntary full rematerialization"


@dataclass(frozen=True, kw_only=True)
class CompiledProgram(TracedProgram):
    """The same, compiled: what all rules read."""

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
        return tuple(
            each if each.source else replace(each, source=self.line_of(each.op_name)) for each in self.compiled
        )

    def line_of(self, name: str) -> str:
        """The first line that uses an argument, by the compiler's name for it; "" if it is none."""
        numbered = re.fullmatch(r"Arg_(\d+)\.\d+", name)
        if numbered and self.passed is not None:
            return self.passed[int(numbered[1])].source
        return next((leaf.source for leaf in self.leaves if name in (leaf.name, leaf.argument)), "")

    @cached_property
    def passed(self) -> list[StepLeaf] | None:
        """The leaves that the program uses, in the order of its arguments; None where that is not known."""
        used = compat.arguments_used(self.step.jaxpr)
        leaves = [leaf for leaf, is_used in zip(self.leaves, used, strict=True) if is_used]
        return leaves if self.step.lower is None and len(leaves) == len(self.placed) else None

    @cached_property
    def uses(self) -> Uses:
        """Who reads which value of the compiled program."""
        return Uses(self.module)

    def collectives(self, *kinds: str) -> Iterator[tuple[CompiledRow, proto.Computation, proto.Instruction]]:
        """Compiled collectives of these kinds that move at least `small` bytes, and their instructions."""
        large = (row for row in self.rows if max(row.bytes_in, row.bytes_out) >= self.small)
        rows = {row.name: row for row in large if row.kind in kinds and row.n > 1}
        for computation in self.module.computations.values():
            for each in computation.instructions.values():
                if each.name in rows and computation.id not in self.uses.fused:
                    yield rows[each.name], computation, each


def compiled_program(where: str, traced: TracedProgram, built: aot.Built | None, target: str | None) -> CompiledProgram:
    """One call compiled for the devices of this process, or as it is `built` for those of `target`."""
    step = traced.step
    sizes = mesh_sizes(step.jaxpr, step.args)
    if built is None or target is None:
        with in_one_sentence(where, "traced and compiled"), backends.capture_log(_REPLICATED) as log:
            lowered = step.lowered
            compiled = lowered.compile()
        executable: Any = compiled.runtime_executable()
        serialized, memory = executable.hlo_modules()[0].as_serialized_hlo_module_proto(), memory_of(executable)
        held = tuple(compiled.in_tree.flatten_up_to(compiled.input_shardings))  # type: ignore[attr-defined]
        versions = {"jax": jax.__version__}
    else:
        if built.module is None:
            raise RuntimeError(
                f"{where}: the program must fit the memory of {target}; its compiler says "
                f"{built.answer['message'].splitlines()[0]} Pass more or larger chips as target=, or smaller arguments."
            )
        lowered = step.traced.lower(lowering_platforms=(parse_topology(target).platform,))
        serialized, memory, log = built.module, Memory(**built.answer["memory"]), built.answer["log"]
        held, versions, sizes = (), built.answer["versions"], sizes or built.sizes
    inside, partitions = backends.lowered_mesh(lowered)
    placed = backends.lowered_arguments(lowered)
    sizes = sizes or inside
    if math.prod(sizes.values()) != partitions > 1:  # a mesh without names
        sizes = {"devices": partitions}
    module = proto.read(serialized, lambda frames: own_line(frames) or proto.outside_kernels(frames))
    kept = [line for line in log if _REPLICATED in line]
    return CompiledProgram(
        step,
        traced.large,
        traced.small,
        traced.capacity,
        mesh=sizes,
        devices=partitions,
        module=module,
        memory=memory,
        compiled=collectives_of(module, sizes),
        log=tuple(dict.fromkeys(kept)),
        placed=tuple(placed),
        held=held,
        versions=versions,
        target=target or "",
    )


def together(rows: Iterable[CompiledRow]) -> str:
    """Collectives of one kind and place in words, as "all_gather over 'data' of 64 bytes"."""
    first, *others = rows
    total = sum(row.bytes_in for row in (first, *others))
    times = f"{len(others) + 1} x " if others else ""
    return f"{times}{first.kind} over {quoted(first.axes)} of {total:,} bytes{' in all' if others else ''}"
