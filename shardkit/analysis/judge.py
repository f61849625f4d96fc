"""The judge: deadlocks, wrong numbers and waste, found in a trace; and what the compiled step holds and sends."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import jax

from shardkit._arguments.checks import at_least, counted, quoted, sized
from shardkit._arguments.typed import typed
from shardkit.analysis.compiled_rules import COMPILED_RULES
from shardkit.analysis.compiled_rules.program import CompiledProgram, compiled_program
from shardkit.analysis.compiled_rules.second_call import second_call, why_not_called
from shardkit.analysis.hlo import aot
from shardkit.analysis.hlo.collectives import CompiledRow
from shardkit.analysis.hlo.differences import Compiled
from shardkit.analysis.hlo.memory import Memory
from shardkit.analysis.hlo.report import plain_row, read_row, size
from shardkit.analysis.jaxpr.census import Census, CensusRow, mesh_sizes
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
    """What one call of a step holds, sends and wastes; `print` it, or read its fields.

    Attributes:
        step: the step's name, and the line at which it is defined.
        target: the chips for which it was compiled; the platform of this process, as "cpu", without a target; "" if it
            was only traced.
        mesh: names and sizes of the mesh axes.
        devices: devices that run it.
        memory: bytes per device: `.held`, `.temp`, `.peak`; None if it was only traced.
        census: every collective as written, inside shard_map.
        rows: every collective as compiled; none if it was only traced.
        findings: what breaks a rule, with the line of the user's own code that causes it.
        skipped: rules that could not be tried, each with the reason.
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
        rows = (r for r in self._sent() if axis in (None, *r.axes) and kind in (None, r.kind))
        return sum((r.total for r in rows), Fraction(0))

    def to_json(self) -> str:
        """Everything in the audit; `from_json` reads it back."""
        data = asdict(self) | {"format": FORMAT, "findings": [each._asdict() for each in self.findings]}
        data |= {"rows": [plain_row(r) for r in self.rows], "census": [plain_row(r) for r in self.census.rows]}
        held = {"held": self.memory.held, "temp": self.memory.temp} if self.memory else {}
        derived = held | {"sent": float(self.sent())}
        return json.dumps(data | {"derived": derived}, indent=1)

    @staticmethod
    def from_json(text: str) -> Audit:
        """The audit that `to_json` wrote.

        Raises:
            OtherFormatError: a ValueError; another version wrote it.
        """
        data: dict[str, Any] = json.loads(text)
        data.pop("derived")
        if (found := data.pop("format")) != FORMAT:
            raise OtherFormatError(
                f"audit: the snapshot must have format {FORMAT}; got {found}. Write it again with this version."
            )
        data["memory"] = data["memory"] and Memory(**data["memory"])
        data["census"] = Census(tuple(CensusRow(**read_row(r)) for r in data["census"]))
        data["rows"] = tuple(CompiledRow(**read_row(r)) for r in data["rows"])
        data["findings"] = tuple(Finding(**f) for f in data["findings"])
        return Audit(**data | {"skipped": tuple(data["skipped"])})

    def compare(self, before: Audit, growth: float = GROWTH) -> list[str]:
        """What is worse than before, one line each: new findings, and bytes that grew by more than a share `growth`.

        A finding is the same if its rule, file and function are: lines move.

        Raises:
            ValueError: the two are of other chips or another mesh, one is compiled and one is not, or `growth` is
                negative.
        """
        at_least("audit", 0, growth=growth)
        mine, theirs = ((a.target, sized(a.mesh.items()), a.devices) for a in (self, before))
        if mine != theirs:
            named = (f"{_on(devices, target)}, {mesh}" for target, mesh, devices in (theirs, mine))
            raise ValueError(
                f"audit: the snapshot must be of the same devices; it has {next(named)}, and this run {next(named)}. "
                "Write a snapshot for each."
            )
        known = Counter(map(_place, before.findings))
        lines = []
        for each in self.findings:
            known[_place(each)] -= 1
            if known[_place(each)] < 0:
                lines.append(f"new: {each}")
        old = before._bytes()
        for name, count in self._bytes().items():
            if count > old.get(name, 0) * (1 + growth) and count - old.get(name, 0) >= SMALL:
                lines.append(f"{name}: {size(old.get(name, 0))} before, {size(count)} now")
        return lines

    def _sent(self) -> tuple[CensusRow | CompiledRow, ...]:
        return self.rows if self.memory else self.census.rows

    def _bytes(self) -> dict[str, Fraction]:
        out: dict[str, Fraction] = {}
        if self.memory:
            out = {"held": Fraction(self.memory.held), "temp": Fraction(self.memory.temp)}
        for row in self._sent():
            name = f"sent by {row.kind} over {quoted(row.axes)}"
            out[name] = out.get(name, Fraction(0)) + row.total
        return out

    def __str__(self) -> str:
        versions = ", ".join(f"{k} {v.splitlines()[0]}" for k, v in self.versions.items())
        lines = [f"{self.step} on {_on(self.devices, self.target)} ({versions})", f"mesh: {sized(self.mesh.items())}"]
        if self.memory:
            lines += [f"held: {size(self.memory.held)} per device", f"temp: {size(self.memory.temp)} per device"]
        lines.append(f"as written:\n{self.census}")
        if self.memory:
            lines.append(f"as compiled:\n{Compiled(self.census, self.rows, self.memory)}")
        lines.append(counted(len(self.findings), "finding") if self.findings else "no findings")
        lines += [*map(str, self.findings), *(f"not tried: {each}" for each in self.skipped)]
        return "\n".join(lines)


def _on(devices: int, target: str) -> str:
    return f"{counted(devices, 'device')} {f'of {target}' if target else 'as traced'}"


def _place(finding: Finding) -> tuple[str, str]:
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
    """Finds communication in one call of `fn` that deadlocks, gives wrong numbers or is wasted, by tracing it.

    Nothing runs and no device is needed; an AbstractMesh of any size is enough. The function is traced twice, the
    second time as another process would trace it; a traced program (`jax.jit(fn).trace(...)`) is not traced again and
    not compared with another process. `RULES` lists the rules; it applies those that read a trace, as `audit` does.

    Not found: mistakes that only run-time values show, and those in Pallas kernels, in collectives that the compiler
    adds and in mutable references (`jax.new_ref`). jax moves a draw that is the same in every iteration out of a scan
    that it differentiates: where one key may serve all layers, lint the loss too.

    Args:
        fn: any function that jax can trace, as a step or a loss; or the result of its `.trace`, without arguments.
        *args: its arguments; `jax.ShapeDtypeStruct` is enough.
        large: bytes from which a replicated input is reported (`large-replicated`).
        small: bytes below which a message costs only its latency: smaller waste is not reported, and smaller pieces are
            `tiny-shards`.
        memory: bytes that one device can hold, less those of the activations: tensor parallelism of what fits there is
            reported (`tensor-parallel-that-fits`). None reports none.
        ignore: names of rules to leave out.
        **kwargs: its keyword arguments; bind those named like an option with `functools.partial`.

    Returns:
        The findings, in the order of the rules; none if it is clean. `print` each.

    Raises:
        ValueError: a name in `ignore` that is not a rule.

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
    """Reads one call of a function that anything built: what it sends and why, what is wrong with it, what it wastes.

    As traced, it is what `census` and `lint` say together, of any function that jax can trace, on any mesh. Compiled,
    it is also what the step holds, what the compiler adds, and the rules that need to see it; it may come from
    `jax.jit` with NamedShardings, `nnx.jit`, `eqx.filter_jit` or `jax.pmap`, with or without shard_map inside. `RULES`
    lists the rules, each with what it reads.

    Args:
        step: the function.
        *args: its positional arguments: arrays, or `jax.ShapeDtypeStruct` with shardings; bind keyword arguments with
            `functools.partial`.
        compiled: whether to compile it too, and to call it twice where its arguments have values.
        target: chips to compile for, as "v5e:2x4" (see `aot.compile`), which implies `compiled`; None: the devices of
            this process.
        large: bytes from which what several devices hold whole is reported. None: 256 MiB of an input of a shard_map
            (`large-replicated`); compiled, 16 MiB per device of a leaf (`replicated-leaf`, which takes its place).
        small: bytes below which waste is not reported.
        memory: as for `lint`.
        ignore: names of rules to leave out.
        call: whether a compiled step is called, on copies of its arguments, for the rule `second-compile`.
        timeout: time limit for the compiler of a target, seconds.

    Returns:
        Audit: collectives, findings and, compiled, memory; print it, `.to_json()`, `.compare(before)`.

    Raises:
        ValueError: a name in `ignore` that is not a rule; a step that cannot be traced, and compiled, with these
            arguments.
        RuntimeError: the target's compiler is missing, or its chips have too little memory.

    Example:
        >>> w, x = (jax.device_put(jnp.ones((8, 8)), jax.NamedSharding(mesh, P(axis))) for axis in ("model", "data"))
        >>> found = sk.audit(jax.jit(lambda w, x: jnp.sum(x @ w)), w, x, compiled=True)
        >>> found.memory.held, found.findings
        (192, ())
    """
    at_least("audit", 0, large=large, small=small, memory=memory)
    check_rules("audit", ignore)
    compiled = compiled or target is not None
    if large is None:
        large = LARGE_LEAF if compiled else LARGE
    with in_one_sentence("audit", "traced and compiled" if compiled else "traced"):
        program = TracedProgram(trace_step(step, args), large, small, memory)
    built = None if target is None else aot.build(program.step.traced, args, topology=target, timeout=timeout)
    program = compiled_program("audit", program, built, target) if compiled else program
    return audit_of(program, ignore, call)


def check_rules(where: str, ignore: Collection[str]) -> None:
    """Refuses names that are no rules."""
    unknown = sorted(set(ignore) - RULES.keys())
    if unknown:
        raise ValueError(f"{where}: ignore must name rules, {quoted(RULES)}; got {quoted(unknown)}. Pass some of them.")


def findings_of(program: TracedProgram, ignore: Collection[str]) -> list[Finding]:
    """What breaks the rules: those on a compiled program, if it is one, then those on a trace."""
    left_out, reads = set(ignore), ["trace"]
    if isinstance(program, CompiledProgram):
        left_out, reads = left_out | {"large-replicated"}, ["compiled", "trace"]  # replicated-leaf covers it
    rules = [rule for each in reads for rule in RULES.values() if rule.reads == each and rule.name not in left_out]
    return findings(rules, program)


def audit_of(program: TracedProgram, ignore: Collection[str], call: bool = True) -> Audit:
    """The audit of a program: every rule on it."""
    name = f"{program.step.name} ({program.step.source})"
    if not isinstance(program, CompiledProgram):
        mesh, versions = mesh_sizes(program.step.jaxpr, program.step.args), {"jax": jax.__version__}
        findings, devices = tuple(findings_of(program, ignore)), math.prod(mesh.values())
        return Audit(name, "", mesh, devices, None, program.census, (), findings, (), versions)
    why = why_not_called(program) if call else "call is False"
    twice: list[Finding] = []
    if not why and "second-compile" not in ignore:
        try:
            twice = list(second_call(program))
        except Exception as error:
            why = f"the step raises {type(error).__name__} when it is called"
    found = [*findings_of(program, {*ignore, "second-compile"}), *twice]
    # pmap has no line of its own here: the step is its function.
    found = [each._replace(source=program.step.source) if each.rule == "pmap" else each for each in found]
    return Audit(
        name,
        program.target or jax.default_backend(),
        program.mesh,
        program.devices,
        program.memory,
        program.census,
        program.rows,
        tuple(found),
        (f"second-compile: {why}",) if why and "second-compile" not in ignore else (),
        dict(program.versions),
    )
