"""Two hosts on one machine: network namespaces with a link between them, each with its own host name and hosts file."""

import contextlib
import os
import shutil
import subprocess
import sys
import time

import pytest

from support import jobs
from support.commands import environment

HOSTS = ("alpha", "beta")
PORT = 29517


def run(*words):
    return subprocess.run(words, check=True, capture_output=True, text=True)


@pytest.fixture
def hosts(tmp_path):
    """The names of two namespaces, `10.77.0.1` and `10.77.0.2`; skipped where the system does not allow them."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("network namespaces need root and the commands ip and unshare")
    names = [f"shardkit-{name}-{os.getpid()}" for name in HOSTS]
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                run("ip", "netns", "add", name)
                stack.callback(subprocess.run, ["ip", "netns", "delete", name], check=False)
            links = [f"sk{os.getpid() % 100000}{letter}" for letter in "ab"]
            run("ip", "link", "add", links[0], "type", "veth", "peer", "name", links[1])
            for index, (name, link) in enumerate(zip(names, links, strict=True)):
                run("ip", "link", "set", link, "netns", name)
                run("ip", "-n", name, "addr", "add", f"10.77.0.{index + 1}/24", "dev", link)
                run("ip", "-n", name, "link", "set", link, "up")
                run("ip", "-n", name, "link", "set", "lo", "up")
            run("unshare", "--uts", "--mount", "true")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this system does not allow network namespaces: {error.stderr.strip()}")
        yield list(zip(names, links, strict=True))


def start(hosts, tmp_path, worker, *words, loopback=()):
    """One process on each host, by `tests/support/workers/<worker>`."""
    running = []
    for rank, (name, _) in enumerate(hosts):
        table = tmp_path / f"hosts.{rank}"
        own = f"127.0.1.1 {HOSTS[rank]}\n" if rank in loopback else ""
        table.write_text(own + "127.0.0.1 localhost\n10.77.0.1 alpha\n10.77.0.2 beta\n")
        script = f'mount --bind {table} /etc/hosts && hostname {HOSTS[rank]} && exec "$@"'
        environ = environment() | {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "2",
            "NPROC": "16",
            "JAX_COORDINATOR_ADDRESS": f"alpha:{PORT}",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(rank),
            "PYTHONPATH": jobs.PATH,
        }
        command = ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "sh", "-c", script, "sh"]
        command += [sys.executable, str(jobs.WORKERS / worker), *map(str, words)]
        running.append(
            subprocess.Popen(
                command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
            )
        )
    return running


def ends(running, timeout=90):
    until = time.monotonic() + timeout
    try:
        found = []
        for process in running:
            output, _ = process.communicate(timeout=max(1, until - time.monotonic()))
            found.append((process.returncode, output.decode().strip().splitlines()[-1]))
        return found
    finally:
        for process in running:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, 9)


@pytest.mark.deep  # the link that is cut below carries steps before
def test_a_job_across_two_hosts(hosts, tmp_path):
    ended = ends(start(hosts, tmp_path, "loop.py", "--deadline", 20))
    assert [code for code, _ in ended] == [0, 0], ended
    assert ended[0][1] == ended[1][1] and ended[0][1].startswith("finished at loss")


def test_a_cut_link_is_named(hosts, tmp_path):
    deadline = 3.0
    running = start(
        hosts, tmp_path, "loop.py", "--deadline", deadline, "--steps", 100000, "--mark", tmp_path / "trains"
    )
    until = time.monotonic() + 60
    while len(list(tmp_path.glob("trains.*"))) < len(running):
        assert time.monotonic() < until and all(process.poll() is None for process in running), ends(running)
        time.sleep(0.1)
    cut = time.monotonic()
    run("ip", "-n", hosts[0][0], "link", "set", hosts[0][1], "down")
    ended = ends(running, timeout=30)
    assert time.monotonic() - cut < deadline + 3.0
    for rank, (code, last) in enumerate(ended):
        assert code != 0
        assert f"shardkit guard: process {1 - rank} has not answered for" in last, ended
        assert "machine or network down?" in last and "step" in last


def test_a_host_name_that_is_loopback_is_refused(hosts, tmp_path):
    ended = ends(start(hosts, tmp_path, "meet.py", "--timeout", 20, loopback=(1,)))
    for code, last in ended:
        assert code == 9
        assert last.endswith(
            "initialize: the host name 'beta' of process 1 must resolve to an address that the other hosts can reach; "
            "it resolves to 127.0.1.1. Correct /etc/hosts or DNS on that host."
        ), ended
