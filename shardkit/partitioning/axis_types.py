"""Meshes with Explicit axes: results have their layouts in their types, and what is between is compiled for Auto axes.

Inside shard_map all axes of a plan are Manual, whatever they were. Around it run optimizers, which are not written for
types with layouts (they slice, reshape and sum), so a step takes its arguments into Auto types and its results out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardkit.layout import canonical


def auto_mesh(mesh: Any) -> Any:
    """The same mesh with Auto axes; the same object if it has no others."""
    types = (AxisType.Auto,) * len(mesh.axis_names)
    if mesh.axis_types == types:
        return mesh
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=types)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def retyped(tree: Any, mesh: Any) -> Any:
    """Arrays or their shapes, laid out as they are, over the same mesh with axes of other types. Nothing moves."""

    def one(x: Any) -> Any:
        layout = getattr(x, "sharding", None)
        if not isinstance(layout, NamedSharding) or layout.mesh == mesh or layout.mesh.shape != mesh.shape:
            return x
        layout = NamedSharding(mesh, layout.spec)
        return x.update(sharding=layout) if isinstance(x, jax.ShapeDtypeStruct) else jax.device_put(x, layout)

    return jax.tree.map(one, tree)


def with_auto_axes(fn: Callable[..., Any], mesh: Any, out: Callable[..., Any]) -> Callable[..., Any]:
    """A function for a mesh with Explicit axes, for use inside jit, from one for `auto_mesh(mesh)`.

    `out(*args)` are the layouts of the results, a prefix of their tree.
    """
    auto = auto_mesh(mesh)
    if auto is mesh:
        return fn

    @wraps(fn)
    def typed(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(_abstract(auto)):
            result = fn(*jax.tree.map(lambda x: jax.sharding.reshard(x, PartitionSpec(*[None] * x.ndim)), args))
        layouts = jax.tree.map(lambda layout, part: jax.tree.map(lambda _: layout, part), out(*args), result)
        return jax.sharding.reshard(result, layouts)

    return typed


def on_auto_axes(fn: Callable[[Any], Any], x: Any, whole: Collection[int]) -> Any:
    """`fn(x)` of an array that may be over Explicit axes, as if these were Auto; `whole` dims of the result are whole."""
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty or auto_mesh(mesh) is mesh:
        return fn(x)
    entries = [None if dim in whole else entry for dim, entry in enumerate(jax.typeof(x).sharding.spec)]
    out = NamedSharding(mesh, canonical(PartitionSpec(*entries)))
    return jax.jit(with_auto_axes(fn, mesh, lambda _: out))(x)


def types_of(tree: Any, mesh: Any) -> Any:
    """The layouts in the types of a tree's leaves, over a mesh with Explicit axes."""
    return jax.tree.map(lambda x: NamedSharding(mesh, canonical(jax.typeof(x).sharding.spec)), tree)


def typed_init(init: Any, mesh: Any) -> Any:
    """The `init` of a train step over a mesh with Explicit axes, from that over `auto_mesh(mesh)`."""
    auto = auto_mesh(mesh)
    if auto is mesh:
        return init

    @wraps(init)
    def typed(params: Any, key: jax.Array, carried: Any = None) -> Any:
        with jax.set_mesh(auto):
            return retyped(init(*retyped((params, key, carried), auto)), mesh)

    typed.abstract = lambda *args: retyped(init.abstract(*retyped(args, auto)), mesh)  # type: ignore[attr-defined]
    return typed


def _abstract(mesh: Any) -> Any:
    return mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
