"""`shardkit plan --model 70b --chip v5p --chips 512`: the layouts that fit, the fastest first, and their code."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from shardkit import bench, cost, planner
from shardkit.analysis import aot
from shardkit.analysis.hlo.report import Report, size
from shardkit.analysis.hlo.topology import topology_of
from shardkit.cli.output import WithJson, console, write_json, writing
from shardkit.meshes.layout import table
from shardkit.planner.candidates import Candidate

EXAMPLES = {
    "shardkit plan --model 70b --chip v5p --chips 512 --batch 4M-tokens": "which layouts fit, and why?",
    "shardkit plan --model config.json --chip h100 --chips 64 --batch 256 --compile 1 --emit train_plan.py": (
        "compile the best, and write it as a module"
    ),
}
MODELS = {  # Llama 3
    "8b": planner.Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14_336, vocabulary=128_256),
    "70b": planner.Model(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28_672, vocabulary=128_256),
    "405b": planner.Model(layers=126, hidden=16_384, heads=128, kv_heads=8, ffn=53_248, vocabulary=128_256),
}
_UNITS = {"": 1, "k": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class Options(WithJson):
    """Options of `shardkit plan`."""

    model: str
    """8b, 70b or 405b (Llama 3), or the config.json of a model on Hugging Face."""
    chip: str
    """v4, v5e, v5p, v6e, tpu7x, a100, h100, h200 or b200."""
    chips: int
    """How many of them, all in one slice or cluster."""
    batch: str
    """Sequences per step over all chips, or tokens, as 4M-tokens, where M is 2^20."""
    sequence: int = 4096
    """Tokens per sequence."""
    axes: tuple[str, ...] = planner.AXES
    """Axes that may have more than one way."""
    rows: int = 10
    """Layouts to show, each using other axes than those before it."""
    efficiency: float = 1.0
    """Share of the chip's peak that matmuls reach."""
    links: Path | None = None
    """Records of shardkit bench comm on your machine, over axes named data, fsdp and tensor."""
    compile: int = 0
    """How many of the layouts to compile with the chip's real compiler, which takes minutes for each."""
    emit: Path | None = None
    """Write the first layout as a module that a training script imports."""


def plan(options: Annotated[Options, tyro.conf.arg(name="")]) -> int:
    """Find the layouts of a transformer that fit a machine, the fastest first, and say why.

    Times are predictions from published figures, or from those of --links; nothing has been measured. The exit code is
    1 if nothing fits.
    """
    o = options
    model, sequence = _model(o.model), o.sequence
    batch = _sequences(o.batch, sequence)
    links = None if o.links is None else bench.links(bench.read(o.links))
    job: dict[str, Any] = {"chip": o.chip, "batch": batch, "sequence": sequence}
    job |= {"efficiency": o.efficiency, "links": links}
    judge = partial(_judged, model, job)
    found = planner.search(model, chips=o.chips, axes=o.axes, **job)
    print(
        f"{model.parameters() / 1e9:.2f} billion parameters, {batch:,} sequences of {sequence:,} tokens per step on "
        f"{o.chips} {cost.chip(o.chip).name}. All times are predictions."
    )
    if not found:
        print(planner.advise(model, planner.Layout(fsdp=o.chips), **job))
        write_json(o.json, "plan", [])
        return 1
    shown = planner.kinds(found)[: o.rows]
    print(planner.table(shown))
    print()
    print(planner.explain(shown[0], judge))
    reports = _compiled(shown[: o.compile], topology_of(o.chip, o.chips), batch, sequence) if o.compile else []
    if reports:
        print()
        print(_beside(shown, reports))
    if o.emit is not None:
        with writing(o.emit) as out:
            out.write(planner.source_of(shown[0], batch=batch, sequence=sequence))
        if str(o.emit) != "-":
            print(f"\n{o.emit}: the first layout; see its functions train_step(optimizer) and make()")
    rows = [_row(each) for each in shown]
    for row, report in zip(rows, reports, strict=False):
        row["compiled"] = json.loads(report.to_json())["derived"] | {"fits": report.fits}
    write_json(o.json, "plan", rows)
    return 0


def _judged(model: planner.Model, job: dict[str, Any], layout: planner.Layout) -> Candidate:
    return planner.estimate(model, layout, **job)


def _model(text: str) -> planner.Model:
    if text.lower() in MODELS:
        return MODELS[text.lower()]
    if not text.endswith(".json"):
        raise ValueError(
            f"plan: --model must be {', '.join(map(repr, MODELS))} or a config.json; got {text!r}. Write for example "
            "70b."
        )
    return planner.Model.of(Path(text))


def _sequences(text: str, sequence: int) -> int:
    """The number of sequences of "1024" or "4M-tokens"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kMG]?)(-tokens)?", text)
    if not found or (found[2] and not found[3]) or (not found[3] and "." in found[1]):
        raise ValueError(
            f"plan: --batch must be a number of sequences, or of tokens with -tokens; got {text!r}. Write for example "
            "1024 or 4M-tokens."
        )
    if not found[3]:
        return int(found[1])
    sequences = round(float(found[1]) * _UNITS[found[2]] / sequence)
    if sequences < 1:
        raise ValueError(
            f"plan: --batch must have at least one sequence; got {text} for sequences of {sequence} tokens. Write more "
            "tokens or a smaller --sequence."
        )
    return sequences


def _compiled(candidates: Sequence[Candidate], topology: str, batch: int, sequence: int) -> list[Report]:
    """The reports of the compiler on these candidates; a line on the terminal says which it is at."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    reports = []
    with Progress(*columns, console=console(), transient=True) as progress:
        for number, candidate in enumerate(candidates, 1):
            what = f"compiling {number} of {len(candidates)} for {topology}: {candidate.layout}"
            task = progress.add_task(what)
            if not progress.console.is_terminal:
                print(what, flush=True)
            step, *args = _made(candidate, batch, sequence)
            reports.append(aot.compile(step, args, topology=topology))
            progress.remove_task(task)
    return reports


def _made(candidate: Candidate, batch: int, sequence: int) -> tuple[Any, ...]:
    """The step and the shapes of its arguments: what `make` of the emitted module returns."""
    module: dict[str, Any] = {}
    exec(planner.source_of(candidate, batch=batch, sequence=sequence), module)
    return module["make"]()


def _beside(candidates: Sequence[Candidate], reports: Sequence[Report]) -> str:
    """Predicted beside compiled."""
    rows = [
        ("", "memory", "", "compute s", "", "exposed s", "", "fits"),
        ("layout", *3 * ("predicted", "compiled"), ""),
    ]
    for candidate, report in zip(candidates, reports, strict=False):
        exposed = candidate.exposed_seconds + max(0.0, candidate.hidden_seconds - candidate.compute_seconds)
        rows.append(
            (
                str(candidate.layout),
                size(candidate.bytes),
                size(report.needed),
                f"{candidate.compute_seconds:.3f}",
                f"{report.compute.seconds:.3f}",
                f"{exposed:.3f}",
                f"{report.exposed_seconds:.3f}",
                "yes" if report.fits else "NO",
            )
        )
    return table(rows)


def _row(candidate: Candidate) -> dict[str, Any]:
    """A candidate as JSON has it."""
    derived = {name: getattr(candidate, name) for name in ("bytes", "fits", "seconds")}
    kept = {name: value for name, value in candidate._asdict().items() if name not in ("model", "layout", "by_axis")}
    layout = {"layout": candidate.layout._asdict(), "axes": candidate.layout.axes, "by_axis": dict(candidate.by_axis)}
    return layout | kept | derived
