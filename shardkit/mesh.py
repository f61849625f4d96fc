"""Meshes of named axes, simulated devices, and a picture of where each device stands."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from shardkit import _platform
from shardkit._check import quoted, sized
from shardkit._typed import typed

# jax 0.10 runs the executions of all simulated devices in one pool of max(NPROC, n) threads. Of n devices, n - 1
# can sit in a collective, and the n launches of a later step wait for their turn in the same pool: from 2n threads
# on, the last device always finds one. 4n leaves room for programs dispatched from a second thread.
_THREADS_PER_DEVICE = 4
_SAFE_THREADS_PER_DEVICE = 2


@typed
def simulate_devices(n: int) -> None:
    """Replaces this process's devices by `n` CPU devices; call it before jax touches a device.

    Also gives jax's CPU runtime the threads it needs: with fewer, steps dispatched without waiting can deadlock
    (see "It hangs" in the README). A second call with the same `n` does nothing.

    Args:
        n: number of devices, at least 1. They share this machine's cores: results are those of `n` real devices,
            times are not.

    Raises:
        ValueError: `n` is below 1.
        RuntimeError: jax has already started with other devices.
    """
    if n < 1:
        raise ValueError(f"simulate_devices: n must be at least 1; got {n}. Pass the number of devices you want.")
    if _platform.jax_has_started():
        devices = jax.devices()
        if len(devices) == n and devices[0].platform == "cpu":
            _warn_if_few_threads(n, stacklevel=4)
            return
        raise RuntimeError(
            f"simulate_devices: jax has already started with {_count(len(devices), devices[0].platform + ' device')}, "
            f"so it cannot be given {n}. Call simulate_devices({n}) first thing in the program, before anything "
            f"touches a device, or start python with XLA_FLAGS=--xla_force_host_platform_device_count={n} "
            f"NPROC={_THREADS_PER_DEVICE * n}."
        )
    jax.config.update("jax_platforms", "cpu")
    offer_cpu_devices(n)


def offer_cpu_devices(n: int) -> None:
    """Has jax start `n` CPU devices, with the threads they need, where it finds no accelerator."""
    os.environ.update(cpu_environment(n, os.environ))
    jax.config.update("jax_num_cpu_devices", n)
    _platform.leave_out_idle_tpu()


def cpu_environment(n: int, environ: Mapping[str, str]) -> dict[str, str]:
    """What a process with `environ` must change in it to have threads for `n` CPU devices, and no other number."""
    flag = r"--xla_force_host_platform_device_count=\d+"
    flags = re.sub(flag, "", environ.get("XLA_FLAGS", "")).strip()
    return {"XLA_FLAGS": flags, "NPROC": str(max(_threads_wanted(environ), _THREADS_PER_DEVICE * n))}


def _widen_thread_pool(n: int) -> None:
    os.environ["NPROC"] = cpu_environment(n, os.environ)["NPROC"]


def _threads_wanted(environ: Mapping[str, str]) -> int:
    nproc = environ.get("NPROC", "")
    return int(nproc) if nproc.isdigit() else (os.cpu_count() or 1)


def _threads_there(n: int) -> int:
    """Threads in the pool that runs `n` CPU devices: counted where the system shows them, else deduced."""
    try:
        names = Counter(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))
    except OSError:
        names = Counter()
    if names["tf_XLAExecute"]:  # later runtimes launch from a pool of their own: nothing to wait for
        return _SAFE_THREADS_PER_DEVICE * n
    return names["tf_XLAEigen"] or max(_threads_wanted(os.environ), n)


def _warn_if_few_threads(n: int, stacklevel: int) -> None:
    threads = _threads_there(n)
    if threads < _SAFE_THREADS_PER_DEVICE * n:
        warnings.warn(
            f"{n} simulated devices share {threads} threads of jax's CPU runtime, and below "
            f"{_SAFE_THREADS_PER_DEVICE * n} steps dispatched without waiting can deadlock. Call "
            f"shardkit.simulate_devices({n}) before jax starts, or start python with "
            f"NPROC={_THREADS_PER_DEVICE * n}.",
            RuntimeWarning,
            stacklevel=stacklevel,
        )


@typed
def make_mesh(
    devices: Sequence[jax.Device] | None = None,
    *,
    axis_types: AxisType | Sequence[AxisType] = AxisType.Auto,
    **sizes: int,
) -> Mesh:
    """Builds a mesh of named axes: `make_mesh(data=2, model=-1)`.

    Args:
        devices: the devices to use, in row-major order of the axes (a subset is allowed); by default all devices,
            in an order that keeps neighbours near each other on the hardware.
        axis_types: `AxisType.Auto` unless the surrounding code uses Explicit sharding; one for all axes, or one each.
        **sizes: axis name and size, from the outermost axis to the innermost; one size may be -1 (what is left).

    Returns:
        `jax.sharding.Mesh` whose axes have the given names and sizes.

    Raises:
        ValueError: no axis, a size below 1, two sizes of -1, a device that is named twice, or a product that is not the
            number of devices.
    """
    _check_types(axis_types, len(sizes))
    if not sizes:
        raise ValueError("make_mesh: at least one axis is needed; got none. Write for example make_mesh(data=-1).")
    chosen = devices is not None
    _check_devices("make_mesh", devices or ())
    twice = next((d for d in devices or () if list(devices or ()).count(d) > 1), None)
    if twice is not None:
        raise ValueError(f"make_mesh: each device must be named once; got {twice} more than once. Name others.")
    if devices is None:
        if not _platform.jax_has_started():
            _widen_thread_pool(_cpu_devices_to_come())
        devices = jax.devices()
    sizes = _fill(sizes, len(devices))
    shape, names = tuple(sizes.values()), tuple(sizes)
    if math.prod(shape) != len(devices):
        need = math.prod(shape)
        remedy = f"pass devices=jax.devices()[:{need}]" if need < len(devices) else f"simulate_devices({need})"
        raise ValueError(
            f"make_mesh: the axis sizes must multiply to the number of devices; got {sized(sizes.items())}, which "
            f"needs {need}, and {len(devices)} devices. Change a size, write -1 for one of them, or {remedy}."
        )
    grid = np.array(devices).reshape(shape) if chosen else mesh_utils.create_device_mesh(shape, devices)
    return _mesh(grid, names, axis_types)


@typed
def abstract_mesh(**sizes: int) -> AbstractMesh:
    """A mesh of named axes without devices, of any size: for `census`, `lint`, `explain` and `aot.compile`.

    Args:
        **sizes: axis name and size, from the outermost axis to the innermost.

    Returns:
        `jax.sharding.AbstractMesh` with Auto axes.

    Raises:
        ValueError: no axis, or a size below 1.
    """
    if not sizes:
        raise ValueError("abstract_mesh: at least one axis is needed; got none. Write for example abstract_mesh(x=8).")
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(
                f"abstract_mesh: the size of axis {name!r} must be at least 1; got {size}. Write the size; there are "
                "no devices to count."
            )
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


@typed
def make_hybrid_mesh(
    *,
    fast: Mapping[str, int],
    slow: Mapping[str, int],
    devices: Sequence[jax.Device] | None = None,
    group_of: Callable[[jax.Device], int] | None = None,
) -> Mesh:
    """Builds a mesh over two kinds of links: fast inside a group of devices, slow between groups.

    `make_hybrid_mesh(fast={"fsdp": 4}, slow={"data": 2})` keeps every `fsdp` neighbour inside one group, so that only
    the `data` collectives cross the slow links. An axis named in both has its slow part outermost.

    Args:
        fast: axis sizes inside one group.
        slow: axis sizes between groups; the product is the number of groups.
        devices: the devices to use; by default all.
        group_of: the group a device belongs to; by default its slice, and its process where there are no slices.

    Returns:
        Mesh with the slow axes first, then the fast ones.

    Raises:
        ValueError: the groups differ in size, or their number or size does not match the products.
    """
    devices = jax.devices() if devices is None else devices
    _check_devices("make_hybrid_mesh", devices)
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
    for name in names:  # the slow part of an axis just before its fast part
        order += [list(slow).index(name)] if name in slow else []
        order += [len(slow) + list(fast).index(name)] if name in fast else []
    shape = [slow.get(name, 1) * fast.get(name, 1) for name in names]
    return _mesh(grid.transpose(order).reshape(shape), tuple(names), AxisType.Auto)


def _check_devices(where: str, devices: Sequence[object]) -> None:
    for device in devices:
        if not hasattr(device, "id"):
            raise TypeError(
                f"{where}: devices must be those of jax; got {device!r}. Pass for example jax.devices()[:4]."
            )


def _check_types(axis_types: object, count: int) -> None:
    each = axis_types if isinstance(axis_types, Sequence) and not isinstance(axis_types, str) else [axis_types] * count
    if len(each) != count or not all(isinstance(kind, AxisType) for kind in each):
        raise TypeError(
            f"make_mesh: axis_types must be one AxisType, or one for each of {count} axes; got {axis_types!r}. Pass "
            "jax.sharding.AxisType.Auto."
        )


def draw(mesh: Mesh) -> str:
    """A table of device ids by coordinates, for a mesh of any rank: rows and columns are the last two axes."""
    devices, names = mesh.devices, mesh.axis_names
    kind = mesh.devices.flat[0].platform
    processes = len({d.process_index for d in devices.flat})
    title = " x ".join(f"{n}={s}" for n, s in mesh.shape.items())
    lines = [f"mesh {title}: {_count(devices.size, kind + ' device')}, {_count(processes, 'process', 'es')}"]
    rows = names[-2] if len(names) > 1 else ""
    ids = np.vectorize(lambda d: d.id)(devices)
    table = ids.reshape(-1, *(ids.shape[-2:] if ids.ndim > 1 else (1, ids.shape[0])))
    heads = [f"{names[-1]}={i}" for i in range(table.shape[2])]
    sides = [f"{rows}={i}" if rows else "" for i in range(table.shape[1])]
    left = max(len(side) for side in sides)
    for block, coordinates in enumerate(np.ndindex(*ids.shape[:-2])):
        if coordinates:
            lines.append(", ".join(f"{n}={c}" for n, c in zip(names, coordinates, strict=False)))
        lines.append(" " * left + "".join(f"  {head}" for head in heads))
        for side, row in zip(sides, table[block], strict=True):
            cells = "".join(f"  {i:>{len(head)}}" for i, head in zip(row, heads, strict=True))
            lines.append(f"{side:<{left}}{cells}")
    return "\n".join(line.rstrip() for line in lines)


def _mesh(grid: np.ndarray, names: tuple[str, ...], axis_types: AxisType | Sequence[AxisType]) -> Mesh:
    types = (axis_types,) * len(names) if isinstance(axis_types, AxisType) else tuple(axis_types)
    local = [d for d in grid.flat if d.process_index == d.client.process_index()]
    if len(local) > 1 and local[0].platform == "cpu":
        _warn_if_few_threads(len(local), stacklevel=5)  # the caller of make_mesh or make_hybrid_mesh
    return Mesh(grid, names, axis_types=types)


def _count(n: int, thing: str, plural: str = "s") -> str:
    return f"{n} {thing}{plural if n != 1 else ''}"


def _cpu_devices_to_come() -> int:
    flag = re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return max(int(flag.group(1)) if flag else 1, _platform.cpu_devices_asked_for(), 1)


def _fill(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    open_axes = [name for name, size in sizes.items() if size == -1]
    bad = {name: size for name, size in sizes.items() if size < 1 and size != -1}
    if bad:
        raise ValueError(
            f"make_mesh: an axis size must be at least 1, or -1 for what is left; got {sized(bad.items())}. "
            "Change the size."
        )
    if len(open_axes) > 1:
        raise ValueError(
            f"make_mesh: only one axis size may be -1; got -1 for {quoted(open_axes)}. Give all but one a size."
        )
    if not open_axes:
        return dict(sizes)
    known = math.prod(size for size in sizes.values() if size != -1)
    if count % known:
        raise ValueError(
            f"make_mesh: axis {open_axes[0]!r} is what is left of {count} devices, which the other sizes "
            f"(product {known}) must divide. Change a size."
        )
    return {name: count // known if size == -1 else size for name, size in sizes.items()}
