"""`shardkit doctor` as a user runs it."""

import pytest

from support import commands


@pytest.mark.parametrize("devices", [4, pytest.param(8, marks=pytest.mark.deep)])
def test_doctor_tests_every_collective(devices, inside):
    done = inside("doctor", "--devices", devices) if devices == 4 else commands.run("doctor", "--devices", devices)
    for name in ("all_reduce sum", "all_gather", "reduce_scatter", "all_to_all", "shift", "broadcast", "axis_index"):
        assert name in done.stdout
    assert f"self-test over {devices} devices" in done.stdout
    assert "all collectives are right" in done.stdout and "WRONG" not in done.stdout
    assert "[checkpoint]" in done.stdout and "jax" in done.stdout
