"""From a wrong result to the line: which equation is the mistake, and how the result differs.

Both programs run once more, keeping every value. A value of the distributed program is whole on every device, split
along a dim, or a partial sum; put together in one of these ways it is looked up among the reference's values. Then
`search.py` tries what would repair the result. Where nothing does, the message names the first value that the reference
does not have: from the wrong result backwards, through values that the reference does not have, to the equations whose
operands it has; the first of them that has a partial sum as an operand, else the first.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from shardkit._arguments.checks import quoted
from shardkit._jax.primitives import registered
from shardkit.testing.exact.interpreter import DiffersError
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.logarithms import to_number
from shardkit.testing.exact.numbers.orders import find_equal
from shardkit.testing.exact.numbers.tower import PRIMES
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.repairs import Call
from shardkit.testing.exact.rules.operands import Operand
from shardkit.testing.exact.search import Event, Record, Remedy, Runs, Search

_MOST_FORMS = 64
# Equations that only pass elements on: a value's origin is behind them.
_PASS = ("broadcast_in_dim", "convert_element_type", "reshape", "scan", "shard_map", "squeeze", "transpose")
_MOVES = (*_PASS, "concatenate", "dynamic_slice", "expand_dims", "gather", "pad", "rev", "slice", "split", "stack")
# Of whose operands a result may have only some elements.
_PARTS = ("dynamic_slice", "gather", "select_n", "slice", "split")
# Collectives that only pass elements on.
_SENT = ("all_gather", "all_gather_invariant", "pvary", "pcast")
_ZERO = "the reference's is zero"
_MISREAD = "The mistake is at {1.line}: {0} reads the {1.name} of that line where the reference has another value"
# How much less likely a mistake is where the reference has what was computed.
_KNOWN, _KNOWN_ON_ONE, _KNOWN_BEFORE = 3.0, 1.0, 0.5
# Repairs that are about as likely.
_ALIKE = 0.25


def located(runs: Runs, index: int, wanted: Exact | None) -> str:
    """Where and how the result of this number differs, as the end of a sentence.

    Without `wanted` it is the value that differs between devices.
    """
    reference, record = Record(), Record()
    results = runs.alone(runs.field, reference)
    try:
        got = runs.on_mesh(runs.field, record)[index]
    except DiffersError as error:
        got = error.value
    values = _Values(runs.field, reference, record)
    search = Search(runs, record, got, results, None if wanted is None else index)
    return _Sentence(values, search, got, wanted).text()


class _Values:
    """The values of a run on the mesh, and which of them the reference has."""

    def __init__(self, field: Field, reference: Record, record: Record):
        self.field, self.record = field, record
        self.reference = reference
        self.computed: dict[bytes, Exact] = {}  # by the reference, and more than elements of inputs
        self.known: set[bytes] = set()
        self.made: dict[int, Event] = {}
        self._held: dict[int, str | None] = {}
        self._masks: dict[int, bool] = {}
        passed: set[int] = set()  # values that are elements of inputs alone
        for event in reference.events:
            passed.update(id(x) for x in event.operands if id(x) not in reference.maker)
            if event.place.equation.primitive.name in _MOVES and passed.issuperset(map(id, event.operands)):
                passed.update(map(id, event.results))
            for x in filter(_is_float, (*event.operands, *event.results)):
                top = _top(field, x)
                self.known.add(_digest(top))
                if isinstance(x, Exact) and id(x) not in passed and (top != top[:1]).any():
                    self.computed.setdefault(_digest(top), x)
        for event in record.events:
            inputs = [x for x in event.operands if isinstance(x, Exact) and id(x) not in self.made]
            self.known.update(_digest(_top(field, x)) for x in inputs)
            summed = registered(event.place.equation.primitive.name).kind  # as a count of tokens
            for x in event.results:
                if isinstance(x, Exact) or (summed and _is_float(x)):
                    self.made.setdefault(id(x), event)

    def explained(self, x: Operand) -> str | None:
        """As what the reference has a value, "" for whole or split; None if it does not."""
        if id(x) not in self.made:
            return None if self.behind_floats(x) else ""
        if id(x) not in self._held:
            event = self.made[id(x)]
            passed = event.place.equation.primitive.name in ("scan", "ppermute")
            if passed and all(self.explained(y) is not None for y in event.operands):
                self._held[id(x)] = ""
            else:
                self._held[id(x)] = self.form(x, event.place.axes, self.known)
        return self._held[id(x)]

    def behind_floats(self, x: Operand) -> bool:
        """Whether a mask or an integer follows from a number that the reference does not have."""
        number = self.record.maker.get(id(x))
        if isinstance(x, Exact) or number is None:
            return False
        if id(x) not in self._masks:
            self._masks[id(x)] = any(self.explained(y) is None for y in self.record.events[number].operands)
        return self._masks[id(x)]

    def form(self, x: Operand, axes: Mapping[str, int], known: Container[bytes]) -> str | None:
        """How a value of the mesh must be put together to be a known one."""
        return next((how for form, how in _forms(self.field, x, axes) if _digest(form) in known), None)

    def misread(self, event: Event) -> Call | None:
        """What made the one operand of an equation that the reference's equation has another for.

        That other value must be nowhere in the program on the mesh: else the wrong one of its values is read, and the
        mistake is the equation's.
        """
        operands = event.operands
        if len(operands) < 2 or len(event.results) != 1:
            return None
        forms = [self.forms(x, event.place.axes) for x in operands]
        for other in self.reference.events:
            if other.place.name != event.place.name or len(other.operands) != len(operands):
                continue
            wanted = [_digest(_top(self.field, x)) if _is_float(x) else b"" for x in other.operands]
            wrong = [i for i, digest in enumerate(wanted) if digest not in forms[i]]
            if len(wrong) == 1 and wanted[wrong[0]] and wanted[wrong[0]] not in self.everywhere:
                return self.origin(operands[wrong[0]], _SENT)
        return None

    def forms(self, x: Operand, axes: Mapping[str, int]) -> set[bytes]:
        """What a value of the mesh may be put together to, but for sums over devices."""
        digests: set[bytes] = set()
        if _is_float(x):
            for form, how in itertools.islice(_forms(self.field, x, axes), _MOST_FORMS):
                if not how:
                    digests.add(_digest(form))
        return digests

    @cached_property
    def everywhere(self) -> set[bytes]:
        """What all values of the mesh may be put together to."""
        digests: set[bytes] = set()
        for event in self.record.events:
            values = event.results
            if event.place.equation.primitive.name != "shard_map":  # whose operands have other dims in front
                values = (*event.operands, *event.results)
            for x in filter(_is_float, values):
                digests |= self.forms(x, event.place.axes)
        return digests

    def origin(self, x: Operand, passing: Sequence[str] = ()) -> Call | None:
        """The equation that made a value, behind those that only passed it on."""
        number = self.record.maker.get(id(x))
        while number is not None:
            event = self.record.events[number]
            if event.place.equation.primitive.name not in (*_PASS, *passing):
                return event.place
            number = next((self.record.maker[id(y)] for y in event.operands if id(y) in self.record.maker), None)
        return None

    def doubts(self, got: Operand) -> dict[int, float]:
        """How unlikely the mistake is at the events before a value: the reference has what they gave, or led to."""
        numbers = self.record.before([got])
        doubts: dict[int, float] = {}
        for doubt, knows in ((_KNOWN_ON_ONE, self._on_one), (_KNOWN, self._on_all)):
            known = {number for number in numbers if knows(self.record.events[number])}
            whole = [self.record.events[number] for number in known]
            operands = [x for event in whole if event.place.name not in _PARTS for x in event.operands]
            doubts.update(dict.fromkeys(known | self.record.before(operands, _PARTS), doubt))
        return doubts

    def last_known(self, got: Operand, doubts: Mapping[int, float]) -> set[int]:
        """The numbers of the events in doubt whose results are read where there is none."""
        events = (self.record.events[number] for number in self.record.before([got]) if number not in doubts)
        return {self.record.maker[id(x)] for event in events for x in event.operands if id(x) in self.record.maker}

    def _on_all(self, event: Event) -> bool:
        """Whether the reference has what an equation gave on all devices."""
        return self._varies(event) and self.form(event.results[0], event.place.axes, self.computed) == ""

    def _on_one(self, event: Event) -> bool:
        """Whether the reference has what an equation gave on one of the devices."""
        if not self._varies(event):
            return False
        top, rank = _top(self.field, event.results[0]), len(event.place.axes)
        devices = np.ndindex(*top.shape[1 : 1 + rank])
        return any(_digest(top[(slice(None), *device)]) in self.computed for device in devices)

    def _varies(self, event: Event) -> bool:
        """Whether an equation gave one array that follows from an input."""
        if len(event.results) != 1 or not isinstance(event.results[0], Exact) or not event.operands:
            return False
        top = _top(self.field, event.results[0])
        return bool((top != top[:1]).any())


class _Sentence:
    """What a message says of a wrong result."""

    def __init__(self, values: _Values, search: Search, got: Operand, wanted: Exact | None):
        self.values, self.search, self.got, self.wanted = values, search, got, wanted
        self.field = values.field
        places = [event.place for event in values.record.events]
        self._sending = {place.line for place in places if registered(place.equation.primitive.name).kind}

    def text(self) -> str:
        """How the result differs, and the line of the mistake."""
        relation = "" if self.wanted is None else _relation(self.field, self.got, self.wanted)
        if how := self.values.explained(self.got):
            relation = f"only{how} it is a value of the reference"
        places = self._places() if not relation else ""
        doubts = self.values.doubts(self.got)
        behind = self.values.last_known(self.got, doubts)

        def doubt(number: int, after: bool) -> float:
            return min(doubts.get(number, 0.0), _KNOWN_BEFORE if after and number in behind else _KNOWN)

        if relation != _ZERO and (found := self.search.repaired(doubt)):
            return f"{places}: {relation or self._factor_of(found)}".rstrip(": ") + f". {self._repair(found)}"
        return places + self._first(relation, doubts)

    def _first(self, relation: str, doubts: Mapping[int, float]) -> str:
        """The first value that the reference does not have."""
        explained, last = self.values.explained, self.values.origin(self.got)
        entries = [event for event in self._entries() if doubts.get(self._number(event), 0.0) < _KNOWN]
        # The line of a shard_map is the library's own.
        entries = [event for event in entries if event.place.equation.primitive.name != "shard_map"]
        if relation == _ZERO or not entries:
            return (f": {relation}" if relation else "") + (f"; it comes from {last}" if last else "")
        first = min(entries, key=lambda event: (not any(map(explained, event.operands)), self._number(event)))
        source = self.values.misread(first)
        if source is not None and source.line != first.place.line:
            return f"{f': {relation}' if relation else ''}. {_MISREAD.format(first.place, source)}"
        partial = [how for how in map(explained, first.operands) if how]
        text = f": {relation or self._factor(first)}".rstrip(": ")
        if not text and (mask := self._mask(first)):
            return f". The first value that the reference does not have is that of {first.place}, which reads {mask}"
        uses = f", of a value that is the reference's only{partial[0]}" if partial else ""
        ends = f"; the result comes from {last}" if relation and str(last) != str(first.place) else ""
        return f"{text}. The first value that the reference does not have is that of {first.place}{uses}{ends}"

    def _places(self) -> str:
        """On which devices and at which elements alone a result differs."""
        if self.wanted is None or self.got.shape != self.wanted.shape:
            return ""
        got = self.got if isinstance(self.got, Exact) else self.field.lift(self.got)
        other = ~find_equal(self.field, got, self.wanted)
        number = self.values.record.maker.get(id(self.got))
        event = self.values.record.events[number] if number is not None else None
        names: list[Sequence[str]] = [()] * other.ndim
        if event and event.place.equation.primitive.name == "shard_map":
            specs = event.place.equation.params["out_specs"]
            at = sum(x.place is event.place for x in self.values.record.events[:number])
            names = [axes if axes is not None else () for axes in (*specs[at % len(specs)], *[None] * other.ndim)][
                : other.ndim
            ]
        words = []
        for dim, axes in enumerate(names):
            rows = np.flatnonzero(other.any(tuple(i for i in range(other.ndim) if i != dim)))
            axis = (axes,) if isinstance(axes, str) else tuple(axes)
            n = math.prod(event.place.equation.params["mesh"].shape[name] for name in axis) if event else 1
            devices = sorted({int(row) * n // other.shape[dim] for row in rows})
            if axis and len(devices) < n:
                words.append(f"where {quoted(axis)} is {_listed(devices)}")
            elif not axis and len(rows) < other.shape[dim]:
                words.append(f"at {_listed(rows.tolist())} of dim {dim}")
        return f", only {' and '.join(words)}" if words else ""

    def _number(self, event: Event) -> int:
        return next(i for i, other in enumerate(self.values.record.events) if other is event)

    def _repair(self, found: list[Remedy]) -> str:
        doubts, best = {id(repair): self._doubt(repair) for repair in found}, self._best(found)
        words = best.words if best.words.startswith("without") else f"with {best.words}"
        others = [x for x in found if x.place.line != best.place.line and doubts[id(x)] <= doubts[id(best)] + _ALIKE]
        lines = [best.place.line]
        if reader := self._reader(best):
            lines.append(reader)
        elif others:
            lines.append(min(others, key=lambda repair: (doubts[id(repair)], -repair.number)).place.line)
        return f"The mistake is at {' or '.join(lines)}: {words}, it is right"

    def _best(self, found: list[Remedy]) -> Remedy:
        """The likeliest repair; of several the one on whose line there are most, then the first."""
        votes = Counter(repair.place.line for repair in found)
        return min(found, key=lambda repair: (self._doubt(repair), -votes[repair.place.line], repair.number))

    def _factor_of(self, found: list[Remedy]) -> str:
        event = self.values.record.events[self._best(found).number]
        return self._factor(event) if self._known_factor(event) else ""

    def _known_factor(self, event: Event) -> bool:
        return all(isinstance(x, Exact) and self.values.explained(x) is None for x in event.results)

    def _reader(self, repair: Remedy) -> str:
        """The line that reads a value which is the reference's only summed: the sum may be missing there."""
        events = self.values.record.events
        [result] = events[repair.number].results
        if not repair.behind or not self.values.explained(result):
            return ""
        for event in events[repair.number :]:
            reads = any(x is result for x in event.operands)
            if reads and event.place.equation.primitive.name in _PASS:
                [result] = event.results
            elif reads and event.place.line != repair.place.line:
                return event.place.line
        return ""

    def _doubt(self, repair: Remedy) -> float:
        """How unlikely a repair is: less so one that gives what the reference has, or is beside a collective."""
        computed, doubt = set(self.values.computed), repair.cost
        if repair.words.startswith(("the sum", "the mean")):  # of the last value, it gives the result
            computed = computed - {_digest(_top(self.field, x)) for x in self.search.wanted}
        if isinstance(repair.value, Exact) and self.values.form(repair.value, repair.place.axes, computed) == "":
            doubt -= 0.5
        near = repair.number in self.search.near and not repair.behind
        return doubt - (0.25 if near or (repair.behind and repair.place.line in self._sending) else 0.0)

    def _entries(self) -> list[Event]:
        """The first equations whose results the reference does not have."""
        record, explained = self.values.record, self.values.explained
        entries: list[Event] = []
        waiting, visited = [self.got], set()
        while waiting:
            x = waiting.pop()
            if id(x) in visited or explained(x) is not None:
                continue
            visited.add(id(x))
            event = record.events[record.maker[id(x)]]
            unknown = [y for y in event.operands if explained(y) is None]
            if not unknown:
                entries.append(event)
            varying = [y for y in unknown if max(y.shape[: len(self._maker(y).place.axes)], default=1) > 1]
            waiting += (varying if self.wanted is None else []) or unknown
        return entries

    def _maker(self, x: Operand) -> Event:
        return self.values.record.events[self.values.record.maker[id(x)]]

    def _mask(self, event: Event) -> Call | None:
        """The equation of the integers or the mask that an equation reads, if it reads only known numbers besides."""
        record = self.values.record
        for x in event.operands:
            number = record.maker.get(id(x))
            while not isinstance(x, Exact) and number is not None:
                maker = record.events[number]
                name = maker.place.equation.primitive.name
                if name not in (*_PASS, "select_n") and maker.operands:
                    return maker.place
                number = next((record.maker[id(y)] for y in maker.operands if id(y) in record.maker), None)
        return None

    def _factor(self, event: Event) -> str:
        x = next(y for y in event.results if id(y) in self.values.made)
        forms = list(itertools.islice(_forms(self.field, x, event.place.axes), _MOST_FORMS))
        for ratio, text in _ratios(event.place.axes):
            inverse = _residue(self.field, 1 / ratio)
            for form, how in forms:
                if _digest(form * inverse % _prime(self.field)) in self.values.known:
                    return f"it is {text} a value of the reference{how}"
        return ""


def _listed(numbers: Sequence[int]) -> str:
    """Numbers in words: those in a row by the first and the last."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return " or ".join(map(str, numbers))


def _is_float(x: Operand) -> bool:
    return isinstance(x, Exact) or x.dtype.kind == "f"


def _relation(field: Field, got: Operand, wanted: Exact) -> str:
    """How a result differs: by a factor, or in the order of its pieces."""
    a, b = (_top(field, x) for x in (got, wanted))
    if a.shape != b.shape:
        return ""
    if not b.any():
        return _ZERO
    if not a.any():
        return "it is zero"
    for ratio, text in _ratios({}):
        if np.array_equal(a, b * _residue(field, ratio) % _prime(field)):
            return f"it is {text} the reference everywhere"
    for dim in range(1, b.ndim):
        for by in range(1, b.shape[dim]):
            if np.array_equal(a, np.roll(b, by, dim)):
                return f"it is the reference rolled by {by} along dim {dim - 1}: devices have each other's pieces"
    return ""


def _ratios(axes: Mapping[str, int]) -> Iterator[tuple[Fraction, str]]:
    """Factors that a wrong program may have, and their words."""
    for name, n in axes.items():
        yield Fraction(n), f"{n} times, the size of {name!r},"
        yield Fraction(1, n), f"1/{n} of, by the size of {name!r},"
    yield Fraction(-1), "minus"
    for n in range(2, 65):
        yield Fraction(n), f"{n} times"
        yield Fraction(1, n), f"1/{n} of"


def _prime(field: Field) -> np.uint64:
    """That of the components that every value has."""
    return np.uint64(PRIMES[-2])


def _residue(field: Field, ratio: Fraction) -> np.uint64:
    p = int(_prime(field))
    return np.uint64(ratio.numerator * pow(ratio.denominator, -1, p) % p)


def _top(field: Field, x: Operand) -> np.ndarray:
    """The components that every value has."""
    return to_number(field, x if isinstance(x, Exact) else field.lift(x)).number[-2 * field.points : -field.points]


def _forms(field: Field, x: Operand, axes: Mapping[str, int]) -> Iterator[tuple[np.ndarray, str]]:
    """The arrays that a value of all devices may be a part of, and how."""
    number = _top(field, x)
    rank = len(axes)
    if number.ndim <= rank:  # a literal of the program, which has no dims of devices
        yield number, ""
        return
    ways: list[list[tuple[Any, int, str]]] = []
    for at, name in enumerate(axes):
        if number.shape[1 + at] == 1:
            ways.append([("whole", at, name)])
        else:
            dims = range(number.ndim - 1 - rank)
            ways.append([("first", at, name), ("sum", at, name), *((dim, at, name) for dim in dims)])
    for choice in itertools.islice(itertools.product(*ways), _MOST_FORMS):
        form: Any = number
        how: list[str] = []
        for way, at, name in reversed(choice):
            if form is None:
                break
            if way == "sum":
                form = form.sum(1 + at, np.uint64, keepdims=True) % _prime(field)
                how.append(name)
            elif way == "first":
                first = np.take(form, [0], 1 + at)
                form = first if (form == first).all() else None
            elif way != "whole":
                to = 1 + rank + way
                form = np.moveaxis(form, 1 + at, to - 1)
                shape = form.shape
                form = form.reshape((*shape[: to - 1], shape[to - 1] * shape[to], *shape[to + 1 :]))
                form = np.expand_dims(form, 1 + at)
        if form is not None:
            yield form, f" summed over {quoted(how)}" if how else ""


def _digest(x: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(x).tobytes(), digest_size=12).digest()
