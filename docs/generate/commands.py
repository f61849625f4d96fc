"""The page of commands: the help of each, as `shardkit COMMAND --help` prints it."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress

from shardkit.cli import COMPLETION, every_command, perform

_COLORS = re.compile(r"\x1b\[[0-9;]*m")


def print_helps() -> Iterator[tuple[str, str]]:
    """The full name of each command, and its help in 84 columns without colors."""
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "84"
    try:
        for full, command in every_command().items():
            out = io.StringIO()
            with redirect_stdout(out), suppress(SystemExit):
                perform(command, full, ["--help"])
            text = _COLORS.sub("", out.getvalue())
            lines = [line.rstrip() for line in text.splitlines()]
            yield full, "\n".join(lines).strip()
    finally:
        if columns is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = columns


def page() -> str:
    """The Markdown of the page."""
    head = (
        "`shardkit COMMAND --help` prints the same, as wide as the terminal. The extra `[cli]` installs what "
        "the commands need; `python -m shardkit` is the same command."
    )
    parts = ["# Commands", head]
    for name, text in [*print_helps(), ("completion", COMPLETION)]:
        parts.append(f"## shardkit {name}\n\n```text\n{text}\n```")
    parts.append(
        "The script holds all names and imports no jax, so that completing is quick: print it again after an upgrade. "
        "bash reads its folder with the package bash-completion; without it, add "
        '`eval "$(shardkit completion bash)"` to '
        "`~/.bashrc`."
    )
    return "\n\n".join(parts) + "\n"
