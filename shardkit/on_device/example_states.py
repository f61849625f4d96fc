"""What a value of a loss is, beside its examples: the same for all, one row for each, a sum over them, or none of that.

`additive.py` says what these are for, and follows a traced loss with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

UNKNOWN = 0.0  # the scale of a whole value that depends on the number of examples in another way than as a factor
EACH_TURN = -1  # the dim of what belongs to the one example of a loop's iteration


@dataclass(frozen=True)
class Whole:
    """A value that does not depend on the examples."""

    differs: frozenset[int] = frozenset()  # the dims along which its elements may differ
    scale: float = 1.0  # its value for 2n examples over that for n
    zero: bool = False  # whether it is known to be 0, or False
    index: int | None = None  # the dim along which every element is its own index; None if it is none


@dataclass(frozen=True)
class Rows:
    """A value with rows of single examples along `dim`: copies x examples x rows of one example."""

    dim: int
    copies: int = 1  # how often all examples stand there, one after the other, as two concatenated views of them
    scale: float = 1.0


@dataclass(frozen=True)
class Total:
    """A sum over the examples; for 2n of them it is `scale` times the sum of those of both halves."""

    scale: float = 1.0


@dataclass(frozen=True)
class Met:
    """What may depend on several examples at once: how, and the line."""

    how: str
    line: str
    columns: tuple[State, ...] = ()  # of indices that were concatenated along the last dim, what each column is


State = Whole | Rows | Total | Met
OneKind = TypeVar("OneKind", Whole, Rows, Total)


class Pair(NamedTuple):
    """The same equation in both programs: for n examples, and for 2n."""

    few: Any
    many: Any
    examples: int  # 2n
    line: str

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
    """A value of which only that it does not depend on the examples is known."""
    shape = getattr(variable.aval, "shape", ())
    return Whole(frozenset(dim for dim, size in enumerate(shape) if size > 1), scale)


def select(states: Sequence[State], kind: type[OneKind]) -> list[OneKind]:
    """Those of one kind."""
    return [state for state in states if isinstance(state, kind)]


def is_turn(state: State) -> bool:
    """Whether a value belongs to the one example of a loop's iteration."""
    return isinstance(state, Rows) and state.dim == EACH_TURN


def join(pair: Pair, a: State, b: State) -> State:
    """What is either of two values: of a loop's first and later iterations, or of two branches."""
    if a == b:
        return a
    for state in (a, b):
        if isinstance(state, Met):
            return state
    if isinstance(a, Whole) and isinstance(b, Whole):
        scale = a.scale if a.scale == b.scale else UNKNOWN
        return Whole(a.differs | b.differs, scale, a.zero and b.zero)
    for first, second in ((a, b), (b, a)):
        if isinstance(first, Whole) and isinstance(second, Total) and first.zero:
            return second
        if isinstance(first, Whole) and isinstance(second, Rows) and fits_beside(first, second):
            return second
    return pair.met("a value is that of single examples, or of all")


def fits_beside(whole: Whole, rows: Rows) -> bool:
    """Whether a whole value is the same for all examples and grows as rows do, so that these may be joined to it."""
    return (whole.zero or whole.scale == rows.scale) and rows.dim not in whole.differs


def shift_dim(dim: int, removed: Sequence[int]) -> int:
    """Where a dim is after others are removed."""
    return dim - sum(other < dim for other in removed)


def shift_dims(dims: frozenset[int], removed: Sequence[int]) -> frozenset[int]:
    """Where the dims are that are left after others are removed."""
    return frozenset(shift_dim(dim, removed) for dim in dims if dim not in removed)
