"""Files of tensors: what they hold, and parts of it. A header that the file does not bear out is an error."""

from __future__ import annotations

import json
import tokenize
import zipfile
import zlib
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
    """A tensor of a file: its shape, the name of its dtype, and the file."""

    shape: tuple[int, ...]
    dtype: str
    file: Path


def damaged(path: Path, error: BaseException | str) -> ValueError:
    """The error for a file that cannot be read."""
    why = error if isinstance(error, str) else reason(error)
    return ValueError(f"load_params: {named(path)} cannot be read: {why}. Copy or export it again.")


class Safetensors:
    """Files of safetensors: one, or those of an index."""

    def __init__(self, path: Path):
        needs_safetensors("load_params")
        self.path = path
        files = indexed(path) if path.name.endswith(".json") else {path: None}
        self.tensors: dict[str, Tensor] = {}
        self._open = {file: _opened(file) for file in files}
        for file, wanted in files.items():
            names = _tried(file, self._open[file].keys)
            lacks = sorted({*(wanted or ())} - {*names})
            if lacks:
                raise damaged(path, f"it says that {file.name!r} has the tensor {lacks[0]!r}, which it lacks")
            for name in names if wanted is None else wanted:
                self.tensors[name] = _tensor(file, self._open[file], name)

    def read(self, name: str, ranges: Ranges) -> np.ndarray:
        """A part of a tensor, of which nothing else is read."""
        file = self.tensors[name].file
        if not ranges:
            return np.asarray(_tried(file, lambda: self._open[file].get_tensor(name)))
        cut = tuple(slice(*each) for each in ranges)
        return np.asarray(_tried(file, lambda: self._open[file].get_slice(name)[cut]))


def needs_safetensors(where: str) -> None:
    """Refuses to continue without the package.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import safetensors.numpy  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"{where}: safetensors must be installed for its files; it is not. Run pip install 'shardkit[safetensors]'."
        ) from error


def indexed(path: Path) -> dict[Path, list[str]]:
    """The files of an index, each with its tensors.

    Raises:
        ValueError: it is no index, or names a file in another directory.
    """
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


def _tensor(file: Path, opened: Any, name: str) -> Tensor:
    found = _tried(file, lambda: opened.get_slice(name))
    kind = found.get_dtype()
    return Tensor(tuple(found.get_shape()), str(DTYPES.get(kind, kind)), file)


def _tried(file: Path, call: Any) -> Any:
    from safetensors import SafetensorError

    try:
        return call()
    except (SafetensorError, OSError, ValueError, TypeError, OverflowError) as error:
        raise damaged(file, error) from error


class Npz:
    """A file of `np.savez`; it has no bfloat16, whose bits NumPy writes as `V2`."""

    def __init__(self, path: Path):
        self.path = path
        self.tensors: dict[str, Tensor] = {}
        self._whole: tuple[str, Any] = ("", None)
        try:
            self._file = zipfile.ZipFile(path)
            for member_name in self._file.namelist():
                name = member_name.removesuffix(".npy")
                with self._file.open(member_name) as member:
                    shape, _, dtype = _npy_header(member)
                if dtype.hasobject:
                    raise ValueError(f"array {name!r} holds Python objects")
                kind = "bfloat16" if dtype.str[1:] == "V2" else str(dtype)
                self.tensors[name] = Tensor(shape, kind, path)
        except _NOT_NPZ as error:
            raise damaged(path, error) from error

    def read(self, name: str, ranges: Ranges) -> np.ndarray:
        """A part of an array; the last array that was read is kept whole."""
        if self._whole[0] != name:
            self._whole = name, self._array(name)
        return self._whole[1][tuple(slice(*each) for each in ranges)]

    def _array(self, name: str) -> np.ndarray:
        shape, dtype, _ = self.tensors[name]
        try:
            with self._file.open(f"{name}.npy") as member:
                _, fortran, stored = _npy_header(member)
                size = int(np.prod(shape, dtype=object)) * stored.itemsize
                data = member.read(size)  # no more than there is, whatever the header says
                if len(data) != size or member.read(1):
                    raise ValueError(f"array {name!r} must have {size} bytes; it has others")
        except _NOT_NPZ as error:
            raise damaged(self.path, error) from error
        array = np.frombuffer(data, stored).reshape(shape, order="F" if fortran else "C")
        return array.view(ml_dtypes.bfloat16) if dtype == "bfloat16" else array


_NOT_NPZ = (
    *(zipfile.BadZipFile, zlib.error, tokenize.TokenError, OSError, ValueError, KeyError, EOFError),
    *(NotImplementedError, RuntimeError, SyntaxError, OverflowError),
)


def _npy_header(member: Any) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(member)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"version {version} of its arrays is not known")
    shape, fortran, dtype = readers[version](member)
    return shape, fortran, dtype
