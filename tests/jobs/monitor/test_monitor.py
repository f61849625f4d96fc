"""The monitor's judgement, its records and its messages, without processes: plain values in, sentences out."""

import errno
import math
import os
import re
import socket
import tempfile
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import shardkit as sk
from shardkit.jobs.monitor.agreement import compare_fingerprints
from shardkit.jobs.monitor.fingerprint import describe_batch, replace_value
from shardkit.jobs.monitor.guard import Guard
from shardkit.jobs.monitor.judge import find_different_batches, find_fault
from shardkit.jobs.monitor.main import Monitor
from shardkit.jobs.monitor.members import Deadlines, Member
from shardkit.runtime.channel import client
from shardkit.runtime.channel import recorder as record
from shardkit.runtime.channel.client import MonitorClient
from shardkit.runtime.channel.place import Place
from shardkit.runtime.channel.recorder import (
    LONGEST_BATCH,
    RUNS,
    SIZE,
    SLOTS,
    Batches,
    Recorder,
    RecordReader,
    Status,
    parse_batches,
)
from shardkit.runtime.channel.wire import MessageStream, encode, encode_output
from shardkit.runtime.checkpoint.orbax_io import Saving
from support.refusals import refused
from support.tables import indented

pytestmark = pytest.mark.check

LIMITS = Deadlines(compile=60, step=10, save=10, data=10, evaluate=10, silence=30)
NOW = 1000.0


def at(phase, step, seconds=1.0, *, flying=None, heard=0.1, **more):
    """A process in a phase since so many seconds; `flying`: its devices are in that step, since as long."""
    last = step if phase in ("user code", "evaluate", "save", "commit", "end") else step - 1
    status = Status(phase, step, seconds, last, last if flying is None else flying - 1, seconds)
    return Member(status, NOW - heard, **more)


def said(*known, limits=LIMITS):
    found = find_fault(dict(enumerate(known)), limits, NOW)
    return found and found.text


# A job's processes, each in a phase and a step since so many seconds, and below them what is said of them.
TABLE = """
user code 5 flying=5 & data 6
start 0 500 & compile 0 59
# whoever is in time where it is may still come: it compiles, saves or loads longer than the step may take
step 6 11 & data 6 3
user code 0 40 flying=0 & compile 0 50
user code 6 11 flying=6 & save 5 9 & user code 6 3 flying=6
# its last process came to it 3 s ago
user code 6 11 flying=6 & user code 6 3 flying=6
compare 0 61 & start 0 30
step 6 11 & save 5 9
step 6 11 & save 5 11
    process 1 timed out saving after step 5: 11.1 s, deadline 10 s; process 0 waits in step 6
# but not without a limit
step 6 71 & data 6 3
    process 1 holds up the others: it has been waiting for the data of step 6 for 3.1 s; process 0 waits in step 6
# and not for one that itself waits, is stopped or has exited
step 6 11 & compare 6 8
    process 1 holds up the others: it has been comparing the program of step 6 with the others for 8.1 s; process 0
    waits in step 6
step 6 11 & save 5 3 stopped
    process 1 is stopped (SIGSTOP?) saving after step 5; process 0 waits in step 6
user code 6 11 flying=6 & user code 5 11 & user code 5 11
    processes 1, 2 hold up the others: they have been in user code after step 5 for 11.1 s; process 0 waits in step
    6
step 6 11 & data 6 12
    process 1 timed out waiting for the data of step 6: 12.1 s, deadline 10 s; process 0 waits in step 6
user code 6 11 flying=6 & user code 5 11
    process 1 holds up the others: it has been in user code after step 5 for 11.1 s; process 0 waits in step 6
user code 6 11 flying=6 & user code 6 11 flying=6
    processes 0, 1 timed out in step 6: 11.1 s, deadline 10 s
user code 6 11 flying=6 & user code 6 11 flying=6 stopped
    process 1 is stopped (SIGSTOP?) in step 6; process 0 waits in step 6
# a moment before the deadlines of those that wait for it
step 7 9 & user code 6 11 flying=6 stopped & user code 7 9 flying=7
    process 1 is stopped (SIGSTOP?) in step 6; processes 0, 2 wait in step 7
user code 6 11 flying=6 & user code 6 11 flying=6 heard=4
    process 1 has not answered for 4.0 s (machine or network down?), last seen in step 6; process 0 waits in step 6
data 6 & data 6 heard=31
    process 1 has not answered for 31.0 s (machine or network down?), last seen waiting for the data of step 6
save 5 11 & save 5 11 & data 6 2
    processes 0, 1 timed out saving after step 5: 11.1 s, deadline 10 s
# of a save: whose own part is written waits for the others', and process 0 finishes it when all are
commit 5 11 & save 5 9
commit 5 11 & save 5 11 & commit 5 11
    process 1 timed out saving after step 5: 11.1 s, deadline 10 s; processes 0, 2 wait in the save after step 5
    (own part written)
save 5 11 & commit 5 11 & save 5 11
    processes 0, 2 timed out saving after step 5: 11.1 s, deadline 10 s; process 1 waits in the save after step 5
    (own part written)
commit 5 11 & commit 5 11 & commit 5 11
    process 0 timed out finishing the save after step 5: 11.1 s, deadline 10 s; processes 1, 2 wait in the save
    after step 5 (own part written)
commit 5 11 & user code 5 9
commit 5 11 & user code 5 11
    process 1 holds up the others: it has been in user code after step 5 for 11.1 s; process 0 waits in the save
    after step 5 (own part written)
step 6 6 & end 5 6 left
    process 1 exited after step 5; process 0 waits in step 6
end 5 60 left & end 5 60 left
step 6 & data 6 gone
    process 1 died without reporting an error (SIGKILL or out of memory?) waiting for the data of step 6
# jax aborts all where its service fails or a stranger joins there: after a process was killed, a consequence
step 6 gone crash=Aborted & step 6 gone & step 6
    process 1 died without reporting an error (SIGKILL or out of memory?) in step 6
step 6 cause=JaxRuntimeError: Gloo: peer & data 6 gone crash=Segmentation fault
    process 1 died of a fatal signal (Segmentation fault) waiting for the data of step 6
step 6 gone crash=Bus error
    process 0 died of a fatal signal (Bus error) in step 6
step 6 gone crash=Aborted & step 6
    process 0 died of a fatal signal (Aborted) in step 6; jax ends it so, too, where a program from outside of the job
    joins at its port: see mtls_cert_file
step 6 gone crash=Aborted & data 6 gone crash=Aborted
    all processes died of a fatal signal (Aborted) in step 6: jax ends them where process 0 fails, which serves it,
    or a program from outside of the job joins at that port, which knows no token; read their output
step 6 gone & step 6 gone & step 6
    process 0 died without reporting an error (SIGKILL or out of memory?) in step 6
step 6 cause=JaxRuntimeError: Gloo: Connection closed by peer & step 6 gone
    process 1 died without reporting an error (SIGKILL or out of memory?) in step 6
step 6 cause=JaxRuntimeError: Gloo: Connection closed by peer & data 6 cause=ValueError: bad sample
    process 1 failed waiting for the data of step 6: ValueError: bad sample
# an error comes up where the host is, however far behind the devices are
user code 4 flying=1 cause=ValueError: x & step 4
    process 0 failed in user code after step 4: ValueError: x
compare 0 61 & start 0 90
    process 1 holds up the others: it has been in startup, before its first step for 90.1 s; process 0 waits
    comparing the program of step 0 with the others
# after the last step
after 5 9 & end 5 60 left
user code 5 9 & end 5 60 left
# which of them was the last is not known
user code 5 60 & user code 5 60
after 5 11 & end 5 60 left
    process 0 timed out in user code after the last step, step 5: 11.1 s, deadline 10 s
end 5 60 left & user code 5 11
    process 1 timed out in user code after step 5: 11.1 s, deadline 10 s; process 0 has exited
# it had fewer batches
after 5 11.5 & step 6 11
    process 0 timed out in user code after the last step, step 5: 11.6 s, deadline 10 s; process 1 waits in step 6
evaluate 4 11 & evaluate 4 12
    processes 0, 1 timed out evaluating after step 4: 11.1 s, deadline 10 s
"""
STATE = re.compile(
    r"(?P<phase>[a-z ]+) (?P<step>\d+)(?: (?P<seconds>[\d.]+))?(?: flying=(?P<flying>\d+))?(?: heard=(?P<heard>\d+))?"
    r"(?P<words>(?: stopped| gone| left)*)(?: cause=(?P<cause>.*?))?(?: crash=(?P<crash>.*))?"
)


def process(text):
    """What `at` makes of a text such as `user code 6 11 flying=6 stopped`."""
    found = {name: each for name, each in STATE.fullmatch(text).groupdict().items() if each}
    more = dict.fromkeys(found.pop("words", "").split(), True)
    for name, kind in (("step", int), ("seconds", float), ("flying", int), ("heard", float)):
        if name in found:
            found[name] = kind(found[name])
    return at(**found, **more)


@pytest.mark.parametrize(("known", "text"), indented(TABLE))
def test_who_is_named(known, text):
    assert said(*map(process, known.split(" & "))) == (text or None)


def test_hosts_are_named_where_there_are_several():
    def named(*hosts, **more):
        return said(*(at("step", 6, 11, host=host, **more) for host in hosts))

    assert named("a", "a") == "processes 0, 1 timed out in step 6: 11.1 s, deadline 10 s"
    assert named("a", "", "b", "a") == "processes 0, 1, 2, 3 on a, b timed out in step 6: 11.1 s, deadline 10 s"
    assert named(*"abcdef").startswith("processes 0, 1, 2, 3, 4, 5 on a, b, c, d timed out")
    other = at("step", 6, host="a")
    for known, text in (
        (at("step", 6, host="b", gone=True), "process 1 on b died without reporting an error"),
        (at("step", 6, host="b", cause="ValueError: x"), "process 1 on b failed in step 6: ValueError: x"),
        (at("step", 6, heard=31, host="b"), "process 1 on b has not answered for 31.0 s"),
        (at("end", 5, 60, host="b", left=True), "process 1 on b exited after step 5; process 0 waits in step 6"),
        (at("user code", 5, 11, host="b"), "process 1 on b holds up the others"),
        (at("step", 6, host="b", stopped=True), "process 1 on b is stopped"),
    ):
        waits = at("step", 6, 11, host="a") if known.status.phase == "user code" or known.stopped else other
        waits = at("step", 6, 9, host="a") if known.left else waits
        assert said(waits, known).startswith(text)


def test_who_is_silent_excuses_nobody_and_what_follows_is_given_time():
    # It was compiling when it was last heard of, which may take a minute.
    known = [at("step", 6, 11), at("compile", 6, 5, heard=4)]
    assert said(*known) == (
        "process 1 has not answered for 4.0 s (machine or network down?), last seen compiling step 6; process 0 "
        "waits in step 6"
    )
    assert said(at("step", 6, 11), at("compile", 6, 5)) is None
    gloo = at("step", 6, cause="JaxRuntimeError: Gloo: Connection closed by peer")
    assert find_fault({0: gloo}, LIMITS, NOW).wait == 2.0
    assert find_fault({0: at("step", 6, cause="ValueError: x")}, LIMITS, NOW).wait == 0.3
    assert find_fault({0: at("step", 6, cause="ValueError: x")}, LIMITS, NOW).primary
    assert find_fault({0: at("step", 6, 11)}, LIMITS, NOW).wait == 0.0


def message(**components):
    lines = components.pop("lines", ["a"])
    return {"components": components, "lines": lines, "collectives": {}, "step": 0, "batch": "float32[8]"}


def test_what_an_engine_may_start_again():
    """A process that died or does not answer, and errors that follow from that; no fault of the program itself."""

    def lost(*known, now=NOW):
        return find_fault(dict(enumerate(known)), LIMITS, now).lost

    well = at("step", 6)
    assert lost(well, at("step", 6, gone=True))
    assert lost(well, at("step", 6, cause="XlaRuntimeError: Gloo connection closed by peer"))
    assert lost(well, at("step", 6), now=NOW + 1000)  # nobody answers
    assert not lost(well, at("step", 6, cause="ValueError: x"))
    assert not lost(at("step", 6, gone=True), at("step", 6, cause="ValueError: x"))
    assert not lost(well, at("data", 6, 1000.0))


def test_what_differs_is_named():
    same = {"program": "p", "seed": "1"}
    assert compare_fingerprints({0: message(**same), 1: message(**same)}) == ""
    found = compare_fingerprints({rank: message(**same | {"seed": "2" if rank == 1 else "1"}) for rank in range(3)})
    assert found == (
        "stopped before step 0: all processes must run the same program with the same settings; they differ in seed (2 "
        "on process 1, 1 on process 0)"
    )
    found = compare_fingerprints({rank: message(**same | ({"extra": "3"} if rank else {})) for rank in range(2)})
    assert found.endswith("they differ in extra (3 on process 1, missing on process 0)")
    many = {f"option {index}": "1" for index in range(6)}
    found = compare_fingerprints({0: message(**many), 1: message(**dict.fromkeys(many, "2"))})
    assert found.endswith("option 3 (2 on process 1, 1 on process 0) and 2 more")


def test_sets_do_not_differ_and_a_program_that_does_is_told_by_line_and_collectives():
    assert replace_value({"b", "a"}) == ["a", "b"]
    assert replace_value(test_what_differs_is_named).startswith("<function test_what_differs_is_named>")
    one = message(program="p", lines=["a", "b", "c"]) | {"collectives": {"all_reduce": 2}, "step": 3}
    other = message(program="q", lines=["a", "x"]) | {"collectives": {"all_gather": 1}, "step": 3}
    assert compare_fingerprints({0: one, 1: other, 2: one}) == (
        "stopped before step 3: all processes must run the same program with the same settings; they differ in program "
        "(process 1 against process 0: 1 more all_gather, 2 fewer all_reduce, first difference at line 2 of the "
        "StableHLO)"
    )
    # It said nothing of the batch, whose shape is most often why programs differ.
    assert compare_fingerprints({0: one, 1: one | {"components": {"program": "q"}, "batch": "float32[6]"}}).endswith(
        "program (process 1 against process 0: a batch of float32[6] against float32[8], first difference at line 0 of "
        "the StableHLO)"
    )


def calls(*runs, phase="user code", everywhere=True, loop=1, host=""):
    """A process that called its steps with these batches: `("a", 0, 4)`, steps 0 to 4, by a program of that name."""
    batches = tuple(Batches(f"program {name}", name, everywhere, loop, *steps) for name, *steps in runs)
    last = batches[-1].last
    return Member(Status(phase, last, 1.0, last, last, 1.0, batches), NOW, host=host)


def apart(*known):
    found = find_different_batches(dict(enumerate(known)))
    return found and found.text


# All of them waited for a deadline, and then the process was named, and not its batch.
def test_who_calls_a_step_with_another_batch_is_named():
    usual, short = calls(("a", 0, 5)), calls(("a", 0, 4), ("b", 5, 5))
    text = (
        "stopped in step 5: all processes must call it with the same global shapes and dtypes of the batch; they "
        "called it with {}. Pad or drop a short batch, on all processes alike"
    )
    assert apart(usual, short, usual) == text.format("b (process 1), a (processes 0, 2)")
    assert apart(short, usual, usual) == text.format("b (process 0), a (processes 1, 2)")
    assert apart(usual, short) == text.format("b (process 1), a (process 0)")  # process 0 is taken for right
    # Who has not come to this step is not said to have called it.
    assert apart(usual, short, calls(("a", 0, 4))) == text.format("b (process 1), a (process 0)")
    many = [calls((name, 5, 5)) for name in "abcdef"]
    assert apart(*many) == text.format("f (process 5), e (process 4), d (process 3), c (process 2) and 2 more")
    hosts = [calls(("a", 0, 5), host="node1"), calls(("b", 5, 5), host="node2")]
    assert apart(*hosts) == text.format("b (process 1 on node2), a (process 0 on node1)")
    # Steps later, on both.
    later = calls(("a", 0, 4), ("b", 5, 5), ("a", 6, 90))
    assert apart(calls(("a", 0, 80)), later) == text.format("b (process 1), a (process 0)")
    # A program on some devices, whose process waits for others that do not compare: it could never go on.
    waits = calls(("a", 0, 4), ("b", 5, 5), phase="compare", everywhere=False)
    assert apart(calls(("a", 0, 7), everywhere=False), waits) == text.format("b (process 1), a (process 0)")
    found = find_different_batches({0: usual, 1: short})
    assert found.primary and not found.lost and found.wait == 1.0


def test_processes_that_call_the_same_are_not_told_apart():
    usual = calls(("a", 0, 4), ("b", 5, 5), ("a", 6, 6))
    for other in (
        calls(("a", 0, 2)),  # is behind
        calls(("a", 0, 4), ("b", 5, 5), ("a", 6, 7), ("b", 8, 8)),  # is ahead
        calls(("a", 6, 9), ("b", 10, 10)),  # has forgotten what was before
        calls(("c", 0, 6), loop=2),  # has begun the next loop
        calls(("c", 0, 6), everywhere=False),  # on devices of its own, as a worker of DiLoCo
        Member(),  # has no guard yet
    ):
        assert apart(usual, other) is None and apart(other, usual) is None
    # An array that the program does not use may have another shape, and one batch may be that of two functions.
    batches = Batches("p", "float32[8], int32[3]", True, 1, 0, 5)
    for change in ({"batch": "float32[8], int32[4]"}, {"program": "q"}):
        statuses = [Status(batches=(each,)) for each in (batches, batches._replace(**change))]
        assert apart(*map(Member, statuses)) is None


def test_the_other_batch_ends_a_job_before_any_deadline():
    ours, theirs = socket.socketpair()
    watching = Monitor(Place("", 0, 0, 2, 0.0, False), os.getppid(), MessageStream(0), None, [MessageStream(ours)])
    with ours, theirs:
        watching.members[0].status = calls(("a", 0, 5)).status
        other = calls(("a", 0, 4), ("b", 5, 5)).status
        theirs.sendall(encode(watching.make_status() | {"status": other}))
        watching.read(watching.peers[1])
        assert watching.members[1].status == other
        for after, over in ((0.0, False), (0.9, False), (1.1, True)):
            watching.rest_until = 0.0
            watching.judge(NOW + after)
            assert bool(watching.verdict) == over
        assert watching.verdict == apart(calls(("a", 0, 5)), calls(("b", 5, 5)))


def test_batches_are_described_as_jax_takes_them():
    batch = {
        "x": np.ones((8, 4), np.int64),
        "y": np.ones(3, bool),
        "z": [np.ones((8, 4), np.int32), 2.0, None],
        "name": "s",
    }
    assert describe_batch(batch) == "2 x int32[8,4], bool[3], float32[]"
    assert describe_batch(()) == "no array"
    one, other = (describe_batch([*map(np.ones, range(1, 40)), np.ones(last)]) for last in (50, 51))
    assert one != other and one[:100] == other[:100] and len(one) <= LONGEST_BATCH


class LoweredOnly:
    """A step that is not compiled."""

    lower = staticmethod(jax.jit(lambda state, batch: state + batch.sum()).lower)

    def __call__(self, state, batch):
        """Ends on an empty batch."""
        return state / batch.size if batch.size else 1 / 0


def test_a_step_is_told_with_its_batch_and_a_call_in_a_phase_is_no_step(tmp_path, monkeypatch):
    recorder, compared = Recorder(str(tmp_path / "ring")), []
    monkeypatch.setattr(
        "shardkit.jobs.monitor.guard.agree",
        lambda monitor, name, message: compared.append((name, message["batch"], recorder.status)),
    )
    mesh = sk.make_mesh(jax.devices()[:1], data=1)
    guard = Guard(SimpleNamespace(recorder=recorder), mesh, {}, 7)
    step, evaluate = guard.watch(LoweredOnly()), guard.watch(LoweredOnly())

    def told():
        return [(each.batch, each.loop, each.first, each.last) for each in recorder.status.batches]

    for size in (4, 4, 2, 4):
        step(1.0, np.ones(size, np.float32))
        with guard.phase("evaluate"):
            evaluate(1.0, np.ones(5, np.float32))
    steps = [("float32[4]", 1, 7, 8), ("float32[2]", 1, 9, 9), ("float32[4]", 1, 10, 10)]
    assert told() == steps
    # It is told before it is compared: who waits for others that do not compare is found by it.
    assert [name for name, _, _ in compared] == ["1/0/7:0", "1/1/8:0", "1/2/9:1"]
    _, batch, status = compared[2]
    assert (batch, status.phase, status.step, status.batches[-1][1:]) == (
        "float32[2]",
        "compare",
        9,
        ("float32[2]", jax.device_count() == 1, 1, 9, 9),
    )
    assert len({each.program for each in recorder.status.batches}) == 2
    # After an error that the loop has caught the same step may be called again: nothing is told of it.
    with pytest.raises(ZeroDivisionError):
        step(1.0, np.ones(0, np.float32))
    step(1.0, np.ones(2, np.float32))
    assert told() == [*steps, ("float32[0]", 1, 11, 11)]
    again = Guard(SimpleNamespace(recorder=recorder), mesh, {}, 0).watch(LoweredOnly())
    again(1.0, np.ones(4, np.float32))
    assert told()[-1] == ("float32[4]", 2, 0, 0) and compared[-1][0] == "2/0/0:0"


def test_the_record_keeps_the_last_batches(tmp_path):
    recorder = Recorder(str(tmp_path / "ring"))
    reader = RecordReader(str(tmp_path / "ring"))
    for step in range(3 * RUNS):
        batch = "x" * LONGEST_BATCH if step // 2 % 2 else "float32[8]"
        recorder.enter("step", step, Batches("0123456789abcdef", batch, step % 4 > 1, 1, step, step))
        recorder.note_dispatch(step)
        assert reader.read_status() == recorder.status
    assert [each[3:] for each in recorder.status.batches] == [(1, step, step + 1) for step in range(8, 24, 2)]
    assert parse_batches([list(each) for each in reader.read_status().batches]) == recorder.status.batches


def test_the_record_keeps_the_last_events(tmp_path):
    path = str(tmp_path / "ring")
    recorder = Recorder(path)
    reader = RecordReader(path)
    assert not os.path.exists(path)
    for step in range(SLOTS):
        recorder.enter("data", step)
        recorder.enter("step", step)
        recorder.note_dispatch(step)
        recorder.note_done(step)
    events = reader.read_events()
    assert len(events) == SLOTS - 1
    assert [(phase, step) for _, phase, step in events[-4:]] == [
        (phase, SLOTS - 1) for phase in ("data", "step", "user code", "step done")
    ]
    status = reader.read_status()
    assert status == recorder.status
    assert (status.phase, status.step, status.dispatched, status.done) == ("user code", SLOTS - 1, SLOTS - 1, SLOTS - 1)


def test_a_flight_record_is_not_written_through_a_link(tmp_path):
    recorder = Recorder(str(tmp_path / "ring"))
    reader, path = RecordReader(str(tmp_path / "ring")), tmp_path / "flight.0.json"
    (tmp_path / "victim").write_text("kept")
    recorder.enter("data", 3)
    reader.save(path, {})
    os.link(path, tmp_path / "hard")  # what an earlier run left may have another name, too
    before = (tmp_path / "hard").read_bytes()
    recorder.enter("step", 3)
    reader.save(path, {})
    assert (tmp_path / "hard").read_bytes() == before != path.read_bytes()
    path.unlink()
    path.symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match=r"flight\.0\.json' is a symbolic link, which is not followed"):
        reader.save(path, {})
    assert (tmp_path / "victim").read_text() == "kept"


def test_a_phase_turns_into_another_under_the_same_deadline(tmp_path):
    recorder = Recorder(str(tmp_path / "ring"))
    recorder.enter("save", 5)
    since = recorder.status.since
    recorder.rename_phase("commit", "save")  # it is not in that one
    recorder.rename_phase("save", "commit")
    assert recorder.status[:3] == ("commit", 5, since)
    reader = RecordReader(str(tmp_path / "ring"))
    assert reader.read_status() == recorder.status and [each[1:] for each in reader.read_events()][-1] == ("commit", 5)
    recorder.rename_phase("commit", "save")
    assert recorder.status[:3] == ("save", 5, since)


def test_a_part_is_told_while_its_process_waits_for_the_others(tmp_path, monkeypatch):
    recorder = Recorder(str(tmp_path / "ring"))
    monkeypatch.setattr(client, "_STARTED", [SimpleNamespace(recorder=recorder)])
    seen, writes, end = [], [threading.Event(), threading.Event()], threading.Event()

    def phase(wanted):
        until = time.monotonic() + 600
        while recorder.status.phase != wanted:
            assert time.monotonic() < until, recorder.status
            time.sleep(0.001)
        seen.append(wanted)

    part = Saving(
        SimpleNamespace(result=lambda: end.wait(10)),
        [SimpleNamespace(result=lambda write=write: write.wait(10)) for write in writes],
    )
    recorder.enter("save", 5)
    waiting = threading.Thread(target=part.result)
    waiting.start()
    writes[0].set()
    time.sleep(0.05)
    phase("save")  # one of two is written
    writes[1].set()
    phase("commit")
    end.set()
    waiting.join()
    phase("save")  # of the next, for which it waited
    recorder.enter("step", 6)
    part.result()  # no phase of a save: nothing to tell
    phase("step")
    recorder.enter("save", 6)
    Saving(SimpleNamespace(result=lambda: phase("save")), [SimpleNamespace(result=lambda: 1 / 0)]).result()
    assert seen == ["save", "commit", "save", "step", "save"]


# It had no trace, so that a census of a guarded step was refused.
def test_a_watched_step_is_read_as_the_step_is():
    watched = Guard.watch(SimpleNamespace(_clock=None, _compare=None), jax.jit(lambda x: x + 1))
    assert str(watched.trace(1.0).jaxpr) == str(jax.make_jaxpr(lambda x: x + 1)(1.0))
    assert sk.census(watched, 1.0).count() == 0 and "stablehlo.add" in watched.lower(1.0).as_text()


def test_a_process_that_is_stopped_while_it_writes_tears_no_record(tmp_path):
    """All that it writes before it counts the event may be half there."""
    recorder = Recorder(str(tmp_path / "ring"))
    reader = RecordReader(str(tmp_path / "ring"))
    for step in range(SLOTS + 9):
        recorder.enter("data", step)
    events, status = reader.read_events(), reader.read_status()
    at = record._locate_event(recorder._count)
    recorder._memory[at : at + record._EVENT.size] = b"\xff" * record._EVENT.size
    at = record._locate_status(recorder._count)
    recorder._memory[at : at + record._STATUS.size] = b"\xff" * record._STATUS.size
    assert (reader.read_events(), reader.read_status()) == (events, status)


def test_a_full_disk_is_a_sentence_and_no_signal(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert refused(lambda: MonitorClient(Place("", 0, 0, 1, 0.0, False)), RuntimeError) == (
        f"initialize: the directory for temporary files must have {SIZE} bytes free; No space left on device. Free "
        "space there, or set TMPDIR to another directory."
    )
    assert not list(tmp_path.iterdir())


RIGHT_BATCH = ["p", "float32[8]", True, 1, 0, 5]
WRONG_BATCHES = [
    None,
    {},
    "batches",
    [1],
    [[]],
    [RIGHT_BATCH[:-1]],
    [[*RIGHT_BATCH, 0]],
    [RIGHT_BATCH] * (RUNS + 1),
    *[[[*RIGHT_BATCH[:at], None, *RIGHT_BATCH[at + 1 :]]] for at in range(len(RIGHT_BATCH))],
    [["p", "float32[8]", 1, 1, 0, 5]],
    [["p", "float32[8]", True, True, 0, 5]],
    [["p" * 17, *RIGHT_BATCH[1:]]],
    [["p", "x" * (LONGEST_BATCH + 1), *RIGHT_BATCH[2:]]],
]


def test_what_is_no_message_of_a_monitor_ends_its_line_alone():
    for words in (
        {"status": 1},
        {"status": ["x"] * 7},
        {"status": ["x", *[math.inf] * 5, []]},
        {"status": ["x", *[0] * 5]},  # of an earlier version
        *[{"status": ["x", *[0] * 5, batches]} for batches in WRONG_BATCHES],
        {"over": []},
        {"over": "x", "lost": False, "hung": 1},
        {"over": "x", "hung": []},
    ):
        ours, theirs = socket.socketpair()
        watching = Monitor(Place("", 0, 0, 2, 0.0, False), os.getppid(), MessageStream(0), None, [MessageStream(ours)])
        with theirs, ours:
            theirs.sendall(encode(words))
            watching.read(watching.peers[1])
        assert watching.peers[1].closed and not watching.verdict and watching.members[1].gone


def test_a_run_that_goes_on_counts_from_there_and_not_what_an_earlier_one_left(tmp_path):
    recorder = Recorder(str(tmp_path / "ring"))
    recorder.begin_loop(41)
    assert recorder.status[:2] == ("start", 42)
    assert (recorder.status.dispatched, recorder.status.done) == (41, 41)
    recorder = Recorder(str(tmp_path / "left"))
    recorder.begin_loop(-1)
    recorder.note_done(99)
    assert recorder.status.done == -1


def monitor(tmp_path, parent):
    Recorder(str(tmp_path / "ring"))
    inbox, words = os.pipe()
    return Monitor(
        Place("", 0, 0, 1, 0.0, False), parent, MessageStream(inbox), RecordReader(str(tmp_path / "ring")), []
    ), words


def test_a_last_word_counts_and_a_monitor_that_was_stopped_blames_no_one(tmp_path):
    for word, gone in (({"left": True}, False), ({"cause": "ValueError: x"}, True)):
        watching, words = monitor(tmp_path, parent=0)
        os.write(words, encode(word))
        os.close(words)
        watching.look_at_process(1.0)
        own = watching.members[0]
        assert not watching.alive
        assert (own.gone, own.left, own.cause) == (gone, "left" in word, word.get("cause", ""))
    watching, words = monitor(tmp_path, parent=os.getppid())
    os.close(words)
    known = watching.members[0]
    known.arrival = 100.0
    for away, heard in ((0.5, 100.0), (99.5, 199.5), (99.5, 200.0)):
        watching.excuse_silence(away, 200.0)
        assert known.arrival == heard


def test_a_long_message_may_take_its_time():
    left, right = socket.socketpair()
    with left, right:
        long, got, lines = {"differs": "x" * 1_000_000}, [], MessageStream(right)
        sending = threading.Thread(target=MessageStream(left).send, args=(long,))
        sending.start()
        while not got:
            time.sleep(0.1)  # about 2 s in all
            got = list(lines.read())
        sending.join()
        assert got == [long]


def test_last_words_are_a_line_whatever_is_in_them():  # the name of a directory for flight records need be no UTF-8
    assert encode_output("Flight record: \udcff/flight.0.json") == b"\nFlight record: \\udcff/flight.0.json\n"


def test_messages_come_whole_and_a_closed_peer_is_seen():
    left, right = socket.socketpair()
    with left, right:
        lines = MessageStream(right)
        data = encode({"a": 1}) + encode({"b": "x" * 100})
        left.sendall(data[:5])
        assert list(lines.read()) == []
        left.sendall(data[5:])
        assert list(lines.read()) == [{"a": 1}, {"b": "x" * 100}]
        assert not lines.wait()
        left.sendall(b"GET / HTTP/1.1\n")
        assert list(lines.read()) == []
        assert lines.closed
    left, right = socket.socketpair()
    lines = MessageStream(right)
    left.close()
    assert list(lines.read()) == []
    assert lines.closed
    lines.send({"a": 1})
    assert lines.closed
    lines.close()
