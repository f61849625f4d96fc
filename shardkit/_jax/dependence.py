"""What of a traced program depends on which of its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal
from jax.interpreters import partial_eval

from shardkit._jax.interpreter import FactInterpreter


class Dependence(FactInterpreter[bool]):
    """Follows whether a value depends on a marked argument; `values` says it of each variable of the program."""

    values: Mapping[Any, bool] = MappingProxyType({})

    def constant(self, x: Any) -> bool:
        """Closed-over arrays depend on no argument."""
        return False

    def literal(self, atom: Any) -> bool:
        """Nor do literals."""
        return False

    def join(self, facts: Sequence[bool], variable: Any) -> bool:
        """What may be a dependent value is one."""
        return any(facts)

    def step(self, equation: Any, operands: list[bool]) -> Sequence[bool]:
        """The results of an equation without marked operands are not looked at."""
        if not any(operands):
            return [False] * len(equation.outvars)
        return super().step(equation, operands)

    def equation(self, equation: Any, operands: list[bool]) -> Sequence[bool]:
        """All results follow from all operands."""
        return [True] * len(equation.outvars)

    def shard_map(self, equation: Any, body: Any, operands: list[bool]) -> Sequence[bool]:
        """As a call."""
        return self.run(body, operands)

    def finish(self, jaxpr: Any, values: Mapping[Any, bool]) -> None:
        """Keeps the values; the outermost program finishes last."""
        self.values = values


def without_unused(closed: Any, used: Sequence[bool] | None = None) -> ClosedJaxpr:
    """A program of all its results, or of the used ones, without the equations that none of them needs."""
    if used is None:
        used = [True] * len(closed.jaxpr.outvars)
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, list(used), instantiate=True)
    return ClosedJaxpr(jaxpr, closed.consts)


def find_independent(jaxpr: Any, given: int, last: int) -> tuple[Any, list[bool]]:
    """What of a jaxpr follows from its first `given` arguments alone, inside its loops and calls too.

    Returns:
        A jaxpr of those arguments, whose results are those of the `last` results that follow from them; and for each of
        the `last` results whether it does not.
    """
    argument_count = len(jaxpr.invars)
    first_result = len(jaxpr.outvars) - last
    other_arguments = [number >= given for number in range(argument_count)]
    given_arguments = [not marked for marked in other_arguments]
    dependence = Dependence()
    depends = dependence.run(jaxpr, other_arguments)[first_result:]
    # An equation with an effect is never dead code: those that other arguments reach are taken out first.
    reached = {variable for variable, marked in dependence.values.items() if marked}
    equations = []
    for equation in jaxpr.eqns:
        if not all(_marks(equation.outvars, reached)) or not any(_marks(equation.invars, reached)):
            equations.append(equation)
    independent_results = [False] * first_result + [not marked for marked in depends]
    independent, _ = partial_eval.dce_jaxpr(
        jaxpr.replace(eqns=equations), independent_results, instantiate=given_arguments
    )
    return independent, depends


def _marks(atoms: Sequence[Any], variables: set[Any]) -> list[bool]:
    """Which of the operands of an equation are among some variables."""
    return [not isinstance(atom, Literal) and atom in variables for atom in atoms]
