"""Pictures of collectives as tables: an arrow for each message."""

import pytest

from shardkit import viz
from shardkit.collectives import tables

pytestmark = pytest.mark.check


@pytest.mark.parametrize("table", [tables.bine("all_reduce", 8), tables.torus("all_gather", (2, 2)), tables.tree(1)])
def test_an_arrow_for_each_message(table):
    [axes] = viz.table(table).axes
    arrows = {each.get_gid(): each for each in axes.texts if each.get_gid()}
    assert list(arrows) == [f"{send.step}: {send}" for send in table.sends]
    for send in table.sends:
        arrow = arrows[f"{send.step}: {send}"]
        (begin, source), (end, target) = arrow.xyann, arrow.xy
        assert send.step < begin < end < send.step + 1
        assert (round(source - 0.24), round(target - 0.24)) == (send.source, send.target)
        assert arrow.arrow_patch.get_linestyle() == ("--" if send.reduce else "-")
