"""Primitives that jax itself computes, for the operands of all devices at once.

Worked example: `population_count` of integers x, [2, 3] + [5] on a mesh of 2 by 3 devices. x becomes [6, 5], `jax.vmap`
binds the primitive to the [5] of each device, and the result [6, 5] becomes [2, 3] + [5] again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
    changed: Mapping[str, Any] | None = None,
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
    changed = changed or {}
    binding = _Binding(equation, changed, as_typed, real_keys)
    if real_keys:
        operands = binding.unpack_keys(operands)
    if sum(x.nbytes for x in operands) > _MOST_BYTES:
        return binding.bind(operands, rank)
    # Each run of a program computes the same masks and places, and jax takes a millisecond for one.
    contents = tuple((x.tobytes(), x.dtype, x.shape) for x in operands)
    key = id(equation), rank, as_typed, real_keys, tuple(changed.items()), contents
    if key not in _recalled:
        if len(_recalled) >= _MOST_RECALLED:
            _recalled.clear()
        results = binding.bind(operands, rank)
        _recalled[key] = _Recalled(equation, results)
    # Copies, because arrays are told apart by their identity.
    return [x.copy() for x in _recalled[key].results]


class _Binding(NamedTuple):
    """A primitive as jax is to compute it. Its attributes are arguments of `bind_primitive`."""

    equation: Any
    changed: Mapping[str, Any]
    as_typed: bool
    real_keys: bool

    def bind(self, operands: Sequence[Known], rank: int) -> list[Known]:
        """The results on every device."""
        lead: tuple[int, ...] = (1,) * rank
        for x in operands:
            lead = np.broadcast_shapes(lead, x.shape[:rank])
        if math.prod(lead) == 1:
            # All devices have the same operands: the results are computed once.
            arrays = [x.reshape(x.shape[rank:]) for x in operands]
            results = self._pack_results(self._bind_on_one_device(arrays))
            return [x.reshape(lead + x.shape) for x in results]
        arrays, mapped_dims = _merge_devices(operands, lead)
        bind_on_all_devices = jax.vmap(self._bind_on_one_device, in_axes=(mapped_dims,))
        results = self._pack_results(bind_on_all_devices(arrays))
        return [x.reshape(lead + x.shape[1:]) for x in results]

    def _bind_on_one_device(self, arrays: Sequence[Any]) -> list[Any]:
        """The results for the operands of one device; keys as their data."""
        primitive = self.equation.primitive
        operands = []
        for variable, x in zip(self.equation.invars, arrays, strict=True):
            operands.append(self._type_operand(variable.aval, x))
        results = primitive.bind(*operands, **primitive.get_bind_params(self._list_params()))
        if not primitive.multiple_results:
            results = [results]
        return [_take_key_data(x) for x in results]

    def _type_operand(self, aval: Any, x: Any) -> Any:
        """An operand as an array of jax, of the dtype that the primitive takes."""
        if self.real_keys and is_key(aval):
            return jax.random.wrap_key_data(x, impl=compat.key_impl(aval.dtype))
        # The bits of a number are those of the dtype that the program has.
        if self.equation.primitive.name == "bitcast_convert_type":
            return jnp.asarray(x, aval.dtype)
        if self.as_typed:
            return jnp.asarray(x, known_dtype(aval.dtype))
        return jnp.asarray(x)

    def _list_params(self) -> dict[str, Any]:
        """The parameters without shardings: the devices of the mesh are dims in front here."""
        params = {**self.equation.params, **self.changed}
        for name, value in params.items():
            if isinstance(value, NamedSharding):
                params[name] = None
        return params

    def unpack_keys(self, operands: Sequence[Known]) -> list[Known]:
        """Operands, of which keys are their data of two numbers of 32 bits."""
        unpacked = []
        for x, variable in zip(operands, self.equation.invars, strict=True):
            if is_key(variable.aval):
                x = split_words(x)
            unpacked.append(x)
        return unpacked

    def _pack_results(self, results: Sequence[Any]) -> list[Known]:
        """Results of jax as known arrays: jax's own keys as words, floats of less than 32 bits widened."""
        packed = []
        for result, variable in zip(results, self.equation.outvars, strict=True):
            x = np.asarray(result)
            if self.real_keys and is_key(variable.aval):
                packed.append(make_words(x))
            else:
                packed.append(widen(x))
        return packed


def _take_key_data(x: Any) -> Any:
    """The data of a key; any other array as it is."""
    if is_key(x):
        return jax.random.key_data(x)
    return x


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
            rows = np.broadcast_to(x, lead + shape)
            arrays.append(rows.reshape(-1, *shape))
            mapped_dims.append(0)
        else:
            arrays.append(x.reshape(shape))
            mapped_dims.append(None)
    return arrays, mapped_dims
