"""Writes the input of a scheduler: a batch script for Slurm, manifests for Kubernetes, a task for SkyPilot.

Exit code 75 means preempted and saved: the scheduler restarts the job, and it resumes. Every other failure is final.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from shardkit.runtime.cluster import skypilot
from shardkit.runtime.cluster.launch import check_counts, program
from shardkit.runtime.cluster.preemption import PREEMPTED
from shardkit.runtime.cluster.yaml_text import Text, dumped
from shardkit.runtime.monitor.hello import TOKEN
from shardkit.simulated import cpu_environment

Kind = Literal["slurm", "k8s", "jobset", "skypilot"]

_PORT = 55527  # the port that jax itself chooses on Kubernetes
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
) -> str:
    """Writes the batch script or the manifest of a job.

    Args:
        kind: "slurm" (`sbatch FILE`); "k8s", an indexed Job with its headless Service; "jobset", the same as a JobSet,
            which also restarts when a machine is lost (both `kubectl apply -f FILE`, after the command at the top of
            the file, which creates the Secret NAME-token, the job's SHARDKIT_JOB_TOKEN); "skypilot", a task for `sky
            jobs launch`, with one process on each node.
        command: the words of the command; `script.py ...` and `-m module ...` run under the `python` of the cluster.
        processes: number of processes.
        devices: devices per process: requested accelerators, or simulated CPU devices.
        name: of the job: at most 40 lower-case letters, digits and hyphens (RFC 1123; a Service begins with a letter).
        image: the container image, for Kubernetes.
        port: the coordinator's port, for Kubernetes; by default 55527. Under Slurm jax derives one from the job's id.
        accelerator: "cpu", "gpu", or on Kubernetes a Google TPU slice type such as "tpu-v5p-slice"; for SkyPilot "cpu"
            or a GPU by its name, such as "H100".
        topology: chips of the TPU slice, such as "4x4" or "2x2x4".

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
    in_jobset = kind == "jobset"
    host = f"{name}-workers-0-0" if in_jobset else f"{name}-0"
    variables |= {
        "JAX_COORDINATOR_ADDRESS": f"{host}.{name}:{_PORT if port is None else port}",
        "JAX_NUM_PROCESSES": str(processes),
    }
    secret = f"{name}-token"
    pod = {
        "serviceAccountName": name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _NOTICE,
        **_selected_nodes(accelerator, topology),
        "containers": [_container(words, image, variables, secret, _limits(devices, accelerator))],
    }
    job = [_jobset(name, processes, pod)] if in_jobset else [_service(name), _indexed(name, processes, pod)]
    documents = [*_account(name), *job]
    return _SECRET.format(secret) + dumped(*documents)


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
    tpu = accelerator.startswith("tpu-") and kind != "slurm"
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
        f"srun --kill-on-bad-exit=1 {shlex.join(words)}",
        "code=$?",
        f"# {PREEMPTED}: preempted or out of time, and saved. The job is queued again, and resumes.",
        f'if [ "$code" -eq {PREEMPTED} ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def _account(name: str) -> list[dict[str, Any]]:
    """A ServiceAccount with the two rights that jax's cluster detection needs, for a script that uses it."""
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
        {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["get"]},
    ]
    group = "rbac.authorization.k8s.io"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}},
        {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": {"name": name}, "rules": rules},
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name}],
            "roleRef": {"apiGroup": group, "kind": "Role", "name": name},
        },
    ]


def _service(name: str) -> dict[str, Any]:
    """The headless Service that gives each process a host name before it is ready, as it waits for the others."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": name},
        },
    }


def _container(
    words: Sequence[str], image: str, variables: Mapping[str, str], secret: str, limits: Mapping[str, Any]
) -> dict[str, Any]:
    index = {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
    environment: list[dict[str, Any]] = [{"name": name, "value": Text(value)} for name, value in variables.items()]
    environment.append({"name": "JAX_PROCESS_ID", "valueFrom": {"fieldRef": index}})
    environment.append({"name": TOKEN, "valueFrom": {"secretKeyRef": {"name": secret, "key": "token"}}})
    # Kubernetes replaces $(NAME) in the words of a command, and $$ stands for one $.
    command = [Text(word.replace("$", "$$")) for word in words]
    return {"name": "main", "image": Text(image), "command": command, "env": environment, **limits}


def _limits(devices: int | None, accelerator: str) -> dict[str, Any]:
    if accelerator == "cpu":
        return {}
    return {"resources": {"limits": {"nvidia.com/gpu" if accelerator == "gpu" else "google.com/tpu": devices}}}


def _selected_nodes(accelerator: str, topology: str | None) -> dict[str, Any]:
    if topology is None:
        return {}
    gke = "cloud.google.com/gke-tpu"
    return {"nodeSelector": {f"{gke}-accelerator": accelerator, f"{gke}-topology": Text(topology)}}


def _job(processes: int, pod: Mapping[str, Any], *more_rules: Mapping[str, Any]) -> dict[str, Any]:
    """The specification of an indexed Job in which every exit code except PREEMPTED is final."""
    final = {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [PREEMPTED]}}
    return {
        "completions": processes,
        "parallelism": processes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [final, *more_rules]},
        "template": {"spec": pod},
    }


def _indexed(name: str, processes: int, pod: Mapping[str, Any]) -> dict[str, Any]:
    """A Job in which each preempted process is restarted; as all are, they connect to each other again."""
    again = {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [PREEMPTED]}}
    spec = _job(processes, {"subdomain": name, **pod}, again)
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}


def _jobset(name: str, processes: int, pod: Mapping[str, Any]) -> dict[str, Any]:
    """A JobSet, restarted as a whole when a process was preempted or its machine was lost without an exit code."""
    rules = [
        {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
        {
            "name": "again",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["BackoffLimitExceeded"],
        },
    ]
    workers = {"name": "workers", "replicas": 1, "template": {"spec": _job(processes, pod)}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
            "failurePolicy": {"rules": rules},
            "replicatedJobs": [workers],
        },
    }
