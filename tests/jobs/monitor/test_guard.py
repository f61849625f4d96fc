"""The guard with real processes: every fault is named in the last line of every process that can still speak."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest

import shardkit as sk
from shardkit.jobs.monitor.guard import Deadlines, Guard
from shardkit.runtime.checkpoint.checkpoints import Checkpoints
from support import jobs
from support.commands import command, environment
from support.refusals import type_error, value_error

pytestmark = pytest.mark.clock  # loop.py gives each phase 3 s, by default

DEADLINE = 3.0
SLACK = 3.0
BUSY = 60.0  # more, where the default tier runs beside other work


def faulty(fault, rank, *words, processes=3, devices=2):
    options = {"processes": processes, "devices": devices}
    return jobs.run("loop.py", "--fault", fault, "--rank", rank, "--deadline", DEADLINE, *words, **options)


def agree(ended, culprit, text, speaks=True):
    """Every process ended badly, those that can speak with the same last line, which names process, phase and step."""
    lines = {each.last for rank, each in enumerate(ended) if speaks or rank != culprit}
    assert len(lines) == 1, lines
    assert re.fullmatch(text, lines.pop().split(" Flight record")[0])
    assert all(each.code != 0 for each in ended)


DIED = r"died without reporting an error \(SIGKILL or out of memory\?\)"
FAULTS = {
    "kill": rf"shardkit guard: process {{r}} {DIED} .*step [345]\.",
    "group": rf"shardkit guard: process {{r}} {DIED}, last seen .*step [0-5]\.",
    "stop": r"shardkit guard: process {r} is stopped \(SIGSTOP\?\) .*step [345]; processes .* wait in step [345]\.",
    "straggle": r"shardkit guard: process {r} holds up the others: it has been in user code after step 4 for "
    r"[\d.]+ s; processes .* wait in step 5\.",
    "raise": r"shardkit guard: process {r} failed in user code after step 4: ValueError: sample 5 is broken\.",
    "data": r"shardkit guard: process {r} timed out waiting for the data of step 5: 3\.\d s, deadline 3 s.*\.",
    "save": r"shardkit guard: process {r} timed out saving after step 5: 3\.\d s, deadline 3 s.*\.",
    "interrupt": r"shardkit guard: process {r} failed in user code after step 4: KeyboardInterrupt\.",
    "hook": r"shardkit guard: process {r} failed in user code after step 4: ValueError: sample 5 is broken\.",
    "iterator": r"shardkit guard: process {r} failed waiting for the data of step 5: OSError: no such file\.",
    "exit": r"shardkit guard: process {r} .*exited.*step 5\.",
    "thread": rf"shardkit guard: process {{r}} {DIED} in user code after step 4\.",
    "early": r"shardkit guard: process {r} failed in startup, before its first step: ValueError: nothing to train on\.",
}


# The tests below plant a kill, an exception, late data and a long save.
# proves F69, S121: whoever holds up a collective is named, in workers and in the coordinator
@pytest.mark.quick("straggle-1")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_by_all(fault, rank):
    # proves F70 in part: faults are planted, and a job is not continued by those who are left
    # Who holds the others up is told from who waits: that takes two that wait.
    ended = faulty(fault, rank, processes=2 if fault in ("hook", "iterator") else 3)
    agree(ended, rank, FAULTS[fault].format(r=rank), speaks=fault != "group")
    planted = float(re.findall(r"planted at ([\d.]+)", ended[rank].output)[-1])
    assert max(each.at for each in ended) < planted + DEADLINE + SLACK + BUSY * ((fault, rank) == ("straggle", 1))


@pytest.mark.deep
def test_a_process_that_ends_in_native_code_was_not_killed():
    ended = faulty("abort", 1, processes=2)
    agree(ended, 1, r"shardkit guard: process 1 died of a fatal signal \(Aborted\) in user code after step 4\.")
    assert re.search(r'^  File ".*loop\.py", line \d+ in wait_here$', ended[1].output, re.M)


STRANGER = """
import sys
from jax._src.lib import _jax
_jax.get_distributed_runtime_client(sys.argv[1], 1, init_timeout=5).connect()
"""


@pytest.mark.deep
def test_a_stranger_at_the_port_of_jax_is_the_fault_of_no_process(tmp_path):
    """Process 0 was said to have died of SIGKILL: jax aborts all when another program joins as one of them."""
    port = jobs.free_port()
    words = [str(jobs.WORKERS / "loop.py"), "--pace", "1", "--steps", "600", "--deadline", "60"]
    words += ["--mark", str(tmp_path / "begun")]
    each = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "SHARDKIT_JOB_TOKEN": "secret"}
    job = jobs.Job(words, processes=2, devices=1, each=lambda rank: each)
    until = time.monotonic() + BUSY * 4
    while not (tmp_path / "begun.0").exists() and time.monotonic() < until:
        time.sleep(0.1)
    subprocess.run([sys.executable, "-c", STRANGER, f"127.0.0.1:{port}"], capture_output=True, check=False)
    ended = job.wait(BUSY * 4)
    agree(
        ended,
        0,
        r"shardkit guard: all processes died of a fatal signal \(Aborted\) .*: jax ends them where process 0 fails, "
        r"which serves it, or a program from outside of the job joins at that port, which knows no token; .*\.",
    )


DIFFERENCES = {
    "shape": r"program \(process 1 against process 0: a batch of float32\[2,4\] against float32\[4,4\], first .*",
    "psum": r"program \(process 1 against process 0: 1 more all_reduce, first difference at line \d+ of the .*",
    "constant": r"program \(process 1 against process 0: first difference at line \d+ of the StableHLO\)",
    "order": r"mesh devices \(id, process\) \(\[\[.* on process 1, \[\[.* on process 0\)",
    "flag": r"XLA_FLAGS \(\"--xla_cpu_enable_fast_min_max=true\" on process 1, \"\" on process 0\)",
    "setting": r"program .*, setting jax_default_matmul_precision \(\"highest\" on process 1, null on process 0\)",
    "config": r"configuration learning rate \(0\.2 on process 1, 0\.1 on process 0\)",
}


# proves S103, S130: what differs is refused before the first step, by name
@pytest.mark.parametrize("fault", [pytest.param(f, marks=() if f == "psum" else pytest.mark.deep) for f in DIFFERENCES])
def test_another_program_is_refused_before_the_first_step(fault):
    ended = faulty(fault, 1, "--at", 0, processes=2, devices=1)
    agree(
        ended,
        1,
        "shardkit guard: stopped before step 0: all processes must run the same program with the same settings; they "
        f"differ in {DIFFERENCES[fault]}.*",
    )


# One waited for the others to compare its program, which had gone on; with a shape that all had compared before, the
# processes summed gradients of batches of other sizes, and the job ended well.
@pytest.mark.quick("seen")
@pytest.mark.parametrize("words", [(), ("--short", 2)], ids=["new", "seen"])
def test_who_calls_a_step_with_another_batch_is_named_before_the_deadline(words):
    ended = jobs.run("loop.py", "--fault", "shape", "--deadline", 600, "--steps", 10**6, *words, processes=3, devices=2)
    agree(
        ended,
        1,
        r"shardkit guard: stopped in step 5: all processes must call it with the same global shapes and dtypes of the "
        r"batch; they called it with float32\[6,4\] \(process 1\), float32\[12,4\] \(processes 0, 2\)\. Pad or drop a "
        r"short batch, on all processes alike\.",
    )


def test_a_flight_record_tells_the_last_steps(tmp_path):
    ended = faulty("kill", 1, "--flight", tmp_path, processes=2)
    assert ended[0].last.endswith(f" Flight record: {tmp_path}/flight.0.json")
    records = [json.loads((tmp_path / f"flight.{rank}.json").read_text()) for rank in range(2)]
    for rank, record in enumerate(records):
        assert (record["process"], record["processes"]) == (rank, 2)
        assert record["fault"].startswith("process 1 died without reporting an error")
        phases = [(event["phase"], event["step"]) for event in record["events"]]
        assert {("compile", 0), ("compare", 0)} <= set(phases)
        # Steps are asynchronous: process 1 may be through four of them before process 0 begins its second.
        if rank == 1:
            assert {("data", 1), ("step", 1), ("user code", 4)} <= set(phases)
        # A thread of its own waits for the ends of steps; on a busy machine it may not have got round to any. And the
        # other process may have gone on until it learned of the end of this one.
        called = {step for phase, step in phases if phase == "step"}
        assert {step for phase, step in phases if phase == "step done"} <= called | {0}
        times = [event["time"] for event in record["events"]]
        assert times == sorted(times)
    assert records[1]["status"]["phase"] == "user code"  # of the process that was killed


@pytest.mark.deep
def test_a_save_on_one_process_may_take_longer_than_a_step():
    words = ("--fault", "save", "--deadline", 2)
    ended = jobs.run("loop.py", *words, "--lasts", 3, "--allowed", 30, processes=2, devices=2)
    assert [each.code for each in ended] == [0, 0], ended
    assert ended[0].last == ended[1].last and ended[0].last.startswith("finished at loss 1.")
    ended = jobs.run("loop.py", *words, "--allowed", 3, processes=2)
    agree(
        ended,
        1,
        r"shardkit guard: process 1 timed out saving after step 5: 3\.\d s, deadline 3 s; process 0 waits .*\.",
    )


@pytest.mark.deep  # what a monitor makes of the phase: test_monitor.py
def test_an_evaluation_counts_as_no_step():
    ended = jobs.run("loop.py", "--evaluate", "--fault", "raise", processes=2)
    agree(ended, 1, FAULTS["raise"].format(r=1))


@pytest.mark.deep
@pytest.mark.parametrize("rank", [0, 1])
def test_one_process_may_end_long_after_the_others(rank):
    ended = jobs.run("loop.py", "--rank", rank, "--linger", 30, processes=2)
    assert [each.code for each in ended] == [0, 0], ended


# A hung evaluation, and a thread that is no daemon
@pytest.mark.quick("busy-0-1")
@pytest.mark.parametrize("fault, rank, processes", [("last", 1, 2), ("busy", 0, 1), ("busy", 0, 2), ("busy", 1, 2)])
def test_a_process_that_does_not_end_after_the_last_step(fault, rank, processes):
    """The others waited for it for an hour, with all devices."""
    ended = faulty(fault, rank, "--evaluation", 2, processes=processes)
    where = "in user code after the last step, step 7"
    agree(ended, rank, rf"shardkit guard: process {rank} timed out {where}: [\d.]+ s, deadline 2 s\.")
    assert [each.code for each in ended] == [70] * processes
    assert [f"the stacks of process {one}:" in each.output for one, each in enumerate(ended)] == [
        one == rank for one in range(processes)
    ]


@pytest.mark.deep
def test_a_healthy_job_is_never_refused_and_may_end_with_steps_in_flight():
    # A thread that waits in jax while Python ends would abort it.
    ended = jobs.run("loop.py", "--unwaited", "--pace", 0, "--steps", 60, processes=2, devices=2)
    assert [each.code for each in ended] == [0, 0], ended
    for start in range(50):
        ended = jobs.run("loop.py", "--seed", start, "--steps", 3, "--pace", 0, processes=2, devices=2)
        assert [each.code for each in ended] == [0, 0], (start, ended)


@pytest.mark.deep
def test_no_random_fault_is_lost():
    import random

    draw = random.Random(20)
    for _ in range(20):
        fault, rank, at = draw.choice(sorted(FAULTS)), draw.randrange(3), draw.randrange(1, 8)
        ended = faulty(fault, rank, "--at", at, "--pace", draw.random() / 10)
        lines = {each.last for other, each in enumerate(ended) if fault != "group" or other != rank}
        assert len(lines) == 1, (fault, rank, at, ended)
        assert f"process {rank} " in lines.pop(), (fault, rank, at, ended)
        assert all(each.code != 0 for each in ended)


def test_the_launcher_lets_the_guard_speak():  # jax aborts the others at once when process 0 is gone
    words = command("launch", "-n", 2, "--devices", 1, "--", jobs.WORKERS / "loop.py")
    ended = subprocess.run(
        [*words, "--fault", "kill", "--rank", "0"], capture_output=True, text=True, env=environment(), timeout=BUSY * 5
    )
    assert ended.returncode == 128 + 9
    for rank in range(2):
        assert (
            f"\n[{rank}] shardkit guard: process 0 died without reporting an error (SIGKILL or out of memory?)"
            in ended.stderr
        )
    assert ended.stderr.splitlines()[-1].startswith(
        "shardkit launch: process 0 failed first, killed by SIGKILL (others: "
    )


def test_one_process_is_guarded_too():
    ended = jobs.run("loop.py", "--fault", "data", "--rank", 0, "--deadline", 1, processes=1)
    assert re.fullmatch(
        r"shardkit guard: process 0 timed out waiting for the data of step 5: [\d.]+ s, deadline 1 s\.", ended[0].last
    )
    assert ended[0].code == 70
    *_, stacks = ended[0].output.partition("shardkit: the stacks of process 0:\n")
    assert re.search(r'^  File ".*loop\.py", line \d+ in batches$', stacks, re.M)


ALONE = """
import os, sys, time
from shardkit.runtime.channel import client
from shardkit.runtime.channel.place import Place
monitor = client.start(Place("", 0, 0, 1, 0.0, False))
"""


def alone(script, command=(sys.executable,), **more):
    """A process with a monitor and no job: its exit code and output; nothing that it started is left."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more
    process = subprocess.Popen([*command, "-c", ALONE + script], start_new_session=True, **pipes)
    try:
        output = b"".join(each or b"" for each in process.communicate(timeout=BUSY * 4))
        until = time.monotonic() + BUSY
        with pytest.raises(ProcessLookupError):
            while time.monotonic() < until:
                os.killpg(process.pid, 0)
                time.sleep(0.05)
        return process.returncode, output.decode()
    finally:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.deep
def test_a_forked_child_does_not_speak_for_its_parent():
    ends = ("sys.exit(0)", "raise ValueError('in the child')")
    children = "".join(f"if not os.fork():\n    {end}\nos.wait()\n" for end in ends)
    code, output = alone(f"{children}time.sleep(1.0)\nprint('well')")
    assert code == 0 and output.startswith("well") and "shardkit guard" not in output, output


def test_children_end_with_the_process():
    code, output = alone(
        "from multiprocessing import get_context\n"
        "get_context('fork').Process(target=time.sleep, args=(3600,)).start()\nraise ValueError('no')"
    )
    assert code == 1
    assert (
        output.splitlines()[-1] == "shardkit guard: process 0 failed in startup, before its first step: ValueError: no."
    )


@pytest.mark.deep
def test_a_full_pipe_holds_nothing_up():
    out, full = os.pipe()
    os.set_blocking(full, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(full, b"x" * 4096)
    os.set_blocking(full, True)
    code, _ = alone("monitor.report_error(ValueError, ValueError('no'))", stderr=full)
    os.close(out)
    os.close(full)
    assert code == -signal.SIGKILL


def test_a_monitor_that_is_stopped_ends_its_process():
    """The others cannot tell it from a machine that is busy; it took the 30 s after which a machine counts as lost."""
    code, output = alone("import signal\nos.kill(monitor.process_id, signal.SIGSTOP)\ntime.sleep(600.0)")
    assert code == 76
    assert output.splitlines()[-1] == "shardkit guard: the monitor of process 0 is stopped (SIGSTOP?)."


def test_the_last_line_is_a_line_and_what_is_not_utf8_is_no_reason_to_lose_it():
    code, output = alone("os.write(2, b'in the middle'); raise ValueError('file \\udcff')")
    assert code == 1
    assert (
        output.splitlines()[-1]
        == r"shardkit guard: process 0 failed in startup, before its first step: ValueError: file \udcff."
    )


def test_a_process_without_standard_streams():
    command = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable)
    assert alone("os.write(2, b'of a library\\n')", command=command)[0] == 0


def test_guard_errors():
    with type_error(
        "guard: watch takes a jitted step, which has a method lower; got <built-in function print>. Pass the step of "
        "make_train_step, or a function under jax.jit."
    ):
        Guard.watch(SimpleNamespace(), print)
    with value_error(
        "guard: a phase must have a deadline; got 'sleep'. Pass one of 'compile', 'step', 'save', 'data', 'evaluate'."
    ):
        Guard.phase(SimpleNamespace(), "sleep")
    assert Deadlines().of("compare") == 1800


# proves F69 in part: all wait in one barrier of orbax, and it was "processes 0, 1 are all late saving"
@pytest.mark.deep
@pytest.mark.parametrize(
    ("held", "rank", "text"),
    [
        ("write", 1, r"process 1 timed out saving after step 1: 3\.\d s, deadline 3 s; process 0 waits in the save .*"),
        ("write", 0, r"process 0 timed out saving after step 1: 3\.\d s, deadline 3 s; process 1 waits in the save .*"),
        ("end", 0, r"process 0 timed out finishing the save after step 1: 3\.\d s, deadline 3 s; process 1 waits .*"),
    ],
)
def test_the_process_whose_write_does_not_end_is_named(held, rank, text, tmp_path):
    ended = jobs.run("saver.py", tmp_path, "--held", held, "--rank", rank, processes=2)
    agree(ended, rank, f"shardkit guard: {text}")


@pytest.mark.deep
def test_a_save_under_the_guard_is_any_save(tmp_path):
    ended = jobs.run("saver.py", tmp_path, "--deadline", 60, processes=2)
    assert [each.code for each in ended] == [0, 0], ended
    loss = lambda params, batch, keys: jnp.mean(batch["x"] @ params["w"])  # noqa: E731
    mesh = sk.make_mesh(jax.devices()[:1], data=1)
    init, _ = sk.make_train_step(sk.value_and_grad(loss), optax.sgd(0.1), mesh=mesh, plan=sk.dp("data"))
    with Checkpoints(tmp_path) as checkpoints:
        state, run = checkpoints.restore(init.abstract({"w": jnp.ones((8, 3))}))
    assert run.step == 3 and state.params["w"].shape == (8, 3) and not jnp.any(state.params["w"] == 1)
    names = [json.loads((tmp_path / str(step) / "_CHECKPOINT_METADATA").read_text()) for step in (2, 3)]
    assert "orbax" in str(names) and "PyTreeHandler" in str(names) and "shardkit.runtime.checkpoint" not in str(names)
