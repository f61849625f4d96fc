"""What a step exchanges with the host: callbacks, feeds, and values that it moves between the memories."""

from __future__ import annotations

from collections.abc import Iterator

from shardkit._jax.jaxprs import Site, walk
from shardkit.analysis.compiled_rules.program import CompiledProgram
from shardkit.analysis.jaxpr.census import size_of
from shardkit.analysis.rules.rule import Finding

_CALLS = {"io_callback", "pure_callback", "debug_callback", "debug_print", "infeed", "outfeed"}


def host(program: CompiledProgram) -> Iterator[Finding]:
    """Each stops the devices until the host has answered, or costs a transfer."""
    for site in walk(program.step.jaxpr):
        times = {None: " an unknown number of times", 1: ""}.get(site.times, f" {site.times} times")
        if site.name in _CALLS:
            yield Finding(
                "host-transfer",
                f"{site.name} calls the host{times} in each step.",
                site.source,
                "Return the values as metrics, and read them outside of the step every few steps.",
            )
        elif site.name == "device_put" and (moved := _moved(site)) >= program.small:
            yield Finding(
                "host-transfer",
                f"device_put moves {moved:,} bytes between the memories of device and host{times} in each step.",
                site.source,
                "Keep the value in the device's memory, or leave this rule out by ignore= where the memory is needed.",
            )


def _moved(site: Site) -> int:
    """Bytes, of all devices together, that change memory."""
    pairs = zip(site.equation.invars, site.equation.outvars, strict=True)
    return sum(size_of(after) for before, after in pairs if _memory(before) != _memory(after))


def _memory(variable: object) -> object:
    return getattr(getattr(variable, "aval", None), "memory_space", None)
