"""Kubeflow's TrainJob and the queue of Kueue: checked against the models of Trainer's API and what its webhooks ask."""

import kubernetes_validate
import pytest
import yaml

from shardkit.runtime.cluster.manifests import render

WORDS = ["train.py", "--lr", "1e-3", "$(JAX_PROCESS_ID)"]
TPU = {"devices": 4, "accelerator": "tpu-v5p-slice", "topology": "2x2x3"}
CASES = [
    {},
    {"devices": 8, "accelerator": "gpu", "queue": "team-a"},
    {"runtime": "own"},
    {"runtime": "own", **TPU},
    TPU,
]
LABEL = {"kueue.x-k8s.io/queue-name": "team-a"}


def documents(kind="trainjob", **options):
    text = render(kind, WORDS, processes=3, image="me/train:1", name="run-1", **options)
    assert '#   kubectl create secret generic run-1-token --from-literal=token="$(openssl rand -hex 32)"\n' in text
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def test_the_schema_of_kubeflow_trainer():
    """A field that Trainer's API does not have would be dropped, or the whole TrainJob refused."""
    from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob  # a second to import
    from kubeflow_trainer_api.models.trainer_v1alpha1_training_runtime import TrainerV1alpha1TrainingRuntime

    for options in CASES:
        found = documents(**options)
        job = found["TrainJob"]
        assert TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job
        if "runtime" not in options:
            assert list(found) == ["TrainJob"]
            continue
        runtime = found["TrainingRuntime"]
        assert TrainerV1alpha1TrainingRuntime.from_dict(runtime).to_dict() == runtime
        (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
        # The model has no fields of what is in the Job; Trainer gives its containers the command.
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "run-1-node-0"}, **node["template"]}
        kubernetes_validate.validate(job | {"metadata": {"name": "run-1-node-0"}}, "1.37", strict=True)


@pytest.mark.check
def test_what_the_pods_of_a_trainjob_get():
    """The rules of Trainer's webhooks, which no schema has: the names "node", and a manager with a slash."""
    job = documents(devices=8, accelerator="gpu", queue="team-a")["TrainJob"]
    token = {"name": "SHARDKIT_JOB_TOKEN", "valueFrom": {"secretKeyRef": {"name": "run-1-token", "key": "token"}}}
    assert job["metadata"] == {"name": "run-1", "labels": LABEL}
    assert job["spec"]["runtimeRef"] == {"name": "jax-distributed"}
    assert job["spec"]["trainer"] == {
        "numNodes": 3,
        "image": "me/train:1",
        "command": ["python", "train.py", "--lr", "1e-3", "$$(JAX_PROCESS_ID)"],
        "env": [{"name": "PYTHONUNBUFFERED", "value": "1"}, token],
        "resourcesPerNode": {"limits": {"nvidia.com/gpu": 8}},
    }
    (patch,) = job["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert (patch["manager"], node["name"]) == ("shardkit/launch", "node")
    assert node["template"]["spec"]["template"]["spec"] == {"terminationGracePeriodSeconds": 120}
    (patch,) = documents(**TPU)["TrainJob"]["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert node["template"]["spec"]["template"]["spec"]["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "2x2x3",
    }


@pytest.mark.check
def test_its_own_runtime_restarts_as_a_jobset_does():
    """With another rule than the JobSet's, a preempted job would end, or one with a mistake run for ever."""
    found = documents(runtime="own", queue="team-a")
    job, runtime = found["TrainJob"]["spec"], found["TrainingRuntime"]["spec"]
    assert found["TrainJob"]["metadata"]["labels"] == LABEL and "labels" not in found["TrainingRuntime"]["metadata"]
    assert job["runtimeRef"] == {"kind": "TrainingRuntime", "name": "run-1"} and "runtimePatches" not in job
    assert runtime["mlPolicy"] == {"numNodes": 3, "jax": {}}
    own, jobset = runtime["template"]["spec"], documents("jobset")["JobSet"]["spec"]
    assert own["failurePolicy"] == jobset["failurePolicy"]
    (node,), (workers,) = own["replicatedJobs"], jobset["replicatedJobs"]
    assert (node["name"], node["replicas"]) == ("node", 1)
    assert node["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    node, workers = node["template"]["spec"], workers["template"]["spec"]
    pods, others = node.pop("template")["spec"], workers.pop("template")["spec"]
    assert node == workers
    assert pods.pop("containers") == [{"name": "node", "image": "me/train:1"}] and others.pop("containers")
    assert others == {"serviceAccountName": "run-1", **pods}


@pytest.mark.check
def test_the_queue_of_a_job_and_of_a_jobset():
    """Without the label on the job itself, Kueue would not see it, and it would start at once."""
    assert documents("k8s", queue="team-a")["Job"]["metadata"] == {"name": "run-1", "labels": LABEL}
    assert documents("jobset", queue="team-a")["JobSet"]["metadata"] == {"name": "run-1", "labels": LABEL}
    assert documents("jobset")["JobSet"]["metadata"] == {"name": "run-1"}


NAME = "must be at most 63 lower-case letters, digits and hyphens, with no hyphen first or last"
ON_KUBERNETES = "'k8s', 'jobset', 'trainjob'"


@pytest.mark.check
@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("trainjob", {"port": 1}, "render: port requires k8s or jobset; got 1 for trainjob. Remove port."),
        ("jobset", {"runtime": "own"}, "render: runtime requires trainjob; got 'own' for jobset. Remove runtime."),
        ("slurm", {"queue": "a"}, f"render: queue requires {ON_KUBERNETES}; got 'a' for slurm. Remove queue."),
        ("k8s", {"queue": "A b"}, f"render: queue {NAME}; got 'A b'. Pass for example 'team-a'."),
        ("k8s", {"queue": "a" * 64}, f"render: queue {NAME}; got '{'a' * 64}'. Pass for example 'team-a'."),
        ("trainjob", {"runtime": "-a"}, f"render: runtime {NAME}; got '-a'. Pass for example 'jax-distributed'."),
    ],
)
def test_errors(kind, options, message):
    with pytest.raises(ValueError) as error:
        render(kind, WORDS, processes=2, image="me/train:1", **options)
    assert str(error.value) == message
