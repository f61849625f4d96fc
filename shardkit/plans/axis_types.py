"""Meshes with Explicit axes: arguments and results of a step have layouts in their types; inside, its axes are Auto.

Inside shard_map all axes of a plan are Manual, whatever they were before. Around it the optimizer runs, which slices,
reshapes and sums, and is not written for types with layouts. So a step casts its arguments to types over Auto axes, and
its results back. Axes that are not Manual become Auto too: jax 0.10 to 0.12 cannot compile a reduce_scatter of an array
that is split over an Explicit axis.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardkit._jax import compat
from shardkit.meshes.layout import canonical


def auto_mesh(mesh: Any) -> Mesh:
    """The same mesh with Auto axes; the same object if it has no others."""
    types = (AxisType.Auto,) * len(mesh.axis_names)
    if mesh.axis_types == types:
        return mesh
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=types)  # type: ignore[return-value]
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def set_auto_mesh(mesh: Any) -> AbstractContextManager[Any]:
    """A context in which the mesh has Auto axes, also within the caller's `jax.set_mesh` of it with other axes.

    Like `jax.set_mesh`, it cannot be used inside jit.
    """
    auto = auto_mesh(mesh)
    return nullcontext() if auto is mesh else jax.set_mesh(auto)


def change_axis_types(tree: Any, mesh: Any) -> Any:
    """Arrays or their shapes, laid out as they are, over the same mesh with axes of other types. Nothing moves."""

    def change(x: Any) -> Any:
        sharding = getattr(x, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            return x
        # An array on another mesh stays as it is: the step refuses it by name.
        if sharding.mesh == mesh or sharding.mesh.shape != mesh.shape:
            return x
        sharding = NamedSharding(mesh, sharding.spec)
        if isinstance(x, jax.ShapeDtypeStruct):
            return x.update(sharding=sharding)
        return jax.device_put(x, sharding)

    return jax.tree.map(change, tree)


def wrap_for_explicit_axes(fn: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
    """A function for use inside jit with arrays over a mesh with Explicit axes, from one for `auto_mesh(mesh)`.

    The `out_shardings` of the jit give its results types with layouts again.
    """
    auto = auto_mesh(mesh)
    if auto is mesh:
        return fn
    abstract = compat.abstract_mesh_of(auto)

    def take_into_auto_type(x: jax.Array) -> jax.Array:
        # A spec of no axes over Auto axes says nothing about the layout: this changes the type, and moves nothing.
        return jax.sharding.reshard(x, PartitionSpec(*[None] * x.ndim))

    @wraps(fn)
    def run(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(abstract):
            return fn(*jax.tree.map(take_into_auto_type, args))

    return run


def apply_on_auto_axes(fn: Callable[[Any], Any], x: Any, whole: Collection[int]) -> Any:
    """`fn(x)` of an array that may be laid out over Explicit axes, computed as if the axes were Auto.

    The result is laid out as the array is, except for the dims `whole`.
    """
    typed = jax.typeof(x).sharding
    if typed.mesh.empty or auto_mesh(typed.mesh) is typed.mesh:
        return fn(x)
    entries = list(typed.spec)
    for dim in range(len(entries)):
        if dim in whole:
            entries[dim] = None
    layout = NamedSharding(typed.mesh, canonical(PartitionSpec(*entries)))
    run = wrap_for_explicit_axes(fn, typed.mesh)
    # `run` is for use inside jit, and this may be called outside.
    return jax.jit(lambda x: jax.sharding.reshard(run(x), layout))(x)
