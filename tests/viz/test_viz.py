"""Pictures of schedules and of collectives as tables: what is drawn is what was simulated."""

import itertools
from collections import Counter
from xml.etree import ElementTree

import numpy as np
import pytest

from shardkit import schedules, viz
from shardkit.collectives import tables
from shardkit.viz import schedule as schedule_pictures
from shardkit.viz import style
from shardkit.viz.schedule import title
from support.refusals import refused

pytestmark = pytest.mark.check

CASES = {
    "lockstep": (schedules.lockstep(4, 8), {}),
    "lockstep, synchronous": (schedules.lockstep(3, 5, 2), {"communication": 0.25, "synchronous": True}),
    "gpipe": (schedules.gpipe(3, 4), {"forward": 2, "backward": 3, "communication": 1}),
    "interleaved": (schedules.interleaved(4, 8, 2), {}),
    "zero_bubble_h1": (schedules.zero_bubble_h1(4, 8), {"weight_grad": 0.5}),
    "no weight gradient": (schedules.zero_bubble_v(2, 4), {"weight_grad": 0}),
    "dualpipe_v, together": (schedules.dualpipe_v(4, 8), {"overlapped": 2.5}),
    "one device": (schedules.one_f_one_b(1, 1), {}),
}


@pytest.fixture(params=CASES)
def case(request):
    schedule, costs = CASES[request.param]
    return schedule, schedule.simulate(**costs), costs


# proves F40: a box for every action of the simulation, and no two in one place
def test_boxes_are_the_simulated_actions(case):
    schedule, timeline, _ = case
    boxes = schedule_pictures.boxes(schedule, timeline)
    assert [box.action for box in boxes] == list(schedule.ticks)
    for box in boxes:
        assert (box.begin, box.begin + box.length) == pytest.approx(timeline.spans[box.action])
        assert str(box.action) in schedule.order(box.device)
    for device in range(schedule.devices):
        row = [box for box in boxes if box.device == device]
        assert sum(box.length * box.height for box in row) == pytest.approx(timeline.busy[device])
        for one, other in itertools.combinations(row, 2):
            apart = (
                one.begin + one.length <= other.begin + 1e-9
                or other.begin + other.length <= one.begin + 1e-9
                or one.top + one.height <= other.top
                or other.top + other.height <= one.top
            )
            assert apart, (one, other)


def test_what_runs_together_shares_a_row_with_the_forward_above():
    schedule = schedules.dualpipe_v(4, 8)
    halves = [box for box in schedule_pictures.boxes(schedule, schedule.simulate(overlapped=2.5)) if box.height == 0.5]
    pairs = sum(len(cell) == 2 for row in schedule.rows for cell in row)
    assert Counter((box.action.op == "F", box.top) for box in halves) == {(True, 0): pairs, (False, 0.5): pairs}
    assert all(box.height == 1 for box in schedule_pictures.boxes(schedule, schedule.simulate()))


# proves F40: the memory curve
def test_the_curve_has_the_simulated_peak(case):
    schedule, timeline, _ = case
    for device, peak in enumerate(timeline.peak_in_flight):
        times, held = zip(*schedule_pictures.in_flight(schedule, timeline, device), strict=True)
        assert max(held) == peak and held[-1] == 0 and min(held) >= 0
        assert list(times) == sorted(set(times)) and times[-1] <= timeline.makespan


def test_the_curve_of_1f1b():
    schedule = schedules.one_f_one_b(2, 2)
    curves = [schedule_pictures.in_flight(schedule, schedule.simulate(), device) for device in (0, 1)]
    assert curves == [
        [(0, 1), (1, 2), (2, 2), (4, 2), (6, 1), (7, 1), (9, 0)],
        [(1, 1), (2, 1), (4, 1), (5, 1), (7, 0)],
    ]


# proves F40: every box's pixels have its op's and chunk's colour, at the place that the simulation says
@pytest.mark.quick("one device", "gpipe", "no weight gradient", "lockstep, synchronous", "zero_bubble_h1")
def test_a_png_shows_the_simulation(case, tmp_path):
    schedule, timeline, costs = case
    viz.draw(schedule, tmp_path / "made" / "picture.PNG", **costs)
    from matplotlib.image import imread

    pixels = imread(tmp_path / "made" / "picture.PNG")[:, :, :3]
    picture = viz.figure(schedule, timeline)
    height, width = (round(length) for length in picture.get_size_inches()[::-1] * picture.dpi)
    assert abs(pixels.shape[0] - height) <= 1 and abs(pixels.shape[1] - width) <= 1
    place = picture.axes[0].transData.transform
    for box in (box for box in schedule_pictures.boxes(schedule, timeline) if box.length):
        x, y = place((box.begin + 0.12 * box.length, box.device - 0.5 + box.top + box.height / 2))
        chunk = box.action.stage // schedule.devices
        colour = style.shade(style.OPS[box.action.op], chunk, schedule.chunks)
        assert pixels[pixels.shape[0] - 1 - int(y), int(x)] == pytest.approx(colour, abs=0.01), box


# proves F40, S82: the words of the picture
def test_an_svg_holds_actions_microbatches_and_bubbles(tmp_path):
    schedule = schedules.lockstep(4, 8, 2)
    viz.draw(schedule, tmp_path / "picture.svg")
    root = ElementTree.parse(tmp_path / "picture.svg").getroot()
    assert set(map(str, schedule.ticks)) <= {element.get("id") for element in root.iter()}
    words = Counter(element.text for element in root.iter() if element.tag.endswith("}text"))
    # Once for each op of each stage; the axes have numbers of their own.
    assert all(words[str(i)] >= 2 * 8 for i in range(8))
    line = schedule.simulate()
    assert {
        "lockstep: 4 devices x 2 chunks, 8 microbatches",
        "makespan 28.5, bubble 18.8% of the work (Megatron's convention), 15.8% of the makespan (GPipe's)",
        "forward",
        "backward",
        "chunk 0",
        "chunk 1",
        "microbatches in flight",
        *(f"{peak:g}" for peak in line.peak_in_flight),
    } <= set(words)
    assert not {"input gradient", "weight gradient"} & set(words)
    assert words["15.8%"] == 4  # the bubble of each device


def test_numbers_that_do_not_fit_are_left_out():
    def shown(schedule, *costs):
        return Counter(text.get_text() for text in viz.figure(schedule, schedule.simulate(*costs)).axes[0].texts)

    assert shown(schedules.gpipe(2, 300))["299"] == 0
    assert shown(schedules.gpipe(2, 99), 1, 12)["98"] == 2  # backwards alone are long enough
    assert shown(schedules.gpipe(2, 9))["8"] == 4


def test_text_stays_inside_its_box():
    schedule = schedules.interleaved(8, 32, 2)
    picture = viz.figure(schedule, schedule.simulate())
    picture.draw_without_rendering()
    axes = picture.axes[0]
    middles = {(round(bar.get_center()[0], 6), round(bar.get_center()[1], 6)): bar for bar in axes.patches}
    numbers = [text for text in axes.texts if tuple(round(float(v), 6) for v in text.get_position()) in middles]
    assert len(numbers) == len(schedule.ticks)
    for text in numbers:
        around = middles[tuple(round(float(v), 6) for v in text.get_position())].get_window_extent()
        assert text.get_window_extent().width <= around.width
        assert text.get_size() >= 4


def test_titles_count():
    assert title(schedules.gpipe(1, 1)) == "gpipe: 1 device, 1 microbatch"
    assert title(schedules.dualpipe_v(2, 4)) == "dualpipe_v: 2 devices x 2 chunks, 4 microbatches"


# How the three kinds of colour-blindness see linear RGB (Machado et al. 2009, severity 1).
SEEN = {
    "all": np.eye(3),
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


def lab(colour, seen):
    linear = np.array([v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in colour])
    linear = np.clip(np.array(seen) @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ linear / [0.9505, 1, 1.089]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("seen", SEEN.values(), ids=SEEN)
def test_colours_can_be_told_apart(seen):
    shades = [style.shade(colour, chunk, 2) for colour in style.OPS.values() for chunk in (0, 1)]
    distances = [np.linalg.norm(lab(a, seen) - lab(b, seen)) for a, b in itertools.combinations(shades, 2)]
    assert min(distances) > 12  # 2.3 can just be noticed


def test_costs_are_checked_as_in_simulate(tmp_path):
    assert refused(lambda: viz.draw(schedules.gpipe(2, 2), tmp_path / "picture.png", forward=0)) == (
        "simulate: forward must be greater than 0; got 0. Pass for example forward=1."
    )


def test_a_notebook_shows_the_figure():
    schedule = schedules.gpipe(2, 2)
    assert viz.figure(schedule, schedule.simulate())._repr_png_().startswith(b"\x89PNG")


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
