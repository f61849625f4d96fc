"""Which repairs are tried for an equation: first those of collectives, then those of one device's arithmetic.

Worked example: the repairs of `psum(x, "a")`, some of them in the order in which they are listed.

    repair_collective    without psum; the maximum over 'a' in place of psum
    repair_mask          psum of what is zero where a mask is false
    repair_factor        psum times 2, the size of 'a'; minus psum
    repair_operand       another operand of psum

`search.py` sorts the repairs of all equations by their costs. The order here decides among equally likely ones.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardkit.testing._compare import is_float
from shardkit.testing.exact.exchange_repairs import (
    repair_broadcast,
    repair_collective,
    repair_mask,
    repair_rows,
    repair_sum,
)
from shardkit.testing.exact.index_repairs import repair_device_index, repair_integer
from shardkit.testing.exact.local_repairs import (
    repair_factor,
    repair_filling,
    repair_function,
    repair_operator,
    repair_place,
    repair_size,
)
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


def propose_repairs(bench: Bench) -> Iterator[Repair]:
    """The repairs of an equation, each of which may be tried.

    Args:
        bench: the tools for the equation.

    Yields:
        Repairs. They depend on the program and on the equation's first run alone, and so are the same ones, in the same
        order, for other numbers.
    """
    if not _is_repairable(bench.call):
        return
    yield from _propose_exchanges(bench)
    # The shard_map itself is no arithmetic: what stands for it here cuts an argument, or joins a result.
    if bench.name == "shard_map":
        return
    yield from repair_place(bench)
    yield from repair_size(bench)
    yield from repair_operator(bench)
    yield from repair_parentheses(bench)
    yield from repair_operand(bench)
    yield from repair_unread_operand(bench)
    yield from repair_joined_mask(bench)
    yield from repair_round(bench)
    if not is_float(bench.aval):
        return
    follows_inputs = isinstance(bench.result, Exact)
    if follows_inputs:
        yield from repair_function(bench)
    # In the first round of a loop a product may be a constant, to which a factor is missing as in all others.
    if follows_inputs or bench.operands:
        yield from repair_unread(bench)
        yield from repair_term(bench)


def _propose_exchanges(bench: Bench) -> Iterator[Repair]:
    """The repairs that have to do with the devices: of collectives, of sums behind an equation, of indices."""
    primitive = bench.call.primitive
    result = bench.result
    yield from repair_collective(bench)
    yield from repair_order(bench)
    yield from repair_mask(bench)
    if primitive == "broadcast_in_dim":
        yield from repair_broadcast(bench)
        yield from repair_filling(bench)
    if bench.name == "axis_index":
        yield from repair_device_index(bench)
    elif is_integer(result) and result.dtype.kind == "i":
        yield from repair_integer(bench)
    if not is_mask(result):
        yield from repair_sum(bench)
        yield from repair_rows(bench)
        if primitive not in _PASSING:
            yield from repair_factor(bench)


def _is_repairable(call: Call) -> bool:
    """Whether an equation gives one array, and reads arrays alone."""
    if len(call.results) != 1:
        return False
    return all(_is_array(x) for x in (*call.operands, *call.results))


def _is_array(x: Operand) -> bool:
    """Whether a value is a number of the field, or a known array of floats, integers or booleans; a key is neither."""
    return isinstance(x, Exact) or x.dtype.kind in "fiub"
