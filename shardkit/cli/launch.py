"""`shardkit launch -n 4 -- train.py`: starts a job of several processes here, or prints a manifest for a cluster."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from shardkit.cli.output import Json, write_json
from shardkit.runtime.cluster.hosts import launch_on_hosts
from shardkit.runtime.cluster.launch import launch as launch_here
from shardkit.runtime.cluster.manifests import Kind, render
from shardkit.runtime.cluster.pods import RUNTIME

EXAMPLES = {
    "shardkit launch -n 4 --devices 2 -- train.py --steps 100": "four processes here",
    "shardkit launch -n 2 -- -m shardkit train fsdp=-1": "two that train together",
    "shardkit launch -n 8 --hosts 3 --meet node0:29400 -- train.py": "on each of three hosts",
    "shardkit launch -n 8 --render slurm -- train.py": "print a batch script",
}
GROUPS = {
    "processes here": ("processes", "devices", "output", "grace", "port", "restarts", "minimum", "json"),
    "several hosts": ("meet", "hosts", "min_hosts", "wait", "silence", "patience"),
    "manifest for a cluster": ("render", "name", "image", "accelerator", "topology", "queue", "runtime"),
}


@dataclass(frozen=True)
class Options:
    """Options of `shardkit launch`."""

    command: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="-- COMMAND ...")] = ()
    """What to run, after --: a script, -m and a module, or any program, with its arguments."""
    processes: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 1
    """Processes in the job, or on this host."""
    devices: int | None = None
    """Devices per process: simulated CPU devices, or with --accelerator what the cluster allocates to each."""
    output: Path | None = None
    """Directory for the standard output and standard error of each process."""
    grace: float = 10.0
    """Seconds that processes have to exit before they are killed, after one has failed, Ctrl-C or SIGTERM."""
    restarts: int = 0
    """Start a failed job again, at most so many times in an hour; the program resumes from its checkpoint."""
    minimum: Annotated[int | None, tyro.conf.arg(name="min")] = None
    """Fewest processes of a restart, after attempts that did not get further; by default all."""
    port: int | None = None
    """The coordinator's port; by default a free one, and with --render k8s or jobset 55527."""
    meet: str | None = None
    """HOST:PORT on one of them: run this on each, with one SHARDKIT_JOB_TOKEN."""
    hosts: int | None = None
    """Hosts of the job."""
    min_hosts: int | None = None
    """Fewest hosts that the job runs on; by default all."""
    wait: float = 30.0
    """Seconds that it waits for all hosts, or for more."""
    silence: float = 10.0
    """Seconds unheard after which a host is left out."""
    patience: float = 600.0
    """Seconds to look for the meeting, or for enough hosts."""
    render: Kind | None = None
    """Print a batch script or a manifest of this kind, and run nothing."""
    name: str = "shardkit"
    """Job name in the manifest."""
    image: str | None = None
    """Container image in the manifest (k8s, jobset, trainjob)."""
    accelerator: str = "cpu"
    """In the manifest: cpu, gpu, or a TPU slice type on Google's clusters, such as tpu-v5p-slice; for skypilot a GPU by
    its name, such as H100."""
    topology: str | None = None
    """Chips of the TPU slice, such as 4x4."""
    queue: str | None = None
    """Kueue's queue for the job (k8s, jobset, trainjob)."""
    runtime: str = RUNTIME
    """The training runtime of a trainjob; own prints one, which restarts a preempted job."""
    json: Json = None
    """Write how the job ended to this file, or with - to standard output."""


def launch(options: Annotated[Options, tyro.conf.arg(name="")]) -> int:
    """Run a command in several processes that jax joins into one job, or print a manifest for a cluster."""
    _check_options(options)
    o = options
    job: Any = {"processes": o.processes, "devices": o.devices, "port": o.port}
    if o.render is None:
        begun = time.perf_counter()
        here: Any = {name: getattr(o, name) for name in _HERE}
        if o.meet is None:
            code = launch_here(o.command, minimum=o.minimum, **here, **job)
        else:
            code = launch_on_hosts(o.command, **{name: getattr(o, name) for name in _ON_HOSTS}, **here, **job)
        row = {"exit_code": code, "seconds": time.perf_counter() - begun, "processes": o.processes}
        write_json(o.json, "launch", [row], arguments=o.command)
        return code
    manifest: Any = {name: getattr(o, name) for name in _OF_MANIFESTS}
    print(render(o.render, o.command, **job, **manifest), end="")
    return 0


_OF_MANIFESTS = ("name", "image", "accelerator", "topology", "queue", "runtime")
_HERE = ("output", "grace", "restarts")
_ON_HOSTS = ("meet", "hosts", "min_hosts", "wait", "silence", "patience")
_OF_PROCESSES_HERE = (*_HERE, *_ON_HOSTS, "minimum", "json")


def _check_options(options: Options) -> None:
    """Refuses an option that would have no effect."""
    here = options.render is None
    for name in _OF_MANIFESTS if here else _OF_PROCESSES_HERE:
        value = getattr(options, name)
        if value != getattr(Options, name):
            rule = "must come with --render" if here else f"must not come with --render {options.render}"
            word = "min" if name == "minimum" else name.replace("_", "-")
            raise ValueError(f"launch: --{word} {rule}; got {value}. Leave it out, or change --render.")
    if not here:
        return
    if options.meet is None:
        for name in _ON_HOSTS[1:]:
            if (value := getattr(options, name)) != getattr(Options, name):
                raise ValueError(
                    f"launch: --{name.replace('_', '-')} must come with --meet; got {value}. Pass --meet HOST:PORT, an "
                    "address of one of the hosts, too."
                )
    elif options.hosts is None:
        raise ValueError("launch: --meet must come with --hosts; got none. Pass --hosts, the number of hosts.")
    elif options.minimum is not None:
        raise ValueError(
            f"launch: --min must not come with --meet; got {options.minimum}. Pass --min-hosts, the fewest hosts."
        )
