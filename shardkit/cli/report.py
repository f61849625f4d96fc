"""`shardkit report train.py:make --output step.html`: a step as one HTML page."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from shardkit._check import counted
from shardkit.analysis.hlo.report import size
from shardkit.analysis.hlo.topology import parse_topology
from shardkit.cli import target as targets
from shardkit.cli.output import Json, write_json
from shardkit.reporting import report as write
from shardkit.reporting.page import check_file
from shardkit.simulated import offer_cpu_devices

EXAMPLES = {
    "shardkit report train.py:make": "writes step.html",
    "shardkit report train.py:make --target v5e:2x4 --output v5e.html": "compiled for other chips",
}


@dataclass(frozen=True)
class Options:
    """Options of `shardkit report`."""

    make: targets.Target
    """A function that returns (step, args), the jitted step and a tuple of its arguments; with --args, the step."""
    output: Path = Path("step.html")
    """The .html file to write."""
    args: tuple[str, ...] = ()
    """Types of the step's arguments, such as 'f32[8,128]', 'bf16[4]', 'i32[]' or 'key'."""
    target: str | None = None
    """Chips to compile for, as 'v5e:2x4'; without it, the devices of this process."""
    devices: int = 8
    """CPU devices to simulate without an accelerator."""
    ignore: tuple[str, ...] = ()
    """Rules to skip."""
    timeout: float = 1800.0
    """Seconds after which the compiler of a target is stopped."""
    json: Json = None
    """Write the results to this file, or with - to standard output."""


def report(options: Annotated[Options, tyro.conf.arg(name="")]) -> int:
    """Write one HTML page on a step, to read or to mail: mesh, layout, collectives, findings, memory and cost.

    The exit code is 0, whatever the page says of the step.
    """
    check_file(options.output)
    if options.target is not None:
        parse_topology(options.target)
    offer_cpu_devices(options.devices)
    step, args = targets.step_of("report", options.make, options.args)
    command = shlex.join(["shardkit", *sys.argv[1:]])
    o = options
    page = write(step, *args, target=o.target, file=o.output, command=command, ignore=o.ignore, timeout=o.timeout)
    said = f"{counted(page.census.count(), 'collective')} a step, {counted(len(page.findings), 'finding')}"
    print(f"wrote {o.output}, {size(len(page.html.encode()))}: {page.step} on {page.target}, {said}")
    findings = [each._asdict() for each in page.findings]
    write_json(o.json, "report", findings, file=o.output, step=page.step, target=page.target)
    return 0
