"""What the page is written from: a step, traced and compiled once, read by everything that reads steps."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from shardkit import cost
from shardkit.analysis.hlo import aot
from shardkit.analysis.hlo.collectives import CompiledRow, total_work
from shardkit.analysis.hlo.compute import NO_WORK, Work
from shardkit.analysis.hlo.differences import account
from shardkit.analysis.hlo.memory import Memory
from shardkit.analysis.hlo.report import Report
from shardkit.analysis.hlo.topology import device_of, parse_topology
from shardkit.analysis.jaxpr.census import Census, census_of, mesh_sizes
from shardkit.analysis.jaxpr.step import TracedStep, trace_step
from shardkit.analysis.judge import LARGE, Audit, audit_of, check_rules, findings_of
from shardkit.analysis.rules import Finding
from shardkit.analysis.rules.program import TracedProgram, compiled_program, in_one_sentence
from shardkit.meshes.inspection import held_as
from shardkit.meshes.layout import path_name, shard_bytes
from shardkit.plans.describe import PlanTable
from shardkit.schedules import Schedule


class ArgumentLeaf(NamedTuple):
    """An array among the arguments of a step, as texts.

    Attributes:
        argument: the argument that holds it.
        name: its path in the argument; of an argument that is an array, its name.
        shape: the global shape.
        dtype: the dtype.
        spec: how it is split over the mesh.
        local: the shape of what one device holds.
        devices: devices that hold it.
        bytes: bytes on each.
    """

    argument: str
    name: str
    shape: str
    dtype: str
    spec: str
    local: str
    devices: str
    bytes: int


@dataclass(frozen=True)
class StepReport:
    """A step as `sk.report` read it; a notebook shows its page.

    Attributes:
        step: the step's name, and the line at which it is defined; of a train step, its plan.
        target: the chips for which it was compiled; the platform of this process, as "cpu", without a target.
        mesh: names and sizes of the mesh axes.
        leaves: every array among the arguments.
        census: every collective as written.
        findings: what breaks a rule of `lint` or of `audit`.
        audit: the audit; None where the program does not fit the memory of the chips.
        compiled: the report of the chips' compiler; None without a target.
        file: the file that was written; None if there is none.
        html: the page.
    """

    step: str
    target: str
    mesh: dict[str, int]
    leaves: tuple[ArgumentLeaf, ...]
    census: Census
    findings: tuple[Finding, ...]
    audit: Audit | None
    compiled: Report | None
    file: Path | None = None
    html: str = ""

    def _repr_html_(self) -> str:
        from shardkit.reporting.html import element

        return element("iframe", srcdoc=self.html, title=self.step, style="width:100%;height:40rem;border:0")


@dataclass(frozen=True)
class Facts:
    """All that the page shows of a step.

    Attributes:
        found: what the caller gets.
        devices: the mesh with its devices; None where it has none, or where the step is over none.
        plan: the table of its plan; None of a step without one.
        chip: the chip whose figures the times are by; None where they are not known.
        work: FLOPs and bytes of one call's compute.
        state: the state of a train step; None of any other.
        schedule: the schedule of a pipeline's train step; None of any other.
    """

    found: StepReport
    devices: Mesh | None
    plan: PlanTable | None
    chip: cost.Chip | None
    work: Work
    state: Any
    schedule: Schedule | None = None

    @property
    def memory(self) -> Memory | None:
        """Bytes per device; None where the program does not fit."""
        return self.found.audit.memory if self.found.audit else None

    @property
    def rows(self) -> tuple[CompiledRow, ...]:
        """Every collective as compiled, with times where a target is named; none where the program does not fit."""
        found = self.found
        return found.compiled.rows if found.compiled else found.audit.rows if found.audit else ()

    @property
    def differences(self) -> list[str]:
        """What the compiler changed, one line each."""
        found = self.found
        if found.compiled:
            return found.compiled.differences()
        return account(found.audit.census, found.audit.rows) if found.audit else []


def read(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    target: str | None,
    ignore: Collection[str],
    large: int,
    small: int,
    call: bool,
    timeout: float,
) -> Facts:
    """Traces and compiles one call, and reads it.

    Raises:
        ValueError: a step that cannot be traced, lowered and compiled with these arguments.
    """
    check_rules("report", ignore)
    where = None if target is None else parse_topology(target)
    with in_one_sentence("report", "traced and compiled"):
        step = trace_step(fn, args)
    built = None if target is None else aot.build(step.traced, args, topology=target, timeout=timeout)
    traced, program = TracedProgram(step, large, small), None
    if built is None or built.module is not None:
        program = compiled_program("report", traced, built, target)
    audit = audit_of(program, ignore, call) if program else None
    compiled = None if built is None or where is None else built.report(where)
    plan = plan_of(fn, args)
    found = StepReport(
        f"train step: {getattr(fn, 'plan', '')}" if plan else f"{step.name} ({step.source})",
        str(where) if where else jax.default_backend(),
        audit.mesh if audit else compiled.mesh if compiled else mesh_sizes(step.jaxpr, args),
        tuple(leaves_of(step)),
        census_of(step.jaxpr),
        audit.findings if audit else tuple(findings_of(replace(traced, large=LARGE), ignore)),
        audit,
        compiled,
    )
    chip = device_of(where) if where else cost.chip_of(jax.devices()[0].device_kind)
    work = compiled.compute if compiled else total_work(program.module) if program else NO_WORK
    return Facts(found, mesh_of(args), plan, chip, work, args[0] if plan else None, getattr(fn, "schedule", None))


def arrays_of(step: TracedStep) -> dict[tuple[str, str], Any]:
    """Every array among the arguments of a step, by its argument and its path there; an argument itself by its name."""
    out = {}
    for (position, *inner), leaf in jax.tree_util.tree_leaves_with_path(step.args):
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            argument = step.parameters[position.idx]
            out[argument, path_name(inner) if inner else argument] = leaf
    return out


def leaves_of(step: TracedStep) -> list[ArgumentLeaf]:
    """Every array among the arguments of a step, as texts."""
    out = []
    for (argument, name), leaf in arrays_of(step).items():
        shape, dtype, spec, local, devices = held_as(leaf)
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
            spec, local, devices = "the compiler's choice", "?", "?"
        out.append(ArgumentLeaf(argument, name, shape, dtype, spec, local, devices, shard_bytes(leaf)))
    return out


def mesh_of(args: Any) -> Mesh | None:
    """The mesh with devices over which the arguments are laid out."""
    for leaf in jax.tree.leaves(args):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None


def plan_of(fn: Any, args: tuple[Any, ...]) -> PlanTable | None:
    """The table of a train step's plan; None of any other step."""
    plan, params = getattr(fn, "plan", None), getattr(args[0], "params", None) if args else None
    if plan is None or params is None:
        return None
    table: PlanTable = plan.table(params, fn.mesh, fn.manual)
    return table
