"""What it costs to build a train step, against its size: time to trace, to lower and to compile, and memory.

A step is traced and lowered over a mesh without devices, so that there may be thousands of them. It is compiled in a
child process with as many simulated devices, each afresh: the growth of its memory is then that of the compilation.
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardkit import _check
from shardkit._typed import typed
from shardkit.bench.environment import environment
from shardkit.bench.growth import Rows, cell, power, right
from shardkit.bench.records import FORMAT, VERSION, Record
from shardkit.mesh import abstract_mesh, make_mesh
from shardkit.models import transformer
from shardkit.partitioning.gradient import value_and_grad
from shardkit.partitioning.plan import chain
from shardkit.schedules import one_f_one_b
from shardkit.simulated import offer_cpu_devices
from shardkit.strategies.data import dp
from shardkit.strategies.pipeline import pipeline, pp
from shardkit.strategies.tensor import tp
from shardkit.strategies.zero import fsdp
from shardkit.train import make_train_step

_EIGHT = {"data": 2, "fsdp": 2, "model": 2}
_TOKENS, _EXAMPLES, _HEADS = 64, 2, 8
_COSTS = ("trace_cpu_s", "lower_cpu_s", "compile_cpu_s", "compile_rss_bytes", "temp_bytes", "program_bytes")
_CHILD = "import sys; from shardkit.bench.scale import child; child(sys.argv[1])"


class Point(NamedTuple):
    """One train step of the reference transformer.

    Attributes:
        sweep: what grows from point to point: "devices", "layers", "microbatches" or "parameters".
        mesh: the sizes of the axes data, fsdp, model and stage.
        layers: of the transformer, which scans over them.
        dim: its width.
        microbatches: of a 1F1B pipeline, with an axis stage.
    """

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
    def parameters(self) -> int:
        """How many parameters the transformer has."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(_params(self)))

    @property
    def size(self) -> int:
        """The number that grows."""
        return int(getattr(self, self.sweep))


@typed
def scale(
    *,
    devices: Sequence[int] = tuple(2**k for k in range(13)),
    layers: Sequence[int] = (1, 8, 64),
    microbatches: Sequence[int] = (4, 16, 64),
    dims: Sequence[int] = (64, 256, 1024),
    compiled: int = 32,
    children: bool = True,
    rounds: int = 3,
    report: Callable[[Sequence[Record]], None] = lambda records: None,
) -> list[Record]:
    """Measures what it costs to build a train step of the reference transformer, while one size grows.

    The plan is data parallelism x FSDP x tensor parallelism, over axes that grow in turn with the devices; the step
    over microbatches is a 1F1B pipeline of four stages x data parallelism. What does not grow stays at 8 devices, 8
    layers and a width of 256.

    Args:
        devices: numbers of devices, powers of two.
        layers: numbers of layers.
        microbatches: numbers of microbatches.
        dims: widths of the model, for the parameters.
        compiled: the most devices to compile for; beyond, steps are traced and lowered alone.
        children: compile in child processes; False: on this process's devices, where the growth of memory is not known.
        rounds: how often to trace and lower; the medians are reported.
        report: called with the records of each sweep as soon as they are there.

    Returns:
        A record per point: `trace_cpu_s`, `lower_cpu_s`, `compile_cpu_s` (CPU time of all threads), `program_bytes` (of
        the lowered program as text), `compile_rss_bytes` (how much the peak memory of the child process is above what
        it held before), and by the compiler `temp_bytes` and `argument_bytes` of one device; None where it was not
        compiled. The last record of each sweep has the case "exponent" and the exponents of all of them.

    Raises:
        ValueError: a number that is not from 1, or devices that are no power of two.
    """
    for count in devices:
        if count < 1 or count & (count - 1):
            raise ValueError(f"scale: devices must be powers of two; got {count}. Pass for example 64.")
    for name, values in {"layers": layers, "microbatches": microbatches}.items():
        _check.whole("scale", **{f"{name}[{i}]": value for i, value in enumerate(values)})
    for dim in dims:
        if dim < 1 or dim % (2 * _HEADS):
            raise ValueError(f"scale: dims must be divisible by {2 * _HEADS}; got {dim}. Pass for example 256.")
    sweeps = [
        [Point("devices", axes_of(count)) for count in devices],
        [Point("layers", _EIGHT, layers=count) for count in layers],
        [Point("microbatches", {"data": 2, "stage": 4}, microbatches=count) for count in microbatches],
        [Point("parameters", _EIGHT, dim=dim) for dim in dims],
    ]
    here, out = environment(), []
    first = next((point for points in sweeps for point in points), None)
    if first is not None:
        built(first, rounds=1)  # the first trace of a process imports and caches
    for points in filter(None, sweeps):
        records = [_record(point, here, compiled, children, rounds) for point in points]
        fits = {
            f"{cost.rsplit('_', 1)[0].removesuffix('_cpu')}_exponent": power(
                [r["size"] for r in records], [r[cost] for r in records]
            )
            for cost in _COSTS
        }
        head = {key: records[0][key] for key in ("format", "version", "benchmark", "row")}
        records.append({**head, "case": "exponent", **fits, "environment": here})
        report(records)
        out += records
    return out


def axes_of(devices: int) -> dict[str, int]:
    """The mesh of a power of two: a third of its factors for "model", up to 8, half of the others for "fsdp"."""
    k = devices.bit_length() - 1
    model = min(k // 3, 3)
    fsdp = (k - model) // 2
    return {"data": 2 ** (k - model - fsdp), "fsdp": 2**fsdp, "model": 2**model}


def built(point: Point, rounds: int) -> dict[str, Any]:
    """Median CPU seconds to trace and to lower a step over a mesh without devices, and the size of the program."""
    times, text = [], ""
    for _ in range(rounds):
        begun = time.process_time()
        traced = _traced(point, abstract_mesh(**point.mesh))
        between = time.process_time()
        lowered = traced.lower(lowering_platforms=("cpu",))
        times.append((between - begun, time.process_time() - between))
        text = lowered.as_text()
    trace, lower = np.median(times, axis=0)
    return {"trace_cpu_s": round(trace, 4), "lower_cpu_s": round(lower, 4), "program_bytes": len(text)}


def compilation(point: Point) -> dict[str, Any]:
    """CPU seconds to compile a step on this process's devices, and the memory that it will need on each."""
    mesh = make_mesh(jax.devices()[: point.devices], **point.mesh)  # type: ignore[arg-type]
    lowered = _traced(point, mesh).lower()
    before, begun = _resident(), time.process_time()
    memory = lowered.compile().memory_analysis()
    seconds, peak = time.process_time() - begun, _peak()
    return {
        "compile_cpu_s": round(seconds, 4),
        "compile_rss_bytes": None if before is None else max(0, peak - before),
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
    }


def child(text: str) -> None:
    """What a child process does: compiles one point and prints the record's part."""
    point = Point(**json.loads(text))
    offer_cpu_devices(point.devices)
    sys.stdout.write(json.dumps(compilation(point)))


def lines(records: Sequence[Record]) -> str:
    """The records of a sweep as a table, whose last row has the exponents."""
    head = ("trace s", "lower s", "compile s", "compile MiB", "temp KiB", "program KiB")
    rows: Rows = [(records[0]["row"], "mesh", *head)]
    for r in records[:-1]:
        seconds = [cell(r[f"{kind}_cpu_s"]) for kind in ("trace", "lower", "compile")]
        sizes = [cell(r["compile_rss_bytes"], 0, 2**20), *(cell(r[key], 0, 1024) for key in _COSTS[4:])]
        rows.append((f"{r['size']:,}", _check.sized(r["mesh"].items()), *seconds, *sizes))
    keys = ("trace", "lower", "compile", "compile_rss", "temp", "program")
    rows.append(("exponent", "", *(cell(records[-1][f"{key}_exponent"]) for key in keys)))
    return right(rows)


def _record(point: Point, here: Mapping[str, Any], compiled: int, children: bool, rounds: int) -> Record:
    head = {"format": FORMAT, "version": VERSION, "benchmark": "scale", "row": point.sweep}
    sizes = {"size": point.size, "parameters": point.parameters, "devices": point.devices}
    sizes |= {name: getattr(point, name) for name in ("mesh", "layers", "microbatches")}
    found: dict[str, Any] = dict.fromkeys([*_COSTS, "argument_bytes"])
    found |= built(point, rounds)
    if point.devices <= compiled:
        found |= _in_child(point) if children else compilation(point)
    case = f"{point.sweep}={point.size}"
    return {**head, "case": case, **sizes, **found, "rounds": rounds, "environment": dict(here)}


def _in_child(point: Point) -> dict[str, Any]:
    command = [sys.executable, "-c", _CHILD, json.dumps(point._asdict())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(
            f"scale: a step for {_check.counted(point.devices, 'device')} could not be compiled ({last}). Pass a "
            "smaller number of devices to compile for."
        )
    return dict(json.loads(done.stdout))


def _params(point: Point) -> Any:
    return jax.eval_shape(lambda: transformer.init(jax.random.key(0), _config(point)))


def _config(point: Point) -> transformer.Config:
    return transformer.Config(layers=point.layers, dim=point.dim, heads=_HEADS)


def _traced(point: Point, mesh: Any) -> Any:
    """The trace of the step, as in a fresh process."""
    jax.clear_caches()
    config, axes = _config(point), set(point.mesh)
    grad_fn: Any
    if "stage" in axes:
        schedule = one_f_one_b(point.mesh["stage"], point.microbatches)
        pieces = transformer.pieces(config, transformer.Axes(stage="stage"))
        grad_fn = pipeline(schedule, "stage").value_and_grad(*pieces, layer_numbers=True)
        plan = chain(dp("data"), pp("stage"))
    else:
        grad_fn = value_and_grad(transformer.loss_fn(config, transformer.Axes(model="model")))
        rules = transformer.tensor_rules(config, "model", point.mesh["model"])
        plan = chain(dp("data"), fsdp("fsdp", layerwise=("layers",)), tp("model", rules))
    init, step = make_train_step(grad_fn, optax.adam(1e-3), mesh=mesh, plan=plan)
    examples = _EXAMPLES * point.microbatches * point.mesh["data"] * point.mesh.get("fsdp", 1)
    tokens = jax.ShapeDtypeStruct((examples, _TOKENS), jnp.int32)
    return step.trace(init.abstract(_params(point)), {"tokens": tokens, "targets": tokens})  # type: ignore[attr-defined]


def _resident() -> int | None:
    """The bytes of memory that this process holds now; None where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return None


def _peak() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
