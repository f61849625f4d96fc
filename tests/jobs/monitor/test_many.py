"""What keeps the monitor of process 0 small in a job of thousands: hashes first, judgements only when one is due."""

import itertools
import json
import os
import random
import resource
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from shardkit.jobs.monitor import agreement, rendezvous
from shardkit.jobs.monitor.judge import find_fault
from shardkit.jobs.monitor.main import Monitor, choose_beat
from shardkit.jobs.monitor.members import PHASE_ORDER, Deadlines, Member
from shardkit.runtime.channel import place
from shardkit.runtime.channel.place import Place, name_processes
from shardkit.runtime.channel.recorder import Status
from shardkit.runtime.channel.wire import MessageStream, encode

pytestmark = pytest.mark.check
LIMITS = Deadlines(compile=60, step=10, save=10, data=10, evaluate=10, silence=30)


def message(seed, **more):
    return {"components": {"seed": seed}, "lines": ["a"], "collectives": {}, "step": 0, "batch": "float32[8]"} | more


class Store:
    """Stands in for the key-value store of jax's coordination service; counts what was written."""

    def __init__(self):
        self.values, self.written, self.changed = {}, [], threading.Condition()

    def tell_processes(self, key, value):
        with self.changed:
            self.values[key] = value
            self.written.append(key)
            self.changed.notify_all()

    def told(self, key, timeout):
        with self.changed:
            self.changed.wait_for(lambda: key in self.values, timeout)
            return self.values.get(key)

    def drop_values(self, key):
        with self.changed:
            self.values = {each: value for each, value in self.values.items() if not each.startswith(f"{key}/")}


def agreed(monkeypatch, seeds, name="1/0/0:0", late=()):
    """A process for each seed compares, those in `late` last: the store, how many went on, what process 0 says."""
    store, went_on, said = Store(), [], []
    monkeypatch.setattr(agreement, "backends", store)
    monkeypatch.setattr(agreement, "_wait_for_end", lambda: went_on.pop())

    def come(rank):
        went_on.append(rank)  # and those that wait for their end take one back
        monitor = SimpleNamespace(place=Place("", 0, rank, len(seeds), 0.0, False), tell=said.append)
        agreement.agree(monitor, name, message(seeds[rank]))

    ranks = sorted(range(len(seeds)), key=lambda rank: rank in late)
    threads = [threading.Thread(target=come, args=(rank,)) for rank in ranks]
    for rank, thread in zip(ranks, threads, strict=True):
        if rank in late:
            assert not said and f"shardkit/programs/{name}/asked" not in store.values
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
    return store, len(went_on), [each["differs"] for each in said]


@pytest.mark.parametrize("late", [0, 1, 2])
def test_agreement_waits_for_all(monkeypatch, late):
    """And leaves one short value in the service."""
    store, went_on, said = agreed(monkeypatch, ["1", "1", "1"], late=[late])
    assert went_on == 3 and not said
    assert store.values == {"shardkit/programs/1/0/0:0/asked": "[]"}


def test_one_of_each_kind_is_asked_for_its_fingerprint(monkeypatch):
    """All sent theirs, with a hash of every line: 1.6 GB at process 0 for 10,000 processes."""
    store, went_on, said = agreed(monkeypatch, ["1", "2", "1", "2", "2"])
    assert went_on == 0
    assert [key for key in store.written if "fingerprint" in key] == ["shardkit/programs/1/0/0:0/fingerprint/1"]
    assert said == [
        "stopped before step 0: all processes must run the same program with the same settings; they differ in seed (1 "
        "on processes 0, 2, 2 on process 1)"
    ]


def test_a_process_alone_agrees_without_jax(monkeypatch):
    monkeypatch.setattr(agreement, "backends", None)
    agreement.agree(SimpleNamespace(place=Place("", 0, 0, 1, 0.0, False)), "1/0/0:0", message("1"))


def test_where_all_differ_some_are_compared_and_many_are_named_by_runs(monkeypatch):
    store, went_on, said = agreed(monkeypatch, [str(rank) for rank in range(100)])
    assert went_on == 0
    assert json.loads(store.values["shardkit/programs/1/0/0:0/asked"]) == list(range(16))
    assert said[0].endswith(
        "they differ in seed (1 on processes 1 to 15, 0 on process 0); 84 further processes differ too"
    )
    assert name_processes([3]) == "process 3"
    assert name_processes(range(8)) == "processes 0, 1, 2, 3, 4, 5, 6, 7"
    assert name_processes([5, *range(7, 10_000)]) == "processes 5, 7 to 9999"
    assert name_processes(range(0, 40, 2)) == "processes 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"


def test_no_fault_is_found_before_it_is_due():
    """Process 0 judges all of them only after the least of these times: one that is too late would hide a fault."""
    draw, found = random.Random(1), 0
    for _ in range(2000):
        now, known = 1000.0, {}
        for rank in range(draw.randrange(1, 4)):
            done = draw.randrange(3, 6)
            ages = [draw.choice([0.1, 0.1, 5.0, 5.0, 9.85, 10.05, 61.0]) for _ in range(3)]
            status = Status(
                draw.choice([*PHASE_ORDER]), draw.randrange(3, 7), ages[0], done + draw.randrange(2), done, ages[1]
            )
            marks = {name: draw.random() < 0.05 for name in ("gone", "left", "stopped")}
            cause = draw.choice([""] * 20 + ["ValueError: x"])
            known[rank] = Member(status, now - draw.choice([0.1, 0.1, 0.1, 3.0, 30.5]), cause=cause, **marks)
            known[rank].set_due(LIMITS)
        if find_fault(known, LIMITS, now):
            found += 1
            assert now >= min(each.due for each in known.values()), known
    assert 300 < found < 1700


class Rank(int):
    """Counts how often it is compared."""

    compared = 0

    def __eq__(self, other):
        Rank.compared += 1
        return int(self) == int(other)

    __hash__ = int.__hash__


@pytest.mark.parametrize("stopped", [0, 999], ids=["all late", "half stopped"])
def test_the_time_of_a_judgement_grows_with_the_processes_and_no_faster(stopped):
    """Each late rank was looked for in the list of all that were: 50 million comparisons for 10,000 of them."""
    late = Status("step", 5, 11.0, 5, 4, 11.0)
    known = {Rank(rank): Member(late, 1000.0, stopped=0 < rank <= stopped) for rank in range(2000)}
    Rank.compared = 0
    said = find_fault(known, LIMITS, 1000.0).text
    names = "processes 0 to 1999 timed out in step 5: 11.0 s, deadline 10 s"
    assert said == (
        "process 1 is stopped (SIGSTOP?) in step 5; processes 0, 1000 to 1999 wait in step 5" if stopped else names
    )
    assert Rank.compared < 10 * len(known)


@pytest.fixture
def opened():
    """Sockets that the test opens."""
    sockets = []
    yield sockets
    for each in sockets:
        each.close()


def monitors(opened, size, rank=0):
    """A monitor of that process with its peers, and the other ends."""
    pairs = [socket.socketpair() for _ in range(size - 1 if rank == 0 else 1)]
    opened += itertools.chain(*pairs)
    watching = Monitor(
        Place("", 0, rank, size, 0.0, False), os.getppid(), MessageStream(0), None, [MessageStream(a) for a, _ in pairs]
    )
    return watching, [MessageStream(b) for _, b in pairs]


def said(line):
    return list(line.read())


def test_what_differs_is_reported_to_all(opened):
    """By process 0, whose program was compared with those of the others; a stranger's escapes are not printed."""
    hub, (one, two) = monitors(opened, 3)
    hub.handle(0, {"differs": "stopped before step 0: \x1b[2J"})
    assert hub.verdict == "stopped before step 0: \\x1b[2J"
    assert said(one) == said(two) == [{"over": hub.verdict, "lost": False, "hung": []}]
    hub.verdict = ""
    hub.handle(1, {"differs": "x"})  # only the process of this monitor says so
    assert not hub.verdict


def test_where_the_process_at_fault_runs_is_said_and_what_hangs_prints_its_stacks(monkeypatch, opened):
    """A job's log named a process, and not the machine to look at."""
    told = []
    monkeypatch.setattr("shardkit.jobs.monitor.main._tell_process", told.append)
    monkeypatch.setattr("shardkit.jobs.monitor.main._wait_until", lambda *_: None)
    monkeypatch.setattr("os.kill", lambda *_: None)
    monkeypatch.setattr("os._exit", lambda *_: None)
    for hung in (1, 0):
        told.clear()
        hub, (line,) = monitors(opened, 2)
        member, _ = monitors(opened, 2, rank=1)
        assert member.members[1].host == socket.gethostname()
        member.members[1].host = "node1"
        hub.members[0].host = "node0"
        hub.deadlines = LIMITS
        hub.handle(1, json.loads(json.dumps(member.make_status())))
        for rank, each in hub.members.items():
            each.status, each.arrival = Status("data", 5, 10.5 if rank == hung else 1.0, 4, 4, 1.0), time.monotonic()
            each.set_due(LIMITS)
        hub.judge(time.monotonic())
        assert (
            hub.verdict
            == f"process {hung} on node{hung} timed out waiting for the data of step 5: 10.5 s, deadline 10 s"
        )
        member.handle(0, *said(line))
        for each in (hub, member):
            each.printed = True
            each.inbox.closed = True
            each.end()
        assert [message["stacks"] for message in told] == [not hung, bool(hung)]


def test_in_a_large_job_a_deadline_is_no_fault_until_all_have_spoken_again(opened):
    """Statuses come once a second there: the step may have ended since."""
    watching, _ = monitors(opened, 2)
    watching.deadlines, watching.beat = LIMITS, 1.0
    late, well = (Status("step", 5, 10.5, 5, 4, 10.5), Status("step", 6, 0.5, 6, 5, 0.5))
    for status, over in ((well, False), (late, True)):
        now = time.monotonic()
        for each in watching.members.values():
            each.status, each.arrival = late, now
            each.set_due(LIMITS)
        watching.rest_until = 0.0
        watching.judge(now)
        assert not watching.verdict
        for each in watching.members.values():
            each.status, each.arrival = status, now + 0.9
            each.set_due(LIMITS)
        watching.rest_until = 0.0
        watching.judge(now + 0.9)
        assert bool(watching.verdict) == over
    assert (choose_beat(2), choose_beat(2_500), choose_beat(10_000)) == (0.25, 0.25, 1.0)


def test_a_limit_of_files_below_the_number_of_processes_is_a_sentence(monkeypatch):
    """9,000 of 10,000 processes connected then, and after the time-out the others were said to be missing."""
    limits = {"now": (1024, 4096)}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, now: limits.update(now=now))
    assert place.allow_files(900) == "" and limits["now"] == (1024, 4096)
    assert place.allow_files(2000) == "" and limits["now"] == (2080, 4096)
    assert place.allow_files(4080) == "" and limits["now"] == (4096, 4096)
    assert place.allow_files(4081) == (
        "initialize: process 0 must be able to open 4097 files, one for each of 4081 processes and 16 of its own; its "
        "limit is 4096. Raise the hard limit: ulimit -Hn 4097, or LimitNOFILE."
    )
    limits["now"] = (1024, resource.RLIM_INFINITY)
    assert place.allow_files(4081) == "" and limits["now"] == (4161, resource.RLIM_INFINITY)


def test_messages_of_single_bytes_are_held_once():
    """Each piece was kept as an object of its own: 40 bytes for one."""
    left, right = socket.socketpair()
    with left, right:
        lines, sent = MessageStream(right), encode({"a": "x" * 50})
        for byte in sent[:-1]:
            left.sendall(bytes([byte]))
            assert said(lines) == []
        assert bytes(lines._incomplete) == sent[:-1]
        left.sendall(sent[-1:])
        assert said(lines) == [json.loads(sent)]


def test_the_ranks_that_are_missing_are_found_from_the_lowest_on():
    """All ranks were looked through for each that came: 10,000 of them took 12 s of one core."""

    class Looked(dict):
        looks = 0

        def __contains__(self, key):
            Looked.looks += 1
            return dict.__contains__(self, key)

    meeting = rendezvous._Meeting.__new__(rendezvous._Meeting)
    meeting._place, meeting._hellos, meeting._lowest = Place("", 0, 0, 2000, 0.0, False), Looked({0: None}), 1
    for rank in range(1, 2000):
        meeting._hellos[rank] = None
        missing = list(itertools.islice(meeting._find_missing(), 8))
        assert not set(missing) & set(meeting._hellos)
    assert missing == [] and Looked.looks < 20 * 2000
