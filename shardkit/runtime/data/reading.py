"""Reads global arrays; every process must call `fetch`, `replicate` and `print_global`, in the same order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit._arguments.checks import at_least_zero, mesh_in_context
from shardkit._arguments.typed import Arrays, typed
from shardkit.collectives import all_gather, vary
from shardkit.meshes.layout import path_name
from shardkit.plans.storage import is_padded, stored_array, to_storable
from shardkit.runtime.channel.place import name_processes
from shardkit.runtime.cluster.barrier import find_absent

_PRINTS = itertools.count()  # numbers the barriers: the order of calls is the same on all processes


@typed
def local_shards(x: jax.Array) -> dict[jax.Device, np.ndarray]:
    """Returns the shards of a global array on this process's devices, by device; for typed keys, their integers.

    Example:
        >>> x = sk.runtime.from_full(np.arange(8), mesh, P("model"))
        >>> sk.runtime.local_shards(x)[mesh.devices[0, 1]]
        array([2, 3], dtype=int32)
    """
    if not isinstance(x, jax.Array):
        raise TypeError(f"local_shards: x must be a jax.Array; got a {type(x).__name__}. Place it with from_full.")
    return {shard.device: np.asarray(to_storable(shard.data)) for shard in x.addressable_shards}


@typed
def fetch(tree: Arrays) -> Any:
    """Returns the whole arrays of a tree as NumPy arrays, on every process; for typed keys, their integers.

    Raises:
        ValueError: on a process outside the mesh of a leaf.

    Cost: an all_gather of every leaf split over processes; of one that is whole here, nothing.

    Example:
        >>> sk.runtime.fetch(sk.runtime.from_full(np.arange(4), mesh, P("data")))
        array([0, 1, 2, 3], dtype=int32)
    """

    def gather_leaf(path: Any, x: Any) -> np.ndarray:
        if _is_whole_here(x):
            return np.asarray(to_storable(x))
        if not x.addressable_shards:
            raise ValueError(
                f"fetch: a process must have a device of the array's mesh; leaf {path_name(path)} is on "
                f"{name_processes(processes_of(x.sharding.device_set))}, and this is process {jax.process_index()}. "
                "Call fetch on those only."
            )
        return np.asarray(multihost_utils.process_allgather(to_storable(x), tiled=True))

    return jax.tree_util.tree_map_with_path(gather_leaf, tree)


@typed
def replicate(tree: Arrays, mesh: Mesh | None = None) -> Any:
    """Copies the arrays of a tree to every device of the mesh, whole. Call it in every process of the mesh.

    It replaces `jax.device_put_replicated`, which jax 0.10 removed. The old function prepended a dim of devices to
    every leaf, for `jax.pmap`; here leaves keep their shape.

    Args:
        tree: pytree of global arrays over this mesh's devices, or of host arrays that are the same in every process.
        mesh: the mesh; by default the mesh of `jax.set_mesh`.

    Cost: up to the compiler, an all_gather of every leaf that is split.

    Example:
        >>> x = sk.runtime.from_full(np.arange(8), mesh, P("data"))
        >>> sk.runtime.replicate(x, mesh).is_fully_replicated
        True
    """
    mesh = mesh_in_context("replicate", mesh, devices=True)
    return _make_replicate(mesh)(tree)


@cache  # a new jit would compile again
def _make_replicate(mesh: Mesh) -> Any:
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))


@typed
def print_global(tree: Any, *, timeout: float = 60.0) -> None:
    """Prints the whole arrays of a tree once. Call it in every process; process 0 prints.

    Args:
        tree: pytree of arrays.
        timeout: seconds to wait until all processes have called it.

    Raises:
        ValueError: a timeout that is negative or infinite.
        RuntimeError: not all processes called it, for example under `if jax.process_index() == 0:`.

    Cost: the cost of `fetch`, and a barrier.

    Example:
        >>> sk.runtime.print_global(sk.runtime.from_full(np.arange(4), mesh, P("data")))
        [0 1 2 3]
    """
    at_least_zero("print_global", timeout=timeout)
    if jax.process_count() > 1:
        missing = find_absent(f"shardkit.print_global.{next(_PRINTS)}", timeout)
        if missing is not None:
            raise RuntimeError(
                f"print_global: every process must call it; {missing} did not within {timeout:g} s. Move it out of `if "
                "jax.process_index() == 0:`, or raise timeout."
            )
    arrays = fetch(tree)
    if jax.process_index() == 0:
        print(arrays, flush=True)  # noqa: T201


def _is_whole_here(x: Any) -> bool:
    """Whether every element is on this process's devices."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return True
    return bool(x.is_fully_replicated and x.addressable_shards)


def processes_of(devices: Iterable[Any]) -> list[int]:
    """The processes of devices, ascending."""
    return sorted({device.process_index for device in devices})


def from_every_device(tree: Any, axes: tuple[str, ...]) -> Any:
    """Gathers each device's small vectors `[k]` of one dtype to `[devices, k]` on all devices, inside shard_map.

    The vectors of all leaves go in one message, [1, 2] and [3] as [1, 2, 3]: a collective for each of hundreds of
    leaves would wait hundreds of times for the slowest link.

    Cost: one all_gather over `axes` of all vectors together.
    """
    vectors, structure = jax.tree.flatten(tree)
    message = jnp.concatenate(vary(vectors, axes))
    messages = all_gather(message[None], axes, replicated=True)
    # `split` wants the places between the vectors, so that the end of the last one is left out.
    lengths = [x.size for x in vectors]
    ends = np.cumsum(lengths)[:-1]
    pieces = jnp.split(messages, ends, axis=1)
    return jax.tree.unflatten(structure, pieces)


def on_mesh(where: str, tree: Any, mesh: Mesh | None) -> tuple[Mesh | None, list[tuple[str, Any]]]:
    """The mesh of all leaves (None without leaves), and each leaf as stored on the devices, with its path."""
    leaves = []
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_padded):
        path = path_name(key_path)
        x = stored_array(leaf)
        sharding = getattr(x, "sharding", None)
        leaf_mesh: Any = None
        if isinstance(sharding, NamedSharding):
            leaf_mesh = sharding.mesh
        if mesh is None:
            mesh = leaf_mesh
        if leaf_mesh is None or leaf_mesh != mesh:
            fault = f"is a {type(x).__name__}"
            if sharding:
                fault = f"has {sharding}"
            raise TypeError(
                f"{where}: every leaf must be an array over one mesh; leaf {path} {fault}. Create it with "
                "from_full(tree, mesh, spec), or remove it from the tree."
            )
        leaves.append((path, x))
    if not leaves:
        return None, []
    return mesh, leaves


def on_any_process(is_so: bool) -> bool:
    """Whether it is so on any process; all of them wait for each other."""
    if jax.process_count() == 1:
        return is_so
    answers = multihost_utils.process_allgather(np.bool_(is_so))
    return bool(np.any(answers))
