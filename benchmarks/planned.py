"""What the planner predicts of a layout beside what the compiler of absent chips reports on the very step.

    python -m benchmarks.planned

Each row is a layout of `models.transformer`, built by its candidate: mesh, plan, configuration and microbatches. The
compiled figures are those of `sk.aot.compile`, its seconds by the time model of `shardkit/analysis/hlo/compute.py`.
Rows in the file of results are not compiled again; the prediction beside them is that of today's planner.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import shardkit as sk
from shardkit import bench, planner
from shardkit.analysis.hlo.report import Report
from shardkit.bench.environment import environment
from shardkit.bench.records import FORMAT, VERSION, write
from shardkit.planner import Layout, Model
from shardkit.planner.candidates import Candidate
from shardkit.planner.memory import count_held
from shardkit.planner.share import Share, find_share
from shardkit.planner.traffic import count_traffic

RESULTS = Path(__file__).parent / "results" / "planned.jsonl"
MODELS = {
    "1.5b": Model(layers=28, hidden=2048, heads=16, kv_heads=8, ffn=5632, vocabulary=32_768),
    "8b": Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14_336, vocabulary=128_256),
    "70b": Model(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28_672, vocabulary=128_256),
    "8x0.6b": Model(16, 2048, 16, 32_768, kv_heads=8, ffn=5632, experts=8),
    "1.5b kernel": Model(28, 2048, 16, 32_768, kv_heads=8, ffn=5632, kernel=True),
    "64x0.1b": Model(16, 2048, 16, 32_768, kv_heads=8, ffn=1024, experts=64, top_k=4),
}


class Row(NamedTuple):
    """One layout on a topology; `local` is the sequences of a microbatch on each data, fsdp and expert way."""

    topology: str
    model: str
    layout: Layout
    local: int = 1
    sequence: int = 2048

    @property
    def name(self) -> str:
        """The row in one line, by which the results are found again."""
        return f"{self.topology} {self.model} {self.layout} {self.local} x {self.sequence}"

    def predicted(self, model: Model | None = None) -> Candidate:
        """Today's prediction, of a model that may be another."""
        model = MODELS[self.model] if model is None else model
        job: Any = {"batch": self.local * self.layout.parts, "sequence": self.sequence}
        return planner.estimate(model, self.layout, chip=self.topology.partition(":")[0], **job)

    def share(self, model: Model | None = None) -> Share:
        """What one device has of the step, of a model that may be another."""
        model = MODELS[self.model] if model is None else model
        return find_share(model, self.layout, self.local * self.layout.parts, self.sequence)

    def step(self, model: Model | None = None) -> tuple[sk.TrainStep, tuple[Any, Any]]:
        """The step that the candidate builds, and the shapes of its arguments."""
        found, mesh = self.predicted(model), sk.abstract_mesh(**self.layout.axes)
        accumulate = self.layout.accumulate
        init, step = sk.make_train_step(
            found.grad_fn(),
            optax.adam(1e-4),
            mesh=mesh,
            plan=found.plan(),
            accumulate=accumulate,
            precision="bf16",
        )
        state = init.abstract(lambda key: sk.models.transformer.init(key, found.config()))
        tokens = jax.ShapeDtypeStruct((self.local * self.layout.parts, self.sequence), jnp.int32)
        return step, (state, {"tokens": tokens, "targets": tokens})


# Drawn by lot from all layouts that fit, after the habits of `shardkit/planner/habits.py` were chosen.
DRAWN = (
    Row("h100:1x1x8", "1.5b", Layout(data=2, remat="full", context=4), 8),
    Row("h100:1x1x8", "1.5b", Layout(fsdp=2, tensor=2, accumulate=4, remat="selective", context=2), 1, 4096),
    Row("h100:1x1x8", "1.5b", Layout(data=4, fsdp=2, accumulate=2, remat="full")),
    Row("h100:1x2x8", "1.5b", Layout(fsdp=8, remat="full", context=2), 2),
    Row("h100:1x2x8", "1.5b", Layout(fsdp=2, tensor=2, remat="full", context=4), 16),
    Row("h100:1x4x8", "8b", Layout(data=2, fsdp=4, accumulate=2, context=4), 8),
    Row("v5e:2x4", "1.5b", Layout(fsdp=2, tensor=4, accumulate=2, remat="full"), 4),
    Row("v5e:2x4", "1.5b", Layout(data=2, fsdp=4, remat="selective"), 1, 4096),
    Row("v5e:4x4", "1.5b", Layout(data=2, tensor=2, remat="full", context=4), 8, 4096),
    Row("v6e:2x4", "1.5b", Layout(fsdp=4, tensor=2, accumulate=4), 2, 4096),
    Row("v5p:2x2x2", "8b", Layout(data=2, tensor=2, accumulate=4, remat="full", context=2), 4, 4096),
    Row("v5p:2x2x2", "8b", Layout(data=2, tensor=4, accumulate=2, remat="selective"), 4, 4096),
)


def rows() -> Iterator[Row]:
    """The layouts, in the order in which they were compiled."""
    yield Row("h100:1x1x8", "1.5b", Layout(fsdp=8), 2)
    yield Row("v5p:2x2x2", "1.5b", Layout(fsdp=8), 2)
    yield Row("v6e:2x4", "1.5b", Layout(fsdp=8))
    yield Row("v5e:2x4", "1.5b", Layout(fsdp=8), 2)
    yield Row("v5e:2x4", "1.5b", Layout(fsdp=8, accumulate=2, remat="full"))
    yield Row("v5e:2x4", "1.5b", Layout(fsdp=4, tensor=2, remat="full"))
    yield Row("v5e:4x4", "1.5b", Layout(data=2, fsdp=8, remat="full"), 2)
    yield Row("h100:1x1x8", "8b", Layout(fsdp=8, remat="full"))
    yield Row("h100:1x1x8", "8b", Layout(fsdp=4, tensor=2))
    yield Row("h100:1x8x8", "8b", Layout(fsdp=64, remat="full"), 2)
    yield Row("h100:1x4x8", "8b", Layout(data=4, fsdp=8, accumulate=2, remat="full"))
    yield Row("h100:1x1x8", "1.5b", Layout(data=8, remat="full"))
    yield Row("h100:1x1x8", "1.5b", Layout(fsdp=8, remat="selective"), 2)
    yield Row("h100:1x8x8", "70b", Layout(fsdp=8, tensor=8, remat="full"))
    yield Row("v5p:2x2x4", "8b", Layout(fsdp=16))
    yield Row("h100:1x16x8", "70b", Layout(fsdp=128, accumulate=2, remat="full"))
    yield Row("h100:1x1x8", "1.5b", Layout(data=8))
    yield Row("h100:1x2x8", "8b", Layout(fsdp=16), 2)
    yield Row("v6e:4x8", "8b", Layout(fsdp=32, remat="full"), 1, 4096)
    yield Row("v5e:8x8", "8b", Layout(fsdp=16, tensor=4, accumulate=4, remat="full"))
    yield Row("v5p:4x4x8", "70b", Layout(fsdp=128, remat="full"))
    yield Row("h100:1x1x8", "1.5b", Layout(data=2, fsdp=4, accumulate=4, remat="full"), 1, 4096)
    yield Row("h100:1x4x8", "8b", Layout(data=2, fsdp=8, tensor=2, accumulate=2, remat="selective"))
    yield Row("h100:1x4x8", "8b", Layout(fsdp=32, remat="full"), 1, 4096)
    yield Row("v6e:4x4", "8b", Layout(fsdp=8, tensor=2, remat="full"))
    yield Row("v5e:16x16", "70b", Layout(fsdp=32, tensor=8, remat="full"))
    yield Row("v5p:2x2x2", "64x0.1b", Layout(expert=8, remat="full"))
    yield Row("v5p:2x2x2", "64x0.1b", Layout(expert=8, remat="full"), 8)
    yield Row("v5p:2x2x2", "64x0.1b", Layout(fsdp=2, expert=4, remat="selective"))
    yield Row("v5p:2x2x2", "64x0.1b", Layout(fsdp=2, expert=4, remat="selective"), 4)
    yield Row("v5p:2x2x2", "64x0.1b", Layout(fsdp=2, expert=4))
    yield Row("v5p:2x2x2", "64x0.1b", Layout(fsdp=2, expert=4), 3)
    yield Row("v5p:2x2x2", "64x0.1b", Layout(fsdp=2, expert=4, accumulate=2, remat="full"))
    yield Row("v5p:2x2x2", "1.5b", Layout(data=8, remat="full"))
    yield Row("v5p:2x2x2", "1.5b", Layout(data=4, tensor=2), 2)
    yield Row("v5p:2x2x2", "8x0.6b", Layout(fsdp=4, expert=2, remat="full"))
    yield Row("v5e:2x4", "1.5b", Layout(fsdp=4, context=2, remat="full"), 1, 4096)
    yield Row("v5e:2x4", "1.5b kernel", Layout(fsdp=4, context=2, remat="full"), 1, 4096)
    yield Row("v5e:2x4", "1.5b kernel", Layout(fsdp=8, remat="full"), 1, 4096)
    yield Row("v5p:2x2x2", "1.5b kernel", Layout(fsdp=8), 1, 4096)
    yield Row("v5p:2x2x2", "1.5b", Layout(fsdp=4, context=2), 1, 4096)
    yield from DRAWN


def compiled(row: Row) -> dict[str, Any]:
    """What the compiler says of the row, as a record."""
    step, args = row.step()
    return record_of(row, sk.aot.compile(step, args, topology=row.topology))


def record_of(row: Row, report: Report) -> dict[str, Any]:
    """A report as a record of the row."""
    record: dict[str, Any] = {"format": FORMAT, "version": VERSION, "benchmark": "planned", "row": row.topology}
    record |= {"case": row.name, "fits": report.fits, "versions": report.versions, "environment": environment()}
    if report.memory is None:
        return record | {"needed": report.needed, "available": report.available}
    return record | {
        "held": report.memory.held,
        "peak": report.memory.peak,
        "sent": float(report.sent()),
        "written": float(report.census.sent()),
        "flops": report.compute.flops,
        "moved": report.compute.bytes,
        "compute_seconds": report.compute.seconds,
        "wire_seconds": report.wire_seconds,
        "exposed_seconds": report.exposed_seconds,
        "compile_seconds": report.compile_seconds,
    }


def stored(path: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """The records of a file, by row."""
    return {record["case"]: record for record in bench.read(path)} if path.exists() else {}


def beside(row: Row, record: dict[str, Any]) -> dict[str, float]:
    """What is predicted of a row over what its record says; wire bytes as written and as compiled."""
    found = row.predicted()
    share = row.share()
    sent = sum(traffic.sent for traffic in count_traffic(share).values())
    return {
        "held": count_held(share) / record["held"],
        "peak": found.bytes / record["peak"],
        "written": sent / record["written"],
        "sent": sent / record["sent"],
        "compute": found.compute_seconds / record["compute_seconds"],
        "step": found.seconds / (record["compute_seconds"] + record["exposed_seconds"]),
    }


def pairs(records: dict[str, dict[str, Any]]) -> list[tuple[float, float]]:
    """The step times of the rows that have records, predicted and compiled."""
    known = [(row.predicted(), records[row.name]) for row in rows() if row.name in records]
    return [(found.seconds, record["compute_seconds"] + record["exposed_seconds"]) for found, record in known]


def tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau: the share of pairs of rows that both figures order alike, less the share that they do not."""
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in combinations(pairs, 2)]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(signs)


def table(records: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The rows that have records, as Markdown."""
    heads = [
        "layout",
        "held, GB",
        "peak, GB",
        "ratio",
        "as written, GB",
        "ratio",
        "as compiled",
        "compute, ms",
        "ratio",
    ]
    yield f"| {' | '.join([*heads, 'exposed, ms', 'step'])} |"
    yield "|---|" + 10 * "--:|"
    for row in rows():
        if row.name not in records:
            continue
        record, ratio = records[row.name], beside(row, records[row.name])
        cells = [row.name, f"{record['held'] / 1e9:.2f}", f"{record['peak'] / 1e9:.2f}", f"{ratio['peak']:.3f}"]
        cells += [f"{record['written'] / 1e9:.2f}", f"{ratio['written']:.6f}", f"{ratio['sent']:.3f}"]
        cells += [f"{1e3 * record['compute_seconds']:.1f}", f"{ratio['compute']:.2f}"]
        cells += [f"{1e3 * record['exposed_seconds']:.1f}", f"{ratio['step']:.2f}"]
        yield f"| {' | '.join(cells)} |"
    ratios = [beside(row, records[row.name]) for row in rows() if row.name in records]
    for name, bound in (("held", 0.01), ("peak", 0.05), ("peak", 0.1), ("written", 1e-9), ("sent", 1e-3)):
        within = sum(abs(ratio[name] - 1) <= bound for ratio in ratios)
        yield f"{name}: {within} of {len(ratios)} within {bound:g}"
    yield f"Kendall's tau of {len(ratios)} step times: {tau(pairs(records)):.3f}"


def main(argv: Sequence[str] | None = None) -> None:
    """Compiles what the file of results has not, and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", default="", help="compile the rows whose name has these words; a word that none has: no row"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    known = stored(options.results)
    for row in rows():
        if options.only in row.name and row.name not in known:
            known[row.name] = compiled(row)
            write([known[row.name]], options.results)
            print(row.name, flush=True)
    print("\n".join(table(known)))


if __name__ == "__main__":
    main()
