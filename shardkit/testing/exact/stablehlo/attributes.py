"""Types, attributes and regions of an operation of StableHLO, as Python has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

# As MLIR names the elements of an array.
DTYPES = {
    "i1": np.bool_,
    "i4": jnp.int4,
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
    "ui4": jnp.uint4,
    "ui8": np.uint8,
    "ui16": np.uint16,
    "ui32": np.uint32,
    "ui64": np.uint64,
    "bf16": jnp.bfloat16,
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "f8E4M3FN": jnp.float8_e4m3fn,
    "f8E5M2": jnp.float8_e5m2,
}


class UnreadableError(Exception):
    """An operation of a compiled module that has no meaning as a function of arrays.

    Attributes:
        operation: its name, with its target if it calls code of a library.
    """

    def __init__(self, operation: str):
        super().__init__(operation)
        self.operation = operation


def read_shape(operation: Any, result: int = 0) -> tuple[int, ...]:
    """The shape of a result."""
    return tuple(operation.results[result].type.shape)


def read_dtype(operation: Any) -> Any:
    """The numpy dtype of the first result."""
    return find_dtype(operation.results[0].type)


def find_dtype(array_type: Any) -> Any:
    """The numpy dtype of the elements of a type."""
    name = str(array_type.element_type)
    if name not in DTYPES:
        raise UnreadableError(f"an array of {name}")
    return DTYPES[name]


def read_numbers(operation: Any, name: str, default: Any = None) -> np.ndarray:
    """An attribute of integers, an array of them or a table."""
    # A module may leave out an attribute that has its default, as strides of 1.
    if name not in operation.attributes:
        return np.asarray(default)
    return np.asarray(operation.attributes[name])


def read_integers(operation: Any, name: str, default: Sequence[int] = ()) -> tuple[int, ...]:
    """An attribute that is a row of integers."""
    if name not in operation.attributes:
        return tuple(default)
    return tuple(map(int, operation.attributes[name]))


def read_integer(operation: Any, name: str) -> int:
    """An attribute that is an integer."""
    return int(operation.attributes[name].value)


def read_pairs(table: np.ndarray) -> list[tuple[int, int]]:
    """The rows of a table [n, 2], as of padding and of senders and receivers."""
    pairs = []
    for first, second in table.tolist():
        pairs.append((int(first), int(second)))
    return pairs


def find_body(operation: Any, region: int = 0) -> Any:
    """The block of a region of an operation, as the comparison of a sort."""
    return operation.regions[region].blocks[0]


def read_constant(operation: Any) -> Any:
    """The number that all elements of a constant are; None if they differ."""
    value = operation.attributes["value"]
    if not value.is_splat:
        return None
    return value.get_splat_value().value


def find_definition(value: Any, *names: str) -> Any:
    """The operation of one of these names whose result a value is; None if it is another's."""
    # The owner of an argument is its block, which is no operation and has no name.
    owner = value.owner
    operation = getattr(owner, "operation", owner)
    if getattr(operation, "name", "") in names:
        return operation.opview
    return None


def name_combiner(block: Any) -> str | None:
    """The operation by which a region combines its two arguments; "" if it takes the second; None if it does more.

    Conversions are left out, because rounding is not modelled. Worked example, a sum of bfloat16, which XLA adds as
    float32. Its name is "stablehlo.add", as if the arguments were added as they are:

        ^(%a, %b): %a32 = convert %a; %b32 = convert %b; %sum = add %a32, %b32; %back = convert %sum; return %back
    """
    *operations, last = list(block.operations)
    first, second = list(block.arguments)[:2]
    originals: dict[Any, Any] = {}  # for each converted value the one before all conversions
    combiners = []
    for operation in operations:
        if _converts_floats(operation):
            source = operation.operands[0]
            originals[operation.results[0]] = originals.get(source, source)
        else:
            combiners.append(operation)
    result = originals.get(last.operands[0], last.operands[0])
    # A scatter that overwrites: of the old element and its update it returns the update.
    if not combiners and result == second:
        return ""
    if len(combiners) != 1:
        return None
    [combiner] = combiners
    operands = {originals.get(value, value) for value in combiner.operands}
    # One that takes its first argument twice, or returns an argument, is no sum of both.
    if operands != {first, second} or result != combiner.results[0]:
        return None
    name: str = combiner.operation.name
    return name


def _converts_floats(operation: Any) -> bool:
    """Whether an operation converts floats to floats, which only rounds them."""
    if operation.operation.name != "stablehlo.convert":
        return False
    return is_float(operation.operands[0]) and is_float(operation.results[0])


def is_float(value: Any) -> bool:
    """Whether a value is an array of floats."""
    return bool(jnp.issubdtype(find_dtype(value.type), jnp.floating))
