"""The page of commands: the help of each, as `shardkit COMMAND --help` prints it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

_COLORS = re.compile(r"\x1b\[[0-9;]*m")


def helps() -> Iterator[tuple[str, str]]:
    """The full name of each command, and its help in 84 columns without colors."""
    from shardkit_command import helptext, table

    columns, os.environ["COLUMNS"] = os.environ.get("COLUMNS"), "84"
    try:
        for group in ("", *table.GROUPS):
            for command in table.commands_of(group):
                full = f"{group} {command.name}".strip()
                yield full, _COLORS.sub("", helptext.of_command(command, full)).strip()
    finally:
        os.environ.pop("COLUMNS")
        os.environ |= {} if columns is None else {"COLUMNS": columns}


def page() -> str:
    """The Markdown of the page."""
    head = (
        "`shardkit COMMAND --help` prints the same, as wide as the terminal. The extra `[cli]` installs what "
        "the commands need; `python -m shardkit` is the same command."
    )
    parts = ["# Commands", head]
    parts += [f"## shardkit {name}\n\n```text\n{text}\n```" for name, text in helps()]
    return "\n\n".join(parts) + "\n"
