"""The `shardkit` command; a file for each of its subcommands, which `shardkit_command` lists.

Start with `training.py`, the loop of `shardkit train`. Imports everything; nothing imports it.
"""

from __future__ import annotations

import dis
import inspect
import io
import os
import shutil
import sys
import textwrap
import traceback
from contextlib import redirect_stdout, suppress
from importlib import import_module
from typing import Annotated, Any, NoReturn, Union

from shardkit_command import BENCH, COMMANDS, Command

# The exit codes of every command, beside those of `docs/reference/exit_codes.md` for single ones.
FINE, FOUND, USAGE, UNEXPECTED, INTERRUPTED = 0, 1, 2, 70, 130

_NO_DASHES = "error: launch: the command and its options must come after --. Write for example -- train.py --steps 100."


def perform(command: Command, full: str, words: list[str]) -> int:
    """Runs a command; what goes wrong ends it with one sentence, and with a traceback if SHARDKIT_DEBUG is set.

    Args:
        command: its row of the table.
        full: its name, as "bench comm".
        words: its arguments.
    """
    from shardkit.runtime.cluster.join import finish

    try:
        finish(_run(command, full, words))
    except BrokenPipeError:  # the reader of the pipe has closed it: no mistake
        raise
    except KeyboardInterrupt as error:
        _say("interrupted")
        _end(error, INTERRUPTED)
    except OSError as error:
        if error.filename is None:
            _unexpected(error)
        _say(f"error: {full}: {error.filename} cannot be used ({error.strerror}). Check the path.")
        _end(error, USAGE)
    except Exception as error:
        if not _meant(error):
            _unexpected(error)
        _say(f"error: {error}")
        from shardkit.runtime.drift import DriftError
        from shardkit.runtime.replay import CorruptionError

        _end(error, FOUND if isinstance(error, DriftError | CorruptionError) else USAGE)


def _run(command: Command, full: str, words: list[str]) -> int:
    import tyro

    from shardkit.cli.output import explicit, text_beside_json

    words = explicit(words)
    function = getattr(import_module(command.module), command.name)
    how: Any = {"prog": f"shardkit {full}", "description": _described(command), "config": (tyro.conf.OmitArgPrefixes,)}
    try:
        with text_beside_json(words):
            return int(tyro.cli(function, args=words, **how))
    except SystemExit as ended:
        if ended.code == USAGE and full == "launch" and "--" not in words:
            _say(_NO_DASHES)
        raise


def _described(command: Command) -> str:
    """The docstring of a command's function, and its examples."""
    module = import_module(command.module)
    said = inspect.getdoc(getattr(module, command.name)) or ""
    examples = [f"  {example}\n      {text}" for example, text in module.EXAMPLES.items()]
    # tyro joins lines, except for those that are indented.
    lines = textwrap.wrap(" ".join(said.split()), shutil.get_terminal_size().columns - 1, subsequent_indent="  ")
    return "\n".join([*lines, "", *examples])


def completion(shell: str) -> str:
    """The script that completes commands, options and their values in "bash", "zsh" or "fish", by tyro."""
    import tyro

    def kinds(commands: tuple[Command, ...]) -> Any:
        named = [(import_module(each.module).Options, each) for each in commands]
        return Union[tuple(Annotated[kind, tyro.conf.subcommand(each.name)] for kind, each in named)]  # noqa: UP007

    def bench(command: Any) -> None: ...

    bench.__annotations__["command"] = kinds(BENCH)
    every: Any = {each.name: import_module(each.module).Options for each in COMMANDS} | {"bench": bench}
    out = io.StringIO()
    with redirect_stdout(out), suppress(SystemExit):
        tyro.extras.subcommand_cli_from_dict(
            every,
            prog="shardkit",
            args=["--tyro-print-completion", shell],
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
        )
    return out.getvalue()


def _unexpected(error: BaseException) -> NoReturn:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = f"{type(error).__name__}{': ' + lines[0] if lines else ''}"
    again = "" if _debugging() else " Add --debug to see where it came from."
    _say(f"error: unexpected {said.rstrip('.')}.{again}")
    _end(error, UNEXPECTED)


def _say(text: str) -> None:
    """Prints to standard error, on a terminal with lines that break between words."""
    if sys.stderr is not None and sys.stderr.isatty() and "\n" not in text:
        width = shutil.get_terminal_size().columns
        text = textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
    print(text, file=sys.stderr)


def _end(error: BaseException, code: int) -> NoReturn:
    from shardkit.runtime.channel import client

    if _debugging():
        traceback.print_exception(error)
    client.tell_others(error, code)
    if code == INTERRUPTED:
        # A compilation goes on in jax's threads; Python's own end would take away what they use: a segmentation fault.
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                with suppress(OSError):
                    stream.flush()
        os._exit(code)
    sys.exit(code)


def _debugging() -> bool:
    return os.environ.get("SHARDKIT_DEBUG", "") not in ("", "0")


def _meant(error: Exception) -> bool:
    """Whether shardkit refuses something by this error, in a `raise` of its own; all others are unexpected."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or not isinstance(error, ValueError | RuntimeError | TypeError | ImportError):
        return False
    ours = last.tb_frame.f_globals.get("__name__", "").partition(".")[0] == "shardkit"
    return ours and last.tb_frame.f_code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]
