"""The measurement: its records, its order, its arithmetic and its refusals. No time is asserted."""

import gc
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardkit as sk
from shardkit import bench
from shardkit.bench import Case
from shardkit.bench.measure import MODES, Sample, difference, interleaved, summarise
from support.refusals import refused

STATISTICS = [
    f"{clock}_{kind}_{label}"
    for clock in ("wall", "cpu")
    for kind in ("us", "ratio")
    for label in ("median", "p10", "p90", "p99", "min", "max")
]
FIELDS = {
    *("format", "version", "benchmark", "row", "mode", "baseline", "case", "calls", "rounds", "donate"),
    *("tolerance_relative", "disagreement_relative_max", "wrong", "samples", "environment", "wall_ratio", "cpu_ratio"),
    *STATISTICS,
}
ENVIRONMENT = {
    *("date", "cpu_model", "cores", "load_average_1min", "python", "jax", "jaxlib", "platform", "device_count"),
    *("device_kind", "XLA_FLAGS", "NPROC", "git_commit", "LIBTPU_INIT_ARGS", "processes", "calibration_cpu_us"),
    "shardkit",
}


def adding(name, amount):
    """A case that adds `amount` twice a call, and returns the sum."""

    def step(x, amount):
        x = x + amount + amount
        return x, jnp.sum(x)

    return Case(name, step, jnp.zeros(4), (jnp.float32(amount),))


def doubled(name, amount):
    """The same as `adding`, computed in another way."""
    return adding(name, amount)._replace(step=lambda x, amount: (x + 2 * amount, jnp.sum(x + 2 * amount)))


@pytest.fixture(scope="module", params=MODES)
def records(request):
    cases = [adding("twice", 1), doubled("once", 1)]
    return bench.measure("test", "four numbers", cases, mode=request.param, calls=3, rounds=4)


def test_a_record_has_the_documented_fields(records):
    assert [r["case"] for r in records] == ["twice", "once"]
    for record in records:
        assert set(record) == FIELDS
        assert set(record["environment"]) == ENVIRONMENT
        assert (record["baseline"], record["calls"], record["rounds"], record["donate"]) == ("twice", 3, 4, True)
        assert record["environment"]["jax"] == jax.__version__
        assert record["disagreement_relative_max"] == 0
        for clock in ("wall_us", "cpu_us"):
            assert 0 <= record[f"{clock}_p10"] <= record[f"{clock}_median"] <= record[f"{clock}_p90"]
    assert [records[0][name] for name in STATISTICS if "wall_ratio" in name] == [1] * 6


def test_report_prints_a_table_and_appends_json_lines(records, tmp_path, capsys):
    file = tmp_path / "out.jsonl"
    bench.report(records, file)
    bench.report(records, file)
    assert [json.loads(line) for line in file.read_text().splitlines()] == [*records, *records]
    title, head, *rows = capsys.readouterr().out.strip().split("\n\n")[0].splitlines()
    assert title == f"four numbers ({records[0]['mode']}, 3 calls x 4 rounds)"
    assert head.split("  ")[0] == "case"
    assert [name in head for name in ("wall us", "CPU us", "wall ratio", "CPU ratio")] == [True] * 4
    assert [row.split()[0] for row in rows] == ["twice", "once"]


def test_every_round_starts_one_case_further_on():
    order = []
    runs = {name: lambda name=name: order.append(name) or len(order) for name in "abc"}
    results = list(interleaved(runs, 4))
    assert "".join(order) == "abcbcacababc"
    assert results[1] == {"b": 4, "c": 5, "a": 6}
    assert [list(each) for each in results] == [list("abc")] * 4


def test_ratios_are_taken_within_a_round():  # proves F81
    # The machine is ten times slower in the third round; the ratio of the medians would be 30 / 11.
    rounds = [(10, 20), (11, 33), (100, 300), (9, 18), (12, 30)]
    samples = [{"base": Sample(a, 2 * a), "other": Sample(b, a)} for a, b in rounds]
    out = summarise(samples, "base")
    assert [out["base"][f"wall_us_{q}"] for q in ("median", "p10", "p90")] == [11, 9.4, 64.8]
    assert [out["other"][f"wall_us_{q}"] for q in ("median", "p10", "p90")] == [30, 18.8, 193.2]
    assert [out["other"][f"wall_ratio_{q}"] for q in ("median", "p10", "p90")] == [2.5, 2, 3]
    assert [out["other"][f"cpu_ratio_{q}"] for q in ("median", "p10", "p90")] == [0.5] * 3
    assert [out["base"][f"cpu_ratio_{q}"] for q in ("median", "p10", "p90")] == [1] * 3
    # over the root of 2, 3, 3, 2 and 2.5, of which the middle half are 2, 2.5 and 3 (the first and last are left out)
    ratios = np.sqrt([2, 2.5, 3])
    assert out["other"]["wall_ratio"] == pytest.approx(np.mean(ratios) / np.mean(1 / ratios), abs=1e-4)
    assert out["base"]["wall_ratio"] == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_row_whose_cases_disagree_is_refused(mode):  # proves F80
    cases = [adding("right", 2), adding("wrong", 3)]
    assert refused(lambda: bench.measure("test", "row", cases, mode=mode, calls=2, rounds=1)) == (
        f"measure: cases must agree within 1.0e-05 of the largest element; in row 'row ({mode})', 'wrong' differs from "
        "'right' by 5.0e-01 in leaf [0]. No time is reported: make both compute the same, or pass a larger tolerance."
    )


def test_a_single_case_must_be_finite():
    with pytest.raises(ValueError, match=r"'only' differs from 'only' by inf in leaf \[0\]"):
        bench.measure("test", "row", [adding("only", np.nan)], calls=1, rounds=1)


# proves S126: a case for each mesh; its speed-up is of the times of the same round, whatever the number of devices
def test_a_train_step_on_three_meshes():
    states, w = {}, jnp.arange(16.0).reshape(4, 4) / 16

    def on(devices, scale=1.0):
        mesh = sk.make_mesh(jax.devices()[:devices], data=devices)
        loss = sk.value_and_grad(lambda params, x, keys: scale * jnp.mean(jnp.square(x @ params["w"])))
        init, step = sk.make_train_step(loss, optax.sgd(1e-3, momentum=0.9), mesh=mesh, plan=sk.dp("data"))
        states[devices] = init({"w": w}, jax.random.key(0))
        return Case(str(devices), step, states[devices], (jnp.ones((8, 4)),), lambda state, metrics: metrics["loss"])

    cases, asked = [on(1), on(2), on(8)], {"mode": "dispatched", "calls": 2, "rounds": 3}
    records = bench.measure("scaling", "a step", cases, **asked)
    assert [record["case"] for record in records] == ["1", "2", "8"]
    alone = np.array(records[0]["samples"]["wall_us"])
    for record in records:
        taken = np.array(record["samples"]["wall_us"]) / alone
        assert record["wall_ratio_median"] == pytest.approx(np.median(taken), rel=1e-3)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(states))  # donated copies, not these
    with pytest.raises(ValueError, match="'8' differs from '1' by "):
        bench.measure("scaling", "a step", [cases[0], on(8, scale=2.0)], **asked)


def test_a_difference_is_relative_to_the_largest_element():
    one = {"a": np.array([1.0, -4.0]), "b": np.zeros(2)}
    assert difference(one, one, 0.0)[0] == 0
    assert difference({**one, "a": np.array([2.0, -4.0])}, one, 0.0)[:2] == (0.25, "['a']")
    assert difference({**one, "b": np.array([0, 1e-9])}, one, 0.0)[:2] == (np.inf, "['b']")
    assert difference({**one, "b": np.zeros(3)}, one, 0.0)[:2] == (np.inf, "['b']")
    assert difference({**one, "b": np.array([0, np.nan])}, one, 0.0)[:2] == (np.inf, "['b']")
    assert difference({"a": one["a"]}, one, 0.0)[:2] == (np.inf, "(another tree)")
    assert difference({"a": np.array([np.inf])}, {"a": np.array([np.inf])}, 0.0)[0] == np.inf


def test_measure_refuses_unknown_modes_and_equal_names():
    assert refused(lambda: bench.measure("test", "row", [adding("a", 1)], mode="outside")) == (
        "measure: mode must be 'inside' or 'dispatched'; got 'outside'. Pass for example mode='inside'."
    )
    assert refused(lambda: bench.measure("test", "row", [adding("a", 1), adding("a", 1)])) == (
        "measure: cases must have different names; got ['a', 'a']. Name each of them."
    )
    for name in ("calls", "rounds"):
        assert refused(lambda name=name: bench.measure("test", "row", [adding("a", 1)], **{name: 0})) == (
            f"measure: {name} must be a whole number of at least 1; got 0. Pass {name}=1 or more."
        )


def test_a_collector_that_is_off_stays_off():
    """Who has turned it off had it on again after the first round."""
    gc.disable()
    try:
        bench.measure("test", "row", [adding("a", 1)], calls=1, rounds=1)
        assert not gc.isenabled()
    finally:
        gc.enable()
    bench.measure("test", "row", [adding("a", 1)], calls=1, rounds=1)
    assert gc.isenabled()


@pytest.mark.parametrize("mode", MODES)
def test_a_case_is_held_against_what_is_expected_of_it(mode):
    """Two cases may mean different things, each with its own reference; without one, they must agree."""
    both = [adding("right", 2)._replace(expected=(jnp.full(4, 8.0), jnp.float32(32))), adding("other", 3)]
    both[1] = both[1]._replace(expected=(jnp.full(4, 12.0), jnp.float32(48)))
    records = bench.measure("test", "row", both, mode=mode, calls=2, rounds=1)
    assert [r["wrong"] for r in records] == [0, 0]
    wrong = both[1]._replace(expected=(jnp.array([12.0, 12, 12, 13]), jnp.float32(48)))
    records = bench.measure("test", "row", [both[0], wrong], mode=mode, calls=2, rounds=1, refuse=False)
    assert [r["wrong"] for r in records] == [0, 1]
    assert refused(lambda: bench.measure("test", "row", [both[0], wrong], mode=mode, calls=2, rounds=1)) == (
        f"measure: results must agree within 1.0e-05 of the largest element; in row 'row ({mode})', 'other' differs "
        "from what is expected by 7.7e-02 in leaf [0]. No time is reported: make both compute the same, or pass a "
        "larger tolerance."
    )


# numpy cannot hold the key of a state, and said so in jax's words.
def test_a_state_with_a_key_is_compared_whole():
    grad_fn = sk.value_and_grad(lambda w, x, keys: sk.Mean.of((x @ w) ** 2))  # the key alone differs
    mesh = sk.make_mesh(jax.devices()[:2], data=2)
    cases = []
    for name, seed in [("first", 0), ("again", 0), ("other key", 1)]:
        init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh, plan=sk.dp("data"))
        state = init(np.ones(4, "f"), jax.random.key(seed))
        cases.append(Case(name, step, state, (np.ones((4, 4), "f"),)))
    records = bench.measure("states", "4 numbers", cases[:2], calls=1, rounds=1)
    assert [record["wrong"] for record in records] == [0, 0]
    with pytest.raises(ValueError, match=r"'other key' differs from 'first'"):
        bench.measure("states", "4 numbers", [cases[0], cases[2]], calls=1, rounds=1)


# What alone finds records of another kind, without times, that are printed line by line and have no table.
def test_lines_need_no_times(capsys):
    sk.bench.report([{"case": "a write", "bytes": 3}], line=lambda record: f"{record['case']}: {record['bytes']}")
    assert capsys.readouterr().out == "a write: 3\n"
