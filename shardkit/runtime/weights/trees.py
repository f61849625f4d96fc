"""Parameters in the trees of orbax: of a run's checkpoints, which are flat and have a record, or of any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from shardkit.layout import path_name
from shardkit.runtime.checkpoint.directory import directory_of
from shardkit.runtime.checkpoint.orbax_io import orbax, quiet
from shardkit.runtime.checkpoint.portable import from_portable, to_read
from shardkit.runtime.checkpoint.reading import find_step, read_arrays
from shardkit.runtime.weights.files import Tensor, damaged

_PARAMS = "params."


class RunStep:
    """The parameters in a step of a run."""

    def __init__(self, directory: Path, step: int | None):
        self._directory = directory_of("load_params", directory)
        self._step, _, records = find_step("load_params", self._directory, step)
        self._records = {path: record for path, record in records.items() if path.startswith(_PARAMS)}
        self.path = directory / str(self._step)
        self.tensors = {
            path.removeprefix(_PARAMS): Tensor(tuple(record["shape"]), record["dtype"], self.path)
            for path, record in self._records.items()
        }

    def load(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """These parameters, each as stored on its devices, in the dtype of the checkpoint."""
        leaves = {_PARAMS + name: _in_dtype(x, self.tensors[name].dtype) for name, x in wanted.items()}
        arrays = read_arrays("load_params", self._directory, self._step, to_read(leaves, self._records), self._records)
        loaded = from_portable(arrays, leaves, self._records)
        return {path.removeprefix(_PARAMS): x for path, x in loaded.items()}


class OrbaxTree:
    """A tree that orbax has saved."""

    def __init__(self, path: Path):
        self.path = directory_of("load_params", path)
        self._v1 = orbax()
        try:
            with quiet():
                self._tree = self._v1.metadata(path).metadata
        except Exception as error:  # a reader may raise anything on a damaged file
            raise damaged(path, error) from error
        found = jax.tree_util.tree_leaves_with_path(self._tree, is_leaf=_is_tensor)
        self.tensors = {path_name(at): Tensor(tuple(x.shape), str(x.dtype), path) for at, x in found if _is_tensor(x)}

    def load(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """These leaves, each as stored on its devices, in the dtype of the tree."""
        leaves = {_PARAMS + name: _in_dtype(x, self.tensors[name].dtype) for name, x in wanted.items()}
        reads = to_read(leaves, dict.fromkeys(leaves))

        def one(at: Any, _: Any) -> Any:
            return reads.get(_PARAMS + path_name(at), self._v1.PLACEHOLDER)

        target = jax.tree_util.tree_map_with_path(one, self._tree, is_leaf=_is_tensor)
        try:
            with quiet():
                loaded = self._v1.load(self.path, target)
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise  # which does not mean damage
        except Exception as error:
            raise damaged(self.path, error) from error
        found = jax.tree_util.tree_leaves_with_path(loaded)
        arrays = {_PARAMS + path_name(at): x for at, x in found if isinstance(x, jax.Array)}
        return {name.removeprefix(_PARAMS): x for name, x in from_portable(arrays, leaves, {}).items()}


def _in_dtype(x: Any, dtype: str) -> Any:
    """A leaf of that dtype, as stored on the devices."""
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, dtype, sharding=array.sharding), x)


def _is_tensor(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")
