"""The files of benchmarks/, each in its smallest run. No time is asserted."""

import json
import subprocess
import sys
import textwrap
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest

import shardkit as sk
from benchmarks import (
    growth,
    links,
    monitor_peers,
    overlap,
    pipeline,
    processes,
    scale,
    schedules,
    soak,
    start,
    step_overhead,
    strategies,
)
from shardkit import bench
from shardkit.bench.measure import MODES
from shardkit.bench.workload import reference

ROOT = Path(start.__file__).parents[1]
SMALL = overlap.Size(tokens=16, width=8, hidden=32, layers=8)


@pytest.mark.check
@pytest.mark.parametrize("name", sorted(path.stem for path in Path(start.__file__).parent.glob("[a-z]*.py")))
def test_every_benchmark_imports_names_that_exist_and_says_its_question(name):
    """The deep tier alone runs most of them."""
    assert import_module(f"benchmarks.{name}").__doc__, "a benchmark says at its top which question it answers"


def test_start_says_that_simulated_devices_share_the_cores_and_its_example_runs(capsys):
    options = start.start("A benchmark.", ["--rounds", "3", "--more"], devices=8, more="another flag")
    assert (options.simulate, options.rounds, options.calls, options.json) == (8, 3, None, None)
    assert (options.smoke, options.more) == (False, True)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "These devices are simulated and share the CPU's cores: read the numbers as overhead and ratios, not as "
        "bandwidth."
    ]
    text = start.__doc__.split("out.jsonl`):\n")[1]
    namespace = {"__name__": "example"}
    exec(compile(textwrap.dedent(text), "example", "exec"), namespace)
    namespace["main"](["--calls", "1", "--rounds", "2"])
    printed = capsys.readouterr().out
    assert [f"4 MiB ({mode}, 1 calls x 2 rounds)" in printed for mode in MODES] == [True, True]


def test_the_builders_unused_keys_do_not_reach_the_compiled_step():
    mesh, model = sk.make_mesh(jax.devices()[:2], data=2), step_overhead.make_mlp(8, 8)
    case_by_hand = step_overhead.make_case_by_hand(model, optax.sgd(1e-3), mesh, "by hand")
    _, by_hand = step_overhead.count_operations(case_by_hand)
    traced, compiled = step_overhead.count_operations(step_overhead.make_built_case(model, optax.sgd(1e-3), mesh))
    assert traced["random_fold_in"] == 3
    assert not [name for name in compiled if name in ("kXor", "kShiftLeft", "kShiftRightLogical", "kWhile")]
    assert compiled["kAllReduce"] == by_hand["kAllReduce"]


def smoke(name, *words):
    """What a benchmark prints in its smallest run."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return done.stdout


def recorded(path, name):
    """What it records."""
    file = path / f"{name}.jsonl"
    if name in ("building", "instruments", "step_overhead"):  # on one device, and one in a process of its own for all
        smoke(name, "--smoke", "--json", file)
    else:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            import_module(f"benchmarks.{name}").main(["--smoke", "--json", str(file)])
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.deep  # what measures is held by the others
def test_step_overhead_smoke(tmp_path):
    records = recorded(tmp_path, "step_overhead")
    assert [(r["row"], r["mode"], r["case"]) for r in records] == [
        (row, mode, name)
        for row, kind in (("mlp, data=2", "by hand"), ("mlp, one device", "plain jit"))
        for mode in MODES
        for name in (kind, "builder", f"{kind} again")
    ]


def test_reshard_smoke(tmp_path):
    """Rows to columns: nothing but what each device must receive is sent, in one piece and in several."""
    records = recorded(tmp_path, "reshard")
    own = [r for r in records if r["case"].startswith("reshard")]
    assert len(records) == 4 and len(own) == 2
    assert all(r["wire_bytes"] == r["least_bytes"] > 0 == r["disagreement_relative_max"] for r in own)


@pytest.mark.deep  # what measures is held by the others
def test_deterministic_smoke(tmp_path, capsys):
    """The two steps agree, and send the same, except for padding and one more message of the means."""
    records = recorded(tmp_path, "deterministic")
    assert [r["case"] for r in records] == ["ordinary", "deterministic", "ordinary again"]
    printed = capsys.readouterr().out
    assert "ordinary: 5.6 KiB sent" in printed and "deterministic: 5.7 KiB sent" in printed


def test_experts_smoke(capsys):
    import_module("benchmarks.experts").main(["--smoke", "--explain"])
    printed = capsys.readouterr().out
    # 3 x 256 tokens x 64 values of 4 bytes, x 8 experts or 10/8 x 2 choices, of which 7/8 travel
    assert "capacity E: 3 all_to_alls, 1.31 MiB sent a device" in printed
    assert "capacity 1.25: 3 all_to_alls, 0.41 MiB sent a device" in printed


@pytest.mark.deep
def test_covering_rows_smoke(tmp_path):
    """A row is timed in each of two checkouts, both of which are this one."""
    file = tmp_path / "rows.jsonl"
    printed = smoke("covering_rows", "--smoke", "--against", ROOT, "--json", file).splitlines()
    record = json.loads(file.read_text())
    assert record["here"]["passed"] and record["against"]["passed"]
    assert printed[-3].startswith("| 4 |") and printed[-1].startswith("here / against: ")


@pytest.mark.deep
def test_manual_smoke(tmp_path, capsys):
    """Explicit fsdp inside an automatic model sends less than plain jit, and several steps in one call are the same."""
    records = recorded(tmp_path, "manual")
    by_name = {record["case"]: record for record in records}
    assert len(records) == 6 + 6 and not any(record["wrong"] for record in records)
    assert by_name["fsdp x rules"]["wire_bytes"] < by_name["jit: fsdp x rules"]["wire_bytes"]
    assert "manual fsdp, steps=2" in capsys.readouterr().out


@pytest.mark.deep
def test_few_frames_stand_between_a_step_and_lax():
    """A wrapper more on the way to each collective is seen here alone."""
    counts = [line.split(": ") for line in smoke("frames").splitlines() if line.endswith(" frames")]
    limits = {"fsdp by layer": 20, "tp, ring": 15, "muon": 14}
    assert [name for name, _ in counts] == list(limits)
    assert all(int(count.split()[0]) <= limits[name] for name, count in counts)


@pytest.mark.deep
def test_context_smoke(tmp_path, capsys):
    records = recorded(tmp_path, "context")
    causal = ["ring, contiguous", "ring, zigzag", "ulysses"]
    assert [r["case"] for r in records] == ["gathered, masked", *causal, "ring, every block"]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        import_module("benchmarks.context").main(["--smoke", "--documents"])
    printed = capsys.readouterr().out
    assert "lognormal         1.91      1.89    1.00" in printed and "64 tokens of lognormal documents" in printed


@pytest.mark.skipif(find_spec("libtpu") is None, reason="the TPU compiler is not installed: shardkit[aot]")
@pytest.mark.deep
def test_exchanges_of_experts_are_compiled():
    sent = {line.split()[0]: line.split()[1] for line in smoke("experts", "--tpu", "--smoke").splitlines() if line}
    assert float(sent["ragged"]) < float(sent["gather"])  # top 2 over 8 devices: choices are fewer than tokens


@pytest.mark.deep
def test_accelerator_smoke(tmp_path, capsys):
    """What `make accelerator` runs, on simulated devices: both rows of several chips, each beside jit's."""
    records = recorded(tmp_path, "accelerator")
    pairs = [(r["row"], r["case"]) for r in records[1:]]
    assert pairs == [
        *(("one chip", name) for name in ("jit", "shardkit")),
        *((f"{plan}, 8 chips", name) for plan in ("dp", "fsdp") for name in ("jit", "shardkit")),
    ]
    printed = capsys.readouterr().out
    assert "collectives over 8 x cpu: all exact" in printed and "| fsdp, 8 chips: shardkit |" in printed


@pytest.mark.deep  # what measures is held by the others
def test_building_and_instruments_smoke(tmp_path):
    records = recorded(tmp_path, "building")
    assert len(records) == 10 and all(record["cpu_us_median"] > 0 for record in records)
    records = recorded(tmp_path, "instruments")
    assert [r["case"] for r in records] == ["trace", "census", "lint", "explain"]
    assert all(r["cpu_us_median"] > 0 for r in records)


@pytest.mark.deep
def test_first_call_smoke():
    """Each row's share is that of its own two times, which are those of something that ran."""
    rows = [line.strip("| ").split(" | ") for line in smoke("first_call", "--smoke").splitlines()[-5:]]
    assert [plan for plan, *_ in rows] == ["dp", "fsdp by layer", "dp, sorted", "dp, sending", "cp, ring"]
    for _, plain, checked, share in rows:
        assert float(plain) > 0 and float(checked) > 0
        # Times are printed in hundredths of a second.
        assert float(share.rstrip("%")) == pytest.approx(100 * (float(checked) / float(plain) - 1), abs=5)


@pytest.mark.deep
@pytest.mark.skipif(find_spec("libtpu") is None, reason="the TPU compiler is not installed: shardkit[aot]")
def test_large_model_smoke(tmp_path):
    file = tmp_path / "report.json"
    printed = smoke("large_model", "--model", "tiny", "--tokens", 256, "--json", file)
    assert printed.startswith("tiny: 0.00B parameters, 4 x 256 tokens a step\nv5e:2x4, mesh fsdp=4, model=2 (jax ")
    assert json.loads(file.read_text())["fits"]


@pytest.mark.deep
@pytest.mark.parametrize("schedules", [("one_f_one_b",), None])
def test_pipeline_smoke(schedules, monkeypatch, tmp_path):
    """A scan as tutorials write it, and each schedule, masked or branched, recomputed or saved."""
    names = schedules or pipeline.SCHEDULES
    monkeypatch.setattr(pipeline, "SCHEDULES", {name: pipeline.SCHEDULES[name] for name in names})
    records = recorded(tmp_path, "pipeline")
    assert {record["row"] for record in records} == {"4 microbatches"}
    assert len(records) == 2 + len(names) * 4
    assert max(record["disagreement_relative_max"] for record in records) < 1e-5


# ---- strategies


@pytest.mark.deep  # what measures is held by tests/cli/test_bench_strategies.py
def test_a_tutorials_step_agrees_with_one_device():
    """What autodiff reduces in every microbatch is twice what the gradients are, and gives the same numbers."""
    mesh, name = sk.make_mesh(data=2, model=4), "tutorial: dp, 2 microbatches"
    with jax.numpy_dtype_promotion("standard"):  # optax does not trace under strict promotion
        work = reference(sk.models.transformer.Config(layers=1, dim=16, heads=4), 16, 4)
        how = {"compiler_options": {"xla_backend_optimization_level": 0}, "calls": 1, "rounds": 1}
        by_hand = strategies.list_handwritten_cases(work, mesh)
        one, tutorial = bench.strategies(work, mesh=mesh, only=[name], beside=by_hand, **how)
    assert 0 < tutorial["disagreement_relative_max"] < tutorial["tolerance_relative"] and not tutorial["wrong"]
    assert one["wire_bytes"] == 0 < tutorial["wire_bytes"] == tutorial["written_bytes"]
    parameters = (one["held_bytes"] - 16 * 4 * 2 * 4 - 4) / 3  # beside two moments, the batch and a counter
    assert tutorial["written_bytes"] == pytest.approx(2 * 2 * 7 / 8 * parameters, rel=0.01)  # microbatches, a ring


@pytest.mark.deep
def test_strategies_smoke(tmp_path):
    """Every case agrees; explicit fsdp sends less than jit, with constraints and without."""
    records = {record["case"]: record for record in recorded(tmp_path, "strategies")}
    assert not any(record["wrong"] for record in records.values()) and len(records) >= 25
    assert {"tutorial: GPipe scan", "tutorial: fsdp, 2 microbatches"} <= set(records)
    theirs = min(records[name]["wire_bytes"] for name in ("jit: fsdp", "jit, constraints: fsdp"))
    assert records["fsdp"]["wire_bytes"] < theirs


# ---- schedules


@pytest.mark.check
def test_the_work_of_masked_schedules_is_that_of_all_devices_at_every_tick():
    """By closed form and by hand; the published tables have these numbers."""
    p, m = 4, 8
    for schedule in (sk.schedules.gpipe(p, m), sk.schedules.lockstep(p, m)):
        assert schedules.count_work(schedule, "masked") == pytest.approx((m + p - 1) * 4 / (3 * m))
    assert schedules.count_work(sk.schedules.breadth_first(p, m, 2), "masked") == pytest.approx(
        (2 * m + p - 1) * 4 / 2 / (3 * m)
    )
    # Ticks of F, F, B, F, B beside I, and B beside W: 1 + 1 + 3 + 1 + 3 + (3 + 1).
    mixed = sk.schedules.Schedule.from_csv("0F0,0F1,,,0B0,0B1\n,1F0,1B0,1F1,1I1,1W1\n")
    assert schedules.count_work(mixed, "masked") == pytest.approx(2 * 13 / (3 * 2 * 2))
    for name in schedules.BUILDERS:
        assert schedules.count_work(schedules.build_schedule(name, 4, 8), "branch") == 4 / 3


# proves F40
@pytest.mark.deep  # each schedule: tests/strategies/test_pipeline.py
def test_executed_schedules_agree_with_the_model(tmp_path, capsys):
    """It alone finds a schedule whose gradients are not the model's on one device, and fields that are missing."""
    file = tmp_path / "out.jsonl"
    assert schedules.main(["--smoke", "--simulate", "8", "--json", str(file)]) == 0
    records = bench.read(file)
    cases = ["unpipelined", "gpipe, masked", "one_f_one_b, masked"]
    assert [(r["row"], r["case"]) for r in records] == [(f"{m} microbatches", case) for m in (2, 4) for case in cases]
    assert [r["wrong"] for r in records] == [0] * 6 and all(r["temp_bytes"] > 0 for r in records)
    last, schedule = records[5], sk.schedules.one_f_one_b(8, 4)
    assert last["makespan"] == schedule.simulate(1, 3).makespan and last["slots_inputs"] == schedule.slots().inputs
    assert last["gpipe_work_ratio"] == round(last["work_ratio"] / records[4]["work_ratio"], 4)
    assert "\n4 microbatches\ncase " in (out := capsys.readouterr().out) and "\nexponent against micro" in out


# ---- what it costs to build a step


@pytest.mark.check
def test_the_exponent_is_the_slope_in_logarithms_and_axes_multiply_to_a_power_of_two():
    assert growth.fit_exponent([1, 2, 4, 8], [5 * x**1.5 for x in (1, 2, 4, 8)]) == pytest.approx(1.5)
    # By hand: points (0, 0), (1, 2), (2, 1) in logarithms to the base 2.
    assert growth.fit_exponent([1, 2, 4], [1, 4, 2]) == pytest.approx(0.5)
    assert growth.fit_exponent([1, 2, 4], [3, None, 48]) == pytest.approx(2)
    assert growth.fit_exponent([2, 2], [1, 3]) is None
    assert scale.choose_axes(4096) == {"data": 32, "fsdp": 16, "model": 8}
    assert all(scale.Point("devices", scale.choose_axes(2**k)).devices == 2**k for k in range(16))


@pytest.mark.deep  # it compiles in a process of its own
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("stages", [1, 4], ids=["fsdp x tp", "pipeline"])
def test_the_text_of_a_step_grows_with_the_devices_by_the_groups_of_its_collectives_alone(stages):
    """A table with an entry for each device, written into the program instead of made on the device, grows it too."""
    sizes = {}
    for devices in (64, 4096):
        mesh = scale.choose_axes(devices) if stages == 1 else {"data": devices // stages, "stage": stages}
        point = scale.Point("devices", mesh, layers=4, dim=64, microbatches=4)
        text = scale.trace_step(point, sk.abstract_mesh(**mesh)).lower(lowering_platforms=("cpu",)).as_text()
        sizes[devices] = len(scale.remove_groups(text))
        assert sizes[devices] < len(text) and "dense<" in text
    assert sizes[4096] == pytest.approx(sizes[64], rel=0.01)


def test_scale_smoke(tmp_path):
    """It alone finds a step that no longer traces over 4096 devices."""
    smoke("scale", "--smoke", "--json", tmp_path / "out.jsonl")
    one, many = bench.read(tmp_path / "out.jsonl")
    assert one["compile_cpu_s"] > 0 and one["compile_rss_bytes"] > 2**20 and many["compile_cpu_s"] is None
    assert many["trace_cpu_s"] > 0 and many["mesh"] == scale.choose_axes(4096)


def test_the_peak_of_a_child_is_its_own():
    """By getrusage it would be at least this process's, in which jax is."""
    code = "from benchmarks import processes; print(processes.read_peak_resident_bytes())"
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert 0 < int(child.stdout) < 2**26 < processes.read_resident_bytes() <= processes.read_peak_resident_bytes()


# ---- what hides


@pytest.mark.check
def test_the_share_is_of_the_shorter_of_the_two():
    """All of it hides where together take the longer, nothing where the sum, and a slower pair is below 0."""
    rows = [(10, 4, 10), (10, 4, 14), (4, 10, 12), (10, 4, 16), (10, 0, 10)]
    assert [overlap.compute_hidden_share(*times) for times in rows] == [1, 0, 0.5, -0.5, None]


@pytest.mark.check
def test_what_is_predicted_is_what_the_time_model_says(monkeypatch):
    """Compute and wire of the report, and of the wire what is exposed; not the sum of both, nor the longer."""
    report = SimpleNamespace(compute=SimpleNamespace(seconds=8e-3), wire_seconds=2e-3, exposed_seconds=5e-4)
    monkeypatch.setattr(sk.aot, "compile", lambda step, args, topology: report)
    parts = overlap.list_cases(sk.abstract_mesh(x=8), SMALL)["matmul_reduce_scatter, ring"]()
    assert overlap.predict_times(parts) == (8000, 2000, 8500)


# proves F82: where there is hardware, each is timed alone and together
def test_the_three_are_timed_and_subtracted():
    """The arithmetic on real functions; on simulated devices the times themselves mean nothing."""
    parts = overlap.list_cases(sk.make_mesh(x=8), SMALL)["matmul_reduce_scatter, ring"]()
    one, other, both = times = overlap.measure_times(parts, rounds=2)
    [record] = overlap.make_records({"ring": times}, "here", "measured", SMALL)
    assert record["hidden_share"] == pytest.approx((one + other - both) / min(one, other), abs=1e-3)
    assert overlap.format_table([record]).endswith("here, measured")


@pytest.mark.deep
@pytest.mark.skipif(find_spec("libtpu") is None, reason="the TPU compiler is not installed: shardkit[aot]")
def test_overlap_smoke(tmp_path):
    printed = smoke("overlap", "--smoke", "--json", tmp_path / "out.jsonl")
    assert printed.endswith("v5e:2x4, predicted from the compiled schedule\n")
    assert [r["case"] for r in bench.read(tmp_path / "out.jsonl")] == list(overlap.QUICK)


# ---- a slow link


@pytest.mark.check
@pytest.mark.parametrize("local", [1, 2, 4])
def test_what_crosses_by_the_census(local):
    """Of S bytes on each of n devices; by hand, with the ring host by host and all_to_all between all pairs."""
    mesh, size, n = sk.abstract_mesh(host=2, local=local), 2**20, 2 * local
    x = jax.ShapeDtypeStruct((n, size // 4), "float32")

    def across(name):
        rows = sk.census(links.map_kernel(links.KERNELS[name], mesh), x).rows
        return float(sum(links.count_bytes_across(row.kind, row.axes, row.total, local) for row in rows))

    assert across("plain") == 2 * (n - 1) / n * size
    assert across("hierarchical") == size
    assert across("hierarchical, bfloat16") == size / 2
    # a chunk of every device to each of the other host's, then the sums once round
    assert across("bfloat16") == local * local * size / n / 2 + (n - 1) / n * size / 2
    assert across("hierarchical, int8") == pytest.approx(size / 4, rel=0.02)  # and a scale for every 256


@pytest.mark.check
def test_the_expected_time_by_hand():
    """12.5 MB at 100 Mbit/s take a second, but for the 16 KiB of the queue; at 1 Gbit/s its burst is a millisecond."""
    told = links.predict_seconds(12.5e6, 6, 100, call=0.1, message=0.01)
    assert told == pytest.approx(0.1 + 0.06 + 1 - 16384 / 12.5e6)
    assert links.predict_seconds(125e6, 0, 1000, call=0, message=0) == pytest.approx(1 - 0.001)


def test_every_way_has_the_exact_sum():
    """The ways and the numbers that are sent, which bfloat16 and int8 hold exactly; on one host's devices."""
    mesh = sk.make_mesh(jax.devices()[:4], host=2, local=2)
    x, expected = links.make_operand(mesh, 640)
    ways = [links.map_kernel(kernel, mesh) for kernel in links.KERNELS.values()]
    for out in jax.jit(lambda x: [way(x) for way in ways])(x):
        np.testing.assert_array_equal(out, expected)


@pytest.mark.check
def test_a_round_takes_as_long_as_on_the_host_that_comes_last():
    """The other one waits for it, which is no time of the link."""

    def host(wall, link):
        samples = {"wall_us": wall, "cpu_us": [10.0, 20.0], "calibration_cpu_us": [1, 1]}
        one = {"case": "plain", "baseline": "plain", "rounds": 2, "samples": samples, "wrong": 1, "environment": {}}
        return [one | {"link_bytes": link, "expected_us": 40.0}]

    [merged] = links.merge_hosts(host([100.0, 80.0], 1000.0), host([90.0, 120.0], 1100.0))
    assert merged["samples"]["wall_us"] == [90.0, 80.0] and merged["samples"]["cpu_us"] == [20.0, 40.0]
    assert merged["wall_us_median"] == 85.0 and merged["achieved"] == round(40 / 85, 4)
    assert merged["wrong"] == 2 and merged["link_bytes"] == 1050


@pytest.mark.deep  # it starts two processes, that compile six programs
def test_over_a_real_link_bytes_are_those_of_the_census(tmp_path):
    try:
        with links.open_link(100):
            pass
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this machine makes no network namespaces: {error}")
    smoke("links", "--smoke", "--json", tmp_path / "out.jsonl")
    records = bench.read(tmp_path / "out.jsonl")
    assert [r["case"] for r in records] == list(links.KERNELS) and not any(r["wrong"] for r in records)
    assert all(1 < r["link_bytes"] / r["link_bytes_expected"] < 1.3 for r in records)  # headers, and answers
    assert smoke("diloco", "--link", "--smoke").count("DiLoCo, H=") == 3
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not {host.space for host in links.HOSTS} & set(left.split())


# ---- monitors


def test_a_rank_that_has_died_is_not_heard():
    """A command to die and a message for the rank may come in one turn, in this order."""
    ranks = monitor_peers.Simulated(port=0, token="", first=0, last=0, size=2)
    ranks.hear(1)
    assert ranks.counts["heard"] == 0


# ---- soak


@pytest.mark.deep
def test_a_short_soak_passes(capsys):
    assert soak.main(["--starts", "2", "--steps", "30"]) == 0
    assert "2 starts of 30 steps on 8 simulated devices: 0 hung or failed, 1 distinct" in capsys.readouterr().out


def test_the_soak_can_fail(monkeypatch):
    monkeypatch.setattr(soak, "CHILD", "import sys; sys.exit({steps})")
    assert soak.run_once(steps=3, timeout=120) == "ended with code 3: no message"
    monkeypatch.setattr(soak, "CHILD", "import time; time.sleep(3600)")
    assert soak.run_once(steps=3, timeout=0.5) == "hung: still running after 0.5 s"
