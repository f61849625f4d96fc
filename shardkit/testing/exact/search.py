"""Which equation of a wrong program is the mistake: one whose repair makes the result right.

A run of the program is recorded, every value with the equation that made it. Of the equations that `suspects.py` lists
the repairs of `proposals.py` are tried, each by one more run (`changed_run.py`), likely mistakes first; what makes the
result right must do so with other numbers too.

Worked example: `psum(x, "b") / 2` where the reference is the sum over "a", divided by 2. The suspects are the psum and
the div.

    cost 0.0  psum: without it                        wrong
    cost 0.0  psum: over "a" in place of "b"          right, with other numbers too: a remedy
    cost 1.0  div: the sum over "a"                   not tried: it is less likely by more than 0.75
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from shardkit._arguments.checks import quoted
from shardkit._jax.jaxprs import kind_of, mesh_axes
from shardkit.testing.exact.changed_run import ChangedRun, Previews, find_goal, find_goal_of_devices
from shardkit.testing.exact.exchange_repairs import Travel
from shardkit.testing.exact.interpreter import DiffersError, Seen
from shardkit.testing.exact.local_repairs import read_instead
from shardkit.testing.exact.memory import StepMemory
from shardkit.testing.exact.numbers.errors import RedrawError, TooDeepError, UnknownValueError
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.orders import find_equal
from shardkit.testing.exact.proposals import propose_repairs
from shardkit.testing.exact.record import Event, Record
from shardkit.testing.exact.repairs import Bench, Call, Change, Cost, Repair
from shardkit.testing.exact.rules.operands import Operand, lift_operand
from shardkit.testing.exact.suspects import align_repairs, list_suspects, rank_suspects

# How many runs are tried, and equations of all of them, most of which are recalled: a minute, of the largest programs
# that are proved.
MOST_RUNS, _MOST_EQUATIONS = 900, 225_000
# Fewer of a compiled program: a compiler writes so otherwise that a repair of one equation seldom is one of a mistake.
_MOST_OF_COMPILED = 24
# How many equations a repaired run may have, for each of the wrong one, and besides.
_MOST_TIMES, _MOST_MORE = 4, 1000
# How much less likely than the likeliest a repair may be that is looked at too.
_MARGIN, _UNLIKELY = 0.75, 3.5
# With how many other numbers a repair must be right; more where comparisons decide, because few outcomes differ.
_DRAWS, _DRAWS_OF_DECISIONS = 1, 4


class Runs(NamedTuple):
    """Both programs, in the field in which they differ.

    Attributes:
        values: how many of the results are no gradients.
    """

    field: Field
    on_mesh: Callable[[Field, Seen | None], list[Operand]]
    alone: Callable[[Field, Seen | None], list[Operand]]
    values: int


class Remedy(NamedTuple):
    """A repair that makes the result right.

    Attributes:
        number: that of the first event at its place.
        cost: how unlikely it is that this was the mistake.
        value: what the repaired equation gives.
        behind: whether it is done to the result of the equation.
        exchange: "sum" where the result is reduced over devices, "shift" where it goes to another one, "travel" and
            "arrival" where an operand does so in each round, behind or before what reads it; else "".
    """

    place: Call
    number: int
    cost: float
    words: str
    value: Operand
    behind: bool
    exchange: str = ""


class _Candidate(NamedTuple):
    """A repair that waits to be tried, of equations that are repaired together.

    Attributes:
        number: that of the first event of the first equation.
        calls: all equations.
        repair: that of the first equation.
        make_changes: the changes of all equations, in a search with other numbers too.
    """

    cost: float
    number: int
    calls: list[Call]
    repair: Repair
    make_changes: Callable[[Search], Mapping[Any, Change]]


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
        self.programs = programs
        self.record = record
        self.got = got
        self.wanted = wanted
        self.index = index
        self.field = programs.field
        self.runs = 0
        self._others: list[Search] | None = None
        self._goal = find_goal_of_devices(record) if index is None else find_goal(record, got)
        self._routes: dict[Any, str] = {}
        self._events_of: dict[Any, list[Event]] = {}
        for event in record.events:
            call = event.place
            self._events_of.setdefault(call.key, []).append(event)
            if kind_of(call.equation) == "ppermute":
                route = mesh_axes(call.equation), tuple(call.equation.params["perm"])
                self._routes.setdefault(route, call.line)
        # A run ends where the wrong result is computed.
        length = record.maker.get(id(got), len(record.events)) + 1
        # A loop that goes on may have some more rounds, but not all of its integers.
        self._most_in_a_run = _MOST_TIMES * len(record.events) + _MOST_MORE
        self._most = min(_MOST_OF_COMPILED if self.field.compiled else MOST_RUNS, _MOST_EQUATIONS // length)
        shapes = [x.shape for event in record.events for x in event.results]
        sizes = {n for shape in shapes for n in shape}
        self._sizes = sorted(sizes - {0, 1})[:6]

    def is_right(self, x: Operand, index: int) -> bool:
        """Whether a result is the reference's."""
        a = lift_operand(self.field, x)
        b = lift_operand(self.field, self.wanted[index])
        # What is outside of a function's domain is right nowhere.
        if a.shape != b.shape or (a.poison != b.poison).any():
            return False
        return bool(find_equal(self.field, a, b).all())

    def try_changes(self, changes: Mapping[Any, Change]) -> Operand | None:
        """What the changed equation gives, if that makes the result right."""
        self.runs += 1
        changed_run = ChangedRun(changes, self.record.values, self._goal, self._most_in_a_run)
        values = changed_run.run(self.programs.on_mesh, self.field)
        return changed_run.changed if values and self._are_right(values) else None

    def _are_right(self, values: Sequence[Operand]) -> bool:
        if self.index is not None:
            return self.is_right(values[0], self.index)
        # What a kernel hands on to its derivative leaves it, too, before or behind its results.
        return all(self._is_among(values, index) for index in range(self.programs.values))

    def _is_among(self, values: Sequence[Operand], index: int) -> bool:
        return any(self.is_right(x, index) for x in values)

    def find_remedies(self, doubt: Callable[[int, bool], float]) -> list[Remedy]:
        """The repairs that make the result right, and are about as likely as the likeliest of them.

        `doubt` says how unlikely it is that the mistake is at a place.
        """
        remedies: list[Remedy] = []
        previews = Previews(self.field, self.record)
        for candidate in self._list_candidates(doubt):
            highest = min([_UNLIKELY, *(remedy.cost + _MARGIN for remedy in remedies)])
            if self.runs >= self._most or candidate.cost > highest:
                break
            repair = candidate.repair
            # Alone, an equation of one round tells nothing of what travels.
            single = len(candidate.calls) == 1 and not isinstance(repair.change, Travel)
            if single and not previews.add(candidate.calls[0], repair.change):
                continue
            value = self.try_changes(candidate.make_changes(self))
            if value is not None and self._is_confirmed(candidate.make_changes):
                place = candidate.calls[0], candidate.number, candidate.cost
                remedies.append(Remedy(*place, repair.words, value, repair.behind, repair.exchange))
        return remedies

    def _list_candidates(self, doubt: Callable[[int, bool], float]) -> list[_Candidate]:
        """All repairs of all suspects, likely ones first."""
        candidates: list[_Candidate] = []
        suspects = list_suspects(self.record, self.got)
        repairs_of = {number: self._propose(call) for number, call in suspects.items()}
        for numbers, calls, doubt_here in rank_suspects(self.record, suspects):
            number = numbers[0]
            lists = [repairs_of[member] for member in numbers]
            for positions in align_repairs(lists):
                repairs = [repairs[position] for repairs, position in zip(lists, positions, strict=True)]
                cost = repairs[0].cost + doubt_here + doubt(number, repairs[0].behind)
                # Where something travels, something else may have been left behind.
                if repairs[0].exchange == "shift" and self._routes:
                    cost -= 1.5
                changes = [repair.change for repair in repairs]
                make_changes = partial(_make_changes, calls=calls, changes=changes, positions=positions, first=self)
                candidates.append(_Candidate(cost, number, calls, repairs[0], make_changes))
            for repair, travel in self._list_travels(calls):
                make_travel = partial(_make_travel, calls=calls, travel=travel)
                candidates.append(_Candidate(repair.cost + doubt_here, number, calls, repair, make_travel))
        return sorted(candidates, key=lambda candidate: (candidate.cost, candidate.number))

    def _list_travels(self, calls: Sequence[Call]) -> Iterator[tuple[Repair, Travel]]:
        """Operands that are the same in each round of a loop, and may have to travel as others do."""
        runs = [event for call in calls for event in self._events_of.get(call.key, ())]
        if len(runs) < 2 or not self._routes:
            return
        bench = Bench(self.field, calls[0], self._sizes)
        for number, x in enumerate(runs[0].operands):
            if not all(event.operands[number] is x for event in runs):
                continue
            for (names, pairs), line in self._routes.items():
                if set(names).isdisjoint(bench.varying_axes(x)) or line == calls[0].line:
                    continue
                for steps, exchange in ((0, "travel"), (1, "arrival")):
                    words = f"an operand of {calls[0].name} that travels along {quoted(names)} in each round"
                    travel = Travel(bench, number, names, pairs, steps)
                    yield Repair(Cost.TRAVEL, words, travel, exchange=exchange), travel

    def _propose(self, call: Call) -> list[Repair]:
        readable = self.record.readable.get(id(call.equation), ())
        record = self.record
        variables = readable, self._sizes, record.unread, record.definitions, record.rounds
        return list(propose_repairs(self.field, call, *variables))

    def _is_confirmed(self, make_changes: Callable[[Search], Mapping[Any, Change]]) -> bool:
        """Whether changes are right with other numbers too, of which some are larger."""
        return all(other.try_changes(make_changes(other)) is not None for other in self._search_others())

    def _search_others(self) -> list[Search]:
        """The search with other numbers; none where these cannot be used."""
        # Chosen inputs are chosen for a comparison: with other numbers they would be no special ones.
        if self.field.elements:
            return []
        if self._others is None:
            self._others = []
            settings: Any = self.field.settings
            draws = _DRAWS_OF_DECISIONS if self.field.compared else _DRAWS
            for draw in range(draws):
                field = Field(settings[0], settings[1] + 1 + draw, *settings[2:])
                field.folded = self.field.folded
                self._others += self._search_again(self.programs._replace(field=field))
        return self._others

    def _search_again(self, programs: Runs) -> list[Search]:
        """The search in another field, if the programs differ there."""
        record = Record()
        programs.field.memory = StepMemory()
        try:
            wanted = programs.alone(programs.field, None)
            results = programs.on_mesh(programs.field, record)
        except DiffersError as error:
            return [Search(programs, record, error.value, wanted, None)]
        except (RedrawError, TooDeepError, UnknownValueError):
            return []
        finally:
            programs.field.memory.close()
        if self.index is None:
            return []
        return [Search(programs, record, results[self.index], wanted, self.index)]

    def find_reader(self, remedy: Remedy, variables: Sequence[Any]) -> Remedy | None:
        """An equation that is right when it reads one of some variables in place of the value that was repaired.

        A sum that the program has already is not missing: another variable is read.
        """
        [value] = self.record.events[remedy.number].results
        for number, call in list_suspects(self.record, self.got).items():
            event = self.record.events[number]
            readable = self.record.readable.get(id(call.equation), ())
            for position, operand in enumerate(event.operands):
                if operand is not value:
                    continue
                for variable in variables:
                    if variable not in readable:
                        continue
                    result = self._try_variable(call, position, variable)
                    if result is not None:
                        words = f"another operand of {call.name}"
                        return Remedy(call, number, Cost.OPERAND, words, result, behind=False)
        return None

    def _try_variable(self, call: Call, position: int, variable: Any) -> Operand | None:
        """What an equation gives of another operand, if that makes the result right with all numbers."""

        def read_instead_of(search: Search) -> dict[Any, Change]:
            return {call.key: read_instead(Bench(search.field, call, search._sizes), position, variable)}

        result = self.try_changes(read_instead_of(self))
        if result is None or not self._is_confirmed(read_instead_of):
            return None
        return result


def _make_changes(
    search: Search, calls: Sequence[Call], changes: Sequence[Change], positions: Sequence[int], first: Search
) -> dict[Any, Change]:
    """The changes by repairs at these places in the lists of some equations, also in a search with other numbers."""
    if search is not first:
        repairs = [search._propose(call)[position] for call, position in zip(calls, positions, strict=True)]
        changes = [repair.change for repair in repairs]
    return {call.key: change for call, change in zip(calls, changes, strict=True)}


def _make_travel(search: Search, calls: Sequence[Call], travel: Travel) -> dict[Any, Change]:
    """The changes of an operand that travels: in each equation of an unrolled loop it has gone one device further."""
    changes: dict[Any, Change] = {}
    for round_, call in enumerate(calls):
        bench = Bench(search.field, call, search._sizes)
        changes[call.key] = replace(travel, bench=bench).in_round(round_)
    return changes
