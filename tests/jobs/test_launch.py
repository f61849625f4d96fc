"""`launch`: real processes, most of them without jax; what is said, what is returned, and that nothing is left."""

import concurrent.futures
import contextlib
import ctypes
import fcntl
import io
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from shardkit.cli import launch as cli
from shardkit.cli import main
from shardkit.jobs.launch import _announce_end, launch
from shardkit.jobs.output import write
from shardkit.runtime.channel.place import free_port
from support import commands
from support.commands import environment
from support.refusals import value_error
from support.tables import indented

LONG = 300.0  # seconds, for what a busy machine may take
PYTHON = [sys.executable, "-I", "-S", "-u", "-c"]  # starts in a few milliseconds


BEGIN = """
import os, signal, sys, time

rank = int(os.environ["RANK"])

def meet():
    os.symlink(str(os.getpid()), f"{os.environ['MEETING']}/{rank}")
    while len(os.listdir(os.environ["MEETING"])) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)

def after(other):
    while os.path.exists("/proc/" + os.readlink(f"{os.environ['MEETING']}/{other}")):
        time.sleep(0.01)

"""


@pytest.fixture(autouse=True)
def meeting(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("MEETING", str(tmp_path_factory.mktemp("meeting")))


@pytest.fixture(autouse=True)
def briefly(monkeypatch):
    """What processes leave behind, and holds their output, is waited for less long."""
    monkeypatch.setattr("shardkit.jobs.launch._LAST_OUTPUT", 1.0)


@pytest.fixture(autouse=True)
def heard():
    """Ctrl-C and hang-ups reach what the tests start, also in the background of a shell and under nohup."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in zip((signal.SIGINT, signal.SIGHUP), before, strict=True):
        signal.signal(number, handler)


def program(text):
    """A command that runs `text`, in which `rank` is the index of the process.

    `meet` waits for all of them, and then `after` for one to have ended, and the launcher to have noticed.
    """
    return [*PYTHON, BEGIN + textwrap.dedent(text)]


def is_gone(pid):
    """Whether the process has ended; one that nobody has waited for counts as ended."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True


def assert_gone(pids, seconds=60.0):
    end = time.monotonic() + seconds
    while not all(map(is_gone, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    left = [pid for pid in pids if not is_gone(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def launching(command):
    """A command that calls `launch`, and says so should that start jax."""
    code = f"""
import sys
from shardkit._jax import backends
from shardkit.jobs import launch
launch._LAST_OUTPUT = 1.0
code = launch.launch({command!r}, processes=2, grace=3)
sys.exit("jax has started" if backends.jax_has_started() else code)
"""
    return [sys.executable, "-c", code]


@contextlib.contextmanager
def launcher(command, *, lines):
    """`launch` in a process of its own, and the first `lines` lines that it passes on."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(launching(command), env=environment(), **pipes) as started:
        watchdog = threading.Timer(LONG, started.kill)
        watchdog.start()
        try:
            yield started, [started.stdout.readline() for _ in range(lines)]
        finally:
            watchdog.cancel()
            started.kill()


# proves S101, F68
def test_every_process_knows_its_place(capfd):
    names = ["JAX_PROCESS_ID", "RANK", "LOCAL_RANK", "JAX_NUM_PROCESSES", "WORLD_SIZE", "MASTER_ADDR"]
    names += ["PYTHONUNBUFFERED", "JAX_COORDINATOR_ADDRESS", "MASTER_PORT", "KEPT"]
    command = program(f"import json; print(json.dumps([os.environ.get(name) for name in {names}]))")
    assert launch(command, processes=3, environ={"KEPT": "yes", "RANK": "9"}) == 0
    out, err = capfd.readouterr()
    rows = {line[:4]: json.loads(line[4:]) for line in out.splitlines()}
    port = rows["[0] "][8]
    assert 1024 < int(port) < 65536 and err == ""
    for index in range(3):
        shared = ["3", "3", "127.0.0.1", "1", f"127.0.0.1:{port}", port, "yes"]
        assert rows[f"[{index}] "] == [str(index)] * 3 + shared
    assert launch(program("print(os.environ['MASTER_PORT'])"), processes=1, port=4567) == 0
    assert capfd.readouterr().out == "[0] 4567\n"


def test_devices_are_simulated(capfd):  # proves S101
    flags = "--xla_cpu_enable_fast_math=true --xla_force_host_platform_device_count=8"
    names = ["JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "NPROC", "XLA_FLAGS"]
    command = program(f"print(*[os.environ.get(name) for name in {names}])")
    assert launch(command, processes=1, devices=3, environ={"XLA_FLAGS": flags, "NPROC": "2"}) == 0
    assert capfd.readouterr().out == "[0] cpu 3 12 --xla_cpu_enable_fast_math=true\n"
    assert launch(command, processes=1, environ={"XLA_FLAGS": flags}) == 0
    assert capfd.readouterr().out == f"[0] None None None {flags}\n"


def test_scripts_and_modules_run_under_this_python(capfd, tmp_path):
    (tmp_path / "script.py").write_text("import sys; print(sys.executable, sys.argv[1:])")
    for command in ([str(tmp_path / "script.py")], ["-m", "script"]):
        environ = os.environ | {"PYTHONPATH": str(tmp_path)}
        assert launch([*command, "--a b", "-n"], processes=1, environ=environ) == 0
        assert capfd.readouterr().out == f"[0] {sys.executable} ['--a b', '-n']\n"
    assert launch(["echo", "it is", "this"], processes=1) == 0
    assert capfd.readouterr().out == "[0] it is this\n"


def test_lines_come_whole(capfdbinary):  # proves S101
    """In a second: a search that tries each byte of an incomplete line as the start of one takes minutes."""
    command = program(
        """
        for line in range(60):
            text = b"%d:%d:" % (rank, line) + b"abcdefgh" * (8192 if line % 20 == 0 else line)
            stream = (sys.stdout if line % 2 else sys.stderr).buffer
            for cut in (text[:7], text[7:30_000], text[30_000:] + b"\\n"):
                stream.write(cut)
                stream.flush()
        """
    )
    assert launch(command, processes=4) == 0
    out, err = capfdbinary.readouterr()
    for text, odd in ((out, 1), (err, 0)):
        seen = {index: [] for index in range(4)}
        for line in text.splitlines():
            rank, same, number, rest = re.fullmatch(rb"\[(\d)\] (\d):(\d+):([a-h]*)", line).groups()
            assert rank == same and len(rest) == 8 * (8192 if int(number) % 20 == 0 else int(number))
            seen[int(rank)].append(int(number))
        assert all(numbers == list(range(odd, 60, 2)) for numbers in seen.values())


def test_bytes_survive_and_files_hold_them_as_they_are(capfdbinary, tmp_path):  # proves S101
    command = program("os.write(1, b'\\xff\\x00 one\\r\\n\\ntail %d' % rank); os.write(2, b'\\xfe')")
    assert launch(command, processes=2, output=tmp_path / "new" / "logs") == 0
    out, err = capfdbinary.readouterr()
    lines = [b"[%d] " % rank + line for rank in (0, 1) for line in (b"\xff\x00 one\r", b"", b"tail %d" % rank)]
    assert sorted(out.split(b"\n")) == sorted([*lines, b""])
    assert sorted(err.splitlines()) == [b"[0] \xfe", b"[1] \xfe"]
    files = {path.name: path.read_bytes() for path in (tmp_path / "new" / "logs").iterdir()}
    text = b"\xff\x00 one\r\n\ntail "
    assert files == {"0.out": text + b"0", "0.err": b"\xfe", "1.out": text + b"1", "1.err": b"\xfe"}


def test_a_launcher_without_binary_streams_passes_text_on():
    """As in a notebook."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert launch(program("os.write(1, b'caf\\xc3\\xa9 \\xff')"), processes=1) == 0
    assert out.getvalue() == "[0] café \ufffd\n"


def test_a_full_disk_ends_the_file_and_not_the_job(capfd, tmp_path, monkeypatch):
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    monkeypatch.setattr("shardkit.jobs.launch.open_file", os.open)  # which follows links
    (tmp_path / "0.out").symlink_to("/dev/full")
    assert launch(program("print('a' * 100_000); print('b')"), processes=2, output=tmp_path) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[0] " + "a" * 100_000, "[0] b", "[1] " + "a" * 100_000, "[1] b"]
    assert err == f"shardkit launch: stopped writing {tmp_path}/0.out (No space left on device)\n"
    assert (tmp_path / "1.out").read_text() == "a" * 100_000 + "\nb\n"


# Each emptied the files of the other.
def test_two_jobs_in_one_directory(tmp_path):
    (tmp_path / "1.out").write_text("of the other")
    with open(tmp_path / "1.out", "ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with value_error(
            f"launch: output must be a directory of one job; another job that runs writes to '{tmp_path}'. Pass "
            "another directory, or end that job."
        ):
            launch(["true"], processes=2, output=tmp_path)
    assert (tmp_path / "1.out").read_text() == "of the other"
    assert launch(["true"], processes=2, output=tmp_path) == 0


# An exit code, a program, and below them the last line.
ENDS = """
0: pass
3: sys.exit(3 if rank == 2 else 0)
    process 2 failed first, exit code 3 (others: 0: 0, 1: 0)
71: meet(); rank == 1 or after(1); sys.exit(70 + rank)
    process 1 failed first, exit code 71 (others: 0: 70, 2: 72)
139: meet(); rank or os.kill(os.getpid(), signal.SIGSEGV); after(0); sys.exit(70)
    process 0 failed first, killed by SIGSEGV (others: 1: 70, 2: 70)
# 5: the others do not exit on their own
5: meet(); rank or sys.exit(5); time.sleep(600)
    process 0 failed first, exit code 5 (others: 1: killed by SIGTERM of the launcher, 2: killed by SIGTERM of the
    launcher)
5: signal.signal(signal.SIGTERM, signal.SIG_IGN); meet(); rank or sys.exit(5); time.sleep(600)
    process 0 failed first, exit code 5 (others: 1: killed by SIGKILL of the launcher, 2: killed by SIGKILL of the
    launcher)
5: meet(); rank or sys.exit(5); os.kill(os.getpid(), signal.SIGSTOP)
    process 0 failed first, exit code 5 (others: 1: killed by SIGKILL of the launcher, 2: killed by SIGKILL of the
    launcher)
"""


def ended(text, grace):
    """The exit code of three processes."""
    begin = time.monotonic()
    code = launch(program(text), processes=3, grace=grace)
    assert time.monotonic() - begin < LONG  # nobody waits for those that would sleep
    return code


# proves S101, F68: the exit code and the last line
@pytest.mark.parametrize(("end", "summary"), indented(ENDS))
def test_the_first_to_fail_gives_the_exit_code(capfd, end, summary):
    code, text = end.split(": ", 1)
    assert ended(text, grace=0.6 if code == "5" else LONG) == int(code)
    assert capfd.readouterr() == ("", f"shardkit launch: {summary}\n" if summary else "")


def test_a_signal_without_a_name_gives_its_number(capfd):
    assert ended("meet(); os.kill(os.getpid(), signal.SIGRTMIN + 1)", LONG) == 128 + signal.SIGRTMIN + 1
    said = capfd.readouterr().err
    assert re.fullmatch(r"shardkit launch: process \d failed first, killed by signal 35 \(.*\)\n", said)


def test_the_others_have_time_to_report(capfd):  # proves S101
    text = "meet(); rank == 1 and sys.exit(1); after(1); print('the loss was 2.5'); sys.exit(70)"
    assert launch(program(text), processes=2, grace=LONG) == 1
    assert capfd.readouterr() == (
        "[0] the loss was 2.5\n",
        "shardkit launch: process 1 failed first, exit code 1 (others: 0: 70)\n",
    )


# Reaped first, an end could be announced after that of a process that had waited for it: once in some hundred runs.
@pytest.mark.skipif(not hasattr(os, "waitid"), reason="macOS before Python 3.13 cannot look at an end without reaping")
def test_an_end_is_announced_before_the_process_is_gone():
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "pass"])
    events = queue.SimpleQueue()
    _announce_end(3, child, events)
    assert events.get(timeout=LONG) == 3
    assert child.returncode is None
    os.kill(child.pid, 0)  # it is there still
    assert child.wait() == 0


# proves S101, F68: what processes have started ends with them, whether they succeed, fail, or are killed
@pytest.mark.parametrize("end", ["pass", "sys.exit(1)", "time.sleep(600 * rank); sys.exit(1)"])
def test_nothing_that_processes_have_started_is_left(capfd, end):
    text = f"""
        import subprocess
        print(subprocess.Popen(["sleep", "600"]).pid)
        print(subprocess.Popen(["sh", "-c", "trap '' TERM HUP; sleep 600 & wait"]).pid)
        meet()
        {end}
    """
    launch(program(text), processes=2, grace=0.2)
    pids = [int(line.split()[1]) for line in capfd.readouterr().out.splitlines()]
    assert len(pids) == 4
    assert_gone(pids)


def test_a_process_that_left_its_group_does_not_hold_the_launcher(capfd):
    text = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)"
    begin = time.monotonic()
    assert launch(program(text), processes=1) == 0
    assert time.monotonic() - begin < LONG
    os.kill(int(capfd.readouterr().out.split()[1]), signal.SIGKILL)


def test_a_signal_to_its_own_group_reaches_no_other_process(capfd):
    command = ["sh", "-c", 'if [ "$RANK" = 0 ]; then sleep 0.2; kill -TERM 0; fi; sleep 0.5; echo done']
    assert launch(command, processes=2, grace=LONG) == 143
    assert capfd.readouterr().out == "[1] done\n"


SLEEPER = """
    import subprocess
    def end(number, frame):
        print("got", signal.Signals(number).name)
        sys.exit(75)
    if rank == 0:
        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGINT, end)
        signal.signal(signal.SIGHUP, end)
    else:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    print(os.getpid(), subprocess.Popen(["sleep", "600"]).pid, os.getpgid(0))
    time.sleep(600)
"""


# proves S101, F68
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(s, marks=pytest.mark.deep) for s in (signal.SIGINT, signal.SIGHUP))]
)
def test_signals_are_passed_on(number):
    with launcher(program(SLEEPER), lines=2) as (started, lines):
        pids = [int(pid) for line in lines for pid in line.split()[1:]]
        started.send_signal(number)
        out, err = started.communicate(timeout=LONG)
        assert started.returncode == 75
        assert out == f"[0] got {number.name}\n"
        assert err == (
            f"shardkit launch: after {number.name} process 0 failed first, exit code 75 (others: 1: killed by "
            "SIGKILL of the launcher)\n"
        )
        assert_gone(pids)


# It was 137, as of a lack of memory, and the monitors wondered who had killed their processes.
def test_who_does_not_end_after_ctrl_c_was_killed_by_the_launcher():
    text = "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN); print('there')"
    with launcher(program(f"{text}; time.sleep(600)"), lines=2) as (started, _):
        started.send_signal(signal.SIGINT)
        _, err = started.communicate(timeout=LONG)
        said = "after SIGINT the launcher killed processes 0, 1, which did not end in time"
        assert (started.returncode, err) == (130, f"shardkit launch: {said}\n")


@pytest.fixture
def adopting():
    """Orphans become ours, as in a container without an init: then the system does not wake the stopped ones."""
    prctl, child_subreaper = ctypes.CDLL(None).prctl, 36
    prctl(child_subreaper, 1)
    yield
    prctl(child_subreaper, 0)


# proves S101, F68: also processes that are stopped
@pytest.mark.quick("True")
@pytest.mark.parametrize("stop", [False, True])
def test_nothing_is_left_when_the_launcher_is_killed(stop, adopting):
    with launcher(program(SLEEPER), lines=2) as (started, lines):
        pids = [int(pid) for line in lines for pid in line.split()[1:]]
        assert len(pids) == 6
        for group in {os.getpgid(pid) for pid in pids if stop}:
            os.killpg(group, signal.SIGSTOP)
        started.kill()
        started.wait()
        assert_gone(pids)


def test_the_job_runs_on_when_nobody_reads(tmp_path):
    """As in `shardkit launch ... | head -n 1`."""
    text = f"""
        for line in range(2000):
            print(line)
        time.sleep(0.2)
        print("more")
        open({str(tmp_path)!r} + f"/{{rank}}", "w").close()
        sys.exit(3)
    """
    with launcher(program(text), lines=1) as (started, _):
        started.stdout.close()
        assert started.wait(timeout=LONG) == 3
        assert started.stderr.read().startswith("shardkit launch: process ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_a_stream_that_nobody_reads_stays_the_callers():
    """It was made /dev/null, for all that the caller writes later."""
    out, into = os.pipe()
    os.close(out)
    with open(into, "w") as stream:
        before = os.fstat(stream.fileno())
        write(stream, b"a line\n")
        assert os.fstat(stream.fileno()) == before


@pytest.mark.deep  # as where nobody reads
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_the_job_runs_on_when_nobody_can_read():
    """As in `shardkit launch ... > FILE` on a full disk."""
    command = launching(program("print('a' * 1_000_000, flush=True); sys.exit(3)"))
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, env=environment(), stdout=full, timeout=LONG).returncode == 3


def test_a_token_for_each_job_that_is_not_printed(tmp_path, capfd):
    names = [tmp_path / "first", tmp_path / "second"]
    for name in names:
        say = f"open({str(name)!r} + os.environ['RANK'], 'w').write(os.environ['SHARDKIT_JOB_TOKEN'])"
        assert launch(program(say), processes=2) == 0
    tokens = [path.read_text() for path in sorted(tmp_path.glob("*[01]"))]
    assert tokens[0] == tokens[1] != tokens[2] == tokens[3] and {len(token) for token in tokens} == {64}
    assert not any(token in "".join(capfd.readouterr()) for token in tokens)


def test_a_port_that_no_other_job_is_given():
    """Two jobs that began at once were given the same one."""
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(free_port()) for _ in range(100)]
        others = [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(100)]
        assert len({*ports, *others}) == 200
        with socket.create_server(("127.0.0.1", ports[0])):  # process 0 may have it
            pass


@pytest.mark.deep
def test_ignored_signals_stay_ignored():
    """As under nohup."""
    command = program("print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN); time.sleep(0.5)")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with launcher(command, lines=2) as (started, lines):
            started.send_signal(signal.SIGHUP)
            assert sorted(lines) == ["[0] True\n", "[1] True\n"] and started.wait(timeout=LONG) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


# proves S101
@pytest.mark.parametrize(
    "message, case",
    {
        "launch: a command must be given; got none. Pass for example -- train.py --steps 100.": ([], {}),
        "launch: processes must be at least 1; got 0. Pass processes=1 or more.": (["true"], {"processes": 0}),
        "launch: port must be from 1 to 65535; got 0. Leave it out, or pass one above 1023.": (["true"], {"port": 0}),
        "launch: port must be from 1 to 65535; got 65536. Leave it out, or pass one above 1023.": (
            ["true"],
            {"port": 65536},
        ),
        "launch: the command must be an executable program; got './no-such-program' (No such file or directory). "
        "Give its path and permission to run, or put its interpreter first, such as python or sh.": (
            ["./no-such-program"],
            {},
        ),
        f"launch: the command must be an executable program; got {str(Path(__file__).parent)!r} (Permission "
        "denied). Give its path and permission to run, or put its interpreter first, such as python or sh.": (
            [str(Path(__file__).parent)],
            {},
        ),
        "launch: the command must be an executable program; got 'true' (embedded null byte). Give its path and "
        "permission to run, or put its interpreter first, such as python or sh.": (["true", "a\0b"], {}),
        "launch: output must be a writable directory; got /dev/null/logs (Not a directory). Pass another directory.": (
            ["true"],
            {"output": "/dev/null/logs"},
        ),
    }.items(),
)
def test_errors(case, message):
    command, options = case
    with value_error(message):
        launch(command, **{"processes": 2, **options})


# proves F68: the guard's word decides, not which of the processes that it ends is quicker
@pytest.mark.parametrize(("blamed", "code", "first"), [(2, 3, "2"), (0, 1, "0"), (1, 1, "0")])
def test_the_one_that_the_guard_names_failed_first(capfd, blamed, code, first):
    text = f"""
        meet()
        print("shardkit guard: process {blamed} failed in step 7: process 1 is named here too.", file=sys.stderr)
        rank and after(rank - 1)
        sys.exit([1, 0, 3][rank])
    """
    assert launch(program(text), processes=3, grace=LONG) == code
    last = capfd.readouterr().err.splitlines()[-1]
    codes = {"0": "1", "1": "0", "2": "3"}
    others = ", ".join(f"{index}: {end}" for index, end in codes.items() if index != first)
    assert last == f"shardkit launch: process {first} failed first, exit code {codes[first]} (others: {others})"


INTERRUPTED = """
import os, signal, time
from shardkit import runtime
runtime.initialize(timeout=200)
if not runtime.is_main():
    os.kill(os.getpid(), signal.SIGINT)
time.sleep(600)
"""


def test_an_interrupted_process_ends_as_a_shell_says_it(capfd, tmp_path):  # proves F68
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    assert launch([str(tmp_path / "interrupted.py")], processes=2, devices=1, environ=environment()) == 130
    *_, before, last = capfd.readouterr().err.splitlines()
    assert before[4:] == "shardkit guard: process 1 failed in startup, before its first step: KeyboardInterrupt."
    assert last == "shardkit launch: process 1 failed first, exit code 130 (others: 0: 70)"


JOINED = """
import os
import queue
import jax
jax.distributed.initialize(
    num_processes=int(os.environ["JAX_NUM_PROCESSES"]), process_id=int(os.environ["JAX_PROCESS_ID"]),
    initialization_timeout=200, heartbeat_timeout_seconds=20, shutdown_timeout_seconds=20,
)
import jax.numpy as jnp
import shardkit as sk
mesh = sk.make_mesh(data=-1)
total = jax.jit(jax.shard_map(
    lambda: sk.all_reduce(jax.lax.axis_index("data") + 1, "data"), mesh=mesh, in_specs=(), out_specs=jax.P(),
))()
print("RESULT", jax.process_index(), jax.process_count(), len(jax.local_devices()), jax.device_count(), int(total))
"""


# proves S101, F68: jax joins the processes to one job
def test_jax_makes_one_job_of_the_processes(capfd, tmp_path):
    (tmp_path / "joined.py").write_text(JOINED)
    assert launch([str(tmp_path / "joined.py")], processes=2, devices=2, output=tmp_path, environ=environment()) == 0
    out = (tmp_path / "0.out").read_text() + (tmp_path / "1.out").read_text()
    assert re.findall("RESULT .*", out) == ["RESULT 0 2 2 4 10", "RESULT 1 2 2 4 10"]


def test_the_command(tmp_path):  # proves S101, F68
    text = "import os, sys; print(sys.argv[1:], os.environ['JAX_NUM_CPU_DEVICES']); sys.exit(70)"
    (tmp_path / "script.py").write_text(text)
    words = ["-n", "2", "--devices", "3", "--output", "logs", "--", "script.py", "-n", "5", "--", "--grace"]
    launching = commands.command("launch", *words)
    done = subprocess.run(launching, capture_output=True, text=True, timeout=LONG, env=environment(), cwd=tmp_path)
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] ['-n', '5', '--', '--grace'] 3" for rank in (0, 1)]
    assert (tmp_path / "logs" / "1.out").read_text() == "['-n', '5', '--', '--grace'] 3\n"
    assert done.returncode == 70
    assert re.fullmatch(r"shardkit launch: process \d failed first, exit code 70 \(others: \d: 70\)\n", done.stderr)


@pytest.mark.parametrize(
    ("words", "code", "last"),
    [
        ([], 2, "error: launch: a command must be given; got none. Pass for example -- train.py --steps 100."),
        (
            ["script.py", "--steps", "5"],
            2,
            "error: launch: the command and its options must come after --. Write for example -- train.py --steps 100.",
        ),
        (["script.py"], 0, ""),  # without options there is no doubt
    ],
)
def test_where_the_command_begins(words, code, last, monkeypatch, tmp_path, capfd):
    (tmp_path / "script.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["shardkit", "launch", "-n", "2", *words])
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capfd.readouterr()
    assert (end.value.code or 0, out) == (code, "") and (err.splitlines() or [""])[-1] == last


# an option that would change nothing is refused
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image": "me/train:1"}, "launch: --image must come with --render; got me/train:1. Leave it out, or change"),
        ({"topology": "4x4"}, "launch: --topology must come with --render; got 4x4. Leave it out, or change"),
        (
            {"render": "slurm", "grace": 3.0},
            "launch: --grace must not come with --render slurm; got 3.0. Leave it out, or change",
        ),
        (
            {"render": "jobset", "output": Path("logs")},
            "launch: --output must not come with --render jobset; got logs. Leave it out, or change",
        ),
    ],
)
def test_options_that_say_nothing(options, message):
    with value_error(f"{message} --render."):
        cli.launch(cli.Options(("true",), **options))


# proves S109: the recipe for machines that know no scheduler, with an ssh that stays on this one
def test_the_recipe_for_ssh(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "howto" / "which_engine.md").read_text()
    recipe = re.search(r"^(export job=.*?)\n```", page, re.DOTALL | re.MULTILINE)[1].replace("train.py", "print.py")
    files = {
        "hosts": "first\nsecond\nthird\n",
        "ssh": '#!/bin/sh\nHOST="$1"; export HOST; shift; exec sh -c "$*"\n',
        "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
        "print.py": "import os; print([v for k, v in sorted(os.environ.items()) if k == 'HOST' or k[:4] == 'JAX_'])",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-c", recipe], capture_output=True, text=True, env=environ, cwd=tmp_path, timeout=LONG)
    hosts = enumerate(["first", "second", "third"])
    assert sorted(done.stdout.splitlines()) == [f"['{host}', 'first:12355', '3', '{index}']" for index, host in hosts]


def test_other_threads_may_launch(capfd):
    """Signals are left alone there."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        assert pool.submit(launch, program("print(rank)"), processes=1).result(timeout=LONG) == 0
    assert capfd.readouterr().out == "[0] 0\n"


def test_chatter_of_gloo_is_left_out(tmp_path, capfd):
    """A line of each process that says nothing to a user; the files have it."""
    chatter = "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"
    mixed = "7 is connected to 7[Gloo] Rank 6 peer ranks. Expected number of connected peer ranks is : 7\n peer ranks."
    code = launch(
        [*PYTHON, f"print({chatter!r}, {mixed!r}, '[Gloo] a fault', 7, sep='\\n')"], processes=1, output=tmp_path
    )
    assert (code, capfd.readouterr().out) == (0, "[0] [Gloo] a fault\n[0] 7\n")
    assert chatter in (tmp_path / "0.out").read_text()
