"""The fingerprint of a step: what must be the same on all processes before they run it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections import Counter
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import jax
from jax.sharding import Mesh

_COLLECTIVE = re.compile(
    r"stablehlo\.(all_reduce|all_gather|reduce_scatter|all_to_all|collective_permute|collective_broadcast)"
)
_LINE_BYTES = 4  # of each line's hash: enough to find the line; the text is compared by a longer hash
# Paths, caches and process identities: these may differ between processes.
_OWN = re.compile(r"cache|dir|dump|path|log|visible|process|profil|traceback|address|mtls|color|num_cpu_devices")
_OWN_FLAGS = re.compile(r"dump|cache|gpu_target_config|force_host_platform_device_count")


def fingerprint(lowered: Any, mesh: Mesh, config: Mapping[str, Any]) -> dict[str, Any]:
    """The components by name, and of the program a hash of every line and its collectives, to show where two differ.

    Args:
        lowered: the result of `step.lower(state, batch)`.
        mesh: the mesh.
        config: options of the run.

    Returns:
        `{"components": {...}, "lines": [...], "collectives": {...}}`, JSON values.
    """
    text = lowered.as_text()
    components = {
        "program": _digest(text),
        "world size": jax.process_count(),
        "mesh axes": dict(mesh.shape),
        "mesh devices (id, process)": [[d.id, d.process_index] for d in mesh.devices.flat],
        **{f"version of {name}": version for name, version in _versions().items()},
        "XLA_FLAGS": _flags("XLA_FLAGS"),
        "LIBTPU_INIT_ARGS": _flags("LIBTPU_INIT_ARGS"),
        **{f"setting {name}": value for name, value in _settings().items()},
        **{f"configuration {name}": value for name, value in config.items()},
    }
    return {
        "components": {name: json.dumps(value, default=_plain, sort_keys=True) for name, value in components.items()},
        "lines": [_digest(line)[: 2 * _LINE_BYTES] for line in text.splitlines()],
        "collectives": Counter(_COLLECTIVE.findall(text)),
    }


def _plain(value: Any) -> Any:
    """A value that is no JSON as one, without what may differ between processes: the order of sets, addresses."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else re.sub(r" at 0x\w+", "", str(value))


def _flags(variable: str) -> str:
    return " ".join(sorted(flag for flag in os.environ.get(variable, "").split() if not _OWN_FLAGS.search(flag)))


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "shardkit", "libtpu", "jax-cuda13-plugin"):
        for distribution in metadata.distributions(name=name):
            found.setdefault(name, distribution.version)
    return found


def _settings() -> dict[str, Any]:
    values = jax.config.values
    return {
        name: value
        for name, value in sorted(values.items())
        if isinstance(value, bool | int | float | str | None) and not _OWN.search(name)
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
