"""The source of the Python standard library as bytes to train on, in batches that depend on (seed, step) only."""

from __future__ import annotations

import sysconfig
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from shardkit.runtime.data.arrays import from_rows, local_rows

_VALIDATION_SHARE = 20  # one file in 20
_SKIPPED = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}


class Text(NamedTuple):
    """A byte-level corpus."""

    train: np.ndarray  # uint8 [n], the training files one after the other
    validation: np.ndarray  # uint8 [m], the held-out files
    source: str  # what it was read from, for the log


def standard_library() -> Text:
    """The source of the Python standard library on this machine, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if not _SKIPPED.intersection(path.relative_to(root).parts[:-1]))
    return _split([(str(path.relative_to(root)), path) for path in files], f"the Python standard library in {root}")


def _split(files: Sequence[tuple[str, Path]], source: str) -> Text:
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    for name, path in files:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ValueError(
                f"--data: every file must be readable; {path} is not ({error.strerror}). Change its permissions or "
                "remove it from --data."
            ) from None
        if content:
            parts[zlib.crc32(name.encode()) % _VALIDATION_SHARE == 0].append(content)
    if not parts[True] and not parts[False]:
        raise ValueError(f"--data: there must be text to train on; {source} has no bytes. Pass another path.")
    if not parts[True] or not parts[False]:
        whole = parts[True] + parts[False]
        parts = {False: [c[: len(c) - len(c) // 10] for c in whole], True: [c[len(c) - len(c) // 10 :] for c in whole]}
    train, validation = (np.frombuffer(b"\n".join(parts[out]), np.uint8) for out in (False, True))
    return Text(train, validation, source)


def batch_at(
    text: np.ndarray, *, seed: int, step: int, batch: int, length: int, rows: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """The batch of a step, counted from 0: windows at random positions, the same for every mesh and process count.

    It is `{"tokens": int32 [batch, length], "targets": int32 [batch, length]}` or those `rows` of them; targets are
    shifted by one token. Refuses a text shorter than one window of length + 1 bytes.
    """
    places = _places(text, length)
    # NumPy guarantees the raw bits of a bit generator over versions, unlike its distributions.
    bits = np.random.Philox(key=np.array([seed, step], np.uint64)).random_raw(batch)
    starts = (bits % np.uint64(places)).astype(np.int64)
    return _windows(text, starts if rows is None else starts[rows], length)


def global_batch_at(
    text: np.ndarray, *, seed: int, step: int, batch: int, length: int, mesh: Mesh, spec: PartitionSpec
) -> dict[str, jax.Array]:
    """`batch_at` as global arrays, split by `plan.batch_spec(mesh)`; each process creates the rows of its devices."""
    rows = local_rows(batch, mesh, spec)
    mine = batch_at(text, seed=seed, step=step, batch=batch, length=length, rows=rows)
    return from_rows(mine, rows, batch, mesh, spec)


def validation_batches(text: np.ndarray, *, count: int, batch: int, length: int) -> list[dict[str, np.ndarray]]:
    """`count` batches of windows spread evenly over the text, the same at every call; refuses as `batch_at`."""
    starts = np.linspace(0, _places(text, length) - 1, count * batch).astype(np.int64)
    return [_windows(text, part, length) for part in starts.reshape(count, batch)]


def _places(text: np.ndarray, length: int) -> int:
    if text.size < length + 1:
        raise ValueError(
            f"--data: the text must have at least one sequence of {length + 1} bytes; it has {text.size}. Pass more "
            "text (training and validation each need that much) or a shorter --length."
        )
    return int(text.size - length)


def _windows(text: np.ndarray, starts: np.ndarray, length: int) -> dict[str, np.ndarray]:
    windows = text[starts[:, None] + np.arange(length + 1)].astype(np.int32)
    return {"tokens": windows[:, :-1], "targets": windows[:, 1:]}
