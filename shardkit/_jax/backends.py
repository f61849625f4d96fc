"""Devices, processes and compilers, where they depend on the jax version (0.10 to 0.12); see `compat.py`."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata

from shardkit._jax.compat import private

# The platform and the kind of the chips that a program is traced for, where they are not those of its mesh. jax keeps
# traces by this context too, so that one for other chips does not serve.
_TARGET: Any = jax.make_user_context()


@contextmanager
def tracing_for(platform: str, kind: str) -> Iterator[None]:
    """Traces inside are for chips of this platform and kind, as jax names them, whatever the mesh's devices are."""
    with _TARGET((platform, kind)):
        yield


@contextmanager
def lowering_for(platform: str, kind: str) -> Iterator[None]:
    """Programs inside are lowered for chips of this platform and kind, which need not be present.

    From jax 0.12 on the lowering of a kernel of Triton asks which GPU it is for. Of a mesh without devices it looks up
    the first device of this machine, a CPU, in a table for kinds that jax does not know.
    """
    # Whoever traced such a kernel has imported it.
    gpu_info = sys.modules.get("jax._src.pallas.triton.gpu_info")
    if platform != "gpu" or gpu_info is None:
        yield
        return
    first_kind = jax.devices()[0].device_kind
    before = dict(gpu_info.registry)  # a user may have kinds of GPUs in it
    version = gpu_info.gpu_version_from_device_kind(kind)
    with tracing_for(platform, kind):  # jax remembers what it has looked up for this context
        gpu_info.registry[first_kind] = lambda: gpu_info._get_gpu_info_impl(version)
        try:
            yield
        finally:
            gpu_info.registry.clear()
            gpu_info.registry.update(before)


def platform() -> str | None:
    """The platform that the program is traced for: "cpu", "tpu" or "gpu"; None over an abstract mesh."""
    if _TARGET.value is not None:
        name, _ = _TARGET.value
        return name
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.default_backend()
    return getattr(mesh.abstract_device, "platform", None)


def device_kind() -> str | None:
    """jax's name of the devices that the program is traced for, as "TPU v5 lite"; None over an abstract mesh."""
    if _TARGET.value is not None:
        _, kind = _TARGET.value
        return kind
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.devices()[0].device_kind
    return getattr(mesh.abstract_device, "device_kind", None)


def jax_has_started() -> bool:
    """Whether jax has initialized its backends, which fixes the devices."""
    return private("xla_bridge.backends_are_initialized")()


def leave_out_idle_tpu() -> None:
    """Keeps jax from initializing libtpu without a TPU, which is slow and prints errors; its compiler still works."""
    if jax_has_started() or getattr(jax.config, "jax_platforms", None):
        return
    if _no_accelerator() and find_spec("libtpu") is not None:
        jax.config.update("jax_platforms", "cpu")


def _no_accelerator() -> bool:
    return not (
        private("hardware_utils.num_available_tpu_chips_and_device_id")()[0]
        or private("hardware_utils.has_visible_nvidia_gpu")()
        or private("hardware_utils.num_available_amd_gpus")(stop_at=1)
    )


def cpu_only() -> bool:
    """Whether jax finds no accelerator, or is configured to use none."""
    platforms = getattr(jax.config, "jax_platforms", None)
    if platforms:
        return bool(platforms == "cpu")
    return _no_accelerator()


def detect_cluster(timeout: int) -> tuple[str | None, int | None, int | None, tuple[int, ...] | None]:
    """What jax detects of a job: the coordinator's address, number of processes, this process, its devices."""
    detect = private("clusters.ClusterEnv").auto_detect_unset_distributed_params
    address, size, rank, devices = detect(None, None, None, None, None, timeout)
    if devices is not None:
        devices = tuple(devices)
    return address, size, rank, devices


def joined_job() -> tuple[str, int, int]:
    """The job that `jax.distributed.initialize` has joined: coordinator's address, number of processes, this one."""
    job = private("distributed.global_state")
    return job.coordinator_address, job.num_processes, job.process_id


def tell_processes(key: str, value: str) -> None:
    """Gives all processes a value by jax's coordination service."""
    private("distributed.global_state").client.key_value_set(key, value)


def told(key: str, timeout: float) -> str | None:
    """The value that a process gives the others by `tell_processes`; None if it does not within `timeout` seconds."""
    try:
        return str(private("distributed.global_state").client.blocking_key_value_get(key, int(timeout * 1000)))
    except jax.errors.JaxRuntimeError:
        return None


def drop_values(key: str) -> None:
    """Deletes the values under a key, `key/...`, that `tell_processes` has given."""
    private("distributed.global_state").client.key_value_delete(f"{key}/")


def wait_at_barrier(name: str, timeout: float) -> str | None:
    """Waits for all processes in jax's coordination service; returns None, or its error about missing processes."""
    client = private("distributed.global_state").client
    assert client is not None
    try:
        client.wait_at_barrier(name, int(timeout * 1000))
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return None


def cpu_devices_asked_for() -> int:
    """The number of CPU devices in jax's configuration; -1 if unset."""
    return int(getattr(jax.config, "jax_num_cpu_devices", -1))


_LOG_LOCK = threading.Lock()
_AS_PROCESS = threading.local()
_AS_PROCESS_LOCK = threading.RLock()


def _process_index(backend: Any = None) -> int:
    """Replaces the code of jax's function; it cannot use this module's globals."""
    from shardkit._jax.backends import process_index_here

    return process_index_here(backend)


def process_index_here(backend: Any) -> int:
    """The index of the process as which this thread traces; in other threads the actual one."""
    index = getattr(_AS_PROCESS, "index", None)
    if index is not None:
        return int(index)
    return int(private("xla_bridge.get_backend")(backend).process_index())


@contextmanager
def as_process(index: int) -> Iterator[None]:
    """Traces as another process: `jax.process_index()` returns `index`, under any name it was imported by.

    Traces inside use separate entries of jax's trace caches, which would return functions traced before.
    """
    with _AS_PROCESS_LOCK:
        function = private("xla_bridge.process_index")
        code = function.__code__
        index_before = getattr(_AS_PROCESS, "index", None)
        _AS_PROCESS.index = index
        function.__code__ = _process_index.__code__
        try:
            with set_xla_metadata(shardkit_as_process=str(index)):
                yield
        finally:
            function.__code__ = code
            _AS_PROCESS.index = index_before


def lowered_mesh(lowered: Any) -> tuple[dict[str, int], int]:
    """Sizes by name of the axes of a lowered program's first mesh (empty without one), and its number of partitions."""
    module = lowered.compiler_ir("stablehlo")
    sizes: dict[str, int] = {}
    for op in module.body.operations:
        if op.operation.name == "sdy.mesh" and not sizes:
            axes = re.findall(r'"([^"]*)"=(\d+)', str(op.attributes["mesh"]))  # <["data"=2, "model"=4]>
            sizes = {name: int(size) for name, size in axes}
    return sizes, int(module.operation.attributes["mhlo.num_partitions"])


def lowered_arguments(lowered: Any) -> list[bool]:
    """For each argument of a lowered program, whether its sharding is given and not left to the compiler."""
    are_given = []
    for attributes in _main(lowered.compiler_ir("stablehlo")).arg_attrs:
        names = {attribute.name for attribute in attributes}
        are_given.append(bool(names & {"sdy.sharding", "mhlo.sharding"}))
    return are_given


def _main(module: Any) -> Any:
    """The main function of a StableHLO module."""
    for op in module.body.operations:
        if "sym_name" in op.attributes and op.attributes["sym_name"].value == "main":
            return op
    raise KeyError("main")


@contextmanager
def capture_log(of: str) -> Iterator[list[str]]:
    """The lines with the text `of` that compilers write to this process's standard error, below Python.

    All other lines reach standard error as they are written. The list is complete at the end.
    """
    captured: list[str] = []
    with _LOG_LOCK:
        sys.stderr.flush()
        try:
            stderr = os.dup(2)
        except OSError:  # there is none
            yield captured
            return
        read, write = os.pipe()
        os.dup2(write, 2)
        os.close(write)

        def pass_on() -> None:
            with open(read, "rb") as lines:
                for line in lines:
                    if of.encode() in line:
                        captured.append(line.decode(errors="replace").rstrip())
                    else:
                        os.write(stderr, line)

        reader = threading.Thread(target=pass_on, daemon=True)
        reader.start()
        try:
            yield captured
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)  # closes the last writer of the pipe
            reader.join()
            os.close(stderr)


def compile_for(bytecode: bytes, devices: list[Any], options: dict[str, Any]) -> Any:
    """Compiles a StableHLO module for devices that need not exist, in the order of the program's partitions.

    Returns:
        The executable: `.hlo_modules()`, `.get_compiled_memory_stats()`.
    """
    import numpy as np
    from jaxlib import _jax
    from jaxlib.mlir import ir

    with private("interpreters.mlir.make_ir_context")():
        module: Any = ir.Module.parse(bytecode)
        main = _main(module)
        client = devices[0].client
        assignment = np.array(devices).reshape(1, -1)  # [replicas, partitions]
        settings = private("compiler.get_compile_options")(1, len(devices), assignment, options, backend=client)
        # The compiler chooses the layouts of arguments and results that the program does not specify.
        build = settings.executable_build_options
        build.allow_spmd_sharding_propagation_to_parameters = _have_no_sharding(main.arg_attrs)
        build.allow_spmd_sharding_propagation_to_output = _have_no_sharding(main.result_attrs)
        return client.compile(module, executable_devices=_jax.DeviceList(tuple(devices)), compile_options=settings)


def _have_no_sharding(attributes: Any) -> list[bool]:
    return ["sdy.sharding" not in attribute for attribute in attributes]
