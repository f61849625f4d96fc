"""Drops the tilings of a module, which say where numbers are, before jaxlib reads it.

A TPU stores f32[16,256]{1,0:T(8,128)} as [2, 2] tiles of [8, 128], one after the other. No operation but a bitcast sees
this. A bitcast returns the same bytes as another shape, and jaxlib reads it as if there were no tiles: in the order of
the dims of its layouts. Whether that is its meaning is asked here of each element. For example

    f32[16,128]{1,0:T(8,128)} to f32[2,8,128]{2,1,0:T(8,128)}        element n of the one is element n of the other
    f32[16,256]{1,0:T(8,128)} to f32[2,2,8,128]{3,2,1,0:T(8,128)}    not so: the dims of the other are the tiles

The first bitcast stays. The second one becomes a call of READ_PLACES, with a table that says for each element of the
result which element of the operand is in its place: 0, 1, ..., 127, then 256, because the second row of the first tile
begins behind the first row of the operand. A bitcast that reads the padding of a tile becomes a call without a meaning,
because nothing says which numbers are there. So does one to elements of another type, as a TPU packs two float16 into a
word.

Source: https://openxla.org/xla/tiled_layout
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from shardkit.analysis.hlo.protobuf import integer, integers, message, split_fields, write_field
from shardkit.testing.exact.stablehlo.instructions import (
    API_VERSION,
    CONFIG,
    LITERAL,
    TARGET,
    TYPE,
    OpenModule,
    WrittenComputation,
    WrittenInstruction,
    edit_fields,
    join_fields,
)

# The field of a module and of a computation with the shapes of parameters and result; of a literal with its shape.
_PROGRAM_SHAPE = 4
_PARAMETERS = 1
_RESULT = 2
_LITERAL_SHAPE = 1
# Those of an instruction.
_OPERAND_SHAPES = 57
# Those of a shape.
_DIMS = 3
_PARTS = 4
_LAYOUT = 5
# Those of a layout, and of a tile.
_MINOR_TO_MAJOR = 1
_TILES = 6
_TILE_DIMS = 1
_WHOLE_DIM = 1 << 63  # a dim of a tile that is joined with the next one

# What bitcasts become: a call that reads elements in another order, with the numbers of these as JSON, and two calls
# without a meaning.
READ_PLACES = "shardkit.read_places"
READ_PADDING = "a bitcast of the padding of tiles"
READ_WORDS = "a bitcast of tiles as elements of another type"


def drop_tilings(module: OpenModule) -> None:
    """Writes all layouts without tiles, and bitcasts that need tiles as calls."""
    module.others = edit_fields(module.others, _PROGRAM_SHAPE, _drop_in_program_shape)
    for computation in module.computations:
        computation.others = edit_fields(computation.others, _PROGRAM_SHAPE, _drop_in_program_shape)
        _write_bitcasts(computation)
        # After all bitcasts, which look at the tiles of their operands.
        for instruction in computation.instructions:
            instruction.shape = _drop_in_shape(instruction.shape)
            fields = edit_fields(instruction.others, LITERAL, _drop_in_literal)
            instruction.others = edit_fields(fields, _OPERAND_SHAPES, _drop_in_shape)


def _write_bitcasts(computation: WrittenComputation) -> None:
    """Makes each bitcast that needs tiles a call."""
    instructions = computation.by_number()
    for instruction in computation.instructions:
        if instruction.opcode != "bitcast":
            continue
        operand = instructions[instruction.operands[0]]
        if keeps_order(operand.shape, instruction.shape):
            continue
        elements = find_elements(operand.shape, instruction.shape)
        if elements is not None:
            target = READ_PLACES
        elif _have_one_type(operand.shape, instruction.shape):
            target = READ_PADDING
        else:
            target = READ_WORDS
        _write_as_call(instruction, target, elements)


def _have_one_type(source: bytes, target: bytes) -> bool:
    """Whether the elements of two shapes are of one type."""
    return integer(message(source), TYPE) == integer(message(target), TYPE)


def _write_as_call(instruction: WrittenInstruction, target: str, elements: Sequence[int] | None) -> None:
    """Makes a bitcast a call, as of READ_PLACES, which reads the elements of these numbers."""
    instruction.opcode = "custom-call"
    config = json.dumps(elements)
    instruction.others = [
        *instruction.metadata,
        (TARGET, write_field(TARGET, target.encode())),
        (CONFIG, write_field(CONFIG, config.encode())),
        (API_VERSION, write_field(API_VERSION, 1)),
    ]


def _drop_in_program_shape(program_shape: bytes) -> bytes:
    fields = edit_fields(split_fields(program_shape), _PARAMETERS, _drop_in_shape)
    return join_fields(edit_fields(fields, _RESULT, _drop_in_shape))


def _drop_in_literal(literal: bytes) -> bytes:
    return join_fields(edit_fields(split_fields(literal), _LITERAL_SHAPE, _drop_in_shape))


@lru_cache(4096)  # a program has few shapes
def _drop_in_shape(shape: bytes) -> bytes:
    """A shape without tiles: f32[16,256]{1,0:T(8,128)} becomes f32[16,256]{1,0}."""
    fields = edit_fields(split_fields(shape), _PARTS, _drop_in_shape)
    return join_fields(edit_fields(fields, _LAYOUT, _drop_in_layout))


def _drop_in_layout(layout: bytes) -> bytes:
    """A layout that says the order of its dims alone."""
    order = [row for row in split_fields(layout) if row[0] == _MINOR_TO_MAJOR]
    return join_fields(order)


@lru_cache(4096)
def keeps_order(source: bytes, target: bytes) -> bool:
    """Whether a bitcast between two shapes is one of the numbers in the order of the dims of their layouts."""
    if not _list_tiles(source) and not _list_tiles(target):
        return True
    if not _have_one_type(source, target):
        return False  # elements of another type may have another number of bits, and so other places
    source_places = _find_places(source)
    target_places = _find_places(target)
    if source_places is None or target_places is None:
        return False
    # Element n of the one, counted by its layout, must be where element n of the other is.
    ordered_source_places = source_places.transpose(_read_order(source)).ravel()
    ordered_target_places = target_places.transpose(_read_order(target)).ravel()
    return bool(np.array_equal(ordered_source_places, ordered_target_places))


@lru_cache(4096)
def find_elements(source: bytes, target: bytes) -> tuple[int, ...] | None:
    """For each element of the result of a bitcast, the number of the element of the operand in the same place.

    None if some place has no element.
    """
    source_places = _find_places(source)
    target_places = _find_places(target)
    if source_places is None or target_places is None or not _have_one_type(source, target):
        return None
    element_at = {}  # by place
    for element, place in enumerate(source_places.ravel().tolist()):
        element_at[place] = element
    elements = []
    for place in target_places.ravel().tolist():
        if place not in element_at:
            return None  # padding of the operand
        elements.append(element_at[place])
    return tuple(elements)


def _read_order(shape: bytes) -> tuple[int, ...]:
    """The dims in the order of a layout, the slowest first: of f32[16,256]{0,1}, where dim 0 is the fastest, (1, 0)."""
    fields = message(shape)
    if _LAYOUT not in fields:
        return tuple(range(len(integers(fields, _DIMS))))
    [layout] = fields[_LAYOUT]
    fastest_first = integers(message(layout), _MINOR_TO_MAJOR)
    return fastest_first[::-1]


def _list_tiles(shape: bytes) -> list[tuple[int, ...]]:
    """The tilings of a layout, one after the other: of bf16[16,256]{1,0:T(8,128)(2,1)}, (8, 128) and (2, 1)."""
    fields = message(shape)
    if _LAYOUT not in fields:
        return []
    [layout] = fields[_LAYOUT]
    tiles = message(layout).get(_TILES, ())
    return [integers(message(tile), _TILE_DIMS) for tile in tiles]


@lru_cache(256)
def _find_places(shape: bytes) -> np.ndarray | None:
    """Where each element is stored; None if that is not known.

    Worked example: [4, 3] in tiles of [2, 2]. The rows are padded to 4, for two tiles side by side:

        0   1   4           element (0, 2) is the first of the second tile: place 4. Place 5 is padding.
        2   3   6
        8   9  12
        10  11  14
    """
    dims = integers(message(shape), _DIMS)
    order = _read_order(shape)
    sizes = [dims[dim] for dim in order]
    places = np.zeros(sizes, np.int64)
    if places.size == 1:  # a single element is the first, in all tiles
        return places.reshape(dims)
    # One array for each dim, which broadcast against each other: [4, 1] and [1, 3] for [4, 3].
    coordinates = list(np.indices(sizes, np.int64, sparse=True))
    for tile in _list_tiles(shape):
        joins_dims = max(tile, default=0) >= _WHOLE_DIM
        if len(tile) > len(sizes) or joins_dims:
            return None
        sizes, coordinates = _cut_tiles(sizes, coordinates, tile)
    # Row by row: in [2, 2, 2, 2] the coordinates (0, 1, 1, 0) are the place ((0 * 2 + 1) * 2 + 1) * 2 + 0 = 6.
    for size, coordinate in zip(sizes, coordinates, strict=True):
        places = places * size + coordinate
    return places.transpose(np.argsort(order))


def _cut_tiles(
    sizes: Sequence[int], coordinates: Sequence[np.ndarray], tile: Sequence[int]
) -> tuple[list[int], list[np.ndarray]]:
    """The dims after one tiling: the last ones become the numbers of tiles, and then the places in a tile.

    Worked example: [4, 3] in tiles of [2, 2] is [2, 2, 2, 2], and the element (1, 2) has the coordinates (0, 1, 1, 0):
    tile (0, 1), and in it the place (1, 0).
    """
    first = len(sizes) - len(tile)
    counts = []
    tile_coordinates = []
    places = []
    for size, coordinate, width in zip(sizes[first:], coordinates[first:], tile, strict=True):
        counts.append(-(-size // width))
        tile_coordinates.append(coordinate // width)
        places.append(coordinate % width)
    new_sizes = [*sizes[:first], *counts, *tile]
    new_coordinates = [*coordinates[:first], *tile_coordinates, *places]
    return new_sizes, new_coordinates
