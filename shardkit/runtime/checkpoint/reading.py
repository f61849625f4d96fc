"""Finds a finished step of a run, and reads its record, and its arrays in pieces, each into the memory where it stays.

The arrays are read with tensorstore, which orbax writes them with, and not with orbax: it reads each shard into one
buffer and copies it into another, several at a time, and takes two to three times the memory of what is read. Here a
shard on CPU is the buffer that was read into, and on another device is copied from it.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from shardkit.runtime.checkpoint.directory import (
    check_damage,
    is_newer,
    list_steps,
    quote_path,
    read_runs,
    warn_of_unfinished,
)
from shardkit.runtime.checkpoint.orbax_io import describe_error, describe_system_error, to_file_names
from shardkit.runtime.checkpoint.record import NewerError, Run, read_record
from shardkit.runtime.data.checksums import checksums
from shardkit.runtime.data.reading import on_any_process

_ALIGNED = 64  # bytes, with which jax on CPU takes a buffer as it is
_UNDERWAY = 2**22  # bytes that are read at once, or a sixteenth of all
Box = tuple[tuple[int, int], ...]  # for each dim the first index, and the one after the last


class DamagedError(ValueError):
    """`Checkpoints` raises this if it cannot restore a step.

    Attributes:
        found: the step and the reason, as a sentence.
        older: the newest step before it that may be intact, or None.
    """

    def __init__(self, found: str, older: int | None):
        remedy = "No older step can be either."
        if older is not None:
            remedy = f"To restore the newest before it, pass step={older}."
        super().__init__(f"{found} {remedy}")
        self.found: str = found
        self.older: int | None = older


def newest_step(directory: Path) -> int | None:
    """The newest finished step according to process 0; None without one.

    A network file system may show a new directory to one process before another: without the broadcast they could
    restore different steps.
    """
    newest = max(list_steps(directory), default=None)
    if jax.process_count() == 1:
        return newest
    # A broadcast is of arrays, which have no None. No step is negative.
    number = newest
    if number is None:
        number = -1
    agreed = int(multihost_utils.broadcast_one_to_all(np.int32(number)))
    if agreed < 0:
        return None
    return agreed


def find_step(where: str, directory: Path, step: int | None) -> tuple[int, Run, dict[str, Any]]:
    """A step, by default the newest, with its run and the records of its leaves; raises as `Checkpoints.restore`."""
    steps = list_steps(directory)
    if step is None:
        step = newest_step(directory)
        warn_of_unfinished(directory, -1 if step is None else step)
    if step is None:
        raise ValueError(
            f"{where}: {quote_path(directory)} has no finished step. Start with init(params, key), or correct the "
            "directory."
        )
    if step not in steps:
        listed = ", ".join(map(str, steps)) or "none"
        raise ValueError(
            f"{where}: {quote_path(directory)} has no finished step {step!r}; it has {listed}. Pass one of these as "
            "step=."
        )
    try:
        run, leaves = read_record(directory / str(step))
        _check_kinds(leaves)
        return step, run, leaves
    except NewerError as error:
        raise ValueError(
            f"{where}: step {step} of {quote_path(directory)} cannot be restored: {error}. Go on with the version that "
            "wrote it, or pass an older step."
        ) from None
    except (ValueError, OSError) as error:
        check_damage(directory / str(step), error)
        raise _damaged(where, directory, step, describe_error(error)) from error


def _check_kinds(leaves: Mapping[str, Any]) -> None:
    """Refuses a record with a dtype or the implementation of a key that jax does not know."""
    for path, leaf in leaves.items():
        try:
            if leaf["dtype"] == "key":
                jax.eval_shape(partial(jax.random.key, 0, impl=leaf["implementation"]))
            else:
                jnp.dtype(leaf["dtype"])
        except (TypeError, ValueError):
            raise ValueError(f"its record has a leaf {path!r} of a kind that is not known here") from None


def read_arrays(
    where: str, directory: Path, step: int, wanted: Mapping[str, jax.ShapeDtypeStruct], records: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """These arrays of a step, after their checksums were compared with the records; raises as `Checkpoints.restore`.

    Processes agree on damage here, before the checksums: these are computed in a program of all devices, in which the
    others would wait for ever for a process that could not read its part. After them every process has the same sums.
    """
    damage = None
    arrays: dict[str, jax.Array] = {}
    try:
        arrays = load_arrays(directory / str(step), wanted)
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise  # which does not mean damage
    except Exception as error:  # a reader may raise anything on a damaged file
        check_damage(directory / str(step), error)
        system_error = describe_system_error(error)
        reason = "its arrays are damaged"
        if system_error:
            reason = f"its arrays cannot be read ({system_error})"
        damage = _damaged(where, directory, step, reason)
        damage.__cause__ = error
    if on_any_process(damage is not None):
        raise damage or _damaged(where, directory, step, "another process cannot read its part")
    for path, checksum in checksums(arrays).items():
        if checksum != records[path]["checksum"]:
            raise _damaged(where, directory, step, f"the checksum of its leaf {path!r} differs")
    return arrays


def _damaged(where: str, directory: Path, step: int, reason: str) -> DamagedError:
    """The error for a step, with the newest before it that can be read, or that a newer version may read."""
    runs = read_runs(directory)
    candidates = []
    for older in list_steps(directory):
        if older < step and (older in runs or is_newer(directory / str(older))):
            candidates.append(older)
    sentence = f"{where}: step {step} of {quote_path(directory)} cannot be restored: {reason}."
    return DamagedError(sentence, max(candidates, default=None))


def load_arrays(path: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The arrays of a step with these shapes, dtypes and shardings; others that it has are not read.

    Raises:
        ValueError: an array has another shape or dtype, or cannot be read.

    Cost: the largest array first; beside what it returns, a sixteenth of it, but 4 MiB, or one piece of the files, if
        that is more.
    """
    arrays = {}
    names = []  # of the arrays that have a file
    for name, x in wanted.items():
        if x.size:
            names.append(name)
        else:
            arrays[name] = jnp.zeros(x.shape, x.dtype, device=x.sharding)
    stored = _open_arrays(path, list(to_file_names(wanted)))
    parts = {}
    for name, array in zip(names, stored, strict=True):
        parts[name] = _Part(wanted[name], array)
    nbytes = {name: part.nbytes for name, part in parts.items()}
    names.sort(key=nbytes.__getitem__, reverse=True)
    # What is read at once. A piece that is larger is read alone.
    limit = max(_UNDERWAY, sum(nbytes.values()) // 16)
    underway: deque[tuple[str, int, Any]] = deque()
    bytes_underway = 0

    def finish_oldest() -> int:
        name, size, copied = underway.popleft()
        copied.result()
        parts[name].remaining -= size
        if not parts[name].remaining:
            arrays[name] = parts.pop(name).place()
        return size

    for name in names:
        for size, start_copy in parts[name].pieces():
            while underway and bytes_underway + size > limit:
                bytes_underway -= finish_oldest()
            underway.append((name, size, start_copy()))
            bytes_underway += size
    while underway:
        finish_oldest()
    return {name: arrays[name] for name in wanted}


def _open_arrays(path: Path, names: list[str]) -> list[Any]:
    """The arrays of a step in tensorstore, all opened at the same time."""
    import tensorstore

    [tree] = path.glob("*/_METADATA")
    base = {"driver": "file", "path": f"{tree.parent}/"}  # a URL could not have each character of a path
    no_cache = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})
    opening = []
    for name in names:
        store = {"driver": "ocdbt", "base": base, "path": name}
        opening.append(tensorstore.open({"driver": "auto", "kvstore": store}, open=True, context=no_cache))
    return [array.result() for array in opening]


class _Part:
    """This process's part of an array: a buffer for each box of elements that one or more of its devices hold.

    For example [8, 6] over "fsdp" of 4 devices, 2 in this process, with replicas along "data": the boxes are rows 0 to
    1 and rows 2 to 3, and each is read once for all of its devices.
    """

    def __init__(self, wanted: jax.ShapeDtypeStruct, stored: Any):
        shape = tuple(stored.shape)
        dtype = stored.dtype.numpy_dtype
        if shape != wanted.shape or dtype != np.dtype(wanted.dtype):
            raise ValueError(f"an array is {dtype}{list(shape)}, not {wanted.dtype}{list(wanted.shape)}")
        self._wanted = wanted
        self._stored = stored
        self._devices: dict[Box, list[jax.Device]] = {}
        for device, index in wanted.sharding.addressable_devices_indices_map(wanted.shape).items():
            bounds = []
            for entry, size in zip(index or (), wanted.shape, strict=True):
                start, stop, _ = entry.indices(size)
                bounds.append((start, stop))
            self._devices.setdefault(tuple(bounds), []).append(device)
        self._buffers = {}
        self.nbytes = 0
        for box in self._devices:
            box_shape = [stop - start for start, stop in box]
            buffer = _allocate(box_shape, wanted.dtype)
            self._buffers[box] = buffer
            self.nbytes += buffer.nbytes
        self.remaining = self.nbytes

    def pieces(self) -> Iterator[tuple[int, Any]]:
        """The bytes of each piece, and what starts to read it."""
        import tensorstore

        chunk = self._stored.chunk_layout.read_chunk.shape or ()  # None of a scalar
        for box, buffer in self._buffers.items():
            start = [first for first, _ in box]
            # With the indices of the whole array: the first row of a buffer of rows 2 and 3 is row 2 there, so that one
            # slice names a piece in both.
            target = tensorstore.array(buffer)[tensorstore.d[:].translate_to[start]]
            ranges = []
            for (first, stop), size in zip(box, chunk, strict=True):
                ranges.append(_cut_range(first, stop, size))
            for piece in itertools.product(*ranges):
                nbytes = buffer.dtype.itemsize
                for entry in piece:
                    nbytes *= entry.stop - entry.start
                yield nbytes, partial(self._start_copy, target, piece)

    def _start_copy(self, target: Any, piece: tuple[slice, ...]) -> Any:
        return target[piece].write(self._stored[piece])

    def place(self) -> jax.Array:
        """The array, after its last piece."""
        sharding = self._wanted.sharding
        shards = []
        for box, buffer in self._buffers.items():
            for device in self._devices[box]:
                on_device = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
                shards.append(jax.device_put(buffer, on_device))
        array = jax.make_array_from_single_device_arrays(self._wanted.shape, sharding, shards)
        return jax.block_until_ready(array)


def _cut_range(first: int, stop: int, size: int) -> list[slice]:
    """A range cut at multiples of `size`, so that no chunk of the files is read twice: 3 to 10 by 4 at 4 and 8."""
    # The first multiple above `first`: of 3 and 4 it is 4, of 4 and 4 it is 8.
    multiple = first // size * size + size
    cuts = [first, *range(multiple, stop, size), stop]
    return [slice(start, end) for start, end in itertools.pairwise(cuts)]


def _allocate(shape: list[int], dtype: Any) -> np.ndarray:
    """An array that jax on CPU takes as it is."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(nbytes + _ALIGNED, np.uint8)
    # How far the next multiple of 64 is: from address 100 it is 28, up to 128.
    skip = -memory.ctypes.data % _ALIGNED
    return memory[skip : skip + nbytes].view(dtype).reshape(shape)
