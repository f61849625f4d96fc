"""Operations of a StableHLO module: listed, made, and replaced."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shardkit._jax import compat

ir = compat.private("interpreters.mlir.ir")
hlo = compat.private("interpreters.mlir.hlo")


def list_operations(module: Any) -> list[Any]:
    """The operations that the main function runs, in their order, with those of fusions, loops and calls."""
    functions = {}
    for operation in module.body.operations:
        if operation.operation.name == "func.func":
            functions[operation.attributes["sym_name"].value] = operation.operation
    called = {"main"}
    return list(_walk(functions["main"], functions, called))


def _walk(parent: Any, functions: dict[str, Any], called: set[str]) -> Iterator[Any]:
    for region in parent.regions:
        for block in region:
            for view in block.operations:
                operation = view.operation
                yield operation
                yield from _walk(operation, functions, called)
                if operation.name == "func.call":
                    callee = view.attributes["callee"].value
                    if callee not in called:
                        called.add(callee)
                        yield from _walk(functions[callee], functions, called)


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of a value."""
    return tuple(ir.RankedTensorType(value.type).shape)


def is_float(value: Any) -> bool:
    """Whether a value is an array of floats."""
    if not isinstance(value.type, ir.RankedTensorType):  # a tuple
        return False
    return is_float_type(ir.RankedTensorType(value.type).element_type)


def is_square(value: Any) -> bool:
    """Whether a value is a matrix with as many rows as columns."""
    shape = shape_of(value)
    return len(shape) == 2 and shape[0] == shape[1] > 1


def find_definition(value: Any) -> Any:
    """The operation whose result a value is; None of the argument of a block."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        return None
    return owner.operation


def make(before: Any, name: str, operands: Sequence[Any], kind: Any, **attributes: Any) -> Any:
    """The one result of a new operation, before another and at its line."""
    operation = ir.Operation.create(
        name,
        results=[kind],
        operands=list(operands),
        attributes=attributes,
        loc=before.location,
        ip=ir.InsertionPoint(before),
    )
    return operation.results[0]


def make_constant(before: Any, number: Any, kind: Any) -> Any:
    """A constant of a type, all of whose elements are a number."""
    element = ir.RankedTensorType(kind).element_type
    value = ir.FloatAttr.get(element, number) if is_float_type(element) else ir.IntegerAttr.get(element, number)
    return make(before, "stablehlo.constant", [], kind, value=ir.DenseElementsAttr.get_splat(kind, value))


def is_float_type(element: Any) -> bool:
    """Whether an element type is one of floats."""
    return str(element).startswith(("f", "bf"))


def replace(operation: Any, name: str) -> None:
    """Replaces an operation by one of another name, of the same operands and types."""
    attributes = {attribute.name: attribute.attr for attribute in _list_attributes(operation)}
    other = ir.Operation.create(
        name,
        results=[value.type for value in operation.results],
        operands=list(operation.operands),
        attributes=attributes,
        loc=operation.location,
        ip=ir.InsertionPoint(operation),
    )
    for value, result in zip(operation.results, other.results, strict=True):
        value.replace_all_uses_with(result)
    operation.erase()


def _list_attributes(operation: Any) -> Iterator[Any]:
    for number in range(len(operation.attributes)):
        yield operation.attributes[number]


def read_integers(operation: Any, name: str) -> list[int]:
    """An attribute that lists integers."""
    return [int(number) for number in operation.attributes[name]]


def write_integers(operation: Any, name: str, numbers: Sequence[int]) -> None:
    """Sets an attribute that lists integers."""
    operation.attributes[name] = ir.DenseI64ArrayAttr.get(list(numbers))


def write_table(operation: Any, name: str, table: Any) -> None:
    """Sets an attribute that is a table of integers."""
    operation.attributes[name] = ir.DenseIntElementsAttr.get(np.ascontiguousarray(table, np.int64))
