"""What `shardkit` answers before it imports jax; help, completion, and the ends of a command."""

import ast
import inspect
import io
import os
import re
import signal
import subprocess
import sys
import typing
from importlib import import_module
from pathlib import Path

import pytest

import shardkit as sk
from shardkit import cli
from shardkit.analysis.judge import GROWTH, SMALL
from shardkit.bench.operations import DTYPES, OPERATIONS
from shardkit.bench.sweep import IMPLS, REDOPS
from shardkit.bench.workload import OptimizerName
from shardkit.cli import output, plan
from shardkit.jobs.manifests import Kind
from shardkit.meshes.simulated import offer_cpu_devices
from shardkit.planner.search import AXES
from support.commands import command, environment
from support.refusals import value_error

pytestmark = pytest.mark.check
EVERY = cli.every_command()
CODES = [(ValueError("no"), 2), (TypeError("no"), 2), (ImportError("no"), 2)]
CODES += [(KeyError("no"), 70), (None, 70)]


@pytest.fixture
def shardkit(monkeypatch, capsys):
    """Runs the command here: its exit code, standard output and standard error."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["shardkit", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return (end.value.code or 0, *capsys.readouterr())

    return run


def test_the_version_the_list_of_commands_and_a_mistake_import_no_jax():
    """Importing jax takes a second and more, also for a typing mistake."""
    code = (
        "import sys\nfrom shardkit.cli import main\n"
        "for words in ['--version'], ['--help'], ['bench', '--help'], ['lanch'], ['completion', '--help']:\n"
        "    sys.argv = ['shardkit', *words]\n"
        "    try: main()\n"
        "    except SystemExit: pass\n"
        "print(sorted({'jax', 'numpy', 'tyro', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\n[]\n")


def test_help_of_a_command_and_a_wrong_option_import_no_jax():
    """They took two seconds; a file of a command that imports something of `sk` at its head would make them."""
    code = (
        "import sys\nfrom shardkit import cli\n"
        "for full in cli.every_command():\n"
        "    for option in '--help', '--no-such-option':\n"
        "        sys.argv = ['shardkit', *full.split(), option]\n"
        "        try: cli.main()\n"
        "        except SystemExit: pass\n"
        "print(sorted({'jax', 'numpy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\n[]\n") and "usage: shardkit bench compare" in done.stdout
    assert "None" not in done.stdout and "(default: )" not in done.stdout


def test_defaults_and_choices_that_help_needs_without_jax():
    """They stand twice: in the file of a command, and where they are used."""
    options = {full: import_module(each.module).Options for full, each in EVERY.items()}
    audit_defaults = {name: option.default for name, option in inspect.signature(options["audit"]).parameters.items()}
    assert (audit_defaults["growth"], audit_defaults["small"]) == (GROWTH, SMALL)
    assert plan.AXES == AXES
    choices = {
        "launch": ("render", Kind),
        "bench strategies": ("optimizer", OptimizerName),
    }
    for full, (name, expected) in choices.items():
        hint = typing.get_type_hints(options[full])[name]
        literal = next((each for each in typing.get_args(hint) if typing.get_origin(each) is typing.Literal), hint)
        assert literal == expected


def test_version(shardkit):
    code, out, _ = shardkit("--version")
    assert code == 0 and out.startswith(f"shardkit {sk.__version__} (jax ") and "Python 3." in out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("lanch",), "error: shardkit has no command 'lanch'; did you mean 'launch'?\n"),
        (("bench", "strategy"), "error: shardkit bench has no command 'strategy'; did you mean 'strategies'?\n"),
        (("--steps", "5"), "error: shardkit has no command '--steps'; shardkit --help lists the commands.\n"),
        (("completion", "csh"), None),
        ((), None),
    ],
)
def test_a_wrong_command_is_wrong_usage(words, error, shardkit):
    code, out, err = shardkit(*words)
    assert (code, out) == (2, "") and (err == error if error else err.startswith("usage: shardkit"))


def test_without_its_extra_the_command_names_the_remedy(shardkit, monkeypatch):
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "tyro" else name)
    said = "shardkit: the command needs the extra [cli]; install it with: pip install 'shardkit[cli]'\n"
    assert shardkit("audit", "a.py:make") == (2, "", said)
    assert shardkit("--version")[0] == 0


@pytest.mark.parametrize("full", EVERY)
def test_help_shows_what_a_command_does_and_examples(full, monkeypatch, shardkit):
    monkeypatch.setenv("COLUMNS", "100")
    code, shown, _ = shardkit(*full.split(), "--help")
    assert code == 0 and shown.startswith(f"usage: shardkit {full} ")
    module = import_module(EVERY[full].module)
    assert getattr(module, EVERY[full].name).__doc__.split(".")[0] in " ".join(shown.split())
    assert all(f"\n  {example}\n" in shown for example in module.EXAMPLES)


def test_every_command_has_json_a_text_for_each_option_and_those_of_its_examples(shardkit):
    """Help has the same texts. A field without one, or an example whose option was renamed, is seen by nothing else."""
    script = shardkit("completion", "bash")[1]
    tree = ast.literal_eval(re.search(r"^COMPLETION_SPEC = (.*)$", script, re.M)[1])
    for full, each in EVERY.items():
        node = tree
        for word in full.split():
            node = node["subcommands"][word]
        texts = {flag: option["description"] for option in node["options"] for flag in option["flags"]}
        assert "--json" in texts, full
        for flag, text in texts.items():
            assert re.sub(r"^[^•]*• |\(.*", "", text).strip(), f"{full} {flag}"
        for example in import_module(each.module).EXAMPLES:
            assert example.startswith(f"shardkit {full}")
            words = {word for word in example.partition(" -- ")[0].split() if word.startswith("-")}
            assert words <= texts.keys(), example


def test_lists_in_the_help_of_bench_comm_are_complete(monkeypatch, shardkit):
    monkeypatch.setenv("COLUMNS", "100")
    text = " ".join(re.sub("[│╭╰─╮╯]", " ", shardkit("bench", "comm", "--help")[1]).split())
    ways = dict.fromkeys(name for each in OPERATIONS.values() for name in each.ways)
    for listed in (OPERATIONS, ways, DTYPES, REDOPS):
        assert ", ".join(listed) in text
    assert f"by default {' and '.join(IMPLS)}: " in text


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_complete(shell, shardkit):
    code, out, _ = shardkit("completion", shell)
    assert code == 0 and shell in out and "--topology" in out and "strategies" in out


def test_bash_completes_without_jax(shardkit, tmp_path):
    """Otherwise each press of the key would take a second."""
    (tmp_path / "jax.py").write_text("raise SystemExit('jax was imported')")
    (tmp_path / "script").write_text(shardkit("completion", "bash")[1])
    asked = {
        "shardkit la": {"launch"},
        "shardkit audit --expl": {"--explain"},
        "shardkit launch --render sl": {"slurm"},
        "shardkit bench com": {"comm", "compare"},
        "shardkit bench comm --cal": {"--calls"},
    }
    lines = [f"source {tmp_path / 'script'}", "words=($(complete -p shardkit))"]
    for line in asked:
        words = line.split(" ")
        lines += [f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; COMPREPLY=(); ${{words[2]}}"]
        lines += ["echo ${COMPREPLY[@]}"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "LC_ALL": "C"}  # bash warns of a locale that is not here
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True, env=environment)
    assert [set(line.split()) for line in done.stdout.splitlines()] == list(asked.values()) and not done.stderr


class Left(SystemExit):
    """What `os._exit` does, as far as a test can bear it."""


def ends(error, monkeypatch, how=SystemExit):
    """The exit code of a command that raises an error."""

    def raising(*_):
        raise error

    def leaving(code):
        raise Left(code)

    monkeypatch.setattr(cli, "_run", raising)
    monkeypatch.setattr(cli.os, "_exit", leaving)
    with pytest.raises(how) as end:
        cli.perform(cli.COMMANDS[0], "launch", [])
    return end.value.code


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (
            FileNotFoundError(2, "No such file or directory", "a.json"),
            2,
            "error: launch: a.json cannot be used (No such file or directory). Check the path.\n",
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


WRONG = {
    "aot {}:raises --topology v5e:2x4": "aot: {}:raises must return a step and its arguments; it raises "
    "ZeroDivisionError: division by zero. Run it with python to see the traceback.",
    "audit {}:fails --args i32[]": "audit: the step must be traced with these arguments; it raises "
    "ZeroDivisionError: integer division or modulo by zero. Check the arguments, and the mesh context "
    "that the step needs.",
    "bench comm data8": "bench comm: the mesh must be given as AXIS=SIZE; got 'data8'. Write for example data=8.",
    "bench comm dta=8": "bench comm: the axis must be one of 'data', 'fsdp', 'expert', 'context', 'zero1', 'zero2', "
    "'ulysses', 'stage', 'model', 'tensor'; got 'dta'. Write for example data=8.",
    "bench comm data=2 data=4": "bench comm: axis 'data' must be given once; got 'data=2 data=4'. Remove one of the "
    "two.",
}


# All of them were unexpected, and ended with 70, or went on for ever; a negative number was taken for none.
@pytest.mark.parametrize(("words", "said"), WRONG.items())
def test_a_wrong_command_line_is_one_sentence(words, said, tmp_path, inside):
    program = tmp_path / "program.py"
    program.write_text("def raises():\n    return 1 / 0\n\ndef fails(x):\n    return x * (1 // 0)\n")
    done = inside(*words.replace("{}", str(program)).split(), code=2)
    assert done.stderr == f"error: {said.replace('{}', str(program))}\n"


@pytest.mark.parametrize("number", [0, -3, 10**8])
def test_devices_that_cannot_be_simulated(number):
    with value_error(
        f"simulate_devices: the number of devices must be from 1 to 65,536; got {number}. Pass for example 8."
    ):
        offer_cpu_devices(number)


@pytest.mark.parametrize(("error", "code"), CODES)
def test_what_shardkit_refuses_is_wrong_usage(error, code, monkeypatch, capsys):
    """An error that is raised by a line of shardkit's own; one that Python raises there is unexpected."""
    names = {"__name__": "shardkit.cli.refusing"}
    exec("def refuse(error):\n    raise error\n", names)
    exec("def mistake(error):\n    int('one')\n", names)
    monkeypatch.setattr(cli, "_run", lambda *_: names["mistake" if error is None else "refuse"](error))
    with pytest.raises(SystemExit) as end:
        cli.perform(cli.COMMANDS[0], "launch", [])
    assert end.value.code == code
    assert ("unexpected" in capsys.readouterr().err) == (code == 70)


def test_ctrl_c_ends_no_interpreter_under_a_compilation(monkeypatch, capfd):
    """Python's own end frees what jax's threads still compile with: a segmentation fault, and 139 for 130."""
    with open(1, "w", closefd=False) as held:
        monkeypatch.setattr(sys, "stdout", held)
        held.write("step 1\n")  # in the stream until it is flushed
        assert ends(KeyboardInterrupt(), monkeypatch, how=Left) == 130
        said = capfd.readouterr()
    assert said == ("step 1\n", "interrupted\n")


def test_ctrl_c_while_a_command_is_imported_says_nothing():
    """A KeyboardInterrupt inside of jax's imports was a traceback, or lost."""
    here = "import os, signal, sys\nfrom shardkit import cli\nsys.argv = ['shardkit', 'doctor']\n"
    here += "cli.find_spec = lambda name: os.kill(os.getpid(), signal.SIGINT)\ncli.main()"
    done = subprocess.run([sys.executable, "-c", here], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_closed_pipe_is_not_rich_s_to_end(monkeypatch):
    """As in `shardkit doctor | head -1`: rich ends the process with 1, where 141 is documented."""

    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    with pytest.raises(BrokenPipeError):
        output.console().print("a line")


def test_help_that_nobody_reads_to_its_end():
    """As in `shardkit --help | head`; what Python holds back it would write again at its end, and complain."""
    buffered = environment() | {"PYTHONUNBUFFERED": ""}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command("--help"), env=buffered, **pipes) as started:
        started.stdout.close()
        assert (started.wait(timeout=600), started.stderr.read()) == (128 + signal.SIGPIPE, b"")


def test_debug_shows_where_an_error_came_from(shardkit, monkeypatch, capsys):
    monkeypatch.setenv("SHARDKIT_DEBUG", "0")
    error = ZeroDivisionError("division by zero")
    assert ends(error, monkeypatch) == 70 and "Traceback" not in capsys.readouterr().err
    code, _, err = shardkit("--debug", "doctor")
    assert code == 70 and "Traceback (most recent call last)" in err and Path(__file__).name in err
