"""The owners of matrices: every matrix is whole on one device, which orthogonalizes it for all.

The matrices of one shape are dealt to the devices by an all_to_all; each orthogonalizes its own, and another all_to_all
brings the results back to the layout of the leaves.

Worked example: a leaf [4, 8, 6], the matrices A, B, C, D of four layers. `fsdp` splits their rows over 4 devices.

    device                              0             1             2             3
    holds, [4, 2, 6]                    A B C D       A B C D       A B C D       A B C D
                                        rows 0, 1     rows 2, 3     rows 4, 5     rows 6, 7
    sends its two rows of A to device 0, of B to device 1, of C to device 2, of D to device 3: an all_to_all
    owns, [1, 8, 6]                     A             B             C             D
    orthogonalizes the matrix that it owns
    sends rows 0, 1 of it to device 0, rows 2, 3 to device 1, and so on: the second all_to_all
    holds, [4, 2, 6]                    the same rows of the four results

A *stack* is an array [matrices, rows..., columns...], to which a device brings its shard of each leaf.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from shardkit.collectives import all_gather, axis_index
from shardkit.meshes.layout import canonical, path_name, spec_axes
from shardkit.optimizers.matrix_dims import MatrixDims
from shardkit.plans.storage import pad_to, padded_shape


class _Member(NamedTuple):
    """A leaf in a group."""

    path: str
    shape: tuple[int, ...]  # its global shape
    dims: MatrixDims
    spec: tuple[tuple[str, ...], ...]  # the mesh axes of each dim

    def group_key(self, dtype: Any) -> Any:
        """What leaves have in common whose matrices are stacked: their shape, how they are split, and their dtype."""
        matrix = tuple((self.shape[dim], self.spec[dim]) for dim in self.dims.matrix)
        # Devices along the axes that split layers or heads hold other matrices, so along these no replicas take turns.
        layer_axes: frozenset[str] = frozenset()
        for dim in self.dims.batch:
            layer_axes |= set(self.spec[dim])
        return matrix, len(self.dims.rows), layer_axes, dtype


class Owners(NamedTuple):
    """Which device orthogonalizes which matrix."""

    mesh: Mesh
    axes: tuple[str, ...]  # those of the plan: along others stand workers of another step
    specs: dict[str, PartitionSpec]  # how the leaves are split, by path
    dims: dict[str, MatrixDims]  # their dims, by path

    def orthogonalize(self, tree: Any, iterations: dict[str, Any]) -> Any:
        """The Newton-Schulz iterations of each matrix of a tree of global arrays, which stay as they are split."""
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
        members = []
        specs = []
        padded = []
        positions_by_group: dict[Any, list[int]] = {}
        for position, (path, x) in enumerate(leaves):
            member = self._make_member(path_name(path), x.shape)
            spec = canonical(PartitionSpec(*member.spec))
            members.append(member)
            specs.append(spec)
            padded.append(_pad(x, spec, self.mesh))
            positions_by_group.setdefault(member.group_key(x.dtype), []).append(position)

        def orthogonalize_shards(shards: list[jax.Array]) -> list[jax.Array]:
            # The groups are independent of each other: while a device computes one, the next may be on its way.
            for positions in positions_by_group.values():
                group = self._make_group([members[position] for position in positions])
                results = group.orthogonalize([shards[position] for position in positions], iterations)
                for position, result in zip(positions, results, strict=True):
                    shards[position] = result
            return shards

        on_mesh = jax.shard_map(orthogonalize_shards, mesh=self.mesh, in_specs=(specs,), out_specs=specs)
        results = []
        for x, member in zip(on_mesh(padded), members, strict=True):
            results.append(_cut(x, member.shape))
        return jax.tree.unflatten(structure, results)

    def _make_member(self, path: str, shape: tuple[int, ...]) -> _Member:
        spec: list[tuple[str, ...]] = [()] * len(shape)
        for dim, axes in enumerate(spec_axes(self.specs[path])):
            spec[dim] = tuple(axis for axis in axes if self.mesh.shape[axis] > 1)
        return _Member(path, shape, self.dims[path], tuple(spec))

    def _make_group(self, members: Sequence[_Member]) -> _Group:
        first = members[0]
        split_dims = {}
        # In a stack the dims of a matrix are 1, 2, ...: dim 0 counts the matrices.
        for stack_dim, dim in enumerate(first.dims.matrix, 1):
            if first.spec[dim]:
                split_dims[stack_dim] = first.spec[dim]
        split_axes: set[str] = set().union(*first.spec)
        replicated_axes = []
        for axis in self.axes:
            if axis not in split_axes and self.mesh.shape[axis] > 1:
                replicated_axes.append(axis)
        return _Group(tuple(members), self.mesh.shape, split_dims, tuple(replicated_axes))


class _Group(NamedTuple):
    """Leaves whose matrices have one shape and dtype, and are split alike: they are stacked, and sent together.

    Worked example, with padding: ten 8x6 matrices in float32, rows over "fsdp" of 4 devices. Shapes on one device, and
    what it sends:

    | step | shape | bytes sent |
    |---|---|--:|
    | a piece of each matrix, stacked | [10, 2, 6] | |
    | padded to a multiple of 4 owners | [12, 2, 6] | |
    | all_to_all: three whole matrices | [3, 8, 6] | 3/4 of 576 = 432 |
    | orthogonalized, each by one device | [3, 8, 6] | |
    | all_to_all: its piece of each matrix | [12, 2, 6] | 432 |
    | without the padding | [10, 2, 6] | |

    With "dp" of 2 devices beside it there are 8 owners, and the stack is padded to 16. Both devices of "dp" hold the
    same pieces: the first keeps the first 8, the second the last 8, and an all_gather over "dp" at the end brings them
    together.
    """

    members: tuple[_Member, ...]
    sizes: Mapping[str, int]  # of the mesh axes
    split_dims: dict[int, tuple[str, ...]]  # the mesh axes that split a dim of the stack
    replicated_axes: tuple[str, ...]  # along which devices hold the same pieces

    def orthogonalize(self, shards: Sequence[jax.Array], iterations: dict[str, Any]) -> list[jax.Array]:
        """The results for the shards of the leaves, in their layout."""
        stacks = []
        for shard, member in zip(shards, self.members, strict=True):
            stacks.append(_stack(shard, member.dims))
        x = jnp.concatenate(stacks)
        count = x.shape[0]
        x = self._send_to_owners(x)
        shape_of_shards = x.shape
        # A padded matrix may be taller than wide where the matrix itself is not, which optax would transpose.
        first = self.members[0]
        x = _cut(x, (x.shape[0], *(first.shape[dim] for dim in first.dims.matrix)))
        x = _iterate(x, len(first.dims.rows), iterations)
        x = pad_to(x, shape_of_shards)
        x = self._send_back(x)

        ends = np.cumsum([stack.shape[0] for stack in stacks])[:-1]
        pieces = jnp.split(x[:count], ends)
        results = []
        for piece, shard, member in zip(pieces, shards, self.members, strict=True):
            results.append(_unstack(piece, shard.shape, member.dims))
        return results

    def _send_to_owners(self, x: jax.Array) -> jax.Array:
        """Of a piece of each matrix, some whole matrices: those of this device."""
        replicas = self._count_devices(self.replicated_axes)
        owners = replicas
        for axes in self.split_dims.values():
            owners *= self._count_devices(axes)
        x = jnp.pad(x, [(0, -x.shape[0] % owners), *[(0, 0)] * (x.ndim - 1)])
        if self.replicated_axes:
            # Devices that have the same pieces take different matrices. Nothing is sent: each has all of them.
            size = x.shape[0] // replicas
            x = lax.dynamic_slice_in_dim(x, axis_index(self.replicated_axes) * size, size)
        # Whole matrices come together here, and only here: a device gives away its piece of each matrix that is not its
        # own, and gets the other pieces of its own, over one split dim after the other. An all_gather would bring every
        # matrix to every device, n times the bytes, and all of them would compute the same. Dealing gradients, before
        # the momentum, would cost the same bytes, but an owner would then hold the momentum of whole matrices, and the
        # state would no longer be optax's. lax is called directly: all axes are bound and have several devices, pieces
        # vary over them, and all dims divide.
        for dim, axes in self.split_dims.items():
            x = lax.all_to_all(x, axes, split_axis=0, concat_axis=dim, tiled=True)
        return x

    def _send_back(self, x: jax.Array) -> jax.Array:
        """The inverse of `_send_to_owners`, but for its padding."""
        # The last dim that was put together is the first that is taken apart.
        for dim, axes in reversed(self.split_dims.items()):
            x = lax.all_to_all(x, axes, split_axis=dim, concat_axis=0, tiled=True)
        if self.replicated_axes:
            # Replicated, because the update is added to parameters that are the same along these axes: a result that
            # varied could leave shard_map only as split.
            x = all_gather(x, self.replicated_axes, replicated=True)
        return x

    def _count_devices(self, axes: Sequence[str]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)


def _iterate(x: jax.Array, row_dims: int, iterations: dict[str, Any]) -> jax.Array:
    """optax's Newton-Schulz iterations of stacked matrices [matrices, rows..., columns...]."""
    rows = tuple(range(1, 1 + row_dims))
    columns = tuple(range(1 + row_dims, x.ndim))
    dimension_numbers = optax.contrib.MuonDimensionNumbers(rows, columns)
    # Without momentum optax's transformation is the iterations alone.
    transformation = optax.contrib.scale_by_muon(
        beta=0.0, nesterov=False, weight_dimension_numbers=dimension_numbers, **iterations
    )
    x, _ = transformation.update(x, transformation.init(x))
    return x


def _pad(x: jax.Array, spec: PartitionSpec, mesh: Mesh) -> jax.Array:
    """With zeros where a dim does not divide: rows and columns of zeros change nothing in the others."""
    return pad_to(x, padded_shape(x.shape, spec, mesh))


def _cut(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    return x[tuple(slice(size) for size in shape)]


def _stack(x: jax.Array, dims: MatrixDims) -> jax.Array:
    """All matrices of a leaf, one behind the other: [matrices, rows..., columns...]."""
    # Projections into heads of six layers, [6, 8, 4, 2], with rows (1,) and columns (2, 3): [6, 8, 4, 2] again, six
    # matrices. If each head has a matrix of its own, the batch dims are (0, 2): [6, 4, 8, 2], and then [24, 8, 2].
    x = x.transpose(dims.stack_order)
    batch_shape = x.shape[: len(dims.batch)]
    matrix_shape = x.shape[len(dims.batch) :]
    return x.reshape(math.prod(batch_shape), *matrix_shape)


def _unstack(x: jax.Array, shape: Sequence[int], dims: MatrixDims) -> jax.Array:
    """The inverse of `_stack`, for a leaf of this shape."""
    x = x.reshape([shape[dim] for dim in dims.stack_order])
    inverse = [dims.stack_order.index(dim) for dim in range(len(shape))]
    return x.transpose(inverse)
