"""Primitives that jax itself computes, for the operands of all devices at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from shardkit.testing.exact.numbers.constants import widen
from shardkit.testing.exact.numbers.errors import UnsupportedError
from shardkit.testing.exact.rules.operands import Known, is_key, known_dtype


def bind_primitive(
    equation: Any, operands: Sequence[Known], rank: int, changed: dict[str, Any] | None = None, as_typed: bool = True
) -> list[Known]:
    """The primitive's own results, by jax, without a mesh, for the operands of every device.

    Args:
        equation: which primitive, with which parameters.
        operands: known arrays.
        rank: the number of mesh dims in front of each.
        changed: parameters that differ from the equation's.
        as_typed: whether operands have the dtypes of the equation; False for places in place of elements.
    """
    # jax's keys are words here, and its primitives do not take them.
    if as_typed and any(is_key(v.aval) for v in (*equation.invars, *equation.outvars)):
        raise UnsupportedError(equation.primitive.name)
    primitive = equation.primitive
    params = _drop_mesh({**equation.params, **(changed or {})})

    def bind_on_one_device(*arrays: Any) -> list[Any]:
        typed = []
        for variable, x in zip(equation.invars, arrays, strict=True):
            dtype = known_dtype(variable.aval.dtype) if as_typed else x.dtype
            typed.append(jnp.asarray(x, dtype))
        results = primitive.bind(*typed, **primitive.get_bind_params(params))
        if primitive.multiple_results:
            return list(results)
        return [results]

    lead: tuple[int, ...] = (1,) * rank
    if operands:
        lead = np.broadcast_shapes(*(x.shape[:rank] for x in operands))
    # All devices have the same: computed once.
    if math.prod(lead) == 1:
        results = bind_on_one_device(*(x.reshape(x.shape[rank:]) for x in operands))
        return [widen(np.asarray(y)).reshape((1,) * rank + y.shape) for y in results]

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
    return [widen(np.asarray(y)).reshape(lead + y.shape[1:]) for y in results]


def _drop_mesh(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters without shardings: the devices of the mesh are dims in front here."""
    kept = {}
    for name, value in params.items():
        kept[name] = None if isinstance(value, NamedSharding) else value
    return kept
