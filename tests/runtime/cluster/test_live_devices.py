"""`examples/live_devices.py`: those who are left of a job go on, with the numbers of one process."""

import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest

from support import jobs

PATH = Path(__file__).parents[3] / "examples" / "live_devices.py"


def example():
    spec = importlib.util.spec_from_file_location("live_devices", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# proves F70: the last process ends after step 8; the others take its steps again, and end with one process's losses
@pytest.mark.clock  # jax tells who is left by heartbeats
@pytest.mark.deep  # an example of what jax has, not of shardkit
@pytest.mark.parametrize("processes", [2, 3])
def test_those_who_are_left_go_on(processes):
    ended = jobs.Job([str(PATH)], processes=processes, devices=2, each=lambda rank: {}).wait(90)
    assert [each.code for each in ended] == [*[0] * (processes - 1), 1], [each.output[-2000:] for each in ended]
    _, losses = example().train(jax.devices()[:2], 0, None, 16)
    lines = [line for line in ended[0].output.splitlines() if line.startswith(("step", "again"))]
    devices = 2 * processes
    assert lines == [
        f"step 4 on {devices} devices: loss {losses[3]:.4f}",
        f"step 8 on {devices} devices: loss {losses[7]:.4f}",
        "again from step 8: ProcessFailureError",
        f"step 12 on {devices - 2} devices: loss {losses[11]:.4f}",
        f"step 16 on {devices - 2} devices: loss {losses[15]:.4f}",
    ]
    assert np.isfinite(losses).all()
