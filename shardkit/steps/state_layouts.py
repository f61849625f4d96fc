"""How the leaves of a state are stored: a leaf that mirrors a parameter as the parameter, all others replicated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit.plans.storage import Storage, is_padded


def match_storage(tree: Any, params: Any, storage: Any) -> Any:
    """How each leaf of a tree is stored: as the parameter that it mirrors, or replicated.

    `storage` says it of each parameter. A leaf mirrors a parameter if its path ends with the parameter's path and the
    shapes are equal.
    """
    return match_parameters(tree, params, jax.tree.leaves(storage), Storage(PartitionSpec()))


def match_parameters(tree: Any, params: Any, values: Sequence[Any], default: Any) -> Any:
    """For each leaf of a tree, the value of the parameter that it mirrors, or the default if it mirrors none."""
    # Worked example: of parameters {"w": [8, 6]}, the state of adam has leaves at (0, "count"), (0, "mu", "w") and
    # (0, "nu", "w"). The last two end with ("w",) and have its shape: they get the value of "w". The count gets the
    # default. A factored moment at ("v_row", "w") of shape [8] ends with ("w",) too, but has another shape.
    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_padded)
    by_path = {}
    for (path, x), value in zip(leaves, values, strict=True):
        by_path[path] = (x.shape, value)

    def match(path: Any, x: Any) -> Any:
        # The longest end of the path first: it names the parameter most exactly.
        for start in range(len(path) + 1):
            shape, value = by_path.get(path[start:], (None, None))
            if shape is not None and shape == jnp.shape(x):
                return value
        return default

    return jax.tree_util.tree_map_with_path(match, tree, is_leaf=is_padded)


def shardings(mesh: Mesh, storage: Any) -> Any:
    """The shardings over a mesh of leaves that are stored like this."""
    return jax.tree.map(lambda leaf: NamedSharding(mesh, leaf.spec), storage)


def attach_shardings(shapes: Any, layouts: Any) -> Any:
    """Shapes with their shardings, which may be a prefix of the tree."""

    def attach(layout: NamedSharding, tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout), tree)

    return jax.tree.map(attach, layouts, shapes)
