"""What the page is written from: a step, traced and compiled once, read by everything that reads steps."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from shardkit import viz
from shardkit.analysis.hlo import aot
from shardkit.analysis.hlo.report import Report
from shardkit.analysis.hlo.topology import parse_topology
from shardkit.analysis.jaxpr.census import Census, census_of, mesh_sizes
from shardkit.analysis.jaxpr.step import TracedStep, trace_step
from shardkit.analysis.judge import LARGE, Audit, audit_of, check_rules, findings_of
from shardkit.analysis.rules import Finding
from shardkit.analysis.rules.program import TracedProgram, compiled_program, in_one_sentence
from shardkit.meshes.inspection import describe
from shardkit.meshes.layout import path_name
from shardkit.reporting.html import escaped


@dataclass(frozen=True)
class StepReport:
    """A step as `sk.report` read it; a notebook shows its page.

    Attributes:
        step: the step's name, and the line at which it is defined; of a train step, its plan.
        target: the chips for which it was compiled; the platform of this process, as "cpu", without a target.
        mesh: names and sizes of the mesh axes.
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
    census: Census
    findings: tuple[Finding, ...]
    audit: Audit | None
    compiled: Report | None
    file: Path | None = None
    html: str = ""

    def _repr_html_(self) -> str:
        style = "width:100%;height:40rem;border:0"
        return f'<iframe srcdoc="{escaped(self.html)}" title="{escaped(self.step)}" style="{style}"></iframe>'


def read(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    target: str | None,
    ignore: Collection[str],
    large: int,
    small: int,
    call: bool,
    timeout: float,
) -> tuple[StepReport, dict[str, str]]:
    """Traces and compiles one call, and reads it: what the caller gets, and the texts of the page by their headings.

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
        census_of(step.jaxpr),
        audit.findings if audit else tuple(findings_of(replace(traced, large=LARGE), ignore)),
        audit,
        compiled,
    )
    texts = {"Plan": plan} if plan else {}
    texts |= {f"Argument {name}": describe(leaves) for name, leaves in arrays_of(step).items()}
    if (schedule := getattr(fn, "schedule", None)) is not None:
        texts["Pipeline"] = f"{viz.title(schedule)}; {viz.facts(schedule.simulate())}\n{schedule}"
    audited = str(audit) if audit else "\n".join([str(found.census), *map(str, found.findings)])
    texts["What it sends, holds and wastes" if audit else "As written"] = audited
    return found, texts | ({f"Compiled for {where}": str(compiled)} if compiled else {})


def arrays_of(step: TracedStep) -> dict[str, dict[str, Any]]:
    """The arrays of each argument of a step, by their paths; of an argument that is an array, by its name."""
    out: dict[str, dict[str, Any]] = {}
    for (position, *inner), leaf in jax.tree_util.tree_leaves_with_path(step.args):
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            argument = step.parameters[position.idx]
            out.setdefault(argument, {})[path_name(inner) if inner else argument] = leaf
    return out


def plan_of(fn: Any, args: tuple[Any, ...]) -> str:
    """What `describe` prints of a train step's plan; nothing of any other step."""
    plan, params = getattr(fn, "plan", None), getattr(args[0], "params", None) if args else None
    return "" if plan is None or params is None else describe(plan, params, fn.mesh, manual=fn.manual)
