"""Meshes of named axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Literal, NamedTuple, overload

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from shardkit._arguments.checks import format_count, format_sizes, quote
from shardkit._arguments.typed import Devices, typed
from shardkit._jax import backends
from shardkit.meshes.device_order import DeviceOrder, assume_equal_gathers, order_devices
from shardkit.meshes.simulated import warn_if_few_threads, widen_thread_pool


@overload
def make_mesh(devices: Devices | None = None, /, **sizes: int) -> Mesh: ...  # sizes may be a dict[str, int]


@overload
def make_mesh(
    devices: Devices | None = None,
    *,
    axis_types: AxisType | Sequence[AxisType] = AxisType.Auto,
    placement: DeviceOrder | Literal["auto"] | None = None,
    **sizes: int,
) -> Mesh: ...


@typed  # type: ignore[misc]  # a size of the name axis_types or placement is refused
def make_mesh(
    devices: Devices | None = None,
    *,
    axis_types: AxisType | Sequence[AxisType] = AxisType.Auto,
    placement: DeviceOrder | Literal["auto"] | None = None,
    **sizes: int,
) -> Mesh:
    """Builds a mesh of named axes: `make_mesh(data=2, model=-1)`.

    Args:
        devices: the devices to use, in row-major order of the axes; you may pass a subset. By default all devices, with
            mesh neighbors close to each other on the hardware.
        axis_types: one AxisType, or one per axis; other than `AxisType.Auto` only with Explicit sharding.
        placement: the order of the devices. "auto" orders them so that the busiest links of a TPU's torus or a GPU
            cluster carry least, if each axis gathers the same array. You can also pass the result of `aot.place` for
            your step and these devices; you may then leave out the sizes. None: the order of `devices`, otherwise
            jax's.
        **sizes: axis name and size, from the outermost axis to the innermost. One size may be -1: as many as are left.

    Raises:
        ValueError: no axis, a size below 1, two sizes of -1, a duplicate device, or a product that is not the number of
            devices. A placement for another mesh or machine, or "auto" for devices that fill no box.

    Example:
        >>> dict(sk.make_mesh(data=2, model=-1).shape)
        {'data': 2, 'model': 4}
    """
    if isinstance(placement, DeviceOrder):
        sizes = sizes or dict(placement.axes)
    _check_types(axis_types, len(sizes))
    if not sizes:
        raise ValueError("make_mesh: at least one axis is needed; got none. Pass for example make_mesh(data=-1).")
    if devices is None:
        if not backends.jax_has_started():
            # The next line starts jax, whose pool of threads cannot grow later.
            widen_thread_pool()
        used = jax.devices()
    else:
        used = list(devices)
        _check_distinct(used)
    sizes = _infer_size(sizes, len(used))
    _check_product(sizes, len(used))
    shape = tuple(sizes.values())
    if placement == "auto":
        _check_torus(used)
        placement = order_devices(used, sizes, assume_equal_gathers(sizes))  # None for devices without known links
    if isinstance(placement, DeviceOrder):
        if list(sizes.items()) != list(placement.axes.items()):
            raise ValueError(
                "make_mesh: placement must be one for the same mesh; got one of "
                f"{format_sizes(placement.axes.items())} for {format_sizes(sizes.items())}. Leave the sizes out, or "
                "make another with aot.place."
            )
        grid = placement.grid(used)
    elif devices is None:
        grid = mesh_utils.create_device_mesh(shape, used)
    else:
        # Devices that the user lists keep their order: jax's rule would move them.
        grid = np.array(used).reshape(shape)
    return _build_mesh(grid, tuple(sizes), axis_types)


@typed
def abstract_mesh(**sizes: int) -> AbstractMesh:
    """Builds a mesh of named axes without devices, of any size: for `census`, `lint`, `explain` and `aot.compile`.

    Args:
        **sizes: axis name and size, from the outermost axis to the innermost.

    Returns:
        `jax.sharding.AbstractMesh` with Auto axes.

    Raises:
        ValueError: no axis, or a size below 1.

    Example:
        >>> pod = sk.abstract_mesh(data=64, model=16)
        >>> double = jax.shard_map(lambda x: sk.all_reduce(x, "model"), mesh=pod, in_specs=P("model"), out_specs=P())
        >>> jax.eval_shape(double, jnp.ones((32, 8))).shape
        (2, 8)
    """
    if not sizes:
        raise ValueError("abstract_mesh: at least one axis is needed; got none. Pass for example abstract_mesh(x=8).")
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(
                f"abstract_mesh: the size of axis {name!r} must be at least 1; got {size}. Pass the size: there are no "
                "devices to infer it from."
            )
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


@typed
def make_hybrid_mesh(
    *,
    fast: Mapping[str, int],
    slow: Mapping[str, int],
    devices: Devices | None = None,
    group_of: Callable[[jax.Device], int] | None = None,
) -> Mesh:
    """Builds a mesh over two kinds of links: fast links inside a group of devices, slow links between groups.

    `make_hybrid_mesh(fast={"fsdp": 4}, slow={"data": 2})` puts the "fsdp" axis inside each group, so only collectives
    over "data" use the slow links. You may name an axis in both: its slow part is the outer part.

    Args:
        fast: axis sizes inside one group.
        slow: axis sizes between groups; the product is the number of groups.
        devices: the devices to use; by default all.
        group_of: the group of a device; by default its slice, or its process where there are no slices.

    Returns:
        Mesh with the slow axes first, then the fast ones.

    Raises:
        ValueError: the groups differ in size, or their number or size does not match the products.

    Example:
        >>> mesh = sk.make_hybrid_mesh(fast={"model": 4}, slow={"data": 2}, group_of=lambda device: device.id // 4)
        >>> [[device.id for device in group] for group in mesh.devices]
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    if devices is None:
        devices = jax.devices()
    if group_of is None:
        group_of = _find_slice_or_process
    groups: dict[int, list[jax.Device]] = {}
    for device in devices:
        groups.setdefault(group_of(device), []).append(device)
    count = math.prod(slow.values())
    size = math.prod(fast.values())
    group_sizes = sorted(map(len, groups.values()))
    if group_sizes != [size] * count:
        raise ValueError(
            f"make_hybrid_mesh: slow axes {format_sizes(slow.items())} over fast axes {format_sizes(fast.items())} "
            f"need {count} group(s) of {size} devices; got group sizes {group_sizes}. Change the sizes or pass "
            "group_of."
        )
    grids = []
    # jax's rule inside each group alone: over all devices it could put devices of two groups next to each other on a
    # fast axis.
    for _, group in sorted(groups.items()):
        grids.append(mesh_utils.create_device_mesh(tuple(fast.values()), group))
    grid = np.stack(grids).reshape(*slow.values(), *fast.values())
    # Worked example: slow {"data": 2} and fast {"data": 2, "model": 4} give a grid [data, data, model]. The slow part
    # of an axis goes directly before its fast part, and they become one axis: data=4.
    names = tuple(dict.fromkeys([*slow, *fast]))
    order: list[int] = []
    shape = []
    for name in names:
        if name in slow:
            order.append(list(slow).index(name))
        if name in fast:
            order.append(len(slow) + list(fast).index(name))
        shape.append(slow.get(name, 1) * fast.get(name, 1))
    return _build_mesh(grid.transpose(order).reshape(shape), names, AxisType.Auto)


def _find_slice_or_process(device: jax.Device) -> int:
    # Inside a slice the links are fast. Without slices, as on CPUs, the devices of one process stand for a group: if a
    # host has several processes, pass group_of.
    return getattr(device, "slice_index", device.process_index)


def _check_types(axis_types: object, count: int) -> None:
    if isinstance(axis_types, AxisType):
        return
    types: list[object] = []
    if isinstance(axis_types, Sequence) and not isinstance(axis_types, str):
        types = list(axis_types)
    if len(types) != count or not all(isinstance(kind, AxisType) for kind in types):
        raise TypeError(
            f"make_mesh: axis_types must be one AxisType, or one for each of {count} axes; got {axis_types!r}. Pass "
            "for example jax.sharding.AxisType.Auto."
        )


def _check_distinct(devices: Sequence[jax.Device]) -> None:
    for device in devices:
        if devices.count(device) > 1:
            raise ValueError(
                f"make_mesh: devices must be distinct; got {device} more than once. Pass each device once."
            )


def _check_product(sizes: Mapping[str, int], devices: int) -> None:
    product = math.prod(sizes.values())
    if product == devices:
        return
    remedy = f"simulate_devices({product})"
    if product < devices:
        remedy = f"pass devices=jax.devices()[:{product}]"
    raise ValueError(
        f"make_mesh: the product of the axis sizes must be the number of devices; got {format_sizes(sizes.items())}, "
        f"which needs {product}, for {devices} devices. Change a size, pass -1 for one size, or {remedy}."
    )


def _check_torus(devices: Sequence[jax.Device]) -> None:
    """Refuses a part of a torus, because nothing says whether its ends are linked."""
    torus = [device for device in devices[0].client.devices() if device.platform == "tpu"]
    if set(torus) - set(devices):
        raise ValueError(
            f"make_mesh: placement='auto' must have all devices of a torus; got {len(devices)} of {len(torus)}. Leave "
            "devices out, or placement."
        )


def draw_mesh(mesh: Mesh) -> DeviceGrid:
    """The device at each coordinate of a mesh."""
    kind = mesh.devices.flat[0].platform
    cells = {}
    processes = set()
    for coordinates, device in np.ndenumerate(mesh.devices):
        cells[coordinates] = (device.id,)
        processes.add(device.process_index)
    axes = []
    labels = []
    for name, size in mesh.shape.items():
        axes.append(f"{name}={size}")
        labels.append([f"{name}={index}" for index in range(size)])
    devices = format_count(mesh.size, kind + " device")
    title = f"mesh {' x '.join(axes)}: {devices}, {format_count(len(processes), 'process', 'es')}"
    return DeviceGrid((title,), labels, cells)


def _build_mesh(grid: np.ndarray, names: tuple[str, ...], axis_types: AxisType | Sequence[AxisType]) -> Mesh:
    if isinstance(axis_types, AxisType):
        axis_types = (axis_types,) * len(names)
    # The devices of other processes run on threads of theirs.
    local = [device for device in grid.flat if device.process_index == device.client.process_index()]
    if len(local) > 1 and local[0].platform == "cpu":
        warn_if_few_threads(len(local), stacklevel=5)  # the caller of make_mesh or make_hybrid_mesh
    return Mesh(grid, names, axis_types=tuple(axis_types))


def _infer_size(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """The sizes of the axes, with the one that is -1 inferred from the number of devices."""
    open_axes = []
    wrong_sizes = []
    product = 1  # of the sizes that are known
    for name, size in sizes.items():
        if size == -1:
            open_axes.append(name)
        elif size < 1:
            wrong_sizes.append((name, size))
        else:
            product *= size
    if wrong_sizes:
        raise ValueError(
            f"make_mesh: an axis size must be at least 1, or -1 to infer it; got {format_sizes(wrong_sizes)}. Change "
            "the size."
        )
    if len(open_axes) > 1:
        raise ValueError(
            f"make_mesh: only one axis size may be -1; got -1 for {quote(open_axes)}. Pass a size for all but one."
        )
    if not open_axes:
        return dict(sizes)
    [axis] = open_axes
    if count % product:
        raise ValueError(
            f"make_mesh: the product of the other sizes must divide the number of devices to infer axis {axis!r}; got "
            f"{product} for {count} devices. Change a size."
        )
    return {**sizes, axis: count // product}


Ids = tuple[int, ...]
_LISTED = 8  # with more devices in a cell, consecutive ids are written as a range


class GridTable(NamedTuple):
    """A table of a grid."""

    title: str  # the labels of the dims before the last two
    row_labels: list[str]
    column_labels: list[str]
    cells: list[list[Ids]]  # rows of cells; a cell holds the ids of its devices


class DeviceGrid(NamedTuple):
    """Device ids over a grid of any number of dims."""

    title: tuple[str, ...]  # lines above the tables
    labels: Sequence[Sequence[str]]  # for each dim the label of each index
    cells: Mapping[Ids, Ids]  # the ids of the devices at each index of the grid

    def tables(self) -> Iterator[GridTable]:
        """The tables, whose rows and columns are the last two dims: one for each index of the dims before.

        Worked example: a grid of [3, 2, 4] is three tables of two rows and four columns. The second one has the cell
        of the index (1, row, column) at each row and column, and the label of index 1 of dim 0 as its title.
        """
        missing = max(0, 2 - len(self.labels))
        # A grid of one dim, [4], is one row of four columns: its dim of rows has one index, without a label.
        *outer_labels, row_labels, column_labels = [[""]] * missing + list(self.labels)
        sizes = [len(labels) for labels in outer_labels]
        for outer in np.ndindex(*sizes):
            cells = []
            for row in range(len(row_labels)):
                row_cells = []
                for column in range(len(column_labels)):
                    index = (*outer, row, column)
                    # A grid of one dim is indexed by the column alone, a grid of none by ().
                    row_cells.append(self.cells[index[missing:]])
                cells.append(row_cells)
            names = [labels[index] for labels, index in zip(outer_labels, outer, strict=True)]
            yield GridTable(", ".join(names), list(row_labels), list(column_labels), cells)

    def __str__(self) -> str:
        tables = list(self.tables())
        # Over all tables, so that their columns stand under each other.
        label_width = max(map(len, tables[0].row_labels))
        widths = list(map(len, tables[0].column_labels))
        for table in tables:
            for cells in table.cells:
                for column, ids in enumerate(cells):
                    widths[column] = max(widths[column], len(format_ids(ids)))
        lines = list(self.title)
        for table in tables:
            if table.title:
                lines.append(table.title)
            if any(table.column_labels):
                lines.append(_format_row("", table.column_labels, label_width, widths))
            for label, cells in zip(table.row_labels, table.cells, strict=True):
                if any(cells):
                    lines.append(_format_row(label, list(map(format_ids, cells)), label_width, widths))
        return "\n".join(map(str.rstrip, lines))


def _format_row(label: str, cells: Sequence[str], label_width: int, widths: Sequence[int]) -> str:
    row = label.ljust(label_width)
    for cell, width in zip(cells, widths, strict=True):
        row += "  " + cell.rjust(width)
    return row


def format_ids(ids: Ids) -> str:
    """The ids of a cell as text: `0,4`, and `0-15,32-47` for many."""
    if len(ids) <= _LISTED:
        return ",".join(map(str, ids))
    runs: list[tuple[int, int]] = []  # the first id and the last of each run
    for number in ids:
        if runs and number == runs[-1][1] + 1:
            first, _ = runs[-1]
            runs[-1] = (first, number)
        else:
            runs.append((number, number))
    texts = []
    for first, last in runs:
        texts.append(str(first) if first == last else f"{first}-{last}")
    return ",".join(texts)


def put_beside(left: str, right: str) -> str:
    """Two texts of several lines next to each other."""
    left_lines = left.split("\n")
    right_lines = right.split("\n")
    width = max(map(len, left_lines))
    lines = []
    for ours, theirs in zip_longest(left_lines, right_lines, fillvalue=""):
        lines.append(f"{ours:<{width}}    {theirs}".rstrip())
    return "\n".join(lines)
