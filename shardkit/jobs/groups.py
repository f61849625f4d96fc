"""Process groups that end with the launcher, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

# A leader is the first of the process group of each process: while it lives, no other group can get its number. The
# keeper is in a group of its own, so that a stop of the others does not stop it. It reads their numbers from a pipe
# that only the launcher holds open: it notices the end of the launcher, even by SIGKILL, and kills the groups.
_LASTING = "trap '' HUP INT QUIT TERM USR1 USR2; "
_LEADER = ("/bin/sh", "-c", _LASTING + "exec sleep 2147483647")
_KEEPER = ("/bin/sh", "-c", _LASTING + 'ids=; while read -r id; do ids="$ids -$id"; done; kill -KILL $ids')


@contextmanager
def groups(count: int) -> Iterator[list[int]]:
    """The numbers of `count` process groups; everything in them is killed at exit, and should the launcher die."""
    theirs, ours = os.pipe()
    nothing = subprocess.DEVNULL
    keeper = subprocess.Popen(_KEEPER, stdin=theirs, stdout=nothing, stderr=nothing, process_group=0)
    os.close(theirs)
    leaders: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            leaders.append(subprocess.Popen(_LEADER, stdin=nothing, stdout=nothing, stderr=nothing, process_group=0))
            os.write(ours, b"%d\n" % leaders[-1].pid)
        yield [leader.pid for leader in leaders]
    finally:
        for leader in leaders:
            os.killpg(leader.pid, signal.SIGKILL)
            leader.wait()
        keeper.kill()  # before the pipe closes: the numbers may have become another's
        keeper.wait()
        os.close(ours)
