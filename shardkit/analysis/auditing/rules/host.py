"""Calls of the host inside the step."""

from __future__ import annotations

from collections.abc import Iterator

from shardkit._jaxprs import walk
from shardkit.analysis.auditing.program import Program, own_source
from shardkit.analysis.jaxpr.rules import Finding

_CALLS = {"io_callback", "pure_callback", "debug_callback", "debug_print", "infeed", "outfeed"}


def host(program: Program) -> Iterator[Finding]:
    """Callbacks and feeds; each stops the devices until the host has answered, or costs a transfer."""
    for site in walk(program.step.jaxpr):
        if site.name in _CALLS:
            times = {None: " an unknown number of times", 1: ""}.get(site.times, f" {site.times} times")
            yield Finding(
                "host-call",
                f"{site.name} sends values to the host{times} in each step.",
                own_source(site),
                "Return the values as metrics, and read them outside of the step every few steps.",
            )
