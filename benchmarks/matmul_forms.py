"""Which form of the collective matmuls is the fastest by the chip's own compiler, and which one `impl="auto"` takes.

    python -m benchmarks.matmul_forms
    python -m benchmarks.matmul_forms --only h100

Each row is a shape on a chip: `all_gather_matmul` and `matmul_reduce_scatter`, the forward pass and the backward pass
each compiled alone, in bfloat16. The seconds are those of `sk.aot.compile`, compute and what it does not hide of the
wire, by the time model of `shardkit/analysis/hlo/compute.py`. Rows in the file of results are not compiled again; the
choice beside them is that of today's `auto`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import bench
from shardkit.analysis.hlo.topology import topology_of
from shardkit.bench.environment import environment
from shardkit.bench.records import FORMAT, VERSION, Record, write
from shardkit.cost import matmul_forms
from shardkit.cost.matmul_forms import Matmul

RESULTS = Path(__file__).parent / "results" / "matmul_forms.jsonl"
KERNELS = ("all_gather_matmul", "matmul_reduce_scatter")
CHIPS = ("h100", "v5e", "b200", "v5p")


class Shape(NamedTuple):
    """One tensor-parallel layer: tokens of a device, width, columns of all devices, devices of the axis."""

    tokens: int
    width: int
    columns: int
    n: int

    def __str__(self) -> str:
        return f"{self.tokens} x {self.width} x {self.columns} over {self.n}"


# Chosen before any of them was compiled: up (or gate and up), down, query-key-value and output matrices of published
# models. The closed forms were made from what the compilers of GPUs made of all of them, and those of TPUs of every
# second one, the first included; on TPUs the others check them.
SHAPES = (
    Shape(2048, 2048, 8192, 2),  # Llama 3 1B
    Shape(1024, 4096, 14336, 2),  # Llama 3 8B
    Shape(4096, 4096, 14336, 2),
    Shape(8192, 4096, 6144, 2),  # its query, key and value
    Shape(16384, 2048, 32768, 2),  # Gemma 2B, gate and up
    Shape(4096, 5120, 13824, 2),  # Qwen 2.5 14B
    Shape(512, 4096, 14336, 4),
    Shape(2048, 4096, 28672, 4),  # Llama 3 8B, gate and up
    Shape(4096, 4096, 6144, 4),
    Shape(1024, 5120, 27648, 4),  # Qwen 2.5 32B
    Shape(2048, 8192, 28672, 4),  # Llama 3 70B
    Shape(8192, 8192, 10240, 4),  # its query, key and value
    Shape(1024, 4096, 32768, 8),  # the shape of benchmarks/overlap.py
    Shape(512, 8192, 28672, 8),
    Shape(1024, 8192, 28672, 8),
    Shape(2048, 8192, 57344, 8),  # gate and up
    Shape(1024, 8192, 10240, 8),
    Shape(1024, 16384, 53248, 8),  # Llama 3 405B
    Shape(512, 4096, 14336, 8),
    Shape(4096, 2048, 8192, 8),
    Shape(512, 16384, 53248, 16),
    Shape(1024, 16384, 18432, 16),  # its query, key and value
    Shape(1024, 12288, 49152, 16),  # GPT-3
    Shape(512, 8192, 28672, 16),
)


class Row(NamedTuple):
    """A shape on a chip."""

    chip: str
    shape: Shape

    @property
    def name(self) -> str:
        """The row in one line, by which the results are found again."""
        return f"{self.chip} {self.shape}"

    @property
    def topology(self) -> str:
        """The chips that the axis fills; of two chips there is no torus to compile for, so two axes have four."""
        return str(topology_of(self.chip, max(self.shape.n, 4)))


def rows() -> Iterator[Row]:
    """All rows: the shapes from which the closed forms were made, on each chip, then the others."""
    for first in (0, 1):
        for chip in CHIPS:
            for shape in SHAPES[first::2]:
                yield Row(chip, shape)


def forms(direction: str, n: int) -> tuple[str, ...]:
    """The forms that differ: over two devices, and in the backward pass, both rings are one."""
    if direction == "backward" or n == 2:
        return ("gather", "ring")
    return ("gather", "ring", "bidirectional")


def programs(shape: Shape) -> dict[str, Callable[[Any], tuple[Any, tuple[Any, ...]]]]:
    """By kernel and pass: a function from `impl` to the jitted program and the shapes of its arguments."""
    mesh = sk.abstract_mesh(data=max(1, 4 // shape.n), model=shape.n)
    tokens, columns, rows = P("model"), P(None, "model"), P("model")
    whole = shape.n * shape.tokens
    sizes = {
        "all_gather_matmul": ((whole, shape.width), (shape.width, shape.columns), (whole, shape.columns)),
        "matmul_reduce_scatter": ((whole, shape.columns), (shape.columns, shape.width), (whole, shape.width)),
    }
    specs = {
        "all_gather_matmul": (tokens, columns, columns),
        "matmul_reduce_scatter": (columns, rows, tokens),
    }

    def forward(name: str, impl: Any) -> tuple[Any, tuple[Any, ...]]:
        kernel = partial(getattr(sk, name), axis="model", impl=impl)
        *operands, result = specs[name]
        mapped = jax.shard_map(kernel, mesh=mesh, in_specs=tuple(operands), out_specs=result)
        return jax.jit(mapped), arguments(name)[:2]

    def backward(name: str, impl: Any) -> tuple[Any, tuple[Any, ...]]:
        kernel = partial(getattr(sk, name), axis="model", impl=impl)

        def pull(x: jax.Array, w: jax.Array, cotangent: jax.Array) -> Any:
            _, back = jax.vjp(kernel, x, w)
            return back(cotangent)

        mapped = jax.shard_map(pull, mesh=mesh, in_specs=specs[name], out_specs=specs[name][:2])
        return jax.jit(mapped), arguments(name)

    def arguments(name: str) -> tuple[jax.ShapeDtypeStruct, ...]:
        arrays = []
        for dims, spec in zip(sizes[name], specs[name], strict=True):
            arrays.append(jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=NamedSharding(mesh, spec)))
        return tuple(arrays)

    made: dict[str, Callable[[Any], tuple[Any, tuple[Any, ...]]]] = {}
    for name in sizes:
        made[f"{name} forward"] = partial(forward, name)
        made[f"{name} backward"] = partial(backward, name)
    return made


def compile_row(row: Row) -> Record:
    """What the compiler says of every form of a row."""
    record: Record = {"format": FORMAT, "version": VERSION, "benchmark": "matmul_forms", "row": row.topology}
    record |= {"case": row.name, "times": {}}
    for program, make in programs(row.shape).items():
        _, direction = program.split()
        times = {}
        for form in forms(direction, row.shape.n):
            report = sk.aot.compile(*make(form), topology=row.topology)
            record["versions"] = report.versions
            if report.memory is not None:
                times[form] = times_of(report)
        record["times"][program] = times
    return record | {"environment": environment()}


def times_of(report: Any) -> dict[str, float]:
    """Microseconds by the time model, and MiB that the compute moves."""
    seconds = {"compute": report.compute.seconds, "exposed": report.exposed_seconds, "wire": report.wire_seconds}
    times = {name: round(1e6 * value, 3) for name, value in seconds.items()}
    times["moved_mib"] = round(report.compute.bytes / 2**20, 2)
    return times


class Choice(NamedTuple):
    """What `auto` takes of a kernel and a pass, and the best form; microseconds of the first, by both models."""

    form: str
    best: str
    predicted: float
    compiled: float
    slower: float  # than the best form, a fraction


def choices(record: Record) -> dict[str, Choice]:
    """Today's choices for a record, by kernel and pass."""
    row = {str(row.name): row for row in rows()}[record["case"]]
    shape = row.shape
    chip = sk.cost.chips[row.chip]
    matmul = Matmul(shape.n, shape.tokens, shape.width, shape.columns // shape.n, value_bytes=2)
    seconds = {
        "all_gather_matmul": matmul_forms.all_gather_matmul_seconds(matmul, chip),
        "matmul_reduce_scatter": matmul_forms.matmul_reduce_scatter_seconds(matmul, chip),
    }
    found = {}
    for program, times in record["times"].items():
        kernel, direction = program.split()
        form = getattr(seconds[kernel].fastest(), direction)
        compiled = {name: time["compute"] + time["exposed"] for name, time in times.items()}
        best = min(compiled, key=compiled.__getitem__)
        predicted = 1e6 * getattr(seconds[kernel], direction)[form]
        found[program] = Choice(form, best, predicted, compiled[form], compiled[form] / compiled[best] - 1)
    return found


def table(records: Sequence[Record]) -> Iterator[str]:
    """A line for each record: of each kernel and pass the choice, and how much slower it is than the best form."""
    programs = [f"{kernel} {direction}" for kernel in KERNELS for direction in ("forward", "backward")]
    yield f"| row | {' | '.join(programs)} |"
    yield "|---|" + len(programs) * "---|"
    judged = []
    for record in records:
        cells = [record["case"]]
        for choice in choices(record).values():
            judged.append(choice.slower)
            text = f"{choice.form} {choice.compiled:,.0f} us"
            if choice.slower > 0:
                text += f" ({choice.best}: -{1 - 1 / (1 + choice.slower):.1%})"
            cells.append(text)
        yield f"| {' | '.join(cells)} |"
    for bound in (0, 0.02, 0.05):
        yield f"within {bound:.0%} of the best form: {sum(slower <= bound for slower in judged)} of {len(judged)}"


def stored(path: Path = RESULTS) -> dict[str, Record]:
    """The records of a file, by row."""
    if not path.exists():
        return {}
    return {record["case"]: record for record in bench.read(path)}


def main(argv: Sequence[str] | None = None) -> None:
    """Compiles what the file of results has not, and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="compile the rows whose name begins with this; 'none': no row")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    known = stored(options.results)
    for row in rows():
        if row.name.startswith(options.only) and row.name not in known:
            known[row.name] = compile_row(row)
            write([known[row.name]], options.results)
            print(row.name, flush=True)
    print("\n".join(table(list(known.values()))))


if __name__ == "__main__":
    main()
