"""Values inside shard_map, printed together and in the order of the mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit._arguments.checks import Axis, quote
from shardkit._arguments.typed import Arrays, typed
from shardkit._jax import compat
from shardkit._jax.compat import bound
from shardkit.collectives.basic import all_gather


class _Leaf(NamedTuple):
    """A leaf that is printed."""

    name: str
    type: str  # dtype and shape
    axes: dict[str, int]  # over which it varies, with their sizes


@typed
def debug_print(x: Arrays, name: str = "x", *, axis: Axis | None = None) -> None:
    """Prints the value of every device inside shard_map, with its coordinates, in the order of the mesh.

    One call gathers and prints all values, so lines of different devices or processes never mix. If a value does not
    vary over an axis, its lines have no coordinate along it: these devices hold the same. You can use it under jit,
    scan, vmap and grad, and in several processes; it changes no result. Outside of shard_map it prints the value
    itself. `jax.checkpoint` prints again when it recomputes. As with `jax.debug.print`, two prints that do not depend
    on each other may come in any order, and `jax.effects_barrier()` waits for all.

    Args:
        x: pytree of arrays or numbers; keys are printed as their integers.
        name: the name to print; a leaf of a pytree is `name.path`.
        axis: the axes to print together; None: all. Each group of devices prints separately, with its place along the
            other axes. In a stage of a pipeline leave out the pipeline's axis, because a stage may hold no collective
            over it; with mode="masked" it also prints values of idle ticks.

    Raises:
        ValueError: an axis that is not bound here.

    Cost: an all_gather of each leaf over the axes over which it varies, B (n-1) bytes, B being one device's leaf, and a
    copy of the result from each device to its host. For a large array print a part, such as `x[:2]`.

    Example:
        >>> show = lambda x: sk.collectives.debug_print(x, "rows")
        >>> jax.shard_map(show, mesh=mesh, in_specs=P("model"), out_specs=None)(jnp.arange(8)); jax.effects_barrier()
        rows: int32[2] on each device, the same along 'data'
        model=0  [0 1]
        model=1  [2 3]
        model=2  [4 5]
        model=3  [6 7]
    """
    sizes = compat.bound_axes()
    tracked = compat.tracked_axes()
    names = tuple(sizes)
    if axis is not None:
        names = bound("debug_print", axis)
    gathered_axes = tuple(axis_name for axis_name in sizes if axis_name in names)
    leaves = []
    values = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        leaf = lax.stop_gradient(jnp.asarray(leaf))
        varying = compat.varying_axes(leaf)
        axes = {}
        for axis_name in gathered_axes:
            # vmap tracks no axes: over its axes any value may vary.
            if axis_name in varying or axis_name not in tracked:
                axes[axis_name] = sizes[axis_name]
        leaf_type = f"{leaf.dtype}{list(leaf.shape)}"
        leaves.append(_Leaf(_name_leaf(name, path), leaf_type, axes))
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        values.append(_gather_values(leaf, axes))
    # Every device calls its host, and the first one's call prints. A `cond` would spare the other calls, but jax drops
    # a callback inside a cond inside a scan when it differentiates the scan.
    is_first = jnp.array(True)
    if gathered_axes:
        is_first = lax.axis_index(gathered_axes) == 0
    group = {}
    for axis_name in sizes:
        if axis_name not in gathered_axes:
            group[axis_name] = lax.axis_index(axis_name)
    print_values = partial(_print_values, leaves, gathered_axes)
    jax.debug.callback(print_values, is_first, group, *values)


def _name_leaf(name: str, path: Any) -> str:
    """`grads.layers.w` for a leaf of "grads"; the names alone where one of them is empty."""
    leaf_path = jax.tree_util.keystr(path, simple=True, separator=".")
    if not name:
        return leaf_path
    if not leaf_path:
        return name
    return f"{name}.{leaf_path}"


def _gather_values(x: jax.Array, axes: dict[str, int]) -> jax.Array:
    """The values of all devices along these axes, in a new dim 0, in the order of the mesh."""
    if not axes or not x.size:  # jax refuses to gather empty arrays
        return jnp.broadcast_to(x[None], (math.prod(axes.values()), *x.shape))
    return all_gather(x[None], tuple(axes), replicated=True)


def _print_values(
    leaves: list[_Leaf], gathered_axes: tuple[str, ...], is_first: Any, group: dict[str, Any], *values: Any
) -> None:
    if not is_first:
        return
    lines = []
    for leaf, value in zip(leaves, values, strict=True):
        lines.append(_format_title(leaf, gathered_axes, group))
        places = []
        for index in np.ndindex(*leaf.axes.values()):
            places.append(_format_place(tuple(leaf.axes), index))
        width = len(places[-1])
        for place, shard in zip(places, np.asarray(value), strict=True):
            margin = ""
            if place:
                margin = f"{place:<{width}}  "
            indent = " " * len(margin)
            lines.append(margin + str(shard).replace("\n", "\n" + indent))
    print("\n".join(lines), flush=True)  # noqa: T201


def _format_title(leaf: _Leaf, gathered_axes: tuple[str, ...], group: dict[str, Any]) -> str:
    """`rows: int32[2] on each device at stage=1, the same along 'data'`."""
    title = f"{leaf.name}: {leaf.type}"
    if gathered_axes or group:
        title += " on each device"
    if group:
        title += f" at {_format_place(tuple(group), tuple(group.values()))}"
    equal_axes = [axis for axis in gathered_axes if axis not in leaf.axes]
    if equal_axes:
        title += f", the same along {quote(equal_axes)}"
    return title


def _format_place(axes: Sequence[str], index: Sequence[Any]) -> str:
    """`data=1 model=3`."""
    coordinates = []
    for axis, i in zip(axes, index, strict=True):
        coordinates.append(f"{axis}={i}")
    return " ".join(coordinates)
