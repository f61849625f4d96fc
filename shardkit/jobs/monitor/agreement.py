"""Checks that all processes are about to run the same program, over jax's coordination service; names what differs.

Process 0 compares a hash of the fingerprint of every process, and only where hashes differ the fingerprints themselves,
component by component: that of a large program has megabytes. Worked example: the hashes of five processes are a, b, a,
b, b. So process 1 is asked for the fingerprint that stands for 1, 3 and 4, and process 0 has that of 0 and 2. The
values in the service, under shardkit/programs/1/0/0:0 for the first program of the first loop, before step 0:

    hash/0 .. hash/4    a, b, a, b, b     of all processes, for process 0
    asked               [0, 1]            of process 0, for all; [] if all hashes are equal
    fingerprint/1       {"components": {"program": "5f...", ...}, ...}
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from shardkit._jax import backends
from shardkit.runtime.channel.client import MonitorClient
from shardkit.runtime.channel.place import name_processes
from shardkit.runtime.channel.wire import Message

_KEY = "shardkit/programs"
_NAMED = 4  # components in a sentence
_ASKED = 16  # fingerprints that process 0 compares, of as many groups of equal ones
_LONGEST_VALUE = 100  # characters of a component in a sentence
_TRY = 1.0  # seconds to wait for a value before Python may handle a signal
_PAUSE = 0.05  # seconds between two tries


def agree(monitor: MonitorClient, name: str, fingerprint: Message) -> None:
    """Returns when all processes have the same fingerprint; where they differ, the monitors end all processes.

    A process that waits here for one that has died, or that does not compare, is ended by its monitor, too.

    Args:
        name: of the program: the same in all processes, and used once.
    """
    place = monitor.place
    if place.size == 1:
        return
    key = f"{_KEY}/{name}"
    backends.tell_processes(f"{key}/hash/{place.rank}", hash_components(fingerprint))
    if place.rank == 0:
        groups = _collect_groups(key, place.size)
        backends.tell_processes(f"{key}/asked", json.dumps(list(groups)))
        if not groups:
            return
        difference = _find_difference(key, place.size, groups, fingerprint)
        monitor.tell({"differs": difference})
    else:
        asked = json.loads(_wait_for_value(f"{key}/asked"))
        if not asked:
            return
        if place.rank in asked:
            backends.tell_processes(f"{key}/fingerprint/{place.rank}", json.dumps(fingerprint))
    _wait_for_end()


def hash_components(message: Message) -> str:
    """The hash of a fingerprint's components."""
    text = json.dumps(message["components"], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _collect_groups(key: str, size: int) -> dict[int, list[int]]:
    """The ranks with equal hashes, of the largest groups, by the lowest of them; none if all hashes are equal."""
    groups: dict[str, list[int]] = {}
    for rank in range(size):
        value = _wait_for_value(f"{key}/hash/{rank}")
        groups.setdefault(value, []).append(rank)
    backends.drop_values(f"{key}/hash")
    if len(groups) == 1:
        return {}
    largest = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))[:_ASKED]
    return {ranks[0]: ranks for ranks in sorted(largest)}


def _find_difference(key: str, size: int, groups: Mapping[int, Sequence[int]], fingerprint: Message) -> str:
    """What differs, by the fingerprints of the processes that are asked; `fingerprint` is that of process 0."""
    members: dict[int, Message] = {}
    for asked, ranks in groups.items():
        message = fingerprint
        if asked != 0:
            message = json.loads(_wait_for_value(f"{key}/fingerprint/{asked}"))
        members |= dict.fromkeys(ranks, message)
    text = compare_fingerprints(members)
    unasked = size - len(members)
    if unasked:
        text += f"; {unasked} further processes differ too"
    return text


def _wait_for_value(key: str) -> str:
    """Waits for a value of another process; for ever if it does not come: then the monitor ends this process."""
    while True:
        value = backends.told(key, _TRY)
        if value is not None:
            return value
        time.sleep(_PAUSE)  # the service may be gone


def _wait_for_end() -> None:
    """Waits until the monitor ends this process."""
    threading.Event().wait()


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
        differing = [rank for rank in ranks if values[rank] != intended]
        if differing:
            models = [rank for rank in ranks if values[rank] == intended]
            text = _describe_difference(name, differing, models[0], fingerprints)
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
    differing = fingerprints[ranks[0]]
    intended = fingerprints[model]
    if name == "program":
        return f"{names} against {model_name}: {_compare_programs(differing, intended)}"
    value = _shorten(differing["components"].get(name, "missing"))
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
    for number, (line, intended_line) in enumerate(zip_longest(lines, intended), 1):
        if line != intended_line:
            return number
    return 0


def _shorten(text: str) -> str:
    if len(text) <= _LONGEST_VALUE:
        return text
    return text[: _LONGEST_VALUE - 3] + "..."
