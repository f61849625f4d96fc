"""The process in which the compiler of an absent accelerator runs: `python -m shardkit.analysis.hlo.aot_child FOLDER`.

It reads `request.json` and `module.mlirbc` in the folder and writes `answer.json` and, when the program compiled,
`module.pb`. An abort of the compiler ends this process only.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np


def compile_in(folder: Path) -> dict[str, Any]:
    """Compiles what the request asks for; returns the answer."""
    import jax
    from jax.experimental import mesh_utils, topologies

    from shardkit._jax import backends
    from shardkit.analysis.hlo.memory import memory_of
    from shardkit.meshes.network import arrange_devices, find_network

    request = json.loads((folder / "request.json").read_text())
    try:
        devices = topologies.get_topology_desc(**request["topology"]).devices
    except Exception as error:  # the compiler's own error types differ between platforms
        return {"error": "topology", "message": str(error)}
    shape = tuple(request["mesh"].values())
    wanted = int(np.prod(shape))
    if wanted > len(devices):
        return {"error": "small", "devices": len(devices)}
    if request["places"]:
        found = find_network(devices)
        assert found is not None, "placements are of networks"
        placed = arrange_devices(devices, tuple(map(tuple, request["places"])), shape, found[1])
    elif wanted == len(devices):
        placed = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        placed = np.array(devices[:wanted]).reshape(shape)
    tpu = request["topology"]["platform"] == "tpu"
    account = folder / "account"
    options = ({"xla_dump_to": str(account)} if tpu else {}) | request["options"]
    started = time.monotonic()
    try:
        executable = backends.compile_for((folder / "module.mlirbc").read_bytes(), list(placed.flat), options)
    except jax.errors.JaxRuntimeError as error:
        return {"error": "compile", "message": str(error)}
    seconds = time.monotonic() - started
    (folder / "module.pb").write_bytes(executable.hlo_modules()[0].as_serialized_hlo_module_proto())
    # On TPU the peak that jax is told counts on-chip memory, and the temporaries count stacks of a loop twice.
    peak = allocated(account) if tpu else executable.get_compiled_memory_stats().peak_memory_in_bytes
    return {
        "seconds": seconds,
        "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "devices": len(devices),
        "places": [list(map(int, device.coords)) for device in placed.flat],
        "memory": asdict(memory_of(executable, peak)),
        "versions": {"jax": jax.__version__, request["package"]: metadata.version(request["package"])},
    }


def allocated(account: Path) -> int:
    """Bytes of device memory by the TPU compiler's own account, by which it refuses a program; 0 without one."""
    texts = [path.read_text() for path in account.glob("*memory-usage-report.txt")]
    return max((int(size) for text in texts for size in re.findall(r"(?m)^Total bytes: (\d+)", text)), default=0)


if __name__ == "__main__":
    where = Path(sys.argv[1])
    (where / "answer.json").write_text(json.dumps(compile_in(where)))
