"""The mesh of `jax.set_mesh`, wherever a caller leaves `mesh=` out."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec


def mesh_in_context(where: str, given: Mesh | AbstractMesh | None) -> Mesh:
    """The mesh that a caller means: the given one, or that of `jax.set_mesh`.

    Raises:
        ValueError: neither, or two different meshes. jax runs nothing on another mesh than that of the context.
    """
    context = _context()
    if given is None:
        if context.empty:
            raise ValueError(
                f"{where}: a mesh must be given; got none. Pass mesh=sk.make_mesh(data=8), or call this inside "
                "`with jax.set_mesh(mesh):`."
            )
        return context
    inside_jit = not isinstance(context, Mesh)  # where shapes may be asked for of any mesh, and jax checks the rest
    if not isinstance(given, Mesh) or context.empty or inside_jit or context == given:
        return given  # type: ignore[return-value]  # an AbstractMesh serves whoever runs nothing
    own, around = _told(given), _told(context)
    if own == around:
        own, around = f"{own} of {_types(given)} axes", f"{around} of {_types(context)} axes"
    raise ValueError(
        f"{where}: mesh must be the mesh of jax.set_mesh where there is one; got mesh {own} in the context of "
        f"{around}. Leave mesh out, or call this inside `with jax.set_mesh(...):` of its own mesh."
    )


def apart(mesh: Any) -> AbstractContextManager[Any]:
    """Inside it `mesh` is the mesh of `jax.set_mesh`, where there is one; nothing where there is none."""
    return nullcontext() if _context().empty else jax.set_mesh(mesh)


def replicated_in_context(x: Any, mesh: Any) -> Any:
    """An array that was made on the mesh of a `jax.set_mesh`, if there is one, on `mesh`."""
    return x if _context().empty else jax.device_put(x, NamedSharding(mesh, PartitionSpec()))


def _context() -> Any:
    """The mesh of `jax.set_mesh`, without its devices inside jit; an empty one where there is none."""
    try:
        return jax.sharding.get_mesh()
    except ValueError:  # inside jit
        return jax.sharding.get_abstract_mesh()


def _types(mesh: Any) -> str:
    """`Auto`, or `Auto and Explicit`: what else tells two meshes apart."""
    return " and ".join(dict.fromkeys(kind.name for kind in mesh.axis_types))


def _told(mesh: Any) -> str:
    return " x ".join(f"{name}={size}" for name, size in mesh.shape.items()) or "()"
