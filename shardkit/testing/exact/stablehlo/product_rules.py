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
        dtype = np.dtype(read_dtype(operation))
        if not _is_mixed(x.dtype, y.dtype, dtype):
            return rule(reader, operation, x, y, dtype)
        x = lax.convert_element_type(x, np.float32)
        y = lax.convert_element_type(y, np.float32)
        product = rule(reader, operation, x, y, np.float32)
        return lax.convert_element_type(product, dtype)

    return apply


def _is_mixed(x: np.dtype, y: np.dtype, result: np.dtype) -> bool:
    """Whether a product is one of floats that jax does not multiply: of two dtypes, or with a result of fewer bits."""
    for dtype in (x, y, result):
        if not jnp.issubdtype(dtype, jnp.floating):
            return False
    return x != y or result.itemsize < x.itemsize


def _dot(reader: BlockReader, operation: Any, x: Any, y: Any, dtype: Any) -> Any:
    # A plain dot sums over the last dim of x and the first of y.
    dims = (((np.ndim(x) - 1,), (0,)), ((), ()))
    return lax.dot_general(x, y, dims, preferred_element_type=dtype)


def _dot_general(reader: BlockReader, operation: Any, x: Any, y: Any, dtype: Any) -> Any:
    """A product that sums over some dims of both operands, and keeps some that both have.

    Worked example: x [8, 4, 3] and y [8, 3, 5] with the contracting dims 2 and 1 and the batching dims 0 and 0 are
    eight products [4, 3] @ [3, 5]: [8, 4, 5].
    """
    dims = compat.hlo_dimensions("Dot", operation.attributes["dot_dimension_numbers"])
    contracting = (
        tuple(dims.lhs_contracting_dimensions),
        tuple(dims.rhs_contracting_dimensions),
    )
    batching = (
        tuple(dims.lhs_batching_dimensions),
        tuple(dims.rhs_batching_dimensions),
    )
    return lax.dot_general(x, y, (contracting, batching), preferred_element_type=dtype)


def _convolve(reader: BlockReader, operation: Any, x: Any, kernel: Any, dtype: Any) -> Any:
    """A convolution, whose dims may stand in any order.

    Worked example: x [4, 8, 3], of 4 examples with 8 places and 3 features, has the batch dim 0, the feature dim 2 and
    the spatial dim 1: (0, 2, 1). A kernel [5, 3, 6] of 5 places has (2, 1, 0): output features, input features, places.
    """
    dims = compat.hlo_dimensions("Conv", operation.attributes["dimension_numbers"])
    input_dims = (
        dims.input_batch_dimension,
        dims.input_feature_dimension,
        *dims.input_spatial_dimensions,
    )
    kernel_dims = (
        dims.kernel_output_feature_dimension,
        dims.kernel_input_feature_dimension,
        *dims.kernel_spatial_dimensions,
    )
    output_dims = (
        dims.output_batch_dimension,
        dims.output_feature_dimension,
        *dims.output_spatial_dimensions,
    )
    rank = np.ndim(x) - 2
    # jax has no reversed windows. A window that is read backwards meets the kernel as a plain one meets its reverse.
    is_reversed = read_numbers(operation, "window_reversal", np.zeros(rank, bool))
    spatial_dims = np.asarray(dims.kernel_spatial_dimensions)
    reversed_dims = spatial_dims[is_reversed.astype(bool)].tolist()
    if reversed_dims:
        kernel = lax.rev(kernel, reversed_dims)
    padding = read_numbers(operation, "padding", np.zeros((rank, 2), int))
    return lax.conv_general_dilated(
        x,
        kernel,
        read_integers(operation, "window_strides", (1,) * rank),
        read_pairs(padding),
        read_integers(operation, "lhs_dilation", (1,) * rank),
        read_integers(operation, "rhs_dilation", (1,) * rank),
        lax.ConvDimensionNumbers(input_dims, kernel_dims, output_dims),
        read_integer(operation, "feature_group_count"),
        read_integer(operation, "batch_group_count"),
        preferred_element_type=dtype,
    )


PRODUCT_RULES: dict[str, Callable[..., Any]] = {
    "stablehlo.dot": _unify_dtypes(_dot),
    "stablehlo.dot_general": _unify_dtypes(_dot_general),
    "stablehlo.convolution": _unify_dtypes(_convolve),
}
