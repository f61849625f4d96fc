"""What it costs to build a train step, against its size: time to trace, to lower and to compile, and memory.

The plan is data parallelism x FSDP x tensor parallelism, over axes that grow in turn with the devices; the step over
microbatches is a 1F1B pipeline of four stages x data parallelism. A step is traced and lowered over a mesh without
devices, so that there may be thousands of them, and compiled in a child process with as many simulated devices: the
growth of its memory is then that of the compilation. Seconds are CPU time; temp KiB is what a device needs to run.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardkit as sk
from benchmarks.growth import align_right, fit_exponent, format_number
from benchmarks.processes import read_peak_resident_bytes, read_resident_bytes
from benchmarks.start import choose_rounds, start
from shardkit.bench.environment import environment
from shardkit.bench.records import FORMAT, Record, write
from shardkit.models import transformer

EIGHT = {"data": 2, "fsdp": 2, "model": 2}
COMPILED = 32  # devices, at most: simulated ones are threads of this machine
# The lists of devices of jax's collectives.
GROUPS = re.compile(r"(replica_groups|source_target_pairs) = dense<[^>]*> : tensor<[^>]*>")
COSTS = ("trace_cpu_s", "lower_cpu_s", "compile_cpu_s", "compile_rss_bytes", "temp_bytes", "program_bytes")


class Point(NamedTuple):
    """One train step of the reference transformer: what grows from point to point, its mesh, and its sizes."""

    sweep: str
    mesh: Mapping[str, int]
    layers: int = 8
    dim: int = 256
    microbatches: int = 1

    @property
    def devices(self) -> int:
        """How many devices the mesh has."""
        return math.prod(self.mesh.values())

    @property
    def config(self) -> transformer.Config:
        """The sizes of the transformer."""
        return transformer.Config(layers=self.layers, dim=self.dim, heads=8)

    @property
    def size(self) -> int:
        """What the sweep is against, at this point."""
        size: int = getattr(self, self.sweep)
        return size

    def describe_params(self) -> Any:
        """Shapes of the parameters."""
        return jax.eval_shape(lambda: transformer.init(jax.random.key(0), self.config))

    @property
    def parameters(self) -> int:
        """How many parameters the transformer has."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.describe_params()))


def choose_axes(devices: int) -> dict[str, int]:
    """The mesh of a power of two: a third of its factors for "model", up to 8, half of the others for "fsdp".

    For example 64 devices have 6 factors of two: 2 for "model", 2 of the other 4 for "fsdp", 2 for "data": 4 x 4 x 4.
    """
    factors = devices.bit_length() - 1
    model = min(factors // 3, 3)
    fsdp = (factors - model) // 2
    data = factors - model - fsdp
    return {"data": 2**data, "fsdp": 2**fsdp, "model": 2**model}


SWEEPS = (
    [Point("devices", choose_axes(2**k)) for k in range(13)],
    [Point("layers", EIGHT, layers=count) for count in (1, 8, 64)],
    [Point("microbatches", {"data": 2, "stage": 4}, microbatches=count) for count in (4, 16, 64)],
    [Point("parameters", EIGHT, dim=dim) for dim in (64, 256, 1024)],
)


def trace_step(point: Point, mesh: Any) -> Any:
    """The trace of the step, as in a fresh process."""
    # Else a point with the layers of the one before would find their trace.
    jax.clear_caches()
    if "stage" in point.mesh:
        grad_fn, plan = make_pipeline(point)
    else:
        grad_fn, plan = make_fsdp_tp(point)
    init, step = sk.make_train_step(grad_fn, optax.adam(1e-3), mesh=mesh, plan=plan)
    examples = 2 * point.microbatches * point.mesh["data"] * point.mesh.get("fsdp", 1)
    tokens = jax.ShapeDtypeStruct((examples, 64), jnp.int32)
    return step.trace(init.abstract(point.describe_params()), {"tokens": tokens, "targets": tokens})


def make_pipeline(point: Point) -> tuple[Any, sk.Plan]:
    """A 1F1B pipeline x data parallelism."""
    pieces = transformer.pieces(point.config, transformer.Axes(stage="stage"))
    schedule = sk.schedules.one_f_one_b(point.mesh["stage"], point.microbatches)
    pipe = sk.pipeline(schedule, "stage")
    grad_fn = pipe.value_and_grad(*pieces, layer_numbers=True)
    return grad_fn, sk.chain(sk.dp("data"), pipe.plan)


def make_fsdp_tp(point: Point) -> tuple[Any, sk.Plan]:
    """Data parallelism x FSDP x tensor parallelism."""
    loss_fn = transformer.loss_fn(point.config, transformer.Axes(model="model"))
    rules = transformer.tensor_rules(point.config, "model", point.mesh["model"])
    plan = sk.chain(sk.dp("data"), sk.fsdp("fsdp", layerwise=("layers",)), sk.tp("model", rules))
    return sk.value_and_grad(loss_fn), plan


def measure_building(point: Point, rounds: int) -> dict[str, Any]:
    """Median CPU seconds to trace and to lower a step over a mesh without devices, and the size of the program."""
    trace_seconds = []
    lower_seconds = []
    text = ""
    for _ in range(rounds):
        start_time = time.process_time()
        program = trace_step(point, sk.abstract_mesh(**point.mesh))
        traced_time = time.process_time()
        lowered = program.lower(lowering_platforms=("cpu",))
        lowered_time = time.process_time()
        trace_seconds.append(traced_time - start_time)
        lower_seconds.append(lowered_time - traced_time)
        text = lowered.as_text()
    return {
        "trace_cpu_s": round(float(np.median(trace_seconds)), 4),
        "lower_cpu_s": round(float(np.median(lower_seconds)), 4),
        "program_bytes": len(text),
        "program_bytes_without_groups": len(remove_groups(text)),
    }


def remove_groups(text: str) -> str:
    """A lowered program without the lists of devices that jax writes beside every collective."""
    return GROUPS.sub("", text)


def measure_compilation(point: Point) -> dict[str, Any]:
    """CPU seconds to compile a step on this process's devices, and the memory that it will need on each."""
    mesh = sk.make_mesh(jax.devices()[: point.devices], **point.mesh)
    lowered = trace_step(point, mesh).lower()
    # What is held already are jax, the trace and the lowered program.
    resident = read_resident_bytes()
    start_time = time.process_time()
    memory = lowered.compile().memory_analysis()
    seconds = time.process_time() - start_time
    return {
        "compile_cpu_s": round(seconds, 4),
        "compile_rss_bytes": max(0, read_peak_resident_bytes() - resident),
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
    }


def measure_in_child(point: Point) -> dict[str, Any]:
    """`measure_compilation` in a process of its own, which has as many devices, and no memory of other points."""
    command = [sys.executable, "-m", "benchmarks.scale", "--child", json.dumps(point._asdict())]
    child = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    return dict(json.loads(child.stdout))


def run_child(argument: str) -> None:
    """Compiles the point that the parent has sent, and prints what that took."""
    point = Point(**json.loads(argument))
    sk.simulate_devices(point.devices)
    print(json.dumps(measure_compilation(point)))


def make_record(point: Point, machine: Mapping[str, Any], rounds: int) -> Record:
    """The record of one point; what was not compiled is None."""
    record = {
        "format": FORMAT,
        "version": 1,
        "benchmark": "scale",
        "row": point.sweep,
        "case": f"{point.sweep}={point.size}",
        "size": point.size,
        "parameters": point.parameters,
        "devices": point.devices,
        "mesh": point.mesh,
        **dict.fromkeys([*COSTS, "argument_bytes"]),
    }
    record |= measure_building(point, rounds)
    if point.devices <= COMPILED:
        record |= measure_in_child(point)
    return record | {"rounds": rounds, "environment": machine}


def format_table(records: Sequence[Record]) -> str:
    """The records of a sweep as a table, whose last row has the exponents."""
    points = [record for record in records if "size" in record]
    rows: list[tuple[str, ...]] = [
        (
            records[0]["row"],
            "mesh",
            "trace s",
            "lower s",
            "compile s",
            "compile MiB",
            "temp KiB",
            "program KiB",
        )
    ]
    for point in points:
        mesh = ", ".join(f"{axis}={size}" for axis, size in point["mesh"].items())
        row = (
            f"{point['size']:,}",
            mesh,
            format_number(point["trace_cpu_s"]),
            format_number(point["lower_cpu_s"]),
            format_number(point["compile_cpu_s"]),
            format_number(point["compile_rss_bytes"], 0, 2**20),
            format_number(point["temp_bytes"], 0, 1024),
            format_number(point["program_bytes"], 0, 1024),
        )
        rows.append(row)
    sizes = [point["size"] for point in points]
    cells = ["exponent", ""]
    for field in COSTS:
        costs = [point[field] for point in points]
        cells.append(format_number(fit_exponent(sizes, costs)))
    rows.append(tuple(cells))
    return align_right(rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures every sweep."""
    options = start(__doc__, argv, devices=1)
    sweeps: Sequence[list[Point]] = SWEEPS
    if options.smoke:
        sweeps = [[Point("devices", choose_axes(count)) for count in (1, 4096)]]
    rounds = choose_rounds(options, 3, smoke=1)
    machine = environment()
    measure_building(sweeps[0][0], rounds=1)  # the first trace of a process imports and caches
    for points in sweeps:
        records = [make_record(point, machine, rounds) for point in points]
        print(f"\n{format_table(records)}", flush=True)
        if options.json:
            write(records, options.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        run_child(sys.argv[2])
    else:
        main()
