"""The `shardkit` command as far as it needs no jax: the list of commands, the version, and who runs a command.

A module beside the package: whatever is below `shardkit` is imported after `shardkit/__init__.py`, which imports jax,
and that cannot be lazy, because `sk.pipeline` is a function and `shardkit.pipeline` a folder: importing from the folder
would put it in the function's place. `shardkit --version` and a typing mistake take 0.06 s here, 1.2 s there.
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
from pathlib import Path
from typing import NamedTuple

__all__ = ["BENCH", "COMMANDS", "COMPLETION", "Command", "every_command", "main"]


class Command(NamedTuple):
    """A command: its name, what it does in a line, and the module with its `Options` and a function of its name."""

    name: str
    line: str
    module: str


COMMANDS = (
    Command("train", "train a byte-level transformer on any mesh", "shardkit.cli.train"),
    Command("launch", "start a job of several processes, or print a manifest", "shardkit.cli.launch"),
    Command("doctor", "check this installation, its devices and every collective", "shardkit.cli.doctor"),
    Command("audit", "what a function sends, and what hangs, is wrong or wasted", "shardkit.cli.audit"),
    Command("aot", "compile a step for chips that are not attached", "shardkit.cli.aot"),
    Command("report", "a step as one HTML page, to read or to mail", "shardkit.cli.report"),
    Command("draw", "a pipeline schedule as text, numbers and picture", "shardkit.cli.draw"),
)
BENCH = (
    Command("comm", "collectives, as nccl-tests measures them", "shardkit.cli.bench.comm"),
    Command("strategies", "one model under every plan that fits a mesh", "shardkit.cli.bench.strategies"),
    Command("compare", "what became slower between two files of results", "shardkit.cli.bench.compare"),
    Command("plot", "results as a picture", "shardkit.cli.bench.plot"),
    Command("trace", "a step as execution traces for network simulators", "shardkit.cli.bench.trace"),
)
_BENCH = "measure communication and plans, and compare measurements"
_SHELLS = ("bash", "zsh", "fish")
_NEEDS = ("packaging", "rich", "tyro", "uniplot", "yaml")
_REMEDY = "shardkit: the command needs the extra [cli]; install it with: pip install 'shardkit[cli]'"
COMPLETION = """usage: shardkit completion bash|zsh|fish

Print a script that completes commands, options and their values.

  bash    shardkit completion bash > ~/.local/share/bash-completion/completions/shardkit
  zsh     shardkit completion zsh > ~/.zfunc/_shardkit    (with fpath+=~/.zfunc before compinit in ~/.zshrc)
  fish    shardkit completion fish > ~/.config/fish/completions/shardkit.fish"""


def every_command() -> dict[str, Command]:
    """All commands by their full names, such as "bench comm"."""
    return {each.name: each for each in COMMANDS} | {f"bench {each.name}": each for each in BENCH}


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
    full = " ".join(named[:2]) if named[:1] == ["bench"] else " ".join(named[:1])
    command = every_command().get(full)
    completes = named[:1] == ["completion"]
    if completes and (asks or len(named) != 2 or named[1] not in _SHELLS):
        print(COMPLETION, file=sys.stdout if asks else sys.stderr)
        return 0 if asks else 2
    if command is None and not completes:
        return _without_command(named, asks is not None)
    if not all(map(find_spec, _NEEDS)):
        print(_REMEDY, file=sys.stderr)
        return 2
    shows = sys.stdout is not None and sys.stdout.isatty() and sys.stderr is not None and sys.stderr.isatty()
    if shows:  # it takes seconds
        print("importing jax", end="", file=sys.stderr, flush=True)
    from shardkit import cli

    if shows:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    if command is None:
        print(cli.completion(named[1]))
        return 0
    after = ["--help"] if asks else own[len(full.split()) :]
    return cli.perform(command, full, after + words[end:])


def _without_command(words: list[str], asks: bool) -> int:
    """What to say where no command is named: the list of commands, or a suggestion."""
    group = "bench" if words[:1] == ["bench"] else ""
    rest = words[1:] if group else words
    prog = f"shardkit {group}".strip()
    if not rest:
        print(_commands(prog, BENCH if group else COMMANDS), file=sys.stdout if asks else sys.stderr)
        return 0 if asks else 2
    names = [each.name for each in BENCH] if group else [*(each.name for each in COMMANDS), "bench", "completion"]
    near = get_close_matches(rest[0].lower(), names, 1, 0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"{prog} --help lists the commands."
    print(f"error: {prog} has no command {rest[0]!r}; {hint}", file=sys.stderr)
    return 2


def _commands(prog: str, commands: tuple[Command, ...]) -> str:
    rows = [(each.name, each.line) for each in commands]
    what = _BENCH.capitalize() if commands is BENCH else "Explicit collectives for JAX"
    more = ["", f"{prog} COMMAND --help shows the options and examples of a command."]
    if commands is COMMANDS:
        rows += [("bench ...", _BENCH), ("completion SHELL", "print the completion script of bash, zsh or fish")]
        more += [
            "To begin: shardkit doctor, then shardkit train data=8 --verify 3.",
            "",
            "options",
            "  -h, --help        show this help",
            "  --version         the versions of shardkit, jax and Python",
            "  --debug           with any command: show the traceback of an error (also SHARDKIT_DEBUG=1)",
            "",
            "exit codes: 0 fine, 1 findings or a failed check, 2 wrong usage, 70 an unexpected error, 130 Ctrl-C",
        ]
    listed = [f"  {name:18}{line}" for name, line in rows]
    return "\n".join([f"usage: {prog} COMMAND [OPTIONS]", "", f"{what}.", "", "commands", *listed, *more])


def _version() -> str:
    """The versions in a line; that of shardkit is read, because importing it imports jax."""
    package = Path(__file__).with_name("shardkit") / "__init__.py"
    found = re.search(r'^__version__ = "(.+)"$', package.read_text(encoding="utf-8"), re.M)
    assert found, "shardkit/__init__.py has its version"
    try:
        jax = metadata.version("jax")
    except metadata.PackageNotFoundError:
        jax = "missing"
    return f"shardkit {found[1]} (jax {jax}, Python {platform.python_version()})"
