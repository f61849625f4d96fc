"""The arguments of a proof: floats as unknowns of the field; integers, booleans and keys with their values."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardkit._arguments.checks import quote
from shardkit.testing._compare import is_float
from shardkit.testing.exact.evidence import UnprovableError
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.inputs import draw_input
from shardkit.testing.exact.rules.known import to_known
from shardkit.testing.exact.rules.operands import Operand, is_key


def make_input(field: Field, name: str, x: Any) -> Operand:
    """An argument in the field: random numbers in place of floats; integers, booleans and keys as they are.

    Args:
        field: the arithmetic, which draws the same numbers for the same name.
        name: the name of the argument.
        x: an array; of floats, a ShapeDtypeStruct will do.
    """
    if field.memory is not None:
        return field.memory.recall(field, name, (), partial(_make_input, field, name, x))
    return _make_input(field, name, x)


def _make_input(field: Field, name: str, x: Any) -> Operand:
    """What `make_input` returns, where nothing is remembered of another run."""
    if is_float(x):
        return draw_input(field, name, np.shape(x))
    return to_known(x)


def check_values(where: str, args: Any) -> None:
    """Refuses integers, booleans and keys of which only the shape is given."""
    for x in jax.tree.leaves(args):
        if isinstance(x, jax.ShapeDtypeStruct) and not is_float(x):
            raise UnprovableError(
                f"{where}: integers, booleans and keys must be given, because a proof holds for their values; got the "
                f"shape {x.dtype}{list(x.shape)}. Pass an array."
            )


def check_floats(where: str, shapes: Any) -> None:
    """Refuses inputs without a float, and complex ones."""
    leaves = jax.tree.leaves(shapes)
    for x in leaves:
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise UnprovableError(
                f"{where}: inputs must be real; got a complex one. Pass real and imaginary parts as two arrays, or "
                "compare floats with assert_matches_reference."
            )
    if not any(is_float(x) for x in leaves):
        dtypes = sorted({str(x.dtype) for x in leaves})
        raise UnprovableError(
            f"{where}: at least one input must be an array of floats, for which the proof holds; got "
            f"{quote(dtypes) or 'none'}. Compare integers with assert_matches_reference."
        )


def describe_array(x: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype with which jax takes an argument: float64 and Python numbers in its default precision."""
    if not hasattr(x, "dtype"):
        x = np.asarray(x)
    dtype = x.dtype
    if not is_key(x):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(x.shape, dtype)
