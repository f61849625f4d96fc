"""The table of all operations of StableHLO that have a meaning here.

A rule is a function of the BlockReader, the operation and the arrays of its operands, and returns the array of its
result, or a list of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardkit.testing.exact.stablehlo.control_rules import CONTROL_RULES
from shardkit.testing.exact.stablehlo.device_rules import DEVICE_RULES
from shardkit.testing.exact.stablehlo.library_rules import LIBRARY_RULES
from shardkit.testing.exact.stablehlo.product_rules import PRODUCT_RULES
from shardkit.testing.exact.stablehlo.reduction_rules import REDUCTION_RULES
from shardkit.testing.exact.stablehlo.scalar_rules import SCALAR_RULES
from shardkit.testing.exact.stablehlo.shape_rules import SHAPE_RULES

OPERATION_RULES: dict[str, Callable[..., Any]] = {
    **SCALAR_RULES,
    **SHAPE_RULES,
    **REDUCTION_RULES,
    **PRODUCT_RULES,
    **CONTROL_RULES,
    **DEVICE_RULES,
    **LIBRARY_RULES,
}
