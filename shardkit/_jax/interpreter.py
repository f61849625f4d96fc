"""Interpreters of jaxprs: one walk through calls, branches, loops and shard_maps, whatever the values are.

A `JaxprInterpreter` runs the equations of a program in their order, with values of one domain: numbers on simulated
devices, numbers of a finite field, names of random keys, facts about what varies. A domain says what its values of
constants and literals are and what an equation makes of its operands. Of the equations that hold programs of their own
it says what it does otherwise: calls are entered, and all others are equations like any other.

`FactInterpreter` is for facts that hold on every run, of which nothing is computed: of a cond it runs all branches and
joins what holds of their results, and the carry of a scan is what holds in every iteration.

Worked example: which results depend on a marked argument, by booleans. Of `def f(w, x): y = sin(x); return w, y * w`
with `x` marked the values are

    w           False
    x           True
    sin         [True]   -> y True
    mul         [True, False] -> True
    results     [False, True]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from jax.extend.core import ClosedJaxpr, Literal

from shardkit._jax import compat

T = TypeVar("T")


class JaxprInterpreter(ABC, Generic[T]):
    """Runs jaxprs, equation by equation; a domain says what its values are."""

    # What a domain says

    @abstractmethod
    def constant(self, x: Any) -> T:
        """The value of an array that a program closes over; `x` is None where the program does not hold it."""

    @abstractmethod
    def literal(self, atom: Any) -> T:
        """The value of a literal."""

    @abstractmethod
    def equation(self, equation: Any, operands: list[T]) -> Sequence[T]:
        """The results of an equation, of those that hold programs too unless a method below is overridden."""

    # What a domain may say

    def call(self, equation: Any, body: Any, operands: list[T]) -> Sequence[T]:
        """The results of a function that is called with the operands, one to one: jit, checkpoint, custom rules."""
        return self.run(body, operands)

    def cond(self, equation: Any, branches: list[Any], operands: list[T]) -> Sequence[T]:
        """The results of a cond or switch; the first operand says which branch runs, all others are passed to it."""
        return self.equation(equation, operands)

    def scan(self, equation: Any, body: Any, operands: list[T]) -> Sequence[T]:
        """The results of a scan; `scan_operands` says what its operands are."""
        return self.equation(equation, operands)

    def while_loop(self, equation: Any, test: Any, body: Any, operands: list[T]) -> Sequence[T]:
        """The results of a while loop; `while_operands` says what its operands are."""
        return self.equation(equation, operands)

    def shard_map(self, equation: Any, body: Any, operands: list[T]) -> Sequence[T]:
        """The results of a shard_map."""
        return self.equation(equation, operands)

    def finish(self, jaxpr: Any, values: Mapping[Any, T]) -> None:
        """Called when all equations of a jaxpr have run, with the values of its variables."""

    # The walk

    def run(self, program: Any, operands: Sequence[T]) -> list[T]:
        """The results of a jaxpr, closed or not, for the values of its arguments."""
        jaxpr = getattr(program, "jaxpr", program)
        consts = getattr(program, "consts", None) or [None] * len(jaxpr.constvars)
        values: dict[Any, T] = {}
        for variable, x in zip(jaxpr.constvars, consts, strict=True):
            values[variable] = self.constant(x)
        values.update(zip(jaxpr.invars, operands, strict=True))
        for equation in jaxpr.eqns:
            inputs = [self.read(atom, values) for atom in equation.invars]
            results = self.step(equation, inputs)
            values.update(zip(equation.outvars, results, strict=True))
        self.finish(jaxpr, values)
        return [self.read(atom, values) for atom in jaxpr.outvars]

    def read(self, atom: Any, values: Mapping[Any, T]) -> T:
        """The value of a variable or a literal."""
        if isinstance(atom, Literal):
            return self.literal(atom)
        return values[atom]

    def step(self, equation: Any, operands: list[T]) -> Sequence[T]:
        """The results of an equation, by the method for its kind."""
        name = equation.primitive.name
        if name in compat.CALLS:
            body = find_called_program(equation)
            if body is not None:
                return self.call(equation, body, operands)
        elif name == "cond":
            return self.cond(equation, compat.inner_programs(equation), operands)
        elif name == "scan":
            return self.scan(equation, equation.params["jaxpr"], operands)
        elif name == "while":
            return self.while_loop(equation, equation.params["cond_jaxpr"], equation.params["body_jaxpr"], operands)
        elif name == "shard_map":
            return self.shard_map(equation, equation.params["jaxpr"], operands)
        return self.equation(equation, operands)


class FactInterpreter(JaxprInterpreter[T]):
    """Follows facts that hold on every run, whichever branch is taken and however often a loop runs."""

    @abstractmethod
    def join(self, facts: Sequence[T], variable: Any) -> T:
        """What holds of a variable that has one of some values."""

    def row(self, fact: T) -> T:
        """What holds of the piece of an array that one iteration of a scan gets, from what holds of the array."""
        return fact

    def stack(self, fact: T) -> T:
        """What holds of the array of what all iterations of a scan give."""
        return fact

    def cond(self, equation: Any, branches: list[Any], operands: list[T]) -> Sequence[T]:
        """A result is one of those of the branches, and follows from what chooses between them."""
        index, *arguments = operands
        results = self.join_branches(equation, branches, arguments)
        return [self.join([index, fact], v) for fact, v in zip(results, equation.outvars, strict=True)]

    def scan(self, equation: Any, body: Any, operands: list[T]) -> Sequence[T]:
        """A carry is what holds in every iteration."""
        consts, carry, arrays = scan_operands(equation, operands)
        rows = [self.row(fact) for fact in arrays]
        results: list[T] = []

        def run_body(carry: list[T]) -> list[T]:
            nonlocal results  # the last run is that of the carry that is found
            results = self.run(body, [*consts, *carry, *rows])
            return results

        carry = self.find_carry(equation, carry, run_body)
        return [*carry, *map(self.stack, results[len(carry) :])]

    def join_branches(self, equation: Any, branches: list[Any], arguments: list[T]) -> list[T]:
        """What holds of the results whichever branch runs."""
        results = [self.run(branch, arguments) for branch in branches]
        return [self.join(facts, v) for *facts, v in zip(*results, equation.outvars, strict=True)]

    def find_carry(self, equation: Any, carry: list[T], run_body: Callable[[list[T]], list[T]]) -> list[T]:
        """What holds of a loop's carry in every iteration."""

        # Worked example: a body that returns (b, c, c) for its carry (a, b, c), of which c alone is marked. After one
        # iteration b is marked too, after two all three are, and a third changes nothing.
        def turn(carry: list[T]) -> list[T]:
            after = run_body(carry)[: len(carry)]
            variables = equation.outvars[: len(carry)]
            return [self.join(facts, v) for *facts, v in zip(carry, after, variables, strict=True)]

        return find_fixed_point(carry, turn)


def find_fixed_point(carry: list[T], turn: Callable[[list[T]], list[T]]) -> list[T]:
    """What holds of a loop's carry in every iteration: `turn` adds what one iteration does, until nothing changes."""
    while True:
        after = turn(carry)
        if after == carry:
            return carry
        carry = after


def find_called_program(equation: Any) -> Any:
    """The program that an equation calls with its operands, one to one; None where it is no plain call."""
    if equation.primitive.name not in compat.CALLS:
        return None
    programs = compat.inner_programs(equation)
    if len(programs) != 1:
        return None
    (program,) = programs
    jaxpr = getattr(program, "jaxpr", program)
    if len(jaxpr.invars) != len(equation.invars):
        return None
    return program


def scan_operands(equation: Any, operands: list[T]) -> tuple[list[T], list[T], list[T]]:
    """A scan's operands: the constants of the loop, its carry, and what it goes over."""
    consts, carry = compat.scan_parts(equation)
    return operands[:consts], operands[consts : consts + carry], operands[consts + carry :]


def while_operands(equation: Any, operands: list[T]) -> tuple[list[T], list[T], list[T]]:
    """A while loop's operands: the constants of its condition, those of its body, and its carry."""
    n = equation.params["cond_nconsts"]
    m = n + equation.params["body_nconsts"]
    return operands[:n], operands[n:m], operands[m:]


def solve_operands(equation: Any, operands: list[T]) -> list[T]:
    """What the `solve` function of a linear solve is passed: what it reads, and the right sides."""
    lengths = equation.params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    consts = operands[first : first + lengths.solve]
    right_sides = operands[sum(lengths) :]
    return consts + right_sides


class _Inliner(JaxprInterpreter[Any]):
    """Evaluates a program, with the functions that it calls inlined."""

    def constant(self, x: Any) -> Any:
        return x

    def literal(self, atom: Any) -> Any:
        return atom.val

    def call(self, equation: Any, body: Any, operands: list[Any]) -> Sequence[Any]:
        with compat.trace_as_equation(equation):
            return self.run(body, operands)

    def equation(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        return compat.bind(equation, operands)


def inline_jaxpr(jaxpr: Any, constants: Sequence[Any], *args: Any) -> list[Any]:
    """The results of a jaxpr, evaluated equation by equation, with the functions that it calls inlined."""
    return _Inliner().run(ClosedJaxpr(jaxpr, list(constants)), args)
