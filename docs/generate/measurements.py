"""What the pages of benchmarks show of the records in benchmarks/results/: a table of all files, and plots."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# A file of records, which of them by the value of a key, and what the picture shows.
PLOT = re.compile(r"<!-- plot benchmarks/results/(\w+)\.jsonl(?: (\w+)=(\w+))?: (.*?) -->")
RESULTS, FOLDER = "<!-- results -->", "benchmarks/results"


def shown(text: str, root: Path) -> str:
    """The text of a page with its markers replaced by the table and the pictures."""
    text = PLOT.sub(r"[![\4](pictures/\1.svg)](pictures/\1.svg)", text)
    return text.replace(RESULTS, table(root / FOLDER)) if RESULTS in text else text


def pictures(root: Path) -> Iterator[tuple[str, bytes]]:
    """Name and SVG of each picture that the pages of docs/benchmarks ask for."""
    from shardkit import bench, viz

    text = "".join(page.read_text() for page in sorted((root / "docs" / "benchmarks").glob("*.md")))
    for name, key, value, _ in PLOT.findall(text):
        records = [each for each in bench.read(root / FOLDER / f"{name}.jsonl") if not key or each[key] == value]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"{name}.svg"
            viz.results(records, file)
            yield f"{name}.svg", file.read_bytes()


def table(results: Path) -> str:
    """A row for each file of records: what was measured, when, on what, and how many elements were wrong."""
    from shardkit import bench

    rows = []
    for path in sorted(results.glob("*.jsonl")):
        records = bench.read(path)
        where: Mapping[str, Any] = records[-1]["environment"]
        dates = sorted(record["environment"]["date"][:10] for record in records)
        days = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
        loads = [record["environment"]["load_average_1min"] for record in records]
        wrong = sum(record.get("wrong", 0) for record in records)
        machine = f"{where['cores']} cores of {where['cpu_model']}, load {min(loads):.1f} to {max(loads):.1f}"
        rows.append(f"| `{FOLDER}/{path.name}` | {len(records)} | {days} | {machine} | {where['jax']} | {wrong} |")
    head = "| records | rows | measured | machine | jax | wrong elements |\n|---|---|---|---|---|---|"
    return "\n".join([head, *rows])
