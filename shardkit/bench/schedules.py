"""Pipeline schedules executed, beside what their simulation says: time, memory, and the time to compile.

All schedules run the same small model. Simulated devices share the CPU's cores, so that CPU time is the work of all
devices together: it shows what a schedule recomputes and what masked devices discard, not the bubble, in which a device
waits.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardkit import _check
from shardkit import schedules as builders
from shardkit._typed import typed
from shardkit.bench.growth import Rows, cell, power, right
from shardkit.bench.measure import Case, measure
from shardkit.bench.pipelines import SPECS, VOCABULARY, make_params, pipelined, unpipelined
from shardkit.bench.records import FORMAT, VERSION, Record
from shardkit.layout import shard
from shardkit.pipeline.run import Mode
from shardkit.schedules import Schedule

BUILDERS = {name: each for name in builders.__all__ if inspect.isfunction(each := getattr(builders, name))}
CHUNKED = tuple(name for name, each in BUILDERS.items() if "chunks" in inspect.signature(each).parameters)
MODES = get_args(Mode)
_ALONE = "unpipelined"


class Sizes(NamedTuple):
    """The sizes of the model that the schedules run.

    Attributes:
        dim: the width of the residual stream; the layers are four times as wide inside.
        examples: examples of a microbatch, each a token.
        layers: layers of each stage of each chunk.
    """

    dim: int = 64
    examples: int = 128
    layers: int = 1


@typed
def schedules(
    mesh: Mesh,
    *,
    names: Sequence[str] = tuple(BUILDERS),
    microbatches: Sequence[int] = (4, 8, 16, 32),
    modes: Sequence[str] = ("masked",),
    chunks: int = 2,
    recompute: bool = True,
    sizes: Sizes = Sizes(),  # noqa: B008
    calls: int = 1,
    rounds: int = 10,
    report: Callable[[Sequence[Record]], None] = lambda records: None,
) -> list[Record]:
    """Runs pipeline schedules beside the model without a pipeline, and beside their simulation.

    A row has a number of microbatches; its baseline is the model on one device, microbatch by microbatch.

    Args:
        mesh: one axis, "stage".
        names: of `shardkit.schedules`; GPipe runs always, as the second baseline.
        microbatches: how many of them, a row each.
        modes: "masked", "branch" or both, as for `pipeline_value_and_grad`.
        chunks: chunks of the model on each device, for the schedules that take them.
        recompute: as for `pipeline_value_and_grad`.
        sizes: of the model.
        calls, rounds: as for `measure`.
        report: called with the records of each row as soon as they are there.

    Returns:
        A record per row and case, as from `measure`, with the schedule, its simulation (`makespan`, `bubble`, `ticks`,
        in forwards of a microbatch through a device), `work_ratio`, the simulated work of all devices over that of the
        baseline, `gpipe_work_ratio` and `gpipe_cpu_ratio`, both over GPipe in the same mode, the slots,
        `temp_bytes` of a device and the CPU seconds to trace and to compile. After them a record per schedule and mode,
        "exponents", with those of compile time and of memory against microbatches. `wrong` counts the elements of loss
        and gradients that are not the baseline's.

    Raises:
        ValueError: another mesh, an unknown schedule or mode, or no microbatches.
    """
    if tuple(mesh.axis_names) != ("stage",):
        raise ValueError(
            f"schedules: the mesh must have one axis, 'stage'; got {_check.sized(mesh.shape.items())}. Pass for "
            "example make_mesh(stage=4)."
        )
    for name in names:
        _check.one_of("schedules", "names", name, tuple(BUILDERS))
    for mode in modes:
        _check.one_of("schedules", "modes", mode, MODES)
    if not names or not modes or not microbatches:
        raise ValueError("schedules: names, modes and microbatches must not be empty. Pass at least one of each.")
    _check.whole("schedules", chunks=chunks, **sizes._asdict())
    devices, records = mesh.shape["stage"], []
    chosen = dict.fromkeys(["gpipe", *names])
    for count in _check.whole("schedules", **{f"microbatches[{i}]": m for i, m in enumerate(microbatches)}):
        made = [builder(name, devices, count, chunks) for name in chosen]
        records += row(mesh, [(each, mode) for mode in modes for each in made], recompute, sizes, calls, rounds)
        report(records[-1 - len(made) * len(modes) :])
    return records + _exponents(records)


def builder(name: str, devices: int, microbatches: int, chunks: int) -> Schedule:
    """The schedule of that name, with chunks if it takes them; lockstep, 1F1B in one program, has one chunk."""
    if name in CHUNKED and name != "lockstep":
        return BUILDERS[name](devices, microbatches, chunks)
    return BUILDERS[name](devices, microbatches)


def work(schedule: Schedule, mode: str, recompute: bool) -> float:
    """What all devices compute, over what the model without a pipeline computes: F takes 1, I and W 1 each.

    Masked, every device computes each kind of op of a tick; in branches, its own alone.
    """
    costs = {"F": 1.0, "B": 2.0 + recompute, "I": 1.0 + recompute, "W": 1.0}
    if mode == "branch":
        total = sum(schedule.simulate(1, costs["B"], weight_grad=1).busy)
    else:
        segments = schedule.table(saved=not recompute).segments
        # Where some devices run B and others I, B is I with W after it.
        kinds = [(each.ticks, set(each.ops) - ({"I"} if "B" in each.ops else set())) for each in segments]
        total = sum(ticks * sum(costs[op] for op in ops) for ticks, ops in kinds)
        total *= schedule.devices / schedule.chunks
    return total / (3 * schedule.devices * schedule.microbatches)


def row(
    mesh: Mesh,
    pipelines: Sequence[tuple[Schedule, str]],
    recompute: bool,
    sizes: Sizes,
    calls: int,
    rounds: int,
) -> list[Record]:
    """The records of schedules, each with its mode, of the same number of microbatches."""
    count = pipelines[0][0].microbatches
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, sizes.examples * count).astype(np.int32)
    # Chunks divide the layers: every schedule runs as many.
    layers = sizes.layers * mesh.size * int(np.lcm.reduce([each.chunks for each, _ in pipelines]))
    params = make_params(layers, sizes.dim, 4 * sizes.dim)
    one = Mesh(mesh.devices.reshape(-1)[:1], ("stage",))
    cases, fields = [], {}
    for name, step, place, facts in [
        (_ALONE, unpipelined(count), one, {}),
        *(
            (f"{s.name}, {mode}", pipelined(s, mode, recompute, mesh), mesh, _facts(s, mode, recompute, sizes))
            for s, mode in pipelines
        ),
    ]:
        args = (shard(params, place, SPECS), {"tokens": jax.device_put(tokens, NamedSharding(place, P()))})
        case = Case(name, jax.jit(step), jax.device_put(jnp.float32(0), NamedSharding(place, P())), args)
        fields[name] = facts | _built(case)
        cases.append(case)
    what = f"{count} microbatches"
    how: dict[str, Any] = {"mode": "dispatched", "calls": calls, "rounds": rounds, "donate": False, "refuse": False}
    found = measure("schedules", what, cases, fields=fields, **how)
    for each, mode in pipelines:
        base, own = (next(r for r in found if r["case"] == f"{name}, {mode}") for name in ("gpipe", each.name))
        for ratio in ("cpu_ratio", "wall_ratio"):  # both over the first case
            own[f"gpipe_{ratio}"] = round(own[ratio] / base[ratio], 4)
        own["gpipe_work_ratio"] = round(own["work_ratio"] / base["work_ratio"], 4)
    return found


def lines(records: Sequence[Record]) -> str:
    """The records of a row, or the exponents, as a table."""
    if "compile_exponent" in records[0]:
        keys = ("slots", "temp", "trace", "compile")
        rows: Rows = [("exponent against microbatches", *keys)]
        for r in records:
            rows.append((r["case"], *(cell(r[f"{key}_exponent"]) for key in keys)))
        return right(rows)
    head = ("case", "ticks", "makespan", "bubble", "work", "CPU", "work/GPipe", "CPU/GPipe")
    rows = [(*head, "in", "cot", "kept", "slot KiB", "temp KiB", "trace s", "compile s", "wrong")]
    for r in records:
        simulated, over = ("", "", ""), ("", "")
        slots: tuple[str, ...] = ("",) * 4
        if "schedule" in r:
            simulated = (str(r["ticks"]), f"{r['makespan']:g}", f"{r['bubble']:.1%}")
            over = (cell(r["gpipe_work_ratio"]), cell(r["gpipe_cpu_ratio"]))
            counts = (str(r[f"slots_{kind}"]) for kind in ("inputs", "cotangents", "kept"))
            slots = *counts, cell(r["slot_bytes"], 0, 1024)
        ratios = (cell(r.get("work_ratio", 1.0)), cell(r["cpu_ratio"]))
        built = (cell(r["temp_bytes"], 0, 1024), cell(r["trace_cpu_s"]), cell(r["compile_cpu_s"]), str(r["wrong"]))
        rows.append((r["case"], *simulated, *ratios, *over, *slots, *built))
    return f"{records[0]['row']}\n{right(rows)}"


def _facts(schedule: Schedule, mode: str, recompute: bool, sizes: Sizes) -> dict[str, Any]:
    """What the table of a schedule says, for its record."""
    timeline, slots = schedule.simulate(1, 2 + recompute, weight_grad=1), schedule.slots(saved=not recompute)
    return {
        "schedule": schedule.name,
        "execution": mode,
        "recompute": recompute,
        "stages": schedule.devices,
        "chunks": schedule.chunks,
        "microbatches": schedule.microbatches,
        "ticks": max(map(len, schedule.rows)),
        "makespan": round(timeline.makespan, 6),
        "bubble": round(timeline.bubble, 6),
        "work_ratio": round(work(schedule, mode, recompute), 4),
        "slots_inputs": slots.inputs,
        "slots_saved": slots.saved,
        "slots_cotangents": slots.cotangents,
        "slots_kept": slots.kept,
        "slot_bytes": 4 * sizes.examples * sizes.dim,  # of an input or a cotangent
    }


def _built(case: Case) -> dict[str, Any]:
    """CPU seconds to trace and to compile a case, which its calls then use, and the memory that it needs."""
    begun = time.process_time()
    traced = case.step.trace(case.carry, *case.args)  # type: ignore[attr-defined]
    between = time.process_time()
    memory = traced.lower().compile().memory_analysis()
    seconds = {"trace_cpu_s": between - begun, "compile_cpu_s": time.process_time() - between}
    return {"temp_bytes": memory.temp_size_in_bytes} | {key: round(value, 4) for key, value in seconds.items()}


def _exponents(records: Sequence[Record]) -> list[Record]:
    """For each schedule and mode, how slots, memory and the time to build grow with the microbatches."""
    out = []
    for name in dict.fromkeys(r["case"] for r in records if "schedule" in r):
        own = [r for r in records if r["case"] == name]
        counts = [r["microbatches"] for r in own]
        costs = {
            "slots": [sum(r[f"slots_{kind}"] for kind in ("inputs", "saved", "cotangents", "kept")) for r in own],
            "temp": [r["temp_bytes"] for r in own],
            "trace": [r["trace_cpu_s"] for r in own],
            "compile": [r["compile_cpu_s"] for r in own],
        }
        fits = {f"{key}_exponent": power(counts, values) for key, values in costs.items()}
        head = {"format": FORMAT, "version": VERSION, "benchmark": "schedules", "row": "exponents", "case": name}
        out.append({**head, **fits, "microbatches_fitted": counts, "environment": own[0]["environment"]})
    return out
