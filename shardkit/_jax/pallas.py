"""Calls kernels of Pallas that were written without varying types, as those that jax ships, inside `jax.shard_map`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardkit._jax import compat
from shardkit._jax.backends import platform
from shardkit._jax.interpreter import JaxprInterpreter

# How kernels are traced here: "interpreted", "written out" or, as on the platform, "". jax keeps traces by it too.
_FORM: Any = jax.make_user_context("")


class KernelCost(NamedTuple):
    """What a kernel computes and moves.

    Attributes:
        flops: of its matmuls.
        exps: exponentials.
        moved: bytes that it reads and writes in the device's memory.
    """

    flops: int
    exps: int
    moved: int


@contextmanager
def interpreting() -> Iterator[None]:
    """Kernels for TPUs inside run on any platform, operation by operation: for tests."""
    with _FORM("interpreted"):
        yield


@contextmanager
def writing_kernels_out() -> Iterator[None]:
    """Functions with a kernel inside are traced in their other form, on TPUs too, as a proof must read them."""
    with _FORM("written out"):
        yield


def uses_tpu_kernels() -> bool:
    """Whether a function that has a kernel for TPUs is traced with it."""
    if _FORM.value == "":
        return platform() == "tpu"
    return bool(_FORM.value == "interpreted")


def call_kernel(function: Callable[..., Any], costs: Sequence[KernelCost], *operands: jax.Array) -> Any:
    """The results of a function with Pallas kernels, which vary over the axes over which any operand does.

    Pallas asks each kernel over which axes its results vary, and kernels that do not say so are refused with
    `check_vma`. So the function is traced without the check, and the types are added to the program.

    Args:
        function: traces one Pallas kernel or several, and ordinary operations.
        costs: what each kernel computes and moves, in their order. Compilers schedule by it, and reports count it.
        operands: its arguments.
    """
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    # Kernels that jax ships rely on its own rules of promotion and on 32 bits, whatever a user has set.
    with (
        compat.untracked(),
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        program, results = jax.make_jaxpr(function, return_shape=True)(*shapes)
    axes: frozenset[str] = frozenset()
    for x in operands:
        axes |= compat.varying_axes(x)
    leaves = _TypedProgram(axes, iter(costs)).run(program, operands)
    return jax.tree.unflatten(jax.tree.structure(results), leaves)


class _TypedProgram(JaxprInterpreter[Any]):
    """Runs a program in which every value varies over the same axes."""

    def __init__(self, axes: frozenset[str], costs: Iterator[KernelCost]):
        self.axes = axes
        self.costs = costs

    def constant(self, x: Any) -> jax.Array:
        return self._vary(x)

    def literal(self, atom: Any) -> jax.Array:
        return self._vary(jnp.asarray(atom.val, atom.aval.dtype))

    def equation(self, equation: Any, operands: list[Any]) -> Sequence[jax.Array]:
        if equation.primitive.name == "pallas_call":
            equation = equation.replace(params={**equation.params, **self._change_kernel(equation)})
        return [self._vary(x) for x in compat.bind(equation, operands)]

    def _change_kernel(self, equation: Any) -> dict[str, Any]:
        """The parameters of a kernel that are other ones here: types, cost, and whether it is interpreted."""
        from jax.experimental.pallas import CostEstimate

        cost = next(self.costs)
        changed: dict[str, Any] = {
            "out_avals": tuple(compat.with_varying(aval, self.axes) for aval in equation.params["out_avals"]),
            "cost_estimate": CostEstimate(flops=cost.flops, transcendentals=cost.exps, bytes_accessed=cost.moved),
        }
        if _FORM.value == "interpreted":
            changed["interpret"] = True
        return changed

    def _vary(self, x: Any) -> jax.Array:
        x = jnp.asarray(x)
        missing = self.axes - compat.varying_axes(x)
        if not missing:
            return x
        return compat.cast_varying(x, tuple(sorted(missing)))
