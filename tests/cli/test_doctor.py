"""`shardkit doctor` as a user runs it."""

import re

import pytest

from shardkit.cli import self_test
from support import commands


@pytest.mark.parametrize("devices", [4, pytest.param(8, marks=pytest.mark.deep)])
def test_doctor_tests_every_collective(devices, inside):
    done = inside("doctor", "--devices", 4) if devices == 4 else commands.run("doctor", "--devices", devices)
    for name in ("all_reduce sum", "all_gather", "reduce_scatter", "all_to_all", "shift", "broadcast", "axis_index"):
        assert name in done.stdout
    assert f"self-test over {devices} devices" in done.stdout
    assert "all collectives are right" in done.stdout and "WRONG" not in done.stdout
    assert "[checkpoint]" in done.stdout and "jax" in done.stdout


@pytest.mark.check
def test_a_wrong_collective_is_named_and_ends_with_code_1(inside, monkeypatch):
    """It alone would catch a difference that is printed and counts for nothing."""
    monkeypatch.setattr(self_test, "self_test", lambda mesh: {"all_gather": 0.0, "shift": 2.0})
    done = inside("doctor", "--devices", 2, code=1)
    assert re.search(r"all_gather +.? *ok ", done.stdout) and re.search(r"shift +.? *WRONG .* 2 ", done.stdout)
    assert "collectives that are WRONG on this machine: 1\n" in done.stdout
