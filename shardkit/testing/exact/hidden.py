"""Comparisons whose outcome no result of any draw shows: if the sides differ in them, the draws say nothing about it.

Worked example: one side computes `min(where(x > 0.5, a, b), c)`, the other `min(where(x > 0.6, a, b), c)`, and c is
smaller than a and b in all draws. Both sides agree, whichever way their comparisons go. They do not agree for an x of
0.55 and a large c. So a comparison that only one side makes is turned round, for all elements at once:

    the results change                    the draws would have shown a wrong branch
    no number changes                     both branches are equal: the comparison decides nothing
    numbers change, and arithmetic ends   so it is for all inputs, as of the maximum that softmax subtracts
      the change before the results
    numbers change, and only further      the draws say nothing about it: "not decided"
      choices end the change

Where one side compares `x > y` and the other `x >= y`, each is turned round for equal numbers alone, in the draws that
have some.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from shardkit._jax import compat
from shardkit.testing.exact.coverage import Decision
from shardkit.testing.exact.forms import digest_value
from shardkit.testing.exact.interpreter import HangsError
from shardkit.testing.exact.numbers.errors import RedrawError, TooDeepError, UnknownValueError, UnsupportedError
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.pieces import DiffersError
from shardkit.testing.exact.program_pair import ProgramPair, Side
from shardkit.testing.exact.rules.movement import MOVED_OPERANDS, MOVES_OF_ONE
from shardkit.testing.exact.rules.operands import Operand

# A draw that has no meaning, or none with the comparison turned round.
_MEANINGLESS = (DiffersError, HangsError, RedrawError, TooDeepError, UnknownValueError, UnsupportedError)
# What takes one of two numbers, or says which is larger: for other inputs it takes the other one.
_CHOICES = {
    *("max", "min", "clamp", "select_n", "reduce_max", "reduce_min", "argmax", "argmin", "cummax", "cummin"),
    *("pmax", "pmin", "sort", "top_k", "sign", "abs", "round", "floor", "ceil"),
    *("lt", "le", "gt", "ge", "eq", "ne", "lt_to", "le_to"),
}
# What takes some elements of an array, the same ones for all inputs, and what calls a program of other equations.
_MOVES = {*MOVES_OF_ONE, *MOVED_OPERANDS, *compat.CALLS, compat.HIGH_LEVEL, compat.SOLVE} - _CHOICES
_CONTROL_FLOW = {"shard_map", "scan", "while", "cond"}


def find_hidden(pair: ProgramPair, kinds: Sequence[str]) -> Decision | None:
    """A comparison that only one side makes, and that no result shows in draws of these kinds; None if there is none.

    Cost: two runs of a side for each such comparison and draw, until a result shows it; mostly the first draw does.
    """
    for key in pair.coverage.foreign_keys():
        if _is_hidden(pair, key, _make_draws(pair, kinds)):
            return pair.coverage.decisions[key]
    return None


def find_hidden_tie(pair: ProgramPair) -> Decision | None:
    """A comparison in which the sides treat equal numbers otherwise, and no result of any draw that has them shows it.

    Cost: as `find_hidden`.
    """
    for key in pair.coverage.find_differing_ties():
        if _is_hidden(pair, key, pair.make_tied_fields(key), ties=True):
            return pair.coverage.decisions[key]
    return None


def _make_draws(pair: ProgramPair, kinds: Sequence[str]) -> Iterator[Field]:
    for seed, kind in enumerate(kinds):
        yield pair.make_field(seed, kind)


def _is_hidden(pair: ProgramPair, key: Any, draws: Iterable[Field], ties: bool = False) -> bool:
    """Whether later choices hide the outcome of a comparison in all draws in which numbers depend on it."""
    side, equation, part, _ = key
    hides = False
    for field in draws:
        with suppress(*_MEANINGLESS):
            before = _Trace(pair.sides[side], field)
            field.turned = equation, part
            field.turns_ties = ties
            after = _Trace(pair.sides[side], field)
            if after.results != before.results:
                return False
            ends = _find_ends(before, after)
            if ends - _CHOICES:  # by arithmetic: so it is for all inputs
                return False
            hides |= bool(ends)
    return hides


class _Step(NamedTuple):
    """An equation that ran.

    Attributes:
        name: its primitive.
        operands: digests of the operands that are no masks.
        results: digests of all results.
    """

    name: str
    operands: tuple[Any, ...]
    results: tuple[Any, ...]


class _Trace:
    """What a run computed.

    Attributes:
        steps: the equations that ran.
        results: digests of the results.
    """

    def __init__(self, side: Side, field: Field):
        self.steps: list[_Step] = []
        self._field = field
        self._digests: dict[int, Any] = {}
        self._kept: list[Operand] = []
        self.results = [self._digest(x) for x in side(field, self._see)]

    def _see(self, equation: Any, operands: Sequence[Operand], results: Sequence[Operand], *place: Any) -> None:
        numbers = [x for x in operands if isinstance(x, Exact) or x.dtype != bool]
        step = _Step(
            equation.primitive.name,
            tuple(self._digest(x) for x in numbers),
            tuple(self._digest(x) for x in results),
        )
        self.steps.append(step)

    def _digest(self, x: Operand) -> Any:
        if id(x) not in self._digests:
            self._kept.append(x)  # so that its id is no other array's
            self._digests[id(x)] = self._compute_digest(x)
        return self._digests[id(x)]

    def _compute_digest(self, x: Operand) -> Any:
        if isinstance(x, Exact):
            return x.shape, digest_value(self._field, x), x.poison.tobytes()
        return x.shape, x.dtype, x.tobytes()


def _find_ends(before: _Trace, after: _Trace) -> set[str]:
    """The primitives of which operands are other numbers in the second run, and the results are the same.

    Worked example: a comparison is turned round in `y = where(x > 1, x, 2 * x); min(y, 0) + (y - y)`. The results of
    `where` are other ones, and those of `min` and `sub` are the same: {"min", "sub"}.
    """
    names = set()
    for one, other in zip(before.steps, after.steps, strict=False):
        if one.operands != other.operands and one.results == other.results:
            names.add(one.name)
    return names - _MOVES - _CONTROL_FLOW
