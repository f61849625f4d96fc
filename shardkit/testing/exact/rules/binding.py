"""Primitives that jax itself computes, for the operands of all devices at once.

Worked example: `population_count` of integers x, [2, 3] + [5] on a mesh of 2 by 3 devices. x becomes [6, 5], `jax.vmap`
binds the primitive to the [5] of each device, and the result [6, 5] becomes [2, 3] + [5] again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from shardkit._jax import compat
from shardkit.testing.exact.numbers.constants import widen
from shardkit.testing.exact.numbers.errors import UnsupportedError
from shardkit.testing.exact.rules.operands import Known, is_key, known_dtype
from shardkit.testing.exact.rules.random_keys import make_words, split_words

_MOST_RECALLED = 2048  # equations
_MOST_BYTES = 2**16  # of the operands of one


class _Recalled(NamedTuple):
    """The results of a primitive in an earlier run.

    Attributes:
        equation: kept, so that no other equation has its id.
        results: for these operands.
    """

    equation: Any
    results: list[Known]


_recalled: dict[Any, _Recalled] = {}


def bind_primitive(
    equation: Any,
    operands: Sequence[Known],
    rank: int,
    changed: dict[str, Any] | None = None,
    as_typed: bool = True,
    real_keys: bool = False,
) -> list[Known]:
    """The results of a primitive on every device, computed by jax without a mesh.

    Args:
        equation: the equation, with its primitive and parameters.
        operands: known arrays.
        rank: the number of mesh dims in front of each operand.
        changed: parameters in place of the equation's.
        as_typed: whether operands have the dtypes of the equation; False if they are places of elements.
        real_keys: whether keys are jax's own, so that its primitives take them.
    """
    # jax's keys are words here, and its primitives do not take them.
    has_keys = any(is_key(v.aval) for v in (*equation.invars, *equation.outvars))
    if as_typed and has_keys and not real_keys:
        raise UnsupportedError(equation.primitive.name)
    if real_keys:
        operands = [_unpack_words(x, v.aval) for x, v in zip(operands, equation.invars, strict=True)]
    changed = changed or {}
    if sum(x.nbytes for x in operands) > _MOST_BYTES:
        return _bind_on_devices(equation, operands, rank, changed, as_typed, real_keys)
    # Each run of a program computes the same masks and places, and jax takes a millisecond for one.
    contents = tuple((x.tobytes(), x.dtype, x.shape) for x in operands)
    key = id(equation), rank, as_typed, real_keys, tuple(changed.items()), contents
    if key not in _recalled:
        if len(_recalled) >= _MOST_RECALLED:
            _recalled.clear()
        results = _bind_on_devices(equation, operands, rank, changed, as_typed, real_keys)
        _recalled[key] = _Recalled(equation, results)
    # Copies, because arrays are told apart by their identity.
    return [x.copy() for x in _recalled[key].results]


def _bind_on_devices(
    equation: Any, operands: Sequence[Known], rank: int, changed: dict[str, Any], as_typed: bool, real_keys: bool
) -> list[Known]:
    """What `bind_primitive` returns, computed."""
    params = _drop_mesh({**equation.params, **changed})
    bind_on_one_device = partial(_bind_on_one_device, equation, params, as_typed, real_keys)
    lead: tuple[int, ...] = (1,) * rank
    if operands:
        lead = np.broadcast_shapes(*(x.shape[:rank] for x in operands))
    if math.prod(lead) == 1:
        # All devices have the same operands: the results are computed once.
        arrays = [x.reshape(x.shape[rank:]) for x in operands]
        results = _pack_results(equation, real_keys, bind_on_one_device(*arrays))
        return [x.reshape(lead + x.shape) for x in results]
    arrays, mapped_dims = _merge_devices(operands, lead)
    bind_on_all_devices = jax.vmap(bind_on_one_device, in_axes=tuple(mapped_dims))
    results = _pack_results(equation, real_keys, bind_on_all_devices(*arrays))
    return [x.reshape(lead + x.shape[1:]) for x in results]


def _merge_devices(operands: Sequence[Known], lead: tuple[int, ...]) -> tuple[list[Known], list[int | None]]:
    """Operands with the devices of a mesh as dim 0, and for each the dim over which vmap runs.

    An operand that all devices have the same has no such dim. Worked example, on a mesh of 2 by 3 devices: [2, 3] + [5]
    becomes [6, 5], mapped over dim 0, and [1, 1] + [5] becomes [5], mapped over none.
    """
    rank = len(lead)
    arrays = []
    mapped_dims: list[int | None] = []
    for x in operands:
        shape = x.shape[rank:]
        if math.prod(x.shape[:rank]) > 1:
            arrays.append(np.broadcast_to(x, lead + shape).reshape(-1, *shape))
            mapped_dims.append(0)
        else:
            arrays.append(x.reshape(shape))
            mapped_dims.append(None)
    return arrays, mapped_dims


def _bind_on_one_device(
    equation: Any, params: dict[str, Any], as_typed: bool, real_keys: bool, *arrays: Any
) -> list[Any]:
    """The results of a primitive for the operands of one device; keys as their data."""
    primitive = equation.primitive
    operands = []
    for variable, x in zip(equation.invars, arrays, strict=True):
        if real_keys and is_key(variable.aval):
            operands.append(jax.random.wrap_key_data(x, impl=compat.key_impl(variable.aval.dtype)))
            continue
        dtype = known_dtype(variable.aval.dtype) if as_typed else x.dtype
        if primitive.name == "bitcast_convert_type":  # the bits are those of the dtype that the program has
            dtype = variable.aval.dtype
        operands.append(jnp.asarray(x, dtype))
    results = primitive.bind(*operands, **primitive.get_bind_params(params))
    if not primitive.multiple_results:
        results = [results]
    return [jax.random.key_data(x) if is_key(x) else x for x in results]


def _pack_results(equation: Any, real_keys: bool, results: Sequence[Any]) -> list[Known]:
    """Results of jax as known arrays: jax's own keys as words, floats of less than 32 bits widened."""
    packed = []
    for x, variable in zip(results, equation.outvars, strict=True):
        if real_keys and is_key(variable.aval):
            packed.append(make_words(np.asarray(x)))
        else:
            packed.append(widen(np.asarray(x)))
    return packed


def _unpack_words(x: Known, aval: Any) -> Known:
    """Keys as their data of two numbers of 32 bits; anything else as it is."""
    if not is_key(aval):
        return x
    return split_words(x)


def _drop_mesh(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters without shardings: the devices of the mesh are dims in front here."""
    kept = {}
    for name, value in params.items():
        kept[name] = None if isinstance(value, NamedSharding) else value
    return kept
