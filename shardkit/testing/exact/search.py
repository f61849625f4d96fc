"""Which equation of a wrong program is the mistake: one whose repair makes the result right.

A run of the program is recorded, every value with the equation that made it. `suspects.py` lists the equations from
which the wrong result follows, and `proposals.py` lists the repairs of each. A repair is tried by one more run of the
program (`changed_run.py`), likely mistakes first. A repair that makes the result right must do so with other random
numbers too.

Worked example: `psum(x, "b") / 2` where the reference is the sum over "a", divided by 2. The suspects are the psum and
the div.

    cost 0.0  psum: without it                        wrong
    cost 0.0  psum: over "a" in place of "b"          right, with other numbers too: a remedy
    cost 1.0  div: the sum over "a"                   not tried: it is less likely by more than 0.75
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from shardkit._arguments.checks import quote
from shardkit._jax.jaxprs import kind_of, mesh_axes
from shardkit.testing.exact.changed_run import ChangedRun, Previews, find_goal, find_goal_of_devices
from shardkit.testing.exact.exchange_repairs import Travel
from shardkit.testing.exact.interpreter import Seen
from shardkit.testing.exact.memory import StepMemory
from shardkit.testing.exact.numbers.errors import NO_VALUE
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.orders import find_equal
from shardkit.testing.exact.operand_repairs import read_instead
from shardkit.testing.exact.pieces import DiffersError
from shardkit.testing.exact.proposals import propose_repairs
from shardkit.testing.exact.record import Event, Record
from shardkit.testing.exact.repairs import Bench, Call, Cost, EquationChange, Repair, Variables
from shardkit.testing.exact.rules.operands import Operand, lift_operand
from shardkit.testing.exact.suspects import Suspects, align_repairs, list_suspects, rank_suspects

# How many repaired runs are tried at most, and how many equations all of them may have together. The values of most
# equations are recalled from the first run, so that this is a minute or two of the largest programs that are proved.
MOST_RUNS, _MOST_EQUATIONS = 2500, 600_000
# Fewer runs of a compiled program: the compiler has rewritten the mistake, so that the repair of one equation seldom
# repairs it.
_MOST_OF_COMPILED = 24
# A repaired loop may go on for longer. A run may have so many times the equations of the wrong run, and so many more.
_MOST_TIMES, _MOST_MORE = 4, 1000
# Repairs that cost this much more than the cheapest remedy are tried too.
_MARGIN = 0.75
# Repairs that cost more than this are never tried.
_UNLIKELY = 3.5
# With how many other draws of numbers a repair must be right too. Where comparisons decide, a wrong repair is right by
# chance more often, because a comparison has only two outcomes.
_DRAWS, _DRAWS_OF_DECISIONS = 1, 4
# A value that stays behind is likelier where other values go from device to device.
_LEFT_BEHIND = 1.5


class Runs(NamedTuple):
    """Both programs, in the field in which their results differ.

    Attributes:
        field: the arithmetic.
        on_mesh: runs the program on the mesh in a field, and returns its results.
        alone: runs the reference in a field, and returns its results.
        values: how many of the results are values; the others are gradients.
    """

    field: Field
    on_mesh: Callable[[Field, Seen | None], list[Operand]]
    alone: Callable[[Field, Seen | None], list[Operand]]
    values: int


class Remedy(NamedTuple):
    """A repair that makes the result right.

    Attributes:
        call: the equation that is repaired.
        number: the number of the first event of that equation.
        cost: how unlikely it is that this equation was the mistake.
        words: what the repair does, as "psum over 'a' in place of 'b'".
        value: the result of the repaired equation.
        behind: whether the repair changes the result of the equation, so that the mistake is behind the equation.
        exchange: "sum" if the repair reduces the result over devices, "shift" if it sends the result to another device,
            "travel" or "arrival" if it sends an operand on in each round, behind or before the equation reads it; else
            "".
    """

    call: Call
    number: int
    cost: float
    words: str
    value: Operand
    behind: bool
    exchange: str = ""


# The changes of some equations in a run, by the keys of the equations (`Call.key`).
_Changes = Mapping[Any, EquationChange]


class _Candidate(NamedTuple):
    """A repair that waits to be tried, of one equation or of several that are repaired together.

    Attributes:
        cost: how unlikely it is that the mistake is this one.
        number: the number of the first event of the first equation.
        calls: the equations.
        repair: the repair of the first equation.
        make_changes: returns the changes of all equations, for this search or for one with other numbers.
        has_preview: whether the first equation alone shows that a repair changes nothing.
    """

    cost: float
    number: int
    calls: list[Call]
    repair: Repair
    make_changes: Callable[[Search], _Changes]
    has_preview: bool


class Search:
    """Looks for repairs of a wrong result.

    Attributes:
        programs: both programs.
        record: the run of the program on the mesh.
        got: the wrong result, or the value that differs between devices.
        wanted: the results of the reference.
        index: the number of the wrong result; None for a value that differs between devices.
        field: the arithmetic.
        runs: how many repaired runs were tried.
        sizes: the sizes of dims in the program, by which a result may be too large or too small.
    """

    def __init__(self, programs: Runs, record: Record, got: Operand, wanted: Sequence[Operand], index: int | None):
        self.programs = programs
        self.record = record
        self.got = got
        self.wanted = wanted
        self.index = index
        self.field = programs.field
        self.runs = 0
        self.sizes = _list_sizes(record)
        self._others: list[Search] | None = None
        self._proposals: dict[Any, list[Repair]] = {}
        self._goal = find_goal_of_devices(record) if index is None else find_goal(record, got)
        self._routes = _find_routes(record)
        self._events_of: dict[Any, list[Event]] = {}
        for event in record.events:
            self._events_of.setdefault(event.call.key, []).append(event)
        # A loop that goes on may have some more rounds, but not all of its integers.
        self._most_in_a_run = _MOST_TIMES * len(record.events) + _MOST_MORE
        # A repaired run ends at the equation that gives the wrong result.
        length = record.maker.get(id(got), len(record.events)) + 1
        most_runs = _MOST_OF_COMPILED if self.field.compiled else MOST_RUNS
        self._most_runs = min(most_runs, _MOST_EQUATIONS // length)

    # Whether a repair is right

    def is_right(self, x: Operand, index: int) -> bool:
        """Whether x is result number `index` of the reference."""
        a = lift_operand(self.field, x)
        b = lift_operand(self.field, self.wanted[index])
        # An element outside of a function's domain on one side alone is no proof of a repair.
        if a.shape != b.shape or (a.poison != b.poison).any():
            return False
        # A changed program may nest logarithms deeper than the reference: it is another one.
        with suppress(*NO_VALUE):
            return bool(find_equal(self.field, a, b).all())
        return False

    def try_changes(self, changes: _Changes) -> Operand | None:
        """Runs the program with changed equations.

        Returns:
            The value of the changed equation, of several the one that ran last, if the result is right; else None.
        """
        self.runs += 1
        changed_run = ChangedRun(changes, self.record.values, self._goal, self._most_in_a_run)
        values = changed_run.run(self.programs.on_mesh, self.field)
        if not values or not self._are_right(values):
            return None
        return changed_run.changed

    def _are_right(self, values: Sequence[Operand]) -> bool:
        """Whether the values at the goal of a run are those of the reference."""
        if self.index is not None:
            return self.is_right(values[0], self.index)
        # A value differed between devices, so that all results of the kernel are compared. A kernel also returns what
        # its derivative needs, before or behind its results: each result must be among the values at the goal.
        return all(self._is_among(values, index) for index in range(self.programs.values))

    def _is_among(self, values: Sequence[Operand], index: int) -> bool:
        """Whether one of the values is result number `index` of the reference."""
        return any(self.is_right(x, index) for x in values)

    def _is_confirmed(self, make_changes: Callable[[Search], _Changes]) -> bool:
        """Whether the result is right with other numbers too."""
        for other in self._search_others():
            if other.try_changes(make_changes(other)) is None:
                return False
        return True

    def _search_others(self) -> list[Search]:
        """The same search with other random numbers; an empty list where no others can be drawn."""
        # Some inputs of this draw were chosen at the tie of a comparison. Other numbers would be at none.
        if self.field.choices.elements:
            return []
        if self._others is None:
            self._others = []
            draws = _DRAWS_OF_DECISIONS if self.field.notes.compared else _DRAWS
            for draw in range(draws):
                field = self.field.like(seed=self.field.settings.seed + 1 + draw)
                other = self._search_again(self.programs._replace(field=field))
                if other is not None:
                    self._others.append(other)
        return self._others

    def _search_again(self, programs: Runs) -> Search | None:
        """The search in another field; None if the wrong result is not computed there."""
        record = Record()
        programs.field.memory = StepMemory()
        try:
            wanted = programs.alone(programs.field, None)
            results = programs.on_mesh(programs.field, record)
        except DiffersError as error:
            return Search(programs, record, error.value, wanted, None)
        except NO_VALUE:
            return None
        finally:
            programs.field.memory.close()
        if self.index is None:
            return None
        return Search(programs, record, results[self.index], wanted, self.index)

    # All repairs, in turn

    def find_remedies(self, doubt: Callable[[int, bool], float]) -> list[Remedy]:
        """The repairs that make the result right, and that are about as likely as the likeliest of them.

        Args:
            doubt: of the number of an event, and whether a repair is done behind its equation: how unlikely it is that
                the mistake is there.
        """
        remedies: list[Remedy] = []
        previews = Previews(self.field, self.record)
        # The likeliest first. Once one is right, only those that are about as likely are tried too.
        highest = _UNLIKELY
        for candidate in self._list_candidates(doubt):
            if self.runs >= self._most_runs or candidate.cost > highest:
                break
            repair = candidate.repair
            # A preview costs one equation, where a run costs all of them.
            if candidate.has_preview and not previews.admit(candidate.calls[0], repair.change):
                continue
            value = self.try_changes(candidate.make_changes(self))
            if value is None or not self._is_confirmed(candidate.make_changes):
                continue
            remedy = Remedy(
                call=candidate.calls[0],
                number=candidate.number,
                cost=candidate.cost,
                words=repair.words,
                value=value,
                behind=repair.behind,
                exchange=repair.exchange,
            )
            remedies.append(remedy)
            highest = min(highest, remedy.cost + _MARGIN)
        return remedies

    def _list_candidates(self, doubt: Callable[[int, bool], float]) -> list[_Candidate]:
        """All repairs of all suspects, the likely ones first."""
        candidates: list[_Candidate] = []
        suspects = list_suspects(self.record, self.got)
        for group in rank_suspects(self.record, suspects):
            candidates += self._list_aligned(group, doubt)
            candidates += self._list_travels(group)
        # Of equally likely ones the first equation's, then the first in this list.
        candidates.sort(key=lambda candidate: (candidate.cost, candidate.number))
        return candidates

    def _list_aligned(self, group: Suspects, doubt: Callable[[int, bool], float]) -> Iterator[_Candidate]:
        """The repairs that some equations have in common, each done in all of them.

        Worked example: the two rounds `i = i + 1` of a loop. "add minus 1" is a candidate that changes both.
        """
        number = group.numbers[0]
        lists = [self.propose(call) for call in group.calls]
        for positions in align_repairs(lists):
            first = lists[0][positions[0]]
            cost = first.cost + (group.doubt + doubt(number, first.behind))
            if first.exchange == "shift" and self._routes:
                cost -= _LEFT_BEHIND
            make_changes = partial(_make_changes, calls=group.calls, positions=positions)
            is_alone = len(group.calls) == 1
            yield _Candidate(cost, number, group.calls, first, make_changes, has_preview=is_alone)

    def _list_travels(self, group: Suspects) -> Iterator[_Candidate]:
        """Operands that are the same array in each round of a loop, and that may have to travel as other values do.

        Worked example: a ring of keys, whose round is `scores = q @ k.T + bias; k = ppermute(k)`. The add reads the
        same bias in each round, and the program has one route, that of k. The repair sends the bias along this route.
        """
        calls = group.calls
        events: list[Event] = []
        for call in calls:
            events += self._events_of.get(call.key, ())
        if len(events) < 2 or not self._routes:
            return
        bench = self.make_bench(calls[0])
        cost = Cost.TRAVEL + group.doubt
        for number, x in enumerate(events[0].operands):
            stays = all(event.operands[number] is x for event in events)
            if not stays:
                continue
            for names, pairs in self._list_routes(calls[0], bench.find_varying_axes(x)):
                words = f"an operand of {bench.name} that travels along {quote(names)} in each round"
                # The first round reads it where it is, or when it has arrived at the next device.
                for steps, exchange in ((0, "travel"), (1, "arrival")):
                    travel = Travel(bench, number, names, pairs, steps)
                    repair = Repair(Cost.TRAVEL, words, travel, exchange=exchange)
                    make_changes = partial(_make_travel, calls=calls, travel=travel)
                    # A value that travels is right in the first round: one round alone shows nothing.
                    yield _Candidate(cost, group.numbers[0], calls, repair, make_changes, has_preview=False)

    def _list_routes(self, call: Call, varying_axes: Sequence[str]) -> Iterator[tuple[Any, Any]]:
        """The axes and pairs of the program's ppermutes on other lines, along axes along which a value varies."""
        for (names, pairs), line in self._routes.items():
            varies = not set(names).isdisjoint(varying_axes)
            if varies and line != call.line:
                yield names, pairs

    def propose(self, call: Call) -> list[Repair]:
        """The repairs of an equation, in an order that is the same in searches with other numbers."""
        if call.key not in self._proposals:
            self._proposals[call.key] = list(propose_repairs(self.make_bench(call)))
        return self._proposals[call.key]

    def make_bench(self, call: Call) -> Bench:
        """The tools for repairs of an equation, with the numbers of this search."""
        record = self.record
        readable = record.readable.get(id(call.equation), ())
        variables = Variables(readable, record.unread, record.definitions, record.rounds)
        return Bench(self.field, call, self.sizes, variables)

    # Another operand

    def find_reader(self, remedy: Remedy, variables: Sequence[Any]) -> Remedy | None:
        """An equation that is right if it reads one of `variables` in place of the value that a remedy repairs.

        A sum that the program has already is not missing: an equation should read it.

        Worked example: `total = psum(x)`, and later `y = x / n`, which should be total / n. A psum of x in front of the
        division is a remedy. This is the better one: the division reads `total` in place of x.
        """
        [value] = self.record.events[remedy.number].results
        for number, call in list_suspects(self.record, self.got).items():
            readable = self.record.readable.get(id(call.equation), ())
            candidates = [variable for variable in variables if variable in readable]
            for position, operand in enumerate(self.record.events[number].operands):
                if operand is not value:
                    continue
                for variable in candidates:
                    result = self._try_variable(call, position, variable)
                    if result is not None:
                        words = f"another operand of {call.name}"
                        return Remedy(call, number, Cost.OPERAND, words, result, behind=False)
        return None

    def _try_variable(self, call: Call, position: int, variable: Any) -> Operand | None:
        """The value of an equation that reads `variable` as an operand, if that makes the result right; else None."""

        def make_changes(search: Search) -> _Changes:
            return {call.key: read_instead(search.make_bench(call), position, variable)}

        result = self.try_changes(make_changes(self))
        if result is None or not self._is_confirmed(make_changes):
            return None
        return result


def _find_routes(record: Record) -> dict[Any, str]:
    """The axes and pairs of a program's ppermutes, with the line of the first ppermute of each.

    Worked example: a ring of two devices on line 5. {(("data",), ((0, 1), (1, 0))): "kernel.py:5"}.
    """
    routes: dict[Any, str] = {}
    for event in record.events:
        call = event.call
        if kind_of(call.equation) == "ppermute":
            route = mesh_axes(call.equation), tuple(call.equation.params["perm"])
            routes.setdefault(route, call.line)
    return routes


def _list_sizes(record: Record) -> list[int]:
    """The smallest sizes of dims in a run, without 0 and 1."""
    sizes: set[int] = set()
    for event in record.events:
        for x in event.results:
            sizes.update(x.shape)
    return sorted(sizes - {0, 1})[:6]


def _make_changes(search: Search, calls: Sequence[Call], positions: Sequence[int]) -> _Changes:
    """The changes of some equations by the repairs at these positions in their lists.

    A change computes with the numbers of the search that made it. A search with other numbers makes its own, and lists
    them in the same order.
    """
    changes: dict[Any, EquationChange] = {}
    for call, position in zip(calls, positions, strict=True):
        changes[call.key] = search.propose(call)[position].change
    return changes


def _make_travel(search: Search, calls: Sequence[Call], travel: Travel) -> _Changes:
    """The changes of an operand that travels: in each equation of an unrolled loop it has gone one device further."""
    changes: dict[Any, EquationChange] = {}
    for round_number, call in enumerate(calls):
        bench = search.make_bench(call)
        changes[call.key] = replace(travel, bench=bench).in_round(round_number)
    return changes
