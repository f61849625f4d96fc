"""Faults from within: taken once, by the process that they are for, and only where the job asks for them."""

import os

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.runtime.monitor.planted import CHAOS, Planted, flipped, plant

pytestmark = pytest.mark.check


def test_a_fault_is_taken_once_by_its_process(tmp_path, monkeypatch):
    monkeypatch.setenv(CHAOS, str(tmp_path / "faults"))
    file = plant(tmp_path / "faults", 2, "exception")
    assert Planted(1).before(7) == 7 and file.exists()
    with pytest.raises(RuntimeError) as caught:
        Planted(2).before(7)
    assert str(caught.value) == "planted by shardkit chaos" and not file.exists()
    assert Planted(2).before(7) == 7
    monkeypatch.delenv(CHAOS)
    plant(tmp_path / "faults", 2, "exception")
    assert Planted(2).before(7) == 7


def test_nobody_else_plants_a_fault(tmp_path, monkeypatch):
    """It alone finds a job that another user of the machine can end, where the folder is one that all can write."""
    monkeypatch.setenv(CHAOS, str(tmp_path))
    file = plant(tmp_path, 2, "exception")
    with monkeypatch.context() as other:
        other.setattr(os, "getuid", lambda: 12345)
        assert Planted(2).before(7) == 7 and file.exists()
    file.rename(tmp_path / "mine")
    file.symlink_to(tmp_path / "mine")
    assert Planted(2).before(7) == 7 and file.is_symlink()


def test_a_flip_waits_for_a_state(tmp_path, monkeypatch):
    """It alone finds a bit that is flipped in nothing, while the process waits for data."""
    monkeypatch.setenv(CHAOS, str(tmp_path))
    file = plant(tmp_path, 0, "flip")
    assert Planted(0).before() is None and file.exists()
    assert Planted(0).before({"w": jax.device_put(np.ones(2, np.float32))})["w"].tolist() == [1.5, 1.0]


def test_slow_data_sleep_past_every_deadline(tmp_path, monkeypatch):
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setenv(CHAOS, str(tmp_path))
    plant(tmp_path, 0, "slow")
    assert Planted(0).before(7) == 7 and slept == [3600.0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_one_bit_of_one_device_is_flipped(dtype):
    """It alone finds a flip on every replica, in an integer, in a zero, or one that the next rounding removes."""
    mesh = sk.make_mesh(data=4, model=2)
    large = np.zeros((4, 3), dtype)
    large[:, 1] = 3

    def place(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    before = {"large": place(large, "model"), "small": place(np.ones(2, dtype)), "n": place(np.arange(100))}
    after = flipped(before)
    changed = []
    for name, leaf in before.items():
        for one, other in zip(leaf.addressable_shards, after[name].addressable_shards, strict=True):
            differ = np.argwhere(np.asarray(one.data) != np.asarray(other.data))
            changed += [
                (name, one.device.id, place.tolist(), float(np.asarray(other.data)[tuple(place)])) for place in differ
            ]
    assert changed == [("large", mesh.devices.flat[0].id, [0, 1], 3.125 if dtype == "float16" else 2.0)]
    assert jax.tree.map(lambda x: x.sharding, before) == jax.tree.map(lambda x: x.sharding, after)
