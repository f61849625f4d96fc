"""Reads an optimized module as a function of `jax.lax`: each of its operations becomes one primitive, or a few.

jaxlib turns the module that a compiler made into StableHLO, and parses it as typed operations: fusions keep their
regions, collectives their groups of devices. So what reads traced programs reads compiled ones too, once the function
that this file makes of a module is traced.

All devices are one flat mesh axis here, because a compiled module numbers its devices and knows no mesh. Worked
example, an all-reduce over the groups {0, 2} and {1, 3} of four devices:

    gathered    all_gather of x [5] along the axis: [4, 5] on every device
    members     [[0, 2], [1, 3], [0, 2], [1, 3]][axis_index]: [2], the numbers of this device's group
    result      gathered[members].sum(0): [5]

Nothing is done with layouts, aliases and copies: they say where numbers are, and not which numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax import lax

from shardkit._jax import compat
from shardkit.analysis.hlo.proto import read
from shardkit.collectives.basic import vary

_DTYPES = {
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


class ImportedModule:
    """A module, parsed.

    Attributes:
        axis: the mesh axis of all devices, along which its function must be mapped.
        devices: the number of devices.
        groups: of a collective, by its channel, the groups of devices.
    """

    def __init__(self, serialized: bytes, axis: str, devices: int):
        """Parses the serialized HloModuleProto of a module."""
        self.axis = axis
        self.devices = devices
        try:
            self._ir = compat.parse_hlo(serialized)
        except ValueError as error:
            # jaxlib 0.12 writes an all_to_all of one array in a form that it does not read.
            raise UnreadableError(f"a part that jaxlib {jaxlib.__version__} cannot turn into StableHLO") from error
        self.groups: dict[int, Any] = {}
        for computation in read(serialized).computations.values():
            for instruction in computation.instructions.values():
                if not instruction.channel:
                    continue
                if self.groups.setdefault(instruction.channel, instruction.groups) != instruction.groups:
                    raise UnreadableError(f"channel {instruction.channel}, which has groups of two kinds,")
        self._functions: dict[str, Any] = {}
        self._callers: dict[str, Callable[..., Any]] = {}
        for operation in self._ir.body.operations:
            if operation.operation.name == "func.func":
                self._functions[operation.attributes["sym_name"].value] = operation

    def __call__(self, *arguments: Any) -> list[Any]:
        """The results of one device, for its arguments; inside of a shard_map over the axis."""
        return _Reader(self).run(self._functions["main"].regions[0].blocks[0], arguments)

    def call_at_line(self, operation: Any, rule: Callable[[], Any]) -> Any:
        """What a rule returns, called as from the lines of the source that an operation of the module came from."""
        location = str(operation.location)
        if location not in self._callers:
            self._callers[location] = make_caller(location)
        return self._callers[location](rule)

    def find_function(self, name: str) -> Any:
        """The block of a function, by its name."""
        return self._functions[name].regions[0].blocks[0]


# A frame as a location of MLIR shows it: "loss_fn"("/home/me/model.py":12:8).
_FRAME = re.compile(r'"([^"]*)"\("([^"]+)":(\d+)')


def make_caller(location: str) -> Callable[[Callable[[], Any]], Any]:
    """A function that calls another one from the lines of a location, so that jax notes these as its traceback.

    Worked example: for `"loss_fn"("model.py":12:8) at "<module>"("train.py":3:0)` it is a function `<module>` of line 3
    of train.py, which calls a function `loss_fn` of line 12 of model.py, which calls what it is passed.
    """
    caller: Callable[..., Any] = _call
    for name, path, line in _FRAME.findall(location):
        code = _call_next.__code__.replace(
            co_filename=path, co_firstlineno=max(int(line) - 1, 1), co_name=name, co_qualname=name
        )
        caller = FunctionType(code, {"inner": caller})
    return caller


def _call(rule: Callable[[], Any]) -> Any:
    return rule()


def _call_next(rule: Callable[[], Any]) -> Any:
    return inner(rule)  # type: ignore[name-defined]  # noqa: F821, the global of each copy


class _Reader:
    """Runs blocks of operations, with traced arrays as values.

    Attributes:
        values: the array of each value of the module.
    """

    def __init__(self, module: ImportedModule):
        self.module = module
        self.values: dict[Any, Any] = {}

    def run(self, block: Any, arguments: Sequence[Any]) -> list[Any]:
        """The results of a block for its arguments."""
        for value, x in zip(block.arguments, arguments, strict=True):
            self.values[value] = x
        for operation in block.operations:
            name = operation.operation.name
            operands = [self.values[value] for value in operation.operands]
            if name in _RETURNS:
                return operands
            rule = _RULES.get(name)
            if rule is None:
                raise UnreadableError(name)
            results = self.module.call_at_line(operation, partial(rule, self, operation, *operands))
            if not isinstance(results, list):
                results = [results]
            self.values.update(zip(operation.results, results, strict=True))
        raise AssertionError("a block ends with a return")

    def vary(self, x: Any) -> Any:
        """A constant, typed as one that may differ between devices, as all values of a module are.

        So what a loop hands on has the same type before and after each iteration, whatever the compiler found out.
        """
        return vary(jnp.asarray(x), self.module.axis)

    def make_function(self, block: Any) -> Callable[..., list[Any]]:
        """A block as a function of arrays."""

        def apply(*arguments: Any) -> list[Any]:
            return self.run(block, arguments)

        return apply

    def map_function(self, block: Any, rank: int) -> Callable[..., list[Any]]:
        """A block of scalars as a function of arrays with so many dims, of each element."""
        function = self.make_function(block)
        for _ in range(rank):
            function = jax.vmap(function)
        return function


_RETURNS = ("func.return", "stablehlo.return", "mhlo.return")


# Attributes


def _read_shape(operation: Any, result: int = 0) -> tuple[int, ...]:
    return tuple(operation.results[result].type.shape)


def _read_dtype(operation: Any, result: int = 0) -> Any:
    return _DTYPES[str(operation.results[result].type.element_type)]


def _read_numbers(operation: Any, name: str, default: Any = None) -> np.ndarray:
    """An attribute of integers, an array of them or a table."""
    if name not in operation.attributes:
        return np.asarray(default)
    return np.asarray(operation.attributes[name])


def _read_integers(operation: Any, name: str, default: Sequence[int] = ()) -> tuple[int, ...]:
    if name not in operation.attributes:
        return tuple(default)
    return tuple(int(n) for n in operation.attributes[name])


def _read_integer(operation: Any, name: str) -> int:
    return int(operation.attributes[name].value)


def _read_pairs(table: np.ndarray) -> list[tuple[int, int]]:
    return [(int(first), int(second)) for first, second in table]


def _find_body(operation: Any, region: int = 0) -> Any:
    return operation.regions[region].blocks[0]


# Arithmetic


def _apply_elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    """A rule that applies a function to the operands alone."""

    def apply(reader: _Reader, operation: Any, *operands: Any) -> Any:
        return function(*operands)

    return apply


def _make_constant(reader: _Reader, operation: Any) -> Any:
    value = operation.attributes["value"]
    shape = _read_shape(operation)
    dtype = _read_dtype(operation)
    if value.is_splat:
        number = value.get_splat_value().value
        x = np.full(shape, number, dtype)
    elif dtype == jnp.bfloat16:
        x = np.asarray(list(value), np.float32).astype(dtype).reshape(shape)
    else:
        x = np.asarray(value, dtype).reshape(shape)
    return reader.vary(x)


def _make_iota(reader: _Reader, operation: Any) -> Any:
    dim = _read_integer(operation, "iota_dimension")
    return reader.vary(lax.broadcasted_iota(_read_dtype(operation), _read_shape(operation), dim))


def _compare(reader: _Reader, operation: Any, x: Any, y: Any) -> Any:
    direction = compat.hlo_text(operation.attributes["comparison_direction"])
    first, second = [_find_total_order(value) for value in operation.operands]
    total = first is not None and second is not None
    if total:
        x = reader.values[first]
        y = reader.values[second]
    elif "compare_type" in operation.attributes:
        total = compat.hlo_text(operation.attributes["compare_type"]) == "TOTALORDER"
    if total and jnp.issubdtype(x.dtype, jnp.floating):
        # jax has "less" and "at most" of this order alone, so the operands of the other two change places.
        if direction in ("GT", "GE"):
            x, y = y, x
        if direction in ("LT", "GT"):
            return compat.less_in_total_order(x, y)
        if direction in ("LE", "GE"):
            return compat.at_most_in_total_order(x, y)
    return _COMPARISONS[direction](x, y)


_COMPARISONS = {"EQ": lax.eq, "NE": lax.ne, "LT": lax.lt, "LE": lax.le, "GT": lax.gt, "GE": lax.ge}


def _find_total_order(value: Any) -> Any:
    """The float that an integer orders as IEEE's total order does; None if it does not.

    A compiler for CPUs writes the order of floats by their bits: of the bits b of x it compares b where they are not
    negative, and b ^ 0x7fffffff where they are.
    """
    select = _find_definition(value, "stablehlo.select")
    if select is None:
        return None
    is_negative, flipped, plain = select.operands
    bits = _find_definition(plain, "mhlo.bitcast", "stablehlo.bitcast_convert")
    flip = _find_definition(flipped, "stablehlo.xor")
    test = _find_definition(is_negative, "stablehlo.compare")
    if bits is None or flip is None or test is None:
        return None
    masks = [_find_definition(other, "stablehlo.constant") for other in flip.operands if other != plain]
    zero = _find_definition(test.operands[1], "stablehlo.constant")
    same_bits = len(masks) == 1 and test.operands[0] == plain
    if not same_bits or masks[0] is None or zero is None:
        return None
    if compat.hlo_text(test.attributes["comparison_direction"]) != "LT" or _read_constant(zero) != 0:
        return None
    largest = np.iinfo(_DTYPES[str(plain.type.element_type)]).max
    is_float = jnp.issubdtype(_DTYPES[str(bits.operands[0].type.element_type)], jnp.floating)
    if not is_float or _read_constant(masks[0]) != largest:
        return None
    return bits.operands[0]


def _read_constant(operation: Any) -> Any:
    """The number that all elements of a constant are; None if they differ."""
    value = operation.attributes["value"]
    return value.get_splat_value().value if value.is_splat else None


def _find_definition(value: Any, *names: str) -> Any:
    """The operation of one of these names whose result a value is; None if it is another's."""
    owner = value.owner
    operation = getattr(owner, "operation", owner)
    if getattr(operation, "name", "") in names:
        return operation.opview
    return None


def _select(reader: _Reader, operation: Any, which: Any, yes: Any, no: Any) -> Any:
    if np.ndim(which) == 0 and np.ndim(yes):
        which = lax.broadcast(which, np.shape(yes))
    return lax.select_n(which, no, yes)


def _clamp(reader: _Reader, operation: Any, low: Any, x: Any, high: Any) -> Any:
    return lax.clamp(low, x, high)


def _convert(reader: _Reader, operation: Any, x: Any) -> Any:
    return lax.convert_element_type(x, _read_dtype(operation))


def _reinterpret(reader: _Reader, operation: Any, x: Any) -> Any:
    return lax.bitcast_convert_type(x, _read_dtype(operation))


def _keep(reader: _Reader, operation: Any, *operands: Any) -> Any:
    """Rounding to fewer bits is not modelled, and copies change nothing."""
    return list(operands)


# Shapes


def _bitcast(reader: _Reader, operation: Any, x: Any) -> Any:
    """The same bytes in memory, as another shape, layout or dtype."""
    # Layouts name dims from the one that changes fastest: {0, 1} of [2, 3] is stored as its transpose [3, 2].
    source = _read_integers(operation, "source_layout")[::-1]
    target = _read_integers(operation, "result_layout")[::-1]
    shape = _read_shape(operation)
    dtype = _read_dtype(operation)
    if np.dtype(x.dtype) != np.dtype(dtype):
        x = lax.bitcast_convert_type(x, dtype)
    if source != tuple(range(len(source))):
        x = lax.transpose(x, source)
    stored = tuple(shape[dim] for dim in target)
    if np.shape(x) != stored:
        x = lax.reshape(x, stored)
    if target != tuple(range(len(target))):
        x = lax.transpose(x, tuple(int(n) for n in np.argsort(target)))
    return x


def _broadcast(reader: _Reader, operation: Any, x: Any) -> Any:
    return lax.broadcast_in_dim(x, _read_shape(operation), _read_integers(operation, "broadcast_dimensions"))


def _reshape(reader: _Reader, operation: Any, x: Any) -> Any:
    return lax.reshape(x, _read_shape(operation))


def _transpose(reader: _Reader, operation: Any, x: Any) -> Any:
    return lax.transpose(x, _read_integers(operation, "permutation"))


def _reverse(reader: _Reader, operation: Any, x: Any) -> Any:
    return lax.rev(x, _read_integers(operation, "dimensions"))


def _slice(reader: _Reader, operation: Any, x: Any) -> Any:
    return lax.slice(
        x,
        _read_integers(operation, "start_indices"),
        _read_integers(operation, "limit_indices"),
        _read_integers(operation, "strides"),
    )


def _concatenate(reader: _Reader, operation: Any, *operands: Any) -> Any:
    return lax.concatenate(operands, _read_integer(operation, "dimension"))


def _pad(reader: _Reader, operation: Any, x: Any, filling: Any) -> Any:
    low = _read_integers(operation, "edge_padding_low")
    high = _read_integers(operation, "edge_padding_high")
    between = _read_integers(operation, "interior_padding")
    return lax.pad(x, filling, list(zip(low, high, between, strict=True)))


def _slice_dynamically(reader: _Reader, operation: Any, x: Any, *starts: Any) -> Any:
    # Starts of a module count from the front, and are clamped.
    sizes = _read_integers(operation, "slice_sizes")
    return compat.dynamic_slice(x, _as_signed(starts), sizes)


def _update_dynamically(reader: _Reader, operation: Any, x: Any, update: Any, *starts: Any) -> Any:
    return compat.dynamic_update_slice(x, update, _as_signed(starts))


def _as_signed(starts: Sequence[Any]) -> list[Any]:
    return [lax.convert_element_type(start, np.int32) for start in starts]


def _gather(reader: _Reader, operation: Any, x: Any, indices: Any) -> Any:
    attribute = compat.hlo_dimensions("Gather", operation.attributes["dimension_numbers"])
    indices = _put_vector_last(indices, attribute.index_vector_dim)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(attribute.offset_dims),
        collapsed_slice_dims=tuple(attribute.collapsed_slice_dims),
        start_index_map=tuple(attribute.start_index_map),
        operand_batching_dims=tuple(attribute.operand_batching_dims),
        start_indices_batching_dims=tuple(attribute.start_indices_batching_dims),
    )
    sizes = _read_integers(operation, "slice_sizes")
    # A module clamps places that do not exist; what jax fills is a select behind it.
    return lax.gather(x, indices, numbers, sizes, mode=lax.GatherScatterMode.CLIP)


def _put_vector_last(indices: Any, dim: int) -> Any:
    """Indices [..., n] of places, from those with the coordinates of a place along `dim`, or without such a dim."""
    if dim == np.ndim(indices):
        return lax.expand_dims(indices, (dim,))
    return jnp.moveaxis(indices, dim, -1)


def _scatter(reader: _Reader, operation: Any, *operands: Any) -> Any:
    count = len(operands) // 2
    if count != 1:
        raise UnreadableError("scatter of several arrays")
    x, indices, updates = operands
    attribute = compat.hlo_dimensions("Scatter", operation.attributes["scatter_dimension_numbers"])
    indices = _put_vector_last(indices, attribute.index_vector_dim)
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(attribute.update_window_dims),
        inserted_window_dims=tuple(attribute.inserted_window_dims),
        scatter_dims_to_operand_dims=tuple(attribute.scattered_dims_to_operand_dims),
        operand_batching_dims=tuple(attribute.input_batching_dims),
        scatter_indices_batching_dims=tuple(attribute.scatter_indices_batching_dims),
    )
    name = _name_combiner(_find_body(operation))
    if name not in _SCATTERS:
        raise UnreadableError("scatter by another function than a sum")
    mode = lax.GatherScatterMode.FILL_OR_DROP  # what is written where no place is is dropped
    return _SCATTERS[name](x, indices, updates, numbers, mode=mode)


_SCATTERS = {"": lax.scatter, "stablehlo.add": lax.scatter_add}


# Over dims


def _name_combiner(block: Any) -> str | None:
    """The operation by which a region combines its two arguments; "" if it takes the second; None if it does more."""
    *operations, last = list(block.operations)
    first, second = list(block.arguments)[:2]
    if not operations and last.operands[0] == second:
        return ""
    if len(operations) != 1:
        return None
    (operation,) = operations
    combines = {first, second} == set(operation.operands) and last.operands[0] == operation.results[0]
    return operation.operation.name if combines else None


def _reduce(reader: _Reader, operation: Any, *operands: Any) -> Any:
    count = len(operands) // 2
    arrays = operands[:count]
    starts = operands[count:]
    dims = _read_integers(operation, "dimensions")
    body = _find_body(operation)
    if count == 1:
        name = _name_combiner(body)
        if name in _REDUCTIONS:
            reduced, combine = _REDUCTIONS[name], _RULES[name]
            return combine(
                reader, operation, reduced(arrays[0], dims), lax.broadcast(starts[0], _read_shape(operation))
            )
    return _fold(reader, body, arrays, starts, dims)


def _fold(reader: _Reader, body: Any, arrays: Sequence[Any], starts: Sequence[Any], dims: Sequence[int]) -> list[Any]:
    """A reduction by any function, one element after the other, of all other places at once."""
    flat = []
    for x in arrays:
        # [..., n]: the reduced dims as one behind the others.
        kept = [dim for dim in range(np.ndim(x)) if dim not in dims]
        x = lax.transpose(x, [*kept, *dims])
        flat.append(lax.reshape(x, (*(x.shape[: len(kept)]), math.prod(x.shape[len(kept) :]))))
    combine = reader.map_function(body, flat[0].ndim - 1)
    results = [lax.broadcast(start, x.shape[:-1]) for start, x in zip(starts, flat, strict=True)]
    for place in range(flat[0].shape[-1]):
        elements = [lax.index_in_dim(x, place, x.ndim - 1, keepdims=False) for x in flat]
        results = combine(*results, *elements)
    return results


def _reduce_dims(primitive: Any) -> Callable[..., Any]:
    def reduce(x: Any, dims: Sequence[int]) -> Any:
        return primitive(x, axes=tuple(dims))

    return reduce


_REDUCTIONS = {
    "stablehlo.add": _reduce_dims(lax.reduce_sum),
    "stablehlo.multiply": _reduce_dims(lax.reduce_prod),
    "stablehlo.maximum": _reduce_dims(lax.reduce_max),
    "stablehlo.minimum": _reduce_dims(lax.reduce_min),
    "stablehlo.and": _reduce_dims(lax.reduce_and),
    "stablehlo.or": _reduce_dims(lax.reduce_or),
}


def _reduce_windows(reader: _Reader, operation: Any, *operands: Any) -> Any:
    if len(operands) != 2:
        raise UnreadableError("reduce_window of several arrays")
    x, start = operands
    name = _name_combiner(_find_body(operation))
    rank = np.ndim(x)
    window = _read_integers(operation, "window_dimensions")
    strides = _read_integers(operation, "window_strides", (1,) * rank)
    padding = _read_numbers(operation, "padding", np.zeros((rank, 2), int))
    base = _read_integers(operation, "base_dilations", (1,) * rank)
    dilation = _read_integers(operation, "window_dilations", (1,) * rank)
    if name not in _WINDOWS:
        raise UnreadableError("reduce_window by another function")
    reduced = lax.reduce_window(
        x,
        _WINDOWS[name](x.dtype),
        _COMBINERS[name],
        window,
        strides,
        _read_pairs(padding),
        base,
        dilation,
    )
    return _COMBINERS[name](reduced, lax.broadcast(start, np.shape(reduced)))


def _make_zero(dtype: Any) -> Any:
    return np.zeros((), dtype)


def _make_least(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return np.asarray(-np.inf, dtype)
    return np.asarray(jnp.iinfo(dtype).min, dtype)


def _make_largest(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return np.asarray(np.inf, dtype)
    return np.asarray(jnp.iinfo(dtype).max, dtype)


_WINDOWS = {"stablehlo.add": _make_zero, "stablehlo.maximum": _make_least, "stablehlo.minimum": _make_largest}
_COMBINERS = {"stablehlo.add": lax.add, "stablehlo.maximum": lax.max, "stablehlo.minimum": lax.min}


def _sort(reader: _Reader, operation: Any, *operands: Any) -> Any:
    """A sort by any comparison: the place of an element is the number of those that come before it.

    Worked example: [3, 1, 2] by `<`. Before 3 come two elements, before 1 none, before 2 one: places [2, 0, 1]. Of two
    elements of which neither comes before the other, the first stays first.
    """
    dim = _read_integer(operation, "dimension")
    size = np.shape(operands[0])[dim]
    comes_before = reader.map_function(_find_body(operation), np.ndim(operands[0]) + 1)
    arrays = [jnp.moveaxis(x, dim, -1) for x in operands]
    shape = (*arrays[0].shape, size)
    rank = len(shape)
    firsts = []
    seconds = []
    for x in arrays:
        # [..., i, j]: element i, and element j.
        firsts.append(lax.broadcast_in_dim(x, shape, tuple(range(rank - 1))))
        seconds.append(lax.broadcast_in_dim(x, shape, (*range(rank - 2), rank - 1)))
    pairs = []
    for first, second in zip(firsts, seconds, strict=True):
        pairs += [second, first]
    (is_before,) = comes_before(*pairs)  # whether j comes before i
    reversed_pairs = []
    for first, second in zip(firsts, seconds, strict=True):
        reversed_pairs += [first, second]
    (is_after,) = comes_before(*reversed_pairs)
    earlier = lax.broadcasted_iota(np.int32, shape, rank - 1) < lax.broadcasted_iota(np.int32, shape, rank - 2)
    counts = is_before | (~is_after & earlier)
    places = lax.reduce_sum(lax.convert_element_type(counts, np.int32), axes=(rank - 1,))
    # The element of place p is the one i whose place is p.
    at_place = lax.broadcasted_iota(np.int32, shape, rank - 2) == lax.broadcast_in_dim(
        places, shape, (*range(rank - 2), rank - 1)
    )
    order = lax.argmax(at_place, rank - 1, np.int32)
    results = []
    for x in arrays:
        results.append(jnp.moveaxis(jnp.take_along_axis(x, order, -1, mode="clip"), -1, dim))
    return results


# Products


def _dot(reader: _Reader, operation: Any, x: Any, y: Any) -> Any:
    dims = (((np.ndim(x) - 1,), (0,)), ((), ()))
    return lax.dot_general(x, y, dims, preferred_element_type=_read_dtype(operation))


def _dot_general(reader: _Reader, operation: Any, x: Any, y: Any) -> Any:
    attribute = compat.hlo_dimensions("Dot", operation.attributes["dot_dimension_numbers"])
    contracted = (tuple(attribute.lhs_contracting_dimensions), tuple(attribute.rhs_contracting_dimensions))
    shared = (tuple(attribute.lhs_batching_dimensions), tuple(attribute.rhs_batching_dimensions))
    return lax.dot_general(x, y, (contracted, shared), preferred_element_type=_read_dtype(operation))


def _convolve(reader: _Reader, operation: Any, x: Any, kernel: Any) -> Any:
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
    reverses = _read_numbers(operation, "window_reversal", np.zeros(rank, bool))
    flipped = [dim for dim, turned in zip(attribute.kernel_spatial_dimensions, reverses, strict=True) if turned]
    if flipped:
        kernel = lax.rev(kernel, flipped)
    padding = _read_numbers(operation, "padding", np.zeros((rank, 2), int))
    return lax.conv_general_dilated(
        x,
        kernel,
        _read_integers(operation, "window_strides", (1,) * rank),
        _read_pairs(padding),
        _read_integers(operation, "lhs_dilation", (1,) * rank),
        _read_integers(operation, "rhs_dilation", (1,) * rank),
        numbers,
        _read_integer(operation, "feature_group_count"),
        _read_integer(operation, "batch_group_count"),
        preferred_element_type=_read_dtype(operation),
    )


# Control flow


def _call_region(reader: _Reader, operation: Any, *operands: Any) -> Any:
    return reader.run(_find_body(operation), operands)


def _call_function(reader: _Reader, operation: Any, *operands: Any) -> Any:
    return reader.run(reader.module.find_function(operation.attributes["callee"].value), operands)


def _loop(reader: _Reader, operation: Any, *operands: Any) -> Any:
    test = reader.make_function(_find_body(operation, 0))
    body = reader.make_function(_find_body(operation, 1))

    def goes_on(carry: Any) -> Any:
        (result,) = test(*carry)
        return result

    def turn(carry: Any) -> Any:
        return body(*carry)

    return list(lax.while_loop(goes_on, turn, list(operands)))


def _choose_branch(reader: _Reader, operation: Any, which: Any, *operands: Any) -> Any:
    blocks = [region.blocks[0] for region in operation.regions]
    branches = [reader.make_function(block) for block in blocks]
    if which.dtype == np.bool_:  # a branch for true, then one for false
        branches = branches[::-1]
    return list(lax.switch(lax.convert_element_type(which, np.int32), branches))


# Collectives


def _find_members(reader: _Reader, operation: Any) -> tuple[Any, Any]:
    """The numbers of the devices in this device's group, in the order of the group, and its place among them."""
    axis = reader.module.axis
    devices = reader.module.devices
    groups = _read_groups(reader.module, operation)
    if groups.size == 0:
        groups = np.arange(devices)[None]
    members = np.zeros((devices, groups.shape[1]), np.int32)
    places = np.zeros(devices, np.int32)
    for group in groups:
        for place, device in enumerate(group):
            members[device] = group
            places[device] = place
    number = lax.axis_index(axis)
    return _take_row(reader, members, number), _take_row(reader, places, number)


_BY_REPLICA = ("stablehlo.all_reduce", "stablehlo.all_gather", "stablehlo.reduce_scatter")


def _read_groups(module: ImportedModule, operation: Any) -> np.ndarray:
    """The groups of a collective, [groups, members]; empty if all devices are one."""
    groups = operation.attributes["replica_groups"]
    # Without the flag these number replicas, and all devices of a program by jit are one replica.
    if operation.operation.name in _BY_REPLICA and "use_global_device_ids" not in operation.attributes:
        raise UnreadableError(f"{operation.operation.name} over replicas")
    if not compat.is_hlo_mesh_axes(groups):
        return np.asarray(groups)
    # Groups that are axes of a mesh lose the order of its devices on the way to StableHLO (seen with jaxlib 0.10.2), so
    # they are those of the instruction with the same channel in the module itself.
    return np.asarray(module.groups[compat.hlo_channel(operation.attributes["channel_handle"])])


def _take_row(reader: _Reader, table: np.ndarray, number: Any) -> Any:
    return lax.dynamic_index_in_dim(reader.vary(table), number, 0, keepdims=False)


def _gather_group(reader: _Reader, x: Any, members: Any) -> Any:
    """[members, ...]: x of each device of this device's group."""
    gathered = lax.all_gather(x, reader.module.axis)
    return jnp.take(gathered, members, 0, mode="clip")


def _sum_groups(reader: _Reader, operation: Any, *operands: Any) -> Any:
    members, _ = _find_members(reader, operation)
    return [_combine_group(reader, operation, x, members) for x in operands]


def _combine_group(reader: _Reader, operation: Any, x: Any, members: Any) -> Any:
    name = _name_combiner(_find_body(operation))
    if name not in _REDUCTIONS:
        raise UnreadableError(f"{operation.operation.name} by another function")
    return _REDUCTIONS[name](_gather_group(reader, x, members), (0,))


def _scatter_groups(reader: _Reader, operation: Any, *operands: Any) -> Any:
    members, place = _find_members(reader, operation)
    dim = _read_integer(operation, "scatter_dimension")
    results = []
    for number, x in enumerate(operands):
        total = _combine_group(reader, operation, x, members)
        size = _read_shape(operation, number)[dim]
        results.append(lax.dynamic_slice_in_dim(total, place * size, size, dim))
    return results


def _gather_groups(reader: _Reader, operation: Any, *operands: Any) -> Any:
    members, _ = _find_members(reader, operation)
    dim = _read_integer(operation, "all_gather_dim")
    results = []
    for number, x in enumerate(operands):
        pieces = jnp.moveaxis(_gather_group(reader, x, members), 0, dim)
        results.append(lax.reshape(pieces, _read_shape(operation, number)))
    return results


def _exchange(reader: _Reader, operation: Any, *operands: Any) -> Any:
    """all_to_all: of one array its pieces are exchanged along a dim, of a list of arrays the arrays."""
    members, place = _find_members(reader, operation)
    if "split_dimension" in operation.attributes:
        split = _read_integer(operation, "split_dimension")
        to = _read_integer(operation, "concat_dimension")
        count = _read_integer(operation, "split_count")
        (x,) = operands
        pieces = jnp.split(x, count, split)
        arrived = _exchange_pieces(reader, pieces, members, place)
        return lax.concatenate(arrived, to)
    return _exchange_pieces(reader, operands, members, place)


def _exchange_pieces(reader: _Reader, pieces: Sequence[Any], members: Any, place: Any) -> list[Any]:
    # [sender, receiver, ...]: of each sender the piece for this device.
    gathered = _gather_group(reader, jnp.stack(pieces), members)
    mine = lax.dynamic_index_in_dim(gathered, place, 1, keepdims=False)
    return [lax.index_in_dim(mine, sender, 0, keepdims=False) for sender in range(len(pieces))]


def _permute(reader: _Reader, operation: Any, *operands: Any) -> Any:
    pairs = _read_pairs(_read_numbers(operation, "source_target_pairs"))
    return [lax.ppermute(x, reader.module.axis, pairs) for x in operands]


def _number_device(reader: _Reader, operation: Any) -> Any:
    return lax.convert_element_type(lax.axis_index(reader.module.axis), np.uint32)


def _make_zero_id(reader: _Reader, operation: Any) -> Any:
    return reader.vary(np.zeros((), np.uint32))


# Libraries


def _call_library(reader: _Reader, operation: Any, *operands: Any) -> Any:
    target = operation.attributes["call_target_name"].value
    function = _LIBRARY.get(target)
    if function is None:
        raise UnreadableError(f"custom_call to {target}")
    return [function(reader, operation, *operands)]


def _take_top(reader: _Reader, operation: Any, x: Any) -> Any:
    count = operation.results[0].type.get_type(0).shape[-1]
    return tuple(lax.top_k(x, count))


_LIBRARY: dict[str, Callable[..., Any]] = {
    "TopK": _take_top,
}


def _make_tuple(reader: _Reader, operation: Any, *operands: Any) -> Any:
    return [tuple(operands)]


def _take_element(reader: _Reader, operation: Any, x: Any) -> Any:
    return x[_read_integer(operation, "index")]


_RULES: dict[str, Callable[..., Any]] = {
    # arithmetic
    "stablehlo.constant": _make_constant,
    "stablehlo.iota": _make_iota,
    "stablehlo.add": _apply_elementwise(lax.add),
    "stablehlo.subtract": _apply_elementwise(lax.sub),
    "stablehlo.multiply": _apply_elementwise(lax.mul),
    "stablehlo.divide": _apply_elementwise(lax.div),
    "stablehlo.remainder": _apply_elementwise(lax.rem),
    "stablehlo.power": _apply_elementwise(lax.pow),
    "stablehlo.maximum": _apply_elementwise(lax.max),
    "stablehlo.minimum": _apply_elementwise(lax.min),
    "stablehlo.negate": _apply_elementwise(lax.neg),
    "stablehlo.abs": _apply_elementwise(lax.abs),
    "stablehlo.sign": _apply_elementwise(lax.sign),
    "stablehlo.floor": _apply_elementwise(lax.floor),
    "stablehlo.ceil": _apply_elementwise(lax.ceil),
    "stablehlo.sqrt": _apply_elementwise(lax.sqrt),
    "stablehlo.rsqrt": _apply_elementwise(lax.rsqrt),
    "stablehlo.cbrt": _apply_elementwise(lax.cbrt),
    "stablehlo.exponential": _apply_elementwise(lax.exp),
    "stablehlo.exponential_minus_one": _apply_elementwise(lax.expm1),
    "stablehlo.log": _apply_elementwise(lax.log),
    "stablehlo.log_plus_one": _apply_elementwise(lax.log1p),
    "stablehlo.logistic": _apply_elementwise(lax.logistic),
    "stablehlo.tanh": _apply_elementwise(lax.tanh),
    "stablehlo.sine": _apply_elementwise(lax.sin),
    "stablehlo.cosine": _apply_elementwise(lax.cos),
    "stablehlo.tan": _apply_elementwise(lax.tan),
    "stablehlo.atan2": _apply_elementwise(lax.atan2),
    "mhlo.erf": _apply_elementwise(lax.erf),
    "stablehlo.round_nearest_afz": _apply_elementwise(
        partial(lax.round, rounding_method=lax.RoundingMethod.AWAY_FROM_ZERO)
    ),
    "stablehlo.round_nearest_even": _apply_elementwise(
        partial(lax.round, rounding_method=lax.RoundingMethod.TO_NEAREST_EVEN)
    ),
    "stablehlo.is_finite": _apply_elementwise(lax.is_finite),
    "stablehlo.and": _apply_elementwise(lax.bitwise_and),
    "stablehlo.or": _apply_elementwise(lax.bitwise_or),
    "stablehlo.xor": _apply_elementwise(lax.bitwise_xor),
    "stablehlo.not": _apply_elementwise(lax.bitwise_not),
    "stablehlo.popcnt": _apply_elementwise(lax.population_count),
    "stablehlo.count_leading_zeros": _apply_elementwise(lax.clz),
    "stablehlo.shift_left": _apply_elementwise(lax.shift_left),
    "stablehlo.shift_right_logical": _apply_elementwise(lax.shift_right_logical),
    "stablehlo.shift_right_arithmetic": _apply_elementwise(lax.shift_right_arithmetic),
    "stablehlo.compare": _compare,
    "stablehlo.select": _select,
    "stablehlo.clamp": _clamp,
    "stablehlo.convert": _convert,
    "stablehlo.bitcast_convert": _reinterpret,
    "stablehlo.reduce_precision": _keep,
    "mhlo.copy": _keep,
    "stablehlo.optimization_barrier": _keep,
    # shapes
    "mhlo.bitcast": _bitcast,
    "stablehlo.broadcast_in_dim": _broadcast,
    "stablehlo.reshape": _reshape,
    "stablehlo.transpose": _transpose,
    "stablehlo.reverse": _reverse,
    "stablehlo.slice": _slice,
    "stablehlo.concatenate": _concatenate,
    "stablehlo.pad": _pad,
    "stablehlo.dynamic_slice": _slice_dynamically,
    "stablehlo.dynamic_update_slice": _update_dynamically,
    "stablehlo.gather": _gather,
    "stablehlo.scatter": _scatter,
    # over dims
    "stablehlo.reduce": _reduce,
    "stablehlo.reduce_window": _reduce_windows,
    "stablehlo.sort": _sort,
    # products
    "stablehlo.dot": _dot,
    "stablehlo.dot_general": _dot_general,
    "stablehlo.convolution": _convolve,
    # control flow
    "mhlo.fusion": _call_region,
    "func.call": _call_function,
    "stablehlo.while": _loop,
    "stablehlo.case": _choose_branch,
    "stablehlo.if": _choose_branch,
    "stablehlo.tuple": _make_tuple,
    "stablehlo.get_tuple_element": _take_element,
    # devices
    "stablehlo.partition_id": _number_device,
    "stablehlo.replica_id": _make_zero_id,
    "stablehlo.all_reduce": _sum_groups,
    "stablehlo.all_gather": _gather_groups,
    "stablehlo.reduce_scatter": _scatter_groups,
    "stablehlo.collective_permute": _permute,
    "stablehlo.all_to_all": _exchange,
    "mhlo.all_to_all": _exchange,
    # libraries
    "stablehlo.custom_call": _call_library,
}
