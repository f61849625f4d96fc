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
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks.compiled import describe_array
from benchmarks.stored import compile_missing, read_by_case
from shardkit.analysis.hlo.report import Report
from shardkit.analysis.hlo.topology import topology_of
from shardkit.bench.environment import environment
from shardkit.bench.records import FORMAT, VERSION, Record
from shardkit.cost import matmul_forms
from shardkit.cost.matmul_forms import Matmul

RESULTS = Path(__file__).parent / "results" / "matmul_forms.jsonl"
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


def list_rows() -> Iterator[Row]:
    """All rows: the shapes from which the closed forms were made, on each chip, then the others."""
    for first in (0, 1):
        for chip in CHIPS:
            for shape in SHAPES[first::2]:
                yield Row(chip, shape)


class Layer(NamedTuple):
    """A kernel with the layer's arrays: two operands, and the result, which is also the shape of the cotangent."""

    kernel: Callable[..., Any]
    dims: tuple[tuple[int, int], ...]
    specs: tuple[P, ...]


def list_layers(shape: Shape) -> dict[str, Layer]:
    """The kernels by name."""
    tokens = shape.n * shape.tokens
    split_rows = P("model")
    split_columns = P(None, "model")
    return {
        "all_gather_matmul": Layer(
            sk.all_gather_matmul,
            ((tokens, shape.width), (shape.width, shape.columns), (tokens, shape.columns)),
            (split_rows, split_columns, split_columns),
        ),
        "matmul_reduce_scatter": Layer(
            sk.matmul_reduce_scatter,
            ((tokens, shape.columns), (shape.columns, shape.width), (tokens, shape.width)),
            (split_columns, split_rows, split_rows),
        ),
    }


class Pass(NamedTuple):
    """One pass of one kernel, which is compiled alone: in one program a compiler may gather once for both passes."""

    kernel: str
    direction: str  # "forward" or "backward"

    @property
    def name(self) -> str:
        """In one word for each."""
        return f"{self.kernel} {self.direction}"

    def list_forms(self, n: int) -> tuple[str, ...]:
        """The forms that differ: over two devices, and in the backward pass, both rings are one."""
        if self.direction == "backward" or n == 2:
            return ("gather", "ring")
        return ("gather", "ring", "bidirectional")

    def build_program(self, shape: Shape, impl: str) -> tuple[Any, tuple[Any, ...]]:
        """The jitted pass, and the shapes of its arguments."""
        # A topology has at least four chips: two axes of two, if the kernel is over two.
        mesh = sk.abstract_mesh(data=max(1, 4 // shape.n), model=shape.n)
        layer = list_layers(shape)[self.kernel]
        kernel: Any = partial(layer.kernel, axis="model", impl=impl)

        def pull_back(x: jax.Array, w: jax.Array, cotangent: jax.Array) -> Any:
            _, backward = jax.vjp(kernel, x, w)
            return backward(cotangent)

        arrays = []
        for dims, spec in zip(layer.dims, layer.specs, strict=True):
            arrays.append(describe_array(mesh, spec, dims))
        operand_specs = layer.specs[:2]
        if self.direction == "forward":
            mapped = jax.shard_map(kernel, mesh=mesh, in_specs=operand_specs, out_specs=layer.specs[2])
            return jax.jit(mapped), tuple(arrays[:2])
        mapped = jax.shard_map(pull_back, mesh=mesh, in_specs=layer.specs, out_specs=operand_specs)
        return jax.jit(mapped), tuple(arrays)


PASSES = (
    Pass("all_gather_matmul", "forward"),
    Pass("all_gather_matmul", "backward"),
    Pass("matmul_reduce_scatter", "forward"),
    Pass("matmul_reduce_scatter", "backward"),
)


def compile_row(row: Row) -> Record:
    """What the compiler says of every form of a row."""
    record: Record = {
        "format": FORMAT,
        "version": VERSION,
        "benchmark": "matmul_forms",
        "row": row.topology,
        "case": row.name,
        "times": {},
    }
    for kernel_pass in PASSES:
        times = {}
        for form in kernel_pass.list_forms(row.shape.n):
            program, args = kernel_pass.build_program(row.shape, form)
            report = sk.aot.compile(program, args, topology=row.topology)
            record["versions"] = report.versions
            if report.memory is not None:
                times[form] = read_times(report)
        record["times"][kernel_pass.name] = times
    return record | {"environment": environment()}


def read_times(report: Report) -> dict[str, float]:
    """Microseconds by the time model, and MiB that the compute moves."""
    return {
        "compute": round(1e6 * report.compute.seconds, 3),
        "exposed": round(1e6 * report.exposed_seconds, 3),
        "wire": round(1e6 * report.wire_seconds, 3),
        "moved_mib": round(report.compute.bytes / 2**20, 2),
    }


class Choice(NamedTuple):
    """What `auto` takes of a kernel and a pass, and the best form; microseconds of the first, by both models."""

    form: str
    best: str
    predicted: float
    compiled: float
    slower: float  # than the best form, a fraction


def list_choices(record: Record) -> dict[str, Choice]:
    """Today's choices for a record, by kernel and pass."""
    [row] = [row for row in list_rows() if row.name == record["case"]]
    shape = row.shape
    chip = sk.cost.chips[row.chip]
    matmul = Matmul(shape.n, shape.tokens, shape.width, shape.columns // shape.n, value_bytes=2)
    predictions = {
        "all_gather_matmul": matmul_forms.all_gather_matmul_seconds(matmul, chip),
        "matmul_reduce_scatter": matmul_forms.matmul_reduce_scatter_seconds(matmul, chip),
    }
    choices = {}
    for kernel_pass in PASSES:
        compiled = {}
        for form, times in record["times"][kernel_pass.name].items():
            compiled[form] = times["compute"] + times["exposed"]
        best = min(compiled, key=compiled.__getitem__)
        prediction = predictions[kernel_pass.kernel]
        form = getattr(prediction.fastest(), kernel_pass.direction)
        choices[kernel_pass.name] = Choice(
            form,
            best,
            predicted=1e6 * getattr(prediction, kernel_pass.direction)[form],
            compiled=compiled[form],
            slower=compiled[form] / compiled[best] - 1,
        )
    return choices


def format_table(records: Sequence[Record]) -> Iterator[str]:
    """A line for each record: of each kernel and pass the choice, and how much slower it is than the best form."""
    yield f"| row | {' | '.join(kernel_pass.name for kernel_pass in PASSES)} |"
    yield "|---|" + len(PASSES) * "---|"
    fractions = []
    for record in records:
        cells = [record["case"]]
        for choice in list_choices(record).values():
            fractions.append(choice.slower)
            text = f"{choice.form} {choice.compiled:,.0f} us"
            if choice.slower > 0:
                text += f" ({choice.best}: -{1 - 1 / (1 + choice.slower):.1%})"
            cells.append(text)
        yield f"| {' | '.join(cells)} |"
    for bound in (0, 0.02, 0.05):
        count = sum(slower <= bound for slower in fractions)
        yield f"within {bound:.0%} of the best form: {count} of {len(fractions)}"


def main(argv: Sequence[str] | None = None) -> None:
    """Compiles what the file of results has not, and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="compile the rows whose name begins with this; 'none': no row")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    records = read_by_case(options.results)
    rows = [row for row in list_rows() if row.name.startswith(options.only)]
    compile_missing(rows, records, options.results, compile_row)
    print("\n".join(format_table(list(records.values()))))


if __name__ == "__main__":
    main()
