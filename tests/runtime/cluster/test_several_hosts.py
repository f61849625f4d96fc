"""Launchers of several hosts, on this one: their connections, what they start, and what they say.

Each launcher is a thread, and its processes are shells: the decisions are in `test_meeting.py`, network namespaces and
jax in `test_lost_host.py`.
"""

import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from shardkit.runtime import launch_on_hosts
from shardkit.runtime.cluster import attempt, memory
from shardkit.runtime.cluster.attending import Attendance
from shardkit.runtime.cluster.messages import (
    Beat,
    Ended,
    Over,
    Ready,
    Start,
    parse_arrival,
    told,
)
from shardkit.runtime.monitor.hello import TOKEN, signed
from shardkit.runtime.monitor.wire import Lines
from shardkit_command import main
from support import jobs
from support.launchers import SLACK, Peer, launcher


@pytest.fixture(autouse=True)
def briefly(monkeypatch):
    monkeypatch.setattr(attempt, "_LAST_OUTPUT", 0.2)
    yield
    while Peer.opened:
        Peer.opened.pop().close()


@pytest.fixture
def port():
    return jobs.free_port()


SAY = 'echo "$RANK/$WORLD_SIZE local $LOCAL_RANK restart $SHARDKIT_RESTARTS at $JAX_COORDINATOR_ADDRESS"; '


@pytest.mark.check
@pytest.mark.parametrize("code", [0, 3])
def test_what_is_in_memory_goes_with_a_job_that_has_succeeded(code, port, tmp_path, monkeypatch):
    """It alone would catch a new job with the token of an old one, which goes on from the snapshots of that.

    Also a token in the name of a job, which programs print.
    """
    monkeypatch.setattr(memory, "MEMORY", str(tmp_path))
    for variable in (memory.JOB, TOKEN):
        monkeypatch.delenv(variable, raising=False)
    kept = memory.folder_of_user(tmp_path) / memory.folder_of_job(memory.hashed("secret"))
    kept.mkdir(parents=True)
    text = f'test "$SHARDKIT_JOB" = {memory.hashed("secret")} && exit {code}'
    assert launcher(port, text, hosts=1, min_hosts=1, restarts=0) == code
    assert kept.exists() == bool(code)


@pytest.mark.check
def test_an_error_of_the_connections_thread_ends_the_launcher(port, monkeypatch, capfd):
    """It alone would catch a launcher that waits for ever for news of a thread that has ended."""
    monkeypatch.setattr(Attendance, "_connected", Mock(side_effect=KeyError("x")))
    assert launcher(port, "true") == 1
    assert capfd.readouterr().err == (
        f"shardkit launch: the launcher cannot attend the meeting at 127.0.0.1:{port} any more (KeyError: 'x')\n"
    )


# proves F70: also across hosts
def test_a_job_on_three_hosts_goes_on_with_two_and_then_with_three(port, capfd):
    """A host is lost while all train, and comes back: the whole way, with one host by hand."""
    text = SAY + 'test "$WORLD_SIZE-$SHARDKIT_RESTARTS" = 6-2 || sleep 30'
    with ThreadPoolExecutor() as pool:
        ends = [pool.submit(launcher, port, text, processes=2) for _ in range(2)]
        third = Peer(port)
        third.say(Ready(7))
        start = third.until(Start)
        assert (start.attempt, start.size) == (0, 6) and start.address == "127.0.0.1"
        third.lines.close()
        said, until = ["", ""], time.monotonic() + SLACK
        while "restart 1" not in said[1]:  # the others go on without
            assert time.monotonic() < until
            time.sleep(0.05)
            said = [old + new for old, new in zip(said, capfd.readouterr(), strict=True)]
        again = Peer(port)
        again.say(Beat(), Ready(7))
        start = again.until(Start)
        assert (start.attempt, start.size) == (2, 6)
        again.say(Ended(2, 0, None, None, None))
        assert again.until(Over) == Over(0, "")
        assert [end.result(SLACK) for end in ends] == [0, 0]
    out, err = (old + new for old, new in zip(said, capfd.readouterr(), strict=True))
    host = socket.gethostname()
    lines = [line for line in err.splitlines() if "restart 2" not in line]
    for line in (
        f"6 processes on 3 of 3 hosts ({host}, {host}, {host})",
        f"host {host} is left out: its connection closed",
        f"waits 0.6 s for {host}, then goes on without",
        f"restart 1: 4 processes on 2 of 3 hosts ({host}, {host})",
        f"{host} came: the others end, to start again together",
    ):
        assert lines.count(f"shardkit launch: {line}") == 2, err
    rows = [line.split() for line in out.splitlines()]
    by_attempt = {n: sorted(row[1] for row in rows if row[5] == n) for n in "012"}
    assert by_attempt["1"] == ["0/4", "1/4", "2/4", "3/4"]
    assert len(by_attempt["0"]) == len(by_attempt["2"]) == 4 and all(each.endswith("/6") for each in by_attempt["2"])
    assert all(row[0] == f"[{row[1].split('/')[0]}]" for row in rows)
    assert {row[3] for row in rows} == {"0", "1"} and len({row[7] for row in rows if row[5] == "1"}) == 1


def test_one_process_that_fails_starts_all_again_with_the_same_token(port, capfd):
    """What is kept on the hosts under its name is found again."""
    text = f'echo "$SHARDKIT_RESTARTS ${TOKEN}"; test "$RANK$SHARDKIT_RESTARTS" != 10'
    with ThreadPoolExecutor() as pool:
        ends = [pool.submit(launcher, port, text, hosts=2) for _ in range(2)]
        assert [end.result(SLACK) for end in ends] == [0, 0]
    out, err = capfd.readouterr()
    assert sorted(line.split()[1:] for line in out.splitlines()) == [[n, "secret"] for n in "0011"]
    assert err.count(f"process 1 on {socket.gethostname()} failed first, exit code 1") == 2


def test_a_wrong_command_ends_all(port, capfd):
    with ThreadPoolExecutor() as pool:
        ends = [pool.submit(launcher, port, 'test "$RANK" = 1 || exit 2; sleep 30', hosts=2) for _ in range(2)]
        assert [end.result(SLACK) for end in ends] == [2, 2]
    assert capfd.readouterr().err.count("not restarted: exit code 2 says that the command is wrong") == 2


def test_another_token_is_said_on_both_sides(port, capfd):
    with ThreadPoolExecutor() as pool:
        first = pool.submit(launcher, port, "true", hosts=2, min_hosts=None)
        assert Peer(port, token="guessed").answer == {"another": "token"}
        with pytest.raises(ValueError) as error:
            launcher(port, "true", token="other")
        assert first.result(SLACK) == 1  # nobody else came
    assert str(error.value) == (
        f"launch: the launcher that serves the meeting at 127.0.0.1:{port} must belong to the same job; it has another "
        f"{TOKEN}. Set the same {TOKEN} on all hosts."
    )
    said = f"shardkit launch: rejected a launcher from 127.0.0.1 with another {TOKEN}\n"
    assert capfd.readouterr().err.count(said) == 1


def test_other_settings_are_refused(port):
    with ThreadPoolExecutor() as pool:
        first = pool.submit(launcher, port, "true")
        Peer(port).lines.close()
        with pytest.raises(ValueError) as error:
            launcher(port, "true", restarts=9)
        first.result(SLACK)
    assert str(error.value) == (
        "launch: all launchers must be started with the same --restarts; got 9 here, and 3 where the meeting is. Pass "
        "the same --restarts on all hosts."
    )


def test_without_a_meeting_a_person_is_asked(port, capfd):
    """The launcher cannot listen there itself: the address is another host's."""
    found = launch_on_hosts(["true"], meet=f"no-such-host.invalid:{port}", hosts=2, patience=0.3, environ={TOKEN: "x"})
    said = capfd.readouterr().err
    assert found == 1 and said.startswith(
        f"shardkit launch: the meeting at no-such-host.invalid:{port} has not answered for 0.3 s (the name "
        "'no-such-host.invalid' does not resolve"
    )
    assert said.endswith("): start `shardkit launch` there again\n")


def test_a_launcher_that_is_cut_off_ends_its_processes(port, capfd):
    """The meeting says nothing any more, as behind a link that was cut: no connection closes."""
    with socket.create_server(("127.0.0.1", port)) as meeting, ThreadPoolExecutor() as pool:
        end = pool.submit(launcher, port, "echo began; sleep 60", patience=0.5, silence=0.5)
        line = Lines(meeting.accept()[0])
        assert line.waits(SLACK)
        arrival = parse_arrival(next(line.read()), "secret")
        line.send(signed({"welcome": True}, "secret", arrival.nonce))
        line.send(told(Start(0, 3, 1, "10.9.9.9", 5)))
        begun = time.monotonic()
        meeting.settimeout(SLACK)
        meeting.accept()[0].close()  # it tries again
        meeting.close()
        assert end.result(SLACK) == 1 and time.monotonic() - begun < 10
        line.close()
    out, err = capfd.readouterr()
    assert out == "[1] began\n"
    assert f"lost the meeting at 127.0.0.1:{port}; it tries to come back for 0.5 s" in err
    assert err.splitlines()[-1] == (
        f"shardkit launch: the meeting at 127.0.0.1:{port} has not answered for 0.5 s (Connection refused): start "
        "`shardkit launch` there again"
    )


MEET = "launch: meet must be the HOST:PORT of one of the hosts; got {!r}. Pass for example {}:29400 (--meet)."


@pytest.mark.check
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"meet": "node0"}, MEET.format("node0", socket.gethostname())),
        ({"meet": "node0:0"}, MEET.format("node0:0", socket.gethostname())),
        ({"meet": "0.0.0.0:29400"}, MEET.format("0.0.0.0:29400", socket.gethostname())),
        ({"hosts": 0}, "launch: min_hosts must be from 1 to hosts, 0; got 0. Correct min_hosts (--min-hosts)."),
        ({"min_hosts": 4}, "launch: min_hosts must be from 1 to hosts, 3; got 4. Correct min_hosts (--min-hosts)."),
        ({"min_hosts": 0}, "launch: min_hosts must be from 1 to hosts, 3; got 0. Correct min_hosts (--min-hosts)."),
        ({"silence": 0.0}, "launch: silence must be greater than 0; got 0.0. Correct silence."),
        (
            {"environ": {}},
            f"launch: {TOKEN} must be set to the same secret on all hosts; it is not. Run for example export "
            f'{TOKEN}="$(openssl rand -hex 32)" on one, and copy its value to the others.',
        ),
        ({"command": []}, "launch: a command must be given; got none. Pass for example -- train.py --steps 100."),
    ],
)
def test_wrong_arguments(options, error):
    with pytest.raises(ValueError) as caught:
        launch_on_hosts(**{"command": ["true"], "meet": "node0:29400", "hosts": 3, "environ": {TOKEN: "x"}} | options)
    assert str(caught.value) == error


@pytest.mark.check
@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ["--hosts", "3"],
            "--hosts must come with --meet; got 3. Pass --meet HOST:PORT, an address of one of the hosts",
        ),
        (["--min-hosts", "2"], "--min-hosts must come with --meet; got 2."),
        (["--meet", "a:5"], "--meet must come with --hosts; got none. Pass --hosts, the number of hosts."),
        (["--meet", "a:5", "--hosts", "2", "--min", "1"], "--min must not come with --meet; got 1. Pass --min-hosts"),
        (["--meet", "a:5", "--hosts", "2", "--min-hosts", "3"], "min_hosts must be from 1 to hosts, 2; got 3."),
        (["--meet", "a", "--hosts", "2"], "meet must be the HOST:PORT of one of the hosts; got 'a'."),
        (["--render", "slurm", "--min-hosts", "2"], "--min-hosts must not come with --render slurm; got 2."),
    ],
)
def test_wrong_options(words, error, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["shardkit", "launch", *words, "--", "true"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and error in " ".join(capfd.readouterr().err.split())
