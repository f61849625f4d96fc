"""Reductions whose derivative jax lacks or defines otherwise. Inputs already vary over `names`."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def extremum(x: jax.Array, names: tuple[str, ...], op: str) -> jax.Array:
    """The elementwise "max" or "min"; its derivative is split equally among the devices that attain it."""
    return lax.pmax(x, names) if op == "max" else lax.pmin(x, names)


@extremum.defjvp
def _extremum_jvp(names: tuple[str, ...], op: str, primals: Any, tangents: Any) -> Any:
    (x,), (dx,) = primals, tangents
    out = extremum(x, names, op)
    attained = x == out
    ties = lax.psum(attained.astype(jnp.float32), names)  # bfloat16 counts no further than 256
    return out, lax.psum(jnp.where(attained, dx / ties.astype(dx.dtype), jnp.zeros_like(dx)), names)


def from_source(x: jax.Array, names: tuple[str, ...], source: int) -> jax.Array:
    """The value of device `source`, bit for bit."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return _bits_from_source(x, names, source)
    reduce = lax.pmax if x.dtype == bool else lax.psum  # a sum of booleans would send four bytes per element
    return reduce(_masked(x, names, source), names)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _bits_from_source(x: jax.Array, names: tuple[str, ...], source: int) -> jax.Array:
    # Sent as integers: a sum of floats turns -0.0 into 0.0.
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{jnp.finfo(x.dtype).bits}"))
    return lax.bitcast_convert_type(lax.psum(_masked(bits, names, source), names), x.dtype)


@_bits_from_source.defjvp
def _bits_from_source_jvp(names: tuple[str, ...], source: int, primals: Any, tangents: Any) -> Any:
    (x,), (dx,) = primals, tangents
    return _bits_from_source(x, names, source), lax.psum(_masked(dx, names, source), names)


def _masked(x: jax.Array, names: tuple[str, ...], source: int) -> jax.Array:
    return jnp.where(lax.axis_index(names) == source, x, jnp.zeros_like(x))
