"""The axes over which the plan of the step that is traced splits the tokens, for layers that depend on their order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from shardkit._check import quoted

# The type of an array says over which axes it varies, and neither on which dim nor in which order: while a step is
# traced this says it of the tokens. It goes where jax's own axis names go, and like them it is bound inside alone.
_SPLIT: ContextVar[tuple[str, ...] | None] = ContextVar("axes that split the tokens", default=None)


@contextmanager
def tokens_split(axes: tuple[str, ...]) -> Iterator[None]:
    """While a loss is traced: its plan splits the tokens over these axes, in this order."""
    before = _SPLIT.set(axes)
    try:
        yield
    finally:
        _SPLIT.reset(before)


def token_axes() -> tuple[str, ...] | None:
    """The axes over which the plan of the step that is traced splits the tokens, in order; None outside of a step."""
    return _SPLIT.get()


def in_plan_order(where: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """The axes of a sequence; refuses another order than that in which the plan splits it."""
    split = [axis for axis in token_axes() or () if axis in names]
    if split != [axis for axis in names if axis in split]:
        raise ValueError(
            f"{where}: the axes must stand in the order in which the plan splits the tokens, {quoted(split)}; got "
            f"{quoted(names)}. Name them in that order."
        )
    return names
