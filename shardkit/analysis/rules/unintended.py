"""What `make_train_step` warns of too: a loss that is another number on each mesh, an axis that does nothing."""

from __future__ import annotations

from collections.abc import Iterator

from shardkit.analysis.rules.program import TracedProgram
from shardkit.analysis.rules.rule import Finding
from shardkit.on_device.advice import idle_axes, uncommon_losses


def unintended(program: TracedProgram) -> Iterator[Finding]:
    """Losses divided before they are summed, penalties that count once for each device, axes that split nothing."""
    for each in (*uncommon_losses(program.step.jaxpr), *idle_axes(program.step.jaxpr)):
        yield Finding(*each)
