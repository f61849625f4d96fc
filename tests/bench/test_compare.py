"""Two files of results: read, refused, and compared in a way that noise does not fool."""

import csv
import json
import os

import numpy as np
import pytest

from shardkit import bench
from shardkit.bench.records import FORMAT, write, write_csv
from shardkit.cli.bench.compare import Options, compare
from support.refusals import refused

pytestmark = pytest.mark.check


def run(ratio=1.0, *, seed=0, rounds=20, noise=0.03, speed=1.0, **changes):
    """The records of a run with two cases whose times are drawn: `ratio` is the second one's, `speed` the machine's."""
    generator = np.random.default_rng(seed)
    hour = speed * (1 + 0.3 * generator.random(rounds))  # what slows a round down slows all of it

    def times(us):
        return [float(t) for t in us * hour * (1 + noise * generator.standard_normal(rounds))]

    calibrated = times(5000)
    return [
        {
            "format": FORMAT,
            "version": 1,
            "benchmark": "test",
            "row": "a row",
            "mode": "inside",
            "case": name,
            "baseline": "base",
            "wrong": 0,
            "environment": {"platform": "cpu"},
            "samples": {"cpu_us": times(us), "wall_us": times(us), "calibration_cpu_us": calibrated},
            **changes,
        }
        for name, us in (("base", 100), ("other", 150 * ratio))
    ]


def verdicts(old, new, **options):
    return [change.verdict for change in bench.compare(old, new, **options).changes]


def test_a_tenth_is_found_and_noise_or_a_slower_hour_is_not():
    assert verdicts(run(), run(seed=1, speed=1.5)) == ["equal", "equal"]
    # Nine of ten planted slowdowns of 10 % at least; of fifty equal runs, none is called slower or faster.
    found = [verdicts(run(seed=2 * i), run(1.1, seed=2 * i + 1))[1] for i in range(20)]
    assert found.count("slower") >= 18
    same = [verdict for i in range(50) for verdict in verdicts(run(seed=2 * i), run(seed=2 * i + 1))]
    assert set(same) == {"equal"}
    assert verdicts(run(), run(0.9, seed=1))[1] == "faster"


def test_the_interval_holds_the_change_and_runs_in_one_file_are_pooled():
    compared = bench.compare(run(), run(1.1, seed=1))
    other = compared.changes[1]
    assert other.low < 0.1 < other.high and other.high - other.low < 0.12
    assert compared.regressed and other.measure == "cpu, base" and compared.changes[0].measure == "cpu, calibration"
    assert str(compared).splitlines()[-1] == "1 of 2 slower by more than 5%"
    assert not bench.compare(run(), run(1.1, seed=1), threshold=0.2).regressed
    old, new = run() + run(seed=1), run(seed=2)
    assert verdicts(old, new) == ["equal", "equal"]
    assert verdicts(old[:1], new) == ["equal", "only in new"]
    assert verdicts(new, old[:1]) == ["equal", "only in old"]


def test_ratios_to_other_baselines_are_not_compared():
    """A run of a case alone has the calibration loop as its baseline: it was called slower or faster by as much."""
    alone = [run()[1] | {"baseline": "other"}]
    compared = bench.compare(run(), alone)
    assert [change.verdict for change in compared.changes] == ["only in old", "not comparable"]
    assert compared.changes[1].measure == "cpu, base; cpu, calibration" and not compared.regressed
    assert str(compared).splitlines()[-1] == "0 of 0 slower by more than 5%"
    assert refused(lambda: bench.compare(run() + alone, run())) == (
        "compare: results of one case in a file must have one baseline and clock; got 'cpu, base' and 'cpu, "
        "calibration' for 'other'. Keep such runs in files of their own."
    )


def test_files_without_a_common_case_are_refused():
    """They passed, as 0 of 0 slower."""
    message = (
        "compare: the two runs must have a case with samples in common; got none in {} and 2 results. Measure the same "
        "cases before and after."
    )
    assert refused(lambda: bench.compare(run(row="another"), run())) == message.format(2)
    assert refused(lambda: bench.compare([], run())) == message.format(0)


def test_a_threshold_below_a_percent_is_printed_as_it_is():
    last = str(bench.compare(run(), run(), threshold=0.005)).splitlines()[-1]
    assert last == "0 of 2 slower by more than 0.5%"


def test_a_wrong_element_is_a_regression_and_a_threshold_is_positive():
    compared = bench.compare(run(), run(wrong=2))
    assert compared.regressed
    assert "wrong elements: a row, other: 2" in str(compared)
    assert refused(lambda: bench.compare(run(), run(), threshold=0.0)) == (
        "compare: threshold must be greater than 0; got 0.0. Pass for example threshold=1."
    )


def test_what_is_written_is_read(tmp_path):
    file = tmp_path / "there" / "out.jsonl"
    write(run(), file)
    write(run(seed=1), file)
    assert bench.read(file) == run() + run(seed=1)
    write_csv(bench.read(file), tmp_path / "out.csv")
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert [row["case"] for row in rows] == ["base", "other"] * 2
    assert rows[0]["environment_platform"] == "cpu" and "samples" not in rows[0]


@pytest.mark.parametrize(
    "message, text",
    {
        "bench: {} must be a file of results; it cannot be read (No such file or directory). Check the path.": None,
        "bench: {} must hold at least one result; it has none. Run the benchmark with --json.": "",
        "bench: each line of {} must be a result of shardkit bench; line 1 is not. Pass a file that --json wrote.": "{",
        "bench: results must be of version 1; line 1 of {} is of version 0. Run the benchmark again with this "
        "shardkit.": json.dumps(run()[0] | {"version": 0}),
        "bench: a result must have benchmark, row, case, environment; line 1 of {} lacks case, environment. Pass a "
        "file as --json wrote it.": json.dumps({"format": FORMAT, "version": 1, "benchmark": "b", "row": "r"}),
    }.items(),
)
def test_a_file_that_is_none_is_refused(tmp_path, text, message):
    file = tmp_path / "out.jsonl"
    if text is not None:
        file.write_text(text)
    assert refused(lambda: bench.read(file)) == message.format(file)


# Of a device the reading never ended, and of a pipe it waited for a writer.
def test_what_never_ends_is_no_file_of_results(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for file in ("/dev/zero", pipe):
        assert refused(lambda file=file: bench.read(file)) == (
            f"bench: {file} must be a file of results; it cannot be read (no regular file). Check the path."
        )


def test_the_command_compares_and_ends_with_the_verdict(tmp_path, capsys):
    for name, records in (("old", run()), ("new", run(1.2, seed=1))):
        write(records, tmp_path / name)
    assert compare(Options(tmp_path / "old", tmp_path / "new")) == 1
    assert "test: a row (inside)  other  cpu, base" in capsys.readouterr().out
    assert compare(Options(tmp_path / "old", tmp_path / "old")) == 0
    assert compare(Options(tmp_path / "old", tmp_path / "new", threshold="30%")) == 0
    for text in ("x", "0", "100%", "-5%"):
        assert refused(lambda: compare(Options(tmp_path / "none", tmp_path / "none", threshold=text))) == (
            f"bench: --threshold must be a percentage between 0 and 100; got {text!r}. Write for example 5%."
        )
