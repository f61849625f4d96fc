"""Chips against their makers' figures, rooflines against the scaling book's."""

import math

import pytest

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
    ridges = [cost.roofline(1, 1, chip).critical_intensity for chip in ("v5e", "h100", "b200")]
    assert list(map(round, ridges)) == [241, 295, 281]
    # part 5: 2550 tokens a chip with one axis of a v5p, 850 with three
    flops = cost.chip("v5p").flops
    assert [round(flops / cost.group_bandwidth("v5p", axes)) for axes in (1, 3)] == [2550, 850]


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
