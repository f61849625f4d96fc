"""A run of the program in which some equations have other results, up to the result that was wrong.

Worked example: `y = psum(x @ w, "data"); z = y / 4; return tanh(z)`, where tanh(z) is wrong, and the change is "z times
2". The run calls it with each equation:

    dot_general, psum   not changed: their results stay
    div                 changed: y / 4 is replaced by y / 4 * 2, which the equations behind it read
    tanh                the goal: its result is what the change gives, and the run ends here

What comes behind the goal, as gradients behind a wrong value, is not run. A change that has no meaning, as of an
operand that has another form there, gives nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardkit.testing.exact.exchange_repairs import Gathering, Travel
from shardkit.testing.exact.forms import digest_value
from shardkit.testing.exact.interpreter import DiffersError, HangsError, Seen
from shardkit.testing.exact.numbers.errors import RedrawError, TooDeepError, UnknownValueError, UnsupportedError
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.record import Record, assign_variables
from shardkit.testing.exact.repairs import Call, Change, Values
from shardkit.testing.exact.rules.operands import Operand


class Goal(NamedTuple):
    """Where the result that was wrong is computed.

    Attributes:
        key: that of the equation, with how many axes are bound there.
        times: how often the equation runs before.
        position: which of its results it is; None for the results of all those times.
    """

    key: Any
    times: int
    position: int | None


def find_goal(record: Record, got: Operand) -> Goal:
    """Where the wrong result is computed."""
    number = record.maker.get(id(got))
    if number is None:
        return Goal(None, 0, 0)
    event = record.events[number]
    call = event.place
    times = sum(other.place is call for other in record.events[:number])
    index = [x is got for x in event.results].index(True)
    return Goal((*call.key, len(call.axes)), times, index)


def find_goal_of_devices(record: Record) -> Goal:
    """Where the results of the kernel leave its devices, between which one of them differs."""
    entries = [event.place for event in record.events if event.place.primitive == "shard_map"]
    call = entries[-1]
    return Goal((*call.key, 0), len(call.equation.outvars) - 1, None)


class _ReachedError(Exception):
    """The result that was wrong is computed again."""

    def __init__(self, values: Sequence[Operand]):
        super().__init__()
        self.values = values


class _OtherShapeError(Exception):
    """What a repair gives has another shape."""


class _EndlessError(Exception):
    """A run of many more equations than without the change, as of a loop that a change lets go on."""


# What a change without a meaning raises, as of an operand that has another form there.
_MEANINGLESS = (
    DiffersError,
    HangsError,
    RedrawError,
    TooDeepError,
    UnknownValueError,
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
        changes: by the keys of equations.
        values: what each variable was last, at first in the run without changes.
        goal: where the run ends.
        most: how many equations it may have.
        reached: the values at the goal so far.
        changed: what a changed equation gave last.
    """

    def __init__(self, changes: Mapping[Any, Change], values: Values, goal: Goal, most: int):
        self.changes = changes
        self.values = dict(values)
        self.goal = goal
        self.most = most
        self.reached: list[Operand] = []
        self.changed: Operand = None
        self._rounds: Counter[Any] = Counter()

    def run(self, program: Callable[[Field, Seen | None], Any], field: Field) -> Sequence[Operand]:
        """The values at the goal; none where a change has no meaning."""
        try:
            program(field, self)
        except _ReachedError as reached:
            return reached.values
        except _MEANINGLESS:
            return []
        return []

    def __call__(
        self,
        equation: Any,
        operands: Sequence[Operand],
        results: Sequence[Operand],
        axes: Mapping[str, int],
        around: str,
    ) -> Sequence[Operand] | None:
        self.most -= 1
        if self.most < 0:
            raise _EndlessError
        key = id(equation), around
        changed = None
        if equation.primitive.name != "shard_map":
            # A change may read what other variables are at this moment.
            assign_variables(self.values, equation, operands, ())
            if key in self.changes:
                change = self._find_change(key)
                changed = list(change(list(operands), list(results), self.values))
                # With the rows of all devices a result is larger, until they are summed.
                if not isinstance(change, Gathering):
                    _check_shapes(results, changed, len(axes))
                results = changed
                self.changed = changed[0]
            assign_variables(self.values, equation, operands, results)
        if (*key, len(axes)) == self.goal.key:
            self._reach(results)
        return changed

    def _find_change(self, key: Any) -> Change:
        """The change of an equation, in this round of a loop."""
        change = self.changes[key]
        if isinstance(change, Travel):
            change = change.in_round(self._rounds[key])
            self._rounds[key] += 1
        return change

    def _reach(self, results: Sequence[Operand]) -> None:
        self.reached.append(results[self.goal.position or 0])
        if len(self.reached) <= self.goal.times:
            return
        raise _ReachedError(self.reached if self.goal.position is None else self.reached[-1:])


def _check_shapes(before: Sequence[Operand], after: Sequence[Operand], rank: int) -> None:
    for x, y in zip(before, after, strict=True):
        if x.shape[rank:] != y.shape[rank:]:
            raise _OtherShapeError
        if isinstance(y, Exact) and not isinstance(x, Exact) and x.dtype.kind != "f":
            raise _OtherShapeError


class Previews:
    """What changes give at their equations alone, so that no run is spent on one that changes nothing there.

    Worked example: i < 4 for the places i of a device, (0, 1). With an operand plus 1 the mask stays what it was, and
    so does the result; with the opposite mask, and with one that is always false, it is the same other one.
    """

    def __init__(self, field: Field, record: Record):
        self.field = field
        self.record = record
        self._times = Counter(id(event.place.equation) for event in record.events)
        self._signatures: dict[Any, set[Any]] = {}

    def add(self, call: Call, change: Change) -> bool:
        """Whether a change is to be tried: it has a meaning, and gives what none before it gave."""
        # Of a loop, or of a function called twice, the variables are those of the last run.
        if self._times[id(call.equation)] != 1:
            return True
        if call.key not in self._signatures:
            self._signatures[call.key] = {self._sign(call.results[0])}
        try:
            [value] = change(list(call.operands), list(call.results), self.record.values)
            signature = self._sign(value)
        except _MEANINGLESS:
            return False
        if signature in self._signatures[call.key]:
            return False
        self._signatures[call.key].add(signature)
        return True

    def _sign(self, x: Operand) -> Any:
        if isinstance(x, Exact):
            return x.shape, digest_value(self.field, x), x.poison.tobytes()
        x = np.asarray(x)
        return x.shape, x.dtype, x.tobytes()
