"""What communication hides: the share, each of its two sources, and no table of both."""

from importlib import import_module
from types import SimpleNamespace

import pytest

import shardkit as sk
from shardkit import bench

overlap = import_module("shardkit.bench.overlap")  # the package has a function of this name
SMALL = bench.Size(tokens=16, width=8, hidden=32, layers=8)


@pytest.mark.check
def test_the_share_is_of_the_shorter_of_the_two():
    """All of it hides where together take the longer, nothing where the sum, and a slower pair is below 0."""
    times = [(10, 4, 10), (10, 4, 14), (4, 10, 12), (10, 4, 16)]
    assert [bench.share_hidden(*each) for each in times] == [1, 0, 0.5, -0.5]
    with pytest.raises(ValueError) as error:
        bench.share_hidden(10, 0, 10)
    assert str(error.value) == "share_hidden: communication must be a time above 0; got 0. Measure it."


@pytest.mark.check
def test_what_is_predicted_is_what_the_time_model_says(monkeypatch):
    """Compute and wire of the report, and of the wire what is exposed; not the sum of both, nor the longer."""
    report = SimpleNamespace(compute=SimpleNamespace(seconds=8e-3), wire_seconds=2e-3, exposed_seconds=5e-4)
    monkeypatch.setattr(sk.aot, "compile", lambda step, args, topology: report)
    [record] = bench.overlap(topology="v5e:2x4", only=["matmul_reduce_scatter, ring"], size=SMALL)
    keys = ("compute_us", "communication_us", "together_us", "hidden_share", "method", "row")
    assert [record[key] for key in keys] == [8000, 2000, 8500, 0.75, "predicted", "v5e:2x4"]
    last = overlap.text([record]).splitlines()[-2:]
    assert last[0].split() == ["matmul_reduce_scatter,", "ring", "8.000", "2.000", "10.000", "8.000", "8.500", "75%"]
    assert last[1] == "v5e:2x4, predicted from the compiled schedule"
    with pytest.raises(ValueError):  # the two are never in one table
        overlap.text([record, record | {"method": "measured"}])


# proves F82: where there is hardware, each is timed alone and together
def test_the_three_are_timed_and_subtracted(monkeypatch):
    """The arithmetic on real functions; on simulated devices the times themselves mean nothing."""
    monkeypatch.setattr(overlap, "_check_hardware", lambda: None)
    only = ["matmul_reduce_scatter, ring", "pipeline, gpipe"]  # of a pipeline only the schedule tells them apart
    [record] = bench.overlap(only=only, size=SMALL, rounds=2)
    one, other, both = (record[f"{name}_us"] for name in ("compute", "communication", "together"))
    assert record["method"] == "measured" and record["hidden_share"] == pytest.approx(
        (one + other - both) / min(one, other), abs=1e-3
    )
