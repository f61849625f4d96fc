"""What the planner predicts of a layout beside what the compiler of absent chips reports on the very step.

    python -m benchmarks.planned

Each row is a layout of `models.transformer`, built by its candidate: mesh, plan, configuration and microbatches. The
compiled figures are those of `sk.aot.compile`, its seconds by the time model of `shardkit/analysis/hlo/compute.py`.
Rows in the file of results are not compiled again; the prediction beside them is that of today's planner.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import shardkit as sk
from benchmarks.stored import compile_missing, read_by_case
from shardkit import planner
from shardkit.analysis.hlo.report import Report
from shardkit.bench.environment import environment
from shardkit.bench.records import FORMAT, VERSION, Record
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

    @property
    def batch(self) -> int:
        """The sequences of a step."""
        return self.local * self.layout.parts

    def predict(self, model: Model | None = None) -> Candidate:
        """Today's prediction, of a model that may be another."""
        if model is None:
            model = MODELS[self.model]
        chip, _, _ = self.topology.partition(":")
        return planner.estimate(model, self.layout, chip=chip, batch=self.batch, sequence=self.sequence)

    def compute_share(self, model: Model | None = None) -> Share:
        """What one device has of the step, of a model that may be another."""
        if model is None:
            model = MODELS[self.model]
        return find_share(model, self.layout, self.batch, self.sequence)

    def build_step(self, model: Model | None = None) -> tuple[Any, tuple[Any, Any]]:
        """The step that the candidate builds, and the shapes of its arguments."""
        candidate = self.predict(model)
        config = candidate.config()
        init, step = sk.make_train_step(
            candidate.grad_fn(),
            optax.adam(1e-4),
            mesh=sk.abstract_mesh(**self.layout.axes),
            plan=candidate.plan(),
            accumulate=self.layout.accumulate,
            precision="bf16",
        )
        state = init.abstract(lambda key: sk.models.transformer.init(key, config))
        tokens = jax.ShapeDtypeStruct((self.batch, self.sequence), jnp.int32)
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


def list_rows() -> Iterator[Row]:
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


def compile_row(row: Row) -> Record:
    """What the compiler says of the row, as a record."""
    step, args = row.build_step()
    return make_record(row, sk.aot.compile(step, args, topology=row.topology))


def make_record(row: Row, report: Report) -> Record:
    """A report as a record of the row."""
    record: Record = {
        "format": FORMAT,
        "version": VERSION,
        "benchmark": "planned",
        "row": row.topology,
        "case": row.name,
        "fits": report.fits,
        "versions": report.versions,
        "environment": environment(),
    }
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


def list_compiled(records: Mapping[str, Record]) -> list[tuple[Row, Record]]:
    """The rows that have records, in their order."""
    pairs = []
    for row in list_rows():
        if row.name in records:
            pairs.append((row, records[row.name]))
    return pairs


def get_step_seconds(record: Record) -> float:
    """A step as compiled: its compute, and what no compute hides."""
    seconds: float = record["compute_seconds"] + record["exposed_seconds"]
    return seconds


def compute_ratios(row: Row, record: Record) -> dict[str, float]:
    """What is predicted of a row over what its record says; wire bytes as written and as compiled."""
    candidate = row.predict()
    share = row.compute_share()
    sent = sum(traffic.sent for traffic in count_traffic(share).values())
    return {
        "held": count_held(share) / record["held"],
        "peak": candidate.bytes / record["peak"],
        "written": sent / record["written"],
        "sent": sent / record["sent"],
        "compute": candidate.compute_seconds / record["compute_seconds"],
        "step": candidate.seconds / get_step_seconds(record),
    }


def list_step_seconds(records: Mapping[str, Record]) -> list[tuple[float, float]]:
    """The step times of the rows that have records, predicted and compiled."""
    seconds = []
    for row, record in list_compiled(records):
        seconds.append((row.predict().seconds, get_step_seconds(record)))
    return seconds


def compute_tau(points: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau: the share of pairs of points that both figures order alike, less the share that they do not.

    For example (1, 1), (2, 3), (3, 2): two of the three pairs are ordered alike, one is not, and tau is 1/3.
    """
    alike = 0
    unlike = 0
    for first, second in combinations(points, 2):
        sign = (first[0] - second[0]) * (first[1] - second[1])
        alike += sign > 0
        unlike += sign < 0
    pairs = len(points) * (len(points) - 1) // 2
    return (alike - unlike) / pairs


COLUMNS = (
    "layout",
    "held, GB",
    "peak, GB",
    "ratio",
    "as written, GB",
    "ratio",
    "as compiled",
    "compute, ms",
    "ratio",
    "exposed, ms",
    "step",
)
# Of each ratio, how far from 1 is close.
BOUNDS = (("held", 0.01), ("peak", 0.05), ("peak", 0.1), ("written", 1e-9), ("sent", 1e-3))


def format_table(records: Mapping[str, Record]) -> Iterator[str]:
    """The rows that have records, as Markdown."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---|" + (len(COLUMNS) - 1) * "--:|"
    all_ratios = []
    for row, record in list_compiled(records):
        ratios = compute_ratios(row, record)
        all_ratios.append(ratios)
        cells = [
            row.name,
            f"{record['held'] / 1e9:.2f}",
            f"{record['peak'] / 1e9:.2f}",
            f"{ratios['peak']:.3f}",
            f"{record['written'] / 1e9:.2f}",
            f"{ratios['written']:.6f}",
            f"{ratios['sent']:.3f}",
            f"{1e3 * record['compute_seconds']:.1f}",
            f"{ratios['compute']:.2f}",
            f"{1e3 * record['exposed_seconds']:.1f}",
            f"{ratios['step']:.2f}",
        ]
        yield f"| {' | '.join(cells)} |"
    for name, bound in BOUNDS:
        count = sum(abs(ratios[name] - 1) <= bound for ratios in all_ratios)
        yield f"{name}: {count} of {len(all_ratios)} within {bound:g}"
    tau = compute_tau(list_step_seconds(records))
    yield f"Kendall's tau of {len(all_ratios)} step times: {tau:.3f}"


def main(argv: Sequence[str] | None = None) -> None:
    """Compiles what the file of results has not, and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", default="", help="compile the rows whose name has these words; a word that none has: no row"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    records = read_by_case(options.results)
    rows = [row for row in list_rows() if options.only in row.name]
    compile_missing(rows, records, options.results, compile_row)
    print("\n".join(format_table(records)))


if __name__ == "__main__":
    main()
