"""Parameters from a run's checkpoints or a file of another library, onto any mesh and plan."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardkit._kinds import Arrays
from shardkit._typed import typed
from shardkit.partitioning.storage import is_padded
from shardkit.runtime.checkpoint.directory import named, steps_in
from shardkit.runtime.checkpoint.portable import leaves_of
from shardkit.runtime.checkpoint.record import RECORD, some
from shardkit.runtime.weights.files import INDEX, Npz, Safetensors, damaged
from shardkit.runtime.weights.names import Leaf, Names, Ranges, named_leaves, refuse_stored_as
from shardkit.runtime.weights.stored import stored_from
from shardkit.runtime.weights.trees import OrbaxTree, RunStep
from shardkit.state import TrainState

_WHERE = "load_params"


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

    A leaf is called by its path, `layers.query`, in safetensors and npz files as in a run.

    Args:
        path: a run's directory of checkpoints, or one of its steps; a .safetensors or .npz file; the index
            `model.safetensors.index.json` of several .safetensors files, or a directory with one; or an orbax tree.
        like: shapes, dtypes and shardings of the parameters: `init.abstract(params).params` of `make_train_step`,
            `evaluate.abstract(params)` of `make_eval_step`, or parameters themselves.
        step: of a run, by default the newest finished one.
        names: what leaves are called in the file: a mapping of paths to names, or a function of the path. A StoredAs
            says more: a tensor for each layer, dims in another order.
        partial: leave out what the file has beyond the parameters.
        cast: convert numbers of another floating dtype to that of `like`.

    Returns:
        Parameters as `like`. A step compiled for it accepts them without recompiling.

    Raises:
        ValueError: a file of another kind or damaged; tensors that are missing, or left over without `partial`; another
            shape or dtype.
        ImportError: the package that reads the file is not installed.

    Cost: of .safetensors, each device's slices alone are read, once for all replicas on a process; of .npz, each
        process reads every array of which it has a part; of a run and of an orbax tree, the shards of the process's
        devices, and padded leaves whole.

    Example:
        >>> import tempfile
        >>> file = tempfile.mkdtemp() + "/weights.npz"
        >>> np.savez(file, w=np.arange(8, dtype=np.float32))
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
    stored = named_leaves(_WHERE, {name: x.shape for name, x in leaves.items()}, names)
    _check_names(source, stored, partial)
    for leaf in stored:
        _check_leaf(source, leaf, leaves[leaf.path], cast)
    if not leaves:
        return like
    if isinstance(source, RunStep | OrbaxTree):
        refuse_stored_as(_WHERE, stored, source.path)
        loaded = source.load({leaf.name: leaves[leaf.path] for leaf in stored})
        found = [_cast(loaded[leaf.name], leaves[leaf.path]) for leaf in stored]
    else:
        found = [_read(source, leaf, leaves[leaf.path]) for leaf in stored]
    return jax.tree.unflatten(jax.tree.structure(like, is_leaf=is_padded), found)


def _source(path: Path, step: int | None) -> Safetensors | Npz | RunStep | OrbaxTree:
    """What is at a path, opened.

    Raises:
        ValueError: nothing, or nothing that holds parameters.
    """
    found: Any = None
    if path.is_dir():
        indices, files = sorted(path.glob(f"*{INDEX}")), sorted(path.glob("*.safetensors"))
        if (path / RECORD).exists() and path.name.isdigit() and int(path.name) in steps_in(path.parent):
            found = _step_of(path)
        elif steps_in(path):
            return RunStep(path, step)
        elif len(indices) == 1 or len(files) == 1:
            found = Safetensors((indices or files)[0])
        elif any((path / name).exists() for name in (RECORD, "_METADATA", "manifest.ocdbt")):
            found = OrbaxTree(path)
    elif path.is_file() and path.name.endswith((".safetensors", INDEX)):
        found = Safetensors(path)
    elif path.is_file() and path.suffix == ".npz":
        found = Npz(path)
    if found is None:
        what = "is not there" if not os.path.lexists(path) else "is none of them"
        raise ValueError(
            "load_params: path must be a run's directory of checkpoints, a .safetensors or .npz file, a directory with "
            f"one .safetensors file or index, or an orbax tree; {named(path)} {what}. Correct path."
        )
    if step is not None:
        raise ValueError(
            f"load_params: step must be for a run's directory of checkpoints; got {step} for {named(path)}. Leave it "
            "out."
        )
    return found


def _step_of(path: Path) -> RunStep | OrbaxTree:
    try:
        return RunStep(path.parent, int(path.name))
    except ValueError:
        return OrbaxTree(path)  # a tree of orbax's, in a directory with a number for a name


def _check_names(source: Any, stored: list[Leaf], partial: bool) -> None:
    wanted = {name for leaf in stored for _, name in leaf.tensors()}
    missing = [name for leaf in stored for _, name in leaf.tensors() if name not in source.tensors]
    others = [name for name in source.tensors if name not in wanted]
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


def _check_leaf(source: Any, leaf: Leaf, x: Any, cast: bool) -> None:
    for _, name in leaf.tensors():
        found = source.tensors[name]
        if tuple(found.shape) != leaf.tensor_shape:
            raise ValueError(
                f"load_params: {named(source.path)} has tensor {name!r} of shape {list(found.shape)}; leaf "
                f"{leaf.path!r} needs {list(leaf.tensor_shape)}. Build the parameters with the sizes of the file."
            )
        if str(found.dtype) != str(x.dtype):
            both = [_floating(dtype) for dtype in (found.dtype, x.dtype)]
            remedy = "Pass cast=True to convert it." if all(both) else "Convert the file."
            if not (all(both) and cast):
                raise ValueError(
                    f"load_params: {named(source.path)} has tensor {name!r} of dtype {found.dtype}; leaf "
                    f"{leaf.path!r} is {x.dtype}. {remedy}"
                )


def _floating(dtype: Any) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:  # that of a file, which NumPy does not have
        return False


def _read(source: Safetensors | Npz, leaf: Leaf, x: Any) -> Any:
    def read(name: str, ranges: Ranges) -> np.ndarray:
        found = source.read(name, ranges)
        if found.shape != tuple(last - first for first, last in ranges):
            raise damaged(source.path, f"tensor {name!r} is not of the shape that it says")
        return found.astype(x.dtype, copy=False)

    return stored_from(x, lambda ranges: leaf.part(read, ranges, x.dtype))


def _cast(found: Any, x: Any) -> Any:
    return found if found.dtype == x.dtype else jax.tree.map(lambda array: array.astype(x.dtype), found)
