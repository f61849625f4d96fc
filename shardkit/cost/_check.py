"""Checks of arguments, with the errors worded as everywhere: the rule, the value, the remedy."""

from __future__ import annotations

from collections.abc import Sequence


def whole(where: str, **values: int) -> None:
    """Refuses what is no whole number of at least 1."""
    for name, value in values.items():
        if value != int(value) or value < 1:
            raise ValueError(f"{where}: {name} must be a whole number of at least 1; got {value!r}. Correct {name}.")


def positive(where: str, **values: float) -> None:
    """Refuses what is not greater than 0."""
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{where}: {name} must be greater than 0; got {value!r}. Correct {name}.")


def at_least_zero(where: str, **values: float) -> None:
    """Refuses what is negative."""
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{where}: {name} must be 0 or more; got {value!r}. Correct {name}.")


def known(where: str, name: str, value: object, choices: Sequence[object]) -> None:
    """Refuses what is none of the choices."""
    if value not in choices:
        *others, last = map(repr, choices)
        raise ValueError(f"{where}: {name} must be {', '.join(others)} or {last}; got {value!r}. Choose one of them.")


def recomputation(where: str, recompute: str | bool) -> str:
    """ "none", "selective" or "full"; False and True mean the first and the last."""
    if isinstance(recompute, bool):
        return "full" if recompute else "none"
    known(where, "recompute", recompute, ("none", "selective", "full"))
    return recompute


def divides(where: str, part: str, parts: int, whole_name: str, size: int) -> None:
    """Refuses a size that does not split evenly."""
    if size % parts:
        raise ValueError(f"{where}: {part} must divide {whole_name}; got {parts} and {size}. Change one of them.")
