"""`shardkit bench strategies`: its smallest run, what it refuses, and a model of one's own."""

import re
from pathlib import Path

import pytest

from shardkit import bench
from shardkit.cli.bench import strategies
from shardkit.cli.bench.options import choose_figures
from shardkit.cli.bench.strategies import _QUICK, _USUAL, Options, _refuse_sizes_of_a_model
from support.refusals import refused

MAKE = """
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

params = {"up": jnp.linspace(-1, 1, 512).reshape(16, 32), "down": jnp.linspace(-1, 1, 512).reshape(32, 16)}
batch = {"x": jnp.sin(jnp.arange(512.0)).reshape(32, 16)}

def loss_fn(params, batch, keys):
    return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["x"]) ** 2)

def over_the_batch(params, batch, keys):
    return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) - batch["x"].mean()) ** 2)

def make():
    return loss_fn, params, batch, {"up": P(None, "model"), "down": P("model")}

def wrong():
    return over_the_batch, params, batch

def short():
    return loss_fn, params
"""
REFUSED = {
    ("stage=2",): "the axes must be 'data' and 'model'; got 'stage'. Write for example data=4 model=2; pipelines run "
    "over 'model'.",
    ("data=two",): "the mesh must be given as AXIS=SIZE; got 'data=two'. Write for example data=8.",
}


@pytest.fixture
def module(tmp_path):
    (tmp_path / "made.py").write_text(MAKE)
    return tmp_path / "made.py"


@pytest.mark.check
@pytest.mark.parametrize("words", REFUSED)
def test_a_mesh_of_other_axes_is_refused(words, inside):
    assert inside("bench", "strategies", *words, code=2).stderr == f"error: strategies: {REFUSED[words]}\n"


def test_a_model_of_ones_own_must_be_made_whole(inside, module):
    out = inside("bench", "strategies", "--model", f"{module}:short", code=2)
    assert out.stderr == (
        "error: strategies: --model must name a function that returns (loss_fn, params, batch), or (loss_fn, params, "
        f"batch, rules); {module}:short returned a tuple of 2. Return these.\n"
    )


@pytest.mark.check
def test_what_is_passed_counts_more_than_quick_and_not_beside_a_model():
    """Both were left out without a word."""
    quick = choose_figures(Options(quick=True, tokens=8, rounds=3), _USUAL, _QUICK)
    assert quick == _QUICK | {"tokens": 8, "rounds": 3}
    assert choose_figures(Options(layers=2), _USUAL, _QUICK) == _USUAL | {"layers": 2}
    _refuse_sizes_of_a_model(Options(model="a.py:make", calls=3))
    assert refused(lambda: _refuse_sizes_of_a_model(Options(model="a.py:make", examples=32))) == (
        "strategies: --examples is of the reference transformer; got 32 beside --model a.py:make. Leave it out: your "
        "function makes its parameters and its batch."
    )


@pytest.mark.check
def test_help_names_the_usual_sizes():
    text = Path(strategies.__file__).read_text()
    for name, size in _USUAL.items():
        [sentence] = re.findall(rf'    {name}: Optional\[int\] = None\n    """(.*?)"""', text)
        assert f"{size} by default" in sentence


# proves F83: plans beside one device, in one table of one run
def test_a_quick_run_agrees_with_one_device(inside, tmp_path):
    file = tmp_path / "out.jsonl"
    out = inside("bench", "strategies", "--quick", "--only", "dp", "--json", file).stdout
    one, dp = bench.read(file)
    assert one["row"] == "data=2, model=4" and dp["baseline"] == "one device"
    assert 0 < dp["disagreement_relative_max"] < dp["tolerance_relative"] < 1e-4 and not dp["wrong"]
    assert one["wire_bytes"] == 0 < dp["wire_bytes"] == dp["written_bytes"]
    assert "results agree within" in out.splitlines()[-1]


def test_a_model_whose_loss_is_no_mean_of_examples_is_exit_code_1(inside, module):
    """A loss over statistics of its batch is another loss where the batch is split."""
    out = inside("bench", "strategies", "--quick", "--model", f"{module}:wrong", "--only", "dp", code=1).stdout
    assert " WRONG" in out and "left out: pipelines, which need the reference transformer" in out


def test_a_model_of_ones_own_runs_under_the_rules_it_came_with(inside, module, tmp_path):
    file = tmp_path / "out.jsonl"
    only = ["--only", "fsdp x rules"]
    inside("bench", "strategies", "--quick", "--model", f"{module}:make", *only, "--json", file)
    assert [(r["case"], r["wrong"]) for r in bench.read(file)] == [("one device", 0), ("fsdp x rules", 0)]


@pytest.mark.deep  # those of the reference transformer: test_strategies_smoke in tests/test_benchmarks.py
def test_every_case_of_a_model_of_ones_own_agrees(inside, module, tmp_path):
    words, file = ["--model", f"{module}:make"], tmp_path / "all.jsonl"
    help = inside("bench", "strategies", *words, "--only", "?", code=2).stderr
    every = help.partition("these fit: '")[2].partition("'. Pass")[0].split("', '")
    inside("bench", "strategies", "--quick", *words, "--only", *every, "--json", file)
    records = bench.read(file)
    assert [record["case"] for record in records] == ["one device", *every] and len(every) >= 7
    assert not any(record["wrong"] for record in records)
