"""Which values and equations of a traced program its results depend on.

A walk from the results back to the arguments, through calls, branches, loops and shard_maps. What prints, calls the
host or writes to a reference counts as a result.

Worked example: a scan whose body returns `(x * 2, y + shift(x))` for its carry `(x, y)`, and a program that returns the
first carry alone. The second carry is read by the body, and by nothing else: `y` and the shift are not read.

    results         [True, False]
    body            x * 2 is read, so x is; y + shift(x) is not
    carry before    [True, False], as after: the loop is done

Why not `dependence.without_unused`, and the equations that it leaves: what jax's own removal of dead code may remove is
less than what nobody reads. In jax 0.10 and 0.11 it has no rule for a while loop, so that a body with any result in use
stays whole. In no version does it remove an argument of a function with its own derivative, which that derivative might
read: in `f(x, shift(y))`, whose `f` is a `jax.custom_vjp` that ignores its second argument, the shift stays. A message
that stays would pass as read. `test_liveness.py` compares the two on every primitive that holds a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from shardkit._jax import compat
from shardkit._jax.interpreter import find_called_program, scan_operands
from shardkit._jax.jaxprs import walk
from shardkit._jax.primitives import registered


class Liveness:
    """What the results of a program depend on: `reads` of an equation, `uses` of a value."""

    def __init__(self, jaxpr: Any) -> None:
        self._equations: set[int] = set()  # by id
        self._values: set[Any] = set()
        # Of the argument of a called function what is passed for it, and of the result of a cast its operand.
        self._origins: dict[Any, Any] = {}
        self._run(jaxpr, [True] * len(jaxpr.outvars))

    def reads(self, equation: Any) -> bool:
        """Whether any result of the program depends on an equation, in any call of the function that it is in."""
        return id(equation) in self._equations

    def uses(self, atom: Any) -> bool:
        """Whether any result of the program depends on a value, under this name or before it was cast or passed on."""
        while not isinstance(atom, Literal):
            if atom in self._values:
                return True
            if atom not in self._origins:
                return False
            atom = self._origins[atom]
        return False

    def _run(self, program: Any, are_read: Sequence[bool]) -> list[bool]:
        """Which arguments of a program are read, if these of its results are."""
        jaxpr = getattr(program, "jaxpr", program)
        values: set[Any] = set()  # that are read, of the equations so far
        _add(values, jaxpr.outvars, are_read)
        for equation in reversed(jaxpr.eqns):
            if registered(equation.primitive.name).same:
                self._origins.update(zip(equation.outvars, equation.invars, strict=True))
            results = [variable in values for variable in equation.outvars]
            operands = self._step(equation, results)
            _add(values, equation.invars, operands)
        self._values |= values
        return [variable in values for variable in jaxpr.invars]

    def _step(self, equation: Any, results: list[bool]) -> list[bool]:
        """Which operands of an equation are read, if these of its results are."""
        name = equation.primitive.name
        called = find_called_program(equation)
        if name == "shard_map":
            called = equation.params["jaxpr"]
        if called is not None:
            self._note_origins(called, equation.invars)
        if not any(results) and not compat.acts(equation):
            return [False] * len(equation.invars)
        self._equations.add(id(equation))
        if called is not None:
            return self._run(called, results)
        if name == "cond":
            return self._step_cond(equation, results)
        if name == "scan":
            return self._step_scan(equation, results)
        if name == "while":
            return self._step_while(equation, results)
        # Of what else holds programs, as a linear solve, all is read.
        for _, jaxpr in compat.inner_jaxprs(equation):
            for site in walk(jaxpr):
                self._equations.add(id(site.equation))
        return [True] * len(equation.invars)

    def _note_origins(self, program: Any, operands: Sequence[Any]) -> None:
        jaxpr = getattr(program, "jaxpr", program)
        self._origins.update(zip(jaxpr.invars, operands, strict=True))

    def _step_cond(self, equation: Any, results: list[bool]) -> list[bool]:
        """A value is read if a branch reads it. What chooses the branch is read with any result."""
        arguments = [False] * (len(equation.invars) - 1)
        for branch in compat.inner_programs(equation):
            self._note_origins(branch, equation.invars[1:])
            arguments = _either(arguments, self._run(branch, results))
        return [True, *arguments]

    def _step_scan(self, equation: Any, results: list[bool]) -> list[bool]:
        """A carry is read if the result is, or if the body needs it for a carry that is read."""
        _, carry_count = compat.scan_parts(equation)
        carry = results[:carry_count]
        stacked = results[carry_count:]
        while True:
            operands = self._run(equation.params["jaxpr"], [*carry, *stacked])
            consts, carry_of_body, rows = scan_operands(equation, operands)
            widened = _either(carry, carry_of_body)
            if widened == carry:
                return [*consts, *carry, *rows]
            carry = widened

    def _step_while(self, equation: Any, results: list[bool]) -> list[bool]:
        """As of a scan. The condition reads its part of the carry with any result."""
        test_const_count = equation.params["cond_nconsts"]
        body_const_count = equation.params["body_nconsts"]
        operands_of_test = self._run(equation.params["cond_jaxpr"], [True])
        test_consts = operands_of_test[:test_const_count]
        carry = _either(results, operands_of_test[test_const_count:])
        while True:
            operands = self._run(equation.params["body_jaxpr"], carry)
            body_consts = operands[:body_const_count]
            widened = _either(carry, operands[body_const_count:])
            if widened == carry:
                return [*test_consts, *body_consts, *carry]
            carry = widened


def _add(values: set[Any], atoms: Sequence[Any], are_read: Sequence[bool]) -> None:
    """Adds the variables that are read to a set of values."""
    for atom, is_read in zip(atoms, are_read, strict=True):
        if is_read and not isinstance(atom, Literal):
            values.add(atom)


def _either(first: Sequence[bool], second: Sequence[bool]) -> list[bool]:
    """What is read by one of two."""
    return [a or b for a, b in zip(first, second, strict=True)]
