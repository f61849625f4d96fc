"""Calls kernels of Pallas that were written without varying types, as those that jax ships, inside `jax.shard_map`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import CostEstimate

from shardkit._jax import compat
from shardkit._jax.interpreter import JaxprInterpreter

# Whether kernels are interpreted, operation by operation, on any platform. jax keeps traces by this context too.
_INTERPRETED: Any = jax.make_user_context(False)


@contextmanager
def interpreting() -> Iterator[None]:
    """Kernels inside run on any platform, slowly: for tests."""
    with _INTERPRETED(True):
        yield


def is_interpreting() -> bool:
    """Whether kernels are interpreted here."""
    return bool(_INTERPRETED.value)


def call_kernel(function: Callable[..., Any], costs: Sequence[CostEstimate], *operands: jax.Array) -> Any:
    """The results of a function with Pallas kernels, which vary over the axes over which any operand does.

    Pallas asks each kernel over which axes its results vary, and kernels that do not say so are refused with
    `check_vma`. So the function is traced without the check, and the types are added to the program.

    Args:
        function: traces one Pallas kernel or several, and ordinary operations.
        costs: what each kernel computes and moves, in their order. Compilers schedule by it, and reports count it.
        operands: its arguments.
    """
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    # Kernels that jax ships rely on its own rules of promotion, whatever a user has set.
    with compat.untracked(), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        program, results = jax.make_jaxpr(function, return_shape=True)(*shapes)
    axes: frozenset[str] = frozenset()
    for x in operands:
        axes |= compat.varying_axes(x)
    leaves = _TypedProgram(axes, iter(costs)).run(program, operands)
    return jax.tree.unflatten(jax.tree.structure(results), leaves)


class _TypedProgram(JaxprInterpreter[Any]):
    """Runs a program in which every value varies over the same axes."""

    def __init__(self, axes: frozenset[str], costs: Iterator[CostEstimate]):
        self.axes = axes
        self.costs = costs

    def constant(self, x: Any) -> jax.Array:
        return self._vary(x)

    def literal(self, atom: Any) -> jax.Array:
        return self._vary(jnp.asarray(atom.val, atom.aval.dtype))

    def equation(self, equation: Any, operands: list[Any]) -> Sequence[jax.Array]:
        if equation.primitive.name == "pallas_call":
            avals = tuple(compat.with_varying(aval, self.axes) for aval in equation.params["out_avals"])
            changed = {"out_avals": avals, "cost_estimate": next(self.costs)}
            if is_interpreting():
                changed["interpret"] = True
            equation = equation.replace(params={**equation.params, **changed})
        return [self._vary(x) for x in compat.bind(equation, operands)]

    def _vary(self, x: Any) -> jax.Array:
        x = jnp.asarray(x)
        missing = tuple(sorted(self.axes - compat.varying_axes(x)))
        return compat.cast_varying(x, missing) if missing else x
