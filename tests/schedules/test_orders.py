"""The orders of the schedules against the published ones, recorded as PyTorch 2.13 prints them.

Four devices, eight microbatches, two chunks where there are chunks; idle ticks are left out. PyTorch's drawing of 1F1B
counts the last device's forwards from 1, a slip that its execution does not make: recorded from 0.
"""

import re
from pathlib import Path

import pytest

from shardkit import schedules
from shardkit.schedules import Schedule

pytestmark = pytest.mark.check

RECORDED = Path(__file__).parents[1] / "support" / "recorded" / "schedules"
BUILT = {
    "gpipe": schedules.gpipe(4, 8),
    "one_f_one_b": schedules.one_f_one_b(4, 8),
    "interleaved": schedules.interleaved(4, 8, chunks=2),
    "zero_bubble_h1": schedules.zero_bubble_h1(4, 8),
    "dualpipe_v": schedules.dualpipe_v(4, 8),
}


@pytest.mark.parametrize("name", BUILT)
def test_published_orders(name):  # proves F35, F36, F37, F38
    text = (RECORDED / f"{name}.csv").read_text()
    orders = [[cell for cell in row.split(",") if cell] for row in BUILT[name].to_csv().splitlines()]
    assert orders == [line.split(",") for line in text.splitlines()]
    # A file without idle ticks is an order: read, it is the same schedule, ticks and all.
    assert Schedule.from_csv(text) == BUILT[name]


def test_orders_by_hand_and_of_lockstep_by_its_closed_form():
    assert schedules.one_f_one_b(2, 3).order(0) == ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]
    assert schedules.lockstep(2, 2).order(1) == ["1F0", "1B0", "1F1", "1B1"]
    assert schedules.dualpipe_v(4, 8).order(0)[16:20] == ["7F3", "0F7", "7B3", "7F4"]
    assert schedules.interleaved(4, 7, chunks=1) == schedules.one_f_one_b(4, 7)
    assert schedules.breadth_first(4, 7, chunks=1) == schedules.gpipe(4, 7)
    assert schedules.breadth_first(2, 2, chunks=2).order(1) == ["1F0", "1F1", "3F0", "3F1", "3B0", "3B1", "1B0", "1B1"]
    assert schedules.breadth_first(2, 2, chunks=2).order(0) == ["0F0", "0F1", "2F0", "2F1", "2B0", "2B1", "0B0", "0B1"]
    schedule = schedules.zero_bubble_v(3, 8)
    assert [schedule.device(stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert schedule.order(0)[:9] == ["0F0", "0F1", "0F2", "0F3", "0F4", "5F0", "5I0", "5W0", "5F1"]
    p, m, v = 3, 7, 2
    at = schedules.lockstep(p, m, v).ticks
    for (stage, op, i), tick in at.items():
        (g, r), (c, d) = divmod(i, p), divmod(stage, p)
        forward, backward = g * v * p + c * p + r + d, (v * p - 1) + g * v * p + (v - 1 - c) * p + r + (p - 1 - d)
        assert tick == (forward if op == "F" else backward)
    assert len(at) == 2 * m * v * p


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (3, 2), (3, 4), (4, 6)])
def test_zero_bubble_v_with_few_microbatches_leaves_out_the_others(stages, microbatches):
    few, enough = (schedules.zero_bubble_v(stages, m) for m in (microbatches, 2 * stages - 1))
    for device in range(stages):
        kept = [each for each in enough.order(device) if int(re.split("[FIBW]", each)[1]) < microbatches]
        assert few.order(device) == kept
