"""What only several processes can show: who came last at a barrier, and what a process has of others' arrays."""

import contextlib
import json
import random
import socket

import numpy as np
import pytest

from shardkit.runtime.cluster import barrier
from support import jobs

LATE = 1.0  # seconds
FIRST_PORT = 2**16 - 2**12  # jax takes one of the last 4,096 ports, by the number of Slurm's job
ABSENT = [("3/4", "2", "process 2"), ("1/4", "3\n/job:jax_worker/replica:0/task:11\n1", "processes 1, 3, 11")]
ABSENT += [("1/90", "7", "processes 7 and others")]


def slurm_job():
    """A number for a job whose port is free."""
    while True:
        job = random.randrange(2**12)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", FIRST_PORT + job)):
            return job


def test_two_processes(tmp_path):
    job = slurm_job()
    ours = dict.fromkeys(("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))

    def slurms(rank):
        said = {"JOB_ID": job, "STEP_NODELIST": "localhost", "NTASKS": 2, "PROCID": rank, "LOCALID": rank}
        return ours | {f"SLURM_{name}": str(value) for name, value in said.items()}

    ended = jobs.run("together.py", tmp_path, LATE, processes=2, devices=2, each=slurms)
    assert [each.code for each in ended] == [0, 0], [each.output[-2000:] for each in ended]
    first, last = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))

    # proves S98, F67: no argument and no variable but the scheduler's
    for rank, each in enumerate((first, last)):
        assert each["cluster"] == [rank, 2, rank, rank == 0, f"localhost:{FIRST_PORT + job}"]
        assert each["devices"] == [4, 2]
        # Catches a process that runs the step of another's worker, and an exchange of its own worker alone.
        assert each["diloco"] == [[2.0, 2.0], [rank == 0, rank == 1]]
        assert each["crossed"] == [[2.0, 2.0], [True, True]]

    # proves S98, F71: nobody goes on before the last has come, and the wait has an end
    assert last["came"] - first["came"] > LATE / 2
    assert first["went on"] >= last["came"] and last["went on"] >= last["came"]
    assert first["alone"] == (
        "barrier: all processes must reach 'nobody else' within 0.2 s; process 1 did not. Read their output, or "
        "raise timeout."
    )

    # proves F71
    assert ["only once" in each.output for each in ended] == [True, False]

    # proves S105: under `if process_index() == 0` it raises instead of hanging
    assert first["print alone"] == (
        "print_global: every process must call it; process 1 did not within 0.2 s. Move it out of `if "
        "jax.process_index() == 0:`, or raise timeout."
    )

    # proves S107: a process outside the mesh has no data of its arrays, calls what all call, and goes on
    halves = np.arange(8.0).reshape(2, 4)
    assert first["held"] == halves.tolist() and last["held"] == []
    assert first["result"] == [[4], [halves.sum(0).tolist()] * 2] and last["result"] == [[4], []]
    assert first["then"] == last["then"] == 28


@pytest.mark.check
@pytest.mark.parametrize(("reached", "names", "said"), ABSENT)
def test_who_did_not_come(reached, names, said, monkeypatch):
    words = f"# of tasks that reached the barrier: {reached}.\nSome timed out task names:\n{names}\n\n"
    monkeypatch.setattr(barrier.backends, "wait_at_barrier", lambda name, timeout: words)
    assert barrier.find_absent("here", 1) == said
    monkeypatch.setattr(barrier.backends, "wait_at_barrier", lambda name, timeout: "the service\nis gone")
    assert barrier.find_absent("here", 1) == "some (the service is gone)"
    monkeypatch.setattr(barrier.backends, "wait_at_barrier", lambda name, timeout: None)
    assert barrier.find_absent("here", 1) is None
