"""`shardkit plan --model 70b --chip v5p --chips 512`: the layouts that fit, the fastest first, and their code."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from shardkit.cli.options import Optional, WithJson
from shardkit.cli.output import open_output, write_json

if TYPE_CHECKING:
    from shardkit.planner.candidates import Candidate

EXAMPLES = {
    "shardkit plan --model 70b --chip v5p --chips 512 --batch 4M-tokens": "find the layouts that fit, and the reasons",
    "shardkit plan --model 8b --chip v5e --chips 64 --batch 256 --emit plan.py": "write the first layout as a module",
}
AXES = ("data", "fsdp", "tensor", "context", "expert", "stage")
_COMPILED = 3  # layouts, unless --compile says how many


@dataclass(frozen=True)
class Options(WithJson):
    """Options of `shardkit plan`."""

    model: str
    """8b, 70b or 405b (Llama 3), or the config.json of a model on Hugging Face. For any other model, FILE.py:FUNCTION
    that returns (loss_fn, params, batch); shapes are enough for params and batch."""
    chip: str
    """v4, v5e, v5p, v6e, tpu7x, a100, h100, h200 or b200."""
    chips: int
    """Number of chips, all in one slice or cluster."""
    batch: str
    """Sequences (or examples) per step over all chips; or tokens, such as 4M-tokens (M is 2^20)."""
    sequence: Optional[int] = None
    """Tokens per sequence of a transformer; by default 4096."""
    axes: tuple[str, ...] = AXES
    """Axes of a transformer that may have more than one way."""
    kernel: bool = False
    """Attention of a transformer by jax's kernel for the chip, which writes no scores to memory."""
    rows: int = 10
    """Number of layouts to show, each with other axes."""
    efficiency: float = 1.0
    """Share of the chip's peak that matmuls reach."""
    links: Optional[Path] = None
    """Records of shardkit bench comm on your machine, over axes with the names of --axes."""
    compile: Optional[int] = None
    """Number of layouts to compile with the chip's real compiler, the first ones; at most --rows. By default 3 if the
    compiler is installed. Each takes a minute or several."""
    tune: bool = False
    """Compile the compiled layouts again with other options of the compiler and other forms of the step, and keep what
    makes them faster: three to five compilations each."""
    options: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A compiler option, name=value, for --compile and --emit; you may repeat it. sk.aot.tune finds good options."""
    emit: Optional[Path] = None
    """Write the first layout, or with --compile the fastest compiled layout that fits, as a module for your training
    script."""


def plan(options: Options) -> int:
    """Find the layouts of a model that fit a machine, the fastest first, and say why.

    Times are predictions from published figures, or from your figures in --links; nothing is measured. If the chip's
    compiler is installed, it compiles the first layouts, and the fastest of them is by its word. The exit code is 1 if
    nothing fits; if layouts were compiled, if none of them fits.
    """
    from shardkit import cost, planner
    from shardkit._arguments import checks
    from shardkit.analysis.hlo.topology import is_compiler_installed, topology_of
    from shardkit.cli import layouts
    from shardkit.cli.tuning import attempt_as_json, choose_attempt, compare_attempts
    from shardkit.planner.source import source_of
    from shardkit.planner.tables import format_milliseconds

    checks.integers_from_one("plan", rows=options.rows)
    topology = topology_of(cost.chip(options.chip).name, options.chips)
    count = options.compile
    if count is None:
        count = 0
        if is_compiler_installed(topology):
            count = min(_COMPILED, options.rows)
    _check_options(options, count)
    compiler_options = _read_compiler_options(options.options)
    search = layouts.search(
        options.model,
        options.batch,
        topology,
        sequence=options.sequence,
        axes=options.axes,
        kernel=options.kernel,
        efficiency=options.efficiency,
        links=options.links,
    )
    print(f"{search.subject} per step on {options.chips} {topology.chip}. All times are predictions.")
    if not search.candidates:
        print(search.reason)
        write_json(options.json, "plan", [])
        return 1
    candidates = search.candidates[: options.rows]
    print(planner.table(candidates), search.reason, sep="\n\n")

    # Without a compiler the prediction decides; below, the compiler has the last word.
    chosen: Candidate | None = candidates[0]
    to_compile = candidates[:count]
    reports = []
    if to_compile:
        if options.compile is None:
            number = len(to_compile)
            print(f"\nThe chip's own compiler compiles the first {number} now; --compile 0 leaves it out.", flush=True)
        reports = layouts.compile_candidates(to_compile, str(topology), search.make_step, compiler_options)
        seconds = sum(report.compile_seconds for report in reports)
        print(f"\ncompiled {len(reports)} layouts in {seconds:.0f} s, the fastest first:")
        print(layouts.compare(to_compile, reports))
        chosen = layouts.choose_compiled(to_compile, reports)
    attempts = []
    if options.tune:
        attempts = layouts.tune_candidates(to_compile, reports, topology, search.make_step, compiler_options)
        every_attempt = list(itertools.chain.from_iterable(attempts))
        print(f"\ntuned in {len(every_attempt) - len(attempts)} compilations, the fastest first:")
        print(compare_attempts(every_attempt))
        best = choose_attempt(every_attempt)
        if best.trial.report is not None and best.trial.report.fits:
            chosen = best.candidate
            compiler_options = best.trial.options
            print(f"\nfastest as tuned: {chosen.layout}, {format_milliseconds(best.trial.seconds)} ms")
    if options.emit is not None and chosen is not None:
        with open_output(options.emit) as out:
            out.write(source_of(chosen, **search.sizes, options=compiler_options))
        if str(options.emit) != "-":
            print(f"\n{options.emit} has {chosen.layout}")
    rows = [layouts.make_row(candidate) for candidate in candidates]
    for row, report in zip(rows[: len(reports)], reports, strict=True):
        derived = json.loads(report.to_json())["derived"]
        row["compiled"] = derived | {"fits": report.fits}
    for row, attempts_of_row in zip(rows[: len(attempts)], attempts, strict=True):
        row["tuned"] = [attempt_as_json(attempt) for attempt in attempts_of_row]
    write_json(options.json, "plan", rows)
    return 1 if chosen is None else 0


def _check_options(options: Options, count: int) -> None:
    """Refuses numbers that are none of layouts, two results in one place, and options without an effect.

    `count` is how many layouts are compiled.
    """
    from shardkit._arguments import checks

    checks.integers_from_zero("plan", compile=count)
    if count > options.rows:
        raise ValueError(
            f"plan: --compile must be at most --rows, the layouts that are shown; got {count} and "
            f"{options.rows}. Pass --rows {count}, or compile fewer."
        )
    if str(options.emit) == str(options.json) == "-":
        raise ValueError("plan: one of --emit and --json may be standard output; got - for both. Pass a file for one.")
    if options.tune and (not count or ":" in options.model):
        raise ValueError(
            "plan: --tune changes compiled layouts of a transformer; got none. Pass --compile 1 and the sizes of a "
            "transformer, or use sk.aot.tune."
        )
    if options.options and not count and options.emit is None:
        raise ValueError(
            "plan: --options are for --compile and --emit; got neither. Pass --compile 1 or --emit plan.py."
        )


def _read_compiler_options(texts: Sequence[str]) -> dict[str, bool | int | float | str]:
    """The options of the compiler, of "name=value"."""
    values: dict[str, bool | int | float | str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not re.fullmatch(r"\w+", name) or not value or name in values:
            raise ValueError(
                f"plan: --options must be names with values, each name once; got {text!r}. Write for example "
                "--options xla_enable_async_all_gather=true --options xla_latency_hiding_scheduler_rerun=2."
            )
        values[name] = _read_value(value)
    return values


def _read_value(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if re.fullmatch(r"-?\d{1,18}", text):  # any whole number of 18 digits fits 64 bits
        return int(text)
    if re.fullmatch(r"-?\d+\.\d+", text):
        return float(text)
    return text
