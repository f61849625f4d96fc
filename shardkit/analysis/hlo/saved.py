"""Compiled programs in files, which another process loads and runs without compiling.

A file has a digest and a pickle: for what the program was compiled, and jax's serialized executable. Whoever writes it
runs code in the process that reads it: it is read only if nobody but its user can have written it, and only if whole.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import platform
import stat
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jaxlib
from jax.experimental import serialize_executable

from shardkit._arguments.checks import describe_error, quote
from shardkit._arguments.typed import typed
from shardkit.steps.step import Step

MAGIC = b"shardkit program 2\n"
_FRONT = len(MAGIC) + hashlib.sha256().digest_size


class _SavedProgram(NamedTuple):
    """The content of a file: a pickle of these, in this order.

    `executable` is a pickle inside the other. It is opened only if the versions of jax equal the ones in `place`.
    """

    place: dict[str, str]
    platform: str
    device_ids: list[int]
    ends: dict[str, bool] | None
    executable: bytes


def save(program: Any, path: str | os.PathLike[str], ends: dict[str, bool] | None = None) -> None:
    """Writes a `jax.stages.Compiled` to a file; `ends` is the attribute of a train step."""
    path = Path(path).expanduser()
    devices = _find_devices(program)
    _refuse_cached(devices[0].platform)
    try:
        executable = pickle.dumps(serialize_executable.serialize(program))
    except Exception as error:  # jax and pickle have many
        raise ValueError(
            "save: the program must consist of arrays and compiled code alone; jax cannot serialize it: "
            f"{describe_error(error)}. Take out calls to Python (jax.debug.print, callbacks), and define the classes "
            "of arguments and results in a module."
        ) from error
    saved = _SavedProgram(
        place=_describe_place(devices),
        platform=devices[0].platform,
        device_ids=[device.id for device in devices],
        ends=ends,
        executable=executable,
    )
    content = pickle.dumps(tuple(saved))
    # A file that appears at once: whoever reads the path has the old program or the new one. Only its owner can read
    # a temporary file, and write to it.
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        file.write(MAGIC + hashlib.sha256(content).digest() + content)
    os.replace(file.name, path)


def _find_devices(program: Any) -> list[Any]:
    """The devices of a compiled program's arguments and results, by their ids."""
    devices = set()
    for sharding in jax.tree.leaves((program.input_shardings, program.output_shardings)):
        devices |= sharding.device_set
    return sorted(devices, key=lambda device: device.id)


def _refuse_cached(platform_name: str) -> None:
    """Refuses a program of CPUs that may come from a compilation cache.

    jax 0.10 to 0.12 serialize it without its code: it would load in the other process, and fail when it runs.
    """
    cache = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if platform_name == "cpu" and cache and jax.config.jax_enable_compilation_cache:  # type: ignore[attr-defined]
        raise ValueError(
            "save: a program of CPUs must be compiled without a compilation cache, because jax cannot write again what "
            f"it loaded from one; got {cache}. Compile it in a process with jax_enable_compilation_cache=False."
        )


@typed
def load(path: str | os.PathLike[str]) -> Callable[..., Any]:
    """Reads a program that `Compiled.save` wrote, and places it on the devices of this process; it compiles nothing.

    The program is machine code, and jax keeps part of it as a pickle: anyone who writes the file runs code in your
    process. So the file must belong to you alone. Never take over a file from a stranger.

    Args:
        path: the file.

    Returns:
        The compiled function or train step. Call it with arguments in the same layout; it gives the same bits.

    Raises:
        ValueError: a file that others can write or own; a damaged file, or another kind of file; a program of another
            version of jax, or for other devices.

    Cost: the time to read the file, and to check and place the executable; nothing is compiled.

    Example:
        sk.analysis.compiled(step, state, batch).save("step.program")  # in one process
        step = sk.aot.load("step.program")  # in another
        state, metrics = step(state, batch)
    """
    path = Path(path).expanduser()
    saved = _read_program(path)
    devices = _find_local_devices(saved)
    _check_place(path, saved.place, _describe_place(devices))
    try:
        code, in_tree, out_tree = pickle.loads(saved.executable)
        run = serialize_executable.deserialize_and_load(
            code, in_tree, out_tree, backend=devices[0].client, execution_devices=devices
        )
    except Exception as error:  # jax, pickle and the modules that it imports have many
        raise ValueError(
            f"aot.load: the runtime must accept the program; it refuses {path}: {describe_error(error)}. Save the "
            "program again, in the environment in which it runs."
        ) from error
    if not saved.ends:
        return run
    return Step(run, ends=saved.ends)


def _read_program(path: Path) -> _SavedProgram:
    """Reads a file, and refuses a damaged one before any of it is unpickled."""
    data = _read_private_file(path)
    if not data.startswith(MAGIC):
        raise ValueError(f"aot.load: the file must be a program of this shardkit; got {path}. Save it again.")
    digest = data[len(MAGIC) : _FRONT]
    content = data[_FRONT:]
    if hashlib.sha256(content).digest() != digest:
        raise ValueError(f"aot.load: the program must be whole; {path} is damaged or cut off. Save it again.")
    return _SavedProgram(*pickle.loads(content))


def _find_local_devices(saved: _SavedProgram) -> list[Any]:
    """The devices of this process with the ids of a saved program's."""
    try:
        devices = jax.devices(saved.platform)
    except RuntimeError:  # no such platform
        return []
    return [device for device in devices if device.id in saved.device_ids]


def _check_place(path: Path, saved: dict[str, str], local: dict[str, str]) -> None:
    """Refuses a program that was compiled for another place than this process; names what differs."""
    if saved == local:
        return
    differing = [name for name in saved if saved[name] != local[name]]
    saved_text = ", ".join(f"{name} {saved[name]}" for name in differing)
    local_text = ", ".join(f"{name} {local[name]}" for name in differing)
    raise ValueError(
        f"aot.load: a program must run where it was compiled for; {path} is for {saved_text}, and this process has "
        f"{local_text}. Compile it here, and save that."
    )


def writable_by(status: os.stat_result) -> str:
    """Who can change a file or folder but its user, as a clause; empty where nobody can, or the system does not say."""
    if not hasattr(os, "getuid"):
        return ""
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others can write to it"
    if status.st_uid != os.getuid():
        return "another user owns it"
    return ""


def _read_private_file(path: Path) -> bytes:
    """The content of a file that its user alone can have written."""
    if not path.is_file():
        raise ValueError(f"aot.load: path must be a file; got {path}. Pass the file that save wrote.")
    with path.open("rb") as file:
        # Of the file that was opened: another one may have been put in its place since.
        writer = writable_by(os.fstat(file.fileno()))
        if writer:
            raise ValueError(
                "aot.load: a compiled program must be a file that its user alone can write to, because it is executed; "
                f"got {path}, and {writer}. Save the program again."
            )
        return file.read()


def _describe_place(devices: Sequence[Any]) -> dict[str, str]:
    """Describes everything on which a program for these devices depends.

    For example {"jax": "0.10.2", "jaxlib": "0.10.2", "devices": "8 x 'TPU v5 lite'", "processor": "any"}.
    """
    kinds = sorted({device.device_kind for device in devices})
    processor = "any"
    if any(device.platform == "cpu" for device in devices):
        processor = _describe_processor()
    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "devices": f"{len(devices)} x {quote(kinds)}",
        "processor": processor,
    }


def _describe_processor() -> str:
    """The instructions that code compiled for this machine's processor may use: a digest of the processor's flags."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    flags: list[str] = []
    for line in lines:
        if line.lower().startswith(("flags", "features")):
            flags = sorted(line.split())
            break
    digest = hashlib.sha256(" ".join(flags).encode()).hexdigest()
    return f"{platform.machine()} {digest[:12]}"
