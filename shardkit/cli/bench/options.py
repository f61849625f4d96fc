"""What the measuring commands share: where their records go."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkit.cli.options import Json, Optional
from shardkit.cli.output import open_output

if TYPE_CHECKING:
    from shardkit.bench.records import Record


@dataclass(frozen=True)
class Output:
    """Options of every measuring command."""

    quick: bool = False
    """Run everything once, in less than a minute. Do not keep the figures."""
    json: Json = None
    """Append the records to this file, one JSON line each, for `shardkit bench compare`; with - print them."""
    csv: Optional[Path] = None
    """Write the records to this file as CSV."""


def choose_figures(options: Output, usual: Mapping[str, Any], quick: Mapping[str, Any]) -> dict[str, Any]:
    """The values of options that have no default of their own, by name: what is passed, else the usual or quick one.

    For example {"calls": 5, "rounds": 2} of `--quick --calls 5`, where the quick ones are 2 and 2.
    """
    figures = dict(usual)
    if options.quick:
        figures = dict(quick)
    for name in figures:
        value = getattr(options, name)
        if value is not None:
            figures[name] = value
    return figures


def check_output(where: str, output: Output) -> None:
    """Refuses files that cannot be written, before anything is measured: a measurement may take an hour."""
    if str(output.csv) == "-":
        raise ValueError(f"{where}: --csv must be a file; got -. Pass a path, or --json - for standard output.")
    if output.csv is not None and output.csv == output.json:
        raise ValueError(
            f"{where}: --json and --csv must be different files; got {output.csv} for both. Pass another for one."
        )
    for file in (output.json, output.csv):
        if file is None or str(file) == "-":
            continue
        # Opening it is the only sure test. A file that was not there is removed again, as if nothing had happened.
        is_new = not file.exists()
        with open_output(file, append=True):
            pass
        if is_new:
            file.unlink()


def write_records(records: Sequence[Record], output: Output) -> int:
    """Writes the records where the options say; the exit code: 1 if any element was wrong."""
    from shardkit.bench.records import write_csv

    if output.json:
        with open_output(output.json, append=True) as out:
            out.writelines(json.dumps(record) + "\n" for record in records)
    if output.csv:
        write_csv(records, output.csv)
    if any(record.get("wrong") for record in records):
        return 1
    return 0


def describe_machine() -> str:
    """Where this runs, in a line, and what simulated devices cannot show."""
    from shardkit.bench.environment import environment

    machine = environment()
    line = (
        f"jax {machine['jax']}, {machine['device_count']} x {machine['device_kind']} ({machine['platform']}), "
        f"{machine['cpu_model']}, {machine['cores']} cores, load {machine['load_average_1min']}, "
        f"Python {machine['python']}"
    )
    if machine["platform"] != "cpu":
        return line
    return f"{line}\nsimulated devices share the CPU's cores: read times as total work and as ratios, not as bandwidth"
