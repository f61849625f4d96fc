"""Fusions, calls, loops, branches and tuples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit.testing.exact.stablehlo.attributes import find_body, read_integer
from shardkit.testing.exact.stablehlo.block_reader import BlockReader


def _call_region(reader: BlockReader, operation: Any, *operands: Any) -> Any:
    """A fusion, which runs the operations of its region one after the other."""
    return reader.run(find_body(operation), operands)


def _call_function(reader: BlockReader, operation: Any, *operands: Any) -> Any:
    name = operation.attributes["callee"].value
    return reader.run(reader.module.find_function(name), operands)


def _loop(reader: BlockReader, operation: Any, *operands: Any) -> Any:
    """A while loop, whose operands are the first values of its carry; its regions are a test and a body.

    Worked example: `while(%i = 0, %x = 1) test { return %i < 3 } body { return %i + 1, %x + %x }` has the carries
    (0, 1), (1, 2), (2, 4), (3, 8), and the results 3 and 8.
    """
    test = reader.make_function(find_body(operation, 0))
    body = reader.make_function(find_body(operation, 1))

    def goes_on(carry: Any) -> Any:
        (result,) = test(*carry)
        return result

    def turn(carry: Any) -> Any:
        return body(*carry)

    # The carry is a list, as the body returns it: jax compares the structures of both.
    return list(lax.while_loop(goes_on, turn, list(operands)))


def _choose_branch(reader: BlockReader, operation: Any, which: Any, *operands: Any) -> Any:
    """A case or an if, whose regions are its branches.

    Worked example: a case of three branches runs branch 1 for the number 1, and branch 2 for 2, 7 and -1.
    """
    branches = []
    for region in operation.regions:
        branches.append(reader.make_function(region.blocks[0]))
    if which.dtype == np.bool_:
        # The region for true stands before that for false. jax counts them: false is 0, true is 1.
        branches.reverse()
        number = lax.convert_element_type(which, np.int32)
    else:
        # Of a number without a branch a module runs the last one. jax runs the first one for numbers below zero.
        last = len(branches) - 1
        number = jnp.where(which < 0, last, which)
    return list(lax.switch(number, branches))


def _make_tuple(reader: BlockReader, operation: Any, *operands: Any) -> Any:
    return [tuple(operands)]  # one result; a bare list would be several


def _take_element(reader: BlockReader, operation: Any, x: Any) -> Any:
    return x[read_integer(operation, "index")]


CONTROL_RULES: dict[str, Callable[..., Any]] = {
    "mhlo.fusion": _call_region,
    "func.call": _call_function,
    "stablehlo.while": _loop,
    "stablehlo.case": _choose_branch,
    "stablehlo.if": _choose_branch,
    "stablehlo.tuple": _make_tuple,
    "stablehlo.get_tuple_element": _take_element,
}
