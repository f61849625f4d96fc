"""The files of benchmarks/, each in its smallest run. No time is asserted."""

import json
import subprocess
import sys
import textwrap
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import jax
import optax
import pytest

import shardkit as sk
from benchmarks import experts, pipeline, start, step_overhead
from shardkit import bench

ROOT = Path(start.__file__).parents[1]


def test_start_says_that_simulated_devices_share_the_cores(capsys):
    options = start.start("A benchmark.", ["--rounds", "3", "--more"], devices=8, more="another flag")
    assert (options.simulate, options.rounds, options.calls, options.json) == (8, 3, None, None)
    assert (options.smoke, options.more) == (False, True)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "These devices are simulated and share the CPU's cores: read the numbers as overhead and ratios, not as "
        "bandwidth."
    ]


def test_the_example_of_the_docstring_runs(capsys):
    text = start.__doc__.split("out.jsonl`):\n")[1]
    namespace = {"__name__": "example"}
    exec(compile(textwrap.dedent(text), "example", "exec"), namespace)
    namespace["main"](["--calls", "1", "--rounds", "2"])
    printed = capsys.readouterr().out
    assert [f"4 MiB ({mode}, 1 calls x 2 rounds)" in printed for mode in bench.MODES] == [True, True]


def test_the_builders_unused_keys_do_not_reach_the_compiled_step():
    mesh, model = sk.make_mesh(jax.devices()[:2], data=2), step_overhead.mlp(8, 8)
    _, by_hand = step_overhead.counted(step_overhead.by_hand(model, optax.sgd(1e-3), mesh, "by hand"))
    traced, compiled = step_overhead.counted(step_overhead.built(model, optax.sgd(1e-3), mesh))
    assert traced["random_fold_in"] == 3
    assert not [name for name in compiled if name in ("kXor", "kShiftLeft", "kShiftRightLogical", "kWhile")]
    assert compiled["kAllReduce"] == by_hand["kAllReduce"]


def smoke(name, *words):
    """What a benchmark prints in its smallest run."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def recorded(path, name):
    """What it records."""
    file = path / "out.jsonl"
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
        for mode in bench.MODES
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
    experts.main(["--smoke", "--explain"])
    printed = capsys.readouterr().out
    # 3 x 256 tokens x 64 values of 4 bytes, x 8 experts or 10/8 x 2 choices, of which 7/8 travel
    assert "capacity E: 3 all_to_alls, 1.31 MiB sent a device" in printed
    assert "capacity 1.25: 3 all_to_alls, 0.41 MiB sent a device" in printed


@pytest.mark.deep
def test_manual_smoke(tmp_path, capsys):
    """Explicit fsdp inside an automatic model sends less than plain jit, and several steps in one call are the same."""
    records = recorded(tmp_path, "manual")
    by_name = {record["case"]: record for record in records}
    assert len(records) == 6 + 6 and not any(record["wrong"] for record in records)
    assert by_name["fsdp x rules"]["wire_bytes"] < by_name["jit: fsdp x rules"]["wire_bytes"]
    assert "manual fsdp, steps=2" in capsys.readouterr().out


@pytest.mark.deep
def test_context_smoke(tmp_path):
    records = recorded(tmp_path, "context")
    causal = ["ring, contiguous", "ring, zigzag", "ulysses"]
    assert [r["case"] for r in records] == ["gathered, masked", *causal, "ring, every block"]


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
def test_building_smoke(tmp_path):
    records = recorded(tmp_path, "building")
    assert len(records) == 8 and all(record["cpu_us_median"] > 0 for record in records)


@pytest.mark.deep  # what measures is held by the others
def test_instruments_smoke(tmp_path):
    records = recorded(tmp_path, "instruments")
    assert [r["case"] for r in records] == ["trace", "census", "lint", "explain"]
    assert all(r["cpu_us_median"] > 0 for r in records)


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


@pytest.mark.deep  # half a minute; what it measures is held by tests/runtime/monitor
def test_monitors_quick():
    """Real monitors and simulated ranks meet, agree, and are told of a death and of a hang."""
    printed = smoke("monitors", "--quick")
    rows = [line for line in printed.splitlines() if line.startswith(("| 3 ", "| 8 ", "| 40 ", "| exponent"))]
    assert len(rows) == 5 and all(figure.strip() for figure in rows[0].split("|")[1:-1])
