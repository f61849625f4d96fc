"""Which of several remedies is the likeliest mistake, and the sentence that names its line.

A wrong result often has several repairs. Worked example: `y = x / n` on line 3 and `z = y * w` on line 4, where n
should be the number of devices.

    line 3, div times 2     cost 1.5
    line 4, mul times 2     cost 1.5, and as right
    the message             The mistake is at kernel.py:3 or kernel.py:4: with div times 2, ..., it is right
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from shardkit._jax.jaxprs import kind_of
from shardkit.testing.exact.forms import digest_value
from shardkit.testing.exact.known_values import KNOWN, KNOWN_BEFORE, PASS, KnownValues
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.record import Event
from shardkit.testing.exact.rules.operands import Operand
from shardkit.testing.exact.search import Remedy, Search

# Repairs whose doubts differ by no more are about as likely.
_ALIKE = 0.25
# A sum over devices is missing behind one of these, with which a device reduces its own elements, more often than
# behind another equation.
_REDUCES = ("reduce_sum", "reduce_max", "reduce_min", "dot_general", "scatter-add")


class RemedyChoice:
    """Finds the remedies of a wrong result, and chooses the likeliest mistake.

    Attributes:
        values: the values of both runs.
        search: the search for a repair.
        got: the wrong result, or the value that differs between devices.
        doubts: how unlikely it is that the mistake is at an event, by the number of the event.
    """

    def __init__(self, values: KnownValues, search: Search, got: Operand, doubts: Mapping[int, float]):
        self.values = values
        self.search = search
        self.got = got
        self.doubts = doubts
        self._lines_of_collectives: set[str] = set()
        # Only the events from which the result follows: a gradient has collectives on the lines of its casts.
        for number in values.record.find_causes([got]):
            event = values.record.events[number]
            if kind_of(event.call.equation):
                self._lines_of_collectives.add(event.call.line)

    def find(self) -> list[Remedy]:
        """The repairs that make the result right."""
        last = self.values.find_last_known(self.got, self.doubts)

        def doubt(number: int, behind: bool) -> float:
            # Behind the last value that the reference has, a mistake is not so unlikely.
            is_behind_known = behind and number in last
            highest = KNOWN_BEFORE if is_behind_known else KNOWN
            return min(self.doubts.get(number, 0.0), highest)

        return self.search.find_remedies(doubt)

    def choose(self, remedies: list[Remedy]) -> Remedy:
        """The likeliest of some remedies; of equals, one on the line with most remedies, then the first."""
        remedies_of = Counter(remedy.call.line for remedy in remedies)

        def rank(remedy: Remedy) -> tuple[float, int, int]:
            return self._doubt(remedy), -remedies_of[remedy.call.line], remedy.number

        return min(remedies, key=rank)

    def describe(self, remedies: list[Remedy]) -> str:
        """The line of the mistake, often with a second line that may be it, and the repair in words."""
        best = self.choose(remedies)
        line = best.call.line
        line_of_travel = self._find_line_of_travel(best)
        if line_of_travel and self._sends_for_nothing(line_of_travel):
            # What should be read travels already.
            return _describe_mistake(best, [line, line_of_travel])
        if line_of_travel:
            return _describe_mistake(best, [line_of_travel, line])
        reader = self._find_better_reader(best)
        if reader is not None:
            return _describe_mistake(reader, [reader.call.line, line])
        return _describe_mistake(best, [line, *self._list_second_lines(best, remedies)])

    def _doubt(self, remedy: Remedy) -> float:
        """How unlikely a remedy is, from its cost and from its place in the program."""
        doubt = remedy.cost
        call = remedy.call
        if remedy.exchange == "sum" and call.primitive in _REDUCES:
            doubt -= 0.5
        # A repair is likelier if the reference computes the value of the repaired equation, too.
        if self._is_computed(remedy):
            doubt -= 0.5
        # A counter that a loop reads is the same on all devices: the equations of a round, which make it the place of a
        # device, are more often wrong.
        if remedy.behind and call.primitive == "iota" and self._is_scanned(remedy):
            doubt += 0.5
        # So are the equations beside a collective.
        reads_collective = remedy.number in self.values.near and not remedy.behind
        is_beside_collective = remedy.behind and call.line in self._lines_of_collectives
        if reads_collective or is_beside_collective:
            doubt -= 0.25
        return doubt

    def _is_scanned(self, remedy: Remedy) -> bool:
        """Whether the rounds of a loop read the result of an equation."""
        events = self.values.record.events
        [result] = events[remedy.number].results
        for event in events:
            if event.call.primitive == "scan" and _reads(event, result):
                return True
        return False

    def _is_computed(self, remedy: Remedy) -> bool:
        """Whether the reference computes the value of the repaired equation."""
        if not isinstance(remedy.value, Exact):
            return False
        computed = set(self.values.computed)
        # The sum of the last value is the result itself, which the reference has of course.
        if remedy.exchange == "sum":
            computed -= {digest_value(self.values.field, x) for x in self.search.wanted}
        return self.values.describe_form(remedy.value, remedy.call.axes, computed) == ""

    # Other lines that may be the mistake

    def _find_line_of_travel(self, remedy: Remedy) -> str:
        """The line on which other values go to another device, if the repaired value should go with them; else "".

        Values that are used together travel together: a gradient with its keys, a mask with its block.

        Worked example: `mask = lengths > i` on line 3, `block = ppermute(block)` on line 5, and on line 6 both are
        read. The mask is right if it goes to the next device, too: the mistake is at line 5, which sends the block
        alone.
        """
        events = self.values.record.events
        before = events[: remedy.number]
        behind = events[remedy.number + 1 :]
        if remedy.exchange == "travel":
            return _find_line_of_send(behind)
        if remedy.exchange == "arrival":
            return _find_line_of_send(reversed(before))
        if remedy.exchange != "shift":
            return ""
        [result] = events[remedy.number].results
        for event in behind:
            if _sends(event):
                return event.call.line
            # The value is read before anything travels.
            if _reads(event, result) and event.call.primitive not in PASS:
                return ""
        return ""

    def _sends_for_nothing(self, line: str) -> bool:
        """Whether a line sends an array round a ring that no other line reads on its way.

        Worked example: `keys, scales = ppermute((keys, scales))` in each round, of which `q @ keys.T * scale` reads the
        keys, and the scale of this device in place of those that travel.
        """
        for event in self.values.record.events:
            if event.call.line == line and _sends(event):
                lines = self._list_lines_of_readers(event)
                if lines == {line}:
                    return True
        return False

    def _list_lines_of_readers(self, event: Event) -> set[str]:
        """The lines that read the result of an equation."""
        [result] = event.results
        lines: set[str] = set()
        for reader in self.values.record.events[event.number + 1 :]:
            if _reads(reader, result):
                lines.add(reader.call.line)
        return lines

    def _find_better_reader(self, remedy: Remedy) -> Remedy | None:
        """The remedy that reads a sum that the program has already, in place of one that computes it again.

        Worked example: `m = x.max(); top = pmax(m); y = psum(exp(x - top).sum()); return log(y) + m`. With a pmax
        behind x.max() the result is right. But the program has that value, `top`, and the last line reads m in its
        place.
        """
        if remedy.exchange != "sum" or not isinstance(remedy.value, Exact):
            return None
        field = self.values.field
        digest = digest_value(field, remedy.value)
        variables = []
        for variable, x in self.values.record.values.items():
            has_shape = isinstance(x, Exact) and x.shape == remedy.value.shape
            if has_shape and digest_value(field, x) == digest:
                variables.append(variable)
        return self.search.find_reader(remedy, variables)

    def _list_second_lines(self, best: Remedy, remedies: list[Remedy]) -> list[str]:
        """The line that may be the mistake in place of the best remedy's, as a list of at most one."""
        reader = self._find_reader(best)
        if reader:
            return [reader]
        highest = self._doubt(best) + _ALIKE
        candidates = []
        for remedy in remedies:
            doubt = self._doubt(remedy)
            if doubt <= highest and remedy.call.line != best.call.line:
                # Of equally likely ones the last.
                candidates.append((doubt, -remedy.number, remedy.call.line))
        if not candidates:
            return []
        _, _, line = min(candidates)
        return [line]

    def _find_reader(self, remedy: Remedy) -> str:
        """The line that reads the partial sum of a remedy, because the sum may be missing there as well; else ""."""
        events = self.values.record.events
        [result] = events[remedy.number].results
        if not remedy.behind or not self.values.explain(result):
            return ""
        for event in events[remedy.number :]:
            if not _reads(event, result):
                continue
            if event.call.primitive in PASS:
                # What reads the reshaped sum reads the sum.
                [result] = event.results
            elif event.call.line != remedy.call.line:
                return event.call.line
        return ""


def _reads(event: Event, x: Operand) -> bool:
    """Whether an equation read a value: this very array, and not an equal one."""
    return any(operand is x for operand in event.operands)


def _sends(event: Event) -> bool:
    """Whether an equation sends an array to another device."""
    return kind_of(event.call.equation) == "ppermute"


def _find_line_of_send(events: Iterable[Event]) -> str:
    """The line of the first ppermute among some events; "" if there is none."""
    for event in events:
        if _sends(event):
            return event.call.line
    return ""


def _describe_mistake(remedy: Remedy, lines: Sequence[str]) -> str:
    """The sentence of a remedy, with the lines that may be the mistake, the likeliest first."""
    words = remedy.words
    if not words.startswith("without"):
        words = f"with {words}"
    # Two of the lines may be the same one.
    places = " or ".join(dict.fromkeys(lines))
    return f"The mistake is at {places}: {words}, it is right"
