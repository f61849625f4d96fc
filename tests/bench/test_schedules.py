"""`shardkit bench schedules`: simulated work against closed forms, the records of a run, and its refusals."""

import importlib

import jax
import pytest

import shardkit as sk
from shardkit import bench
from shardkit.bench import pipelines
from shardkit.bench.schedules import BUILDERS, builder, work
from shardkit.cli.bench.options import Output
from shardkit.cli.bench.schedules import Options, schedules

MODULE = importlib.import_module("shardkit.bench.schedules")  # bench.schedules is its function


@pytest.mark.check
def test_the_work_of_masked_schedules_is_that_of_all_devices_at_every_tick():
    """It alone finds an op of a tick that is forgotten, or counted for one device where all compute it."""
    p, m = 4, 8
    over = 3 * m
    assert work(sk.schedules.gpipe(p, m), "masked", True) == pytest.approx((m + p - 1) * 4 / over)
    assert work(sk.schedules.gpipe(p, m), "masked", False) == pytest.approx((m + p - 1) * 3 / over)
    assert work(sk.schedules.breadth_first(p, m, 2), "masked", True) == pytest.approx((2 * m + p - 1) * 4 / 2 / over)
    # Lockstep: p - 1 ticks of F, m of both, p - 1 of B. One tick of both overlaps neither end.
    ticks = {segment.ops: segment.ticks for segment in sk.schedules.lockstep(p, m).table().segments}
    assert ticks == {"F": p - 1, "FB": m, "B": p - 1}
    assert work(sk.schedules.lockstep(p, m), "masked", True) == pytest.approx((m + p - 1) * 4 / over)


@pytest.mark.check
@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_the_work_in_branches_is_the_models_and_the_recomputation(name):
    for recompute in (True, False):
        assert work(builder(name, 4, 8, 2), "branch", recompute) == pytest.approx((3 + recompute) / 3)
        assert work(builder(name, 4, 8, 2), "masked", recompute) >= (3 + recompute) / 3 - 1e-9


@pytest.mark.check
def test_where_some_devices_run_b_and_others_i_a_tick_computes_it_once():
    """By hand, ticks of F, F, B, F, B beside I, and B beside W: with recomputation 1 + 1 + 3 + 1 + 3 + (3 + 1)."""
    schedule = sk.schedules.Schedule.from_csv("0F0,0F1,,,0B0,0B1\n,1F0,1B0,1F1,1I1,1W1\n")
    assert work(schedule, "masked", True) == pytest.approx(2 * 13 / (3 * 2 * 2))
    assert work(schedule, "masked", False) == pytest.approx(2 * 10 / (3 * 2 * 2))
    assert work(schedule, "branch", True) == pytest.approx(4 / 3)


# proves F40
def test_the_quick_run_executes_and_agrees_with_the_model(tmp_path, capsys):
    """It alone finds a schedule whose gradients are not the model's, and fields that are missing from the records."""
    file = tmp_path / "out.jsonl"
    assert schedules(Options(("stage=8",), output=Output(quick=True, json=file))) == 0
    out = capsys.readouterr().out
    records = bench.read(file)
    cases = ["unpipelined", "gpipe, masked", "one_f_one_b, masked"]
    assert [(r["row"], r["case"]) for r in records] == [
        *((f"{m} microbatches", case) for m in (2, 4) for case in cases),
        *(("exponents", case) for case in cases[1:]),
    ]
    assert [r["wrong"] for r in records[:6]] == [0] * 6 and all(r["temp_bytes"] > 0 for r in records[:6])
    last = records[5]
    schedule = sk.schedules.one_f_one_b(8, 4)
    simulated = schedule.simulate(1, 3)
    assert (last["makespan"], last["bubble"]) == (simulated.makespan, round(simulated.bubble, 6))
    assert (last["slots_inputs"], last["slot_bytes"]) == (schedule.slots().inputs, 4 * 4 * 8)
    assert last["compile_cpu_s"] > 0 and last["gpipe_cpu_ratio"] > 0
    assert last["gpipe_work_ratio"] == round(last["work_ratio"] / records[4]["work_ratio"], 4)
    assert records[4]["gpipe_cpu_ratio"] == 1 and isinstance(records[-1]["compile_exponent"], float)
    assert "simulated devices share the CPU's cores" in out and "\n4 microbatches\ncase " in out
    assert "\nexponent against microbatches" in out


def test_wrong_gradients_end_with_exit_code_1(monkeypatch, capsys):
    def wrong(*_):
        step = pipelines.unpipelined(2)

        def other(carry, params, batch):
            carry, (loss, grads) = step(carry, params, batch)
            return carry, (loss, grads | {"gain": grads["gain"] + 1})

        return other

    monkeypatch.setattr(MODULE, "pipelined", wrong)
    options = Options(("stage=8",), ("gpipe",), (2,), dim=8, examples=4, rounds=1)
    assert schedules(options) == 1
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("gpipe, masked")]
    assert [row[-1] for row in rows if len(row) > 10] == ["1"]


@pytest.mark.check
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"names": ["pipedream"]},
            "schedules: names must be 'breadth_first', 'dualpipe_v', 'gpipe', 'interleaved', 'lockstep', "
            "'one_f_one_b', 'zero_bubble_h1' or 'zero_bubble_v'; got 'pipedream'. Pass for example "
            "names='breadth_first'.",
        ),
        (
            {"modes": ["both"]},
            "schedules: modes must be 'masked' or 'branch'; got 'both'. Pass for example modes='masked'.",
        ),
        (
            {"microbatches": []},
            "schedules: names, modes and microbatches must not be empty. Pass at least one of each.",
        ),
        (
            {"microbatches": [4, 0]},
            "schedules: microbatches[1] must be a whole number of at least 1; got 0. Correct microbatches[1].",
        ),
        ({"chunks": 0}, "schedules: chunks must be a whole number of at least 1; got 0. Correct chunks."),
    ],
)
def test_what_cannot_run_is_refused(options, message):
    with pytest.raises(ValueError) as error:
        bench.schedules(sk.make_mesh(jax.devices()[:2], stage=2), **options)
    assert str(error.value) == message


@pytest.mark.check
def test_a_mesh_of_other_axes_is_refused():
    with pytest.raises(ValueError) as error:
        bench.schedules(sk.make_mesh(data=8))
    assert str(error.value) == (
        "schedules: the mesh must have one axis, 'stage'; got data=8. Pass for example make_mesh(stage=4)."
    )
    with pytest.raises(ValueError) as error:
        schedules(Options(("stage=4", "data=2")))
    assert str(error.value) == (
        "bench: the mesh of schedules must be the stages alone; got stage=4 data=2. Write for example stage=4."
    )
