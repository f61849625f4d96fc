"""What the measuring commands share: where their records go."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardkit import bench
from shardkit.cli.output import Json, writing


@dataclass(frozen=True)
class Output:
    """Options of every measuring command."""

    quick: bool = False
    """The smallest run that exercises everything, in less than a minute; not for figures to keep."""
    json: Json = None
    """Append the records to this file, one JSON line each, for `shardkit bench compare`; with - print them."""
    csv: Path | None = None
    """Write the records to this file as CSV."""


def kept(records: Sequence[bench.Record], output: Output) -> int:
    """Writes the records where the options say; the exit code: 1 if any element was wrong."""
    if output.json:
        with writing(output.json, append=True) as out:
            out.writelines(json.dumps(record) + "\n" for record in records)
    if output.csv:
        bench.write_csv(records, output.csv)
    return int(any(record.get("wrong") for record in records))


def header() -> str:
    """Where this runs, in a line, and what simulated devices cannot show."""
    here = bench.environment()
    line = (
        f"jax {here['jax']}, {here['device_count']} x {here['device_kind']} ({here['platform']}), {here['cpu_model']}, "
        f"{here['cores']} cores, load {here['load_average_1min']}, Python {here['python']}"
    )
    if here["platform"] != "cpu":
        return line
    return f"{line}\nsimulated devices share the CPU's cores: read times as total work and as ratios, not as bandwidth"
