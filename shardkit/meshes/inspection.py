"""Descriptions as text: the devices of a mesh, the devices that hold each piece of an array, the leaves of a tree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from shardkit._arguments.checks import Axis, quote
from shardkit._arguments.typed import ARRAYS, PLAN, check_kind, is_array, typed
from shardkit._jax.compat import bound_axes, tracked_axes, varying_axes
from shardkit.meshes.layout import brief_spec, by_path, bytes_per_device, shard_bytes, shard_shape, table
from shardkit.meshes.mesh import DeviceGrid, draw_mesh, put_beside


@typed
def describe(
    thing: Any, params: Any = None, mesh: Mesh | None = None, *, after: Any = None, manual: Axis | None = None
) -> str:
    """Describes a mesh, an array (which device holds which piece), a pytree (a line per leaf) or a plan, as text.

    For an array you get a table of its pieces, with the ids of the devices of each piece; rows and columns are
    the last two split dims. For a pytree you get a line per leaf with shapes, dtype, spec, devices and bytes per
    device, and their sum. Inside shard_map a line names the varying axes instead of a spec. Pass `after` to show the
    array or pytree after a resharding beside it. For a plan, call `describe(plan, params, mesh)`: you get a line per
    leaf with its layouts, its bytes per device, and the reason. You may leave out the mesh if the parameters are
    sharded over one, or inside `jax.set_mesh`.

    Args:
        thing: a mesh, an array, a pytree of arrays, or a plan.
        params: the parameters, with a plan.
        mesh: the mesh, with a plan.
        after: an array, or a pytree of the same structure, to show beside `thing`.
        manual: with a plan, the Manual axes, as for `make_train_step`. Over all other axes the parameters keep their
            layout.

    Raises:
        TypeError: a plan without parameters, `manual` without a plan, or `after` with something other than arrays.
        ValueError: `after` with another structure; `manual` without an axis of the plan, or with an axis of another
            mesh.

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
        return _compare(thing, params, mesh, after)
    if isinstance(thing, Mesh) and params is None:
        return str(draw_mesh(thing))
    if hasattr(thing, "describe"):
        if params is None:
            raise TypeError("describe: a plan must come with parameters; got none. Call describe(plan, params, mesh).")
        return str(thing.describe(params, mesh, manual))
    if params is not None or mesh is not None:
        check_kind("describe", "plan", thing, (PLAN,))
    check_kind("describe", "thing", thing, (ARRAYS,))
    if is_on_devices(thing):
        return str(draw_array(thing))
    rows = [("leaf", "global", "dtype", "spec", "local", "devices", "bytes/device")]
    for name, x in _list_leaves(thing).items():
        shape, dtype = _describe_global(x)
        local = _describe_local(x)
        rows.append((name, shape, dtype, local.spec, local.shape, local.devices, local.bytes))
    return f"{table(rows)}\n{_count_leaves(rows)}, {bytes_per_device(thing):,} bytes on each device"


def draw_array(x: Any) -> DeviceGrid:
    """The devices that hold each piece of an array.

    Of an 8x4 array split as P("data", "model") on a mesh of 2x4: rows [0:4] and [4:8], columns [:, 0:1] to [:, 3:4],
    and in each cell the id of one device. Split as P("data") alone it is one column, with four ids in each cell.
    """
    spans = _find_spans(x)
    # Of 8 rows over 4 devices dim 0 has the pieces (0, 2), (2, 4), (4, 6) and (6, 8).
    pieces = []
    shown = []
    hidden = []
    for dim, device_spans in enumerate(zip(*spans.values(), strict=True)):
        pieces.append(sorted(set(device_spans)))
        # A table has two dims: of an array with more dims, only the split dims are shown.
        if len(pieces[dim]) > 1 or len(x.shape) <= 2:
            shown.append(dim)
        else:
            hidden.append(str(dim))
    cells: dict[tuple[int, ...], tuple[int, ...]] = {}
    # In the order of ids: a cell then reads 0,4 and not 4,0.
    for device in sorted(spans, key=lambda device: device.id):
        index = tuple(pieces[dim].index(spans[device][dim]) for dim in shown)
        # Devices that hold the same piece share a cell.
        cells[index] = (*cells.get(index, ()), device.id)
    labels = []
    for dim in shown:
        # As an index is written in Python: `[:, 0:4]` for rows of dim 1.
        before = ":, " * dim
        labels.append([f"[{before}{start}:{stop}]" for start, stop in pieces[dim]])
    shape, dtype = _describe_global(x)
    local = _describe_local(x)
    title = f"{local.shape}, {local.bytes} bytes, on {_describe_holders(list(spans))}{_describe_hidden(hidden)}"
    return DeviceGrid((f"{shape} {dtype}, {local.spec}", title), labels, cells)


def _find_spans(x: Any) -> dict[jax.Device, tuple[tuple[int, int], ...]]:
    """For each device, the start and the end of its piece of an array in each dim."""
    spans = {}
    for device, index in x.sharding.devices_indices_map(tuple(x.shape)).items():
        device_spans = []
        for dim_slice, size in zip(index, x.shape, strict=True):
            start, stop, _ = dim_slice.indices(size)
            device_spans.append((start, stop))
        spans[device] = tuple(device_spans)
    return spans


def _describe_holders(devices: Sequence[jax.Device]) -> str:
    platform = devices[0].platform
    if len(devices) == 1:
        return f"one {platform} device"
    return f"each of {len(devices)} {platform} devices"


def _describe_hidden(dims: Sequence[str]) -> str:
    """Which dims a picture does not show, because they are whole."""
    if not dims:
        return ""
    noun = "dim" if len(dims) == 1 else "dims"
    return f"; {noun} {', '.join(dims)} whole"


def _compare(thing: Any, params: Any, mesh: Any, after: Any) -> str:
    """Arrays or pytrees before and after, side by side."""
    if params is not None or mesh is not None:
        raise TypeError(
            "describe: after must come with an array or a pytree alone; got params or a mesh too. Leave them out."
        )
    check_kind("describe", "thing", thing, (ARRAYS,))
    check_kind("describe", "after", after, (ARRAYS,))
    if is_array(thing) and is_array(after):
        return put_beside(f"before: {_describe_array(thing)}", f"after: {_describe_array(after)}")
    before_leaves = _list_leaves(thing)
    after_leaves = _list_leaves(after)
    different = sorted(before_leaves.keys() ^ after_leaves.keys())
    if different:
        raise ValueError(
            f"describe: after must have the leaves of thing; got {different[0]!r} in one of them alone. Pass the same "
            "tree, before and after."
        )
    rows = [("leaf", "global", "dtype", "before", "local", "bytes/device", "after", "local", "bytes/device")]
    for name, x in before_leaves.items():
        shape, dtype = _describe_global(x)
        old = _describe_local(x)
        new = _describe_local(after_leaves[name])
        rows.append((name, shape, dtype, old.spec, old.shape, old.bytes, new.spec, new.shape, new.bytes))
    old_bytes = f"{bytes_per_device(thing):,} bytes on each device"
    new_bytes = f"{bytes_per_device(after):,} bytes on each device"
    return f"{table(rows)}\n{_count_leaves(rows)}, before {old_bytes}, after {new_bytes}"


def _describe_array(x: Any) -> str:
    """The picture of an array; only its title if the array is on the host, or its devices are not known."""
    if is_on_devices(x):
        return str(draw_array(x))
    shape, dtype = _describe_global(x)
    return f"{shape} {dtype}, {_describe_local(x).spec}"


def _list_leaves(tree: Any) -> dict[str, Any]:
    return by_path("describe", jax.tree_util.tree_leaves_with_path(tree))


def _count_leaves(rows: Sequence[Any]) -> str:
    count = len(rows) - 1  # the first row has the names of columns
    return "1 leaf" if count == 1 else f"{count} leaves"


def _describe_global(x: Any) -> tuple[str, str]:
    """Global shape, which is not known inside shard_map, and dtype."""
    dtype = str(getattr(x, "dtype", type(x).__name__))
    if _find_bound_sizes(x):
        return "-", dtype
    return _format_shape(jax.numpy.shape(x)), dtype


class LocalText(NamedTuple):
    """One device's part of an array, in words."""

    spec: str
    shape: str
    devices: str  # how many
    bytes: str


def _describe_local(x: Any) -> LocalText:
    sharding = getattr(x, "sharding", None)
    sizes = _find_bound_sizes(x)
    devices = 0
    if sizes:  # inside shard_map a value has no spec, but a type that says over which axes it varies
        devices = math.prod(sizes.values())
    elif sharding is not None:
        devices = sharding.num_devices
    return LocalText(_describe_spec(x), _format_shape(shard_shape(x)), str(devices), f"{shard_bytes(x):,}")


def _describe_spec(x: Any) -> str:
    sizes = _find_bound_sizes(x)
    if sizes:
        # jax tracks no types under vmap: a value may vary over its axis.
        may_vary = (sizes.keys() - tracked_axes()) | varying_axes(x)
        axes = [axis for axis in sizes if axis in may_vary]
        if not axes:
            return "the same on all"
        return f"varies over {quote(axes)}"
    if isinstance(x, jax.core.Tracer):
        return "traced"
    sharding = getattr(x, "sharding", None)
    if sharding is None:
        return "host"
    spec = getattr(sharding, "spec", None)
    if spec is None:
        return "one device"
    return brief_spec(spec)


def _find_bound_sizes(x: Any) -> dict[str, int]:
    """The axes that shard_map or vmap binds around a value, with their sizes; none for an array that is not traced."""
    if not isinstance(x, jax.core.Tracer):
        return {}
    return bound_axes()


def is_on_devices(x: Any) -> bool:
    """Whether a value is an array, or the description of one, on devices that are known."""
    sharding = getattr(x, "sharding", None)
    if not is_array(x) or isinstance(x, jax.core.Tracer) or sharding is None:
        return False
    return not isinstance(getattr(sharding, "mesh", None), AbstractMesh)


def _format_shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"
