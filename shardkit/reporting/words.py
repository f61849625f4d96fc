"""Figures in words, as every table of the page writes them."""

from __future__ import annotations

from fractions import Fraction

from shardkit.analysis.jaxpr.census import Row


def count(size: Fraction) -> str:
    """Bytes, exactly."""
    return f"{int(size):,}" if size.denominator == 1 else f"{float(size):,.1f}"


def times(number: int, unknown: bool) -> str:
    """How often a collective runs; a loop of unknown length counts once."""
    return f"{number}?" if unknown else f"{number}"


def over(axes: tuple[str, ...], n: int) -> str:
    """The axes of a collective and its devices."""
    return f"{','.join(axes)}={n}"


def place(source: str, branch: str) -> str:
    """The line of a collective, and the branch of a conditional in which it is."""
    return f"{source} [{branch}]" if branch else source


def pass_of(row: Row) -> str:
    """The part of the step in which a collective runs."""
    return "backward" if row.backward else "update" if row.update else "forward"


def seconds(value: float) -> str:
    """A time in the unit that suits it, with three digits."""
    if not value:
        return "0"
    units = (("s", 1.0), ("ms", 1e3), ("us", 1e6))
    unit, scale = next((each for each in units if value * each[1] >= 1), ("ns", 1e9))
    return f"{value * scale:.3g} {unit}"


def flops(number: int) -> str:
    """Floating-point operations in the unit that suits them, with three digits."""
    units = (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6))
    unit, scale = next((each for each in units if number >= each[1]), ("kFLOP", 1e3))
    return f"{number / scale:.3g} {unit}"
