"""What a GPU's compiler is told, so that it sends while it computes: flags in XLA_FLAGS, on GPUs alone."""

from __future__ import annotations

import os
from pathlib import Path

from shardkit import _platform
from shardkit._typed import typed

# A schedule that puts compute between the start and the end of a collective; collectives of a loop's neighbouring
# iterations moved into it; and Triton wherever it can write the matmul.
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
    """Adds flags to XLA_FLAGS where jax will run on GPUs; elsewhere it does nothing. Call it before jax starts.

    What was set before is left as it is. XLA_FLAGS is what `guard` compares between processes and what a benchmark's
    record holds, so a run says which flags it had.

    Args:
        flags: what to add, each as `--xla_gpu_name=value`.

    Returns:
        The flags that it added.

    Raises:
        RuntimeError: jax has already started on a machine with GPUs, and would not read them.
    """
    if _platform.cpu_only() or not any(Path("/dev", name).exists() for name in _DEVICES):
        return ()
    given = os.environ.get("XLA_FLAGS", "").split()
    known = {flag.partition("=")[0] for flag in given}
    added = tuple(flag for flag in flags if flag.partition("=")[0] not in known)
    if added and _platform.jax_has_started():
        raise RuntimeError(
            f"gpu_flags: it must come before jax starts, which reads XLA_FLAGS once; {' '.join(added)} would be "
            "ignored. Call it first, before anything touches a device."
        )
    os.environ["XLA_FLAGS"] = " ".join([*given, *added])
    return added
