"""The source of the Python standard library as bytes to train on, in batches that depend on (seed, step) only."""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

_VALIDATION_SHARE = 20  # one file in 20
_SKIPPED = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}


class Text(NamedTuple):
    """A byte-level corpus."""

    train: np.ndarray  # uint8 [n], the training files one after the other
    validation: np.ndarray  # uint8 [m], the held-out files


def read_standard_library() -> Text:
    """The files of the library on this machine, without tests and installed packages; a hash of the path splits."""
    root = Path(sysconfig.get_path("stdlib"))
    train: list[bytes] = []
    validation: list[bytes] = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        content = path.read_bytes()
        if not content or _SKIPPED.intersection(name.parts[:-1]):
            continue
        if zlib.crc32(str(name).encode()) % _VALIDATION_SHARE == 0:
            validation.append(content)
        else:
            train.append(content)
    return Text(_join(train), _join(validation))


def _join(files: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"\n".join(files), np.uint8)


def draw_batch(text: np.ndarray, *, seed: int, step: int, batch: int, length: int) -> dict[str, np.ndarray]:
    """The batch of a step, counted from 0: windows at random positions, the same for every mesh and process count.

    It is `{"tokens": int32 [batch, length], "targets": int32 [batch, length]}`; targets are shifted by one token.
    """
    # NumPy guarantees the raw bits of a bit generator over versions, unlike its distributions.
    bits = np.random.Philox(key=np.array([seed, step], np.uint64)).random_raw(batch)
    starts = (bits % np.uint64(text.size - length)).astype(np.int64)
    return _cut_windows(text, starts, length)


def cut_validation_batches(text: np.ndarray, *, count: int, batch: int, length: int) -> list[dict[str, np.ndarray]]:
    """`count` batches of windows spread evenly over the text, the same at every call."""
    starts = np.linspace(0, text.size - length - 1, count * batch).astype(np.int64)
    batches = []
    for batch_starts in starts.reshape(count, batch):
        batches.append(_cut_windows(text, batch_starts, length))
    return batches


def _cut_windows(text: np.ndarray, starts: np.ndarray, length: int) -> dict[str, np.ndarray]:
    windows = text[starts[:, None] + np.arange(length + 1)].astype(np.int32)
    return {"tokens": windows[:, :-1], "targets": windows[:, 1:]}
