"""How a value inside a loss depends on the examples: not at all, a row for each, as a sum over them, or otherwise.

`additive.py` says what the states are for, and follows a traced loss with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

UNKNOWN = 0.0  # the scale of a whole value that depends on the number of examples in another way than as a factor
EACH_TURN = -1  # in place of a dim: inside a loop over the examples, the value belongs to the iteration's example


@dataclass(frozen=True)
class Whole:
    """A value that does not depend on the examples."""

    differs: frozenset[int] = frozenset()  # the dims along which its elements may differ
    scale: float = 1.0  # its value for 2n examples divided by its value for n: 2 of n itself
    zero: bool = False  # whether it is known to be 0, or False
    index: int | None = None  # the dim along which every element is its own index, as 0 of `arange(n)`; else None


@dataclass(frozen=True)
class Rows:
    """A value with rows of single examples along `dim`: copies x examples x rows of one example."""

    dim: int
    copies: int = 1  # how often the array has all examples, one after the other: 2 of two concatenated views
    scale: float = 1.0


@dataclass(frozen=True)
class Total:
    """A sum over the examples, or a multiple of it.

    For 2n examples it is `scale` times (its value for the first n plus its value for the last n): 1 of a sum, 1 / 2 of
    a mean.
    """

    scale: float = 1.0


@dataclass(frozen=True)
class Met:
    """A value that may depend on several examples at once: how they meet, and at which line."""

    how: str
    line: str
    columns: tuple[State, ...] = ()  # of indices that were concatenated along the last dim, the state of each column


State = Whole | Rows | Total | Met
OneKind = TypeVar("OneKind", Whole, Rows, Total)


class Pair(NamedTuple):
    """One equation of a loss, in the program for n examples and in the program for 2n."""

    few: Any  # the equation for n examples
    many: Any  # the equation for 2n examples
    examples: int  # 2n
    line: str
    of_plan: bool = False  # whether a plan traced it, as it does the gather of a layer's weights

    @property
    def name(self) -> str:
        """The primitive's name."""
        return str(self.many.primitive.name)

    def shape(self, operand: int) -> tuple[int, ...]:
        """The shape of an operand for 2n examples."""
        return tuple(self.many.invars[operand].aval.shape)

    @property
    def out(self) -> tuple[int, ...]:
        """The shape of the first result for 2n examples."""
        return tuple(self.many.outvars[0].aval.shape)

    def met(self, how: str) -> Met:
        """Examples meet here."""
        return Met(how, self.line)


def any_whole(variable: Any, scale: float = 1.0) -> Whole:
    """A whole value of which nothing else is known: its elements may differ along every dim."""
    shape = getattr(variable.aval, "shape", ())
    return Whole(find_long_dims(shape), scale)


def find_long_dims(shape: Sequence[int]) -> frozenset[int]:
    """The dims along which the elements of an array may differ: those of more than one element."""
    return frozenset(dim for dim, size in enumerate(shape) if size > 1)


def select(states: Sequence[State], kind: type[OneKind]) -> list[OneKind]:
    """The states of one kind."""
    return [state for state in states if isinstance(state, kind)]


def are_all(states: Sequence[State], kind: type[OneKind]) -> bool:
    """Whether all states are of one kind."""
    return all(isinstance(state, kind) for state in states)


def is_turn(state: State) -> bool:
    """Whether a value belongs to the one example of a loop's iteration."""
    return isinstance(state, Rows) and state.dim == EACH_TURN


def join(pair: Pair, a: State, b: State) -> State:
    """The state of a value that is one of two: of a loop's first and later iterations, or of two branches."""
    if a == b:
        return a
    for state in (a, b):
        if isinstance(state, Met):
            return state
    if isinstance(a, Whole) and isinstance(b, Whole):
        scale = a.scale if a.scale == b.scale else UNKNOWN
        return Whole(a.differs | b.differs, scale, a.zero and b.zero)
    for whole, state in ((a, b), (b, a)):
        if not isinstance(whole, Whole):
            continue
        # The zeros with which a loop begins to sum are a sum over no example yet.
        if isinstance(state, Total) and whole.zero:
            return state
        if isinstance(state, Rows) and fits_beside(whole, state):
            return state
    return pair.met("a value is that of single examples, or of all")


def fits_beside(whole: Whole, rows: Rows) -> bool:
    """Whether a whole value may stand in place of a row: it is the same for all examples, and grows as the rows do."""
    grows_alike = whole.zero or whole.scale == rows.scale
    return grows_alike and rows.dim not in whole.differs


def shift_dim(dim: int, removed: Sequence[int]) -> int:
    """The number of a dim after other dims are removed."""
    removed_before = [removed_dim for removed_dim in removed if removed_dim < dim]
    return dim - len(removed_before)


def shift_dims(dims: frozenset[int], removed: Sequence[int]) -> frozenset[int]:
    """The numbers of the remaining dims after some are removed: {0, 2} without dim 1 is {0, 1}."""
    return frozenset(shift_dim(dim, removed) for dim in dims if dim not in removed)
