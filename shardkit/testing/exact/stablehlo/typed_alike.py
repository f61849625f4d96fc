"""Writes operations that StableHLO does not have in operations that it has, before jaxlib reads a module.

- A reduce-scatter or a permute of two arrays becomes two of one array each, and a tuple of their results:

      %r = (f32[2], f32[3]) reduce-scatter(%x, %y)      %r.7 = f32[2] reduce-scatter(%x)
                                                        %r.8 = f32[3] reduce-scatter(%y)
                                                        %r = tuple(%r.7, %r.8)

- Operations of mixed precision, as xla calls them, have floats of two dtypes. A TPU's compiler makes them, where they
  save a conversion. They become a conversion and the operation of one dtype; an operation of several arrays is done in
  float32, and its results are converted:

      %p = bf16[8] pad(%x, %zero), of f32[] %zero       %p.9 = bf16[] convert(%zero)
                                                        %p = bf16[8] pad(%x, %p.9)
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
    "add",
    "subtract",
    "multiply",
    "divide",
    "negate",
    "abs",
    "maximum",
    "minimum",
    "select",
    "clamp",
    "copy",
    "reshape",
    "transpose",
    "broadcast",
    "reverse",
    "pad",
    "slice",
    "dynamic-slice",
    "concatenate",
    "dynamic-update-slice",
    "gather",
    "reduce-precision",
    "all-reduce",
}
# Operations that combine the elements of float32 by a function of float32, and round the result.
_ROUNDED_BEHIND = {"reduce"}
_CONVERTED = _OF_ONE_DTYPE | _ROUNDED_BEHIND
# xla's numbers of float16, float32 and bfloat16.
_FLOATS = {10, 11, 16}
_FLOAT32 = 11


def split_arrays(computation: WrittenComputation) -> None:
    """Writes collectives of several arrays as those of one, where StableHLO has these alone."""
    number = computation.next_number()
    instructions = []
    for instruction in computation.instructions:
        shapes = list_parts(instruction.shape)
        # A collective with further operands, as places in the arrays, is another function: it stays.
        has_several_arrays = 1 < len(shapes) == len(instruction.operands)
        if instruction.opcode in _OF_ONE_ARRAY and has_several_arrays:
            parts = []
            for operand, shape in zip(instruction.operands, shapes, strict=True):
                parts.append(_copy(instruction, number, [operand], shape))
                number += 1
            instructions += parts
            _become(instruction, "tuple", [part.number for part in parts])
        instructions.append(instruction)
    computation.instructions = instructions


def convert_floats(computation: WrittenComputation) -> None:
    """Writes operations of floats of two dtypes with a conversion."""
    number = computation.next_number()
    shapes = {instruction.number: instruction.shape for instruction in computation.instructions}
    instructions = []
    for instruction in computation.instructions:
        if instruction.opcode in _CONVERTED:
            conversions = _convert(instruction, shapes, number)
            number += len(conversions)
            instructions += conversions
        instructions.append(instruction)
    computation.instructions = instructions


def _convert(instruction: WrittenInstruction, shapes: dict[int, bytes], number: int) -> list[WrittenInstruction]:
    """What stands before an operation, so that it is one of a single dtype; its instruction is changed.

    Args:
        instruction: the operation.
        shapes: the shape of each instruction of the computation, by its number.
        number: the first number that no instruction has.
    """
    parts = list_parts(instruction.shape)
    result_types = set(map(_read_type, parts))
    operand_types = {_read_type(shapes[operand]) for operand in instruction.operands}
    float_types = (result_types | operand_types) & _FLOATS
    if len(float_types) < 2:  # StableHLO has this operation as it is
        return []
    # What moves or adds numbers of one array is done in the type of its result.
    if len(parts) == 1 and instruction.opcode not in _ROUNDED_BEHIND:
        [target] = result_types
        return _convert_operands(instruction, shapes, target, number)
    # A reduce, and what has arrays of several types, is done in float32 and rounded at its end.
    conversions = _convert_operands(instruction, shapes, _FLOAT32, number)
    number += len(conversions)
    if len(parts) == 1:
        return [*conversions, _convert_result(instruction, number)]
    return [*conversions, *_convert_results(instruction, parts, number)]


def _convert_operands(
    instruction: WrittenInstruction, shapes: dict[int, bytes], target: int, number: int
) -> list[WrittenInstruction]:
    """Makes an instruction read floats of one type alone: the conversions of its other operands."""
    conversions = []
    operands = []
    for operand in instruction.operands:
        shape = shapes[operand]
        element_type = _read_type(shape)
        if element_type in _FLOATS and element_type != target:
            conversion = _make(instruction, number, "convert", operand, _write_type(shape, target))
            conversions.append(conversion)
            operand = number
            number += 1
        operands.append(operand)
    instruction.operands = operands
    return conversions


def _convert_result(instruction: WrittenInstruction, number: int) -> WrittenInstruction:
    """Makes an instruction the conversion of its result: the operation itself, in float32.

    Worked example: `%s = bf16[4] reduce(%x, %zero)` of a float32 x becomes `%s.5 = f32[4] reduce(%x, %zero)`, and
    `%s = bf16[4] convert(%s.5)`.
    """
    shape = _write_type(instruction.shape, _FLOAT32)
    operation = _copy(instruction, number, instruction.operands, shape)
    _become(instruction, "convert", [number])
    return operation


def _convert_results(instruction: WrittenInstruction, parts: list[bytes], number: int) -> list[WrittenInstruction]:
    """Makes an instruction of several arrays a tuple of converted results: the operation itself, and the conversions.

    Worked example: `%s = (f32[4], bf16[4]) all-reduce(%x, %y)` becomes

        %s.5 = (f32[4], f32[4]) all-reduce(%x, %y)      the operation, in float32, with a number of its own
        %s.6 = f32[4] get-tuple-element(%s.5), index=0
        %s.7 = f32[4] get-tuple-element(%s.5), index=1
        %s.8 = bf16[4] convert(%s.7)
        %s = tuple(%s.6, %s.8)                          what others read keeps its number
    """
    wide_parts = list(map(_widen, parts))
    operation = _copy(instruction, number, instruction.operands, make_tuple(wide_parts))
    instructions = [operation]
    results = []
    for place, (part, wide_part) in enumerate(zip(parts, wide_parts, strict=True)):
        number += 1
        element = _make(instruction, number, "get-tuple-element", operation.number, wide_part)
        element.others.append((TUPLE_INDEX, write_field(TUPLE_INDEX, place)))
        instructions.append(element)
        if part != wide_part:
            number += 1
            instructions.append(_make(instruction, number, "convert", element.number, part))
        results.append(number)
    _become(instruction, "tuple", results)
    return instructions


def _widen(shape: bytes) -> bytes:
    """An array of floats in float32; one of integers, as the places of an argmax, as it is."""
    if _read_type(shape) not in _FLOATS:
        return shape
    return _write_type(shape, _FLOAT32)


def _copy(instruction: WrittenInstruction, number: int, operands: list[int], shape: bytes) -> WrittenInstruction:
    """The same operation with a number of its own, of other operands or with another shape."""
    name = f"{instruction.name}.{number}"
    return WrittenInstruction(number, name, instruction.opcode, operands, shape, instruction.others)


def _become(instruction: WrittenInstruction, opcode: str, operands: list[int]) -> None:
    """Makes an instruction another operation; what reads it keeps reading it by its number."""
    instruction.opcode = opcode
    instruction.operands = operands
    instruction.others = instruction.metadata


def _make(origin: WrittenInstruction, number: int, opcode: str, operand: int, shape: bytes) -> WrittenInstruction:
    """An instruction from the line of another one."""
    return WrittenInstruction(number, f"{origin.name}.{number}", opcode, [operand], shape, origin.metadata)


def _read_type(shape: bytes) -> int:
    return integer(message(shape), TYPE)


def _write_type(shape: bytes, number: int) -> bytes:
    """A shape with elements of another type."""
    fields = []
    for field_number, field in split_fields(shape):
        if field_number == TYPE:
            field = write_field(TYPE, number)
        fields.append(field)
    return b"".join(fields)
