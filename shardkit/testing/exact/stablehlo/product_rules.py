"""Matrix products and convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def _dot(reader: BlockReader, operation: Any, x: Any, y: Any) -> Any:
    dims = (((np.ndim(x) - 1,), (0,)), ((), ()))
    return lax.dot_general(x, y, dims, preferred_element_type=read_dtype(operation))


def _dot_general(reader: BlockReader, operation: Any, x: Any, y: Any) -> Any:
    attribute = compat.hlo_dimensions("Dot", operation.attributes["dot_dimension_numbers"])
    contracted = (tuple(attribute.lhs_contracting_dimensions), tuple(attribute.rhs_contracting_dimensions))
    shared = (tuple(attribute.lhs_batching_dimensions), tuple(attribute.rhs_batching_dimensions))
    return lax.dot_general(x, y, (contracted, shared), preferred_element_type=read_dtype(operation))


def _convolve(reader: BlockReader, operation: Any, x: Any, kernel: Any) -> Any:
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
        preferred_element_type=read_dtype(operation),
    )


PRODUCT_RULES: dict[str, Callable[..., Any]] = {
    "stablehlo.dot": _dot,
    "stablehlo.dot_general": _dot_general,
    "stablehlo.convolution": _convolve,
}
