"""ZeRO and activation memory against the papers' printed tables."""

import inspect
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardkit as sk
from shardkit import cost
from shardkit.cost.zero import zero_breakdown

pytestmark = pytest.mark.check

GB = 1e9
# ZeRO, table 1: GB a device at DP degrees 1, 4, 16, 64, 256, 1024; a row for each model and stage 1, 2, 3.
DEGREES = (1, 4, 16, 64, 256, 1024)
TABLE_1 = {
    (7.5e9, 1): (120, 52.5, 35.6, 31.4, 30.4, 30.1),
    (7.5e9, 2): (120, 41.3, 21.6, 16.6, 15.4, 15.1),
    (7.5e9, 3): (120, 30, 7.5, 1.88, 0.47, 0.12),
    (128e9, 1): (2048, 896, 608, 536, 518, 513),
    (128e9, 2): (2048, 704, 368, 284, 263, 257),
    (128e9, 3): (2048, 512, 128, 32, 8, 2),
    (1e12, 1): (16000, 7000, 4750, 4187, 4046, 4011),
    (1e12, 2): (16000, 5500, 2875, 2218, 2054, 2013),
    (1e12, 3): (16000, 4000, 1000, 250, 62.5, 15.6),
}
MODELS = ((64, 6144), (96, 12288), (128, 20480), (160, 25600))  # Korthikanti et al., table 3: heads, hidden


# proves F52 (the closed form)
@pytest.mark.parametrize(("row", "printed"), TABLE_1.items())
def test_zero_table_1(row, printed):
    parameters, stage = row
    for ways, figure in zip(DEGREES, printed, strict=True):
        # the table rounds its first model and cuts the digits of the others
        unit = 10.0 ** -len(f"{figure}".partition(".")[2])
        assert cost.zero_memory(parameters, ways, stage) / GB == pytest.approx(figure, abs=unit)


# proves S70: the figure of the paper that every plan of it names
def test_zero_figure_1_and_its_parts():
    found = [round(cost.zero_memory(7.5e9, 64, stage) / GB, 1) for stage in range(4)]
    assert found == [120.0, 31.4, 16.6, 1.9]
    assert "arXiv:1910.02054" in sys.modules[cost.zero_memory.__module__].__doc__
    assert all("Rajbhandari" in inspect.getdoc(plan) for plan in (sk.zero1, sk.zero2, sk.fsdp))
    parts = zero_breakdown(1000, 4, 2, parameter_bytes=4, gradient_bytes=8, optimizer_bytes=16)
    assert parts == (4000, 2000, 4000) and parts.total == 10_000 and parts.gradients == 2000
    assert cost.zero_memory(1000, 4, 2, parameter_bytes=4, gradient_bytes=8, optimizer_bytes=16) == 10_000


@pytest.mark.parametrize("number", [int, float, np.int32, np.int64, np.float64, Fraction])
def test_types_of_sizes(number):
    # 12 times two billion is more than 32 bits hold; so are these activations
    assert cost.zero_memory(number(2 * 10**9), 4, 1) == 14 * 10**9
    assert cost.zero_memory(number(2 * 10**9), np.int64(1), np.int64(0)) == 32 * 10**9
    if number is not Fraction:
        sizes = {"batch": number(128), "sequence": number(2048), "hidden": number(12288)}
        for recompute, factor in (("none", 34 + 80), ("selective", 34), ("full", 2)):
            found = cost.activation_memory(**sizes, heads=96, recompute=recompute)
            assert type(found) is float and found == factor * 128 * 2048 * 12288
        assert cost.tensor_volume(**sizes, ways=2).forward == 2 * 128 * 2048 * 12288 * 2
        assert cost.transformer_parameters(layers=number(105), hidden=number(20480)) == 105 * (12 * 20480 + 13) * 20480


@given(parameters=st.integers(1, 10**13), ways=st.integers(1, 10**5))
def test_zero_stages_only_ever_save(parameters, ways):
    held = [cost.zero_memory(parameters, ways, stage) for stage in range(4)]
    assert held == sorted(held, reverse=True)
    assert held[3] == pytest.approx(held[0] / ways)
    assert held[0] == 16 * parameters


@given(parameters=st.integers(1, 10**12), ways=st.integers(1, 10**4), k=st.integers(1, 64))
def test_zero_volume_in_units_of_the_parameters(parameters, ways, k):
    unit = 2 * parameters * (ways - 1) / ways

    def volume(stage, **options):
        return cost.zero_volume(parameters, ways, stage, accumulate=k, **options)

    assert volume(0) == volume(1) == volume(3, layerwise=False) == pytest.approx(2 * unit)
    assert volume(0, gradient_bytes=4) == pytest.approx(4 * unit)
    assert volume(1, gradient_bytes=4) == pytest.approx(3 * unit)
    assert volume(2) == pytest.approx((k + 1) * unit)
    assert volume(3) == pytest.approx(3 * k * unit)
    assert volume(3, regather=False) == pytest.approx(2 * k * unit)


@pytest.mark.parametrize("tensor", [1, 8])
@pytest.mark.parametrize(("heads", "hidden"), MODELS)
def test_activation_table_2(heads, hidden, tensor):
    s, b = 2048, 3
    sbh, core = s * b * hidden, 5 * heads * s / hidden

    def layer(**options):
        return cost.activation_memory(batch=b, sequence=s, hidden=hidden, heads=heads, **options)

    assert layer() == pytest.approx(sbh * (34 + core))
    assert layer(tensor=tensor) == pytest.approx(sbh * (10 + 24 / tensor + core / tensor))
    assert layer(tensor=tensor, sequence_parallel=True) == pytest.approx(sbh / tensor * (34 + core))
    assert layer(tensor=tensor, recompute="selective") == pytest.approx(sbh * (10 + 24 / tensor))
    assert layer(tensor=tensor, sequence_parallel=True, recompute="selective") == pytest.approx(sbh * 34 / tensor)
    assert layer(tensor=tensor, recompute="full") == layer(recompute=True) == 2 * sbh
    assert layer(recompute=False) == layer()


# Keys and values are 4 sbh of the 34 at as many heads as queries; with fewer they shrink, and nothing else does.
@pytest.mark.parametrize("tensor", [1, 4, 16])
def test_fewer_key_value_heads_keep_less(tensor):
    sizes = {"batch": 3, "sequence": 512, "hidden": 1024, "heads": 16, "tensor": tensor}
    sbh = 3 * 512 * 1024
    for recompute in ("none", "selective", "full"):
        whole = cost.activation_memory(**sizes, recompute=recompute)
        assert cost.activation_memory(**sizes, kv_heads=16, recompute=recompute) == whole
        for kv_heads in (1, 2, 4, 8):
            found = cost.activation_memory(**sizes, kv_heads=kv_heads, recompute=recompute)
            here = max(1, kv_heads / tensor)  # a device holds at least one
            dropped = 0 if recompute == "full" else 4 * sbh * (16 / tensor - here) / 16
            assert found == pytest.approx(whole - dropped)
