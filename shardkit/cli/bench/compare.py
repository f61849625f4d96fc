"""`shardkit bench compare OLD NEW --threshold 5%`: what became slower between two files of results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from shardkit import bench
from shardkit.cli.output import WithJson, write_json

EXAMPLES = {
    "shardkit bench compare old.jsonl new.jsonl": "exit code 1 if a case became slower",
    "shardkit bench compare old.jsonl new.jsonl --threshold 10%": "by more than a tenth",
}


@dataclass(frozen=True)
class Options(WithJson):
    """Options of `shardkit bench compare`."""

    old: tyro.conf.Positional[Path]
    """Results before, as --json wrote them."""
    new: tyro.conf.Positional[Path]
    """Results after."""
    threshold: str = "5%"
    """The smallest slowdown that counts, such as 5% or 0.05."""


def compare(options: Annotated[Options, tyro.conf.arg(name="")]) -> int:
    """Compare two files of results, round by round; the exit code is 1 if a case became slower or wrong."""
    threshold = _fraction(options.threshold)
    found = bench.compare(bench.read(options.old), bench.read(options.new), threshold=threshold)
    print(found)
    rows = [each._asdict() for each in found.changes]
    write_json(options.json, "bench compare", rows, threshold=threshold, wrong=found.wrong)
    return int(found.regressed)


def _fraction(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise ValueError(
            f"bench: --threshold must be a percentage between 0 and 100; got {text!r}. Write for example 5%."
        )
    return value
