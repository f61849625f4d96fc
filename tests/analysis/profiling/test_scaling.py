"""Scaling: arithmetic exactly, on a clock that the test moves; structure on a real run; errors in full."""

import json

import jax
import jax.numpy as jnp
import pytest

from shardkit.analysis import scaling
from shardkit.analysis.profiling.runs import Machine
from shardkit.analysis.profiling.scaling import Sample, scaling_of

GPU = Machine(jax="0.12.0", platform="gpu", kind="H100", devices=8, cores=16)
CPU = Machine(jax="0.12.0", platform="cpu", kind="cpu", devices=8, cores=2)
SHARED = (
    "These devices are simulated and share 2 CPU cores, so that speed-up and efficiency describe the cores, not the "
    "devices. The efficiency of CPU time, over the total work, shows what the program loses."
)


class Clock:
    """Wall and CPU time that pass only when a program of this clock runs."""

    def __init__(self):
        self.wall = self.cpu = 0.0
        self.ran = []

    def __call__(self):
        return self.wall, self.cpu

    def make(self, seconds):
        """`make` of programs that take `seconds[devices] = (wall, cpu)` a call."""

        def make(devices):
            def fn(x):
                self.ran.append(devices)
                self.wall += seconds[devices][0]
                self.cpu += seconds[devices][1]
                return x

            fn.trace = None  # it is not to be jitted: it would run once
            return fn, (jnp.ones(1),)

        return make


def medians(report, name):
    return [getattr(size, name).median for size in report.sizes]


def test_strong_scaling_is_measured_not_assumed():  # proves S126
    clock = Clock()
    make = clock.make({1: (8, 8), 2: (5, 10), 4: (4, 16)})
    report = scaling(make, [4, 1, 2], calls=3, rounds=2, clock=clock)
    assert [size.devices for size in report.sizes] == [1, 2, 4]
    assert medians(report, "wall") == [8, 5, 4] and medians(report, "cpu") == [8, 10, 16]
    assert medians(report, "speed_up") == [1, 1.6, 2]
    assert medians(report, "efficiency") == [1, 0.8, 0.5]
    assert medians(report, "work_efficiency") == [1, 0.8, 0.5]


def test_weak_scaling_counts_the_work():
    clock = Clock()
    report = scaling(clock.make({2: (4, 8), 8: (5, 64)}), [2, 8], mode="weak", calls=1, rounds=3, clock=clock)
    assert medians(report, "speed_up") == [1, 3.2]  # four times the work in 5/4 of the time
    assert medians(report, "efficiency") == [1, 0.8]
    assert medians(report, "work_efficiency") == [1, 0.5]


def test_sizes_take_turns():
    clock = Clock()
    scaling(clock.make({1: (1, 1), 2: (1, 1), 4: (1, 1)}), [1, 2, 4], calls=2, rounds=3, clock=clock)
    assert clock.ran[:3] == [1, 2, 4]  # the calls that compile
    assert clock.ran[3:] == [1, 1, 2, 2, 4, 4, 2, 2, 4, 4, 1, 1, 4, 4, 1, 1, 2, 2]


def test_ratios_are_taken_within_a_round():
    """A machine that becomes ten times slower for a round changes times, and no ratio."""
    samples = [Sample((8.0 * k, 4.0 * k), (8.0 * k, 16.0 * k)) for k in (1, 10, 1)]
    report = scaling_of([1, 4], samples, "strong", 5, GPU)
    assert report.sizes[1].speed_up == (2, 2, 2) and report.sizes[1].efficiency == (0.5, 0.5, 0.5)
    assert report.sizes[1].wall == pytest.approx((4, 4, 4 + 0.8 * 36))
    assert report.notes == ()


def test_the_report_in_full():
    samples = [Sample((0.008, 0.005), (0.008, 0.010)) for _ in range(3)]
    report = scaling_of([2, 4], samples, "strong", 5, CPU)
    assert str(report) == (
        "jax 0.12.0, 8 x cpu (cpu), 2 CPU cores\n"
        "strong scaling (the same work on every mesh), median [p10, p90] of 3 rounds of 5 calls, ratios within a round "
        "to 2 devices\n"
        "devices  wall ms               CPU ms                   speed-up           of linear  efficiency         CPU "
        "time's efficiency\n"
        "2        8.000 [8.000, 8.000]  8.000 [8.000, 8.000]     1.00 [1.00, 1.00]  1          1.00 [1.00, 1.00]  1.00 "
        "[1.00, 1.00]\n"
        "4        5.000 [5.000, 5.000]  10.000 [10.000, 10.000]  1.60 [1.60, 1.60]  2          0.80 [0.80, 0.80]  0.80 "
        "[0.80, 0.80]\n"
        f"note: {SHARED}"
    )
    data = json.loads(report.to_json())
    assert data["mode"] == "strong" and data["machine"]["cores"] == 2 and data["notes"] == [SHARED]
    assert data["sizes"][1]["devices"] == 4 and data["sizes"][1]["speed_up"] == [1.6, 1.6, 1.6]


def test_a_busy_machine_is_named():
    samples = [Sample((8.0, 8.0 / k), (1.0, 1.0)) for k in (1, 2, 4)]
    report = scaling_of([1, 2], samples, "strong", 5, GPU)
    assert report.notes == (
        "The speed-up on 2 devices differs between rounds by more than half: the machine was busy. Repeat with more "
        "rounds or on an idle machine.",
    )


def test_cpu_time_below_a_tick_has_no_ratio():
    report = scaling_of([1, 2], [Sample((2.0, 1.0), (1.0, 0.0))], "strong", 1, GPU)
    assert report.sizes[1].work_efficiency.median != report.sizes[1].work_efficiency.median  # not a number
    assert report.sizes[1].speed_up.median == 2


def test_errors_in_full():
    def refused(error, *args, **options):
        with pytest.raises(error) as caught:
            scaling(lambda devices: (lambda x: x, (jnp.ones(1),)), *args, **options)
        return str(caught.value)

    assert refused(ValueError, [1, 2], mode="linear") == (
        "scaling: mode must be 'strong' or 'weak'; got 'linear'. Pass for example mode='strong'."
    )
    assert refused(ValueError, [4, 4]) == (
        "scaling: sizes must hold at least two different numbers of devices; got [4, 4]. Add a smaller one to compare "
        "with."
    )
    assert refused(ValueError, [0, 4]) == "scaling: size must be a whole number of at least 1; got 0. Correct size."
    assert refused(ValueError, [1, 4], calls=0) == (
        "scaling: calls must be a whole number of at least 1; got 0. Correct calls."
    )
    assert refused(ValueError, [1, 4], rounds=0) == (
        "scaling: rounds must be a whole number of at least 1; got 0. Correct rounds."
    )
    with pytest.raises(TypeError) as error:
        scaling(lambda devices: (lambda x: x, (jax.ShapeDtypeStruct((1,), jnp.float32),)), [1, 2])
    assert str(error.value) == (
        "scaling: arguments must be arrays, because the program runs; got a ShapeDtypeStruct at args[0]. Pass arrays, "
        "or use aot.compile, which runs nothing."
    )
