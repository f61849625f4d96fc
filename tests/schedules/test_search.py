"""search.py: the fastest schedule that is found for given costs and memory, beside the published and the bound."""

import contextlib
import inspect
import math
import random
from itertools import product

import numpy as np
import pytest

from shardkit import schedules
from shardkit.schedules.action import Action
from shardkit.schedules.base import build_schedule
from shardkit.schedules.exhaust import Exhaustion
from shardkit.schedules.search import search
from shardkit.schedules.simulate import find_costs
from shardkit.schedules.tighten import Actions
from support.refusals import value_error

EVEN, UNEVEN = {}, {"forward": 2, "backward": 5, "input_grad": 3}
COSTS = {"even": EVEN, "uneven": UNEVEN, "long input": {"backward": 2, "input_grad": 1.3}}
COST_NAMES = ("forward", "backward", "input_grad", "weight_grad")
# That split their backward or not; lockstep holds more than 1F1B.
PUBLISHED = {1: ("one_f_one_b", "zero_bubble_h1", "gpipe"), 2: ("interleaved", "zero_bubble_v", "breadth_first")}


def built(name, devices, microbatches, chunks):
    build = getattr(schedules, name)
    return build(devices, microbatches, *([chunks] if "chunks" in inspect.signature(build).parameters else []))


# proves N44: at the memory of 1F1B, which less than ZB-H2's is, it reaches the bound; at half of it 8% above
@pytest.mark.quick("8-8-2-None-27.5", "8-32-1-None-103", "8-32-2-4-107.5", "8-32-2-5-104.5")
@pytest.mark.parametrize(
    ("devices", "microbatches", "chunks", "memory", "makespan"),
    [
        (8, 32, 2, None, 99.5),
        (8, 32, 4, None, 97.75),
        (8, 32, 1, None, 103),
        (8, 32, 2, 4, 107.5),
        (8, 32, 2, 5, 104.5),
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


# What the authors' code makes of V-Min and V-Half, and its peak in flight: half of what it prints, for F = I = W = 1.
@pytest.mark.quick("4-8-2-29.5", "4-8-3-26.5")
@pytest.mark.parametrize(
    ("devices", "microbatches", "memory", "published"),
    [
        (4, 8, 2, 29.5),
        (4, 8, 3, 26.5),
        (4, 16, 2, 53.5),
        (4, 16, 3, 50.5),
        (6, 18, 3, 62.5),
        (6, 18, 4, 59.5),
        (8, 16, 4, 61.5),
        (8, 16, 5, 56.5),
        (12, 24, 5, 92.5),
        (12, 24, 7, 86.5),
    ],
)
def test_v_min_and_v_half_are_not_faster_at_their_memory(devices, microbatches, memory, published):
    line = search(devices, microbatches, 2, memory=memory).simulate()
    assert line.makespan <= published and max(line.peak_in_flight) <= memory


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


@pytest.mark.parametrize(
    "costs",
    {
        "even": {"forward": 2, "backward": 3, "input_grad": 2},
        "messages": {"forward": 2, "backward": 3, "input_grad": 2, "communication": 1},
        "stages differ": {"forward": [1, 3], "backward": [3, 5], "input_grad": [2, 4]},
        "one part without a cost": {"forward": 1, "backward": [2, 1], "weight_grad": [2, 0]},
    }.items(),
    ids=lambda each: each[0],
)
def test_no_order_of_few_actions_is_faster_and_the_bound_holds_for_all(costs):
    """Two devices and three microbatches: every order that keeps the microbatches in turn, against the search."""
    orders = [[]]
    while len(orders[0]) < 9:
        longer = []
        for order in orders:
            count = {op: sum(name == op for name, _ in order) for op in "FIW"}
            for op, before in (("F", 3), ("I", count["F"]), ("W", count["I"])):
                longer += [[*order, (op, count[op])]] if count[op] < before else []
        orders = longer
    lines = []
    for pair in product(orders, repeat=2):
        cells = [[(Action(device, *action),) for action in order] for device, order in enumerate(pair)]
        with contextlib.suppress(ValueError):  # two orders may wait for each other
            lines.append(build_schedule("drawn", cells, 3).simulate(**costs[1]))
    priced = find_costs("test", 2, 1, *(costs[1].get(name) for name in COST_NAMES), costs[1].get("communication", 0))
    for memory in (1, 2, 3):
        fastest = min(line.makespan for line in lines if max(line.peak_in_flight) <= memory)
        found = search(2, 3, memory=memory, **costs[1])
        assert found.simulate(**costs[1]).makespan == fastest >= found.least_makespan(memory=memory, **costs[1])
        # With nothing to start from, as fast: it leaves out no order that matters.
        every = Exhaustion(Actions(2, 3, 1, "loop", priced), memory, math.inf)
        assert every.best == fastest and every.remaining > 0


@pytest.mark.parametrize("placement", ["loop", "v"])
@pytest.mark.parametrize("memory", [1, 1.5, 2])
def test_of_few_pieces_the_search_finds_the_fastest_and_the_bound_holds(memory, placement):
    """Two chunks, stages that differ: what all orders from nothing give, of each placement, and the search of both."""
    rng = random.Random(f"{memory}{placement}")
    for _ in range(6):
        costs = {name: [rng.randint(1, 4) for _ in range(4)] for name in ("forward", "input_grad", "weight_grad")}
        costs["backward"] = [i + w for i, w in zip(costs["input_grad"], costs["weight_grad"], strict=True)]
        work = Actions(2, 2, 2, placement, find_costs("test", 4, 2, *(costs[name] for name in COST_NAMES), 0.5))
        every = Exhaustion(work, int(2 * memory), math.inf)
        found = search(2, 2, 2, memory=memory, communication=0.5, **costs)
        line = found.simulate(communication=0.5, **costs)
        assert found.least_makespan(memory=memory, communication=0.5, **costs) <= line.makespan <= every.best
        assert every.remaining > 0 and max(line.peak_in_flight) <= memory
        assert found.placement != placement or line.makespan == every.best


def test_costs_of_each_stage():
    zigzag = schedules.zero_bubble_v(2, 3)
    assert zigzag.simulate([0.5] * 4, [1] * 4).spans == zigzag.simulate().spans
    line = schedules.gpipe(2, 1).simulate(forward=np.array([1, 3]), backward=[2, 7])
    assert (line.makespan, line.busy) == (13, (3, 10))
    # The first half of the model is twice as slow: what does not know it is slower.
    costs = {"forward": [2] * 4 + [1] * 4, "backward": [4] * 4 + [2] * 4}
    unaware, aware = search(4, 8, 2, memory=2), search(4, 8, 2, memory=2, **costs)
    assert unaware.simulate(**costs).makespan == 99 and aware.simulate(**costs).makespan <= 91


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

    # Two halves may cost less than the whole.
    halves = {"backward": 2, "input_grad": 0.5, "weight_grad": 0.5}
    known = schedules.zero_bubble_h1(1, 4)
    assert known.least_makespan(**halves) == known.simulate(**halves).makespan == 8


@pytest.mark.parametrize(
    ("message", "call"),
    {
        "search: memory must hold one microbatch, all chunks of a device; got 0.5. Pass memory=1 or more.": (
            lambda: search(4, 8, 2, memory=0.5)
        ),
        "search: microbatches must be a whole number of at least 1; got 0. Pass microbatches=1 or more.": (
            lambda: search(4, 0)
        ),
        "search: forward must be greater than 0; got 0. Pass for example forward=1.": lambda: search(4, 8, forward=0),
        "search: forward must be a number, or one for each of 4 stages; got 3. Pass 4.": (
            lambda: search(2, 8, 2, forward=[1, 2, 3])
        ),
        "least_makespan: input_grad[1] must be 0 or more; got -1. Pass for example input_grad[1]=1.": (
            lambda: schedules.gpipe(2, 4).least_makespan(input_grad=[1, -1])
        ),
        "simulate: weight_grad must be at most backward; got [1, 3] of 2. Pass input_grad too.": (
            lambda: schedules.gpipe(2, 4).simulate(weight_grad=[1, 3])
        ),
    }.items(),
)
def test_refusals(message, call):
    with value_error(message):
        call()
