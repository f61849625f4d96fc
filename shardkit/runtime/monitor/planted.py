"""Faults that `shardkit chaos` plants from within: a process looks for one where SHARDKIT_CHAOS names a folder.

A fault is a file of the same user with the index of the process as its name and the kind as its text. It is taken once.
"""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

CHAOS = "SHARDKIT_CHAOS"
Within = Literal["exception", "slow", "flip"]
_LONG = 3600.0  # seconds: more than any deadline


def plant(folder: Path, process: int, kind: Within) -> Path:
    """Plants a fault in a process that has this folder in its environment; the file is there until it is taken."""
    folder.mkdir(exist_ok=True)
    file, new = folder / str(process), folder / f"{process}.new"
    new.write_text(kind)
    return new.replace(file)


class Planted:
    """The faults of one process."""

    def __init__(self, process: int):
        folder = os.environ.get(CHAOS)
        self._file = Path(folder) / str(process) if folder else None

    def before(self, state: Any = None) -> Any:
        """Raises, sleeps, or returns the state with a flipped bit, if such a fault is there; else returns the state."""
        if self._file is None or not _is_own(self._file):
            return state
        kind = self._file.read_text()
        if kind == "flip" and state is None:  # there will be a state at the next step
            return state
        self._file.unlink()
        if kind == "exception":
            raise RuntimeError("planted by shardkit chaos")
        if kind == "slow":
            time.sleep(_LONG)
        return flipped(state) if kind == "flip" else state


def _is_own(file: Path) -> bool:
    """Whether a file is there that this user has made: where all may write, somebody else may plant."""
    try:
        found = file.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()


def flipped(state: Any) -> Any:
    """The state with one bit changed on one device: of the largest number in this device's shard of the largest leaf.

    It is a high bit of the mantissa: rounding in later steps does not remove the difference.
    """
    leaves, structure = jax.tree.flatten(state)
    sizes = [x.size if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating) else 0 for x in leaves]
    which = sizes.index(max(sizes))
    leaf = leaves[which]
    shards = [shard.data for shard in leaf.addressable_shards]
    changed = np.array(shards[0])
    numbers = changed.reshape(-1)
    place = int(np.argmax(np.abs(numbers.astype(np.float32))))
    numbers[place : place + 1].view(np.uint8)[-2] ^= 0x40
    shards[0] = jax.device_put(changed, shards[0].sharding)
    leaves[which] = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)
    return jax.tree.unflatten(structure, leaves)
