"""Starting a job of many processes: who is who, and one clear sentence instead of a hang when something is amiss."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

import jax

from shardkit import _platform
from shardkit._check import at_least, finite
from shardkit._typed import typed
from shardkit.config import DistributedConfig
from shardkit.runtime.monitor import client
from shardkit.runtime.monitor.hello import TOKEN, Place
from shardkit.runtime.monitor.rendezvous import bind_address

# Seconds that jax's own exit barrier waits for the others, then ends all by abort: a process may have more to do than
# the others after the last step, and where one ends badly the monitors end the wait.
_SHUTDOWN = 3600


class Cluster(NamedTuple):
    """What a process knows of its job.

    Attributes:
        rank: this process, from 0.
        processes: number of processes of the job; its devices are `device_count`.
        local_rank: this process among those of its host, as the launcher says.
        is_master: whether this is process 0, which logs.
        coordinator: host:port at which the processes met; empty for a single process.
    """

    rank: int
    processes: int
    local_rank: int
    is_master: bool
    coordinator: str

    @property
    def device_count(self) -> int:
        """Devices of all processes."""
        return jax.device_count()

    @property
    def local_device_count(self) -> int:
        """Devices of this process."""
        return jax.local_device_count()


class _Found(NamedTuple):
    address: str | None = None
    size: int | None = None
    rank: int | None = None
    local_devices: tuple[int, ...] | None = None


@typed
def initialize(
    config: DistributedConfig | None = None,
    *,
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: int | tuple[int, ...] | None = None,
    timeout: float = 300.0,
    expect_devices: int | None = None,
) -> Cluster:
    """Starts this process as one of a job's, or says why the job cannot run; without a job it is the only process.

    Before jax starts, all processes meet at the coordinator's address and compare what they were told. Only those with
    the same token in SHARDKIT_JOB_TOKEN, a secret that `launch` and its manifests provide, belong to the job; process 0
    listens on the coordinator's address alone, where that is one of its machine's. Then a monitor beside each process
    goes on listening (`guard`): a process that ends without a word, or with an exception, ends all others within a
    second or two, each with the cause as its last line.

    Args:
        config: a DistributedConfig of one device per process: its world_size counts devices and processes alike.
        coordinator_address: host:port of process 0. An argument that is not given comes from the config, else from
            JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, else from MASTER_ADDR, MASTER_PORT,
            WORLD_SIZE and RANK, else from what jax itself detects (Slurm, Open MPI, Kubernetes, Cloud TPU).
        num_processes: number of processes.
        process_id: this one, from 0.
        local_device_ids: the accelerators that this process may use; by default all that it sees.
        timeout: seconds to wait for all processes.
        expect_devices: the number of devices that the whole job must have.

    Returns:
        Cluster.

    Raises:
        ValueError: numbers that contradict each other.
        RuntimeError: within `timeout` and 5 s: jax has devices already, the coordinator cannot be reached, its port is
            taken, processes are missing (they are named), came twice or were started with another number of
            processes, a host's name leads nowhere (CPU only), or another number of devices than expected.

    Source: `jax.distributed.initialize`, whose own failures here abort the process.
    """
    finite("initialize", timeout=timeout)
    ids = local_device_ids
    at_least(
        "initialize", 0, timeout=timeout, local_device_ids=min(ids, default=0) if isinstance(ids, Sequence) else ids
    )
    found = _given(coordinator_address, num_processes, process_id, local_device_ids)
    found = _filled(found, _from_config(config)) if config is not None else found
    if config is not None and not config.enabled:
        return Cluster(0, 1, 0, True, "")
    found = _filled(found, _from_environment(os.environ))
    if None in found[:3]:
        found = _filled(found, _Found(*_platform.detect_cluster(int(timeout))))
    local_rank = _local_rank(config, os.environ)
    if found.address is None and found.size in (None, 1) and not found.rank:
        _platform.leave_out_idle_tpu()
        _check_devices(expect_devices)
        return Cluster(0, 1, local_rank, True, "")
    place = _place(found, timeout)
    if client.running() is not None:
        raise RuntimeError(
            "initialize: it may be called once in a process; it was called before. Remove the second call."
        )
    if _platform.jax_has_started():
        raise RuntimeError(
            "initialize: it must come before jax starts its devices; they were touched already (jax.devices(), an "
            "array, a computation). Call it first."
        )
    if config is not None:
        for name, value in config.jax_settings().items():
            jax.config.update(name, value)
    client.start(place)
    _platform.leave_out_idle_tpu()
    listens = bind_address(place.host) if place.rank == 0 else ""
    jax.distributed.initialize(
        place.address,
        place.size,
        place.rank,
        local_device_ids=found.local_devices,
        cluster_detection_method="deactivate",
        initialization_timeout=max(1, int(timeout)),
        shutdown_timeout_seconds=_SHUTDOWN,
        coordinator_bind_address=_join(listens, place.port) if listens else None,
    )
    _check_devices(expect_devices)
    return Cluster(place.rank, place.size, local_rank, place.rank == 0, place.address)


def is_main() -> bool:
    """Whether this is process 0: the one that logs; checkpoints are written by all."""
    return jax.process_index() == 0


@typed
def finish(code: int = 0) -> NoReturn:
    """Ends this process in good order, in a job without the seconds that Python takes to clear up.

    For a run that was told to go (`preempted`) and has saved: `finish(PREEMPTED)`, once its Checkpoints are closed.
    Every process of a job must call it.

    Args:
        code: the exit code.
    """
    watcher = client.running()
    if watcher is not None and jax.process_count() > 1:
        watcher.left()
        jax.distributed.shutdown()  # waits for the others
        client.leave(code)
    sys.exit(code)


def log(*values: object) -> None:
    """Prints on standard error, on process 0 only; unlike `print_global` it communicates nothing."""
    if is_main():
        print(*values, file=sys.stderr, flush=True)  # noqa: T201


@typed
def barrier(name: str, timeout: float = 60.0) -> None:
    """Waits for all processes; a name is used once.

    Raises:
        RuntimeError: not all came within `timeout` seconds; names those that did not.
    """
    at_least("barrier", 0, timeout=timeout)
    finite("barrier", timeout=timeout)
    if jax.process_count() > 1:
        missing = absent(name, timeout)
        if missing is not None:
            raise RuntimeError(
                f"barrier: all processes must reach {name!r} within {timeout:g} s; {missing} did not. Look at their "
                "output, or raise timeout."
            )


def absent(name: str, timeout: float) -> str | None:
    """Waits for all processes under a name; None, or those that did not come: `processes 1, 3`."""
    words = _platform.wait_at_barrier(name, timeout)
    if words is None:
        return None
    found = re.search(r"timed out task names:\n((?:\S*\d\n)+)", words)
    counts = re.search(r"reached the barrier: (\d+)/(\d+)", words)
    if found is None or counts is None:
        return f"some ({' '.join(words.split())})"
    ranks = sorted(int(each) for each in re.findall(r"(\d+)\n", found[1]))
    more = " and others" if len(ranks) < int(counts[2]) - int(counts[1]) else ""
    return f"process{'es' if ranks[1:] or more else ''} {', '.join(map(str, ranks))}{more}"


@typed
def health_check(*, processes: int | None = None, devices: int | None = None) -> str:
    """Runs one sum over all devices and checks what it must give; call it on every process.

    Args:
        processes: the number of processes that there must be; by default more than one.
        devices: the number of devices that there must be; by default more than this process has.

    Returns:
        A line such as `process 1 of 4: 8 devices, 2 of them here; their sum is right`.

    Raises:
        RuntimeError: another number of processes or devices, or a wrong sum.
    """
    import jax.numpy as jnp

    from shardkit.collectives import all_reduce
    from shardkit.mesh import make_mesh

    there, all_devices, here = jax.process_count(), jax.device_count(), jax.local_device_count()
    if there != processes if processes is not None else there < 2:
        wanted = processes if processes is not None else "more than 1"
        raise RuntimeError(
            f"health_check: the number of processes must be {wanted}; got {there}. Was initialize() called, and all "
            "started?"
        )
    if all_devices != devices if devices is not None else all_devices <= here:
        wanted = devices if devices is not None else f"more than the {here} of this process"
        raise RuntimeError(f"health_check: the number of devices must be {wanted}; got {all_devices}. Check each host.")
    mesh, spec = make_mesh(all=-1), jax.sharding.PartitionSpec("all")
    numbers = jax.jit(lambda: jnp.arange(1.0, all_devices + 1), out_shardings=jax.sharding.NamedSharding(mesh, spec))()
    summed = jax.jit(
        jax.shard_map(lambda x: all_reduce(x, "all"), mesh=mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec())
    )
    got, right = float(summed(numbers)[0]), all_devices * (all_devices + 1) / 2
    if got != right:
        raise RuntimeError(
            f"health_check: the sum over {all_devices} devices must be {right:g}; got {got:g}. Check the network."
        )
    return f"process {jax.process_index()} of {there}: {all_devices} devices, {here} of them here; their sum is right"


def _given(address: str | None, size: int | None, rank: int | None, devices: int | tuple[int, ...] | None) -> _Found:
    return _Found(address, size, rank, (devices,) if isinstance(devices, int) else devices)


def _from_config(config: DistributedConfig) -> _Found:
    alone = config.world_size == 1
    return _Found(None if alone else f"{config.master_addr}:{config.master_port}", config.world_size, config.rank)


def _from_environment(environ: Mapping[str, str]) -> _Found:
    def number(name: str) -> int | None:
        text = environ.get(name)
        try:
            return None if text is None else int(text)
        except ValueError:
            raise ValueError(
                f"initialize: the variable {name} must be a whole number; got {text!r}. Correct or unset it."
            ) from None

    found = _Found(environ.get("JAX_COORDINATOR_ADDRESS"), number("JAX_NUM_PROCESSES"), number("JAX_PROCESS_ID"), None)
    if number("WORLD_SIZE") is None:
        return found
    address = f"{environ.get('MASTER_ADDR', 'localhost')}:{number('MASTER_PORT') or 29500}"
    return _filled(found, _Found(address if number("WORLD_SIZE") != 1 else None, number("WORLD_SIZE"), number("RANK")))


def _filled(found: _Found, other: _Found) -> _Found:
    missing = {name: value for name, value in other._asdict().items() if getattr(found, name) is None}
    return found._replace(**missing)


def _local_rank(config: DistributedConfig | None, environ: Mapping[str, str]) -> int:
    if config is not None:
        return config.local_rank
    names = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
    text = next((environ[name] for name in names if name in environ), "0")
    return int(text) if text.isdigit() else 0


def _place(found: _Found, timeout: float) -> Place:
    if found.address is None or found.size is None or found.rank is None:
        names = zip(("coordinator_address", "num_processes", "process_id"), found[:3], strict=True)
        missing = next(name for name, value in names if value is None)
        raise ValueError(
            f"initialize: {missing} must be known in a job of many processes; it is neither given nor in the "
            "environment. Pass it, or start the job with shardkit launch."
        )
    size, rank = found.size, found.rank
    if not 0 <= rank < size:
        raise ValueError(
            f"initialize: process_id must be at least 0 and below num_processes; got {rank} of {size}. Choose 0 to "
            f"{size - 1}."
        )
    host, colon, port = found.address.rpartition(":")
    if not colon or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(
            f"initialize: coordinator_address must be host:port with a port from 1 to 65535; got {found.address!r}. "
            "Write for example node0:29500."
        )
    return Place(host.strip("[]"), int(port), rank, size, timeout, _platform.cpu_only(), os.environ.get(TOKEN, ""))


def _join(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _check_devices(expected: int | None) -> None:
    if expected is not None and jax.device_count() != expected:
        raise RuntimeError(
            f"initialize: the job must have {expected} devices; it has {jax.device_count()}, of which process "
            f"{jax.process_index()} has {jax.local_device_count()}. Check each host, or the number."
        )
