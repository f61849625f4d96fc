"""Chips against their makers' figures, rooflines against the scaling book's."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit import cost

pytestmark = pytest.mark.check

CHIPS = {  # TFLOP/s, bytes of memory, TB/s of memory, GB/s one way of a link (TPU) or into the switch (GPU), torus
    "v4": (275, 32 * 2**30, 1.2, 45, 3),
    "v5e": (197, 16 * 2**30, 0.819, 45, 2),
    "v5p": (459, 95 * 2**30, 2.765, 90, 3),
    "v6e": (918, 32 * 2**30, 1.638, 90, 2),
    "tpu7x": (2307, 192 * 2**30, 7.38, 100, 3),
    "a100": (312, 80 * 10**9, 2.039, 300, 0),
    "h100": (989, 80 * 10**9, 3.35, 450, 0),
    "h200": (989, 141 * 10**9, 4.8, 450, 0),
    "b200": (2250, 180 * 10**9, 8.0, 900, 0),
}


def test_chips():
    assert set(cost.chips) == set(CHIPS)
    for name, (peak, memory, bandwidth, link, torus) in CHIPS.items():
        chip = cost.chips[name]
        found = (chip.flops / 1e12, chip.hbm_bytes, chip.hbm_bandwidth / 1e12, chip.link_bandwidth / 1e9, chip.torus)
        assert found == (peak, memory, bandwidth, link, torus)
        assert chip.name == name and chip.source.startswith("https://") and chip.network_bandwidth < chip.link_bandwidth
        assert cost.chip(name) is cost.chip(name.upper()) is cost.chip(chip) is chip
        assert chip.host == (1 if torus else 8)
    assert cost.group_bandwidth("v5p") == 1.8e11 and cost.group_bandwidth("v5p", 3) == 5.4e11
    assert cost.group_bandwidth("h100") == 4.5e11


def test_scaling_book_rooflines():
    # part 1: about 240 FLOPs a byte on v5e; part on GPUs: 295 on H100, 281 on B200
    assert [round(cost.critical_intensity(chip)) for chip in ("v5e", "h100", "b200")] == [241, 295, 281]
    assert cost.matmul_intensity(240, 10**6, 10**6) == pytest.approx(240, rel=1e-3)
    assert cost.matmul_intensity(2, 3, 5, value_bytes=4) == 60 / (4 * 31)
    # part 5: 2550 tokens a chip with one axis of a v5p, 850 with three
    assert round(cost.data_parallel_batch("v5p")) == 2550 and round(cost.data_parallel_batch("v5p", 3)) == 850
    assert cost.network_intensity("v5p", 3) == cost.data_parallel_batch("v5p", 3)
    # Gemma 7B with F = 50k: bound from 19 ways; LLaMA-3 70B with F = 30k: about 11 for each axis
    assert int(cost.tensor_parallel_ways("v5p", 50_000)) == 19
    assert cost.tensor_parallel_ways("v5p", 30_000, 2) / 2 == pytest.approx(11, rel=0.08)
    # the mix: 2550^2 / (2 F), about 100 for F = 32768 and 113 for LLaMA-3 70B
    assert cost.fsdp_tensor_batch("v5p", 32768) == pytest.approx(2550**2 / (2 * 32768))
    assert round(cost.fsdp_tensor_batch("v5p", 32768)) == 99
    assert round(cost.fsdp_tensor_batch("v5p", 28672)) == 113
    assert cost.fsdp_tensor_batch("h100", 32768) == 4 * (989e12 / 450e9) ** 2 / 32768


@given(tokens=st.integers(1, 10**8), ffn=st.integers(1, 10**5), chips=st.integers(1, 10**4))
def test_no_other_split_sends_for_a_shorter_time(tokens, ffn, chips):
    def seconds(x):  # forward, a layer of width D = 1 on v5p with two axes for FSDP
        y = chips / x
        times = 4 * ffn / (y * 1.8e11 * 2), 4 * tokens / (x * 1.8e11)
        return max(times), sum(times)

    fsdp, tensor = cost.fsdp_tensor_split("v5p", ffn, tokens=tokens, chips=chips)
    assert fsdp * tensor == pytest.approx(chips) and 1 <= fsdp <= chips
    for other in (1, chips, fsdp * 0.9, fsdp * 1.1):
        for best, worse in zip(seconds(fsdp), seconds(min(max(other, 1), chips)), strict=True):
            assert best <= worse * (1 + 1e-9)


@pytest.mark.parametrize(
    ("chip", "axes", "together"),
    [("v5p", (2, 1), max), ("v5p", (1, 2), max), ("v5e", (1, 1), max), ("v6e", (1, 1), max), ("h100", (1, 1), sum)],
)
def test_at_the_least_batch_the_best_split_is_just_compute_bound(chip, axes, together):
    # along different axes at once, into one switch after one another; less than the least batch waits for the network
    ffn, chips, over = 28672, 1024, dict(zip(("fsdp_axes", "tensor_axes"), axes, strict=True))
    least = cost.fsdp_tensor_batch(chip, ffn, **over) * chips
    for share, bound in ((0.9, "network"), (1, None), (1.1, "compute")):
        tokens = least * share
        x, y = cost.fsdp_tensor_split(chip, ffn, tokens=tokens, chips=chips, **over)
        line = cost.roofline(4 * tokens * ffn / chips, 0, chip)
        sent = [
            cost.roofline(0, 0, chip, sent=4 * ffn / y, axes=axes[0]).seconds,
            cost.roofline(0, 0, chip, sent=4 * tokens / x, axes=axes[1]).seconds,
        ]
        assert 1 < x < chips and sent[0] == pytest.approx(sent[1])
        if bound is None:
            assert together(sent) == pytest.approx(line.compute_seconds)
        else:
            assert ("network" if together(sent) > line.compute_seconds else "compute") == bound


def test_roofline():
    found = cost.roofline(1e12, 1e9, "h100")  # part 1: 1.01 ms
    assert found.bound == "compute" and round(1e3 * found.seconds, 2) == 1.01
    assert found.intensity == 1000 and found.flops_per_second == pytest.approx(989e12)
    loading = cost.roofline(1e9, 1e9, "v5e")
    assert loading.bound == "memory" and loading.seconds == 1e9 / 819e9 == loading.memory_seconds
    assert loading.intensity < loading.critical_intensity
    assert loading.flops_per_second == pytest.approx(819e9)
    sending = cost.roofline(1e9, 1e9, chip="v5p", sent=1e9, axes=3)
    assert sending.bound == "network" and sending.seconds == pytest.approx(1e9 / 5.4e11)
    assert cost.roofline(1, 0, "v5e").intensity == math.inf
    assert cost.arithmetic_intensity(6, 4) == 1.5


NAMES = " or ".join([", ".join(map(repr, [*cost.chips][:-1])), repr([*cost.chips][-1])])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cost.chip("v7"), f"chip: name must be {NAMES}; got 'v7'. Pass for example name='v4'."),
        (lambda: cost.roofline(1, 1, "tpu"), f"chip: name must be {NAMES}; got 'tpu'. Pass for example name='v4'."),
        (
            lambda: cost.group_bandwidth("v5e", 3),
            "group_bandwidth: axes must be at most 2 for chip 'v5e'; got 3. Choose fewer axes or another chip.",
        ),
        (
            lambda: cost.group_bandwidth("h100", 2),
            "group_bandwidth: axes must be at most 1 for chip 'h100'; got 2. Choose fewer axes or another chip.",
        ),
        (
            lambda: cost.fsdp_tensor_batch("v5e", 8, fsdp_axes=2, tensor_axes=1),
            "fsdp_tensor_batch: fsdp_axes and tensor_axes must together be at most 2 for chip 'v5e'; got 2 and 1. "
            "Choose fewer axes or another chip.",
        ),
        (lambda: cost.roofline(0, 0, "v5e"), "roofline: work must be greater than 0; got 0.0. Correct work."),
        (lambda: cost.roofline(1, -1, "v5e"), "roofline: bytes must be 0 or more; got -1. Correct bytes."),
        (
            lambda: cost.arithmetic_intensity(1, 0),
            "arithmetic_intensity: bytes must be greater than 0; got 0. Correct bytes.",
        ),
        (
            lambda: cost.matmul_intensity(1, 0, 1),
            "matmul_intensity: inner must be a whole number of at least 1; got 0. Correct inner.",
        ),
        (
            lambda: cost.tensor_parallel_ways("v5p", 0),
            "tensor_parallel_ways: ffn must be a whole number of at least 1; got 0. Correct ffn.",
        ),
        (
            lambda: cost.fsdp_tensor_split("v5p", 8, tokens=0, chips=4),
            "fsdp_tensor_split: tokens must be greater than 0; got 0. Correct tokens.",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message
