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
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardkit as sk
from benchmarks.growth import cell, exponent, right
from benchmarks.start import start
from shardkit.bench.environment import environment
from shardkit.bench.records import FORMAT, Record, write
from shardkit.models import transformer

EIGHT = {"data": 2, "fsdp": 2, "model": 2}
COMPILED = 32  # devices, at most
GROUPS = re.compile(r"(replica_groups|source_target_pairs) = dense<[^>]*> : tensor<[^>]*>")  # of jax's collectives
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

    def params(self) -> Any:
        """Shapes of the parameters."""
        return jax.eval_shape(lambda: transformer.init(jax.random.key(0), self.config))

    @property
    def parameters(self) -> int:
        """How many parameters the transformer has."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.params()))


def axes_of(devices: int) -> dict[str, int]:
    """The mesh of a power of two: a third of its factors for "model", up to 8, half of the others for "fsdp"."""
    k = devices.bit_length() - 1
    model = min(k // 3, 3)
    fsdp = (k - model) // 2
    return {"data": 2 ** (k - model - fsdp), "fsdp": 2**fsdp, "model": 2**model}


SWEEPS = (
    [Point("devices", axes_of(2**k)) for k in range(13)],
    [Point("layers", EIGHT, layers=count) for count in (1, 8, 64)],
    [Point("microbatches", {"data": 2, "stage": 4}, microbatches=count) for count in (4, 16, 64)],
    [Point("parameters", EIGHT, dim=dim) for dim in (64, 256, 1024)],
)


def traced(point: Point, mesh: Any) -> Any:
    """The trace of the step, as in a fresh process."""
    jax.clear_caches()
    grad_fn: Any
    if "stage" in point.mesh:
        pieces = transformer.pieces(point.config, transformer.Axes(stage="stage"))
        pipe = sk.pipeline(sk.schedules.one_f_one_b(point.mesh["stage"], point.microbatches), "stage")
        grad_fn, plan = pipe.value_and_grad(*pieces, layer_numbers=True), sk.chain(sk.dp("data"), pipe.plan)
    else:
        grad_fn = sk.value_and_grad(transformer.loss_fn(point.config, transformer.Axes(model="model")))
        rules = transformer.tensor_rules(point.config, "model", point.mesh["model"])
        plan = sk.chain(sk.dp("data"), sk.fsdp("fsdp", layerwise=("layers",)), sk.tp("model", rules))
    init, step = sk.make_train_step(grad_fn, optax.adam(1e-3), mesh=mesh, plan=plan)
    examples = 2 * point.microbatches * point.mesh["data"] * point.mesh.get("fsdp", 1)
    tokens = jax.ShapeDtypeStruct((examples, 64), jnp.int32)
    return step.trace(init.abstract(point.params()), {"tokens": tokens, "targets": tokens})


def built(point: Point, rounds: int) -> dict[str, Any]:
    """Median CPU seconds to trace and to lower a step over a mesh without devices, and the size of the program."""
    times, text = [], ""
    for _ in range(rounds):
        begun = time.process_time()
        program = traced(point, sk.abstract_mesh(**point.mesh))
        between = time.process_time()
        lowered = program.lower(lowering_platforms=("cpu",))
        times.append((between - begun, time.process_time() - between))
        text = lowered.as_text()
    trace, lower = np.median(times, axis=0)
    sizes = {"program_bytes": len(text), "program_bytes_without_groups": len(without_groups(text))}
    return {"trace_cpu_s": round(trace, 4), "lower_cpu_s": round(lower, 4), **sizes}


def without_groups(text: str) -> str:
    """A lowered program without the lists of devices that jax writes beside every collective."""
    return GROUPS.sub("", text)


def compiled(point: Point) -> dict[str, Any]:
    """CPU seconds to compile a step on this process's devices, and the memory that it will need on each."""
    lowered = traced(point, sk.make_mesh(jax.devices()[: point.devices], **point.mesh)).lower()
    before, begun = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize(), time.process_time()
    memory = lowered.compile().memory_analysis()
    return {
        "compile_cpu_s": round(time.process_time() - begun, 4),
        "compile_rss_bytes": max(0, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before),
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
    }


def in_child(point: Point) -> dict[str, Any]:
    """`compiled` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.scale", "--child", json.dumps(point._asdict())]
    return dict(json.loads(subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout))


def record(point: Point, here: Mapping[str, Any], rounds: int) -> Record:
    """The record of one point; what was not compiled is None."""
    size = getattr(point, point.sweep)
    found = dict.fromkeys([*COSTS, "argument_bytes"]) | built(point, rounds)
    found |= in_child(point) if point.devices <= COMPILED else {}
    sizes = {"size": size, "parameters": point.parameters, "devices": point.devices, "mesh": point.mesh}
    head = {"format": FORMAT, "version": 1, "benchmark": "scale", "row": point.sweep}
    return {**head, "case": f"{point.sweep}={size}", **sizes, **found, "rounds": rounds, "environment": here}


def lines(records: Sequence[Record]) -> str:
    """The records of a sweep as a table, whose last row has the exponents."""
    head = ("trace s", "lower s", "compile s", "compile MiB", "temp KiB", "program KiB")
    rows: list[tuple[str, ...]] = [(records[0]["row"], "mesh", *head)]
    points = [r for r in records if "size" in r]
    for r in points:
        seconds = [cell(r[key]) for key in COSTS[:3]]
        sizes = [cell(r["compile_rss_bytes"], 0, 2**20), *(cell(r[key], 0, 1024) for key in COSTS[4:])]
        mesh = ", ".join(f"{axis}={n}" for axis, n in r["mesh"].items())
        rows.append((f"{r['size']:,}", mesh, *seconds, *sizes))
    fits = (exponent([r["size"] for r in points], [r[key] for r in points]) for key in COSTS)
    return right([*rows, ("exponent", "", *map(cell, fits))])


def main(argv: Sequence[str] | None = None) -> None:
    """Measures every sweep."""
    options = start(__doc__, argv, devices=1)
    sweeps = [[Point("devices", axes_of(count)) for count in (1, 4096)]] if options.smoke else SWEEPS
    here, rounds = environment(), options.rounds or (1 if options.smoke else 3)
    built(sweeps[0][0], rounds=1)  # the first trace of a process imports and caches
    for points in sweeps:
        records = [record(point, here, rounds) for point in points]
        print(f"\n{lines(records)}", flush=True)
        if options.json:
            write(records, options.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        asked = Point(**json.loads(sys.argv[2]))
        sk.simulate_devices(asked.devices)
        print(json.dumps(compiled(asked)))
    else:
        main()
