"""The picture of overlap: its rectangles are the spans of the timeline, and what is exposed is hatched."""

import dataclasses

import pytest

from shardkit import viz
from shardkit.analysis.hlo.memory import Memory
from shardkit.analysis.hlo.report import Report
from shardkit.analysis.hlo.timeline import Span, Timeline
from shardkit.analysis.jaxpr.census import Census
from shardkit.viz.bars import duration
from shardkit.viz.gantt import hidden

pytestmark = pytest.mark.check
LINE = Timeline(
    (
        Span("fusion.1", "compute", "compute", 0.0, 3e-3),
        Span("all-gather.2", "all_gather", "fsdp", 1e-3, 3e-3),
        Span("all-gather.2", "all_gather", "fsdp", 3e-3, 4e-3, exposed=True),
        Span("fusion.3", "compute", "compute", 4e-3, 6e-3),
        Span("all-reduce.4", "all_reduce", "tp", 6e-3, 6.5e-3, exposed=True),
        Span("while.5: 3 more iterations", "loop", "compute", 6.5e-3, 8e-3),
    ),
    6.5e-3,
    1.5e-3,
)
REPORT = Report(
    "v5e:2x4", {"fsdp": 4}, True, "", Memory(1, 1, 0, 1, 1, 0), 4096, Census(()), 0.0, timeline=LINE
)  # fmt: skip


def rectangles(axes):
    return {(p.get_gid(), round(1e3 * p.get_x(), 6), round(1e3 * p.get_width(), 6)): p for p in axes.patches}


def test_rectangles_are_the_spans():
    """It alone finds a span in another row, or for another time."""
    [axes] = viz.overlap(REPORT).axes
    found = rectangles(axes)
    assert set(found) == {
        ("fusion.1", 0.0, 3.0),
        ("fusion.3", 4.0, 2.0),
        ("while.5: 3 more iterations", 6.5, 1.5),
        ("all-gather.2", 1.0, 2.0),
        ("all-gather.2, exposed", 3.0, 1.0),
        ("all-reduce.4, exposed", 6.0, 0.5),
        ("wait", 3.0, 1.0),
        ("wait", 6.0, 0.5),
    }
    assert [label.get_text() for label in axes.get_yticklabels()] == ["compute", "over fsdp", "over tp"]
    rows = {name: round(patch.get_y() + 0.36, 6) for (name, _, _), patch in found.items()}
    assert rows["fusion.1"] == rows["wait"] == 0
    assert rows["all-gather.2"] == rows["all-gather.2, exposed"] == 1 and rows["all-reduce.4, exposed"] == 2


def test_what_is_exposed_is_hatched_and_what_is_hidden_is_not():
    """It alone finds an exposed part drawn as hidden."""
    [axes] = viz.overlap(REPORT).axes
    for (name, _, _), patch in rectangles(axes).items():
        assert bool(patch.get_hatch()) == ("exposed" in name or name == "wait" or "iterations" in name), name
    words = [text.get_text() for text in axes.texts]
    assert words == ["6.5 ms", "3 ms, 1 ms exposed", "500 us, 500 us exposed"]
    assert hidden(LINE) == "8 ms: compute 6.5 ms, exposed 1.5 ms of 3.5 ms of collectives, 57% hidden"


def test_what_is_too_thin_for_hatches_stays_visible():
    thin = Timeline((*LINE.spans, Span("p", "ppermute", "pp", 6.5e-3, 6.5e-3 + 1e-6, exposed=True)), 6.5e-3, 1.501e-3)
    [axes] = viz.overlap(thin).axes
    [patch] = [patch for patch in axes.patches if patch.get_gid() == "p, exposed"]
    assert patch.get_linewidth() > 0 and patch.get_edgecolor() == patch.get_facecolor()
    assert axes.texts[3].get_text() == "1 us, 1 us exposed"


def test_times_have_a_unit_that_suits_them():
    assert [duration(t) for t in (0, 4.5e-8, 1.5e-3, 0.25, 90.0)] == ["0 s", "45 ns", "1.5 ms", "250 ms", "90 s"]


def test_reports_beside_each_other_have_one_scale():
    half = LINE._replace(spans=LINE.spans[:1], compute_seconds=3e-3, exposed_seconds=0.0)
    picture = viz.overlap({"whole": REPORT, "half": half})
    assert [axes.get_xlim() for axes in picture.axes] == [(0, 8e-3)] * 2
    assert "half: 3 ms: compute 3 ms, no collectives" in [text.get_text() for text in picture.texts]


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_both_kinds_of_files_are_written(suffix, tmp_path):
    for name in "ab":
        viz.overlap(REPORT, output=tmp_path / f"{name}{suffix}")
    assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


def test_what_has_no_timeline_is_refused():
    with pytest.raises(TypeError) as error:
        viz.overlap({"a": 3})
    assert str(error.value) == (
        "viz.overlap: report must be a report of aot.compile, or a mapping of names to them; got 3. Pass "
        "sk.aot.compile(step, args, topology='v5e:2x4')."
    )
    with pytest.raises(ValueError) as error:
        viz.overlap(dataclasses.replace(REPORT, timeline=Timeline()))
    assert str(error.value) == (
        "viz.overlap: the report must have a timeline; got one of a program that the compiler refused, or that an "
        "older version wrote. Compile it again, for a topology that it fits."
    )
