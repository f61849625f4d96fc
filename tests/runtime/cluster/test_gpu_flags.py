"""What a GPU's compiler is told: on GPUs, before jax starts, beside what the user says; and recorded."""

import subprocess
import sys

import jax
import pytest

from shardkit.bench.environment import environment
from shardkit.jobs.monitor.fingerprint import read_flags as compared
from shardkit.runtime.cluster import gpu_flags
from support.refusals import refused

pytestmark = pytest.mark.check


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Another machine: with a GPU or without, with jax started or not."""
    assert jax.devices()  # XLA reads its flags once, and shall not read those below

    def become(*, gpu, started=False, given="--xla_cpu_enable_fast_math=false"):
        (tmp_path / "nvidia0").touch() if gpu else (tmp_path / "nvidia0").unlink(missing_ok=True)
        monkeypatch.setattr(gpu_flags, "Path", lambda folder, name: tmp_path / name)
        monkeypatch.setattr(gpu_flags.backends, "cpu_only", lambda: False)  # a TPU's machine without a GPU is not one
        monkeypatch.setattr(gpu_flags.backends, "jax_has_started", lambda: started)
        monkeypatch.setenv("XLA_FLAGS", given)

    return become


# proves S35
def test_a_gpu_gets_them_and_they_are_recorded(machine, capsys):
    machine(gpu=True)
    assert gpu_flags.gpu_flags() == gpu_flags.GPU_OVERLAP
    assert capsys.readouterr().err == f"gpu_flags: added to XLA_FLAGS: {' '.join(gpu_flags.GPU_OVERLAP)}\n"
    recorded = environment()["XLA_FLAGS"]  # of a benchmark
    assert recorded.split() == ["--xla_cpu_enable_fast_math=false", *gpu_flags.GPU_OVERLAP]
    assert set(recorded.split()) == set(compared("XLA_FLAGS").split())  # between processes, before the first step
    assert gpu_flags.gpu_flags() == () and environment()["XLA_FLAGS"] == recorded


# proves S35
def test_nothing_else_gets_them(machine, monkeypatch, capsys):
    machine(gpu=False)
    assert gpu_flags.gpu_flags() == () and environment()["XLA_FLAGS"] == "--xla_cpu_enable_fast_math=false"
    machine(gpu=True, started=True)
    monkeypatch.setattr(gpu_flags.backends, "cpu_only", lambda: True)  # a GPU that the user leaves out
    assert gpu_flags.gpu_flags() == () and environment()["XLA_FLAGS"] == "--xla_cpu_enable_fast_math=false"
    assert capsys.readouterr().err == ""


def test_what_the_user_set_stays_and_a_call_too_late_is_refused(machine):
    machine(gpu=True, given="--xla_gpu_triton_gemm_any=false")
    assert gpu_flags.gpu_flags(gpu_flags.GPU_OVERLAP[-2:]) == gpu_flags.GPU_OVERLAP[-2:-1]
    assert environment()["XLA_FLAGS"].split() == ["--xla_gpu_triton_gemm_any=false", gpu_flags.GPU_OVERLAP[-2]]
    machine(gpu=True, started=True)
    assert refused(lambda: gpu_flags.gpu_flags(("--xla_gpu_a=1", "--xla_gpu_b=2")), RuntimeError) == (
        "gpu_flags: it must be called before jax starts, which reads XLA_FLAGS once; --xla_gpu_a=1 --xla_gpu_b=2 would "
        "be ignored. Call it before anything uses a device."
    )


def test_xla_knows_every_flag():
    """An unknown one ends the process."""
    code = "import os; os.environ['XLA_FLAGS'] = ' '.join({0!r}); import jax; print(len(jax.devices('cpu')))"
    done = subprocess.run([sys.executable, "-c", code.format(gpu_flags.GPU_OVERLAP)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
