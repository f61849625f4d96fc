"""Assertions about a kernel of remote copies: no order goes wrong, and it equals a plain function for all inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from shardkit._arguments.checks import at_least, mesh_in_context
from shardkit._arguments.typed import Specs, typed
from shardkit._jax import compat
from shardkit.remote_copies.equations import list_calls
from shardkit.remote_copies.proof import OrdersProof, prove_calls
from shardkit.testing._kernels import check_args, check_axes_of_specs, wrap_kernel
from shardkit.testing.exact.arguments import check_floats, describe_array
from shardkit.testing.exact.certificate import Equality
from shardkit.testing.exact.equality import assert_equal_for_all_inputs
from shardkit.testing.kernels.written_out import write_out_proved


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
        OrdersError: the mistakes, each with an order that shows it, from which no event can be left out.
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


@typed
def assert_kernel(
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    *,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Specs | None,
    out_specs: Specs,
    args: Sequence[Any],
    repeats: int = 2,
    grad: bool = False,
    points: int = 3,
    check_vma: bool = False,
) -> Equality:
    """Proves a Pallas kernel of remote copies equal to a plain function, in every order and for all inputs.

    First all orders: no two accesses race, no device waits for ever, and nothing is read before it arrives or comes
    after the kernel has ended. All orders of such a kernel give the same values, so those of one order are compared, as
    `assert_equal_for_all_inputs` does.

    Args:
        kernel: the function that each device runs, with calls of `pallas_call` inside.
        reference: the same as a function of the global arrays, in jax and without collectives.
        mesh: the mesh, also one without devices (`sk.abstract_mesh`); by default the mesh of `jax.set_mesh`.
        in_specs: as for `jax.shard_map`.
        out_specs: as for `jax.shard_map`.
        args: the global arguments, a tuple of pytrees of arrays or ShapeDtypeStructs; small shapes prove as much.
        repeats: how often the function is called in a row. A barrier semaphore is the same one in each call.
        grad: compare gradients too, of a kernel with a derivative of its own.
        points: as for `assert_equal_for_all_inputs`.
        check_vma: as for `jax.shard_map`; few kernels state over which axes they vary.

    Returns:
        Equality: the statement, the chance of a wrong verdict, and the assumptions; print it.

    Raises:
        AssertionError: `shardkit.testing.kernels.OrdersError`, with an order that shows each mistake; or a difference,
            as of `assert_equal_for_all_inputs`.
        IndexError: an index outside of the kernel's memory, or a device that is not in the mesh.
        ValueError: a kernel whose events depend on data, by its line; no `pallas_call`; or no verdict about equality.

    Cost: one run of all events for each event that touches memory that others see, then that of
        `assert_equal_for_all_inputs`: a second for 4 devices and 8 steps.

    Example:
        >>> from jax.experimental import pallas as pl
        >>> from jax.experimental.pallas import tpu as pltpu
        >>> def send_right(x_ref, result_ref, sent, received):
        ...     right = (jax.lax.axis_index("x") + 1) % 4
        ...     copy = pltpu.make_async_remote_copy(x_ref, result_ref, sent, received, device_id=(right,))
        ...     copy.start()
        ...     copy.wait()
        >>> permute = pl.pallas_call(
        ...     send_right, jax.ShapeDtypeStruct((2, 2), "f"), in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        ...     out_specs=pl.BlockSpec(memory_space=pl.ANY), scratch_shapes=[pltpu.SemaphoreType.DMA] * 2,
        ... )
        >>> proof = sk.testing.assert_kernel(
        ...     permute, lambda x: jnp.roll(x, 2, 0), mesh=sk.abstract_mesh(x=4), in_specs=P("x"), out_specs=P("x"),
        ...     args=(np.zeros((8, 2), "f"),),
        ... )
        >>> proof.chance < 1e-15
        True

    Source: Lamport, Time, Clocks, and the Ordering of Events in a Distributed System, CACM 1978; Godefroid,
        Partial-Order Methods for the Verification of Concurrent Systems, 1996.
    """
    where = "assert_kernel"
    mesh = mesh_in_context(where, mesh)
    at_least(where, 1, repeats=repeats)
    check_axes_of_specs(where, mesh, in_specs, out_specs)
    check_args(where, mesh, in_specs, args, symbolic=True)
    shapes = jax.tree.map(describe_array, tuple(args))
    check_floats(where, shapes)
    orders = check_orders(
        kernel,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        args=args,
        repeats=repeats,
        check_vma=check_vma,
    )
    proof = assert_equal_for_all_inputs(
        write_out_proved(kernel),
        reference,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        args=args,
        grad=grad,
        points=points,
        check_vma=check_vma,
    )
    return proof._replace(what=f"{proof.what}; {orders}")
