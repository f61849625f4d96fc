"""Devices, processes and compilers, in what depends on the jax version (0.10 to 0.12); see `_compat.py`."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata

from shardkit._compat import private


def platform() -> str | None:
    """The platform of the devices whose program is traced here: "cpu", "tpu", "gpu"; None over an abstract mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.default_backend()
    return getattr(mesh.abstract_device, "platform", None)


def device_kind() -> str | None:
    """What jax calls the devices whose program is traced here, as "TPU v5 lite"; None over an abstract mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.devices()[0].device_kind
    return getattr(mesh.abstract_device, "device_kind", None)


def jax_has_started() -> bool:
    """Whether jax has created its backends, after which devices can no longer be chosen."""
    return private("xla_bridge.backends_are_initialized")()


def leave_out_idle_tpu() -> None:
    """Keeps jax from trying the TPU's library where only its compiler is of use: slow, and errors on the screen."""
    if not jax_has_started() and not getattr(jax.config, "jax_platforms", None) and _idle_tpu_library():
        jax.config.update("jax_platforms", "cpu")


def _idle_tpu_library() -> bool:
    return _no_accelerator() and find_spec("libtpu") is not None


def _no_accelerator() -> bool:
    return not (
        private("hardware_utils.num_available_tpu_chips_and_device_id")()[0]
        or private("hardware_utils.has_visible_nvidia_gpu")()
        or private("hardware_utils.num_available_amd_gpus")(stop_at=1)
    )


def cpu_only() -> bool:
    """Whether jax will find no accelerator, or is told to use none."""
    chosen = getattr(jax.config, "jax_platforms", None)
    return chosen == "cpu" if chosen else _no_accelerator()


def detect_cluster(timeout: int) -> tuple[str | None, int | None, int | None, tuple[int, ...] | None]:
    """What jax itself finds of a job: the coordinator's address, processes, this one, its devices."""
    detect = private("clusters.ClusterEnv").auto_detect_unset_distributed_params
    address, size, rank, devices = detect(None, None, None, None, None, timeout)
    return address, size, rank, None if devices is None else tuple(devices)


def wait_at_barrier(name: str, timeout: float) -> str | None:
    """Waits for all processes in jax's coordination service; None, or its words about those that did not come."""
    client = private("distributed.global_state").client
    assert client is not None
    try:
        client.wait_at_barrier(name, int(timeout * 1000))
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return None


def cpu_devices_asked_for() -> int:
    """The CPU devices that jax's own configuration asks for; -1 where it says nothing."""
    return int(getattr(jax.config, "jax_num_cpu_devices", -1))


_AS_PROCESS = threading.local()
_AS_PROCESS_LOCK = threading.RLock()


def _process_index(backend: Any = None) -> int:
    """Stands in for jax's function, whose globals are not these."""
    from shardkit._platform import process_index_here

    return process_index_here(backend)


def process_index_here(backend: Any) -> int:
    """The process as which this thread traces; for all other threads, and for a backend, jax's own answer."""
    index = getattr(_AS_PROCESS, "index", None)
    return int(private("xla_bridge.get_backend")(backend).process_index()) if index is None else index


@contextmanager
def as_process(index: int) -> Iterator[None]:
    """Traces as process 0 or 1 would: `jax.process_index()` answers so, under whatever name it was imported.

    What is traced inside is kept apart from jax's trace caches, in which functions traced before would be found.
    """
    with _AS_PROCESS_LOCK:
        function = private("xla_bridge.process_index")
        code, before = function.__code__, getattr(_AS_PROCESS, "index", None)
        _AS_PROCESS.index = index
        function.__code__ = _process_index.__code__
        try:
            with set_xla_metadata(shardkit_as_process=str(index)):
                yield
        finally:
            function.__code__ = code
            _AS_PROCESS.index = before


def lowered_mesh(lowered: Any) -> tuple[dict[str, int], int]:
    """Names and sizes of the axes of a lowered program's first mesh, none if it has none, and its partitions."""
    module = lowered.compiler_ir("stablehlo")
    meshes = [str(op.attributes["mesh"]) for op in module.body.operations if op.operation.name == "sdy.mesh"]
    axes = re.findall(r'"([^"]*)"=(\d+)', next((text for text in meshes if "=" in text), ""))
    return {name: int(size) for name, size in axes}, int(module.operation.attributes["mhlo.num_partitions"])


def compile_for(bytecode: bytes, devices: list[Any], options: dict[str, Any]) -> Any:
    """Compiles a StableHLO module for devices that need not exist; they stand in the order of the program's partitions.

    Returns:
        The executable: `.hlo_modules()`, `.get_compiled_memory_stats()`.
    """
    import numpy as np
    from jaxlib import _jax
    from jaxlib.mlir import ir

    with private("interpreters.mlir.make_ir_context")():
        module: Any = ir.Module.parse(bytecode)
        named = {op.attributes["sym_name"].value: op for op in module.body.operations if "sym_name" in op.attributes}
        main = named["main"]
        # Where the program says nothing of an argument's or a result's layout, the compiler is free to choose.
        free = [["sdy.sharding" not in each for each in attrs] for attrs in (main.arg_attrs, main.result_attrs)]
        client = devices[0].client
        placed = np.array(devices).reshape(1, -1)
        settings = private("compiler.get_compile_options")(1, len(devices), placed, options, backend=client)
        build = settings.executable_build_options
        build.allow_spmd_sharding_propagation_to_parameters, build.allow_spmd_sharding_propagation_to_output = free
        return client.compile(module, executable_devices=_jax.DeviceList(tuple(devices)), compile_options=settings)
