"""`shardkit bench plot FILE --output picture.svg`: results as a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from shardkit import bench, viz
from shardkit.cli.output import WithJson, write_json

EXAMPLES = {"shardkit bench plot comm.jsonl --output comm.svg": "bandwidth and latency"}


@dataclass(frozen=True)
class Options(WithJson):
    """Options of `shardkit bench plot`."""

    files: tyro.conf.Positional[tuple[Path, ...]]
    """Results, as --json wrote them."""
    output: Path
    """The .png or .svg file to write; needs the extra [viz]."""


def plot(options: Annotated[Options, tyro.conf.arg(name="")]) -> int:
    """Draw results: bandwidth, latency and achieved over expected of comm, ratios, schedules, and what grows."""
    records = [record for file in options.files for record in bench.read(file)]
    viz.results(records, options.output)
    print(f"wrote {options.output}")
    write_json(options.json, "bench plot", [{"file": options.output, "records": len(records)}])
    return 0
