"""Writes the input of a scheduler: a batch script for Slurm, or the manifest of a JobSet for Kubernetes.

Exit code 75 means preempted and saved, 76 that another process died or its machine does not answer: the scheduler
restarts the job, and it resumes. Every other failure is final.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import yaml

from shardkit.jobs.launch import check_counts, find_program
from shardkit.meshes.simulated import cpu_environment
from shardkit.runtime.channel.place import TOKEN
from shardkit.runtime.channel.wire import LOST
from shardkit.runtime.cluster.preemption import PREEMPTED

Kind = Literal["slurm", "jobset"]

_NOTICE = 120  # seconds between SIGTERM and SIGKILL, for the last save
_RESTARTS = 100  # of a job whose machines keep getting lost
_PORT = 55527  # the port that jax itself chooses on Kubernetes
# Longer names would not leave room for what Kubernetes adds: -workers-0, the index of the process and five letters.
_LONGEST_NAME = 40
_SECRET = """\
# Create the secret that identifies the processes of the job once; it is in no file:
#   kubectl create secret generic {}-token --from-literal=token="$(openssl rand -hex 32)"
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
    """The text of the batch script or the manifest of a job; `shardkit launch --help` has all options.

    Args:
        kind: "slurm" (`sbatch FILE`), or "jobset" (`kubectl apply -f FILE`, after the command at the top of the file,
            which creates the Secret NAME-token, the job's SHARDKIT_JOB_TOKEN).
        command: the words of the command; `script.py ...` and `-m module ...` run under the `python` of the cluster.
        name: of the job: at most 40 lower-case letters, digits and hyphens (RFC 1123; a Service begins with a letter).
        port: the coordinator's port, for a JobSet; by default 55527. Under Slurm jax derives one from the job's id.

    Raises:
        ValueError: a name, count, port, word or choice that the scheduler would reject or misread.
    """
    words = find_program(command, python="python")
    check_counts("render", processes=processes, devices=devices, port=port)
    _check_name(name)
    _check_words([*words, image or ""])
    _check_devices(kind, processes, devices, accelerator, topology)
    if port is not None and kind != "jobset":
        raise ValueError(f"render: port requires jobset; got {port!r} for {kind}. Remove port.")
    if kind == "slurm":
        return _render_slurm(words, processes, devices, name, accelerator)
    if not image or image.split() != [image]:
        raise ValueError(
            f"render: image must be the name of a container image for {kind}; got {image!r}. Pass for example "
            "image='ghcr.io/me/train:1'."
        )
    variables = _make_variables(devices, accelerator)
    variables["JAX_COORDINATOR_ADDRESS"] = f"{name}-workers-0-0.{name}:{port or _PORT}"
    variables["JAX_NUM_PROCESSES"] = str(processes)
    container = _make_container(words, image, _make_environment(variables, name), devices, accelerator)
    pod = _make_pod(name, container, accelerator, topology)
    documents = [*_make_account(name), _make_jobset(name, processes, pod)]
    return _SECRET.format(name) + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=math.inf)


class _Text(str):
    """Text that is written in quotes: YAML parsers differ on which plain words are numbers (1e-3, 1_000, 12:30)."""


class _Dumper(yaml.SafeDumper):
    """Writes `_Text` in quotes, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: _Text) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')


_Dumper.add_representer(_Text, _represent_text)


def _check_name(name: str) -> None:
    """Refuses what is no name of a Kubernetes object and of a Service."""
    if len(name) > _LONGEST_NAME or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        raise ValueError(
            f"render: name must be at most {_LONGEST_NAME} lower-case letters, digits and hyphens, begin with a letter "
            f"and not end with a hyphen; got {name!r}. Pass for example 'train-1'."
        )


def _check_words(words: Sequence[str]) -> None:
    """Refuses words that are no text: neither YAML nor a shell script can hold them."""
    for word in words:
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            raise ValueError(
                f"render: every word of the command must be UTF-8; got {word!r}. Rename the file or option."
            )


def _check_devices(kind: Kind, processes: int, devices: int | None, accelerator: str, topology: str | None) -> None:
    """Refuses accelerators that the scheduler does not have, and numbers of devices that do not fit them."""
    is_tpu = accelerator.startswith("tpu-") and kind == "jobset"
    if accelerator not in ("cpu", "gpu") and not is_tpu:
        raise ValueError(
            "render: accelerator must be 'cpu', 'gpu' or for a JobSet a TPU slice such as 'tpu-v5p-slice'; got "
            f"{accelerator!r} for {kind}. Pass one of these."
        )
    if accelerator != "cpu" and devices is None:
        raise ValueError(
            f"render: devices must be given with accelerator {accelerator!r}; got none. Pass the number per process."
        )
    if topology is not None and not is_tpu:
        raise ValueError(
            f"render: topology requires a TPU slice in a JobSet; got {topology!r} with accelerator {accelerator!r} for "
            f"{kind}. Remove topology."
        )
    if is_tpu:
        chips = _count_chips(topology or "")
        if chips != processes * (devices or 0):
            raise ValueError(
                "render: topology must be the shape of a slice of processes x devices chips, such as '4x4'; got "
                f"{topology!r} for {processes} x {devices}. Pass numbers whose product is the chips of topology."
            )


def _count_chips(topology: str) -> int:
    """The chips of a slice of this shape: of '2x2x4' 16; 0 for what is no shape."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", topology):
        return 0
    return math.prod(map(int, topology.split("x")))


def _make_variables(devices: int | None, accelerator: str) -> dict[str, str]:
    """The environment variables that all processes have in common, under each scheduler."""
    variables = {"PYTHONUNBUFFERED": "1"}
    if accelerator == "cpu" and devices is not None:
        variables["JAX_PLATFORMS"] = "cpu"
        variables["JAX_NUM_CPU_DEVICES"] = str(devices)
        # The number of cores here says nothing about the machines of the job.
        variables["NPROC"] = cpu_environment(devices, {"NPROC": "1"})["NPROC"]
    return variables


def _make_environment(variables: Mapping[str, str], name: str) -> list[dict[str, Any]]:
    """The variables of a container; its index is an annotation of its pod, and the token a Secret."""
    environment: list[dict[str, Any]] = []
    for variable, value in variables.items():
        environment.append({"name": variable, "value": _Text(value)})
    index = {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
    environment.append({"name": "JAX_PROCESS_ID", "valueFrom": {"fieldRef": index}})
    token = {"secretKeyRef": {"name": f"{name}-token", "key": "token"}}
    environment.append({"name": TOKEN, "valueFrom": token})
    return environment


def _make_container(
    words: Sequence[str], image: str, environment: list[dict[str, Any]], devices: int | None, accelerator: str
) -> dict[str, Any]:
    """The container of a process, with its accelerators."""
    # Kubernetes replaces $(NAME) in the words of a command, and $$ stands for one $.
    command = [_Text(word.replace("$", "$$")) for word in words]
    container: dict[str, Any] = {"name": "main", "image": _Text(image), "command": command, "env": environment}
    if accelerator == "gpu":
        container["resources"] = {"limits": {"nvidia.com/gpu": devices}}
    elif accelerator != "cpu":
        container["resources"] = {"limits": {"google.com/tpu": devices}}
    return container


def _make_pod(name: str, container: dict[str, Any], accelerator: str, topology: str | None) -> dict[str, Any]:
    """A pod of one process, on a node of the TPU slice if there is one."""
    pod: dict[str, Any] = {
        "serviceAccountName": name,
        "restartPolicy": "Never",  # one process alone cannot join a job that runs: the JobSet restarts all
        "terminationGracePeriodSeconds": _NOTICE,
        "containers": [container],
    }
    if topology is not None:
        pod["nodeSelector"] = {
            "cloud.google.com/gke-tpu-accelerator": accelerator,
            "cloud.google.com/gke-tpu-topology": _Text(topology),
        }
    return pod


def _make_account(name: str) -> list[dict[str, Any]]:
    """A ServiceAccount with the two rights that jax's cluster detection needs, for a script that uses it."""
    group = "rbac.authorization.k8s.io"
    metadata = {"metadata": {"name": name}}
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
        {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["get"]},
    ]
    account = {"kind": "ServiceAccount", "name": name}
    role = {"apiGroup": group, "kind": "Role", "name": name}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", **metadata},
        {"apiVersion": f"{group}/v1", "kind": "Role", **metadata, "rules": rules},
        {"apiVersion": f"{group}/v1", "kind": "RoleBinding", **metadata, "subjects": [account], "roleRef": role},
    ]


def _make_jobset(name: str, processes: int, pod: Mapping[str, Any]) -> dict[str, Any]:
    """A JobSet, which restarts after PREEMPTED, LOST or no code, as of a lost machine; other codes are final.

    Not so of a pod that Kubernetes evicts, as for a drain: before its first save point it ends with the code of a
    signal.
    """
    # The rules of a pod that failed, in this order. What no rule names counts against backoffLimit, which is 0: the Job
    # fails for BackoffLimitExceeded, and the JobSet starts all processes again.
    evicted = {"action": "Count", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    final = {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [PREEMPTED, LOST]}}
    job = {
        "completions": processes,
        "parallelism": processes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [evicted, final]},
        "template": {"spec": pod},
    }
    rules = [
        {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
        {"name": "again", "action": "RestartJobSet", "onJobFailureReasons": ["BackoffLimitExceeded"]},
    ]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
            "failurePolicy": {"maxRestarts": _RESTARTS, "rules": rules},
            "replicatedJobs": [{"name": "workers", "replicas": 1, "template": {"spec": job}}],
        },
    }


def _render_slurm(words: Sequence[str], processes: int, devices: int | None, name: str, accelerator: str) -> str:
    """A batch script, which starts the processes, and requeues the job if it was preempted or lost a process."""
    options = [f"--job-name={name}", f"--ntasks={processes}"]
    variables = _make_variables(devices, accelerator)
    if accelerator == "gpu":
        options.append(f"--gpus-per-task={devices}")
        # Under Slurm jax would use one device per process, the one with the process's index on its machine.
        numbers = range(devices or 0)
        variables["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, numbers))
    # A requeued job has the same number, and would write over the output of its first run.
    options += ["--requeue", "--open-mode=append", f"--signal=TERM@{_NOTICE}"]
    lines = ["#!/bin/bash"]
    for option in options:
        lines.append(f"#SBATCH {option}")
    lines.append("")
    lines.append("# jax reads the coordinator, the number of processes and each one's index from Slurm's variables.")
    for variable, value in variables.items():
        lines.append(f"export {variable}={value}")
    lines += [
        "# The secret that identifies the processes of the job.",
        f"export {TOKEN}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')",
        "# srun returns the highest code of all processes: a fatal signal (132 to 139) of one would hide what the",
        "# others say of it, and so would SIGTERM (143), by which srun ends them.",
        f"each='trap : TERM; \"$@\"; code=$?; case $code in 13[2-9]) code={LOST} ;; 143) code=1 ;; esac; exit $code'",
        f'srun --kill-on-bad-exit=1 bash -c "$each" shardkit {shlex.join(words)}',
        "code=$?",
        f"# {PREEMPTED}: preempted or out of time, and saved. {LOST}: a process or a machine was lost. It resumes.",
        'case "$code" in',
        f'{PREEMPTED}) scontrol requeue "$SLURM_JOB_ID" ;;',
        f'{LOST}) [ "${{SLURM_RESTART_COUNT:-0}}" -ge {_RESTARTS} ] || scontrol requeue "$SLURM_JOB_ID" ;;',
        "esac",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"
