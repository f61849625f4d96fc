"""`initialize` after `jax.distributed.initialize`, as where an engine joins the processes: the monitors meet too."""

import re
import types

import jax
import pytest

import shardkit as sk
from shardkit._jax import backends
from shardkit.runtime.channel.place import TOKEN
from shardkit.runtime.cluster import join
from shardkit.runtime.cluster.config import DistributedConfig
from support import jobs
from support.refusals import raises, refused


@pytest.fixture
def joined(monkeypatch):
    """jax has joined the job as a process of two; what it would tell the others, and the places that monitors get."""
    said, places, job = {}, [], types.SimpleNamespace(rank=0, answers=True, running=None)
    monkeypatch.delenv(TOKEN, raising=False)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(backends, "joined_job", lambda: ("10.0.0.1:50193", 2, job.rank))
    monkeypatch.setattr(backends, "tell_processes", said.__setitem__)
    monkeypatch.setattr(backends, "told", lambda key, timeout: said.get(key) if job.answers else None)
    monkeypatch.setattr(join.client, "start", places.append)
    monkeypatch.setattr(join.client, "find_monitor", lambda: job.running)
    return job, places


@pytest.mark.check
@pytest.mark.parametrize("own", [("", ""), ("secret", "secret"), ("secret", ""), ("", "secret")])
def test_where_the_monitors_meet(own, joined, monkeypatch):
    """Another port than jax's, which is taken; a drawn token, unless process 0 has one: that one is told to nobody."""
    job, places = joined
    for job.rank in (0, 1):
        monkeypatch.setenv(TOKEN, own[job.rank])
        cluster = sk.runtime.initialize()
        assert (cluster.rank, cluster.processes, cluster.is_master) == (job.rank, 2, job.rank == 0)
    first, second = places
    assert (first.host, first.rank, first.size) == ("10.0.0.1", 0, 2) and first.port not in (0, 50193)
    assert (second.host, second.port, second.rank) == ("10.0.0.1", first.port, 1)
    if own[0]:
        assert (first.token, second.token) == own
    else:
        assert len(first.token) == 64 and second.token == (own[1] or first.token)


JOB = "must be {}, as in the job that jax has joined already; got {}. Leave it out."


@pytest.mark.check
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"num_processes": 4}, ValueError, f"initialize: num_processes {JOB.format(2, 4)}"),
        ({"process_id": 0}, ValueError, f"initialize: process_id {JOB.format(1, 0)}"),
        (
            {"config": DistributedConfig(world_size=4, num_processes_per_node=4, rank=1)},
            ValueError,
            f"initialize: num_processes {JOB.format(2, 4)}",
        ),
        (
            {"local_device_ids": 3},
            ValueError,
            "initialize: local_device_ids must be passed to jax.distributed.initialize, which has been called already; "
            "got (3,). Leave it out.",
        ),
        (
            {"timeout": 2.0},
            RuntimeError,
            "initialize: process 0 must call it too; it did not within 2 s. Call it in every process, or raise "
            "timeout.",
        ),
    ],
)
def test_errors(given, error, message, joined):
    job, places = joined
    job.rank, job.answers = 1, False
    assert refused(lambda: sk.runtime.initialize(**given), error) == message and not places


@pytest.mark.check
def test_a_second_call(joined):
    """It would wait for the others at a port that nobody told."""
    job, _ = joined
    job.running = "a monitor"
    with raises(RuntimeError, "initialize: it must be called once per process; got a second call. Remove that."):
        sk.runtime.initialize()


@pytest.mark.clock
@pytest.mark.deep
def test_the_guard_of_a_job_that_jax_has_joined():
    """The same losses as in a job that initialize joins, and the same sentence when a process is killed."""
    ours, theirs = (jobs.run("loop.py", *words, processes=2) for words in ([], ["--joined"]))
    assert [each.code for each in ours + theirs] == [0] * 4, theirs
    assert {each.last for each in theirs} == {each.last for each in ours}
    ended = jobs.run("loop.py", "--joined", "--fault", "kill", processes=2)
    assert ended[0].code and ended[1].code == -9
    died = r"shardkit guard: process 1 died without reporting an error \(SIGKILL or out of memory\?\) .*step [345]\."
    assert re.fullmatch(died, ended[0].last), ended[0].output


@pytest.mark.clock
@pytest.mark.deep
def test_a_process_that_the_others_do_not_follow_or_that_has_another_token():
    """Only one process calls initialize: it says so within its time, and does not wait for ever."""
    words = ["--joined", "--timeout", 2, "--alone"]
    first, second = (jobs.run("loop.py", *words, rank, processes=2)[rank] for rank in (0, 1))
    assert first.code == second.code == 9
    assert "initialize: process 1 of 2 did not connect to 127.0.0.1:" in first.output
    assert "initialize: process 0 must call it too; it did not within 2 s." in second.output
    # A process with another token than process 0 does not get in, and both say so.
    ended = jobs.run("loop.py", "--joined", "--timeout", 3, processes=2, each=lambda rank: {TOKEN: f"secret {rank}"})
    assert [each.code for each in ended] == [9, 9]
    assert f"connected with another {TOKEN}: set it to the same value in all processes." in ended[0].output
    assert "initialize: process 1 could not connect to the coordinator at" in ended[1].output
