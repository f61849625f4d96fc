"""`shardkit report train.py:make --output step.html`: a step as one HTML page."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from shardkit._arguments.checks import counted
from shardkit.analysis.hlo.report import size
from shardkit.cli.output import write_json
from shardkit.cli.target import StepOptions, step_of
from shardkit.reporting import report as write
from shardkit.reporting.page import check_file

EXAMPLES = {
    "shardkit report train.py:make": "writes step.html",
    "shardkit report train.py:make --target v5e:2x4 --output v5e.html": "compiled for other chips",
}


@dataclass(frozen=True)
class Options(StepOptions):
    """Options of `shardkit report`."""

    output: Path = Path("step.html")
    """The .html file to write."""


def report(options: Annotated[Options, tyro.conf.arg(name="")]) -> int:
    """Write one HTML page on a step, to read or to mail: mesh, layout, collectives, findings, memory and cost.

    The exit code is 0, whatever the page says of the step.
    """
    check_file(options.output)
    step, args = step_of("report", options)
    command = shlex.join(["shardkit", *sys.argv[1:]])
    o = options
    page = write(step, *args, target=o.target, file=o.output, command=command, ignore=o.ignore, timeout=o.timeout)
    said = f"{counted(page.census.count(), 'collective')} a step, {counted(len(page.findings), 'finding')}"
    print(f"wrote {o.output}, {size(len(page.html.encode()))}: {page.step} on {page.target}, {said}")
    findings = [each._asdict() for each in page.findings]
    write_json(o.json, "report", findings, file=o.output, step=page.step, target=page.target)
    return 0
