"""Options of a compiler, tried on one step: which of them lower the time that its report models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple, TypeVar

from shardkit.analysis.hlo.report import Report, format_bytes
from shardkit.meshes.layout import table

Option = bool | int | float | str
CompilerOptions = dict[str, Option]
T = TypeVar("T")
C = TypeVar("C")


class Trial(NamedTuple):
    """A step compiled with some options; print it.

    Attributes:
        options: the options.
        report: what `compile` reports; None where the compiler refused them.
        message: its words where it refused, else "".
    """

    options: CompilerOptions
    report: Report | None
    message: str = ""

    @property
    def seconds(self) -> float:
        """Seconds of the step by the model; infinite where it does not run."""
        if self.report is None or not self.report.fits:
            return math.inf
        return self.report.seconds

    @property
    def synchronous(self) -> Fraction:
        """Bytes per device and call that collectives send with no compute beside them."""
        sent = Fraction(0)
        if self.report is None:
            return sent
        for row in self.report.rows:
            if not row.asynchronous:
                sent += row.total
        return sent

    def __str__(self) -> str:
        return _format_trials([self])


class Tuned(NamedTuple):
    """What `tune` returns; print it.

    Attributes:
        trials: the compiled steps, the fastest first.
    """

    trials: tuple[Trial, ...]

    @property
    def options(self) -> CompilerOptions:
        """The options of the fastest."""
        return self.trials[0].options

    def __str__(self) -> str:
        return _format_trials(self.trials)


def try_options(compile_with: Callable[[CompilerOptions], Trial], options: Sequence[Mapping[str, Option]]) -> Tuned:
    """Compiles the step without options, then with each mapping added to the options that were kept.

    Added options are kept if the step becomes faster; as long as it does not fit, they are kept if it needs less
    memory. For example with options a, b and c, where b makes the step slower, four programs are compiled:

        {}           1.9 ms
        {a}          1.7 ms    kept
        {a, b}       1.8 ms
        {a, c}       1.6 ms    kept: the fastest
    """

    def add_options(best: Trial, added: Mapping[str, Option]) -> Trial:
        return compile_with(best.options | dict(added))

    trials = keep_faster(compile_with({}), options, add_options, rank_trial)
    return Tuned(tuple(sorted(trials, key=rank_trial)))


def keep_faster(
    first: T, changes: Iterable[C], apply: Callable[[T, C], T], rank: Callable[[T], tuple[bool, float, int]]
) -> list[T]:
    """Tries each change on what was kept so far, and keeps it if that lowers the rank: all that was tried."""
    best = first
    tried = [first]
    for change in changes:
        candidate = apply(best, change)
        tried.append(candidate)
        # Not where both are equal, so that a change without an effect is left out.
        if rank(candidate) < rank(best):
            best = candidate
    return tried


def rank_trial(trial: Trial) -> tuple[bool, float, int]:
    """The fastest first, then what does not fit by its memory, and last what was refused.

    The three are (is it refused, seconds, bytes that it needs if it does not fit); seconds of what does not fit are
    infinite.
    """
    if trial.report is None:
        return True, math.inf, 0
    if not trial.report.fits:
        return False, math.inf, trial.report.needed
    return False, trial.seconds, 0


_HEADS = ("step ms", "compute ms", "exposed ms", "synchronous", "temp", "options")


def _format_trials(trials: Sequence[Trial]) -> str:
    rows = [_HEADS]
    for trial in trials:
        rows.append(_make_row(trial))
    return table(rows)


def _make_row(trial: Trial) -> tuple[str, str, str, str, str, str]:
    """The cells of a trial under the heads."""
    options = ", ".join(f"{name}={value}" for name, value in trial.options.items())
    if not options:
        options = "none"
    report = trial.report
    if report is None:
        return f"refused: {trial.message}", "", "", "", "", options
    if not report.fits or report.memory is None:
        return f"does not fit: {format_bytes(report.needed)}", "", "", "", "", options
    return (
        _format_ms(report.seconds),
        _format_ms(report.compute.seconds),
        _format_ms(report.exposed_seconds),
        format_bytes(trial.synchronous),
        format_bytes(report.memory.temp),
        options,
    )


def _format_ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"
