"""`shardkit plan --model 70b --chip v5p --chips 512`: the layouts that fit, the fastest first, and their code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import optax
import tyro
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import shardkit as sk
from shardkit import bench, cost, planner
from shardkit._arguments import checks
from shardkit.analysis import aot
from shardkit.analysis.hlo.report import Report, size
from shardkit.analysis.hlo.topology import device_of, topology_of
from shardkit.cli.output import WithJson, console, write_json, writing
from shardkit.cli.target import TargetError, load
from shardkit.meshes.layout import table
from shardkit.planner.candidates import Candidate
from shardkit.planner.search import AXES, list_estimates

EXAMPLES = {
    "shardkit plan --model 70b --chip v5p --chips 512 --batch 4M-tokens": "which layouts fit, and why?",
    "shardkit plan --model 8b --chip v5e --chips 64 --batch 256 --emit plan.py": "write the first as a module",
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
    """8b, 70b or 405b (Llama 3); the config.json of a model on Hugging Face; or, for any other model, FILE.py:FUNCTION,
    which returns (loss_fn, params, batch), or shapes of the last two."""
    chip: str
    """v4, v5e, v5p, v6e, tpu7x, a100, h100, h200 or b200."""
    chips: int
    """How many of them, all in one slice or cluster."""
    batch: str
    """Sequences (or examples) per step over all chips; or tokens, as 4M-tokens, where M is 2^20."""
    sequence: int | None = None
    """Tokens per sequence of a transformer; 4096 if left out."""
    axes: tuple[str, ...] = AXES
    """Axes that may have more than one way, of a transformer."""
    rows: int = 10
    """Layouts to show, each using other axes than those before it."""
    efficiency: float = 1.0
    """Share of the chip's peak that matmuls reach."""
    links: Path | None = None
    """Records of shardkit bench comm on your machine, over axes named as those of --axes."""
    compile: int = 0
    """How many of the layouts to compile with the chip's real compiler, which takes minutes for each."""
    options: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """An option of the compiler as name=value, such as sk.aot.tune finds, for --compile and --emit; may be repeated."""
    emit: Path | None = None
    """Write the first layout, or with --compile the fastest of the compiled ones, as a module for a training script."""


def plan(options: Annotated[Options, tyro.conf.arg(name="")]) -> int:
    """Find the layouts of a model that fit a machine, the fastest first, and say why.

    Times are predictions from published figures, or from those of --links; nothing has been measured. The exit code is
    1 if nothing fits.
    """
    o = options
    checks.whole("plan", rows=o.rows)
    checks.count("plan", compile=o.compile)
    if str(o.emit) == str(o.json) == "-":
        raise ValueError("plan: one of --emit and --json may be standard output; got - for both. Pass a file for one.")
    where = topology_of(cost.chip(o.chip).name, o.chips)
    compiler = _compiler_options(o.options)
    if compiler and not o.compile and o.emit is None:
        raise ValueError(
            "plan: --options are for --compile and --emit; got neither. Pass --compile 1 or --emit plan.py."
        )
    # one device, of which a tpu7x has two
    job: dict[str, Any] = {"chip": device_of(where), "efficiency": o.efficiency, "chips": where.devices}
    job["links"] = None if o.links is None else bench.links(bench.read(o.links))
    asked = _of_file(o, job) if ":" in o.model else _of_transformer(o, job)
    print(f"{asked.what} per step on {o.chips} {where.chip}. All times are predictions.")
    if not asked.found:
        print(asked.why)
        write_json(o.json, "plan", [])
        return 1
    shown = asked.found[: o.rows]
    print(planner.table(shown), asked.why, sep="\n\n")
    reports = _compiled(shown[: o.compile], str(where), asked.made, compiler) if o.compile else []
    chosen = shown[0]
    if reports:
        print()
        print(_beside(shown, reports))
        fitting = [pair for pair in zip(reports, shown, strict=False) if pair[0].fits]
        if fitting:
            report, chosen = min(fitting, key=lambda pair: pair[0].seconds)
            print(f"\nfastest as compiled: {chosen.layout}, {report.seconds:.2f} s")
    if o.emit is not None:
        with writing(o.emit) as out:
            out.write(planner.source_of(chosen, **asked.sizes, options=compiler))
        if str(o.emit) != "-":
            print(f"\n{o.emit} has {chosen.layout}")
    rows = [_row(each) for each in shown]
    for row, report in zip(rows, reports, strict=False):
        row["compiled"] = json.loads(report.to_json())["derived"] | {"fits": report.fits}
    write_json(o.json, "plan", rows)
    return 0


class Asked(NamedTuple):
    """What was found for a model."""

    what: str  # the model and the batch, in words
    found: list[Candidate]  # one of each kind
    why: str  # what binds the first; without one, what would fit
    sizes: dict[str, int]  # of the batch
    made: Callable[[Candidate], tuple[Any, ...]]  # the step of a candidate, and the shapes of its arguments


def _of_transformer(o: Options, job: dict[str, Any]) -> Asked:
    """The layouts of a transformer, by its sizes."""
    model, sequence = _model(o.model), 4096 if o.sequence is None else o.sequence
    sizes: dict[str, Any] = {"batch": _sequences(o.batch, sequence), "sequence": sequence}
    found = planner.kinds(planner.search(model, axes=o.axes, **job, **sizes))
    chips = job.pop("chips")
    if found:
        why = planner.explain(found[0], partial(planner.estimate, model, **job, **sizes))
    else:
        every = list_estimates(model, chips=chips, axes=o.axes, **job, **sizes)
        smallest = min(every, key=lambda each: each.bytes).layout
        why = f"Nothing fits; the smallest is this.\n{planner.advise(model, smallest, **job, **sizes)}"

    def made(candidate: Candidate) -> tuple[Any, ...]:
        module: dict[str, Any] = {}
        exec(planner.source_of(candidate, **sizes), module)  # what is compiled is what --emit writes
        return module["make"]()

    words = f"{model.parameters() / 1e9:.2f} billion parameters, {sizes['batch']:,} sequences of {sequence:,} tokens"
    return Asked(words, found, why, sizes, made)


def _of_file(o: Options, job: dict[str, Any]) -> Asked:
    """The layouts of any model, counted from its loss."""
    if o.sequence is not None or o.axes != AXES:
        raise ValueError(
            "plan: --sequence and --axes are of a transformer; got one for a model of your own, whose examples are "
            "those of its batch, over one axis. Leave them out."
        )
    loss_fn, arguments = load(o.model)
    if len(arguments) != 2:
        raise TargetError(
            f"plan: the function must return a loss, parameters and a batch; {o.model} returned {1 + len(arguments)} "
            "values. Write for example return loss_fn, params, batch."
        )
    params, batch = arguments
    if not o.batch.isdigit():
        raise ValueError(
            f"plan: --batch must be a number of examples for a model of your own; got {o.batch!r}. Write for example "
            "256."
        )
    examples = int(o.batch)
    model = planner.counted(loss_fn, params, batch)
    first: dict[str, Candidate] = {}
    for each in planner.search(model, batch=examples, **job):
        first.setdefault(str(each.layout.plan), each)  # type: ignore[attr-defined]

    def made(candidate: Candidate) -> tuple[Any, ...]:
        init, step = sk.make_train_step(
            sk.value_and_grad(loss_fn),
            optax.adamw(3e-4),
            mesh=sk.abstract_mesh(**candidate.layout.axes),
            plan=candidate.plan(),
            accumulate=candidate.layout.accumulate,
            precision="bf16",
        )
        whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct((examples, *x.shape[1:]), x.dtype), batch)
        return step, init.abstract(params), whole

    words = f"{model.parameters() / 1e6:,.1f} million parameters, {examples:,} examples"
    why = "hidden: gradients, and layers gathered one by one; exposed: parameters gathered at once"
    return Asked(words, list(first.values()), why if first else "nothing fits: pass more chips", {}, made)


def _model(text: str) -> planner.Model:
    if text.lower() in MODELS:
        return MODELS[text.lower()]
    if not text.endswith(".json"):
        raise ValueError(
            f"plan: --model must be {', '.join(map(repr, MODELS))}, a config.json or FILE.py:FUNCTION; got {text!r}. "
            "Write for example 70b."
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


def _compiler_options(given: Sequence[str]) -> dict[str, bool | int | float | str]:
    """The options of the compiler, of "name=value"."""
    found: dict[str, bool | int | float | str] = {}
    for text in given:
        name, _, value = text.partition("=")
        if not re.fullmatch(r"\w+", name) or not value or name in found:
            raise ValueError(
                f"plan: --options must be names with values, each name once; got {text!r}. Write for example "
                "--options xla_enable_async_all_gather=true --options xla_latency_hiding_scheduler_rerun=2."
            )
        found[name] = _value(value)
    return found


def _value(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if re.fullmatch(r"-?\d{1,18}", text):
        return int(text)
    return float(text) if re.fullmatch(r"-?\d+\.\d+", text) else text


def _compiled(
    candidates: Sequence[Candidate],
    topology: str,
    made: Callable[[Candidate], tuple[Any, ...]],
    options: dict[str, Any],
) -> list[Report]:
    """The reports of the compiler on these candidates; a line on the terminal says which it is at."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    reports = []
    with Progress(*columns, console=console(), transient=True) as progress:
        for number, candidate in enumerate(candidates, 1):
            what = f"compiling {number} of {len(candidates)} for {topology}: {candidate.layout}"
            task = progress.add_task(what)
            if not progress.console.is_terminal:
                print(what, flush=True)
            step, *args = made(candidate)
            reports.append(aot.compile(step, args, topology=topology, options=options))
            progress.remove_task(task)
    return reports


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
