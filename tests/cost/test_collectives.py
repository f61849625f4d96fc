"""Closed forms of collectives: bus factors against nccl-tests, times against their bounds and the kernels."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import cost
from shardkit.analysis import census
from support.refusals import value_error

pytestmark = pytest.mark.check

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
sizes, ways = st.integers(1, 10**9), st.integers(1, 600)


def test_cost_is_reached_from_the_top():
    assert sk.cost is cost
    assert all(hasattr(cost, name) for name in cost.__all__)


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
    assert bound <= cost.collective_time(kind, huge, n, bandwidth=1e9, latency=1e-6) <= bound * (1 + 1e-6)


def test_time_of_a_collective_by_hand():
    # 8 devices, 80 bytes at 10 bytes/s: an all_reduce sends 2 * 7/8 * 80 = 140 bytes in 14 hops
    def time(kind, algorithm):
        return cost.collective_time(kind, 80, 8, bandwidth=10, latency=100, algorithm=algorithm)

    assert time("all_reduce", "ring") == 14 * 100 + 14
    assert time("all_reduce", "bidirectional") == 8 * 100 + 7
    assert time("all_reduce", "tree") == 6 * 100 + 14
    assert time("all_gather", "ring") == 7 * 100 + 56
    assert time("all_gather", "bidirectional") == 4 * 100 + 28
    assert time("reduce_scatter", "tree") == 3 * 100 + 7
    assert time("all_to_all", "ring") == 7 * 100 + 7
    assert time("all_to_all", "tree") == 3 * 100 + 3 * 4  # three rounds of half the operand
    assert time("ppermute", "ring") == time("ppermute", "tree") == 100 + 8
    assert cost.collective_time("all_reduce", 80, 1, bandwidth=10, latency=100) == 0


@given(kind=st.sampled_from(KINDS), size=sizes, n=st.integers(2, 600))
def test_algorithms_are_ordered_as_they_should(kind, size, n):
    def time(algorithm, latency):
        return cost.collective_time(kind, size, n, bandwidth=1e9, latency=latency, algorithm=algorithm)

    assert time("bidirectional", 0) == pytest.approx(time("ring", 0) / 2)
    assert time("tree", 0) >= time("ring", 0) * (1 - 1e-12)  # no algorithm beats the bandwidth bound
    rounds = math.ceil(math.log2(n)) * (2 if kind == "all_reduce" else 1)
    assert time("tree", 1e6) - time("tree", 0) == pytest.approx(rounds * 1e6)


@given(kind=st.sampled_from(KINDS), size=sizes, inner=ways, outer=ways)
def test_two_levels_of_equal_speed_send_what_one_does(kind, size, inner, outer):
    two = cost.hierarchical_time(kind, size, inner, outer, inner_bandwidth=1e9, outer_bandwidth=1e9)
    one = cost.collective_time(kind, size, inner * outer, bandwidth=1e9)
    # the stages of a reduction or a gather telescope; an all_to_all sends its bytes once a level
    if kind == "all_to_all":
        assert one <= two * (1 + 1e-9) and two <= 2 * one * (1 + 1e-9)
    else:
        assert two == pytest.approx(one, rel=1e-9)


def test_a_hierarchy_pays_on_slow_links():
    h100 = cost.chips["h100"]
    flat = cost.collective_time("all_reduce", 2**30, 64, bandwidth=h100.network_bandwidth)
    levels = cost.hierarchical_time(
        "all_reduce", 2**30, 8, 8, inner_bandwidth=h100.link_bandwidth, outer_bandwidth=h100.network_bandwidth
    )
    assert levels == pytest.approx(2**30 * (2 * 7 / 8 / 450e9 + 2 * 7 / 8 / 8 / 50e9))
    assert flat / levels > 4


@pytest.mark.parametrize("kind", KINDS[:3])
def test_each_level_sends_what_the_kernel_does(kind):
    inner, outer = 4, 2
    mesh = AbstractMesh((outer, inner), ("slow", "fast"), axis_types=(AxisType.Auto,) * 2)
    kernel = {
        "all_reduce": lambda x: sk.hierarchical.all_reduce(x, "fast", "slow"),
        "all_gather": lambda x: sk.hierarchical.all_gather(x, "fast", "slow"),
        "reduce_scatter": lambda x: sk.hierarchical.reduce_scatter(x, "fast", "slow"),
    }[kind]
    spec = P(("slow", "fast"))
    f = jax.shard_map(
        lambda x: sk.vary(kernel(x), ("slow", "fast")), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True
    )
    found = census(f, jax.ShapeDtypeStruct((64, 3), jnp.float32))
    size = 8 * 3 * 4
    for axis, bandwidths in (("fast", (1.0, math.inf)), ("slow", (math.inf, 1.0))):
        seconds = cost.hierarchical_time(
            kind, size, inner, outer, inner_bandwidth=bandwidths[0], outer_bandwidth=bandwidths[1]
        )
        assert seconds == float(sum(r.total for r in found.rows if r.axes == (axis,)))


def test_a_torus_uses_every_axis():
    # How to Scale Your Model, part 3: an all_gather of V bytes takes V / (W axes), W both directions of a link; an
    # all_to_all of V bytes takes V max(A, B, C) / (4 N W)
    whole, link = 1e12, 4.5e10
    for shape in ((16,), (16, 16), (16, 16, 16)):
        n = math.prod(shape)
        piece = whole / n
        gathered = cost.torus_time("all_gather", piece, shape, bandwidth=link)
        assert gathered == pytest.approx(whole / (2 * link * len(shape)), rel=0.07 if len(shape) == 1 else 5e-3)
        reduced = cost.torus_time("all_reduce", whole, shape, bandwidth=link)
        assert reduced == pytest.approx(2 * gathered)
        assert cost.torus_time("reduce_scatter", whole, shape, bandwidth=link) == pytest.approx(gathered)
        swapped = cost.torus_time("all_to_all", piece, shape, bandwidth=link)
        assert swapped == pytest.approx(whole * 16 / (4 * n * 2 * link))


@given(kind=st.sampled_from(KINDS[:3]), size=sizes, n=st.integers(3, 600))
def test_a_torus_of_one_dimension_is_the_bidirectional_ring(kind, size, n):
    ring = cost.collective_time(kind, size, n, bandwidth=1e9, latency=1e-6, algorithm="bidirectional")
    assert cost.torus_time(kind, size, (n,), bandwidth=1e9, latency=1e-6) == pytest.approx(ring)


def test_a_torus_without_wraparound():
    # a line has one way to its last device; two devices have one link, whatever is claimed
    for kind in KINDS:
        wrapped = cost.torus_time(kind, 64, (4, 4), bandwidth=1)
        assert cost.torus_time(kind, 64, (4, 4), bandwidth=1, wrap=False) == 2 * wrapped
        assert cost.torus_time(kind, 64, (2,), bandwidth=1) == cost.torus_time(
            kind, 64, (2, 1), bandwidth=1, wrap=False
        )
    assert cost.torus_time("all_gather", 0, (4, 4), bandwidth=1, latency=1) == 2 + 2
    assert cost.torus_time("all_gather", 0, (4, 4), bandwidth=1, latency=1, wrap=False) == 3 + 3
    assert cost.torus_time("ppermute", 64, (4, 4), bandwidth=2, latency=1) == 33
    assert cost.torus_time("all_reduce", 64, (1, 1), bandwidth=2, latency=1) == 0


@given(n=st.integers(3, 64), wrap=st.booleans())
def test_all_to_all_on_a_ring_by_counting_links(n, wrap):
    # every pair sends 1/n of the operand along the shortest way; a tie goes half each way
    load = dict.fromkeys([(i, s) for i in range(n) for s in (1, -1)], Fraction(0))
    for a in range(n):
        for b in range(n):
            ahead = (b - a) % n if wrap else b - a
            ways = [s for s in (1, -1) if abs(ahead if s > 0 else n - ahead) == min(ahead, n - ahead)] if wrap else []
            ways = ways or [1 if ahead > 0 else -1]
            for s in ways if a != b else []:
                steps = ahead if s > 0 else n - ahead
                for k in range(steps if wrap else abs(ahead)):
                    load[((a + s * k) % n, s)] += Fraction(1, n * len(ways))
    assert cost.torus_time("all_to_all", 1, (n,), bandwidth=1, wrap=wrap) == pytest.approx(float(max(load.values())))


ERRORS = {
    "bus_factor: op must be 'all_reduce', 'all_gather', 'reduce_scatter', 'all_to_all', 'gather', 'scatter', "
    "'broadcast', 'reduce', 'ppermute' or 'sendrecv'; got 'allsum'. Pass for example op='all_reduce'.": (
        lambda: cost.bus_factor("allsum", 8)
    ),
    "bus_factor: n must be a whole number of at least 1; got 'all_reduce'. Correct n.": (
        lambda: cost.bus_factor(8, "all_reduce")
    ),
    "bus_factor: n must be a whole number of at least 1; got nan. Correct n.": (
        lambda: cost.bus_factor("all_reduce", math.nan)
    ),
    "collective_time: kind must be 'all_reduce', 'all_gather', 'reduce_scatter', 'all_to_all' or 'ppermute'; got "
    "'broadcast'. Pass for example kind='all_reduce'.": lambda: cost.collective_time("broadcast", 8, 8, bandwidth=1),
    "collective_time: algorithm must be 'ring', 'bidirectional' or 'tree'; got 'star'. Pass for example "
    "algorithm='ring'.": lambda: cost.collective_time("all_reduce", 8, 8, bandwidth=1, algorithm="star"),
    "collective_time: bandwidth must be greater than 0; got 0. Correct bandwidth.": (
        lambda: cost.collective_time("all_reduce", 8, 8, bandwidth=0)
    ),
    "collective_time: latency must be 0 or more; got -1. Correct latency.": (
        lambda: cost.collective_time("all_reduce", 8, 8, bandwidth=1, latency=-1)
    ),
    "hierarchical_time: outer_bandwidth must be greater than 0; got -1. Correct outer_bandwidth.": (
        lambda: cost.hierarchical_time("all_reduce", 8, 2, 2, inner_bandwidth=1, outer_bandwidth=-1)
    ),
    "torus_time: sizes[1] must be a whole number of at least 1; got 0. Correct sizes[1].": (
        lambda: cost.torus_time("all_reduce", 8, (4, 0), bandwidth=1)
    ),
    "torus_time: sizes must name at least one dimension; got (). Pass for example (4, 4).": (
        lambda: cost.torus_time("all_reduce", 8, (), bandwidth=1)
    ),
}


@pytest.mark.parametrize(("message", "call"), ERRORS.items())
def test_errors(message, call):
    with value_error(message):
        call()
