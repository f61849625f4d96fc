"""`shardkit audit module:make`: what a jitted step holds, sends and wastes, and what of that is new."""

from __future__ import annotations

import json as json_lib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from shardkit import viz
from shardkit.analysis.auditing.audit import GROWTH, LARGE, Audit
from shardkit.analysis.auditing.audit import audit as read
from shardkit.analysis.hlo.differences import Compiled
from shardkit.analysis.hlo.topology import parse_topology
from shardkit.analysis.jaxpr.lint import SMALL
from shardkit.cli import target as targets
from shardkit.cli.output import Json, write_json
from shardkit.cli.pictures import check_picture
from shardkit.simulated import offer_cpu_devices

EXAMPLES = {
    "shardkit audit train.py:make": "make() returns (step, args)",
    "shardkit audit train.py:make --snapshot kept.json": "keep what it finds",
    "shardkit audit train.py:make --against kept.json": "exit code 1 if it became worse",
}


@dataclass(frozen=True)
class Options:
    """Options of `shardkit audit`."""

    make: targets.Target
    """A function that returns (step, args), the jitted step and a tuple of its arguments; with --args, the step."""
    args: tuple[str, ...] = ()
    """Types of the step's arguments, such as 'f32[8,128]', 'bf16[4]', 'i32[]' or 'key'."""
    target: str | None = None
    """Chips to compile for, as 'v5e:2x4'; without it, the devices of this process."""
    devices: int = 8
    """CPU devices to simulate without an accelerator."""
    json: Json = None
    """Write the results to this file, or with - to standard output."""
    output: Path | None = None
    """Write the picture of what goes over each axis to this .png or .svg file; needs the extra [viz]."""
    snapshot: Path | None = None
    """Write the audit to this file, for a later --against."""
    against: Path | None = None
    """A file that --snapshot wrote before: report what is worse."""
    growth: float = GROWTH
    """Share by which bytes may grow against the snapshot."""
    ignore: tuple[str, ...] = ()
    """Rules to skip."""
    large: int = LARGE
    """Bytes per device from which a leaf that several devices hold is reported."""
    small: int = SMALL
    """Bytes below which waste is not reported."""
    call: bool = True
    """By default the step is called twice, if its arguments have values, to see whether it compiles again; --no-call
    leaves that out."""
    timeout: float = 1800.0
    """Seconds after which the compiler of a target is stopped."""


def audit(options: Annotated[Options, tyro.conf.arg(name="")]) -> int:
    """Read any jitted step: memory, collectives with their lines, and what is wasted.

    The exit code is 0; with --against it is 1 if there are new findings or bytes grew.
    """
    if options.target is not None:
        parse_topology(options.target)
    check_picture("audit", options.output)
    before = _read(options.against) if options.against else None
    offer_cpu_devices(options.devices)
    step, args = targets.step_of("audit", options.make, options.args)
    found = read(
        step,
        *args,
        target=options.target,
        large=options.large,
        small=options.small,
        ignore=options.ignore,
        call=options.call,
        timeout=options.timeout,
    )
    print(found)
    worse = found.compare(before, options.growth) if before else []
    if before:
        print(f"against {options.against}: {len(worse) or 'nothing'} worse", *worse, sep="\n")
    if options.output:
        as_compiled = Compiled(found.census, found.rows, found.memory)
        viz.census({"as written": found.census, "as compiled": as_compiled}, output=options.output)
    if options.snapshot:
        options.snapshot.parent.mkdir(parents=True, exist_ok=True)
        options.snapshot.write_text(found.to_json())
    data = json_lib.loads(found.to_json())
    write_json(options.json, "audit", data["findings"], audit=data, worse=list(map(str, worse)))
    return 1 if worse else 0


def _read(file: Path) -> Audit:
    try:
        return Audit.from_json(file.read_text())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if str(error).startswith("audit: "):
            raise
        raise ValueError(
            f"audit: {file} must be a file that --snapshot wrote; it cannot be read ({type(error).__name__}). Check "
            "the path."
        ) from error
