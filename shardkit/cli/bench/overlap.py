"""`shardkit bench overlap --topology v5e:2x4`: how much communication hides behind compute."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import jax
import tyro

from shardkit import bench
from shardkit._platform import leave_out_idle_tpu
from shardkit.analysis.hlo.topology import compiler_package, parse_topology
from shardkit.bench.overlap import text
from shardkit.cli.bench.options import Output, header, kept

_TOPOLOGY = "v5e:2x4"
_QUICK_CASES = ("all_gather_matmul, gather", "all_gather_matmul, ring", "layers, prefetch")

EXAMPLES = {
    "shardkit bench overlap --topology v5e:2x4": "predicted from the compiled schedule",
    "shardkit bench overlap --measured": "on this machine's accelerators",
}


@dataclass(frozen=True)
class Options(Output):
    """Options of `shardkit bench overlap`."""

    topology: str | None = None
    """Predict from what the compiler of these chips schedules, such as v5e:2x4; without an accelerator the default."""
    measured: bool = False
    """Measure on this machine's devices, which is the default where there are accelerators."""
    only: tuple[str, ...] = ()
    """Cases, by name."""
    tokens: int = 8192
    """Tokens of all devices."""
    width: int = 4096
    """Width of the activations."""
    hidden: int = 32768
    """Columns of the weights; of a layer of the stack, a quarter."""
    layers: int = 8
    """Layers of the stack."""
    rounds: int = 20
    """Rounds of a measurement."""


def overlap(options: Annotated[Options, tyro.conf.arg(name="")]) -> int:
    """Compare each kernel with its compute alone and its communication alone: the share that hides.

    Measured where there is hardware, otherwise predicted from the compiled schedule; a table is of one kind.
    """
    o = options
    if o.measured and o.topology:
        raise ValueError(
            f"overlap: --measured must come without --topology, which predicts; got both, with {o.topology!r}. Leave "
            "one of them out."
        )
    leave_out_idle_tpu()
    measure = o.measured or (o.topology is None and jax.default_backend() != "cpu")
    topology = None if measure else o.topology or _TOPOLOGY
    size, only = bench.Size(o.tokens, o.width, o.hidden, o.layers), o.only
    if o.quick:
        size, only = bench.Size(1024, 512, 2048, 8), o.only or _QUICK_CASES
    where = topology and parse_topology(topology)
    if where and o.quick:
        try:
            compiler_package(where)
        except RuntimeError as missing:
            print(f"overlap: nothing is predicted; {str(missing).removeprefix('aot.compile: ')}")
            records = bench.written(devices=where.devices, only=only, size=size)
            print("\n" + text(records))
            return kept(records, o)
    if measure:
        print(header())
    records = bench.overlap(topology=topology, only=only, size=size, rounds=o.rounds, progress=_progress)
    print("\n" + text(records), flush=True)
    return kept(records, o)


def _progress(name: str) -> None:
    print(f"compiling {name}", file=sys.stderr, flush=True)
