"""What is rendered: read by a parser, held against the schemas of JobSet and Kubernetes, and run where possible."""

import os
import re
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import pytest
import yaml

from shardkit.jobs.manifests import render
from support import schemas
from support.commands import environment
from support.refusals import value_error

CASES = {
    "plain": {},
    "simulated": {"devices": 2},
    "gpu": {"devices": 8, "accelerator": "gpu", "name": "run-1", "port": 4000},
    "tpu": {"devices": 4, "accelerator": "tpu-v5p-slice", "topology": "2x2x3"},
}
ARGUMENTS = ["--lr", "1e-3", "12:30", "yes", "a b", "it's", '"$HOME"']
ARGUMENTS += ["$(JAX_PROCESS_ID)", "$$", "a\nb: c", "é\x7f", ""]
WORDS = ["train.py", *ARGUMENTS]
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


def documents(command=WORDS, **options):
    found = list(yaml.safe_load_all(render("jobset", command, processes=3, image="me/train:1", **options)))
    return {document["kind"]: document for document in found}


def job_spec(found):
    (jobs,) = found["JobSet"]["spec"]["replicatedJobs"]
    return jobs["template"]["spec"]


def container(found):
    (only,) = job_spec(found)["template"]["spec"]["containers"]
    return only


def expanded(word, variables):
    """What Kubernetes makes of a word of a command."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda m: "$" if m[0] == "$$" else variables.get(m[1], m[0]), word)


# proves S108
@pytest.mark.parametrize("case", CASES)
def test_a_manifest_follows_the_schemas(case):
    found = documents(**CASES[case])
    assert list(found) == ["ServiceAccount", "Role", "RoleBinding", "JobSet"]
    schemas.validate(*found.values())


# proves S108
def test_what_the_processes_of_a_manifest_get():
    found = documents(**CASES["gpu"])
    spec, main = job_spec(found), container(found)
    numbers = (spec["completions"], spec["parallelism"], spec["completionMode"], spec["backoffLimit"])
    assert numbers == (3, 3, "Indexed", 0)
    variables = {each["name"]: each.get("value", each.get("valueFrom")) for each in main["env"]}
    assert variables == {
        "PYTHONUNBUFFERED": "1",
        "JAX_COORDINATOR_ADDRESS": "run-1-workers-0-0.run-1:4000",
        "JAX_NUM_PROCESSES": "3",
        "JAX_PROCESS_ID": {
            "fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
        },
        "SHARDKIT_JOB_TOKEN": {"secretKeyRef": {"name": "run-1-token", "key": "token"}},
    }
    assert main["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert main["image"] == "me/train:1"
    assert [expanded(word, {"JAX_PROCESS_ID": "2"}) for word in main["command"]] == ["python", *WORDS]
    text = render("jobset", WORDS, processes=3, image="me/train:1")
    assert "#   kubectl create secret generic shardkit-token --from-literal=token=" in text  # and no secret itself
    for word in ("1e-3", "12:30", "yes", "3"):  # plain, other readers than this one take them for something else
        assert re.search(rf'(-|value:) "{word}"\n', text)
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never" and pod["serviceAccountName"] == "run-1"
    assert pod["terminationGracePeriodSeconds"] == 120  # by default 30, in which a last save may not end
    assert {found[part]["metadata"]["name"] for part in found} == {"run-1"}
    network = found["JobSet"]["spec"]["network"]
    assert network == {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": "run-1"}


def test_simulated_devices_tpu_slices_and_what_is_started_again():  # proves S108
    variables = {each["name"]: each.get("value") for each in container(documents(devices=2))["env"]}
    assert variables.items() >= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "NPROC": "8"}.items()
    found = documents(**CASES["tpu"])
    assert container(found)["resources"] == {"limits": {"google.com/tpu": 4}}
    assert job_spec(found)["template"]["spec"]["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "2x2x3",
    }
    # proves S108
    found = documents()
    # What no rule names counts against the limit, which is 0. An evicted pod does, whatever the code it ends with: a
    # drain before the first save point was final.
    evicted, final = job_spec(found)["podFailurePolicy"]["rules"]
    assert evicted == {"action": "Count", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert final == {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [75, 76]}}
    policy = {
        rule["onJobFailureReasons"][0]: rule["action"] for rule in found["JobSet"]["spec"]["failurePolicy"]["rules"]
    }
    assert policy == {"PodFailurePolicy": "FailJobSet", "BackoffLimitExceeded": "RestartJobSet"}
    assert found["JobSet"]["spec"]["failurePolicy"]["maxRestarts"] == 100


SRUN = """#!/bin/sh
[ "$1 ${{#SHARDKIT_JOB_TOKEN}}" = "--kill-on-bad-exit=1 64" ] || exit 99
shift
highest=0
for code in {codes}; do
  CODE=$code "$@"
  code=$?
  [ $code -le $highest ] || highest=$code
done
exit $highest
"""
# A process of the job: it prints its words, and ends with $CODE, of 128 and more by a signal.
PYTHON = """#!{python}
import os, sys
code = int(os.environ["CODE"])
print([sys.argv[1:], os.environ.get("JAX_LOCAL_DEVICE_IDS")], flush=True)
if 128 < code < 160:
    os.kill(os.getpid(), code - 128)
sys.exit(code)
"""


def batch(script, directory, codes=(0,), starts=0):
    """Runs a batch script with an srun whose processes, one after the other, end so; it returns the highest code."""
    programs = {"srun": SRUN.format(codes=" ".join(map(str, codes)))}
    programs |= {"python": PYTHON.format(python=sys.executable), "scontrol": '#!/bin/sh\necho "scontrol $@"\n'}
    for name, text in programs.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    environ = {"PATH": f"{directory}:{os.environ['PATH']}", "SLURM_JOB_ID": "17", "PYTHONUTF8": "1"}
    environ |= {"SLURM_RESTART_COUNT": str(starts)} if starts else {}
    return subprocess.run(["bash"], input=script, env=environ, capture_output=True, encoding="utf-8", timeout=600)


def test_a_batch_script_runs(tmp_path):
    script = render("slurm", WORDS, processes=4, devices=2, accelerator="gpu", name="run-1")
    options = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    assert options[:3] == ["--job-name=run-1", "--ntasks=4", "--gpus-per-task=2"]
    assert options[3:] == ["--requeue", "--open-mode=append", "--signal=TERM@120"]
    said = f"{[WORDS, '0,1']}\n"
    again = "scontrol requeue 17\n"
    for codes, starts, more, code in (
        ([0], 0, "", 0),
        ([70], 0, "", 70),
        ([75], 0, again, 75),
        ([75], 100, again, 75),
        ([76], 99, again, 76),
        ([76], 100, "", 76),
        ([137, 76], 0, again, 76),  # killed: the highest code hid what the other one said, and the job ended
        ([76, 139], 0, again, 76),  # a segmentation fault
        ([134, 143], 99, again, 76),  # by SIGTERM, srun ended the other one
        ([137, 76], 100, "", 76),
        ([1, 143, 70], 0, "", 70),
        ([143], 0, "", 1),
        ([255, 76], 0, "", 255),
    ):
        done = batch(script, tmp_path, codes, starts)
        assert (done.stdout, done.returncode) == (said * len(codes) + more, code), codes
        assert not done.stderr or max(codes) > 128  # where the shell tells of the signal
    assert "export JAX_PLATFORMS=cpu\nexport JAX_NUM_CPU_DEVICES=2\n" in render("slurm", WORDS, processes=4, devices=2)


@hypothesis.given(words=st.lists(TEXT, max_size=4))
@hypothesis.example(words=ARGUMENTS)
def test_words_survive(words, tmp_path_factory):  # proves S108
    main = container(documents(["train.py", *words]))
    assert [expanded(word, {"JAX_PROCESS_ID": "2"}) for word in main["command"]] == ["python", "train.py", *words]
    done = batch(render("slurm", ["train.py", *words], processes=1), tmp_path_factory.mktemp("batch"))
    assert done.stdout == f"{[['train.py', *words], None]}\n"


NAME = (
    "render: name must be at most 40 lower-case letters, digits and hyphens, begin with a letter and not end with a "
    "hyphen; got {!r}. Pass for example 'train-1'."
)
IMAGE = (
    "render: image must be the name of a container image for {}; got {!r}. Pass for example image='ghcr.io/me/train:1'."
)
ACCELERATOR = (
    "render: accelerator must be 'cpu', 'gpu' or for a JobSet a TPU slice such as 'tpu-v5p-slice'; got {!r} for {}. "
    "Pass one of these."
)
SHAPE = (
    "render: topology must be the shape of a slice of processes x devices chips, such as '4x4'; got {!r} for 4 x {}. "
    "Pass numbers whose product is the chips of topology."
)
NAMES = ("Run", "1st", "a_b", "a-", "", "a" * 41, "a\n", "é")
SHAPES = (None, "4x5", "4by4", "0x4", "16", "4x4\n")
ERRORS = {
    "render: processes must be at least 1; got 0. Pass processes=1 or more.": ("jobset", {"processes": 0}),
    "render: port must be from 1 to 65535; got 65536. Leave it out, or pass one above 1023.": (
        "jobset",
        {"port": 65536},
    ),
    IMAGE.format("jobset", None): ("jobset", {"image": None}),
    IMAGE.format("jobset", "a b"): ("jobset", {"image": "a b"}),
    ACCELERATOR.format("fpga", "jobset"): ("jobset", {"accelerator": "fpga", "devices": 1}),
    ACCELERATOR.format("tpu-v5p-slice", "slurm"): ("slurm", {"accelerator": "tpu-v5p-slice", "devices": 1}),
    "render: devices must be given with accelerator 'gpu'; got none. Pass the number per process.": (
        "jobset",
        {"accelerator": "gpu"},
    ),
    "render: topology requires a TPU slice in a JobSet; got '4x4' with accelerator 'gpu' for jobset. Remove "
    "topology.": ("jobset", {"accelerator": "gpu", "devices": 4, "topology": "4x4"}),
    "render: port requires jobset; got 1 for slurm. Remove port.": ("slurm", {"port": 1}),
    "render: every word of the command must be UTF-8; got '\\udcff'. Rename the file or option.": (
        "slurm",
        {"command": ["train.py", "\udcff"]},
    ),
    "launch: a command must be given; got none. Pass for example -- train.py --steps 100.": ("slurm", {"command": []}),
}
ERRORS |= {NAME.format(name): ("slurm", {"name": name}) for name in NAMES}
ERRORS |= {
    SHAPE.format(shape, 4): ("jobset", {"accelerator": "tpu-v5p-slice", "devices": 4, "topology": shape})
    for shape in SHAPES
}


# proves S108
@pytest.mark.parametrize("message, case", ERRORS.items())
def test_errors(case, message):
    kind, options = case
    with value_error(message):
        render(kind, **{"command": WORDS, "processes": 4, "image": "me/train:1", **options})


def test_the_command_prints_what_render_returns():  # proves S108
    words = ["-n", "2", "--devices", "8", "--accelerator", "gpu", "--image", "me/train:1", "--name", "run-1"]
    command = [sys.executable, "-m", "shardkit", "launch", *words, "--render", "jobset", "--", *WORDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment())
    options = {"processes": 2, "devices": 8, "accelerator": "gpu", "image": "me/train:1", "name": "run-1"}
    assert (done.stdout, done.stderr, done.returncode) == (render("jobset", WORDS, **options), "", 0)
