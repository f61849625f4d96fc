"""Writes the input of a scheduler: a batch script (Slurm), manifests (Kubernetes, Kubeflow), a task (SkyPilot).

Exit code 75 means preempted and saved: the scheduler restarts the job, and it resumes. Every other failure is final.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from typing import Any, Literal

from shardkit._check import quoted
from shardkit.runtime.cluster import pods, skypilot
from shardkit.runtime.cluster.launch import check_counts, program
from shardkit.runtime.cluster.memory import JOB
from shardkit.runtime.cluster.preemption import PREEMPTED
from shardkit.runtime.cluster.yaml_text import Text, dumped
from shardkit.runtime.monitor.hello import TOKEN
from shardkit.simulated import cpu_environment

Kind = Literal["slurm", "k8s", "jobset", "trainjob", "skypilot"]

_NOTICE = 120  # seconds between SIGTERM and SIGKILL, for the last save
# Longer names would not leave room for what Kubernetes adds: -workers-0, the index of the process and five letters.
_LONGEST_NAME = 40
_SECRET = """\
# Create the secret that identifies the processes of the job once; it is in no file:
#   kubectl create secret generic {} --from-literal=token="$(openssl rand -hex 32)"
"""


def render(
    kind: Kind,
    command: Sequence[str],
    *,
    processes: int,
    devices: int | None = None,
    name: str = "shardkit",
    image: str | None = None,
    port: int | None = None,
    accelerator: str = "cpu",
    topology: str | None = None,
    queue: str | None = None,
    runtime: str = pods.RUNTIME,
) -> str:
    """Writes the batch script or the manifest of a job.

    Args:
        kind: "slurm" (`sbatch FILE`); "k8s", an indexed Job with its headless Service; "jobset", the same as a JobSet,
            which also restarts when a machine is lost (both `kubectl apply -f FILE`, after the command at the top of
            the file, which creates the Secret NAME-token, the job's SHARDKIT_JOB_TOKEN); "trainjob", the same for
            Kubeflow Trainer 2.3 or newer; "skypilot", a task for `sky jobs launch`, with one process on each node.
        command: the words of the command; `script.py ...` and `-m module ...` run under the `python` of the cluster.
        processes: number of processes.
        devices: devices per process: requested accelerators, or simulated CPU devices.
        name: of the job: at most 40 lower-case letters, digits and hyphens (RFC 1123; a Service begins with a letter).
        image: the container image, for Kubernetes.
        port: the coordinator's port, for "k8s" and "jobset"; by default 55527. Under Slurm jax derives one from the
            job's id, and Kubeflow Trainer takes 29500.
        accelerator: "cpu", "gpu", or on Kubernetes a Google TPU slice type such as "tpu-v5p-slice"; for SkyPilot "cpu"
            or a GPU by its name, such as "H100".
        topology: chips of the TPU slice, such as "4x4" or "2x2x4".
        queue: on Kubernetes the queue of Kueue that the job waits in, a LocalQueue.
        runtime: for "trainjob" the ClusterTrainingRuntime that the job uses; "own" for one that is printed with it and
            restarts the job as a JobSet does.

    Returns:
        The text of the file.

    Raises:
        ValueError: a name, count, port, word or choice that the scheduler would reject or misread.
    """
    words = program(command, python="python")
    check_counts("render", processes=processes, devices=devices, port=port)
    _check_name(name)
    for word in (*words, image or ""):
        _check_text(word)
    _check_devices(kind, processes, devices, accelerator, topology)
    _check_kubernetes(kind, port, queue, runtime)
    variables = _variables(devices, accelerator)
    if kind == "slurm":
        return _slurm(words, processes, devices, name, accelerator)
    if kind == "skypilot":
        sizes: Any = {"processes": processes, "devices": devices, "name": name}
        text = {each: Text(value) for each, value in variables.items()}
        made = skypilot.task(words, **sizes, image=image, accelerator=accelerator, variables=text)
        return skypilot.HEAD.format(token=TOKEN) + dumped(made)
    if not image or image.split() != [image]:
        raise ValueError(
            f"render: image must be the name of a container image for {kind}; got {image!r}. Pass for example "
            "image='ghcr.io/me/train:1'."
        )
    chosen: Any = {"accelerator": accelerator, "topology": topology, "queue": queue, "runtime": runtime, "port": port}
    sizes = {"processes": processes, "devices": devices, "name": name, "image": image}
    return _SECRET.format(f"{name}-token") + dumped(
        *pods.documents(kind, words, **sizes, **chosen, variables=variables)
    )


def _check_name(name: str) -> None:
    if len(name) > _LONGEST_NAME or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        raise ValueError(
            f"render: name must be at most {_LONGEST_NAME} lower-case letters, digits and hyphens, begin with a letter "
            f"and not end with a hyphen; got {name!r}. Pass for example 'train-1'."
        )


def _check_text(word: str) -> None:
    try:
        word.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"render: every word of the command must be UTF-8; got {word!r}. Rename the file or option."
        ) from None


def _check_devices(kind: Kind, processes: int, devices: int | None, accelerator: str, topology: str | None) -> None:
    if kind == "skypilot" and accelerator != "cpu":
        skypilot.check_accelerator(accelerator, devices)
    tpu = accelerator.startswith("tpu-") and kind in pods.KUBERNETES
    if accelerator not in ("cpu", "gpu") and not tpu and kind != "skypilot":
        raise ValueError(
            "render: accelerator must be 'cpu', 'gpu' or on Kubernetes a TPU slice such as 'tpu-v5p-slice'; got "
            f"{accelerator!r} for {kind}. Pass one of these."
        )
    if accelerator != "cpu" and devices is None:
        raise ValueError(
            f"render: devices must be given with accelerator {accelerator!r}; got none. Pass the number per process."
        )
    if topology is not None and not tpu:
        raise ValueError(
            f"render: topology requires a TPU slice on Kubernetes; got {topology!r} with accelerator {accelerator!r} "
            f"for {kind}. Remove topology."
        )
    if tpu:
        is_shape = re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", topology or "")
        chips = math.prod(map(int, (topology or "").split("x"))) if is_shape else 0
        if chips != processes * (devices or 0):
            raise ValueError(
                "render: topology must be the shape of a slice of processes x devices chips, such as '4x4'; got "
                f"{topology!r} for {processes} x {devices}. Correct topology, processes or devices."
            )


def _check_kubernetes(kind: Kind, port: int | None, queue: str | None, runtime: str) -> None:
    if port is not None and kind not in ("k8s", "jobset"):
        raise ValueError(f"render: port requires k8s or jobset; got {port} for {kind}. Remove port.")
    if runtime != pods.RUNTIME and kind != "trainjob":
        raise ValueError(f"render: runtime requires trainjob; got {runtime!r} for {kind}. Remove runtime.")
    if queue is not None and kind not in pods.KUBERNETES:
        raise ValueError(f"render: queue requires {quoted(pods.KUBERNETES)}; got {queue!r} for {kind}. Remove queue.")
    for what, value, example in (("queue", queue, "team-a"), ("runtime", runtime, pods.RUNTIME)):
        if value is not None and (len(value) > 63 or not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", value)):
            raise ValueError(
                f"render: {what} must be at most 63 lower-case letters, digits and hyphens, with no hyphen first or "
                f"last; got {value!r}. Pass for example {example!r}."
            )


def _variables(devices: int | None, accelerator: str) -> dict[str, str]:
    if accelerator != "cpu" or devices is None:
        return {"PYTHONUNBUFFERED": "1"}
    # The number of cores here says nothing about the machines of the job.
    threads = cpu_environment(devices, {"NPROC": "1"})["NPROC"]
    simulated = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "NPROC": threads}
    return {"PYTHONUNBUFFERED": "1"} | simulated


def _slurm(words: Sequence[str], processes: int, devices: int | None, name: str, accelerator: str) -> str:
    options = [
        f"--job-name={name}",
        f"--ntasks={processes}",
        "--requeue",
        "--open-mode=append",
        f"--signal=TERM@{_NOTICE}",
    ]
    variables = _variables(devices, accelerator)
    if accelerator == "gpu":
        options.insert(2, f"--gpus-per-task={devices}")
        # Under Slurm jax would use one device per process, the one with the process's index on its machine.
        variables["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, range(devices or 0)))
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in options),
        "",
        "# jax reads the coordinator, the number of processes and each one's index from Slurm's variables.",
        *(f"export {variable}={value}" for variable, value in variables.items()),
        "# The secret that identifies the processes of the job.",
        f"export {TOKEN}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')",
        "# Its name, the same when it is queued again, by which it finds its snapshots in memory.",
        f"export {JOB}=${{{JOB}:-$SLURM_JOB_ID}}",
        f"srun --kill-on-bad-exit=1 {shlex.join(words)}",
        "code=$?",
        f"# {PREEMPTED}: preempted or out of time, and saved. The job is queued again, and resumes.",
        f'if [ "$code" -eq {PREEMPTED} ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"
