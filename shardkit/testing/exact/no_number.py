"""How a result differs that is NaN where the other side has a number, and which equation gave the first NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardkit._jax.jaxprs import source_line
from shardkit.testing.exact.numbers.values import NOT_A_NUMBER, Exact
from shardkit.testing.exact.rules.operands import Operand
from shardkit.testing.exact.search import Runs


def describe_no_number(got: Exact, wanted: Exact) -> str:
    """In how many elements a result is NaN where the other side has a number; "" if the sides do not differ so."""
    ours = _is_nan_alone(got, wanted)
    theirs = _is_nan_alone(wanted, got)
    count = int((ours | theirs).sum())
    if not count:
        return ""
    side, other = "the reference", "it"
    if ours.any():
        side, other = "it", "the reference"
    return f": in {count} of {ours.size} elements {side} is NaN, where {other} is a number"


def find_first_no_number(runs: Runs, got: Exact, wanted: Exact) -> str:
    """The first equation that gives NaN and reads none, on the side that has NaN alone; "" if there is none."""
    makers: list[str] = []

    def note(equation: Any, operands: Sequence[Operand], results: Sequence[Operand], axes: object, around: str) -> None:
        if any(_has_nan(x) for x in operands):
            return
        if any(_has_nan(x) for x in results):
            makers.append(f"{equation.primitive.name} at {source_line(equation, around)}")

    side = runs.on_mesh if _is_nan_alone(got, wanted).any() else runs.alone
    side(runs.field, note)
    return makers[0] if makers else ""


def _is_nan_alone(x: Exact, y: Exact) -> np.ndarray:
    """bool [...]: where x is NaN and y is a number."""
    return (x.poison == NOT_A_NUMBER) & (y.poison == 0)


def _has_nan(x: Operand) -> bool:
    if isinstance(x, Exact):
        return bool((x.poison == NOT_A_NUMBER).any())
    return x.dtype.kind == "f" and bool(np.isnan(x).any())
