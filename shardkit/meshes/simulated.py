"""Simulated devices: CPU devices in place of accelerators, with the threads they need."""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import jax

from shardkit._arguments.checks import at_least, format_count
from shardkit._arguments.typed import typed
from shardkit._jax import backends

# jax 0.10 runs all simulated devices in one pool of max(NPROC, n) threads. n - 1 devices may block in a collective
# while the n launches of a later step block in the same pool, so that the last device needs 2n threads to proceed. 4n
# leaves room for programs dispatched from a second thread.
_THREADS_PER_DEVICE = 4
_SAFE_THREADS_PER_DEVICE = 2
_MOST_DEVICES = 2**16  # as many take minutes to start


@typed
def simulate_devices(n: int) -> None:
    """Gives this process `n` CPU devices, so you can run everything on a laptop. Call it before the first array.

    It also gives jax's CPU runtime enough threads: with fewer, steps that you dispatch asynchronously can deadlock (see
    `docs/howto/faults.md`). A second call with the same `n` does nothing.

    Args:
        n: number of devices, at least 1. They share this machine's cores: you get the results of `n` real devices, but
            not their times.

    Raises:
        ValueError: `n` is below 1, or above 65,536.
        RuntimeError: jax has already started with other devices.

    Example:
        >>> sk.simulate_devices(8)
        >>> jax.device_count()
        8
    """
    at_least("simulate_devices", 1, n=n)
    if backends.jax_has_started():
        devices = jax.devices()
        # As when a cell of a notebook is run again.
        if len(devices) == n and devices[0].platform == "cpu":
            warn_if_few_threads(n, stacklevel=4)
            return
        raise RuntimeError(
            "simulate_devices: jax has already started with "
            f"{format_count(len(devices), devices[0].platform + ' device')}, so it cannot simulate {n}. Call "
            f"simulate_devices({n}) at the start of the program, before jax initializes its devices, or start python "
            f"with XLA_FLAGS=--xla_force_host_platform_device_count={n} NPROC={_THREADS_PER_DEVICE * n}."
        )
    # Also on a machine with an accelerator, whose devices jax would take first.
    jax.config.update("jax_platforms", "cpu")
    offer_cpu_devices(n)


def offer_cpu_devices(n: int) -> None:
    """Makes jax start `n` CPU devices, with the threads they need, if it finds no accelerator."""
    if not 1 <= n <= _MOST_DEVICES:
        raise ValueError(
            f"simulate_devices: the number of devices must be from 1 to {_MOST_DEVICES:,}; got {n}. Pass for example 8."
        )
    # XLA reads them once, when jax starts its devices.
    os.environ.update(cpu_environment(n, os.environ))
    jax.config.update("jax_num_cpu_devices", n)
    backends.leave_out_idle_tpu()


def cpu_environment(n: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables to change in `environ` so that a process has threads for `n` CPU devices, and starts no others."""
    flag = r"--xla_force_host_platform_device_count=\d+"
    flags = re.sub(flag, "", environ.get("XLA_FLAGS", "")).strip()
    threads = max(_find_threads(environ), _THREADS_PER_DEVICE * n)
    return {"XLA_FLAGS": flags, "NPROC": str(threads)}


def widen_thread_pool() -> None:
    """Gives the CPU devices that jax is configured to start the threads they need; call it before jax starts."""
    devices = max(1, backends.cpu_devices_asked_for())
    flag = re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    if flag is not None:
        devices = max(devices, int(flag.group(1)))
    os.environ["NPROC"] = cpu_environment(devices, os.environ)["NPROC"]


def _find_threads(environ: Mapping[str, str]) -> int:
    """The threads of jax's pool by `NPROC`, or else by the cores of this machine."""
    nproc = environ.get("NPROC", "")
    if nproc.isdigit():
        return int(nproc)
    return os.cpu_count() or 1


def warn_if_few_threads(n: int, stacklevel: int) -> None:
    """Warns if steps over `n` CPU devices, dispatched asynchronously, can deadlock."""
    try:
        # Linux names each thread of a process there. Elsewhere the folder is missing, and the number of threads is
        # estimated.
        names = Counter(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))
    except OSError:
        names = Counter()
    threads = names["tf_XLAEigen"] or max(_find_threads(os.environ), n)
    # Later runtimes launch from a separate pool: no deadlock.
    if threads < _SAFE_THREADS_PER_DEVICE * n and not names["tf_XLAExecute"]:
        warnings.warn(
            f"{n} simulated devices share {threads} threads of jax's CPU runtime; below "
            f"{_SAFE_THREADS_PER_DEVICE * n}, steps dispatched asynchronously can deadlock. Call "
            f"shardkit.simulate_devices({n}) before jax starts, or start python with "
            f"NPROC={_THREADS_PER_DEVICE * n}.",
            RuntimeWarning,
            stacklevel=stacklevel,
        )
