"""Parameters from a run's checkpoints or from safetensors, onto any mesh and plan."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardkit._arguments.typed import Arrays, typed
from shardkit.plans.storage import is_padded
from shardkit.runtime.checkpoint.directory import directory_of, named, steps_in
from shardkit.runtime.checkpoint.portable import Leaves, from_portable, leaves_of, to_read
from shardkit.runtime.checkpoint.reading import find_step, read_arrays
from shardkit.runtime.checkpoint.record import some
from shardkit.runtime.weights.files import INDEX, Safetensors, Tensor
from shardkit.runtime.weights.names import Names, Ranges, StoredLeaf, named_leaves
from shardkit.steps.state import TrainState

_WHERE = "load_params"
_PARAMS = "params."


@typed
def load_params(
    path: str | os.PathLike[str],
    like: Arrays,
    *,
    step: int | None = None,
    names: Names | None = None,
    partial: bool = False,
    cast: bool = False,
) -> Any:
    """Loads parameters by name, without an optimizer, onto any mesh and plan; every process must call it.

    A leaf is called by its path, `layers.query`, in files as in a run.

    Args:
        path: a run's directory of checkpoints; a .safetensors file; or the index `model.safetensors.index.json` of
            several, or a directory with one of these.
        like: shapes, dtypes and shardings of the parameters: `init.abstract(params).params` of `make_train_step`,
            `evaluate.abstract(params)` of `make_eval_step`, or parameters themselves.
        step: of a run, by default the newest finished one.
        names: what leaves are called in files: a mapping of paths to names, or a function of the path. A StoredAs says
            more: a tensor for each layer, dims in another order.
        partial: leave out what the file has beyond the parameters.
        cast: convert numbers of another floating dtype to that of `like`.

    Returns:
        Parameters as `like`. A step compiled for it accepts them without recompiling.

    Raises:
        ValueError: a file of another kind or damaged; tensors that are missing, or left over without `partial`; another
            shape or dtype.
        ImportError: the package that reads the file is not installed.

    Cost: each device's slices alone are read, once for all replicas on a process, and padded leaves whole. Programs
        move the leaves that `like` stores padded or permuted, 64 MiB or one leaf at a time.

    Example:
        >>> import tempfile
        >>> from safetensors.numpy import save_file
        >>> file = tempfile.mkdtemp() + "/weights.safetensors"
        >>> save_file({"w": np.arange(8, dtype=np.float32)}, file)
        >>> like = {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=jax.NamedSharding(mesh, P("model")))}
        >>> params = sk.runtime.load_params(file, like)
        >>> params["w"].addressable_shards[1].data
        Array([2., 3.], dtype=float32)
    """
    if isinstance(like, TrainState):
        raise ValueError(
            "load_params: like must be the parameters; got a TrainState. Pass like.params, or restore all of it with "
            "Checkpoints."
        )
    leaves = leaves_of(_WHERE, like)
    source = _source(Path(path).absolute(), step)
    if names is not None and isinstance(source, _RunStep):
        raise ValueError(
            f"load_params: names must be for files of other libraries; {named(source.path)} is a step of a run. Leave "
            "them out, and call the leaves of like as the run does."
        )
    stored = named_leaves(_WHERE, {name: x.shape for name, x in leaves.items()}, names)
    _check_names(source, stored, partial)
    for leaf in stored:
        _check_leaf(source, leaf, leaves[leaf.path], cast)
    loaded = source.load(leaves) if isinstance(source, _RunStep) else _load_files(source, stored, leaves)
    return jax.tree.unflatten(jax.tree.structure(like, is_leaf=is_padded), [loaded[path] for path in leaves])


class _RunStep:
    """The parameters in a step of a run."""

    def __init__(self, directory: Path, step: int | None):
        self._directory = directory_of(_WHERE, directory)
        self._step, _, records = find_step(_WHERE, self._directory, step)
        self._records = {path: record for path, record in records.items() if path.startswith(_PARAMS)}
        self.path = directory / str(self._step)
        self.tensors = {
            path.removeprefix(_PARAMS): Tensor(tuple(record["shape"]), record["dtype"])
            for path, record in self._records.items()
        }

    def load(self, leaves: Leaves) -> Leaves:
        """The leaves, read and checked in the dtype of the checkpoint."""
        wanted = {_PARAMS + path: _in_dtype(x, self.tensors[path].dtype) for path, x in leaves.items()}
        arrays = read_arrays(_WHERE, self._directory, self._step, to_read(wanted, self._records), self._records)
        found = from_portable(arrays, wanted, self._records)
        return {path: _cast(found[_PARAMS + path], x) for path, x in leaves.items()}


def _load_files(source: Safetensors, stored: list[StoredLeaf], leaves: Leaves) -> Leaves:
    """The leaves, of which each device gets its part of the original form."""
    wanted = {_PARAMS + path: x for path, x in leaves.items()}
    reads = to_read(wanted, dict.fromkeys(wanted))
    arrays = {_PARAMS + leaf.path: _array(source, leaf, reads[_PARAMS + leaf.path]) for leaf in stored}
    return {path.removeprefix(_PARAMS): x for path, x in from_portable(arrays, wanted, {}).items()}


def _array(source: Safetensors, leaf: StoredLeaf, like: jax.ShapeDtypeStruct) -> jax.Array:
    read: dict[Ranges, np.ndarray] = {}  # once for all replicas

    def shard(index: Any) -> np.ndarray:
        ranges = tuple(piece.indices(size)[:2] for piece, size in zip(index, like.shape, strict=True))
        if ranges not in read:
            read[ranges] = leaf.part(source.read, ranges, like.dtype)
        return read[ranges]

    return jax.make_array_from_callback(like.shape, like.sharding, shard, dtype=like.dtype)


def _source(path: Path, step: int | None) -> Safetensors | _RunStep:
    """What is at a path, opened; refuses what holds no parameters."""
    if path.is_dir() and steps_in(path):
        return _RunStep(path, step)
    file = path
    if path.is_dir():
        indices, files = sorted(path.glob(f"*{INDEX}")), sorted(path.glob("*.safetensors"))
        file = (indices or files)[0] if len(indices) == 1 or len(files) == 1 else path
    if not file.is_file() or not file.name.endswith((".safetensors", INDEX)):
        what = "is not there" if not os.path.lexists(path) else "is none of them"
        raise ValueError(
            "load_params: path must be a run's directory of checkpoints, a .safetensors file or index, or a directory "
            f"with one of these; {named(path)} {what}. Pass one of them."
        )
    if step is not None:
        raise ValueError(
            f"load_params: step must be for a run's directory of checkpoints; got {step} for {named(path)}. Leave it "
            "out."
        )
    return Safetensors(file)


def _check_names(source: Safetensors | _RunStep, stored: list[StoredLeaf], partial: bool) -> None:
    wanted = [name for leaf in stored for _, name in leaf.tensors()]
    missing = [name for name in wanted if name not in source.tensors]
    others = [name for name in source.tensors if name not in {*wanted}]
    if missing:
        has = f" and has {some(others)} that like lacks" if others else ""
        raise ValueError(
            f"load_params: {named(source.path)} lacks {some(missing)}{has}. Pass names= if they have other names there."
        )
    if others and not partial:
        raise ValueError(
            f"load_params: {named(source.path)} has {some(others)} that like lacks. Pass partial=True to leave them "
            "out."
        )


def _check_leaf(source: Safetensors | _RunStep, leaf: StoredLeaf, x: Any, cast: bool) -> None:
    for _, name in leaf.tensors():
        found = source.tensors[name]
        if found.shape != leaf.tensor_shape:
            raise ValueError(
                f"load_params: {named(source.path)} has tensor {name!r} of shape {list(found.shape)}; leaf "
                f"{leaf.path!r} needs {list(leaf.tensor_shape)}. Build the parameters with the sizes of the file."
            )
        if found.dtype != str(x.dtype):
            convertible = _floating(found.dtype) and _floating(x.dtype)
            if not (convertible and cast):
                remedy = "Pass cast=True to convert it." if convertible else "Convert the file."
                raise ValueError(
                    f"load_params: {named(source.path)} has tensor {name!r} of dtype {found.dtype}; leaf "
                    f"{leaf.path!r} is {x.dtype}. {remedy}"
                )


def _floating(dtype: Any) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:  # that of a file, which NumPy does not have
        return False


def _in_dtype(x: Any, dtype: str) -> Any:
    """A leaf of that dtype, as stored on the devices."""
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, dtype, sharding=array.sharding), x)


def _cast(found: Any, x: Any) -> Any:
    return found if found.dtype == x.dtype else jax.tree.map(lambda array: array.astype(x.dtype), found)
