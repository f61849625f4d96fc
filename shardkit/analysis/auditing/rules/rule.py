"""What a rule of the audit is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from shardkit._check import quoted
from shardkit.analysis.auditing.program import Program
from shardkit.analysis.hlo.collectives import CompiledRow
from shardkit.analysis.jaxpr.rules import Finding


def together(rows: Iterable[CompiledRow]) -> str:
    """Collectives of one kind and place in words, as "all_gather over 'data' of 64 bytes"."""
    first, *others = rows
    total = sum(row.bytes_in for row in (first, *others))
    times = f"{len(others) + 1} x " if others else ""
    return f"{times}{first.kind} over {quoted(first.axes)} of {total:,} bytes{' in all' if others else ''}"


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
