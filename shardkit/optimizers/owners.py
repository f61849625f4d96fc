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

import itertools
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

    position: int  # among the leaves of the tree
    shape: tuple[int, ...]  # its global shape
    dtype: Any
    dims: MatrixDims
    spec: tuple[tuple[str, ...], ...]  # the mesh axes of each dim

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """The shape of one matrix."""
        return tuple(self.shape[dim] for dim in self.dims.matrix)

    @property
    def matrix_spec(self) -> tuple[tuple[str, ...], ...]:
        """The mesh axes of each dim of a matrix."""
        return tuple(self.spec[dim] for dim in self.dims.matrix)

    @property
    def group_key(self) -> Any:
        """What leaves have in common whose matrices are stacked: their shape, how they are split, and their dtype."""
        # Devices along the axes that split layers or heads hold other matrices, so along these no replicas take turns.
        batch_axes: set[str] = set()
        for dim in self.dims.batch:
            batch_axes.update(self.spec[dim])
        rows = len(self.dims.rows)
        return self.matrix_shape, self.matrix_spec, rows, frozenset(batch_axes), self.dtype


class Owners(NamedTuple):
    """Which device orthogonalizes which matrix."""

    mesh: Mesh
    axes: tuple[str, ...]  # those of the plan: along others stand workers of another step
    specs: dict[str, PartitionSpec]  # how the leaves are split, by path
    dims: dict[str, MatrixDims]  # their dims, by path

    def orthogonalize(self, tree: Any, iterations: dict[str, Any]) -> Any:
        """The Newton-Schulz iterations of each matrix of a tree of global arrays, which stay as they are split."""
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
        specs = []
        padded_leaves = []
        members_by_group: dict[Any, list[_Member]] = {}
        for position, (path, x) in enumerate(leaves):
            member = self._make_member(position, path_name(path), x)
            members_by_group.setdefault(member.group_key, []).append(member)
            spec = canonical(PartitionSpec(*member.spec))
            specs.append(spec)
            # Zeros where a dim does not divide: rows and columns of zeros change nothing in the others.
            padded_leaves.append(pad_to(x, padded_shape(x.shape, spec, self.mesh)))

        def orthogonalize_shards(shards: list[jax.Array]) -> list[jax.Array]:
            # The groups are independent of each other: while a device computes one, the next may be on its way.
            for members in members_by_group.values():
                group = self._make_group(members)
                group_shards = [shards[member.position] for member in members]
                results = group.orthogonalize(group_shards, iterations)
                for member, result in zip(members, results, strict=True):
                    shards[member.position] = result
            return shards

        on_mesh = jax.shard_map(orthogonalize_shards, mesh=self.mesh, in_specs=(specs,), out_specs=specs)
        padded_results = on_mesh(padded_leaves)
        results = []
        for padded_result, (_, x) in zip(padded_results, leaves, strict=True):
            results.append(_remove_padding(padded_result, x.shape))
        return jax.tree.unflatten(structure, results)

    def _make_member(self, position: int, path: str, x: jax.Array) -> _Member:
        spec: list[tuple[str, ...]] = [()] * x.ndim
        for dim, axes in enumerate(spec_axes(self.specs[path])):
            spec[dim] = self._keep_long_axes(axes)
        return _Member(position, x.shape, x.dtype, self.dims[path], tuple(spec))

    def _make_group(self, members: Sequence[_Member]) -> _Group:
        first = members[0]
        split_dims = {}
        # In a stack the dims of a matrix are 1, 2, ...: dim 0 counts the matrices.
        for stack_dim, axes in enumerate(first.matrix_spec, 1):
            if axes:
                split_dims[stack_dim] = axes
        replicated_axes = []
        for axis in self._keep_long_axes(self.axes):
            if axis not in itertools.chain(*first.spec):
                replicated_axes.append(axis)
        return _Group(tuple(members), self.mesh.shape, split_dims, tuple(replicated_axes))

    def _keep_long_axes(self, axes: Sequence[str]) -> tuple[str, ...]:
        """The axes that have several devices."""
        return tuple(axis for axis in axes if self.mesh.shape[axis] > 1)


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
        ends = []  # of the matrices of each leaf, among those of all leaves
        count = 0
        for shard, member in zip(shards, self.members, strict=True):
            stack = _stack(shard, member.dims)
            count += stack.shape[0]
            stacks.append(stack)
            ends.append(count)

        x = self._send_to_owners(jnp.concatenate(stacks))
        owner_shape = x.shape
        # A padded matrix may be taller than wide where the matrix itself is not, which optax would transpose.
        first = self.members[0]
        x = _remove_padding(x, (x.shape[0], *first.matrix_shape))
        x = _iterate(x, len(first.dims.rows), iterations)
        x = self._send_back(pad_to(x, owner_shape))

        pieces = jnp.split(x[:count], ends[:-1])
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
        count = math.ceil(x.shape[0] / owners) * owners
        x = pad_to(x, (count, *x.shape[1:]))
        if self.replicated_axes:
            # Devices that have the same pieces take different matrices. Nothing is sent: each has all of them.
            matrices = count // replicas
            first = axis_index(self.replicated_axes) * matrices
            x = lax.dynamic_slice_in_dim(x, first, matrices)
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


def _remove_padding(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """The first part of an array, of this shape."""
    return x[tuple(map(slice, shape))]


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
    inverse_order = np.argsort(dims.stack_order)
    return x.transpose(inverse_order)
