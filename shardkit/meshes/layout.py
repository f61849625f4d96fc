"""Layouts of arrays: specs from logical names, local and global shapes, and arrays that are laid out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardkit._arguments.checks import divides, mesh_in_context, quote
from shardkit._arguments.typed import Arrays, Specs, typed

WHOLE: PartitionSpec = PartitionSpec()
AxisEntry = str | tuple[str, ...] | None
Rules = Mapping[str, AxisEntry] | Sequence[tuple[str, AxisEntry]]


@typed
def specs_from_rules(logical_axes: Any, rules: Rules) -> Any:
    """Turns logical axis names into mesh layouts: `("embed", "hidden")` into `P(None, "model")`.

    Args:
        logical_axes: pytree of tuples, with one logical name (or None) for each dim of the array.
        rules: logical name to mesh axis, tuple of mesh axes, or None (replicated); a mapping or a list of pairs.

    Returns:
        The same pytree with a PartitionSpec for each leaf, without trailing None.

    Raises:
        ValueError: a name without a rule, a name with two rules, or one mesh axis on two dims of a leaf.
        TypeError: a leaf that is not a tuple of names.

    Example:
        >>> sk.specs_from_rules({"up": ("embed", "hidden"), "gain": ("embed",)}, {"embed": None, "hidden": "model"})
        {'gain': P(), 'up': P(None, 'model')}
    """
    if logical_axes is None:
        raise TypeError("specs_from_rules: logical_axes must be a pytree of tuples of names; got None. Pass one.")
    if isinstance(rules, Mapping):
        rules = list(rules.items())
    for pair in rules:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise TypeError(
                f"specs_from_rules: rules must be a mapping, or pairs of a logical axis and a mesh axis or None; got "
                f"{pair!r} among them. Pass for example {{'embed': None, 'hidden': 'model'}}."
            )
    axes_by_name: dict[str, AxisEntry] = {}
    for name, entry in rules:
        # A dict has the last of two rules for a name: the first would be ignored without a word.
        if name in axes_by_name:
            raise ValueError(f"specs_from_rules: logical axis {name!r} has two rules. Remove one.")
        axes_by_name[name] = entry

    def make_spec(path: Any, names: Any) -> PartitionSpec:
        where = f"specs_from_rules: leaf {path_name(path)}"
        if not _is_names(names):
            raise TypeError(
                f"{where} must be a tuple of logical axis names or None, one for each dim; got {names!r}. "
                "Pass for example ('embed', 'hidden')."
            )
        entries: list[AxisEntry] = []
        for name in names:
            if name is None:
                entries.append(None)
                continue
            if name not in axes_by_name:
                raise ValueError(
                    f"{where} has the logical axis {name!r}, which has no rule; there are rules for "
                    f"{quote(axes_by_name)}. Add a rule; None replicates the dim."
                )
            entries.append(axes_by_name[name])
        spec = canonical(PartitionSpec(*entries))
        _refuse_double_use(where, spec, tuple(names))
        return spec

    # A tuple of names is a leaf here, although jax takes a tuple for a node of the tree.
    return jax.tree_util.tree_map_with_path(make_spec, logical_axes, is_leaf=_is_names)


def count_devices(mesh: Any, axes: Iterable[str]) -> int:
    """The number of devices along some axes of a mesh together: 8 of "data" with 4 and "model" with 2."""
    return math.prod(mesh.shape[axis] for axis in axes)


@typed
def local_shape(shape: Sequence[int], spec: PartitionSpec, mesh: Mesh | AbstractMesh | None = None) -> tuple[int, ...]:
    """Returns the shape of one device's shard of a global array.

    Args:
        shape: global shape.
        spec: mesh axis, tuple of axes or None for each dim; missing entries mean replicated.
        mesh: the mesh; by default the mesh of `jax.set_mesh`.

    Raises:
        ValueError: a dim that does not divide, an axis the mesh does not have or that is used twice, or a spec
            longer than the shape.

    Example:
        >>> sk.local_shape((8, 512), P("data", "model"), mesh)
        (4, 128)
    """
    return local_shape_of("local_shape", shape, spec, mesh_in_context("local_shape", mesh))


def local_shape_of(where: str, shape: Sequence[int], spec: PartitionSpec, mesh: Any) -> tuple[int, ...]:
    """`local_shape` as part of another function: errors begin with `where`, its name and the leaf."""
    _check_shape(where, shape)
    check_spec(where, spec, mesh, len(shape))
    local = list(shape)
    for dim, axes in enumerate(spec_axes(spec)):
        if axes:
            count = count_devices(mesh, axes)
            divides(where, dim, shape[dim], axes, count)
            local[dim] //= count
    return tuple(local)


@typed
def shard(tree: Arrays, mesh: Mesh | None = None, specs: Specs = WHOLE) -> Any:
    """Splits the arrays of a pytree over the devices of a mesh.

    Args:
        tree: pytree of numpy or jax arrays of global shape.
        mesh: the mesh; by default the mesh of `jax.set_mesh`.
        specs: one PartitionSpec for all leaves, or a pytree of them (a prefix of `tree`). By default every device holds
            all arrays whole.

    Returns:
        The same pytree of `jax.Array` with `NamedSharding(mesh, spec)`.

    Raises:
        ValueError: as `local_shape`, naming the leaf.

    Example:
        >>> params = sk.shard({"w": np.ones((8, 512))}, mesh, P(None, "model"))
        >>> params["w"].sharding.shard_shape((8, 512))
        (8, 128)
    """
    mesh = mesh_in_context("shard", mesh)

    def lay_out(path: Any, x: Any, spec: PartitionSpec) -> jax.Array:
        local_shape_of(f"shard: leaf {path_name(path)}", jax.numpy.shape(x), spec, mesh)
        # Canonical, as the results of a step are: with P("data", None) here and P("data") there the second step would
        # compile again.
        return jax.device_put(x, NamedSharding(mesh, canonical(spec)))

    return jax.tree_util.tree_map_with_path(lay_out, tree, broadcast_specs(specs, tree, "shard"))


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Rows of cells as text, each column as wide as its widest cell."""
    widths: list[int] = []
    for column in zip(*rows, strict=True):
        widths.append(max(map(len, column)))
    lines = []
    for row in rows:
        cells = map(str.ljust, row, widths)
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


@typed
def bytes_per_device(tree: Arrays) -> int:
    """Returns the bytes a pytree of arrays takes on one device: the sum over its shards.

    Example:
        >>> sk.bytes_per_device(sk.shard({"w": jnp.ones((8, 512))}, mesh, P(None, "model")))
        4096
    """
    return sum(shard_bytes(x) for x in jax.tree.leaves(tree))


def canonical(spec: PartitionSpec) -> PartitionSpec:
    """The canonical spec of a layout: no trailing None, no one-element or empty tuples.

    jit treats `P()` and `P(None)` as different and compiles twice.
    """
    entries = list(map(_shorten_entry, spec_axes(spec)))
    # P(("data",), None) becomes P("data"), and so does P("data", ()).
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def _shorten_entry(axes: tuple[str, ...]) -> AxisEntry:
    """An entry of a spec: the name alone of one axis, and None for no axis."""
    if not axes:
        return None
    if len(axes) == 1:
        return axes[0]
    return axes


def spec_axes(spec: PartitionSpec) -> list[tuple[str, ...]]:
    """The mesh axes of each entry of a spec, as tuples."""
    axes: list[tuple[str, ...]] = []
    for entry in spec.partitions:
        if entry is None:
            axes.append(())
        elif isinstance(entry, str):
            axes.append((entry,))
        else:
            axes.append(tuple(entry))
    return axes


def split_dims(spec: PartitionSpec) -> dict[int, tuple[str, ...]]:
    """The dims that a spec splits, each with its mesh axes."""
    return {dim: axes for dim, axes in enumerate(spec_axes(spec)) if axes}


def all_axes(spec: PartitionSpec) -> frozenset[str]:
    """The mesh axes that a spec uses."""
    return frozenset().union(*spec_axes(spec))


def broadcast_specs(specs: Any, tree: Any, where: str = "specs") -> Any:
    """One spec for each leaf of `tree`, from a single spec or a pytree of specs that is a prefix of it.

    Raises:
        ValueError: a tree that is no prefix.
    """

    def spread(spec: PartitionSpec, part: Any) -> Any:
        return jax.tree.map(lambda _: spec, part)

    try:
        return jax.tree.map(spread, specs, tree, is_leaf=lambda x: isinstance(x, PartitionSpec))
    except ValueError:
        raise ValueError(
            f"{where}: specs must be one spec, or a tree of them that is a prefix of the arrays' tree; got "
            f"{jax.tree.structure(specs)} for {jax.tree.structure(tree)}. Make it with jax.tree.map, or pass one spec."
        ) from None


def check_spec(where: str, spec: PartitionSpec, mesh: Mesh | AbstractMesh, ndim: int) -> None:
    """Refuses a spec that is longer than the array's rank, names an unknown axis, or uses an axis twice."""
    if len(spec) > ndim:
        entries = "1 entry" if len(spec) == 1 else f"{len(spec)} entries"
        raise ValueError(f"{where}: the spec {spec} has {entries} for an array of rank {ndim}. Drop an entry.")
    for axis in sorted(all_axes(spec)):
        if axis not in mesh.shape:
            raise ValueError(
                f"{where}: the spec {spec} uses axis {axis!r}, which the mesh does not have; its axes are "
                f"{quote(mesh.axis_names)}. Use one of them, or add the axis to make_mesh."
            )
    _refuse_double_use(where, spec)


def _check_shape(where: str, shape: Sequence[int]) -> None:
    if min(shape, default=0) < 0:
        raise ValueError(f"{where}: the sizes in shape must be at least 0; got {shape}. Pass for example (8, 4).")


def path_name(path: Iterable[Any]) -> str:
    """A leaf's path in its pytree, as `layers.norm` or `blocks[0].w`."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator=".") or "(the whole tree)"


def by_path(where: str, leaves: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
    """From pairs of path and value, the values by the path's name; refuses two leaves of one name.

    For example, both leaves of `{"a": {"b": x}, "a.b": y}` have the name "a.b": one would replace the other.
    """
    named: dict[str, Any] = {}
    twice = set()
    for path, leaf in leaves:
        name = path_name(path)
        if name in named:
            twice.add(name)
        named[name] = leaf
    if twice:
        raise ValueError(
            f"{where}: the path of each leaf must be unique; got two leaves at {quote(sorted(twice))}. Rename one of "
            "them."
        )
    return named


def check_axes(where: str, specs: Any, known: Iterable[str]) -> None:
    """Refuses a pytree of specs with an unknown axis, or with an axis twice in one spec."""
    for spec in jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec)):
        for axis in sorted(all_axes(spec) - set(known)):
            raise ValueError(
                f"{where}: the spec {spec} uses axis {axis!r}, which is not among {quote(known)}. Use one of those."
            )
        _refuse_double_use(where, spec)


def _refuse_double_use(where: str, spec: PartitionSpec, names: tuple[str | None, ...] = ()) -> None:
    axes = list(itertools.chain(*spec_axes(spec)))
    for axis in axes:
        if axes.count(axis) > 1:
            origin = f" (from the logical axes {names})" if names else ""
            raise ValueError(
                f"{where}: a mesh axis can shard one dim only; got {axis!r} twice in {spec}{origin}. Give the other "
                "dim another axis, or None."
            )


def _is_names(x: Any) -> bool:
    return isinstance(x, tuple) and all(isinstance(name, str | None) for name in x)


def shard_shape(x: Any) -> tuple[int, ...]:
    """The shape of one device's part of an array; of a host array, its shape."""
    sharding = getattr(x, "sharding", None)
    if sharding is None:
        return tuple(jax.numpy.shape(x))
    return tuple(sharding.shard_shape(x.shape))


def shard_bytes(x: Any) -> int:
    """The bytes of one device's part of an array."""
    dtype = x.dtype if hasattr(x, "dtype") else jax.numpy.asarray(x).dtype
    return math.prod(shard_shape(x)) * dtype.itemsize


def brief_spec(spec: PartitionSpec) -> str:
    """A spec as users write it: `P('data', None)`."""
    entries = [repr(_shorten_entry(axes)) for axes in spec_axes(spec)]
    return f"P({', '.join(entries)})"
