"""`shardkit aot module:function --topology v5p:8x8x8`: what the real compiler makes of a step for absent chips."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from shardkit.analysis.hlo.aot import compile
from shardkit.analysis.hlo.report import Report
from shardkit.analysis.hlo.topology import parse_topology
from shardkit.cli import target as targets
from shardkit.simulated import offer_cpu_devices


@dataclass(frozen=True)
class Options:
    """Compile a function for chips that are not there: memory, collectives, overlap, time by a stated model.

    Ends with exit code 1 if the program does not fit the chip's memory, 0 if it does.
    """

    target: tyro.conf.Positional[str]
    """MODULE:FUNCTION or FILE.py:FUNCTION. Without --args it takes no parameters and returns (fn, *args)."""
    topology: str
    """The chips: 'v5p:8x8x8' (a torus), 'h100:1x4x8' (slices x hosts x GPUs a host)."""
    args: tuple[str, ...] = ()
    """Types of the function's arguments: 'f32[8,128]', 'bf16[4]', 'i32[]', 'key'."""
    json: Path | None = None
    """Where to write the report."""
    against: Path | None = None
    """A report written before, to compare with."""
    timeout: float = 1800.0
    """Seconds the compiler is given."""
    devices: int = 8
    """CPU devices to simulate where there is no accelerator, for a function that makes a mesh of real devices."""


def aot(options: Annotated[Options, tyro.conf.arg(name="")]) -> int:
    """Compile for chips that are not there."""
    parse_topology(options.topology)
    before = _read(options.against) if options.against else None
    offer_cpu_devices(options.devices)
    fn, args = targets.load(options.target, options.args)
    report = compile(fn, args, topology=options.topology, timeout=options.timeout)
    print(report)
    if before:
        print(f"\nbeside {options.against}:\n{report.compare(before)}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(report.to_json())
    return 0 if report.fits else 1


def _read(file: Path) -> Report:
    try:
        return Report.from_json(file.read_text())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"aot: {file} is no report that can be read ({type(error).__name__}). Pass a file that --json wrote."
        ) from error
