"""The faults of `shardkit chaos`: how they are drawn, and how each is planted in a running job."""

from __future__ import annotations

import os
import random
import resource
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from shardkit.runtime.cluster.living import Living, living
from shardkit.runtime.cluster.sockets import connections, cut
from shardkit.runtime.cluster.wall_clock import set_clock
from shardkit.runtime.monitor import planted
from shardkit.runtime.monitor.hello import TOKEN

Kind = Literal["kill", "stop", "terminate", "monitor", "damage", "exception", "slow", "flip", "disk", "link", "clock"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MAY_GO_ON: tuple[Kind, ...] = ("disk", "link", "clock")  # a job that is not hit by one need not start again
NAMED: tuple[Kind, ...] = ("kill", "stop", "monitor", "damage", "exception", "slow", "flip")  # guard says the process
_SIGNALS = {"stop": signal.SIGSTOP, "terminate": signal.SIGTERM}
_JUMPS = (-86_400, -3_600, 3_600, 86_400)  # seconds


class Fault(NamedTuple):
    """A fault to plant.

    Attributes:
        kind: "kill" (SIGKILL), "stop" (SIGSTOP), "terminate" (SIGTERM, as a preemption), "monitor" (SIGKILL to the
            monitor that `guard` started), "damage" (the newest of several checkpoints is cut in half, then SIGKILL),
            "exception" (raised before a step), "slow" (the next batch does not come), "flip" (a bit of the state, on
            one device), "disk" (no room for files: for process 0, or for all others, as on two hosts), "link" (a TCP
            connection of the process or its monitor ends), or "clock" (the wall clock of the job jumps by up to a day).
        process: the index of the process.
        after: seconds from the loss that is awaited to the fault.
    """

    kind: Kind
    process: int
    after: float


def draw(seed: int, faults: int, processes: int, kinds: Sequence[Kind] = KINDS, latest: float = 3.0) -> list[Fault]:
    """Faults of a seed: every kind as often as any other, in a drawn order, at drawn processes and times."""
    drawn = random.Random(seed)
    order = [kinds[index % len(kinds)] for index in range(faults)]
    drawn.shuffle(order)
    return [Fault(kind, drawn.randrange(processes), drawn.uniform(0, latest)) for kind in order]


class Site(NamedTuple):
    """Where faults are planted.

    Attributes:
        launcher: the process id of the launcher of the job.
        token: the value of SHARDKIT_JOB_TOKEN in its processes.
        saved: the directory of its checkpoints, if it has one.
        within: the folder in which its processes look for faults.
        clock: the file that its wall clock follows.
    """

    launcher: int
    token: str
    saved: Path | None
    within: Path
    clock: Path

    def steps(self) -> list[int]:
        """The steps of the finished checkpoints."""
        there = self.saved.iterdir() if self.saved is not None and self.saved.is_dir() else ()
        return sorted(int(path.name) for path in there if path.name.isdigit())

    def living(self) -> list[Living]:
        """The processes of the job, the launcher too."""
        return living(TOKEN, self.token)

    def mains(self) -> dict[int, int]:
        """The ids of the processes that the launcher started, by their index."""
        return {each.rank: each.id for each in self.living() if each.parent == self.launcher and each.rank is not None}


def plant(fault: Fault, site: Site) -> int | None:
    """Plants a fault; returns the newest checkpoint that is intact after it."""
    steps = site.steps()
    if fault.kind == "damage" and site.saved is not None and len(steps) > 1:
        for path in (site.saved / str(steps.pop())).rglob("*"):
            if path.is_file():
                os.truncate(path, path.stat().st_size // 2)
    drawn = random.Random(fault.after)
    if fault.kind == "clock":
        set_clock(site.clock, drawn.choice(_JUMPS))
    elif fault.kind in ("exception", "slow", "flip"):
        planted.plant(site.within, fault.process, fault.kind)
    elif fault.kind == "disk":
        limit_files(fault, site, 0)
    elif (main := site.mains().get(fault.process)) is not None:  # else it has just ended
        monitors = [each.id for each in site.living() if each.parent == main]
        if fault.kind == "link":
            links = [(id, each) for id in (main, *monitors) for each in connections(id)]
            with suppress(OSError):  # it has just ended
                cut(*drawn.choice(links) if links else (main, -1))
        else:
            which = monitors[0] if fault.kind == "monitor" and monitors else main
            os.kill(which, _SIGNALS.get(fault.kind, signal.SIGKILL))
    return steps[-1] if steps else None


def limit_files(fault: Fault, site: Site, size: int) -> None:
    """Lets processes write no byte of a file beyond this size, until they end."""
    for process, id in site.mains().items():
        if (process == 0) == (fault.process == 0):
            with suppress(ProcessLookupError):
                _, hard = resource.prlimit(id, resource.RLIMIT_FSIZE)
                resource.prlimit(id, resource.RLIMIT_FSIZE, (size, hard))


def take_back(fault: Fault, site: Site) -> None:
    """Ends a fault that the job goes on with: there is room on the disk again."""
    if fault.kind == "disk":
        limit_files(fault, site, resource.RLIM_INFINITY)
