"""`--json`, and text for people beside it."""

import io
import json
from fractions import Fraction

import numpy as np
import pytest
from matplotlib.figure import Figure

from shardkit.bench.records import write, write_csv
from shardkit.cli import doctor, output, self_test
from shardkit.cli.words import fill_in_json
from shardkit.jobs.launch import launch
from shardkit.viz import style

pytestmark = pytest.mark.check
BARE = [("--json", "--json -"), ("--json --devices 2", "--json - --devices 2"), ("--json a.json x", "--json a.json x")]
BARE += [("-n 2 -- prog --json", "-n 2 -- prog --json"), ("--json -- prog --json", "--json - -- prog --json")]
BARE += [("", ""), ("-- prog", "-- prog")]


def test_json_on_standard_output_stands_alone(inside, monkeypatch):
    monkeypatch.setattr(self_test, "self_test", lambda mesh: {"shift": 0.0})
    done = inside("doctor", "--devices", 2, "--json")
    found = json.loads(done.stdout)
    assert found.keys() >= {"schema", "command", "date", "versions", "device", "rows"}
    assert found["schema"] == output.SCHEMA and found["command"] == "doctor" and "jax" in found["packages"]
    assert found["versions"].keys() == {"shardkit", "jax", "jaxlib", "python"}
    assert found["rows"][0] == {"row": "collective", "name": "shift", "difference": 0.0, "right": True}
    assert "all collectives are right" in done.stderr


@pytest.mark.parametrize(("words", "found"), BARE)
def test_a_bare_json_is_standard_output(words, found):
    assert fill_in_json(words.split()) == found.split()


WRITERS = {
    "a.json": lambda file: output.write_json(file, "audit", []),
    "more.json": lambda file: output.open_output(file, append=True).__enter__(),
    "a.jsonl": lambda file: write([{}], file),
    "a.csv": lambda file: write_csv([{"environment": {}}], file),
    "a.svg": lambda file: style.save(Figure(), file),
    "a.png": lambda file: style.save(Figure(), file),
    "0.out": lambda file: launch(["true"], processes=1, output=file.parent),
}


# What the link led to was overwritten: in a folder that others write to, a file of the user's own.
@pytest.mark.parametrize("name", WRITERS)
def test_no_link_is_written_through(name, tmp_path):
    file, victim = tmp_path / name, tmp_path / "victim"
    victim.write_text("kept")
    file.symlink_to(victim)
    with pytest.raises((OSError, ValueError), match="symbolic link, which is not followed"):
        WRITERS[name](file)
    assert victim.read_text() == "kept"


def test_what_is_not_finite_is_null():
    """NaN is not JSON: other programs cannot read it."""
    assert output.to_plain({"a": [float("nan"), float("inf"), 1.5], "b": (True, None)}) == {
        "a": [None, None, 1.5],
        "b": [True, None],
    }


def test_numbers_of_numpy_are_numbers():
    """They were written as text."""
    plain = output.to_plain([np.float32(1.5), np.int64(3), np.float32("nan"), Fraction(3, 4), 7])
    assert plain == [1.5, 3, None, 0.75, 7] and [type(number) for number in plain[:2]] == [float, int]


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


def test_doctor_knows_every_package_of_every_extra(monkeypatch):
    asked = {
        "shardkit": ["jax>=0.10", "rich>=13; extra == 'cli'", "tyro>=1; extra == 'cli'", "jax[tpu]; extra == 'aot'"],
        "jax": ["libtpu==0.0.42.*; extra == 'tpu'", "other; extra == 'cuda'"],
    }
    there = {"rich": "12.9", "jax": "0.10.2"}
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: asked[name])
    monkeypatch.setattr(doctor, "version_of", there.get)
    monkeypatch.setattr(
        doctor.metadata, "metadata", lambda name: type("M", (), {"get_all": lambda self, key: ["cli", "aot"]})()
    )
    assert [doctor.describe_extra(*row) for row in doctor.find_extras().items()] == [
        "[cli]: missing rich 12.9 (needs >=13), tyro; pip install 'shardkit[cli]'",
        "[aot]: missing libtpu; pip install 'shardkit[aot]'",
    ]
    there |= {"rich": "13.0.1", "libtpu": "0.0.42.1"}
    assert [doctor.describe_extra(*row) for row in doctor.find_extras().items()] == [
        "[cli]: rich 13.0.1; missing tyro; pip install 'shardkit[cli]'",
        "[aot]: libtpu 0.0.42.1",
    ]
