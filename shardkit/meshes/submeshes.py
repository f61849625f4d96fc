"""Submeshes: the slices of a mesh along one axis, and arrays over the mesh that are joined from arrays on its slices.

A pipeline of several programs has a stage on each slice, and DiLoCo a worker; a checkpoint of workers is written from
arrays over the mesh.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit._arguments.checks import format_sizes, quote
from shardkit._arguments.typed import typed


@typed
def submeshes(mesh: Mesh, axis: str) -> list[Mesh]:
    """Slices a mesh along one axis: a mesh for each stage of a pipeline.

    Args:
        mesh: the mesh; `make_mesh(stage=2, data=4)` is split along "stage" into two halves.
        axis: the mesh axis to split. The slices keep it, with size 1, so your specs stay valid.

    Returns:
        One mesh per device of the axis, in its order.

    Raises:
        ValueError: the mesh has no such axis.

    Example:
        >>> [dict(part.shape) for part in sk.submeshes(mesh, "data")]
        [{'data': 1, 'model': 4}, {'data': 1, 'model': 4}]
    """
    if axis not in mesh.shape:
        raise ValueError(
            f"submeshes: axis {axis!r} is not an axis of this mesh; its axes are {quote(mesh.axis_names)}. "
            "Use one of them, or add the axis to make_mesh."
        )
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"submeshes: the mesh must have devices; got abstract {format_sizes(mesh.shape.items())}. Pass "
            "sk.make_mesh(...)."
        )
    # np.split leaves the axis there, with size 1.
    slices = np.split(mesh.devices, mesh.shape[axis], mesh.axis_names.index(axis))
    return [Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types) for devices in slices]


def join_submeshes(
    trees: Sequence[dict[str, jax.Array] | None], mesh: Mesh, specs: dict[str, PartitionSpec], *, rows: bool = False
) -> dict[str, jax.Array]:
    """Joins the arrays on the submeshes of a mesh to arrays over the mesh. They keep their buffers: nothing is copied.

    Worked example: two submeshes of 2 devices, each with an array [3, 8] whose dim 1 its devices split: [3, 4] on a
    device. With `rows` and the spec `P("stage", "data")` they become one array [6, 8] over the mesh of 4 devices, the
    rows of the second after those of the first. Without, and with `P(None, "data")`, they are the same array [3, 8], of
    which each submesh has a copy.

    Args:
        trees: for each submesh its arrays by name; None for a submesh of another process.
        mesh: the mesh that they are slices of.
        specs: the layout of each array over the mesh.
        rows: whether the arrays of one submesh come after those of another along dim 0; else they are the same.
    """
    local_trees = [arrays for arrays in trees if arrays is not None]
    joined: dict[str, jax.Array] = {}
    for name, spec in specs.items():
        shape = local_trees[0][name].shape
        shards = []
        # A process passes the shards that it has; jax puts each where its device stands in the mesh.
        for arrays in local_trees:
            shards += [shard.data for shard in arrays[name].addressable_shards]
        if rows and shape:
            shape = (len(trees) * shape[0], *shape[1:])
        elif rows:
            # A scalar, such as a count of steps, has no rows: each submesh gives one.
            shape = (len(trees),)
            shards = [shard[None] for shard in shards]
        joined[name] = jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, spec), shards)
    return joined
