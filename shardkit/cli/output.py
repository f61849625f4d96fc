"""Where a command writes: text for people on a terminal or a pipe, and `--json` for programs."""

from __future__ import annotations

import datetime
import json
import math
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TextIO

import jax
import jaxlib
import tyro
from rich.console import Console

import shardkit as sk
from shardkit._arguments.files import open_file
from shardkit._jax.backends import jax_has_started

SCHEMA = 1
Json = Annotated[Path | None, tyro.conf.arg(metavar="FILE|-")]


@dataclass(frozen=True, kw_only=True)
class WithJson:
    """The option of every command that has results."""

    json: Json = None
    """Write the results to this file, or with - to standard output."""


_STANDARD: list[TextIO] = []  # standard output, while text for people goes to standard error


class Piped(Console):
    """A console whose closed pipe ends the command as `shardkit.cli.main` says; rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        """Called while the error is handled."""
        raise BrokenPipeError


def console() -> Console:
    """A console that breaks lines between words on a terminal, and nowhere in a pipe; colors are for terminals too."""
    here = Piped(highlight=False, markup=False, emoji=False)
    here.soft_wrap = not here.is_terminal
    return here


def explicit(words: Sequence[str]) -> list[str]:
    """The words of a command with the file that a bare `--json` stands for: standard output."""
    end = words.index("--") if "--" in words else len(words)
    out = []
    for index, word in enumerate(words):
        out.append(word)
        following = words[index + 1] if index + 1 < end else "--"
        if word == "--json" and index < end and following.startswith("--"):
            out.append("-")
    return out


@contextmanager
def text_beside_json(words: Sequence[str]) -> Iterator[None]:
    """With `--json -`, text for people goes to standard error, so that standard output holds JSON alone."""
    own = words[: words.index("--")] if "--" in words else words
    if "--json=-" not in own and ("--json", "-") not in pairwise(own):
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
    device = jax.devices()[0] if jax_has_started() else None
    return {
        "schema": SCHEMA,
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {
            "shardkit": sk.__version__,
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "python": platform.python_version(),
        },
        "device": device
        and {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": jax.device_count(),
            "processes": jax.process_count(),
        },
    }


def write_json(file: Path | None, command: str, rows: Sequence[Mapping[str, Any]], /, **more: Any) -> None:
    """Writes the result of a command, as "lint", as one JSON object; to standard output with "-", nowhere with None."""
    if file is not None:
        with writing(file) as out:
            out.write(json.dumps(plain(header(command) | more | {"rows": list(rows)}), indent=1) + "\n")


@contextmanager
def writing(file: Path, *, append: bool = False) -> Iterator[TextIO]:
    """A file open for text, whose folder is made; "-" is standard output."""
    if str(file) == "-":
        out = _STANDARD[-1] if _STANDARD else sys.stdout
        yield out
        out.flush()
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a" if append else "w", encoding="utf-8", opener=open_file) as out:
        yield out


def plain(value: Any) -> Any:
    """A value as JSON has it: paths and other objects as text, and None for a number that is not finite."""
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, bool | int | float | str | None) else str(value)
