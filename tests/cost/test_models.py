"""Parameters, FLOPs and utilization of transformers against what the papers print."""

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
