"""The `shardkit` command as far as it needs no jax: version, help, completion, and which module runs a command.

A package of its own, because importing anything below `shardkit` imports jax, which takes seconds.
"""

from __future__ import annotations

import os
import platform
import re
import signal
import sys
from difflib import get_close_matches
from importlib import metadata
from importlib.util import find_spec

from shardkit_command.declared import root
from shardkit_command.table import COMMANDS, GROUPS, SHELLS, Command, commands_of, find

__all__ = ["COMMANDS", "GROUPS", "Command", "main"]

_NEEDS = ("rich", "tyro", "uniplot", "yaml")
_REMEDY = "shardkit: the command needs the extra [cli]; install it with: pip install 'shardkit[cli]'"


def main() -> None:
    """Runs `shardkit COMMAND` with the words of `sys.argv`, and exits with its code."""
    try:
        try:
            sys.exit(_main(sys.argv[1:]))
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:  # the reader of the pipe has closed it: | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at interpreter exit
        sys.exit(128 + signal.SIGPIPE)


def _main(words: list[str]) -> int:
    """Answers what needs no jax, and hands everything else to `shardkit.cli`; the exit code."""
    end = words.index("--") if "--" in words else len(words)
    own = [word for word in words[:end] if word != "--debug"]
    if len(own) < end:
        os.environ["SHARDKIT_DEBUG"] = "1"
    asks = next((word for word in own if word in ("-h", "--help", "--version")), None)
    if own[:1] == ["help"]:
        own, asks = own[1:], "--help"
    if asks == "--version":
        print(_version())
        return 0
    named = [word for word in own if word not in ("-h", "--help")]
    found = find(named)
    if found is None:
        return _without_command(named, asks)
    command, full, _ = found
    if asks:
        from shardkit_command.helptext import of_command

        print(of_command(command, full))
        return 0
    if not all(map(find_spec, _NEEDS)):
        print(_REMEDY, file=sys.stderr)
        return 2
    shows = sys.stdout is not None and sys.stdout.isatty() and sys.stderr is not None and sys.stderr.isatty()
    if shows:  # it takes seconds
        print("importing jax", end="", file=sys.stderr, flush=True)
    from shardkit import cli

    if shows:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return cli.perform(command, full, own[len(full.split()) :] + words[end:])


def _without_command(words: list[str], asks: str | None) -> int:
    """What to say where no command is named: help, a completion script, or a suggestion."""
    from shardkit_command.helptext import of_all

    group = words[0] if words and words[0] in GROUPS else ""
    rest = words[1:] if group else words
    if asks and not rest:
        print(of_all(group))
        return 0
    if not rest:
        print(of_all(group), file=sys.stderr)
        return 2
    if rest[0] == "completion" and not group:
        return _completion(rest[1:], asks)
    names = [each.name for each in commands_of(group)] + ([] if group else [*GROUPS, "completion"])
    prog = f"shardkit {group}".strip()
    near = get_close_matches(rest[0].lower(), names, 1, 0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"{prog} --help lists the commands."
    print(f"error: {prog} has no command {rest[0]!r}; {hint}", file=sys.stderr)
    return 2


def _completion(words: list[str], asks: str | None) -> int:
    if asks or len(words) != 1 or words[0] not in SHELLS:
        from shardkit_command.completion import USAGE

        print(USAGE, file=sys.stdout if asks else sys.stderr)
        return 0 if asks else 2
    from shardkit_command.completion import script

    print(script(words[0]))
    return 0


def _version() -> str:
    """The versions in a line; that of shardkit is read, because importing it imports jax."""
    found = re.search(r'^__version__ = "(.+)"$', (root() / "__init__.py").read_text(encoding="utf-8"), re.M)
    assert found, "shardkit/__init__.py has its version"
    try:
        jax = metadata.version("jax")
    except metadata.PackageNotFoundError:
        jax = "missing"
    return f"shardkit {found[1]} (jax {jax}, Python {platform.python_version()})"
