"""Values inside shard_map, printed together and in the order of the mesh."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit._arguments.checks import Axis, quoted
from shardkit._arguments.typed import Arrays, typed
from shardkit._jax import compat
from shardkit._jax.compat import bound
from shardkit.collectives.basic import all_gather


class _Leaf(NamedTuple):
    """What a leaf is called, its dtype and shape, and the axes over which it varies, with their sizes."""

    name: str
    kind: str
    axes: dict[str, int]


@typed
def debug_print(x: Arrays, name: str = "x", *, axis: Axis | None = None) -> None:
    """Prints a value of all devices inside shard_map, with their coordinates, at once and in the order of the mesh.

    The values are gathered and printed by one call, so that lines of different devices or processes never mix. An axis
    over which a value does not vary has no coordinate: its devices hold the same. It works under jit, scan, vmap and
    grad, which it does not change, and in several processes; outside of shard_map it prints the value as it is.
    `jax.checkpoint` prints again what it recomputes. As with `jax.debug.print`, either of two prints that do not depend
    on each other may come first, and `jax.effects_barrier()` waits for all.

    Args:
        x: pytree of arrays or numbers; keys are printed as their integers.
        name: what to call it; a leaf of a pytree is called `name.path`.
        axis: the axes whose devices are printed together; None: all. Each group of them prints on its own and says
            where it is along the others. A stage of a pipeline, which may hold no collective over the pipeline's axis,
            leaves that one out; with mode="masked" it prints what it computes in idle ticks too.

    Raises:
        ValueError: an axis that is not bound here.

    Cost: an all_gather of each leaf over the axes over which it varies, B (n-1) bytes, B being one device's leaf, and a
    copy of the result from each device to its host. Of a large array print a part, as in `x[:2]`.

    Example:
        >>> show = lambda x: sk.collectives.debug_print(x, "rows")
        >>> jax.shard_map(show, mesh=mesh, in_specs=P("model"), out_specs=None)(jnp.arange(8)); jax.effects_barrier()
        rows: int32[2] on each device, the same along 'data'
        model=0  [0 1]
        model=1  [2 3]
        model=2  [4 5]
        model=3  [6 7]
    """
    sizes, tracked = compat.bound_axes(), compat.tracked_axes()
    together = tuple(sizes) if axis is None else tuple(a for a in sizes if a in bound("debug_print", axis))
    leaves, values = [], []
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        leaf = lax.stop_gradient(jnp.asarray(leaf))
        axes = {a: sizes[a] for a in together if a not in tracked or a in compat.varying_axes(leaf)}
        full = ".".join(filter(None, [name, jax.tree_util.keystr(path, simple=True, separator=".")]))
        leaves.append(_Leaf(full, f"{leaf.dtype}{list(leaf.shape)}", axes))
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        values.append(_of_all(jax.random.key_data(leaf) if is_key else leaf, axes))
    # Every device calls its host, and the first one's call prints. A `cond` would spare the other calls, but jax drops
    # a callback inside a cond inside a scan when it differentiates the scan.
    first = lax.axis_index(together) == 0 if together else jnp.array(True)
    apart = {a: lax.axis_index(a) for a in sizes if a not in together}
    jax.debug.callback(partial(_print, leaves, together), first, apart, *values)


def _of_all(x: jax.Array, axes: dict[str, int]) -> jax.Array:
    """The values of all devices along these axes, in a new dim 0, in the order of the mesh."""
    if not axes or not x.size:  # jax refuses to gather empty arrays
        return jnp.broadcast_to(x[None], (math.prod(axes.values()), *x.shape))
    return all_gather(x[None], tuple(axes), replicated=True)


def _print(leaves: list[_Leaf], together: tuple[str, ...], first: Any, apart: dict[str, Any], *values: Any) -> None:
    if not first:
        return
    lines = []
    group = f" at {_place(apart, apart.values())}" if apart else ""
    for leaf, value in zip(leaves, values, strict=True):
        same = [axis for axis in together if axis not in leaf.axes]
        where = " on each device" if together or apart else ""
        lines.append(f"{leaf.name}: {leaf.kind}{where}{group}{f', the same along {quoted(same)}' if same else ''}")
        places = [_place(leaf.axes, at) for at in np.ndindex(*leaf.axes.values())]
        for place, each in zip(places, np.asarray(value), strict=True):
            before = f"{place:<{len(places[-1])}}  " if place else ""
            lines.append(before + str(each).replace("\n", "\n" + " " * len(before)))
    print("\n".join(lines), flush=True)  # noqa: T201


def _place(axes: Iterable[str], at: Iterable[Any]) -> str:
    return " ".join(f"{axis}={i}" for axis, i in zip(axes, at, strict=True))
