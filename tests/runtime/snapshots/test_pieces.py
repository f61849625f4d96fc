"""Who keeps, sends and needs which pieces: pure functions, on drawn places."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from shardkit.runtime.snapshots.pieces import Grid, filled, moves, sharing, shifted

pytestmark = pytest.mark.check


@st.composite
def placed(draw):
    """Devices of two to four hosts in any order, as many on each, and arrays over them: replicated, split, or mixed."""
    count, each = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    hosts = draw(st.permutations([host for host in range(count) for _ in range(each)]))
    held = draw(st.lists(st.lists(st.integers(0, 3), min_size=len(hosts), max_size=len(hosts)), min_size=1, max_size=3))
    return hosts, held


@given(placed())
@settings(max_examples=60)
def test_after_the_loss_of_any_host_the_others_have_every_piece(found):
    # Catches a copy that is kept on the host that it is a copy of, and a piece that no host sends.
    hosts, held = found
    shared = sharing(held, [1] * len(held), hosts)
    for lost in set(hosts):
        left = {(each.leaf, each.piece) for each in shared.kept if hosts[each.device] != lost}
        assert left == {(leaf, piece) for leaf, pieces in enumerate(held) for piece in pieces}
    for each in shared.kept:
        device = shared.targets.index(each.device) if each.received else each.device
        assert held[each.leaf][device] == each.piece


@given(placed())
@settings(max_examples=60)
def test_nothing_is_kept_twice_or_sent_without_need(found):
    # Catches replicas that a host keeps besides each other, and copies of what another host has anyway.
    hosts, held = found
    shared = sharing(held, [1] * len(held), hosts)
    kept = [(each.leaf, each.piece, hosts[each.device]) for each in shared.kept]
    assert len(set(kept)) == len(kept)
    for each in shared.kept:
        having = {host for host, piece in zip(hosts, held[each.leaf], strict=True) if piece == each.piece}
        assert each.received == (hosts[each.device] not in having)
        assert not each.received or len(having) == 1
    assert set(shared.sent) == {each.leaf for each in shared.kept if each.received}


def test_a_host_spreads_its_pieces_over_its_devices():
    # Catches one device that copies all replicas of its host, while the others wait.
    kept = sharing([[0] * 4] * 8, [4] * 8, [0, 0, 1, 1]).kept
    assert sorted(each.device for each in kept) == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4


def test_one_host_sends_nothing():
    assert sharing([[0, 1]], [4], [0, 0])[:2] == ((), ())


def test_hosts_in_any_order_and_of_any_size():
    assert shifted([0, 1, 0, 1]) == (1, 0, 3, 2)
    assert shifted([0, 0, 1, 2]) == (2, 3, 0, 1)
    with pytest.raises(ValueError) as error:
        shifted([0, 0, 0, 1])
    assert str(error.value) == (
        "Snapshots: no host may have more than half of the devices, so that another one can keep its copies; got "
        "3 devices of 4 on one host. Start as many processes on each host."
    )


@st.composite
def grids(draw):
    """An array, its grid, and its pieces: padded dims, and rows in another order with rows of zeros among them."""
    parts = draw(st.lists(st.integers(1, 3), min_size=0, max_size=3))
    piece = [draw(st.integers(1, 3)) for _ in parts]
    stored = [a * b for a, b in zip(parts, piece, strict=True)]
    cut = {dim: draw(st.integers(1, size)) for dim, size in enumerate(stored) if draw(st.booleans())}
    rows: tuple[int, ...] = ()
    shape = [cut.get(dim, size) for dim, size in enumerate(stored)]
    if parts and draw(st.booleans()):
        kept = draw(st.integers(1, shape[0]))
        rows = tuple(draw(st.permutations([*range(kept), *[-1] * (shape[0] - kept)])))
        shape[0] = kept
    whole = np.arange(1.0, math.prod(shape) + 1).reshape(shape)
    held = whole
    if rows:
        held = np.stack([whole[row] if row >= 0 else np.zeros(shape[1:]) for row in rows])
    padded = np.zeros(stored)
    padded[tuple(map(slice, held.shape))] = held
    grid = Grid(tuple(stored), "float64", tuple(parts), tuple(cut.items()), rows)
    places = list(np.ndindex(*parts))
    indices = [tuple(slice(p * s, p * s + s) for p, s in zip(place, piece, strict=True)) for place in places]
    return whole, grid, {grid.number(index): padded[index] for index in indices}


@given(grids(), st.data())
@settings(max_examples=150)
def test_any_region_is_filled_from_the_pieces_that_touch_it(found, data):
    # Catches padding that is copied, rows in stored order, and pieces that are left out.
    whole, grid, pieces = found
    assert sorted(pieces) == list(range(grid.total))
    region = tuple(tuple(sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2)))) for size in whole.shape)
    needed = {number: pieces[number] for number in grid.touching(region)}
    expected = whole[tuple(slice(*each) for each in region)]
    np.testing.assert_array_equal(filled(region, np.float64, grid, needed), expected)


def test_an_array_without_elements_has_a_piece_without_bytes():
    grid = Grid((0, 4), "float32", (1, 2))
    assert (grid.total, grid.nbytes, list(grid.touching(((0, 0), (0, 2))))) == (2, 0, [])
    assert grid.number((slice(None), slice(2, 4))) == 1


@given(st.data())
@settings(max_examples=50)
def test_every_process_gets_what_its_host_lacks_from_one_that_has_it(data):
    # Catches a sender that lacks the piece, and one that is sent although every host has what it needs.
    hosts = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
    hosts = [sorted(set(hosts)).index(host) for host in hosts]
    drawn = st.lists(st.booleans(), min_size=6, max_size=6)
    have = np.array([data.draw(drawn) for _ in set(hosts)])
    have[0] |= ~have.any(axis=0)
    needs = np.array([data.draw(drawn) for _ in hosts])
    found = dict(moves(have, hosts, needs))
    for piece in range(6):
        lacking = any(needs[process, piece] and not have[host, piece] for process, host in enumerate(hosts))
        assert (piece in found) == lacking
        assert not lacking or have[hosts[found[piece]], piece]
