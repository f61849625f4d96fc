"""`shardkit bench scale`: what it costs to build a train step, against its size."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro

from shardkit import bench
from shardkit._platform import jax_has_started
from shardkit.bench.scale import lines
from shardkit.cli.bench.options import Output, header, kept
from shardkit.simulated import offer_cpu_devices

EXAMPLES = {
    "shardkit bench scale": "devices 1 to 4096, layers, microbatches, widths",
    "shardkit bench scale --devices 8 64 512 --layers 8 --compiled 0": "trace and lower alone",
}


@dataclass(frozen=True)
class Options:
    """Options of `shardkit bench scale`."""

    devices: tuple[int, ...] = tuple(2**k for k in range(13))
    """Numbers of devices, powers of two; by default 1 2 4 .. 4096."""
    layers: tuple[int, ...] = (1, 8, 64)
    """Numbers of layers."""
    microbatches: tuple[int, ...] = (4, 16, 64)
    """Numbers of microbatches of a pipeline."""
    dims: tuple[int, ...] = (64, 256, 1024)
    """Widths of the model, for the parameters."""
    compiled: int = 32
    """The most devices to compile for, each in a process of its own; 0: trace and lower alone."""
    rounds: int = 3
    """How often to trace and lower; the medians are reported."""
    output: tyro.conf.OmitArgPrefixes[Output] = field(default_factory=Output)
    """Where the records go."""


def scale(options: Annotated[Options, tyro.conf.arg(name="")]) -> int:
    """Trace, lower and compile a train step: seconds and memory against devices, layers, microbatches, parameters."""
    o = options
    sizes: dict[str, Any] = {name: getattr(o, name) for name in ("devices", "layers", "microbatches", "dims")}
    sizes |= {"compiled": o.compiled, "rounds": o.rounds}
    if o.output.quick:
        sizes = {"devices": (1, 4096), "layers": (), "microbatches": (), "dims": ()}
        sizes |= {"compiled": 1, "rounds": 1, "children": False}
    if not jax_has_started():
        offer_cpu_devices(1)
    print(header())
    print("seconds are CPU time; compile MiB: growth of the compiling process; temp KiB: what a device needs to run\n")
    return kept(bench.scale(**sizes, report=lambda records: print(f"{lines(records)}\n", flush=True)), o.output)
