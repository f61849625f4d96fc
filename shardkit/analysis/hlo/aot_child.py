"""The process in which the compiler of an absent accelerator runs: `python -m shardkit.analysis.hlo.aot_child FOLDER`.

It reads `request.json` and `module.mlirbc` in the folder and writes `answer.json` and, when the program compiled,
`module.pb`. An abort of the compiler ends this process only.
"""

from __future__ import annotations

import json
import math
import re
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np


def compile_in(folder: Path) -> dict[str, Any]:
    """Compiles what the request asks for; returns the answer.

    For example the request

        {"topology": {"platform": "tpu", "topology_name": "v5e:2x4"}, "mesh": {"data": 8}, "options": {},
         "package": "libtpu", "places": null}

    has an answer with "seconds", "rss", "places" of the mesh's devices, "memory" and "versions"; or one with "error":
    "topology" (the compiler does not know it), "small" (it has fewer devices than the mesh) or "compile" (the compiler
    refuses the program), with its "message".
    """
    import jax
    from jax.experimental import topologies

    from shardkit._jax import backends
    from shardkit.analysis.hlo.memory import memory_of

    request = json.loads((folder / "request.json").read_text())
    try:
        devices = topologies.get_topology_desc(**request["topology"]).devices
    except Exception as error:  # the compiler's own error types differ between platforms
        return {"error": "topology", "message": str(error)}
    shape = tuple(request["mesh"].values())
    if math.prod(shape) > len(devices):
        return {"error": "small", "devices": len(devices)}
    grid = _order_devices(devices, shape, request["places"])

    tpu = request["topology"]["platform"] == "tpu"
    account = folder / "account"
    options = dict(request["options"])
    if tpu:
        # There the compiler writes its account of memory, for `read_allocated_bytes`.
        options.setdefault("xla_dump_to", str(account))
    started = time.monotonic()
    try:
        executable = backends.compile_for((folder / "module.mlirbc").read_bytes(), list(grid.flat), options)
    except jax.errors.JaxRuntimeError as error:
        return {"error": "compile", "message": str(error)}
    seconds = time.monotonic() - started
    (folder / "module.pb").write_bytes(executable.hlo_modules()[0].as_serialized_hlo_module_proto())

    if tpu:
        # The peak that jax is told counts on-chip memory, and the temporaries count stacks of a loop twice.
        peak = read_allocated_bytes(account)
    else:
        peak = executable.get_compiled_memory_stats().peak_memory_in_bytes
    package = request["package"]
    return {
        "seconds": seconds,
        "rss": _read_peak_memory(),
        "devices": len(devices),
        "places": [list(map(int, device.coords)) for device in grid.flat],
        "memory": asdict(memory_of(executable, peak)),
        "versions": {"jax": jax.__version__, package: metadata.version(package)},
    }


def _read_peak_memory() -> int:
    """The most memory that this process has had, bytes.

    Linux starts `ru_maxrss` of a child with the peak of the process that started it: a trainer of 20 GB would make
    every compilation look as large. What /proc says of a process is its own.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak  # macOS counts bytes, others KiB
    return peak * 1024


def _order_devices(devices: Sequence[Any], shape: tuple[int, ...], places: list[list[int]] | None) -> np.ndarray:
    """The devices of a mesh of this shape: at these places, else in jax's order; the first ones if some stay idle."""
    from jax.experimental import mesh_utils

    from shardkit.meshes.network import arrange_devices, find_network

    if places is not None:
        network = find_network(devices)
        assert network is not None, "placements are of networks"
        _, coordinates = network
        order = tuple(tuple(place) for place in places)
        return arrange_devices(devices, order, shape, coordinates)
    size = math.prod(shape)
    if size == len(devices):
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return np.array(devices[:size]).reshape(shape)


def read_allocated_bytes(account: Path) -> int:
    """Bytes of device memory by the TPU compiler's own account, by which it refuses a program; 0 without one.

    The account is a folder of reports with a line as "Total bytes: 1234" for each memory.
    """
    largest = 0
    for path in account.glob("*memory-usage-report.txt"):
        for size in re.findall(r"(?m)^Total bytes: (\d+)", path.read_text()):
            largest = max(largest, int(size))
    return largest


if __name__ == "__main__":
    shared = Path(sys.argv[1])
    (shared / "answer.json").write_text(json.dumps(compile_in(shared)))
