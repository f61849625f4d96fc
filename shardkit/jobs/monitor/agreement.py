"""Checks that all processes are about to run the same program: compares hashes of their fingerprints, and where those
differ the fingerprints, by component. Process 0 asks for these then: that of a large program has megabytes.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from itertools import zip_longest

from shardkit.runtime.channel.place import processes
from shardkit.runtime.channel.wire import Message

_NAMED = 4  # components in a sentence
_ASKED = 16  # fingerprints that process 0 compares, of as many groups of equal ones


def digest(message: Message) -> str:
    """The hash of a fingerprint's components."""
    return hashlib.sha256(json.dumps(message["components"], sort_keys=True).encode()).hexdigest()


class Agreement:
    """Collects the hashes of programs, and the fingerprints of those that differ."""

    def __init__(self, size: int):
        self._size = size
        self._digests: dict[str, dict[int, str]] = {}
        self._asked: dict[str, dict[int, list[int]]] = {}  # by program and rank that is asked: the ranks that are equal
        self._told: dict[str, dict[int, Message]] = {}

    def hear(self, rank: int, program: str, hashed: str) -> list[int] | None:
        """None until all processes have sent the hash; then which of them to ask, none if all are equal."""
        heard = self._digests.setdefault(program, {})
        heard[rank] = str(hashed)
        if len(heard) < self._size:
            return None
        del self._digests[program]
        groups: dict[str, list[int]] = {}
        for each, value in sorted(heard.items()):
            groups.setdefault(value, []).append(each)
        if len(groups) == 1:
            return []
        largest = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))[:_ASKED]
        self._asked[program] = {ranks[0]: ranks for ranks in largest}
        self._told[program] = {}
        return sorted(self._asked[program])

    def told(self, rank: int, program: str, message: Message) -> str | None:
        """What differs, once all that were asked have sent their fingerprint; None before, and for one not asked."""
        asked = self._asked.get(program, {})
        if rank not in asked:
            return None
        told = self._told[program]
        told[rank] = message
        if len(told) < len(asked):
            return None
        rest = self._size - sum(map(len, asked.values()))
        more = f"; {rest} further processes differ too" if rest else ""
        return compared({each: told[one] for one, ranks in asked.items() for each in ranks}) + more


def compared(heard: dict[int, Message]) -> str:
    """The components that differ between the fingerprints, with their processes; empty if nothing does.

    The value of most processes is taken for the intended one; in a tie, that of process 0.
    """
    heard = dict(sorted(heard.items()))
    first = next(iter(heard.values()))
    names = list(dict.fromkeys(name for message in heard.values() for name in message["components"]))
    found = []
    for name in names:
        values = {rank: message["components"].get(name) for rank, message in heard.items()}
        meant = Counter(values.values()).most_common(1)[0][0]  # in a tie the first, process 0's
        others = [rank for rank, value in values.items() if value != meant]
        if others:
            model = next(rank for rank, value in values.items() if value == meant)
            found.append(f"{name} ({_difference(name, others, model, heard)})")
    if not found:
        return ""
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return (
        f"stopped before step {first['step']}: all processes must run the same program with the same settings; they "
        f"differ in {', '.join(found[:_NAMED])}{more}"
    )


def _difference(name: str, ranks: list[int], model: int, heard: dict[int, Message]) -> str:
    one, other = heard[ranks[0]], heard[model]
    if name != "program":
        this, that = (_short(message["components"].get(name, "missing")) for message in (one, other))
        return f"{this} on {processes(ranks)}, {that} on {processes([model])}"
    shapes = "" if one["batch"] == other["batch"] else f"a batch of {one['batch']} against {other['batch']}"
    counts: Counter[str] = Counter(one["collectives"])
    counts.subtract(other["collectives"])
    more = [f"{abs(n)} {'more' if n > 0 else 'fewer'} {kind}" for kind, n in sorted(counts.items()) if n]
    pairs = zip_longest(one["lines"], other["lines"])
    line = next((number for number, (a, b) in enumerate(pairs, 1) if a != b), 0)
    where = f"first difference at line {line} of the StableHLO"
    return f"{processes(ranks)} against {processes([model])}: {', '.join([*filter(None, [shapes]), *more, where])}"


def _short(text: str, length: int = 100) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
