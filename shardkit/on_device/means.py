"""Means over devices and microbatches: a total and a weight, which are divided only after all sums."""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardkit._arguments.typed import typed
from shardkit.meshes.layout import path_name

_NOT_LINEAR = (
    "Mean: means can be added, and multiplied by numbers, because they are divided only after the sum over devices; "
    "got one that is {did}. Do that to the values before they are summed, or use the metric of the step."
)


class Mean(NamedTuple):
    """A mean over devices and microbatches: two sums, and one division at the very end.

    Return one from your loss if devices have different numbers of examples or tokens. Your loss may also be a sum of
    Means with different weights, `a - b / 10`. The step then sums their weights over devices first, by an all_reduce of
    4 bytes each, and computes one gradient. It cannot split such a loss into microbatches.

    Attributes:
        total: scalar, the sum of this device's values, in float32: 16 bits round a sum, and are refused in a loss. For
            an auxiliary mean it may be an array or a pytree of arrays.
        weight: scalar, the number of these values or the sum of their weights, float32 or integer. Compute it from this
            device's examples. Devices and microbatches add it in float32: counts are exact up to 2^24, and to 7 digits
            beyond. If `total` is an array, `weight` may be an array of the same shape, with a weight for each element.
    """

    total: Any
    weight: Any

    @classmethod
    @typed
    def of(cls, values: jax.Array, weights: jax.Array | None = None) -> Mean:
        """Sums `values` (any shape), weighted by `weights` (the same shape), both in float32.

        Raises:
            TypeError: complex values or weights.
            ValueError: weights of another shape, because a broadcast weight would count once for many values.
        """
        for name, x in (("values", values), ("weights", weights)):
            if x is not None and not is_real(x.dtype):
                raise TypeError(
                    f"Mean.of: {name} must be real numbers; got {describe_type(x)}. Pass a real part, as jnp.real(x) "
                    "or jnp.abs(x)."
                )
        values = values.astype(jnp.float32)
        if weights is None:
            return cls(jnp.sum(values), jnp.float32(values.size))
        if jnp.shape(weights) != values.shape:
            raise ValueError(
                f"Mean.of: the weights must have the shape of the values; got {jnp.shape(weights)} for "
                f"{values.shape}. Broadcast them with jnp.broadcast_to(weights, values.shape)."
            )
        weights = weights.astype(jnp.float32)
        return cls(jnp.sum(values * weights), jnp.sum(weights))

    def __add__(self, other: Any) -> Any:
        return Sum((self,)) + other

    def __radd__(self, other: Any) -> Any:
        if isinstance(other, int) and other == 0:  # `sum` begins with 0
            return self
        return self + other

    def __sub__(self, other: Any) -> Any:
        return Sum((self,)) - other

    def __rsub__(self, other: Any) -> Any:
        return -1 * self + other

    def __neg__(self) -> Mean:
        return -1 * self

    def __mul__(self, factor: Any) -> Mean:
        factor = check_factor(factor)
        return Mean(jax.tree.map(lambda total: factor * total, self.total), self.weight)

    def __rmul__(self, factor: Any) -> Mean:
        return self * factor

    def __truediv__(self, factor: Any) -> Mean:
        factor = check_factor(factor)
        return Mean(jax.tree.map(lambda total: total / factor, self.total), self.weight)

    def __rtruediv__(self, other: Any) -> Mean:
        raise TypeError(_NOT_LINEAR.format(did="divided by"))

    def __pow__(self, other: Any) -> Mean:
        raise TypeError(_NOT_LINEAR.format(did="raised to a power"))


class Sum(NamedTuple):
    """A sum of Means, `terms`, each with its own weight: what `a + 0.1 * b` is."""

    terms: tuple[Mean, ...]

    def __add__(self, other: Any) -> Sum:
        if not isinstance(other, Mean | Sum):
            raise TypeError(f"Mean: only Means can be added to it; got {describe_type(other)}. Pass Mean(value, 1).")
        return Sum((*self.terms, *terms_of(other)))

    def __radd__(self, other: Any) -> Any:
        if isinstance(other, int) and other == 0:
            return self
        return self + other

    def __sub__(self, other: Any) -> Sum:
        if isinstance(other, Mean | Sum):
            return self + -1 * other
        return self + other  # which refuses it

    def __rsub__(self, other: Any) -> Any:
        return -1 * self + other

    def __neg__(self) -> Sum:
        return -1 * self

    def __mul__(self, factor: Any) -> Sum:
        factor = check_factor(factor)
        return Sum(tuple(factor * mean for mean in self.terms))

    def __rmul__(self, factor: Any) -> Sum:
        return self * factor

    def __truediv__(self, factor: Any) -> Sum:
        factor = check_factor(factor)
        return Sum(tuple(mean / factor for mean in self.terms))

    def __rtruediv__(self, other: Any) -> Sum:
        raise TypeError(_NOT_LINEAR.format(did="divided by"))

    def __pow__(self, other: Any) -> Sum:
        raise TypeError(_NOT_LINEAR.format(did="raised to a power"))


# `np.float32(2) * mean` is a product of this class: numpy would multiply the total and the weight, a tuple to it.
Mean.__array_ufunc__ = None  # type: ignore[attr-defined]
Sum.__array_ufunc__ = None  # type: ignore[attr-defined]


def check_factor(factor: Any) -> Any:
    """What a Mean is multiplied or divided by; refuses anything but a real number or an array of them."""
    # jax takes a Python integer for an int32, which would overflow.
    if isinstance(factor, int) and abs(factor) >= 2**31:
        factor = to_array(factor)
    if not is_real(dtype_of(factor)):
        raise TypeError(
            f"Mean: the factor of a mean must be a real number or an array of them; got {describe_type(factor)}. "
            "Multiply the values before they are summed."
        )
    return factor


def dtype_of(value: Any) -> Any:
    """The dtype of an array or a Python number; None of anything else."""
    dtype = getattr(value, "dtype", None)
    if dtype is None and isinstance(value, int | float):
        return jnp.result_type(value)
    return dtype


def is_real(dtype: Any) -> bool:
    """Whether a dtype is of floats, integers or booleans; None is none."""
    if dtype is None:
        return False
    kinds = (jnp.floating, jnp.integer, jnp.bool_)
    return any(jnp.issubdtype(dtype, real) for real in kinds)


def to_array(value: Any) -> jax.Array:
    """A number or an array as an array; a Python integer that int32 cannot hold as float32, in which it is summed."""
    check_size(value)
    if isinstance(value, int) and abs(value) >= 2**31:
        return jnp.asarray(value, jnp.float32)
    return jnp.asarray(value)


def check_size(value: Any) -> None:
    """Refuses a Python integer of more than 64 bits."""
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError(f"Mean: a whole number must be below 2**63; got {value.bit_length()} bits. Pass a float.")


def terms_of(loss: Any) -> tuple[Any, ...]:
    """The Means of which a loss is the sum."""
    if isinstance(loss, Sum):
        return loss.terms
    return (loss,)


def largest_weight(loss: Any) -> jax.Array:
    """The weight by which a loss's gradient is still to be divided: the only one, or the largest of a sum of Means."""
    # For a sum of Means `combine_terms` has multiplied each total by this weight over its own.
    weights = [mean.weight for mean in terms_of(loss)]
    return reduce(jnp.maximum, weights)


def divisor_of(weight: jax.Array) -> jax.Array:
    """The weight, or 1 where it is 0: without a weight the total is 0, and so are the gradients."""
    return jnp.where(weight == 0, jnp.ones_like(weight), weight)


def is_mean(x: Any) -> bool:
    """Whether a node of a tree is a Mean."""
    return isinstance(x, Mean)


def means_by_path(means: Any) -> list[tuple[str, Mean]]:
    """The Means of a tree, each after its path, such as "stats.variance"."""
    leaves = jax.tree_util.tree_leaves_with_path(means, is_leaf=is_mean)
    return [(path_name(path), mean) for path, mean in leaves]


def describe_type(x: Any) -> str:
    """A value as an error names it: `float32[2,3]`, or the name of its type."""
    if isinstance(x, Mean):
        return f"Mean({describe_type(x.total)}, {describe_type(x.weight)})"
    if hasattr(x, "dtype"):
        return f"{x.dtype}[{','.join(map(str, x.shape))}]"
    return type(x).__name__
