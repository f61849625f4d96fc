"""`shardkit bench schedules stage=4`: pipeline schedules executed, beside their simulation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from shardkit import bench
from shardkit.bench.schedules import BUILDERS, MODES, lines
from shardkit.cli.bench.options import Output, header, kept
from shardkit.cli.plans import mesh_of, mesh_words

EXAMPLES = {
    "shardkit bench schedules stage=4 --schedules one_f_one_b": "one schedule, beside gpipe",
    "shardkit bench schedules --quick": "the shortest run",
}


@dataclass(frozen=True)
class Options:
    """Options of `shardkit bench schedules`."""

    mesh: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="stage=SIZE")] = ("stage=4",)
    """The number of stages, stage=4."""
    schedules: tuple[str, ...] = ()
    """The schedules to run, beside gpipe; all of them by default."""
    microbatches: tuple[int, ...] = (4, 8, 16, 32)
    """Numbers of microbatches, a table each; the exponents in the last table are over them."""
    chunks: int = 2
    """Chunks of the model on each device, for interleaved and breadth_first."""
    mode: Literal["masked", "branch", "both"] = "masked"
    """Whether a device computes at every tick and discards what is not its own, or takes branches."""
    recompute: bool = True
    """By default the backward pass recomputes the forward pass; --no-recompute saves its residuals."""
    dim: int = 64
    """The width of the model."""
    examples: int = 128
    """Examples in a microbatch."""
    rounds: int = 10
    """Timed rounds."""
    output: tyro.conf.OmitArgPrefixes[Output] = field(default_factory=Output)
    """Where the records go."""


def schedules(options: Annotated[Options, tyro.conf.arg(name="")]) -> int:
    """Run pipeline schedules: CPU time beside the simulated work, memory beside slots, the time to compile."""
    o = options
    if tuple(mesh_words(o.mesh, "bench")) != ("stage",):
        raise ValueError(
            f"bench: the mesh of schedules must be the stages alone; got {' '.join(o.mesh) or 'none'}. Write for "
            "example stage=4."
        )
    mesh = mesh_of("bench", o.mesh, many=False)
    names = o.schedules or tuple(BUILDERS)
    counts, sizes, rounds = o.microbatches, bench.Sizes(o.dim, o.examples), o.rounds
    if o.output.quick:
        names, counts, sizes, rounds = o.schedules or ("one_f_one_b",), (2, 4), bench.Sizes(8, 4), 2
    print(header())
    print("ticks, makespan and bubble are simulated, with F = 1 and I = W = 1; work and CPU are over the model on one")
    print("device; in, cot and kept are slots for stage inputs, cotangents and weight-gradient residuals\n")
    records = bench.schedules(
        mesh,
        names=names,
        microbatches=counts,
        modes=MODES if o.mode == "both" else (o.mode,),
        chunks=o.chunks,
        recompute=o.recompute,
        sizes=sizes,
        rounds=rounds,
        report=lambda row: print(f"{lines(row)}\n", flush=True),
    )
    print(lines([each for each in records if each["row"] == "exponents"]))
    return kept(records, o.output)
