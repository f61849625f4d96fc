"""Matrix products and convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit._jax import compat
from shardkit.testing.exact.stablehlo.attributes import (
    read_dtype,
    read_integer,
    read_integers,
    read_numbers,
    read_pairs,
)
from shardkit.testing.exact.stablehlo.block_reader import BlockReader


def _unify_dtypes(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A rule for operands of any floats, from one for operands of the same dtype, which is all that jax multiplies.

    Worked example: a TPU's compiler leaves a product of bfloat16 with float32 whose result is a bfloat16. Both operands
    become float32, their product is one of float32, and it is converted to bfloat16. A proof models no rounding, so
    that this is the same product.
    """

    def apply(reader: BlockReader, operation: Any, x: Any, y: Any) -> Any:
        dtype = read_dtype(operation)
        dtypes = {np.dtype(x.dtype), np.dtype(y.dtype)}
        are_floats = all(jnp.issubdtype(kind, jnp.floating) for kind in (*dtypes, dtype))
        is_narrower = np.dtype(dtype).itemsize < max(kind.itemsize for kind in dtypes)
        if are_floats and (len(dtypes) > 1 or is_narrower):
            x = lax.convert_element_type(x, np.float32)
            y = lax.convert_element_type(y, np.float32)
            return lax.convert_element_type(rule(reader, operation, x, y, np.float32), dtype)
        return rule(reader, operation, x, y, dtype)

    return apply


def _dot(reader: BlockReader, operation: Any, x: Any, y: Any, dtype: Any) -> Any:
    # A plain dot sums over the last dim of x and the first of y.
    dims = (((np.ndim(x) - 1,), (0,)), ((), ()))
    return lax.dot_general(x, y, dims, preferred_element_type=dtype)


def _dot_general(reader: BlockReader, operation: Any, x: Any, y: Any, dtype: Any) -> Any:
    attribute = compat.hlo_dimensions("Dot", operation.attributes["dot_dimension_numbers"])
    contracted = (tuple(attribute.lhs_contracting_dimensions), tuple(attribute.rhs_contracting_dimensions))
    shared = (tuple(attribute.lhs_batching_dimensions), tuple(attribute.rhs_batching_dimensions))
    return lax.dot_general(x, y, (contracted, shared), preferred_element_type=dtype)


def _convolve(reader: BlockReader, operation: Any, x: Any, kernel: Any, dtype: Any) -> Any:
    attribute = compat.hlo_dimensions("Conv", operation.attributes["dimension_numbers"])
    numbers = lax.ConvDimensionNumbers(
        (attribute.input_batch_dimension, attribute.input_feature_dimension, *attribute.input_spatial_dimensions),
        (
            attribute.kernel_output_feature_dimension,
            attribute.kernel_input_feature_dimension,
            *attribute.kernel_spatial_dimensions,
        ),
        (attribute.output_batch_dimension, attribute.output_feature_dimension, *attribute.output_spatial_dimensions),
    )
    rank = np.ndim(x) - 2
    reverses = read_numbers(operation, "window_reversal", np.zeros(rank, bool))
    flipped = [dim for dim, turned in zip(attribute.kernel_spatial_dimensions, reverses, strict=True) if turned]
    # jax has no reversed windows. A window that is read backwards meets the kernel as a plain one meets its reverse.
    if flipped:
        kernel = lax.rev(kernel, flipped)
    padding = read_numbers(operation, "padding", np.zeros((rank, 2), int))
    return lax.conv_general_dilated(
        x,
        kernel,
        read_integers(operation, "window_strides", (1,) * rank),
        read_pairs(padding),
        read_integers(operation, "lhs_dilation", (1,) * rank),
        read_integers(operation, "rhs_dilation", (1,) * rank),
        numbers,
        read_integer(operation, "feature_group_count"),
        read_integer(operation, "batch_group_count"),
        preferred_element_type=dtype,
    )


PRODUCT_RULES: dict[str, Callable[..., Any]] = {
    "stablehlo.dot": _unify_dtypes(_dot),
    "stablehlo.dot_general": _unify_dtypes(_dot_general),
    "stablehlo.convolution": _unify_dtypes(_convolve),
}
