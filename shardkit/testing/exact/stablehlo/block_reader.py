"""Runs the operations of a block in their order, each by its rule; the arrays are traced.

Worked example, the block `^(%x): %y = add %x, %x; %z = negate %y; return %z` of an array x of jax: `values` is {%x: x}
at first. The rule of `add` takes (reader, operation, x, x) and binds the primitive `add`; its result is the value of
%y. So a jaxpr of the function of x has one equation for each operation, but for fusions and calls, whose blocks are run
in their place, and for loops and branches, whose blocks become functions for jax to trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardkit.collectives.basic import vary
from shardkit.testing.exact.stablehlo.attributes import UnreadableError
from shardkit.testing.exact.stablehlo.module import ImportedModule


class Arriving(NamedTuple):
    """What a collective that was started writes, and nothing may read before its end; also the state of its engines.

    Attributes:
        start: the operation that started it.
        sent: the array that it sends.
        result: the array that has arrived at its end.
        collective: which collective it is, over which devices, as text.
        parts: how many values its start returned.
    """

    start: Any
    sent: Any
    result: Any
    collective: str
    parts: int


class BlockReader:
    """Runs blocks of operations, with traced arrays as values.

    Attributes:
        module: the module of the blocks.
        rules: for each operation its rule, by the name of the operation.
        values: the array of each value of the module; None for a part of a result that nothing may read, and
            `Arriving` for one that is read by the end of a collective alone.
        promised: results of gathers of which the compiler promises that all indices are in bounds.
    """

    def __init__(self, module: ImportedModule, rules: Mapping[str, Callable[..., Any]]):
        self.module = module
        self.rules = rules
        self.values: dict[Any, Any] = {}
        self.promised: set[Any] = set()

    def run(self, block: Any, arguments: Sequence[Any]) -> list[Any]:
        """The results of a block for its arguments."""
        for value, x in zip(block.arguments, arguments, strict=True):
            self.values[value] = x
        for operation in block.operations:
            name = operation.operation.name
            operands = [self.values[value] for value in operation.operands]
            if name in _RETURNS:
                return operands
            if name not in self.rules:
                raise UnreadableError(name)
            if name not in _PASS_ON and any(map(is_unreadable, operands)):
                raise UnreadableError(f"{name} of a library's workspace")
            # From the lines of the operation, so that the equations which the rule binds have these as their source.
            rule = partial(self.rules[name], self, operation, *operands)
            results = self.module.call_at_line(operation, rule)
            if not isinstance(results, list):
                results = [results]
            self.values.update(zip(operation.results, results, strict=True))
        raise AssertionError("a block ends with a return")

    def vary(self, x: Any) -> Any:
        """A constant, typed as one that may differ between devices, as all values of a module are.

        Otherwise a loop that begins with a constant 0, and adds a value of the device to it in each round, would carry
        another type after a round than before it, and jax would refuse it.
        """
        return vary(jnp.asarray(x), self.module.axes)

    def make_function(self, block: Any) -> Callable[..., list[Any]]:
        """A block as a function of arrays."""

        def apply(*arguments: Any) -> list[Any]:
            return self.run(block, arguments)

        return apply

    def map_function(self, block: Any, rank: int) -> Callable[..., list[Any]]:
        """A block of scalars as a function of arrays with so many dims, of each element.

        Worked example: the block `^(%a, %b): return add %a, %b` with rank 2 adds two arrays [4, 3]. The inner vmap runs
        it for each element of a row, the outer one for each row.
        """
        function = self.make_function(block)
        for _ in range(rank):
            function = jax.vmap(function)
        return function


def is_unreadable(x: Any) -> bool:
    """Whether a value is none that an operation of arrays may read."""
    return x is None or isinstance(x, Arriving)


# Operations that hand on what they are passed; calls of libraries say themselves what they read.
_PASS_ON = ("mhlo.fusion", "func.call", "stablehlo.tuple", "stablehlo.custom_call")
_RETURNS = ("func.return", "stablehlo.return", "mhlo.return")
