"""Compiled programs in files, which another process loads and runs without compiling.

A file has a head in JSON, the trees of arguments and results, and jax's serialized executable. The last two are pickles
and machine code: a file is read only if nobody but its user can have written it, and then only if it is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import platform
import stat
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding

from shardkit._check import counted, quoted, sized
from shardkit._typed import typed
from shardkit.layout import table
from shardkit.train import keyed

MAGIC = b"shardkit program"
FORMAT = 1
_NUMBER = struct.Struct(">I")
_FRONT = len(MAGIC) + _NUMBER.size + hashlib.sha256().digest_size


@dataclass(frozen=True)
class Program:
    """A compiled program from a file: call it as the function or train step that was compiled, or `print` it.

    Attributes:
        call: the function.
        about: what the file says of it: versions, devices, mesh, arguments and results.
    """

    call: Callable[..., Any]
    about: dict[str, Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __str__(self) -> str:
        of = f"{_devices(self.about)}, mesh {sized(self.about['mesh'].items())} (jax {self.about['jax']})"
        return "\n".join([f"program for {of}", table([*self.about["arguments"], *self.about["results"]])])


def save(program: Any, path: str | os.PathLike[str], ends: dict[str, bool] | None = None) -> None:
    """Writes a `jax.stages.Compiled` to a file; `ends` is that of a train step.

    Raises:
        ValueError: a folder that others can write to, a program that cannot be serialized, or one of CPUs that may come
            from a compilation cache.

    Example:
        save(jax.jit(f).lower(x).compile(), "f.program")
    """
    path = Path(path).expanduser()
    _check_folder("save", path)
    about = _about(program)
    cache = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    # jax 0.10 to 0.12 leave the code out, and the program fails when it runs.
    if about["platform"] == "cpu" and cache and jax.config.jax_enable_compilation_cache:  # type: ignore[attr-defined]
        raise ValueError(
            "save: a program of CPUs must be compiled without a compilation cache, because jax cannot write again what "
            f"it loaded from one; got {cache}. Compile it in a process with jax_enable_compilation_cache=False."
        )
    try:
        executable, *trees = serialize_executable.serialize(program)
        pickled = pickle.dumps(trees)
    except Exception as error:  # jax and pickle have many
        raise ValueError(
            "save: the program must consist of arrays and compiled code alone; jax cannot serialize it: "
            f"{_first(error)}. Take out what calls Python (jax.debug.print, callbacks), and define the classes of "
            "arguments and results in a module."
        ) from error
    head = about | {"ends": ends, "trees": len(pickled), "executable": len(executable)}
    text = json.dumps(head).encode()
    rest = b"".join([_NUMBER.pack(len(text)), text, pickled, executable])
    content = b"".join([MAGIC, _NUMBER.pack(FORMAT), hashlib.sha256(rest).digest(), rest])
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:  # for its owner alone
        file.write(content)
    os.replace(file.name, path)


@typed
def load(path: str | os.PathLike[str]) -> Program:
    """Reads a program that `Compiled.save` wrote, and places it on the devices of this process; it compiles nothing.

    The program is machine code, and jax keeps part of it as a pickle: whoever writes the file runs code in your
    process. So the file and its folder must be yours alone, and a file that a stranger sent must not be made yours.

    Args:
        path: the file.

    Returns:
        Program: call it as the function or train step that was compiled, with arguments laid out alike. It has the
        same bits.

    Raises:
        ValueError: a file that others can write to, own or link to; one that is damaged, or none of these; one of
            another version of jax, or for other devices.

    Cost: reading the file; the executable is checked and placed, not compiled.

    Example:
        sk.analysis.compiled(step, state, batch).save("step.program")  # in one process
        step = sk.aot.load("step.program")  # in another
        state, metrics = step(state, batch)
    """
    path = Path(path).expanduser()
    about, trees, executable = _parts(_content(path), path)
    devices = _devices_here(about, path)
    try:
        in_tree, out_tree = pickle.loads(trees)
        run = serialize_executable.deserialize_and_load(
            executable, in_tree, out_tree, backend=devices[0].client, execution_devices=devices
        )
    except Exception as error:  # jax, pickle and the modules that it imports have many
        raise ValueError(
            f"aot.load: the runtime must accept the program; it refuses {path}: {_first(error)}. Save the program "
            "again, in the environment in which it runs."
        ) from error
    return Program(keyed(run, **about["ends"]) if about["ends"] else run, about)


def writable_by(found: os.stat_result) -> str:
    """Who can change a file or folder but its user, as a clause; empty where nobody can, or the system does not say."""
    if not hasattr(os, "getuid"):
        return ""
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others can write to it"
    return "another user owns it" if found.st_uid != os.getuid() else ""


def _check_folder(where: str, path: Path) -> None:
    try:
        found = os.lstat(path.parent)
    except OSError as error:
        raise ValueError(f"{where}: the folder {path.parent} must exist ({error.strerror}). Create it.") from None
    whose = "it is a symbolic link" if stat.S_ISLNK(found.st_mode) else writable_by(found)
    if whose:
        raise ValueError(
            f"{where}: a compiled program must be in a folder that its user alone can write to, because it is "
            f"executed; got {path.parent}, and {whose}. Run chmod go-w on it, or pass a path in another one."
        )


def _content(path: Path) -> bytes:
    """The content of a file that its user alone can have written."""
    _check_folder("aot.load", path)
    try:
        file = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        why = "it is a symbolic link" if path.is_symlink() else error.strerror
        raise ValueError(f"aot.load: path must be a file that can be read; got {path} ({why}). Correct path.") from None
    found = os.fstat(file)
    whose = writable_by(found) if stat.S_ISREG(found.st_mode) else "it is no file"
    if whose:
        os.close(file)
        raise ValueError(
            "aot.load: a compiled program must be a file that its user alone can write to, because it is executed; got "
            f"{path}, and {whose}. Save the program again."
        )
    with open(file, "rb") as opened:
        return opened.read()


def _parts(content: bytes, path: Path) -> tuple[dict[str, Any], bytes, bytes]:
    """The head, the trees and the executable of a file, if it is whole and of this version of jax."""
    if content[: len(MAGIC)] != MAGIC:
        raise ValueError(f"aot.load: the file must be a program that was saved by shardkit; got {path}. Correct path.")
    front, rest = content[len(MAGIC) : _FRONT], content[_FRONT:]
    written = _NUMBER.unpack_from(front)[0] if len(front) >= _NUMBER.size else FORMAT
    if written != FORMAT:
        raise ValueError(
            f"aot.load: the program must have format {FORMAT}; {path} has {written}. Save it again with this version."
        )
    if hashlib.sha256(rest).digest() != front[_NUMBER.size :]:
        raise ValueError(f"aot.load: the program must be whole; {path} is damaged or cut off. Save it again.")
    end = _NUMBER.size + _NUMBER.unpack_from(rest)[0]
    about = json.loads(rest[_NUMBER.size : end])
    if (mine := _versions()) != (found := {name: about[name] for name in mine}):
        theirs, ours = (", ".join(f"{name} {version}" for name, version in each.items()) for each in (found, mine))
        raise ValueError(
            f"aot.load: the program must be of the versions that run it, {ours}; {path} is of {theirs}. Save it again "
            "with these."
        )
    trees = rest[end : end + about["trees"]]
    return about, trees, rest[end + len(trees) :]


def _devices_here(about: dict[str, Any], path: Path) -> list[Any]:
    """The devices of this process for which a program was compiled."""
    try:
        here = {device.id: device for device in jax.devices(about["platform"])}
    except RuntimeError:
        here = {}
    kinds = sorted({device.device_kind for device in here.values()})
    if not here.keys() >= set(about["ids"]) or kinds != about["kinds"]:
        mine = f"{len(here)} of {quoted(kinds)}" if here else f"none of platform {about['platform']!r}"
        raise ValueError(
            f"aot.load: the program must run on the devices for which it was compiled, {_devices(about)}; this process "
            f"has {mine}. Compile it here, and save that."
        )
    if about["processor"] != _processor(about["platform"]):
        raise ValueError(
            f"aot.load: the program must run on processors with the instructions for which it was compiled; {path} is "
            "of another processor. Compile it here, and save that."
        )
    return [here[each] for each in about["ids"]]


def _devices(about: dict[str, Any]) -> str:
    return f"{counted(len(about['ids']), 'device')} of {quoted(about['kinds'])}"


def _about(program: Any) -> dict[str, Any]:
    """What a program is for, as JSON can hold it."""
    layouts = jax.tree.leaves((program.input_shardings, program.output_shardings))
    devices = sorted({each for layout in layouts for each in layout.device_set}, key=lambda each: each.id)
    mesh = next((layout.mesh for layout in layouts if isinstance(layout, NamedSharding)), None)
    return _versions() | {
        "platform": devices[0].platform,
        "kinds": sorted({device.device_kind for device in devices}),
        "ids": [device.id for device in devices],
        "processor": _processor(devices[0].platform),
        "mesh": dict(mesh.shape) if mesh is not None else {},
        "arguments": _leaves("arguments", program.args_info),
        "results": _leaves("results", program.out_info),
    }


def _leaves(of: str, tree: Any) -> list[tuple[str, str]]:
    found = jax.tree_util.tree_leaves_with_path(tree)
    return [(f"{of}{jax.tree_util.keystr(path)}", f"{x.dtype}{list(x.shape)}") for path, x in found]


def _versions() -> dict[str, str]:
    return {"jax": jax.__version__, "jaxlib": jaxlib.__version__}


def _processor(platform_name: str) -> str:
    """The instructions that compiled code may use on this machine's processor; empty for an accelerator's program."""
    if platform_name != "cpu":
        return ""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    flags = next((sorted(line.split()) for line in lines if line.lower().startswith(("flags", "features"))), [])
    return f"{platform.machine()} {hashlib.sha256(' '.join(flags).encode()).hexdigest()}"


def _first(error: Exception) -> str:
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{type(error).__name__}: {text.rstrip('.')}"
