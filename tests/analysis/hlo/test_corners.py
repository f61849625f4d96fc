"""Where a compiled program is easily read wrong: merged scalars, axes of one device, unrolled bodies, odd chips."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit._jax.pallas import KernelCost, cost_scope
from shardkit.analysis.hlo import aot, proto, trip_counts
from shardkit.analysis.hlo.collectives import CompiledRow, ComputationRun, Reader, collectives_of
from shardkit.analysis.hlo.compute import NO_CLOCK, ModuleWork, Work
from shardkit.analysis.hlo.differences import _find_scatters_run_as_sums, _Traffic, account, compiled
from shardkit.analysis.hlo.report import report_of
from shardkit.analysis.hlo.topology import device_memory, device_of
from shardkit.analysis.jaxpr.census import Census
from support.commands import deep
from support.compilers import answers, child_that, gpu, refused, tpu
from support.recorded.programs import abstract_mesh, shape
from support.recorded.record import load

CHILD_THAT_SHOWS_ITS_MESH = """
import json, sys
mesh = json.load(open(sys.argv[1] + "/request.json"))["mesh"]
json.dump({"error": "compile", "message": f"mesh {mesh}"}, open(sys.argv[1] + "/answer.json", "w"))
"""


def mapped(body, mesh, ins, outs):
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=ins, out_specs=outs))


# ---- the same collective under another description


def test_an_axis_of_one_device_is_no_difference():
    mesh = sk.make_mesh(jax.devices()[:8], data=8, model=1)
    f = mapped(lambda x: lax.psum(x, ("data", "model")), mesh, P(("data", "model")), P())
    found = compiled(f, jnp.ones((8, 4)))
    assert found.census.rows[0].axes == ("data", "model") and found.rows[0].axes == ("data",)
    assert found.differences() == []


def test_a_permute_that_stays_along_one_of_its_axes_is_no_difference(mesh2x4):
    pairs = [(0, 1), (1, 2), (4, 5)]
    f = mapped(lambda x: lax.ppermute(x, ("data", "model"), pairs), mesh2x4, *[P(("data", "model"))] * 2)
    found = compiled(f, jnp.ones((8, 4)))
    assert found.rows[0].axes == ("model",)
    assert found.differences() == []


def test_a_loop_whose_length_only_the_compiler_knows_is_no_difference(data8):
    def body(x):
        return lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, lax.psum(c[1], "data") * c[1]), (0, x))[1]

    found = compiled(mapped(body, data8, P("data"), P("data")), jnp.ones((8, 4)))
    assert [row.count for row in found.census.rows] == [None] and sum(row.times for row in found.rows) == 5
    assert found.differences() == []


@pytest.mark.check
@pytest.mark.parametrize("mine", [True, False])
def test_what_is_merged_under_the_name_of_another_operation_is_told_by_its_line(mine):
    mesh = abstract_mesh(data=8)
    f = mapped(lambda x: lax.psum(x, "data") + lax.psum(x * x, "data"), mesh, P("data"), P())
    written = sk.census(f, shape((64, 4), mesh, P("data"), jnp.float32))
    one, other = written.rows
    sent, line = one.sent + other.sent, one.source if mine else "layers.py:7 (gelu)"
    merged = CompiledRow(
        *("all_reduce", "all-reduce.1", ("data",), 8, 1, 2, 2 * one.bytes_in, 2 * one.bytes_out, sent),
        *(False, 0, 0.0, 0.0, "jit(f)/shard_map/mul", line, ""),
    )
    words = [each.partition(":")[0] for each in account(written, [merged])]
    assert words == (["merged"] if mine else ["dropped", "added"])


# ---- the module


def test_the_layers_of_an_unrolled_body_are_not_walked(data8, monkeypatch):
    """Every sum with two operands used to double the walk, so that a scan over 40 unrolled layers never ended."""
    visits, follow = [], trip_counts._follow
    monkeypatch.setattr(trip_counts, "_follow", lambda *args: visits.append(1) or follow(*args))

    def layers(x, _):
        for _ in range(40):
            x = x + jnp.tanh(x @ x)
        return lax.psum(x, "data") * x, None

    f = mapped(lambda x: lax.scan(layers, x, None, length=3)[0], data8, P("data"), P("data"))
    assert sum(row.times for row in compiled(f, jnp.ones((64, 8))).rows) == 3
    assert len(visits) < 200


def counting_loop(direction, first, limit, step):
    """A loop that goes on while `counter direction limit` holds of its counter."""
    number, truth = proto.Shape(4, ()), proto.Shape(1, ())
    state = proto.Shape(13, (), (number,))

    def instruction(number, opcode, shape, *operands, **more):
        return proto.Instruction(id=number, opcode=opcode, shape=shape, operands=operands, **more)

    def read_counter():
        return instruction(0, "parameter", state), instruction(1, "get-tuple-element", number, 0)

    entry = (
        instruction(0, "constant", number, literal=first),
        instruction(1, "tuple", state, 0),
        instruction(2, "while", state, 1, calls=(1, 2)),
    )
    body = (
        *read_counter(),
        instruction(2, "constant", number, literal=step),
        instruction(3, "add", number, 1, 2),
        instruction(4, "tuple", state, 3),
    )
    condition = (
        *read_counter(),
        instruction(2, "constant", number, literal=limit),
        instruction(3, "compare", truth, 1, 2, direction=direction),
    )
    computations = {}
    for key, instructions in enumerate((entry, body, condition)):
        computations[key] = proto.Computation(key, "", len(instructions) - 1, {i.id: i for i in instructions})
    return proto.Module("", 0, computations, {})


@pytest.mark.check
@pytest.mark.parametrize(
    ("direction", "first", "limit", "step", "expected"),
    [
        ("LT", 0, 10, 3, 4),
        ("LE", 0, 12, 3, 5),
        ("LT", 0, 10, -3, None),
        ("GT", 6, 0, -3, 2),
        ("GE", 6, 0, -3, 3),
        ("LT", 12, 10, 1, 0),
        ("NE", 0, 12, 3, 4),
        ("NE", 0, 10, 3, None),
        ("NE", 20, 12, 1, None),  # it moves away from 12, and was counted as no iteration at all
        ("EQ", 12, 12, 1, None),
    ],
)
def test_trip_counts_of_conditions_in_every_direction(direction, first, limit, step, expected):
    module = counting_loop(direction, first, limit, step)
    entry = module.computations[0]
    assert trip_counts.trip_count(module, entry, entry.instructions[2], {}) == (expected, {})


def test_a_number_that_is_zero_is_read_and_a_config_that_is_no_json_left_alone():
    """A message leaves out a number that is 0."""
    instruction = b"\x0a\x01a" + b"\x12\x08constant" + b"\x1a\x02\x10\x04" + b"\x98\x02\x00"
    read = proto._read_computation(b"\x0a\x01c" + b"\x12" + bytes([len(instruction)]) + instruction, {})
    assert (read.id, read.root, read.instructions[0].opcode) == (0, 0, "constant")
    name, shape_, config = b"\x0a\x01a" + b"\x12\x0bcustom-call", b"\x1a\x02\x10\x04", b"{n = 1 : i64}"
    read = proto._read_instruction(name + shape_ + b"\xda\x02" + bytes([len(config)]) + config)
    assert read.opcode == "custom-call" and read.config == {}


def branches_of(*computations):
    """An entry with a conditional over computations of single instructions."""
    entry = {0: proto.Instruction(id=0, opcode="conditional", calls=tuple(range(1, len(computations) + 1)))}
    inner = [proto.Computation(i, "", 0, {0: each}) for i, each in enumerate(computations, 1)]
    return proto.Module("", 0, {c.id: c for c in (proto.Computation(0, "", 0, entry), *inner)}, {})


def test_of_a_conditionals_branches_each_figure_is_the_largest_and_kernels_are_counted():
    copy = proto.Instruction(id=0, opcode="broadcast", shape=proto.Shape(11, (1000,)))
    kernel = proto.Instruction(id=0, opcode="custom-call", target="tpu_custom_call", shape=proto.Shape(11, (10,)))
    module = branches_of(copy, kernel)
    work = ModuleWork(module, lambda flops, size: float(size)).of_computation(0)
    assert work == Work(0, 4000, 4000.0, 1)
    assert Work(1, 2, 3.0, 4).plus(work, 2) == Work(1, 8002, 8003.0, 6)


def test_a_kernel_whose_name_says_its_cost_counts_it():
    """XLA's calls of Triton's kernels have no estimate."""
    name = f"jit(step)/while/body/{cost_scope(KernelCost(2048, 64, 512))}/attention"
    kernel = proto.Instruction(
        id=0, opcode="custom-call", target="__gpu$xla.gpu.triton", shape=proto.Shape(11, (10,)), op_name=name
    )
    module = proto.Module("", 0, {0: proto.Computation(0, "", 0, {0: kernel})}, {})
    assert ModuleWork(module, lambda flops, size: float(size)).of_computation(0) == Work(2048, 512, 512.0, 0)


def test_a_conditional_whose_scope_says_how_often_it_runs_counts_so_often():
    empty = proto.Instruction(id=0, opcode="parameter")
    copy = proto.Instruction(id=0, opcode="broadcast", shape=proto.Shape(11, (1000,)))
    module = branches_of(empty, copy)
    entry = module.computations[0]
    entry.instructions[0].op_name = "jit(step)/while/body/shardkit_runs_2_of_5/cond"
    assert ModuleWork(module, lambda flops, size: float(size)).of_computation(0) == Work(0, 1600, 1600.0, 0)
    runs = Reader(module, {"x": 2}, NO_CLOCK)._list_runs(ComputationRun(0, 5), entry, entry.instructions[0])
    assert [(run.times, run.branch) for run in runs] == [(2, "branch 1 of 2"), (2, "branch 2 of 2")]


def test_a_fusion_reads_the_slice_that_a_fusion_inside_it_takes_and_writes_the_part_it_updates():
    """Unrolled layers slice their weights out of one stack; counted whole, the stack would hide every collective."""
    stack, layer, index = proto.Shape(16, (8, 4, 4)), proto.Shape(16, (1, 4, 4)), proto.Shape(4, ())
    given = {n: proto.Instruction(id=n, opcode="parameter", parameter=n, shape=s) for n, s in enumerate((stack, index))}

    def stage(number, opcode, result, **more):
        last = proto.Instruction(id=3, opcode=opcode, shape=result, operands=(2, 1), **more)
        flat = proto.Instruction(id=2, opcode="bitcast", shape=stack, operands=(0,))
        return proto.Computation(number, "", 3, {**given, 2: flat, 3: last})

    def work(*stages):
        module = proto.Module("", 0, {s.id: s for s in stages}, {})
        return ModuleWork(module, lambda flops, size: 0.0).of_computation(0)

    outer, inner = stage(0, "fusion", layer, calls=(1,)), stage(1, "fusion", layer, calls=(2,))
    assert work(outer, inner, stage(2, "dynamic-slice", layer)).bytes == 2 * layer.bytes  # read and written
    update = proto.Instruction(id=4, opcode="dynamic-update-slice", shape=stack, operands=(0, 5, 1))
    fresh = proto.Instruction(id=5, opcode="constant", shape=layer)
    root = proto.Instruction(id=6, opcode="bitcast", shape=stack, operands=(4,))
    written = proto.Computation(1, "", 6, {**given, 5: fresh, 4: update, 6: root})
    assert work(stage(0, "fusion", stack, calls=(1,)), written).bytes == layer.bytes + index.bytes


def test_a_matmul_reads_operands_that_a_fusion_inside_it_only_renames():
    """The TPU compiler puts the bitcast of an operand into a fusion; without it no matmul would read its weights."""
    rows, columns = proto.Shape(16, (8, 4)), proto.Shape(16, (4, 2))
    given = {
        0: proto.Instruction(id=0, opcode="parameter", parameter=0, shape=rows),
        1: proto.Instruction(id=1, opcode="parameter", parameter=1, shape=columns),
    }
    result = proto.Shape(16, (8, 2))
    renamed = proto.Instruction(id=2, opcode="fusion", shape=columns, operands=(1,), calls=(2,))
    product = proto.Instruction(id=3, opcode="dot", shape=result, operands=(0, 2), contracting=(1,))
    fusion = proto.Instruction(id=2, opcode="fusion", shape=result, operands=(0, 1), calls=(1,))
    operand = proto.Instruction(id=0, opcode="parameter", parameter=0, shape=columns)
    bitcast = proto.Instruction(id=1, opcode="bitcast", shape=columns, operands=(0,))
    computations = {
        0: proto.Computation(0, "entry", 2, given | {2: fusion}),
        1: proto.Computation(1, "matmul", 3, given | {2: renamed, 3: product}),
        2: proto.Computation(2, "rename", 1, {0: operand, 1: bitcast}),
    }
    work = ModuleWork(proto.Module("m", 0, computations, {}), lambda flops, size: 0.0).of_computation(0)
    assert work.bytes == rows.bytes + columns.bytes + result.bytes


def test_a_collective_that_goes_on_beside_a_loop_is_one():
    """The TPU compiler's all_gather of a backward pass, beside a ring: seven hops of copies were seven gathers."""
    shard, whole = proto.Shape(11, (8,)), proto.Shape(11, (64,))
    state = proto.Shape(13, (), (shard, whole))
    given = proto.Instruction(id=0, opcode="parameter", shape=shard)
    gather = proto.Instruction(id=1, opcode="all-gather", shape=whole, operands=(0,), channel=2)

    def fused(number, target=""):
        instructions = {0: given, 1: gather}
        if target:
            instructions[2] = proto.Instruction(id=2, opcode="custom-call", target=target, shape=state, operands=(1,))
        return proto.Computation(number, "fused", len(instructions) - 1, instructions)

    def carry(number, opcode, *operands, **more):
        return proto.Instruction(id=number, opcode=opcode, operands=operands, **({"shape": state} | more))

    length = {"known_trip_count": {"n": "7"}}
    entry = {
        0: given,
        1: carry(1, "fusion", 0, calls=(1,)),
        2: carry(2, "get-tuple-element", 1),
        3: carry(3, "tuple", 2, 0),
        4: carry(4, "while", 3, calls=(4, 5), config=length),
        5: carry(5, "get-tuple-element", 4),
        6: carry(6, "fusion", 5, calls=(3,), shape=whole),
    }
    body = {
        0: proto.Instruction(id=0, opcode="parameter", shape=state),
        1: carry(1, "get-tuple-element", 0),
        2: carry(2, "fusion", 1, calls=(2,)),
        3: carry(3, "tuple", 2, 0),
    }
    computations = [
        proto.Computation(0, "entry", 6, entry),
        fused(1, "AsyncCollectiveStart"),
        fused(2),
        fused(3, "AsyncCollectiveDone"),
        proto.Computation(4, "body", 3, body),
        proto.Computation(5, "condition", 0, {0: body[0]}),
    ]
    module = proto.Module("m", 0, {computation.id: computation for computation in computations}, {})
    [row] = collectives_of(module, {"model": 8})
    assert (row.kind, row.times, row.asynchronous) == ("all_gather", 1, True)


# ---- chips and memory


@pytest.mark.parametrize("target", ["AllocateBuffer", "ConcatBitcast"])
def test_a_custom_call_that_names_memory_is_no_work(target):
    """By them a ring of matmuls both ways seemed a third slower than it is."""
    held = proto.Shape(11, (1000,))
    given = proto.Instruction(id=0, opcode="parameter", shape=held)
    named = proto.Instruction(id=1, opcode="custom-call", target=target, shape=held, operands=(0,))
    module = proto.Module("m", 0, {0: proto.Computation(0, "c", 1, {0: given, 1: named})}, {})
    assert ModuleWork(module, lambda flops, size: float(size)).of_computation(0) == Work()


@pytest.mark.parametrize(("space", "size"), [(1, 0), (5, 4000), (0, 2 * 4000)])
def test_an_asynchronous_copy_to_memory_on_the_chip_is_no_work(space, size):
    """The TPU compiler brings operands into VMEM before their reader, whose bytes are counted: 15 % of a step."""
    held = proto.Shape(11, (1000,))
    pair = proto.Shape(13, (), (held._replace(space=space), held, proto.Shape(8, ())))
    start = proto.Instruction(id=1, opcode="copy-start", shape=pair, operands=(0,))
    done = proto.Instruction(id=2, opcode="copy-done", shape=held, operands=(1,))
    given = proto.Instruction(id=0, opcode="parameter", shape=held)
    module = proto.Module("m", 0, {0: proto.Computation(0, "c", 2, {0: given, 1: start, 2: done})}, {})
    assert ModuleWork(module, lambda flops, size: float(size)).of_computation(0) == Work(0, size, float(size))


def test_a_chip_of_two_devices_gives_each_its_half():
    seven, five = aot.parse_topology("tpu7x:2x2x1"), aot.parse_topology("v5p:2x2x1")
    assert (seven.devices, five.devices) == (8, 4)
    assert device_memory(seven) == 94.75 * 2**30
    whole, half = sk.cost.chips["tpu7x"], device_of(seven)
    assert (2 * half.flops, 2 * half.hbm_bandwidth) == (whole.flops, whole.hbm_bandwidth)
    assert half.link_bandwidth == whole.link_bandwidth
    assert device_of(five) == sk.cost.chips["v5p"]


@pytest.mark.parametrize(("argument", "fits"), [(95.5, True), (96, False)])
def test_what_a_program_needs_is_compared_with_the_compilers_own_limit(argument, fits):
    """It is not the data sheet's: of the 95 GiB of a v5p it gives out a little more, of other chips less."""
    answer, module = load("fsdp_tp-v5p_2x2x2-jax0.10.json.gz")
    answer["memory"]["argument"] = int(argument * 2**30)
    sizes = {"fsdp": 4, "tp": 2}
    report = report_of(module, answer, topology="v5p:2x2x2", mesh=sizes, census=Census(()), lowering_seconds=0.0)
    assert report.fits == fits and report.needed > 95 * 2**30


def test_a_kernel_that_overflows_its_scratch_memory_is_refused_and_not_too_large_for_the_chip(monkeypatch):
    words = "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 20.0M of 16.0M vmem."
    child_that(monkeypatch, answers({"error": "compile", "message": words}))
    assert refused(lambda x: x, (1.0,), error=RuntimeError) == (
        f"aot.compile: the compiler for v5e:2x4 refused the program: {words}"
    )


# ---- what is asked for


def test_the_mesh_of_a_sharding_constraint_is_found(monkeypatch):
    child_that(monkeypatch, CHILD_THAT_SHOWS_ITS_MESH)
    rows = NamedSharding(abstract_mesh(a=2, b=4), P("a", "b"))
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    constrained = lambda x: lax.with_sharding_constraint(jnp.tanh(x), rows).sum()  # noqa: E731
    for step in (constrained, jax.jit(jnp.sum, in_shardings=rows)):
        assert refused(step, (x,), error=RuntimeError).endswith("refused the program: mesh {'a': 2, 'b': 4}")


def test_wrong_types_are_refused(monkeypatch):
    child_that(monkeypatch, "raise SystemExit('not reached')")
    assert refused(jnp.sum, jnp.ones((2, 2)), error=TypeError) == (
        "aot.compile: args must be a tuple of the step's positional arguments; got ArrayImpl. "
        "Write (x,) for a single argument."
    )
    assert refused(jnp.sum, (1.0,), topology=8, error=TypeError) == (
        "aot: topology must be a string; got int. Pass for example 'v5p:8x8x8' or 'h100:1x1x8'."
    )
    assert refused(jnp.sum, (1.0,), mesh={"data": 8}, error=TypeError) == (
        "aot.compile: mesh must be a Mesh or an AbstractMesh; got dict. Pass sk.abstract_mesh(data=8), or omit it."
    )
    assert refused(jnp.sum, (1.0,), options=["fast"], error=TypeError) == (
        "aot.compile: options must map names of compiler options to numbers, strings or booleans; "
        "got ['fast']. Pass for example {'xla_tpu_enable_async_collective_fusion': False}."
    )
    x = shape((8,), abstract_mesh(data=8), P("data"))
    assert refused(jnp.sum, (x,), mesh=abstract_mesh(data=4)) == (
        "aot.compile: mesh= must have as many devices as the program; got data=4 for a program of 8 devices. "
        "Pass the program's mesh as mesh=, or omit it."
    )
    assert refused(jnp.sum, (1.0,), topology="v5e:2x2x2") == (
        "aot: topology 'v5e:2x2x2' must give a valid shape. After 'v5e' write the torus, as 'v5e:2x4'."
    )


def test_a_function_that_cannot_be_lowered_is_refused_in_its_own_words():
    class Unlowerable:
        def trace(self, x):
            traced = jax.jit(jnp.sum).trace(x)
            return type("T", (), {"jaxpr": traced.jaxpr, "lower": self.lower})

        def lower(self, **_):
            raise RuntimeError("no rule\nmore")

    assert refused(Unlowerable(), (1.0,)) == (
        "aot.compile: the function cannot be lowered for this platform: RuntimeError: no rule."
    )


@pytest.mark.check
def test_what_a_merged_sum_saves_is_no_negative_traffic():
    """Sums that run as one all_reduce may send up to a tenth less than both; the rest was -251,911,650 bytes."""
    scatter, reduce = ("reduce_scatter", ("data",)), ("all_reduce", ("data",))
    before = {scatter: _Traffic(1, Fraction(100)), reduce: _Traffic(1, Fraction(3))}
    found, restored = _find_scatters_run_as_sums(before, {reduce: _Traffic(1, Fraction(190))})
    assert len(found) == 1 and restored == before


# ---- live


@tpu
@pytest.mark.parametrize("topology", [deep("v4:2x2x2"), "v5e:2x4", deep("tpu7x:2x2x1")])
def test_scalars_that_the_compiler_merges_are_counted(topology):
    mesh = abstract_mesh(data=8)
    body = lambda x: (lax.psum(x.sum(), "data"), lax.psum((x * x).max(), "data"), lax.psum(x.sum(0), "data"))  # noqa: E731
    f = mapped(body, mesh, P("data"), (P(), P(), P()))
    report = aot.compile(f, (shape((64, 256), mesh, P("data"), jnp.float32),), topology=topology)
    assert report.sent() == report.census.sent() == 2 * 7 * (4 + 4 + 1024) / 8
    assert sum(row.arrays for row in report.rows) == 3
    assert all(line.startswith("merged: ") for line in report.differences())


@tpu
def test_a_small_reduce_scatter_that_runs_as_an_all_reduce_is_named():
    mesh = abstract_mesh(data=8)
    f = mapped(lambda x: sk.reduce_scatter(x, "data"), mesh, P(None, "data"), P("data"))
    report = aot.compile(f, (shape((24, 56), mesh, P(None, "data")),), topology="v5e:2x4")
    (line,) = report.differences()
    assert line.startswith("run as all_reduce: 1 x reduce_scatter over 'data', 588 bytes instead of 294 at ")


@tpu
@pytest.mark.deep  # a corner
def test_a_program_with_a_random_key_and_one_with_kernels():
    report = aot.compile(lambda k: jax.random.normal(k, (4,)), (jax.random.key(0),), topology="v5e:2x2")
    assert report.fits and report.rows == () and report.compute.kernels == 0
    grouped = [
        jax.ShapeDtypeStruct(dims, kind) for dims, kind in [((128, 256), jnp.bfloat16), ((4, 256, 512), jnp.bfloat16)]
    ]
    report = aot.compile(lax.ragged_dot, (*grouped, jax.ShapeDtypeStruct((4,), jnp.int32)), topology="v5e:2x2")
    assert report.compute.kernels > 0 and "kernel calls not counted: " in str(report)


@gpu
def test_a_gpu_program_with_a_librarys_calls():
    matrix = jax.ShapeDtypeStruct((8, 64, 64), jnp.float32)
    assert aot.compile(jnp.linalg.cholesky, (matrix,), topology="h100:1x1x8").fits
    image, taps = (jax.ShapeDtypeStruct(d, jnp.bfloat16) for d in [(2, 16, 32, 32), (32, 16, 3, 3)])
    report = aot.compile(lambda x, w: lax.conv(x, w, (1, 1), "SAME"), (image, taps), topology="h100:1x1x8")
    assert report.compute.kernels == 1 and "kernel calls not counted: 1" in str(report)
