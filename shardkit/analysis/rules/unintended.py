"""What `make_train_step` warns of too: losses that depend on the mesh, and axes along which nothing is split."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from shardkit.analysis.rules.program import TracedProgram
from shardkit.analysis.rules.rule import Finding
from shardkit.on_device.advice import find_idle_axes, find_uncommon_losses


def unintended(program: TracedProgram) -> Iterator[Finding]:
    """Losses divided before they are summed, penalties that count once for each device, axes that split nothing."""
    jaxpr = program.step.jaxpr
    for advice in itertools.chain(find_uncommon_losses(jaxpr), find_idle_axes(jaxpr)):
        yield Finding(*advice)
