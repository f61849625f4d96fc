"""What `shardkit` answers before it imports jax: version, help, suggestions, completion; and the ends of a command."""

import linecache
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import tyro

import shardkit as sk
import shardkit_command
from shardkit import cli
from shardkit.bench.comm import IMPLS, REDOPS
from shardkit.bench.operations import DTYPES, OPERATIONS
from shardkit.runtime.drift import DriftError
from shardkit.runtime.replay import CorruptionError
from shardkit_command import table
from shardkit_command.declared import declared
from shardkit_command.helptext import of_command

EVERY = [(command, command.name) for command in table.COMMANDS]
EVERY += [(command, f"{group} {command.name}") for group, (rows, _) in table.GROUPS.items() for command in rows]


@pytest.fixture
def shardkit(monkeypatch, capsys):
    """Runs the command here: its exit code, standard output and standard error."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["shardkit", *words])
        with pytest.raises(SystemExit) as end:
            shardkit_command.main()
        return (end.value.code or 0, *capsys.readouterr())

    return run


@pytest.mark.check
def test_version_help_and_completion_import_no_jax():
    """Importing jax takes seconds, also for a typing mistake."""
    code = (
        "import sys\nfrom shardkit_command import main\n"
        "for words in ['--version'], ['--help'], ['train', '--help'], ['tain'], ['completion', 'bash']:\n"
        "    sys.argv = ['shardkit', *words]\n"
        "    try: main()\n"
        "    except SystemExit: pass\n"
        "print(sorted({'jax', 'numpy', 'tyro', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\n[]\n")


@pytest.mark.check
def test_version(shardkit):
    code, out, _ = shardkit("--version")
    assert code == 0 and out.startswith(f"shardkit {sk.__version__} (jax ") and "Python 3." in out


@pytest.mark.check
@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("tain",), "error: shardkit has no command 'tain'; did you mean 'train'?\n"),
        (("bench", "strategy"), "error: shardkit bench has no command 'strategy'; did you mean 'strategies'?\n"),
        (("--steps", "5"), "error: shardkit has no command '--steps'; shardkit --help lists the commands.\n"),
        (("completion", "csh"), None),
        ((), None),
    ],
)
def test_a_wrong_command_is_wrong_usage(words, error, shardkit):
    code, out, err = shardkit(*words)
    assert (code, out) == (2, "") and (err == error if error else err.startswith("usage: shardkit"))


@pytest.mark.check
def test_without_its_extra_the_command_names_the_remedy(shardkit, monkeypatch):
    monkeypatch.setattr(shardkit_command, "find_spec", lambda name: None if name == "tyro" else name)
    said = "shardkit: the command needs the extra [cli]; install it with: pip install 'shardkit[cli]'\n"
    assert shardkit("train", "data=2") == (2, "", said)
    assert shardkit("--version")[0] == 0


@pytest.mark.check
@pytest.mark.parametrize(("command", "full"), EVERY, ids=[full for _, full in EVERY])
def test_help_has_every_option_and_fits_a_screen(command, full, monkeypatch, capsys):
    """The help is read from the source of the options: a type that it cannot read would hide one."""
    monkeypatch.setenv("COLUMNS", "100")
    function = getattr(import_module(command.module), command.name)
    with pytest.raises(SystemExit):
        tyro.cli(function, args=["--help"], config=(tyro.conf.OmitArgPrefixes,))
    rows = re.findall(r"^[^-\w\n]{0,4}(--?[a-z].*)", capsys.readouterr().out, re.M)
    real = {word.split()[0] for row in rows for word in row.split(", ") if word.startswith("-")}
    said = declared(command.module, command.name)
    words = {word for option in said.options for word in option.words}
    assert words <= real
    negated = {word.replace("--no-", "--") if "--no-" in word else word.replace("--", "--no-") for word in words}
    assert real - words - negated == {"-h", "--help"}
    shown = of_command(command, full)
    assert all(option.text for option in said.options)
    grouped = {name for names in said.groups.values() for name in names}
    assert not grouped or grouped == {option.name for option in said.options if option.words}
    assert said.examples
    assert all(word in shown for word in words)
    assert max(map(len, shown.splitlines())) <= 100
    assert shown.count("\n") < (115 if command.name == "train" else 50)
    assert not any(wrong in shown for wrong in ("{None}", "(default )", "object at", "Annotated"))


@pytest.mark.check
def test_lists_in_the_help_of_bench_comm_are_complete():
    text = {option.name: option.text for option in declared("shardkit.cli.bench.comm", "comm").options}
    assert ", ".join(OPERATIONS) in " ".join(text["op"].split())
    ways = dict.fromkeys(name for each in OPERATIONS.values() for name in each.ways)
    assert f"by default {' and '.join(IMPLS)}: {', '.join(ways)}." in " ".join(text["impl"].split())
    assert ", ".join(DTYPES) in text["dtype"] and ", ".join(REDOPS) in text["redop"]


@pytest.mark.check
def test_examples_in_help_name_options_that_are_there():
    for command, full in EVERY:
        said = declared(command.module, command.name)
        words = {word for option in said.options for word in option.words}
        for example, _ in said.examples:
            assert example.startswith(f"shardkit {full}")
            own = example.partition(" -- ")[0].split()
            assert {word for word in own if word.startswith("-")} <= words, example


@pytest.mark.check
@pytest.mark.parametrize("shell", table.SHELLS)
def test_completion_scripts_hold_every_command_and_option(shell, shardkit):
    code, out, _ = shardkit("completion", shell)
    assert code == 0
    for command, _ in EVERY:
        assert command.name in out
        for option in declared(command.module, command.name).options:
            assert all(word.lstrip("-") in out for word in option.words)


@pytest.mark.check
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("shardkit tr", {"train"}),
        ("shardkit train --kv", {"--kv-heads"}),
        ("shardkit train --precision b", {"bf16"}),
        ("shardkit bench c", {"comm", "compare"}),
        ("shardkit bench strategies --mod", {"--model"}),
        ("shardkit completion ", {"bash", "zsh", "fish"}),
    ],
)
def test_bash_completes(line, offered, shardkit, tmp_path):
    _, script, _ = shardkit("completion", "bash")
    (tmp_path / "script").write_text(script)
    words = line.split(" ")
    code = f"source {tmp_path / 'script'}; COMP_WORDS=({' '.join(word or chr(39) * 2 for word in words)}); "
    code += f"COMP_CWORD={len(words) - 1}; _shardkit; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == offered and not done.stderr


def ends(error, monkeypatch):
    """The exit code of a command that raises an error."""

    def raising(*_):
        raise error

    monkeypatch.setattr(cli, "_run", raising)
    with pytest.raises(SystemExit) as end:
        cli.perform(table.COMMANDS[0], "train", [])
    return end.value.code


@pytest.mark.check
@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (
            FileNotFoundError(2, "No such file or directory", "a.json"),
            2,
            "error: train: a.json cannot be used (No such file or directory). Check the path.\n",
        ),
        (
            ZeroDivisionError("division\nby zero"),
            70,
            "error: unexpected ZeroDivisionError: division. Add --debug to see where it came from.\n",
        ),
        (ValueError("ours"), 70, "error: unexpected ValueError: ours. Add --debug to see where it came from.\n"),
    ],
)
def test_a_command_ends_with_one_sentence_and_a_code(error, code, said, monkeypatch, capsys):
    assert ends(error, monkeypatch) == code
    assert capsys.readouterr().err == said


REFUSING = "def refuse(error):\n    raise error\n"


@pytest.mark.check
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("no"), 2),
        (TypeError("no"), 2),
        (ImportError("no"), 2),
        (DriftError("no", []), 1),
        (CorruptionError("no", []), 1),
        (KeyError("no"), 70),
    ],
)
def test_what_shardkit_refuses_is_wrong_usage_and_drift_a_failed_check(error, code, monkeypatch, capsys):
    """An error that is raised by a line of shardkit's own."""
    file, names = str(Path(cli.__file__).with_name("refusing.py")), {}
    monkeypatch.setitem(linecache.cache, file, (len(REFUSING), None, REFUSING.splitlines(True), file))
    exec(compile(REFUSING, file, "exec"), names)
    monkeypatch.setattr(cli, "_run", lambda *_: names["refuse"](error))
    with pytest.raises(SystemExit) as end:
        cli.perform(table.COMMANDS[0], "train", [])
    assert end.value.code == code
    assert ("unexpected" in capsys.readouterr().err) == (code == 70)


@pytest.mark.check
def test_debug_shows_where_an_error_came_from(shardkit, monkeypatch, capsys):
    monkeypatch.setenv("SHARDKIT_DEBUG", "0")
    error = ZeroDivisionError("division by zero")
    assert ends(error, monkeypatch) == 70 and "Traceback" not in capsys.readouterr().err
    code, _, err = shardkit("--debug", "train", "data=2")
    assert code == 70 and "Traceback (most recent call last)" in err and Path(__file__).name in err
