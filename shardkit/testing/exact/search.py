"""Which equation of a wrong program is the mistake: one whose repair makes the result right.

A run of the program is recorded, every value with the equation that made it. Suspected is what the wrong result follows
from. Of these equations the repairs of `proposals.py` are tried, each by one more run, likely mistakes first; what
makes the result right must do so with other numbers too. Equations of a Python loop that was unrolled are repaired
together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from shardkit._jax.jaxprs import walk
from shardkit._jax.primitives import registered
from shardkit.testing.exact.interpreter import DiffersError, HangsError, Seen
from shardkit.testing.exact.numbers.errors import RedrawError, TooDeepError, UnknownValueError, UnsupportedError
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.orders import find_equal
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.proposals import propose_repairs
from shardkit.testing.exact.repairs import Call, Change, Repair, Values
from shardkit.testing.exact.rules.operands import Operand

# How many runs are tried, and equations of all of them: a minute, of the largest programs that are proved.
MOST_RUNS, _MOST_EQUATIONS = 600, 150_000
# How much less likely than the likeliest a repair may be that is looked at too.
_MARGIN, _UNLIKELY = 0.75, 3.5
_PASS = ("broadcast_in_dim", "convert_element_type", "reshape", "squeeze", "slice", "transpose", "expand_dims")
_HOLDING = ("shard_map", "scan", "while", "cond")


class Runs(NamedTuple):
    """Both programs, in the field in which they differ."""

    field: Field
    on_mesh: Callable[[Field, Seen | None], list[Operand]]
    alone: Callable[[Field, Seen | None], list[Operand]]


class Event(NamedTuple):
    """An equation that ran."""

    place: Call
    operands: tuple[Operand, ...]
    results: tuple[Operand, ...]


class Record:
    """What a run computed, in order.

    Attributes:
        events: the equations that ran.
        maker: of a value, by its id, the number of the event that made it.
        values: what each variable was last.
        readable: of an equation, by its id, the variables that it could read.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.maker: dict[int, int] = {}
        self.values: dict[Any, Operand] = {}
        self.readable: dict[int, list[Any]] = {}
        self._places: dict[Any, Call] = {}
        self._inputs: dict[int, Iterator[Any]] = {}

    def __call__(
        self,
        equation: Any,
        operands: Sequence[Operand],
        results: Sequence[Operand],
        axes: Mapping[str, int],
        around: str,
    ) -> None:
        place = Call(equation, around, axes, operands, results)
        place = self._places.setdefault((*place.key, len(axes)), place)
        for x in results:
            if not any(x is y for y in operands):
                self.maker.setdefault(id(x), len(self.events))
        self.events.append(Event(place, tuple(operands), tuple(results)))
        if equation.primitive.name == "shard_map":
            self._entered(equation, results, bool(axes))
        else:
            _assign(self.values, equation, operands, results)

    def _entered(self, equation: Any, results: Sequence[Operand], inside: bool) -> None:
        if id(equation) not in self._inputs:
            body = equation.params["jaxpr"]
            body = getattr(body, "jaxpr", body)
            self._inputs[id(equation)] = iter(body.invars)
            for jaxpr in {id(site.jaxpr): site.jaxpr for site in walk(body)}.values():
                readable = list(jaxpr.invars)
                for inner in jaxpr.eqns:
                    self.readable[id(inner)] = list(readable)
                    readable += inner.outvars
        variable = next(self._inputs[id(equation)], None) if inside else None
        if variable is not None:
            self.values[variable] = results[0]

    def before(self, values: Iterable[Operand], up_to: Sequence[str] = ()) -> set[int]:
        """The numbers of the events that values follow from, not before equations of some names."""
        numbers: set[int] = set()
        waiting = [self.maker[id(x)] for x in values if id(x) in self.maker]
        while waiting:
            number = waiting.pop()
            if number not in numbers:
                numbers.add(number)
                if self.events[number].place.equation.primitive.name in up_to:
                    continue
                waiting += [self.maker[id(x)] for x in self.events[number].operands if id(x) in self.maker]
        return numbers

    def near_devices(self) -> set[int]:
        """The numbers of the events that read what a collective gave, or the index of a device."""
        numbers: set[int] = set()
        passing: set[int] = set()
        for number, event in enumerate(self.events):
            makers = {self.maker.get(id(x)) for x in event.operands}
            name = event.place.equation.primitive.name
            if makers & passing:
                numbers.add(number)
            if registered(name).kind or name == "axis_index" or (name in _PASS and makers & passing):
                passing.add(number)
        return numbers

    def after(self, name: str) -> set[int]:
        """The numbers of the events that follow from an equation of this name."""
        numbers: set[int] = set()
        for number, event in enumerate(self.events):
            makers = {self.maker.get(id(x)) for x in event.operands}
            if event.place.name == name or makers & numbers:
                numbers.add(number)
        return numbers


def _assign(values: dict[Any, Operand], equation: Any, operands: Sequence[Operand], results: Sequence[Operand]) -> None:
    """Notes what the variables of an equation are."""
    calls = len(equation.invars) != len(operands)
    if not calls:
        values.update((v, x) for v, x in zip(equation.invars, operands, strict=True) if not hasattr(v, "val"))
    values.update(zip(equation.outvars, results, strict=False))


class Remedy(NamedTuple):
    """A repair that makes the result right.

    Attributes:
        number: that of the first event at its place.
        cost: how unlikely it is that this was the mistake.
        value: what the repaired equation gives.
        behind: whether it is done to the result of the equation.
    """

    place: Call
    number: int
    cost: float
    words: str
    value: Operand
    behind: bool


class _ReachedError(Exception):
    """The result that was wrong is computed again."""

    def __init__(self, values: Sequence[Operand]):
        super().__init__()
        self.values = values


class _OtherShapeError(Exception):
    """What a repair gives has another shape."""


class _Trial:
    """A run in which equations have other results, up to the result that was wrong."""

    def __init__(self, changes: Mapping[Any, Change], values: Values, goal: tuple[Any, int, int | None]):
        self.changes, self.values, self.goal = changes, dict(values), goal
        self.reached: list[Operand] = []
        self.changed: Operand = None

    def __call__(
        self,
        equation: Any,
        operands: Sequence[Operand],
        results: Sequence[Operand],
        axes: Mapping[str, int],
        around: str,
    ) -> Sequence[Operand] | None:
        key, changed = (id(equation), around), None
        entry = equation.primitive.name == "shard_map"
        if not entry:
            _assign(self.values, equation, operands, ())
        if key in self.changes and not entry:
            changed = list(self.changes[key](list(operands), list(results), self.values))
            _check_shapes(results, changed, len(axes))
            results, self.changed = changed, changed[0]
        if not entry:
            _assign(self.values, equation, operands, results)
        goal, times, at = self.goal
        if (*key, len(axes)) == goal:
            self.reached.append(results[at or 0])
            if len(self.reached) > times:
                raise _ReachedError(self.reached if at is None else self.reached[-1:])
        return changed


def _check_shapes(before: Sequence[Operand], after: Sequence[Operand], rank: int) -> None:
    for x, y in zip(before, after, strict=True):
        if x.shape[rank:] != y.shape[rank:]:
            raise _OtherShapeError
        if isinstance(y, Exact) and not isinstance(x, Exact) and x.dtype.kind != "f":
            raise _OtherShapeError


class Search:
    """Looks for repairs of a wrong result.

    Attributes:
        record: the run.
        got: the wrong result, or what differs between devices.
        wanted: what all results must be.
        index: which of them is wrong; None for what differs between devices.
        runs: how many were tried.
    """

    def __init__(self, programs: Runs, record: Record, got: Operand, wanted: Sequence[Operand], index: int | None):
        self.programs, self.record, self.got, self.wanted, self.index = programs, record, got, wanted, index
        self.field = programs.field
        self.runs = 0
        self._second: Search | None = None
        self._goal = self._behind_devices() if index is None else self._of_result()
        self._behind_index, self.near = record.after("axis_index"), record.near_devices()
        self._most = min(MOST_RUNS, _MOST_EQUATIONS // max(len(record.events), 1))

    def _of_result(self) -> tuple[Any, int, int | None]:
        """The equation that gives the result, how often it ran before, and which of its results it is."""
        number = self.record.maker.get(id(self.got))
        if number is None:
            return None, 0, 0
        event = self.record.events[number]
        times = sum(other.place is event.place for other in self.record.events[:number])
        place = event.place
        return (*place.key, len(place.axes)), times, [x is self.got for x in event.results].index(True)

    def _behind_devices(self) -> tuple[Any, int, int | None]:
        """The same of all results of the devices between which a value differs."""
        entry = next(x.place for x in reversed(self.record.events) if x.place.equation.primitive.name == "shard_map")
        return (*entry.key, 0), len(entry.equation.outvars) - 1, None

    def right(self, x: Operand, index: int) -> bool:
        """Whether a result is the reference's."""
        a, b = (y if isinstance(y, Exact) else self.field.lift(y) for y in (x, self.wanted[index]))
        if a.shape != b.shape or (a.poison != b.poison).any():  # what is outside of a domain is right nowhere
            return False
        return bool(find_equal(self.field, a, b).all())

    def tried(self, changes: Mapping[Any, Change]) -> Operand | None:
        """What the changed equation gives, if that makes the result right."""
        self.runs += 1
        trial = _Trial(changes, self.record.values, self._goal)
        try:
            self.programs.on_mesh(self.field, trial)
        except _ReachedError as reached:
            numbers = range(min(len(reached.values), len(self.wanted))) if self.index is None else [self.index]
            right = all(self.right(x, i) for x, i in zip(reached.values, numbers, strict=False))
            return trial.changed if right else None
        except (
            DiffersError,
            HangsError,
            RedrawError,
            TooDeepError,
            UnknownValueError,
            UnsupportedError,
            _OtherShapeError,
        ):
            return None
        except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError):
            return None  # a change without a meaning, as of an operand that has another form there
        return None

    def suspects(self) -> dict[int, Call]:
        """The equations that the wrong result follows from, by the number of their first event."""
        places: dict[int, Call] = {}
        seen: set[Any] = set()
        for number in sorted(self.record.before([self.got])):
            place = self.record.events[number].place
            if place.equation.primitive.name not in _HOLDING and place.key not in seen and place.results:
                seen.add(place.key)
                places[number] = place
        return places

    def repaired(self, doubt: Callable[[int, bool], float]) -> list[Remedy]:
        """The repairs that make the result right, and are about as likely as the likeliest of them.

        `doubt` says how unlikely it is that the mistake is at a place.
        """
        suspects = self.suspects()
        sizes = sorted({n for event in self.record.events for x in event.results for n in x.shape} - {0, 1})[:6]
        waiting: list[tuple[float, int, list[int], int, tuple[Repair, ...]]] = []
        loops = _loops(suspects)
        for group in _together(suspects):
            ways = [self._repairs(suspects[number], sizes) for number in group]
            number, place = group[0], suspects[group[0]]
            more = 0.25 if place.around else 0.0
            if len(group) > 1:
                more += 0.25 if len(group) in loops else 1.0
            if number in self._behind_index and not isinstance(place.results[0], Exact):
                more -= 0.5
            for way, same in enumerate(zip(*ways, strict=False)):
                if len({repair.words for repair in same}) > 1:
                    break
                cost = same[0].cost + more + doubt(number, same[0].behind)
                waiting.append((cost, number, group, way, same))
        waiting.sort(key=lambda row: row[:2])
        found: list[Remedy] = []
        for cost, number, group, way, same in waiting:
            if self.runs >= self._most or cost > min([_UNLIKELY, *(other.cost + _MARGIN for other in found)]):
                break
            places = [suspects[n] for n in group]
            changes = {place.key: repair.change for place, repair in zip(places, same, strict=True)}
            changed = self.tried(changes)
            if changed is not None and self._confirmed(places, way, sizes):
                found.append(Remedy(places[0], number, cost, same[0].words, changed, same[0].behind))
        return found

    def _confirmed(self, places: Sequence[Call], way: int, sizes: Sequence[int]) -> bool:
        """Whether it is right with other numbers too, of which others are larger."""
        if self.field.elements:  # with other numbers they would be no special ones
            return True
        if self._second is None:
            settings: Any = self.field.settings
            field = Field(settings[0], settings[1] + 1, *settings[2:])
            self._second = self._again(self.programs._replace(field=field))
        if self._second is self:
            return True
        changes = {place.key: self._second._repairs(place, sizes)[way].change for place in places}
        return self._second.tried(changes) is not None

    def _again(self, programs: Runs) -> Search:
        """The search with other numbers; itself where these cannot be used."""
        record = Record()
        try:
            wanted = programs.alone(programs.field, None)
            results = programs.on_mesh(programs.field, record)
        except DiffersError as error:
            return Search(programs, record, error.value, wanted, None)
        except (RedrawError, TooDeepError, UnknownValueError):
            return self
        return self if self.index is None else Search(programs, record, results[self.index], wanted, self.index)

    def _repairs(self, place: Call, sizes: Sequence[int]) -> list[Repair]:
        return list(propose_repairs(self.field, place, self.record.readable.get(id(place.equation), ()), sizes))


def _loops(suspects: Mapping[int, Call]) -> set[int]:
    """How often loops may have been unrolled: so often several lines have the same equation."""
    counts = Counter((place.line, place.name) for place in suspects.values())
    lines = {(line, count // step) for (line, _), count in counts.items() for step in (1, 2, 3) if count % step == 0}
    return {n for n, often in Counter(n for _, n in lines).items() if n > 1 and often > 1}


def _together(suspects: Mapping[int, Call]) -> Iterator[list[int]]:
    """Equations that are repaired together: each alone, and what a line has again and again, as an unrolled loop."""
    alike: dict[Any, list[int]] = {}
    for number, place in suspects.items():
        yield [number]
        alike.setdefault((place.line, place.name, len(place.operands)), []).append(number)
    for numbers in alike.values():
        for step in (1, 2, 3):
            if len(numbers) % step == 0 and len(numbers) > step:
                yield from (numbers[i::step] for i in range(step))
