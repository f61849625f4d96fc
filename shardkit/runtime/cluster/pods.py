"""A job as Kubernetes runs it: the pods of an indexed Job, the same as a JobSet, or as Kubeflow's TrainJob.

Exit code 75 restarts the pods of a Job and of a JobSet. Those of a TrainJob have the rules of its runtime, which are
the JobSet's where the manifest brings it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardkit.runtime.cluster.preemption import PREEMPTED
from shardkit.runtime.cluster.yaml_text import Text
from shardkit.runtime.monitor.hello import TOKEN

KUBERNETES = ("k8s", "jobset", "trainjob")
RUNTIME = "jax-distributed"  # the one for jax that Kubeflow Trainer brings
OWN = "own"  # one that the manifest brings
_RESTARTS = [
    {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
    {"name": "again", "action": "RestartJobSetAndIgnoreMaxRestarts", "onJobFailureReasons": ["BackoffLimitExceeded"]},
]
_PORT = 55527  # the port that jax itself chooses on Kubernetes
_NOTICE = 120  # seconds between SIGTERM and SIGKILL, for the last save


def documents(
    kind: str,
    words: Sequence[str],
    *,
    processes: int,
    devices: int | None,
    name: str,
    image: str,
    port: int | None,
    accelerator: str,
    topology: str | None,
    queue: str | None,
    runtime: str,
    variables: Mapping[str, str],
) -> list[dict[str, Any]]:
    """The manifest's documents; kind is one of KUBERNETES."""
    # Kueue holds a job with this label back until its queue has room for all its pods.
    labels = {} if queue is None else {"labels": {"kueue.x-k8s.io/queue-name": Text(queue)}}
    metadata = {"name": name, **labels}
    nodes = _selected_nodes(accelerator, topology)
    main: dict[str, Any] = {"image": Text(image), "command": _command(words)}
    resources = {} if accelerator == "cpu" else _resources(devices, accelerator)
    if kind == "trainjob":
        main |= {"env": _environment(variables, name)} | ({"resourcesPerNode": resources} if resources else {})
        return _train_job(metadata, {"numNodes": processes, **main}, nodes, runtime)
    host = f"{name}-workers-0-0" if kind == "jobset" else f"{name}-0"
    index = {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
    joined = {
        "JAX_COORDINATOR_ADDRESS": f"{host}.{name}:{_PORT if port is None else port}",
        "JAX_NUM_PROCESSES": str(processes),
    }
    *environment, token = _environment({**variables, **joined}, name)
    environment += [{"name": "JAX_PROCESS_ID", "valueFrom": {"fieldRef": index}}, token]
    pod = {
        "serviceAccountName": name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _NOTICE,
        **nodes,
        "containers": [{"name": "main", **main, "env": environment, **({"resources": resources} if resources else {})}],
    }
    if kind == "jobset":
        return [*_account(name), _jobset(metadata, processes, pod)]
    return [*_account(name), _service(name), _indexed(metadata, processes, pod)]


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


def _environment(variables: Mapping[str, str], name: str) -> list[dict[str, Any]]:
    """The variables of a container, and from the Secret of the job its token."""
    token = {"secretKeyRef": {"name": f"{name}-token", "key": "token"}}
    return [
        *({"name": each, "value": Text(value)} for each, value in variables.items()),
        {"name": TOKEN, "valueFrom": token},
    ]


def _command(words: Sequence[str]) -> list[Text]:
    # Kubernetes replaces $(NAME) in the words of a command, and $$ stands for one $.
    return [Text(word.replace("$", "$$")) for word in words]


def _resources(devices: int | None, accelerator: str) -> dict[str, Any]:
    return {"limits": {"nvidia.com/gpu" if accelerator == "gpu" else "google.com/tpu": devices}}


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


def _indexed(metadata: Mapping[str, Any], processes: int, pod: Mapping[str, Any]) -> dict[str, Any]:
    """A Job in which each preempted process is restarted; as all are, they connect to each other again."""
    again = {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [PREEMPTED]}}
    spec = _job(processes, {"subdomain": metadata["name"], **pod}, again)
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def _jobset(metadata: Mapping[str, Any], processes: int, pod: Mapping[str, Any]) -> dict[str, Any]:
    """A JobSet, restarted as a whole when a process was preempted or its machine was lost without an exit code."""
    workers = {"name": "workers", "replicas": 1, "template": {"spec": _job(processes, pod)}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": metadata["name"]},
            "failurePolicy": {"rules": _RESTARTS},
            "replicatedJobs": [workers],
        },
    }


def _train_job(
    metadata: Mapping[str, Any], trainer: Mapping[str, Any], nodes: Mapping[str, Any], runtime: str
) -> list[dict[str, Any]]:
    """A TrainJob; its runtime sets JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID in each pod."""
    head, pod = {"apiVersion": "trainer.kubeflow.org/v1alpha1"}, {"terminationGracePeriodSeconds": _NOTICE, **nodes}
    spec: dict[str, Any] = {"runtimeRef": {"name": runtime}, "trainer": trainer}
    job = {**head, "kind": "TrainJob", "metadata": metadata, "spec": spec}
    if runtime != OWN:
        patched = [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]
        patch = {"template": {"spec": {"replicatedJobs": patched}}}
        spec["runtimePatches"] = [{"manager": "shardkit/launch", "trainingRuntimeSpec": patch}]
        return [job]
    name, processes = metadata["name"], trainer["numNodes"]
    spec["runtimeRef"] = {"kind": "TrainingRuntime", "name": name}
    containers = [{"name": "node", "image": trainer["image"]}]
    step = {"metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}}
    workers = _job(processes, {"restartPolicy": "Never", **pod, "containers": containers})
    node = {"name": "node", "replicas": 1, "template": {**step, "spec": workers}}
    policy = {"numNodes": processes, "jax": {}}
    rules = {"failurePolicy": {"rules": _RESTARTS}, "replicatedJobs": [node]}
    own = {"mlPolicy": policy, "template": {"spec": rules}}
    return [{**head, "kind": "TrainingRuntime", "metadata": {"name": name}, "spec": own}, job]
