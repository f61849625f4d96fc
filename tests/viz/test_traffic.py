"""Pictures of a census and of overlap: the bars are bytes or seconds of the rows, each in the place of its axes."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import viz
from shardkit.analysis.hlo.collectives import CompiledRow
from shardkit.analysis.hlo.compute import Work
from shardkit.analysis.hlo.memory import Memory
from shardkit.analysis.hlo.report import Report
from shardkit.analysis.jaxpr.census import Census
from shardkit.viz.bars import duration
from support.refusals import refused

pytestmark = pytest.mark.check
MESH = sk.abstract_mesh(data=2, model=4)


def counted(times=3):
    def kernel(x):
        for _ in range(times):
            x = sk.all_reduce(x, "model")
        y = sk.all_gather(x, "data")
        return sk.reduce_scatter(y, "data") + sk.all_reduce(x, ("data", "model"))

    f = jax.shard_map(kernel, mesh=MESH, in_specs=P("data", "model"), out_specs=P("data"))
    return sk.census(f, jax.ShapeDtypeStruct((64, 64), jnp.float32))


def widths(picture):
    return {patch.get_gid(): patch.get_width() for patch in picture.axes[0].patches if patch.get_gid()}


def test_bars_are_the_bytes_of_the_rows():
    """It alone finds a bar of another length than its rows sum to, or under other axes."""
    found = counted()
    expected = {}
    for row in found.rows:
        key = f"{','.join(row.axes)}={row.n}, {row.kind}"
        expected[key] = expected.get(key, 0) + float(row.total)
    drawn = widths(viz.census(found))
    assert drawn == pytest.approx(expected)
    assert sum(drawn.values()) == pytest.approx(float(found.sent()))
    assert {key.split(", ")[1] for key in drawn} == {"all_reduce", "all_gather", "reduce_scatter"}


def test_collectives_of_one_axis_stand_one_after_the_other():
    [axes] = viz.census(counted()).axes
    rows = [label.get_text() for label in axes.get_yticklabels()]
    assert rows == ["data=2", "data,model=8", "model=4"]
    gathered, scattered = (
        next(patch for patch in axes.patches if patch.get_gid() == f"data=2, {kind}")
        for kind in ("all_gather", "reduce_scatter")
    )
    assert gathered.get_x() == 0 and scattered.get_x() == pytest.approx(gathered.get_width())
    assert gathered.get_hatch() != scattered.get_hatch() and gathered.get_facecolor() != scattered.get_facecolor()
    beside = [text.get_text() for text in axes.texts]
    assert beside == ["4 KiB, 2 x", "3.5 KiB, 1 x", "9 KiB, 3 x"]
    assert axes.get_xlabel() == "bytes that one device sends per step"


def test_a_collective_in_a_loop_counts_as_often_as_it_runs():
    """It alone finds bars of single executions."""

    def kernel(x):
        return jax.lax.scan(lambda x, _: (sk.vary(sk.all_reduce(x, "data"), "data"), None), x, length=5)[0]

    f = jax.shard_map(kernel, mesh=MESH, in_specs=P("data"), out_specs=P("data"))
    found = sk.census(f, jax.ShapeDtypeStruct((8,), jnp.float32))
    assert widths(viz.census(found)) == {"data=2, all_reduce": 5 * 16.0}


def test_several_censuses_are_told_apart_by_name_and_a_collective_looks_alike_in_each():
    drawn = widths(viz.census({"three": counted(3), "one": counted(1)}))
    assert drawn["three: model=4, all_reduce"] == pytest.approx(3 * drawn["one: model=4, all_reduce"])
    assert drawn["three: data=2, all_gather"] == drawn["one: data=2, all_gather"]

    def look(picture, kind):
        return next(p.get_facecolor() for p in picture.axes[0].patches if (p.get_gid() or "").endswith(kind))

    only = Census(tuple(row for row in counted().rows if row.kind == "reduce_scatter"))
    assert look(viz.census(only), "reduce_scatter") == look(viz.census(counted()), "reduce_scatter")


def test_a_step_that_sends_nothing_says_so(tmp_path):
    viz.census(Census(()), output=tmp_path / "a.svg")
    assert ">no collectives<" in (tmp_path / "a.svg").read_text()


def test_loops_of_unknown_length_are_named():
    def kernel(x):
        return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: sk.vary(sk.all_reduce(x, "data"), "data"), x)

    f = jax.shard_map(kernel, mesh=MESH, in_specs=P("data"), out_specs=P("data"))
    picture = viz.census(sk.census(f, jax.ShapeDtypeStruct((8,), jnp.float32)))
    assert picture.texts[1].get_text() == "per device and step: 16 B; a loop of unknown length counts once"


@pytest.mark.parametrize("wrong", [None, 3, {"a": 3}, [1]])
def test_what_is_no_census_is_refused(wrong):
    got = repr(wrong["a"] if isinstance(wrong, dict) else wrong)
    assert refused(lambda: viz.census(wrong), TypeError) == (
        f"viz.census: census must be a census, a report or a mapping of names to them; got {got}. Pass "
        "sk.census(step, state, batch)."
    )


ROW = CompiledRow(
    "all_gather", "all-gather.1", ("fsdp",), 4, 2, 1, 8, 32, 24, True, 9, 1e-3, 0.25e-3, "all_gather", "a.py:1 (f)", ""
)  # fmt: skip
ALONE = dataclasses.replace(
    ROW, kind="all_reduce", axes=("tp",), n=2, count=1, asynchronous=False, seconds=5e-4, exposed=5e-4
)
REPORT = Report(
    "v5e:2x4", {"fsdp": 4, "tp": 2}, True, "", Memory(1, 1, 0, 1, 1, 0), 4096, Census(()), 0.0, (ALONE, ROW),
    Work(1, 1, 5e-3),
)  # fmt: skip


def test_bars_of_overlap_are_the_seconds_of_the_rows():
    """It alone finds an exposed part drawn as hidden, or a loop's collective once."""
    picture = viz.overlap(REPORT)
    expected = {"compute, compute": 5e-3, "fsdp=4, hidden": 1.5e-3, "fsdp=4, exposed": 5e-4, "tp=2, exposed": 5e-4}
    assert widths(picture) == pytest.approx(expected)
    words = [text.get_text() for text in picture.texts]
    assert "6 ms, exposed 1 ms of 2.5 ms of collectives" in words
    half = dataclasses.replace(REPORT, rows=())
    several = viz.overlap({"whole": REPORT, "half": half})
    assert widths(several)["half: compute, compute"] == 5e-3
    assert "half: 5 ms, no collectives" in several.texts[1].get_text()


def test_overlap_of_what_has_no_times_is_refused_and_times_have_a_unit():
    assert refused(lambda: viz.overlap({"a": 3}), TypeError) == (
        "viz.overlap: report must be a report of aot.compile, or a mapping of names to them; got 3. Pass "
        "sk.aot.compile(step, args, topology='v5e:2x4')."
    )
    assert refused(lambda: viz.overlap(dataclasses.replace(REPORT, fits=False, memory=None))) == (
        "viz.overlap: the program must be compiled; got a report of one that does not fit v5e:2x4, of which there are "
        "no times. Pass a report with fits=True."
    )
    assert [duration(t) for t in (0, 4.5e-8, 1.5e-3, 0.25, 90.0)] == ["0 s", "45 ns", "1.5 ms", "250 ms", "90 s"]
