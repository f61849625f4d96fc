"""The timeline of a compiled program: it says of each collective what its row says, and of compute what is counted."""

import itertools
import json

import pytest

from shardkit.analysis.hlo import proto
from shardkit.analysis.hlo.collectives import Cover, Reader, Step, _Slot, collectives_of, total_work
from shardkit.analysis.hlo.compute import Clock, Work
from shardkit.analysis.hlo.time_model import clock_of
from shardkit.analysis.hlo.timeline import Span, Timeline, _collective, _repeated, timeline_of
from shardkit.cost import chip
from support.recorded.record import HERE, load

pytestmark = pytest.mark.check
SIZES = {
    "fsdp_tp": {"fsdp": 4, "tp": 2},
    "ring_loop": {"tp": 8},
    "ring_unrolled": {"tp": 8},
    "branches": {"data": 4, "model": 2},
}
FILES = sorted(f.name for f in HERE.glob("*-jax0.10.json.gz") if f.name.split("-")[0] in SIZES)


def read(file):
    name, topology, *_ = file.removesuffix(".json.gz").split("-")
    answer, serialized = load(file)
    kind = topology.split("_")[0]
    clock = clock_of("cuda" if kind == "h100" else "tpu", chip(kind), answer["places"])
    return proto.read(serialized), SIZES[name], clock


@pytest.mark.parametrize("file", FILES)
def test_it_says_what_the_rows_say(file):
    """It alone finds a collective drawn for longer than it takes, hidden where it is exposed, or in a loop once."""
    module, sizes, clock = read(file)
    line, rows, work = (
        timeline_of(module, sizes, clock),
        collectives_of(module, sizes, clock),
        total_work(module, clock),
    )
    assert line.compute_seconds == pytest.approx(work.seconds)
    parts = {(name, alone): 0.0 for name in {row.name for row in rows} for alone in (True, False)}
    for span in line.spans:
        if span.kind != "compute":
            parts[span.name, span.exposed] += span.seconds
    branched = {row.name for row in rows if row.branch}
    for row in rows:
        if row.name not in branched:
            assert parts[row.name, True] == pytest.approx(row.exposed * row.times, abs=1e-15)
            assert parts[row.name, False] == pytest.approx((row.seconds - row.exposed) * row.times, abs=1e-15)
    if not branched:
        assert line.exposed_seconds == pytest.approx(sum(row.exposed * row.times for row in rows))
    else:  # one of them runs
        assert line.exposed_seconds < sum(row.exposed * row.times for row in rows)


@pytest.mark.parametrize("file", FILES)
def test_no_two_spans_of_a_lane_overlap_and_compute_waits_for_what_is_exposed(file):
    """It alone finds compute that runs on beside what it waits for."""
    line = timeline_of(*read(file))
    lanes = {lane: [span for span in line.spans if span.lane == lane] for lane in line.lanes()}
    small = 1e-9 * line.seconds
    for spans in lanes.values():
        assert all(one.end <= other.start + small for one, other in itertools.pairwise(spans))
    exposed = [span for span in line.spans if span.exposed]
    for span in lanes["compute"]:
        assert not any(wait.start + small < span.end and span.start + small < wait.end for wait in exposed)
    assert max(span.end for span in line.spans) == pytest.approx(line.seconds)
    assert sum(s.seconds for s in lanes["compute"]) + sum(s.seconds for s in exposed) == pytest.approx(line.seconds)


def test_collectives_that_share_a_cover_run_one_after_the_other():
    """It alone finds two drawn at the same time on the same links, beside the same compute."""
    module, sizes, clock = read("fsdp_tp-v5e_2x4-jax0.10.json.gz")
    reader = Reader(module, sizes, clock._replace(wire=lambda kind, groups, sent: 1.5))
    found = next(
        each
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if (each := reader.pairs.collective_of(computation, instruction))
    )
    window = [_Slot(3, Work(1, 1, 1.0)), _Slot(4, Work(1, 1, 1.0))]
    first, second = (Step(found.carrier, Work(), *reader._row(found, 1, "", window)) for _ in range(2))
    assert first.covers == (Cover(3, 0.0, 1.0), Cover(4, 0.0, 0.5)) and second.covers == (Cover(4, 0.5, 0.5),)
    begins = [0.0, 0.0, 0.0, 10.0, 20.0]
    times = [[(span.start, span.end, span.exposed) for span in _collective(s, begins, 21.0)] for s in (first, second)]
    assert times == [[(10.0, 11.0, False), (20.0, 20.5, False)], [(20.5, 21.0, False), (21.0, 22.0, True)]]


def test_a_hidden_collective_runs_between_its_start_and_its_end():
    """Of a ring in a loop on a GPU: each of eight permutes beside the matmul of its own iteration."""
    line = timeline_of(*read("ring_loop-h100_1x1x8-jax0.10.json.gz"))
    sent = {}
    for span in line.spans:
        if span.lane == "tp":
            sent.setdefault(round(span.start // (line.seconds / 8)), 0)
            sent[round(span.start // (line.seconds / 8))] += 1
    assert sorted(sent) == list(range(8))
    assert {span.place for span in line.spans if span.lane == "tp"} == {
        "programs.py:46 (ring.<locals>.kernel.<locals>.hop)"
    }


def test_permutes_both_ways_have_lanes_of_their_own():
    module, sizes, clock = read("ring_unrolled-v5e_2x4-jax0.10.json.gz")
    assert timeline_of(module, sizes, clock).lanes() == ["compute", "tp"]
    for computation in module.computations.values():
        for each in computation.instructions.values():
            each.pairs = tuple((target, source) for source, target in each.pairs)
    assert timeline_of(module, sizes, clock).lanes() == ["compute", "tp backward"]


def test_what_the_clock_does_not_know_takes_no_time():
    module, sizes, _ = read("fsdp_tp-v5e_2x4-jax0.10.json.gz")
    assert timeline_of(module, sizes) == Timeline()
    line = timeline_of(module, sizes, Clock(lambda flops, size: 0.0, lambda kind, groups, sent: 1.0))
    assert line.exposed_seconds == len(line.spans) == line.seconds


def test_of_a_long_loop_the_first_iterations_are_listed():
    body = Timeline(tuple(Span(str(i), "compute", "compute", i, i + 1) for i in range(100)), 80.0, 20.0)
    line = _repeated(body, 1000, "while.3")
    assert len(line.spans) == 2001 and line.seconds == 100_000
    assert line.spans[1999] == Span("99", "compute", "compute", 1999, 2000)
    assert line.spans[-1] == Span("while.3: 980 more iterations", "loop", "compute", 2000, 100_000)
    assert (line.compute_seconds, line.exposed_seconds) == (80_000, 20_000)
    assert _repeated(body, 0, "none") == Timeline()


def test_it_goes_to_json_and_back():
    line = timeline_of(*read("ring_loop-h100_1x1x8-jax0.10.json.gz"))
    assert Timeline.from_json(json.loads(json.dumps(line))) == line
