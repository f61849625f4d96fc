"""Which dims of a leaf are the rows and columns of a matrix, for `muon`.

Users pass optax's *dimension numbers*, which name the dims of the rows and columns of a leaf. `MatrixDims` are the same
counted from the front, with the *batch* dims: a leaf has one matrix for each of their entries.

Worked example: of {"layers": MuonDimensionNumbers(-2, -1), "embed": None} for leaves layers.w [4, 8, 6] and embed
[100, 8], `find_dims` gives {"layers.w": MatrixDims(batch=(0,), rows=(1,), columns=(2,))}: four matrices of 8x6. `adam`
updates the embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardkit._arguments.checks import dim_of
from shardkit._arguments.typed import short
from shardkit.meshes.layout import path_name
from shardkit.plans.dim_rules import is_function


class MatrixDims(NamedTuple):
    """Which dims of a leaf are what, counted from the front.

    Of a stack of projections into heads [layers, model, heads, head size], whose matrices map the model to all heads:
    batch (0,), rows (1,), columns (2, 3).
    """

    batch: tuple[int, ...]  # one matrix for each entry
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def matrix(self) -> tuple[int, ...]:
        """The dims of one matrix."""
        return self.rows + self.columns

    @property
    def stack_order(self) -> tuple[int, ...]:
        """The order in which all dims stand in a stack."""
        return self.batch + self.matrix


def find_dims(dimension_numbers: Any, params: Any) -> dict[str, MatrixDims]:
    """The dims of each leaf that has matrices, by path."""
    ndims = {}
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        ndims[path_name(path)] = jnp.ndim(x)
    numbers_tree = broadcast_numbers(dimension_numbers, params)
    leaves = jax.tree_util.tree_leaves_with_path(numbers_tree, is_leaf=is_dimension_numbers)
    dims = {}
    for path, numbers in leaves:
        if numbers is None:
            continue
        name = path_name(path)
        dims[name] = _read_numbers(name, ndims[name], numbers)
    return dims


def _read_numbers(path: str, ndim: int, numbers: Any) -> MatrixDims:
    """The dims of a leaf that optax's dimension numbers name; all others are batch dims."""
    rows = _count_from_front(path, ndim, numbers.reduction_axis)
    columns = _count_from_front(path, ndim, numbers.output_axis)
    if not rows or not columns or set(rows) & set(columns):
        raise ValueError(
            f"muon: rows and columns of leaf {path} must be different dims; got {rows} and {columns}. Name others, or "
            "None for adam."
        )
    batch = tuple(dim for dim in range(ndim) if dim not in rows + columns)
    return MatrixDims(batch, rows, columns)


def _count_from_front(path: str, ndim: int, dims: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(dims, int):
        dims = (dims,)
    where = f"muon: leaf {path}"
    return tuple(dim_of(where, dim, ndim) for dim in dims)


def check_dimension_numbers(tree: Any) -> None:
    """Refuses a tree of anything but optax's dimension numbers and None; what a function returns is not known yet."""
    if is_function(tree):
        return
    for numbers in jax.tree.leaves(tree, is_leaf=is_dimension_numbers):
        if not is_dimension_numbers(numbers):
            raise TypeError(
                "muon: muon_weight_dimension_numbers must be a tree of optax.contrib.MuonDimensionNumbers and None, or "
                f"a function that returns one; got {short(tree)}. Pass None for all leaves of two dims."
            )


def is_dimension_numbers(x: Any) -> bool:
    """Whether a node of a tree is the dimension numbers of a leaf; None stands for a leaf that `adam` updates."""
    return x is None or isinstance(x, optax.contrib.MuonDimensionNumbers)


def broadcast_numbers(tree: Any, params: Any) -> Any:
    """A tree like the parameters, with the dimension numbers of each leaf, or None.

    Worked example: {"layers": numbers, "embed": None} of the user says the same of all leaves under "layers".
    """
    if tree is None:
        return jax.tree.map(_choose_numbers, params)
    if is_function(tree):
        tree = tree(params)

    def spread(numbers: Any, subtree: Any) -> Any:
        return jax.tree.map(lambda _: numbers, subtree)

    return jax.tree.map(spread, tree, params, is_leaf=is_dimension_numbers)


def _choose_numbers(x: Any) -> Any:
    """As optax chooses: leaves of two dims are matrices."""
    if jnp.ndim(x) == 2:
        return optax.contrib.MuonDimensionNumbers()
    return None
