"""Pictures in characters: as long as the values, and told apart without color."""

import pytest

from shardkit import cost, viz
from shardkit.analysis.hlo.timeline import Span, Timeline
from shardkit.analysis.jaxpr.census import Census, Row

pytestmark = pytest.mark.check
LINE = Timeline(
    (
        Span("fusion.1", "compute", "compute", 0.0, 2.0),
        Span("all-gather.2", "all_gather", "fsdp", 1.0, 2.0),
        Span("all-gather.2", "all_gather", "fsdp", 2.0, 3.0, exposed=True),
        Span("fusion.3", "compute", "compute", 3.0, 4.0),
    ),
    3.0,
    1.0,
)


def row(kind, axes, n, sent, count=1):
    return Row(kind, kind, axes, n, count, 0, 0, sent, "a.py:1 (f)", False, "")


ROWS = Census(
    (
        row("all_reduce", ("data",), 4, 100, 3),
        row("all_gather", ("data",), 4, 100),
        row("all_gather", ("model",), 2, 200),
    )
)


def test_bars_are_as_long_as_the_values():
    """It alone finds a bar of another length, or the character of another kind."""
    lines = viz.text.census(ROWS, width=60).splitlines()
    assert lines[0] == "sent per device and step: 600 B"
    assert lines[1] == "data=4   " + "█" * 10 + "▒" * 30 + " 400 B, 4 x"
    assert lines[2] == "model=2  " + "█" * 20 + " 200 B, 1 x"
    assert lines[3:] == ["█ all_gather  ▒ all_reduce"]
    assert viz.text.census(Census(())) == "sent per device and step: 0 B\nnothing"


@pytest.mark.parametrize("width", [20, 21, 40, 80, 200])
def test_no_line_is_wider_than_the_terminal(width):
    stages = {f"{stage}": cost.zero_breakdown(1e9, 8, stage) for stage in range(4)}
    wide = [
        *viz.text.memory(stages, width=width).splitlines()[1:-1],
        *viz.text.census(ROWS, width=width).split("\n")[1:3],
    ]
    wide += viz.text.losses({"a": [1.0, 2.0, 3.0]}, width=width).splitlines()[:-2]
    wide += viz.text.overlap(LINE, width=width).splitlines()[1:-1]
    assert max(map(len, wide)) <= max(width, 21)


def test_curves_have_a_mark_for_each_run_and_the_first_above_the_others():
    lines = viz.text.losses({"dp": [4.0, 2.0, 1.0], "fsdp": [4.0, 3.0, 1.0]}, width=24, height=4).splitlines()
    assert lines[:4] == ["4 |o", "3 |          x", "2 |          o", "1 |                    o"]
    assert lines[4:] == ["   1 .. step 3", "o dp  x fsdp", "largest difference: 1 (fsdp - dp)"]


def test_losses_that_are_equal_or_not_numbers_are_drawn():
    assert viz.text.losses({"a": [2.0, 2.0, float("nan")]}).count("o") == 3  # of which one is its name's
    assert viz.text.losses({"a": [float("inf")]}).count("o") == 1


def test_overlap_is_shaded_where_compute_waits():
    """It alone finds what is exposed drawn as hidden."""
    lines = viz.text.overlap({"step": LINE}, width=49).splitlines()
    assert lines == [
        "step: 4 s: compute 3 s, exposed 1 s of 2 s of collectives, 50% hidden",
        "compute  " + "█" * 20 + " " * 10 + "█" * 10,
        "fsdp     " + " " * 10 + "█" * 10 + "░" * 10,
        "█ runs  ░ exposed: compute waits",
    ]


def test_a_short_collective_stays_visible():
    """It alone finds a lane left empty because nothing in it is as long as a column."""
    short = LINE._replace(spans=(*LINE.spans, Span("p", "ppermute", "tp", 1.0, 1.001)))
    assert viz.text.overlap(short, width=49).splitlines()[3:] == [
        "tp       " + " " * 10 + "·",
        "█ runs  ░ exposed: compute waits  · less than a third of a column",
    ]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: viz.text.census(ROWS, width=19), "viz.text.census: width must be at least 20; got 19. Correct width."),
        (
            lambda: viz.text.losses({"a": [1.0]}, height=1),
            "viz.text.losses: height must be at least 2; got 1. Correct height.",
        ),
        (lambda: viz.text.overlap(LINE, width=0), "viz.text.overlap: width must be at least 20; got 0. Correct width."),
    ],
)
def test_too_narrow_a_terminal_is_refused(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message
