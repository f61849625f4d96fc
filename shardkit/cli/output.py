"""Where a command writes: text for people on a terminal or a pipe, and `--json` for programs."""

from __future__ import annotations

import json
import math
import numbers
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import shardkit as sk
from shardkit._arguments.files import open_file
from shardkit.cli.words import split_at_dashes

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1

_STANDARD: list[TextIO] = []  # standard output, while text for people goes to standard error


def console() -> Console:
    """A console that breaks lines between words on a terminal, and nowhere in a pipe; colors are for terminals too."""
    from rich.console import Console

    class Piped(Console):
        """A console that ends the command as `shardkit.cli.main` says if its pipe is closed; rich would exit with 1."""

        def on_broken_pipe(self) -> None:
            """Called while the error is handled."""
            raise BrokenPipeError

    terminal = Piped(highlight=False, markup=False, emoji=False)
    terminal.soft_wrap = not terminal.is_terminal
    return terminal


@contextmanager
def text_beside_json(words: Sequence[str]) -> Iterator[None]:
    """With `--json -`, text for people goes to standard error, so that standard output holds JSON alone."""
    options, _ = split_at_dashes(words)
    to_standard_output = "--json=-" in options or ("--json", "-") in pairwise(options)
    if not to_standard_output:
        yield
        return
    _STANDARD.append(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _STANDARD.pop()


def header(command: str) -> dict[str, Any]:
    """What every JSON output begins with: schema, command, date, versions, and the devices if jax has any."""
    import jax
    import jaxlib

    return {
        "schema": SCHEMA,
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "shardkit": sk.__version__,
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "python": platform.python_version(),
        },
        "device": _describe_devices(),
    }


def _describe_devices() -> dict[str, Any] | None:
    """The devices that have started; None before, as a command without devices must not start them for its header."""
    import jax

    from shardkit._jax.backends import jax_has_started

    if not jax_has_started():
        return None
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "kind": device.device_kind,
        "count": jax.device_count(),
        "processes": jax.process_count(),
    }


def write_json(file: Path | None, command: str, rows: Sequence[Mapping[str, Any]], /, **more: Any) -> None:
    """Writes the result of a command, as "lint", as one JSON object; to standard output with "-", nowhere with None."""
    if file is None:
        return
    document = header(command) | more | {"rows": list(rows)}
    text = json.dumps(to_plain(document), indent=1)
    with open_output(file) as out:
        out.write(text + "\n")


@contextmanager
def open_output(file: Path, *, append: bool = False) -> Iterator[TextIO]:
    """A file open for text, with its folder made if it is missing; "-" is standard output."""
    if str(file) == "-":
        out = sys.stdout
        # Under `text_beside_json` that is standard error, and the true one is kept in the list.
        if _STANDARD:
            out = _STANDARD[-1]
        yield out
        out.flush()
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a" if append else "w", encoding="utf-8", opener=open_file) as out:
        yield out


def to_plain(value: Any) -> Any:
    """A value as JSON has it: paths and other objects as text, and None for a number that is not finite.

    Numbers of NumPy are numbers: only Python's own pass `isinstance` of int and float.
    """
    if isinstance(value, Mapping):
        return {str(name): to_plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(entry) for entry in value]
    # Before Integral, which a bool is too: True would become 1.
    if isinstance(value, bool | str | None):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        if not math.isfinite(value):
            return None
        return float(value)
    return str(value)
