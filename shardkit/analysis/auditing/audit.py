"""The audit: what a jitted step holds, sends and wastes, whoever built it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import jax

from shardkit._check import at_least, counted, quoted, sized
from shardkit._typed import typed
from shardkit.analysis.auditing.program import Program, program_of
from shardkit.analysis.auditing.rules import AUDIT_RULES
from shardkit.analysis.auditing.rules.second_call import second_call, why_not_called
from shardkit.analysis.auditing.step import trace_step
from shardkit.analysis.hlo.collectives import CompiledRow
from shardkit.analysis.hlo.differences import Compiled
from shardkit.analysis.hlo.memory import Memory
from shardkit.analysis.hlo.report import plain_row, read_row, size
from shardkit.analysis.jaxpr.census import Census, Row
from shardkit.analysis.jaxpr.lint import SMALL, lint
from shardkit.analysis.jaxpr.rules import RULES, Finding

FORMAT = 1
LARGE = 16 * 2**20
GROWTH = 0.05


@dataclass(frozen=True)
class Audit:
    """What one call of a step holds, sends and wastes; `print` it, or read its fields.

    Attributes:
        step: the step's name, and the line at which it is defined.
        target: the chips for which it was compiled; the platform of this process, as "cpu", without a target.
        mesh: names and sizes of the mesh axes.
        devices: devices that run it.
        memory: bytes per device: `.held`, `.temp`, `.peak`.
        census: every collective as written, inside shard_map.
        rows: every collective as compiled.
        findings: what breaks a rule, with the line of the user's own code that causes it.
        skipped: rules that could not be tried, each with the reason.
        versions: of jax and the compiler.
    """

    step: str
    target: str
    mesh: dict[str, int]
    devices: int
    memory: Memory
    census: Census
    rows: tuple[CompiledRow, ...]
    findings: tuple[Finding, ...]
    skipped: tuple[str, ...]
    versions: dict[str, str]

    def sent(self, *, axis: str | None = None, kind: str | None = None) -> Fraction:
        """Bytes sent per device and call, as compiled."""
        rows = (r for r in self.rows if axis in (None, *r.axes) and kind in (None, r.kind))
        return sum((r.total for r in rows), Fraction(0))

    def to_json(self) -> str:
        """Everything in the audit; `from_json` reads it back."""
        data = asdict(self) | {"format": FORMAT, "findings": [each._asdict() for each in self.findings]}
        data |= {"rows": [plain_row(r) for r in self.rows], "census": [plain_row(r) for r in self.census.rows]}
        derived = {"held": self.memory.held, "temp": self.memory.temp, "sent": float(self.sent())}
        return json.dumps(data | {"derived": derived}, indent=1)

    @staticmethod
    def from_json(text: str) -> Audit:
        """The audit that `to_json` wrote.

        Raises:
            ValueError: it has another format.
        """
        data: dict[str, Any] = json.loads(text)
        data.pop("derived")
        if (found := data.pop("format")) != FORMAT:
            raise ValueError(
                f"audit: the snapshot must have format {FORMAT}; got {found}. Write it again with this version."
            )
        data["memory"] = Memory(**data["memory"])
        data["census"] = Census(tuple(Row(**read_row(r)) for r in data["census"]))
        data["rows"] = tuple(CompiledRow(**read_row(r)) for r in data["rows"])
        data["findings"] = tuple(Finding(**f) for f in data["findings"])
        return Audit(**data | {"skipped": tuple(data["skipped"])})

    def compare(self, before: Audit, growth: float = GROWTH) -> list[str]:
        """What is worse than before, one line each: new findings, and bytes that grew by more than a share `growth`.

        A finding is the same if its rule, file and function are: lines move.

        Raises:
            ValueError: the two are of other chips or another mesh, or `growth` is negative.
        """
        at_least("audit", 0, growth=growth)
        mine, theirs = ((a.target, sized(a.mesh.items()), a.devices) for a in (self, before))
        if mine != theirs:
            named = (f"{counted(devices, 'device')} of {target}, {mesh}" for target, mesh, devices in (theirs, mine))
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

    def _bytes(self) -> dict[str, Fraction]:
        out = {"held": Fraction(self.memory.held), "temp": Fraction(self.memory.temp)}
        for row in self.rows:
            name = f"sent by {row.kind} over {quoted(row.axes)}"
            out[name] = out.get(name, Fraction(0)) + row.total
        return out

    def __str__(self) -> str:
        versions = ", ".join(f"{k} {v.splitlines()[0]}" for k, v in self.versions.items())
        lines = [
            f"{self.step} on {counted(self.devices, 'device')} of {self.target} ({versions})",
            f"mesh: {sized(self.mesh.items())}",
            f"held: {size(self.memory.held)} per device",
            f"temp: {size(self.memory.temp)} per device",
            f"as written:\n{self.census}",
            f"as compiled:\n{Compiled(self.census, self.rows, self.memory)}",
            counted(len(self.findings), "finding") if self.findings else "no findings",
            *map(str, self.findings),
            *(f"not tried: {each}" for each in self.skipped),
        ]
        return "\n".join(lines)


def _place(finding: Finding) -> tuple[str, str]:
    return finding.rule, re.sub(r":\d+", "", finding.source)


@typed
def audit(
    step: Callable[..., Any],
    *args: Any,
    target: str | None = None,
    large: int = LARGE,
    small: int = SMALL,
    ignore: Collection[str] = (),
    call: bool = True,
    timeout: float = 1800.0,
) -> Audit:
    """Reads one call of a jitted step that anything built: what it holds, what it sends and why, and what it wastes.

    The step is traced and compiled, and called twice where its arguments have values. It may come from `jax.jit` with
    NamedShardings, `nnx.jit`, `eqx.filter_jit` or `jax.pmap`, with or without shard_map inside. `AUDIT_RULES` lists
    the rules; those of `lint` are applied too, except for `large-replicated`, which `replicated-leaf` covers.

    Args:
        step: the jitted function.
        *args: its positional arguments: arrays, or `jax.ShapeDtypeStruct` with shardings; bind keyword arguments with
            `functools.partial`.
        target: chips to compile for, as "v5e:2x4" (see `aot.compile`); None: the devices of this process.
        large: bytes per device from which a leaf that several devices hold is reported.
        small: bytes below which waste is not reported.
        ignore: names of rules to leave out.
        call: whether to call the step, on copies of its arguments, for the rule `second-compile`.
        timeout: time limit for the compiler of a target, seconds.

    Returns:
        Audit: memory, collectives, findings; print it, `.to_json()`, `.compare(before)`.

    Raises:
        ValueError: a name in `ignore` that is not a rule; a step that cannot be traced and lowered with these
            arguments.
        RuntimeError: the target's compiler is missing, or its chips have too little memory.

    Example:
        >>> w, x = (jax.device_put(jnp.ones((8, 8)), jax.NamedSharding(mesh, P(axis))) for axis in ("model", "data"))
        >>> found = sk.audit(jax.jit(lambda w, x: jnp.sum(x @ w)), w, x)
        >>> found.memory.held, found.findings
        (192, ())
    """
    at_least("audit", 0, large=large, small=small)
    check_rules("audit", ignore)
    try:
        program = program_of(trace_step(step, args), target, timeout, large, small)
    except Exception as error:
        if str(error).startswith(("audit: ", "aot")):
            raise
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"audit: the step must be traced and compiled with these arguments; it raises {type(error).__name__}: "
            f"{first} Check the arguments, and the mesh context that the step needs."
        ) from error
    return judged(program, ignore, call)


def check_rules(where: str, ignore: Collection[str]) -> None:
    """Refuses names that are no rules."""
    names = AUDIT_RULES | RULES
    unknown = sorted(set(ignore) - names.keys())
    if unknown:
        raise ValueError(f"{where}: ignore must name rules, {quoted(names)}; got {quoted(unknown)}. Correct ignore.")


def judged(program: Program, ignore: Collection[str], call: bool) -> Audit:
    """The audit of a program: every rule on it."""
    skipped = {"second-compile": "call is False" if not call else why_not_called(program)}
    left_out = {*ignore, *(rule for rule, why in skipped.items() if why)}
    found: list[Finding] = []
    for check in dict.fromkeys(rule.check for rule in AUDIT_RULES.values() if rule.name not in left_out):
        try:
            found += check(program)
        except Exception as error:
            if check is not second_call:
                raise
            skipped["second-compile"] = f"the step raises {type(error).__name__} when it is called"
    for each in lint(
        program.step.traced, small=program.small, ignore=(*RULES.keys() & set(ignore), "large-replicated")
    ):
        # pmap has no line of its own here: the step is its function.
        found.append(each._replace(source=program.step.source) if each.rule == "pmap" else each)
    return Audit(
        f"{program.step.name} ({program.step.source})",
        program.target or jax.default_backend(),
        program.mesh,
        program.devices,
        program.memory,
        program.census,
        program.rows,
        tuple(f for f in dict.fromkeys(found) if f.rule not in ignore),
        tuple(f"{rule}: {why}" for rule, why in skipped.items() if why and rule not in ignore),
        dict(program.versions),
    )
