"""`shardkit launch -n 4 -- train.py`: starts a job of several processes here, or prints a manifest for a cluster."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from shardkit.cli.output import Json, write_json
from shardkit.jobs.launch import launch as launch_here
from shardkit.jobs.manifests import Kind, render

EXAMPLES = {
    "shardkit launch -n 4 --devices 2 -- train.py --steps 100": "four processes here",
    "shardkit launch -n 2 --restarts 5 -- train.py": "started again when a process dies",
    "shardkit launch -n 8 --render slurm -- train.py": "print a batch script",
}


@dataclass(frozen=True)
class Options:
    """Options of `shardkit launch`."""

    command: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="-- COMMAND ...")] = ()
    """What to run, after --: a script, -m and a module, or any program, with its arguments."""
    processes: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 1
    """Processes in the job."""
    devices: int | None = None
    """Devices per process: simulated CPU devices, or with --accelerator what the cluster allocates to each."""
    output: Path | None = None
    """Directory for the standard output and standard error of each process."""
    grace: float = 10.0
    """Seconds that processes have to exit before they are killed, after one has failed, Ctrl-C or SIGTERM."""
    restarts: int = 0
    """Start a failed job again, at most so many times; the program resumes from its checkpoint."""
    port: int | None = None
    """The coordinator's port; by default a free one, and with --render jobset 55527."""
    render: Kind | None = None
    """Print a batch script or a manifest of this kind, and run nothing."""
    name: str = "shardkit"
    """Job name in the manifest."""
    image: str | None = None
    """Container image in the manifest (jobset)."""
    accelerator: str = "cpu"
    """In the manifest: cpu, gpu, or a TPU slice type on Google's clusters, such as tpu-v5p-slice."""
    topology: str | None = None
    """Chips of the TPU slice, such as 4x4."""
    json: Json = None
    """Write how the job ended to this file, or with - to standard output."""


def launch(options: Annotated[Options, tyro.conf.arg(name="")]) -> int:
    """Run a command in several processes that jax joins into one job, or print a manifest for a cluster."""
    o, here = options, options.render is None
    for name in _OF_MANIFESTS if here else _OF_PROCESSES_HERE:  # an option that would have no effect
        if (value := getattr(o, name)) != getattr(Options, name):
            rule = "must come with --render" if here else f"must not come with --render {o.render}"
            raise ValueError(f"launch: --{name} {rule}; got {value}. Leave it out, or change --render.")
    job: Any = {"processes": o.processes, "devices": o.devices, "port": o.port}
    if o.render is None:
        begun = time.perf_counter()
        code = launch_here(o.command, output=o.output, grace=o.grace, restarts=o.restarts, **job)
        row = {"exit_code": code, "seconds": time.perf_counter() - begun, "processes": o.processes}
        write_json(o.json, "launch", [row], arguments=o.command)
        return code
    manifest: Any = {name: getattr(o, name) for name in _OF_MANIFESTS}
    print(render(o.render, o.command, **job, **manifest), end="")
    return 0


_OF_MANIFESTS = ("name", "image", "accelerator", "topology")
_OF_PROCESSES_HERE = ("output", "grace", "restarts", "json")
