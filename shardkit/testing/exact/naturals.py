"""Which integers of a loop or a branch are not negative, whatever the inputs are.

A loop that a float ends has run so many rounds in this draw, and runs others for other inputs; a branch that a float
chooses may be another one. So what they return is marked as following floats, and that it is not negative here says
nothing of other inputs. It is read from the program: of every branch, and of a loop from one round to the next.

Worked example: a loop with the carry (count = 0, left = 9) and the body (count + 1, left - 1).

    count       not negative, because 0 is not, and what is not negative stays so when 1 is added
    left        may be negative: the difference of two such integers may be
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardkit._jax.interpreter import FactInterpreter, while_operands
from shardkit._jax.primitives import registered
from shardkit.testing.exact.rules.operands import is_key

# Primitives that give integers which are not negative, of such integers.
_KEEPS_NATURAL = {
    "abs",
    "add",
    "argmax",
    "argmin",
    "axis_index",
    "broadcast_in_dim",
    "clamp",
    "concatenate",
    "convert_element_type",
    "cummax",
    "cummin",
    "cumsum",
    "div",
    "dynamic_slice",
    "gather",
    "iota",
    "lu_pivots_to_permutation",
    "max",
    "min",
    "mul",
    "reduce_max",
    "reduce_min",
    "reduce_sum",
    "rem",
    "reshape",
    "rev",
    "select_n",
    "slice",
    "sort",
    "squeeze",
    "stack",
    "transpose",
}


def keeps_natural(name: str) -> bool:
    """Whether a primitive makes of integers that are not negative others that are not, as a sum of counts is none."""
    return name in _KEEPS_NATURAL or registered(name).kind is not None


class NaturalFacts(FactInterpreter[bool]):
    """Follows through a program which integers are not negative for any input."""

    def constant(self, x: Any) -> bool:
        if x is None or is_key(x) or np.asarray(x).dtype.kind not in "iub":
            return False
        return bool((np.asarray(x) >= 0).all())

    def literal(self, atom: Any) -> bool:
        return self.constant(np.asarray(atom.val))

    def join(self, facts: Sequence[bool], variable: Any) -> bool:
        return all(facts)

    def cond(self, equation: Any, branches: list[Any], operands: list[bool]) -> Sequence[bool]:
        """A result is not negative if it is not in any branch."""
        return self.join_branches(equation, branches, operands[1:])

    def while_loop(self, equation: Any, test: Any, body: Any, operands: list[bool]) -> Sequence[bool]:
        """A carry is not negative if it is not at first, and no round makes it so."""
        _, consts, carry = while_operands(equation, operands)
        return self.find_carry(equation, carry, lambda facts: self.run(body, [*consts, *facts]))

    def equation(self, equation: Any, operands: list[bool]) -> Sequence[bool]:
        are_natural = keeps_natural(equation.primitive.name) and all(operands)
        facts = []
        for variable in equation.outvars:
            dtype = variable.aval.dtype
            is_mask = jnp.issubdtype(dtype, np.bool_)
            facts.append(is_mask or (are_natural and not may_wrap(dtype)))
        return facts


def may_wrap(dtype: Any) -> bool:
    """Whether integers are so narrow that a count may be negative in them: of int8, 128 is -128."""
    return bool(jnp.issubdtype(dtype, jnp.signedinteger)) and dtype.itemsize < 4
