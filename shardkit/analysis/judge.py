"""The judge: deadlocks, wrong numbers and waste, found in a trace; and what the compiled step holds and sends."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import jax

from shardkit._arguments.checks import at_least, format_count, format_sizes, quote
from shardkit._arguments.typed import typed
from shardkit.analysis.compiled_rules import COMPILED_RULES
from shardkit.analysis.compiled_rules.program import CompiledProgram, compiled_program
from shardkit.analysis.compiled_rules.second_call import second_call, why_not_called
from shardkit.analysis.hlo import aot
from shardkit.analysis.hlo.collectives import CompiledRow
from shardkit.analysis.hlo.differences import Compiled
from shardkit.analysis.hlo.memory import Memory
from shardkit.analysis.hlo.report import format_bytes, format_versions, plain_row, read_row
from shardkit.analysis.hlo.topology import parse_topology, tracing_for
from shardkit.analysis.jaxpr.census import Census, CensusRow, mesh_sizes, select_rows
from shardkit.analysis.jaxpr.step import trace_step
from shardkit.analysis.rules import TRACE_RULES, Finding
from shardkit.analysis.rules.program import TracedProgram, in_one_sentence
from shardkit.analysis.rules.rule import findings

RULES = TRACE_RULES | COMPILED_RULES
"""The rules of `lint` and `audit`, by name."""

FORMAT = 1
LARGE = 256 * 2**20  # of an input of a shard_map
LARGE_LEAF = 16 * 2**20  # of a leaf, per device
SMALL = 1024
GROWTH = 0.05


class OtherFormatError(ValueError):
    """A snapshot that another version wrote."""


@dataclass(frozen=True)
class Audit:
    """The result of `audit`: memory, collectives and findings. `print` it, or read its fields.

    Attributes:
        step: the step's name, and the line at which it is defined.
        target: the chips for which it was compiled; the platform of this process, as "cpu", without a target; "" if it
            was only traced.
        mesh: names and sizes of the mesh axes.
        devices: devices that run it.
        memory: bytes per device: `.held`, `.temp`, `.peak`; None if it was only traced.
        census: every collective as written, inside shard_map.
        rows: every collective as compiled; none if it was only traced.
        findings: broken rules, each with the line of your code that causes it.
        skipped: rules that could not run, each with the reason.
        versions: of jax and the compiler.
    """

    step: str
    target: str
    mesh: dict[str, int]
    devices: int
    memory: Memory | None
    census: Census
    rows: tuple[CompiledRow, ...]
    findings: tuple[Finding, ...]
    skipped: tuple[str, ...]
    versions: dict[str, str]

    def sent(self, *, axis: str | None = None, kind: str | None = None) -> Fraction:
        """Bytes sent per device and call: as compiled, or as written if it was only traced."""
        rows = select_rows(self._sending_rows(), axis, kind)
        return sum((row.total for row in rows), Fraction(0))

    def to_json(self) -> str:
        """Everything in the audit; `from_json` reads it back."""
        data = asdict(self)
        data["format"] = FORMAT
        data["findings"] = [finding._asdict() for finding in self.findings]
        data["rows"] = [plain_row(row) for row in self.rows]
        data["census"] = [plain_row(row) for row in self.census.rows]
        # For readers of the file: `from_json` leaves these figures out.
        derived: dict[str, float] = {}
        if self.memory:
            derived["held"] = self.memory.held
            derived["temp"] = self.memory.temp
        derived["sent"] = float(self.sent())
        data["derived"] = derived
        return json.dumps(data, indent=1)

    @staticmethod
    def from_json(text: str) -> Audit:
        """The audit that `to_json` wrote.

        Raises:
            OtherFormatError: a ValueError; another version wrote it.
        """
        data: dict[str, Any] = json.loads(text)
        # These figures are computed again from the others.
        data.pop("derived")
        version = data.pop("format")
        if version != FORMAT:
            raise OtherFormatError(
                f"audit: the snapshot must have format {FORMAT}; got {version}. Write it again with this version."
            )
        if data["memory"] is not None:
            data["memory"] = Memory(**data["memory"])
        census_rows = tuple(CensusRow(**read_row(row)) for row in data["census"])
        data["census"] = Census(census_rows)
        data["rows"] = tuple(CompiledRow(**read_row(row)) for row in data["rows"])
        data["findings"] = tuple(Finding(**finding) for finding in data["findings"])
        data["skipped"] = tuple(data["skipped"])
        return Audit(**data)

    def compare(self, before: Audit, growth: float = GROWTH) -> list[str]:
        """What is worse than before, one line each: new findings, and bytes that grew by more than a share `growth`.

        Growth by less than 1 KiB is left out. A finding is the same if its rule, file and function are: lines move.

        Raises:
            ValueError: the two are of other chips or another mesh, one is compiled and one is not, or `growth` is
                negative.
        """
        at_least("audit", 0, growth=growth)
        if self._devices() != before._devices():
            raise ValueError(
                f"audit: the snapshot must be of the same devices; it has {before._devices()}, and this run "
                f"{self._devices()}. Write a snapshot for each."
            )
        lines = []
        # Counted, because one function may have the same finding twice: a third one is new.
        remaining = Counter(_identify(finding) for finding in before.findings)
        for finding in self.findings:
            identity = _identify(finding)
            if remaining[identity] == 0:
                lines.append(f"new: {finding}")
            else:
                remaining[identity] -= 1
        old_sizes = before._sizes()
        for name, new in self._sizes().items():
            old = old_sizes.get(name, Fraction(0))
            # Of a collective that was not there before, old is 0, and any share of it is exceeded.
            if new > old * (1 + growth) and new - old >= SMALL:
                lines.append(f"{name}: {format_bytes(old)} before, {format_bytes(new)} now")
        return lines

    def _devices(self) -> str:
        """The devices and the mesh, in words."""
        return f"{_describe_devices(self.devices, self.target)}, {format_sizes(self.mesh.items())}"

    def _sending_rows(self) -> tuple[CensusRow | CompiledRow, ...]:
        """The collectives as compiled, or as written if it was only traced."""
        if self.memory is None:
            return self.census.rows
        return self.rows

    def _sizes(self) -> dict[str, Fraction]:
        """Bytes per device, by what they are for."""
        sizes: dict[str, Fraction] = {}
        if self.memory:
            sizes["held"] = Fraction(self.memory.held)
            sizes["temp"] = Fraction(self.memory.temp)
        for row in self._sending_rows():
            name = f"sent by {row.kind} over {quote(row.axes)}"
            sizes[name] = sizes.get(name, Fraction(0)) + row.total
        return sizes

    def __str__(self) -> str:
        lines = [
            f"{self.step} on {_describe_devices(self.devices, self.target)} ({format_versions(self.versions)})",
            f"mesh: {format_sizes(self.mesh.items())}",
        ]
        if self.memory:
            lines.append(f"held: {format_bytes(self.memory.held)} per device")
            lines.append(f"temp: {format_bytes(self.memory.temp)} per device")
        lines.append(f"as written:\n{self.census}")
        if self.memory:
            lines.append(f"as compiled:\n{Compiled(self.census, self.rows, self.memory)}")
        if self.findings:
            lines.append(format_count(len(self.findings), "finding"))
        else:
            lines.append("no findings")
        for finding in self.findings:
            lines.append(str(finding))
        for reason in self.skipped:
            lines.append(f"not tried: {reason}")
        return "\n".join(lines)


def _describe_devices(devices: int, target: str) -> str:
    text = format_count(devices, "device")
    if not target:
        return f"{text} as traced"
    return f"{text} of {target}"


def _identify(finding: Finding) -> tuple[str, str]:
    """The parts of a finding that stay when lines move: its rule, file and function."""
    return finding.rule, re.sub(r":\d+", "", finding.source)


@typed
def lint(
    fn: Callable[..., Any],
    *args: Any,
    large: int = LARGE,
    small: int = SMALL,
    memory: int | None = None,
    ignore: Collection[str] = (),
    **kwargs: Any,
) -> list[Finding]:
    """Traces one call of `fn`, and finds communication that deadlocks, gives wrong numbers or is wasted.

    Nothing runs, and you need no device: an AbstractMesh of any size is enough. It traces the function twice, the
    second time as another process would. If you pass a traced program (`jax.jit(fn).trace(...)`), it cannot compare it
    with another process. `RULES` lists the rules; `lint` applies the rules on a trace.

    It does not find mistakes that only run-time values show, nor those in Pallas kernels but for the orders of remote
    copies, in the compiler's own collectives and in mutable references (`jax.new_ref`). If a draw is the same in every
    iteration, jax moves it out of a scan under differentiation. So if one key may serve all layers, lint the loss too.

    Args:
        fn: any function jax can trace, such as a step or a loss; or the result of its `.trace`, without arguments.
        *args: its arguments; `jax.ShapeDtypeStruct` is enough.
        large: bytes from which a replicated input is a finding (`large-replicated`).
        small: bytes below which a message costs only its latency: smaller waste is not a finding, and smaller pieces
            are `tiny-shards`.
        memory: bytes one device can hold, less the bytes of the activations. Tensor parallelism is a finding if
            its weights fit (`tensor-parallel-that-fits`). None: no such finding.
        ignore: names of rules to leave out.
        **kwargs: its keyword arguments. If one has the name of an option, bind it with `functools.partial`.

    Returns:
        The findings, in the order of the rules, or an empty list. `print` each one.

    Raises:
        ValueError: an unknown rule in `ignore`.

    Example:
        >>> swap = lambda x: jax.lax.ppermute(x, "model", [(0, 1), (1, 0)])
        >>> f = jax.shard_map(swap, mesh=mesh, in_specs=P("model"), out_specs=P("model"))
        >>> [finding] = sk.lint(f, jnp.ones(8))
        >>> finding.message
        "ppermute over 'model' of 4 devices names no source for 2, 3, which receive zeros."
    """
    at_least("lint", 0, large=large, small=small, memory=memory)
    check_rules("lint", ignore)
    return findings_of(TracedProgram(trace_step(fn, args, kwargs), large, small, memory), ignore)


@typed
def audit(
    step: Callable[..., Any],
    *args: Any,
    compiled: bool = False,
    target: str | None = None,
    large: int | None = None,
    small: int = SMALL,
    memory: int | None = None,
    ignore: Collection[str] = (),
    call: bool = True,
    timeout: float = 1800.0,
) -> Audit:
    """Reads one call of any function: its collectives with their lines, its mistakes, and its waste.

    You can pass any function that jax can trace, on any mesh: from `jax.jit` with NamedShardings, `nnx.jit`,
    `eqx.filter_jit` or `jax.pmap`, with or without shard_map inside. From the trace you get `census` and `lint`
    together. With `compiled=True` you also get the memory of the step, the collectives added by the compiler, and the
    rules on compiled programs. `RULES` lists the rules.

    Args:
        step: the function.
        *args: its positional arguments: arrays, or `jax.ShapeDtypeStruct` with shardings; bind keyword arguments with
            `functools.partial`.
        compiled: whether to compile it too, and to call it twice if its arguments have values.
        target: chips to compile for, such as "v5e:2x4" (see `aot.compile`); it implies `compiled`. None: the devices of
            this process.
        large: bytes from which an array that several devices hold whole is a finding. None: 256 MiB for an input of a
            shard_map (`large-replicated`); if compiled, 16 MiB per device for a leaf (`replicated-leaf`, in its place).
        small: bytes below which waste is not a finding.
        memory: as for `lint`.
        ignore: names of rules to leave out.
        call: whether to call a compiled step, on copies of its arguments, for the rule `second-compile`.
        timeout: time limit for the compiler of a target, seconds.

    Returns:
        Audit: collectives, findings and, compiled, memory; print it, `.to_json()`, `.compare(before)`.

    Raises:
        ValueError: an unknown rule in `ignore`; a step jax cannot trace, or compile, with these arguments.
        RuntimeError: the target's compiler is missing, or its chips have too little memory.

    Example:
        >>> w, x = (jax.device_put(jnp.ones((8, 8)), jax.NamedSharding(mesh, P(axis))) for axis in ("model", "data"))
        >>> found = sk.audit(jax.jit(lambda w, x: jnp.sum(x @ w)), w, x, compiled=True)
        >>> found.memory.held, found.findings
        (192, ())
    """
    at_least("audit", 0, large=large, small=small, memory=memory)
    check_rules("audit", ignore)
    if target is not None:
        compiled = True
    must_be = "traced"
    if compiled:
        must_be = "traced and compiled"
    if large is None:
        large = LARGE
        if compiled:
            large = LARGE_LEAF
    # A step may choose its collectives by the chip: trace it as it would be traced on the target.
    chips: AbstractContextManager[None] = nullcontext()
    if target is not None:
        chips = tracing_for(parse_topology(target))
    with chips, in_one_sentence("audit", must_be):
        traced = TracedProgram(trace_step(step, args), large, small, memory)
    if not compiled:
        return audit_of(traced, ignore, call)
    built = None
    if target is not None:
        built = aot.build(traced.step.traced, args, topology=target, timeout=timeout)
    return audit_of(compiled_program("audit", traced, built, target), ignore, call)


def check_rules(where: str, ignore: Collection[str]) -> None:
    """Refuses names that are no rules."""
    unknown = sorted(set(ignore) - RULES.keys())
    if unknown:
        raise ValueError(f"{where}: ignore must name rules, {quote(RULES)}; got {quote(unknown)}. Pass some of them.")


def findings_of(program: TracedProgram, ignore: Collection[str]) -> list[Finding]:
    """Applies the rules: to a compiled program first the ones that read it, then the ones that read a trace."""
    ignored = set(ignore)
    kinds = ["trace"]
    if isinstance(program, CompiledProgram):
        ignored.add("large-replicated")  # replicated-leaf covers it
        kinds = ["compiled", "trace"]
    rules = []
    for kind in kinds:
        for rule in RULES.values():  # a user may have added some
            if rule.reads == kind and rule.name not in ignored:
                rules.append(rule)
    return findings(rules, program)


def audit_of(program: TracedProgram, ignore: Collection[str], call: bool = True) -> Audit:
    """The audit of a program: every rule on it."""
    name = program.step.name
    if program.step.source:
        name = f"{name} ({program.step.source})"
    if not isinstance(program, CompiledProgram):
        mesh = mesh_sizes(program.step.jaxpr, program.step.args)
        return Audit(
            step=name,
            target="",
            mesh=mesh,
            devices=math.prod(mesh.values()),
            memory=None,
            census=program.census,
            rows=(),
            findings=tuple(findings_of(program, ignore)),
            skipped=(),
            versions={"jax": jax.__version__},
        )
    # This rule calls the step, so that it comes last and by itself: a step that raises must not take the others with
    # it.
    results = findings_of(program, {*ignore, "second-compile"})
    skipped: tuple[str, ...] = ()
    if "second-compile" not in ignore:
        second_findings, reason = _try_second_call(program, call)
        results += second_findings
        if reason:
            skipped = (f"second-compile: {reason}",)
    for i, finding in enumerate(results):
        if finding.rule == "pmap":  # it has no line of its own here: the step is its function
            results[i] = finding._replace(source=program.step.source)
    return Audit(
        step=name,
        target=program.target or jax.default_backend(),
        mesh=program.mesh,
        devices=program.devices,
        memory=program.memory,
        census=program.census,
        rows=program.rows,
        findings=tuple(results),
        skipped=skipped,
        versions=dict(program.versions),
    )


def _try_second_call(program: CompiledProgram, call: bool) -> tuple[list[Finding], str]:
    """The findings of the rule `second-compile`, and why it could not be tried ("" if it was)."""
    if not call:
        return [], "call is False"
    reason = why_not_called(program)
    if reason:
        return [], reason
    try:
        return list(second_call(program)), ""
    except Exception as error:
        return [], f"the step raises {type(error).__name__} when it is called"
