"""Which dim of a leaf a strategy splits, from the user's rules: a function of the leaf, or a tree of specs."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral
from typing import Any, NoReturn

import jax
from jax.sharding import PartitionSpec

from shardkit._arguments.checks import dim_of, name_axes, quote
from shardkit.meshes.layout import all_axes, by_path, path_name, spec_axes
from shardkit.plans.splits import Leaf, Split

ChooseDim = Callable[[str, tuple[int, ...]], int | None]
DimRules = ChooseDim | Any  # the tree may be any pytree of PartitionSpecs


def make_dim_chooser(name: str, axes: tuple[str, ...], rules: DimRules) -> ChooseDim:
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

        def call_rules(path: str, shape: tuple[int, ...]) -> int | None:
            return _check_dim(f"{name}: leaf {path}", rules(path, shape), len(shape))

        return call_rules
    specs = _specs_by_path(name, axes, rules)

    def read_spec(path: str, shape: tuple[int, ...]) -> int | None:
        # Refused, not left whole: every device would store all of a forgotten leaf, and nothing would say so.
        if path not in specs:
            _refuse_unknown_leaf(name, path, specs)
        return _find_dim(name, axes, path, shape, specs[path])

    return read_spec


def _find_dim(name: str, axes: tuple[str, ...], path: str, shape: tuple[int, ...], spec: PartitionSpec) -> int | None:
    """The dim on which a spec has all of the axes; None for a spec without any of the axes.

    Of the axes ("d",): dim 1 for P(None, "d") and for P(None, ("t", "d")), none for P("t"). P("d", "d") is refused.
    """
    entries = spec_axes(spec)
    too_long = len(entries) > len(shape)
    dims = []
    partial = False  # whether a dim has some of the axes, and not all
    for dim, entry in enumerate(entries):
        if set(entry) & set(axes):
            dims.append(dim)
            partial = partial or not set(axes) <= set(entry)
    if too_long or partial or len(dims) > 1:
        pronoun = "it" if len(axes) == 1 else "them"
        raise ValueError(
            f"{name}: the rules must put {name_axes(axes)} on one dim of leaf {path}; got {tuple(spec)} for shape "
            f"{shape}. Map one of the leaf's logical axes to {pronoun}."
        )
    return dims[0] if dims else None


def _refuse_unknown_leaf(name: str, path: str, specs: dict[str, PartitionSpec]) -> NoReturn:
    subtree, _, last = path.rpartition(".")
    where = f" to {subtree!r}" if subtree else ""
    raise ValueError(
        f"{name}: the rules have no spec for leaf {path}; theirs are for the leaves {quote(sorted(specs))}. "
        f'Add "{last}": P(){where}, with which it stays whole, or make the rules '
        "from the logical axes of these parameters."
    )


def split_by_rules(name: str, axes: tuple[str, ...], choose: ChooseDim, leaf: Leaf) -> Split | str:
    """The split of a leaf of which the loss gets a part, or why it stays whole.

    Raises:
        ValueError: a dim that the devices do not divide.
    """
    if leaf.ways == 1:
        return "the axis has one device"
    dim = choose(leaf.path, leaf.shape)
    if dim is None:
        return "the rules name no dim"
    size = leaf.shape[dim]
    if size % leaf.ways:
        padded = math.ceil(size / leaf.ways) * leaf.ways
        raise ValueError(
            f"{name}: dim {dim} of leaf {leaf.path} must be divisible by {name_axes(axes)}; got size {size} over "
            f"{leaf.ways} devices. Pad it to {padded} (a vocabulary; then pass "
            f"vocab_cross_entropy(vocabulary={size})), leave the leaf whole (key/value heads), or "
            "use a smaller axis."
        )
    return Split(dim)


def _check_dim(where: str, dim: Any, ndim: int) -> int | None:
    """The dim that the user's function returned, counted from the front."""
    if dim is None:
        return None
    # True is an Integral, and would split dim 1: `rules` of that kind meant to say whether, not where.
    if isinstance(dim, bool) or not isinstance(dim, Integral):
        raise TypeError(
            f"{where}: rules must return a dim, or None for a leaf that stays whole; got {dim!r}. Return an int or "
            "None."
        )
    return dim_of(where, int(dim), ndim)


def axes_of_rules(name: str, axes: tuple[str, ...], rules: DimRules | None) -> tuple[tuple[str, str], ...]:
    """For a tree of specs, `(path, axis)` for each axis over which it splits a leaf; nothing for a function."""
    if rules is None or is_function(rules):
        return ()
    pairs = []
    for path, spec in _specs_by_path(name, axes, rules).items():
        for axis in sorted(all_axes(spec)):
            pairs.append((path, axis))
    return tuple(pairs)


def is_function(rules: DimRules) -> bool:
    """Whether rules are a function. A module with specs for leaves is a tree of specs, although it can be called."""
    leaves = jax.tree.leaves(rules, is_leaf=_is_spec)
    return callable(rules) and not any(_is_spec(leaf) for leaf in leaves)


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _specs_by_path(name: str, axes: tuple[str, ...], rules: Any) -> dict[str, PartitionSpec]:
    leaves = jax.tree_util.tree_leaves_with_path(rules, is_leaf=_is_spec)
    used: set[str] = set()
    for path, spec in leaves:
        if not _is_spec(spec):
            raise TypeError(
                f"{name}: rules must be a function of path and shape, or a tree of PartitionSpecs; got {spec!r} for "
                f"{path_name(path)}. Make the tree with specs_from_rules."
            )
        # A spec with only some of a strategy's axes is refused by `_find_dim`, which names the leaf. Here one axis is
        # enough to show that the rules are for this strategy.
        used |= all_axes(spec)
    if not used & set(axes):
        raise ValueError(
            f"{name}: the rules must put {name_axes(axes)} on some dim; the axes that they name are "
            f"{quote(sorted(used))}. Map a logical axis to {axes[0]!r}, or pass the axis of the rules to {name}."
        )
    return by_path(f"{name}: rules", leaves)


def choose_in_subtree(subtree: str, stack: str) -> ChooseDim:
    """Rules that split dim 0 of the leaves in a subtree, or dim 1 where dim 0 counts the layers of a stack.

    Of the subtree "experts" and the stack "layers": dim 0 of experts.up and, in a list of layers, of
    layers.3.experts.up; dim 1 of layers.experts.up; no dim of layers.router.
    """

    def choose(path: str, shape: tuple[int, ...]) -> int | None:
        names = path.split(".")
        if subtree not in names:
            return None
        outer = names[: names.index(subtree)]
        if stack not in outer:
            return 0
        # In "layers.experts.up" dim 0 counts layers, and dim 1 the experts of a layer. In "layers.3.experts.up" the
        # stack is a list: this is a leaf of layer 3, and dim 0 counts its experts.
        from_stack = ".".join(names[outer.index(stack) :])
        counts_layers = is_stacked(from_stack, (stack,))
        return 1 if counts_layers else 0

    return choose


def is_in_subtrees(path: str, subtrees: tuple[str, ...]) -> bool:
    """Whether a leaf is in one of the named subtrees."""
    # With the dot, since "layers_norm.gain" is no leaf of the subtree "layers".
    return any(path == name or path.startswith(f"{name}.") for name in subtrees)


def is_stacked(path: str, subtrees: tuple[str, ...]) -> bool:
    """Whether dim 0 of a leaf counts layers: the leaf is in one of the named subtrees, and the subtree is a stack.

    A subtree may be a list of layers instead: then the path continues with the number of a layer, and a path within the
    layer. Of the subtree "layers": layers.up is in a stack, layers.0.up is a leaf of layer 0 in a list, and layers.0 is
    in a stack again, the first of a tuple of stacks.
    """
    for name in subtrees:
        if not is_in_subtrees(path, (name,)):
            continue
        parts = path[len(name) + 1 :].split(".")
        in_a_list = len(parts) > 1 and parts[0].isdigit()
        if not in_a_list:
            return True
    return False
