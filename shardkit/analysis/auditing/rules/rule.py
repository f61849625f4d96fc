"""What a rule of the audit is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from shardkit.analysis.auditing.program import Program
from shardkit.analysis.jaxpr.rules import Finding


class Rule(NamedTuple):
    """One rule of the audit.

    Attributes:
        name: what a finding and `audit(ignore=...)` call it.
        finds: what it finds, in a few words.
        check: `check(program)` yields the findings. Rules may share one function, which runs once.
    """

    name: str
    finds: str
    check: Callable[[Program], Iterator[Finding]]
