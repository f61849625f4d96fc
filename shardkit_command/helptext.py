"""What `--help` prints: examples first, then the options by group, within the width of the terminal."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence

from shardkit_command.declared import Option, declared
from shardkit_command.table import GROUPS, Command, commands_of

_WIDEST = 100
_COLUMN = 26


def of_all(group: str = "") -> str:
    """The help of `shardkit`, or of a group of commands."""
    prog = f"shardkit {group}".strip()
    rows = [(each.name, each.line) for each in commands_of(group)]
    if not group:
        rows += [(f"{name} ...", line) for name, (_, line) in GROUPS.items()]
        rows += [("completion SHELL", "print the completion script of bash, zsh or fish")]
    lines = [f"{_bold('usage:')} {prog} COMMAND [OPTIONS]", ""]
    lines += [(GROUPS[group][1].capitalize() if group else "Explicit collectives for JAX") + ".", ""]
    lines += [_bold("commands")]
    for name, line in rows:
        lines += _row(name, line, 20)
    lines += ["", f"{prog} COMMAND --help shows the options and examples of a command."]
    if group:
        return "\n".join(lines)
    lines += ["To begin: shardkit doctor, then shardkit train data=8 --verify 3."]
    lines += ["", _bold("options")]
    lines += _row("-h, --help", "show this help", 20)
    lines += _row("--version", "the versions of shardkit, jax and Python", 20)
    lines += _row("--debug", "with any command: show the traceback of an error (also SHARDKIT_DEBUG=1)", 20)
    lines += ["", "exit codes: 0 fine, 1 findings or a failed check, 2 wrong usage, 70 an unexpected error, 130 Ctrl-C"]
    return "\n".join(lines)


def of_command(command: Command, full: str) -> str:
    """The help of one command, whose full name may have two words."""
    said = declared(command.module, command.name)
    places = [option for option in said.options if not option.words]
    needed = [f"{option.words[-1]} {option.value}" for option in said.options if option.words and option.needed]
    first = [o.value if o.needed else f"[{o.value}]" for o in places if not o.value.startswith("-- ")]
    last = [option.value for option in places if option.value.startswith("-- ")]
    usage = " ".join(["shardkit", full, *first])
    lines = [" ".join([_bold("usage:"), usage, *needed, "[OPTIONS]", *last]), ""]
    lines += _wrapped(said.text, "")
    if said.examples:
        lines += [""]
        fitting = [len(example) for example, _ in said.examples if len(example) <= width() * 3 // 5]
        for example, text in said.examples:
            lines += _row(example, text, max(fitting, default=_COLUMN) + 4)
    if places:
        lines += ["", _bold("arguments")]
        for option in places:
            lines += _row(option.value, _text(option), _COLUMN)
    for title, options in _grouped(said.groups, [o for o in said.options if o.words]):
        lines += ["", _bold(title)]
        for option in options:
            lines += _row(f"{', '.join(option.words)} {option.value}".strip(), _text(option), _COLUMN)
    return "\n".join(lines)


def width() -> int:
    """Columns to write in: those of the terminal, at most 100."""
    return max(40, min(_WIDEST, shutil.get_terminal_size((_WIDEST, 24)).columns))


def colored() -> bool:
    """Whether standard output shows colors."""
    return sys.stdout is not None and sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _bold(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m" if colored() else text


def _text(option: Option) -> str:
    said = option.text.rstrip().removesuffix(".")
    return f"{said} (default {option.default})" if option.default.strip() else said


def _grouped(groups: dict[str, tuple[str, ...]], options: Sequence[Option]) -> Iterator[tuple[str, Sequence[Option]]]:
    named = {option.name: option for option in options}
    grouped = {name for names in groups.values() for name in names}
    for title, names in groups.items():
        yield title, [named[name] for name in names]
    rest = [option for option in options if option.name not in grouped]
    if rest:
        yield "options", rest


def _row(left: str, text: str, column: int) -> list[str]:
    """A word and its text in columns; the text is below where the word is too long."""
    lines = _wrapped(text, " " * column)
    if len(left) + 4 > column:
        return [f"  {left}", *lines]
    first, *others = lines or [""]
    return [f"  {left:{column - 2}}{first[column:]}".rstrip(), *others]


def _wrapped(text: str, indent: str) -> list[str]:
    """The paragraphs of a text, wrapped between words; in a column without empty lines between them."""
    lines: list[str] = []
    for paragraph in text.replace("`", "").split("\n\n"):
        lines += [""] if lines and not indent else []
        joined = " ".join(paragraph.split())
        lines += textwrap.wrap(
            joined, width(), initial_indent=indent, subsequent_indent=indent, break_long_words=False,
            break_on_hyphens=False,
        )  # fmt: skip
    return lines
