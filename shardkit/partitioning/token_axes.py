"""The axes over which a plan splits the tokens, for layers that depend on the order of the tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from shardkit._check import quoted

# The type of an array says over which axes it varies, but neither on which dim nor in which order. This says so for the
# tokens; like an axis name of jax, it is bound only while the step is traced.
_SPLIT: ContextVar[tuple[str, ...] | None] = ContextVar("axes that split the tokens", default=None)


@contextmanager
def tokens_split(axes: tuple[str, ...]) -> Iterator[None]:
    """Binds the axes over which the plan splits the tokens, in order, while a loss is traced."""
    before = _SPLIT.set(axes)
    try:
        yield
    finally:
        _SPLIT.reset(before)


def token_axes() -> tuple[str, ...] | None:
    """The axes over which the plan splits the tokens, in order; None outside a step."""
    return _SPLIT.get()


def in_plan_order(where: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """The axes of a sequence, if they are in the order in which the plan splits the tokens."""
    split = [axis for axis in token_axes() or () if axis in names]
    if split != [axis for axis in names if axis in split]:
        raise ValueError(
            f"{where}: the axes must be in the order in which the plan splits the tokens, {quoted(split)}; got "
            f"{quoted(names)}. Name them in that order."
        )
    return names
