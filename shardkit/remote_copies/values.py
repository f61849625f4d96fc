"""Values in a kernel: integers that are known on a device, and data that is known only by its number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from shardkit._jax import compat
from shardkit._jax.known_arithmetic import ELEMENTWISE


class Data(NamedTuple):
    """A value that depends on the arguments, by its number in the device's program."""

    number: int
    shape: tuple[int, ...]
    dtype: Any


def is_known(x: Any) -> bool:
    """Whether a value is an integer, a boolean or an array of them that the device's program knows."""
    return isinstance(x, np.ndarray | np.generic)


def computes_integers(equation: Any, operands: Sequence[Any]) -> bool:
    """Whether an equation makes known integers of known ones. Floats stay operations: a proof is about them."""
    for x in operands:
        if not is_known(x):
            return False
    for variable in equation.outvars:
        dtype = getattr(variable.aval, "dtype", None)
        if dtype is None or np.dtype(dtype).kind not in "iub":
            return False
    return not equation.effects


def compute_integers(equation: Any, operands: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
    """The results of an equation of known integers."""
    name = equation.primitive.name
    aval = equation.outvars[0].aval
    if name in ELEMENTWISE:  # faster than jax, operation by operation
        return [np.asarray(ELEMENTWISE[name](*operands), aval.dtype)]
    if name == "select_n" and np.ndim(operands[0]) == 0:
        return [np.asarray(operands[1 + int(operands[0])])]
    if name == "convert_element_type":
        return [np.asarray(operands[0]).astype(aval.dtype)]
    with jax.ensure_compile_time_eval():
        return [np.asarray(x) for x in compat.bind(equation, [np.asarray(x) for x in operands])]
