"""`initialize()` without an argument, where a scheduler started the processes: it goes where that says."""

import sys
from types import SimpleNamespace as Thing

import pytest
from jax._src.clusters import cloud_tpu_cluster, k8s_cluster

import shardkit as sk
from shardkit.runtime.cluster import environment, join
from shardkit.runtime.cluster.join import Cluster
from support.refusals import refused

pytestmark = pytest.mark.check
SLURM = {
    "SLURM_JOB_ID": "4097",  # jax takes one of the last 4,096 ports by the job's number
    "SLURM_STEP_NODELIST": "node[012-015],other2",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "8192.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
}
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2", "HOSTNAME": "localhost"}
TRAINER = KUBERNETES | {  # what Kubeflow Trainer's plugin for jax adds in each pod of a TrainJob "run-1"
    "JAX_COORDINATOR_ADDRESS": "run-1-node-0-0.run-1:29500",
    "JAX_NUM_PROCESSES": "3",
    "JAX_PROCESS_ID": "2",
}
TPU = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "localhost,tpu-1", "TPU_SKIP_MDS_QUERY": "1"} | {
    f"MEGASCALE_{name}": ""
    for name in ("COORDINATOR_ADDRESS", "NUM_SLICES", "SLICE_ID")  # one slice
}


class Reached(Exception):
    """Where initialize would go."""


@pytest.fixture
def elsewhere(monkeypatch):
    """Says which scheduler's variables there are, and no others; `initialize` gets as far as where it would connect."""

    def start(place):
        raise Reached(*place[:4])

    def become(environ, pod=True):
        for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setitem(sys.modules, "kubernetes", kubernetes() if pod else None)
        monkeypatch.setattr(k8s_cluster.K8sCluster, "_namespace", classmethod(lambda cls: "default"))
        monkeypatch.setattr(k8s_cluster.socket, "gethostbyname", lambda name: "127.0.0.1")
        monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", "TPU_WORKER_HOSTNAMES" in environ)

    monkeypatch.setattr(join.backends, "jax_has_started", lambda: False)
    monkeypatch.setattr(join.client, "start", start)
    return become


def kubernetes():
    """The client's module, with one pod of a JobSet's job of three."""
    owner = Thing(controller=True, kind="Job")
    labels = {"job-name": "train-workers-0", "jobset.sigs.k8s.io/jobset-name": "train"}
    pod = Thing(metadata=Thing(name="train-workers-0-2", labels=labels, owner_references=[owner]), spec=Thing())
    job = Thing(metadata=Thing(name="train-workers-0", labels=labels), spec=Thing(parallelism=3))
    core = Thing(list_namespaced_pod=lambda namespace, field_selector: Thing(items=[pod]))
    client = Thing(
        CoreV1Api=lambda: core,
        BatchV1Api=lambda: Thing(read_namespaced_job=lambda name, namespace: job),
        exceptions=Thing(ApiException=OSError),
    )
    return Thing(config=Thing(load_incluster_config=lambda: None), client=client)


# proves S98, F67: Slurm, Open MPI, Kubernetes (a JobSet), Cloud TPU
@pytest.mark.parametrize(
    ("environ", "place", "local_rank"),
    [
        (SLURM, ("node012", 2**16 - 2**12 + 1, 5, 8), 1),
        (OPEN_MPI, ("10.96.0.1", 2**16 - 2**12 + 2, 3, 4), 3),
        (KUBERNETES, ("train-workers-0-0.train", 55527, 2, 3), 0),
        (TRAINER, ("run-1-node-0-0.run-1", 29500, 2, 3), 0),
        (TPU, ("localhost", 8482, 1, 2), 0),
    ],
    ids=["Slurm", "Open MPI", "Kubernetes", "Kubeflow Trainer", "Cloud TPU"],
)
def test_without_arguments(environ, place, local_rank, elsewhere):
    elsewhere(environ)
    with pytest.raises(Reached) as reached:
        sk.runtime.initialize(timeout=5)
    assert reached.value.args == place
    assert environment.find_local_rank(environ) == local_rank


def without(name, environ):
    return {other: value for other, value in environ.items() if other != name}


OR_PASS = "or pass coordinator_address, num_processes and process_id"
UNREADABLE = "initialize: the scheduler's environment must say which processes the job has; jax cannot read it"
WRONG = {
    "initialize: the environment variable SLURM_PROCID must be a whole number; got 'five'. Set or unset it.": (
        SLURM | {"SLURM_PROCID": "five"}
    ),
    "initialize: process_id must be at least 0 and below num_processes; got 8 of 8. ": SLURM | {"SLURM_PROCID": "8"},
    "initialize: Slurm must set all variables that jax reads; SLURM_NTASKS is 8, and 'SLURM_STEP_NODELIST' is "
    f"missing. Start it with srun, {OR_PASS}.": without("SLURM_STEP_NODELIST", SLURM),
    f"{UNREADABLE} (Could not parse coordinator IP address from Open MPI environment.). Unset its variables, "
    f"{OR_PASS}.": OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "8192.0;udp"},
    "initialize: Open MPI must set all variables that jax reads; OMPI_COMM_WORLD_SIZE is 4, and "
    "'OMPI_MCA_orte_hnp_uri' is missing. Open MPI 5 no longer sets it; start it with Open MPI 4, "
    f"{OR_PASS}.": without("OMPI_MCA_orte_hnp_uri", OPEN_MPI),
    "initialize: in a pod of an indexed Job, jax needs the package kubernetes to find the others; it is not "
    f"installed. Run pip install 'jax[k8s]', {OR_PASS}; num_processes=1 for a pod that works alone.": KUBERNETES,
    "initialize: the environment variable TPU_WORKER_ID must be a whole number; got 'zero'. Set or unset it.": (
        TPU | {"TPU_WORKER_ID": "zero"}
    ),
    f"initialize: TPU_WORKER_ID must be set beside TPU_WORKER_HOSTNAMES; it is not. Set it, {OR_PASS}.": without(
        "TPU_WORKER_ID", TPU
    ),
}


# proves S98, F67: a job of many is never taken for a process alone, and what is wrong is named
@pytest.mark.filterwarnings("ignore:.*Kubernetes environment detected:UserWarning")
@pytest.mark.parametrize("message, environ", WRONG.items())
def test_variables_that_are_wrong_or_too_few(environ, message, elsewhere):
    elsewhere(environ, pod=False)
    assert refused(lambda: sk.runtime.initialize(timeout=5)).startswith(message)


# proves S98: what is one process alone for all of them stays so
@pytest.mark.filterwarnings("ignore:.*Kubernetes environment detected:UserWarning")
@pytest.mark.parametrize(
    ("environ", "arguments"),
    [
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}, {}),  # in a shell of salloc, outside of srun
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, {}),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {}),  # a pod of no job
        (KUBERNETES, {"num_processes": 1}),
    ],
)
def test_a_process_alone(environ, arguments, elsewhere):
    elsewhere(environ, pod=False)
    assert sk.runtime.initialize(**arguments) == Cluster(0, 1, 0, True, "")


# proves S98, S99: four processes with two devices each, and a process per GPU, from one config
@pytest.mark.parametrize(
    ("fields", "visible", "ids"),
    [
        ({"devices_per_process": 2}, None, (6, 7)),
        ({"num_nodes": 2}, None, (3,)),  # one per GPU, rank 7 on the second node
        ({"num_nodes": 2}, "0,1,2,3", (3,)),
        ({"num_nodes": 2}, "3", None),  # Slurm's --gpus-per-task: the process sees no other
    ],
)
def test_local_rank_decides_the_devices(fields, visible, ids, monkeypatch, elsewhere):
    def start(*place, local_device_ids, **options):
        raise Reached(*place, local_device_ids)

    elsewhere({"CUDA_VISIBLE_DEVICES": visible} if visible else {})
    monkeypatch.setattr(join.backends, "leave_out_idle_tpu", lambda: None)
    monkeypatch.setattr(join.client, "start", lambda place: None)
    monkeypatch.setattr(join.jax.distributed, "initialize", start)
    processes = 8 // fields.get("devices_per_process", 1)
    config = sk.DistributedConfig(world_size=8, rank=processes - 1, **fields)
    with pytest.raises(Reached) as reached:
        sk.runtime.initialize(config)
    assert reached.value.args == ("localhost:29500", processes, processes - 1, ids)
    with pytest.raises(Reached) as reached:
        sk.runtime.initialize(config, local_device_ids=0)
    assert reached.value.args[-1] == (0,)


def test_a_config_of_another_job(elsewhere):
    """Each of four processes would train alone."""
    elsewhere({"WORLD_SIZE": "4", "RANK": "3"})
    assert refused(lambda: sk.runtime.initialize(sk.DistributedConfig())) == (
        "initialize: the config must describe the job that the environment variables do; got num_processes=1 and 4. "
        "Make it with DistributedConfig.from_environment(), or correct one."
    )


@pytest.mark.parametrize(
    ("host", "rank", "bound"),
    [
        ("127.0.0.1", 0, "127.0.0.1:5000"),
        ("127.0.0.1", 1, None),  # only process 0 listens
        ("[fd00::1]", 1, None),
        ("192.0.2.1", 0, None),  # of a service in front of the machine: jax listens on all addresses
    ],
)
def test_jax_listens_where_the_processes_met(host, rank, bound, monkeypatch):
    """By itself its service listens on every address of the machine, and asks nobody for a token."""

    def start(address, *place, coordinator_bind_address, **options):
        assert address == f"{host}:5000"
        raise Reached(coordinator_bind_address)

    monkeypatch.setattr(join.backends, "jax_has_started", lambda: False)
    monkeypatch.setattr(join.backends, "leave_out_idle_tpu", lambda: None)
    monkeypatch.setattr(join.client, "start", lambda place: None)
    monkeypatch.setattr(join.jax.distributed, "initialize", start)
    with pytest.raises(Reached) as reached:
        sk.runtime.initialize(coordinator_address=f"{host}:5000", num_processes=2, process_id=rank)
    assert reached.value.args == (bound,)


FILES = ["mtls_cert_file", "mtls_key_file", "mtls_ca_file"]


def test_certificates_are_passed_on_or_refused(tmp_path, monkeypatch):
    for name in FILES:
        (tmp_path / name).touch()
    files = {name: str(tmp_path / name) for name in FILES}
    assert refused(lambda: sk.runtime.initialize(mtls_key_file="a")) == (
        "initialize: 'mtls_cert_file', 'mtls_key_file', 'mtls_ca_file' must be passed together; got 'mtls_key_file'. "
        "Pass all three."
    )
    assert refused(lambda: sk.runtime.initialize(**files | {"mtls_ca_file": str(tmp_path)})) == (
        f"initialize: mtls_ca_file must be a file; got '{tmp_path}'. Pass its path."
    )
    monkeypatch.setattr(join.jax.distributed, "initialize", lambda coordinator_address: None)
    monkeypatch.setattr(join.jax, "__version__", "0.10.2")
    assert refused(lambda: sk.runtime.initialize(**files)) == (
        "initialize: mtls_cert_file needs jax 0.12, whose service knows certificates; got jax 0.10.2. Install a newer "
        "jax, or leave the three files out."
    )
    monkeypatch.setattr(join.jax.distributed, "initialize", lambda mtls_cert_file, mtls_key_file, mtls_ca_file: None)
    assert join._check_certificates(*files.values()) == files
