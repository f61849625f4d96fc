"""Runs each collective primitive of jax under vmap with axis names, and compares what is assumed to be replicated.

vmap reduces over a tuple of axes, as shard_map does. It gathers, scatters and permutes over one axis at a time, and
permutes only if every device sends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit._arguments.checks import quoted
from shardkit._jax import compat
from shardkit._jax.jaxprs import source_line
from shardkit.testing._compare import distance, first_other_bits


def _names(params: Any) -> tuple[str, ...]:
    named = params["axes"] if "axes" in params else params["axis_name"]
    return tuple(named) if isinstance(named, tuple | list) else (named,)


def _gathered(x: Any, names: tuple[str, ...], dim: int) -> Any:
    for name in reversed(names):
        x = lax.all_gather(x, name, axis=dim, tiled=True)
    return x


def _all_gather(x: Any, params: Any) -> Any:
    dim = params["all_gather_dimension"]
    return _gathered(x if params["tiled"] else jnp.expand_dims(x, dim), _names(params), dim)


def _reduce_scatter(x: Any, params: Any) -> Any:
    dim = params["scatter_dimension"]
    for name in _names(params):
        x = lax.psum_scatter(x, name, scatter_dimension=dim, tiled=True)
    return x if params["tiled"] else jnp.squeeze(x, dim)


def _all_to_all(x: Any, params: Any) -> Any:
    names = _names(params)
    x = jnp.where(lax.axis_index(names) >= 0, x, x)  # vmap adds a dim to a value that is not mapped
    return lax.all_to_all(x, names, params["split_axis"], params["concat_axis"], tiled=True)


def _ppermute(x: Any, params: Any) -> Any:
    known = list(compat.bound_axes())
    names = tuple(sorted(_names(params), key=known.index))  # ppermute counts devices in the mesh's order
    source = np.full(math.prod(compat.bound_axes()[name] for name in names), -1)
    senders, targets = zip(*params["perm"], strict=True) if params["perm"] else ((), ())
    for places in (senders, targets):
        if len(set(places)) < len(places) or not set(places) <= set(range(len(source))):
            raise ValueError(
                f"emulate: ppermute over {quoted(names)} must name each of its {len(source)} devices at most once as "
                f"source and once as target; got {params['perm']}. Remove duplicates and devices that do not exist."
            )
    if len(names) == 1 and len(targets) == len(source):
        return lax.ppermute(x, names[0], params["perm"])
    source[list(targets)] = senders
    mine = jnp.asarray(source)[lax.axis_index(names)]
    return jnp.where(mine >= 0, _gathered(x[None], names, 0)[mine], jnp.zeros_like(x))


def _sum(x: Any, params: Any) -> Any:
    return lax.psum(x, _names(params))


RULES: dict[str, Callable[[Any, Any], Any]] = {
    "psum": _sum,
    "psum_invariant": _sum,
    "unreduced_psum": _sum,
    "pmax": lambda x, params: lax.pmax(x, _names(params)),
    "pmin": lambda x, params: lax.pmin(x, _names(params)),
    "all_gather": _all_gather,
    "all_gather_invariant": _all_gather,
    "all_gather_reduced": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "unreduced_reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "ppermute": _ppermute,
}


def compare(x: Any, equation: Any, note: Callable[[str], None]) -> None:
    """Compares the bits that the devices hold at an `assume_replicated` when the program runs."""
    names, line = list(compat.bound_axes()), source_line(equation)
    along = [names.index(name) for name in equation.params["axes"]]

    def look(values: np.ndarray) -> None:
        for at in along:
            devices = np.moveaxis(values, at, 0)
            other = first_other_bits(list(devices))
            if other:
                gap = np.max(distance(devices[other], devices[0]))
                note(
                    f"assume_replicated needs the same bits on all devices along axis {names[at]!r}; at {line} device "
                    f"{other} differs from device 0 by up to {gap:.3g}. Complete the exchange over {names[at]!r}, or "
                    "leave the value varying."
                )
                return

    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    for name in reversed(names):
        x = lax.all_gather(x, name)
    jax.debug.callback(look, x)
