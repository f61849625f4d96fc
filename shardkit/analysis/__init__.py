"""Readers of programs: they tell you what a program communicates.

`jaxpr/` reads the traced program, `hlo/` the compiled one; `judge.py` holds any function against the rules in
`rules/` and `compiled_rules/`, and `contracts.py` against the collectives that it should run. Start with
`jaxpr/census.py`. Imports cost, meshes and on_device, and `hlo/` also steps; steps imports the readers of traced
programs and their rules.
"""

from shardkit.analysis.contracts import collective, expects
from shardkit.analysis.hlo import aot
from shardkit.analysis.hlo.differences import compiled
from shardkit.analysis.jaxpr.census import census
from shardkit.analysis.jaxpr.explain import explain
from shardkit.analysis.jaxpr.foreign import sends
from shardkit.analysis.judge import audit, lint
from shardkit.analysis.rules import Finding

__all__ = [
    "Finding",
    "aot",
    "audit",
    "census",
    "collective",
    "compiled",
    "expects",
    "explain",
    "lint",
    "sends",
]
