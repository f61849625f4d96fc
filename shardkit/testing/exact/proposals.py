"""Which repairs are tried for an equation: first those of collectives, then those of one device's arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from shardkit.testing._compare import is_float
from shardkit.testing.exact.exchange_repairs import (
    repair_broadcast,
    repair_collective,
    repair_device_index,
    repair_integer,
    repair_mask,
    repair_rows,
    repair_sum,
)
from shardkit.testing.exact.local_repairs import (
    repair_factor,
    repair_filling,
    repair_function,
    repair_operator,
    repair_place,
    repair_size,
)
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.operand_repairs import (
    repair_joined_mask,
    repair_operand,
    repair_round,
    repair_term,
    repair_unread,
    repair_unread_operand,
)
from shardkit.testing.exact.order_repairs import repair_order, repair_parentheses
from shardkit.testing.exact.repairs import Bench, Call, Repair, is_integer, is_mask
from shardkit.testing.exact.rules.operands import Operand

# Equations that only pass elements on. A factor that is missing behind one of them is missing behind the equation that
# made the elements, too, and is tried there.
_PASSING = ("convert_element_type", "reshape", "squeeze", "transpose", "expand_dims")


def propose_repairs(
    field: Field,
    call: Call,
    readable: Sequence[Any],
    sizes: Sequence[int],
    unread: Set[Any],
    definitions: Mapping[Any, Any],
    rounds: Mapping[Any, Sequence[Any]],
) -> Iterator[Repair]:
    """The repairs of an equation, each of which may be tried.

    Args:
        field: the arithmetic.
        call: the equation, with its operands and results.
        readable: the variables that the equation could read.
        sizes: the sizes of dims in the program.
        unread: the variables that no equation reads, and that one should perhaps read.
        definitions: the equation of each variable.
        rounds: for each variable the variables of all rounds of its unrolled loop.

    Yields:
        Repairs. They depend on the program alone, and so are the same ones, in the same order, for other numbers.
    """
    if len(call.results) != 1 or not all(_is_array(x) for x in (*call.operands, *call.results)):
        return
    bench = Bench(field, call, sizes)
    yield from _propose_exchanges(bench, readable, definitions)
    # The shard_map itself is no arithmetic: what stands for it here cuts an argument, or joins a result.
    if call.name == "shard_map":
        return
    yield from repair_place(bench)
    yield from repair_size(bench)
    yield from repair_operator(bench)
    yield from repair_parentheses(bench, definitions)
    yield from repair_operand(bench, readable, unread)
    yield from repair_unread_operand(bench, readable, unread)
    yield from repair_joined_mask(bench, readable)
    yield from repair_round(bench, readable, rounds)
    if not is_float(call.equation.outvars[0].aval):
        return
    if isinstance(bench.result, Exact):
        yield from repair_function(bench)
    # In the first round of a loop a product may be a constant, to which a factor is missing as in all others.
    if isinstance(bench.result, Exact) or call.operands:
        yield from repair_unread(bench, readable, unread)
        yield from repair_term(bench, readable)


def _propose_exchanges(bench: Bench, readable: Sequence[Any], definitions: Mapping[Any, Any]) -> Iterator[Repair]:
    """The repairs that have to do with the devices: of collectives, of sums behind an equation, of indices."""
    call = bench.call
    result = bench.result
    yield from repair_collective(bench)
    yield from repair_order(bench, definitions)
    yield from repair_mask(bench, readable)
    if call.primitive == "broadcast_in_dim":
        yield from repair_broadcast(bench)
        yield from repair_filling(bench)
    if call.name == "axis_index":
        yield from repair_device_index(bench)
    elif is_integer(result) and result.dtype.kind == "i":
        yield from repair_integer(bench)
    if not is_mask(result):
        yield from repair_sum(bench)
        yield from repair_rows(bench)
        if call.primitive not in _PASSING:
            yield from repair_factor(bench)


def _is_array(x: Operand) -> bool:
    """Whether a value is a number of the field, or a known array of floats, integers or booleans; a key is neither."""
    return isinstance(x, Exact) or x.dtype.kind in "fiub"
