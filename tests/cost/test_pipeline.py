"""Bubbles against the papers' tables, and every error; against the schedules: test_pipeline_forms.py."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit import cost
from support.refusals import value_error

pytestmark = pytest.mark.check


# proves S82 (the closed form)
@given(p=st.integers(1, 64), rounds=st.integers(1, 8), v=st.integers(1, 8))
def test_bubbles_of_one_kind_of_tick(p, rounds, v):
    m = rounds * p
    # Megatron's convention and GPipe's
    assert cost.bubble(p, m) == cost.bubble(p, m, schedule="gpipe") == pytest.approx((p - 1) / m)
    assert cost.bubble(p, m, of="total") == pytest.approx((p - 1) / (m + p - 1))
    for schedule in ("interleaved", "lockstep", "breadth_first"):
        assert cost.bubble(p, m, schedule=schedule, chunks=v) == pytest.approx((p - 1) / (v * m))
    idle, total = cost.bubble(p, m), cost.bubble(p, m, of="total")
    assert total == pytest.approx(idle / (1 + idle))


def test_zero_bubble_table_2():
    # Qi et al., table 2, with T_B their input gradient: (p-1)(T_F + T_B - T_W) and (p-1)(T_F + T_B - 2 T_W)
    costs = {"forward": 5, "backward": 7 + 3, "weight": 3}
    assert cost.bubble_time(8, 24, schedule="zero_bubble_h1", **costs) == 7 * (5 + 7 - 3)
    assert cost.bubble_time(8, 24, schedule="zero_bubble_h2", **costs) == 7 * (5 + 7 - 2 * 3)
    assert cost.bubble_time(8, 24, **costs) == 7 * (5 + 7 + 3)
    # where the three are equal: a third of 1F1B's, nothing, nothing
    assert cost.bubble(8, 24, schedule="zb_h1") == pytest.approx(cost.bubble(8, 24, schedule="one_f_one_b") / 3)
    assert cost.bubble(8, 24, schedule="zb_h2") == cost.bubble(8, 24, schedule="zb_v") == 0
    assert cost.bubble_time(8, 24, schedule="zb_h2", forward=2, backward=6, weight=4) == 0
    held = {"1f1b": 8, "gpipe": 24, "zero_bubble_h1": 8, "zero_bubble_h2": 15, "zero_bubble_v": 8}
    assert {name: cost.in_flight(8, 24, schedule=name) for name in held} == held


def test_deepseek_table_2():
    costs = {"forward": 2, "backward": 5, "weight": 1.5}
    assert cost.bubble_time(8, 20, **costs) == 7 * (2 + 5)
    assert cost.bubble_time(8, 20, schedule="zb_h1", **costs) == 7 * (2 + 5 - 2 * 1.5)
    assert cost.bubble_time(8, 20, schedule="dualpipe", overlapped=6, **costs) == 3 * (6 + 5 - 3 * 1.5)
    assert cost.in_flight(8, 20, schedule="dualpipe") == 9
    # sixteen stages of half the layers on eight devices: (16/2 - 1)(F&B + B - 3W) of half the cost
    equal = {"forward": 2, "backward": 3.5, "weight": 1.5}
    assert cost.bubble_time(8, 20, schedule="dualpipe_v", overlapped=5.5, **equal) == 7 * (5.5 + 3.5 - 3 * 1.5) / 2
    assert cost.in_flight(8, 20, schedule="dualpipe_v") == (16 + 1) / 2
    # the published drawing of 8 ranks and 20 microbatches: 66 columns, 60 of them busy, with F = B - W = W = 1
    assert cost.bubble_time(8, 20, schedule="dualpipe") == 6
    assert cost.bubble(8, 20, schedule="dualpipe") == 6 / 60
    assert cost.bubble(8, 20, schedule="dualpipe", overlapped=2.5) == 4.5 / 50


# Makespans of schedules simulated tick by tick, p = 8, F = 1, B = 2; lockstep is exact at every m.
@pytest.mark.parametrize(
    ("schedule", "chunks", "makespans"),
    [
        ("lockstep", 1, {8: 45, 16: 69, 32: 117, 64: 213}),
        ("lockstep", 2, {8: 34.5, 16: 58.5, 32: 106.5, 64: 202.5}),
    ],
)
def test_simulated_makespans(schedule, chunks, makespans):
    for m, makespan in makespans.items():
        idle = cost.bubble_time(8, m, schedule=schedule, chunks=chunks)
        assert 3 * m + idle == makespan
        assert 3 * m * (1 + cost.bubble(8, m, schedule=schedule, chunks=chunks)) == pytest.approx(makespan)


@pytest.mark.parametrize(
    ("names", "costs"),
    [
        (("1f1b", "1F1B", "one_f_one_b", "OneFOneB"), {}),
        (("interleaved", "Interleaved-1F1B", "interleaved_1f1b", "1f1b"), {"chunks": 2}),
        (("gpipe", "GPipe"), {}),
        (("breadth_first", "Breadth-First", "breadth first"), {"chunks": 2}),
        (("zero_bubble_h1", "ZB-H1", "zbh1", "zb_h1", "ZeroBubbleH1"), {}),
        (("zero_bubble_h2", "ZB-H2"), {"forward": 2}),
        (("zero_bubble_v", "ZB-V", "ZBV"), {}),
        (("dualpipe", "DualPipe", "dual_pipe"), {}),
        (("dualpipe_v", "DualPipeV", "dualpipev"), {}),
    ],
)
def test_spellings(names, costs):
    assert len({cost.bubble(8, 16, name, **costs) for name in names}) == 1
    assert len({cost.in_flight(8, 16, name, chunks=costs.get("chunks", 1)) for name in names}) == 1


@pytest.mark.parametrize("integer", [int, float, np.int32, np.int64])
def test_types(integer):
    for name, value in (("1f1b", 3 / 8), ("zero_bubble_h1", 1 / 8), ("zero_bubble_h2", 0.0), ("dualpipe", 1 / 12)):
        found = cost.bubble(integer(4), integer(8), name)
        assert type(found) is float and found == value
        assert type(cost.in_flight(integer(4), integer(8), name)) is float
        assert type(cost.bubble_time(4, 8, name, forward=integer(1), backward=integer(2), weight=integer(1))) is float
    assert cost.bubble(1, 1) == cost.bubble_time(1, 1, "zero_bubble_h1") == 0
    assert cost.bubble(4, 10**30, of="total") == pytest.approx(3e-30)


def test_interleaving_holds_what_the_paper_says():
    assert cost.in_flight(8, 64, schedule="interleaved", chunks=3) == pytest.approx(8 * (1 + 7 / 24))
    assert cost.in_flight(8, 64, schedule="interleaved") == 8
    assert cost.in_flight(8, 3) == 3


SCHEDULES = (
    "'gpipe', '1f1b', 'interleaved', 'lockstep', 'breadth_first', 'zero_bubble_h1', 'zero_bubble_h2', 'zero_bubble_v', "
    "'dualpipe' or 'dualpipe_v'"
)


ERRORS = {
    "bubble: of must be 'ideal' or 'total'; got 'all'. Pass for example of='ideal'.": lambda: cost.bubble(
        4, 8, of="all"
    ),
    f"bubble: schedule must be {SCHEDULES}; got '2f2b'. Pass for example schedule='gpipe'.": (
        lambda: cost.bubble(4, 8, schedule="2f2b")
    ),
    "bubble: schedule 'gpipe' does not take chunks; got chunks=2. Leave chunks out, or choose 'interleaved', "
    "'lockstep' or 'breadth_first'.": lambda: cost.bubble(4, 8, "gpipe", chunks=2),
    "bubble: 'dualpipe' needs an even number of stages; got 5. Choose 6.": (
        lambda: cost.bubble(5, 8, schedule="dualpipe")
    ),
    "bubble: schedule '1f1b' does not run forward and backward together; got overlapped=2. Leave it out, or choose "
    "'dualpipe' or 'dualpipe_v'.": lambda: cost.bubble(4, 8, overlapped=2),
    "bubble: the closed form of 'zero_bubble_v' needs equal times of forward, input gradient and weight gradient; got "
    "1.0, 1.5 and 1.5. Change them, or call schedules.zero_bubble_v(4, 8).simulate(...), which is exact.": (
        lambda: cost.bubble(4, 8, schedule="zero_bubble_v", backward=3)
    ),
    "bubble: the closed form of 'dualpipe_v' needs equal times of forward and input gradient, and a weight gradient no "
    "longer; got 3.0, 2.0 and 1.0. Change them, or call schedules.dualpipe_v(8, 20).simulate(...), which is exact.": (
        lambda: cost.bubble(8, 20, "dualpipe_v", forward=3, backward=3, weight=1)
    ),
    "bubble: the closed form of 'dualpipe_v' needs overlapped to be forward + backward, 3.0; got 2. Change them, or "
    "call schedules.dualpipe_v(8, 20).simulate(...), which is exact.": (
        lambda: cost.bubble(8, 20, "dualpipe_v", overlapped=2)
    ),
    "bubble: the closed form of 'zero_bubble_h2' needs an input gradient or a weight gradient no longer than forward "
    "in the times of the three; got 1.0, 2.0 and 2.0. Change them.": (
        lambda: cost.bubble(4, 8, "zero_bubble_h2", forward=1, backward=4)
    ),
    "bubble: the closed form of 'breadth_first' needs at least 4 microbatches on 4 stages; got 3. Change them, or call "
    "schedules.breadth_first(4, 3, 2).simulate(...), which is exact.": (
        lambda: cost.bubble(4, 3, "breadth_first", chunks=2)
    ),
    "bubble: the closed form of 'interleaved' needs a multiple of stages=4 microbatches; got 6. Change them, or call "
    "schedules.interleaved(4, 6, 2).simulate(...), which is exact.": (
        lambda: cost.bubble(4, 6, "interleaved", chunks=2)
    ),
    "bubble: weight must be a part of backward; got 5.0 and 2.0. Pass the whole backward's time as backward.": (
        lambda: cost.bubble(4, 8, weight=5)
    ),
    "bubble: stages must be a whole number of at least 1; got 'gpipe'. Correct stages.": lambda: cost.bubble(
        "gpipe", 4
    ),
    "in_flight: 'lockstep' has no published form; got schedule='lockstep'. Simulate the schedule to count.": (
        lambda: cost.in_flight(4, 8, schedule="lockstep")
    ),
}


@pytest.mark.parametrize(("message", "call"), ERRORS.items())
def test_errors(message, call):
    with value_error(message):
        call()
