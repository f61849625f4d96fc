"""Meshes of named axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Literal, NamedTuple, overload

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from shardkit._arguments.checks import counted, quoted, sized
from shardkit._arguments.typed import Devices, typed
from shardkit._jax import backends
from shardkit.meshes.placement import DeviceOrder, alike, place
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
        devices: the devices to use, in row-major order of the axes (a subset is allowed); by default all devices, with
            mesh neighbors close to each other on the hardware.
        axis_types: one AxisType, or one per axis; other than `AxisType.Auto` only with Explicit sharding.
        placement: "auto": the order of these devices in which the busiest links of a TPU's torus or a GPU cluster carry
            least, if each axis gathers the same array; what `aot.place` found for a step and these devices, whose sizes
            may be left out. None: the order of `devices`, else jax's.
        **sizes: axis name and size, from the outermost axis to the innermost; one size may be -1 (inferred).

    Raises:
        ValueError: no axis, a size below 1, two sizes of -1, a duplicate device, or a product that is not the number of
            devices; a placement for another mesh or machine, "auto" for devices that fill no box.

    Example:
        >>> dict(sk.make_mesh(data=2, model=-1).shape)
        {'data': 2, 'model': 4}
    """
    if isinstance(placement, DeviceOrder):
        sizes = sizes or dict(placement.axes)
    _check_types(axis_types, len(sizes))
    if not sizes:
        raise ValueError("make_mesh: at least one axis is needed; got none. Pass for example make_mesh(data=-1).")
    chosen = [] if devices is None else list(devices)  # an array of devices has no truth value
    twice = next((d for d in chosen if chosen.count(d) > 1), None)
    if twice is not None:
        raise ValueError(f"make_mesh: devices must be distinct; got {twice} more than once. Pass each device once.")
    if devices is None and not backends.jax_has_started():
        widen_thread_pool()
    used = jax.devices() if devices is None else chosen
    sizes = _fill(sizes, len(used))
    shape, names = tuple(sizes.values()), tuple(sizes)
    if math.prod(shape) != len(used):
        need = math.prod(shape)
        remedy = f"pass devices=jax.devices()[:{need}]" if need < len(used) else f"simulate_devices({need})"
        raise ValueError(
            f"make_mesh: the product of the axis sizes must be the number of devices; got {sized(sizes.items())}, "
            f"which needs {need}, for {len(used)} devices. Change a size, pass -1 for one size, or {remedy}."
        )
    if placement == "auto":
        _check_whole(used)
        placement = place(used, sizes, alike(sizes))
    if isinstance(placement, DeviceOrder):
        if list(sizes.items()) != list(placement.axes.items()):
            raise ValueError(
                f"make_mesh: placement must be one for the same mesh; got one of {sized(placement.axes.items())} for "
                f"{sized(sizes.items())}. Leave the sizes out, or make another with aot.place."
            )
        return _mesh(placement.grid(used), names, axis_types)
    grid = mesh_utils.create_device_mesh(shape, used) if devices is None else np.array(used).reshape(shape)
    return _mesh(grid, names, axis_types)


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
    """Builds a mesh over two kinds of links: fast ones inside a group of devices, slow ones between groups.

    `make_hybrid_mesh(fast={"fsdp": 4}, slow={"data": 2})` places each `fsdp` axis inside one group, so that only the
    `data` collectives use the slow links. The slow part of an axis that is in both is its outer part.

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
    devices = jax.devices() if devices is None else devices
    group_of = group_of or (lambda d: getattr(d, "slice_index", d.process_index))
    groups: dict[int, list[jax.Device]] = {}
    for device in devices:
        groups.setdefault(group_of(device), []).append(device)
    count, size = math.prod(slow.values()), math.prod(fast.values())
    found = sorted(len(group) for group in groups.values())
    if found != [size] * count:
        raise ValueError(
            f"make_hybrid_mesh: slow axes {sized(slow.items())} over fast axes {sized(fast.items())} need {count} "
            f"group(s) of {size} devices; got group sizes {found}. Change the sizes or pass group_of."
        )
    inside = [mesh_utils.create_device_mesh(tuple(fast.values()), group) for _, group in sorted(groups.items())]
    grid = np.stack(inside).reshape(*slow.values(), *fast.values())
    names = [*slow, *(name for name in fast if name not in slow)]
    order: list[int] = []
    for name in names:  # the slow part of an axis directly before its fast part
        order += [list(slow).index(name)] if name in slow else []
        order += [len(slow) + list(fast).index(name)] if name in fast else []
    shape = [slow.get(name, 1) * fast.get(name, 1) for name in names]
    return _mesh(grid.transpose(order).reshape(shape), tuple(names), AxisType.Auto)


def _check_types(axis_types: object, count: int) -> None:
    each = axis_types if isinstance(axis_types, Sequence) and not isinstance(axis_types, str) else [axis_types] * count
    if len(each) != count or not all(isinstance(kind, AxisType) for kind in each):
        raise TypeError(
            f"make_mesh: axis_types must be one AxisType, or one for each of {count} axes; got {axis_types!r}. Pass "
            "for example jax.sharding.AxisType.Auto."
        )


def _check_whole(devices: Sequence[jax.Device]) -> None:
    """Refuses a part of a torus: whether its ends are linked is not known."""
    every = [device for device in devices[0].client.devices() if device.platform == "tpu"]
    if set(every) - set(devices):
        raise ValueError(
            f"make_mesh: placement='auto' must have all devices of a torus; got {len(devices)} of {len(every)}. Leave "
            "devices out, or placement."
        )


def grid_of_mesh(mesh: Mesh) -> DeviceGrid:
    """The device at each coordinate of a mesh."""
    kind = mesh.devices.flat[0].platform
    processes = len({d.process_index for d in mesh.devices.flat})
    title = " x ".join(f"{n}={s}" for n, s in mesh.shape.items())
    return DeviceGrid(
        (f"mesh {title}: {counted(mesh.size, kind + ' device')}, {counted(processes, 'process', 'es')}",),
        [[f"{name}={i}" for i in range(size)] for name, size in mesh.shape.items()],
        {at: (device.id,) for at, device in np.ndenumerate(mesh.devices)},
    )


def _mesh(grid: np.ndarray, names: tuple[str, ...], axis_types: AxisType | Sequence[AxisType]) -> Mesh:
    types = (axis_types,) * len(names) if isinstance(axis_types, AxisType) else tuple(axis_types)
    local = [d for d in grid.flat if d.process_index == d.client.process_index()]
    if len(local) > 1 and local[0].platform == "cpu":
        warn_if_few_threads(len(local), stacklevel=5)  # the caller of make_mesh or make_hybrid_mesh
    return Mesh(grid, names, axis_types=types)


def _fill(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    open_axes = [name for name, size in sizes.items() if size == -1]
    bad = {name: size for name, size in sizes.items() if size < 1 and size != -1}
    if bad:
        raise ValueError(
            f"make_mesh: an axis size must be at least 1, or -1 to infer it; got {sized(bad.items())}. Change the size."
        )
    if len(open_axes) > 1:
        raise ValueError(
            f"make_mesh: only one axis size may be -1; got -1 for {quoted(open_axes)}. Pass a size for all but one."
        )
    if not open_axes:
        return dict(sizes)
    known = math.prod(size for size in sizes.values() if size != -1)
    if count % known:
        raise ValueError(
            f"make_mesh: the product of the other sizes must divide the number of devices to infer axis "
            f"{open_axes[0]!r}; got {known} for {count} devices. Change a size."
        )
    return {name: count // known if size == -1 else size for name, size in sizes.items()}


Ids = tuple[int, ...]
_LISTED = 8  # of more devices in one cell, consecutive ones are written as a range


class GridTable(NamedTuple):
    """A table of a grid."""

    at: str  # the labels of the dims before the last two
    sides: list[str]  # the label of each row
    heads: list[str]  # the label of each column
    cells: list[list[Ids]]  # rows of cells; a cell holds the ids of its devices


class DeviceGrid(NamedTuple):
    """Device ids over a grid of any number of dims."""

    title: tuple[str, ...]  # lines above the tables
    labels: Sequence[Sequence[str]]  # for each dim the label of each place along it
    cells: Mapping[Ids, Ids]  # the ids of the devices at each place

    def blocks(self) -> Iterator[GridTable]:
        """The tables, whose rows and columns are the last two dims."""
        rows, columns = [[""], [""], *self.labels][-2:]
        before = self.labels[:-2]
        places = [range(len(each)) for each in self.labels]
        for outer in product(*places[:-2]):
            inner = iter(product(*places[-2:]))
            cells = [[self.cells[*outer, *next(inner)] for _ in columns] for _ in rows]
            at = ", ".join(each[i] for each, i in zip(before, outer, strict=True))
            yield GridTable(at, list(rows), list(columns), cells)

    def __str__(self) -> str:
        blocks = list(self.blocks())
        left = max(len(side) for side in blocks[0].sides)
        texts = [[[written(cell) for cell in row] for row in block.cells] for block in blocks]
        columns = [[row[i] for text in texts for row in text] for i in range(len(blocks[0].heads))]
        widths = [max(map(len, [head, *c])) for head, c in zip(blocks[0].heads, columns, strict=True)]
        lines = list(self.title)
        for block, text in zip(blocks, texts, strict=True):
            lines += [block.at] if block.at else []
            for side, row in zip(["", *block.sides], [block.heads, *text], strict=True):
                cells = "".join(f"  {cell:>{width}}" for cell, width in zip(row, widths, strict=True))
                lines += [f"{side:<{left}}{cells}"] if any(row) else []
        return "\n".join(line.rstrip() for line in lines)


def written(ids: Ids) -> str:
    """The ids of a cell as text: `0,4`, and `0-15,32-47` for many."""
    if len(ids) <= _LISTED:
        return ",".join(map(str, ids))
    runs: list[list[int]] = []
    for each in ids:
        if runs and each == runs[-1][-1] + 1:
            runs[-1][1:] = [each]
        else:
            runs.append([each])
    return ",".join("-".join(map(str, run)) for run in runs)


def beside(left: str, right: str) -> str:
    """Two texts of several lines next to each other."""
    one, other = left.split("\n"), right.split("\n")
    width = max(map(len, one))
    rows = max(len(one), len(other))
    pairs = zip(one + [""] * (rows - len(one)), other + [""] * (rows - len(other)), strict=True)
    return "\n".join(f"{a:<{width}}    {b}".rstrip() for a, b in pairs)
