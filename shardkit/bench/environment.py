"""Where a benchmark ran: what a reader needs to judge its numbers, and a loop whose time says how fast it was then."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np

import shardkit

_NUMBERS = np.arange(2**18, dtype=np.uint32) * np.uint32(2654435761)  # Knuth's multiplier: in no order


def environment() -> dict[str, Any]:
    """Describes the machine and the software of this run.

    Returns:
        A dict of JSON values: date, versions, devices, cores, load, flags, the commit, and the CPU microseconds of
        `calibration`. The name of the machine is left out.

    Example:
        >>> from shardkit.bench.environment import environment
        >>> environment()["device_count"]
        8
    """
    device = jax.devices()[0]
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):  # a container may have fewer than the machine
        cores = len(os.sched_getaffinity(0))
    load = None
    if hasattr(os, "getloadavg"):
        load = round(os.getloadavg()[0], 2)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu_model": _cpu_model(),
        "cores": cores,
        "load_average_1min": load,
        "python": platform.python_version(),
        "shardkit": shardkit.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "platform": device.platform,
        "device_count": jax.device_count(),
        "device_kind": device.device_kind,
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "NPROC": os.environ.get("NPROC", ""),
        "LIBTPU_INIT_ARGS": os.environ.get("LIBTPU_INIT_ARGS", ""),
        "processes": jax.process_count(),
        # What else runs can only make it longer, so that the shortest of five is nearest to what the machine can do.
        "calibration_cpu_us": round(min(calibration() for _ in range(5)), 1),
        "git_commit": _git_commit(),
    }


def calibration() -> float:
    """Times a fixed piece of work on one core (a sort of 2^18 integers), to compare machines and hours.

    Returns:
        Microseconds of CPU time of this thread; about 2,000 to 20,000.

    Example:
        >>> from shardkit.bench.environment import calibration
        >>> calibration() > 0
        True
    """
    begun = time.thread_time()
    np.sort(_NUMBERS)
    return (time.thread_time() - begun) * 1e6


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            _, _, model = line.partition(":")
            return model.strip()
    return platform.processor() or platform.machine()


def _git_commit() -> str | None:
    # --exclude=* leaves out all tags, so that this is always a commit; "-dirty" follows it if files are changed.
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
