"""Options of a compiler, tried on one step: which of them lower the time that its report models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from shardkit.analysis.hlo.report import Report, size
from shardkit.meshes.layout import table

Option = bool | int | float | str
CompilerOptions = dict[str, Option]


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
        return self.report.seconds if self.report and self.report.fits else math.inf

    @property
    def synchronous(self) -> Fraction:
        """Bytes per device and call that collectives send with no compute beside them."""
        rows = self.report.rows if self.report else ()
        return sum((row.total for row in rows if not row.asynchronous), Fraction(0))

    def __str__(self) -> str:
        return table([_HEADS, _cells(self)])


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
        return table([_HEADS, *map(_cells, self.trials)])


def tried(compiled: Callable[[CompilerOptions], Trial], options: Sequence[Mapping[str, Option]]) -> Tuned:
    """The step without options, then with each of these added to those that stayed.

    They stay if the step is faster, and, as long as it does not fit, if it needs less memory.
    """
    best = compiled({})
    trials = [best]
    for more in options:
        trials.append(compiled(best.options | dict(more)))
        best = min(best, trials[-1], key=_rank)
    return Tuned(tuple(sorted(trials, key=_rank)))


def _rank(trial: Trial) -> tuple[bool, float, int]:
    """The fastest first, then what does not fit by its memory, and last what was refused."""
    if trial.report is None:
        return True, math.inf, 0
    return False, trial.seconds, 0 if trial.report.fits else trial.report.needed


_HEADS = ("step ms", "compute ms", "exposed ms", "synchronous", "temp", "options")


def _cells(trial: Trial) -> tuple[str, ...]:
    words = ", ".join(f"{name}={value}" for name, value in trial.options.items()) or "none"
    report = trial.report
    if report is None:
        return f"refused: {trial.message}", "", "", "", "", words
    if not report.fits or report.memory is None:
        return f"does not fit: {size(report.needed)}", "", "", "", "", words
    times = (report.seconds, report.compute.seconds, report.exposed_seconds)
    step, compute, exposed = (f"{1e3 * seconds:.3f}" for seconds in times)
    return step, compute, exposed, size(trial.synchronous), size(report.memory.temp), words
