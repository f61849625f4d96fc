"""Checks that all processes are about to run the same program, and names what differs.

Process 0 compares a hash of the fingerprint of every process, and only where hashes differ the fingerprints themselves,
component by component: that of a large program has megabytes. Worked example: the hashes of five processes are a, b, a,
b, b. So process 1 is asked for the fingerprint that stands for 1, 3 and 4, and process 0 for that of 0 and 2.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from shardkit.runtime.channel.place import name_processes
from shardkit.runtime.channel.wire import Message

_NAMED = 4  # components in a sentence
_ASKED = 16  # fingerprints that process 0 compares, of as many groups of equal ones
_LONGEST_VALUE = 100  # characters of a component in a sentence


def hash_components(message: Message) -> str:
    """The hash of a fingerprint's components."""
    text = json.dumps(message["components"], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


class Agreement:
    """Collects the hashes of programs, and the fingerprints of those that differ."""

    def __init__(self, size: int):
        self._size = size
        self._hashes: dict[str, dict[int, str]] = {}  # by program and rank
        self._groups: dict[str, dict[int, list[int]]] = {}  # by program and the rank that is asked: ranks with its hash
        self._fingerprints: dict[str, dict[int, Message]] = {}  # by program and the rank that was asked

    def take_hash(self, rank: int, program: str, hashed: str) -> list[int] | None:
        """None until all processes have sent the hash; then which of them to ask, none if all are equal."""
        hashes = self._hashes.setdefault(program, {})
        hashes[rank] = str(hashed)
        if len(hashes) < self._size:
            return None
        del self._hashes[program]
        groups: dict[str, list[int]] = {}
        for member, value in sorted(hashes.items()):
            groups.setdefault(value, []).append(member)
        if len(groups) == 1:
            return []
        largest = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))[:_ASKED]
        self._groups[program] = {ranks[0]: ranks for ranks in largest}
        self._fingerprints[program] = {}
        return sorted(self._groups[program])

    def take_fingerprint(self, rank: int, program: str, message: Message) -> str | None:
        """What differs, once all that were asked have sent their fingerprint; None before, and for one not asked."""
        groups = self._groups.get(program, {})
        if rank not in groups:
            return None
        fingerprints = self._fingerprints[program]
        fingerprints[rank] = message
        if len(fingerprints) < len(groups):
            return None
        members: dict[int, Message] = {}
        for asked, ranks in groups.items():
            members |= dict.fromkeys(ranks, fingerprints[asked])
        text = compare_fingerprints(members)
        unasked = self._size - len(members)
        if unasked:
            text += f"; {unasked} further processes differ too"
        return text


def compare_fingerprints(fingerprints: Mapping[int, Message]) -> str:
    """The components that differ between the fingerprints, with their processes; empty if nothing does.

    The value of most processes is taken for the intended one; in a tie, that of process 0.
    """
    ranks = sorted(fingerprints)
    names: dict[str, None] = {}  # in the order in which they come
    for rank in ranks:
        names |= dict.fromkeys(fingerprints[rank]["components"])
    differences = []
    for name in names:
        values = {rank: fingerprints[rank]["components"].get(name) for rank in ranks}
        intended, _ = Counter(values.values()).most_common(1)[0]  # in a tie the first, process 0's
        others = [rank for rank in ranks if values[rank] != intended]
        if others:
            model = next(rank for rank in ranks if values[rank] == intended)
            text = _describe_difference(name, others, model, fingerprints)
            differences.append(f"{name} ({text})")
    if not differences:
        return ""
    step = fingerprints[ranks[0]]["step"]
    text = (
        f"stopped before step {step}: all processes must run the same program with the same settings; they differ in "
        f"{', '.join(differences[:_NAMED])}"
    )
    if len(differences) > _NAMED:
        text += f" and {len(differences) - _NAMED} more"
    return text


def _describe_difference(name: str, ranks: Sequence[int], model: int, fingerprints: Mapping[int, Message]) -> str:
    """How a component of these processes differs from that of `model`."""
    names = name_processes(ranks)
    model_name = name_processes([model])
    other = fingerprints[ranks[0]]
    intended = fingerprints[model]
    if name == "program":
        return f"{names} against {model_name}: {_compare_programs(other, intended)}"
    value = _shorten(other["components"].get(name, "missing"))
    intended_value = _shorten(intended["components"].get(name, "missing"))
    return f"{value} on {names}, {intended_value} on {model_name}"


def _compare_programs(other: Message, intended: Message) -> str:
    """What is most telling first: the batch, the collectives, the first line."""
    parts = []
    if other["batch"] != intended["batch"]:
        parts.append(f"a batch of {other['batch']} against {intended['batch']}")
    counts: Counter[str] = Counter(other["collectives"])
    counts.subtract(intended["collectives"])
    for kind, count in sorted(counts.items()):
        if count > 0:
            parts.append(f"{count} more {kind}")
        elif count < 0:
            parts.append(f"{-count} fewer {kind}")
    line = _find_first_difference(other["lines"], intended["lines"])
    parts.append(f"first difference at line {line} of the StableHLO")
    return ", ".join(parts)


def _find_first_difference(lines: Sequence[str], intended: Sequence[str]) -> int:
    """The number of the first line that differs, from 1; 0 if none does."""
    for number, (line, other) in enumerate(zip_longest(lines, intended), 1):
        if line != other:
            return number
    return 0


def _shorten(text: str) -> str:
    if len(text) <= _LONGEST_VALUE:
        return text
    return text[: _LONGEST_VALUE - 3] + "..."
