"""Benchmarks whose rows take minutes to compile: what is in their file of results is not compiled again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, TypeVar

from shardkit import bench
from shardkit.bench.records import Record, write


class Named(Protocol):
    """A row of a benchmark."""

    @property
    def name(self) -> str:
        """The row in one line, which its record has as `case`."""


Row = TypeVar("Row", bound=Named)


def read_by_case(file: Path) -> dict[str, Record]:
    """The records of a file by their case; none if there is no file."""
    if not file.exists():
        return {}
    return {record["case"]: record for record in bench.read(file)}


def compile_missing(
    rows: Iterable[Row], records: dict[str, Record], file: Path, compile_row: Callable[[Row], Record]
) -> None:
    """Compiles the rows that have no record, and adds their records to the others and to the file."""
    for row in rows:
        if row.name in records:
            continue
        record = compile_row(row)
        records[row.name] = record
        # Written at once: who ends the run after an hour keeps what it has compiled.
        write([record], file)
        print(row.name, flush=True)
