"""Files of safetensors: what they hold, and parts of it. A header that the file does not bear out is an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from shardkit.runtime.checkpoint.directory import named
from shardkit.runtime.checkpoint.orbax_io import reason
from shardkit.runtime.weights.names import Ranges

INDEX = ".safetensors.index.json"
# The dtypes that safetensors and NumPy both read.
DTYPES: dict[str, Any] = {f"F{bits}": np.dtype(f"float{bits}") for bits in (64, 32, 16)}
DTYPES |= {f"I{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)}
DTYPES |= {f"U{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)}
DTYPES |= {"BF16": np.dtype(ml_dtypes.bfloat16), "BOOL": np.dtype(bool), "C64": np.dtype(np.complex64)}


class Tensor(NamedTuple):
    """A tensor as a file or a run has it: its shape and the name of its dtype."""

    shape: tuple[int, ...]
    dtype: str


def damaged(path: Path, error: BaseException | str) -> ValueError:
    """The error for a file that cannot be read."""
    why = error if isinstance(error, str) else reason(error)
    return ValueError(f"load_params: {named(path)} cannot be read: {why}. Copy or export it again.")


class Safetensors:
    """The tensors of one file, or of those of an index."""

    def __init__(self, path: Path):
        needs_safetensors("load_params")
        self.path = path
        self.tensors: dict[str, Tensor] = {}
        self._of: dict[str, tuple[Path, Any]] = {}  # for each tensor its file, which is open
        files = _indexed(path) if path.name.endswith(".json") else {path: None}
        for file, wanted in files.items():
            opened = _opened(file)
            names = _tried(file, opened.keys)
            lacks = sorted({*(wanted or ())} - {*names})
            if lacks:
                raise damaged(path, f"it says that {file.name!r} has the tensor {lacks[0]!r}, which it lacks")
            for name in names if wanted is None else wanted:
                found = _tried(file, lambda opened=opened, name=name: opened.get_slice(name))
                kind = found.get_dtype()
                self.tensors[name] = Tensor(tuple(found.get_shape()), str(DTYPES.get(kind, kind)))
                self._of[name] = file, opened

    def read(self, name: str, ranges: Ranges) -> np.ndarray:
        """A part of a tensor, of which nothing else is read."""
        file, opened = self._of[name]
        cut = tuple(slice(*each) for each in ranges)
        read = (lambda: opened.get_slice(name)[cut]) if cut else (lambda: opened.get_tensor(name))
        found = np.asarray(_tried(file, read))
        if found.shape != tuple(last - first for first, last in ranges):
            raise damaged(file, f"tensor {name!r} is not of the shape that it says")
        return found


def needs_safetensors(where: str) -> None:
    """Refuses to continue without the package."""
    try:
        import safetensors.numpy  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"{where}: safetensors must be installed for its files; it is not. Run pip install 'shardkit[safetensors]'."
        ) from error


def _indexed(path: Path) -> dict[Path, list[str]]:
    """The files of an index, each with its tensors; refuses files in another directory."""
    try:
        names = json.loads(path.read_text("utf-8"))["weight_map"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = error if isinstance(error, OSError) else "it is not the JSON of an index, with a weight_map"
        raise damaged(path, why) from error
    files: dict[Path, list[str]] = {}
    for name, file in names:
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise damaged(path, f"tensor {name!r} must be in a .safetensors file beside it, and is in {file!r}")
        files.setdefault(path.parent / file, []).append(name)
    return files


def _opened(file: Path) -> Any:
    from safetensors import safe_open

    if not file.is_file():
        raise damaged(file, "there is no such file")
    return _tried(file, lambda: safe_open(file, framework="numpy").__enter__())


def _tried(file: Path, call: Any) -> Any:
    from safetensors import SafetensorError

    try:
        return call()
    except (SafetensorError, OSError, ValueError, TypeError, OverflowError) as error:
        raise damaged(file, error) from error
