"""`shardkit draw` as a user runs it."""

import inspect
import sys

import pytest

from shardkit import schedules
from shardkit._arguments.checks import either
from shardkit.cli import draw
from shardkit.cli.train_options import TrainOptions
from support import commands
from support.pipelines import BUILDERS, CHUNKED

LOCKSTEP = ["--schedule", "lockstep", "--devices", "4", "--microbatches", "8"]


@pytest.fixture
def run(inside):
    """Draws in this process; gives what it printed and wrote to stderr."""

    def draw(*words, code=0):
        done = inside("draw", *words, code=code)
        return done.stdout, done.stderr

    return draw


# proves F40, S78, S82
def test_the_grid_and_the_numbers_are_printed(run):
    out, err = run(*LOCKSTEP)
    schedule = schedules.lockstep(4, 8)
    assert not err and out == f"{schedule}\n\n" + (
        "lockstep: 4 devices, 8 microbatches\n"
        "makespan 33, bubble 37.5% of the work (Megatron's convention), 27.3% of the makespan (GPipe's)\n"
        "most in flight on each device: 7, 5, 3, 1\n"
        "slots: 5 for inputs, 1 for cotangents, 0 for weight-gradient residuals\n"
    )


def test_costs_change_the_time(run):
    out, _ = run(*LOCKSTEP[:4], "--microbatches", 16, "--chunks", 2, "--forward", 2, "--backward", 3)
    line = schedules.lockstep(4, 16, 2).simulate(2, 3)
    assert f"lockstep: 4 devices x 2 chunks, 16 microbatches\nmakespan {line.makespan:g}, " in out
    out, _ = run(*LOCKSTEP, "--communication", 0.5)
    assert f"makespan {schedules.lockstep(4, 8).simulate(communication=0.5).makespan:g}, " in out


@pytest.mark.parametrize(
    ("spelling", "name"),
    [(name, name) for name in BUILDERS]
    + [("1F1B", "one_f_one_b"), ("ZB-H1", "zero_bubble_h1"), ("zb-v", "zero_bubble_v"), ("Interleaved", "interleaved")],
)
def test_every_schedule_has_a_name(spelling, name, run):
    out, _ = run("--schedule", spelling, "--devices", 2, "--microbatches", 4)
    assert f"\n\n{name}: 2 devices" in out
    assert all(name in inspect.getsource(options) for options in (draw.Options, TrainOptions)), "its help"


def test_a_picture_is_written(run, tmp_path):
    run(*LOCKSTEP, "--output", tmp_path / "new" / "picture.png")
    assert (tmp_path / "new" / "picture.png").read_bytes()[:4] == b"\x89PNG"
    run(*LOCKSTEP, "--backward", 3, "--output", tmp_path / "picture.svg")
    assert ">makespan 44, bubble " in (tmp_path / "picture.svg").read_text()


def test_a_file_can_be_written_and_read(run, tmp_path):
    file = tmp_path / "new" / "mine.csv"
    written, _ = run(*LOCKSTEP, "--to-csv", file)
    assert file.read_text() == schedules.lockstep(4, 8).to_csv()
    read, _ = run("--csv", file)
    assert read == written.replace("lockstep: 4", "mine: 4")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [],
            "draw: a schedule must be given by --schedule, --devices and --microbatches or by --csv; got none. "
            "Write for example --schedule lockstep --devices 4 --microbatches 8.",
        ),
        (
            LOCKSTEP[:4],
            "draw: a schedule must be given by --schedule, --devices and --microbatches or by --csv; got --schedule, "
            "--devices. Write for example --schedule lockstep --devices 4 --microbatches 8.",
        ),
        (
            ["--csv", "FILE", "--devices", "4", "--chunks", "2"],
            "draw: --csv must come alone, because the file holds the whole schedule; got --devices, --chunks too. "
            "Leave it out.",
        ),
        (
            ["--csv", "no/such/file"],
            "draw: no/such/file must be a file that --to-csv wrote; it cannot be read (FileNotFoundError). Check the "
            "path.",
        ),
        (
            ["--csv", "FILE"],
            "from_csv: every stage must run every microbatch; 0B0 is missing on device 0. Add it.\n"
            "tick      0   1   2\n"
            "device 0  0F0 0B1 .\n"
            "                  ^",
        ),
        (
            ["--schedule", "fastest", *LOCKSTEP[2:]],
            f"draw: schedule must be {either([*map(repr, BUILDERS)])}; got 'fastest'. Pass for example "
            "schedule='breadth_first'.",
        ),
        (
            ["--schedule", "gpipe", *LOCKSTEP[2:], "--chunks", "2"],
            "draw: schedule 'gpipe' does not take chunks; got 2. Leave --chunks out, or choose "
            f"{either([*map(repr, CHUNKED)])}.",
        ),
        (
            [*LOCKSTEP[:2], "--devices", "0", "--microbatches", "8"],
            "lockstep: devices must be a whole number of at least 1; got 0. Pass devices=1 or more.",
        ),
        (
            [*LOCKSTEP, "--chunks", "0"],
            "lockstep: chunks must be a whole number of at least 1; got 0. Pass chunks=1 or more.",
        ),
        (
            [*LOCKSTEP, "--forward", "0"],
            "simulate: forward must be greater than 0; got 0.0. Pass for example forward=1.",
        ),
        (
            [*LOCKSTEP, "--output", "picture.pdf"],
            "viz.draw: the picture must be a .png or .svg file; got 'picture.pdf'. Pass for example 'picture.svg'.",
        ),
    ],
)
def test_mistakes_end_with_one_sentence(words, message, run, tmp_path):
    (tmp_path / "wrong.csv").write_text("0F0,0B1\n")
    _, err = run(*(str(tmp_path / "wrong.csv") if word == "FILE" else word for word in words), code=2)
    assert err == f"error: {message}\n"


def test_without_matplotlib_the_numbers_come_and_the_extra_is_named(run, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "makespan 33" in run(*LOCKSTEP)[0]
    _, err = run(*LOCKSTEP, "--output", tmp_path / "picture.png", code=2)
    assert err == (
        "error: viz: pictures need matplotlib, which is not installed. Install it with: pip install 'shardkit[viz]'\n"
    )


def test_the_command_is_installed():
    assert "\nmakespan 33, bubble 37.5% of the work" in commands.run("draw", *LOCKSTEP).stdout
