"""Which dim of a leaf a strategy splits, from the user's rules: a function of the leaf, or a tree of specs."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral
from typing import Any

import jax
from jax.sharding import PartitionSpec

from shardkit._arguments.checks import dim_of, named, quoted
from shardkit.meshes.layout import all_axes, by_path, path_name, spec_axes
from shardkit.plans.placement import Leaf, Split

ChooseDim = Callable[[str, tuple[int, ...]], int | None]
DimRules = ChooseDim | Any  # the tree may be any pytree of PartitionSpecs


def dim_chooser(name: str, axes: tuple[str, ...], rules: DimRules) -> ChooseDim:
    """The rules of a strategy as a function of a leaf's path and shape.

    `rules` is such a function, or a pytree of PartitionSpecs like the parameters, such as `specs_from_rules` returns:
    the dim with the axes is split, and a leaf without them stays whole.

    Returns:
        `(path, shape) -> dim`, counted from the front, or None for a leaf that is not split.

    Raises:
        TypeError: a tree of anything but specs; when called, rules that return anything but a dim or None.
        ValueError: no spec of the tree names the axes; when called, a dim that a leaf does not have, a leaf without a
            spec, or a spec that is longer than the leaf's shape or has the axes on several dims.
    """
    if is_function(rules):
        return lambda path, shape: _from_front(f"{name}: leaf {path}", rules(path, shape), len(shape))
    specs = _specs_by_path(name, axes, rules)

    def choose(path: str, shape: tuple[int, ...]) -> int | None:
        if path not in specs:
            inside, _, last = path.rpartition(".")
            raise ValueError(
                f"{name}: the rules have no spec for leaf {path}; theirs are for the leaves {quoted(sorted(specs))}. "
                f'Add "{last}": P(){f" to {inside!r}" if inside else ""}, with which it stays whole, or make the rules '
                "from the logical axes of these parameters."
            )
        spec = tuple(specs[path])
        found = spec_axes(specs[path])
        dims = [dim for dim, on in enumerate(found) if set(on) & set(axes)]
        if len(found) > len(shape) or len(dims) > 1 or (dims and not set(axes) <= set(found[dims[0]])):
            raise ValueError(
                f"{name}: the rules must put {named(axes)} on one dim of leaf {path}; got {spec} for shape "
                f"{shape}. Map one of the leaf's logical axes to {'it' if len(axes) == 1 else 'them'}."
            )
        return dims[0] if dims else None

    return choose


def split_by_rules(name: str, axes: tuple[str, ...], choose: ChooseDim, leaf: Leaf) -> Split | str:
    """The split of a leaf of which the loss gets a part, or why it stays whole.

    Raises:
        ValueError: a dim that the devices do not divide.
    """
    if leaf.ways == 1:
        return "the axis has one device"
    at = choose(leaf.path, leaf.shape)
    if at is None:
        return "the rules name no dim"
    size = leaf.shape[at]
    if size % leaf.ways:
        raise ValueError(
            f"{name}: dim {at} of leaf {leaf.path} must be divisible by {named(axes)}; got size {size} over "
            f"{leaf.ways} devices. Pad it to {math.ceil(size / leaf.ways) * leaf.ways} (a vocabulary; then pass "
            f"vocab_cross_entropy(vocabulary={size})), leave the leaf whole (key/value heads), or "
            "use a smaller axis."
        )
    return Split(at)


def _from_front(where: str, dim: Any, ndim: int) -> int | None:
    """The dim that the user's function returned, counted from the front."""
    if dim is None:
        return None
    if isinstance(dim, bool) or not isinstance(dim, Integral):
        raise TypeError(
            f"{where}: rules must return a dim, or None for a leaf that stays whole; got {dim!r}. Return an int or "
            "None."
        )
    return dim_of(where, int(dim), ndim)


def axes_of_rules(name: str, axes: tuple[str, ...], rules: DimRules | None) -> tuple[tuple[str, str], ...]:
    """The path of each leaf that a tree of specs splits, with each axis over which it does; none for a function."""
    if rules is None or is_function(rules):
        return ()
    specs = _specs_by_path(name, axes, rules)
    return tuple((path, axis) for path, spec in specs.items() for axis in sorted(all_axes(spec)))


def is_function(rules: DimRules) -> bool:
    """Whether rules are a function, and not a tree of specs in the form of a module, which can be called too."""
    leaves = jax.tree.leaves(rules, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return callable(rules) and not any(isinstance(leaf, PartitionSpec) for leaf in leaves)


def _specs_by_path(name: str, axes: tuple[str, ...], rules: Any) -> dict[str, PartitionSpec]:
    flat = jax.tree_util.tree_flatten_with_path(rules, is_leaf=lambda x: isinstance(x, PartitionSpec))[0]
    for path, spec in flat:
        if not isinstance(spec, PartitionSpec):
            raise TypeError(
                f"{name}: rules must be a function of path and shape, or a tree of PartitionSpecs; got {spec!r} for "
                f"{path_name(path)}. Make the tree with specs_from_rules."
            )
    used = frozenset[str]().union(*(all_axes(spec) for _, spec in flat))
    if not used & set(axes):
        raise ValueError(
            f"{name}: the rules must put {named(axes)} on some dim; the axes that they name are "
            f"{quoted(sorted(used))}. Map a logical axis to {axes[0]!r}, or pass the axis of the rules to {name}."
        )
    return by_path(f"{name}: rules", flat)


def in_subtrees(path: str, subtrees: tuple[str, ...]) -> bool:
    """Whether a leaf is in one of the named subtrees."""
    return any(path == name or path.startswith(name + ".") for name in subtrees)


def dim0_counts_layers(path: str, subtrees: tuple[str, ...]) -> bool:
    """Whether dim 0 of a leaf counts layers: it is in one of the named subtrees, and that is a stack.

    In a list of layers the path continues with the layer's number and a path within the layer. A tuple of stacks is a
    stack.
    """
    rest = [path[len(name) + 1 :].split(".") for name in subtrees if in_subtrees(path, (name,))]
    return any(not (len(parts) > 1 and parts[0].isdigit()) for parts in rest)
