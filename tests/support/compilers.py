"""The compilers for absent chips: whether they are here, a child process that replaces them, and what is refused."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from shardkit.analysis.hlo import aot

tpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="the TPU compiler is not installed: shardkit[aot]")
gpu = pytest.mark.skipif(
    find_spec("jax_cuda13_plugin") is None, reason="the GPU compiler is not installed: shardkit[aot-gpu]"
)
RUN = subprocess.run


def child_that(monkeypatch, code):
    """Every compile runs this Python instead of the compiler; the folder is its argument."""
    monkeypatch.setattr(aot, "compiler_package", lambda where: "libtpu")
    monkeypatch.setattr(subprocess, "run", lambda command, **o: RUN([sys.executable, "-c", code, command[-1]], **o))


def answers(answer):
    return f"import json, sys; open(sys.argv[1] + '/answer.json', 'w').write(json.dumps({answer!r}))"


def refused(step, args, topology="v5e:2x4", error=ValueError, **options):
    with pytest.raises(error) as caught:
        aot.compile(step, args, topology=topology, **options)
    return str(caught.value)
