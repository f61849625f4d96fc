"""Checks of arguments, with the errors worded as everywhere: the rule, the value, the remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Rational, Real


def whole(where: str, **values: int) -> tuple[int, ...]:
    """The values as Python integers, which do not overflow as NumPy's do; refuses what is no whole number from 1."""
    return _whole(where, 1, values)


def count(where: str, **values: int) -> tuple[int, ...]:
    """As `whole`, from 0."""
    return _whole(where, 0, values)


def _whole(where: str, least: int, values: dict[str, int]) -> tuple[int, ...]:
    for name, value in values.items():
        number = _number(value)
        if not least <= number < math.inf or number != int(number):
            raise ValueError(
                f"{where}: {name} must be a whole number of at least {least}; got {value!r}. Correct {name}."
            )
    return tuple(map(int, values.values()))


def positive(where: str, **values: float) -> tuple[float, ...]:
    """The values as Python numbers; refuses what is not greater than 0."""
    for name, value in values.items():
        _finite(where, name, value)
        if not _number(value) > 0:
            raise ValueError(f"{where}: {name} must be greater than 0; got {value!r}. Correct {name}.")
    return tuple(map(_number, values.values()))


def at_least_zero(where: str, **values: float) -> tuple[float, ...]:
    """The values as Python numbers; refuses what is negative."""
    for name, value in values.items():
        _finite(where, name, value)
        if not _number(value) >= 0:
            raise ValueError(f"{where}: {name} must be 0 or more; got {value!r}. Correct {name}.")
    return tuple(map(_number, values.values()))


def _finite(where: str, name: str, value: float) -> None:
    """Refuses infinity for all but a bandwidth, that of a wire that costs nothing."""
    if _number(value) == math.inf and not name.endswith("bandwidth"):
        raise ValueError(f"{where}: {name} must be finite; got {value!r}. Correct {name}.")


def _number(value: object) -> float:
    """NumPy's scalars as Python's; nan, which every check refuses, for what is no number."""
    if isinstance(value, bool):  # True is no number of anything
        return math.nan
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Rational):
        return value  # type: ignore[return-value]  # a Fraction stays exact
    return float(value) if isinstance(value, Real) else math.nan


def pieces(where: str, **sizes: int) -> tuple[int, ...]:
    """As `whole`; refuses a schedule of more pieces of work than anybody can lay out, a million."""
    found = whole(where, **sizes)
    if math.prod(found) > 10**6:
        told = ", ".join(f"{name}={size}" for name, size in zip(sizes, found, strict=True))
        raise ValueError(f"{where}: a schedule must have a million pieces of work at most; got {told}. Lower one.")
    return found


def known(where: str, name: str, value: object, choices: Sequence[object]) -> None:
    """Refuses what is none of the choices."""
    if value not in choices or isinstance(value, bool):  # True would be 1
        *others, last = map(repr, choices)
        raise ValueError(f"{where}: {name} must be {', '.join(others)} or {last}; got {value!r}. Choose one of them.")


def spelled(
    where: str, name: str, value: object, choices: Sequence[str], others: Mapping[str, str] | None = None
) -> str:
    """The choice that the value spells, or another name of one, whatever its capitals, "-", "_" and spaces."""

    def plain(text: object) -> str:
        return str(text).lower().translate({ord(c): None for c in "-_ "})

    names = {plain(choice): choice for choice in choices} | {plain(k): v for k, v in (others or {}).items()}
    if plain(value) not in names:
        known(where, name, value, choices)
    return names[plain(value)]


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
