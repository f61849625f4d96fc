"""Sums of shares between CPU processes, where jaxlib's own are wrong.

Once a process has joined a job, XLA's CPU collectives go through gloo, also between devices of one process. Until
jaxlib 0.12 its reduce_scatter sends from a buffer that it overwrites at the same time: under load the last elements of
device 0's share are silently wrong, from a few MiB on (jax issue 40830). All replicas then agree on the wrong numbers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir
from jaxlib.version import __version_info__ as jaxlib_version

from shardkit._jax.compat import private

# The first jaxlib whose gloo scatters by another algorithm: the racing class is no longer in its library.
_MENDED = (0, 12, 0, 1)
_SUMS = ("reduce_scatter_p", "unreduced_reduce_scatter_p")


def mend() -> None:
    """Lowers jax's reduce_scatter, for CPU devices of a job, as an all_to_all of shares that each device adds.

    It replaces the lowering rule of jax's own primitive, for the whole process. A rule of shardkit's functions alone
    would leave out the sums that jax makes, as the transpose of each all_gather, and those that a user's loss writes by
    `lax.psum_scatter`: the step would train with wrong numbers although no line of shardkit is wrong. Types,
    transposes and the census stay, since the primitive does; the bytes are the same. Outside of a job, and for every
    other platform, the rule calls jax's own, so that programs keep their text. jax's asynchronous form, which
    shardkit never issues, keeps its rule.
    """
    if jaxlib_version >= _MENDED:
        return
    for name in _SUMS:
        primitive = private(f"lax.parallel.{name}")
        jax_rule = private("interpreters.mlir._lowerings")[primitive].rule
        if getattr(jax_rule, "func", None) is not _lower_scatter:  # unless it is replaced already
            mlir.register_lowering(primitive, partial(_lower_scatter, jax_rule))


def races(platforms: Any) -> bool:
    """Whether a reduce_scatter that is lowered for these platforms goes through gloo."""
    joined = private("distributed.global_state").client is not None
    implementation = getattr(jax.config, "jax_cpu_collectives_implementation", None)
    return tuple(platforms) == ("cpu",) and joined and implementation == "gloo"


def _lower_scatter(jax_rule: Any, ctx: Any, x: Any, **params: Any) -> Any:
    if not races(ctx.platforms or ctx.module_context.platforms):
        return jax_rule(ctx, x, **params)
    (aval,) = ctx.avals_in
    # all_to_all takes no unreduced operand: to it the shares of a sum are plain values, which vary.
    axis_type = aval.manual_axis_type
    varying = axis_type.update(varying=axis_type.varying | axis_type.unreduced, unreduced=frozenset())
    ctx = ctx.replace(avals_in=[aval.update(manual_axis_type=varying)])
    return mlir.lower_fun(partial(_exchange_and_sum, **params), multiple_results=False)(ctx, x)


def _exchange_and_sum(
    x: jax.Array, *, scatter_dimension: int, axis_name: Any, axis_size: int, axis_index_groups: Any = None, tiled: bool
) -> jax.Array:
    """A reduce_scatter: sums this device's piece of all devices' arrays, in their order."""
    dim = scatter_dimension
    shape = list(x.shape)
    if tiled:
        shape[dim : dim + 1] = [axis_size, shape[dim] // axis_size]
    pieces = lax.all_to_all(x.reshape(shape), axis_name, dim, dim, axis_index_groups=axis_index_groups, tiled=True)
    # XLA's CPU compiler also adds 16 bits wide, in float32, and rounds once.
    is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits <= 16
    sum_dtype = jnp.float32 if is_narrow else x.dtype
    return pieces.sum(dim, dtype=sum_dtype).astype(x.dtype)
