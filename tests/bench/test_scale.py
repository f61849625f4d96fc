"""`shardkit bench scale`: its exponents, its meshes, the records of a run, and its refusals."""

import importlib
import json
import subprocess

import jax
import pytest

import shardkit as sk
from shardkit import bench
from shardkit.bench.scale import Point, axes_of, lines
from shardkit.cli.bench.options import Output
from shardkit.cli.bench.scale import Options, scale

NONE = {"devices": (), "layers": (), "microbatches": (), "dims": ()}


@pytest.mark.check
def test_the_exponent_is_the_least_squares_slope_in_logarithms():
    e, c = bench.exponent([1, 2, 4, 8], [5 * x**1.5 for x in (1, 2, 4, 8)])
    assert e == pytest.approx(1.5) and c == pytest.approx(5)
    # By hand: points (0, 0), (1, 2), (2, 1) in logarithms to the base 2 have the slope 1/2 and the intercept 1/2.
    e, c = bench.exponent([1, 2, 4], [1, 4, 2])
    assert e == pytest.approx(0.5) and c == pytest.approx(2**0.5)
    assert bench.exponent([1, 2, 4], [3, None, 48])[0] == pytest.approx(2)
    assert bench.exponent([2, 2], [1, 3]) is None and bench.exponent([], []) is None


@pytest.mark.check
def test_the_axes_of_a_power_of_two_multiply_to_it():
    assert axes_of(1) == {"data": 1, "fsdp": 1, "model": 1}
    assert axes_of(4096) == {"data": 32, "fsdp": 16, "model": 8}
    assert all(Point("devices", axes_of(2**k)).devices == 2**k for k in range(16))


@pytest.mark.check
def test_the_parameters_are_those_of_the_transformer():
    small = Point("parameters", axes_of(1), layers=1, dim=16)
    width = 64  # 8/3 of 16, rounded up to a multiple of 32
    assert small.size == small.parameters == 2 * 256 * 16 + 16 + 2 * 16 + 4 * 16 * 16 + 3 * 16 * width


def test_the_quick_run_traces_thousands_of_devices_and_compiles_one(tmp_path, capsys):
    """It alone finds a step that no longer traces over 4096 devices."""
    file = tmp_path / "out.jsonl"
    with jax.numpy_dtype_promotion("standard"):  # optax's adam relies on it
        assert scale(Options(output=Output(quick=True, json=file))) == 0
    out, records = capsys.readouterr().out, bench.read(file)
    assert [(r["row"], r["case"]) for r in records] == [
        ("devices", case) for case in ("devices=1", "devices=4096", "exponent")
    ]
    one, many, fit = records
    assert one["compile_cpu_s"] > 0 and one["temp_bytes"] > 0 and many["compile_cpu_s"] is None
    assert many["trace_cpu_s"] > 0 and many["mesh"] == axes_of(4096)
    wanted, _ = bench.exponent([1, 4096], [one["program_bytes"], many["program_bytes"]])
    assert fit["program_exponent"] == pytest.approx(wanted, abs=1e-4) and fit["compile_exponent"] is None
    assert out.count("\nexponent ") == 1 and any(line.split()[0] == "4,096" for line in out.splitlines() if line)


@pytest.mark.deep
def test_a_child_process_compiles_and_reports_its_memory():
    with jax.numpy_dtype_promotion("standard"):
        records = bench.scale(**NONE | {"devices": (2,), "microbatches": (4,)}, rounds=1)
    for r in records[::2]:
        assert r["compile_cpu_s"] > 0 and r["compile_rss_bytes"] > 2**20 and r["argument_bytes"] > r["parameters"]
    assert lines(records[:2]).splitlines()[-1].startswith("exponent")


@pytest.mark.check
def test_a_child_is_given_its_point_and_its_failure_is_a_sentence(monkeypatch):
    given = []

    def failing(command, **_):
        given.append(json.loads(command[-1]))
        return subprocess.CompletedProcess(command, 1, "", "Traceback\nMemoryError: too much\n")

    monkeypatch.setattr(subprocess, "run", failing)
    module = importlib.import_module("shardkit.bench.scale")  # bench.scale is its function
    monkeypatch.setattr(module, "built", lambda point, rounds: {})
    monkeypatch.setattr(module, "environment", dict)
    with pytest.raises(RuntimeError) as error:
        bench.scale(**NONE | {"layers": (3,)})
    assert str(error.value) == (
        "scale: a step for 8 devices could not be compiled (MemoryError: too much). Pass a smaller number of devices "
        "to compile for."
    )
    assert Point(**given[-1]) == Point("layers", {"data": 2, "fsdp": 2, "model": 2}, layers=3)


@pytest.mark.check
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": [8, 12]}, "scale: devices must be powers of two; got 12. Pass for example 64."),
        ({"dims": [100]}, "scale: dims must be divisible by 16; got 100. Pass for example 256."),
        ({"layers": [0]}, "scale: layers[0] must be a whole number of at least 1; got 0. Correct layers[0]."),
    ],
)
def test_what_cannot_be_built_is_refused(options, message):
    with pytest.raises(ValueError) as error:
        bench.scale(**NONE | options)
    assert str(error.value) == message


@pytest.mark.check
def test_nothing_to_measure_is_no_record():
    assert bench.scale(**NONE) == [] and sk.bench.exponent([1], [1]) is None
