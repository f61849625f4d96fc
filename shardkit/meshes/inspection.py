"""Descriptions as text: the devices of a mesh, the devices that hold each piece of an array, the leaves of a tree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from shardkit._arguments.checks import Axis, quoted
from shardkit._arguments.typed import ARRAYS, PLAN, check_kind, is_array, typed
from shardkit._jax.compat import bound_axes, tracked_axes, varying_axes
from shardkit.meshes import mesh as _mesh
from shardkit.meshes.layout import brief_spec, by_path, bytes_per_device, shard_bytes, shard_shape, table
from shardkit.meshes.mesh import DeviceGrid, beside


@typed
def describe(
    thing: Any, params: Any = None, mesh: Mesh | None = None, *, after: Any = None, manual: Axis | None = None
) -> str:
    """Describes a mesh, an array (which device holds which piece), a pytree (a line per leaf) or a plan, as text.

    For an array: a table of its pieces, with the ids of all devices that hold each; rows and columns are the last two
    dims that are split. For a pytree: a line per leaf with shapes, dtype, spec, devices and bytes per device, and their
    sum; inside shard_map, the axes over which each varies instead of a spec. With `after`, the array or pytree
    after a resharding is shown beside it. For a plan, `describe(plan, params, mesh)`: a line per leaf with its layouts,
    bytes per device, and why; the mesh may be omitted where the parameters are sharded over one, or inside
    `jax.set_mesh`.

    Args:
        thing: a mesh, an array, a pytree of arrays, or a plan.
        params: the parameters, with a plan.
        mesh: the mesh, with a plan.
        after: an array, or a pytree of the same structure, to show beside `thing`.
        manual: with a plan, the Manual axes, as for `make_train_step`: over any other the parameters stay as laid out.

    Raises:
        TypeError: a plan without parameters, `manual` without a plan, or `after` with anything but arrays.
        ValueError: `after` of another structure; `manual` without an axis of the plan, or with one of another mesh.

    Example:
        >>> print(sk.describe(mesh))
        mesh data=2 x model=4: 8 cpu devices, 1 process
                model=0  model=1  model=2  model=3
        data=0        0        1        2        3
        data=1        4        5        6        7
        >>> print(sk.describe(sk.shard(np.ones((8, 4)), mesh, P(None, "model"))))
        8x4 float32, P(None, 'model')
        8x1, 32 bytes, on each of 8 cpu devices
               [:, 0:1]  [:, 1:2]  [:, 2:3]  [:, 3:4]
        [0:8]       0,4       1,5       2,6       3,7
    """
    if manual is not None and not hasattr(thing, "describe"):
        raise TypeError(f"describe: manual must come with a plan; got {manual=} without one. Leave it out.")
    if after is not None:
        return _compared(thing, params, mesh, after)
    if isinstance(thing, Mesh) and params is None:
        return str(_mesh.grid_of_mesh(thing))
    if hasattr(thing, "describe"):
        if params is None:
            raise TypeError("describe: a plan must come with parameters; got none. Call describe(plan, params, mesh).")
        return str(thing.describe(params, mesh, manual))
    if params is not None or mesh is not None:
        check_kind("describe", "plan", thing, (PLAN,))
    check_kind("describe", "thing", thing, (ARRAYS,))
    if is_placed(thing):
        return str(grid_of_array(thing))
    rows = [("leaf", "global", "dtype", "spec", "local", "devices", "bytes/device")]
    rows += [(name, *_whole(x), *_held(x)) for name, x in _leaves(thing).items()]
    return f"{table(rows)}\n{_counted(rows)}, {bytes_per_device(thing):,} bytes on each device"


def grid_of_array(x: Any) -> DeviceGrid:
    """The devices that hold each piece of an array."""
    where = x.sharding.devices_indices_map(tuple(x.shape))
    spans = {
        device: tuple(at.indices(size)[:2] for at, size in zip(index, x.shape, strict=True))
        for device, index in where.items()
    }
    pieces = [sorted({span[dim] for span in spans.values()}) for dim in range(len(x.shape))]
    # A picture has two dims; of an array with more, those that are split.
    shown = [dim for dim, each in enumerate(pieces) if len(each) > 1 or len(pieces) <= 2]
    cells: dict[tuple[int, ...], tuple[int, ...]] = {}
    for device in sorted(spans, key=lambda device: device.id):
        at = tuple(pieces[dim].index(spans[device][dim]) for dim in shown)
        cells[at] = (*cells.get(at, ()), device.id)
    labels = [[f"[{':, ' * dim}{start}:{stop}]" for start, stop in pieces[dim]] for dim in shown]
    whole = [str(dim) for dim in range(len(pieces)) if dim not in shown]
    shape, dtype = _whole(x)
    spec, local, _, size = _held(x)
    on = f"on each of {len(spans)}" if len(spans) > 1 else "on one"
    also = f"; {'dim' if len(whole) == 1 else 'dims'} {', '.join(whole)} whole" if whole else ""
    held = f"{local}, {size} bytes, {on} {next(iter(spans)).platform} device{'s' * (len(spans) > 1)}{also}"
    return DeviceGrid((f"{shape} {dtype}, {spec}", held), labels, cells)


def _compared(thing: Any, params: Any, mesh: Any, after: Any) -> str:
    """Arrays or pytrees before and after, side by side."""
    if params is not None or mesh is not None:
        raise TypeError(
            "describe: after must come with an array or a pytree alone; got params or a mesh too. Leave them out."
        )
    check_kind("describe", "thing", thing, (ARRAYS,))
    check_kind("describe", "after", after, (ARRAYS,))
    sides = (thing, after)
    if all(map(is_array, sides)):
        before, then = map(_alone, sides)
        return beside(f"before: {before}", f"after: {then}")
    one, other = _leaves(thing), _leaves(after)
    if differ := sorted(one.keys() ^ other.keys()):
        raise ValueError(
            f"describe: after must have the leaves of thing; got {differ[0]!r} in one of them alone. Pass the same "
            "tree, before and after."
        )
    rows = [("leaf", "global", "dtype", "before", "local", "bytes/device", "after", "local", "bytes/device")]
    for name, x in one.items():
        old, new = _held(x), _held(other[name])
        rows.append((name, *_whole(x), old[0], old[1], old[3], new[0], new[1], new[3]))
    held = [f"{bytes_per_device(side):,} bytes on each device" for side in sides]
    return f"{table(rows)}\n{_counted(rows)}, before {held[0]}, after {held[1]}"


def _alone(x: Any) -> str:
    """The picture of an array; of one on the host, or without devices, its title."""
    return str(grid_of_array(x)) if is_placed(x) else "{} {}, {}".format(*_whole(x), _held(x)[0])


def _leaves(tree: Any) -> dict[str, Any]:
    return by_path("describe", jax.tree_util.tree_leaves_with_path(tree))


def _counted(rows: Sequence[Any]) -> str:
    return "1 leaf" if len(rows) == 2 else f"{len(rows) - 1} leaves"


def _whole(x: Any) -> tuple[str, str]:
    """Global shape, which is not known inside shard_map, and dtype."""
    shape = "-" if _axes_around(x) else _brief(jax.numpy.shape(x))
    return shape, str(getattr(x, "dtype", type(x).__name__))


def _held(x: Any) -> tuple[str, str, str, str]:
    """Spec, shape of a shard, number of devices and bytes on each."""
    spec = getattr(sharding := getattr(x, "sharding", None), "spec", None)
    around, devices = _axes_around(x), sharding.num_devices if sharding is not None else 0
    if around:
        over = [axis for axis in around if axis not in tracked_axes() or axis in varying_axes(x)]
        named, devices = f"varies over {quoted(over)}" if over else "the same on all", math.prod(around.values())
    elif isinstance(x, jax.core.Tracer):
        named = "traced"
    else:
        named = "host" if sharding is None else "one device" if spec is None else brief_spec(spec)
    return named, _brief(shard_shape(x)), str(devices), f"{shard_bytes(x):,}"


def _axes_around(x: Any) -> dict[str, int]:
    """The axes that shard_map or vmap binds around a value, with their sizes; none for an array that is not traced."""
    return bound_axes() if isinstance(x, jax.core.Tracer) else {}


def is_placed(x: Any) -> bool:
    """Whether a value is an array, or the description of one, on devices that are known."""
    sharding = getattr(x, "sharding", None)
    if not is_array(x) or isinstance(x, jax.core.Tracer) or sharding is None:
        return False
    return not isinstance(getattr(sharding, "mesh", None), AbstractMesh)


def _brief(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"
