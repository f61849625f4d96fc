"""What strangers, and launchers with a mistake, can do to the meeting of a job's launchers: nothing."""

import json
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardkit.runtime.cluster import messages
from shardkit.runtime.cluster.messages import (
    Beat,
    Ended,
    Note,
    Over,
    Ready,
    Start,
    Terms,
    ToLauncher,
    ToMeeting,
    arrival_message,
    heard,
    introduction,
    parse_arrival,
    told,
)
from shardkit.runtime.monitor.hello import is_signed
from support import jobs
from support.launchers import Peer, launcher


@pytest.fixture
def port():
    yield jobs.free_port()
    while Peer.opened:
        Peer.opened.pop().close()


def strange(random_, port):
    """One connection that says something wrong, some of them with the token."""
    kind = random_.randrange(5)
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
            arrival = introduction(random_.choice(("x", "by hand2")), 1, Terms(3, 2, 3))
            if kind == 0:
                connection.sendall(random_.randbytes(random_.choice((1, 100, 70_000))))
            elif kind == 1:
                connection.sendall(json.dumps(mutated(random_, arrival_message(arrival, "guessed"))).encode() + b"\n")
            elif kind == 2:
                connection.sendall(json.dumps(mutated(random_, arrival_message(arrival, "secret"))).encode() + b"\n")
            elif kind == 3:
                connection.sendall(b"[" * random_.choice((10, 60_000)) + b"\n")
            else:  # it has the token, and then says what no launcher says
                connection.sendall(json.dumps(arrival_message(arrival, "secret")).encode() + b"\n")
                connection.sendall(json.dumps(mutated(random_, told(any_of(random_)))).encode() + b"\n")
            if random_.random() < 0.5:
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1 << 16)
    except OSError:
        pass


def any_of(random_):
    return random_.choice((Ready(5), Ended(0, 1, 0, None, 3), Beat(), Start(0, 2, 0, "h", 1), Note("x"), Over(1, "")))


def mutated(random_, message):
    """A message of which something has another value, or none."""
    message = dict(message)
    name = random_.choice([*message, "more"])
    if random_.random() < 0.2:
        message.pop(name, None)
    else:
        message[name] = random_.choice((None, True, -1, 2**70, 1.5, "", "x" * 300, [], {}, [1], "start", "ready"))
    return message


@pytest.mark.parametrize("connections", [40, pytest.param(3000, marks=pytest.mark.deep)])
def test_strangers_do_not_disturb_a_meeting(connections, port, capfd):
    """After them all the launchers still meet, start and end."""
    random_ = random.Random(connections)
    with ThreadPoolExecutor() as pool:
        ends = [pool.submit(launcher, port, "true", wait=60.0, patience=300.0)]
        Peer(port).lines.close()
        for _ in range(connections):
            strange(random_, port)
        time.sleep(0.3)  # those with the token are left out
        ends += [pool.submit(launcher, port, "true", wait=60.0, patience=300.0) for _ in range(2)]
        assert [end.result(60) for end in ends] == [0, 0, 0]
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.check
def test_brackets_that_can_just_be_read_are_not_signed():
    """It alone would catch a stranger whose message can be read but not written again, and ends the thread that did."""
    nested = []
    for _ in range(100_000):
        nested = [nested]
    assert not is_signed({"mac": "0" * 64, "x": nested}, "secret", "nonce")


@pytest.mark.check
@pytest.mark.parametrize("messages_", [2000, pytest.param(200_000, marks=pytest.mark.deep)])
def test_only_messages_of_the_right_form_are_heard(messages_):
    """Whatever is changed in a message, it is heard as one of its kind with the right types, or not at all."""
    random_ = random.Random(1)
    for _ in range(messages_):
        message = mutated(random_, told(any_of(random_)))
        for kinds in (ToLauncher, ToMeeting):
            found = heard(json.loads(json.dumps(message)), kinds)
            assert found is None or told(found) == message
        arrival = arrival_message(introduction("id", 2, Terms(3, 2, 3)), "secret")
        changed = mutated(random_, arrival)
        assert isinstance(parse_arrival(changed, "secret"), str) or changed == arrival
        assert messages.objection(Terms(3, 2, 3), Terms(3, 2, 3)) == ""
