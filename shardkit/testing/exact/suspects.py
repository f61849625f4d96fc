"""Which equations are suspected of a wrong result: what it follows from, alone and as rounds of an unrolled loop.

Worked example: a Python loop over two devices, of which each round has `b = shift(b); total = total + a @ b`.

    alone           each of the six equations
    together        both shifts, both products, both sums: three lines that have the same equation twice are a loop

What is suspected is ranked by how unlikely a mistake is there: an integer that follows from the index of a device is
mistaken more often than another one, and equations that are repaired together less often than one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from shardkit._jax.jaxprs import kind_of
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.record import Record
from shardkit.testing.exact.repairs import Call, Repair
from shardkit.testing.exact.rules.operands import Operand

_HOLDING = ("shard_map", "scan", "while", "cond")
# How much less likely a mistake is within a function that is called, and in equations that are repaired together: of
# a collective of a tuple, or of a line that only has an equation several times.
_WITHIN, _IN_TUPLE, _TOGETHER = 0.25, 0.25, 1.0
# And how much likelier where an integer follows from the index of a device.
_OF_DEVICE = 0.5


class Suspects(NamedTuple):
    """Equations that are repaired together.

    Attributes:
        numbers: those of the first events of the equations.
        calls: the equations.
        doubt: how much less likely a mistake is here than elsewhere.
    """

    numbers: list[int]
    calls: list[Call]
    doubt: float


def list_suspects(record: Record, got: Operand) -> dict[int, Call]:
    """The equations that a wrong result follows from, by the number of their first event."""
    suspects: dict[int, Call] = {}
    keys: set[Any] = set()
    for number in sorted(record.find_causes([got])):
        call = record.events[number].place
        if call.primitive not in _HOLDING and call.key not in keys and call.results:
            keys.add(call.key)
            suspects[number] = call
    return suspects


def rank_suspects(record: Record, suspects: Mapping[int, Call]) -> Iterator[Suspects]:
    """Equations that may be repaired together, and how unlikely a mistake is there."""
    behind_index = record.find_followers("axis_index")
    loops = _guess_loops(suspects)
    for numbers in _group_suspects(suspects):
        calls = [suspects[number] for number in numbers]
        doubt = _WITHIN if calls[0].around else 0.0
        # Who corrects a line corrects it in all rounds of its loop: that is as likely as in one of them.
        if len(numbers) > 1 and len(numbers) not in loops:
            belong_together = kind_of(calls[0].equation) is not None
            doubt += _IN_TUPLE if belong_together else _TOGETHER
        if numbers[0] in behind_index and not isinstance(calls[0].results[0], Exact):
            doubt -= _OF_DEVICE
        yield Suspects(numbers, calls, doubt)


def _guess_loops(suspects: Mapping[int, Call]) -> set[int]:
    """How often loops may have been unrolled: so often several lines have the same equation."""
    counts = Counter((call.line, call.name) for call in suspects.values())
    rounds: set[tuple[str, int]] = set()
    for (line, _), count in counts.items():
        # A round may have an equation once, twice or three times.
        for per_round in (1, 2, 3):
            if count % per_round == 0:
                rounds.add((line, count // per_round))
    lines = Counter(count for _, count in rounds)
    return {count for count, often in lines.items() if count > 1 and often > 1}


def _group_suspects(suspects: Mapping[int, Call]) -> Iterator[list[int]]:
    """Equations that are repaired together: each alone, and what a line has again and again, as an unrolled loop.

    Rounds have results of the same types: `a[:, None] == b[None]` makes a row and a column in each. What a function
    computes that the line calls, as the remainder of `(i + 1) % n`, is apart.
    """
    alike: dict[Any, list[int]] = {}
    exchanged: dict[Any, list[int]] = {}
    for number, call in suspects.items():
        yield [number]
        if kind_of(call.equation):
            exchanged.setdefault((call.line, call.around, call.name), []).append(number)
        avals = [variable.aval for variable in call.equation.outvars]
        types = [(getattr(aval, "shape", ()), getattr(aval, "dtype", None)) for aval in avals]
        kind = call.line, call.around, call.name, len(call.operands), *types
        alike.setdefault(kind, []).append(number)
    for numbers in alike.values():
        for step in (1, 2, 3):
            if len(numbers) % step == 0 and len(numbers) > step:
                for start in range(step):
                    yield numbers[start::step]
    # A collective of a tuple, as of keys and values, is an equation for each of its arrays, whatever their types.
    groups = list(alike.values())
    for numbers in exchanged.values():
        if len(numbers) > 1 and numbers not in groups:
            yield numbers


def align_repairs(lists: Sequence[Sequence[Repair]]) -> list[tuple[int, ...]]:
    """The places of repairs that several equations have, one place in the list of each.

    Repairs are alike by their words, the first of some words with the first. A round may have some that others have
    not: `i + 0` is in strides as it is in blocks, and `i + 1` is not.
    """
    columns: list[dict[Any, int]] = []
    for repairs in lists:
        counts: Counter[str] = Counter()
        places: dict[Any, int] = {}
        for position, repair in enumerate(repairs):
            places[repair.words, counts[repair.words]] = position
            counts[repair.words] += 1
        columns.append(places)
    common = [key for key in columns[0] if all(key in places for places in columns)]
    return [tuple(places[key] for places in columns) for key in common]
