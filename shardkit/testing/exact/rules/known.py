"""Equations whose operands are all known: integers, booleans, keys, and floats that follow from no input.

Worked example: `jnp.arange(4) * 2 < n` with a closed-over n. No operand follows from an input, so that numpy computes
the mask, and the field sees a constant.

numpy is much faster than jax here, which dispatches each equation to a device. So numpy computes what it computes with
the same bits, and jax the others. Floats of less than 32 bits are widened first, because rounding is not modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardkit._jax.known_arithmetic import ELEMENTWISE
from shardkit.testing.exact.numbers.assembly import join_arrays
from shardkit.testing.exact.numbers.constants import widen
from shardkit.testing.exact.rules.binding import bind_primitive
from shardkit.testing.exact.rules.movement import MOVED_OPERANDS, MOVES_OF_ONE, move_known
from shardkit.testing.exact.rules.operands import Known, is_key, known_dtype
from shardkit.testing.exact.rules.random_keys import apply_random, apply_threefry, make_words

_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "reduce_sum": np.add.reduce,
    "reduce_max": np.maximum.reduce,
    "reduce_min": np.minimum.reduce,
    "reduce_and": np.bitwise_and.reduce,
    "reduce_or": np.bitwise_or.reduce,
}


def to_known(x: Any, as_stored: bool = False) -> Known:
    """A constant or an input as a known array; keys as words.

    A constant of 16 bits becomes the number that it stands for: 0.8984375 in bfloat16 becomes 0.9. In a compiled
    program a bfloat16 stays `as_stored`, because compilers widen this dtype: XLA replaces the division by that constant
    with a product with the float32 1.1130434, which is 1 / 0.8984375 and not 1 / 0.9. In float16 the product is with a
    float16 again, which stands for 10/9.
    """
    if hasattr(x, "dtype") and is_key(x):
        data = jax.random.key_data(x)
        return make_words(np.asarray(data))
    x = np.asarray(x)
    x = np.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype))
    if as_stored and x.dtype == jnp.bfloat16:
        return x.astype(np.float32)
    return widen(x)


def compute_known(
    equation: Any, operands: Sequence[Known], rank: int, draw: int = 0, real_keys: bool = False
) -> list[Known]:
    """The results of an equation whose operands are all known, for every device, in a draw of that seed."""
    name = equation.primitive.name
    # A plain select is numpy's where; one of many cases takes its elements by places.
    if name in MOVED_OPERANDS and not _is_plain_select(equation, operands):
        return move_known(equation, operands, rank)
    if name.startswith("random_") and real_keys:
        result = apply_threefry(equation, operands)
        if result is not None:
            return [result]
        return bind_primitive(equation, operands, rank, real_keys=True)
    if name.startswith("random_"):
        result = apply_random(equation, operands, draw)
        if result is not None:
            return [result]
    # Not there is what numpy and jax may round otherwise, as exp.
    compute = _BY_NUMPY.get(name)
    if compute is not None:
        result = compute(equation, operands, rank)
        if result is not None:
            return [result]
    return bind_primitive(equation, operands, rank)


def _is_plain_select(equation: Any, operands: Sequence[Known]) -> bool:
    """Whether an equation is a select of one of two arrays by a boolean."""
    return equation.primitive.name == "select_n" and len(operands) == 3 and operands[0].dtype == bool


def _compute_elements(equation: Any, operands: Sequence[Known], rank: int) -> Known:
    """Elementwise arithmetic and comparisons."""
    function = ELEMENTWISE[equation.primitive.name]
    aligned = align(operands, rank)
    return np.asarray(function(*aligned), _result_dtype(equation))


def _divide(equation: Any, operands: Sequence[Known], rank: int) -> Known | None:
    """div of floats. jax rounds the quotient of integers to zero, and numpy down."""
    if not jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating):
        return None
    x, y = align(operands, rank)
    return np.asarray(np.divide(x, y), _result_dtype(equation))


def _clamp(equation: Any, operands: Sequence[Known], rank: int) -> Known | None:
    """clamp of integers."""
    if not jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.integer):
        return None
    low, x, high = align(operands, rank)
    return np.asarray(np.minimum(np.maximum(x, low), high), _result_dtype(equation))


def _select(equation: Any, operands: Sequence[Known], rank: int) -> Known:
    """A plain select: select_n of two arrays by a boolean."""
    which, no, yes = align(operands, rank)
    return np.where(which, yes, no)


def _reduce(equation: Any, operands: Sequence[Known], rank: int) -> Known | None:
    """A reduction over dims."""
    name = equation.primitive.name
    [x] = operands
    if is_key(equation.outvars[0].aval):
        return None
    # numpy has no largest element of none, and jax has the smallest number of the dtype.
    if not x.size and name in ("reduce_max", "reduce_min"):
        return None
    dims = tuple(rank + dim for dim in equation.params["axes"])
    return np.asarray(_REDUCTIONS[name](x, axis=dims), _result_dtype(equation))


def _sum_along(equation: Any, operands: Sequence[Known], rank: int) -> Known:
    """cumsum: sums from the first element on, or from the last one back."""
    [x] = operands
    dim = rank + equation.params["axis"]
    dtype = _result_dtype(equation)
    if not equation.params["reverse"]:
        return np.asarray(np.cumsum(x, dim, dtype))
    return np.flip(np.cumsum(np.flip(x, dim), dim, dtype), dim)


def _convert(equation: Any, operands: Sequence[Known], rank: int) -> Known | None:
    """A cast that loses nothing. One to bfloat16 keeps float32: rounding is not modelled."""
    [x] = operands
    result = equation.outvars[0].aval
    # A cast of float64 may round, and is left to jax; so is one to keys.
    if x.dtype == np.float64 or is_key(result):
        return None
    # A float may be too large for an integer, where numpy wraps and jax does not.
    is_rounded = x.dtype.kind == "f" and jnp.issubdtype(result.dtype, jnp.integer)
    if is_rounded:
        return None
    return x.astype(known_dtype(result.dtype))


def _bitcast(equation: Any, operands: Sequence[Known], rank: int) -> Known | None:
    """The bits of numbers as another dtype of the same width."""
    [x] = operands
    dtype = equation.outvars[0].aval.dtype
    if x.dtype.itemsize != np.dtype(dtype).itemsize:
        return None
    return np.ascontiguousarray(x).view(dtype)


def _move_elements(equation: Any, operands: Sequence[Known], rank: int) -> Known | None:
    """A movement of the elements of one array."""
    if len(operands) != 1:  # sizes that are not known when the program is traced are operands too
        return None
    return MOVES_OF_ONE[equation.primitive.name](operands[0], rank, equation)


def _count_along(equation: Any, operands: Sequence[Known], rank: int) -> Known | None:
    """iota: 0, 1, ... along a dim."""
    if operands:
        return None
    result = equation.outvars[0].aval
    dim = equation.params["dimension"]
    shape = result.shape
    sizes = [1] * len(shape)
    sizes[dim] = shape[dim]
    counts = np.arange(shape[dim], dtype=_result_dtype(equation)).reshape(sizes)
    # bfloat16 has no 257, and a mask of positions would be another one.
    counts = counts.astype(result.dtype).astype(counts.dtype)
    # The same on all devices: size 1 along every mesh dim.
    return np.broadcast_to(counts, shape)[(None,) * rank]


def _concatenate(equation: Any, operands: Sequence[Known], rank: int) -> Known:
    """Arrays side by side."""
    return join_arrays(operands, rank + equation.params["dimension"], new=False)


def _stack(equation: Any, operands: Sequence[Known], rank: int) -> Known:
    """Arrays along a new dim."""
    return join_arrays(operands, rank + equation.params["axis"], new=True)


# What numpy computes with the same bits as jax. These functions return None for operands of which it does not.
_BY_NUMPY: dict[str, Callable[[Any, Sequence[Known], int], Known | None]] = {
    **dict.fromkeys(ELEMENTWISE, _compute_elements),
    "div": _divide,
    "clamp": _clamp,
    "select_n": _select,
    **dict.fromkeys(_REDUCTIONS, _reduce),
    "cumsum": _sum_along,
    "convert_element_type": _convert,
    "bitcast_convert_type": _bitcast,
    **dict.fromkeys(MOVES_OF_ONE, _move_elements),
    "iota": _count_along,
    "concatenate": _concatenate,
    "stack": _stack,
}


def _result_dtype(equation: Any) -> Any:
    """The dtype of an equation's result as a known array."""
    return known_dtype(equation.outvars[0].aval.dtype)


def align(operands: Sequence[Known], rank: int) -> list[Known]:
    """Operands with equally many dims: a scalar gets dims of size 1 after the dims of the mesh.

    Worked example, on a mesh of two devices: a scalar [2] beside an array [1] + [4, 3] becomes [2] + [1, 1].
    """
    most = max(x.ndim for x in operands)
    aligned = []
    for x in operands:
        if x.ndim < most:
            ones = (1,) * (most - x.ndim)
            x = x.reshape(x.shape[:rank] + ones + x.shape[rank:])
        aligned.append(x)
    return aligned
