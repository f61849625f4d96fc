"""`shardkit bench ...`: measurements; a file for each.

Start with `options.py`. Imports `bench` and the other folders; only `cli/__init__.py` imports it.
"""

from __future__ import annotations

from collections.abc import Callable


def bench() -> int:
    """Measure communication, and compare measurements; `shardkit bench --help` lists the commands."""
    raise AssertionError("the command runs one of benches()")


def benches() -> dict[str, Callable[..., int]]:
    """The commands under `shardkit bench`, by name."""
    from shardkit.cli.bench import comm, compare, links, overlap, plot, scale, schedules, strategies, trace

    return {
        "comm": comm.comm,
        "links": links.links,
        "overlap": overlap.overlap,
        "strategies": strategies.strategies,
        "schedules": schedules.schedules,
        "scale": scale.scale,
        "compare": compare.compare,
        "plot": plot.plot,
        "trace": trace.trace,
    }
