"""Links of chips and as measured, and the sizes from which one way is faster: against the times of both."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit import cost
from shardkit.cost import hardware
from shardkit.cost.crossovers import ring_from

pytestmark = pytest.mark.check

LATENCY = st.floats(1e-7, 1e-3)
BANDWIDTH = st.floats(1e6, 1e12)


@given(latency=LATENCY, bandwidth=BANDWIDTH, columns=st.integers(1, 10**6), ways=st.integers(1, 2))
def test_a_matmul_hides_its_message_from_there_on(latency, bandwidth, columns, ways):
    link, flops = cost.Link(latency, bandwidth), 1e14
    found = ring_from(link, columns, flops=flops, ways=ways, value_bytes=4)

    def hidden(size):
        return ways * 2 * size / 4 * columns / flops - (latency + size / bandwidth)

    if math.isinf(found):
        assert hidden(1e15) < 0
    else:
        assert hidden(found * 0.99) < 0 < hidden(found * 1.01)


@given(latency=LATENCY, bandwidth=BANDWIDTH, n=st.integers(3, 4096))
def test_a_scatter_and_a_gather_beat_a_tree_of_whole_messages_from_there_on(latency, bandwidth, n):
    link = cost.Link(latency, bandwidth)
    found = cost.scatter_from(link, n)

    def gained(size):
        pair = cost.collective_time("all_reduce", size, n, bandwidth=bandwidth, latency=latency)
        return math.ceil(math.log2(n)) * (latency + size / bandwidth) - pair

    assert gained(found * 0.99) < 0 < gained(found * 1.01)


def test_over_two_devices_they_send_as_much_and_over_one_nothing():
    link = cost.Link(1e-6, 1e9)
    assert cost.scatter_from(link, 2) == cost.scatter_from(link, 1) == math.inf


@given(latency=LATENCY, bandwidth=BANDWIDTH, n=st.integers(2, 4096), share=st.floats(0.01, 0.99))
def test_latency_takes_its_share_of_a_bucket(latency, bandwidth, n, share):
    size = cost.bucket_bytes(cost.Link(latency, bandwidth), n, share=share)
    whole = cost.collective_time("all_reduce", size, n, bandwidth=bandwidth, latency=latency)
    if size > 1000:  # a whole number of bytes
        assert 2 * (n - 1) * latency / whole == pytest.approx(share, rel=2e-3)


def test_figures_by_hand_of_which_the_slowest_axis_counts():
    v5e, h100 = cost.links("v5e"), cost.links(cost.chips["h100"])
    assert v5e == (cost.Link(1e-6, 45e9, "chip v5e"), 197e12, ()) and h100.link == (3.4e-6, 450e9, "chip h100")
    # 5000 columns: a byte's matmul takes 25.38 ps, its hop 22.22 ps: 1 us is made up for by 317 kB
    assert ring_from(v5e.link, 5000, flops=197e12) == pytest.approx(1e-6 / (5000 / 197e12 - 1 / 45e9))
    assert ring_from(v5e.link, 4377, flops=197e12) == math.inf
    # eight devices: 14 messages of an eighth against 3 whole ones, so 11 latencies against 1.25 operands
    assert cost.scatter_from(v5e.link, 8) == pytest.approx(11 * 45e3 / 1.25)
    # 14 us of 140, in which 1.75 buckets are sent
    assert cost.bucket_bytes(v5e.link, 8) == pytest.approx(126e-6 * 45e9 / 1.75)
    fast, slow, far = cost.Link(1e-6, 9e9, "a"), cost.Link(2e-6, 1e9, "b"), cost.Link(9e-6, 4e9, "c")
    links = cost.Links(fast, 1e12, (("host", slow), ("slice", far)))
    assert links.of("model") == links.of(()) == fast and links.of(("host",)) == slow
    assert links.of(("host", "model")) == slow and links.of(("slice", "host")) == slow._replace(latency=9e-6)
    assert str(slow) == "2 us a message, 1 GB/s (b)" and str(cost.Link(0, 1e6)) == "0 us a message, 0.001 GB/s"


def test_chips_by_what_jax_calls_them():
    names = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e"}
    names |= {"TPU7x": "tpu7x", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA B200": "b200"}
    assert {kind: hardware.chip_of(kind).name for kind in names} == names
    assert [hardware.chip_of(kind) for kind in ("cpu", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "TPU v9", "", None)] == [
        None
    ] * 6
