"""`shardkit launch -n 4 -- train.py`: starts a job of several processes here, or prints a manifest for a cluster."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from shardkit.cli.options import Json, Optional, show_default
from shardkit.cli.output import write_json

EXAMPLES = {
    "shardkit launch -n 4 --devices 2 -- train.py --steps 100": "four processes here",
    "shardkit launch -n 2 --restarts 5 -- train.py": "started again when a process dies",
    "shardkit launch -n 8 --render slurm -- train.py": "print a batch script",
}


@dataclass(frozen=True)
class Options:
    """Options of `shardkit launch`."""

    command: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        tyro.conf.arg(metavar="-- COMMAND ...", help_behavior_hint=show_default),
    ] = ()
    """The program to run, after --: a script, -m and a module, or any program, with its arguments."""
    processes: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 1
    """Processes in the job."""
    devices: Optional[int] = None
    """Devices per process: simulated CPU devices, or with --accelerator the devices that the cluster allocates to
    it."""
    output: Optional[Path] = None
    """Directory for the standard output and standard error of each process."""
    grace: float = 10.0
    """Seconds between the end of the job (a failed process, Ctrl-C or SIGTERM) and the kill of all other processes."""
    restarts: int = 0
    """Start a failed job again, at most this many times. Your program resumes from its checkpoint."""
    port: Optional[int] = None
    """The coordinator's port; by default a free port, and with --render jobset 55527."""
    render: Optional[Literal["slurm", "jobset"]] = None
    """Print a batch script or a manifest, and run nothing."""
    name: str = "shardkit"
    """Job name in the manifest."""
    image: Optional[str] = None
    """Container image in the manifest (jobset)."""
    accelerator: str = "cpu"
    """In the manifest: cpu, gpu, or a TPU slice type on Google's clusters, such as tpu-v5p-slice."""
    topology: Optional[str] = None
    """Chips of the TPU slice, such as 4x4."""
    json: Json = None
    """Write the result of the job to this file, or with - to standard output."""


_ONLY_IN_MANIFESTS = ("name", "image", "accelerator", "topology")
_ONLY_HERE = ("output", "grace", "restarts", "json")


def launch(options: Options) -> int:
    """Run a command in several processes that jax joins into one job, or print a manifest for a cluster."""
    from shardkit.jobs.launch import launch as run_job
    from shardkit.jobs.manifests import render

    _refuse_without_effect(options)
    job: dict[str, Any] = {"processes": options.processes, "devices": options.devices, "port": options.port}
    if options.render is not None:
        manifest = {name: getattr(options, name) for name in _ONLY_IN_MANIFESTS}
        print(render(options.render, options.command, **job, **manifest), end="")
        return 0
    start = time.perf_counter()
    code = run_job(options.command, output=options.output, grace=options.grace, restarts=options.restarts, **job)
    seconds = time.perf_counter() - start
    row = {"exit_code": code, "seconds": seconds, "processes": options.processes}
    write_json(options.json, "launch", [row], arguments=options.command)
    return code


def _refuse_without_effect(options: Options) -> None:
    """Refuses an option of manifests for a job that runs here, and the other way round."""
    rule = "must come with --render"
    names = _ONLY_IN_MANIFESTS
    if options.render is not None:
        rule = f"must not come with --render {options.render}"
        names = _ONLY_HERE
    for name in names:
        value = getattr(options, name)
        # A dataclass keeps the default of a field as an attribute of the class.
        if value != getattr(Options, name):
            raise ValueError(f"launch: --{name} {rule}; got {value}. Leave it out, or change --render.")
