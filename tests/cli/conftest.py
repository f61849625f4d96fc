"""The command in this process."""

import signal
import subprocess
import sys

import jax
import pytest

from shardkit import cli
from shardkit.cli import mesh
from shardkit.meshes import simulated


@pytest.fixture
def program(request, tmp_path):
    """A file with the PROGRAM of the tests."""
    (tmp_path / "program.py").write_text(request.module.PROGRAM)
    return tmp_path / "program.py"


@pytest.fixture(autouse=True)
def heard():
    """Ctrl-C is heard, also where the tests run in the background of a shell, which has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def inside(monkeypatch, capsys):
    """Runs the command in this process, as support.commands.run does in another: what it printed, on so many devices.

    The devices are there already: of those, the command is given as many as it asks for.
    """
    devices = jax.devices()

    def offer(n):
        monkeypatch.setattr(jax, "devices", lambda *_: devices[:n])

    for module in (simulated, mesh):
        monkeypatch.setattr(module, "offer_cpu_devices", offer)
    monkeypatch.setenv("COLUMNS", "100")

    def run(*words, code=0):
        words = ["shardkit", *map(str, words)]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as end, jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            cli.main()
        out, err = capsys.readouterr()
        assert (end.value.code or 0) == code, out + err
        return subprocess.CompletedProcess(words, code, out, err)

    return run
