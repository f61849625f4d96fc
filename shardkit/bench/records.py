"""Records of measurements: versioned JSON lines, CSV, and tables as text."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardkit._arguments.files import open_file, read_file, why
from shardkit.meshes import layout

Record = dict[str, Any]
"""A row of results: a JSON object."""
FORMAT = "shardkit-bench"
"""What every record says in the field `format`."""
VERSION = 1
_LARGEST_FILE = 2**28  # bytes; a record has about a thousand
_KEYS = ("benchmark", "row", "case", "environment")


def write(records: Sequence[Record], file: Path) -> None:
    """Appends records to a file, one JSON line each.

    Args:
        records: of `measure`.
        file: the file; it need not exist.

    Example:
        After a measurement, for `read` and for `shardkit bench compare`:

            from shardkit.bench.records import write

            write(records, Path("results/today.jsonl"))
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a", opener=open_file) as out:
        out.writelines(json.dumps(record) + "\n" for record in records)


def read(file: Path | str) -> list[Record]:
    """Reads the records of a file that `report` or `shardkit bench --json` wrote, in its order.

    Args:
        file: its path.

    Raises:
        ValueError: a file that cannot be read, a line that is not a record, or a record of another version.

    Example:
        The records of one case, in the order in which they were written:

            mine = [record for record in sk.bench.read("results/today.jsonl") if record["case"] == "mine"]
    """
    try:
        lines = read_file(file, _LARGEST_FILE).decode().splitlines()
    except (OSError, ValueError) as error:  # ValueError: no text, or a name with a zero
        raise ValueError(
            f"bench: {file} must be a file of results; it cannot be read ({why(error)}). Check the path."
        ) from error
    records = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            records.append(_parse(line, number, file))
    if not records:
        raise ValueError(f"bench: {file} must hold at least one result; it has none. Run the benchmark with --json.")
    return records


def _parse(line: str, number: int, file: Path | str) -> Record:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(
            f"bench: each line of {file} must be a result of shardkit bench; line {number} is not. Pass a file that "
            "--json wrote."
        )
    if record.get("version") != VERSION:
        raise ValueError(
            f"bench: results must be of version {VERSION}; line {number} of {file} is of version "
            f"{record.get('version')!r}. Run the benchmark again with this shardkit."
        )
    missing = [key for key in _KEYS if key not in record]
    if missing:
        raise ValueError(
            f"bench: a result must have {', '.join(_KEYS)}; line {number} of {file} lacks {', '.join(missing)}. Pass a "
            "file as --json wrote it."
        )
    return record


def write_csv(records: Sequence[Record], file: Path) -> None:
    """Writes records as CSV, without samples, with a column for each value of the environment.

    Args:
        records: of `measure` or `read`.
        file: the file; its old content is replaced.

    Example:
        For a spreadsheet:

            from shardkit.bench.records import write_csv

            write_csv(sk.bench.read("results/today.jsonl"), Path("today.csv"))
    """
    rows = []
    columns: dict[str, None] = {}  # in the order in which records have them
    for record in records:
        row = {}
        for key, value in record.items():
            # A cell has one value: samples stay in the JSON.
            if not isinstance(value, dict | list):
                row[key] = value
        for key, value in record["environment"].items():
            row[f"environment_{key}"] = value
        rows.append(row)
        columns |= dict.fromkeys(row)
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "w", newline="", opener=open_file) as out:
        writer = csv.DictWriter(out, list(columns))
        writer.writeheader()
        writer.writerows(rows)


def report(records: Sequence[Record], file: Path | None = None, line: Callable[[Record], str] | None = None) -> None:
    """Prints records as a table, or line by line, and appends them to a file as JSON lines if you pass one.

    Args:
        records: of one row.
        file: where to append them.
        line: a function from a record to its line; None: a table.

    Example:
        >>> case = sk.bench.Case("double", lambda x: (2 * x, None), jnp.ones(4))
        >>> records = sk.bench.measure("doubling", "4 numbers", [case], calls=2, rounds=2)
        >>> sk.bench.report(records, line=lambda record: f"{record['case']} over {record['rounds']} rounds")
        double over 2 rounds
    """
    if line is None:
        text = "\n" + table(records)
    else:
        text = "\n".join(line(record) for record in records)
    print(text, flush=True)  # noqa: T201
    if file is not None:
        write(records, file)


def table(records: Sequence[Record]) -> str:
    """Formats the records of one row as plain text: microseconds a call and ratios, each as median [p10, p90].

    Args:
        records: of one call of `measure`.

    Example:
        >>> case = sk.bench.Case("double", lambda x: (2 * x, None), jnp.ones(4))
        >>> records = sk.bench.measure("doubling", "4 numbers", [case], calls=2, rounds=2)
        >>> from shardkit.bench.records import table
        >>> print(table(records))
        4 numbers (inside, 2 calls x 2 rounds)
        case    wall us  ...
        double  ...
    """
    lines = [("case", "wall us", "CPU us", "wall ratio", "CPU ratio")]
    for record in records:
        line = (
            record["case"],
            _spread(record, "wall_us", 1),
            _spread(record, "cpu_us", 1),
            _spread(record, "wall_ratio", 3),
            _spread(record, "cpu_ratio", 3),
        )
        lines.append(line)
    first = records[0]
    heading = f"{first['row']} ({first['mode']}, {first['calls']} calls x {first['rounds']} rounds)"
    return "\n".join([heading, layout.table(lines)])


def _spread(record: Record, key: str, digits: int) -> str:
    median = record[f"{key}_median"]
    low = record[f"{key}_p10"]
    high = record[f"{key}_p90"]
    return f"{median:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
