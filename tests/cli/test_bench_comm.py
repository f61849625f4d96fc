"""`shardkit bench comm` as a user runs it: in this process, wrong kernels of a file, several processes."""

import json

import pytest

from shardkit import bench
from shardkit.cli.bench.options import Output, check_output
from shardkit.cli.mesh import read_sizes
from shardkit.planner.search import AXES
from support.commands import run

KERNELS = """
from jax import lax

def right(x, axis):
    return lax.psum(x, axis)

def wrong(x, axis):
    return lax.psum(x, axis).at[-1].mul(2) if x.size == 1024 else lax.psum(x, axis)

def unknown_axis(x, axis):
    return lax.psum(x, "model")
"""


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("--op", "all_reduce", "halo_exchange"), id="two operations"),
        pytest.param((), marks=pytest.mark.deep, id="all"),
    ],
)
def test_the_smallest_run(inside, tmp_path, words):
    """A table for each operation, a record for each row, and what the simulated machine cannot show."""
    file = tmp_path / "out.jsonl"
    printed = inside("bench", "comm", "data=8", *words, "--quick", "--json", file).stdout.splitlines()
    assert (
        "simulated devices share the CPU's cores: read times as total work and as ratios, not as bandwidth" in printed
    )
    assert "all_reduce sum over data (mesh data=8)" in printed and "halo_exchange over data (mesh data=8)" in printed
    assert printed[-1] == "wrong elements: 0"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    rows = [(r["op"], r["impl"], r["size"], r["calls"], r["rounds"], r["mode"]) for r in records]
    wanted = [("all_reduce", impl, size) for impl in ("lax", "ring") for size in (1024, 4096)]
    wanted += [("halo_exchange", "lax", size) for size in (1024, 4096)]
    assert set(rows) >= {(*row, 2, 2, "inside") for row in wanted} and (len(rows) == 6 or not words)
    # what one device sends, by the closed forms: 2 B 7/8, and an eighth of the rows to each side
    sent = {(r["op"], r["size"]): r["written_bytes"] for r in records}
    assert sent["all_reduce", 4096] == 7168 and sent["halo_exchange", 4096] == 1024


def test_a_wrong_kernel_of_a_file_ends_with_1(inside, tmp_path):
    """In the one size where it is wrong, dispatched from Python."""
    (tmp_path / "kernels.py").write_text(KERNELS)
    kernels = [f"{tmp_path / 'kernels.py'}:{name}" for name in ("right", "wrong")]
    words = ["--sizes", "1K:4K:4", "--calls", "1", "--rounds", "1", "--mode", "dispatched"]
    done = inside("bench", "comm", "data=4", "--op", "all_reduce", "--impl", *kernels, *words, code=1)
    lines = done.stdout.splitlines()
    assert lines[-1] == "wrong elements: 4"
    assert [line.partition(":wrong, ")[2].split(":")[0] for line in lines if line.startswith("wrong: ")] == ["4096 B"]
    assert not any(":right, " in line for line in lines)


# It ended with 70, as if shardkit were wrong, and without a word: jax's assertion has no message.
def test_a_kernel_that_raises_is_named(inside, tmp_path):
    (tmp_path / "kernels.py").write_text(KERNELS)
    words = ["--impl", f"{tmp_path / 'kernels.py'}:unknown_axis", "--quick"]
    error = inside("bench", "comm", "data=4", "--op", "all_reduce", *words, code=2).stderr
    assert error == (
        "error: bench comm: a kernel must run; kernels.py:11 (unknown_axis) raises AssertionError. Add --debug to see "
        "the traceback.\n"
    )


@pytest.mark.parametrize("text", ["1K:x", "4K:1K:2", "1K:4K:1", "0", "1T", ""])
def test_sizes_that_do_not_parse(inside, text):
    done = inside("bench", "comm", "data=8", "--sizes", text, code=2)
    assert done.stderr == (
        "error: bench comm: --sizes must be FIRST:LAST:FACTOR or one size, in bytes or with K, M or G; got "
        f"{text!r}. Write for example 1K:64M:4.\n"
    )


# Catches records that are lost after an hour of measuring, because their file cannot be written: nothing is measured.
@pytest.mark.check
def test_a_file_that_cannot_be_written_is_refused_first(inside, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "sweeps", lambda *args, **options: pytest.fail("it measures"))
    kept = tmp_path / "kept.jsonl"
    kept.write_text("a record\n")
    name = "--csv must be a file; got -. Pass a path, or --json - for standard output."
    done = inside("bench", "comm", "data=8", "--csv", "-", code=2)
    assert done.stderr == f"error: bench comm: {name}\n"
    done = inside("bench", "comm", "data=8", "--json", kept, "--csv", kept, code=2)
    assert done.stderr == (
        f"error: bench comm: --json and --csv must be different files; got {kept} for both. Pass another for one.\n"
    )
    done = inside("bench", "comm", "data=8", "--json", kept, "--csv", tmp_path, code=2)
    assert done.stderr == f"error: bench comm: {tmp_path} cannot be used (Is a directory). Check the path.\n"
    done = inside("bench", "comm", "data=8", "--json", kept / "below.jsonl", code=2)
    assert done.stderr.startswith(f"error: bench comm: {kept} cannot be used (")
    assert kept.read_text() == "a record\n"


def test_no_file_is_left_where_nothing_was_measured(tmp_path):
    new = tmp_path / "folder" / "new.jsonl"
    check_output("bench comm", Output(json=new))
    assert new.parent.is_dir() and not new.exists()


# Catches links of the planner's axis "tensor" that nobody can measure: the command knew no such axis.
@pytest.mark.check
def test_every_axis_of_the_planner_can_be_measured():
    words = tuple(f"{axis}=2" for axis in AXES)
    assert list(read_sizes("bench comm", words)) == list(AXES)


@pytest.mark.deep
def test_several_processes(tmp_path):
    """Process 0 prints and writes; an element that is wrong elsewhere counts."""
    file, kernels = tmp_path / "out.jsonl", tmp_path / "kernels.py"
    words = ["--op", "all_reduce", "--sizes", "1K:4K:4", "--calls", "2", "--rounds", "2"]
    printed = run("launch", "-n", 2, "--", "-m", "shardkit", "bench", "comm", "data=2", *words, "--json", file).stdout
    assert (
        "[0] all_reduce sum over data (mesh data=2, along 2 processes)" in printed and "[1] all_reduce" not in printed
    )
    assert len(file.read_text().splitlines()) == 4
    kernels.write_text(
        "import jax.numpy as jnp, shardkit as sk\n"
        "def wrong(x, axis):\n"
        "    y = sk.vary(sk.all_reduce(x, axis), axis)\n"
        "    return jnp.where(sk.axis_index(axis) == 1, y + 1, y)\n"
    )
    words += ["--impl", f"{kernels}:wrong"]
    done = run("launch", "-n", 2, "--", "-m", "shardkit", "bench", "comm", "data=2", *words, code=1)
    assert "[0] wrong elements: 1280" in done.stdout and f"{kernels}:wrong, 1024 B: on others" in done.stdout
