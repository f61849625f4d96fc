"""The page about engines: what it shows for each is held against the schema of what reads it."""

import copy
import re
from pathlib import Path

import pytest
import yaml

from support import schemas

pytestmark = pytest.mark.check
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "which_engine.md"
TOKEN = {"name": "SHARDKIT_JOB_TOKEN", "valueFrom": {"secretKeyRef": {"name": "train-token", "key": "token"}}}


@pytest.fixture(scope="module")
def documents():
    blocks = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.S | re.M)
    found = [document for block in blocks for document in yaml.safe_load_all(block)]
    return {document.get("kind", "task"): document for document in found}


def test_manifests_of_kubernetes_follow_its_schemas(documents):
    assert set(documents) == {"Service", "Job", "TrainJob", "task"}
    schemas.validate(documents["Service"], documents["Job"], documents["TrainJob"])


def test_the_processes_of_a_kubernetes_job_find_each_other(documents):
    """A process waits for the others before it is ready, so the Service must name it; 75 alone restarts it."""
    service, spec = documents["Service"], documents["Job"]["spec"]
    pod = spec["template"]["spec"]
    (main,) = pod["containers"]
    name = documents["Job"]["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"] == name
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    address, size, index, token = main["env"]
    assert address == {"name": "JAX_COORDINATOR_ADDRESS", "value": f"{name}-0.{name}:55527"}
    assert size == {"name": "JAX_NUM_PROCESSES", "value": str(spec["completions"])}
    assert index["name"] == "JAX_PROCESS_ID" and token == TOKEN
    assert spec["completions"] == spec["parallelism"] and spec["completionMode"] == "Indexed"
    actions = [(rule["action"], *rule["onExitCodes"].values()) for rule in spec["podFailurePolicy"]["rules"]]
    assert actions == [("FailJob", "NotIn", [75, 76]), ("Ignore", "In", [75, 76])]
    assert pod["restartPolicy"] == "Never" and spec["backoffLimit"] == 0


def test_what_the_webhooks_of_kubeflow_ask(documents):
    """Rules that no schema has: the names "node", and a manager with a slash."""
    spec = documents["TrainJob"]["spec"]
    (patch,) = spec["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert "/" in patch["manager"] and node["name"] == "node"
    assert node["template"]["spec"]["template"]["spec"] == {"terminationGracePeriodSeconds": 120}
    assert spec["runtimeRef"] == {"name": "jax-distributed"} and spec["trainer"]["env"] == [TOKEN]


def test_a_task_of_skypilot(documents):
    """Its keys are those of SkyPilot 0.14's schema, which validated them; the secret is not in the file."""
    task = documents["task"]
    run = task.pop("run")
    assert task == {
        "name": "train",
        "num_nodes": 2,
        "resources": {
            "accelerators": "H100:8",
            "job_recovery": {"max_restarts_on_errors": 0, "recover_on_exit_codes": [75, 76]},
        },
        "secrets": {"SHARDKIT_JOB_TOKEN": None},
    }
    assert run.splitlines()[-1] == "python train.py /checkpoints"
    assert re.findall(r"(JAX_\w+)=", run) == ["JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"]


def mappings(document, path=()):
    """The path of each object that has a schema; labels and limits may hold any name."""
    if isinstance(document, dict):
        yield path
        for name, value in document.items():
            if name not in ("labels", "limits", "selector"):
                yield from mappings(value, (*path, name))
    elif isinstance(document, list):
        for index, value in enumerate(document):
            yield from mappings(value, (*path, index))


@pytest.mark.parametrize("kind", ["Service", "Job", "TrainJob"])
def test_a_wrong_field_is_found_wherever_it_stands(documents, kind):
    """A schema that drops what it does not know would pass any page."""
    schemas.validate(documents[kind])
    for path in mappings(documents[kind]):
        wrong = copy.deepcopy(documents[kind])
        here = wrong
        for each in path:
            here = here[each]
        here["sharkit"] = "1"
        try:
            schemas.validate(wrong)
        except Exception:  # each schema has its own
            continue
        pytest.fail(f"{kind}: sharkit was not found at {path}")
