"""Transfers between the devices and the host: callbacks, feeds, and values that move between their memories."""

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
        times = _describe_times(site.times)
        if site.name in _CALLS:
            yield Finding(
                "host-transfer",
                f"{site.name} calls the host{times} in each step.",
                site.source,
                "Return the values as metrics, and read them outside of the step every few steps.",
            )
        elif site.name == "device_put":
            moved = _count_moved_bytes(site)
            if moved < program.small:
                continue
            yield Finding(
                "host-transfer",
                f"device_put moves {moved:,} bytes between the memories of device and host{times} in each step.",
                site.source,
                "Keep the value in the device's memory, or leave this rule out with ignore= if you need the memory.",
            )


def _describe_times(times: int | None) -> str:
    if times is None:
        return " an unknown number of times"
    if times == 1:
        return ""
    return f" {times} times"


def _count_moved_bytes(site: Site) -> int:
    """Bytes that change memory: of all devices together, and inside a shard_map of one."""
    moved = 0
    for before, after in zip(site.equation.invars, site.equation.outvars, strict=True):
        # Inside jit a device_put may change the sharding alone, and stay in the memory of the devices.
        if _memory_space(before) != _memory_space(after):
            moved += size_of(after)
    return moved


def _memory_space(variable: object) -> object:
    aval = getattr(variable, "aval", None)
    return getattr(aval, "memory_space", None)
