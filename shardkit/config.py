"""The configuration of a distributed job, validated before it starts."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import jax
from jax.sharding import Mesh

from shardkit._check import at_least
from shardkit._typed import check_fields
from shardkit.mesh import make_mesh


@dataclass(frozen=True)
class DistributedConfig:
    """Configuration of a distributed job; an inconsistent one is refused at construction, not on the cluster.

    Attributes:
        enabled: False means one device, whatever the other fields: the same code then runs undistributed.
        world_size: number of devices in the job; launchers give each process one. (`runtime.Cluster.processes` counts
            processes.)
        backend: "nccl" (GPU), "gloo" or "mpi" (CPU); see `jax_settings`.
        rank: index of this process, 0 <= rank < world_size.
        local_rank: index of this process on its node.
        num_nodes: number of nodes.
        num_processes_per_node: processes on each node; by default world_size / num_nodes.
        master_addr: host name of the coordinator.
        master_port: port of the coordinator.
        tensor_parallel_size: number of devices that shard a layer.
        pipeline_parallel_size: number of pipeline stages.
        mesh_shape: sizes of the mesh axes; by default data x model x stage as the sizes above give them.
        mesh_axis_names: names of the mesh axes, as many as `mesh_shape` has sizes.
        mixed_precision: "no", "fp16" or "bf16", for `make_train_step(precision=...)`.

    Raises:
        ValueError: at construction, naming the field, the numbers and the remedy.
    """

    enabled: bool = True
    world_size: int = 1
    backend: Literal["nccl", "gloo", "mpi"] = "nccl"
    rank: int = 0
    local_rank: int = 0
    num_nodes: int = 1
    num_processes_per_node: int | None = None
    master_addr: str = "localhost"
    master_port: int = 29500
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    mesh_shape: tuple[int, ...] | None = None
    mesh_axis_names: tuple[str, ...] | None = None
    mixed_precision: Literal["no", "fp16", "bf16"] = "no"

    def __post_init__(self) -> None:
        check_fields(self)
        counts = ("world_size", "num_nodes", "tensor_parallel_size", "pipeline_parallel_size")
        at_least("DistributedConfig", 1, **{name: getattr(self, name) for name in counts})
        if self.num_processes_per_node is None:
            object.__setattr__(self, "num_processes_per_node", self.world_size // self.num_nodes)
        per_node = self.num_processes_per_node or 0
        if self.world_size != self.num_nodes * per_node:
            raise ValueError(
                "DistributedConfig: world_size must equal num_nodes x num_processes_per_node; got world_size="
                f"{self.world_size} for {self.num_nodes} x {per_node} = {self.num_nodes * per_node}. Change one."
            )
        self._check_parallel_sizes()
        self._check_ranks(per_node)
        if not 1 <= self.master_port <= 65535:
            raise ValueError(
                f"DistributedConfig: master_port must be from 1 to 65535; got {self.master_port}. Pass a free one."
            )
        self._check_mesh()

    def _check_parallel_sizes(self) -> None:
        tensor, stages = self.tensor_parallel_size, self.pipeline_parallel_size
        got = f"got {tensor} x {stages} = {tensor * stages} for world_size={self.world_size}"
        if tensor * stages > self.world_size:
            raise ValueError(
                "DistributedConfig: tensor_parallel_size x pipeline_parallel_size must not exceed world_size; "
                f"{got}. Lower one of the sizes, or raise world_size."
            )
        if self.world_size % (tensor * stages):
            raise ValueError(
                "DistributedConfig: tensor_parallel_size x pipeline_parallel_size must divide world_size; "
                f"{got}. Pass sizes whose product divides it."
            )

    def _check_ranks(self, per_node: int) -> None:
        for name, size, of in (
            ("rank", self.world_size, "world_size"),
            ("local_rank", per_node, "num_processes_per_node"),
        ):
            value = getattr(self, name)
            if not 0 <= value < size:
                raise ValueError(
                    f"DistributedConfig: {name} must be at least 0 and below {of}; got {name}={value} for {of}={size}. "
                    f"Pass 0 to {size - 1}."
                )

    def _check_mesh(self) -> None:
        shape, names = self.mesh_shape, self.mesh_axis_names
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
        if any(size < 1 for size in shape):
            raise ValueError(
                f"DistributedConfig: the sizes in mesh_shape must be at least 1; got {shape}. Change the size."
            )
        if math.prod(shape) != self.world_size:
            raise ValueError(
                f"DistributedConfig: the product of mesh_shape must equal world_size; got {shape}, which is "
                f"{math.prod(shape)}, for world_size={self.world_size}. Change a size or world_size."
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None, **overrides: object) -> DistributedConfig:
        """Reads MASTER_ADDR, MASTER_PORT, WORLD_SIZE, RANK and LOCAL_RANK; unset variables have the field's default.

        Args:
            environ: the environment variables; by default this process's.
            **overrides: values of fields, which take precedence over the environment.

        Raises:
            ValueError: a variable that is not a whole number, or an inconsistent configuration.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, object] = {}
        for name in ("master_addr", "master_port", "world_size", "rank", "local_rank"):
            text = environ.get(name.upper())
            if text is None:
                continue
            try:
                values[name] = text if name == "master_addr" else int(text)
            except ValueError:
                raise ValueError(
                    f"DistributedConfig: the variable {name.upper()} must be a whole number; got {text!r}. "
                    "Correct or unset the variable."
                ) from None
        return cls(**(values | overrides))  # type: ignore[arg-type]

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
        return {} if self.backend == "nccl" else {"jax_cpu_collectives_implementation": self.backend}

    def mesh(self) -> Mesh:
        """The mesh: `mesh_shape` under `mesh_axis_names`, by default data x model x stage; one device if disabled.

        Raises:
            ValueError: world_size is not the number of devices that jax has.
        """
        names = self.mesh_axis_names or ("data", "model", "stage")
        if not self.enabled:
            return make_mesh(jax.local_devices()[:1], **dict.fromkeys(names, 1))  # type: ignore[arg-type]
        shape = self.mesh_shape or (
            self.get_data_parallel_size(),
            self.tensor_parallel_size,
            self.pipeline_parallel_size,
        )
        if jax.device_count() != self.world_size:
            raise ValueError(
                f"DistributedConfig: world_size must equal the number of devices; got world_size={self.world_size} and "
                f"{jax.device_count()} devices. Change world_size, or call simulate_devices({self.world_size}) first."
            )
        return make_mesh(**dict(zip(names, shape, strict=True)))  # type: ignore[arg-type]
