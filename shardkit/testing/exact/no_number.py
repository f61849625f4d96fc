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
    is_nan_in_result = _is_nan_alone(got, wanted)
    is_nan_in_reference = _is_nan_alone(wanted, got)
    count = int((is_nan_in_result | is_nan_in_reference).sum())
    if not count:
        return ""
    if is_nan_in_result.any():
        sides = "it is NaN, where the reference is a number"
    else:
        sides = "the reference is NaN, where it is a number"
    return f": in {count} of {is_nan_in_result.size} elements {sides}"


def find_first_no_number(runs: Runs, got: Exact, wanted: Exact) -> str:
    """The first equation that gives NaN and reads none, on the side that has NaN alone; "" if there is none."""
    equations: list[str] = []

    def note(equation: Any, operands: Sequence[Operand], results: Sequence[Operand], axes: object, around: str) -> None:
        reads_nan = any(_has_nan(x) for x in operands)
        gives_nan = any(_has_nan(x) for x in results)
        if gives_nan and not reads_nan:
            equations.append(f"{equation.primitive.name} at {source_line(equation, around)}")

    if _is_nan_alone(got, wanted).any():
        runs.on_mesh(runs.field, note)
    else:
        runs.alone(runs.field, note)
    if not equations:
        return ""
    return equations[0]


def _is_nan_alone(x: Exact, y: Exact) -> np.ndarray:
    """bool [...]: where x is NaN and y is a number."""
    return (x.poison == NOT_A_NUMBER) & (y.poison == 0)


def _has_nan(x: Operand) -> bool:
    """Whether an array of numbers or floats has NaN."""
    if isinstance(x, Exact):
        return bool((x.poison == NOT_A_NUMBER).any())
    return x.dtype.kind == "f" and bool(np.isnan(x).any())
