"""Pictures of results: what is drawn where, that nothing missing breaks them, and what is refused. No pixels."""

import math

import pytest

from shardkit import bench, viz
from shardkit.cli.bench.plot import Options, plot
from shardkit.viz.bench import panels
from support.refusals import refused

pytestmark = pytest.mark.check
HEAD = {"format": bench.FORMAT, "version": 1, "environment": {"platform": "cpu"}}


def comm(ops=("all_reduce",), impls=("lax", "ring"), **changes):
    return [
        HEAD
        | {
            "benchmark": "bench comm",
            "row": f"{op}, {size} bytes",
            "case": impl,
            "op": op,
            "impl": impl,
            "axes": "data",
        }
        | {"size": size, "busbw_GBps": size / 1e6, "wall_us_median": 10 + size / 1e3, "dtype": "float32"}
        | {"of_fit": 1 / (1 + size), "of_chip": None, "redop": "sum", **changes}
        for op in ops
        for impl in impls
        for size in (1024, 65536, 2**20)
    ]


def ratios(benchmark="strategies", **changes):
    return [
        HEAD
        | {"benchmark": benchmark, "row": "data=8", "case": case, "mode": "dispatched", "baseline": "one device"}
        | {"cpu_ratio_median": ratio, "wall_ratio_median": ratio / 2, **changes}
        for case, ratio in (("one device", 1.0), ("fsdp", 1.3))
    ]


def drawn(records):
    """The points of every line and the length of every bar, by gid, plot by plot."""
    out = []
    for axes in viz.results(records).axes:
        lines = {line.get_gid(): line.get_xydata().tolist() for line in axes.lines if line.get_gid()}
        bars = {patch.get_gid(): patch.get_width() for patch in axes.patches if patch.get_gid()}
        out.append((axes.get_title(loc="left"), lines | bars))
    return out


def test_bandwidth_latency_and_the_share_of_what_is_expected():
    """It alone finds large sizes among the latencies, and a plot of what no record has."""
    plots = drawn(comm())
    assert [title for title, _ in plots] == ["bus bandwidth", "latency", "achieved over expected by the alpha-beta fit"]
    bandwidth, latency, share = (lines for _, lines in plots)
    assert set(bandwidth) == {"lax", "ring"}
    assert bandwidth["ring"] == [[s, s / 1e6] for s in (1024, 65536, 2**20)]
    assert latency["lax"] == [[s, 10 + s / 1e3] for s in (1024, 65536)]
    assert share["lax"] == [[s, 1 / (1 + s)] for s in (1024, 65536, 2**20)]
    assert drawn(comm(of_chip=0.5))[3][0] == "achieved over expected by the chip"


def test_axes_are_logarithmic_and_many_lines_are_told_apart_without_color():
    picture = viz.results(comm(impls=("lax", "ring", "bidirectional", "compressed")))
    for axes in picture.axes:
        assert axes.get_xscale() == axes.get_yscale() == "log"
        looks = {(line.get_marker(), line.get_linestyle()) for line in axes.lines if line.get_gid()}
        assert len(looks) == 4
    impls = ("lax", "ring", "two", "three")
    summed = comm(ops=("all_reduce",), impls=impls)
    plots = drawn(summed + comm(ops=("all_gather", "broadcast"), impls=impls, redop="none"))
    assert len(plots) == 9 and plots[3][0] == "all_gather: bus bandwidth"
    assert set(plots[3][1]) == {"lax", "ring", "two", "three"}
    assert set(drawn(comm(ops=("all_reduce", "all_gather")))[0][1]) == {
        *(f"{op} {impl}" for op in ("all_reduce", "all_gather") for impl in ("lax", "ring"))
    }


@pytest.mark.parametrize("missing", ["busbw_GBps", "of_fit", "op", "impl", "dtype", "axes", "size"])
def test_a_missing_field_leaves_its_points_out(missing):
    whole = comm()
    some = [{k: v for k, v in r.items() if k != missing} if r["impl"] == "ring" else r for r in whole]
    assert any(lines for _, lines in drawn(some))
    for value in (None, math.nan, math.inf, 0, -1.0, "x", True):
        assert panels([whole[0], whole[1] | {missing: value}, whole[2]])


def test_ratios_are_bars_beside_each_other_with_hatches():
    [(title, bars)] = drawn(ratios())
    assert title == "data=8, over one device"
    assert bars == {
        "one device, CPU time": 1.0,
        "fsdp, CPU time": 1.3,
        "one device, wall time": 0.5,
        "fsdp, wall time": 0.65,
    }
    [axes] = viz.results(ratios()).axes
    assert {patch.get_hatch() for patch in axes.patches} == {"", "////"}
    [(_, bars)] = drawn(ratios(cpu_ratio=1.1))  # of all rounds together, as the tables say it
    assert bars["fsdp, CPU time"] == 1.1
    [(_, bars)] = drawn(ratios() + ratios(cpu_ratio_median=3.0))  # the last of a case that stands twice
    assert bars["fsdp, CPU time"] == 3.0


def test_files_of_several_benchmarks_are_one_picture(tmp_path, capsys):
    files = []
    for name, records in (("comm", comm()), ("others", ratios())):
        bench.write(records, tmp_path / name)
        files.append(tmp_path / name)
    assert plot(Options(tuple(files), tmp_path / "new" / "picture.svg")) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'new' / 'picture.svg'}\n"
    text = (tmp_path / "new" / "picture.svg").read_text()
    assert ">bus bandwidth<" in text and ">data=8, over one device<" in text
    for name in ("one.svg", "two.svg"):
        plot(Options((files[1],), tmp_path / name))
    assert (tmp_path / "one.svg").read_text() == (tmp_path / "two.svg").read_text()


def test_what_cannot_be_drawn_is_refused():
    assert refused(lambda: viz.results([HEAD | {"benchmark": "guard", "row": "r", "case": "c"}])) == (
        "viz.results: the records must have sizes with times, or ratios; got benchmarks 'guard' without any. Pass the "
        "results of a measurement, as --json writes them."
    )
