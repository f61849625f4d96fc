"""Compiling for absent chips: errors in full, what the child process survives, and small live compiles."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit._arguments.checks import quote
from shardkit.analysis.hlo import aot, topology
from shardkit.analysis.hlo.report import report_of
from shardkit.models import transformer
from support.compilers import answers, child_that, gpu, refused, tpu
from support.recorded.programs import PROGRAMS, abstract_mesh, shape
from support.recorded.record import load
from support.trees import assert_laid_out

CONFIG = transformer.Config(vocabulary=64, layers=2, dim=32, heads=4, hidden=64)


def data_parallel(n=8):
    """A train step over a mesh without devices, and its abstract arguments."""
    loss = sk.value_and_grad(transformer.loss_fn(CONFIG))
    init, step = sk.make_train_step(loss, optax.sgd(1e-3, momentum=0.9), mesh=abstract_mesh(data=n), plan=sk.dp("data"))
    tokens = jax.ShapeDtypeStruct((2 * n, 16), jnp.int32)
    return step, (init.abstract(lambda key: transformer.init(key, CONFIG)), {"tokens": tokens, "targets": tokens})


# ---- what is asked for


@pytest.mark.parametrize("topology", ["v5e:2x4", "h100:1x1x8"])
@pytest.mark.parametrize("devices", ["none", "simulated"])
def test_auto_chooses_for_the_topology_as_on_a_mesh_of_its_chips(topology, devices, monkeypatch):
    """A report of another program than the one that will run would be worth nothing."""
    chip = aot.parse_topology(topology)
    kind = {"v5e": "TPU v5 lite", "h100": "NVIDIA H100 80GB HBM3"}[chip.chip]
    platform = "tpu" if chip.platform == "tpu" else "gpu"
    meshes = {"none": sk.abstract_mesh(model=8), "simulated": sk.make_mesh(jax.devices()[:8], model=8)}
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    real = jax.sharding.AbstractMesh((8,), ("model",), meshes["none"].axis_types, abstract_device=device)
    specs = (P("model"), P(None, "model"))

    def multiply(mesh):
        kernel = lambda x, w: sk.all_gather_matmul(x, w, "model")  # noqa: E731
        return jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=specs, out_specs=specs[1]))

    def shapes(mesh):
        arrays = []
        for dims, spec in zip(((8192, 4096), (4096, 32768)), specs, strict=True):
            arrays.append(jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=NamedSharding(mesh, spec)))
        return arrays

    step, args = multiply(meshes[devices]), shapes(meshes[devices])
    assert [row.kind for row in sk.census(step, *args).rows] == ["all_gather"]
    traced = aot._trace_for(chip, step, args)
    for_mesh = multiply(real).trace(*shapes(real))
    assert {row.kind for row in sk.census(traced, *args).rows} == {"ppermute"}
    platforms = {"lowering_platforms": (chip.platform,)}
    assert traced.lower(**platforms).as_text() == for_mesh.lower(**platforms).as_text()
    assert [row.kind for row in sk.census(step, *args).rows] == [
        "all_gather"
    ]  # the trace for a chip is not kept for others


def test_topologies_are_read():
    assert aot.parse_topology("v5p:8x8x8") == aot.Topology("v5p", (8, 8, 8))
    assert aot.parse_topology("v5e:2x4").platform == "tpu"
    assert aot.parse_topology("h100:1x4x8").platform == "cuda"
    assert str(aot.parse_topology("b200:1x1x8")) == "b200:1x1x8"


@pytest.mark.parametrize(
    "message, text",
    {
        f"aot: unknown chip 'v9' in topology 'v9:2x2'; known are {quote(sk.cost.chips)}. Pass for example "
        "'v5p:8x8x8' or 'h100:1x1x8'.": "v9:2x2",
        "aot: topology 'v5e' must give a valid shape. After 'v5e' write the torus, as 'v5e:2x4'.": "v5e",
        "aot: topology 'v5p:0x4x4' must give a valid shape. After 'v5p' write the torus, as 'v5e:2x4'.": "v5p:0x4x4",
        "aot: topology 'h100:8' must give a valid shape. After 'h100' write slices x hosts x GPUs per host, "
        "as 'h100:1x1x8'.": "h100:8",
    }.items(),
)
def test_unreadable_topologies_are_refused(text, message):
    assert refused(lambda x: x, (1.0,), topology=text) == message


def test_a_missing_compiler_and_a_topology_smaller_than_the_mesh_are_refused_before_anything_is_compiled(monkeypatch):
    monkeypatch.setattr(topology, "find_spec", lambda name: None)
    assert refused(lambda x: x, (1.0,), error=RuntimeError) == (
        "aot.compile: the compiler for v5e is not installed. Install it with: pip install 'shardkit[aot]'"
    )
    assert refused(lambda x: x, (1.0,), topology="h200:1x1x8", error=RuntimeError) == (
        "aot.compile: the compiler for h200 is not installed. Install it with: pip install 'shardkit[aot-gpu]'"
    )
    child_that(monkeypatch, "raise SystemExit('not reached')")
    step, args = data_parallel(8)
    assert refused(step, args, topology="v5e:2x2") == (
        "aot.compile: topology 'v5e:2x2' has 4 devices, fewer than the 8 of the mesh data=8. "
        "Pass a larger topology or a smaller mesh."
    )


def test_a_function_that_cannot_be_traced_is_refused_in_its_own_words(monkeypatch):
    child_that(monkeypatch, "raise SystemExit('not reached')")
    assert refused(lambda x: x @ jnp.ones((3, 3)), (jnp.ones((2, 2)),)).startswith(
        "aot.compile: the function cannot be traced with these arguments: TypeError: dot_general requires contracting"
    )
    step, (state, batch) = data_parallel(8)
    odd = jax.tree.map(lambda x: jax.ShapeDtypeStruct((9, 16), x.dtype), batch)
    assert "ValueError: make_train_step: " in refused(step, (state, odd))


# ---- what the compiler's process may do


def test_an_abort_of_the_compiler_is_an_error_with_its_cause(monkeypatch):
    cry = (
        "import os, sys; sys.stderr.write('noise\\nF1121 12:00:00 1 t.cc:1] Check failed: z == 1 (9 vs. 1)\\nmore\\n')"
    )
    child_that(monkeypatch, cry + "; sys.stderr.flush(); os.abort()")
    assert refused(*data_parallel(), error=RuntimeError) == (
        "aot.compile: the compiler for v5e:2x4 ended with exit code -6: Check failed: z == 1 (9 vs. 1)"
    )
    child_that(monkeypatch, "pass")
    assert refused(*data_parallel(), error=RuntimeError) == (
        "aot.compile: the compiler for v5e:2x4 ended with exit code 0: no message"
    )


def test_a_compiler_that_takes_too_long_is_ended(monkeypatch):
    child_that(monkeypatch, "import time; time.sleep(60)")
    assert refused(*data_parallel(), error=RuntimeError, timeout=0.5) == (
        "aot.compile: the compiler for v5e:2x4 took longer than 0.5 s. Pass a longer timeout=, or a program with its "
        "layers in a scan."
    )


def test_what_the_compiler_refuses_is_passed_on(monkeypatch):
    child_that(monkeypatch, answers({"error": "topology", "message": "no such torus\nmore"}))
    assert refused(*data_parallel()) == "aot.compile: the compiler knows no topology 'v5e:2x4': no such torus"
    child_that(monkeypatch, answers({"error": "compile", "message": "INVALID_ARGUMENT: No such compile option: 'x'"}))
    assert refused(*data_parallel(), error=RuntimeError) == (
        "aot.compile: the compiler for v5e:2x4 refused the program: INVALID_ARGUMENT: No such compile option: 'x'"
    )
    for words in (  # of v5e:8x8 and of v6e:4x4: they are no fault of the program
        "INTERNAL: RET_CHECK failure (a.cc:1879) device_count == target.Topology()->LogicalDeviceCount( kTensorCore) "
        "On platforms with limited ICI routing device assignment should include all slice devices",
        "INTERNAL: RET_CHECK failure (net_util.cc:2304) device_id < kMaxDeviceCount Unexpected device_id 8 [0:2]",
    ):
        child_that(monkeypatch, answers({"error": "compile", "message": words}))
        assert refused(*data_parallel(), topology="v5e:8x8") == (
            "aot.compile: the compiler for v5e:8x8 cannot leave 56 of its 64 devices idle, as the mesh data=8 would. "
            "Pass a topology of 8 devices, or a mesh of 64."
        )
        assert refused(*data_parallel(), error=RuntimeError).endswith(f"refused the program: {words}")
    child_that(monkeypatch, answers({"error": "small", "devices": 4}))
    assert "has 4 devices, fewer than the 8 of the mesh data=8" in refused(*data_parallel())


@pytest.mark.parametrize(
    "message, needed",
    [
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (22.10G) exceeds available HBM (15.75G). HLO module: jit_g.",
            22.10,
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 22.10G of 15.75G hbm. Exceeded by 6.35G.",
            22.10,
        ),
    ],
)
def test_a_program_that_does_not_fit_is_a_report_with_the_compilers_number(monkeypatch, message, needed):  # proves F52
    child_that(monkeypatch, answers({"error": "compile", "message": message}))
    report = aot.compile(*data_parallel(), topology="v5e:2x4")
    assert not report.fits and report.memory is None and report.rows == () and report.differences() == []
    assert report.needed == int(needed * 2**30) and report.available == int(15.75 * 2**30)
    assert str(report).splitlines() == [
        "v5e:2x4, mesh data=8",
        "does not fit: 22.10 GiB of 15.75 GiB per device",
        message,
    ]
    assert report.census.count(axis="data") > 0  # what it would send is known all the same
    assert json.loads(report.to_json())["memory"] is None


def test_a_program_that_the_gpu_compiler_lets_through_is_held_to_the_chips_memory():
    """The GPU compiler refuses nothing, so its own peak is compared with the memory of the target."""
    answer, module = load("ring_loop-h100_1x1x8-jax0.10.json.gz")
    answer["memory"]["compiler_peak"] = 85 * 10**9
    step, args = PROGRAMS["ring_loop"]()
    census = sk.census(step, *args)
    report = report_of(module, answer, topology="h100:1x1x8", mesh={"tp": 8}, census=census, lowering_seconds=0.0)
    assert not report.fits and report.needed == 85 * 10**9
    assert "fits: NO, 79.16 GiB of 79.11 GiB per device" in str(report)
    step, args = PROGRAMS["partitioner"]()  # what the compiler changed is told all the same
    answer, module = load("partitioner-h100_1x1x8-jax0.10.json.gz")
    answer["memory"]["compiler_peak"] = 85 * 10**9
    options = {"topology": "h100:1x1x8", "mesh": {"a": 2, "b": 2, "c": 2}, "census": sk.census(step, *args)}
    added = report_of(module, answer, lowering_seconds=0.0, **options)
    assert len(json.loads(added.to_json())["derived"]["differences"]) == len(added.differences()) == 2


# ---- a state without arrays


def test_an_abstract_state_is_laid_out_as_a_real_one(data8):
    loss = sk.value_and_grad(transformer.loss_fn(CONFIG))
    for precision in ("bf16", "fp16"):
        init, _ = sk.make_train_step(loss, optax.adafactor(1e-3), mesh=data8, plan=sk.dp("data"), precision=precision)
        real = init(lambda key: transformer.init(key, CONFIG), jax.random.key(0))
        for abstract in (
            init.abstract(lambda key: transformer.init(key, CONFIG)),
            init.abstract(transformer.init(jax.random.key(0), CONFIG)),
        ):
            assert_laid_out(real, abstract)


# ---- live


@tpu
def test_a_train_step_compiles_for_eight_tpu_chips():  # proves F52, F86
    step, args = data_parallel()
    report = aot.compile(step, args, topology="v5e:2x4")
    assert report.fits and report.needed == report.memory.compiler_peak < 2**30 and report.available == 15.75 * 2**30
    state_bytes = sk.bytes_per_device(args[0])
    batch_bytes = 2 * 2 * 16 * 4
    assert state_bytes + batch_bytes <= report.memory.held < 4 * (state_bytes + batch_bytes)  # tiles of 8 x 128
    assert report.memory.alias >= 0.9 * state_bytes  # donated
    assert report.count() == 1 and report.sent() == report.census.sent()
    (difference,) = report.differences()
    assert difference.startswith("merged: ") and "all_reduce over 'data' run as 1" in difference
    assert 0 < report.compile_seconds < 300 and 0 < report.lowering_seconds < 60
    assert json.loads(report.to_json())["versions"]["jax"] == jax.__version__


# Catches a limit that a new compiler has changed, by which what it accepts is then judged.
@tpu
@pytest.mark.deep  # tests/cli/test_aot.py has a program that does not fit
@pytest.mark.parametrize("topology", ["v5e:2x4", "v4:2x2x2", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1"])
def test_the_tpu_compiler_gives_its_number_when_memory_runs_out(topology):
    mesh = abstract_mesh(data=8)
    f = jax.shard_map(
        lambda x: sk.all_reduce(jnp.sin(x), "data") * 2 + x, mesh=mesh, in_specs=P("data"), out_specs=P("data")
    )
    report = aot.compile(f, (shape((8 * 6_400_000, 8192), mesh, P("data")),), topology=topology)
    assert not report.fits and report.needed > 96 * 2**30 and report.available == report.limit


@tpu
@pytest.mark.deep  # what is made of its answers: test_what_the_compiler_refuses_is_passed_on
def test_the_tpu_compiler_refuses_a_torus_it_does_not_know_and_an_unknown_option():
    step, args = data_parallel()
    assert refused(step, args, topology="v5e:3x5").startswith("aot.compile: the compiler knows no topology 'v5e:3x5': ")
    assert refused(step, args, error=RuntimeError, options={"nonsense": 1}) == (
        "aot.compile: the compiler for v5e:2x4 refused the program: "
        "INVALID_ARGUMENT: No such compile option: 'nonsense'"
    )


@tpu
@pytest.mark.deep
@pytest.mark.parametrize("topology", ["v5e:8x8", "v6e:8x8"])
def test_a_torus_that_the_compiler_takes_only_as_a_whole(topology):
    assert refused(*data_parallel(), topology=topology).startswith(
        f"aot.compile: the compiler for {topology} cannot leave 56 of its 64 devices idle, as the mesh data=8"
    )


@tpu
@pytest.mark.deep  # a corner
def test_a_mesh_smaller_than_the_topology_leaves_chips_idle_and_no_mesh_is_one_chip():
    step, args = PROGRAMS["parts"]()
    assert aot.compile(step, args, topology="v5e:4x4").count() == 2
    report = aot.compile(lambda x: x @ x.T, (jax.ShapeDtypeStruct((256, 256), jnp.float32),), topology="v5e:2x2")
    assert report.mesh == {} and report.rows == () and report.compute.flops == 2 * 256**3


@gpu
@pytest.mark.parametrize("topology", ["h100:1x1x8", "h200:1x2x8", "b200:1x1x8"])
def test_a_train_step_compiles_for_gpus(topology):  # proves F86
    step, args = data_parallel()
    report = aot.compile(step, args, topology=topology)
    assert report.fits and report.sent() == report.census.sent()
    huge = NamedSharding(abstract_mesh(data=8), P())
    over = aot.compile(
        lambda x: x * 2, (jax.ShapeDtypeStruct((60, 2**30), jnp.float32, sharding=huge),), topology=topology
    )
    assert not over.fits and over.needed > 2 * 60 * 2**32 * 0.99
