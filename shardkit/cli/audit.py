"""`shardkit audit module:make`: a function's collectives, mistakes and waste, and the new ones among them."""

from __future__ import annotations

import json as json_lib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardkit._arguments.files import read_file, why
from shardkit.cli.options import Optional, Target, WithJson, Words
from shardkit.cli.output import open_output, write_json

if TYPE_CHECKING:
    from shardkit.analysis.judge import Audit

EXAMPLES = {
    "shardkit audit train.py:make": "make() returns your function and its arguments",
    "shardkit audit train.py:step --args 'f32[8,128]' key": "types in place of arguments",
    "shardkit audit train.py:make --explain": "also explain the backward pass",
    "shardkit audit train.py:make --compiled --snapshot kept.json": "compile it too, and keep the findings",
    "shardkit audit train.py:make --against kept.json": "exit code 1 if it became worse",
}

_LONGEST = 2.0  # seconds of one run of a proof
_POINTS = 3  # of a proof
_LARGEST_SNAPSHOT = 2**28  # bytes; a finding or a collective has some hundreds


@dataclass(frozen=True)
class Options(WithJson):
    """Options of `shardkit audit`."""

    make: Target
    """A function without parameters that returns (step, *args) or (step, args); with --args, the step itself."""
    args: Words = ()
    """Types of the step's arguments, such as 'f32[8,128]', 'bf16[4]', 'i32[]' or 'key'."""
    target: Optional[str] = None
    """Chips to compile for, such as 'v5e:2x4'; by default the devices of this process."""
    devices: int = 8
    """CPU devices to simulate without an accelerator."""
    ignore: Words = ()
    """Rules to skip."""
    timeout: float = 1800.0
    """Seconds to wait for the compiler of a --target."""
    compiled: bool = False
    """Compile it too: shows its memory and the compiler's collectives, applies the rules on compiled programs, and
    proves a small one equal to the traced one for all inputs. --target implies it, without the proof."""
    explain: bool = False
    """Name the forward line that causes each collective of the backward pass."""
    snapshot: Optional[Path] = None
    """Write the audit to this file. Compare with it later with --against."""
    against: Optional[Path] = None
    """A file from --snapshot: report everything that is worse than in it."""
    growth: float = 0.05
    """Share by which bytes may grow since the snapshot of --against."""
    large: Optional[int] = None
    """Report arrays of this many bytes that several devices hold whole; by default 256 MiB, and 16 MiB with
    --compiled."""
    small: int = 1024
    """Do not report waste below this many bytes."""
    memory: Optional[int] = None
    """Bytes that one device can hold, less activations. Reports tensor parallelism of weights that fit."""
    call: bool = True
    """Call a compiled step twice, if its arguments have values, to see whether it compiles again. Pass --no-call to
    leave this out."""


def audit(options: Options) -> int:
    """Read any function: its collectives with their lines, deadlocks, mistakes and waste; compiled, its memory too.

    The exit code is 1 if there are findings, or if the compiled program differs from the traced one; with --against, if
    there are new findings or bytes grew.
    """
    from shardkit.analysis import judge
    from shardkit.analysis.hlo.topology import parse_topology
    from shardkit.analysis.jaxpr.explain import explain
    from shardkit.cli.target import load_step
    from shardkit.meshes.simulated import offer_cpu_devices

    _refuse_without_effect(options)
    # Before the devices start and anything compiles: a mistake in the options is refused at once.
    before = None
    if options.against is not None:
        before = _read_snapshot(options.against)
    if options.target is not None:
        parse_topology(options.target)
    offer_cpu_devices(options.devices)
    step, args = load_step("audit", options.make, options.args)
    report = judge.audit(
        step,
        *args,
        compiled=options.compiled,
        target=options.target,
        large=options.large,
        small=options.small,
        memory=options.memory,
        ignore=options.ignore,
        call=options.call,
        timeout=options.timeout,
    )
    print(report)
    proof = CompiledVerdict("", ())
    if options.compiled and options.target is None:
        proof = _prove_compiled(step, args)
        print(*proof.lines, sep="\n  ")
    if options.explain:
        print(explain(step, *args))
    worse: list[str] = []
    failed = bool(report.findings)
    if before is not None:
        worse = report.compare(before, options.growth)
        failed = bool(worse)
        print(f"against {options.against}: {len(worse) or 'nothing'} worse", *worse, sep="\n")
    if options.snapshot is not None:
        with open_output(options.snapshot) as out:
            out.write(report.to_json())
    # As --snapshot writes it, so that both outputs have the same fields.
    data = json_lib.loads(report.to_json())
    write_json(options.json, "audit", data["findings"], audit=data, worse=worse, proof=proof._asdict())
    if failed or proof.verdict == "differs":
        return 1
    return 0


class CompiledVerdict(NamedTuple):
    """Whether a compiled program is the traced one.

    Attributes:
        verdict: "equal", "differs" or "not decided"; "" if it was not tried.
        lines: a line about it, and below it a line for each condition under which it holds.
    """

    verdict: str
    lines: tuple[str, ...]


def _prove_compiled(step: Any, args: Sequence[Any]) -> CompiledVerdict:
    """Proves that the optimized program is the traced one, if it is small enough, and each operation has a meaning."""
    import jax

    from shardkit.testing._compare import UnequalError
    from shardkit.testing.exact import assert_compiled_equal
    from shardkit.testing.exact.compiled import ASSUMED_AS_COMPILED
    from shardkit.testing.exact.compiled_pair import ReplicationError
    from shardkit.testing.exact.evidence import UnprovableError
    from shardkit.testing.exact.size import check_size

    function = step
    if not hasattr(step, "trace"):
        function = jax.jit(step)
    try:
        # Before anything is compiled for the proof: a step that is too large for one is told at once.
        check_size("audit", [function.trace(*args).jaxpr], _POINTS, draws=1, longest=_LONGEST)
        equality = assert_compiled_equal(function, *args, points=_POINTS)
    except ReplicationError as error:
        return CompiledVerdict("not decided", (f"the traced program is wrong itself, so nothing equals it: {error}",))
    except UnequalError as error:
        return CompiledVerdict("differs", (f"the compiled program is not the traced one: {error}",))
    except UnprovableError as error:
        return CompiledVerdict("not decided", (f"not proved equal to the traced program: {error}",))
    lines = [f"proved equal to the traced program for all inputs, {equality.points} points"]
    # What holds of this program alone: constants that were folded, rounding, branches that were never taken.
    lines += [sentence for sentence in equality.assumed if sentence not in ASSUMED_AS_COMPILED]
    lines += equality.compared
    return CompiledVerdict("equal", tuple(lines))


def _refuse_without_effect(options: Options) -> None:
    """Refuses options that change nothing without another, and two results in one place."""
    is_compiled = options.compiled or options.target is not None
    needs = (
        ("--growth", options.growth != Options.growth, options.against is not None, "--against FILE"),
        ("--timeout", options.timeout != Options.timeout, options.target is not None, "--target CHIPS"),
        ("--no-call", not options.call, is_compiled, "--compiled"),
    )
    for name, is_passed, has_effect, needed in needs:
        if is_passed and not has_effect:
            raise ValueError(f"audit: {name} must come with {needed}; got it alone. Leave it out, or add {needed}.")
    if str(options.snapshot) == str(options.json) == "-":
        raise ValueError(
            "audit: one of --snapshot and --json may be standard output; got - for both. Pass a file for one."
        )


def _read_snapshot(file: Path) -> Audit:
    from shardkit.analysis.judge import Audit, OtherFormatError

    try:
        return Audit.from_json(read_file(file, _LARGEST_SNAPSHOT).decode())
    # It is a ValueError too, and its own sentence says more than the one below.
    except OtherFormatError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"audit: {file} must be a file that --snapshot wrote; it cannot be read ({why(error)}). Check the path."
        ) from error
