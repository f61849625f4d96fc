"""The reader of compiled programs, on modules that the compilers wrote: no accelerator, no compiler, no guess.

What each program must communicate is counted in its own trace; `tests/support/recorded/record.py` made the modules.
"""

import gzip
import json
from dataclasses import fields
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.analysis.hlo import groups, proto
from shardkit.analysis.hlo.collectives import (
    ComputationRun,
    Reader,
    _shape_before_padding,
    _Slot,
    collectives_of,
    total_work,
)
from shardkit.analysis.hlo.compute import Clock, Work
from shardkit.analysis.hlo.report import Report, report_of
from shardkit.analysis.jaxpr.census import census_of, mesh_sizes
from shardkit.analysis.jaxpr.counts import taps
from support.recorded.programs import PROGRAMS, abstract_mesh
from support.recorded.record import HERE, load
from support.refusals import refused

pytestmark = pytest.mark.check

FILES = sorted(file.name for file in HERE.glob("*.gz"))


def report(file):
    name, topology, *_ = file.removesuffix(".json.gz").split("-")
    step, args = PROGRAMS[name]()
    jaxpr = step.trace(*args).jaxpr.jaxpr
    answer, module = load(file)
    return report_of(
        module,
        answer,
        topology=topology.replace("_", ":"),
        mesh=mesh_sizes(jaxpr, args),
        census=census_of(jaxpr),
        lowering_seconds=0.0,
    )


def files(program):
    found = [file for file in FILES if file.startswith(program + "-")]
    assert found
    return found


def test_every_program_was_recorded_on_both_platforms_and_both_versions():
    for program in PROGRAMS:
        names = files(program)
        assert {name.split("-")[-1] for name in names} == {"jax0.10.json.gz", "jax0.12.json.gz"}
        assert {"v5e_2x4", "h100_1x1x8"} <= {name.split("-")[1] for name in names}
    assert sum((HERE / file).stat().st_size for file in FILES) < 400_000


@pytest.mark.parametrize("file", files("fsdp_tp"))
def test_layers_communicate_as_written_on_every_chip(file):  # proves F76, F88
    """Async fusions, start/done pairs, sparse-core calls, merged operands: the same counts and bytes over each axis."""
    found = report(file)
    for kind in ("all_gather", "all_reduce", "reduce_scatter"):
        for axis in ("fsdp", "tp"):
            assert found.sent(axis=axis, kind=kind) == found.census.sent(axis=axis, kind=kind)
            arrays = sum(r.times * r.arrays for r in found.select(axis=axis, kind=kind))
            assert arrays == found.census.count(axis=axis, kind=kind)
    assert all(line.startswith("merged: ") for line in found.differences())
    assert all(r.source.startswith("programs.py:") for r in found.rows)
    # Four layers: two matmuls forward, one of them again, four backward; 2 x 512 tokens, 1024 x 2048 weights a device.
    assert found.compute.flops == 4 * 7 * 2 * (2 * 512) * 1024 * 2048


def test_overlap_is_read_off_the_schedule():  # proves S91
    v5e, v5p, offload = (
        report(f"fsdp_tp-{name}-jax0.10.json.gz") for name in ("v5e_2x4", "v5p_2x2x2", "v6e_2x4-offload")
    )
    assert {r.asynchronous for r in v5p.rows} == {False}
    assert v5p.exposed_seconds == v5p.wire_seconds
    # On v5e one gather of each layer runs beside a matmul, forward and backward, and is almost all hidden.
    beside = [r for r in v5e.rows if r.asynchronous]
    assert sum(r.times for r in beside) == 8 and {r.kind for r in beside} == {"all_gather"}
    assert all(r.hidden_flops >= 2 * (2 * 512) * 1024 * 2048 for r in beside)
    assert sum(r.exposed * r.times for r in beside) < 0.1 * sum(r.seconds * r.times for r in beside)
    assert v5e.exposed_seconds < v5e.wire_seconds
    # v6e's sparse cores take every collective off the matmul units when they are told to.
    assert {r.asynchronous for r in offload.rows} == {True}
    assert offload.exposed_seconds < 0.7 * report("fsdp_tp-v6e_2x4-jax0.10.json.gz").exposed_seconds


@pytest.mark.parametrize("file", files("ring_loop"))
def test_a_ring_in_a_loop_overlaps_every_hop(file):
    (row,) = report(file).rows
    assert (row.kind, row.axes, row.n, row.count, row.asynchronous) == ("ppermute", ("tp",), 8, 8, True)
    assert row.sent == row.bytes_in == 1024 * 4096 * 2
    assert row.hidden_flops == 2 * 1024 * 4096 * 2048
    assert report(file).differences() == []


@pytest.mark.parametrize("file", files("ring_unrolled"))
def test_an_unrolled_ring_drops_its_last_hop_and_overlaps_less_on_a_gpu(file):
    found = report(file)
    assert found.count(kind="ppermute") == 7
    assert found.differences() == [
        "dropped: 1 of 8 x ppermute over 'tp', 8,388,608 bytes at programs.py:46 (ring.<locals>.kernel.<locals>.hop)"
    ]
    asynchronous = sum(r.times for r in found.rows if r.asynchronous)
    assert asynchronous == 7 if "v5e" in file else asynchronous < 4


@pytest.mark.parametrize("file", files("partitioner"))
def test_what_the_compiler_adds_is_named(file):  # proves F88
    found = report(file)
    assert found.census.rows == ()
    assert {(r.kind, r.axes, r.n, r.sent) for r in found.rows} == {
        ("all_reduce", ("b",), 2, Fraction(2048 * 4096 * 2)),
        ("all_reduce", ("a", "c"), 4, Fraction(6)),
    }
    source = "programs.py:64 (partitioner.<locals>.<lambda>)"
    assert found.differences() == [
        f"added: 1 x all_reduce over 'a', 'c', 6 bytes at {source}",
        f"added: 1 x all_reduce over 'b', 16,777,216 bytes at {source}",
    ]


@pytest.mark.parametrize("file", files("parts"))
def test_groups_over_a_part_of_an_axis_are_called_so(file):
    rows = {r.kind: r for r in report(file).rows}
    assert (rows["all_reduce"].axes, rows["all_reduce"].n) == (("part of a",), 4)
    assert (rows["all_gather"].axes, rows["all_gather"].n) == (("part of a",), 2)


@pytest.mark.parametrize("file", files("branches"))
def test_loops_branches_and_conditions_are_counted(file):
    found = report(file)
    assert found.count(axis="data", kind="all_to_all") == 15  # five times in each of three
    assert [r.branch for r in found.rows if r.branch] == ["branch 1 of 2", "branch 2 of 2"]
    unknown = [(r.kind, r.axes) for r in found.rows if r.count is None]
    assert sorted(unknown) == [("all_reduce", ("data", "model")), ("all_reduce", ("model",))]
    assert found.differences() == ["merged: 3 x all_reduce over 'data', 'model' run as 2, 3,591 bytes as written"]


def test_a_window_hides_one_collective_of_an_axis_only():
    """Two gathers over the same links cannot both hide behind the same matmul."""
    _, module = load("fsdp_tp-v6e_2x4-offload-jax0.10.json.gz")
    clock = Clock(lambda flops, size: flops / 1e12, lambda kind, groups, sent: float(sent))
    for row in collectives_of(proto.read(module), {"fsdp": 4, "tp": 2}, clock):
        assert 0 <= row.exposed <= row.seconds == float(row.sent)
    rows = collectives_of(proto.read(module), {"fsdp": 4, "tp": 2}, clock)
    hidden = sum((r.seconds - r.exposed) * r.times for r in rows if "fsdp" in r.axes)
    assert hidden <= total_work(proto.read(module), clock).seconds + 1e-9


def test_compute_that_hides_one_collective_is_used_up_for_the_next():
    """Of the same links; the recordings have no two that overlap for longer than what they overlap with."""
    _, serialized = load("fsdp_tp-v5e_2x4-jax0.10.json.gz")
    module = proto.read(serialized)
    clock = Clock(lambda flops, size: 1.0, lambda kind, groups, sent: 1.5)
    reader = Reader(module, {"fsdp": 4, "tp": 2}, clock)
    found = next(
        each
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if (each := reader.pairs.collective_of(computation, instruction)) and each.kind == "all_gather"
    )
    window = [_Slot(Work(1.0, 1.0, 1.0)), _Slot(Work(1.0, 1.0, 1.0))]
    assert [reader._make_row(ComputationRun(module.entry), found, window).exposed for _ in range(3)] == [0.0, 1.0, 1.5]


def test_a_report_goes_to_json():
    mine, other = report("fsdp_tp-v5e_2x4-jax0.10.json.gz"), report("fsdp_tp-h100_1x1x8-jax0.10.json.gz")
    found = json.loads(mine.to_json())
    assert found.keys() == {"derived", *(each.name for each in fields(Report))}
    derived = found["derived"]
    assert derived["peak"] == mine.memory.peak and derived["exposed_seconds"] == mine.exposed_seconds
    assert [row["exposed"] for row in found["rows"]] == [row.exposed for row in mine.rows]
    assert mine.limit == 15.75 * 2**30 and other.limit == 84_942_979_072


def test_a_report_reads_like_this():
    assert str(report("ring_loop-h100_1x1x8-jax0.12.json.gz")).splitlines() == [
        "h100:1x1x8, mesh tp=8 (jax 0.12.0.1, jax-cuda13-plugin 0.12.0.1)",
        "fits: yes, 76.00 MiB of 79.11 GiB per device",
        "held: 24.00 MiB",
        "temp: 20.00 MiB",
        "code: 0 B",
        "compute: 0.137 TFLOP in matmuls, at least 0.214 ms",
        "wire: 0.149 ms, of which 0.000 ms exposed",
        "step: at least 0.214 ms, in which the matmuls take 64.9% of the chip's peak",
        "compiled in: 0.5 s after 0.0 s of lowering, 356.88 MiB",
        "kind      axes  times  arrays  bytes in   sent/device  runs        hidden by    exposed   source",
        "ppermute  tp=8  8      1       8,388,608  64.00 MiB    overlapped  137.4 GFLOP  0.000 ms  "
        "programs.py:46 (ring.<locals>.kernel.<locals>.hop)",
        "as written",
    ]


def test_bytes_that_are_no_module_are_refused():
    for data in (b"", b"\x0a\x03abc", b"nonsense"):
        assert refused(lambda: proto.read(data)) == (
            f"hlo.read: proto must be a serialized HloModuleProto; got {len(data)} bytes that are not one. "
            "Pass the result of HloModule.as_serialized_hlo_module_proto()."
        )


def test_groups_in_every_form_that_compilers_write():
    """An iota whose dims are reordered, a mesh's axes, parts of an axis, a mesh whose devices are permuted."""
    assert groups._cut_iota(2, 4, (2, 2, 2), (1, 0, 2)) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert groups._find_mesh_groups([4, 2], [b"\x08\x00"]) == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert groups._find_mesh_groups([4, 2], [b"\x08\x00", b"\x08\x01"]) == ((0, 1, 2, 3, 4, 5, 6, 7),)
    assert groups._find_mesh_groups([4, 2], [b"\x08\x01", b"\x08\x00"]) == ((0, 2, 4, 6, 1, 3, 5, 7),)
    part = b"\x08\x00\x12\x04\x08\x02\x10\x04"  # of axis 0, pre_size 2, size 4: the minor digit of eight
    assert groups._find_mesh_groups([8], [part]) == ((0, 1, 2, 3), (4, 5, 6, 7))
    mesh = b"\x0a\x02\x10\x02\x0a\x02\x10\x02" + b"\x12\x04\x03\x02\x01\x00"  # 2 x 2, devices 3 2 1 0
    data = b"\x0a" + bytes([len(mesh)]) + mesh + b"\x12\x02\x08\x01"
    assert groups.groups_in(93, data) == ((3, 2), (1, 0))


def test_the_memory_of_a_report_adds_up():
    memory = report("fsdp_tp-v5e_2x4-jax0.10.json.gz").memory
    weights = 2 * 4 * 1024 * 4096 * 2 // 8
    assert memory.argument == memory.held == weights + 2 * 512 * 1024 * 2
    assert memory.alias == weights  # donated
    assert memory.peak == memory.argument + memory.output - memory.alias + memory.temp + memory.generated_code


def test_a_pad_before_a_reduce_scatter_is_the_compilers_or_written():
    """The compiler's own costs nothing that was asked for; what the author pads is sent, and was counted without it."""
    part, whole = proto.Shape(11, (50,)), proto.Shape(11, (56,))  # float32
    for op_name, shape in (("jit(f)/shard_map/psum_scatter", part), ("", part), ("jit(f)/shard_map/pad", whole)):
        pad = proto.Instruction(2, "pad.1", "pad", whole, operands=(1,), op_name=op_name)
        held = proto.Computation(1, "main", 2, {1: proto.Instruction(1, "x", "parameter", part), 2: pad})
        assert (_shape_before_padding(held, 2), _shape_before_padding(held, 1)) == (shape, part)


def test_taps_of_a_convolution_leave_out_padding_and_holes():
    def brute(size, kernel, result, stride, low, step, holes):
        wide = np.zeros((size - 1) * holes + 1)
        wide[::holes] = 1
        places = [o * stride + k * step - low for o in range(result) for k in range(kernel)]
        return sum(bool(0 <= p < len(wide) and wide[p]) for p in places)

    cases = [(8, 1, 8, 1, 0, 1, 1), (8, 3, 8, 1, 1, 1, 1), (4, 4, 4, 3, 3, 1, 4), (5, 2, 4, 2, 1, 2, 3)]
    for case in [*cases, (4, 2, 4, 1, -1, 1, 1)]:
        assert taps(*case[:3], **dict(zip(("stride", "low", "step", "holes"), case[3:], strict=True))) == brute(*case)


# ---- programs compiled for this machine


def test_expects_takes_a_report():
    found = report("ring_loop-v5e_2x4-jax0.10.json.gz")
    sk.expects(sk.collective("ppermute", "tp", times=8)).check_compiled(found)
    with pytest.raises(AssertionError, match="expected 7 x ppermute over 'tp'; found 8 x"):
        sk.expects(sk.collective("ppermute", "tp", times=7)).check_compiled(found)


def test_the_mesh_of_a_program_is_found():
    mesh = abstract_mesh(a=2, b=4)
    f = jax.shard_map(lambda x: lax.psum(x, "a"), mesh=mesh, in_specs=P("a"), out_specs=P())
    nested = jax.make_jaxpr(jax.jit(lambda x: lax.map(f, x)))(np.ones((3, 4), np.float32)).jaxpr
    assert mesh_sizes(nested, ()) == {"a": 2, "b": 4}
    assert mesh_sizes(jax.make_jaxpr(jnp.sin)(1.0).jaxpr, (1.0,)) == {}


def test_recordings_hold_no_path_of_a_machine():
    for file in FILES:
        answer, module = load(file)
        places = {source.split(":")[0] for source in proto.read(module).frames.values()}
        assert not any("/" in place for place in places)
        assert "/" not in json.dumps(answer)
        assert b"/home" not in module and b"/work" not in module and b"/tmp" not in module
        assert gzip.decompress((HERE / file).read_bytes())
