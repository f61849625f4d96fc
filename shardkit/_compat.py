"""Every call whose spelling depends on the jax version (0.10 to 0.12). Nothing else imports jax privately."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax._src import core as _core
from jax._src import source_info_util as _source_info_util
from jax._src import xla_bridge as _xla_bridge


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which `x` may differ between devices, as check_vma tracks them."""
    aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)
    if manual is not None:
        return frozenset(manual.varying)
    return frozenset(getattr(aval, "vma", None) or ())


def tracked_axes() -> frozenset[str]:
    """The axes that shard_map tracks here; under vmap with an axis name nothing is tracked."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def cast_varying(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Marks `x` as varying over `axes`; every one must be missing, since pcast is not idempotent."""
    return lax.pcast(x, axes, to="varying")


def all_gather_replicated(x: jax.Array, axes: str | tuple[str, ...], dim: int) -> jax.Array:
    """A tiled all_gather whose result is typed as equal on all devices of `axes`."""
    if not tracked_axes() & set((axes,) if isinstance(axes, str) else axes):  # nothing has a type under vmap
        return lax.all_gather(x, axes, axis=dim, tiled=True)
    return lax.all_gather(x, axes, axis=dim, tiled=True, to="invarying")


def bound_axes() -> dict[str, int]:
    """Names and sizes of the axes bound here by shard_map or vmap, in mesh order."""
    sizes = {name: size for name, size in _core.get_axis_env().axis_sizes.items() if isinstance(name, str)}
    mesh = jax.sharding.get_abstract_mesh().axis_names  # shard_maps inside each other bind in another order
    return {name: sizes[name] for name in sorted(sizes, key=lambda n: mesh.index(n) if n in mesh else len(mesh))}


def jax_has_started() -> bool:
    """Whether jax has created its backends, after which devices can no longer be chosen."""
    return _xla_bridge.backends_are_initialized()


def cpu_devices_asked_for() -> int:
    """The CPU devices that jax's own configuration asks for; -1 where it says nothing."""
    return int(getattr(jax.config, "jax_num_cpu_devices", -1))


def inner_jaxprs(equation: Any) -> list[tuple[str, Any]]:
    """The jaxprs among an equation's parameters, each with the parameter's name."""
    found = []
    for name, value in equation.params.items():
        for each in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(each, "jaxpr", each)
            if hasattr(jaxpr, "eqns"):
                found.append((name, jaxpr))
    return found


def user_frames(equation: Any) -> list[tuple[str, int, str]]:
    """File, line and function of the frames outside jax that made an equation, innermost first."""
    frames = _source_info_util.user_frames(equation.source_info.traceback)
    return [(frame.file_name, frame.start_line, frame.function_name) for frame in frames]


def in_backward(equation: Any) -> bool:
    """Whether an equation was made by transposing (the backward pass)."""
    return "transpose" in str(equation.source_info.name_stack)
