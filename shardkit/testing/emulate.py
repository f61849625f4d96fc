"""Runs a per-device function on one device: traced over an abstract mesh, run under nested vmap.

Worked example: `lambda x: all_reduce(x, "data")` on data=4, with x [8] split over "data" and a replicated result.

    trace        shard_map over an abstract mesh: the kernel sees x [2], its jaxpr has a psum over "data"
    split        x becomes [4, 2], a row for each device
    run          the jaxpr under a vmap with the axis name "data", where the psum is a sum over the rows
    results      [4, 2], the same row four times; that is checked, because the spec P() says so
    join         the first row, [2]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from shardkit._arguments.checks import divides
from shardkit._arguments.typed import ARRAYS, check_kind, typed
from shardkit._jax.pallas import writing_kernels_out
from shardkit.collectives import vary
from shardkit.meshes.layout import all_axes, check_spec, count_devices, path_name, spec_axes
from shardkit.testing._compare import distance, is_spec_or_none
from shardkit.testing._interpreter import add_mesh_dims, interpret, join_shards


@typed
def emulate(
    kernel: Callable[..., Any], mesh_sizes: Mapping[str, int], in_specs: Any, out_specs: Any, *, check_vma: bool = True
) -> Callable[..., Any]:
    """Runs a per-device function for all devices of a mesh, on a single device, by vmap over every axis.

    jax traces the kernel inside `jax.shard_map` over an abstract mesh, so it sees this mesh, its varying types and its
    differentiation rules; the traced program then runs on one device. You can differentiate it, and get the gradients
    of the global function; with a ragged_all_to_all or a ragged_dot in it, call `jax.jvp` inside the kernel. It runs
    `lax.ragged_all_to_all`, which CPUs do not have. Two things differ from shard_map. out_specs may omit an axis if the
    result varies over it by type, but has equal values. And a collective that only some devices reach does not deadlock
    (lint finds it).

    Args:
        kernel: the function that each device runs, on local arrays; pytrees in and out.
        mesh_sizes: axis name and size, from the outermost axis to the innermost, for example `{"data": 2, "model": 4}`.
        in_specs: one PartitionSpec for all arguments, or a tuple with a spec, or a pytree of them, for each; None is
            `P()`.
        out_specs: one PartitionSpec, or a pytree of them that is a prefix of the result.
        check_vma: as for `jax.shard_map`. Pass False for a foreign kernel without varying types.

    Returns:
        A function from the global arguments to the global result, with the shapes of shard_map.

    Raises:
        ValueError: no axis. From the call: an indivisible dim, a spec that does not fit, `axis_index_groups`, an
            unknown collective, a result that differs along an axis missing from out_specs (not checked under an outer
            jit or grad), a value that differs although `assume_replicated` calls it equal, or rows of a
            ragged_all_to_all that overlap, lie outside of an array, or are not what the receiver expects. Of the last
            two jax makes a JaxRuntimeError under an outer jit and in a backward pass.
        TypeError: from the call: a spec other than a PartitionSpec.
        TypeError, ValueError: errors of tracing the kernel.

    Example:
        >>> total = sk.testing.emulate(lambda x: sk.all_reduce(x, "data"), {"data": 4}, P("data"), P())
        >>> total(jnp.arange(4)).tolist()
        [6]
    """
    names = tuple(mesh_sizes)
    if not names:
        raise ValueError(
            f"emulate: mesh_sizes must give one or more axes a positive number of devices; got {dict(mesh_sizes)}. "
            "Write for example {'data': 2, 'model': 4}."
        )
    sizes = tuple(map(int, mesh_sizes.values()))
    mesh: Any = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))
    notes = _Notes()

    @partial(jax.jit, static_argnums=(1, 2))
    def run_all_devices(leaves: list[Any], specs: tuple[PartitionSpec, ...], structure: Any) -> Any:
        def run_device(*leaves: Any) -> Any:
            args = jax.tree.unflatten(structure, leaves)
            out = jax.tree.map(jnp.asarray, kernel(*args))
            return add_mesh_dims(vary(out, names), len(names))

        # All axes stand in these out_specs, so that the results of all devices come back. `_join` compares them along
        # the axes which the caller's out_specs omit.
        mapped = jax.shard_map(
            run_device, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(*names), check_vma=check_vma
        )
        return interpret(mapped, mesh, notes.add)(*leaves)

    def run(*args: Any) -> Any:
        __tracebackhide__ = True
        _check_count(in_specs, args)
        check_kind("emulate", "args", args, (ARRAYS,))
        specs = tuple(_list_specs("in_specs", in_specs, args))
        leaves = _list_leaves(args, specs, mesh)
        with notes.reading(), writing_kernels_out():
            out = run_all_devices(leaves, specs, jax.tree.structure(args))
            jax.effects_barrier()  # the callbacks that look at values have run
        if notes.sentences:
            raise ValueError(f"emulate: {notes.sentences[0]}")
        return _join_results(out, _list_specs("out_specs", out_specs, out), mesh)

    return run


class _Notes:
    """What callbacks note while a program runs, as values that `assume_replicated` wrongly says are equal.

    Attributes:
        sentences: the notes of the last call.
    """

    def __init__(self) -> None:
        self.sentences: list[str] = []
        self._is_read = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A call, which reads its notes at its end."""
        self.sentences.clear()  # a call that raised has left its own
        self._is_read = True
        try:
            yield
        finally:
            self._is_read = False

    def add(self, sentence: str) -> None:
        """Notes a sentence; where no call would read it, as in a backward pass, jax fails with it."""
        if not self._is_read:
            raise ValueError(f"emulate: {sentence}")
        self.sentences.append(sentence)


def _check_count(in_specs: Any, args: Sequence[Any]) -> None:
    """Refuses a tuple of specs that is longer or shorter than the arguments."""
    if not isinstance(in_specs, tuple) or isinstance(in_specs, PartitionSpec):
        return
    if len(in_specs) != len(args):
        raise ValueError(
            f"emulate: in_specs must have one entry for each argument; got {len(in_specs)} for {len(args)} "
            "arguments. Add or drop an entry, or pass one PartitionSpec for all."
        )


def _list_leaves(args: Any, specs: Sequence[PartitionSpec], mesh: Any) -> list[jax.Array]:
    """The arguments as arrays; refuses arrays that their specs do not divide."""
    leaves = []
    for (path, x), spec in zip(jax.tree_util.tree_leaves_with_path(args), specs, strict=True):
        where = f"emulate: argument {path_name(path)}"
        leaf = jnp.asarray(x)
        check_spec(where, spec, mesh, leaf.ndim)
        for dim, axes in enumerate(spec_axes(spec)):
            divides(where, dim, leaf.shape[dim], axes, count_devices(mesh, axes))
        leaves.append(leaf)
    return leaves


def _join_results(out: Any, specs: Sequence[PartitionSpec], mesh: Any) -> Any:
    """The global results, from a pytree of arrays [*mesh sizes, *local shape]."""
    paths_and_leaves, structure = jax.tree_util.tree_flatten_with_path(out)
    results = []
    for (path, x), spec in zip(paths_and_leaves, specs, strict=True):
        result = _join(_fetch(x), spec, mesh, f"result {path_name(path)}")
        results.append(jnp.asarray(result))
    return jax.tree.unflatten(structure, results)


def _list_specs(what: str, specs: Any, tree: Any) -> list[PartitionSpec]:
    """One spec for each leaf of a tree, of which `specs` is a prefix."""

    def repeat_for_leaves(path: Any, spec: Any, subtree: Any) -> Any:
        # In a result, None is a subtree without leaves. An array there needs a spec of its own, since a wrong P() would
        # drop the values of all devices but the first.
        has_leaves = bool(jax.tree.leaves(subtree))
        if spec is None and (what == "in_specs" or not has_leaves):
            spec = PartitionSpec()
        if not isinstance(spec, PartitionSpec):
            place = f" at {path_name(path)}" if path else ""
            raise TypeError(
                f"emulate: {what} must be a PartitionSpec, or a pytree of them; got {spec!r}{place}. Write P('data') "
                "for an array that axis 'data' splits, P() for a replicated one."
            )
        return jax.tree.map(lambda _: spec, subtree)

    try:
        spec_tree = jax.tree_util.tree_map_with_path(repeat_for_leaves, specs, tree, is_leaf=is_spec_or_none)
    except ValueError:
        of = "the arguments" if what == "in_specs" else "the result"
        raise ValueError(
            f"emulate: {what} must be a prefix of {of}; got {specs!r} for {jax.tree.structure(tree)}. Pass a spec for "
            "each leaf, or one for a subtree."
        ) from None
    return jax.tree.leaves(spec_tree, is_leaf=lambda s: isinstance(s, PartitionSpec))


def _fetch(x: jax.Array) -> Any:
    """The array as a numpy array if possible, so that joining arrays compiles nothing."""
    if isinstance(x, jax.core.Tracer) or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    return np.asarray(x)


def _join(x: Any, spec: PartitionSpec, mesh: Any, what: str) -> Any:
    """From the results of all devices, [*all mesh sizes, *local shape], to the global array."""
    check_spec(f"emulate: {what}", spec, mesh, x.ndim - len(mesh.axis_names))
    # A tracer, under an outer jit or grad, has no values to compare.
    if not isinstance(x, jax.core.Tracer):
        for dim, name in reversed(list(enumerate(mesh.axis_names))):
            if name not in all_axes(spec):
                _check_equal(x, dim, name, what)
    return join_shards(x, spec, dict(mesh.shape))


def _check_equal(x: Any, mesh_dim: int, name: str, what: str) -> None:
    """Refuses results that differ along a mesh axis; NaN equals NaN."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    values = np.moveaxis(np.asarray(x), mesh_dim, 0)
    first = values[:1]
    both_are_nan = (values != values) & (first != first)
    is_equal = (values == first) | both_are_nan
    if not is_equal.all():
        device = np.argwhere(~is_equal)[0][0]
        gap = distance(values[device], values[0]).max()
        raise ValueError(
            f"emulate: {what} must be equal along axis {name!r}, which out_specs omit; device {device} differs from "
            f"device 0 by up to {gap:.3g}. Reduce it over {name!r}, or name the axis in out_specs."
        )
