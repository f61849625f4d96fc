"""Who sends what to whom between two meshes, against a simulation that moves the indices of the elements."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardkit.resharding.rounds import Side, UnitSend, _arrange_rounds, cut_unit, find_rounds, list_pairs

pytestmark = pytest.mark.check
MESHES = [(1,), (2,), (3,), (4,), (6,), (2, 2), (2, 3), (3, 1, 2), (2, 2, 2), (4, 4)]


@st.composite
def sides(draw, names, dims):
    """A mesh, and some of its axes, in some order, on some dims."""
    axes = tuple(zip(names, draw(st.sampled_from(MESHES)), strict=False))
    order = draw(st.permutations([name for name, _ in axes]))[: draw(st.integers(0, len(axes)))]
    places = [draw(st.integers(0, dims - 1)) for _ in order] if dims else []
    layout = tuple(tuple(a for a, place in zip(order, places, strict=False) if place == dim) for dim in range(dims))
    return Side(axes, layout)


@st.composite
def cases(draw):
    dims = draw(st.integers(0, 3))
    source, target = draw(sides("abc", dims)), draw(sides("xyz", dims))
    factor = st.sampled_from([0, 1, 1, 2, 3, 5, 12])
    shape = tuple(math.lcm(p, q) * draw(factor) for p, q in zip(source.parts, target.parts, strict=True))
    return shape, source, target


def shard_of(array, side, device):
    for dim, axes in enumerate(side.layout):
        for axis in axes:
            array = np.split(array, side.sizes[axis], axis=dim)[device[axis]]
    return array


# Alone in finding: a unit that nobody sends or that crosses twice, one that its sender does not hold, and copies of
# which one sends or receives all.
@settings(max_examples=200)
@example(((12,), Side((("a", 2),), (("a",),)), Side((("x", 6),), ((),))))
@example(((14,), Side((("a", 2),), (("a",),)), Side((("x", 6),), ((),))))
@example(((), Side((("a", 2),), ()), Side((("x", 3),), ())))
@given(cases())
def test_every_element_crosses_once_from_where_it_is_to_where_it_belongs(case):
    shape, source, target = case
    array = np.arange(math.prod(shape)).reshape(shape)
    route = find_rounds(shape, source, target)
    held = [shard_of(array, source, device) for device in source.devices()]
    needed = [shard_of(array, target, device) for device in target.devices()]
    arrived = Counter()
    for one_round in route.rounds:
        assert len({message.sender for message in one_round}) == len(one_round)
        assert len({message.receiver for message in one_round}) == len(one_round)
        for sender, receiver, unit in one_round:
            place = tuple(slice(i * n, (i + 1) * n) for i, n in zip(unit, route.unit, strict=True))
            elements = array[place]
            assert np.isin(elements, held[sender]).all()
            assert np.isin(elements, needed[receiver]).all()
            arrived.update(elements.ravel().tolist())
    assert set(arrived.values()) <= {1}
    assert len(arrived) == array.size  # every element once, so that no fewer bytes could cross
    pairs = [list_pairs(one_round) for one_round in route.rounds]
    assert pairs == sorted(pairs)


@settings(max_examples=200)
@given(cases())
def test_copies_of_a_shard_share_its_units(case):
    """And there are as many rounds as the busiest device has units, which no order of the sends could undercut."""
    shape, source, target = case
    route = find_rounds(shape, source, target)
    messages = [message for one_round in route.rounds for message in one_round]
    loads = []
    for side, devices in (
        (source, Counter(message.sender for message in messages)),
        (target, Counter(message.receiver for message in messages)),
    ):
        for holders in side.list_holders().values():
            counts = [devices[number] for number in holders]
            assert max(counts) - min(counts) <= 1
            loads += counts
    assert len(route.rounds) == max(loads)


# Alone in finding: rounds found by the first place alone, which need up to twice as many.
@settings(max_examples=300)
@example([(0, 0), (1, 1), (0, 1), (2, 1), (2, 0), (1, 2)])
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=40))
def test_rounds_are_as_many_as_the_busiest_device_has_messages(pairs):
    messages = [UnitSend(sender, receiver, (number,)) for number, (sender, receiver) in enumerate(pairs)]
    rounds = _arrange_rounds(messages)
    assert sorted(message.unit for one_round in rounds for message in one_round) == sorted(m.unit for m in messages)
    for one_round in rounds:
        assert len({m.sender for m in one_round}) == len({m.receiver for m in one_round}) == len(one_round)
    busiest = max([0, *Counter(a for a, _ in pairs).values(), *Counter(b for _, b in pairs).values()])
    assert len(rounds) == busiest


@settings(max_examples=200)
@example((6, 10), 12)
@example((6, 10), 5)
@given(st.lists(st.integers(1, 24), max_size=3).map(tuple), st.integers(1, 100))
def test_a_piece_has_no_more_elements_than_it_may(unit, most):
    counts = cut_unit(unit, most)
    assert all(size % count == 0 for size, count in zip(unit, counts, strict=True))
    assert math.prod(unit) // math.prod(counts) <= most
    if math.prod(unit) <= most:
        assert math.prod(counts) == 1


def test_copies_in_a_target_that_cannot_share():
    """14 rows in two shards for six copies: 3 divides no unit of 7 rows, so that two of the copies receive one each."""
    route = find_rounds((14,), Side((("a", 2),), (("a",),)), Side((("x", 6),), ((),)))
    assert (route.grid, route.unit, route.count_messages(), len(route.rounds)) == ((2,), (7,), 2, 1)
    even = find_rounds((12,), Side((("a", 2),), (("a",),)), Side((("x", 6),), ((),)))
    assert (even.grid, even.unit, even.count_messages(), len(even.rounds)) == ((6,), (2,), 6, 3)
