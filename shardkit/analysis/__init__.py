"""What a program communicates, read from the program itself.

`jaxpr/` reads the traced program, `hlo/` the compiled one, `profiling/` a run; `auditing/` judges any
step by all of them. `contracts.py` compares a program with
the collectives that it should run. Start with `jaxpr/census.py`. Imports collectives, cost and partitioning.
"""

from shardkit.analysis.auditing.audit import Audit, audit
from shardkit.analysis.auditing.rules import AUDIT_RULES
from shardkit.analysis.contracts import Collective, collective, expects
from shardkit.analysis.hlo import aot
from shardkit.analysis.hlo.differences import Compiled, compiled
from shardkit.analysis.jaxpr.census import Census, Row, census
from shardkit.analysis.jaxpr.explain import Explanation, Reason, explain
from shardkit.analysis.jaxpr.lint import lint
from shardkit.analysis.jaxpr.rules import RULES, Finding
from shardkit.analysis.profiling.profile import profile, trace
from shardkit.analysis.profiling.timings import Profile, Timing

__all__ = [
    "AUDIT_RULES",
    "RULES",
    "Audit",
    "Census",
    "Collective",
    "Compiled",
    "Explanation",
    "Finding",
    "Profile",
    "Reason",
    "Row",
    "Timing",
    "aot",
    "audit",
    "census",
    "collective",
    "compiled",
    "expects",
    "explain",
    "lint",
    "profile",
    "trace",
]
