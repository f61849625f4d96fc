"""The same mesh over other devices: arrays whose shards are sent there bit by bit, and checksums of every shard."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit.collectives import vary
from shardkit.collectives.permute import permuted
from shardkit.runtime.data.checksums import checksum, from_storable, is_key, is_storable, to_storable
from shardkit.runtime.drift import from_every_device, on_mesh

Order = tuple[int, ...]  # for each place in the mesh, row by row, the place whose device works there


def exchanged(mesh: Mesh, order: Order) -> Mesh:
    """The mesh with its devices in another order."""
    devices = mesh.devices.reshape(-1)[list(order)].reshape(mesh.devices.shape)
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def sent(tree: Any, order: Order) -> Any:
    """A copy of the arrays over a mesh on the mesh in this order: each place of it has the same bits as before.

    What is not an array over a mesh, such as a batch in NumPy, is returned as it is.

    Cost: each device sends its shards to another, in one permutation per leaf.
    """
    leaves, structure = jax.tree.flatten(tree)
    over = [k for k, x in enumerate(leaves) if isinstance(getattr(x, "sharding", None), NamedSharding)]
    if not over:
        return tree
    arrays = [leaves[k] for k in over]
    mesh, specs = arrays[0].sharding.mesh, tuple(x.sharding.spec for x in arrays)
    for k, x, pieces in zip(over, arrays, _sent(arrays, mesh=mesh, specs=specs, order=order), strict=True):
        leaves[k] = _placed(x, pieces, NamedSharding(exchanged(mesh, order), x.sharding.spec))
    return jax.tree.unflatten(structure, leaves)


@partial(jax.jit, static_argnames=("mesh", "specs", "order"))
def _sent(arrays: list[jax.Array], *, mesh: Mesh, specs: tuple[PartitionSpec, ...], order: Order) -> list[jax.Array]:
    """The shards after they were sent, one after the other along dim 0, also those that are equal."""

    def per_device(arrays: list[jax.Array]) -> list[jax.Array]:
        stored = [jnp.atleast_1d(to_storable(x)) for x in arrays]
        return permuted(stored, mesh.axis_names, list(enumerate(order)))

    every = PartitionSpec(mesh.axis_names)
    return jax.shard_map(per_device, mesh=mesh, in_specs=(list(specs),), out_specs=every)(arrays)


def _placed(x: jax.Array, pieces: jax.Array, sharding: NamedSharding) -> jax.Array:
    """The array whose shards are these pieces, each on the device where it is."""
    like = x if is_storable(x) else jax.eval_shape(to_storable, x)
    shards = [piece.data if like.ndim else piece.data.reshape(()) for piece in pieces.addressable_shards]
    whole = jax.make_array_from_single_device_arrays(like.shape, sharding, shards, dtype=like.dtype)
    if like is x:
        return whole
    kind = jax.random.key_impl(x) if is_key(x) else x.dtype
    return _restored(whole, kind=kind, is_key=is_key(x), mesh=sharding.mesh, spec=sharding.spec)


@partial(jax.jit, static_argnames=("kind", "is_key", "mesh", "spec"))
def _restored(x: jax.Array, *, kind: Any, is_key: bool, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """The inverse of `to_storable`: typed keys of an implementation, or numbers of a dtype."""
    back = lambda x: jax.random.wrap_key_data(x, impl=kind) if is_key else from_storable(x, kind)  # noqa: E731
    return jax.shard_map(back, mesh=mesh, in_specs=spec, out_specs=spec)(x)


def shard_checksums(where: str, tree: Any) -> tuple[list[str], jax.Array | None]:
    """The paths of the leaves, and uint32 [devices, leaves]: the checksum of each shard, on all devices.

    Raises:
        TypeError: a leaf that is not an array over the mesh of the first.

    Cost: an all_gather of 4 bytes per leaf.
    """
    mesh, leaves = on_mesh(where, tree, None)
    if mesh is None:
        return [], None
    arrays = [x for _, x in leaves]
    return [path for path, _ in leaves], _checksums(arrays, mesh=mesh, specs=tuple(x.sharding.spec for x in arrays))


@partial(jax.jit, static_argnames=("mesh", "specs"))
def _checksums(arrays: list[jax.Array], *, mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> jax.Array:
    def per_device(arrays: list[jax.Array]) -> jax.Array:
        sums = jnp.stack([vary(checksum(x), mesh.axis_names) for x in arrays])
        return from_every_device(sums, mesh.axis_names)

    return jax.shard_map(per_device, mesh=mesh, in_specs=(list(specs),), out_specs=PartitionSpec())(arrays)


def on_host(sums: jax.Array | None) -> np.ndarray:
    """Checksums in NumPy; none on a process that is not in the mesh."""
    return np.asarray(sums) if sums is not None and sums.addressable_shards else np.zeros((0, 0), np.uint32)
