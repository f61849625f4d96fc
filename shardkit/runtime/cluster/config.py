"""The configuration of a distributed job, validated before it starts."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import jax
from jax.sharding import Mesh

from shardkit._arguments.checks import at_least, quote
from shardkit._arguments.typed import check_fields, typed
from shardkit.meshes.mesh import make_mesh
from shardkit.plans.dim_rules import DimRules
from shardkit.plans.plan import Plan, chain
from shardkit.strategies.data import dp
from shardkit.strategies.pipeline import pp
from shardkit.strategies.tensor import tp
from shardkit.strategies.zero import fsdp, zero1, zero2

_ZERO = {"zero1": zero1, "zero2": zero2, "fsdp": fsdp}
_AXES = ("data", "model", "stage")  # of the mesh, where the config names none
_SIZES = {"model": "tensor_parallel_size", "stage": "pipeline_parallel_size"}


@dataclass(frozen=True)
class DistributedConfig:
    """The settings of a distributed job. You see a contradiction when you construct it, not on the cluster.

    The job has `world_size` devices. Each of its `num_processes` processes has `devices_per_process` of them: one for a
    process per GPU, all of a host for a process per host.

    Attributes:
        enabled: False means one device, with any other fields: the same code then runs undistributed.
        world_size: number of devices in the job, over all processes.
        backend: "nccl" (GPU), "gloo" or "mpi" (CPU); see `jax_settings`.
        rank: index of this process, 0 <= rank < num_processes.
        local_rank: index of this process on its node; by default rank modulo num_processes_per_node, as launchers
            number them. `local_device_ids` follow from it.
        num_nodes: number of nodes.
        num_processes_per_node: processes on each node; by default world_size / (num_nodes x devices_per_process).
        devices_per_process: number of devices that each process has.
        master_addr: host name of the coordinator.
        master_port: port of the coordinator.
        tensor_parallel_size: number of devices that share a layer: the size of the mesh axis "model".
        pipeline_parallel_size: number of devices of the pipeline: the size of the mesh axis "stage".
        data_strategy: the strategy over the mesh axis "data": "dp", "zero1", "zero2" or "fsdp".
        mesh_shape: sizes of the mesh axes; by default data x model x stage as the sizes above give them.
        mesh_axis_names: names of the mesh axes, one for each size in `mesh_shape`. If they contain "model" and "stage",
            you may leave out the two fields above.
        mixed_precision: "no", "fp16" or "bf16", for `make_train_step(precision=...)`.

    Raises:
        ValueError: at construction, naming the field, the numbers and the remedy.

    Example:
        Four processes with two devices each, of which this is the last; the mesh, the plan and the precision of a step:

        >>> config = sk.DistributedConfig(
        ...     world_size=8, devices_per_process=2, rank=3, tensor_parallel_size=4, mixed_precision="bf16"
        ... )
        >>> config.num_processes, config.local_device_ids(), dict(config.mesh().shape)
        (4, (6, 7), {'data': 2, 'model': 4, 'stage': 1})
        >>> grad_fn = sk.value_and_grad(lambda params, batch, keys: jnp.mean(batch @ params["w"]))
        >>> plan = config.plan({"w": P(None, "model")})
        >>> options = {"mesh": config.mesh(), "plan": plan, "precision": config.mixed_precision}
        >>> init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), **options)
    """

    enabled: bool = True
    world_size: int = 1
    backend: Literal["nccl", "gloo", "mpi"] = "nccl"
    rank: int = 0
    local_rank: int | None = None
    num_nodes: int = 1
    num_processes_per_node: int | None = None
    devices_per_process: int = 1
    master_addr: str = "localhost"
    master_port: int = 29500
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_strategy: Literal["dp", "zero1", "zero2", "fsdp"] = "dp"
    mesh_shape: tuple[int, ...] | None = None
    mesh_axis_names: tuple[str, ...] | None = None
    mixed_precision: Literal["no", "fp16", "bf16"] = "no"

    def __post_init__(self) -> None:
        check_fields(self)
        counts = ("world_size", "num_nodes", "devices_per_process", "tensor_parallel_size", "pipeline_parallel_size")
        values = {name: getattr(self, name) for name in counts}
        at_least("DistributedConfig", 1, **values)
        self._check_processes()
        self._check_parallel_sizes()
        self._check_ranks()
        if not 1 <= self.master_port <= 65535:
            raise ValueError(
                f"DistributedConfig: master_port must be from 1 to 65535; got {self.master_port}. Pass a free one."
            )
        self._check_mesh()

    def _set(self, name: str, value: int) -> None:
        object.__setattr__(self, name, value)  # the fields are frozen

    def _check_processes(self) -> None:
        nodes = self.num_nodes
        devices = self.devices_per_process
        if self.num_processes_per_node is None:
            # Rounded down: of 10 devices on 4 nodes 2 for each, whose product is 8 and is refused below.
            self._set("num_processes_per_node", self.world_size // (nodes * devices))
        processes = self.num_processes_per_node or 0
        product = nodes * processes * devices
        if self.world_size != product:
            raise ValueError(
                "DistributedConfig: world_size must equal num_nodes x num_processes_per_node x devices_per_process; "
                f"got world_size={self.world_size} for {nodes} x {processes} x {devices} = {product}. Change one."
            )

    def _check_parallel_sizes(self) -> None:
        tensor = self.tensor_parallel_size
        stages = self.pipeline_parallel_size
        sizes = f"got {tensor} x {stages} = {tensor * stages} for world_size={self.world_size}"
        if tensor * stages > self.world_size:
            raise ValueError(
                "DistributedConfig: tensor_parallel_size x pipeline_parallel_size must not exceed world_size; "
                f"{sizes}. Lower one of the sizes, or raise world_size."
            )
        if self.world_size % (tensor * stages):
            raise ValueError(
                "DistributedConfig: tensor_parallel_size x pipeline_parallel_size must divide world_size; "
                f"{sizes}. Pass sizes whose product divides it."
            )

    def _check_ranks(self) -> None:
        _check_rank("rank", self.rank, "num_processes", self.num_processes)
        processes = self.num_processes_per_node or 0
        if self.local_rank is None:
            self._set("local_rank", self.rank % processes)
        _check_rank("local_rank", self.local_rank or 0, "num_processes_per_node", processes)

    def _check_mesh(self) -> None:
        shape = self.mesh_shape
        names = self.mesh_axis_names
        if shape is None and names is None:
            return
        if shape is None or names is None or len(shape) != len(names):
            raise ValueError(
                f"DistributedConfig: mesh_shape and mesh_axis_names must have equal length; got {shape} and {names}. "
                "Pass one size and one name per axis."
            )
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"DistributedConfig: mesh_axis_names must be distinct; got {names} with {name!r} twice. Rename one."
                )
        if min(shape, default=1) < 1:
            raise ValueError(
                f"DistributedConfig: the sizes in mesh_shape must be at least 1; got {shape}. Change the size."
            )
        if math.prod(shape) != self.world_size:
            raise ValueError(
                f"DistributedConfig: the product of mesh_shape must equal world_size; got {shape}, which is "
                f"{math.prod(shape)}, for world_size={self.world_size}. Change a size or world_size."
            )
        sizes = dict(zip(names, shape, strict=True))
        for axis, field in _SIZES.items():
            value = getattr(self, field)
            size = sizes.get(axis, 1)
            if value == 1:  # the default, which says nothing
                self._set(field, size)
            elif value != size:
                actual = f"no such axis in {names}"
                if axis in sizes:
                    actual = f"size {size}"
                raise ValueError(
                    f"DistributedConfig: {field} must be the size of the mesh axis {axis!r}; got {value} and {actual}. "
                    "Change one."
                )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None, **overrides: object) -> DistributedConfig:
        """Reads MASTER_ADDR, MASTER_PORT, WORLD_SIZE, RANK and LOCAL_RANK. An unset variable gives the field's default.

        WORLD_SIZE is a launcher's number of processes, each with `devices_per_process` devices.

        Args:
            environ: the environment variables; by default this process's.
            **overrides: values of fields, which take precedence over the environment.

        Raises:
            ValueError: a variable that is not a whole number, or an inconsistent configuration.
        """
        if environ is None:
            environ = os.environ
        values: dict[str, object] = {}
        for name in ("master_addr", "master_port", "world_size", "rank", "local_rank"):
            text = environ.get(name.upper())
            if text is None:
                continue
            if name == "master_addr":
                values[name] = text
                continue
            try:
                values[name] = int(text)
            except ValueError:
                raise ValueError(
                    f"DistributedConfig: the variable {name.upper()} must be a whole number; got {text!r}. "
                    f"Set for example {name.upper()}=1, or unset it."
                ) from None
        # A launcher's WORLD_SIZE counts processes, and the config's world_size devices.
        devices = overrides.get("devices_per_process", 1)
        processes = values.get("world_size")
        if isinstance(processes, int) and isinstance(devices, int):
            values["world_size"] = processes * devices
        return cls(**(values | overrides))  # type: ignore[arg-type]

    @property
    def num_processes(self) -> int:
        """Number of processes in the job: world_size / devices_per_process."""
        return self.world_size // self.devices_per_process

    def local_device_ids(self) -> tuple[int, ...]:
        """This process's devices among those of its node, for `jax.distributed.initialize`; it takes them on GPUs."""
        first = (self.local_rank or 0) * self.devices_per_process
        return tuple(range(first, first + self.devices_per_process))

    def get_data_parallel_size(self) -> int:
        """Number of model replicas: world_size / (tensor_parallel_size x pipeline_parallel_size); 1 if disabled."""
        if not self.enabled:
            return 1
        return self.world_size // (self.tensor_parallel_size * self.pipeline_parallel_size)

    def is_main_process(self) -> bool:
        """Whether this process logs and saves: rank 0."""
        return self.rank == 0

    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its node: local_rank 0."""
        return self.local_rank == 0

    def jax_settings(self) -> dict[str, str]:
        """The jax configuration for `backend`; empty for "nccl", jax's default on GPUs."""
        if self.backend == "nccl":
            return {}
        return {"jax_cpu_collectives_implementation": self.backend}

    def mesh(self) -> Mesh:
        """The mesh: `mesh_shape` under `mesh_axis_names`, by default data x model x stage; one device if disabled.

        Raises:
            ValueError: world_size is not the number of devices that jax has.
        """
        names = self.mesh_axis_names or _AXES
        if not self.enabled:
            # With the same names, so that specs and plans of the distributed run hold here too.
            return make_mesh(jax.local_devices()[:1], **dict.fromkeys(names, 1))
        shape = self.mesh_shape
        if not shape:
            shape = (self.get_data_parallel_size(), self.tensor_parallel_size, self.pipeline_parallel_size)
        if jax.device_count() != self.world_size:
            raise ValueError(
                f"DistributedConfig: world_size must equal the number of devices; got world_size={self.world_size} and "
                f"{jax.device_count()} devices. Change world_size, or call simulate_devices({self.world_size}) first."
            )
        sizes = dict(zip(names, shape, strict=True))
        return make_mesh(**sizes)

    @typed
    def plan(self, rules: DimRules | None = None, *, layerwise: tuple[str, ...] = ()) -> Plan:
        """The plan: `data_strategy` over "data", fsdp over "fsdp", tp over "model" and pp over "stage".

        Args:
            rules: which dim of a leaf tp splits, as `tp` takes them; required if `tensor_parallel_size` exceeds 1.
            layerwise: subtrees of lazy leaves, for the ZeRO strategies and fsdp; dp has none.

        Returns:
            A plan for `make_train_step`, over `mesh()`.

        Raises:
            ValueError: tensor parallelism without rules, rules without an axis "model", or an axis with another name.
        """
        names = self.mesh_axis_names or _AXES
        unknown = sorted({*names} - {*_AXES, "fsdp"})
        if unknown:
            raise ValueError(
                "DistributedConfig.plan: mesh_axis_names must be among 'data', 'fsdp', 'model', 'stage'; got "
                f"{quote(unknown)}. Rename the axis, or write the plan with chain."
            )
        if rules is None and self.tensor_parallel_size > 1:
            raise ValueError(
                f"DistributedConfig.plan: rules must be given with tensor_parallel_size={self.tensor_parallel_size}; "
                "got None. Pass rules=, such as specs_from_rules returns."
            )
        if rules is not None and "model" not in names:
            raise ValueError(
                f"DistributedConfig.plan: rules need a mesh axis 'model'; mesh_axis_names are {names}. Add the axis, "
                "or leave rules out."
            )
        plans = []
        if "data" in names:
            if self.data_strategy == "dp":
                plans.append(dp("data"))
            else:
                plans.append(_ZERO[self.data_strategy]("data", layerwise=layerwise))
        if "fsdp" in names:
            plans.append(fsdp("fsdp", layerwise=layerwise))
        if rules is not None:
            plans.append(tp("model", rules))
        if self.pipeline_parallel_size > 1:
            plans.append(pp("stage"))
        return chain(*plans)


def _check_rank(name: str, rank: int, count_name: str, count: int) -> None:
    if not 0 <= rank < count:
        raise ValueError(
            f"DistributedConfig: {name} must be at least 0 and below {count_name}; got {name}={rank} for "
            f"{count_name}={count}. Pass 0 to {count - 1}."
        )
