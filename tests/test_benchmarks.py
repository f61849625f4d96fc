"""The harness: its records, its order, its arithmetic and its refusals. No time is asserted."""

import json
import subprocess
import sys
import textwrap
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardkit as sk
from benchmarks import experts, harness, partitioner, pipeline, step_overhead
from benchmarks.harness import Sample, Variant
from shardkit.models import transformer

ROOT = Path(harness.__file__).parents[1]
STATISTICS = [
    f"{clock}_{kind}_{label}"
    for clock in ("wall", "cpu")
    for kind in ("us", "ratio")
    for label in ("median", "p10", "p90")
]
FIELDS = {
    *("benchmark", "row", "mode", "baseline", "variant", "calls", "rounds", "donate", "tolerance_relative"),
    *("disagreement_relative_max", "environment", *STATISTICS),
}
ENVIRONMENT = {
    *("date", "cpu_model", "cores", "load_average_1min", "python", "jax", "jaxlib", "platform", "device_count"),
    *("device_kind", "XLA_FLAGS", "NPROC", "git_commit"),
}


def adding(name, amount):
    """A variant that adds `amount` twice a call, and returns the sum."""

    def step(x, amount):
        x = x + amount + amount
        return x, jnp.sum(x)

    return Variant(name, step, jnp.zeros(4), (jnp.float32(amount),))


def doubled(name, amount):
    """The same as `adding`, computed in another way."""
    return adding(name, amount)._replace(step=lambda x, amount: (x + 2 * amount, jnp.sum(x + 2 * amount)))


@pytest.fixture(scope="module", params=harness.MODES)
def records(request):
    variants = [adding("twice", 1), doubled("once", 1)]
    return harness.measure("test", "four numbers", variants, mode=request.param, calls=3, rounds=4)


def test_a_record_has_the_documented_fields(records):
    assert [r["variant"] for r in records] == ["twice", "once"]
    for record in records:
        assert set(record) == FIELDS
        assert set(record["environment"]) == ENVIRONMENT
        assert (record["baseline"], record["calls"], record["rounds"], record["donate"]) == ("twice", 3, 4, True)
        assert record["environment"]["jax"] == jax.__version__
        assert record["disagreement_relative_max"] == 0
        for clock in ("wall_us", "cpu_us"):
            assert 0 <= record[f"{clock}_p10"] <= record[f"{clock}_median"] <= record[f"{clock}_p90"]
    assert [records[0][name] for name in STATISTICS if "wall_ratio" in name] == [1, 1, 1]


def test_report_prints_a_table_and_appends_json_lines(records, tmp_path, capsys):
    file = tmp_path / "out.jsonl"
    harness.report(records, file)
    harness.report(records, file)
    assert [json.loads(line) for line in file.read_text().splitlines()] == [*records, *records]
    title, head, *rows = capsys.readouterr().out.strip().split("\n\n")[0].splitlines()
    assert title == f"four numbers ({records[0]['mode']}, 3 calls x 4 rounds)"
    assert head.split("  ")[0] == "variant"
    assert [name in head for name in ("wall us", "CPU us", "wall ratio", "CPU ratio")] == [True] * 4
    assert [row.split()[0] for row in rows] == ["twice", "once"]


def test_every_round_starts_one_variant_further_on():
    order = []
    runs = {name: lambda name=name: order.append(name) or len(order) for name in "abc"}
    results = list(harness.interleaved(runs, 4))
    assert "".join(order) == "abcbcacababc"
    assert results[1] == {"b": 4, "c": 5, "a": 6}
    assert [list(each) for each in results] == [list("abc")] * 4


def test_ratios_are_taken_within_a_round():  # proves F81 in part: there is JSON, and no CSV
    # The machine is ten times slower in the third round; the ratio of the medians would be 30 / 11.
    rounds = [(10, 20), (11, 33), (100, 300), (9, 18), (12, 30)]
    samples = [{"base": Sample(a, 2 * a), "other": Sample(b, a)} for a, b in rounds]
    out = harness.summarise(samples, "base")
    assert [out["base"][f"wall_us_{q}"] for q in ("median", "p10", "p90")] == [11, 9.4, 64.8]
    assert [out["other"][f"wall_us_{q}"] for q in ("median", "p10", "p90")] == [30, 18.8, 193.2]
    assert [out["other"][f"wall_ratio_{q}"] for q in ("median", "p10", "p90")] == [2.5, 2, 3]
    assert [out["other"][f"cpu_ratio_{q}"] for q in ("median", "p10", "p90")] == [0.5] * 3
    assert [out["base"][f"cpu_ratio_{q}"] for q in ("median", "p10", "p90")] == [1] * 3


@pytest.mark.parametrize("mode", harness.MODES)
def test_a_row_whose_variants_disagree_is_refused(mode):  # proves F80
    with pytest.raises(ValueError) as error:
        harness.measure("test", "row", [adding("right", 2), adding("wrong", 3)], mode=mode, calls=2, rounds=1)
    assert str(error.value) == (
        f"measure: variants must agree within 1.0e-05 of the largest element; in row 'row ({mode})', 'wrong' differs "
        "from 'right' by 5.0e-01 in leaf [0]. No time is reported: make both compute the same, or pass a larger "
        "tolerance."
    )


def test_a_single_variant_must_be_finite():
    with pytest.raises(ValueError, match=r"'only' differs from 'only' by inf in leaf \[0\]"):
        harness.measure("test", "row", [adding("only", np.nan)], calls=1, rounds=1)


def test_disagreement_is_relative_to_the_largest_element():
    one = {"a": np.array([1.0, -4.0]), "b": np.zeros(2)}
    assert harness.disagreement(one, one)[0] == 0
    assert harness.disagreement({**one, "a": np.array([2.0, -4.0])}, one) == (0.25, "['a']")
    assert harness.disagreement({**one, "b": np.array([0, 1e-9])}, one) == (np.inf, "['b']")
    assert harness.disagreement({**one, "b": np.zeros(3)}, one) == (np.inf, "['b']")
    assert harness.disagreement({"a": one["a"]}, one) == (np.inf, "(another tree)")
    assert harness.disagreement({"a": np.array([np.inf])}, {"a": np.array([np.inf])})[0] == np.inf


def test_measure_refuses_unknown_modes_and_equal_names():
    with pytest.raises(ValueError) as error:
        harness.measure("test", "row", [adding("a", 1)], mode="outside")
    assert str(error.value) == "measure: mode must be 'inside' or 'dispatched'; got 'outside'. Choose one of them."
    with pytest.raises(ValueError) as error:
        harness.measure("test", "row", [adding("a", 1), adding("a", 1)])
    assert str(error.value) == "measure: variants must have different names; got ['a', 'a']. Name each of them."


def test_start_says_that_simulated_devices_share_the_cores(capsys):
    options = harness.start("A benchmark.", ["--rounds", "3", "--more"], devices=8, more="another flag")
    assert (options.simulate, options.rounds, options.calls, options.json) == (8, 3, None, None)
    assert (options.smoke, options.more) == (False, True)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "These devices are simulated and share the CPU's cores: read the numbers as overhead and ratios, not as "
        "bandwidth."
    ]


def test_the_example_of_the_docstring_runs(capsys):
    text = harness.__doc__.split("out.jsonl`):\n")[1]
    namespace = {"__name__": "example"}
    exec(compile(textwrap.dedent(text), "example", "exec"), namespace)
    namespace["main"](["--calls", "1", "--rounds", "2"])
    printed = capsys.readouterr().out
    assert [f"4 MiB ({mode}, 1 calls x 2 rounds)" in printed for mode in harness.MODES] == [True, True]


def test_the_builders_unused_keys_do_not_reach_the_compiled_step():
    mesh, model = sk.make_mesh(jax.devices()[:2], data=2), step_overhead.mlp(8, 8)
    _, by_hand = step_overhead.counted(step_overhead.by_hand(model, optax.sgd(1e-3), mesh, "by hand"))
    traced, compiled = step_overhead.counted(step_overhead.built(model, optax.sgd(1e-3), mesh))
    assert traced["random_fold_in"] == 3
    assert not [name for name in compiled if name in ("kXor", "kShiftLeft", "kShiftRightLogical", "kWhile")]
    assert compiled["kAllReduce"] == by_hand["kAllReduce"]


# proves S61: explicit collectives give what jit with NamedShardings gives, and send less
@pytest.mark.deep
def test_explicit_fsdp_sends_less_than_the_automatic_partitioner():
    mesh = sk.make_mesh(jax.devices()[:4], data=4)
    config = transformer.Config(vocabulary=64, layers=2, dim=64, heads=2)
    with jax.numpy_dtype_promotion("standard"):  # optax does not trace under strict promotion
        row = partitioner.Row({"data": 4}, {"fsdp": sk.fsdp("data")})
        steps = partitioner.variants(row, mesh, config, examples=4, tokens=32)
        records = harness.measure("partitioner", "fsdp", steps, calls=1, rounds=1, tolerance=1e-5)
        *theirs, ours = map(partitioner.sizes, steps)
    assert [each.name for each in steps] == ["jit", "jit, all", "fsdp"]
    assert records[-1]["disagreement_relative_max"] > 0  # another program, not the same one twice
    assert ours["wire_bytes"] == ours["written_bytes"] < min(each["wire_bytes"] for each in theirs)


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


def test_step_overhead_smoke(tmp_path):
    records = recorded(tmp_path, "step_overhead")
    assert all(set(record) == FIELDS for record in records)
    assert [(r["row"], r["mode"], r["variant"]) for r in records] == [
        (row, mode, name)
        for row, kind in (("mlp, data=2", "by hand"), ("mlp, one device", "plain jit"))
        for mode in harness.MODES
        for name in (kind, "builder", f"{kind} again")
    ]


def test_collectives_smoke(tmp_path):
    records = recorded(tmp_path, "collectives")
    assert records and all(set(record) == FIELDS for record in records)
    assert {r["variant"] for r in records} >= {"psum"}


def test_reshard_smoke(tmp_path):
    """Rows to columns: nothing but what each device must receive is sent, in one piece and in several."""
    records = recorded(tmp_path, "reshard")
    own = [r for r in records if r["variant"].startswith("reshard")]
    assert len(records) == 4 and len(own) == 2
    assert all(r["wire_bytes"] == r["least_bytes"] > 0 == r["disagreement_relative_max"] for r in own)


def test_deterministic_smoke(tmp_path, capsys):
    """The two steps agree, and send the same but for padding and one message more of the means."""
    records = recorded(tmp_path, "deterministic")
    assert [r["variant"] for r in records] == ["ordinary", "deterministic", "ordinary again"]
    printed = capsys.readouterr().out
    assert "ordinary: 5.6 KiB sent" in printed and "deterministic: 5.7 KiB sent" in printed


def test_experts_smoke(capsys):
    experts.main(["--smoke", "--explain"])
    printed = capsys.readouterr().out
    # 3 x 256 tokens x 64 values of 4 bytes, x 8 experts or 10/8 x 2 choices, of which 7/8 travel
    assert "capacity E: 3 all_to_alls, 1.31 MiB sent a device" in printed
    assert "capacity 1.25: 3 all_to_alls, 0.41 MiB sent a device" in printed


@pytest.mark.deep
def test_partitioner_smoke(tmp_path, capsys):
    records = recorded(tmp_path, "partitioner")
    assert all(set(record) == FIELDS | {"written_bytes", "wire_bytes", "temp_bytes"} for record in records)
    own = {name for row in partitioner.SMOKE for name in partitioner.ROWS[row].plans}
    assert {r["variant"] for r in records if r["written_bytes"]} == own
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(records)


@pytest.mark.deep
def test_manual_smoke(tmp_path, capsys):
    """Explicit fsdp inside an automatic model sends less than plain jit, and several steps in one call are the same."""
    records = recorded(tmp_path, "manual")
    by_name = {record["variant"]: record for record in records}
    assert len(records) == 7 + 6
    assert by_name["manual fsdp, by layer"]["wire_bytes"] < records[0]["wire_bytes"]
    assert max(record["disagreement_relative_max"] for record in records) < 1e-4
    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]) == 4 + len(records)


@pytest.mark.deep
def test_context_smoke(tmp_path):
    records = recorded(tmp_path, "context")
    causal = ["ring, contiguous", "ring, zigzag", "ulysses"]
    assert [r["variant"] for r in records] == ["gathered, masked", *causal, "ring, every block", *causal]


@pytest.mark.deep  # the harness is held by the others
def test_building_smoke(tmp_path):
    records = recorded(tmp_path, "building")
    assert len(records) == 8 and all(record["cpu_seconds_median"] > 0 for record in records)


def test_instruments_smoke(tmp_path):
    (record,) = recorded(tmp_path, "instruments")
    assert set(record["seconds_median"]) == {"trace", "census", "lint", "explain"}
    assert all(value > 0 for value in record["seconds_median"].values())


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
