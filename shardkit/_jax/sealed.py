"""Arrays that can be carried, scanned and sliced along their first dims, but not computed with until they are unsealed.

A sealed array has an extended dtype, as jax's keys have: jax refuses it in arithmetic, and the error contains the
dtype's name. Other uses, such as a flip, jax does not refuse: `find_misuse` finds them in the traced program. Like a
key it has no gradient: jax's stop_gradient would skip it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from shardkit._jax import compat
from shardkit._jax.jaxprs import walk
from shardkit._jax.primitives import registered


class SealedType(jax.dtypes.extended):
    """The scalar type of sealed dtypes."""


class _Rules:
    """The rules of an extended dtype in jax. None creates a value of it, or converts one."""

    allow_conversion = False

    @staticmethod
    def physical_element_aval(dtype: Sealed) -> Any:
        return jax.core.ShapedArray((), dtype.holds)

    @staticmethod
    def tangent_dtype(dtype: Sealed) -> Any:
        return jax.dtypes.float0

    @staticmethod
    def full(shape: Any, value: Any, dtype: Sealed) -> Any:
        raise TypeError(f"a value of {dtype}")

    @staticmethod
    def zero(dtype: Sealed) -> Any:
        raise TypeError(f"a zero of {dtype}")


try:
    _ExtendedDType: Any = compat.private("dtypes.ExtendedDType")
except ImportError:  # raised again by the first array that is sealed
    _ExtendedDType = object


class Sealed(_ExtendedDType):
    """The dtype of a sealed array: the dtype inside, and the text that every error about it contains.

    The last `last` dims stay as they are until it is unsealed.
    """

    _rules = _Rules
    type = SealedType

    def __init__(self, holds: Any, name: str, last: int = 0):
        compat.private("dtypes.ExtendedDType")
        self.holds = jnp.dtype(holds)
        self._name = name
        self.last = last

    @property
    def name(self) -> str:
        """The text in errors."""
        return self._name

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.holds.itemsize

    def __repr__(self) -> str:
        return self._name

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Sealed) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.holds, self._name, self.last))


def _unseal_type(x: Any) -> Any:
    if x.ndim < x.dtype.last:
        raise TypeError(f"{x.dtype} without its dim {x.ndim - x.dtype.last}")
    return x.update(dtype=x.dtype.holds)


def _unseal_batch(args: Any, dims: Any) -> Any:
    """Under vmap: a dim that is taken off behind the first of those that stay would change what they count."""
    (x,) = args
    (dim,) = dims
    if dim > x.ndim - 1 - x.dtype.last:
        raise TypeError(f"vmap over dim {dim} of {x.dtype}")
    return _unseal.bind(x), dim


_seal = Primitive("seal")
_unseal = Primitive("unseal")
_seal.def_abstract_eval(lambda x, *, dtype: x.update(dtype=dtype, weak_type=False))
_unseal.def_abstract_eval(_unseal_type)
batching.defvectorized(_seal)
batching.primitive_batchers[_unseal] = _unseal_batch
for _primitive in (_seal, _unseal):
    _primitive.def_impl(lambda x, **_: x)  # arrays are sealed at trace time
    ad.defjvp(_primitive, None)
    mlir.register_lowering(_primitive, lambda _, x, **__: [x])


def seal(x: Any, name: str, last: int) -> Any:
    """The array, sealed: every error about it contains `name`, and its last dims are those of the array inside."""
    return _seal.bind(x, dtype=Sealed(x.dtype, name, last))


def unseal(x: Any) -> Any:
    """The array inside a sealed one; any other unchanged."""
    return _unseal.bind(x) if is_sealed(x) else x


def is_sealed(x: Any) -> bool:
    """Whether an array, or a variable's type, is sealed."""
    return isinstance(getattr(x, "dtype", None), Sealed)


_PASS = {_unseal.name, "scan", "while", "cond", *compat.CALLS}


def find_misuse(jaxpr: Any) -> str:
    """The name of a sealed array that is used in a wrong way, with the equation and its line; "" if there is none.

    Calls and loops may pass it on, and equations may change the dims in front of the last ones that must stay: a scan
    over stacked layers slices dim 0, and the rows and columns of each layer stay.
    """
    for site in walk(jaxpr):
        for atom in site.equation.invars:
            aval = atom.aval
            if is_sealed(aval) and not _keeps_dims(site.equation, aval.shape, aval.ndim - aval.dtype.last):
                return f"{aval.dtype}, by {site.name} at {site.source}"
    return ""


def _keeps_dims(equation: Any, shape: tuple[int, ...], first: int) -> bool:
    """Whether an equation passes on all dims of the shape from `first` on, whole and in their order."""
    name = equation.primitive.name
    params = equation.params
    last_dims = range(first, len(shape))
    if name == "slice":
        strides = params["strides"] or (1,) * len(shape)
        slices = list(zip(params["start_indices"], params["limit_indices"], strides, strict=True))
        return slices[first:] == [(0, size, 1) for size in shape[first:]]
    if name == "dynamic_slice":
        return tuple(params["slice_sizes"][first:]) == shape[first:]
    if name == "squeeze":
        return not set(params["dimensions"]) & set(last_dims)
    if name == "transpose":
        return tuple(params["permutation"][first:]) == tuple(last_dims)
    return name in _PASS or registered(name).same
