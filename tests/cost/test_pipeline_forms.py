"""The published bubbles and microbatches in flight of schedules, against the schedules run tick by tick."""

from fractions import Fraction
from itertools import product

import pytest

from shardkit import schedules

pytestmark = pytest.mark.check
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
