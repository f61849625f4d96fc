"""Primitives that jax itself computes, for the operands of all devices at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from shardkit._jax import compat
from shardkit.testing.exact.numbers.constants import widen
from shardkit.testing.exact.numbers.errors import UnsupportedError
from shardkit.testing.exact.rules.operands import Known, is_key, known_dtype
from shardkit.testing.exact.rules.random_keys import make_words, split_words


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
    primitive = equation.primitive
    params = _drop_mesh({**equation.params, **(changed or {})})

    def bind_on_one_device(*arrays: Any) -> list[Any]:
        typed = []
        for variable, x in zip(equation.invars, arrays, strict=True):
            if real_keys and is_key(variable.aval):
                typed.append(jax.random.wrap_key_data(x, impl=compat.key_impl(variable.aval.dtype)))
                continue
            dtype = known_dtype(variable.aval.dtype) if as_typed else x.dtype
            typed.append(jnp.asarray(x, dtype))
        results = primitive.bind(*typed, **primitive.get_bind_params(params))
        if not primitive.multiple_results:
            results = [results]
        return [jax.random.key_data(x) if is_key(x) else x for x in results]

    def pack(x: Any, variable: Any) -> Known:
        if real_keys and is_key(variable.aval):
            return make_words(np.asarray(x))
        return widen(np.asarray(x))

    lead: tuple[int, ...] = (1,) * rank
    if operands:
        lead = np.broadcast_shapes(*(x.shape[:rank] for x in operands))
    # All devices have the same operands: the results are computed once.
    if math.prod(lead) == 1:
        results = bind_on_one_device(*(x.reshape(x.shape[rank:]) for x in operands))
        arrays = [pack(y, v) for y, v in zip(results, equation.outvars, strict=True)]
        return [x.reshape((1,) * rank + x.shape) for x in arrays]

    # The devices become one dim, over which vmap runs; what all devices have the same has none. On a mesh of 2 by 3
    # devices, [2, 3] + [5] becomes [6, 5], mapped over dim 0, and [1, 1] + [5] becomes [5].
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
    results = jax.vmap(bind_on_one_device, in_axes=tuple(mapped_dims))(*arrays)
    known = [pack(y, v) for y, v in zip(results, equation.outvars, strict=True)]
    return [x.reshape(lead + x.shape[1:]) for x in known]


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
