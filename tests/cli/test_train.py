"""`shardkit train` as a user runs it."""

import math
import re
import signal
import subprocess
from pathlib import Path

import pytest

from shardkit.cli.output import SCHEMA
from support.commands import SMALL, command, deep, environment, rows
from support.tables import indented

ROOT = Path(__file__).parents[2]


def test_train_prints_a_summary_and_writes_the_results(inside, corpus, tmp_path):
    out = tmp_path / "results" / "run.json"
    words = ["--steps", 8, "--log-every", 1, "--verify", 2, "--json", out]
    done = inside("train", "data=4", "--data", corpus, *words, *SMALL)
    first, *_, results = rows(out)
    assert first["row"] == "run" and first["mesh"] == {"data": 4} and first["device"]["count"] == 8
    assert first["options"]["batch"] == 16 and first["schema"] == SCHEMA
    assert first["held_bytes_per_device"] > 3 * 4 * 256 * 32
    assert results["row"] == "end" and results["step"] == 8 and results["ended"] == "done"
    logged = rows(out, "step")
    assert [row["step"] for row in logged] == [*range(1, 9)]
    assert logged[0]["tokens_per_second"] is None and all(row["tokens_per_second"] > 0 for row in logged[1:])
    assert all(0.1 < row["gradient_norm"] < 100 for row in logged)
    # One step of warmup, then a cosine from the peak to a tenth of it.
    cosine = [0.003 * (0.1 + 0.9 * (1 + math.cos(math.pi * step / 7)) / 2) for step in range(7)]
    assert [row["learning_rate"] for row in logged] == pytest.approx([0, *cosine])
    assert 0 < logged[0]["seconds"] < logged[1]["seconds"] < logged[2]["seconds"]
    assert [row["step"] for row in rows(out, "evaluation")] == [4, 8]
    page = (ROOT / "docs" / "reference" / "json.md").read_text()
    for row in rows(out):
        entries = re.search(rf"^\| `{row['row']}` \| (.*) \|$", page, re.M)[1]
        assert {"row", *re.findall(r"`(\w+)`", entries)} == row.keys()
    assert "\x1b" not in done.stdout + done.stderr
    assert logged[-1]["loss"] == results["train_loss"]
    assert 3 < results["validation_loss"] < 6 and 3 < results["train_loss"] < 6
    (differences,) = rows(out, "verify")
    assert differences["steps"] == 2 and differences["loss"] < 1e-5 and differences["parameters"] < 1e-4
    for line in (
        "mesh data=4: 4 cpu devices, 1 process",
        "plan: dp('data'); ",
        "verify: after 2 steps the loss differs from one device's by ",
        "step 4: loss ",
        "first step: tracing and compiling ...\n",
        "\ndone: 8 steps\n",
        "nats per byte on held-out text",
    ):
        assert line in done.stdout


@pytest.mark.deep  # the handlers alone: test_run.py
def test_interrupting_ends_with_a_summary(corpus):
    words = command("train", "data=2", "--data", corpus, "--steps", 100_000, *SMALL)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(words, env=environment(), **pipes) as child:
        for line in child.stdout:
            if line.startswith("step 4:"):
                break
        child.send_signal(signal.SIGINT)
        rest = child.stdout.read()
        assert child.wait(timeout=60) == 130, rest
    assert "interrupted after step" in rest and "validation loss" in rest
    assert "stopping after this step; Ctrl-C again stops at once" in rest
    assert "nothing was saved; with --checkpoint DIRECTORY a run is saved, and the same command resumes it" in rest
    assert "Traceback" not in rest


MISTAKES = """
data8
    error: train: the mesh must be given as AXIS=SIZE; got 'data8'. Write for example data=8.
dta=8
    error: train: the axis must be one of 'data', 'fsdp', 'expert', 'context', 'zero1', 'zero2', 'ulysses', 'stage',
    'model'; got 'dta'. Write for example data=8.
data=2 data=4
    error: train: axis 'data' must be given once; got 'data=2 data=4'. Remove one of the two.
data=2 --sequence
    error: train: --sequence needs an axis 'model'; the axes are 'data'. Add model=2, or leave the option out.
data=2 --chunks 2
    error: train: --chunks needs an axis 'stage'; the axes are 'data'. Add stage=2, or leave the option out.
model=8
    error: tp: dim 1 of leaf layers.attention_out must be divisible by axis 'model'; got size 4 over 8 devices. Pad
    it to 8 (a vocabulary; then pass vocab_cross_entropy(vocabulary=4)), leave the leaf whole (key/value heads), or
    use a smaller axis.
expert=4 --experts 6
    error: ep: the experts, dim 1 of leaf layers.experts.down, must be divisible by axis 'expert'; got shape
data=4 --batch 10
    error: make_train_step: batch dim 0 must be divisible by axis 'data'; leaf targets has size 10 over 4 devices.
    Choose another size, or pad with examples of weight 0.
data=1 --data no/such/path
    error: --data: the path must be a file or a directory; no/such/path does not exist. Pass one that does.
data=1 --length 100000
    error: --data: the text must have at least one sequence of 100001 bytes; it has
"""


@pytest.mark.parametrize("words, message", indented(MISTAKES))
def test_mistakes_end_with_one_sentence(words, message, inside, corpus):
    extra = [] if "--data" in words else ["--data", corpus]
    done = inside("train", *words.split(), *extra, code=2)
    assert done.stderr.startswith(message)
    assert len(done.stderr.strip().splitlines()) == 1


def verified(inside, out, *words):
    """Trains on a mesh, compares with one device, and returns the bytes that each device holds."""
    inside("train", *SMALL, *words, "--verify", 2, "--json", out)
    (differences,) = rows(out, "verify")
    assert differences["loss"] < 1e-5 and differences["parameters"] < 1e-4
    return rows(out, "run")[0]["held_bytes_per_device"]


@pytest.mark.deep  # the option --verify: test_pipeline.py
@pytest.mark.parametrize("words", [["data=2", "fsdp=4"], ["zero1=8"], ["zero2=4", "data=2"]])
def test_sharded_state_trains_to_one_devices_numbers_and_is_small(words, inside, corpus, tmp_path):  # proves S67
    held = verified(inside, tmp_path / "run.json", *words, "--data", corpus, "--steps", 4)
    whole = 3 * 4 * rows(tmp_path / "run.json", "run")[0]["parameters"]
    assert held < (0.35 if "fsdp=4" in words else 0.6) * whole


INSIDE = [
    deep(["model=2", "context=2", "ulysses=2", "--sequence", "--heads", "4", "--dropout", "0.1"]),
    deep(["model=2", "data=4"]),  # the plan: laws/test_laws.py
    deep(["fsdp=2", "model=2", "context=2", "--sequence"]),
    deep(["context=2", "ulysses=2", "fsdp=2", "--dropout", "0.1"]),
    deep(["expert=2", "data=4"]),
]


@pytest.mark.parametrize("words", INSIDE, ids=lambda words: "_".join(words[:3]).replace("=", ""))
def test_models_split_inside_a_layer_train_to_one_devices_numbers(words, inside, corpus, tmp_path):  # proves S75, F25
    verified(inside, tmp_path / "run.json", *words, "--data", corpus, "--steps", 2)
