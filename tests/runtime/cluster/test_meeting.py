"""The decisions of a meeting: which hosts run the next attempt, and what follows its end; no sockets, no processes."""

import random

import pytest

from shardkit.runtime.cluster.meeting import Host, Limits, Meeting, begins, in_order, outcome, starts
from shardkit.runtime.cluster.messages import Arrival, Ended, Leaves, Note, Over, Ready, Start, Stop, Terms

pytestmark = pytest.mark.check
WAIT, SILENCE, PATIENCE = 30.0, 10.0, 600.0


class Job:
    """A meeting, and launchers that do as they are told; what they were told is in `told`, by name."""

    def __init__(self, hosts=3, least=2, restarts=5, processes=2):
        self.terms, self.processes, self.now = Terms(hosts, least, restarts), processes, 0.0
        self.meeting = Meeting(Limits(self.terms, WAIT, SILENCE, PATIENCE), 0.0)
        self.told, self.silent = {}, set()

    def come(self, *names, ready=True):
        for name in names:
            arrival = Arrival(name, name, self.processes, *self.terms, "0" * 32)
            if self.meeting.arrives(arrival, f"10.0.0.{ord(name) - 96}", name == "a", self.now) and ready:
                self.hear(name, Ready(1000 + ord(name)))
        self.after(0)

    def hear(self, name, message):
        self.meeting.hears(name, message, self.now)
        self.deliver()

    def after(self, seconds):
        """Time passes, in which all launchers but the silent ones are heard."""
        until = self.now + seconds
        while True:
            for name, host in self.meeting.hosts.items():
                host.heard = host.heard if name in self.silent else self.now
            self.meeting.tick(self.now)
            self.deliver()
            if self.now >= until:
                return
            self.now = min(until, self.now + 0.5)

    def end(self, codes, attempt, step=None):
        """These launchers report the end of their processes, and are ready again."""
        for name, code in codes.items():
            self.hear(name, Ended(attempt, code, 0 if code else None, None if step is None else 0, step))
            self.hear(name, Ready(2000 + ord(name)))
        self.after(0)

    def deliver(self):
        for name, message in self.meeting.out:
            self.told.setdefault(name, []).append(message)
        self.meeting.out = []

    def of(self, kind, name="a"):
        return [message for message in self.told.get(name, []) if isinstance(message, kind)]

    def notes(self):
        return [note.text for note in self.of(Note)]


def test_all_hosts_start_together_with_ranks_in_the_order_of_their_names():
    job = Job()
    job.come("b", "c")
    assert not job.told
    job.come("a")
    (a,), (b,), (c,) = (job.of(Start, name) for name in "abc")
    assert a == Start(0, 6, 0, "10.0.0.1", 1097)
    assert (b, c) == (a._replace(offset=2), a._replace(offset=4))
    assert job.notes() == ["6 processes on 3 of 3 hosts (a, b, c)"]


def test_the_meetings_host_has_rank_0_and_hosts_may_differ():
    members = in_order(
        {"x": Host("a", "1.1.1.1", 3, False, 0.0, 5), "y": Host("b", "2.2.2.2", 1, True, 0.0, 6)},
    )
    assert starts(members, 4) == {"y": Start(4, 4, 0, "2.2.2.2", 6), "x": Start(4, 4, 1, "2.2.2.2", 6)}


@pytest.mark.parametrize(
    ("ready", "expected", "fewest", "waited", "begun"),
    [(3, 3, 2, 0, True), (2, 3, 2, 29, False), (2, 3, 2, 30, True), (1, 3, 2, 99, False), (1, 1, 2, 99, False)],
)
def test_when_an_attempt_begins(ready, expected, fewest, waited, begun):
    assert begins(ready, expected, fewest, waited, WAIT) == begun


def test_enough_hosts_start_after_a_wait_and_one_that_comes_later_is_no_fault():
    job = Job(restarts=0)  # so that any fault would be final
    job.come("a", "b")
    job.after(WAIT - 1)
    assert not job.of(Start)
    job.after(1)
    assert [start.size for start in job.of(Start)] == [4]
    job.come("c")
    job.after(WAIT - 1)
    assert not job.of(Stop)  # an attempt that just began goes on for a while
    job.after(1)
    assert job.of(Stop) == job.of(Stop, "b") == [Stop(0, "stop")]
    job.end({"a": 75, "b": 143}, 0)
    assert [start.size for start in job.of(Start)] == [4, 6] and job.of(Start, "c")[0].attempt == 1
    assert job.notes()[-2:] == [
        "c came: the others end, to start again together",
        "restart 1: 6 processes on 3 of 3 hosts (a, b, c)",
    ]


def test_a_silent_host_is_left_out_and_waited_for_before_the_others_go_on():
    job = Job()
    job.come("a", "b", "c")
    job.silent = {"c"}
    job.after(SILENCE + 1)
    assert job.of(Stop) == [Stop(0, "lost")] and "c" not in job.meeting.hosts
    job.end({"a": 70, "b": 70}, 0, step=7)
    assert job.notes()[1:] == [
        "host c is left out: it was not heard for 10 s",
        "waits 30 s for c, then goes on without",
    ]
    job.after(WAIT - 1)
    assert len(job.of(Start)) == 1
    job.after(1)
    assert job.of(Start)[-1].size == 4 and job.of(Start)[-1].attempt == 1
    job.end({"a": 70, "b": 70}, 1, step=9)  # a later fault of the two: nobody waits for the third again
    job.after(1)
    assert job.of(Start)[-1].attempt == 2


def test_a_host_that_is_back_at_once_takes_part_at_once():
    job = Job()
    job.come("a", "b", "c")
    job.meeting.loses("c", "its connection closed", job.now)
    job.end({"a": 70, "b": 70}, 0)
    job.come("c")
    job.after(1)
    assert job.of(Start)[-1].size == 6


def test_the_same_launcher_again_replaces_its_lost_connection():
    job = Job()
    job.come("a", "b", "c")
    job.come("c")
    assert job.notes()[1] == "host c is left out: it connected again" and len(job.meeting.hosts) == 3
    job.end({"a": 70, "b": 70}, 0)
    job.after(1)
    assert job.of(Start, "c")[-1].attempt == 1


def test_one_host_too_many_has_to_wait():
    job = Job()
    job.come("a", "b", "c")
    job.come("d")
    assert "d" not in job.meeting.hosts and len(job.meeting.hosts) == 3


def test_what_is_final():
    """The rules of one host, with the same words."""
    for codes, steps, text in (
        ([2], [None], "not restarted: exit code 2 says that the command is wrong"),
        ([70, 70, 70], [5, 5, 5], "not restarted: step 5 failed 3 times in a row. Look at its batch, number 5 from 0"),
        (
            [1] * 6,
            [1, 2, 3, 4, 5, 6],
            "not restarted: 5 restarts in an hour are the limit. Mend the cause, or raise --restarts",
        ),
    ):
        job = Job()
        job.come("a", "b", "c")
        for attempt, (code, step) in enumerate(zip(codes, steps, strict=True)):
            job.end(dict.fromkeys("abc", code), attempt, step)
            job.after(60)
        assert job.of(Over, "c") == [Over(codes[-1], text)]


def test_success_is_that_of_all():
    job = Job()
    job.come("a", "b", "c")
    job.end({"a": 0, "b": 0}, 0)
    job.after(2 * WAIT)
    assert not job.meeting.over and not job.of(Stop, "c")  # two that wait for the third are no newcomers
    job.end({"c": 0}, 0)
    assert job.of(Over) == [Over(0, "")]


def test_a_host_lost_at_the_end_is_no_success():
    job = Job(restarts=0)
    job.come("a", "b", "c")
    job.end({"a": 0, "b": 0}, 0)
    job.meeting.loses("c", "its connection closed", job.now)
    assert job.meeting.over == Over(1, "")


def test_too_few_hosts_are_a_matter_for_a_person():
    job = Job()
    job.come("a")
    job.after(WAIT)
    assert job.notes() == ["1 of at least 2 hosts so far; it waits for more"]
    job.after(PATIENCE)
    assert job.of(Over) == [
        Over(
            1,
            "1 of at least 2 hosts (--min-hosts) came within 600 s: start `shardkit launch` on the others again",
        )
    ]


def test_a_signal_to_one_launcher_takes_its_host_out_and_one_to_the_meetings_ends_the_job():
    job = Job(restarts=0)
    job.come("a", "b", "c")
    job.hear("c", Leaves(15))
    assert job.of(Stop) == [Stop(0, "stop")] and not job.of(Stop, "c")
    job.end({"a": 75, "b": 75, "c": 75}, 0)
    assert job.of(Start)[-1].size == 4
    job.hear("a", Leaves(2))
    job.end({"b": 75, "a": 75}, 1)
    assert job.meeting.over == Over(75, "")


def test_the_word_of_the_guard_decides_who_failed_first():
    first, named = Ended(0, 70, 2, None, None), Ended(0, 137, 5, None, None)
    said = Ended(0, 70, 0, 5, 12)
    assert outcome([first, named]) == first
    assert outcome([first, said, named]) == named._replace(blamed=5, step=12)
    assert outcome([first, said]) == said  # the one that it names is gone with its host
    assert outcome([Ended(0, 0, None, None, None)]) is None


EVENTS = ("come", "ready", "ended", "failed", "leaves", "lost", "silent", "time")


def drawn(seed, events=200):
    """A job whose launchers do anything, in any order; what must hold is asserted after each event."""
    random_, names = random.Random(seed), "abcde"
    job = Job(hosts=random_.randint(1, 4), least=1, restarts=random_.randint(0, 3))
    job.terms = job.terms._replace(min_hosts=random_.randint(1, job.terms.hosts))
    job.meeting.limits = job.meeting.limits._replace(terms=job.terms)
    running, last, finished = {}, -1, None  # the attempt of which a launcher has processes
    for _ in range(events):
        event, name = random_.choice(EVENTS), random_.choice(names)
        here = name in job.meeting.hosts
        if event == "come":
            job.come(name, ready=False)
            running.pop(name, None)
        elif event == "ready" and here and name not in running:
            job.hear(name, Ready(5))
        elif event in ("ended", "failed") and here and name in running:
            code = random_.choice((1, 2, 70, 143)) if event == "failed" else 0
            job.hear(name, Ended(running.pop(name), code, 0 if code else None, 0, random_.randint(0, 3)))
        elif event == "leaves":
            job.hear(name, Leaves(15))
        elif event == "lost":
            job.meeting.loses(name, "its connection closed", job.now)
        elif event == "silent":
            job.silent = {name}
        job.after(random_.choice((0, 0, 0.5, 40)) if event == "time" else 0)
        begun = {each: message for each in names for message in job.of(Start, each) if message.attempt > last}
        if begun:
            assert not set(running) & set(begun) and job.terms.min_hosts <= len(begun) <= job.terms.hosts
            offsets = sorted(start.offset for start in begun.values())
            assert offsets == list(range(0, 2 * len(begun), 2))
            assert {start._replace(offset=0) for start in begun.values()} == {
                Start(last + 1, 2 * len(begun), 0, *next(iter(begun.values()))[3:])
            }
            last += 1
            running |= dict.fromkeys(begun, last)
        for each in [each for each in running if each not in job.meeting.hosts]:
            del running[each]
        assert finished in (None, job.meeting.over)
        finished = job.meeting.over
    return last, finished


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 4000), marks=pytest.mark.deep)])
def test_launchers_that_do_anything_in_any_order(seeds):
    """It alone finds a launcher that is told to start twice, ranks that overlap, a job that goes on after its end."""
    found = [drawn(seed) for seed in seeds]
    assert max(last for last, _ in found) > 3 and {over is None for _, over in found} == {True, False}
