"""Bubbles and what is in flight against schedules run tick by tick: a closed form is exact, or it refuses."""

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit import cost, schedules

pytestmark = pytest.mark.check


def zero_bubble(p, m):
    """Each device's order of (op, microbatch) in ZB-H1: as 1F1B, with weight gradients that begin the device's index
    later."""
    orders = []
    for device in range(p):
        begun, weighed = min(m, p - 1 - device), 0
        ops = [("F", i) for i in range(begun)]
        for i in range(m):
            if begun < m:
                ops.append(("F", begun))
            ops.append(("B", i))
            if begun >= m or i + 1 - weighed > device:
                ops.append(("W", weighed))
                weighed += 1
            begun += 1
        orders.append(ops + [("W", i) for i in range(weighed, m)])
    return orders


def run(orders):
    """When each op ends if it takes one tick and starts as soon as its device and its input are there."""
    p, ends, clocks, places = len(orders), {}, [0] * len(orders), [0] * len(orders)
    while any(place < len(ops) for place, ops in zip(places, orders, strict=True)):
        before = list(places)
        for d, ops in enumerate(orders):
            while places[d] < len(ops):
                op, i = ops[places[d]]
                needs = {
                    "F": [("F", i, d - 1)] * (d > 0),
                    "B": [("F", i, d), *[("B", i, d + 1)] * (d < p - 1)],
                    "W": [("B", i, d)],
                }[op]
                if any(need not in ends for need in needs):
                    break
                clocks[d] = ends[op, i, d] = 1 + max([clocks[d], *(ends[need] for need in needs)])
                places[d] += 1
        assert places != before, "the order waits for itself"
    return ends


def live(ops):
    """The most microbatches between their forward and their weight gradient."""
    now = [0]
    for op, _ in ops:
        now.append(now[-1] + {"F": 1, "B": 0, "W": -1}[op])
    return max(now)


# proves F38 (the closed forms)
@given(p=st.integers(1, 9), more=st.integers(0, 20))
def test_zero_bubble_h1_runs_tick_by_tick(p, more):
    m = more + p
    orders = zero_bubble(p, m)
    ends = run(orders)
    spans = [max(ends["W", i, d] for i in range(m)) - (ends["F", 0, d] - 1) for d in range(p)]
    assert max(spans) - 3 * m == cost.bubble_time(p, m, "zero_bubble_h1")
    assert [live(ops) for ops in orders] == [cost.in_flight(p, m, "zero_bubble_h1")] * p
    assert max(ends.values()) == 3 * m + p - 1


def test_with_fewer_microbatches_than_stages_zb_h1_idles_longer():
    for m in range(1, 8):
        assert max(run(zero_bubble(8, m)).values()) - 3 * m == 7 + (8 - m)
        with pytest.raises(ValueError, match="needs at least 8 microbatches on 8 stages"):
            cost.bubble_time(8, m, "zero_bubble_h1")


def answered(*args, **costs):
    """The closed form, or None where it refuses because it does not hold."""
    try:
        return cost.bubble_time(*args, **costs)
    except ValueError as error:
        assert str(error).startswith("bubble: the closed form of ")
        return None


def idle(schedule, forward, inputs, weight, overlapped=None):
    """A step's bubble, simulated, and the most that a device idles in its own span; exact."""
    if overlapped is not None:
        overlapped = Fraction(overlapped)
    line = schedule.simulate(
        Fraction(forward), Fraction(inputs + weight), Fraction(inputs), Fraction(weight), overlapped=overlapped
    )
    return line.bubble * max(line.busy), line.bubble_of_span * max(line.busy)


COSTS = [(f, i, w) for f, i, w in product((1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3, 4)) if i + w]


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_zb_h1_is_simulated_or_refused(p):  # W above F or above I gave too little
    assert cost.bubble_time(8, 16, "zero_bubble_h1", forward=1, backward=3, weight=2) == 7
    for m in range(1, 2 * p + 2):
        schedule = schedules.zero_bubble_h1(p, m)
        for f, i, w in COSTS:
            found = answered(p, m, "zero_bubble_h1", forward=f, backward=i + w, weight=w)
            assert (found is None) == (m < p)
            if found is not None:
                assert found == idle(schedule, f, i, w)[0]


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_zb_v_is_simulated_or_refused(p):
    for m in range(1, 2 * p + 2):
        schedule = schedules.zero_bubble_v(p, m)
        for f, i, w in ((1, 1, 1), (2, 2, 2), (1, 2, 1), (2, 1, 1)):
            found = answered(p, m, "zero_bubble_v", forward=f, backward=i + w, weight=w)
            assert (found is None) == (p > 1 and (m < 2 * p - 1 or len({f, i, w}) > 1))
            if found is not None:
                assert found == idle(schedule, f, i, w)[1] == 0


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_dualpipe_v_is_simulated_or_refused(p):  # (3, 2, 1) and (2, 3, 1) gave too little
    for m in (max(1, 2 * p - 1), 2 * p, 2 * p + 3):
        schedule = schedules.dualpipe_v(p, m)
        for f, i, w in COSTS:
            found = answered(p, m, "dualpipe_v", forward=f, backward=i + w, weight=w)
            assert (found is None) == (p > 1 and (m < 2 * p or f != i or w > f))
            if found is not None:
                assert idle(schedule, f, i, w, f + i + w) == (found, found)


@pytest.mark.parametrize("name", ["interleaved", "lockstep", "breadth_first"])
def test_chunked_forms_are_simulated_or_refused(name):
    for p, m, v in product(range(1, 5), range(1, 11), range(1, 4)):
        found = answered(p, m, name, chunks=v, forward=1, backward=2)
        holds = m >= p if name == "breadth_first" else m % p == 0
        assert (found is None) == (p > 1 and v > 1 and not holds)
        if found is not None:
            assert found == pytest.approx(float(idle(getattr(schedules, name)(p, m, v), 1, 1, 1)[0]))


def test_in_flight_of_every_schedule_is_simulated():  # interleaved between p and 2p microbatches was too much
    for p, m in product(range(1, 7), range(1, 16)):
        for name in ("gpipe", "one_f_one_b", "zero_bubble_h1", "zero_bubble_v", "dualpipe_v"):
            assert cost.in_flight(p, m, name) == max(getattr(schedules, name)(p, m).simulate().peak_in_flight)
        for name, v in product(("interleaved", "breadth_first"), range(1, 4)):
            most = max(getattr(schedules, name)(p, m, v).simulate().peak_in_flight)
            assert cost.in_flight(p, m, name, chunks=v) == pytest.approx(most)
