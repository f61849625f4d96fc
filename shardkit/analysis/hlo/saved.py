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
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable

from shardkit._arguments.checks import quoted, raised
from shardkit._arguments.typed import typed
from shardkit.steps.step import Step

MAGIC = b"shardkit program 2\n"
_FRONT = len(MAGIC) + hashlib.sha256().digest_size


def save(program: Any, path: str | os.PathLike[str], ends: dict[str, bool] | None = None) -> None:
    """Writes a `jax.stages.Compiled` that can be serialized to a file; `ends` is that of a train step."""
    path = Path(path).expanduser()
    layouts = jax.tree.leaves((program.input_shardings, program.output_shardings))
    devices = sorted({each for layout in layouts for each in layout.device_set}, key=lambda each: each.id)
    on, cache = devices[0].platform, jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    # jax 0.10 to 0.12 leave the code out, and the program fails when it runs.
    if on == "cpu" and cache and jax.config.jax_enable_compilation_cache:  # type: ignore[attr-defined]
        raise ValueError(
            "save: a program of CPUs must be compiled without a compilation cache, because jax cannot write again what "
            f"it loaded from one; got {cache}. Compile it in a process with jax_enable_compilation_cache=False."
        )
    try:
        executable = pickle.dumps(serialize_executable.serialize(program))
    except Exception as error:  # jax and pickle have many
        raise ValueError(
            "save: the program must consist of arrays and compiled code alone; jax cannot serialize it: "
            f"{raised(error)}. Take out what calls Python (jax.debug.print, callbacks), and define the classes of "
            "arguments and results in a module."
        ) from error
    # A pickle inside the other, which is opened only where the versions of jax are these.
    content = pickle.dumps((_place(devices), on, [each.id for each in devices], ends, executable))
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:  # for its owner alone
        file.write(MAGIC + hashlib.sha256(content).digest() + content)
    os.replace(file.name, path)


@typed
def load(path: str | os.PathLike[str]) -> Callable[..., Any]:
    """Reads a program that `Compiled.save` wrote, and places it on the devices of this process; it compiles nothing.

    The program is machine code, and jax keeps part of it as a pickle: whoever writes the file runs code in your
    process. So the file must be yours alone, and a file that a stranger sent must not be made yours.

    Args:
        path: the file.

    Returns:
        The function or train step that was compiled, to call with arguments laid out alike. It has the same bits.

    Raises:
        ValueError: a file that others can write to or own; one that is damaged, or none of these; one of another
            version of jax, or for other devices.

    Cost: reading the file; the executable is checked and placed, not compiled.

    Example:
        sk.analysis.compiled(step, state, batch).save("step.program")  # in one process
        step = sk.aot.load("step.program")  # in another
        state, metrics = step(state, batch)
    """
    path = Path(path).expanduser()
    content = _content(path)
    if not content.startswith(MAGIC):
        raise ValueError(f"aot.load: the file must be a program of this shardkit; got {path}. Save it again.")
    if hashlib.sha256(content[_FRONT:]).digest() != content[len(MAGIC) : _FRONT]:
        raise ValueError(f"aot.load: the program must be whole; {path} is damaged or cut off. Save it again.")
    place, on, ids, ends, executable = pickle.loads(content[_FRONT:])
    try:
        devices = [device for device in jax.devices(on) if device.id in ids]
    except RuntimeError:  # no such platform
        devices = []
    here = _place(devices)
    if place != here:
        theirs, ours = (
            ", ".join(f"{name} {each[name]}" for name in place if place[name] != here[name]) for each in (place, here)
        )
        raise ValueError(
            f"aot.load: a program must run where it was compiled for; {path} is for {theirs}, and this process has "
            f"{ours}. Compile it here, and save that."
        )
    try:
        code, in_tree, out_tree = pickle.loads(executable)
        run = serialize_executable.deserialize_and_load(
            code, in_tree, out_tree, backend=devices[0].client, execution_devices=devices
        )
    except Exception as error:  # jax, pickle and the modules that it imports have many
        raise ValueError(
            f"aot.load: the runtime must accept the program; it refuses {path}: {raised(error)}. Save the program "
            "again, in the environment in which it runs."
        ) from error
    return Step(run, ends=ends) if ends else run


def writable_by(found: os.stat_result) -> str:
    """Who can change a file or folder but its user, as a clause; empty where nobody can, or the system does not say."""
    if not hasattr(os, "getuid"):
        return ""
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others can write to it"
    return "another user owns it" if found.st_uid != os.getuid() else ""


def _content(path: Path) -> bytes:
    """The content of a file that its user alone can have written."""
    if not path.is_file():
        raise ValueError(f"aot.load: path must be a file; got {path}, which is none. Pass the file that save wrote.")
    with path.open("rb") as file:
        if whose := writable_by(os.fstat(file.fileno())):  # of what was opened, not of what stands there by now
            raise ValueError(
                "aot.load: a compiled program must be a file that its user alone can write to, because it is executed; "
                f"got {path}, and {whose}. Save the program again."
            )
        return file.read()


def _place(devices: Sequence[Any]) -> dict[str, str]:
    """What a program on these devices depends on, in words."""
    kinds = sorted({device.device_kind for device in devices})
    on_cpu = any(device.platform == "cpu" for device in devices)
    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "devices": f"{len(devices)} x {quoted(kinds)}",
        "processor": _processor() if on_cpu else "any",
    }


def _processor() -> str:
    """The instructions that code compiled for this machine's processor may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    flags = next((sorted(line.split()) for line in lines if line.lower().startswith(("flags", "features"))), [])
    return f"{platform.machine()} {hashlib.sha256(' '.join(flags).encode()).hexdigest()[:12]}"
