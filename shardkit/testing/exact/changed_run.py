"""A run of the program in which some equations have other results, up to the result that was wrong.

Worked example: `y = psum(x @ w, "data"); z = y / 4; return tanh(z)`, where tanh(z) is wrong, and the change is "z times
2". The interpreter calls a `ChangedRun` with each equation:

    dot_general, psum   not changed: the run goes on with their results
    div                 changed: y / 4 is replaced by y / 4 * 2, and the equations behind the div read that
    tanh                the goal: its result is the value with the change, and the run ends here

Equations behind the goal, as those of gradients behind a wrong value, are not run. A change may have no meaning at its
equation, as one that reads an operand of another shape: then the run has no value at the goal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shardkit.testing.exact.forms import sign_value
from shardkit.testing.exact.interpreter import Seen
from shardkit.testing.exact.numbers.errors import NO_VALUE, CollectiveError, UnsupportedError
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.pieces import DiffersError
from shardkit.testing.exact.record import Record, assign_variables
from shardkit.testing.exact.repairs import Call, EquationChange, Operands, Values
from shardkit.testing.exact.rules.operands import Operand


class Goal(NamedTuple):
    """The equation that computes the wrong result, and with which of its runs.

    Attributes:
        key: the key of the equation (`Call.key`), and the number of axes that are bound there.
        times: how often the equation runs before, as in earlier rounds of a loop.
        position: which of the equation's results is the wrong one; None if the first results of all its runs are
            looked at, up to this one.
    """

    key: Any
    times: int
    position: int | None


def find_goal(record: Record, got: Operand) -> Goal:
    """The equation that computed the wrong result `got` in a recorded run.

    Worked example: a scan of three rounds, of whose add the third result is wrong. The goal is that add, after it has
    run 2 times before.
    """
    number = record.maker.get(id(got))
    if number is None:  # an argument is returned as it is: no run reaches the goal
        return Goal(None, 0, 0)
    event = record.events[number]
    call = event.call
    times = sum(earlier.call is call for earlier in record.events[:number])
    matches = [x is got for x in event.results]
    return Goal((*call.key, len(call.axes)), times, matches.index(True))


def find_goal_of_devices(record: Record) -> Goal:
    """The end of a kernel, of which a result differs between devices: its shard_map, once for each of its results."""
    calls = [event.call for event in record.events if event.call.primitive == "shard_map"]
    last = calls[-1]
    return Goal((*last.key, 0), len(last.equation.outvars) - 1, None)


class _ReachedError(Exception):
    """The run is at its goal, with these values."""

    def __init__(self, values: Operands):
        super().__init__()
        self.values = values


class _OtherShapeError(Exception):
    """A change gives a result of another shape."""


class _EndlessError(Exception):
    """A run has many more equations than without the change, as of a loop that goes on for longer."""


# Errors of changes that have no meaning at their equation: jax, numpy and the rules of the field raise these, as for
# operands whose shapes do not fit.
_MEANINGLESS = (
    DiffersError,
    CollectiveError,
    *NO_VALUE,
    UnsupportedError,
    _OtherShapeError,
    _EndlessError,
    ArithmeticError,
    AttributeError,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
)


class ChangedRun:
    """A run in which equations have other results, up to the result that was wrong.

    Attributes:
        changes: the change of each changed equation, by the key of the equation.
        values: the value that each variable had last; at first, in the run without changes.
        goal: where the run ends.
        most: how many more equations the run may have.
        reached: the values at the goal so far.
        changed: the result of the changed equation that ran last.
    """

    def __init__(self, changes: Mapping[Any, EquationChange], values: Values, goal: Goal, most: int):
        self.changes = changes
        self.values = dict(values)
        self.goal = goal
        self.most = most
        self.reached: list[Operand] = []
        self.changed: Operand = None
        self._rounds: Counter[Any] = Counter()

    def run(self, program: Callable[[Field, Seen | None], Any], field: Field) -> Operands:
        """The values at the goal; none where a change has no meaning."""
        try:
            program(field, self)
        except _ReachedError as reached:
            return reached.values
        except _MEANINGLESS:
            return []
        return []

    def __call__(
        self, equation: Any, operands: Operands, results: Operands, axes: Mapping[str, int], around: str
    ) -> Operands | None:
        self.most -= 1
        if self.most < 0:
            raise _EndlessError
        key = id(equation), around
        changed = None
        # What a shard_map tells of are shards, one by one, and not the values of its variables.
        if equation.primitive.name != "shard_map":
            if key in self.changes:
                changed = self._change(equation, key, operands, results, len(axes))
                results = changed
            assign_variables(self.values, equation, operands, results)
        if (*key, len(axes)) == self.goal.key:
            self._reach(results)
        return changed

    def _change(self, equation: Any, key: Any, operands: Operands, results: Operands, rank: int) -> Operands:
        """The other results of a changed equation, in the round of its loop that it is in."""
        # A change may read other variables, with their values at this moment.
        assign_variables(self.values, equation, operands, ())
        change = self.changes[key].in_round(self._rounds[key])
        self._rounds[key] += 1
        changed = list(change(list(operands), list(results), self.values))
        if not change.has_more_rows:
            _check_shapes(results, changed, rank)
        self.changed = changed[0]
        return changed

    def _reach(self, results: Operands) -> None:
        """Notes the value at the goal, and ends the run if the equation there has run as often as before."""
        position = self.goal.position
        if position is None:
            self.reached.append(results[0])
        else:
            self.reached.append(results[position])
        if len(self.reached) <= self.goal.times:
            return
        if position is None:
            raise _ReachedError(self.reached)
        raise _ReachedError(self.reached[-1:])


def _check_shapes(before: Operands, after: Operands, rank: int) -> None:
    """Refuses changed results of another shape on a device, and numbers of the field in place of integers or masks."""
    for x, y in zip(before, after, strict=True):
        if x.shape[rank:] != y.shape[rank:]:
            raise _OtherShapeError
        if isinstance(y, Exact) and not isinstance(x, Exact) and x.dtype.kind != "f":
            raise _OtherShapeError


class Previews:
    """The results that changes give at their equations alone, so that no run is spent on one that changes nothing.

    Worked example: the mask i < 4 for the places i of a device, (0, 1), is true, true.

        an operand plus 1       true, true: nothing changes, so that no run is needed
        the opposite mask       false, false: tried
        a mask always false     false, false: the same as the opposite, so that no run is needed
    """

    def __init__(self, field: Field, record: Record):
        self.field = field
        self.record = record
        self._times = Counter(id(event.call.equation) for event in record.events)
        self._signatures: dict[Any, set[Any]] = {}

    def admit(self, call: Call, change: EquationChange) -> bool:
        """Whether a change is to be tried: it has a meaning, and gives a result that none before it gave."""
        # An equation in a loop, or in a function that is called twice, has no one result: it is always tried.
        if self._times[id(call.equation)] != 1:
            return True
        if call.key not in self._signatures:
            # The result without a change, which is wrong.
            self._signatures[call.key] = {sign_value(self.field, call.results[0])}
        signatures = self._signatures[call.key]
        try:
            [value] = change(list(call.operands), list(call.results), self.record.values)
            signature = sign_value(self.field, value)
        except _MEANINGLESS:
            return False
        if signature in signatures:
            return False
        signatures.add(signature)
        return True
