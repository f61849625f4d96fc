"""Parameters saved in original form, as safetensors for other libraries."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from shardkit._arguments.checks import at_least
from shardkit._arguments.typed import Arrays, typed
from shardkit.plans.storage import stored_array
from shardkit.runtime.channel.place import create_file
from shardkit.runtime.channel.place import processes as processes_named
from shardkit.runtime.checkpoint.directory import named
from shardkit.runtime.checkpoint.orbax_io import reason
from shardkit.runtime.checkpoint.portable import Leaves, leaves_of, to_portable
from shardkit.runtime.data.reading import on_any_process, processes_of, replicate
from shardkit.runtime.weights.files import DTYPES, INDEX, needs_safetensors
from shardkit.runtime.weights.names import Names, StoredLeaf, named_leaves
from shardkit.steps.state import TrainState

_WHERE = "save_params"
_PIECE_BYTES = 2**28
Rows = tuple[int, int]  # the first, and the one after the last


class _Tensor(NamedTuple):
    """A tensor to write: of which leaf, at which index along its first dims, and its size."""

    name: str
    leaf: StoredLeaf
    at: tuple[int, ...]
    bytes: int

    @property
    def rows(self) -> Rows:
        """Its rows of the leaf."""
        return (self.at[0], self.at[0] + 1) if self.at else (0, self.leaf.shape[0] if self.leaf.shape else 1)


@typed
def save_params(
    path: str | os.PathLike[str], params: Arrays, *, names: Names | None = None, file_bytes: int = 5 * 2**30
) -> None:
    """Saves parameters in original form, without padding and with layers in order, for other libraries.

    Every process must call it, and see the same directory. `load_params` is the inverse.

    Args:
        path: a .safetensors file, which process 0 writes; or a directory of several, of which each process writes its
            share, with Hugging Face's index `model.safetensors.index.json`.
        params: the parameters as they are stored, `state.params`, or a master copy of them, `state.opt_state.copy`.
        names: what leaves are called in the file, as for `load_params`; by default by their paths, `layers.query`.
        file_bytes: the size to which the files of a directory are filled; with a last tensor, one may be larger.

    Raises:
        ValueError: a path that exists, a dtype that the files do not have, names that are not distinct.
        RuntimeError: it could not be written.
        ImportError: safetensors is not installed.

    Cost: what other processes hold of a tensor is sent to all, at most 256 MiB at a time unless one row is larger;
        padded leaves are whole on every device meanwhile, one at a time. A process holds one of its files on the host.

    Example:
        >>> import tempfile
        >>> from safetensors.numpy import load_file
        >>> file = tempfile.mkdtemp() + "/weights.safetensors"
        >>> params = sk.shard({"layers": {"up": np.ones((4, 2), np.float32)}}, mesh, P("model"))
        >>> sk.runtime.save_params(file, params)
        >>> load_file(file)["layers.up"].shape
        (4, 2)
    """
    at_least(_WHERE, 1, file_bytes=file_bytes)
    if isinstance(params, TrainState):
        raise ValueError("save_params: params must be the parameters; got a TrainState. Pass state.params.")
    needs_safetensors(_WHERE)
    path, leaves = Path(path).absolute(), leaves_of(_WHERE, params)
    for name, x in leaves.items():
        _check_leaf(name, x)
    tensors = [
        _Tensor(name, leaf, at, math.prod(leaf.tensor_shape) * leaves[leaf.path].dtype.itemsize)
        for leaf in named_leaves(_WHERE, {name: x.shape for name, x in leaves.items()}, names)
        for at, name in leaf.tensors()
    ]
    for tensor in tensors:
        if tensor.name == "__metadata__":
            raise ValueError(
                f"save_params: no tensor of safetensors may be called '__metadata__', which is theirs; leaf "
                f"{tensor.leaf.path!r} is. Pass for example names={{{tensor.leaf.path!r}: 'metadata'}}."
            )
    alone = path.suffix == ".safetensors"
    _check_free(path, alone=alone)
    if alone:
        _save_files(leaves, {path: tensors})
        return
    total = sum(tensor.bytes for tensor in tensors)
    shares = _shares(tensors, max(jax.process_count(), -(-total // file_bytes)))
    files = {path / f"model-{i:05d}-of-{len(shares):05d}.safetensors": share for i, share in enumerate(shares, 1)}
    _save_files(leaves, files)
    weight_map = {tensor.name: file.name for file, share in files.items() for tensor in share}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"
    index = path / f"model{INDEX}"
    _together(index, (lambda unfinished: unfinished.write_text(text)) if jax.process_index() == 0 else None)


def _check_leaf(name: str, x: Any) -> None:
    array = stored_array(x)
    if not isinstance(array, jax.Array):
        raise ValueError(
            f"save_params: every leaf must be an array; leaf {name!r} is only its shape. Pass state.params, and not "
            "what init.abstract returns."
        )
    there = processes_of(array.sharding.device_set)
    if len(there) < jax.process_count():
        raise ValueError(
            f"save_params: every process must have a device of the mesh; leaf {name!r} is on {processes_named(there)} "
            f"of {jax.process_count()}. Load or restore them onto a mesh of all."
        )
    if str(x.dtype) not in map(str, DTYPES.values()):
        raise ValueError(
            f"save_params: a dtype must be one that safetensors files have; leaf {name!r} is {x.dtype}. Convert it."
        )


def _check_free(path: Path, *, alone: bool) -> None:
    """Refuses, on all processes, a path that has a file to be replaced, or parameters of another save."""
    there = [path] if os.path.lexists(path) and (alone or not path.is_dir()) else []
    there += [] if alone else [*path.glob("*.safetensors"), *path.glob(f"*{INDEX}")]
    if on_any_process(bool(there)):
        raise ValueError(
            f"save_params: path must have no parameters yet; {named(there[0] if there else path)} exists. Delete it, "
            "or pass another path."
        )


def _shares(tensors: Sequence[_Tensor], count: int) -> list[list[_Tensor]]:
    """The tensors in order, in at most so many files of about the same size."""
    total, before = sum(tensor.bytes for tensor in tensors), 0
    shares: dict[int, list[_Tensor]] = {}
    for tensor in tensors:
        shares.setdefault(before * count // max(total, 1), []).append(tensor)
        before += tensor.bytes
    return list(shares.values())


def _save_files(leaves: Leaves, files: dict[Path, list[_Tensor]]) -> None:
    """Writes the files, as many at a time as there are processes."""
    from safetensors.numpy import save_file

    paths, processes, index = [*files], jax.process_count(), jax.process_index()
    arrays: dict[str, np.ndarray] = {}

    def write(unfinished: Path) -> None:
        save_file(arrays, unfinished, {"format": "pt"})  # without it, transformers does not read the file

    for first in range(0, len(paths), processes):
        group = paths[first : first + processes]
        mine = group[index] if index < len(group) else None
        _together(group[0], None)  # an error before anything is sent
        wanted = [tensor for path in group for tensor in files[path]]
        arrays = _arrays(leaves, wanted, [] if mine is None else files[mine])
        _together(mine or group[0], write if mine else None)


def _together(path: Path, write: Callable[[Path], object] | None) -> None:
    """Makes the folder and writes the file if this process has one; an error of one process is one of all.

    Under another name first, so that a file that is half written is never read.
    """
    failed: Exception | None = None
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if write is not None:
            os.close(create_file(unfinished))
            try:
                write(unfinished)
                unfinished.replace(path)
            finally:
                unfinished.unlink(missing_ok=True)
    except Exception as error:
        failed = error
    if on_any_process(failed is not None):
        why = reason(failed) if failed else "another process failed"
        raise RuntimeError(
            f"save_params: {named(path)} could not be written: {why}. Free or repair the disk, then save again."
        ) from failed


def _arrays(leaves: Leaves, group: list[_Tensor], mine: list[_Tensor]) -> dict[str, np.ndarray]:
    """The tensors that this process writes, of those that all processes write at the same time."""
    arrays: dict[str, np.ndarray] = {}
    for leaf in dict.fromkeys(tensor.leaf for tensor in group):
        own = [tensor for tensor in mine if tensor.leaf is leaf]
        rows = _rows([tensor for tensor in group if tensor.leaf is leaf])
        first, last = _rows(own)
        [array] = to_portable({leaf.path: leaves[leaf.path]}).values()
        part = rows_on_host(array, rows, (first, last))
        for tensor in own:
            at = (tensor.at[0] - first, *tensor.at[1:]) if tensor.at else ()
            arrays[tensor.name] = leaf.tensor(part[at])
    return arrays


def _rows(tensors: list[_Tensor]) -> Rows:
    """The rows of a leaf from the first to the last of some tensors."""
    return min((each.rows[0] for each in tensors), default=0), max((each.rows[1] for each in tensors), default=0)


def rows_on_host(array: jax.Array, rows: Rows, mine: Rows) -> np.ndarray:
    """The rows `mine` of an array, on the host; of a scalar all of it.

    Every process must call it, with the same `rows` along dim 0, among which `mine` are.

    Cost: none between devices if the array is whole on the process's devices. Otherwise an all_gather of `rows`, of at
        most 256 MiB at a time unless one row is larger.
    """
    if not array.ndim:
        return np.asarray(array.addressable_data(0))
    out = np.empty((mine[1] - mine[0], *array.shape[1:]), array.dtype)
    for index, part in _parts(array, rows):
        start, stop, _ = index[0].indices(array.shape[0])
        first, last = max(start, mine[0]), min(stop, mine[1])
        if first < last:
            to = slice(first - mine[0], last - mine[0])
            out[(to, *index[1:])] = np.asarray(part)[first - start : last - start]
    return out


def _parts(array: jax.Array, rows: Rows) -> Iterator[tuple[tuple[slice, ...], jax.Array]]:
    """Parts of an array that this process can read, which together hold the rows, and where they are in it."""
    if array.is_fully_addressable or array.is_fully_replicated:
        for shard in {str(shard.index): shard for shard in array.addressable_shards}.values():  # one of equal ones
            yield shard.index, shard.data
        return
    count = max(1, _PIECE_BYTES * array.shape[0] // max(1, array.nbytes))
    for first in range(*rows, count):
        last = min(first + count, rows[1])
        whole = replicate(lax.slice_in_dim(array, first, last), array.sharding.mesh)  # type: ignore[attr-defined]
        yield (slice(first, last), *[slice(None)] * (array.ndim - 1)), whole
