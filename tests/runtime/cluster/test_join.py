"""Starting a job: who is who, and one clear sentence on every process when it cannot start."""

import re
import socket
import subprocess
import sys
import time

import jax
import pytest

import shardkit as sk
from shardkit.runtime.cluster import environment
from shardkit.runtime.cluster.config import DistributedConfig
from shardkit.runtime.cluster.join import Cluster
from support import jobs
from support.refusals import raises, value_error

SLACK = 60.0  # seconds; 5 on a quiet machine
PROXIES = [({}, {}), ({"http_proxy": ""}, {}), ({"https_proxy": "p:1"}, {"no_grpc_proxy": "h"})]
PROXIES += [({"http_proxy": "p:1", "no_proxy": "a,b"}, {"no_grpc_proxy": "a,b,h"})]
PROXIES += [({"grpc_proxy": "p:1", "no_proxy": "a", "no_grpc_proxy": "c"}, {"no_grpc_proxy": "c,h"})]


# proves S98, S99, S102, S110, T3: the job's devices, and of them a process' own, in a job that was initialized
@pytest.mark.parametrize(
    ("processes", "devices"),
    [(2, 2), pytest.param(4, 2, marks=pytest.mark.deep), pytest.param(4, 4, marks=pytest.mark.deep)],
)
def test_all_processes_know_each_other(processes, devices):
    """Also where a proxy is named for the web: gRPC would ask it for the coordinator, and wait for minutes."""
    web = {"http_proxy": "http://127.0.0.1:9", "no_proxy": "corp.example"}
    ended = jobs.run("meet.py", processes=processes, devices=devices, each=lambda rank: web)
    assert [each.code for each in ended] == [0] * processes, ended
    everyone = []
    for rank, each in enumerate(ended):
        assert f"'rank': {rank}, 'processes': {processes}, 'local_rank': 0, 'is_master': {rank == 0}" in each.output
        text = (
            f"process {rank} of {processes}: {processes * devices} devices, {devices} of them here; their sum is right"
        )
        assert text in each.last
        everyone += map(int, re.search(r"\[(.*)\]$", each.last).group(1).split(","))
        assert ("only once" in each.output) == (rank == 0)
    assert len(set(everyone)) == len(everyone) == processes * devices  # disjoint, and together all of them


@pytest.mark.deep
def test_processes_that_meet_at_an_address_of_ipv6():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as free:
            address = f"[::1]:{free.getsockname()[1]}"
    except OSError:
        pytest.skip("this machine has no IPv6")
    ended = jobs.run("meet.py", processes=2, each=lambda rank: {"JAX_COORDINATOR_ADDRESS": address})
    assert [each.code for each in ended] == [0, 0], ended
    assert all(f"'coordinator': '{address}'" in each.output for each in ended)


def refused(ended, text, within=30.0):
    """Every process said the same sentence, within the time-out and 5 s."""
    for each in ended:
        found = re.fullmatch(r"after ([\d.]+) s: RuntimeError: (.*)", each.last)
        assert found, each.output
        assert re.fullmatch(text, found[2]), found[2]
        assert float(found[1]) < within + SLACK
        assert each.code == 9


def variables(**by_rank):
    return lambda rank: by_rank.get(f"p{rank}", {})


def test_missing_processes_and_a_missing_coordinator_are_named():
    each = variables(p0={"JAX_NUM_PROCESSES": "4"}, p1={"JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2"})
    ended = jobs.run("meet.py", "--timeout", 10, processes=2, each=each)
    refused(
        ended,
        r"initialize: processes 1, 3 of 4 did not connect to 127\.0\.0\.1:\d+ within 10 s\. Read their output, or "
        r"raise timeout\.",
        within=10,
    )
    each = variables(p0={"JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "2"})
    ended = jobs.run("meet.py", "--timeout", 2, processes=1, each=each)
    refused(
        ended,
        r"initialize: process 1 could not connect to the coordinator at 127\.0\.0\.1:\d+ within 2 s: Connection "
        r"refused\. Check that process 0 runs, and that this is the address of its host\.",
        within=2,
    )


def test_a_monitor_that_still_waits_ends_with_its_process():
    port = jobs.free_port()
    script = (
        "from shardkit.runtime.channel.client import MonitorClient\n"
        "from shardkit.runtime.channel.place import Place\n"
        f"MonitorClient(Place('127.0.0.1', {port}, 0, 2, 60.0, True))"
    )
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        until = time.monotonic() + SLACK
        while not listens(port):
            assert time.monotonic() < until
            time.sleep(0.05)
        process.kill()
    until = time.monotonic() + SLACK
    while listens(port):
        assert time.monotonic() < until
        time.sleep(0.05)


def listens(port):
    """Asked by a connection: to try to listen there could take the port from the monitor."""
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def test_devices_that_were_touched():
    assert jax.devices()
    with raises(
        RuntimeError,
        "initialize: it must be called before jax starts its devices; they have started (by jax.devices(), an array or "
        "a computation). Call it first.",
    ):
        sk.runtime.initialize(coordinator_address="127.0.0.1:1", num_processes=2, process_id=0)


# proves S111
def test_another_number_of_devices():
    ended = jobs.run("meet.py", "--expect", 8, processes=2, devices=2)
    for rank, each in enumerate(ended):
        assert (
            f"RuntimeError: initialize: the job must have 8 devices; it has 4, of which process {rank} has 2. Check "
            "the devices of each host, or expect_devices."
        ) in each.output


# proves S11, F67: where the numbers come from
@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (None, None, None)),
        ({"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}, ("h:1", 4, 3)),
        ({"MASTER_ADDR": "h", "MASTER_PORT": "7", "WORLD_SIZE": "2", "RANK": "1"}, ("h:7", 2, 1)),
        ({"WORLD_SIZE": "2", "RANK": "1"}, ("localhost:29500", 2, 1)),
        ({"WORLD_SIZE": "1", "RANK": "0"}, (None, 1, 0)),
        ({"JAX_COORDINATOR_ADDRESS": "h:1", "WORLD_SIZE": "2", "RANK": "0"}, ("h:1", 2, 0)),
    ],
)
def test_where_the_numbers_come_from(environ, expected):
    assert environment.read_variables(environ)[:3] == expected


@pytest.mark.parametrize(("environ", "expected"), PROXIES)
def test_a_proxy_is_not_asked_for_the_coordinator(environ, expected):
    assert environment.bypass_proxy("h", environ) == expected


def test_explicit_arguments_come_first():
    found = environment.JobFacts("a:1", None, 1).fill_missing(environment.JobFacts("b:2", 4, 0))
    assert found[:3] == ("a:1", 4, 1)


def test_alone_there_is_nothing_to_start(monkeypatch):
    for name in ("JAX_COORDINATOR_ADDRESS", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    alone = sk.runtime.initialize()
    assert alone == Cluster(0, 1, 0, True, "")
    assert sk.runtime.initialize(DistributedConfig(enabled=False, world_size=4, rank=2)) == alone
    assert sk.runtime.is_main()


ERRORS = {
    "initialize: num_processes must be known in a job of many processes; got neither an argument nor an environment "
    "variable. Pass it, or start the job with shardkit launch.": {
        "coordinator_address": "node0:29500",
        "process_id": 0,
    },
    "initialize: process_id must be at least 0 and below num_processes; got 2 of 2. Pass 0 to 1.": {
        "coordinator_address": "node0:29500",
        "num_processes": 2,
        "process_id": 2,
    },
} | {
    f"initialize: coordinator_address must be host:port with a port from 1 to 65535; got {address!r}. Pass for example "
    "node0:29500, or [fd00::1]:29500.": {"coordinator_address": address, "num_processes": 2, "process_id": 0}
    for address in ("node0", "fd00::1")  # no port 1 of "fd00:"
}


@pytest.mark.parametrize("message, arguments", ERRORS.items())
def test_errors(arguments, message):
    with value_error(message):
        sk.runtime.initialize(**arguments)


def test_variables_that_are_no_numbers(monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "four")
    with value_error(
        "initialize: the environment variable JAX_NUM_PROCESSES must be a whole number; got 'four'. Set or unset it."
    ):
        sk.runtime.initialize()


def test_health_check_errors():
    with raises(
        RuntimeError,
        "health_check: the number of processes must be more than 1; got 1. Start all of them, and call "
        "initialize() in each.",
    ):
        sk.runtime.health_check()
    with raises(RuntimeError, "health_check: the number of devices must be 9; got 8. Check the devices of each host."):
        sk.runtime.health_check(processes=1, devices=9)
    assert sk.runtime.health_check(processes=1, devices=8) == (
        "process 0 of 1: 8 devices, 8 of them here; their sum is right"
    )
