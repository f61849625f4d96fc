"""Parameters, FLOPs, bubbles, chips and rooflines against what the papers print."""

import math

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardkit as sk
from shardkit import cost

DAY = 24 * 3600
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


def test_megatron_training_times():
    # section 5.1: GPT-3's 300 billion tokens on 1024 A100s take 34 days; 450 billion of the trillion model's 84 days
    gpt3 = cost.training_time(175e9, 300e9, chips=1024, flops_per_chip=140e12)
    trillion = cost.training_time(1008e9, 450e9, chips=3072, flops_per_chip=163e12)
    assert round(gpt3 / DAY) == 34 and round(trillion / DAY) == 84
    assert cost.training_time(175e9, 300e9, chips=1024, flops_per_chip=140e12, recompute=False) == gpt3 * 6 / 8
    assert cost.training_flops(70e9, 15e12) == 6.3e24  # LLaMA-3, How to Scale Your Model, part 5


# Korthikanti et al., table 5: model FLOPs utilisation in percent, of sequence-parallel runs with an iteration time
@pytest.mark.parametrize(
    ("hidden", "layers", "batch", "gpus", "seconds", "percent"),
    [
        (6144, 48, 4, 8, 1.10, 41.5),
        (12288, 96, 64, 64, 13.75, 51.4),
        (20480, 105, 280, 280, 37.83, 56.0),
        (25600, 128, 512, 512, 71.49, 56.3),
    ],
)
def test_published_utilisation(hidden, layers, batch, gpus, seconds, percent):
    flops = cost.transformer_flops(hidden=hidden, layers=layers, batch=batch, **GPT)
    h = hidden
    form = 72 * batch * layers * 2048 * h**2 * (1 + 2048 / (6 * h) + 51200 / (12 * h * layers))
    assert flops == pytest.approx(form)
    # the first row's time has three digits
    assert 100 * cost.mfu(flops, seconds, peak=312e12, chips=gpus) == pytest.approx(percent, abs=0.2)


def test_flops_of_variants():
    sizes = {"layers": 3, "hidden": 64, "sequence": 32, "batch": 2}
    none, selective, full = (cost.transformer_flops(**sizes, recompute=r) for r in ("none", "selective", "full"))
    scores = 4 * 32 * 64 * 2 * 32 * 3
    assert selective == none + scores and full == none * 4 / 3
    assert cost.transformer_flops(**sizes, causal=True) == none - 3 * scores / 2
    assert cost.transformer_flops(**sizes, recompute=True) == full
    # a gate of 2/3 of the width costs what no gate does; half the key/value heads save a matrix
    assert cost.transformer_flops(**sizes, ffn=96, gated=True) == cost.transformer_flops(**sizes, ffn=144)
    saved = none - cost.transformer_flops(**sizes, heads=8, kv_heads=4)
    assert saved == 3 * 2 * 64 * 64 * 2 * 32 * 3


# The parameters that the checkpoints hold.
@pytest.mark.parametrize(
    ("parameters", "sizes"),
    [
        (6738415616, {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008, "vocabulary": 32000}),  # Llama 2 7B
        (13015864320, {"layers": 40, "hidden": 5120, "heads": 40, "ffn": 13824, "vocabulary": 32000}),  # Llama 2 13B
        (
            8030261248,  # Llama 3 8B
            {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocabulary": 128256},
        ),
        (
            70553706496,  # Llama 3 70B
            {"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "vocabulary": 128256},
        ),
    ],
)
def test_llama_parameters(parameters, sizes):
    found = cost.transformer_parameters(**sizes, gated=True, biases=False, tied=False, final_norm=True)
    assert found == parameters


def test_gpt2_parameters():
    found = cost.transformer_parameters(layers=12, hidden=768, vocabulary=50257, sequence=1024, final_norm=True)
    assert found == 124439808


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_of_our_own_transformer(tied):
    config = sk.models.transformer.Config(layers=3, dim=48, heads=6, kv_heads=2, hidden=96, tied=tied)
    shapes = jax.eval_shape(lambda key: sk.models.transformer.init(key, config), jax.random.key(0))
    found = cost.transformer_parameters(
        layers=3,
        hidden=48,
        heads=6,
        kv_heads=2,
        ffn=96,
        vocabulary=config.vocabulary,
        gated=True,
        biases=False,
        tied=tied,
        final_norm=True,
    )
    assert found == sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


# proves S82 (the closed form)
@given(p=st.integers(1, 64), m=st.integers(1, 256), v=st.integers(1, 8))
def test_bubbles_of_one_kind_of_tick(p, m, v):
    # Megatron's convention and GPipe's
    assert cost.bubble(p, m) == cost.bubble(p, m, schedule="gpipe") == pytest.approx((p - 1) / m)
    assert cost.bubble(p, m, of="total") == pytest.approx((p - 1) / (m + p - 1))
    for schedule in ("interleaved", "lockstep", "looped_bfs"):
        assert cost.bubble(p, m, schedule=schedule, chunks=v) == pytest.approx((p - 1) / (v * m))
    idle, total = cost.bubble(p, m), cost.bubble(p, m, of="total")
    assert total == pytest.approx(idle / (1 + idle))


def test_zero_bubble_table_2():
    # Qi et al., table 2, with T_B their input gradient: (p-1)(T_F + T_B - T_W) and (p-1)(T_F + T_B - 2 T_W)
    costs = {"forward": 5, "backward": 7 + 3, "weight": 3}
    assert cost.bubble_time(8, 24, schedule="zero_bubble_h1", **costs) == 7 * (5 + 7 - 3)
    assert cost.bubble_time(8, 24, schedule="zero_bubble_h2", **costs) == 7 * (5 + 7 - 2 * 3)
    assert cost.bubble_time(8, 24, **costs) == 7 * (5 + 7 + 3)
    # where the three are equal: a third of 1F1B's, nothing, nothing
    assert cost.bubble(8, 24, schedule="zb_h1") == pytest.approx(cost.bubble(8, 24, schedule="one_f_one_b") / 3)
    assert cost.bubble(8, 24, schedule="zb_h2") == cost.bubble(8, 24, schedule="zb_v") == 0
    assert cost.bubble_time(8, 24, schedule="zb_h2", forward=1, backward=6, weight=4) == 0
    held = {"1f1b": 8, "gpipe": 24, "zero_bubble_h1": 8, "zero_bubble_h2": 15, "zero_bubble_v": 8}
    assert {name: cost.in_flight(8, 24, schedule=name) for name in held} == held


def test_deepseek_table_2():
    costs = {"forward": 2, "backward": 5, "weight": 1.5}
    assert cost.bubble_time(8, 20, **costs) == 7 * (2 + 5)
    assert cost.bubble_time(8, 20, schedule="zb_h1", **costs) == 7 * (2 + 5 - 2 * 1.5)
    assert cost.bubble_time(8, 20, schedule="dualpipe", overlapped=6, **costs) == 3 * (6 + 5 - 3 * 1.5)
    assert cost.in_flight(8, 20, schedule="dualpipe") == 9
    # sixteen stages of half the layers on eight devices: (16/2 - 1)(F&B + B - 3W) of half the cost
    assert cost.bubble_time(8, 20, schedule="dualpipe_v", overlapped=6, **costs) == 7 * (6 + 5 - 3 * 1.5) / 2
    assert cost.in_flight(8, 20, schedule="dualpipe_v") == (16 + 1) / 2
    # the published drawing of 8 ranks and 20 microbatches: 66 columns, 60 of them busy, with F = B - W = W = 1
    assert cost.bubble_time(8, 20, schedule="dualpipe") == 6
    assert cost.bubble(8, 20, schedule="dualpipe") == 6 / 60
    assert cost.bubble(8, 20, schedule="dualpipe", overlapped=2.5) == 4.5 / 50


# Makespans of schedules simulated tick by tick, p = 8, F = 1, B = 2; lockstep is exact at every m.
@pytest.mark.parametrize(
    ("schedule", "chunks", "makespans"),
    [
        ("lockstep", 1, {8: 45, 16: 69, 32: 117, 64: 213}),
        ("lockstep", 2, {8: 34.5, 16: 58.5, 32: 106.5, 64: 202.5}),
        ("zero_bubble_h1", 1, {8: 31}),
    ],
)
def test_simulated_makespans(schedule, chunks, makespans):
    for m, makespan in makespans.items():
        idle = cost.bubble_time(8, m, schedule=schedule, chunks=chunks)
        assert 3 * m + idle == makespan
        assert 3 * m * (1 + cost.bubble(8, m, schedule=schedule, chunks=chunks)) == pytest.approx(makespan)


def test_interleaving_holds_what_the_paper_says():
    assert cost.in_flight(8, 64, schedule="interleaved", chunks=3) == pytest.approx(8 * cost.interleaving_factor(8, 3))
    assert cost.in_flight(8, 64, schedule="interleaved") == 8
    assert cost.in_flight(8, 3) == 3


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
    # the mix: 2 * 2550^2 / F, about 396 for F = 32768
    assert cost.fsdp_tensor_batch("v5p", 32768) == pytest.approx(2 * 2550**2 / 32768)
    assert round(cost.fsdp_tensor_batch("v5p", 32768)) == 397
    assert cost.fsdp_tensor_batch("h100", 32768) == 4 * (989e12 / 450e9) ** 2 / 32768


@given(tokens=st.integers(1, 10**8), ffn=st.integers(1, 10**5), chips=st.integers(1, 10**4))
def test_no_other_split_sends_for_a_shorter_time(tokens, ffn, chips):
    def seconds(x):  # forward, a layer of width D = 1 on v5p with two axes for FSDP
        y = chips / x
        return 4 * ffn / (y * 1.8e11 * 2) + 4 * tokens / (x * 1.8e11)

    fsdp, tensor = cost.fsdp_tensor_split("v5p", ffn, tokens=tokens, chips=chips)
    assert fsdp * tensor == pytest.approx(chips) and 1 <= fsdp <= chips
    for other in (1, chips, fsdp * 0.9, fsdp * 1.1):
        assert seconds(fsdp) <= seconds(min(max(other, 1), chips)) * (1 + 1e-9)


def test_at_the_least_batch_the_best_split_is_just_compute_bound():
    ffn, chips = 32768, 64
    tokens = cost.fsdp_tensor_batch("v5p", ffn) * chips
    fsdp, tensor = cost.fsdp_tensor_split("v5p", ffn, tokens=tokens, chips=chips)
    sent = 4 * ffn / (tensor * 1.8e11 * 2) + 4 * tokens / (fsdp * 1.8e11)
    assert sent == pytest.approx(4 * tokens * ffn / (chips * 459e12))


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


NAMES = "'v4', 'v5e', 'v5p', 'v6e', 'tpu7x', 'a100', 'h100', 'h200' or 'b200'"
SCHEDULES = (
    "'gpipe', '1f1b', 'interleaved', 'lockstep', 'looped_bfs', 'zero_bubble_h1', 'zero_bubble_h2', 'zero_bubble_v', "
    "'dualpipe' or 'dualpipe_v'"
)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cost.chip("v7"), f"chip: name must be {NAMES}; got 'v7'. Choose one of them."),
        (lambda: cost.roofline(1, 1, "tpu"), f"chip: name must be {NAMES}; got 'tpu'. Choose one of them."),
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
        (lambda: cost.bubble(4, 8, of="all"), "bubble: of must be 'ideal' or 'total'; got 'all'. Choose one of them."),
        (
            lambda: cost.bubble(4, 8, schedule="2f2b"),
            f"bubble: schedule must be {SCHEDULES}; got '2f2b'. Choose one of them.",
        ),
        (
            lambda: cost.bubble(4, 0),
            "bubble: microbatches must be a whole number of at least 1; got 0. Correct microbatches.",
        ),
        (
            lambda: cost.bubble(4, 8, chunks=2),
            "bubble: schedule '1f1b' does not take chunks; got chunks=2. "
            "Leave chunks out, or choose 'interleaved', 'lockstep' or 'looped_bfs'.",
        ),
        (
            lambda: cost.bubble(5, 8, schedule="dualpipe"),
            "bubble: 'dualpipe' needs an even number of stages; got 5. Choose 6.",
        ),
        (
            lambda: cost.bubble(4, 8, overlapped=2),
            "bubble: schedule '1f1b' does not run forward and backward together; got overlapped=2. "
            "Leave it out, or choose 'dualpipe' or 'dualpipe_v'.",
        ),
        (
            lambda: cost.bubble(4, 8, schedule="zero_bubble_v", backward=3),
            "bubble: the published form of 'zero_bubble_v' needs equal times of forward, input gradient and weight "
            "gradient; got 1.0, 1.5 and 1.5. Simulate the schedule for other times.",
        ),
        (lambda: cost.bubble(4, 8, forward=0), "bubble: forward must be greater than 0; got 0. Correct forward."),
        (
            lambda: cost.in_flight(4, 8, schedule="lockstep"),
            "in_flight: 'lockstep' has no published form; got schedule='lockstep'. Simulate the schedule to count.",
        ),
        (
            lambda: cost.transformer_parameters(layers=0, hidden=8),
            "transformer_parameters: layers must be a whole number of at least 1; got 0. Correct layers.",
        ),
        (
            lambda: cost.transformer_parameters(layers=1, hidden=8, heads=3),
            "transformer_parameters: heads must divide hidden; got 3 and 8. Change one of them.",
        ),
        (
            lambda: cost.transformer_flops(layers=1, hidden=8, sequence=4, heads=4, kv_heads=3),
            "transformer_flops: kv_heads must divide heads; got 3 and 4. Change one of them.",
        ),
        (
            lambda: cost.transformer_parameters(layers=1, hidden=8, kv_heads=2),
            "transformer_parameters: kv_heads and head_size need heads; got heads=None, kv_heads=2, head_size=None. "
            "Pass heads.",
        ),
        (
            lambda: cost.transformer_flops(layers=1, hidden=8, sequence=4, recompute="half"),
            "transformer_flops: recompute must be 'none', 'selective' or 'full'; got 'half'. Choose one of them.",
        ),
        (
            lambda: cost.training_time(1, 1, chips=0, flops_per_chip=1),
            "training_time: chips must be a whole number of at least 1; got 0. Correct chips.",
        ),
        (
            lambda: cost.training_flops(-1, 1),
            "training_flops: parameters must be 0 or more; got -1. Correct parameters.",
        ),
        (lambda: cost.mfu(1, 0, peak=1), "mfu: seconds must be greater than 0; got 0. Correct seconds."),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message
