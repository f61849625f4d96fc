"""The `shardkit` command; a file for each of its subcommands.

Start with `audit.py`. Imports everything; nothing imports it. This file imports no jax, nor does a file of a command
before its function is called: `shardkit --version` and a typing mistake take 0.06 s, the help of a command and a wrong
option 0.3 s, and a command 1.2 s.
"""

from __future__ import annotations

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
from typing import Annotated, Any, NamedTuple, NoReturn, TextIO, Union

import shardkit
from shardkit._arguments.extras import install
from shardkit.cli.errors import is_refusal
from shardkit.cli.words import fill_in_json, split_at_dashes

# The exit codes of every command, beside those of `docs/reference/exit_codes.md` for single ones.
USAGE = 2
UNEXPECTED = 70
INTERRUPTED = 130

_NO_DASHES = "error: launch: the command and its options must come after --. Write for example -- train.py --steps 100."


class Command(NamedTuple):
    """A command: its name, what it does in a line, and the module with its `Options` and a function of its name."""

    name: str
    line: str
    module: str


COMMANDS = (
    Command("launch", "start a job of several processes, or print a manifest", "shardkit.cli.launch"),
    Command("doctor", "check this installation, its devices and every collective", "shardkit.cli.doctor"),
    Command("prove", "prove a kernel or a step against one device", "shardkit.cli.prove"),
    Command("audit", "find a function's collectives, mistakes and waste", "shardkit.cli.audit"),
    Command("plan", "find the layouts of a model that fit a machine", "shardkit.cli.plan"),
    Command("aot", "compile a step for chips that are not attached", "shardkit.cli.aot"),
)
BENCH = (
    Command("comm", "measure collectives, as nccl-tests does", "shardkit.cli.bench.comm"),
    Command("strategies", "measure one model under every plan that fits a mesh", "shardkit.cli.bench.strategies"),
    Command("compare", "find cases that became slower between two files", "shardkit.cli.bench.compare"),
)
_SHELLS = ("bash", "zsh", "fish")
_NEEDS = ("packaging", "rich", "tyro", "yaml")
COMPLETION = """usage: shardkit completion bash|zsh|fish

Print a script that completes commands, options and their values.

  bash    shardkit completion bash > ~/.local/share/bash-completion/completions/shardkit
  zsh     shardkit completion zsh > ~/.zfunc/_shardkit    (with fpath+=~/.zfunc before compinit in ~/.zshrc)
  fish    shardkit completion fish > ~/.config/fish/completions/shardkit.fish"""


def every_command() -> dict[str, Command]:
    """All commands by their full names, such as "bench comm"."""
    commands = {command.name: command for command in COMMANDS}
    for command in BENCH:
        commands[f"bench {command.name}"] = command
    return commands


def main() -> None:
    """Runs `shardkit COMMAND` with the words of `sys.argv`, and exits with its code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else the shell has it ignored
        signal.signal(signal.SIGINT, _end_while_importing)
    try:
        try:
            sys.exit(_main(sys.argv[1:]))
        finally:
            _hear_interrupts()
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:  # the reader of the pipe has closed it: | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at interpreter exit
        sys.exit(128 + signal.SIGPIPE)


def _end_while_importing(*_: Any) -> NoReturn:
    """Ctrl-C before a command has begun: a KeyboardInterrupt inside of jax's imports is lost, or another error."""
    os._exit(INTERRUPTED)


def _hear_interrupts() -> None:
    """From here on Ctrl-C is a KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end_while_importing:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _main(words: list[str]) -> int:
    """Answers what needs no jax, and hands everything else to a command's module; the exit code."""
    words, program = split_at_dashes(words)
    if "--debug" in words:
        os.environ["SHARDKIT_DEBUG"] = "1"
        words = [word for word in words if word != "--debug"]
    wants_help = "-h" in words or "--help" in words
    if words[:1] == ["help"]:
        wants_help = True
        words = words[1:]
    elif _asks_for_version(words):
        print(_version())
        return 0
    names = [word for word in words if word not in ("-h", "--help")]
    if names[:1] == ["completion"]:
        return _complete(names, wants_help)
    name_length = 1
    if names[:1] == ["bench"]:  # bench comm
        name_length = 2
    full = " ".join(names[:name_length])
    command = every_command().get(full)
    if command is None:
        return _answer_without_command(names, wants_help)
    if not _has_packages():
        return USAGE
    options = words[name_length:]
    if wants_help:
        options = ["--help"]
    return perform(command, full, options + program)


def _asks_for_version(words: list[str]) -> bool:
    """Whether `--version` comes before any request for help."""
    for word in words:
        if word in ("-h", "--help", "--version"):
            return word == "--version"
    return False


def _has_packages() -> bool:
    """Whether the packages of the extra [cli] are installed; says how to install them if not."""
    if all(find_spec(name) for name in _NEEDS):
        return True
    print(f"shardkit: the command needs the extra [cli]; install it with: {install('cli')}", file=sys.stderr)
    return False


def _complete(names: list[str], wants_help: bool) -> int:
    """Prints the script of `completion SHELL`, or its help; the exit code."""
    if wants_help:
        print(COMPLETION)
        return 0
    if len(names) != 2 or names[1] not in _SHELLS:
        print(COMPLETION, file=sys.stderr)
        return USAGE
    if not _has_packages():
        return USAGE
    print(completion(names[1]))
    return 0


def _answer_without_command(words: list[str], wants_help: bool) -> int:
    """What to say where no command is named: the list of commands, or a suggestion."""
    prog = "shardkit"
    names = [command.name for command in COMMANDS]
    names += ["bench", "completion"]
    text = _list_commands()
    if words[:1] == ["bench"]:
        prog = "shardkit bench"
        names = [command.name for command in BENCH]
        text = _list_bench()
        words = words[1:]
    if not words and wants_help:
        print(text)
        return 0
    if not words:
        print(text, file=sys.stderr)
        return USAGE
    hint = f"{prog} --help lists the commands."
    similar_names = get_close_matches(words[0].lower(), names, n=1, cutoff=0.5)
    if similar_names:
        hint = f"did you mean {similar_names[0]!r}?"
    print(f"error: {prog} has no command {words[0]!r}; {hint}", file=sys.stderr)
    return USAGE


_COMMANDS_HELP = """\
usage: shardkit COMMAND [OPTIONS]

Explicit collectives for JAX.

commands
{commands}

shardkit COMMAND --help shows the options and examples of a command.
To begin: shardkit doctor.

options
  -h, --help        show this help
  --version         the versions of shardkit, jax and Python
  --debug           with any command: show the traceback of an error (also SHARDKIT_DEBUG=1)

exit codes: 0 fine, 1 findings or a failed check, 2 wrong usage, 70 an unexpected error, 130 Ctrl-C"""
_BENCH_HELP = """\
usage: shardkit bench COMMAND [OPTIONS]

Measure communication and plans, and compare measurements.

commands
{commands}

shardkit bench COMMAND --help shows the options and examples of a command."""


def _list_commands() -> str:
    rows = [(command.name, command.line) for command in COMMANDS]
    rows.append(("bench ...", "measure communication and plans, and compare measurements"))
    rows.append(("completion SHELL", "print the completion script of bash, zsh or fish"))
    return _COMMANDS_HELP.format(commands=_align(rows))


def _list_bench() -> str:
    rows = [(command.name, command.line) for command in BENCH]
    return _BENCH_HELP.format(commands=_align(rows))


def _align(rows: list[tuple[str, str]]) -> str:
    return "\n".join(f"  {name:18}{line}" for name, line in rows)


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
    try:
        code = _run(command, full, words)  # help, and a wrong option, end it here
        from shardkit.runtime.cluster.join import finish

        finish(code)
    except BrokenPipeError:  # the reader of the pipe has closed it: no mistake
        raise
    except KeyboardInterrupt as error:
        _say("interrupted")
        _end(error, INTERRUPTED)
    except OSError as error:
        # Without a file it is not a path that the user could check, but for example a socket.
        if error.filename is None:
            _end_unexpected(error)
        _say(f"error: {full}: {error.filename} cannot be used ({error.strerror}). Check the path.")
        _end(error, USAGE)
    except Exception as error:
        if not is_refusal(error):
            _end_unexpected(error)
        _say(f"error: {error}")
        _end(error, USAGE)


def _run(command: Command, full: str, words: list[str]) -> int:
    """Reads the options, which needs no jax, then imports it and calls the command's function; the exit code."""
    import tyro

    from shardkit.cli.output import text_beside_json

    module = import_module(command.module)
    words = fill_in_json(words)
    try:
        options = tyro.cli(
            module.Options,
            args=words,
            prog=f"shardkit {full}",
            description=_describe(command),
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone),
        )
    except SystemExit as ended:
        if ended.code == USAGE and full == "launch" and "--" not in words:
            _say(_NO_DASHES)
        raise
    # jax is imported in this order, after the options are right and before Ctrl-C is heard: a KeyboardInterrupt inside
    # of its imports is lost, or another error, and whoever asks for help waits for none of it.
    _import_jax()
    _hear_interrupts()
    with text_beside_json(words):
        return int(getattr(module, command.name)(options))


def _import_jax() -> None:
    """Imports jax, which takes a second, and says so on a terminal."""
    is_terminal = _is_terminal(sys.stdout) and _is_terminal(sys.stderr)
    if is_terminal:
        print("importing jax", end="", file=sys.stderr, flush=True)
    try:
        import_module("jax")
    finally:
        if is_terminal:
            # To the start of the line, and erase it.
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _is_terminal(stream: TextIO | None) -> bool:
    """Whether somebody reads a stream of this process on a terminal; None: it is closed."""
    return stream is not None and stream.isatty()


def _describe(command: Command) -> str:
    """The docstring of a command's function, and its examples."""
    module = import_module(command.module)
    text = inspect.getdoc(getattr(module, command.name)) or ""
    # tyro joins lines, except for those that are indented.
    width = shutil.get_terminal_size().columns - 1
    lines = textwrap.wrap(" ".join(text.split()), width, subsequent_indent="  ")
    lines.append("")
    for example, meaning in module.EXAMPLES.items():
        lines += [f"  {example}", f"      {meaning}"]
    return "\n".join(lines)


def completion(shell: str) -> str:
    """The script that completes commands, options and their values in "bash", "zsh" or "fish", by tyro."""
    import tyro

    def make_subcommands(commands: tuple[Command, ...]) -> Any:
        subcommands = []
        for command in commands:
            options = import_module(command.module).Options
            subcommands.append(Annotated[options, tyro.conf.subcommand(command.name)])
        return Union[tuple(subcommands)]  # noqa: UP007

    def bench(command: Any) -> None: ...

    # tyro reads subcommands from the annotation of a parameter. These are known only when this runs.
    bench.__annotations__["command"] = make_subcommands(BENCH)
    tree: dict[str, Any] = {command.name: import_module(command.module).Options for command in COMMANDS}
    tree["bench"] = bench
    out = io.StringIO()
    # tyro prints the script and exits, as it does for a user.
    with redirect_stdout(out), suppress(SystemExit):
        tyro.extras.subcommand_cli_from_dict(
            tree,
            prog="shardkit",
            args=["--tyro-print-completion", shell],
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes, tyro.conf.DisallowNone),
        )
    return out.getvalue()


def _end_unexpected(error: BaseException) -> NoReturn:
    """Says what no line of shardkit refuses, in the first line of the error."""
    text = type(error).__name__
    lines = str(error).strip().splitlines()
    if lines:
        text += f": {lines[0].strip()}"
    sentence = f"error: unexpected {text.rstrip('.')}."
    if not _is_debugging():
        sentence += " Add --debug to see where it came from."
    _say(sentence)
    _end(error, UNEXPECTED)


def _say(text: str) -> None:
    """Prints to standard error, on a terminal with lines that break between words."""
    if _is_terminal(sys.stderr) and "\n" not in text:
        width = shutil.get_terminal_size().columns
        text = textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
    print(text, file=sys.stderr)


def _end(error: BaseException, code: int) -> NoReturn:
    """Ends the command, and tells the other processes of its job why."""
    from shardkit.runtime.channel import client

    if _is_debugging():
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


def _is_debugging() -> bool:
    return os.environ.get("SHARDKIT_DEBUG", "") not in ("", "0")
