"""Writes operations that the compilers know and StableHLO does not as ones that it does, before jaxlib reads a module.

- A reduce-scatter or a permute of several arrays is one of each array, and a tuple of their results.
- A TPU's compiler makes bfloat16 of float32 in an operation of another kind, as `bf16[8] pad(bf16[6], f32[])`: xla
  calls that mixed precision. Here it is a conversion, and then the operation of one dtype; of several arrays, the
  operation in float32, and then conversions.
"""

from __future__ import annotations

from shardkit.analysis.hlo.protobuf import integer, message, split_fields, write_field
from shardkit.testing.exact.stablehlo.instructions import (
    TUPLE_INDEX,
    TYPE,
    WrittenComputation,
    WrittenInstruction,
    list_parts,
    make_tuple,
)

_OF_ONE_ARRAY = ("reduce-scatter", "collective-permute")
# Operations that move, choose or add numbers. Not a bitcast, which is one of bits.
_OF_ONE_DTYPE = {
    *("add", "subtract", "multiply", "divide", "negate", "abs", "maximum", "minimum", "select", "clamp"),
    *("copy", "reshape", "transpose", "broadcast", "reverse", "pad", "slice", "dynamic-slice", "concatenate"),
    *("dynamic-update-slice", "gather", "reduce-precision", "all-reduce"),
}
# xla's numbers of float16, float32 and bfloat16.
_FLOATS = (10, 11, 16)
_FLOAT32 = 11


def split_arrays(computation: WrittenComputation) -> None:
    """Writes collectives of several arrays as those of one, where StableHLO has these alone."""
    number = computation.next_number()
    written = []
    for instruction in computation.instructions:
        shapes = list_parts(instruction.shape)
        if instruction.opcode in _OF_ONE_ARRAY and 1 < len(shapes) == len(instruction.operands):
            parts = []
            for operand, shape in zip(instruction.operands, shapes, strict=True):
                name = f"{instruction.name}.{number}"
                parts.append(WrittenInstruction(number, name, instruction.opcode, [operand], shape, instruction.others))
                number += 1
            written += parts
            instruction.opcode = "tuple"
            instruction.operands = [part.number for part in parts]
            instruction.others = instruction.metadata
        written.append(instruction)
    computation.instructions = written


def convert_floats(computation: WrittenComputation) -> None:
    """Writes operations of floats of two dtypes with a conversion."""
    number = computation.next_number()
    shapes = {instruction.number: instruction.shape for instruction in computation.instructions}
    written = []
    for instruction in computation.instructions:
        if instruction.opcode in _OF_ONE_DTYPE:
            conversions = _convert(instruction, shapes, number)
            number += len(conversions)
            written += conversions
        written.append(instruction)
    computation.instructions = written


def _convert(instruction: WrittenInstruction, shapes: dict[int, bytes], number: int) -> list[WrittenInstruction]:
    """What stands before an operation, so that it is one of a single dtype; its instruction is changed.

    Of several arrays, it is an operation of float32 before the instruction, which becomes a tuple of converted results.
    """
    parts = list_parts(instruction.shape)
    types = {_read_type(shape) for shape in parts}
    dtypes = types | {_read_type(shapes[operand]) for operand in instruction.operands}
    dtypes &= set(_FLOATS)
    if len(dtypes) < 2:
        return []
    # A sum of arrays of both dtypes is one of float32 alone: the results are converted behind it.
    is_tuple = len(parts) > 1
    before: list[WrittenInstruction] = []
    target = _FLOAT32 if is_tuple else types.pop()
    operands = []
    for operand in instruction.operands:
        shape = shapes[operand]
        if _read_type(shape) in _FLOATS and _read_type(shape) != target:
            before.append(_make(instruction, number, "convert", operand, _write_type(shape, target)))
            operand = number
            number += 1
        operands.append(operand)
    if not is_tuple:
        instruction.operands = operands
        return before
    # The operation takes another number, and a tuple of its converted results takes the old one.
    total = number
    shape = make_tuple([_write_type(part, target) for part in parts])
    before.append(
        WrittenInstruction(
            total, f"{instruction.name}.{total}", instruction.opcode, operands, shape, instruction.others
        )
    )
    results = []
    for place, part in enumerate(parts):
        number += 1
        element = _make(instruction, number, "get-tuple-element", total, _write_type(part, target))
        element.others.append((TUPLE_INDEX, write_field(TUPLE_INDEX, place)))
        before.append(element)
        if _read_type(part) != target:
            before.append(_make(instruction, number + 1, "convert", number, part))
            number += 1
        results.append(number)
    instruction.opcode = "tuple"
    instruction.operands = results
    instruction.others = instruction.metadata
    return before


def _make(origin: WrittenInstruction, number: int, opcode: str, operand: int, shape: bytes) -> WrittenInstruction:
    """An instruction from the line of another one."""
    return WrittenInstruction(number, f"{origin.name}.{number}", opcode, [operand], shape, origin.metadata)


def _read_type(shape: bytes) -> int:
    return integer(message(shape), TYPE)


def _write_type(shape: bytes, number: int) -> bytes:
    written = []
    for field, data in split_fields(shape):
        if field == TYPE:
            data = write_field(TYPE, number)
        written.append(data)
    return b"".join(written)
