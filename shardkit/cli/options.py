"""The types of options that several commands have, and how the help of each shows what it is without the option.

Help and completion import this file and those of the commands, and neither jax nor numpy: so the file of a command
imports what it calls inside its function.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import tyro

T = TypeVar("T")


def show_default(text: str) -> str:
    """What tyro shows after the text of an option: its default, but no "(default: None)" and no "(default: )".

    The text of an option without a default says what happens without it.
    """
    if text in ("", "None"):
        return ""
    return f"(default: {text})"


_HINT = tyro.conf.arg(help_behavior_hint=show_default)

Optional = Annotated[T | None, _HINT]
Words = Annotated[tuple[str, ...], _HINT]
Json = Annotated[Path | None, tyro.conf.arg(metavar="FILE|-", help_behavior_hint=show_default)]
Target = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODULE:FUNCTION|FILE.py:FUNCTION")]
Sizes = Annotated[
    tyro.conf.Positional[tuple[str, ...]],
    tyro.conf.arg(metavar="AXIS=SIZE ...", help_behavior_hint=show_default),
]


@dataclass(frozen=True, kw_only=True)
class WithJson:
    """The option of every command that has results."""

    json: Json = None
    """Write the results to this file, or with - to standard output."""
