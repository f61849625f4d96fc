"""Bubbles against the papers and the simulated schedules, and every error."""

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
