"""`shardkit doctor` as a user runs it."""

import re
from types import SimpleNamespace

import jax
import pytest

from shardkit import bench
from shardkit.cli import doctor
from support import commands

HERE = {"date": "2026-11-23T12:00:00+00:00", "device_kind": "cpu"}


@pytest.fixture
def file(tmp_path):
    """Times of an all_reduce over four devices, with 5 us a hop and 1 GB/s."""
    sizes = {size: 1.5 * size for size in (2**10, 2**20)}
    one = {"format": bench.FORMAT, "version": 1, "benchmark": "bench comm", "row": "all_reduce", "case": "lax"}
    one |= {"environment": HERE, "op": "all_reduce", "impl": "lax", "axes": "data", "n": 4, "hops": 6}
    times = [{"size": s, "written_bytes": b, "wall_us_median": 6 * 5 + b / 1e3} for s, b in sizes.items()]
    bench.write([one | each for each in times], tmp_path / "comm.jsonl")
    return tmp_path / "comm.jsonl"


@pytest.mark.parametrize("devices", [4, pytest.param(8, marks=pytest.mark.deep)])
def test_doctor_tests_every_collective(devices, inside, file, tmp_path):
    own = ("--links", file, "--flops", 1e11, "--output", tmp_path / "a.svg")
    done = inside("doctor", "--devices", 4, *own) if devices == 4 else commands.run("doctor", "--devices", devices)
    for name in ("all_reduce sum", "all_gather", "reduce_scatter", "all_to_all", "shift", "broadcast", "axis_index"):
        assert name in done.stdout
    assert f"self-test over {devices} devices" in done.stdout
    assert "all collectives are right" in done.stdout and "WRONG" not in done.stdout
    assert "[checkpoint]" in done.stdout and "jax" in done.stdout
    if devices == 4:
        assert "mesh x=4: 4 cpu devices" in (tmp_path / "a.svg").read_text()
        assert "links of axis 'data', 4 devices: 5 us a message, 1 GB/s (measured on 2026-11-23)" in done.stdout
        assert "from 100 bfloat16 columns a device; with twice as many, messages from 5,000 bytes" in done.stdout
        assert "180,000 bytes: latency takes 10% of the time" in done.stdout
    else:
        assert "links: no figures of 'cpu'; measure them" in done.stdout


@pytest.mark.check
def test_a_wrong_collective_is_named_and_ends_with_code_1(inside, monkeypatch):
    """It alone would catch a difference that is printed and counts for nothing."""
    monkeypatch.setattr(doctor, "self_test", lambda mesh: {"all_gather": 0.0, "shift": 2.0})
    done = inside("doctor", "--devices", 2, code=1)
    assert re.search(r"all_gather +.? *ok ", done.stdout) and re.search(r"shift +.? *WRONG .* 2 ", done.stdout)
    assert "collectives that are WRONG on this machine: 1\n" in done.stdout


@pytest.mark.check
def test_links_are_those_of_the_chip_or_say_how_to_measure_them():
    chip = SimpleNamespace(device_kind="TPU v5p")
    a_slice = SimpleNamespace(devices=SimpleNamespace(flat=[chip]), shape={"x": 8})
    told = doctor.links_of(a_slice, None, [])
    assert told.startswith("links of axis 'x', 8 devices: 1 us a message, 90 GB/s (chip v5p)\n")
    assert "from 5,100 bfloat16 columns a device" in told
    simulated = jax.sharding.Mesh(jax.devices()[:1], "x")
    assert doctor.links_of(simulated, None, []) == (
        "links: no figures of 'cpu'; measure them: shardkit bench comm --json FILE, then doctor --links FILE"
    )
