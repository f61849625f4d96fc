"""The profiler's view: every collective of the program is found, figures are nccl-tests', errors in full.

Nothing here depends on how long anything takes: times are exact where the trace is made up, and only present where it
is real.
"""

import gzip
import json

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.profiler import ProfileData
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.analysis import profile, trace
from shardkit.analysis.hlo import proto
from shardkit.analysis.hlo.collectives import collectives_of
from shardkit.analysis.hlo.differences import compiled
from shardkit.analysis.jaxpr.census import mesh_sizes
from shardkit.analysis.profiling.profile import read_spans
from shardkit.analysis.profiling.timings import SIMULATED, Machine, Span, profile_of
from shardkit.models import transformer
from support.recorded.programs import PROGRAMS
from support.recorded.record import load
from support.refusals import raises, refused, type_error, value_error

BOTH = ("data", "model")
GPU = Machine(jax="0.12.0", platform="gpu", kind="H100", devices=8, cores=16)
RUNNING = "jax records one trace at a time, and another one is running. Stop that one first."


def every_kind(mesh):
    """A program with each kind of collective, two of them in a loop, and its argument."""

    def kernel(x):
        def layer(c, _):
            gathered = lax.all_gather(c, "model", axis=0, tiled=True)
            return lax.psum_scatter(jnp.tanh(gathered), "model", tiled=True), None

        x, _ = lax.scan(layer, x, None, length=3)
        x = lax.ppermute(x, "data", [(0, 1), (1, 0)])
        x = lax.all_to_all(x.reshape(4, -1), "model", 0, 0, tiled=True).reshape(-1)
        return x + lax.psum(x, BOTH)

    x = jax.device_put(jnp.arange(256.0), NamedSharding(mesh, P(BOTH)))
    return jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=P(BOTH), out_specs=P(BOTH))), x


def recorded(file):
    """The module and the collectives of a program that a compiler wrote for an absent chip."""
    step, args = PROGRAMS[file.split("-")[0]]()
    module = proto.read(load(file)[1])
    return module, collectives_of(module, mesh_sizes(step.trace(*args).jaxpr.jaxpr, args))


def made_up(planes):
    """A trace from `{plane: {line: [(event, statistics, start, duration in ns)]}}`."""
    text = []
    for plane, lines in planes.items():
        names, statistics, body = [], [], []
        for line, events in lines.items():
            shown = []
            for event, said, start, duration in events:
                names += [event] * (event not in names)
                statistics += [key for key in said if key not in statistics]
                stats = " ".join(
                    f'stats {{ metadata_id: {statistics.index(key) + 1} str_value: "{value}" }}'
                    for key, value in said.items()
                )
                at = f"metadata_id: {names.index(event) + 1} offset_ps: {start * 1000} duration_ps: {duration * 1000}"
                shown.append(f"events {{ {at} {stats} }}")
            body.append(f'lines {{ name: "{line}" {" ".join(shown)} }}')
        for kind, known in (("event", names), ("stat", statistics)):
            body += [
                f'{kind}_metadata {{ key: {i + 1} value {{ id: {i + 1} name: "{name}" }} }}'
                for i, name in enumerate(known)
            ]
        text.append(f'planes {{ name: "{plane}" {" ".join(body)} }}')
    return ProfileData.from_text_proto("\n".join(text))


# ---- a real run


def test_every_collective_of_the_program_is_found(mesh2x4):  # proves S128
    fn, x = every_kind(mesh2x4)
    found = profile(fn, x, calls=2)
    rows = compiled(fn, x).rows
    assert {r.kind for r in rows} == {"all_gather", "reduce_scatter", "ppermute", "all_to_all", "all_reduce"}
    assert [(r.name, r.kind, r.axes, r.n) for r in found.rows] == [(r.name, r.kind, r.axes, r.n) for r in rows]
    assert [r.times for r in found.rows] == [r.count for r in found.rows] == [r.count for r in rows]
    sizes = {r.kind: r.bytes for r in found.rows}  # 32 elements on a device; a gather's result is four times that
    assert sizes == {"all_gather": 512, "reduce_scatter": 512, "ppermute": 128, "all_to_all": 128, "all_reduce": 128}
    assert found.devices == 8 and len(found.steps) == 2
    assert all(0 < r.fastest <= r.seconds for r in found.rows)
    assert all(r.source.startswith("test_profile.py:") for r in found.rows)
    assert found.notes == (SIMULATED,)
    assert found.select(kind="ppermute", axis="data") == tuple(r for r in found.rows if r.kind == "ppermute")


def test_a_train_step_keeps_its_state_and_is_compiled_once(data8):
    traced = []
    config = transformer.Config(vocabulary=16, layers=1, dim=8, heads=2, hidden=16)
    model = transformer.loss_fn(config)

    def loss(params, batch, keys):
        traced.append(1)
        return model(params, batch, keys)

    init, step = sk.make_train_step(
        sk.value_and_grad(loss), optax.sgd(1e-3, momentum=0.9), mesh=data8, plan=sk.dp("data")
    )
    state = init(lambda key: transformer.init(key, config), jax.random.key(0))
    batch = {name: jnp.zeros((8, 4), jnp.int32) for name in ("tokens", "targets")}
    found = profile(step, state, batch, calls=2)
    assert len(traced) == 3  # the step, and twice its loss, at which the first call looks
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert [(r.kind, r.axes, r.times) for r in found.rows] == [("all_reduce", ("data",), 1)]
    assert float(step(state, batch)[1]["loss"]) > 0  # and only now is it donated
    assert state.params["embed"].is_deleted()


def test_a_loop_of_unknown_length_is_counted_by_the_run(data8):
    def kernel(x):
        def body(carry):
            number, total = carry
            return number + 1, sk.vary(sk.all_reduce(total, "data", op="mean"), "data")

        limit = sk.all_reduce(jnp.max(x), "data", op="max").astype(jnp.int32)
        return lax.while_loop(lambda carry: carry[0] < limit, body, (jnp.int32(0), x))[1]

    fn = jax.shard_map(kernel, mesh=data8, in_specs=P("data"), out_specs=P("data"))
    found = profile(fn, jnp.full(8, 5.0), calls=3)
    assert [(r.count, r.times) for r in found.rows] == [(1, 1), (None, 5)]
    assert found.notes == (SIMULATED,)


def test_nothing_to_show():
    found = profile(lambda x: x * 2, jnp.ones(4), calls=1)
    assert found.rows == () and found.devices == 0
    assert str(found).splitlines()[2] == "no collectives"


def test_a_trace_is_left_for_tensorboard_and_perfetto(tmp_path, mesh2x4):  # proves S119
    # proves F89 in part: the trace, and no snapshot of memory
    fn, x = every_kind(mesh2x4)
    jax.block_until_ready(fn(x))
    names = {row.name for row in compiled(fn, x).rows}
    with trace(tmp_path / "new" / "folder") as folder:
        jax.block_until_ready(fn(x))
    (run,) = (folder / "plugins" / "profile").iterdir()  # where TensorBoard looks
    (file,) = run.glob("*.xplane.pb")
    shown = [
        event.name
        for plane in ProfileData.from_file(str(file)).planes
        for line in plane.lines
        for event in line.events
        if event.name in names
    ]
    assert {name: shown.count(name) for name in names} == {r.name: 8 * r.count for r in compiled(fn, x).rows}
    perfetto = json.loads(gzip.decompress((run / "perfetto_trace.json.gz").read_bytes()))
    assert names <= {event.get("name") for event in perfetto["traceEvents"]}
    assert "metadata" not in perfetto  # which Perfetto refuses


@pytest.mark.check
def test_what_else_keeps_a_trace_from_beginning_is_jaxs_own_error(tmp_path, monkeypatch):
    """Only one that is running already has a sentence of ours; any other error must not be taken for a trace."""

    def fails(*args, **options):
        raise RuntimeError("no space left on the device")

    monkeypatch.setattr(jax.profiler, "start_trace", fails)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    with raises(RuntimeError, "no space left on the device"), trace(tmp_path):
        pass


def test_a_trace_ends_with_its_block(tmp_path):
    with pytest.raises(ZeroDivisionError), trace(tmp_path / "a"):
        _ = 1 // 0
    with trace(tmp_path / "b", python=True):
        pass
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_a_profile_can_keep_its_trace(tmp_path, mesh2x4):
    fn, x = every_kind(mesh2x4)
    profile(fn, x, calls=2, folder=tmp_path)
    (file,) = tmp_path.rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "call" for event in events) == 2


# ---- figures, exactly


def test_figures_are_those_of_nccl_tests(mesh2x4):
    fn, x = every_kind(mesh2x4)
    rows = compiled(fn, x).rows
    # Of two devices one comes 4 us late each time: it takes 1 us, and the other waits for it.
    spans = {
        row.name: {
            0: [Span(10_000 * i, 10_000 * i + 5_000) for i in range(2 * row.count)],
            1: [Span(10_000 * i + 4_000, 10_000 * i + 5_000) for i in range(2 * row.count)],
        }
        for row in rows
    }
    found = profile_of(rows, spans, [50e-6, 150e-6], GPU)
    assert (found.seconds, found.devices, found.notes) == (pytest.approx(100e-6), 2, ())
    for row in found.rows:
        assert row.seconds == pytest.approx(row.count * 3e-6, rel=1e-12)
        assert row.fastest == pytest.approx(row.count * 1e-6, rel=1e-12)
        assert found.share(row) == pytest.approx(row.count * 0.03, rel=1e-12)
        assert row.algorithm_bandwidth == pytest.approx(row.bytes / 1e-6, rel=1e-12)
    bus = {r.kind: r.bus_bandwidth / r.algorithm_bandwidth for r in found.rows}
    factors = {"all_gather": 3 / 4, "reduce_scatter": 3 / 4, "all_to_all": 3 / 4, "ppermute": 1, "all_reduce": 7 / 4}
    assert bus == pytest.approx(factors, rel=1e-12)
    head, step, columns, *body, total = str(found).splitlines()
    assert head == "jax 0.12.0, 8 x H100 (gpu), 16 CPU cores"
    assert step == "one call: 0.100 ms, the mean of 2 calls from 0.050 to 0.150 ms"
    columns = columns.split("  ")
    assert [c.strip() for c in columns if c] == [
        "kind", "axes", "times", "bytes", "ms/call", "fastest device", "of the call", "alg GB/s", "bus GB/s", "source",
    ]  # fmt: skip
    shown = {line.split()[0]: line.split()[1:10] for line in body}
    assert shown["all_gather"] == ["model=4", "3", "512", "B", "0.009", "0.003", "9.0%", "0.512", "0.384"]
    assert shown["all_reduce"] == ["data,model=8", "1", "128", "B", "0.003", "0.001", "3.0%", "0.128", "0.224"]
    assert [line.split()[0] for line in body][:2] == ["all_gather", "reduce_scatter"]  # the slowest first
    assert total == "in collectives: 0.027 ms, 27% of a call"
    data = json.loads(found.to_json())
    gather = next(row for row in data["rows"] if row["kind"] == "all_gather")
    assert (gather["axes"], gather["bytes"], gather["times"]) == (["model"], 512, 3)
    assert gather["bus_bandwidth"] == pytest.approx(384e6) and gather["share"] == pytest.approx(0.09)
    assert data["machine"]["kind"] == "H100" and data["seconds"] == pytest.approx(100e-6)


def test_what_the_trace_does_not_show_is_said(mesh2x4):
    fn, x = every_kind(mesh2x4)
    rows = compiled(fn, x).rows
    none = profile_of(rows, {}, [1.0], GPU)
    names = [row.name for row in rows]
    assert none.notes == (
        f"The trace of gpu under jax 0.12.0 does not show 5 of 5 collectives ({', '.join(names[:3])} and 2 more), "
        f"whose times are unknown.",
    )
    assert {(r.seconds, r.fastest, r.bus_bandwidth, none.share(r)) for r in none.rows} == {(None,) * 4}
    assert str(none).splitlines()[3].split()[5:10] == ["?"] * 5
    # One event of device 1 is lost: the mean stays, but which device was fastest is not known any more.
    spans = {r.name: {d: [Span(0, 1000)] * (r.count - (d == 1 and r is rows[0])) for d in (0, 1)} for r in rows}
    lost = profile_of(rows, spans, [1.0], GPU)
    assert lost.notes == (f"{names[0]} runs 3 times per call, and the trace shows 2.5.",)
    assert (lost.rows[0].times, lost.rows[0].fastest, lost.rows[0].bus_bandwidth) == (2.5, None, None)
    assert lost.rows[0].seconds == pytest.approx(2.5e-6) and lost.rows[1].fastest == pytest.approx(3e-6)


@pytest.mark.parametrize("version", ("0.10", "0.12"))
def test_a_gpus_kernels_are_matched_by_what_started_them_and_a_tpus_pairs_last_from_start_to_done(version):
    """The form of a GPU's trace: kernels on streams, whose statistics name the instruction that started them."""
    module, rows = recorded(f"fsdp_tp-h100_1x1x8-jax{version}.json.gz")
    row = next(r for r in rows if r.kind == "reduce_scatter")
    assert not row.name.endswith("-start")  # it is inside a computation that another instruction starts
    starts = {
        i.name for c in module.computations.values() for i in c.instructions.values() if i.opcode.endswith("-start")
    }
    holder = next(name for name in sorted(starts) if name.startswith("reduce-scatter-start"))
    said = {"hlo_op": holder, "hlo_module": module.name}
    events = [("ncclDevKernel_ReduceScatter", said, 100, 40), ("ncclDevKernel_ReduceScatter", said, 300, 60)]
    others = [("gemm", {"hlo_op": "dot.1", "hlo_module": module.name}, 0, 9), ("memcpy", {}, 0, 9)]
    foreign = [("kernel", {"hlo_op": holder, "hlo_module": "jit_other"}, 500, 50)]
    data = made_up(
        {
            "/device:GPU:0": {"Stream #13": events + others + foreign},
            "/device:GPU:1": {"Stream #13": events},
            "/host:CPU": {"python": [(holder, said, 0, 1)]},  # the dispatch, not the run
        }
    )
    spans = read_spans(data, module, rows, "gpu")
    seen = {name: devices for name, devices in spans.items() if devices}
    assert list(seen.values()) == [{f"/device:GPU:{i}": [(100, 140), (300, 360)] for i in (0, 1)}]
    # The form of a TPU's trace: the start and the done of a permute are two short operations.
    module, rows = recorded(f"ring_loop-v5e_2x4-jax{version}.json.gz")
    (row,) = rows
    started, done = row.name, row.name.replace("-start", "-done")
    ops = [(started, {"hlo_op": started}, 100 * i, 2) for i in range(8)]
    ops += [(done, {"hlo_op": done}, 100 * i + 50, 5) for i in range(8)]
    again = [(started, {"hlo_op": started}, 100 * i, 55) for i in range(8)]
    data = made_up({"/device:TPU:0": {"XLA Ops": ops, "Async XLA Ops": again}})
    spans = read_spans(data, module, rows, "tpu")
    assert spans == {started: {"/device:TPU:0": [(100 * i, 100 * i + 55) for i in range(8)]}}
    # A start whose end is not there has no length.
    assert read_spans(made_up({"/device:TPU:0": {"XLA Ops": ops[:8]}}), module, rows, "tpu") == {started: {}}


# ---- errors


def test_errors_in_full(tmp_path, data8):
    with value_error("profile: calls must be a whole number of at least 1; got 0. Pass calls=1 or more."):
        profile(lambda x: x, jnp.ones(1), calls=0)
    with type_error(
        "profile: arguments must be arrays, because the program runs; got a ShapeDtypeStruct at "
        "args[1]['tokens']. Pass arrays, or use aot.compile, which runs nothing."
    ):
        profile(lambda x, batch: x, jnp.ones(1), {"tokens": jax.ShapeDtypeStruct((2,), jnp.int32)})
    with trace(tmp_path):
        with raises(RuntimeError, f"trace: {RUNNING}"), trace(tmp_path):
            pass
        assert refused(lambda: profile(lambda x: x * 2, jnp.ones(1)), RuntimeError) == f"profile: {RUNNING}"
    assert len(list(tmp_path.rglob("*.xplane.pb"))) == 1  # the outer trace was not disturbed
