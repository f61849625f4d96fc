"""What a loss gets a part of: the axes over which a plan splits the tokens, and a leaf that it splits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from shardkit._arguments.checks import quoted

# The type of an array says over which axes it varies, but neither on which dim nor in which order. This says so for the
# tokens; like an axis name of jax, it is bound only while the step is traced.
_SPLIT: ContextVar[tuple[tuple[str, ...] | None, str]] = ContextVar("what is split", default=(None, ""))


@contextmanager
def tokens_split(axes: tuple[str, ...], leaf: str = "") -> Iterator[None]:
    """Binds, while a loss is traced, the axes over which the plan splits the tokens, in order, and a leaf it splits."""
    before = _SPLIT.set((axes, leaf))
    try:
        yield
    finally:
        _SPLIT.reset(before)


def check_whole() -> None:
    """Refuses, for a loss that does not communicate, a plan that passes it a part of a leaf or of an example.

    Raises:
        ValueError: names what is split.
    """
    axes, leaf = _SPLIT.get()
    if leaf or axes:
        what = f"leaf {leaf}" if leaf else f"each example, split over {quoted(axes or ())}"
        raise ValueError(
            "value_and_grad: with local=True a loss does not communicate, and must get whole leaves and examples; the "
            f"plan passes it a part of {what}. Leave out local=, or use dp, zero1, zero2 or fsdp."
        )


def token_axes() -> tuple[str, ...] | None:
    """The axes over which the plan splits the tokens, in order; None outside a step."""
    return _SPLIT.get()[0]


def in_plan_order(where: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """The axes of a sequence, if they are in the order in which the plan splits the tokens."""
    split = [axis for axis in token_axes() or () if axis in names]
    if split != [axis for axis in names if axis in split]:
        raise ValueError(
            f"{where}: the axes must be in the order in which the plan splits the tokens, {quoted(split)}; got "
            f"{quoted(names)}. Name them in that order."
        )
    return names
