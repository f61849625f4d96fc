"""`--json` of every command, and text for people beside it."""

import io
import json
import re
import sys

import jax
import pytest
from rich.console import Console

from shardkit.cli import extras, output, trainlog
from shardkit.cli.curve import Point, losses
from shardkit.cli.display import Display, duration
from shardkit_command import table
from shardkit_command.declared import declared


@pytest.mark.check
def test_every_command_has_json():
    for group in ("", *table.GROUPS):
        for command in table.commands_of(group):
            said = {option.name: option.value for option in declared(command.module, command.name).options}
            assert said.get("json") == "FILE|-", command.name


@pytest.mark.check
def test_json_on_standard_output_stands_alone(inside):
    done = inside("draw", "--schedule", "gpipe", "--devices", 2, "--microbatches", 2, "--json")
    found = json.loads(done.stdout)
    assert found.keys() >= {"schema", "command", "date", "versions", "device", "rows"}
    assert found["schema"] == output.SCHEMA and found["command"] == "draw" and found["makespan"] == 9
    assert found["versions"].keys() == {"shardkit", "jax", "jaxlib", "python"}
    assert [row["order"] for row in found["rows"]] == [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    assert "makespan 9" in done.stderr


@pytest.mark.check
@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("--json", "--json -"),
        ("--json --devices 2", "--json - --devices 2"),
        ("--json a.json x", "--json a.json x"),
        ("-n 2 -- prog --json", "-n 2 -- prog --json"),
        ("--json -- prog --json", "--json - -- prog --json"),
    ],
)
def test_a_bare_json_is_standard_output(words, found):
    assert output.explicit(words.split()) == found.split()


@pytest.mark.check
def test_what_is_not_finite_is_null():
    """NaN is not JSON: other programs cannot read it."""
    assert output.plain({"a": [float("nan"), float("inf"), 1.5], "b": (True, None)}) == {
        "a": [None, None, 1.5],
        "b": [True, None],
    }


@pytest.mark.check
def test_lines_break_between_words_on_a_terminal_and_nowhere_in_a_pipe(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    text = "a plan of which a word, data parallelism, would be broken in two by the terminal"
    for terminal, expected in ((True, 40), (False, len(text))):
        here = output.console()
        here.file, here._force_terminal = io.StringIO(), terminal
        here.soft_wrap = not terminal
        here.print(text)
        lines = here.file.getvalue().splitlines()
        assert max(map(len, lines)) <= expected and " ".join(line.strip() for line in lines) == text


@pytest.mark.check
def test_doctor_knows_every_package_of_every_extra(monkeypatch):
    asked = {
        "shardkit": [
            "jax>=0.10",
            "rich>=13; extra == 'cli'",
            "uniplot>=0.20; extra == 'cli'",
            "jax[tpu]; extra == 'aot'",
        ],
        "jax": ["libtpu==0.0.42.*; extra == 'tpu'", "other; extra == 'cuda'"],
    }
    there = {"rich": "12.9", "jax": "0.10.2"}
    monkeypatch.setattr(extras.metadata, "requires", lambda name: asked[name])
    monkeypatch.setattr(extras, "version_of", there.get)
    monkeypatch.setattr(
        extras.metadata, "metadata", lambda name: type("M", (), {"get_all": lambda self, key: ["cli", "aot"]})()
    )
    assert [extras.line(*row) for row in extras.extras().items()] == [
        "[cli]: missing rich 12.9 (needs 13), uniplot; pip install 'shardkit[cli]'",
        "[aot]: missing libtpu; pip install 'shardkit[aot]'",
    ]
    there |= {"rich": "13.0.1", "libtpu": "0.0.42.1"}
    assert [extras.line(*row) for row in extras.extras().items()] == [
        "[cli]: rich 13.0.1; missing uniplot; pip install 'shardkit[cli]'",
        "[aot]: libtpu 0.0.42.1",
    ]


@pytest.mark.check
@pytest.mark.parametrize("command", ["aot train.py:make --topology v5e:2x4", "audit train.py:make", "doctor", "train"])
def test_another_kind_of_picture_is_refused_before_anything_else(command, inside):
    """Otherwise a compiler's minutes, or a whole run, would be lost."""
    words = command.split()
    assert inside(*words, "--output", "picture.pdf", code=2).stderr == (
        f"error: {words[0]}: the picture must be a .png or .svg file; got 'picture.pdf'. Pass for example "
        "'picture.svg'.\n"
    )


@pytest.mark.check
def test_the_losses_of_a_run_are_drawn_by_name():
    curve = (Point(1, 3.0, None), Point(2, 2.0, 2.5))
    assert losses(curve) == {"training": {1: 3.0, 2: 2.0}, "validation": {2: 2.5}}
    assert losses(curve[:1]) == {"training": {1: 3.0}}


class Board:
    """In place of TensorBoard's writer."""

    def __init__(self, folder=None):
        self.folder, self.seen = folder, []

    def add_scalar(self, tag, value, step):
        self.seen.append((tag, value, step))

    def close(self):
        self.seen.append("closed")


@pytest.mark.check
def test_tensorboard_gets_the_numbers_of_a_step(monkeypatch, tmp_path):
    board = Board()
    monkeypatch.setattr(trainlog, "_board", lambda folder: board)
    with trainlog.train_log(None, tmp_path, writes=True, resumes=False) as log:
        log.begin(plan="dp")
        log.row("step", step=3, loss=1.5, gradient_norm=2.0, tokens_per_second=None)
        log.row("evaluation", step=3, validation_loss=1.25)
        log.row("end", ended="done")
    assert board.seen == [
        ("loss/training", 1.5, 3),
        ("gradient norm", 2.0, 3),
        ("loss/validation", 1.25, 3),
        "closed",
    ]
    with trainlog.train_log(None, tmp_path, writes=False, resumes=False) as log:
        log.row("step", step=4, loss=1.0)  # another process writes
    assert len(board.seen) == 4


@pytest.mark.check
def test_tensorboard_without_its_package_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    message = (
        "train: --tensorboard needs the package tensorboardX, which is missing. Install it with: pip install "
        "'shardkit[tensorboard]'."
    )
    with pytest.raises(ValueError) as error, trainlog.train_log(None, tmp_path, writes=True, resumes=False):
        pass
    assert str(error.value) == message


@pytest.mark.check
def test_rows_can_be_read_while_the_run_goes_on_and_a_resumed_run_appends(tmp_path):
    file = tmp_path / "new" / "run.jsonl"
    for resumes in (False, True):
        with trainlog.train_log(file, None, writes=True, resumes=resumes) as log:
            log.begin()
            log.row("step", step=1, loss=float("nan"))
            assert json.loads(file.read_text().splitlines()[-1]) == {"row": "step", "step": 1, "loss": None}
    assert len(file.read_text().splitlines()) == 4


def shown(display):
    """The moving line as text."""
    console = Console(width=100, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(display.line())
    return console.file.getvalue().strip()


@pytest.mark.check
def test_the_line_says_what_is_done_and_for_how_long():
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100)
    display = Display(terminal, first=0, steps=150)
    with display.building("first step"):
        assert "first step: tracing, 0 s" in shown(display)
        jax.jit(lambda x: x + 1).lower(1.0)
        assert "first step: compiling, 0 s" in shown(display)
    display.step(12, "loss 3.210, 1,234 tokens/s, 1:05 left")
    assert re.fullmatch(r"step 12/150 \S+ +loss 3.210, 1,234 tokens/s, 1:05 left", shown(display))
    with display.phase("evaluating"):
        assert shown(display).endswith("evaluating, 0 s")
    pipe = Console(file=io.StringIO(), force_terminal=False, width=100)
    with Display(pipe, first=0, steps=150) as display, display.building("first step"):
        pass
    assert pipe.file.getvalue() == "first step: tracing and compiling ...\n"


@pytest.mark.check
@pytest.mark.parametrize(("seconds", "text"), [(5, "0:05"), (65.4, "1:05"), (3723, "1:02:03")])
def test_time_left(seconds, text):
    assert duration(seconds) == text
