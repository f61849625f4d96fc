"""Calls kernels of Pallas that were written without varying types, as those that jax ships, inside `jax.shard_map`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardkit._jax import compat
from shardkit._jax.backends import platform
from shardkit._jax.interpreter import JaxprInterpreter

# How kernels are traced here: "written out", "tpu" or "gpu" if those for this platform are interpreted or, as on the
# platform of the program, "". jax keeps traces by it too.
_FORM: Any = jax.make_user_context("")
_PLATFORMS = ("tpu", "gpu")  # which have kernels
_COST = "shardkit_kernel"  # `cost_scope`
_COST_NAME = re.compile(rf"\b{_COST}_(\d+)_flops_(\d+)_exps_(\d+)_bytes\b")


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


def cost_scope(cost: KernelCost) -> str:
    """The `jax.named_scope` around a kernel whose compiler drops its cost: the name of its instruction says it.

    For example "shardkit_kernel_2048_flops_64_exps_512_bytes".
    """
    return f"{_COST}_{cost.flops}_flops_{cost.exps}_exps_{cost.moved}_bytes"


def find_cost(name: str) -> KernelCost | None:
    """The cost that the name of an instruction says, as "jit(f)/jvp(shardkit_kernel_2048_flops_64_exps_512_bytes)/..".

    Of a kernel under vmap the name says the cost of one of several calls, and None is returned.
    """
    match = _COST_NAME.search(name)
    if match is None or "vmap(" in name:
        return None
    flops, exps, moved = match.groups()
    return KernelCost(int(flops), int(exps), int(moved))


@contextmanager
def interpreting(platform: str) -> Iterator[None]:
    """Kernels for a platform, "tpu" or "gpu", inside run on any other, operation by operation: for tests."""
    assert platform in _PLATFORMS, platform
    with _FORM(platform):
        yield


@contextmanager
def writing_kernels_out() -> Iterator[None]:
    """Functions with a kernel inside are traced in their other form, on every platform, as a proof must read them."""
    with _FORM("written out"):
        yield


def kernel_platform() -> str | None:
    """The platform whose kernels a program is traced with, "tpu" or "gpu"; None: functions are traced without them."""
    if _FORM.value == "written out":
        return None
    if _FORM.value:
        return str(_FORM.value)
    name = platform()
    return name if name in _PLATFORMS else None


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
            return self._call_kernel(equation, operands)
        return [self._vary(x) for x in compat.bind(equation, operands)]

    def _call_kernel(self, equation: Any, operands: list[Any]) -> Sequence[jax.Array]:
        """The results of a kernel with other parameters: types, cost, and whether it is interpreted."""
        from jax.experimental.pallas import CostEstimate

        cost = next(self.costs)
        params: dict[str, Any] = {
            **equation.params,
            "out_avals": tuple(compat.with_varying(aval, self.axes) for aval in equation.params["out_avals"]),
            "cost_estimate": CostEstimate(flops=cost.flops, transcendentals=cost.exps, bytes_accessed=cost.moved),
        }
        if _FORM.value in _PLATFORMS:
            params["interpret"] = True
        scope: AbstractContextManager[Any] = nullcontext()
        if kernel_platform() == "gpu":  # XLA's call of a kernel of Triton has no estimate
            scope = jax.named_scope(cost_scope(cost))
        with scope:
            results = compat.bind(equation.replace(params=params), operands)
        return [self._vary(x) for x in results]

    def _vary(self, x: Any) -> jax.Array:
        x = jnp.asarray(x)
        missing = self.axes - compat.varying_axes(x)
        if not missing:
            return x
        return compat.cast_varying(x, tuple(sorted(missing)))
