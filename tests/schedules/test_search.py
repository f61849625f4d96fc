"""search.py: the fastest schedule that is found for given costs and memory, beside the published and the bound."""

import contextlib
import inspect
from itertools import product

import pytest

from shardkit import schedules
from shardkit.schedules.action import Action
from shardkit.schedules.base import scheduled
from shardkit.schedules.search import search
from support.refusals import raises, value_error

EVEN, UNEVEN = {}, {"forward": 2, "backward": 5, "input_grad": 3}
COSTS = {"even": EVEN, "uneven": UNEVEN, "long input": {"backward": 2, "input_grad": 1.3}}
# That split their backward or not; lockstep holds more than 1F1B.
PUBLISHED = {1: ("one_f_one_b", "zero_bubble_h1", "gpipe"), 2: ("interleaved", "zero_bubble_v", "breadth_first")}


def built(name, devices, microbatches, chunks):
    build = getattr(schedules, name)
    return build(devices, microbatches, *([chunks] if "chunks" in inspect.signature(build).parameters else []))


# proves N44 in part: at the memory of 1F1B it reaches the bound, and at half of it V-Min's makespan
@pytest.mark.quick("8-8-2-None-27.5", "8-32-1-None-103", "8-32-2-4-109.5")
@pytest.mark.parametrize(
    ("devices", "microbatches", "chunks", "memory", "makespan"),
    [
        (8, 32, 2, None, 99.5),
        (8, 32, 4, None, 97.75),
        (8, 32, 1, None, 103),
        (8, 32, 2, 4, 109.5),
        (8, 8, 2, None, 27.5),
    ],
)
def test_what_it_finds(devices, microbatches, chunks, memory, makespan):
    found = search(devices, microbatches, chunks, memory=memory)
    found.check()
    line = found.simulate()
    assert line.makespan == makespan and max(line.peak_in_flight) <= (devices if memory is None else memory)
    if memory is None:
        assert makespan == found.least_makespan(), "no other can be faster"


@pytest.mark.quick("4-8-1-uneven", "4-8-2-uneven", "4-16-2-long input")
@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize(("devices", "microbatches"), [(4, 8), (4, 16), (8, 8), (8, 16), (8, 64), (16, 16)])
def test_no_published_schedule_is_faster_at_its_memory(devices, microbatches, chunks, costs):
    for name in PUBLISHED[chunks]:
        known = built(name, devices, microbatches, chunks).simulate(**COSTS[costs])
        found = search(devices, microbatches, chunks, memory=max(known.peak_in_flight), **COSTS[costs])
        line = found.simulate(**COSTS[costs])
        assert line.makespan <= known.makespan + 1e-9, name
        assert max(line.peak_in_flight) <= max(known.peak_in_flight)


@pytest.mark.parametrize("communication", [0, 1])
def test_no_order_of_few_actions_is_faster_and_the_bound_holds_for_all(communication):
    """Two devices and three microbatches: every order that keeps the microbatches in turn, against the search."""
    orders = [[]]
    while len(orders[0]) < 9:
        longer = []
        for order in orders:
            count = {op: sum(name == op for name, _ in order) for op in "FIW"}
            for op, before in (("F", 3), ("I", count["F"]), ("W", count["I"])):
                longer += [[*order, (op, count[op])]] if count[op] < before else []
        orders = longer
    costs = {"forward": 2, "backward": 3, "input_grad": 2, "communication": communication}
    lines = []
    for pair in product(orders, repeat=2):
        cells = [[(Action(device, *action),) for action in order] for device, order in enumerate(pair)]
        with contextlib.suppress(ValueError):  # two orders may wait for each other
            lines.append(scheduled("drawn", cells, 3).simulate(**costs))
    for memory in (1, 2, 3):
        least = min(line.makespan for line in lines if max(line.peak_in_flight) <= memory)
        found = search(2, 3, memory=memory, **costs)
        assert found.simulate(**costs).makespan == least >= found.least_makespan(memory=memory, **costs)


def test_nothing_goes_below_the_bound():
    """Catches a bound that one placement of stages, one split or one size breaks."""
    names = ("gpipe", "one_f_one_b", "zero_bubble_h1", "interleaved", "breadth_first", "lockstep", "zero_bubble_v")
    for name, devices, microbatches, costs in product(names, (1, 2, 3, 5), (1, 2, 5), (EVEN, UNEVEN)):
        for communication in (0, 0.5):
            schedule = built(name, devices, microbatches, 2)
            line = schedule.simulate(**costs, communication=communication)
            given = {"memory": max(line.peak_in_flight), "communication": communication} | costs
            assert schedule.least_makespan(**given) <= line.makespan + 1e-9, (name, devices, microbatches)
    assert search(1, 4).least_makespan() == search(1, 4).simulate().makespan == 12


def test_refusals():
    raises(
        lambda: search(4, 8, 2, memory=0.5),
        value_error("search: memory must hold one microbatch, all chunks of a device; got 0.5. Pass memory=1 or more."),
    )
    raises(
        lambda: search(4, 0),
        value_error("search: microbatches must be a whole number of at least 1; got 0. Pass microbatches=1 or more."),
    )
    raises(
        lambda: search(4, 8, forward=0),
        value_error("search: forward must be greater than 0; got 0. Pass for example forward=1."),
    )
