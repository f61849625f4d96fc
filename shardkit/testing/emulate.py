"""The per-device function on one device: nested vmap with axis names instead of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, PartitionSpec

from shardkit._kinds import Specs
from shardkit._typed import typed
from shardkit.layout import all_axes, broadcast_specs, check_axes, check_spec, local_shape, path_name, spec_axes


@typed
def emulate(
    kernel: Callable[..., Any], mesh_sizes: Mapping[str, int], in_specs: Specs, out_specs: Specs
) -> Callable[..., Any]:
    """Runs a per-device function for all devices of a mesh on one device, by vmap over every axis.

    It splits the global arguments by their specs, maps the kernel over every axis under its name, and joins the results
    by theirs, as `jax.shard_map` does, with no more than one device. It may be differentiated, and gives the gradients
    of the global function. Two things differ: nothing is typed as varying, so a mistake that check_vma finds must show
    in the values; and a kernel that calls `jax.grad` itself does not get shard_map's rules (there, the gradient of a
    value that is equal everywhere is summed over the devices). Mark values with `sk.vary`, not with `lax.pcast`, which
    vmap does not know.

    Args:
        kernel: the function that each device runs, on local arrays; a pytree in, a pytree out.
        mesh_sizes: axis name and size, from the outermost axis to the innermost, for example `{"data": 2, "model": 4}`.
        in_specs: one PartitionSpec for all arguments, or a tuple with a spec, or a pytree of them, for each.
        out_specs: one PartitionSpec, or a pytree of them that is a prefix of the result.

    Returns:
        A function of the global arguments with the global result, of the same shapes as that of shard_map.

    Raises:
        ValueError: from the call: a dim that does not divide, a spec that does not fit, or a result that out_specs do
            not split over an axis and that is not equal along it. Under an outer jit or grad the values are not known
            and this is not checked.
    """
    check_axes("emulate", (in_specs, out_specs), mesh_sizes)
    names = tuple(mesh_sizes)
    mesh: Any = AbstractMesh(tuple(mesh_sizes.values()), names)

    def each_device(flat: list[Any], used: tuple[tuple[str, ...], ...], structure: Any) -> Any:
        def one(_: Any, *leaves: Any) -> Any:
            return kernel(*jax.tree.unflatten(structure, leaves))

        for name in reversed(names):
            one = jax.vmap(one, in_axes=(0, *(0 if name in axes else None for axes in used)), axis_name=name)
        return one(jnp.zeros(tuple(mesh_sizes.values()), jnp.int8), *flat)

    compiled = jax.jit(each_device, static_argnums=(1, 2))

    def run(*args: Any) -> Any:
        if isinstance(in_specs, tuple) and not isinstance(in_specs, PartitionSpec) and len(in_specs) != len(args):
            raise ValueError(
                f"emulate: in_specs must have one entry for each argument; got {len(in_specs)} for {len(args)} "
                "arguments. Add or drop an entry, or pass one PartitionSpec for all."
            )
        paths, structure = jax.tree_util.tree_flatten_with_path(args)
        specs = _specs(in_specs, args)
        split = [
            _split(_on_host(jnp.asarray(x)), spec, mesh, f"argument {path_name(path)}")
            for (path, x), spec in zip(paths, specs, strict=True)
        ]
        used = tuple(tuple(name for name in names if name in all_axes(spec)) for spec in specs)
        # A derivative that jax takes of compiled code finds no axes bound in the rules of custom_jvp.
        traced = any(isinstance(x, jax.core.Tracer) for x in split)
        out = (each_device if traced else compiled)(split, used, structure)
        paths, structure = jax.tree_util.tree_flatten_with_path(out)
        specs = _specs(out_specs, out)
        whole = [
            _join(_on_host(x), spec, mesh, f"result {path_name(path)}")
            for (path, x), spec in zip(paths, specs, strict=True)
        ]
        return jax.tree.unflatten(structure, [jnp.asarray(x) for x in whole])

    return run


def _specs(specs: Any, tree: Any) -> list[PartitionSpec]:
    return jax.tree.leaves(broadcast_specs(specs, tree), is_leaf=lambda s: isinstance(s, PartitionSpec))


def _on_host(x: jax.Array) -> Any:
    """As a numpy array where that is possible: splitting and joining then compile nothing."""
    return x if isinstance(x, jax.core.Tracer) or jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x)


def _split(x: Any, spec: PartitionSpec, mesh: Any, what: str) -> Any:
    """From a global array to the pieces of all devices: [*sizes of the axes that split it, *local shape]."""
    _fits(lambda: local_shape(x.shape, spec, mesh), what)
    shape: list[int] = []
    at: dict[str, int] = {}
    for dim, axes in enumerate(spec_axes(spec) + [()] * (x.ndim - len(spec))):
        left = x.shape[dim]
        for axis in axes:
            at[axis] = len(shape)
            shape.append(mesh.shape[axis])
            left //= mesh.shape[axis]
        shape.append(left)
    lead = [at[name] for name in mesh.axis_names if name in at]
    rest = [i for i in range(len(shape)) if i not in lead]
    return x.reshape(shape).transpose(lead + rest)


def _join(x: Any, spec: PartitionSpec, mesh: Any, what: str) -> Any:
    """From [*all mesh sizes, *local shape] to the global array."""
    local = x.shape[len(mesh.axis_names) :]
    _fits(lambda: check_spec("local_shape", spec, mesh, len(local)), what)
    split = [name for name in mesh.axis_names if name in all_axes(spec)]
    for name in reversed([name for name in mesh.axis_names if name not in split]):
        at = mesh.axis_names.index(name)
        if not isinstance(x, jax.core.Tracer):
            _check_equal(x, at, name, what)
        x = x[(slice(None),) * at + (0,)]
    order: list[int] = []
    shape: list[int] = []
    for dim, axes in enumerate(spec_axes(spec) + [()] * (len(local) - len(spec))):
        order += [split.index(axis) for axis in axes] + [len(split) + dim]
        count = int(np.prod([mesh.shape[axis] for axis in axes], dtype=int))
        shape.append(local[dim] * count)
    return x.transpose(order).reshape(shape)


def _check_equal(x: Any, at: int, name: str, what: str) -> None:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    values = np.moveaxis(np.asarray(x), at, 0)
    same = (values == values[:1]) | ((values != values) & (values[:1] != values[:1]))
    if not same.all():
        device = int(np.argwhere(~same)[0][0])
        gap = np.abs(values[device].astype(np.float64) - values[0].astype(np.float64)).max()
        raise ValueError(
            f"emulate: {what} must be equal on all devices of axis {name!r}, because out_specs do not split it there; "
            f"device {device} differs from device 0 by up to {gap:.3g}. Reduce it over {name!r}, or name the axis in "
            "out_specs."
        )


def _fits(check: Callable[[], Any], what: str) -> None:
    try:
        check()
    except ValueError as error:
        raise ValueError(str(error).replace("local_shape:", f"emulate: {what}:", 1)) from None
