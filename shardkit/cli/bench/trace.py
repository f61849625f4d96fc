"""`shardkit bench trace train.py:make --output DIR`: a step as execution traces for simulators of networks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from shardkit import bench
from shardkit.cli.output import WithJson, write_json
from shardkit.cli.target import Target, step_at

EXAMPLES = {
    "shardkit bench trace train.py:make --output traces": "one file per device",
    "shardkit bench trace train.py:make --output traces --chip v5e": "with durations",
}


@dataclass(frozen=True)
class Options(WithJson):
    """Options of `shardkit bench trace`."""

    target: Target
    """A function, or one without parameters that returns (function, *arguments)."""
    output: Path
    """The directory for trace.RANK.et, a file per device, and groups.json."""
    args: tuple[str, ...] = ()
    """The types of the function's arguments, such as 'f32[8,128]'."""
    chip: str | None = None
    """A chip whose peaks give compute its duration, such as v5e; without it, only FLOPs and bytes are written."""


def trace(options: Annotated[Options, tyro.conf.arg(name="")]) -> int:
    """Write a step as Chakra execution traces: compute and collectives of every device, with their dependencies."""
    fn, args = step_at("bench trace", options.target, options.args)
    found = bench.execution_trace(fn, *args, chip=options.chip)
    *files, groups = found.write(options.output)
    rows = []
    for name, count in Counter(node.name for node in found.nodes).items():
        sizes = [node.bytes for node in found.nodes if node.name == name]
        rows.append({"name": name, "count": count, "bytes": sum(sizes)})
        print(f"{count:>6} x {name}, {sum(sizes):,} bytes")
    flops = sum(node.flops for node in found.nodes)
    print(f"{len(found.nodes):,} nodes, {flops:,} FLOPs per device")
    print(f"wrote {files[0]} to {files[-1].name}, and {groups.name}")
    write_json(options.json, "bench trace", rows, nodes=len(found.nodes), flops=flops, files=len(files))
    return 0
