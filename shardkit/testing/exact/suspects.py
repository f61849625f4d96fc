"""Which equations are suspected of a wrong result: those from which it follows, alone and as rounds of a loop.

Worked example: a Python loop over two devices, of which each round has `b = shift(b); total = total + a @ b`.

    alone           each of the six equations
    together        both shifts, both products, both sums: three lines that have the same equation twice are a loop

Suspects are ranked by how unlikely a mistake is there. An integer that follows from the index of a device is mistaken
more often than another integer, and several equations together less often than one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from shardkit._jax.jaxprs import kind_of
from shardkit.testing.exact.interpreter import CONTROL_FLOW
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.record import Record
from shardkit.testing.exact.repairs import Call, Repair
from shardkit.testing.exact.rules.operands import Operand

# How much less likely a mistake is within a function that is called; in all equations of a collective of a tuple; and
# in all equations of a line that has the same equation several times, where no loop is known.
_WITHIN, _IN_TUPLE, _TOGETHER = 0.25, 0.25, 1.0
# And how much likelier a mistake is where an integer follows from the index of a device.
_OF_DEVICE = 0.5
# How often a round of a loop may have the same equation on one line.
_PER_ROUND = (1, 2, 3)


class Suspects(NamedTuple):
    """Equations that are repaired together.

    Attributes:
        numbers: the numbers of the first events of the equations.
        calls: the equations.
        doubt: how much less likely a mistake is here than elsewhere.
    """

    numbers: list[int]
    calls: list[Call]
    doubt: float


def list_suspects(record: Record, got: Operand) -> dict[int, Call]:
    """The equations from which a wrong result follows, by the numbers of their first events."""
    suspects: dict[int, Call] = {}
    keys: set[Any] = set()
    for number in sorted(record.find_causes([got])):
        call = record.events[number].call
        if call.primitive not in CONTROL_FLOW and call.key not in keys and call.results:
            keys.add(call.key)
            suspects[number] = call
    return suspects


def rank_suspects(record: Record, suspects: Mapping[int, Call]) -> Iterator[Suspects]:
    """Equations that may be repaired together, and how unlikely a mistake is there."""
    behind_index = record.find_followers("axis_index")
    loops = _guess_loops(suspects)
    for numbers in _group_suspects(suspects):
        calls = [suspects[number] for number in numbers]
        first = calls[0]
        doubt = _WITHIN if first.around else 0.0
        # A correction of a line corrects all rounds of its loop: that is as likely as a mistake in one round. Where no
        # loop is known, equations of one line hardly have the same mistake.
        if len(numbers) > 1 and len(numbers) not in loops:
            is_collective = kind_of(first.equation) is not None
            doubt += _IN_TUPLE if is_collective else _TOGETHER
        if numbers[0] in behind_index and not isinstance(first.results[0], Exact):
            doubt -= _OF_DEVICE
        yield Suspects(numbers, calls, doubt)


def _guess_loops(suspects: Mapping[int, Call]) -> set[int]:
    """The numbers of rounds that unrolled loops may have: so often several lines have the same equation.

    Worked example: line 3 has a ppermute four times, line 4 a dot_general four times and an add twice. Line 3 may be
    four rounds, or two of two ppermutes; line 4 four or two. Both numbers stand on two lines: {2, 4}.
    """
    counts = Counter((call.line, call.name) for call in suspects.values())
    rounds: set[tuple[str, int]] = set()
    for (line, _), count in counts.items():
        for per_round in _PER_ROUND:
            if count % per_round == 0:
                rounds.add((line, count // per_round))
    lines = Counter(count for _, count in rounds)
    return {count for count, line_count in lines.items() if count > 1 and line_count > 1}


def _group_suspects(suspects: Mapping[int, Call]) -> Iterator[list[int]]:
    """Equations that are repaired together: each alone, the rounds of an unrolled loop, a collective of a tuple.

    Worked example: `for i in range(2): b = shift(b); total = total + a @ b`, whose shifts are the events 0 and 3.

        alone           [0], [1], ..., [5]
        as rounds       [0, 3], [1, 4], [2, 5]: the same line has the same equation twice
    """
    for number in suspects:
        yield [number]
    rounds = _find_alike(suspects)
    for numbers in rounds:
        yield from _split_rounds(numbers)
    for numbers in _find_exchanged(suspects):
        if len(numbers) > 1 and numbers not in rounds:
            yield numbers


def _find_alike(suspects: Mapping[int, Call]) -> list[list[int]]:
    """The equations of a line that have the same primitive and types, as those of the rounds of an unrolled loop.

    The types tell equations of a round apart: `a[:, None] == b[None]` makes a row and a column. So does the call around
    an equation: the remainder of `(i + 1) % n` is computed in a function that the line calls.
    """
    alike: dict[Any, list[int]] = {}
    for number, call in suspects.items():
        types = []
        for variable in call.equation.outvars:
            types.append((getattr(variable.aval, "shape", ()), getattr(variable.aval, "dtype", None)))
        kind = call.line, call.around, call.name, len(call.operands), *types
        alike.setdefault(kind, []).append(number)
    return list(alike.values())


def _split_rounds(numbers: list[int]) -> Iterator[list[int]]:
    """Equations of one kind as one in each round, or as each of two or three in a round.

    Worked example: [0, 1, 2, 3] is four rounds, or the rounds [0, 2] of a first equation and [1, 3] of a second.
    """
    for per_round in _PER_ROUND:
        if len(numbers) % per_round == 0 and len(numbers) > per_round:
            for start in range(per_round):
                yield numbers[start::per_round]


def _find_exchanged(suspects: Mapping[int, Call]) -> list[list[int]]:
    """The equations of a collective of a tuple, as of keys and values: one for each array, whatever its type."""
    exchanged: dict[Any, list[int]] = {}
    for number, call in suspects.items():
        if kind_of(call.equation):
            kind = call.line, call.around, call.name
            exchanged.setdefault(kind, []).append(number)
    return list(exchanged.values())


def align_repairs(lists: Sequence[Sequence[Repair]]) -> list[tuple[int, ...]]:
    """The repairs that several equations have in common, as their positions in the list of each equation.

    Repairs are alike by their words; of repairs with the same words, the first is like the first. A round may have
    repairs that others do not have: `i + 0` is in strides as it is in blocks, and `i + 1` is not.

    Worked example: [plus 1, minus 1] and [minus 1, modulo 2] have one in common: [(1, 0)].
    """
    places_of = [_number_repairs(repairs) for repairs in lists]
    aligned = []
    for name in places_of[0]:
        if all(name in places for places in places_of):
            aligned.append(tuple(places[name] for places in places_of))
    return aligned


def _number_repairs(repairs: Sequence[Repair]) -> dict[tuple[str, int], int]:
    """The positions of repairs in a list, by their words and how often the same words stand before."""
    counts: Counter[str] = Counter()
    places: dict[tuple[str, int], int] = {}
    for position, repair in enumerate(repairs):
        places[repair.words, counts[repair.words]] = position
        counts[repair.words] += 1
    return places
