"""The roofline: every computation where its FLOPs and bytes put it, and the roof that of the chip."""

import dataclasses

import pytest

from shardkit import cost, viz
from shardkit.analysis.hlo.collectives import CompiledRow
from shardkit.analysis.hlo.compute import Work
from shardkit.analysis.hlo.memory import Memory
from shardkit.analysis.hlo.report import Report
from shardkit.analysis.jaxpr.census import Census

pytestmark = pytest.mark.check
V5E = cost.chip("v5e")
ROW = CompiledRow(
    "all_reduce", "all-reduce.1", ("data",), 8, 2, 1, 8, 8, 14, False, 0, 1e-3, 1e-3, "psum", "a.py:1 (f)", ""
)  # fmt: skip
REPORT = Report(
    "v5e:2x4", {"data": 8}, True, "", Memory(1, 1, 0, 1, 1, 0), 4096, Census(()), 0.0, (ROW,),
    Work(10**12, 10**10, 0.01),
)  # fmt: skip


def drawn(picture):
    return {line.get_gid(): line.get_xydata().tolist() for line in picture.axes[0].lines}


def test_points_and_the_roof():
    """It alone finds FLOPs and bytes exchanged, or a roof that bends elsewhere than at the critical intensity."""
    below, above = cost.roofline(1e12, 1e11, V5E), cost.roofline(1e12, 1e9, V5E)
    slow = cost.roofline(1e12, 1e9, V5E, sent=1e12)
    found = drawn(viz.roofline({"below": below, "above": above, "slow": slow, "measured": (1e12, 1e10, 0.1)}, "v5e"))
    assert found["below"] == [[10, pytest.approx(10 * V5E.hbm_bandwidth)]]
    assert found["above"] == [[1000, V5E.flops]]
    assert found["slow"][0][1] < V5E.flops / 10
    assert found["measured"] == [[100, 1e13]]
    start, ridge, end = found["roof"]
    assert ridge == [pytest.approx(197e12 / 819e9), pytest.approx(V5E.flops)]
    assert start[1] == pytest.approx(start[0] * V5E.hbm_bandwidth) and end[1] == V5E.flops


def test_ticks_are_in_the_units_of_their_labels():
    """Ticks between the powers of ten in FLOP/s, where the axis says TFLOP/s, and on top of each other."""
    axes = viz.roofline({"few": (1e12, 1e10, 0.1)}, "v5e").axes[0]
    for axis, inside in ((axes.yaxis, ("50", "100")), (axes.xaxis, ("50", "100", "200"))):
        labels = [label.get_text() for label in axis.get_majorticklabels()]
        assert set(inside) <= set(labels) and not any("10^" in label for label in labels)
        assert not any(label.get_text() for label in axis.get_minorticklabels())


def test_a_report_waits_for_what_it_exposes():
    """It alone finds the exposed collectives left out of a step's time."""
    picture = viz.roofline({"step": REPORT})
    assert drawn(picture)["step"] == [[100, pytest.approx(1e12 / 0.012)]]
    [label] = [text.get_text() for text in picture.axes[0].get_legend().get_texts()]
    assert label == "step: 42% of peak, memory bound"
    assert picture.texts[0].get_text() == "roofline of v5e"
    axes = picture.axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("FLOPs per byte of memory traffic", "TFLOP/s")
    assert axes.get_xscale() == axes.get_yscale() == "log"
    waiting = dataclasses.replace(REPORT, rows=(dataclasses.replace(ROW, exposed=0.1),))
    assert viz.roofline({"step": waiting}).axes[0].get_legend().get_texts()[0].get_text().endswith("network bound")


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda: viz.roofline({"a": (1.0, 2.0)}, "v5e"),
            TypeError,
            "viz.roofline: computation 'a' must be a cost.roofline, a report, or FLOPs, bytes and seconds; got (1.0, "
            "2.0). Pass for example sk.cost.roofline(1e12, 1e10, 'v5e').",
        ),
        (
            lambda: viz.roofline({"a": (1.0, 0.0, 1.0)}, "v5e"),
            ValueError,
            "viz.roofline: computation 'a' must have FLOPs, bytes and seconds; got inf FLOPs/byte and 1 FLOP/s. Leave "
            "it out, or count its memory traffic.",
        ),
        (
            lambda: viz.roofline({"a": (1.0, 1.0, 1.0)}),
            ValueError,
            "viz.roofline: chip must be given unless all reports are of one; got reports of none. Pass for example "
            "chip='v5e'.",
        ),
    ],
)
def test_errors(call, kind, message):
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == message
