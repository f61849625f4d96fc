"""What must be equal on all processes before a step: its program, the devices, versions, flags and settings.

Worked example, of a step with one all_reduce on two processes of one device each, much shortened:

    components     {"program": "\\"5f0c...\\"", "world size": "2", "mesh axes": "{\\"data\\": 2}", ...}
    lines          ["9a31bc07", "07ffd213", ...]    a hash of each line of the StableHLO
    collectives    {"all_reduce": 1}
    hash           "5f0c..."                        of the whole text
    devices        2

Components are compared one by one, so that the message can name what differs. The rest says how the programs differ.
"""

from __future__ import annotations

import contextlib
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

from shardkit.runtime.channel.recorder import LONGEST_BATCH

_COLLECTIVE = re.compile(
    r"stablehlo\.(all_reduce|all_gather|reduce_scatter|all_to_all|collective_permute|collective_broadcast)"
)
_PARTITIONS = re.compile(r"mhlo\.num_partitions = (\d+)")  # devices of a program, in its first line
_LINE_BYTES = 4  # of each line's hash: enough to find the line; the text is compared by a longer hash
# Paths, caches and process identities: these may differ between processes.
_PROCESS_SETTINGS = re.compile(
    r"cache|dir|dump|path|log|visible|process|profil|traceback|address|mtls|color|num_cpu_devices"
)
_PROCESS_FLAGS = re.compile(r"dump|cache|gpu_target_config|force_host_platform_device_count")
_DISTRIBUTIONS = ("jax", "jaxlib", "shardkit", "libtpu", "jax-cuda13-plugin")


def make_fingerprint(lowered: Any, mesh: Mesh, config: Mapping[str, Any]) -> dict[str, Any]:
    """The components by name, and of the program a hash of every line and its collectives, to show where two differ."""
    text = lowered.as_text()
    text_hash = hash_text(text)
    # In the order in which a message names them: what is likely to be the reason first.
    components: dict[str, Any] = {
        "program": text_hash,
        "world size": jax.process_count(),
        "mesh axes": dict(mesh.shape),
        "mesh devices (id, process)": [[device.id, device.process_index] for device in mesh.devices.flat],
    }
    for name, version in _find_versions().items():
        components[f"version of {name}"] = version
    for variable in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        components[variable] = read_flags(variable)
    # Settings change programs, as jax_default_matmul_precision does, but some change what XLA does with an equal text.
    for name, value in sorted(jax.config.values.items()):
        is_plain = value is None or isinstance(value, bool | int | float | str)
        if is_plain and not _PROCESS_SETTINGS.search(name):
            components[f"setting {name}"] = value
    for name, value in config.items():
        components[f"configuration {name}"] = value
    texts = {}
    for name, value in components.items():
        texts[name] = json.dumps(value, default=replace_value, sort_keys=True)
    devices = 1
    partitions = _PARTITIONS.search(text)
    if partitions is not None:
        devices = int(partitions[1])
    return {
        "components": texts,
        "lines": [hash_text(line)[: 2 * _LINE_BYTES] for line in text.splitlines()],
        "collectives": Counter(_COLLECTIVE.findall(text)),
        "hash": text_hash,
        "devices": devices,
    }


def describe_batch(batch: Any) -> str:
    """The global shapes and dtypes of a batch's arrays, equal ones counted, for a sentence; of limited length.

    As jax takes them: a NumPy array of int64 is one of int32, and what is no array has no shape.
    """
    counts: Counter[str] = Counter()
    for leaf in jax.tree.leaves(batch):
        with contextlib.suppress(TypeError):  # a string, for example, which is no array
            value = jax.typeof(leaf)
            shape = ",".join(map(str, value.shape))
            counts[f"{value.dtype}[{shape}]"] += 1
    parts = []
    for name, count in counts.items():
        if count > 1:
            name = f"{count} x {name}"
        parts.append(name)
    text = ", ".join(parts) or "no array"
    if len(text) <= LONGEST_BATCH:
        return text
    ending = f"... (with hash {hash_text(text)})"
    return text[: LONGEST_BATCH - len(ending)] + ending


def find_shapes(batch: Any) -> Any:
    """What decides whether a step has seen such a batch: its structure, its shapes and dtypes; can be hashed."""
    leaves, structure = jax.tree.flatten(batch)
    shapes = []
    for leaf in leaves:
        shape = getattr(leaf, "shape", ())
        dtype = getattr(leaf, "dtype", type(leaf))
        shapes.append((shape, dtype))
    return structure, tuple(shapes)


def hash_text(text: str) -> str:
    """A short hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_flags(variable: str) -> str:
    """The flags in an environment variable, sorted, without those that may differ between processes."""
    flags = []
    for flag in os.environ.get(variable, "").split():
        if not _PROCESS_FLAGS.search(flag):
            flags.append(flag)
    return " ".join(sorted(flags))


def replace_value(value: Any) -> Any:
    """A value that is no JSON as one, without what may differ between processes: the order of sets, addresses."""
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return re.sub(r" at 0x\w+", "", str(value))


def _find_versions() -> dict[str, str]:
    """The versions of Python and of the packages that are installed; of two with one name, of the first on the path."""
    versions = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        for distribution in metadata.distributions(name=name):
            versions.setdefault(name, distribution.version)
    return versions
