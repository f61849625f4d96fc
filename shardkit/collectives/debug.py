"""Values inside shard_map, printed together and in the order of the mesh."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit import _compat
from shardkit._check import quoted
from shardkit._kinds import Arrays
from shardkit._typed import typed
from shardkit.collectives.basic import all_gather


@typed
def debug_print(x: Arrays, name: str = "x") -> None:
    """Prints a value of every device inside shard_map, with its coordinates, all at once and in the order of the mesh.

    One device gets the values of all and prints them with one call, so that lines of different devices or processes
    never mix. An axis over which the value does not vary has no coordinate: its devices hold the same. It works under
    jit, scan, vmap, grad (of which it prints the forward values) and in several processes; outside of shard_map it
    prints the value as it is. As with `jax.debug.print`, two prints that do not depend on each other may appear in
    either order, and `jax.effects_barrier()` waits for all.

    Args:
        x: pytree of arrays or numbers.
        name: what to call the value; a leaf of a pytree is called `name.path`.

    Cost: of each leaf an all_gather over the axes over which it varies, B (n-1) bytes for n devices and a leaf of B
    bytes, and a copy of the result from each device to its host. Print a part of a large array, as in `x[:2]`.

    Example:
        >>> show = lambda x: sk.debug_print(x, "rows")
        >>> jax.shard_map(show, mesh=mesh, in_specs=P("model"), out_specs=None)(jnp.arange(8))
        >>> jax.effects_barrier()
        rows of each device, int32[2], the same along 'data'
        model=0  [0 1]
        model=1  [2 3]
        model=2  [4 5]
        model=3  [6 7]
    """
    sizes = _compat.bound_axes()
    tracked = _compat.tracked_axes()
    heads, values = [], []
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        # Only what is printed is copied: no tangent follows, and a key is printed as its integers.
        leaf = lax.stop_gradient(jnp.asarray(leaf))
        data = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        axes = {n: size for n, size in sizes.items() if n not in tracked or n in _compat.varying_axes(leaf)}
        where = jax.tree_util.keystr(path, simple=True, separator=".")
        heads.append((f"{name}.{where}" if where else name, jax.typeof(leaf).str_short(), axes))
        values.append(_of_all(data, axes))
    # Every device calls its host and one of them prints: jax drops a callback that a `cond` in a scan makes on one
    # device when the scan is differentiated.
    first = lax.axis_index(tuple(sizes)) == 0 if sizes else jnp.array(True)
    jax.debug.callback(partial(_print, heads, tuple(sizes)), first, *values)


def _of_all(x: jax.Array, axes: dict[str, int]) -> jax.Array:
    """The values of the devices along these axes, in a new first dim in the order of the mesh."""
    if not axes or not x.size:
        return jnp.broadcast_to(x[None], (int(np.prod([*axes.values()], dtype=int)), *x.shape))
    return all_gather(x[None], tuple(axes), replicated=True)


def _print(heads: list[tuple[str, str, dict[str, int]]], bound: tuple[str, ...], first: Any, *values: Any) -> None:
    if not first:
        return
    lines = []
    for (name, aval, axes), value in zip(heads, map(np.asarray, values), strict=True):
        same = [axis for axis in bound if axis not in axes]
        rest = f", the same along {quoted(same)}" if same else ""
        lines.append(f"{name}{' of each device' if bound else ''}, {aval}{rest}")
        for coordinates, each in zip(np.ndindex(*axes.values()), value, strict=True):
            at = " ".join(f"{axis}={i}" for axis, i in zip(axes, coordinates, strict=True))
            before = f"{at}  " if at else ""
            lines.append(before + str(each).replace("\n", "\n" + " " * len(before)))
    print("\n".join(lines), flush=True)  # noqa: T201
