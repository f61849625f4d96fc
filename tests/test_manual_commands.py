"""The commands on the manual's pages run as a reader would run them, and print what stands below them."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.commands import environment

ROOT = Path(__file__).parents[1]
FENCED = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.S | re.M)
# A reader's shell finds the command that is installed; here it is that of this clone.
SHELL = f'shardkit() {{ "{sys.executable}" -m shardkit "$@"; }}; python() {{ "{sys.executable}" "$@"; }}\n'
# jax's own lines, which pages leave out; those of gloo are of several threads, and may be mixed.
CHATTER = re.compile(r"^(\[\d+\] )?(.*(\[Gloo\]|is connected to|peer ranks)|[EWI]\d{4} ).*\n", re.M)


def commands(page):
    """Files that a page names, and its commands with what they print; a block without a command is of another job."""
    fenced = FENCED.findall(page.read_text())
    files = {title: text for kind, title, text in fenced if title}
    command = re.compile(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", re.M)
    return files, [each for kind, _, text in fenced if kind == "console" for each in command.findall(text)]


def alike(shown, printed):
    """Whether both say the same: times differ between machines, and a line `...` stands for any lines."""
    pieces = [re.escape(piece) for piece in re.split(r"^ *\.\.\.\n", shown, flags=re.M)]
    pattern = re.sub(r"\d+(\\\.\d+)?(\\? )?s\b", r"[0-9.,]+ ?s", r"(?:.*\n)*".join(pieces))
    printed = re.sub(r" \(\d+:\d\d:\d\d\)$", "", printed, flags=re.M)  # pytest's, of a run of more than a minute
    printed = re.sub(r" +\[ *\d+%\]$", "", printed, flags=re.M)  # pytest's, at the right edge of the terminal
    return re.fullmatch(pattern, CHATTER.sub("", printed))


# Other pages show commands that install, compile for hours or measure this machine.
NAMES = [f"howto/{name}.md" for name in ("benchmark_my_mesh", "faults", "many_processes", "resume_elsewhere")]
NAMES += ["howto/restart_by_itself.md", "howto/which_engine.md", "howto/test_a_collective.md"]
NEEDS = {"submit.py": "submitit", "examples.ray_train": "ray"}  # commands that need a package which no extra has


@pytest.mark.deep
@pytest.mark.parametrize("name", NAMES)
def test_the_commands_of_a_page_print_what_it_says(name, tmp_path):
    """A page is one session in one folder, in which the files that it shows lie."""
    files, session = commands(ROOT / "docs" / name)
    assert session
    for title, text in files.items():
        (tmp_path / title).write_text(text)
    # Ray would store a token in the home folder, and send what was used.
    ray = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    variables = environment() | {"PYTHONPATH": str(ROOT)} | ray
    for command, shown in session:
        if any(word in command and find_spec(package) is None for word, package in NEEDS.items()):
            continue
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": 300}
        done = subprocess.run(["bash", "-c", SHELL + command], cwd=tmp_path, env=variables, check=False, **options)
        assert alike(shown, done.stdout), f"$ {command}\n{done.stdout}"


@pytest.mark.check
def test_a_block_without_a_command_is_no_output_of_the_one_before(tmp_path):
    """It alone finds what a page quotes of another job compared with what its last command printed."""
    page = tmp_path / "page.md"
    page.write_text("```console\n$ a \\\n  b\nsaid\n$ c\n```\n\nElsewhere:\n\n```console\nrejected\n```\n")
    assert commands(page) == ({}, [("a \\\n  b", "said\n"), ("c", "")])


@pytest.mark.check
def test_what_a_command_prints_is_compared():
    """Another word is found; another time, and lines that the page leaves out, are not."""
    shown = "mesh a=2 (cpu)\n...\ndone: 5 steps, 3.0 s\n"
    assert alike(shown, "mesh a=2 (cpu)\n[Gloo] Rank 0\nstep 1\nstep 2\ndone: 5 steps, 12 s\n")
    assert alike(shown, "mesh a=2 (cpu)\nstep 1\ndone: 5 steps, 62.3s (0:01:02)\n")
    assert alike("..\n2 passed in 5.1s\n", "..           [100%]\n2 passed in 3.05s\n")
    assert not alike(shown, "mesh a=2 (gpu)\ndone: 5 steps, 12 s\n")
    assert not alike(shown, "mesh a=2 (cpu)\ndone: 6 steps, 12 s\n")
