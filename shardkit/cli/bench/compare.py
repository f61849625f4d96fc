"""`shardkit bench compare OLD NEW --threshold 5%`: find cases that became slower between two files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from shardkit.cli.options import WithJson
from shardkit.cli.output import write_json

EXAMPLES = {
    "shardkit bench compare old.jsonl new.jsonl": "exit code 1 if a case became slower",
    "shardkit bench compare old.jsonl new.jsonl --threshold 10%": "by more than a tenth",
}


@dataclass(frozen=True)
class Options(WithJson):
    """Options of `shardkit bench compare`."""

    old: tyro.conf.Positional[Path]
    """Results from before the change, from --json."""
    new: tyro.conf.Positional[Path]
    """Results from after the change."""
    threshold: str = "5%"
    """The smallest slowdown to report, such as 5% or 0.05."""


def compare(options: Options) -> int:
    """Compare two files of results, round by round. The exit code is 1 if a case became slower or wrong."""
    from shardkit import bench

    threshold = _read_threshold(options.threshold)
    old = bench.read(options.old)
    new = bench.read(options.new)
    comparison = bench.compare(old, new, threshold=threshold)
    print(comparison)
    rows = [change._asdict() for change in comparison.changes]
    write_json(options.json, "bench compare", rows, threshold=threshold, wrong=comparison.wrong)
    return 1 if comparison.regressed else 0


def _read_threshold(text: str) -> float:
    """A share, of "5%" or "0.05"."""
    try:
        share = float(text.removesuffix("%"))
    except ValueError:
        share = 0.0  # refused below
    if text.endswith("%"):
        share /= 100
    if not 0 < share < 1:
        raise ValueError(
            f"bench: --threshold must be a percentage between 0 and 100; got {text!r}. Write for example 5%."
        )
    return share
