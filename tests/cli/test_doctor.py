"""`shardkit doctor` as a user runs it."""

import pytest

from support.commands import run

pytestmark = pytest.mark.deep


def test_doctor_tests_every_collective():
    done = run("doctor", "--devices", 4)
    for name in ("all_reduce sum", "all_gather", "reduce_scatter", "all_to_all", "shift", "broadcast", "axis_index"):
        assert name in done.stdout
    assert "all collectives are right" in done.stdout and "WRONG" not in done.stdout
    assert "[checkpoint]" in done.stdout and "jax" in done.stdout
