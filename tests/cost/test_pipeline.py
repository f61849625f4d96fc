"""Bubbles against the papers and the simulated schedules, and every error."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit import cost, schedules

pytestmark = pytest.mark.check
CHUNKED = ("interleaved", "lockstep", "breadth_first")
SPELLINGS = [(("1f1b", "1F1B", "one_f_one_b", "OneFOneB"), {})]
SPELLINGS += [(("interleaved", "Interleaved-1F1B", "interleaved_1f1b", "1f1b"), {"chunks": 2})]
SPELLINGS += [(("gpipe", "GPipe"), {})]
SPELLINGS += [(("breadth_first", "Breadth-First", "breadth first"), {"chunks": 2})]


# proves S82 (the closed form)
@given(p=st.integers(1, 64), rounds=st.integers(1, 8), v=st.integers(1, 8))
def test_bubbles_of_one_kind_of_tick(p, rounds, v):
    m = rounds * p
    # Megatron's convention and GPipe's
    assert cost.bubble(p, m) == cost.bubble(p, m, schedule="gpipe") == pytest.approx((p - 1) / m)
    assert cost.bubble(p, m, of="total") == pytest.approx((p - 1) / (m + p - 1))
    for schedule in CHUNKED:
        assert cost.bubble(p, m, schedule=schedule, chunks=v) == pytest.approx((p - 1) / (v * m))
    idle, total = cost.bubble(p, m), cost.bubble(p, m, of="total")
    assert total == pytest.approx(idle / (1 + idle))


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
def test_whole_forms_are_simulated(name):
    for p, m in product(range(1, 5), range(1, 11)):
        line = getattr(schedules, name)(p, m).simulate(3, 5)
        assert (line.bubble, line.bubble_of_total) == pytest.approx(
            (cost.bubble(p, m, name), cost.bubble(p, m, name, of="total"))
        )


@pytest.mark.parametrize("name", CHUNKED)
def test_chunked_forms_are_simulated_or_refused(name):
    for p, m, v in product(range(1, 5), range(1, 11), range(1, 4)):
        if v == 1 or (m >= p if name == "breadth_first" else m % p == 0):
            line = getattr(schedules, name)(p, m, v).simulate()
            assert line.bubble == pytest.approx(cost.bubble(p, m, name, chunks=v))
        else:
            with pytest.raises(ValueError, match="bubble: the closed form of "):
                cost.bubble(p, m, name, chunks=v)


@pytest.mark.parametrize(("names", "costs"), SPELLINGS)
def test_spellings(names, costs):
    assert len({cost.bubble(8, 16, name, **costs) for name in names}) == 1


@pytest.mark.parametrize("integer", [int, float, np.int32, np.int64])
def test_types(integer):
    found = cost.bubble(integer(4), integer(8))
    assert type(found) is float and found == 3 / 8
    assert cost.bubble(1, 1) == 0
    assert cost.bubble(4, 10**30, of="total") == pytest.approx(3e-30)


# ---- published bubbles and microbatches in flight, against the schedules run tick by tick

COSTS = [(f, i, w) for f, i, w in product((1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3, 4)) if i + w]


def idle(schedule, forward, inputs, weight, overlapped=None):
    """A step's bubble, simulated, and the most that a device idles in its own span; exact."""
    if overlapped is not None:
        overlapped = Fraction(overlapped)
    line = schedule.simulate(
        Fraction(forward), Fraction(inputs + weight), Fraction(inputs), Fraction(weight), overlapped=overlapped
    )
    return line.bubble * max(line.busy), line.bubble_of_span * max(line.busy)


# proves F38 (the published forms)
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_zb_h1_zb_v_and_dualpipe_v(p):
    """Qi et al., table 2: (p-1)(F + I - W) where W is the least of the three."""
    for m in range(p, 2 * p + 2):
        schedule = schedules.zero_bubble_h1(p, m)
        for f, i, w in COSTS:
            assert idle(schedule, f, i, w)[0] == (p - 1) * (f + i - min(f, i, w))
    # Nothing within a device's own span, where the three parts are equal.
    for m in range(2 * p - 1, 2 * p + 2):
        assert idle(schedules.zero_bubble_v(p, m), 2, 2, 2)[1] == 0
    # DeepSeek-V3, table 2: (p-1)(F&B + B - 3W) / 2, where forward and input gradient are equal and W is no longer.
    for m in (2 * p, 2 * p + 3):
        schedule = schedules.dualpipe_v(p, m)
        for f, i, w in COSTS:
            if f == i and w <= f:
                bubble = Fraction((p - 1) * (f + 2 * (i + w) - 3 * w), 2)
                assert idle(schedule, f, i, w, f + i + w) == (bubble, bubble)


def test_in_flight_of_every_schedule():  # proves F40 (in flight)
    for p, m in product(range(1, 7), range(1, 16)):
        most = {"gpipe": m, "one_f_one_b": p, "zero_bubble_h1": p, "zero_bubble_v": p, "dualpipe_v": p + 0.5}
        for name, published in most.items():
            assert max(getattr(schedules, name)(p, m).simulate().peak_in_flight) == min(m, published)
        for v in range(1, 4):
            further = min(max(0, m - p), p - 1) / v if v > 1 else 0  # Korthikanti et al., section 4.2.3
            peak = max(schedules.interleaved(p, m, v).simulate().peak_in_flight)
            assert peak == pytest.approx(min(m, p + further))
            assert max(schedules.breadth_first(p, m, v).simulate().peak_in_flight) == m
