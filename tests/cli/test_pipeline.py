"""`shardkit train` with an axis "stage", as a user runs it."""

import inspect

import pytest
import tyro

from shardkit import schedules
from shardkit._arguments.checks import either
from shardkit.cli.plans import mesh_words, schedule_of
from shardkit.cli.train import Options
from shardkit.cli.train_options import TrainOptions
from support.commands import SMALL, deep, rows
from support.pipelines import BUILDERS, CHUNKED
from support.refusals import refused
from support.tables import indented

TINY = [*SMALL, "--layers", 4]


@pytest.fixture
def trained(inside, corpus, tmp_path):
    """What three steps of the command print and write."""

    def run(*words):
        out = tmp_path / "run.json"
        done = inside("train", *TINY, *words, "--data", corpus, "--steps", 3, "--verify", 3, "--json", out)
        (differences,) = rows(out, "verify")
        assert differences["loss"] < 1e-5 and differences["parameters"] < 1e-4
        pipeline = rows(out, "run")[0]["pipeline"]
        assert f"\npipeline: {pipeline}\n" in done.stdout
        return pipeline

    return run


# proves F35, F36, F37, F38, F42, S92: the commands of the README, in small
@pytest.mark.parametrize(
    "words",
    [
        ["data=2", "stage=2", "--dropout", 0.1],
        deep(["data=2", "stage=2", "model=2", "--dropout", 0.1]),
        deep(["stage=2", "fsdp=4", "--schedule", "interleaved", "--chunks", 2]),
        deep(["stage=2", "--schedule", "1f1b"]),
        deep(["stage=2", "--schedule", "zb-h1", "--microbatches", 4]),
        deep(["stage=2", "model=2", "context=2", "--sequence", "--heads", 4]),
        deep(["stage=2", "expert=2", "data=2", "--dropout", 0.1]),
        deep(["stage=2", "expert=2", "--accumulate", 2, "--microbatches", 2]),
    ],
    ids=lambda words: "_".join(map(str, words[:3])).replace("=", "").replace("--", ""),
)
@pytest.mark.filterwarnings("ignore:make_train_step. accumulate=2 fills and drains the pipeline")  # the last row
def test_a_pipeline_trains_to_one_devices_numbers(words, trained):
    trained(*words)


@pytest.mark.deep  # the row above trains by a schedule too, and tests/schedules reads files
def test_the_schedule_of_a_file_is_run(trained, tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text(schedules.zero_bubble_h1(2, 4).to_csv())
    assert trained("stage=2", "--schedule", file).startswith("mine, 2 stages, 4 microbatches; simulated bubble ")


@pytest.mark.check
@pytest.mark.parametrize(
    ("spelling", "name"),
    [(name, name) for name in BUILDERS]
    + [("1F1B", "one_f_one_b"), ("ZB-H1", "zero_bubble_h1"), ("zb-v", "zero_bubble_v"), ("Interleaved", "interleaved")],
)
def test_every_schedule_has_a_name(spelling, name):
    """It alone finds a schedule that the help does not tell of."""
    options = tyro.cli(Options, args=["stage=2", "--schedule", spelling, "--microbatches", "4"])
    assert schedule_of(options, mesh_words(options.mesh)).name == name
    assert name in inspect.getsource(TrainOptions)


MISTAKES = f"""
data=2 --schedule gpipe
    train: --schedule needs an axis 'stage'; the axes are 'data'. Add stage=2, or leave the option out.
stage=2 data=2 --microbatches 3
    train: the microbatches must divide the examples of a device; got 3 microbatches for 16 examples. Change
    --microbatches or --batch.
stage=2 --microbatches 0
    lockstep: microbatches must be a whole number of at least 1; got 0. Pass microbatches=1 or more.
stage=2 --chunks 2 --layers 6
    train: the layers must be divisible by stages x chunks; got 6 layers for 2 x 2. Change --layers, or use fewer
    stages or chunks.
stage=4 --schedule FILE
    train: the schedule must be for the devices of axis 'stage'; got a schedule for 2 over 4 devices. Write stage=2,
    or pass another schedule.
stage=2 --schedule no/such.csv
    train: no/such.csv must be a schedule as Schedule.to_csv writes it; it cannot be read (No such file or
    directory). Check the path.
stage=2 --schedule gpipe --chunks 2
    train: schedule 'gpipe' does not take chunks; got 2. Leave --chunks out, or choose
    {either([*map(repr, CHUNKED)])}.
stage=2 --schedule FILE --microbatches 4
    train: --microbatches must not come with a --schedule file, which holds the whole schedule. Leave it out.
"""


@pytest.mark.parametrize("words, message", indented(MISTAKES))
def test_mistakes_are_named_in_one_sentence(words, message, tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text(schedules.gpipe(2, 4).to_csv())
    options = tyro.cli(Options, args=words.replace("FILE", str(file)).split())
    assert refused(lambda: schedule_of(options, mesh_words(options.mesh))) == message


def test_the_microbatches_are_four_a_stage_or_what_divides():
    def count(batch, **sizes):
        return schedule_of(Options(batch=batch), sizes).microbatches

    assert [count(32, stage=2), count(32, stage=2, data=2), count(64, stage=4, fsdp=4)] == [8, 8, 16]
    assert [count(12, stage=2), count(12, stage=4), count(9, stage=2), count(7, stage=2)] == [6, 12, 3, 7]
