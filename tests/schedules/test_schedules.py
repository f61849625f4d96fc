"""Schedules: legality, closed forms, slots, the table that a program runs, the grid and the CSV form."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardkit as sk
from shardkit import cost, schedules
from shardkit.schedules import Schedule
from shardkit.schedules.action import Action
from shardkit.schedules.table import FIELDS, MOVES
from support.pipelines import BUILDERS, CHUNKED

pytestmark = pytest.mark.check

FORMS = ("gpipe", "one_f_one_b", "interleaved", "lockstep", "breadth_first")


@st.composite
def built(draw, names=tuple(BUILDERS), least=0):
    """A schedule, with `least` times p microbatches or more; the name and the arguments of its closed form."""
    name = draw(st.sampled_from(names))
    p = draw(st.integers(1, 8))
    m = draw(st.integers(max(1, least * p), 40))
    chunks = {"chunks": draw(st.integers(1, 3))} if name in CHUNKED else {}
    return getattr(schedules, name)(p, m, **chunks), name, chunks


@pytest.mark.parametrize("name", BUILDERS)
@given(data=st.data())
def test_every_schedule_is_legal_and_survives_csv(name, data):  # proves F39
    schedule, _, _ = data.draw(built((name,)))
    schedule.check()
    back = Schedule.from_csv(schedule.to_csv())
    assert back == schedule and back.to_csv() == schedule.to_csv()
    assert (back.devices, back.chunks, back.microbatches) == (schedule.devices, schedule.chunks, schedule.microbatches)
    work = schedule.microbatches * schedule.chunks * schedule.devices
    ops = [action.op for action in schedule.ticks]
    assert ops.count("F") == ops.count("B") + ops.count("I") == work and ops.count("I") == ops.count("W")


@given(built(FORMS, least=1), st.integers(1, 5), st.integers(1, 5))
def test_closed_forms(case, forward, backward):  # proves F40, S82
    schedule, name, chunks = case
    p, m = schedule.devices, schedule.microbatches
    line = schedule.simulate(forward=Fraction(forward), backward=Fraction(backward))
    assert float(line.bubble_of_total) == pytest.approx(float(line.bubble / (1 + line.bubble)))
    if m % p and chunks.get("chunks", 1) > 1 and name != "breadth_first":
        return  # the published forms are for whole rounds
    assert line.bubble == line.bubble_of_span
    assert float(line.bubble) == pytest.approx(cost.bubble(p, m, name, **chunks))
    assert float(line.bubble_of_total) == pytest.approx(cost.bubble(p, m, name, **chunks, of="total"))


@given(p=st.integers(1, 8), m=st.integers(1, 40))
def test_what_each_device_holds_and_when_it_runs(p, m):  # proves S78, F36
    gpipe = schedules.gpipe(p, m)
    assert all(tick == stage + i for (stage, op, i), tick in gpipe.ticks.items() if op == "F")
    assert len({tick for action, tick in gpipe.ticks.items() if action.op == "F"}) == p + m - 1
    assert gpipe.simulate().peak_in_flight == (m,) * p
    assert schedules.one_f_one_b(p, m).simulate().peak_in_flight == tuple(min(m, p - d) for d in range(p))
    eager = schedules.lockstep(p, m).simulate()
    assert eager.peak_in_flight == tuple(min(m, 2 * (p - 1 - d) + 1) for d in range(p))
    assert eager.makespan == schedules.one_f_one_b(p, m).simulate().makespan == 3 * (m + p - 1)


@given(p=st.integers(1, 8), more=st.integers(0, 20))
def test_zero_bubble_v_has_the_published_makespan_and_peak(p, more):  # proves F38
    m = 2 * p - 1 + more
    line = schedules.zero_bubble_v(p, m).simulate()
    # 6 m ticks of half a device's layers, and a device begins one tick after the one before
    assert line.makespan == (6 * m + p - 1) / 2
    assert line.bubble_of_span == 0 and line.bubble == pytest.approx((p - 1) / 2 / (3 * m))
    assert line.peak_in_flight == (p,) * p


def test_pairs_that_overlap_and_the_parts_of_the_backward():
    schedule = schedules.dualpipe_v(8, 20)
    # one after the other, each when its own input is there; together, when both are; and together in less time
    assert [schedule.simulate(overlapped=time).makespan for time in (None, 3, 2.5)] == [63.5, 67, 59.5]
    line = schedule.simulate(overlapped=3)
    forward, backward = next(cell for cell in schedule.rows[0] if len(cell) == 2)
    assert line.spans[forward] == line.spans[backward]
    assert line.makespan - 60 == 7
    schedule = schedules.zero_bubble_h1(4, 8)
    assert schedule.simulate(2, 5, weight_grad=1.5).spans == schedule.simulate(2, 5, input_grad=3.5).spans
    assert schedule.simulate(2, 5).makespan == schedule.simulate(2, 5, 2.5, 2.5).makespan


# Simulated with F = 1 and B = 2 on eight devices. One op a tick: every tick holds up all devices.
@pytest.mark.parametrize(
    ("name", "chunks", "synchronous", "makespans", "inputs"),
    [
        ("one_f_one_b", {}, True, (52, 84, 148, 276), 8),
        ("one_f_one_b", {}, False, (45, 69, 117, 213), 8),
        ("lockstep", {}, True, (45, 69, 117, 213), 13),
        ("lockstep", {}, False, (45, 69, 117, 213), 13),
        ("interleaved", {"chunks": 2}, True, (38, 70, 134, 262), 22),
        ("lockstep", {"chunks": 2}, True, (34.5, 58.5, 106.5, 202.5), 21),
        ("lockstep", {"chunks": 2}, False, (34.5, 58.5, 106.5, 202.5), 21),
        ("zero_bubble_h1", {}, False, (31, 55, 103, 199), 8),
    ],
)
def test_eight_devices(name, chunks, synchronous, makespans, inputs):
    for m, makespan in zip((8, 16, 32, 64), makespans, strict=True):
        schedule = getattr(schedules, name)(8, m, **chunks)
        assert schedule.simulate(synchronous=synchronous).makespan == makespan
    slots = schedule.slots()
    assert slots.inputs == inputs
    assert slots.kept == (8 if name == "zero_bubble_h1" else 0)
    assert name != "lockstep" or slots.cotangents == 1


@given(p=st.integers(1, 8), m=st.integers(1, 40), v=st.integers(1, 3))
def test_lockstep_ticks_slots_and_segments(p, m, v):
    schedule = schedules.lockstep(p, m, v)
    table = schedule.table()
    g, r = divmod(m - 1, p)
    forwards = g * v * p + (v - 1) * p + r + p  # ticks with a forward, and with a backward
    assert table.rows.shape[0] == len(schedule.rows[0]) == forwards + v * p - 1
    assert table.rows.dtype == np.int32
    assert [segment[:3] for segment in table.segments if segment.ops in ("F", "FB", "B")] == [
        segment
        for segment in (
            ("F", 0, min(v * p - 1, forwards)),
            ("FB", v * p - 1, forwards - (v * p - 1)),
            ("B", max(forwards, v * p - 1), v * p - 1),
        )
        if segment[2] > 0
    ]
    if v == 1:
        assert table.slots.inputs <= max(0, 2 * p - 3) and (m < 2 * p - 3 or table.slots.inputs == max(0, 2 * p - 3))
        assert table.slots.cotangents == (p > 1)


def run(schedule):
    """Runs the table alone, on what each (stage, microbatch) computed instead of arrays; returns the work done."""
    table = schedule.table()
    p, done = schedule.devices, []
    last = p * schedule.chunks - 1
    columns = {field: table.column(field) for field in FIELDS}
    sizes = (table.buffers[name] for name in ("inputs", "cotangents", "kept"))
    inputs, cotangents, kept = ([["vain"] * size for _ in range(p)] for size in sizes)
    for segment in table.segments:
        for t in range(segment.begin, segment.begin + segment.ticks):
            outputs, input_grads = ["vain"] * p, ["vain"] * p
            for d in range(p):
                now = {field: int(column[t, d]) for field, column in columns.items()}
                if "I" in segment.ops and now["backward_on"] != 2:
                    kept[d][now["backward_kept"]] = "vain"
                for name in ("forward", "backward", "weight"):
                    if not now[f"{name}_on"]:
                        continue
                    stage, i = now[f"{name}_stage"], now[f"{name}_microbatch"]
                    op = {"forward": "F", "weight": "W"}.get(name) or " BI"[now["backward_on"]]
                    assert op in segment.ops and now[f"{name}_chunk"] == stage // p
                    done.append((d, Action(stage, op, i)))
                    if name != "weight" and stage:
                        assert inputs[d][now[f"{name}_input"]] == (stage - 1, i)
                    if op == "F":
                        outputs[d] = (stage, i)
                    if name == "backward":
                        assert stage == last or cotangents[d][now["backward_cotangent"]] == (stage + 1, i)
                        input_grads[d] = (stage, i)
                        if op == "I":
                            kept[d][now["backward_kept"]] = (stage, i)
                    if op == "W":
                        assert kept[d][now["weight_kept"]] == (stage, i)
            for move in MOVES:
                sent, buffer = (outputs, inputs) if move.buffer == "inputs" else (input_grads, cotangents)
                for d in range(p if move in segment.moves else 0):
                    slot = columns[move.field][t, d]
                    if slot < len(buffer[d]):
                        buffer[d][slot] = sent[(d - move.shift) % p]
                    else:
                        assert move.buffer in table.crowded
    return done


@pytest.mark.parametrize("name", BUILDERS)
@given(data=st.data())
def test_the_table_alone_runs_the_schedule(name, data):  # proves F39
    schedule, _, _ = data.draw(built((name,)))
    done = run(schedule)
    assert sorted(done) == sorted((schedule.device(action.stage), action) for action in schedule.ticks)
    for device in range(schedule.devices):
        assert [str(action) for d, action in done if d == device and action.op != "W"] == [
            text for text in schedule.order(device) if "W" not in text
        ]


@given(built())
def test_slots_are_as_few_as_can_be(case):
    schedule, _, _ = case
    slots = schedule.slots()
    most = []
    for places, giver in ((slots.input_of, -1), (slots.cotangent_of, 1)):
        live = np.zeros((schedule.devices, len(schedule.rows[0])), int)
        for stage, i in places:
            ops = "F" if giver < 0 else "BI"
            [sent] = [at for op in ops if (at := schedule.ticks.get(Action(stage + giver, op, i))) is not None]
            [used] = [at for op in "BI" if (at := schedule.ticks.get(Action(stage, op, i))) is not None]
            live[schedule.device(stage), sent + 1 : used + 1] += 1
        most.append(live.max())
    assert most == [slots.inputs, slots.cotangents]


def test_communication_and_synchronous_ticks():
    pipe = schedules.gpipe(3, 1)
    assert pipe.simulate(communication=10).makespan == 3 * 3 + 4 * 10
    assert pipe.simulate(communication=10, synchronous=True).makespan == 3 * 3 + 5 * 10
    # the turn of a V stays on its device: two moves there, two back; device 1 weighs its last stage on the way
    assert schedules.zero_bubble_v(2, 1).simulate(2, 4, communication=10).makespan == 4 + 4 + 1 + 1 + 4 * 10
    spans = pipe.simulate(communication=0.5).spans
    assert spans[Action(1, "F", 0)] == (1.5, 2.5) and spans[Action(2, "B", 0)] == (4, 6)


def test_the_grid():
    assert sk.schedules is schedules
    assert (
        str(schedules.one_f_one_b(2, 2))
        == """\
tick      0   1   2   3   4   5
device 0  0F0 0F1 .   0B0 .   0B1
device 1  .   1F0 1B0 1F1 1B1 ."""
    )
    assert (
        str(schedules.lockstep(2, 2))
        == """\
tick      0       1       2       3
device 0  0F0     0F1     0B0     0B1
device 1  .       1F0/1B0 1F1/1B1 ."""
    )


def test_a_cell_keeps_its_column_or_moves_right():
    schedule = Schedule.from_csv("0F0, 0B0\n,,,1F0, 1B0\n")
    assert schedule.to_csv() == "0F0,,,,,0B0\n,,,1F0,1B0,\n"
    assert Schedule.from_csv("(0F0;0B0)OVERLAP_F_B") == schedules.lockstep(1, 1)
    assert Schedule.from_csv("(0F0;0B0)") == schedules.lockstep(1, 1)


@pytest.mark.parametrize("before", ["\ufeff", "\n", "\ufeff\n", " \n\n", "\r\n"])
def test_what_editors_put_before_a_table(before):
    schedule = schedules.interleaved(2, 4, 2)
    assert Schedule.from_csv(before + schedule.to_csv()) == schedule


def test_a_simulated_step_prints_as_a_sentence():
    assert str(sk.schedules.gpipe(2, 2).simulate()) == (
        "makespan 9; idle 50.0% of the work, 33.3% of the makespan, 50.0% within a device's span; microbatches in "
        "flight 2, 2"
    )
