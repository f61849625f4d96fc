"""`sk.report`: a step as one HTML page."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardkit._arguments.checks import at_least
from shardkit._arguments.typed import typed
from shardkit.analysis.judge import LARGE_LEAF, SMALL
from shardkit.bench.environment import environment
from shardkit.meshes.layout import table
from shardkit.reporting.html import document
from shardkit.reporting.read import StepReport, read

# What a reader needs of the environment, and its name on the page.
_ABOUT = {
    "date": "date",
    "shardkit": "shardkit",
    "git_commit": "commit",
    "jax": "jax",
    "jaxlib": "jaxlib",
    "python": "python",
    "cpu_model": "processor of this machine",
    "device_kind": "device of this process",
    "device_count": "devices of this process",
    "processes": "processes",
    "XLA_FLAGS": "XLA_FLAGS",
    "LIBTPU_INIT_ARGS": "LIBTPU_INIT_ARGS",
}


@typed
def report(
    step: Callable[..., Any],
    *args: Any,
    target: str | None = None,
    file: str | os.PathLike[str] | None = "step.html",
    command: str | None = None,
    large: int = LARGE_LEAF,
    small: int = SMALL,
    ignore: Collection[str] = (),
    call: bool = False,
    timeout: float = 1800.0,
) -> StepReport:
    """Writes what one call of a jitted step holds, sends and wastes as one HTML page that can be mailed.

    The page has what `describe` prints of the plan and the arguments, `audit` of the step and `aot.compile` of the
    target: layouts, every collective as written and as compiled, findings and memory; with versions, date and command.
    It needs no other file and no script, follows the reader's light or dark theme, and can be printed.

    Args:
        step: the step: a train step, or any jitted function.
        *args: its positional arguments: arrays, or `jax.ShapeDtypeStruct` with shardings.
        target: chips to compile for, as "v5e:2x4" (see `aot.compile`), which has times too; None: the devices of this
            process.
        file: the .html file to write, whose missing directories are created; None writes none.
        command: the command that the page says it was made by; None: that of this process; "" leaves it out, as where
            its words are not for the page's readers.
        large: bytes per device from which a leaf that several devices hold is reported.
        small: bytes below which waste is not reported.
        ignore: names of rules to leave out.
        call: whether to call the step, on copies of its arguments, for the rule `second-compile`.
        timeout: time limit for the compiler of a target, seconds.

    Returns:
        StepReport: what was read, and the page as `.html`, which notebooks show. A program that does not fit the memory
        of the target gives a page that says so.

    Raises:
        ValueError: a file that does not end in .html or cannot be written, a name in `ignore` that is not a rule, a
            step that cannot be traced and compiled with these arguments.
        RuntimeError: the target's compiler is missing.

    Example:
        >>> w, x = (jax.device_put(jnp.ones((8, 8)), jax.NamedSharding(mesh, P(axis))) for axis in ("model", "data"))
        >>> page = sk.report(jax.jit(lambda w, x: jnp.sum(x @ w)), w, x, file=None)
        >>> len(page.findings), "<script" in page.html
        (0, False)
    """
    at_least("report", 0, large=large, small=small)
    path = None if file is None else check_file(Path(file))
    found, texts = read(step, args, target, ignore, large, small, call, timeout)
    html = page_of(found, texts, shlex.join(sys.orig_argv) if command is None else command)
    if path:
        write(path, html)
    return replace(found, file=path, html=html)


def page_of(found: StepReport, read: Mapping[str, str], command: str) -> str:
    """The page: what was read, and how it was made."""
    here = environment()
    about = [(name, str(here[key])) for key, name in _ABOUT.items() if here[key] not in (None, "")]
    if found.audit and found.compiled:
        about += [(f"compiler's {name}", text.splitlines()[0]) for name, text in found.audit.versions.items()]
    made = {"Command": command} if command else {}
    return document(f"{found.step} on {found.target}", {**read, **made, "Versions and machine": table(about)})


def check_file(file: Path) -> Path:
    """The path of a page, whose directory is made; refuses early what cannot be written, for compilers take minutes."""
    if file.suffix.lower() != ".html":
        raise ValueError(f"report: file must end in .html; got {file.name!r}. Pass for example 'step.html'.")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir():
            raise IsADirectoryError
    except OSError as error:
        raise _unwritable(file, error) from error
    return file


def write(file: Path, html: str) -> None:
    """Writes the page."""
    try:
        file.write_text(html, encoding="utf-8")
    except OSError as error:
        raise _unwritable(file, error) from error


def _unwritable(file: Path, error: OSError) -> ValueError:
    return ValueError(
        f"report: file must be one that can be written; {str(file)!r} cannot ({type(error).__name__}). Pass another "
        "path."
    )
