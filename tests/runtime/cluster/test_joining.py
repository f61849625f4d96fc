"""`initialize()` without an argument, where a scheduler started the processes: it goes where that says."""

import sys
from types import SimpleNamespace as Thing

import pytest
from jax._src.clusters import cloud_tpu_cluster, k8s_cluster

import shardkit as sk
from shardkit.runtime.cluster import join

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
TPU = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "localhost,tpu-1", "TPU_SKIP_MDS_QUERY": "1"} | {
    f"MEGASCALE_{name}": ""
    for name in ("COORDINATOR_ADDRESS", "NUM_SLICES", "SLICE_ID")  # one slice
}


class Reached(Exception):
    """Where initialize would go."""


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
@pytest.mark.check
@pytest.mark.parametrize(
    ("environ", "place", "local_rank"),
    [
        (SLURM, ("node012", 2**16 - 2**12 + 1, 5, 8), 1),
        (OPEN_MPI, ("10.96.0.1", 2**16 - 2**12 + 2, 3, 4), 3),
        (KUBERNETES, ("train-workers-0-0.train", 55527, 2, 3), 0),
        (TPU, ("localhost", 8482, 1, 2), 0),
    ],
    ids=["Slurm", "Open MPI", "Kubernetes", "Cloud TPU"],
)
def test_without_arguments(environ, place, local_rank, monkeypatch):
    def start(place):
        raise Reached(*place[:4])

    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "kubernetes", kubernetes())
    monkeypatch.setattr(k8s_cluster.K8sCluster, "_namespace", classmethod(lambda cls: "default"))
    monkeypatch.setattr(k8s_cluster.socket, "gethostbyname", lambda name: "127.0.0.1")
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", environ is TPU)
    monkeypatch.setattr(join._platform, "jax_has_started", lambda: False)
    monkeypatch.setattr(join.client, "start", start)
    with pytest.raises(Reached) as reached:
        sk.runtime.initialize(timeout=5)
    assert reached.value.args == place
    assert join._local_rank(None, environ) == local_rank


@pytest.mark.check
@pytest.mark.parametrize(
    ("host", "rank", "bound"),
    [
        ("127.0.0.1", 0, "127.0.0.1:5000"),
        ("127.0.0.1", 1, None),  # only process 0 listens
        ("192.0.2.1", 0, None),  # of a service in front of the machine: jax listens on all addresses
    ],
)
def test_jax_listens_where_the_processes_met(host, rank, bound, monkeypatch):
    """By itself its service listens on every address of the machine, and asks nobody for a token."""

    def start(*place, coordinator_bind_address, **options):
        raise Reached(coordinator_bind_address)

    monkeypatch.setattr(join._platform, "jax_has_started", lambda: False)
    monkeypatch.setattr(join._platform, "leave_out_idle_tpu", lambda: None)
    monkeypatch.setattr(join.client, "start", lambda place: None)
    monkeypatch.setattr(join.jax.distributed, "initialize", start)
    with pytest.raises(Reached) as reached:
        sk.runtime.initialize(coordinator_address=f"{host}:5000", num_processes=2, process_id=rank)
    assert reached.value.args == (bound,)
