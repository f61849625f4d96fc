"""XLA flags that overlap collectives with compute on GPUs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from shardkit._arguments.typed import typed
from shardkit._jax import backends

# Compute scheduled between the start and the end of a collective, collectives pipelined over the iterations of a loop,
# and Triton for every matmul that it supports.
GPU_OVERLAP = (
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    "--xla_gpu_enable_pipelined_all_gather=true",
    "--xla_gpu_enable_pipelined_reduce_scatter=true",
    "--xla_gpu_enable_pipelined_all_reduce=true",
    "--xla_gpu_triton_gemm_any=true",
)
_DEVICES = ("nvidia0", "dxg", "kfd")


@typed
def gpu_flags(flags: tuple[str, ...] = GPU_OVERLAP) -> tuple[str, ...]:
    """Adds flags to XLA_FLAGS if jax will run on GPUs, and returns the added flags. Call it before jax starts.

    Flags that you have set stay unchanged. It prints the added flags to standard error. `guard` compares XLA_FLAGS
    between processes, and the record of a benchmark contains it.

    Args:
        flags: the flags to add, each as `--xla_gpu_name=value`.

    Raises:
        RuntimeError: jax has already started on a machine with GPUs, and would ignore them.

    Example:
        >>> from shardkit.runtime.cluster.gpu_flags import gpu_flags
        >>> gpu_flags()  # on CPU devices
        ()
    """
    if backends.cpu_only() or not any(Path("/dev", name).exists() for name in _DEVICES):
        return ()
    present = os.environ.get("XLA_FLAGS", "").split()
    names = {flag.partition("=")[0] for flag in present}
    added = tuple(flag for flag in flags if flag.partition("=")[0] not in names)
    if added and backends.jax_has_started():
        raise RuntimeError(
            f"gpu_flags: it must be called before jax starts, which reads XLA_FLAGS once; {' '.join(added)} would be "
            "ignored. Call it before anything uses a device."
        )
    os.environ["XLA_FLAGS"] = " ".join([*present, *added])
    if added:
        print("gpu_flags: added to XLA_FLAGS:", *added, file=sys.stderr, flush=True)  # noqa: T201
    return added
