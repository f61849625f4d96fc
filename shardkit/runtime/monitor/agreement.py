"""Whether all processes are about to run the same program: their fingerprints compared, component by component."""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest

from .hello import processes
from .wire import Message

_NAMED = 4  # components in a sentence


class Agreement:
    """Collects the fingerprints of one program after the other."""

    def __init__(self, size: int):
        self._size = size
        self._heard: dict[str, dict[int, Message]] = {}

    def hear(self, rank: int, message: Message) -> str | None:
        """None until all have spoken; then what differs, or an empty string if nothing does."""
        heard = self._heard.setdefault(message["program"], {})
        heard[rank] = message
        if len(heard) < self._size:
            return None
        del self._heard[message["program"]]
        return compared(heard)


def compared(heard: dict[int, Message]) -> str:
    """What differs between the fingerprints, naming components and processes; empty if nothing does.

    Those that most processes have are taken to be meant; of as many, those of process 0.
    """
    names = list(dict.fromkeys(name for _, message in sorted(heard.items()) for name in message["components"]))
    found = []
    for name in names:
        values = {rank: message["components"].get(name) for rank, message in sorted(heard.items())}
        meant = Counter(values.values()).most_common(1)[0][0]  # of as many the first, which is process 0's
        others = [rank for rank, value in values.items() if value != meant]
        if others:
            model = next(rank for rank, value in values.items() if value == meant)
            found.append(f"{name} ({_difference(name, others, model, heard)})")
    if not found:
        return ""
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return (
        f"refused before step {heard[0]['step']}: all processes must run the same program in the same setting; they "
        f"differ in {', '.join(found[:_NAMED])}{more}"
    )


def _difference(name: str, ranks: list[int], model: int, heard: dict[int, Message]) -> str:
    one, other = heard[ranks[0]], heard[model]
    if name != "program":
        this, that = (_short(message["components"].get(name, "not there")) for message in (one, other))
        return f"{this} of {processes(ranks)}, {that} of {processes([model])}"
    counts: Counter[str] = Counter(one["collectives"])
    counts.subtract(other["collectives"])
    more = [f"{abs(n)} {kind} {'more' if n > 0 else 'fewer'}" for kind, n in sorted(counts.items()) if n]
    pairs = zip_longest(one["lines"], other["lines"])
    line = next((number for number, (a, b) in enumerate(pairs, 1) if a != b), 0)
    return ", ".join([f"{processes(ranks)} against {processes([model])}", *more, f"first at line {line} of the text"])


def _short(text: str, length: int = 100) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
