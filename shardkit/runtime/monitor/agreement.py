"""Checks that all processes are about to run the same program: compares their fingerprints by component."""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest

from .hello import processes
from .wire import Message

_NAMED = 4  # components in a sentence


class Agreement:
    """Collects the fingerprints of programs."""

    def __init__(self, size: int):
        self._size = size
        self._heard: dict[str, dict[int, Message]] = {}

    def hear(self, rank: int, message: Message) -> str | None:
        """None until all processes have sent theirs; then what differs, or an empty string if nothing does."""
        heard = self._heard.setdefault(message["program"], {})
        heard[rank] = message
        if len(heard) < self._size:
            return None
        del self._heard[message["program"]]
        return compared(heard)


def compared(heard: dict[int, Message]) -> str:
    """The components that differ between the fingerprints, with their processes; empty if nothing does.

    The value of most processes is taken for the intended one; in a tie, that of process 0.
    """
    names = list(dict.fromkeys(name for _, message in sorted(heard.items()) for name in message["components"]))
    found = []
    for name in names:
        values = {rank: message["components"].get(name) for rank, message in sorted(heard.items())}
        meant = Counter(values.values()).most_common(1)[0][0]  # in a tie the first, process 0's
        others = [rank for rank, value in values.items() if value != meant]
        if others:
            model = next(rank for rank, value in values.items() if value == meant)
            found.append(f"{name} ({_difference(name, others, model, heard)})")
    if not found:
        return ""
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return (
        f"stopped before step {heard[0]['step']}: all processes must run the same program with the same settings; they "
        f"differ in {', '.join(found[:_NAMED])}{more}"
    )


def _difference(name: str, ranks: list[int], model: int, heard: dict[int, Message]) -> str:
    one, other = heard[ranks[0]], heard[model]
    if name != "program":
        this, that = (_short(message["components"].get(name, "missing")) for message in (one, other))
        return f"{this} on {processes(ranks)}, {that} on {processes([model])}"
    counts: Counter[str] = Counter(one["collectives"])
    counts.subtract(other["collectives"])
    more = [f"{abs(n)} {'more' if n > 0 else 'fewer'} {kind}" for kind, n in sorted(counts.items()) if n]
    pairs = zip_longest(one["lines"], other["lines"])
    line = next((number for number, (a, b) in enumerate(pairs, 1) if a != b), 0)
    where = f"first difference at line {line} of the StableHLO"
    return f"{processes(ranks)} against {processes([model])}: {', '.join([*more, where])}"


def _short(text: str, length: int = 100) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
