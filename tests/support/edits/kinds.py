"""What a compiler may do wrong, as edits of a module: for each kind the places where it can be done.

A kind is a function of the operations of a module that yields sites: an operation, and what edits it. The line at which
a proof should see an edit is that of the operation.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from shardkit._jax import compat
from support.edits import modules
from support.edits.modules import find_definition, hlo, ir, is_float, is_square, make, make_constant, replace, shape_of


class Site(NamedTuple):
    """A place for an edit.

    Attributes:
        operation: which is wrong then.
        apply: edits the module.
    """

    operation: Any
    apply: Callable[[], None]


Kind = Callable[[Sequence[Any]], Iterator[Site]]


def _replace_uses(value: Any, other: Any) -> None:
    value.replace_all_uses_with(other)


# Collectives


def _read_groups(operation: Any) -> np.ndarray:
    """The groups of a collective, [groups, members]."""
    return np.asarray(operation.attributes["replica_groups"])


def _write_groups(operation: Any, groups: Any) -> None:
    modules.write_table(operation, "replica_groups", groups)


def drop_sums(operations: Sequence[Any]) -> Iterator[Site]:
    """An all-reduce is lost: its operand goes on."""
    for operation in operations:
        if operation.name == "stablehlo.all_reduce":
            for result, operand in zip(operation.results, operation.operands, strict=True):
                yield Site(operation, partial(_replace_uses, result, operand))


def drop_sums_beside_scatters(operations: Sequence[Any]) -> Iterator[Site]:
    """An all-reduce of what a reduce-scatter gave is lost, as in xla#40034."""
    for site in drop_sums(operations):
        maker = find_definition(site.operation.operands[0])
        if maker is not None and maker.name == "stablehlo.reduce_scatter":
            yield site


def exchange_members(operations: Sequence[Any]) -> Iterator[Site]:
    """Two groups have exchanged a device."""
    for operation in operations:
        if "replica_groups" in operation.attributes:
            groups = _read_groups(operation).copy()
            if len(groups) > 1 and groups.shape[1] > 1:
                groups[0, -1], groups[1, -1] = groups[1, -1], groups[0, -1]
                yield Site(operation, partial(_write_groups, operation, groups))


def regroup(operations: Sequence[Any]) -> Iterator[Site]:
    """The groups are those of another axis, all devices, or halves of what they should be."""
    for operation in operations:
        if operation.name != "stablehlo.all_reduce":
            continue
        groups = _read_groups(operation)
        if len(groups) > 1:
            yield Site(operation, partial(_write_groups, operation, groups.reshape(1, -1)))
        if len(groups) > 1 and groups.shape[0] == groups.shape[1]:
            yield Site(operation, partial(_write_groups, operation, groups.T))
        if len(groups) and groups.shape[1] > 2:
            yield Site(operation, partial(_write_groups, operation, groups.reshape(2 * len(groups), -1)))


def reorder_members(operations: Sequence[Any]) -> Iterator[Site]:
    """The devices of each group are in another order."""
    for operation in operations:
        if operation.name in ("stablehlo.all_gather", "stablehlo.reduce_scatter", "stablehlo.all_to_all"):
            groups = _read_groups(operation)
            if groups.size:
                yield Site(operation, partial(_write_groups, operation, groups[:, ::-1]))


def _exchange_slice_and_sum(total: Any, cut: Any) -> None:
    """x -> all_reduce -> slice becomes x -> slice -> all_reduce."""
    attributes = {"slice_sizes": cut.attributes["slice_sizes"]}
    operands = [total.operands[0], *list(cut.operands)[1:]]
    piece = make(cut, "stablehlo.dynamic_slice", operands, cut.results[0].type, **attributes)
    _replace_uses(cut.results[0], _make_sum(cut, piece, total))


def _make_sum(before: Any, x: Any, like: Any) -> Any:
    """An all-reduce with the groups of another collective."""
    attributes = {}
    for name in ("replica_groups", "channel_handle", "use_global_device_ids"):
        attributes[name] = like.attributes[name]
    operation = ir.Operation.create(
        "stablehlo.all_reduce",
        results=[x.type],
        operands=[x],
        attributes=attributes,
        regions=1,
        loc=like.location,
        ip=ir.InsertionPoint(before),
    )
    scalar = ir.RankedTensorType.get([], ir.RankedTensorType(x.type).element_type)
    block = ir.Block.create_at_start(operation.regions[0], [scalar, scalar], [like.location] * 2)
    with ir.InsertionPoint(block), like.location:
        total = hlo.AddOp(block.arguments[0], block.arguments[1])
        hlo.ReturnOp([total.result])
    return operation.results[0]


def slice_before_sums(operations: Sequence[Any]) -> Iterator[Site]:
    """A slice that differs between devices is taken before the sum over them."""
    for operation in operations:
        if operation.name == "stablehlo.dynamic_slice":
            maker = find_definition(operation.operands[0])
            if maker is not None and maker.name == "stablehlo.all_reduce":
                yield Site(operation, partial(_exchange_slice_and_sum, maker, operation))
        if operation.name == "stablehlo.reduce_scatter":
            yield Site(operation, partial(_sum_first_pieces, operation))


def _sum_first_pieces(operation: Any) -> None:
    """A reduce-scatter becomes the sum of what each device would keep: here of the first piece."""
    result = operation.results[0]
    shape = shape_of(result)
    piece = make(
        operation,
        "stablehlo.slice",
        [operation.operands[0]],
        result.type,
        start_indices=ir.DenseI64ArrayAttr.get([0] * len(shape)),
        limit_indices=ir.DenseI64ArrayAttr.get(list(shape)),
        strides=ir.DenseI64ArrayAttr.get([1] * len(shape)),
    )
    _replace_uses(result, _make_sum(operation, piece, operation))


def _write_pairs(operation: Any, pairs: np.ndarray) -> None:
    modules.write_table(operation, "source_target_pairs", pairs)


def mistake_pairs(operations: Sequence[Any]) -> Iterator[Site]:
    """A permute sends two pieces to each other's device, one to nobody, or all backwards."""
    for operation in operations:
        if operation.name != "stablehlo.collective_permute":
            continue
        pairs = np.asarray(operation.attributes["source_target_pairs"])
        exchanged = pairs.copy()
        exchanged[[0, 1], 1] = exchanged[[1, 0], 1]
        for wrong in (exchanged, pairs[:-1], pairs[:, ::-1]):
            if not np.array_equal(wrong, pairs):
                yield Site(operation, partial(_write_pairs, operation, wrong))


def _find_combiner(operation: Any) -> Any:
    """The operation in the region of a reduction, if it is one alone."""
    *inner, _ = list(operation.regions[0].blocks[0].operations)
    return inner[0].operation if len(inner) == 1 else None


_COMBINED = {
    "stablehlo.add": "stablehlo.maximum",
    "stablehlo.maximum": "stablehlo.add",
    "stablehlo.and": "stablehlo.or",
}


def mistake_reductions(operations: Sequence[Any]) -> Iterator[Site]:
    """A reduction, over dims or devices, takes the maximum for the sum, or the other way around."""
    for operation in operations:
        if operation.name in ("stablehlo.all_reduce", "stablehlo.reduce_scatter", "stablehlo.reduce"):
            combiner = _find_combiner(operation)
            if combiner is not None and combiner.name in _COMBINED:
                yield Site(operation, partial(replace, combiner, _COMBINED[combiner.name]))


# Devices


def _mistake_device(operation: Any, operand: int, device: int, other: int) -> None:
    """One device reads another one's number."""
    number = operation.operands[operand]
    kind = number.type
    mask = ir.RankedTensorType.get([], ir.IntegerType.get_signless(1))
    one = make_constant(operation, device, kind)
    direction = hlo.ComparisonDirectionAttr.get("EQ")
    is_one = make(operation, "stablehlo.compare", [number, one], mask, comparison_direction=direction)
    wrong = make_constant(operation, other, kind)
    operation.operands[operand] = make(operation, "stablehlo.select", [is_one, wrong, number], kind)


def mistake_devices(operations: Sequence[Any]) -> Iterator[Site]:
    """What reads the number of a device reads another one's on one device."""
    for operation in operations:
        for number, operand in enumerate(operation.operands):
            maker = find_definition(operand)
            if maker is not None and maker.name == "stablehlo.partition_id":
                for device, other in ((1, 0), (2, 1), (3, 0)):
                    yield Site(operation, partial(_mistake_device, operation, number, device, other))


def _write_value(operation: Any, array: np.ndarray) -> None:
    kind = operation.results[0].type
    element = ir.RankedTensorType(kind).element_type
    if str(element) == "i1":
        array = np.packbits(array, bitorder="little")
    operation.attributes["value"] = ir.DenseElementsAttr.get(np.ascontiguousarray(array), type=kind)


def mistake_tables(operations: Sequence[Any]) -> Iterator[Site]:
    """A table of places has the place of another device in one row."""
    for operation in operations:
        if operation.name != "stablehlo.constant" or len(shape_of(operation.results[0])) != 1:
            continue
        value = operation.attributes["value"]
        if not isinstance(value, ir.DenseIntElementsAttr) or value.is_splat:
            continue
        table = np.asarray(value).copy()
        differing = np.flatnonzero(table != table[0])
        table[0] = table[differing[0]]
        yield Site(operation, partial(_write_value, operation, table))


# Loops and buffers


def mistake_trip_counts(operations: Sequence[Any]) -> Iterator[Site]:
    """A loop ends a turn early, or a turn late."""
    for operation in operations:
        if operation.name != "stablehlo.while":
            continue
        for inner in _list_inner(operation.regions[0].blocks[0]):
            if inner.name == "stablehlo.constant" and isinstance(inner.attributes["value"], ir.DenseIntElementsAttr):
                count = np.asarray(inner.attributes["value"])
                for wrong in (count - 1, count + 1):
                    yield Site(operation, partial(_write_value, inner, wrong.astype(count.dtype)))


def _list_inner(block: Any) -> Iterator[Any]:
    for view in block.operations:
        yield view.operation
        for region in view.operation.regions:
            for inner in region:
                yield from _list_inner(inner)


def _set_operand(operation: Any, number: int, value: Any) -> None:
    operation.operands[number] = value


def keep_carries(operations: Sequence[Any]) -> Iterator[Site]:
    """A loop hands on what it got in place of what it computed."""
    for operation in operations:
        if operation.name != "stablehlo.while":
            continue
        block = operation.regions[1].blocks[0]
        *_, last = list(block.operations)
        for number, (argument, value) in enumerate(zip(block.arguments, last.operands, strict=True)):
            if value != argument and is_float(value):
                yield Site(operation, partial(_set_operand, last.operation, number, argument))


def drop_updates(operations: Sequence[Any]) -> Iterator[Site]:
    """What is written into a buffer is lost."""
    for operation in operations:
        if operation.name == "stablehlo.dynamic_update_slice" and is_float(operation.results[0]):
            yield Site(operation, partial(_replace_uses, operation.results[0], operation.operands[0]))


def _shift_start(operation: Any, number: int) -> None:
    start = operation.operands[number]
    one = make_constant(operation, 1, start.type)
    operation.operands[number] = make(operation, "stablehlo.add", [start, one], start.type)


def shift_updates(operations: Sequence[Any]) -> Iterator[Site]:
    """A buffer is written one place further."""
    for operation in operations:
        if operation.name == "stablehlo.dynamic_update_slice":
            sizes = shape_of(operation.operands[1])
            yield from _shift_starts(operation, 2, shape_of(operation.operands[0]), sizes)


def shift_dynamic_slices(operations: Sequence[Any]) -> Iterator[Site]:
    """A slice begins one place further."""
    for operation in operations:
        if operation.name == "stablehlo.dynamic_slice" and is_float(operation.results[0]):
            yield from _shift_starts(operation, 1, shape_of(operation.operands[0]), shape_of(operation.results[0]))


def _shift_starts(operation: Any, first: int, shape: Sequence[int], sizes: Sequence[int]) -> Iterator[Site]:
    for dim, (whole, size) in enumerate(zip(shape, sizes, strict=True)):
        if whole > size:
            yield Site(operation, partial(_shift_start, operation, first + dim))


_COPIES = ("mhlo.copy", "mhlo.bitcast", "stablehlo.all_reduce", "stablehlo.reshape", "stablehlo.convert")


def read_stale_buffers(operations: Sequence[Any]) -> Iterator[Site]:
    """An operation reads a buffer before what it holds was computed in place."""
    for operation in operations:
        if operation.name.endswith("return"):
            continue
        for number, operand in enumerate(operation.operands):
            maker = find_definition(operand)
            if maker is None or maker.name in _COPIES or not is_float(operand):
                continue
            for before in maker.operands:
                if before.type == operand.type:
                    yield Site(operation, partial(_set_operand, operation, number, before))
                    break


# Arithmetic


_OTHER = {
    "stablehlo.add": "stablehlo.subtract",
    "stablehlo.subtract": "stablehlo.add",
    "stablehlo.multiply": "stablehlo.divide",
    "stablehlo.divide": "stablehlo.multiply",
    "stablehlo.maximum": "stablehlo.minimum",
    "stablehlo.sine": "stablehlo.cosine",
    "stablehlo.cosine": "stablehlo.sine",
    "stablehlo.tanh": "stablehlo.sine",
    "stablehlo.exponential": "stablehlo.exponential_minus_one",
}


def _is_in_reduction(operation: Any) -> bool:
    parent = operation.parent
    parent = getattr(parent, "operation", parent)
    return parent.name in ("stablehlo.all_reduce", "stablehlo.reduce_scatter", "stablehlo.reduce")


def mistake_operators(operations: Sequence[Any]) -> Iterator[Site]:
    """An operation is taken for a related one."""
    for operation in operations:
        if operation.name in _OTHER and is_float(operation.results[0]) and not _is_in_reduction(operation):
            yield Site(operation, partial(replace, operation, _OTHER[operation.name]))


def _exchange_operands(operation: Any, first: int, second: int) -> None:
    x, y = operation.operands[first], operation.operands[second]
    operation.operands[first] = y
    operation.operands[second] = x


def exchange_operands(operations: Sequence[Any]) -> Iterator[Site]:
    """A difference or a quotient is taken the other way around."""
    for operation in operations:
        if operation.name in ("stablehlo.subtract", "stablehlo.divide") and is_float(operation.results[0]):
            yield Site(operation, partial(_exchange_operands, operation, 0, 1))


def exchange_branches(operations: Sequence[Any]) -> Iterator[Site]:
    """A select takes what is for true where it is false."""
    for operation in operations:
        if operation.name == "stablehlo.select":
            yield Site(operation, partial(_exchange_operands, operation, 1, 2))


_UNARY = ("tanh", "sine", "cosine", "exponential", "negate", "rsqrt", "sqrt", "log", "abs")


def drop_functions(operations: Sequence[Any]) -> Iterator[Site]:
    """A function of each element is lost."""
    for operation in operations:
        if operation.name in [f"stablehlo.{name}" for name in _UNARY] and is_float(operation.results[0]):
            yield Site(operation, partial(_replace_uses, operation.results[0], operation.operands[0]))


def mistake_constants(operations: Sequence[Any]) -> Iterator[Site]:
    """A constant is twice what it should be, or one in place of zero."""
    for operation in operations:
        if operation.name != "stablehlo.constant" or not is_float(operation.results[0]):
            continue
        value = operation.attributes["value"]
        number = value.get_splat_value().value if value.is_splat else np.nan
        if np.isfinite(number):
            array = np.full(shape_of(operation.results[0]), 2 * number or 1, np.float32)
            yield Site(operation, partial(_write_value, operation, array))


_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "EQ": "NE", "NE": "EQ"}
_NEGATED = {"LT": "GE", "GT": "LE", "LE": "GT", "GE": "LT", "EQ": "NE", "NE": "EQ"}
_WIDENED = {"LT": "LE", "LE": "LT", "GT": "GE", "GE": "GT"}


def _write_direction(operation: Any, direction: str) -> None:
    operation.attributes["comparison_direction"] = hlo.ComparisonDirectionAttr.get(direction)


def mistake_comparisons(operations: Sequence[Any]) -> Iterator[Site]:
    """A comparison asks for the opposite, or takes equal numbers for the other case."""
    for operation in operations:
        if operation.name != "stablehlo.compare":
            continue
        direction = compat.hlo_text(operation.attributes["comparison_direction"])
        for table in (_MIRRORED, _NEGATED, _WIDENED):
            if direction in table:
                yield Site(operation, partial(_write_direction, operation, table[direction]))


# Dims


def _write_dims(operation: Any, name: str, dims: Sequence[int]) -> None:
    modules.write_integers(operation, name, dims)


def mistake_reduced_dims(operations: Sequence[Any]) -> Iterator[Site]:
    """A reduction is over another dim of the same size."""
    for operation in operations:
        if operation.name != "stablehlo.reduce":
            continue
        dims = modules.read_integers(operation, "dimensions")
        shape = shape_of(operation.operands[0])
        for other in range(len(shape)):
            kept = [size for dim, size in enumerate(shape) if dim != other]
            if len(dims) == 1 and other != dims[0] and kept == list(shape_of(operation.results[0])):
                yield Site(operation, partial(_write_dims, operation, "dimensions", [other]))


def mistake_broadcast_dims(operations: Sequence[Any]) -> Iterator[Site]:
    """A vector is repeated along the other dim."""
    for operation in operations:
        if operation.name != "stablehlo.broadcast_in_dim":
            continue
        dims = modules.read_integers(operation, "broadcast_dimensions")
        shape = shape_of(operation.results[0])
        for other in range(len(shape)):
            if len(dims) == 1 and other != dims[0] and shape[other] == shape[dims[0]] > 1:
                yield Site(operation, partial(_write_dims, operation, "broadcast_dimensions", [other]))


def _transpose_operand(operation: Any, number: int) -> None:
    x = operation.operands[number]
    permutation = ir.DenseI64ArrayAttr.get([1, 0])
    operation.operands[number] = make(operation, "stablehlo.transpose", [x], x.type, permutation=permutation)


def transpose_dots(operations: Sequence[Any]) -> Iterator[Site]:
    """A matmul reads a matrix as its transpose."""
    for operation in operations:
        if operation.name in ("stablehlo.dot", "stablehlo.dot_general"):
            for number, operand in enumerate(operation.operands):
                if is_square(operand):
                    yield Site(operation, partial(_transpose_operand, operation, number))


def drop_transposes(operations: Sequence[Any]) -> Iterator[Site]:
    """A transpose of a square matrix is lost, or one in another layout is read as if it were not."""
    for operation in operations:
        if operation.name not in ("stablehlo.transpose", "mhlo.bitcast") or not is_square(operation.results[0]):
            continue
        if operation.operands[0].type == operation.results[0].type:
            yield Site(operation, partial(_replace_uses, operation.results[0], operation.operands[0]))


def _shift_slice(operation: Any, dim: int, by: int) -> None:
    for name in ("start_indices", "limit_indices"):
        places = modules.read_integers(operation, name)
        places[dim] += by
        modules.write_integers(operation, name, places)


def shift_slices(operations: Sequence[Any]) -> Iterator[Site]:
    """A slice begins one place off."""
    for operation in operations:
        if operation.name == "stablehlo.slice":
            starts = modules.read_integers(operation, "start_indices")
            limits = modules.read_integers(operation, "limit_indices")
            for dim, size in enumerate(shape_of(operation.operands[0])):
                if starts[dim] > 0:
                    yield Site(operation, partial(_shift_slice, operation, dim, -1))
                elif limits[dim] < size:
                    yield Site(operation, partial(_shift_slice, operation, dim, 1))


def _round_result(operation: Any) -> None:
    """Rounds a result to bfloat16 and back."""
    result = operation.results[0]
    block = list(operation.block.operations)
    number = [view.operation for view in block].index(operation)
    after = block[number + 1].operation
    short = ir.RankedTensorType.get(list(shape_of(result)), ir.BF16Type.get())
    rounded = make(after, "stablehlo.convert", [result], short)
    widened = make(after, "stablehlo.convert", [rounded], result.type)
    result.replace_all_uses_except(widened, [find_definition(rounded)])


def round_products(operations: Sequence[Any]) -> Iterator[Site]:
    """A matmul rounds its result to bfloat16: no difference of real numbers."""
    for operation in operations:
        if operation.name in ("stablehlo.dot", "stablehlo.dot_general"):
            yield Site(operation, partial(_round_result, operation))


KINDS: dict[str, Kind] = {
    "a sum dropped": drop_sums,
    "a sum dropped beside a reduce-scatter": drop_sums_beside_scatters,
    "groups of wrong devices": exchange_members,
    "groups of another axis": regroup,
    "the order of a group": reorder_members,
    "a slice before its sum": slice_before_sums,
    "a wrong pair of a permute": mistake_pairs,
    "max for add": mistake_reductions,
    "one device's offset": mistake_devices,
    "one row of a table of offsets": mistake_tables,
    "a wrong trip count": mistake_trip_counts,
    "a carry not updated": keep_carries,
    "an update dropped": drop_updates,
    "an update at the wrong index": shift_updates,
    "a slice at the wrong index": shift_dynamic_slices,
    "a stale buffer": read_stale_buffers,
    "another operation": mistake_operators,
    "operands exchanged": exchange_operands,
    "branches exchanged": exchange_branches,
    "a function dropped": drop_functions,
    "a wrong constant": mistake_constants,
    "a wrong comparison": mistake_comparisons,
    "a reduction over another dim": mistake_reduced_dims,
    "a broadcast along another dim": mistake_broadcast_dims,
    "a transposed dot": transpose_dots,
    "a transpose dropped": drop_transposes,
    "a static slice one off": shift_slices,
}
ROUNDED = "rounded to bfloat16"
