"""`shardkit soak` as a user runs it."""

import pytest

from shardkit.cli.soak import Options, run_once
from support.commands import run


# A small run of the command; `make soak` is the large one.
@pytest.mark.deep
def test_a_short_soak_passes():
    done = run("soak", "--starts", 2, "--steps", 30)
    assert "2 starts of 30 steps on 8 simulated devices: 0 hung or failed, 1 distinct final loss(es)" in done.stdout


def test_the_soak_can_fail():
    result = run_once(Options(steps=5, devices=2, timeout=0.5))
    assert result == "hung: still running after 0.5 s"
