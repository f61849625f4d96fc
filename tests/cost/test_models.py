"""Transformers against what papers print, chips against their makers' figures, rooflines against the scaling book."""

import math

import pytest

from shardkit import cost

pytestmark = pytest.mark.check

# Narayanan et al., table 1: billions of parameters, heads, hidden, layers, GPUs, batch, TFLOP/s achieved a GPU, and the
# percentage of the A100's 312 TFLOP/s.
MEGATRON = [
    (1.7, 24, 2304, 24, 32, 512, 137, 44),
    (3.6, 32, 3072, 30, 64, 512, 138, 44),
    (7.5, 32, 4096, 36, 128, 512, 142, 46),
    (18.4, 48, 6144, 40, 256, 1024, 135, 43),
    (39.1, 64, 8192, 48, 512, 1536, 138, 44),
    (76.1, 80, 10240, 60, 1024, 1792, 140, 45),
    (145.6, 96, 12288, 80, 1536, 2304, 148, 47),
    (310.1, 128, 16384, 96, 1920, 2160, 155, 50),
    (529.6, 128, 20480, 105, 2520, 2520, 163, 52),
    (1008.0, 160, 25600, 128, 3072, 3072, 163, 52),
]
GPT = {"sequence": 2048, "vocabulary": 51200}
PUBLISHED = [(6144, 48, 4, 8, 1.10, 41.5, 43.7), (12288, 96, 64, 64, 13.75, 51.4, 52.8)]
PUBLISHED += [(20480, 105, 280, 280, 37.83, 56.0, 57.0), (25600, 128, 512, 512, 71.49, 56.3, 57.0)]


# proves F84
@pytest.mark.parametrize("row", MEGATRON, ids=lambda row: f"{row[0]}B")
def test_megatron_table_1(row):
    billions, heads, h, layers, gpus, batch, achieved, percent = row
    parameters = cost.transformer_parameters(layers=layers, hidden=h, heads=heads, **GPT)
    assert round(parameters / 1e9, 1) == billions
    assert parameters == pytest.approx(12 * layers * h**2 * (1 + 13 / (12 * h) + (51200 + 2048) / (12 * layers * h)))
    flops = cost.transformer_flops(layers=layers, hidden=h, batch=batch, recompute="full", **GPT)
    form = 96 * batch * 2048 * layers * h**2 * (1 + 2048 / (6 * h) + 51200 / (16 * layers * h))
    assert flops == pytest.approx(form)
    seconds = flops / (gpus * achieved * 1e12)
    assert cost.mfu(flops, seconds, peak="a100", chips=gpus) * 100 == pytest.approx(percent, abs=0.55)


# Korthikanti et al., table 5: model and hardware FLOPs utilization in percent, of runs with sequence parallelism and
# selective recomputation, and the time of an iteration.
@pytest.mark.parametrize(("hidden", "layers", "batch", "gpus", "seconds", "model", "hardware"), PUBLISHED)
def test_published_utilization(hidden, layers, batch, gpus, seconds, model, hardware):
    flops = cost.transformer_flops(hidden=hidden, layers=layers, batch=batch, **GPT)
    h = hidden
    form = 72 * batch * layers * 2048 * h**2 * (1 + 2048 / (6 * h) + 51200 / (12 * h * layers))
    assert flops == pytest.approx(form)
    # the first row's time has three digits
    assert 100 * cost.mfu(flops, seconds, peak=312e12, chips=gpus) == pytest.approx(model, abs=0.2)
    repeated = cost.transformer_flops(hidden=hidden, layers=layers, batch=batch, recompute="selective", **GPT)
    form = 72 * batch * layers * 2048 * h**2 * (1 + 2048 / (3 * h) + 51200 / (12 * h * layers))
    assert repeated == pytest.approx(form)
    assert 100 * cost.mfu(repeated, seconds, peak="a100", chips=gpus) == pytest.approx(hardware, abs=0.2)


def test_flops_of_variants_and_parameters_of_gpt2():
    sizes = {"layers": 3, "hidden": 64, "sequence": 32, "batch": 2}
    none, selective, full = (cost.transformer_flops(**sizes, recompute=r) for r in ("none", "selective", "full"))
    scores = 4 * 32 * 64 * 2 * 32 * 3
    assert selective == none + 3 * scores and full == none * 4 / 3
    assert cost.transformer_flops(**sizes, recompute=True) == full
    # a gate of 2/3 of the width costs what no gate does; half the key/value heads save a matrix
    assert cost.transformer_flops(**sizes, ffn=96, gated=True) == cost.transformer_flops(**sizes, ffn=144)
    saved = none - cost.transformer_flops(**sizes, heads=8, kv_heads=4)
    assert saved == 3 * 2 * 64 * 64 * 2 * 32 * 3
    found = cost.transformer_parameters(layers=12, hidden=768, vocabulary=50257, sequence=1024, final_norm=True)
    assert found == 124439808


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
