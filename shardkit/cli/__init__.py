"""The `shardkit` command; a file for each of its subcommands.

Start with `audit.py`. Imports everything; nothing imports it. This file imports no jax: `shardkit --version` and a
typing mistake take 0.06 s, a command 1.2 s.
"""

from __future__ import annotations

import dis
import inspect
import io
import os
import platform
import shutil
import signal
import sys
import textwrap
import traceback
from contextlib import redirect_stdout, suppress
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any, NamedTuple, NoReturn, Union

import shardkit
from shardkit._arguments.extras import install

# The exit codes of every command, beside those of `docs/reference/exit_codes.md` for single ones.
USAGE, UNEXPECTED, INTERRUPTED = 2, 70, 130

_NO_DASHES = "error: launch: the command and its options must come after --. Write for example -- train.py --steps 100."


class Command(NamedTuple):
    """A command: its name, what it does in a line, and the module with its `Options` and a function of its name."""

    name: str
    line: str
    module: str


COMMANDS = (
    Command("launch", "start a job of several processes, or print a manifest", "shardkit.cli.launch"),
    Command("doctor", "check this installation, its devices and every collective", "shardkit.cli.doctor"),
    Command("prove", "a kernel or a step against one device, for all inputs", "shardkit.cli.prove"),
    Command("audit", "what a function sends, and what hangs, is wrong or wasted", "shardkit.cli.audit"),
    Command("plan", "the layouts of a model that fit a machine, and their code", "shardkit.cli.plan"),
    Command("aot", "compile a step for chips that are not attached", "shardkit.cli.aot"),
)
BENCH = (
    Command("comm", "collectives, as nccl-tests measures them", "shardkit.cli.bench.comm"),
    Command("strategies", "one model under every plan that fits a mesh", "shardkit.cli.bench.strategies"),
    Command("compare", "what became slower between two files of results", "shardkit.cli.bench.compare"),
)
_BENCH = "measure communication and plans, and compare measurements"
_SHELLS = ("bash", "zsh", "fish")
_NEEDS = ("packaging", "rich", "tyro", "yaml")
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
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else the shell has it ignored
        signal.signal(signal.SIGINT, _end_while_importing)
    try:
        try:
            sys.exit(_main(sys.argv[1:]))
        finally:
            _imported()
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:  # the reader of the pipe has closed it: | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at interpreter exit
        sys.exit(128 + signal.SIGPIPE)


def _end_while_importing(*_: Any) -> NoReturn:
    """Ctrl-C before a command has begun: a KeyboardInterrupt inside of jax's imports is lost, or another error."""
    os._exit(INTERRUPTED)


def _imported() -> None:
    """From here on Ctrl-C is a KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end_while_importing:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _main(words: list[str]) -> int:
    """Answers what needs no jax, and hands everything else to a command's module; the exit code."""
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
        return 0 if asks else USAGE
    if command is None and not completes:
        return _without_command(named, asks is not None)
    if not all(map(find_spec, _NEEDS)):
        print(f"shardkit: the command needs the extra [cli]; install it with: {install('cli')}", file=sys.stderr)
        return 2
    if command is None:
        print(completion(named[1]))
        return 0
    after = ["--help"] if asks else own[len(full.split()) :]
    return perform(command, full, after + words[end:])


def _without_command(words: list[str], asks: bool) -> int:
    """What to say where no command is named: the list of commands, or a suggestion."""
    group = "bench" if words[:1] == ["bench"] else ""
    rest = words[1:] if group else words
    prog = f"shardkit {group}".strip()
    if not rest:
        print(_commands(prog, BENCH if group else COMMANDS), file=sys.stdout if asks else sys.stderr)
        return 0 if asks else USAGE
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
            "To begin: shardkit doctor.",
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
    """The versions in a line, without importing jax."""
    from importlib import metadata  # which takes a third of the time to this line

    try:
        jax = metadata.version("jax")
    except metadata.PackageNotFoundError:
        jax = "missing"
    return f"shardkit {shardkit.__version__} (jax {jax}, Python {platform.python_version()})"


def perform(command: Command, full: str, words: list[str]) -> int:
    """Runs a command; what goes wrong ends it with one sentence, and with a traceback if SHARDKIT_DEBUG is set."""
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
        _end(error, USAGE)


def _run(command: Command, full: str, words: list[str]) -> int:
    import tyro

    from shardkit.cli.output import explicit, text_beside_json

    words = explicit(words)
    shows = sys.stdout is not None and sys.stdout.isatty() and sys.stderr is not None and sys.stderr.isatty()
    if shows:  # it takes seconds
        print("importing jax", end="", file=sys.stderr, flush=True)
    try:
        function = getattr(import_module(command.module), command.name)
    finally:
        if shows:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    _imported()
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
