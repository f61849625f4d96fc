"""Creates the shards of a global array from the data of a process."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit.layout import canonical, local_shape, path_name
from shardkit.runtime.data.checksums import is_key


def sharding_of(where: str, path: Any, shape: tuple[int, ...], mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    """A leaf's sharding, by as many entries of the spec as it has dims; refuses dims that do not divide."""
    spec = canonical(PartitionSpec(*spec[: len(shape)]))
    try:
        local_shape(shape, spec, mesh)
    except ValueError as error:
        raise ValueError(str(error).replace("local_shape:", _leaf(where, path), 1)) from None
    return NamedSharding(mesh, spec)


def _leaf(where: str, path: Any) -> str:
    return f"{where}: leaf {path_name(path)}:" if path else f"{where}:"


def on_host(where: str, path: Any, x: Any) -> Any:
    """A leaf as a NumPy array of a jax dtype, or as typed keys; refuses integers that are too large for the dtype."""
    if is_key(x):
        return x
    x = np.asarray(x)
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    if x.size and np.issubdtype(dtype, np.integer) and dtype.itemsize < x.dtype.itemsize:
        for value in (x.min(), x.max()):
            if value != value.astype(dtype):  # the cast below would wrap it
                raise ValueError(
                    f"{_leaf(where, path)} {x.dtype} values must fit jax's {dtype}; got {value}. Pass smaller numbers, "
                    "or set jax_enable_x64."
                )
    return x.astype(dtype, copy=False)


def global_array(x: Any, sharding: NamedSharding, shape: tuple[int, ...], rows: np.ndarray | None = None) -> jax.Array:
    """A global array, from this process's rows of it in ascending order, or from all of it."""

    def piece(index: Any) -> Any:
        if rows is None or not shape:
            return x[index]
        first, last, _ = index[0].indices(shape[0])
        start = int(np.searchsorted(rows, first))
        return x[(slice(start, start + last - first), *index[1:])]

    return jax.make_array_from_callback(shape, sharding, piece, dtype=x.dtype)
