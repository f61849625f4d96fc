"""What the pages of benchmarks show of the records in benchmarks/results/: a table of all files, and plots."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# A file of records, which of them by the value of a key, and what the picture shows.
PLOT = re.compile(r"<!-- plot benchmarks/results/(\w+)\.jsonl(?: (\w+)=(\w+))?: (.*?) -->")
RESULTS = "<!-- results -->"
FOLDER = "benchmarks/results"


def fill_in(text: str, root: Path) -> str:
    """The text of a page with its markers replaced by the table and the pictures."""
    text = PLOT.sub(r"[![\4](pictures/\1.svg)](pictures/\1.svg)", text)
    if RESULTS not in text:
        return text
    return text.replace(RESULTS, table(root / FOLDER))


def pictures(root: Path) -> Iterator[tuple[str, bytes]]:
    """Name and SVG of each picture that the pages of docs/benchmarks ask for."""
    from shardkit import bench

    pages = sorted((root / "docs" / "benchmarks").glob("*.md"))
    text = "".join(page.read_text() for page in pages)
    for name, key, value, _ in PLOT.findall(text):
        records = bench.read(root / FOLDER / f"{name}.jsonl")
        if key:
            records = [record for record in records if record[key] == value]
        yield f"{name}.svg", picture(records).encode()


def picture(records: Sequence[Mapping[str, Any]]) -> str:
    """The bandwidth and latency of collectives against their size, or ratios to a baseline as bars, as SVG."""
    from shardkit.viz.style import look, make_figure, svg_of

    with look():
        if any("busbw_GBps" in record for record in records):
            figure = make_figure(9, 3)
            _draw_sizes(figure.subplots(1, 2), records)
        else:
            rows = list(dict.fromkeys(record["row"] for record in records))
            figure = make_figure(7, 0.3 * len(records) + 0.7 * len(rows))
            _draw_ratios(figure.subplots(len(rows), 1, squeeze=False)[:, 0], rows, records)
        figure.tight_layout()
        return svg_of(figure)


def _draw_sizes(plots: Any, records: Sequence[Mapping[str, Any]]) -> None:
    """A line for each implementation: bus bandwidth, and the time of small sizes, which is mostly latency."""
    keys = (("bus bandwidth, GB/s", "busbw_GBps", math.inf), ("time, us", "wall_us_median", 2**16))
    for axes, (title, key, largest) in zip(plots, keys, strict=True):
        for impl in dict.fromkeys(record["impl"] for record in records):
            sizes = []
            values = []
            for record in records:
                if record["impl"] == impl and record["size"] <= largest:
                    sizes.append(record["size"])
                    values.append(record[key])
            axes.loglog(sizes, values, "o-", base=2, label=impl)
        axes.set(title=title, xlabel="bytes")
        axes.grid()
        axes.legend()


def _draw_ratios(plots: Any, rows: Sequence[str], records: Sequence[Mapping[str, Any]]) -> None:
    """A plot for each row: two bars for each case, with a line at the baseline."""
    for axes, row in zip(plots, rows, strict=True):
        cases = [record for record in records if record["row"] == row]
        for clock, shift in (("cpu", -0.2), ("wall", 0.2)):
            places = [number + shift for number in range(len(cases))]
            ratios = [case[f"{clock}_ratio_median"] for case in cases]
            bars = axes.barh(places, ratios, 0.4, label=f"{clock} time")
            axes.bar_label(bars, fmt=" %.2f", fontsize=5)
        axes.set_yticks(range(len(cases)), [case["case"] for case in cases])
        axes.axvline(1, color="0.5", linewidth=0.8)
        axes.set_title(f"{row}: over {cases[0]['baseline']}")
        axes.invert_yaxis()
        axes.legend()


def table(results: Path) -> str:
    """A row for each file of records: what was measured, when, on what, and how many elements were wrong."""
    from shardkit import bench

    rows = []
    for path in sorted(results.glob("*.jsonl")):
        records = bench.read(path)
        machine: Mapping[str, Any] = records[-1]["environment"]
        dates = sorted(record["environment"]["date"][:10] for record in records)
        days = dates[0]
        if dates[0] != dates[-1]:
            days = f"{dates[0]} to {dates[-1]}"
        loads = [record["environment"]["load_average_1min"] for record in records]
        wrong = sum(record.get("wrong", 0) for record in records)
        cores = f"{machine['cores']} cores of {machine['cpu_model']}, load {min(loads):.1f} to {max(loads):.1f}"
        rows.append(f"| `{FOLDER}/{path.name}` | {len(records)} | {days} | {cores} | {machine['jax']} | {wrong} |")
    head = "| records | rows | measured | machine | jax | wrong elements |\n|---|---|---|---|---|---|"
    return "\n".join([head, *rows])
