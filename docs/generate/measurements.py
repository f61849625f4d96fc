"""What the pages of benchmarks show of the records in benchmarks/results/: a table of all files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS, FOLDER = "<!-- results -->", "benchmarks/results"


def shown(text: str, root: Path) -> str:
    """The text of a page with its marker replaced by the table."""
    return text.replace(RESULTS, table(root / FOLDER)) if RESULTS in text else text


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
