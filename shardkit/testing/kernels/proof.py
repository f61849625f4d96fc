"""Proof of the orders of a kernel: what a function with Pallas calls does on all devices, whatever comes first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from shardkit._jax import compat
from shardkit.testing._kernels import wrap_kernel
from shardkit.testing.kernels.equations import list_calls
from shardkit.testing.kernels.orders import Orders
from shardkit.testing.kernels.program import KernelProgram
from shardkit.testing.kernels.rules import add_call
from shardkit.testing.kernels.verdicts import Mistake, judge


class OrdersError(AssertionError):
    """A kernel that goes wrong in some order; `mistakes` has all of them."""

    def __init__(self, mistakes: Sequence[Mistake]):
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(str(mistake) for mistake in mistakes))


@dataclass(frozen=True)
class OrdersProof:
    """No order goes wrong.

    Attributes:
        devices: of the mesh.
        calls: the Pallas calls of the function, as often as it was repeated.
        events: of all cores and engines.
        sent: bytes that copies bring to other devices in one call of the function, all devices together.
    """

    devices: int
    calls: int
    events: int
    sent: int

    def __str__(self) -> str:
        events = f"{self.events} events on {self.devices} devices"
        return f"no race and no deadlock in any order of {events}, in {self.calls} calls"


def check_orders(
    kernel: Callable[..., Any],
    *,
    mesh: Mesh | AbstractMesh,
    in_specs: Any,
    out_specs: Any,
    args: Sequence[Any],
    repeats: int = 2,
    check_vma: bool = False,
) -> OrdersProof:
    """Proves that a kernel of remote copies does the same in every order.

    Args:
        kernel: the function that each device runs, with calls of `pallas_call` inside.
        mesh: the mesh, also one without devices.
        in_specs: as for `jax.shard_map`.
        out_specs: as for `jax.shard_map`.
        args: the global arguments; only shapes and dtypes matter.
        repeats: how often the function is called in a row. A barrier semaphore is the same one in each call.
        check_vma: as for `jax.shard_map`; few kernels state over which axes they vary.

    Returns:
        OrdersProof: what was proved; print it.

    Raises:
        OrdersError: the mistakes, each with a shortest order that shows it.
        IndexError: an index outside of the kernel's memory, or a device that is not in the mesh.
        UnknownOrdersError: a ValueError; a kernel whose events depend on data or on the order, by its line.
        ValueError: no `pallas_call` in the function.

    Cost: one run of all events for each event that touches memory that others see: seconds for 4 devices and 8 steps.
    """
    explained = wrap_kernel("check_orders", kernel, mesh, out_specs, check_vma)
    mapped = jax.shard_map(explained, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
    shapes = [jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arg) for arg in args]
    program = jax.make_jaxpr(mapped)(*shapes)
    calls = list_calls(program.jaxpr)
    if not calls:
        raise ValueError(
            "check_orders: a kernel must call pl.pallas_call; this function does not. Pass the function that calls it, "
            "or compare a function of lax collectives with assert_equal_for_all_inputs."
        )
    return prove_calls(calls, dict(compat.abstract_mesh_of(mesh).shape), repeats)


def prove_calls(calls: Sequence[Any], axes: dict[str, int], repeats: int) -> OrdersProof:
    """The proof for equations of `pallas_call`, one after the other."""
    program = KernelProgram(axes)
    # A mistake of the first call is shown by a shorter order than one of a later call.
    for number in range(repeats):
        for place, equation in enumerate(calls):
            add_call(program, equation, number * len(calls) + place)
        mistakes = judge(Orders(program.events))
        if mistakes:
            raise OrdersError(mistakes)
    sent = 0
    for event in program.events:
        if event.copy is not None and event.copy.source.device != event.copy.target.device:
            sent += event.copy.read.bytes
    return OrdersProof(program.devices, repeats * len(calls), len(program.events), sent // repeats)
