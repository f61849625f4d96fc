"""`shardkit doctor` as a user runs it."""

import re

import jax
import numpy as np
import pytest

import shardkit as sk
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


# Catches NaN on another device than the first: Python's max left it out, and the collective was right.
@pytest.mark.parametrize("device", [0, 1])
def test_nan_on_any_device_is_a_difference(device, monkeypatch):
    run_kernel = self_test._run_kernel

    def run_on_broken_device(kernel, array, mesh):
        shards = [shard.astype(float) for shard in run_kernel(kernel, array, mesh)]
        shards[device][:] = np.nan
        return shards

    monkeypatch.setattr(self_test, "_run_kernel", run_on_broken_device)
    differences = self_test.self_test(sk.make_mesh(jax.devices()[:2], x=2))
    assert np.isnan(list(differences.values())).all()
