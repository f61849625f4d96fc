"""`shardkit bench overlap`: its smallest run, with the compiler and without, and what it refuses."""

from importlib.util import find_spec
from types import SimpleNamespace

import jax
import pytest

from shardkit import bench
from shardkit.analysis.hlo import topology


@pytest.mark.check
def test_simulated_devices_are_not_measured(inside):
    out = inside("bench", "overlap", "--measured", code=2)
    assert out.stderr == (
        "error: overlap: overlap must be measured on hardware; got 8 CPU devices, which share the same cores. Pass "
        "--topology v5e:2x4, which reads it from the compiled schedule.\n"
    )
    one = SimpleNamespace(platform="gpu")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError) as error:
        patch.setattr(jax, "devices", lambda: [one])
        bench.overlap()
    assert str(error.value) == (
        "overlap: overlap must be measured on at least 2 devices; got 1, which sends nothing. Pass --topology v5e:2x4, "
        "which reads it from the compiled schedule."
    )


@pytest.mark.check
def test_both_sources_or_an_unknown_case_are_refused(inside):
    out = inside("bench", "overlap", "--measured", "--topology", "v5e:2x4", code=2)
    assert out.stderr == (
        "error: overlap: --measured must come without --topology, which predicts; got both, with 'v5e:2x4'. Leave one "
        "of them out.\n"
    )
    with pytest.raises(ValueError) as error:
        bench.overlap(topology="v5e:2x4", only=["gather"])
    assert str(error.value).startswith(
        "overlap: --only must name cases; got 'gather'. Pass some of 'all_gather_matmul, gather', "
    )


@pytest.mark.check
def test_a_quick_run_without_the_compiler_says_what_is_missing(inside, monkeypatch, tmp_path):
    """It counts what is written, without a time; a run that is not quick is refused."""
    monkeypatch.setattr(topology, "find_spec", lambda name: None)
    file = tmp_path / "out.jsonl"
    out = inside("bench", "overlap", "--quick", "--json", file).stdout
    assert out.startswith(
        "overlap: nothing is predicted; the compiler for v5e is not installed. Install it with: pip install "
        "'shardkit[aot]'\n"
    )
    assert out.endswith("8 devices, as written\n")
    assert [(r["collectives"], "hidden_share" in r) for r in bench.read(file)] == [(1, False), (7, False), (17, False)]
    with pytest.raises(RuntimeError):
        bench.overlap(topology="v5e:2x4", only=["all_gather_matmul, ring"])


@pytest.mark.deep
@pytest.mark.skipif(find_spec("libtpu") is None, reason="the TPU compiler is not installed: shardkit[aot]")
def test_a_quick_run_reads_the_compiled_schedule(inside):
    out = inside("bench", "overlap", "--quick").stdout
    assert out.endswith("v5e:2x4, predicted from the compiled schedule\n")
    assert "layers, prefetch" in out
