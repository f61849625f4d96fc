"""Calls of libraries whose contract is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import lax

from shardkit.testing.exact.stablehlo.attributes import UnreadableError
from shardkit.testing.exact.stablehlo.block_reader import BlockReader


def _call_library(reader: BlockReader, operation: Any, *operands: Any) -> Any:
    target = operation.attributes["call_target_name"].value
    function = _LIBRARY.get(target)
    if function is None:
        raise UnreadableError(f"custom_call to {target}")
    return [function(reader, operation, *operands)]


def _take_top(reader: BlockReader, operation: Any, x: Any) -> Any:
    count = operation.results[0].type.get_type(0).shape[-1]
    return tuple(lax.top_k(x, count))


_LIBRARY: dict[str, Callable[..., Any]] = {
    "TopK": _take_top,
}


LIBRARY_RULES: dict[str, Callable[..., Any]] = {
    "stablehlo.custom_call": _call_library,
}
