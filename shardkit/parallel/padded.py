"""Leaves that do not divide: held and sent with zeros at the end of the dim that is split.

A state's arrays need dims that divide. Inside a step the compiler holds any D rows over n devices as ceil(D/n) rows
each, which is just how they are held padded: to cut the zeros off and to add them again sends nothing. So the loss and
the optimizer always see natural shapes, and the numbers are those of one device. Only an optimizer that multiplies
matrices (muon) pays: for its products the compiler gathers rows that do not divide, where it sums over those that do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from shardkit.collectives import unpad
from shardkit.layout import spec_axes

Sizes = tuple[tuple[int, int], ...]


@partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["sizes"])
@dataclass(frozen=True, eq=False)
class Padded:
    """A leaf with zeros at the end of some dims; `unpadded` gives it back in its natural shape.

    Attributes:
        array: the array as it is held; inside shard_map this device's part.
        sizes: each padded dim with its natural size.
    """

    array: Any
    sizes: Sizes

    @property
    def shape(self) -> tuple[int, ...]:
        """The natural shape."""
        sizes = dict(self.sizes)
        return tuple(sizes.get(dim, size) for dim, size in enumerate(self.array.shape))

    @property
    def dtype(self) -> Any:
        """The dtype of the array."""
        return self.array.dtype


def is_padded(x: Any) -> bool:
    """Whether a node of a tree is a padded leaf."""
    return isinstance(x, Padded)


def array_of(x: Any) -> Any:
    """A leaf's array as it is held, padding and all."""
    return x.array if is_padded(x) else x


def wrapped(array: Any, sizes: Sizes) -> Any:
    """An array with what is known of its padding; itself where there is none."""
    return Padded(array, sizes) if sizes else array


def cut(x: Any, sizes: Iterable[tuple[int, int]]) -> Any:
    """An array without the padding of these dims."""
    for dim, size in sizes:
        x = unpad(x, size, dim=dim)
    return x


def unpadded(tree: Any) -> Any:
    """The leaves of a state in their natural shapes, for evaluation, export or another plan.

    Layout: `X[.., n ceil(D/n), ..] -> X[.., D, ..]` of leaves that `uneven="pad"` padded; all others as they are.

    Args:
        tree: pytree of arrays, for example `state.params` or `state.opt_state`.

    Returns:
        The pytree with a plain array for each leaf.

    Cost: none inside jit, where the natural array keeps the layout that it is pinned to. Outside, an array cannot lie
        split over devices that do not divide it: a padded leaf comes back whole on every device.
    """
    return jax.tree.map(lambda x: cut(x.array, x.sizes) if is_padded(x) else x, tree, is_leaf=is_padded)


def padded(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """The leaves of natural shape as they are held under these specs: padded where a dim does not divide."""

    def one(spec: PartitionSpec, x: Any) -> Any:
        sizes = padding(x.shape, spec, mesh)
        shape = padded_shape(x.shape, spec, mesh)
        zeros = [(0, held - size) for size, held in zip(x.shape, shape, strict=True)]
        return Padded(jnp.pad(x, zeros), sizes) if sizes else x

    return jax.tree.map(one, specs, tree, is_leaf=lambda x: isinstance(x, PartitionSpec))


def padding(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> Sizes:
    """The dims that do not divide under a spec, each with its natural size."""
    held = padded_shape(shape, spec, mesh)
    return tuple((dim, size) for dim, size in enumerate(shape) if size != held[dim])


def padded_shape(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> tuple[int, ...]:
    """The shape with each dim up to the next multiple of the devices that split it."""
    ways = [math.prod(mesh.shape[axis] for axis in axes) for axes in spec_axes(spec)]
    ways += [1] * (len(shape) - len(ways))
    return tuple(-(-size // n) * n for size, n in zip(shape, ways, strict=True))
