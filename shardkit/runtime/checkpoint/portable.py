"""A training state as a checkpoint holds it: plain arrays by path, in their natural shapes and orders.

So a checkpoint knows no mesh, no plan and no number of processes. A leaf that is held padded or in the order of
pipeline stages is stored without; a key as its data, and beside it the name of its implementation; a dtype that the
files have no name for as bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit._check import quoted
from shardkit.layout import canonical, path_name, spec_axes
from shardkit.partitioning.storage import Held, is_padded, padded, padding, stored_array, unpadded
from shardkit.runtime.data.checksums import NOT_COMPUTED, checksum, from_plain, is_key, is_plain, plain, stored_dtype

Leaves = dict[str, Any]


def leaves_of(where: str, state: Any) -> Leaves:
    """The leaves of a state by path, each as it is held.

    Raises:
        ValueError: two leaves of one path, leaves that lie on no mesh of devices, or of a dtype that nothing computes.
    """
    found = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_padded)
    leaves = {path_name(path): x for path, x in found}
    if len(leaves) < len(found):
        paths = [path_name(path) for path, _ in found]
        raise ValueError(
            f"{where}: each leaf must have a path of its own; got two of "
            f"{quoted(sorted({path for path in paths if paths.count(path) > 1}))}. Rename one of the entries."
        )
    for path, x in leaves.items():
        sharding = getattr(stored_array(x), "sharding", None)
        if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
            raise ValueError(
                f"{where}: every leaf must be laid out over a mesh of devices; leaf {path!r} has {sharding}. Pass what "
                "init or init.abstract of make_train_step gives, over a mesh from make_mesh."
            )
        if str(x.dtype) in NOT_COMPUTED:
            raise ValueError(
                f"{where}: every leaf must be of a dtype that XLA computes with; leaf {path!r} is {x.dtype}. Hold "
                "it as bool or int2."
            )
    return leaves


def form(x: Any) -> dict[str, Any]:
    """What a checkpoint notes of a leaf, as JSON: its natural shape and dtype, and a key's implementation."""
    shape = list(x.shape)
    if not is_key(x):
        return {"shape": shape, "dtype": str(x.dtype)}
    implementation = {} if isinstance(x, jax.ShapeDtypeStruct) else {"implementation": str(jax.random.key_impl(x))}
    return {"shape": shape, "dtype": "key", **implementation}


def natural(leaves: Leaves) -> dict[str, jax.Array]:
    """The leaves as plain arrays in natural form; those that are held so are the same arrays, not copies.

    A leaf keeps its layout but for dims that do not divide, which are whole on every device.
    """
    changed = {path: x for path, x in leaves.items() if is_padded(x) or not is_plain(x)}
    arrays = _natural(tuple(changed.values()), tuple(_natural_sharding(x) for x in changed.values()))
    return leaves | dict(zip(changed, arrays, strict=True))


@partial(jax.jit, static_argnums=1)
def _natural(leaves: tuple[Any, ...], shardings: tuple[NamedSharding, ...]) -> list[jax.Array]:
    arrays = [plain(unpadded(x)) for x in leaves]
    return [lax.with_sharding_constraint(x, layout) for x, layout in zip(arrays, shardings, strict=True)]


def _natural_sharding(x: Any) -> NamedSharding:
    sharding = stored_array(x).sharding
    if not is_padded(x):
        return sharding
    uneven = {dim for dim, _ in padding(x.shape, sharding.spec, sharding.mesh)}
    entries = [None if dim in uneven else axes for dim, axes in enumerate(spec_axes(sharding.spec))]
    return NamedSharding(sharding.mesh, canonical(PartitionSpec(*entries)))


def abstract(leaves: Leaves, forms: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays to be read for leaves that are to be held so; `forms` are those of the checkpoint."""

    def one(path: str, x: Any) -> jax.ShapeDtypeStruct:
        shape, dtype = x.shape, stored_dtype(x.dtype)
        if is_key(x):
            data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=forms[path]["implementation"])))
            shape, dtype = shape + data.shape, data.dtype
        return jax.ShapeDtypeStruct(shape, dtype, sharding=_natural_sharding(x))

    return {path: one(path, x) for path, x in leaves.items()}


def held(arrays: Mapping[str, jax.Array], leaves: Leaves, forms: Mapping[str, Any]) -> Leaves:
    """Natural arrays as the leaves hold them; those that are held in natural form are the same arrays."""
    changed = {path: x for path, x in leaves.items() if is_padded(x) or not is_plain(x)}

    def make(arrays: dict[str, jax.Array]) -> Leaves:
        def one(path: str, x: Any) -> Any:
            if is_key(x):
                return jax.random.wrap_key_data(arrays[path], impl=forms[path]["implementation"])
            array = from_plain(arrays[path], x.dtype)
            if not is_padded(x):
                return array
            sharding = x.array.sharding
            return padded(array, Held(sharding.spec, x.rows), sharding.mesh)

        return {path: one(path, x) for path, x in changed.items()}

    shardings = {path: stored_array(x).sharding for path, x in changed.items()}
    made = jax.jit(make, out_shardings=shardings)({path: arrays[path] for path in changed})
    return {path: made.get(path, arrays[path]) for path in leaves}


def checksums(arrays: Mapping[str, Any]) -> dict[str, int]:
    """For each array a checksum of its bits and their places, below 2^32; the same on every mesh.

    Layout: the arrays as they lie; a sum is psum'ed over their axes.
    """
    mesh = next(iter(arrays.values())).sharding.mesh
    sums = _sums(tuple(arrays.values()), NamedSharding(mesh, PartitionSpec()))
    return dict(zip(arrays, np.asarray(sums).tolist(), strict=True))


@partial(jax.jit, static_argnums=1)
def _sums(arrays: tuple[jax.Array, ...], replicated: NamedSharding) -> jax.Array:
    return lax.with_sharding_constraint(jnp.stack([checksum(x) for x in arrays]), replicated)
