"""What `shardkit plan` searches and compiles: the layouts of a transformer, or of any model from its loss."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import shardkit as sk
from shardkit import bench, planner
from shardkit.analysis import aot
from shardkit.analysis.hlo.report import Report, format_bytes
from shardkit.analysis.hlo.topology import Topology, device_of
from shardkit.analysis.hlo.tuning import Trial
from shardkit.cli.output import console
from shardkit.cli.target import TargetError, load
from shardkit.cli.tuning import Attempt, tune
from shardkit.meshes.layout import table
from shardkit.planner.candidates import Candidate
from shardkit.planner.changes import list_changes
from shardkit.planner.search import AXES, list_estimates
from shardkit.planner.source import source_of
from shardkit.planner.tables import format_milliseconds

MODELS = {  # Llama 3
    "8b": planner.Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14_336, vocabulary=128_256),
    "70b": planner.Model(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28_672, vocabulary=128_256),
    "405b": planner.Model(layers=126, hidden=16_384, heads=128, kv_heads=8, ffn=53_248, vocabulary=128_256),
}
_UNITS = {"": 1, "k": 2**10, "M": 2**20, "G": 2**30}
_SEQUENCE = 4096


class LayoutSearch(NamedTuple):
    """The layouts of a model that fit a machine.

    Attributes:
        subject: the model and the batch, in words.
        candidates: one of each kind, the fastest first.
        reason: what binds the first; without one, what would fit.
        sizes: of the batch.
        make_step: the step of a candidate, and the shapes of its arguments.
    """

    subject: str
    candidates: list[Candidate]
    reason: str
    sizes: dict[str, int]
    make_step: Callable[[Candidate], tuple[Any, ...]]


def search(
    model: str,
    batch: str,
    topology: Topology,
    *,
    sequence: int | None,
    axes: tuple[str, ...],
    kernel: bool,
    efficiency: float,
    links: Path | None,
) -> LayoutSearch:
    """Searches the layouts of a model, named as the options of `shardkit plan` name it."""
    machine: dict[str, Any] = {
        "chip": device_of(topology),  # one device, of which a tpu7x has two
        "efficiency": efficiency,
        "links": None,
    }
    if links is not None:
        machine["links"] = bench.links(bench.read(links))
    if ":" not in model:
        sizes = _read_model(model)._replace(kernel=kernel)
        if sequence is None:
            sequence = _SEQUENCE
        return _search_transformer(sizes, batch, sequence, axes, topology.devices, machine)
    if sequence is not None or axes != AXES or kernel:
        raise ValueError(
            "plan: --sequence, --axes and --kernel need a transformer; got one for another model, with its examples "
            "over one axis. Leave them out."
        )
    return _search_of_loss(model, batch, topology.devices, machine)


def _search_transformer(
    model: planner.Model, batch_text: str, sequence: int, axes: tuple[str, ...], chips: int, machine: dict[str, Any]
) -> LayoutSearch:
    """The layouts of a transformer, by its sizes."""
    batch = _read_sequences(batch_text, sequence)
    sizes: dict[str, Any] = {"batch": batch, "sequence": sequence}
    candidates = planner.kinds(planner.search(model, chips=chips, axes=axes, **machine, **sizes))
    if candidates:
        reason = planner.explain(candidates[0], partial(planner.estimate, model, **machine, **sizes))
    else:
        tried = list_estimates(model, chips=chips, axes=axes, **machine, **sizes)
        smallest = min(tried, key=lambda candidate: candidate.bytes).layout
        advice = planner.advise(model, smallest, **machine, **sizes)
        reason = f"Nothing fits; the smallest is this.\n{advice}"

    def make_step(candidate: Candidate) -> tuple[Any, ...]:
        module: dict[str, Any] = {}
        exec(source_of(candidate, **sizes), module)  # what is compiled is what --emit writes
        return module["make"]()

    billions = model.parameters() / 1e9
    subject = f"{billions:.2f} billion parameters, {batch:,} sequences of {sequence:,} tokens"
    return LayoutSearch(subject, candidates, reason, sizes, make_step)


def _search_of_loss(target: str, batch_text: str, chips: int, machine: dict[str, Any]) -> LayoutSearch:
    """The layouts of any model, counted from its loss."""
    loss_fn, arguments = load(target)
    if len(arguments) != 2:
        raise TargetError(
            f"plan: the function must return a loss, parameters and a batch; {target} returned "
            f"{1 + len(arguments)} values. Write for example return loss_fn, params, batch."
        )
    params, batch = arguments
    if not batch_text.isdecimal():
        raise ValueError(
            f"plan: --batch must be a number of examples for a model of your own; got {batch_text!r}. Write for "
            "example 256."
        )
    examples = int(batch_text)
    model = planner.counted(loss_fn, params, batch)
    # The search returns the fastest first: of one plan with several mesh sizes or microbatches, the first stays.
    first_of_plan: dict[str, Candidate] = {}
    for candidate in planner.search(model, batch=examples, chips=chips, **machine):
        plan = str(candidate.layout.plan)  # type: ignore[attr-defined]
        first_of_plan.setdefault(plan, candidate)
    reason = "nothing fits: pass more chips"
    if first_of_plan:
        reason = "hidden: gradients, and layers gathered one by one; exposed: parameters gathered at once"

    def make_step(candidate: Candidate) -> tuple[Any, ...]:
        init, step = sk.make_train_step(
            sk.value_and_grad(loss_fn),
            optax.adamw(3e-4),
            mesh=sk.abstract_mesh(**candidate.layout.axes),
            plan=candidate.plan(),
            accumulate=candidate.layout.accumulate,
            precision="bf16",
        )

        # The model was counted on the user's batch, which may be small. The step is compiled for that of --batch.
        def enlarge(x: Any) -> jax.ShapeDtypeStruct:
            _, *shape_of_example = x.shape
            return jax.ShapeDtypeStruct((examples, *shape_of_example), x.dtype)

        global_batch = jax.tree.map(enlarge, batch)
        return step, init.abstract(params), global_batch

    subject = f"{model.parameters() / 1e6:,.1f} million parameters, {examples:,} examples"
    return LayoutSearch(subject, list(first_of_plan.values()), reason, {}, make_step)


def _read_model(text: str) -> planner.Model:
    if text.lower() in MODELS:
        return MODELS[text.lower()]
    if not text.endswith(".json"):
        raise ValueError(
            f"plan: --model must be {', '.join(map(repr, MODELS))}, a config.json or FILE.py:FUNCTION; got {text!r}. "
            "Write for example 70b."
        )
    return planner.Model.of(Path(text))


def _read_sequences(text: str, sequence: int) -> int:
    """The number of sequences of "1024" or "4M-tokens", which of sequences of 4,096 tokens is 1,024 too."""
    if text.isdecimal():
        return int(text)
    # A unit or a fraction makes sense for tokens only: "4M" without -tokens would be four million sequences.
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kMG]?)-tokens", text)
    if match is None:
        raise ValueError(
            f"plan: --batch must be a number of sequences, or of tokens with -tokens; got {text!r}. Write for example "
            "1024 or 4M-tokens."
        )
    number, unit = match.groups()
    sequences = round(float(number) * _UNITS[unit] / sequence)
    if sequences < 1:
        raise ValueError(
            f"plan: --batch must have at least one sequence; got {text} for sequences of {sequence} tokens. Write more "
            "tokens or a smaller --sequence."
        )
    return sequences


def compile_candidates(
    candidates: Sequence[Candidate],
    topology: str,
    make_step: Callable[[Candidate], tuple[Any, ...]],
    options: dict[str, Any],
) -> list[Report]:
    """The reports of the compiler on these candidates; a line on the terminal says which it is at."""
    reports = []
    for number, candidate in enumerate(candidates, 1):
        text = f"compiling {number} of {len(candidates)} for {topology}: {candidate.layout}"
        reports.append(compile_candidate(candidate, topology, make_step, options, text))
    return reports


def compile_candidate(
    candidate: Candidate,
    topology: str,
    make_step: Callable[[Candidate], tuple[Any, ...]],
    options: dict[str, Any],
    text: str,
) -> Report:
    """The compiler's report on a candidate; a line on the terminal says what it does."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console(), transient=True) as progress:
        progress.add_task(text)
        # rich draws nothing that moves into a pipe, and a log should say what takes minutes.
        if not progress.console.is_terminal:
            print(text, flush=True)
        step, *args = make_step(candidate)
        return aot.compile(step, args, topology=topology, options=options)


def tune_candidates(
    candidates: Sequence[Candidate],
    reports: Sequence[Report],
    topology: Topology,
    make_step: Callable[[Candidate], tuple[Any, ...]],
    options: dict[str, Any],
) -> list[list[Attempt]]:
    """For each compiled candidate all attempts to make it faster, of which the first is as it was compiled."""

    def compile_step(candidate: Candidate, options: dict[str, Any], changes: str) -> Report:
        text = f"compiling for {topology}: {candidate.layout}, with {changes}"
        return compile_candidate(candidate, str(topology), make_step, options, text)

    chip = device_of(topology)
    attempts = []
    for candidate, report in zip(candidates, reports, strict=True):
        changes = list_changes(candidate.layout, chip)
        attempts.append(tune(candidate, Trial(options, report), changes, compile_step))
    return attempts


def compare(candidates: Sequence[Candidate], reports: Sequence[Report]) -> str:
    """A table of what was predicted of each candidate, beside what the compiler reports, the fastest first."""
    rows = [
        ("", "memory", "", "compute ms", "", "exposed ms", "", "fits"),
        ("layout", "predicted", "compiled", "predicted", "compiled", "predicted", "compiled", ""),
    ]
    pairs = list(zip(candidates, reports, strict=True))
    pairs.sort(key=_rank_compiled)
    for candidate, report in pairs:
        fits = "NO"
        if report.fits:
            fits = "yes"
        row = (
            str(candidate.layout),
            format_bytes(candidate.bytes),
            format_bytes(report.needed),
            format_milliseconds(candidate.compute_seconds),
            format_milliseconds(report.compute.seconds),
            format_milliseconds(candidate.exposed_seconds),
            format_milliseconds(report.exposed_seconds),
            fits,
        )
        rows.append(row)
    return table(rows)


def _rank_compiled(pair: tuple[Candidate, Report]) -> tuple[bool, float]:
    _, report = pair
    return (not report.fits, report.seconds)


def choose_compiled(candidates: Sequence[Candidate], reports: Sequence[Report]) -> Candidate | None:
    """The candidate that is the fastest as compiled, of those that fit, and says which; None if none fits.

    The compiler has the last word: what it says does not fit is not chosen, however fast it was predicted to be.
    """
    fastest = None
    seconds = math.inf
    for candidate, report in zip(candidates, reports, strict=True):
        if report.fits and report.seconds < seconds:
            fastest = candidate
            seconds = report.seconds
    if fastest is None:
        print(f"\nof {len(reports)} compiled layouts none fits. Pass more --chips, or compile more of the --rows.")
        return None
    print(f"\nfastest as compiled: {fastest.layout}, {format_milliseconds(seconds)} ms")
    return fastest


def make_row(candidate: Candidate) -> dict[str, Any]:
    """A candidate as JSON has it."""
    layout = candidate.layout
    row: dict[str, Any] = {"layout": layout._asdict(), "axes": layout.axes, "by_axis": dict(candidate.by_axis)}
    for name, value in candidate._asdict().items():
        if name not in ("model", "layout", "by_axis"):
            row[name] = value
    for name in ("bytes", "fits", "seconds"):  # derived from the others
        row[name] = getattr(candidate, name)
    return row
