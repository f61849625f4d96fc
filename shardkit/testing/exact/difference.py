"""From a wrong result to the line: which equation is the mistake, and how the result differs.

Both programs run once more, keeping every value. `search.py` tries what would repair the result. Where nothing does,
the message names the first value that the reference does not have: from the wrong result backwards, through values that
the reference does not have, to the equations that read only what it has; the first of them that has a partial sum as an
operand, else the first. What an algorithm of blocks computes of its blocks is passed over there.

Worked example: on data=2, `psum(x, "data") / 4` where the reference is the mean of two.

    the result      it is 1/2 of the reference everywhere
    a remedy        div times 2: the result is right
    the message     ...: it is 1/2 of the reference everywhere. The mistake is at kernel.py:3: with div times 2, the
                    size of 'data', it is right
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from shardkit._arguments.checks import quoted
from shardkit._jax.jaxprs import kind_of
from shardkit.testing.exact.forms import (
    digest,
    digest_value,
    list_forms,
    list_ratios,
    multiply_residues,
    take_residues,
)
from shardkit.testing.exact.interpreter import DiffersError
from shardkit.testing.exact.known_values import KNOWN, KNOWN_BEFORE, PASS, KnownValues
from shardkit.testing.exact.memory import StepMemory
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.orders import find_equal
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.record import Event, Record
from shardkit.testing.exact.repairs import Call, is_integer, is_mask
from shardkit.testing.exact.rules.operands import Operand, lift_operand
from shardkit.testing.exact.search import Remedy, Runs, Search

_ZERO = "the reference's is zero"
_MISREAD = "The mistake is at {1.line}: {0} reads the {1.name} of that line where the reference has another value"
_LOST = "The first value that the reference does not have is that of {}, of a sum without that of {}"
# Repairs that are about as likely.
_ALIKE = 0.25
# How many equations behind a partial sum it is looked for.
_MOST_BEHIND = 4
# A sum over devices is missing where a device reduces what it has, more often than anywhere behind.
_REDUCES = ("reduce_sum", "reduce_max", "reduce_min", "dot_general", "scatter-add")


def describe_difference(runs: Runs, index: int, wanted: Exact | None) -> str:
    """Where and how the result of this number differs, as the end of a sentence.

    Without `wanted` it is the value that differs between devices.
    """
    return _examine(runs, index, wanted).describe()


def describe_remedy(runs: Runs, index: int, wanted: Exact | None) -> str:
    """The line of the mistake and what would repair it, as a sentence; "" if nothing does."""
    return _examine(runs, index, wanted).describe_remedy()


def _examine(runs: Runs, index: int, wanted: Exact | None) -> _Difference:
    reference = Record()
    record = Record()
    results = runs.alone(runs.field, reference)
    memory = StepMemory()
    runs.field.memory = memory
    try:
        got = runs.on_mesh(runs.field, record)[index]
    except DiffersError as error:
        got = error.value
    memory.close()
    values = KnownValues(runs.field, reference, record)
    search = Search(runs, record, got, results, None if wanted is None else index)
    return _Difference(values, search, got, wanted)


class _Difference:
    """What a message says of a wrong result."""

    def __init__(self, values: KnownValues, search: Search, got: Operand, wanted: Exact | None):
        self.values = values
        self.search = search
        self.got = got
        self.wanted = wanted
        self.field = values.field
        self._doubts = values.list_doubts(got)
        self._masks: dict[int, bool] = {}
        self._sending: set[str] = set()
        # Of what the result follows from: a gradient sends on the lines of its casts.
        for number in values.record.find_causes([got]):
            event = values.record.events[number]
            if kind_of(event.place.equation):
                self._sending.add(event.place.line)

    def describe(self) -> str:
        """How the result differs, and the line of the mistake."""
        relation = "" if self.wanted is None else _describe_relation(self.field, self.got, self.wanted)
        if words := self.values.explain(self.got):
            relation = f"only{words} it is a value of the reference"
        places = "" if relation else self._describe_places()
        remedies = []
        if relation != _ZERO and not (self.field.compiled and self._has_lost_sum()):
            remedies = self._find_remedies()
        if not remedies:
            return places + self._describe_first(relation)
        start = f"{places}: {relation or self._describe_factor_of(remedies)}".rstrip(": ")
        return f"{start}. {self._describe_remedies(remedies)}"

    def describe_remedy(self) -> str:
        """The line of the mistake, and what would repair it."""
        remedies = self._find_remedies()
        return self._describe_remedies(remedies) if remedies else ""

    # How a result differs

    def _describe_places(self) -> str:
        """On which devices and at which elements alone a result differs."""
        if self.wanted is None or self.got.shape != self.wanted.shape:
            return ""
        wrong = ~find_equal(self.field, lift_operand(self.field, self.got), self.wanted)
        words = []
        for dim, axes in enumerate(self._find_split_axes(wrong.ndim)):
            others = tuple(i for i in range(wrong.ndim) if i != dim)
            rows = np.flatnonzero(wrong.any(others))
            # Row 5 of 8 over four devices is on device 2.
            n = math.prod(axes.values())
            devices = sorted({int(row) * n // wrong.shape[dim] for row in rows})
            if axes and len(devices) < n:
                words.append(f"where {quoted(axes)} is {_list_numbers(devices)}")
            elif not axes and len(rows) < wrong.shape[dim]:
                words.append(f"at {_list_numbers(rows.tolist())} of dim {dim}")
        return f", only {' and '.join(words)}" if words else ""

    def _find_split_axes(self, rank: int) -> list[dict[str, int]]:
        """For each dim of the result the axes that split it, with their sizes."""
        split: list[dict[str, int]] = [{} for _ in range(rank)]
        number = self.values.record.maker.get(id(self.got))
        if number is None:
            return split
        events = self.values.record.events
        call = events[number].place
        if call.primitive != "shard_map":
            return split
        # A shard_map tells of its results one by one, in the order of their specs.
        specs = call.equation.params["out_specs"]
        position = sum(event.place is call for event in events[:number])
        sizes = call.equation.params["mesh"].shape
        for dim, names in enumerate(tuple(specs[position % len(specs)])[:rank]):
            names = (names,) if isinstance(names, str) else names or ()
            split[dim] = {name: sizes[name] for name in names}
        return split

    def _describe_factor_of(self, remedies: list[Remedy]) -> str:
        """By which factor a repaired value is wrong, of the likeliest repair for which one is known."""
        for remedy in (self._choose(remedies), *remedies):
            event = self.values.record.events[remedy.number]
            if self._is_unknown(event):
                factor = self._describe_factor(event)
                if factor:
                    return factor
        return ""

    def _is_unknown(self, event: Event) -> bool:
        """Whether an equation gave numbers that the reference does not have."""
        return all(isinstance(x, Exact) and self.values.explain(x) is None for x in event.results)

    def _describe_factor(self, event: Event) -> str:
        """By which factor what an equation gave is not a value of the reference."""
        forms: list[tuple[np.ndarray, str]] = []
        for x in event.results:  # a mask has no factor
            if id(x) in self.values.made:
                forms += list_forms(self.field, x, event.place.axes)
        for ratio, text in list_ratios(event.place.axes):
            for form, words in forms:
                if digest(multiply_residues(form, 1 / ratio)) in self.values.known:
                    return f"it is {text} a value of the reference{words}"
        return ""

    # What would repair it

    def _find_remedies(self) -> list[Remedy]:
        last = self.values.find_last_known(self.got, self._doubts)

        def doubt(number: int, behind: bool) -> float:
            highest = KNOWN_BEFORE if behind and number in last else KNOWN
            return min(self._doubts.get(number, 0.0), highest)

        return self.search.find_remedies(doubt)

    def _describe_remedies(self, remedies: list[Remedy]) -> str:
        best = self._choose(remedies)
        lines = [best.place.line]
        if travels_at := self._find_travelling(best):
            lines.insert(0, travels_at)
        elif reader := self._find_better_reader(best):
            best = reader
            lines.insert(0, best.place.line)
        elif line := self._find_reader(best):
            lines.append(line)
        elif others := self._list_others(best, remedies):
            doubts = {id(remedy): self._doubt(remedy) for remedy in others}
            other = min(others, key=lambda remedy: (doubts[id(remedy)], -remedy.number))
            lines.append(other.place.line)
        words = best.words if best.words.startswith("without") else f"with {best.words}"
        return f"The mistake is at {' or '.join(dict.fromkeys(lines))}: {words}, it is right"

    def _choose(self, remedies: list[Remedy]) -> Remedy:
        """The likeliest repair; of several the one on whose line there are most, then the first."""
        votes = Counter(remedy.place.line for remedy in remedies)
        return min(remedies, key=lambda remedy: (self._doubt(remedy), -votes[remedy.place.line], remedy.number))

    def _list_others(self, best: Remedy, remedies: list[Remedy]) -> list[Remedy]:
        """Repairs of other lines that are about as likely."""
        highest = self._doubt(best) + _ALIKE
        others = [remedy for remedy in remedies if remedy.place.line != best.place.line]
        return [remedy for remedy in others if self._doubt(remedy) <= highest]

    def _doubt(self, remedy: Remedy) -> float:
        """How unlikely a repair is: less so one that gives what the reference has, or is beside a collective."""
        doubt = remedy.cost
        if remedy.exchange == "sum" and remedy.place.primitive in _REDUCES:
            doubt -= 0.5
        if self._is_computed(remedy):
            doubt -= 0.5
        # A counter that a loop reads is the same on all devices: what a round makes of it is more often wrong.
        if remedy.behind and remedy.place.primitive == "iota" and self._is_scanned(remedy):
            doubt += 0.5
        near = remedy.number in self.values.near and not remedy.behind
        if near or (remedy.behind and remedy.place.line in self._sending):
            doubt -= 0.25
        return doubt

    def _is_scanned(self, remedy: Remedy) -> bool:
        """Whether the rounds of a loop read what an equation gave."""
        events = self.values.record.events
        [result] = events[remedy.number].results
        rounds = [event for event in events if event.place.primitive == "scan"]
        return any(x is result for event in rounds for x in event.operands)

    def _is_computed(self, remedy: Remedy) -> bool:
        """Whether the reference computes what a repaired equation gives."""
        if not isinstance(remedy.value, Exact):
            return False
        computed = set(self.values.computed)
        if remedy.exchange == "sum":  # of the last value, it gives the result
            computed -= {digest_value(self.field, x) for x in self.search.wanted}
        return self.values.describe_form(remedy.value, remedy.place.axes, computed) == ""

    def _find_travelling(self, remedy: Remedy) -> str:
        """The line on which other values go to another device, between a value that should and its reader.

        What is used together travels together: a gradient with its keys, a mask with its block.
        """
        events = self.values.record.events
        if remedy.exchange in ("travel", "arrival"):
            return self._find_route(remedy)
        if remedy.exchange != "shift":
            return ""
        [result] = events[remedy.number].results
        for event in events[remedy.number + 1 :]:
            if kind_of(event.place.equation) == "ppermute":
                return event.place.line
            if any(x is result for x in event.operands) and event.place.primitive not in PASS:
                return ""
        return ""

    def _find_route(self, remedy: Remedy) -> str:
        """The line on which other values go on in each round, behind the first round or before it."""
        events = self.values.record.events
        later = events[remedy.number + 1 :] if remedy.exchange == "travel" else events[: remedy.number][::-1]
        for event in later:
            if kind_of(event.place.equation) == "ppermute":
                return event.place.line
        return ""

    def _find_better_reader(self, remedy: Remedy) -> Remedy | None:
        """The repair that reads a value that the program has already, in place of making it again.

        Worked example: `own = x.max(); top = pmax(own); y = psum(exp(x - top).sum()); return log(y) + own`. With
        a pmax behind x.max() the result is right; but that is top, and the last line reads own in its place.
        """
        if remedy.exchange != "sum" or not isinstance(remedy.value, Exact):
            return None
        wanted = digest_value(self.field, remedy.value)
        variables = []
        for variable, x in self.values.record.values.items():
            if isinstance(x, Exact) and x.shape == remedy.value.shape and digest_value(self.field, x) == wanted:
                variables.append(variable)
        return self.search.find_reader(remedy, variables)

    def _find_reader(self, remedy: Remedy) -> str:
        """The line that reads a value which is the reference's only summed: the sum may be missing there."""
        events = self.values.record.events
        [result] = events[remedy.number].results
        if not remedy.behind or not self.values.explain(result):
            return ""
        for event in events[remedy.number :]:
            if not any(x is result for x in event.operands):
                continue
            if event.place.primitive in PASS:
                [result] = event.results
            elif event.place.line != remedy.place.line:
                return event.place.line
        return ""

    # Where nothing does

    def _describe_first(self, relation: str) -> str:
        """The first value that the reference does not have."""
        last = self.values.find_origin(self.got)
        beginning = f": {relation}" if relation else ""
        first = None if relation == _ZERO else self._find_first()
        if first is None:
            lost = self._find_lost_sum(self.got) if self.field.compiled else None
            ends = f"; it is a sum without that of {lost}" if lost is not None else ""
            return beginning + (f"; it comes from {last}" if last else "") + ends
        lost = self._find_lost_sum_of(first) if self.field.compiled else None
        if lost is not None:
            return f"{beginning}. {_LOST.format(first.place, lost)}{self._describe_loop(first)}"
        if self.field.compiled:
            return f"{beginning}. {self._describe_first_of_compiled(first)}"
        source = self.values.find_misread(first)
        if source is not None and source.line != first.place.line:
            return f"{beginning}. {_MISREAD.format(first.place, source)}"
        sentence = f"The first value that the reference does not have is that of {first.place}"
        factor = relation or self._describe_factor(first)
        mask = None if factor else self._find_mask(first)
        if mask is not None:
            return f". {sentence}, which reads {mask}"
        uses = self._describe_partial(first)
        ends = f"; the result comes from {last}" if relation and str(last) != str(first.place) else ""
        return f"{f': {factor}' if factor else ''}. {sentence}{uses}{ends}"

    def _describe_first_of_compiled(self, first: Event) -> str:
        """The same of a compiled program, of which no equation is like one of the reference."""
        sentence = f"The first value that the reference does not have is that of {first.place}"
        mask = self._find_mask(first)
        if mask is not None:
            if mask.line != first.place.line:
                sentence += f", which reads {mask}"
            origin = self._find_integers(first, mask.line)
            if origin is not None and origin.line != first.place.line:
                sentence += f", of integers from {origin}"
        sentence += self._describe_partial(first)
        return f"{sentence}{self._describe_loop(first)}"

    def _describe_partial(self, event: Event) -> str:
        """Which operand of an equation is only a partial sum."""
        for x in event.operands:
            words = self.values.explain(x)
            if words:
                return f", of a value that is the reference's only{words}"
        return ""

    def _has_lost_sum(self) -> bool:
        """Whether a sum of the reference is not there: that is likelier than what would repair it elsewhere."""
        first = self._find_first()
        lost = self._find_lost_sum(self.got) if first is None else self._find_lost_sum_of(first)
        return lost is not None

    def _find_lost_sum_of(self, event: Event) -> Call | None:
        """The same of the operands of an equation."""
        for x in event.operands:
            lost = self._find_lost_sum(x) if self._is_made(x) else None
            if lost is not None:
                return lost
        return None

    def _find_lost_sum(self, x: Operand) -> Call | None:
        """The sum of the reference over devices that makes a partial sum whole, or what it follows from."""
        for _ in range(_MOST_BEHIND):
            number = self.values.record.maker.get(id(x))
            if number is None:
                return None
            event = self.values.record.events[number]
            place = self.values.find_sum(x, event.place.axes)
            if place is not None or kind_of(event.place.equation):
                return place
            varying = [operand for operand in event.operands if self._is_made(operand)]
            if not varying:
                return None
            x = varying[0]
        return None

    def _is_made(self, x: Operand) -> bool:
        """Whether an equation of the program on the mesh made a number."""
        return isinstance(x, Exact) and id(x) in self.values.record.maker

    def _describe_loop(self, event: Event) -> str:
        """The loop around an equation of a compiled program, or before it: the number of its rounds may be wrong."""
        if not self.field.compiled:
            return ""
        loops = self.values.record.loops
        line = loops.get(id(event.place.equation), "")
        if line:
            return f", in the loop at {line}" if line != event.place.line else ""
        waiting = self.values.record.find_makers(event.operands)
        for number in itertools.islice(waiting, _MOST_BEHIND):
            maker = self.values.record.events[number]
            line = loops.get(id(maker.place.equation), "")
            if line:
                return f", of what the loop at {line} gives"
            waiting += self.values.record.find_makers(maker.operands)
        return ""

    def _find_integers(self, event: Event, line: str) -> Call | None:
        """What made the integers of another line that the masks of an equation follow from: a key, or a place."""
        record = self.values.record
        waiting = record.find_makers(x for x in event.operands if is_integer(x) or is_mask(x))
        visited = set(waiting)
        for number in waiting:
            maker = record.events[number]
            if maker.place.line != line and maker.operands and maker.place.primitive not in PASS:
                return maker.place
            for behind in record.find_makers(x for x in maker.operands if is_integer(x) or is_mask(x)):
                if behind not in visited:
                    visited.add(behind)
                    waiting.append(behind)
        return None

    def _find_first(self) -> Event | None:
        """The first equation of which the reference does not have the result, but for what blocks explain."""
        first = self._select_entry(lambda x: self.values.explain(x) is not None)
        if first is None or not any(self.values.is_of_blocks(x) for x in first.results):
            return first
        explained = self._select_entry(self._is_known_by_blocks)
        return explained or first

    def _is_known_by_blocks(self, x: Operand) -> bool:
        """Whether the reference has a value, or its blocks, or in a compiled program what the mask follows from."""
        if self.values.explain(x) is not None or self.values.is_of_blocks(x):
            return True
        number = self.values.record.maker.get(id(x))
        if not self.field.compiled or isinstance(x, Exact) or number is None:
            return False
        if id(x) not in self._masks:
            operands = self.values.record.events[number].operands
            self._masks[id(x)] = all(self._is_known_by_blocks(operand) for operand in operands)
        return self._masks[id(x)]

    def _select_entry(self, is_known: Callable[[Operand], bool]) -> Event | None:
        """Of the equations that lead from known values to others, one with a partial sum, else the first."""
        entries = []
        for event in self._list_entries(is_known):
            # The line of a shard_map is the library's own.
            if self._doubts.get(self._number(event), 0.0) < KNOWN and event.place.primitive != "shard_map":
                entries.append(event)
        if not entries:
            return None
        return min(entries, key=lambda event: (not any(map(self.values.explain, event.operands)), self._number(event)))

    def _list_entries(self, is_known: Callable[[Operand], bool]) -> list[Event]:
        """The equations of which all operands are known, and the result is not."""
        entries: list[Event] = []
        waiting = [self.got]
        visited: set[int] = set()
        while waiting:
            x = waiting.pop()
            if id(x) in visited or is_known(x):
                continue
            visited.add(id(x))
            event = self._find_maker(x)
            unknown = [operand for operand in event.operands if not is_known(operand)]
            if not unknown:
                entries.append(event)
            # Of a value that differs between devices the reason is what differs, too.
            varying = [operand for operand in unknown if self._varies(operand)] if self.wanted is None else []
            waiting += varying or unknown
        return entries

    def _varies(self, x: Operand) -> bool:
        """Whether devices may have different values."""
        rank = len(self._find_maker(x).place.axes)
        return max(x.shape[:rank], default=1) > 1

    def _find_maker(self, x: Operand) -> Event:
        record = self.values.record
        return record.events[record.maker[id(x)]]

    def _number(self, event: Event) -> int:
        return next(i for i, other in enumerate(self.values.record.events) if other is event)

    def _find_mask(self, event: Event) -> Call | None:
        """The equation of the integers or the mask that an equation reads, if it reads only known numbers besides."""
        record = self.values.record
        for x in event.operands:
            number = record.maker.get(id(x))
            while not isinstance(x, Exact) and number is not None:
                maker = record.events[number]
                if maker.place.primitive not in (*PASS, "select_n") and maker.operands:
                    return maker.place
                number = next(iter(record.find_makers(maker.operands)), None)
        return None


def _list_numbers(numbers: Sequence[int]) -> str:
    """Numbers in words: those in a row by the first and the last."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return " or ".join(map(str, numbers))


def _describe_relation(field: Field, got: Operand, wanted: Exact) -> str:
    """How a result differs: by a factor, or in the order of its pieces."""
    a = take_residues(field, got)
    b = take_residues(field, wanted)
    if a.shape != b.shape:
        return ""
    if not b.any():
        return _ZERO
    if not a.any():
        return "it is zero"
    for ratio, text in list_ratios({}):
        if np.array_equal(a, multiply_residues(b, ratio)):
            return f"it is {text} the reference everywhere"
    for dim in range(1, b.ndim):
        for distance in range(1, b.shape[dim]):
            if np.array_equal(a, np.roll(b, distance, dim)):
                return f"it is the reference rolled by {distance} along dim {dim - 1}: devices have each other's pieces"
    return ""
