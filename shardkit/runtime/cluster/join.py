"""Starts a job of many processes: their ranks, and one clear error instead of a hang when one is missing or wrong."""

from __future__ import annotations

import inspect
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import jax

from shardkit._arguments.checks import at_least, at_least_zero, quote
from shardkit._arguments.typed import typed
from shardkit._jax import backends
from shardkit.runtime.channel import client
from shardkit.runtime.channel.place import TOKEN, Place, allow_files, bind_address, free_port
from shardkit.runtime.cluster import environment
from shardkit.runtime.cluster.config import DistributedConfig
from shardkit.runtime.cluster.environment import JobFacts

# Seconds that jax's exit barrier waits before it aborts all processes: after the last step one may have more to do than
# the others, and when one fails the monitors end the wait.
_SHUTDOWN = 3600
# Seconds without a heartbeat after which jax ends all processes. It takes them from the wall clock: a host's clock that
# is set ahead by more would end the job. The monitors send heartbeats of their own, by the monotonic clock.
_HEARTBEAT = 10 * 86_400

_KEY = "shardkit/monitors"


class Cluster(NamedTuple):
    """A process's place in its job.

    Attributes:
        rank: this process, from 0.
        processes: number of processes of the job; its devices are `device_count`.
        local_rank: this process among those of its host, according to the launcher.
        is_master: whether this is process 0, which logs.
        coordinator: host:port at which the processes connected; empty for a single process.
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
    mtls_cert_file: str | os.PathLike[str] | None = None,
    mtls_key_file: str | os.PathLike[str] | None = None,
    mtls_ca_file: str | os.PathLike[str] | None = None,
) -> Cluster:
    """Joins this process to the others of its job, or says why the job cannot run. Without a job it does nothing.

    Before jax starts, all processes connect at the coordinator's address and compare their arguments. A process belongs
    to the job if it has the same token in SHARDKIT_JOB_TOKEN, a secret that `launch` and its manifests provide. Process
    0 listens on the coordinator's address only, if its machine has this address. jax's own service listens there too,
    and checks no token: anyone who reaches its port can end the job, unless the processes have certificates
    (`mtls_cert_file`, from jax 0.12 on). From then on each process has a monitor (`guard`). When one process dies or
    raises, all others end within a second or two, with the cause as the last line.

    If you have already called `jax.distributed.initialize`, or Ray Train has, only the monitors connect. Process 0
    sends the others its port through jax, and a token if they have none.

    Args:
        config: a DistributedConfig. Its `local_device_ids` are the accelerators of this process, unless the launcher
            lets it see no others (CUDA_VISIBLE_DEVICES).
        coordinator_address: host:port of process 0, [address]:port of IPv6. If you leave out an argument, it comes from
            the config, else from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, else from MASTER_ADDR,
            MASTER_PORT, WORLD_SIZE and RANK, else from jax's own detection (Slurm, Open MPI, Kubernetes, Cloud TPU).
        num_processes: number of processes.
        process_id: the rank of this process, from 0.
        local_device_ids: the accelerators that this process may use; by default all.
        timeout: seconds to wait for all processes.
        expect_devices: the number of devices that the whole job must have.
        mtls_cert_file, mtls_key_file, mtls_ca_file: this process's certificate, its key, and the authority that signed
            the certificates of all processes, as PEM files. jax's service then answers nobody else.

    Raises:
        ValueError: arguments or scheduler variables are incomplete, or contradict each other.
        RuntimeError: within `timeout` and 5 s: jax has started its devices already, the coordinator cannot be reached,
            its port is in use, processes are missing (they are named), have the same rank or were started with another
            number of processes, a host's name does not resolve (CPU only), or another number of devices than expected.

    Example:
        First in a script that `launch` or a scheduler starts in every process:

            cluster = sk.runtime.initialize()
            sk.runtime.log(f"{cluster.processes} processes, {cluster.device_count} devices")

    Source: `jax.distributed.initialize`, which aborts the process on these failures.
    """
    at_least_zero("initialize", timeout=timeout)
    ids = local_device_ids
    if isinstance(ids, int):
        ids = (ids,)
    if ids is not None:
        at_least("initialize", 0, local_device_ids=min(ids, default=0))
    passed = JobFacts(coordinator_address, num_processes, process_id, ids)
    certificates = _check_certificates(mtls_cert_file, mtls_key_file, mtls_ca_file)
    is_enabled = config is None or config.enabled
    if is_enabled and jax.distributed.is_initialized():
        if certificates:
            raise ValueError(
                "initialize: mtls_cert_file must be passed to jax.distributed.initialize, which has been called "
                f"already; got {certificates['mtls_cert_file']!r}. Leave it out."
            )
        cluster = _join_monitors(config, passed, timeout)
        _check_devices(expect_devices)
        return cluster

    variables = environment.read_variables(os.environ)
    if not is_enabled:
        return Cluster(0, 1, 0, True, "")
    job = _find_job(config, passed, variables, timeout)
    if config is None:
        local_rank = environment.find_local_rank(os.environ)
    else:
        local_rank = config.local_rank or 0
    if job.address is None and job.size in (None, 1) and not job.rank:
        backends.leave_out_idle_tpu()
        _check_devices(expect_devices)
        return Cluster(0, 1, local_rank, True, "")
    place = _find_place(job, timeout)
    _check_first()
    if backends.jax_has_started():
        raise RuntimeError(
            "initialize: it must be called before jax starts its devices; they have started (by jax.devices(), an "
            "array or a computation). Call it first."
        )
    if config is not None:
        for name, value in config.jax_settings().items():
            jax.config.update(name, value)
    client.start(place)
    _initialize_jax(place, job, certificates)
    _check_devices(expect_devices)
    return Cluster(place.rank, place.size, local_rank, place.rank == 0, place.address)


def _find_job(config: DistributedConfig | None, passed: JobFacts, variables: JobFacts, timeout: float) -> JobFacts:
    """The job: what is passed, else what the config says, else variables, else what jax detects of a scheduler."""
    job = passed
    if config is not None:
        # An argument that is passed contradicts variables on purpose: the config is compared with them only without.
        has_place = passed.size is not None or passed.rank is not None
        compared = JobFacts() if has_place else variables
        job = job.fill_missing(_read_config(config, compared))
    job = job.fill_missing(variables)
    is_complete = None not in (job.address, job.size, job.rank)
    if job.size != 1 and not is_complete:
        job = job.fill_missing(environment.detect(os.environ, timeout))
    return job


def _initialize_jax(place: Place, job: JobFacts, certificates: dict[str, Any]) -> None:
    """Connects this process with jax's coordination service, which process 0 runs."""
    backends.leave_out_idle_tpu()
    listens = ""
    if place.rank == 0:
        allow_files(place.size)  # jax's coordination service, too, holds a connection per process
        listens = bind_address(place.host)
    os.environ.update(environment.bypass_proxy(place.host, os.environ))
    # jax detects no scheduler here: the place is known by now, from what was passed and from variables, and a second
    # answer could only contradict it.
    jax.distributed.initialize(
        place.address,
        place.size,
        place.rank,
        local_device_ids=job.local_devices,
        cluster_detection_method="deactivate",
        initialization_timeout=max(1, int(place.timeout)),
        heartbeat_timeout_seconds=_HEARTBEAT,
        shutdown_timeout_seconds=_SHUTDOWN,
        coordinator_bind_address=place._replace(host=listens).address if listens else None,
        **certificates,
    )


def _join_monitors(config: DistributedConfig | None, passed: JobFacts, timeout: float) -> Cluster:
    """The cluster of a job that jax has joined already: only the monitors connect."""
    if config is not None:
        passed = passed.fill_missing(JobFacts(size=config.num_processes, rank=config.rank))
    _check_first()
    with _find_joined_place(passed, timeout) as place:
        if place.size > 1:
            client.start(place)
    address = ""
    if place.size > 1:
        address = place.address
    local_rank = environment.find_local_rank(os.environ)
    return Cluster(place.rank, place.size, local_rank, place.rank == 0, address)


def is_main() -> bool:
    """Whether this is process 0, which logs; all processes write checkpoints.

    Example:
        >>> sk.runtime.is_main()
        True
    """
    return jax.process_index() == 0


@typed
def finish(code: int = 0) -> NoReturn:
    """Ends this process without an error, and at once: Python would take seconds to clean up.

    Every process of a job must call it, after its Checkpoints are closed.

    Args:
        code: the exit code, such as PREEMPTED.

    Example:
        After the last save of a preempted run:

            if sk.runtime.preempted(step):
                checkpoints.save(state)
                checkpoints.wait()
                sk.runtime.finish(sk.runtime.PREEMPTED)
    """
    watcher = client.find_monitor()
    # The report comes first, so that the guards take what follows for an exit, and not for a death.
    if watcher is not None and jax.process_count() > 1:
        watcher.report_exit()
        jax.distributed.shutdown()  # waits for the others
        client.leave(code)
    sys.exit(code)


def leave() -> None:
    """Declares the end of training in this process, if the process itself goes on: Ray, for example, ends it later.

    Call it in every process, best in a `finally`. A process that waits for this one in a step then ends, with the
    reason.

    Example:
        At the end of a function that Ray runs in each worker:

            runtime.initialize()
            try:
                train()
            finally:
                runtime.leave()
    """
    watcher = client.find_monitor()
    if watcher is not None:
        watcher.report_exit()


def log(*values: object) -> None:
    """Prints to standard error, on process 0 only; unlike `print_global` it communicates nothing.

    Example:
        >>> sk.runtime.log("step", 10, "loss", 0.5)
    """
    if is_main():
        print(*values, file=sys.stderr, flush=True)  # noqa: T201


@contextmanager
def _find_joined_place(passed: JobFacts, timeout: float) -> Iterator[Place]:
    """This process's place, by jax: process 0 tells the others a port, free inside, and a token if it has none.

    The port of the job's address is that of jax's coordination service, which tells them. Who can ask it for the token
    could end the job anyway. Refuses what `passed` says otherwise than jax, and a process 0 that does not answer.
    """
    address, size, rank = backends.joined_job()
    facts = (("num_processes", passed.size, size), ("process_id", passed.rank, rank))
    for name, value, actual in facts:
        if value is not None and value != actual:
            raise ValueError(
                f"initialize: {name} must be {actual}, as in the job that jax has joined already; got {value}. Leave "
                "it out."
            )
    if passed.local_devices is not None:
        raise ValueError(
            "initialize: local_device_ids must be passed to jax.distributed.initialize, which has been called already; "
            f"got {passed.local_devices}. Leave it out."
        )
    host, _, _ = address.rpartition(":")
    host = host.strip("[]")
    cpu = backends.cpu_only()
    token = os.environ.get(TOKEN, "")
    if rank:
        message = backends.told(_KEY, timeout)
        if message is None:
            raise RuntimeError(
                f"initialize: process 0 must call it too; it did not within {timeout:g} s. Call it in every process, "
                "or raise timeout."
            )
        port, _, new_token = message.partition(" ")
        yield Place(host, int(port), rank, size, timeout, cpu, token or new_token)
        return
    # The socket holds the port until the monitor listens on it: another job on this host would take a port that is only
    # known to have been free.
    with free_port("") as free:
        new_token = ""
        if not token:
            new_token = secrets.token_hex(32)
        backends.tell_processes(_KEY, f"{free} {new_token}")
        yield Place(host, free, 0, size, timeout, cpu, token or new_token)


def _check_certificates(*files: str | os.PathLike[str] | None) -> dict[str, Any]:
    """The arguments of jax's initialize for mutual TLS; none without files, which this version of jax must know."""
    names = ("mtls_cert_file", "mtls_key_file", "mtls_ca_file")
    paths: dict[str, Any] = {}
    for name, path in zip(names, files, strict=True):
        if path is not None:
            paths[name] = os.fspath(path)
    if not paths:
        return {}
    if len(paths) < len(names):
        raise ValueError(
            f"initialize: {quote(names)} must be passed together; got {quote(list(paths))}. Pass all three."
        )
    for name, file in paths.items():
        if not os.path.isfile(file):
            raise ValueError(f"initialize: {name} must be a file; got {file!r}. Pass its path.")
    if not set(names) <= inspect.signature(jax.distributed.initialize).parameters.keys():
        raise ValueError(
            f"initialize: mtls_cert_file needs jax 0.12, whose service knows certificates; got jax {jax.__version__}. "
            "Install a newer jax, or leave the three files out."
        )
    return paths


def _check_first() -> None:
    if client.find_monitor() is not None:
        raise RuntimeError("initialize: it must be called once per process; got a second call. Remove that.")


def _read_config(config: DistributedConfig, variables: JobFacts) -> JobFacts:
    """What the config says; refuses one that describes another job than the launcher started."""
    size = config.num_processes
    facts = (("num_processes", size, variables.size), ("rank", config.rank, variables.rank))
    for name, described, variable in facts:
        if variable is not None and variable != described:
            raise ValueError(
                f"initialize: the config must describe the job that the environment variables do; got {name}="
                f"{described} and {variable}. Make it with DistributedConfig.from_environment(), or correct one."
            )
    address = None
    if size != 1:
        address = f"{config.master_addr}:{config.master_port}"
    return JobFacts(address, size, config.rank, environment.choose_devices(config, os.environ))


def _find_place(job: JobFacts, timeout: float) -> Place:
    """This process's place in a job; refuses a job that lacks something, or says what cannot be."""
    if job.address is None or job.size is None or job.rank is None:
        missing = "process_id"
        if job.address is None:
            missing = "coordinator_address"
        elif job.size is None:
            missing = "num_processes"
        raise ValueError(
            f"initialize: {missing} must be known in a job of many processes; got neither an argument nor an "
            "environment variable. Pass it, or start the job with shardkit launch."
        )
    if not 0 <= job.rank < job.size:
        raise ValueError(
            f"initialize: process_id must be at least 0 and below num_processes; got {job.rank} of {job.size}. Pass 0 "
            f"to {job.size - 1}."
        )
    host, colon, port = job.address.rpartition(":")
    host = host.strip("[]")
    if not colon or not port.isdigit() or not 0 < int(port) < 65536 or host.endswith(":"):
        raise ValueError(
            f"initialize: coordinator_address must be host:port with a port from 1 to 65535; got {job.address!r}. "
            "Pass for example node0:29500, or [fd00::1]:29500."
        )
    return Place(host, int(port), job.rank, job.size, timeout, backends.cpu_only(), os.environ.get(TOKEN, ""))


def _check_devices(expected: int | None) -> None:
    if expected is not None and jax.device_count() != expected:
        raise RuntimeError(
            f"initialize: the job must have {expected} devices; it has {jax.device_count()}, of which process "
            f"{jax.process_index()} has {jax.local_device_count()}. Check the devices of each host, or expect_devices."
        )
