"""The meeting of a job's processes, without jax: who belongs to it, who is turned away, and what a stranger can do."""

import json
import random
import resource
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardkit.jobs.monitor import introduction, rendezvous
from shardkit.jobs.monitor.introduction import Hello
from shardkit.jobs.monitor.rendezvous import Refused, meet
from shardkit.runtime.channel import client
from shardkit.runtime.channel.place import Place, bind_address
from shardkit.runtime.channel.wire import escape
from support import jobs
from support.refusals import refused

pytestmark = pytest.mark.check
SLACK = 60.0  # seconds, for what a busy machine may take
HOST = socket.gethostname()
JUNK = [None, True, -1, 0, 1, 7, 99, 2**63, 1.5, float("nan"), "", "x", "\x1b[31m\n", "\ud800", "9" * 300, [1], [], {}]


def meetings(*places, before=lambda port: None, note=lambda text: None):
    """What becomes of processes that meet: each a rank, the number of processes that it was told, and its token."""
    port = jobs.free_port()

    def come(rank, size, token="secret"):
        try:
            return meet(Place("127.0.0.1", port, rank, size, 120.0, True, token), note)
        except Refused as refusal:
            return str(refusal)

    with ThreadPoolExecutor() as pool:
        first = pool.submit(come, *places[0])
        until_listens(port)
        before(port)
        told = [each.result() for each in [first, *(pool.submit(come, *place) for place in places[1:])]]
    for lines in told:
        for line in lines if isinstance(lines, list) else []:
            line.close()
    return told


def until_listens(port):
    until = time.monotonic() + SLACK
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            assert time.monotonic() < until
            time.sleep(0.01)


def count(told):
    return [len(lines) if isinstance(lines, list) else lines for lines in told]


def strange(port, *lines):
    """What a stranger is answered that says these lines."""
    with socket.create_connection(("127.0.0.1", port), timeout=SLACK) as connection:
        heard = b""
        try:
            for line in lines:
                connection.sendall(line)
            connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(1 << 16):
                heard += data
        except OSError:  # it was turned away meanwhile
            pass
        return heard


def forged(token="guessed", **changed):
    """The introduction of process 1 of 3 as somebody without the token makes it up."""
    message = introduction.make_hello_message(Hello(1, 3, HOST, "127.0.0.1", True, "0" * 32), token)
    return json.dumps({**message, **changed}).encode() + b"\n"


@pytest.mark.parametrize("size", [2, 4])
def test_another_number_of_processes_is_refused(size):
    assert meetings((0, 3), (1, size), (2, 3)) == 3 * [
        f"initialize: all processes must be started with the same number of processes; process 1 on {HOST} was started "
        f"with {size}, process 0 on {HOST} with 3. Start all with the same num_processes."
    ]


def test_a_number_that_comes_twice_and_a_name_that_does_not_resolve():
    assert meetings((0, 3), (1, 3), (1, 3)) == 3 * [
        f"initialize: the process_id of each process must be unique; 1 was used twice, on {HOST} and on {HOST}. Start "
        "the processes with 0 to 2."
    ]
    with pytest.raises(Refused, match=r"the name 'no-such-host\.invalid' does not resolve") as refusal:
        meet(Place("no-such-host.invalid", 29500, 1, 2, 0.5, True))
    assert "within 0.5 s" in str(refusal.value)


def test_a_port_that_is_taken():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        assert refused(lambda: meet(Place("127.0.0.1", port, 0, 2, 1.0, True)), Refused) == (
            f"initialize: process 0 must listen on port {port}; got 'Address already in use'. End the program or "
            "earlier run that uses the port, or pass a coordinator_address with another port."
        )
        begun = time.monotonic()
        assert refused(lambda: meet(Place("127.0.0.1", port, 1, 2, 1.0, True)), Refused) == (
            f"initialize: the program that listens at 127.0.0.1:{port} must be process 0 of this job; it did not "
            "answer process 1 within 1 s. Pass a coordinator_address with a port that is free."
        )
        assert time.monotonic() - begun < 1.0 + SLACK


def test_what_closes_every_connection():
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        threading.Thread(target=lambda: [proxy.accept()[0].close() for _ in range(20)], daemon=True).start()
        port = proxy.getsockname()[1]
        message = refused(lambda: meet(Place("127.0.0.1", port, 1, 2, 1.0, True)), Refused)
    assert message == (
        f"initialize: process 1 could not connect to the coordinator at 127.0.0.1:{port} within 1 s: the program that "
        "listens there closes the connection. Check that process 0 runs, and that this is the address of its host."
    )


def test_strangers_are_not_in_the_way():
    port, met, strangers = jobs.free_port(), {}, []

    def come(rank):
        met[rank] = meet(Place("127.0.0.1", port, rank, 4, 120.0, True))

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(4)]
    for thread in threads[:3]:
        thread.start()
    until_listens(port)
    for words in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 10000, b"", b"{}\n", b"[1]\n", b'{"shardkit": 1}\n'):
        strangers.append(socket.create_connection(("127.0.0.1", port)))
        strangers[-1].sendall(words)
    threads[3].start()
    for thread in threads:
        thread.join()
    assert [len(met[rank]) for rank in range(4)] == [3, 1, 1, 1]
    for line in [each for lines in met.values() for each in lines] + strangers:
        line.close()


def test_a_host_name_that_leads_nowhere():
    one = Hello(0, 2, "a", "10.0.0.1", True, "")
    refusal = rendezvous._refuse_addresses
    one_host = {0: one._replace(address="127.0.1.1"), 1: one._replace(address="127.0.1.1")}
    assert not refusal({0: one, 1: one._replace(host="b", address="10.0.0.2")})
    assert not refusal(one_host)
    assert not refusal({0: one, 1: one._replace(host="b", address="127.0.1.1", cpu=False)})
    for address, got in (("127.0.1.1", "resolves to 127.0.1.1"), ("", "does not resolve")):
        assert refusal({0: one, 1: one._replace(host="b", address=address)}) == (
            "initialize: the host name 'b' of process 1 must resolve to an address that the other hosts can reach; it "
            f"{got}. Give it an address in /etc/hosts or DNS on that host."
        )
    assert not refusal({0: one, 1: one._replace(host="b", address="fd00::1")})
    assert "it resolves to ::1." in refusal({0: one, 1: one._replace(host="b", address="::1")})


def test_a_name_that_leads_nowhere_on_the_only_host():
    """Gloo's assertion, of a line of its sources, ended every process."""
    one = Hello(0, 2, "a", "", True, "")
    assert rendezvous._refuse_addresses({0: one, 1: one._replace(rank=1)}) == (
        "initialize: the host name 'a' of process 0 must resolve to an address; it does not resolve. Give "
        "it an address in /etc/hosts or DNS on that host."
    )
    assert not rendezvous._refuse_addresses({0: one._replace(cpu=False), 1: one._replace(rank=1, cpu=False)})


def test_a_host_of_ipv6_alone_is_introduced_by_its_address(monkeypatch):
    """It was refused: only an address of IPv4 counted."""

    def found(name, *_, family=0, **__):
        return [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fe80::1%eth0", 0, 0, 2))]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    place = Place("::1", 1, 1, 2, 1.0, True)
    hello = introduction.describe_process(place)
    assert hello.address == "fe80::1" and place.address == "[::1]:1"
    assert introduction.parse_hello(introduction.make_hello_message(hello, ""), "") == hello


def test_a_process_without_the_token_is_turned_away(monkeypatch):
    monkeypatch.setattr(rendezvous, "_AFTER_REFUSAL", 0.1)
    port, notes, told = jobs.free_port(), [], {}

    def come(rank, token):
        try:
            waits = 2.0 if rank else 6.0  # process 0 still listens when the other one tries for the last time
            meet(Place("127.0.0.1", port, rank, 2, waits, True, token), notes.append)
        except Refused as refusal:
            told[rank] = str(refusal)

    threads = [threading.Thread(target=come, args=each) for each in ((0, "secret"), (1, ""))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told[0].startswith(
        f"initialize: process 1 of 2 did not connect to 127.0.0.1:{port} within 6 s. Read its output, or raise "
        "timeout. "
    )
    assert told[0].endswith(" connected with another SHARDKIT_JOB_TOKEN: set it to the same value in all processes.")
    assert told[1] == (
        f"initialize: process 1 could not connect to the coordinator at 127.0.0.1:{port} within 2 s: the program that "
        "listens there has another SHARDKIT_JOB_TOKEN. Check that process 0 runs, and that this is the address of its "
        "host."
    )
    (note,) = notes
    assert note.endswith(" with another SHARDKIT_JOB_TOKEN).") and "secret" not in "".join([note, *told.values()])


@pytest.mark.parametrize("token", ["guessed", "secret"])
def test_who_pretends_to_be_process_0_is_not_believed(token):
    """It has no token, or repeats answers to another introduction: it can neither welcome nor refuse."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answers():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1 << 16)
                    for message in ({"welcome": True}, {"refused": "\x1b[2J"}, {"missing": [1]}, {"missing": ["x"]}):
                        line = json.dumps(introduction.sign(message, token)).encode() + b"\n"
                        connection.sendall(line)

        threading.Thread(target=answers, daemon=True).start()
        message = refused(lambda: meet(Place("127.0.0.1", port, 1, 2, 0.5, True, "secret")), Refused)
    assert "the program that listens there closes the connection" in message


def status(draw):
    """A status with batches, some of whose fields are none."""
    batches = [["p", "float32[8]", True, 1, 0, 5] for _ in range(draw.randrange(20))]
    for each in batches:
        each[draw.randrange(6)] = draw.choice([*JUNK, each[0]])
    return ["step", 5, 0.1, 5, 4, 0.1, draw.choice([batches, batches[:1], *JUNK])]


def malicious(draw):
    """Bytes that somebody without the token might send."""
    kind = draw.randrange(8)
    if kind == 0:
        return draw.randbytes(draw.randrange(200)) + b"\n" * draw.randrange(2)
    if kind == 1:
        return (
            draw.choice(
                [b"[" * 200_000, b"[" * 50_000, b"[" * 4_000, b'{"a":' * 10_000, b"9" * 5000, b"\n", b"null\n", b"[]\n"]
            )
            + b"\n"
        )
    if kind == 2:
        words = draw.choice(
            [{"over": "stranger"}, {"status": status(draw)}, {"welcome": True}, {"refused": "no"}, {"cause": "x"}]
        )
        return json.dumps(words).encode() + b"\n"
    names = [*Hello._fields, "mac", "shardkit", "over"]
    line = forged(**{draw.choice(names): draw.choice(JUNK) for _ in range(draw.randrange(4))})
    if kind == 3:
        at = draw.randrange(len(line))
        return line[:at] + draw.randbytes(3) + line[at + draw.randrange(3) :]
    if kind == 4:
        return line[: draw.randrange(len(line))]
    return line * draw.randrange(1, 3)


# proves N31: no message of a stranger has an effect on a job that has a token, but one line in its log
@pytest.mark.parametrize("messages", [300, pytest.param(10_000, marks=pytest.mark.deep)])
def test_no_message_of_a_stranger_has_an_effect(messages):
    draw, notes, answers = random.Random(messages), [], set()

    def attack(port):
        for _ in range(messages):
            answers.update(strange(port, malicious(draw)).split(b"\n"))

    assert count(meetings((0, 3), (1, 3), (2, 3), before=attack, note=notes.append)) == [2, 1, 1]
    assert answers == {b"", b'{"another": "token"}', b'{"another": "version"}'}
    (note,) = notes
    assert note.startswith(
        f"shardkit: rejected {messages + 1} connections to 127.0.0.1:"
    )  # and the one that looked for the port
    assert "\n" not in note and "from outside this job, the first from 127.0.0.1 (" in note


@pytest.mark.parametrize(
    "wrong",
    [
        *[{"rank": rank} for rank in (-1, 0, 3, 7, True, "1")],
        *[{"size": size} for size in (1, 2**20 + 1, 3.0)],
        *[{"host": "h" * 256}, {"address": "10.0.0"}, {"address": None}, {"nonce": "0" * 31}, {"cpu": 1}],
    ],
    ids=str,
)
def test_an_introduction_beyond_its_limits_is_none(wrong):
    """Of a job without a token, too, in which whoever comes can sign: number 7 of 3 would have been counted as come."""
    right = Hello(2, 3, "host", "10.0.0.1", True, "0" * 32)
    assert introduction.parse_hello(introduction.make_hello_message(right, ""), "") == right
    assert introduction.parse_hello(introduction.make_hello_message(right._replace(**wrong), ""), "") == ""


def test_a_line_without_an_end_costs_little():
    """Four of them made 141 MB and 10 s of CPU: the lines were copied at each read, and had no limit."""
    cost = {}

    def attack(port):
        begun = time.process_time()
        for _ in range(4):
            strange(port, *[b"x" * 65536] * 400)
        cost["cpu"] = time.process_time() - begun

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert count(meetings((0, 2), (1, 2), before=attack)) == [1, 1]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KB
    assert cost["cpu"] < 1.0


SMALL = """
import resource, runpy, sys
runpy.run_path(sys.argv[2])
from shardkit.jobs.monitor import rendezvous
from shardkit.jobs.monitor.rendezvous import meet
from shardkit.runtime.channel.place import Place
rendezvous._INTRODUCTION = 1000.0  # they are not closed for their silence
resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))
print(len(meet(Place("127.0.0.1", int(sys.argv[1]), 0, 2, 120.0, True, "secret"), print)))
"""


def test_more_connections_than_files_may_be_open():
    """The oldest of those that say nothing go, and the processes of the job come in."""
    port = jobs.free_port()
    command = [sys.executable, "-I", "-S", "-c", SMALL, str(port), str(client._MONITOR)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        until_listens(port)
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
        for line in [*meet(Place("127.0.0.1", port, 1, 2, 120.0, True, "secret")), *held]:
            line.close()
        note, peers = process.stdout.read().splitlines()
    assert peers == "1" and note.startswith("shardkit: ") and "from outside this job" in note


@pytest.mark.parametrize(("limit", "at_most"), [("UNKNOWN", 4), ("_INTRODUCTION", 0.2)])
def test_who_says_nothing_has_to_go(limit, at_most, monkeypatch):
    """The oldest where there are many, and each after some seconds."""
    monkeypatch.setattr(rendezvous, limit, at_most)

    def wait(port):
        held = [socket.create_connection(("127.0.0.1", port), timeout=SLACK) for _ in range(9)]
        try:
            assert held[0].recv(1) == b""
        finally:
            for connection in held:
                connection.close()

    assert count(meetings((0, 2), (1, 2), before=wait)) == [1, 1]


def test_text_of_others_cannot_forge_lines():
    assert escape("node\n[0] step 9 loss 0.0\x1b[2J\ud800") == "node\\n[0] step 9 loss 0.0\\x1b[2J\\ud800"
    assert len(escape("x" * 10**6)) == 2000
    message = introduction.make_hello_message(Hello(1, 2, "a\nb", "", True, "0" * 32), "")
    assert introduction.parse_hello(message, "").host == "a\\nb"


def test_the_smallest_address_is_listened_on():
    assert bind_address("127.0.0.1") == "127.0.0.1"
    assert bind_address("localhost") in ("127.0.0.1", "::1")
    assert bind_address("192.0.2.1") == ""  # of a service in front of this machine
    assert bind_address("no-such-host.invalid") == bind_address("x" * 64) == ""
    with rendezvous._listen(Place("127.0.0.1", jobs.free_port(), 0, 2, 1.0, True)) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_a_name_that_is_no_host_name_is_an_introduction_too(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "n" * 64)  # gethostbyname raises a UnicodeError
    assert introduction.describe_process(Place("", 0, 1, 2, 1.0, True)).address == ""
