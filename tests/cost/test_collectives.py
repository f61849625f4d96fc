"""Closed forms of collectives: bus factors against nccl-tests, times against their bounds and the kernels."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit import cost

pytestmark = pytest.mark.check

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
sizes, ways = st.integers(1, 10**9), st.integers(1, 600)


# The factors over 8 devices of nccl-tests' doc/PERFORMANCE.md; gather and scatter from their source files.
FACTORS = {
    14 / 8: ("all_reduce", "AllReduce", "all-reduce", "all reduce"),
    7 / 8: (
        *("all_gather", "all-gather", "reduce_scatter", "ReduceScatter", "reduce-scatter", "gather", "scatter"),
        *("all_to_all", "alltoall", "AllToAll"),
    ),
    1: ("broadcast", "Broadcast", "reduce", "ppermute", "sendrecv", "send_recv"),
}


@pytest.mark.parametrize(("op", "factor"), [(op, factor) for factor, ops in FACTORS.items() for op in ops])
def test_bus_factor(op, factor):
    for n in (8, np.int32(8), 8.0):
        found = cost.bus_factor(op, n)
        assert type(found) is float and found == factor
    assert cost.bus_factor(op, 1) == (1 if factor == 1 else 0)


def test_wire_is_exact_whatever_the_type_of_the_size():
    for size in (2**40, float(2**40), np.float32(2**40), np.int64(2**40), Fraction(2**40)):
        found = cost.wire("all_reduce", size, 3)
        assert found == (Fraction(2**42, 3), 4) and type(found.sent) is Fraction
    # four times 2^30 is more than 32 bits hold, seven times 2^62 more than 64
    assert cost.wire("all_gather", np.int32(2**30), 5).sent == 4 * 2**30
    assert cost.wire("all_gather", np.int64(2**62), np.int64(8)).sent == 7 * 2**62
    assert all(cost.wire(kind, 8, 1) == (0, 0) for kind in (*KINDS, "ppermute"))
    # a permutation without pairs is a shift; one that moves nothing sends nothing
    assert cost.wire("ppermute", 8, 4) == cost.wire("ppermute", 8, 4, [(0, 1), (2, 2)]) == (8, 1)
    assert cost.wire("ppermute", 8, 4, []) == cost.wire("ppermute", 8, 4, [(2, 2)]) == (0, 0)


@given(kind=st.sampled_from(KINDS), pieces=st.integers(1, 10**6), n=ways)
def test_bus_factor_is_wire_over_ncclss_size(kind, pieces, n):
    whole = pieces * n  # what nccl-tests calls the size
    operand = pieces if kind == "all_gather" else whole
    assert float(cost.wire(kind, operand, n).sent) / whole == pytest.approx(cost.bus_factor(kind, n), rel=1e-12)


# proves F84
@given(kind=st.sampled_from(KINDS), size=sizes, n=st.integers(2, 600))
def test_a_ring_is_latency_bound_when_small_and_bandwidth_bound_when_large(kind, size, n):
    traffic = cost.wire(kind, size, n)
    small = cost.collective_time(kind, 0, n, bandwidth=1e9, latency=1e-6)
    assert small == pytest.approx(traffic.hops * 1e-6)
    assert cost.collective_time(kind, size, n, bandwidth=1e9) == pytest.approx(float(traffic.sent) / 1e9)
    huge = size * 10**12
    bound = float(cost.wire(kind, huge, n).sent) / 1e9
    seconds = cost.collective_time(kind, huge, n, bandwidth=1e9, latency=1e-6)
    assert bound * (1 - 1e-12) <= seconds <= bound * (1 + 1e-6)  # both are rounded, each in its own order


def test_time_of_a_collective_by_hand():
    # 8 devices, 80 bytes at 10 bytes/s: an all_reduce sends 2 * 7/8 * 80 = 140 bytes in 14 hops
    def time(kind, n=8):
        return cost.collective_time(kind, 80, n, bandwidth=10, latency=100)

    assert time("all_reduce") == 14 * 100 + 14
    assert time("all_gather") == 7 * 100 + 56
    assert time("all_to_all") == 7 * 100 + 7
    assert time("ppermute") == 100 + 8
    assert time("all_reduce", 1) == time("ppermute", 1) == 0
