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
    params = {}
    for name, value in {**equation.params, **(changed or {})}.items():
        if isinstance(value, NamedSharding):  # the mesh is in the dims in front
            value = None
        params[name] = value

    # The equation on one device, of arrays without dims of a mesh.
    def bind_one(*xs: Any) -> list[Any]:
        typed = []
        for variable, x in zip(equation.invars, xs, strict=True):
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
        results = bind_one(*(x.reshape(x.shape[rank:]) for x in operands))
        return [widen(np.asarray(y)).reshape((1,) * rank + y.shape) for y in results]

    # The devices become one dim, over which vmap runs; what all devices have the same has none.
    rows = []
    mapped_dims: list[int | None] = []
    for x in operands:
        shape = x.shape[rank:]
        if math.prod(x.shape[:rank]) > 1:
            rows.append(np.broadcast_to(x, lead + shape).reshape(-1, *shape))
            mapped_dims.append(0)
        else:
            rows.append(x.reshape(shape))
            mapped_dims.append(None)
    results = jax.vmap(bind_one, in_axes=tuple(mapped_dims))(*rows)
    return [widen(np.asarray(y)).reshape(lead + y.shape[1:]) for y in results]
