"""Arrays that can be carried, sliced, scanned and differentiated, but not computed with until they are unsealed.

A sealed array has an extended dtype, as jax's keys have: jax refuses it in arithmetic, and the error contains the
dtype's name.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from shardkit import _compat


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
        return dtype.holds

    @staticmethod
    def full(shape: Any, value: Any, dtype: Sealed) -> Any:
        raise TypeError(f"a value of {dtype}")

    @staticmethod
    def zero(dtype: Sealed) -> Any:
        raise TypeError(f"a zero of {dtype}")


try:
    _ExtendedDType: Any = _compat.private("dtypes.ExtendedDType")
except ImportError:  # raised again by the first array that is sealed
    _ExtendedDType = object


class Sealed(_ExtendedDType):
    """The dtype of a sealed array: the dtype inside, and the text that every error about it contains."""

    _rules = _Rules
    type = SealedType

    def __init__(self, holds: Any, name: str):
        _compat.private("dtypes.ExtendedDType")
        self.holds, self._name = jnp.dtype(holds), name

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
        return isinstance(other, Sealed) and (self.holds, self._name) == (other.holds, other._name)

    def __hash__(self) -> int:
        return hash((self.holds, self._name))


_seal, _unseal = Primitive("seal"), Primitive("unseal")
_seal.def_abstract_eval(lambda x, *, dtype: x.update(dtype=dtype, weak_type=False))
_unseal.def_abstract_eval(lambda x: x.update(dtype=x.dtype.holds))
for _primitive in (_seal, _unseal):
    _primitive.def_impl(lambda x, **_: x)  # arrays are sealed at trace time
    ad.defjvp(_primitive, lambda t, x, **_: t)
    batching.defvectorized(_primitive)
    mlir.register_lowering(_primitive, lambda _, x, **__: [x])


def seal(x: Any, name: str) -> Any:
    """The array, sealed: every error about it contains `name`."""
    return _seal.bind(x, dtype=Sealed(x.dtype, name))


def unseal(x: Any) -> Any:
    """The array inside a sealed one; any other unchanged."""
    return _unseal.bind(x) if isinstance(x.dtype, Sealed) else x
