"""`sk.report`: a step, traced and compiled once, read by everything that reads steps, and written as one HTML page."""

from __future__ import annotations

import html
import os
import shlex
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from shardkit import viz
from shardkit._arguments.checks import at_least
from shardkit._arguments.files import FileError, open_file, why
from shardkit._arguments.typed import typed
from shardkit.analysis.compiled_rules.program import compiled_program
from shardkit.analysis.hlo import aot
from shardkit.analysis.hlo.report import Report
from shardkit.analysis.hlo.topology import parse_topology
from shardkit.analysis.jaxpr.census import Census, census_of, mesh_sizes
from shardkit.analysis.jaxpr.step import TracedStep, trace_step
from shardkit.analysis.judge import LARGE, LARGE_LEAF, SMALL, Audit, audit_of, check_rules, findings_of
from shardkit.analysis.rules import Finding
from shardkit.analysis.rules.program import TracedProgram, in_one_sentence
from shardkit.bench.environment import environment
from shardkit.meshes.inspection import describe
from shardkit.meshes.layout import by_path, table

# As light or dark as the reader's system is; tables scroll inside their box, and break their lines on paper.
_STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; padding: 1.25rem 1rem 3rem; max-width: 90rem; font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; overflow-wrap: anywhere; } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
pre { margin: 0; padding: .75rem; overflow-x: auto; border: 1px solid; border-radius: .4rem; font-size: .8125rem; }
@media print { body { max-width: none; padding: 0; } pre { white-space: pre-wrap; font-size: 7.5pt; } }
"""
# Neither scripts, nor anything that is not in the page itself.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
# What a reader needs of the environment, and its name on the page.
_ABOUT = {
    "date": "date",
    "shardkit": "shardkit",
    "git_commit": "commit",
    "jax": "jax",
    "jaxlib": "jaxlib",
    "python": "python",
    "cpu_model": "processor of this machine",
    "device_kind": "device of this process",
    "device_count": "devices of this process",
    "processes": "processes",
    "XLA_FLAGS": "XLA_FLAGS",
    "LIBTPU_INIT_ARGS": "LIBTPU_INIT_ARGS",
}


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
    found: dict[str, list[Any]] = {}
    for (position, *inner), leaf in jax.tree_util.tree_leaves_with_path(step.args):
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            argument = step.parameters[position.idx]
            found.setdefault(argument, []).append((inner or [jax.tree_util.DictKey(argument)], leaf))
    return {argument: by_path(f"report: {argument}", leaves) for argument, leaves in found.items()}


def plan_of(fn: Any, args: tuple[Any, ...]) -> str:
    """What `describe` prints of a train step's plan; nothing of any other step."""
    plan, params = getattr(fn, "plan", None), getattr(args[0], "params", None) if args else None
    return "" if plan is None or params is None else describe(plan, params, fn.mesh, manual=fn.manual)


@typed
def report(
    step: Callable[..., Any],
    *args: Any,
    target: str | None = None,
    file: str | os.PathLike[str] | None = "step.html",
    command: str | None = None,
    large: int = LARGE_LEAF,
    small: int = SMALL,
    ignore: Collection[str] = (),
    call: bool = False,
    timeout: float = 1800.0,
) -> StepReport:
    """Writes what one call of a jitted step holds, sends and wastes as one HTML page that can be mailed.

    The page has what `describe` prints of the plan and the arguments, `audit` of the step and `aot.compile` of the
    target: layouts, every collective as written and as compiled, findings and memory; with versions, date and command.
    It needs no other file and no script, follows the reader's light or dark theme, and can be printed.

    Args:
        step: the step: a train step, or any jitted function.
        *args: its positional arguments: arrays, or `jax.ShapeDtypeStruct` with shardings.
        target: chips to compile for, as "v5e:2x4" (see `aot.compile`), which has times too; None: the devices of this
            process.
        file: the .html file to write, whose missing directories are created; None writes none.
        command: the command that the page says it was made by; None: that of this process; "" leaves it out, as where
            its words are not for the page's readers.
        large: bytes per device from which a leaf that several devices hold is reported.
        small: bytes below which waste is not reported.
        ignore: names of rules to leave out.
        call: whether to call the step, on copies of its arguments, for the rule `second-compile`.
        timeout: time limit for the compiler of a target, seconds.

    Returns:
        StepReport: what was read, and the page as `.html`, which notebooks show. A program that does not fit the memory
        of the target gives a page that says so.

    Raises:
        ValueError: a file that does not end in .html or cannot be written, a name in `ignore` that is not a rule, a
            step that cannot be traced and compiled with these arguments.
        RuntimeError: the target's compiler is missing.

    Example:
        >>> w, x = (jax.device_put(jnp.ones((8, 8)), jax.NamedSharding(mesh, P(axis))) for axis in ("model", "data"))
        >>> page = sk.report(jax.jit(lambda w, x: jnp.sum(x @ w)), w, x, file=None)
        >>> len(page.findings), "<script" in page.html
        (0, False)
    """
    at_least("report", 0, large=large, small=small)
    path = None if file is None else check_file(Path(file))
    found, texts = read(step, args, target, ignore, large, small, call, timeout)
    html = page_of(found, texts, shlex.join(sys.orig_argv) if command is None else command)
    if path:
        write(path, html)
    return replace(found, file=path, html=html)


def page_of(found: StepReport, read: Mapping[str, str], command: str) -> str:
    """The page: what was read, and how it was made."""
    here = environment()
    about = [(name, str(here[key])) for key, name in _ABOUT.items() if here[key] not in (None, "")]
    if found.audit and found.compiled:
        about += [(f"compiler's {name}", text.splitlines()[0]) for name, text in found.audit.versions.items()]
    made = {"Command": command} if command else {}
    return document(f"{found.step} on {found.target}", {**read, **made, "Versions and machine": table(about)})


def check_file(file: Path) -> Path:
    """The path of a page, whose directory is made; refuses early what cannot be written, for compilers take minutes."""
    if file.suffix.lower() != ".html":
        raise ValueError(f"report: file must end in .html; got {file.name!r}. Pass for example 'step.html'.")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir():
            raise FileError(file, "a directory")
    except OSError as error:
        raise _unwritable(file, error) from error
    return file


def write(file: Path, html: str) -> None:
    """Writes the page."""
    try:
        with open(file, "w", encoding="utf-8", opener=open_file) as out:
            out.write(html)
    except OSError as error:
        raise _unwritable(file, error) from error


def _unwritable(file: Path, error: OSError) -> ValueError:
    return ValueError(
        f"report: file must be one that can be written; {str(file)!r} cannot ({why(error)}). Pass another path."
    )


def escaped(value: object) -> str:
    """A value as text of a page. Control characters and lone surrogates, which a page cannot hold, are replaced."""
    text = "".join(c if c in "\n\t" or (c >= " " and not _forbidden(ord(c))) else "\ufffd" for c in str(value))
    return html.escape(text)


def _forbidden(code: int) -> bool:
    return 0x7F <= code <= 0x9F or 0xD800 <= code <= 0xDFFF or code & 0xFFFE == 0xFFFE or 0xFDD0 <= code <= 0xFDEF


def document(title: str, parts: Mapping[str, str]) -> str:
    """A whole page: its title, and each text below its heading, whose lines are kept."""
    body = "".join(
        f"<h2>{escaped(name)}</h2>\n"
        f'<pre tabindex="0" role="region" aria-label="{escaped(name)}">{escaped(text)}</pre>\n'
        for name, text in parts.items()
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><main><h1>{escaped(title)}</h1>\n{body}</main></body></html>\n"
    )
