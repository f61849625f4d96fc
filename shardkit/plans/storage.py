"""Leaves that are stored padded, or with their layers permuted into the order of stages.

A leaf that does not divide is stored and sent with zeros at the end of the dim that is split. The arrays of a state
need dims that divide; inside a step the compiler stores any D rows over n devices as ceil(D/n) rows each, which is the
padded form: cutting and adding the zeros sends nothing. So the loss and the optimizer see original shapes, and the
numbers are those of one device. Only optimizers that multiply matrices (muon) pay: for the products the compiler
gathers rows that do not divide, where it would otherwise sum over them.

The stack of a pipeline is stored stage by stage (`stages.py`), each padded with rows of zeros to the longest. Most
optimizers do not depend on the order of layers, and see the stored order. If rows of padding must be removed, or the
optimizer depends on the order, it sees the original order, for which the compiler moves rows.

Worked example: 5 layers in 2 stages of 3 and 2 on a pipeline of 2 devices. Each device needs as many rows, so the stack
[5, D] is stored as [6, D] with `rows = (0, 1, 2, 3, 4, -1)`: three rows on each device, and the row of zeros at the end
of the second. With D = 7 split over 2 devices as well, it is stored as [6, 8], and `sizes = ((1, 7),)`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from shardkit.collectives import unpad_from_axis
from shardkit.meshes.layout import by_path, count_devices, path_name, spec_axes
from shardkit.plans.axis_types import apply_on_auto_axes

Sizes = tuple[tuple[int, int], ...]
Rows = tuple[int, ...]


@dataclass(frozen=True)
class Storage:
    """How a leaf is stored: its spec, and the original index of each row of dim 0 (-1: zeros; (): original order)."""

    spec: PartitionSpec
    rows: Rows = ()


@partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["sizes", "rows"])
@dataclass(frozen=True, eq=False)
class Padded:
    """A leaf with zeros at the end of some dims, or with its rows permuted; `unpadded` undoes both.

    Attributes:
        array: the stored array; inside shard_map this device's part.
        sizes: each padded dim with its original size.
        rows: the original index of each stored row of dim 0, -1 for a row of zeros; () for original order.
    """

    array: Any
    sizes: Sizes
    rows: Rows = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The original shape."""
        sizes = dict(self.sizes)
        if self.rows:
            # Rows of padding are no layers.
            sizes[0] = len(self.rows) - self.rows.count(-1)
        shape = list(self.array.shape)
        for dim, size in sizes.items():
            shape[dim] = size
        return tuple(shape)

    @property
    def dtype(self) -> Any:
        """The dtype."""
        return self.array.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """A copy in the original shape and order."""
        # numpy passes `copy` too; this is a copy in any case.
        return np.array(unpadded(self), dtype)


def is_padded(x: Any) -> bool:
    """Whether a node of a tree is a padded leaf."""
    return isinstance(x, Padded)


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """The arrays of a tree by path: of a padded leaf the stored array. Of a tree of specs, the specs by path.

    Raises:
        ValueError: two leaves at one path.
    """

    def is_leaf(x: Any) -> bool:
        return is_padded(x) or isinstance(x, PartitionSpec)

    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return {path: stored_array(leaf) for path, leaf in by_path("parameters", leaves).items()}


def replace_arrays(tree: Any, named: dict[str, Any]) -> Any:
    """The tree with other arrays, by path."""

    def replace_array(path: Any, leaf: Any) -> Any:
        array = named[path_name(path)]
        if is_padded(leaf):
            return replace(leaf, array=array)
        return array

    return jax.tree_util.tree_map_with_path(replace_array, tree, is_leaf=is_padded)


def is_key(x: Any) -> bool:
    """Whether a leaf is an array of typed keys."""
    return jax.dtypes.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key)


def to_storable(x: Any) -> Any:
    """Typed keys as their integers; other arrays unchanged."""
    if is_key(x):
        return jax.random.key_data(x)
    return x


def stored_array(x: Any) -> Any:
    """A leaf's array as it is stored, with its padding."""
    return x.array if is_padded(x) else x


def wrap_stored(array: Any, sizes: Sizes, rows: Rows = ()) -> Any:
    """A stored array as a Padded; a plain array where it is stored in its original form."""
    if sizes or rows:
        return Padded(array, sizes, rows)
    return array


def cut_padding(x: Any, sizes: Iterable[tuple[int, int]]) -> Any:
    """An array with these dims cut to their original sizes."""
    for dim, size in sizes:
        x = unpad_from_axis(x, size, dim=dim)
    return x


def unpadded(tree: Any) -> Any:
    """Returns leaves in their original shapes and order, for evaluation, checkpoints, export or another plan.

    Layout: `X[.., n ceil(D/n), ..] -> X[.., D, ..]` for leaves that `uneven="pad"` padded; the layers of a pipeline
        from the order of its stages to their own; all others unchanged.

    Args:
        tree: pytree of arrays, for example `state.params` or `state.opt_state`.

    Returns:
        The pytree with a plain array for each leaf.

    Cost: inside jit, nothing for padding. Outside of jit, every device gathers a padded leaf, because jax cannot split
        an array over devices that do not divide it. Layers in the order of stages move between devices.

    Example:
        >>> plan = sk.fsdp("model", min_size=1, uneven="pad")
        >>> grad_fn = sk.value_and_grad(lambda params, batch, keys: jnp.mean(batch @ params))
        >>> init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh, plan=plan)
        >>> state = init(jnp.ones(3), jax.random.key(0))
        >>> state.params.array.shape, sk.unpadded(state.params).shape
        ((4,), (3,))
    """
    return restore_leaves(tree, in_order=True)


def restore_leaves(tree: Any, *, in_order: bool) -> Any:
    """The leaves without padding; with `in_order`, or if there are rows of padding, their rows in original order."""

    def restore(leaf: Any) -> Any:
        if not is_padded(leaf):
            return leaf
        # Over Explicit axes jax refuses to cut a dim to a size that does not divide, so the result has the dim whole.
        restore_array = partial(_restore_array, sizes=leaf.sizes, rows=leaf.rows, in_order=in_order)
        return apply_on_auto_axes(restore_array, leaf.array, dict(leaf.sizes))

    return jax.tree.map(restore, tree, is_leaf=is_padded)


def _restore_array(array: jax.Array, sizes: Sizes, rows: Rows, in_order: bool) -> jax.Array:
    array = cut_padding(array, sizes)
    if not _must_reorder(rows, in_order):
        return array
    # A stable sort of (0, 2, 1, -1) puts the rows of padding first: [3, 0, 2, 1]. Behind them is the inverse.
    zeros = rows.count(-1)
    inverse = np.argsort(rows, kind="stable")[zeros:]
    return _take_rows(array, tuple(inverse.tolist()), zeros > 0)


def pad_to(x: Any, shape: Sequence[int]) -> jax.Array:
    """An array with zeros at the end of each dim, up to a shape."""
    widths = []
    for size, padded_size in zip(x.shape, shape, strict=True):
        widths.append((0, padded_size - size))
    return jnp.pad(x, widths)


def pad_leaves(tree: Any, storage: Any, mesh: Mesh, *, in_order: bool = True) -> Any:
    """The inverse of `restore_leaves`: the leaves as they are stored; `storage` has a Storage for each."""

    def pad(form: Storage, x: Any) -> Any:
        # Rows first, then padding: `spec` is that of the stored rows.
        if _must_reorder(form.rows, in_order):
            x = _take_rows(x, form.rows, -1 in form.rows)
        sizes = padding(x.shape, form.spec, mesh)
        if sizes:
            x = pad_to(x, padded_shape(x.shape, form.spec, mesh))
        return wrap_stored(x, sizes, form.rows)

    return jax.tree.map(pad, storage, tree)


@partial(jax.jit, static_argnums=(1, 2))
def _take_rows(x: Any, rows: Rows, uneven: bool) -> Any:
    """The rows of these indices, with zeros for indices below 0: by one gather, or for uneven stages as slices.

    A gather sends least, but XLA's partitioner fails with an internal error if the number of rows changes and two
    further dims are split.
    """
    if not uneven:
        # All indices are in bounds. "clip" spares the select by which the default mode fills other rows with nan.
        return jnp.take(x, np.array(rows), axis=0, mode="clip")
    slices = []
    for start, stop in _find_runs(rows):
        count = stop - start
        if rows[start] < 0:
            slices.append(jnp.zeros((count, *x.shape[1:]), x.dtype))
        else:
            slices.append(lax.slice_in_dim(x, rows[start], rows[start] + count))
    return jnp.concatenate(slices)


def _find_runs(rows: Rows) -> list[tuple[int, int]]:
    """Where each run of consecutive rows starts and stops; each row of zeros, -1, is a run of its own.

    Of (0, 1, 2, 3, 4, -1): (0, 5), the five layers, and (5, 6), the zeros.
    """
    starts = []
    for number, row in enumerate(rows):
        continues = number > 0 and row > 0 and row == rows[number - 1] + 1  # row 0 does not continue a -1
        if not continues:
            starts.append(number)
    stops = [*starts[1:], len(rows)]
    return list(zip(starts, stops, strict=True))


def check_storage(where: str, tree: Any, storage: Any, mesh: Mesh) -> None:
    """Refuses leaves that are not stored as a plan stores them.

    Raises:
        ValueError: with the leaf's path and both forms.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_padded)
    for (path, x), form in zip(leaves, jax.tree.leaves(storage), strict=True):
        sizes = padding(stored_shape(x.shape, form.rows), form.spec, mesh)
        actual: tuple[Sizes, Rows] = ((), ())
        if is_padded(x):
            actual = (x.sizes, x.rows)
        # A stack in the order of another plan's stages may have the right shape: its layers would run in the wrong
        # order, and nothing would say so.
        if actual != (sizes, form.rows):
            raise ValueError(
                f"{where} must be stored as this plan stores them; leaf {path_name(path)} is stored "
                f"{_describe_form(*actual)}, and must be {_describe_form(sizes, form.rows)}. Pass unpadded(...) of "
                "them to init, or to an evaluation with a plan that pads nothing."
            )


def _describe_form(sizes: Sizes, rows: Rows) -> str:
    """The padding and the order of a stored leaf in words; of the rows the first eight."""
    words = [f"with dim {dim} of {size} padded" for dim, size in sizes]
    if rows:
        first = ", ".join(map(str, rows[:8]))
        more = ", ..." if rows[8:] else ""
        words.append(f"with its rows in the order of stages ({first}{more})")
    return ", ".join(words) or "in its original form"


def stored_shape(shape: tuple[int, ...], rows: Rows) -> tuple[int, ...]:
    """The shape of a leaf with its rows as they are stored."""
    if not rows:
        return shape
    return (len(rows), *shape[1:])


def _must_reorder(rows: Rows, in_order: bool) -> bool:
    """Whether rows must be moved: the caller wants the original order, or there are rows of zeros among them."""
    return bool(rows) and (in_order or -1 in rows)


def padding(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> Sizes:
    """The dims that do not divide under a spec, each with its original size."""
    stored = padded_shape(shape, spec, mesh)
    return tuple((dim, size) for dim, size in enumerate(shape) if size != stored[dim])


def padded_shape(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> tuple[int, ...]:
    """The shape with each dim rounded up to a multiple of the devices that split it."""
    # A leaf 6x4 under P("fsdp") of 4 devices is stored as 8x4: 2 rows on each, of which the last device's are padding.
    padded = list(shape)
    for dim, axes in enumerate(spec_axes(spec)):
        devices = count_devices(mesh, axes)
        padded[dim] = math.ceil(shape[dim] / devices) * devices
    return tuple(padded)
