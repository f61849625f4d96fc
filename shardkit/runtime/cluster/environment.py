"""What the environment says about a job: the variables of launchers, and what jax detects of a scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shardkit._arguments.checks import quote
from shardkit._jax import backends
from shardkit.runtime.cluster.config import DistributedConfig

_REMEDY = "pass coordinator_address, num_processes and process_id"
# The variables from which jax reads a scheduler's job, with the number of processes, the process, and the process on
# its host first; all of them are numbers but those that say where.
_SLURM = ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_NODELIST")
_OPEN_MPI = (*(f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_RANK")), "OMPI_MCA_orte_hnp_uri")
_TPU = ("TPU_WORKER_ID", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID")
_WHERE = ("SLURM_STEP_NODELIST", "OMPI_MCA_orte_hnp_uri")
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


class JobFacts(NamedTuple):
    """What one source says about the job; None where it says nothing."""

    address: str | None = None
    size: int | None = None
    rank: int | None = None
    local_devices: tuple[int, ...] | None = None

    def fill_missing(self, other: JobFacts) -> JobFacts:
        """With the other's values in place of None.

        For example ("node0:29500", None, 3, None) filled from (None, 8, 2, None) is ("node0:29500", 8, 3, None).
        """
        missing = {}
        for name, value in other._asdict().items():
            if getattr(self, name) is None:
                missing[name] = value
        return self._replace(**missing)


def read_variables(environ: Mapping[str, str]) -> JobFacts:
    """What jax's own variables say, and else those of torch's launchers."""

    def number(name: str) -> int | None:
        text = environ.get(name)
        if text is None:
            return None
        return _read_number(name, text)

    size = number("WORLD_SIZE")
    port = number("MASTER_PORT") or 29500
    torch_job = JobFacts()
    if size is not None:
        address: str | None = f"{environ.get('MASTER_ADDR', 'localhost')}:{port}"
        # One process has no coordinator to connect to, though its launcher may set the variables of one.
        if size == 1:
            address = None
        torch_job = JobFacts(address, size, number("RANK"))
    jax_job = JobFacts(environ.get("JAX_COORDINATOR_ADDRESS"), number("JAX_NUM_PROCESSES"), number("JAX_PROCESS_ID"))
    return jax_job.fill_missing(torch_job)


def detect(environ: Mapping[str, str], timeout: float) -> JobFacts:
    """What jax detects of Slurm, Open MPI, Kubernetes or Cloud TPU; refuses variables that are wrong, or too few."""
    try:
        job = JobFacts(*backends.detect_cluster(int(timeout)))
    except Exception as error:
        # Which variable jax could not read, its error does not say: they are read again here, one by one.
        for name in (*_SLURM, *_OPEN_MPI, *_TPU):
            if environ.get(name) and name not in _WHERE:
                _read_number(name, environ[name])
        _refuse_partial(environ)
        if "TPU_WORKER_HOSTNAMES" in environ and "TPU_WORKER_ID" not in environ:
            raise ValueError(
                f"initialize: TPU_WORKER_ID must be set beside TPU_WORKER_HOSTNAMES; it is not. Set it, or {_REMEDY}."
            ) from None
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"initialize: the scheduler's environment must say which processes the job has; jax cannot read it "
            f"({reason}). Unset its variables, or {_REMEDY}."
        ) from error
    if job == JobFacts():
        _refuse_partial(environ)
        if "JOB_COMPLETION_INDEX" in environ and "KUBERNETES_SERVICE_HOST" in environ:
            raise ValueError(
                "initialize: in a pod of an indexed Job, jax needs the package kubernetes to find the others; it is "
                f"not installed. Run pip install 'jax[k8s]', or {_REMEDY}; num_processes=1 for a pod that works alone."
            )
    return job


def bypass_proxy(host: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables to set so that jax's gRPC connects to a host itself, where the environment names a proxy.

    A proxy for the web refuses the connection or loses it, and jax would wait for the whole timeout.
    """
    if not any(environ.get(name) for name in ("grpc_proxy", "https_proxy", "http_proxy")):
        return {}
    # gRPC reads the second where it lacks the first.
    exceptions = environ.get("no_grpc_proxy") or environ.get("no_proxy") or ""
    hosts = [name for name in exceptions.split(",") if name]
    return {"no_grpc_proxy": ",".join([*hosts, host])}


def find_local_rank(environ: Mapping[str, str]) -> int:
    """This process among those of its host, according to the launcher."""
    for name in ("LOCAL_RANK", _SLURM[2], _OPEN_MPI[2]):
        if name in environ:
            text = environ[name]
            if text.isdigit():
                return int(text)
            return 0
    return 0


def choose_devices(config: DistributedConfig, environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """The accelerators of the config's process; None where the launcher lets it see these alone."""
    for name in _VISIBLE:
        if environ.get(name):
            visible = environ[name].split(",")
            if len(visible) == config.devices_per_process:
                return None
            break
    return config.local_device_ids()


def _refuse_partial(environ: Mapping[str, str]) -> None:
    """Refuses a process of a job that jax would take for a single process, which then trains alone."""
    srun = "Start it with srun"
    old_mpi = "Open MPI 5 no longer sets it; start it with Open MPI 4"
    for launcher, names, hint in (("Slurm", _SLURM, srun), ("Open MPI", _OPEN_MPI, old_mpi)):
        size_name, rank_name, *_ = names
        size = environ.get(size_name)
        missing = [name for name in names if name not in environ]
        # Without a size or a rank this is no process of such a job, but for example a shell in its allocation.
        if size is None or rank_name in missing or not missing:
            continue
        if _read_number(size_name, size) > 1:
            raise ValueError(
                f"initialize: {launcher} must set all variables that jax reads; {size_name} is {size}, and "
                f"{quote(missing)} is missing. {hint}, or {_REMEDY}."
            )


def _read_number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"initialize: the environment variable {name} must be a whole number; got {text!r}. Set or unset it."
        ) from None
