"""Topologies of ahead-of-time compilation: their names, their shapes, and their descriptions for a compiler."""

from __future__ import annotations

import math
import os
import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from jax.experimental import topologies

from shardkit._arguments.checks import quoted, whole
from shardkit._arguments.extras import install
from shardkit._jax import backends
from shardkit.cost import Chip, chips
from shardkit.cost.hardware import device_kind

_TARGETS = resources.files("shardkit.analysis.hlo").joinpath("targets")  # what the GPU compiler must know of a chip
_TPU = tuple(each.name for each in chips.values() if each.torus)
_GPU = tuple(name for name in chips if _TARGETS.joinpath(f"{name}.txtpb").is_file())
_CORES = {"tpu7x": 2}  # devices per chip, where there are several
# GiB of one device that a program may use, as the TPU's compiler (libtpu 0.0.42) says when it refuses one.
_TPU_LIMITS = {"v4": 30.75, "v5e": 15.75, "v5p": 95.74, "v6e": 31.25, "tpu7x": 94.75}
_MOST = 100_000  # chips of a topology that is looked for
# What a compiler must be told in a process without its chips.
ALONE = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_STDERR_LOG_LEVEL": "1",  # warnings, which say where the partitioner replicates a value
}


class Topology(NamedTuple):
    """Chips and how they are connected: "v5p:8x8x8" (a torus), "h100:1x4x8" (slices x hosts x GPUs per host)."""

    chip: str
    shape: tuple[int, ...]

    @property
    def platform(self) -> str:
        """jax's name of the platform: "tpu" or "cuda"."""
        return "tpu" if self.chip in _TPU else "cuda"

    @property
    def devices(self) -> int:
        """jax devices: two for each tpu7x chip, one for any other."""
        return math.prod(self.shape) * _CORES.get(self.chip, 1)

    def __str__(self) -> str:
        return f"{self.chip}:{'x'.join(map(str, self.shape))}"


def parse_topology(text: str) -> Topology:
    """Reads "v5p:8x8x8" or "h100:1x1x8"; refuses an unknown chip, and a shape that it cannot have."""
    if not isinstance(text, str):
        raise TypeError(
            f"aot: topology must be a string; got {type(text).__name__}. Pass for example 'v5p:8x8x8' or 'h100:1x1x8'."
        )
    chip, _, shape = text.partition(":")
    if chip in chips and chip not in (*_TPU, *_GPU):
        raise ValueError(
            f"aot: chip {chip!r} must have a description for its compiler; got none. Add {chip}.txtpb to "
            "shardkit/analysis/hlo/targets."
        )
    if chip not in (*_TPU, *_GPU):
        raise ValueError(
            f"aot: unknown chip {chip!r} in topology {text!r}; known are {quoted((*_TPU, *_GPU))}. "
            "Pass for example 'v5p:8x8x8' or 'h100:1x1x8'."
        )
    allowed = (2,) if chip in _GPU else range(1, chips[chip].torus)
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", shape) or shape.count("x") not in allowed:
        form = "slices x hosts x GPUs per host, as 'h100:1x1x8'" if chip in _GPU else "the torus, as 'v5e:2x4'"
        raise ValueError(f"aot: topology {text!r} must give a valid shape. After {chip!r} write {form}.")
    return Topology(chip, tuple(map(int, shape.split("x"))))


def topology_of(chip: str, count: int) -> Topology:
    """So many chips: the most cubic torus, or full hosts of GPUs; refuses a number that fills no hosts."""
    [count] = whole("topology", chips=count)
    host = chips[chip].host
    if count > _MOST or (chip in _GPU and count > host and count % host):
        rule = f"a multiple of the {host} of a host" if chip in _GPU else f"at most {_MOST:,}"
        raise ValueError(f"topology: chips must be {rule}; got {count} of {chip!r}. Choose another number.")
    if chip in _GPU:
        return Topology(chip, (1, max(1, count // host), min(host, count)))
    sides = [side for side in range(1, count + 1) if count % side == 0]
    shapes: list[tuple[int, ...]] = [()]
    for _ in range(chips[chip].torus):
        shapes = [(*shape, side) for shape in shapes for side in sides if count % (math.prod(shape) * side) == 0]
    best = min((sorted(each) for each in shapes if math.prod(each) == count), key=sum)
    if len(best) == 3:  # "2x2x1" is a shape of chips with three dimensions, "1x2x2" is none
        best.sort(key=lambda side: side == 1)
    return Topology(chip, tuple(best))


@dataclass(frozen=True)
class AbsentDevice:
    """What orders of devices are made from, of a device that need not be present; the fields are those of jax."""

    id: int
    platform: str
    device_kind: str
    coords: tuple[int, ...]
    core_on_chip: int
    process_index: int
    slice_index: int


def absent_devices(where: Topology) -> list[AbsentDevice]:
    """The devices of a topology, in jax's order: the first coordinate of a TPU changes fastest, after the core."""
    kind, found = device_kind(where.chip), list[AbsentDevice]()
    if where.platform == "cuda":
        for number, place in enumerate(np.ndindex(where.shape)):
            host = number // where.shape[2]
            found.append(AbsentDevice(number, "gpu", kind, place, 0, host, place[0]))
        return found
    cores = _CORES.get(where.chip, 1)
    shape = (*where.shape, *[1] * (3 - len(where.shape)))
    for place in np.ndindex(*reversed(shape)):
        for core in range(cores):
            found.append(AbsentDevice(len(found), "tpu", kind, tuple(reversed(place)), core, 0, 0))
    return found


def tracing_for(where: Topology) -> AbstractContextManager[None]:
    """Traces inside are for the chips of a topology: `impl="auto"` chooses what it chooses on a mesh of them."""
    platform = "gpu" if where.platform == "cuda" else where.platform
    return backends.tracing_for(platform, device_kind(where.chip))


def compiler_package(where: Topology) -> str:
    """The package of the chip's compiler; a RuntimeError if it is not installed."""
    package, extra = ("libtpu", "aot") if where.platform == "tpu" else ("jax-cuda13-plugin", "aot-gpu")
    if find_spec(package.replace("-", "_")) is None:
        raise RuntimeError(
            f"aot.compile: the compiler for {where.chip} is not installed. Install it with: {install(extra)}"
        )
    return package


def description_of(where: Topology) -> dict[str, Any]:
    """The arguments of jax's get_topology_desc."""
    if where.platform == "tpu":
        # A v4 chip is one device; its compiler must be told so.
        both = {"chip_config_name": "megacore"} if where.chip == "v4" else {}
        return {"platform": "tpu", "topology_name": str(where), **both}
    shape = "x".join(map(str, where.shape))
    return {"platform": "cuda", "topology_name": where.chip, "target_config": _target(where.chip), "topology": shape}


def _target(chip: str) -> str:
    return _TARGETS.joinpath(f"{chip}.txtpb").read_text()


def device_of(where: Topology) -> Chip:
    """One device's part of a chip: half of a tpu7x, whose two devices share the chip's links."""
    chip, cores = chips[where.chip], _CORES.get(where.chip, 1)
    return chip._replace(
        flops=chip.flops / cores, hbm_bytes=chip.hbm_bytes // cores, hbm_bandwidth=chip.hbm_bandwidth / cores
    )


def device_memory(where: Topology) -> int:
    """Bytes that the compiler lets a program use on one device: not the data sheet's, except for a TPU not seen yet."""
    if where.platform == "tpu":
        limit = _TPU_LIMITS.get(where.chip)
        return device_of(where).hbm_bytes if limit is None else int(limit * 2**30)
    found = re.search(r"device_memory_size: (\d+)", _target(where.chip))
    assert found, "every target description gives its memory"
    return int(found[1])


def topology_devices(topology: str) -> list[Any]:
    """The devices of chips that need not be present, for a mesh whose programs are compiled here and saved.

    The compiler runs in this process: unlike that of `compile`, it ends the process where it aborts.

    Args:
        topology: as for `compile`: "v5e:2x4", "h100:1x1x8".

    Returns:
        jax's devices of that topology, which hold no arrays and run nothing.

    Raises:
        ValueError: an unknown topology.
        RuntimeError: the compiler's package is missing.

    Example:
        mesh = sk.make_mesh(devices=sk.aot.topology_devices("v5e:2x4"), data=8)
        init, step = sk.make_train_step(grad_fn, optimizer, mesh=mesh, plan=sk.dp("data"))
        sk.analysis.compiled(step, init.abstract(params), batch).save("step.program")
    """
    where = parse_topology(topology)
    compiler_package(where)
    backends.leave_out_idle_tpu()
    if backends.cpu_only():
        os.environ.update(ALONE | os.environ)
    try:
        return list(topologies.get_topology_desc(**description_of(where)).devices)
    except Exception as error:  # the compiler's own error types differ between platforms
        first = str(error).splitlines()[0]
        raise ValueError(f"aot.topology_devices: the compiler knows no topology {str(where)!r}: {first}") from error
