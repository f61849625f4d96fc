"""`shardkit plan --tune`: changes of compiled layouts, each compiled, of which those stay that make a step faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shardkit.analysis.hlo.report import Report, format_bytes
from shardkit.analysis.hlo.tuning import CompilerOptions, Trial, keep_faster, rank_trial
from shardkit.meshes.layout import table
from shardkit.planner.candidates import Candidate
from shardkit.planner.changes import StepChange
from shardkit.planner.tables import format_milliseconds

# Compiles a candidate with options; raises a RuntimeError where the compiler refuses them.
Compile = Callable[[Candidate, CompilerOptions, str], Report]


class Attempt(NamedTuple):
    """A layout as it was compiled.

    Attributes:
        candidate: the layout, in its form.
        trial: the compiler's options, and its report.
        changes: what was changed of the layout as it was found.
    """

    candidate: Candidate
    trial: Trial
    changes: tuple[str, ...] = ()


def tune(candidate: Candidate, first: Trial, changes: Sequence[StepChange], compile_step: Compile) -> list[Attempt]:
    """Compiles a layout with each change added to those that were kept; all attempts, the first one included.

    Worked example, of the changes SparseCore, ring and prefetch:

        none                    3.38 s
        SparseCore              2.85 s    kept
        SparseCore, ring        2.72 s    kept
        SparseCore, ring, prefetch
                                2.91 s
    """

    def apply(best: Attempt, change: StepChange) -> Attempt:
        options = best.trial.options | dict(change.options)
        changed = best.candidate._replace(layout=change.of_layout(best.candidate.layout))
        names = (*best.changes, change.name)
        try:
            trial = Trial(options, compile_step(changed, options, ", ".join(names)))
        except RuntimeError as error:
            trial = Trial(options, None, str(error))
        return Attempt(changed, trial, names)

    return keep_faster(Attempt(candidate, first), changes, apply, _rank_attempt)


def choose_attempt(attempts: Sequence[Attempt]) -> Attempt:
    """The fastest attempt that fits; if none fits, the one that needs the least memory."""
    return min(attempts, key=_rank_attempt)


def compare_attempts(attempts: Sequence[Attempt]) -> str:
    """A table of all attempts, the fastest first."""
    rows = [("layout", "changes", "memory", "compute ms", "exposed ms", "step ms", "fits")]
    for attempt in sorted(attempts, key=_rank_attempt):
        rows.append(_make_row(attempt))
    return table(rows)


def _rank_attempt(attempt: Attempt) -> tuple[bool, float, int]:
    return rank_trial(attempt.trial)


def _make_row(attempt: Attempt) -> tuple[str, str, str, str, str, str, str]:
    layout = str(attempt.candidate.layout)
    changes = ", ".join(attempt.changes) or "none"
    report = attempt.trial.report
    if report is None:
        return layout, changes, f"refused: {attempt.trial.message}", "", "", "", "NO"
    return (
        layout,
        changes,
        format_bytes(report.needed),
        format_milliseconds(report.compute.seconds),
        format_milliseconds(report.exposed_seconds),
        format_milliseconds(report.seconds),
        "yes" if report.fits else "NO",
    )


def attempt_as_json(attempt: Attempt) -> dict[str, Any]:
    """An attempt as JSON has it."""
    row: dict[str, Any] = {
        "layout": attempt.candidate.layout._asdict(),
        "options": attempt.trial.options,
        "changes": list(attempt.changes),
    }
    report = attempt.trial.report
    if report is None:
        return row | {"refused": attempt.trial.message}
    return row | {"seconds": report.seconds, "fits": report.fits}
