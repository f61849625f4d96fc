"""Finds a finished step of a run, and reads its record, and its arrays in pieces, each into the memory where it stays.

Orbax reads each shard into one buffer and copies it into another, several at a time: two to three times the memory of
what is read. Here a shard on CPU is the buffer that was read into, and on another device is copied from it.
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

from shardkit.runtime.checkpoint.directory import check_damage, is_newer, named, runs_in, steps_in, warn_of_strange
from shardkit.runtime.checkpoint.orbax_io import by_file_name, reason, system_reason
from shardkit.runtime.checkpoint.record import NewerError, Run, read_record
from shardkit.runtime.data.checksums import checksums
from shardkit.runtime.data.reading import on_any_process


class DamagedError(ValueError):
    """A step that cannot be restored.

    Attributes:
        found: which step, and why, as a sentence.
        older: the newest step before it that may be intact, or None.
    """

    def __init__(self, found: str, older: int | None):
        remedy = (
            "No older step can be either." if older is None else f"To restore the newest before it, pass step={older}."
        )
        super().__init__(f"{found} {remedy}")
        self.found: str = found
        self.older: int | None = older


def newest_step(directory: Path) -> int | None:
    """The newest finished step according to process 0; None without one."""
    newest = max(steps_in(directory), default=None)
    if jax.process_count() == 1:
        return newest
    from jax.experimental import multihost_utils

    newest = int(multihost_utils.broadcast_one_to_all(np.int32(-1 if newest is None else newest)))
    return None if newest < 0 else newest


def find_step(where: str, directory: Path, step: int | None) -> tuple[int, Run, dict[str, Any]]:
    """A step, by default the newest, with its run and the records of its leaves; raises as `Checkpoints.restore`."""
    steps = steps_in(directory)
    if step is None:
        step = newest_step(directory)
        warn_of_strange(directory, -1 if step is None else step)
    if step is None:
        raise ValueError(
            f"{where}: {named(directory)} has no finished step. Start with init(params, key), or correct the directory."
        )
    if step not in steps:
        known = ", ".join(map(str, steps)) or "none"
        raise ValueError(
            f"{where}: {named(directory)} has no finished step {step!r}; it has {known}. Pass one of these as step=."
        )
    try:
        run, leaves = read_record(directory / str(step))
        _check_known(leaves)
        return step, run, leaves
    except NewerError as error:
        raise ValueError(
            f"{where}: step {step} of {named(directory)} cannot be restored: {error}. Go on with the version that "
            "wrote it, or pass an older step."
        ) from None
    except (ValueError, OSError) as error:
        check_damage(directory / str(step), error)
        raise _unusable(where, directory, step, reason(error)) from error


def _check_known(leaves: Mapping[str, Any]) -> None:
    """Refuses a record of which jax knows a dtype or the implementation of a key not."""
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
    """These arrays of a step, after their checksums were compared with the records; raises as `Checkpoints.restore`."""
    damage, arrays = None, dict[str, jax.Array]()
    try:
        arrays = load(directory / str(step), wanted)
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise  # which does not mean damage
    except Exception as error:  # a reader may raise anything on a damaged file
        check_damage(directory / str(step), error)
        system = system_reason(error)
        what = f"its arrays cannot be read ({system})" if system else "its arrays are damaged"
        damage = _unusable(where, directory, step, what)
        damage.__cause__ = error
    if on_any_process(damage is not None):  # before the checksums, for which every process must have its arrays
        raise damage or _unusable(where, directory, step, "another process cannot read its part")
    wrong = [path for path, found in checksums(arrays).items() if found != records[path]["checksum"]]
    if wrong:
        raise _unusable(where, directory, step, f"the checksum of its leaf {wrong[0]!r} differs")
    return arrays


def _unusable(where: str, directory: Path, step: int, reason: str) -> DamagedError:
    before, runs = [other for other in steps_in(directory) if other < step], runs_in(directory)
    older = max((other for other in before if other in runs or is_newer(directory / str(other))), default=None)
    return DamagedError(f"{where}: step {step} of {named(directory)} cannot be restored: {reason}.", older)


_ALIGNED = 64  # bytes, with which jax on CPU takes a buffer as it is
_UNDERWAY = 2**22  # bytes that are read at once, or a sixteenth of all


def load(path: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The arrays of a step with these shapes, dtypes and shardings; others that it has are not read.

    Raises:
        ValueError: an array has another shape or dtype, or cannot be read.

    Cost: the largest array first; beside what it returns, a sixteenth of it, but 4 MiB, or one piece of the files, if
        that is more.
    """
    arrays = {name: jnp.zeros(x.shape, x.dtype, device=x.sharding) for name, x in wanted.items() if not x.size}
    files = dict(zip(by_file_name(wanted), (name for name, x in wanted.items() if x.size), strict=True))
    parts = {
        wanted_name: _Part(wanted[wanted_name], stored)
        for wanted_name, stored in zip(files.values(), _opened(path, list(files)), strict=True)
    }
    limit = max(_UNDERWAY, sum(part.nbytes for part in parts.values()) // 16)
    underway: deque[tuple[str, int, Any]] = deque()
    held = 0

    def finish() -> int:
        name, size, copied = underway.popleft()
        copied.result()
        parts[name].left -= size
        if not parts[name].left:
            arrays[name] = parts.pop(name).placed()
        return size

    for name in sorted(parts, key=lambda name: -parts[name].nbytes):
        for size, copy in parts[name].pieces():
            while underway and held + size > limit:
                held -= finish()
            underway.append((name, size, copy()))
            held += size
    while underway:
        finish()
    return {name: arrays[name] for name in wanted}


def _opened(path: Path, names: list[str]) -> list[Any]:
    import tensorstore

    [tree] = path.glob("*/_METADATA")
    base = {"driver": "file", "path": f"{tree.parent}/"}  # a URL could not have each character of a path
    store = {"driver": "ocdbt", "base": base}
    nothing_kept = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})
    opening = [
        tensorstore.open({"driver": "auto", "kvstore": {**store, "path": name}}, open=True, context=nothing_kept)
        for name in names
    ]
    return [each.result() for each in opening]


class _Part:
    """This process's part of an array: a buffer for each box of elements that one or more of its devices hold."""

    def __init__(self, wanted: jax.ShapeDtypeStruct, stored: Any):
        found = tuple(stored.shape), stored.dtype.numpy_dtype
        if found != (wanted.shape, np.dtype(wanted.dtype)):
            raise ValueError(f"an array is {found[1]}{list(found[0])}, not {wanted.dtype}{list(wanted.shape)}")
        self._wanted, self._stored = wanted, stored
        self._devices: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
        for device, box in wanted.sharding.addressable_devices_indices_map(wanted.shape).items():
            bounds = [at.indices(size)[:2] for at, size in zip(box or (), wanted.shape, strict=True)]
            self._devices.setdefault(tuple(bounds), []).append(device)
        self._buffers = {bounds: _aligned([b - a for a, b in bounds], wanted.dtype) for bounds in self._devices}
        self.nbytes = self.left = sum(buffer.nbytes for buffer in self._buffers.values())

    def pieces(self) -> Iterator[tuple[int, Any]]:
        """The bytes of each piece, and what starts to read it."""
        import tensorstore

        for bounds, buffer in self._buffers.items():
            target = tensorstore.array(buffer)[tensorstore.d[:].translate_to[[a for a, _ in bounds]]]
            steps = self._stored.chunk_layout.read_chunk.shape or ()  # None of a scalar
            # Each range, cut at multiples of its step.
            ends = ((a, *range(a // n * n + n, b, n), b) for (a, b), n in zip(bounds, steps, strict=True))
            for box in itertools.product(*([slice(*pair) for pair in itertools.pairwise(at)] for at in ends)):
                size = math.prod(at.stop - at.start for at in box) * buffer.dtype.itemsize
                yield size, lambda box=box, target=target: target[box].write(self._stored[box])

    def placed(self) -> jax.Array:
        """The array, after its last piece."""
        sharding, shape = self._wanted.sharding, self._wanted.shape
        kind = sharding.memory_kind
        shards = [
            jax.device_put(buffer, jax.sharding.SingleDeviceSharding(device, memory_kind=kind))
            for bounds, buffer in self._buffers.items()
            for device in self._devices[bounds]
        ]
        return jax.block_until_ready(jax.make_array_from_single_device_arrays(shape, sharding, shards))


def _aligned(shape: list[int], dtype: Any) -> np.ndarray:
    """An array that jax on CPU takes as it is."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(nbytes + _ALIGNED, np.uint8)
    skip = -raw.ctypes.data % _ALIGNED
    return raw[skip : skip + nbytes].view(dtype).reshape(shape)
