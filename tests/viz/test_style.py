"""The one look: light and dark, with or without color, whatever the user's own settings are."""

import ast
import re
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import jax
import numpy as np
import pytest

from shardkit import schedules, viz
from shardkit.collectives import tables
from shardkit.viz import style
from support.refusals import refused

pytestmark = pytest.mark.check
SCHEDULE = replace(schedules.gpipe(2, 2), name="b <&>")
GIVEN = {"viz.array": jax.device_put(np.ones(1)), "viz.draw": schedules.gpipe(1, 1)}
GIVEN |= {"viz.table": tables.ring("all_gather", 2)}


def luminance(colour):
    values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_an_svg_is_dark_where_its_readers_system_is(tmp_path):
    """It alone finds a picture whose dark rules meet none of its colors, or those of the page around it."""
    viz.draw(SCHEDULE, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    [rules] = re.findall(r"@media \(prefers-color-scheme: dark\)\{(.*?\})\}<", text)
    used = set(re.findall(r"(?:fill|stroke): (#\w{6})", text))
    for light in (style.PAPER, style.INK, style.MUTED):
        assert light in used
        for what in ("fill", "stroke"):
            either = f'.shardkit [style*="{what}: {light}"],.shardkit [{what}="{light}"]'
            assert f"{either}{{{what}:{style.DARK[light]} !important}}" in rules
    assert all(part.strip().startswith(".shardkit [") for part in re.findall(r"[^{},]+(?=[,{])", rules))
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert root.get("class") == "shardkit" and root.get("role") == "img"
    assert root.get("aria-label").startswith("b <&>: 2 devices, 2 microbatches; makespan 9, ")


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_on_the_paper(dark):
    def shown(colour):
        return style.DARK.get(colour, colour) if dark else colour

    paper = shown(style.PAPER)
    assert contrast(shown(style.INK), paper) > 10
    assert contrast(shown(style.MUTED), paper) > 4.5


def test_the_users_own_settings_change_nothing_and_an_svg_has_no_date_and_no_version(tmp_path):
    import matplotlib

    viz.draw(SCHEDULE, tmp_path / "a.svg")
    with matplotlib.rc_context({"axes.facecolor": "black", "text.color": "pink", "font.size": 30, "svg.hashsalt": "x"}):
        viz.draw(SCHEDULE, tmp_path / "b.svg")
        picture = viz.figure(SCHEDULE, SCHEDULE.simulate())
        assert matplotlib.rcParams["font.size"] == 30
        (tmp_path / "c.svg").write_text(style.svg_of(picture))  # saved once more, outside of the call
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "c.svg").read_bytes()
    viz.draw(SCHEDULE, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert "<dc:date>" not in text and "Matplotlib v" not in text


@pytest.mark.parametrize("suffix", [".png", ".svg", ".SVG"])
def test_both_kinds_of_files_are_written_the_same_twice(suffix, tmp_path):
    for name in "ab":
        viz.draw(SCHEDULE, tmp_path / "new" / f"{name}{suffix}")
    one, other = ((tmp_path / "new" / f"{name}{suffix}").read_bytes() for name in "ab")
    assert one == other
    assert one.startswith(b"\x89PNG") if suffix == ".png" else b"</svg>" in one


def test_importing_viz_does_not_import_matplotlib():
    for path in Path(viz.__file__).parent.glob("*.py"):
        tops = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not any("matplotlib" in ast.unparse(node) for node in tops), path.name


@pytest.mark.parametrize("name", GIVEN)
def test_another_kind_of_file_is_refused_before_anything_else(name):
    assert refused(lambda: getattr(viz, name.removeprefix("viz."))(GIVEN[name], output="picture.pdf")) == (
        f"{name}: the picture must be a .png or .svg file; got 'picture.pdf'. Pass for example 'picture.svg'."
    )


def test_without_matplotlib_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert refused(lambda: viz.draw(SCHEDULE, tmp_path / "a.svg"), RuntimeError) == (
        "viz: pictures need matplotlib, which is not installed. Install it with: pip install 'shardkit[viz]'"
    )
