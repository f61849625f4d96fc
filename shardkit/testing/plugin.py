"""What the pytest plugin does once a test asks for a mesh. The hooks are in `shardkit_pytest`, which imports no jax."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import jax
import pytest
from jax.sharding import Mesh

from shardkit._platform import jax_has_started
from shardkit.mesh import make_mesh
from shardkit.simulated import simulate_devices

TIMEOUTS = {  # seconds: a collective that waits for a device that never comes ends the run
    "xla_cpu_collective_timeout_seconds": 60,
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 20,
    "xla_cpu_collective_call_terminate_timeout_seconds": 60,
}


def start(devices: int) -> None:
    """Simulates devices, with short collective time-outs; does nothing where jax has already started.

    Args:
        devices: number of CPU devices.
    """
    if jax_has_started():
        return
    flags = os.environ.get("XLA_FLAGS", "")
    missing = [f"--{name}={seconds}" for name, seconds in TIMEOUTS.items() if name not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *missing]).strip()
    simulate_devices(devices)


def mesh_of(sizes: Mapping[str, Any] | None) -> Mesh:
    """The mesh of a test, over the first devices; without sizes, all devices along "data".

    Args:
        sizes: axis name and size; at most one size may be -1.

    Returns:
        The mesh.

    Raises:
        pytest.UsageError: more devices than there are.
    """
    there = jax.devices()
    sizes = {"data": len(there)} if sizes is None else dict(sizes)
    needed = math.prod(sizes.values())
    if needed > len(there):
        raise pytest.UsageError(
            f"meshes: a mesh must fit the devices; {sizes} needs {needed} and there are {len(there)}. Set "
            f"shardkit_devices = {needed} in pytest's configuration, and let nothing start jax before."
        )
    return make_mesh(there[:needed] if needed > 0 else there, **sizes)
