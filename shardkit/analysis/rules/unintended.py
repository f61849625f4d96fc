"""What `make_train_step` warns of too: a loss that is another number on each mesh, an axis that does nothing."""

from __future__ import annotations

from collections.abc import Iterator

from shardkit.analysis.rules.program import TracedProgram
from shardkit.analysis.rules.rule import Finding
from shardkit.on_device.advice import idle_axes, quotients


def mean_of_quotients(program: TracedProgram) -> Iterator[Finding]:
    """Losses divided before they are summed."""
    for each in quotients(program.step.jaxpr):
        yield Finding("mean-of-quotients", *each)


def same_work(program: TracedProgram) -> Iterator[Finding]:
    """Axes that split nothing."""
    for each in idle_axes(program.step.jaxpr):
        yield Finding("idle-axis", each.message, each.source, each.remedy)
