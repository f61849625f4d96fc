"""Parameters saved in original form, in the files of other libraries."""

from __future__ import annotations

import json
import math
import os
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from shardkit._check import at_least
from shardkit._kinds import Arrays
from shardkit._typed import typed
from shardkit.partitioning.storage import stored_array
from shardkit.runtime.channel.place import processes as processes_named
from shardkit.runtime.checkpoint.directory import named
from shardkit.runtime.checkpoint.orbax_io import orbax, quiet, reason
from shardkit.runtime.checkpoint.portable import leaves_of, to_portable
from shardkit.runtime.data.reading import on_any_process, processes_of
from shardkit.runtime.weights.files import DTYPES, INDEX, needs_safetensors
from shardkit.runtime.weights.names import Leaf, Names, named_leaves, refuse_stored_as
from shardkit.runtime.weights.stored import rows_on_host
from shardkit.state import TrainState

Format = Literal["safetensors", "npz", "orbax"]
_WHERE = "save_params"


class _Tensor(NamedTuple):
    """A tensor to write: of which leaf, at which index along its first dims, and its size."""

    name: str
    leaf: Leaf
    at: tuple[int, ...]
    bytes: int

    @property
    def rows(self) -> tuple[int, int]:
        """Its rows of the leaf."""
        return (self.at[0], self.at[0] + 1) if self.at else (0, self.leaf.shape[0] if self.leaf.shape else 1)


@typed
def save_params(
    path: str | os.PathLike[str],
    params: Arrays,
    *,
    format: Format | None = None,
    names: Names | None = None,
    file_bytes: int = 5 * 2**30,
) -> None:
    """Saves parameters in original form, without padding and with layers in order, for other libraries.

    Every process must call it, and see the same directory. `load_params` is the inverse.

    Args:
        path: a .safetensors or .npz file, which process 0 writes. Otherwise a directory: of .safetensors files, of
            which each process writes its share, with Hugging Face's index `model.safetensors.index.json`; or of orbax.
        params: the parameters as they are stored, `state.params`, or a master copy of them, `state.opt_state.copy`.
        format: "safetensors", "npz" or "orbax"; by default that of the path's suffix, else "safetensors".
        names: what leaves are called in the file, as for `load_params`; by default by their paths, `layers.query`.
        file_bytes: the size to which several .safetensors files are filled; with a last tensor, one may be larger.

    Raises:
        ValueError: a path that exists, a dtype that the files do not have, names that are not distinct.
        RuntimeError: it could not be written.
        ImportError: the package that writes the format is not installed.

    Cost: what other processes hold of a tensor is sent to all, at most 256 MiB at a time unless one row is larger. A
        process holds one of its files on the host; process 0 a file that it writes alone.

    Example:
        >>> import tempfile
        >>> file = tempfile.mkdtemp() + "/weights.npz"
        >>> params = sk.shard({"layers": {"up": np.ones((4, 2), np.float32)}}, mesh, P("model"))
        >>> sk.runtime.save_params(file, params)
        >>> np.load(file)["layers.up"].shape
        (4, 2)
    """
    at_least(_WHERE, 1, file_bytes=file_bytes)
    if isinstance(params, TrainState):
        raise ValueError("save_params: params must be the parameters; got a TrainState. Pass state.params.")
    path = Path(path).absolute()
    suffix = {".safetensors": "safetensors", ".npz": "npz"}.get(path.suffix)
    format = format or suffix or "safetensors"  # type: ignore[assignment]
    if format != (suffix or format) or (format == "npz" and not suffix):
        raise ValueError(
            f"save_params: path must be a {'directory' if format == 'orbax' else f'.{format} file'} for format "
            f"{format!r}; got {named(path)}. Correct path, or leave format out."
        )
    leaves = leaves_of(_WHERE, params)
    shapes = [name for name, x in leaves.items() if not isinstance(stored_array(x), jax.Array)]
    if shapes:
        raise ValueError(
            f"save_params: every leaf must be an array; leaf {shapes[0]!r} is only its shape. Pass state.params, and "
            "not what init.abstract returns."
        )
    for name, x in leaves.items():
        there = processes_of(stored_array(x).sharding.device_set)
        if len(there) < jax.process_count():
            raise ValueError(
                f"save_params: every process must have a device of the mesh; leaf {name!r} is on "
                f"{processes_named(there)} of {jax.process_count()}. Load or restore them onto a mesh of "
                "all."
            )
    if format == "safetensors":
        needs_safetensors(_WHERE)
    stored = named_leaves(_WHERE, {name: x.shape for name, x in leaves.items()}, names)
    _check_dtypes(leaves, format)
    _free(path, alone=suffix is not None or format == "orbax")
    if format == "orbax":
        refuse_stored_as(_WHERE, stored, path)
        _save_orbax(path, leaves, stored)
        return
    tensors = [
        _Tensor(name, leaf, at, math.prod(leaf.tensor_shape) * leaves[leaf.path].dtype.itemsize)
        for leaf in stored
        for at, name in leaf.tensors()
    ]
    if suffix:
        write = _write_npz if format == "npz" else _write_safetensors
        _together(path, lambda: None)
        arrays = _arrays(leaves, tensors, tensors if jax.process_index() == 0 else [])
        _together(path, lambda: _replace(write, path, arrays) if jax.process_index() == 0 else None)
        return
    _save_files(path, leaves, tensors, file_bytes)


def _check_dtypes(leaves: dict[str, Any], format: Format | None) -> None:
    stored = {str(dtype) for dtype in DTYPES.values()}
    for name, x in leaves.items():
        if format != "orbax" and str(x.dtype) not in stored:
            raise ValueError(
                f"save_params: a dtype must be one that {format} files have; leaf {name!r} is {x.dtype}. Convert it, "
                "or pass format='orbax'."
            )


def _free(path: Path, *, alone: bool) -> None:
    """Refuses, on all processes, a path that has a file to be replaced, or parameters of another save."""
    there = [path] if os.path.lexists(path) and (alone or not path.is_dir()) else []
    there += [] if alone else [*path.glob("*.safetensors"), *path.glob(f"*{INDEX}")]
    if on_any_process(bool(there)):
        raise ValueError(
            f"save_params: path must have no parameters yet; {named(there[0] if there else path)} exists. Delete it, "
            "or pass another path."
        )


def _together(path: Path, write: Callable[[], None]) -> None:
    """Writes, and waits for the other processes; an error of one is one of all."""
    failed: Exception | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write()
    except Exception as error:
        failed = error
    if on_any_process(failed is not None):
        why = reason(failed) if failed else "another process failed"
        raise RuntimeError(
            f"save_params: {named(path)} could not be written: {why}. Free or repair the disk, then save again."
        ) from failed


def _save_files(path: Path, leaves: dict[str, Any], tensors: list[_Tensor], file_bytes: int) -> None:
    processes, index = jax.process_count(), jax.process_index()
    total = sum(tensor.bytes for tensor in tensors)
    files = _shares(tensors, max(processes, -(-total // file_bytes)))
    name = "model-{:05d}-of-" + f"{len(files):05d}.safetensors"
    _together(path / "model", lambda: None)  # makes the directory
    for first in range(0, len(files), processes):  # each process holds one of its files
        group = files[first : first + processes]
        mine = group[index] if index < len(group) else []
        arrays = _arrays(leaves, [tensor for share in group for tensor in share], mine)
        file = path / name.format(first + index + 1)
        _together(file, lambda: _replace(_write_safetensors, file, arrays) if mine else None)  # noqa: B023
    weight_map = {tensor.name: name.format(i + 1) for i, share in enumerate(files) for tensor in share}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"
    listed = path / f"model{INDEX}"
    _together(listed, lambda: _replace(lambda to, text: to.write_text(text), listed, text) if index == 0 else None)


def _shares(tensors: Sequence[_Tensor], count: int) -> list[list[_Tensor]]:
    """The tensors in order, in at most so many files of about the same size."""
    total, before = sum(tensor.bytes for tensor in tensors), 0
    shares: dict[int, list[_Tensor]] = {}
    for tensor in tensors:
        shares.setdefault(before * count // max(total, 1), []).append(tensor)
        before += tensor.bytes
    return list(shares.values())


def _arrays(leaves: dict[str, Any], group: list[_Tensor], mine: list[_Tensor]) -> dict[str, np.ndarray]:
    """The tensors that this process writes, of those that all processes write at the same time."""
    arrays: dict[str, np.ndarray] = {}
    for leaf in dict.fromkeys(tensor.leaf for tensor in group):
        both = [[tensor for tensor in each if tensor.leaf is leaf] for each in (group, mine)]
        rows, own = (
            (min(tensor.rows[0] for tensor in each), max(tensor.rows[1] for tensor in each)) if each else (0, 0)
            for each in both
        )
        part = rows_on_host(leaves[leaf.path], rows, own)
        for tensor in both[1]:
            at = (tensor.at[0] - own[0], *tensor.at[1:]) if tensor.at else ()
            arrays[tensor.name] = leaf.tensor(part[at])
    return arrays


def _replace(write: Callable[[Path, Any], object], path: Path, content: Any) -> None:
    """Writes a file under another name first, so that one that is half written is never read."""
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        write(unfinished, content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _write_safetensors(path: Path, arrays: dict[str, np.ndarray]) -> None:
    from safetensors.numpy import save_file

    save_file(arrays, path, metadata={"format": "pt"})  # without it, transformers does not read the file


def _write_npz(path: Path, arrays: dict[str, np.ndarray]) -> None:
    with zipfile.ZipFile(path, "w") as archive:  # np.savez would take no array of the name "file"
        for name, x in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                bits = x if str(x.dtype) != "bfloat16" else x.view("V2")
                np.lib.format.write_array(member, bits, allow_pickle=False)


def _save_orbax(path: Path, leaves: dict[str, Any], stored: list[Leaf]) -> None:
    orbax()
    from orbax.checkpoint import StandardCheckpointer  # whose trees every reader of orbax's knows

    tree: dict[str, Any] = {}
    called = [leaf.name for leaf in stored]
    for name in called:
        inside = [other for other in called if other.startswith(f"{name}.")]
        if inside:
            raise ValueError(
                f"save_params: no leaf of an orbax tree may be inside of another; got {inside[0]!r} and {name!r}. Pass "
                "names= to rename one."
            )
    arrays = to_portable(leaves)
    for leaf in stored:
        *outer, last = leaf.name.split(".")
        node = tree
        for part in outer:
            node = node.setdefault(part, {})
        node[last] = arrays[leaf.path]

    def write() -> None:
        with quiet(), StandardCheckpointer() as checkpointer:
            checkpointer.save(path, tree)

    _together(path, write)
