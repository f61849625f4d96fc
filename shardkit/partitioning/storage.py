"""Leaves that are held in another form than their natural one: padded, or with their layers in the order of stages.

Leaves that do not divide are held and sent with zeros at the end of the dim that is split.

A state's arrays need dims that divide. Inside a step the compiler holds any D rows over n devices as ceil(D/n) rows
each, which is just how they are held padded: to cut the zeros off and to add them again sends nothing. So the loss and
the optimizer always see natural shapes, and the numbers are those of one device. Only an optimizer that multiplies
matrices (muon) pays: for its products the compiler gathers rows that do not divide, where it sums over those that do.

The stack of a pipeline is held stage by stage (`stages.py`), each filled up with rows of zeros to the largest. Nearly
every optimizer is indifferent to the order of layers and sees them as they are held. It sees the natural order, for
which the compiler moves rows, where there are rows to be left out or it keeps arrays that mirror no parameter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from shardkit.collectives import unpad_from_axis
from shardkit.layout import path_name, spec_axes

Sizes = tuple[tuple[int, int], ...]
Rows = tuple[int, ...]


@dataclass(frozen=True)
class Held:
    """How a leaf is held: its spec, and the natural row of each row of dim 0 (-1 for zeros); () for natural order."""

    spec: PartitionSpec
    rows: Rows = ()


@partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["sizes", "rows"])
@dataclass(frozen=True, eq=False)
class Padded:
    """A leaf with zeros at the end of some dims, or with its rows in another order; `unpadded` gives it back.

    Attributes:
        array: the array as it is held; inside shard_map this device's part.
        sizes: each padded dim with its natural size.
        rows: the natural row of each row of dim 0, with -1 for one of zeros; () for the natural order.
    """

    array: Any
    sizes: Sizes
    rows: Rows = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The natural shape."""
        sizes = dict(self.sizes)
        if self.rows:
            sizes[0] = len(self.rows) - self.rows.count(-1)
        return tuple(sizes.get(dim, size) for dim, size in enumerate(self.array.shape))

    @property
    def dtype(self) -> Any:
        """The dtype of the array."""
        return self.array.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """A copy in the natural shape and order."""
        return np.array(unpadded(self), dtype)


def is_padded(x: Any) -> bool:
    """Whether a node of a tree is a padded leaf."""
    return isinstance(x, Padded)


def array_of(x: Any) -> Any:
    """A leaf's array as it is held, padding and all."""
    return x.array if is_padded(x) else x


def wrapped(array: Any, sizes: Sizes, rows: Rows = ()) -> Any:
    """An array with what is known of its padding and its rows; itself where it is held in its natural form."""
    return Padded(array, sizes, rows) if sizes or rows else array


def cut(x: Any, sizes: Iterable[tuple[int, int]]) -> Any:
    """An array without the padding of these dims."""
    for dim, size in sizes:
        x = unpad_from_axis(x, size, dim=dim)
    return x


def unpadded(tree: Any) -> Any:
    """The leaves of a state in their natural shapes and order, for evaluation, checkpoints, export or another plan.

    Layout: `X[.., n ceil(D/n), ..] -> X[.., D, ..]` of leaves that `uneven="pad"` padded, and the layers of a pipeline
        from the order of its stages to their own; all others as they are.

    Args:
        tree: pytree of arrays, for example `state.params` or `state.opt_state`.

    Returns:
        The pytree with a plain array for each leaf.

    Cost: of padding none inside jit, where the natural array keeps the layout that it is pinned to. Outside, an array
        cannot lie split over devices that do not divide it: a padded leaf comes back whole on every device. Layers in
        the order of stages move between devices.
    """
    return exact(tree, in_order=True)


def exact(tree: Any, *, in_order: bool) -> Any:
    """The leaves without their padding, with their rows in natural order or, where none is padding, as they stand."""

    def one(x: Any) -> Any:
        if not is_padded(x):
            return x
        array = cut(x.array, x.sizes)
        if not _moves(x.rows, in_order):
            return array
        filled = x.rows.count(-1)
        return _rows(array, tuple(np.argsort(x.rows, kind="stable")[filled:].tolist()), filled > 0)

    return jax.tree.map(one, tree, is_leaf=is_padded)


def padded(tree: Any, held: Any, mesh: Mesh, *, in_order: bool = True) -> Any:
    """What `exact` gave, as it is held: padded where a dim does not divide, and with its rows in place."""

    def one(held: Held, x: Any) -> Any:
        if _moves(held.rows, in_order):
            x = _rows(x, held.rows, -1 in held.rows)
        sizes = padding(x.shape, held.spec, mesh)
        shape = padded_shape(x.shape, held.spec, mesh)
        zeros = [(0, longer - size) for size, longer in zip(x.shape, shape, strict=True)]
        return wrapped(jnp.pad(x, zeros) if sizes else x, sizes, held.rows)

    return jax.tree.map(one, held, tree)


@partial(jax.jit, static_argnums=(1, 2))
def _rows(x: Any, rows: Rows, uneven: bool) -> Any:
    """These rows, zeros for those below 0; where stages are uneven as slices, and not by one gather.

    XLA's partitioner ends with an internal error on a gather of other than as many rows, where two further dims are
    split over axes of their own. Of as many it is what sends least.
    """
    if not uneven:
        return jnp.take(x, np.array(rows), axis=0, mode="clip")
    first = [i for i, row in enumerate(rows) if i == 0 or row <= 0 or row != rows[i - 1] + 1]
    runs = [(rows[i], after - i) for i, after in itertools.pairwise([*first, len(rows)])]
    zeros = lambda count: jnp.zeros((count, *x.shape[1:]), x.dtype)  # noqa: E731
    return jnp.concatenate([zeros(n) if row < 0 else lax.slice_in_dim(x, row, row + n) for row, n in runs])


def check_held(where: str, tree: Any, held: Any, mesh: Mesh) -> None:
    """Refuses leaves that are held in another form than a plan holds them: as they lie, they would be other numbers.

    Raises:
        ValueError: with the leaf's path and both forms.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_padded)
    for (path, x), each in zip(leaves, jax.tree.leaves(held), strict=True):
        wanted = padding(in_rows(x.shape, each.rows), each.spec, mesh), each.rows
        found = (x.sizes, x.rows) if is_padded(x) else ((), ())
        if found != wanted:
            raise ValueError(
                f"{where} must be held as this plan holds them, and another plan's are not; leaf {path_name(path)} is "
                f"held {_form(*found)}, and here {_form(*wanted)}. Pass unpadded(...) of them to init, or to an "
                "evaluation whose plan pads nothing."
            )


def _form(sizes: Sizes, rows: Rows) -> str:
    padded = [f"with dim {dim} of {size} padded" for dim, size in sizes]
    order = ["with its rows in the order of stages " + str(rows[:8])[:-1].rstrip(",") + (", ...)" if rows[8:] else ")")]
    return ", ".join(padded + order * bool(rows)) or "in its natural form"


def in_rows(shape: tuple[int, ...], rows: Rows) -> tuple[int, ...]:
    """The shape of a leaf with its rows as they are held."""
    return (len(rows), *shape[1:]) if rows else shape


def _moves(rows: Rows, in_order: bool) -> bool:
    return bool(rows) and (in_order or -1 in rows)


def padding(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> Sizes:
    """The dims that do not divide under a spec, each with its natural size."""
    held = padded_shape(shape, spec, mesh)
    return tuple((dim, size) for dim, size in enumerate(shape) if size != held[dim])


def padded_shape(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> tuple[int, ...]:
    """The shape with each dim up to the next multiple of the devices that split it."""
    ways = [math.prod(mesh.shape[axis] for axis in axes) for axes in spec_axes(spec)]
    ways += [1] * (len(shape) - len(ways))
    return tuple(-(-size // n) * n for size, n in zip(shape, ways, strict=True))
