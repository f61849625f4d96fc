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

from shardkit._arguments.checks import integers_from_one, quote
from shardkit._arguments.extras import install
from shardkit._jax import backends
from shardkit.cost import Chip, chips
from shardkit.cost.hardware import device_kind

_TARGETS = resources.files("shardkit.analysis.hlo").joinpath("targets")  # descriptions of chips for the GPU compiler
_TPU = tuple(name for name, chip in chips.items() if chip.torus)
_GPU = tuple(name for name in chips if _TARGETS.joinpath(f"{name}.txtpb").is_file())
_CORES = {"tpu7x": 2}  # devices per chip, where there are several
# GiB of one device that a program may use, as the TPU's compiler (libtpu 0.0.42) says when it refuses one.
_TPU_LIMITS = {"v4": 30.75, "v5e": 15.75, "v5p": 95.74, "v6e": 31.25, "tpu7x": 94.75}
_MOST_CHIPS = 100_000  # for which `topology_of` looks for a shape
# Environment variables for a compiler in a process without its chips.
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
        if self.chip in _TPU:
            return "tpu"
        return "cuda"

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
            f"aot: unknown chip {chip!r} in topology {text!r}; known are {quote((*_TPU, *_GPU))}. "
            "Pass for example 'v5p:8x8x8' or 'h100:1x1x8'."
        )
    if chip in _GPU:
        lengths = [3]
        form = "slices x hosts x GPUs per host, as 'h100:1x1x8'"
    else:
        lengths = list(range(2, chips[chip].torus + 1))
        form = "the torus, as 'v5e:2x4'"
    sizes = shape.split("x")
    are_numbers = all(re.fullmatch(r"[1-9]\d*", size) for size in sizes)
    if not are_numbers or len(sizes) not in lengths:
        raise ValueError(f"aot: topology {text!r} must give a valid shape. After {chip!r} write {form}.")
    return Topology(chip, tuple(int(size) for size in sizes))


def topology_of(chip: str, count: int) -> Topology:
    """So many chips: the most cubic torus, or full hosts of GPUs; refuses a number that fills no hosts.

    For example 32 chips of v5p are "v5p:2x4x4", and 16 of h100 are "h100:1x2x8".
    """
    [count] = integers_from_one("topology", chips=count)
    if chip in _GPU:
        per_host = chips[chip].host
        if count > _MOST_CHIPS or (count > per_host and count % per_host):
            raise _wrong_count(chip, count, f"a multiple of the {per_host} of a host")
        if count < per_host:
            return Topology(chip, (1, 1, count))
        return Topology(chip, (1, count // per_host, per_host))
    if count > _MOST_CHIPS:
        raise _wrong_count(chip, count, f"at most {_MOST_CHIPS:,}")
    # Of all factors with this product the most equal ones have the smallest sum: of 32 it is 2 + 4 + 4.
    shape = list(min(_factorize(count, chips[chip].torus), key=sum))
    if len(shape) == 3:
        # libtpu knows "2x2x1", and no "1x2x2", as a shape of chips with three dimensions.
        ones = shape.count(1)
        shape = shape[ones:] + shape[:ones]
    return Topology(chip, tuple(shape))


def _wrong_count(chip: str, count: int, rule: str) -> ValueError:
    return ValueError(f"topology: chips must be {rule}; got {count} of {chip!r}. Choose another number.")


def _factorize(count: int, parts: int) -> list[tuple[int, ...]]:
    """All ways to write a number as a product of so many sorted factors: of 8 in two parts (1, 8) and (2, 4)."""
    if parts == 1:
        return [(count,)]
    products = []
    for first in range(1, count + 1):
        if count % first:
            continue
        for later_factors in _factorize(count // first, parts - 1):
            if first <= later_factors[0]:
                products.append((first, *later_factors))
    return products


@dataclass(frozen=True)
class AbsentDevice:
    """A device that need not be present, with the fields of jax's devices from which orders are made."""

    id: int
    platform: str
    device_kind: str
    coords: tuple[int, ...]
    core_on_chip: int
    process_index: int
    slice_index: int


def absent_devices(where: Topology) -> list[AbsentDevice]:
    """The devices of a topology, in jax's order: the first coordinate of a TPU changes fastest, after the core."""
    if where.platform == "cuda":
        return _absent_gpus(where)
    return _absent_tpus(where)


def _absent_gpus(where: Topology) -> list[AbsentDevice]:
    _, _, gpus_per_host = where.shape
    devices = []
    for number, place in enumerate(np.ndindex(where.shape)):
        slice_index, _, _ = place
        device = AbsentDevice(
            id=number,
            platform="gpu",
            device_kind=device_kind(where.chip),
            coords=place,
            core_on_chip=0,
            process_index=number // gpus_per_host,
            slice_index=slice_index,
        )
        devices.append(device)
    return devices


def _absent_tpus(where: Topology) -> list[AbsentDevice]:
    shape = list(where.shape)
    while len(shape) < 3:  # a device has three coordinates, also where its torus has two dims
        shape.append(1)
    devices: list[AbsentDevice] = []
    # ndindex changes the last index fastest, and a TPU's first coordinate changes fastest.
    for reversed_place in np.ndindex(*reversed(shape)):
        for core in range(_CORES.get(where.chip, 1)):
            device = AbsentDevice(
                id=len(devices),
                platform="tpu",
                device_kind=device_kind(where.chip),
                coords=tuple(reversed(reversed_place)),
                core_on_chip=core,
                process_index=0,
                slice_index=0,
            )
            devices.append(device)
    return devices


def tracing_for(where: Topology) -> AbstractContextManager[None]:
    """Traces inside are for the chips of a topology: `impl="auto"` chooses what it chooses on a mesh of them."""
    return backends.tracing_for(*_name_chips(where))


def lowering_for(where: Topology) -> AbstractContextManager[None]:
    """Programs inside are lowered for the chips of a topology."""
    return backends.lowering_for(*_name_chips(where))


def _name_chips(where: Topology) -> tuple[str, str]:
    """The platform and the kind of the chips of a topology, as jax's devices name them."""
    platform = where.platform
    if platform == "cuda":
        platform = "gpu"  # in jax's other name of it
    return platform, device_kind(where.chip)


def compiler_package(where: Topology) -> str:
    """The package of the chip's compiler; a RuntimeError if it is not installed."""
    package, extra = _name_package(where)
    if not is_compiler_installed(where):
        raise RuntimeError(
            f"aot.compile: the compiler for {where.chip} is not installed. Install it with: {install(extra)}"
        )
    return package


def is_compiler_installed(where: Topology) -> bool:
    """Whether the package of the chip's compiler is installed."""
    package, _ = _name_package(where)
    return find_spec(package.replace("-", "_")) is not None


def _name_package(where: Topology) -> tuple[str, str]:
    """The package of the chip's compiler, and the extra of shardkit that installs it."""
    if where.platform == "tpu":
        return "libtpu", "aot"
    return "jax-cuda13-plugin", "aot-gpu"


def description_of(where: Topology) -> dict[str, Any]:
    """The arguments of jax's get_topology_desc."""
    if where.platform == "tpu":
        description = {"platform": "tpu", "topology_name": str(where)}
        if where.chip == "v4":  # the two cores of a chip are one device; the compiler must be told so
            description["chip_config_name"] = "megacore"
        return description
    return {
        "platform": "cuda",
        "topology_name": where.chip,
        "target_config": _read_target(where.chip),
        "topology": "x".join(map(str, where.shape)),
    }


def _read_target(chip: str) -> str:
    """The description of a GPU for its compiler, as text."""
    return _TARGETS.joinpath(f"{chip}.txtpb").read_text()


def device_of(where: Topology) -> Chip:
    """One device's part of a chip: half of a tpu7x, whose two devices share the chip's links."""
    chip = chips[where.chip]
    cores = _CORES.get(where.chip, 1)
    return chip._replace(
        flops=chip.flops / cores, hbm_bytes=chip.hbm_bytes // cores, hbm_bandwidth=chip.hbm_bandwidth / cores
    )


def device_memory(where: Topology) -> int:
    """Bytes that the compiler lets a program use on one device: not the data sheet's, except for a TPU not seen yet."""
    if where.platform == "tpu":
        if where.chip not in _TPU_LIMITS:
            return device_of(where).hbm_bytes
        return int(_TPU_LIMITS[where.chip] * 2**30)
    match = re.search(r"device_memory_size: (\d+)", _read_target(where.chip))
    assert match is not None, "every target description gives its memory"
    return int(match[1])


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
        # In this order, so that what the user has set stays.
        os.environ.update(ALONE | os.environ)
    try:
        return list(topologies.get_topology_desc(**description_of(where)).devices)
    except Exception as error:  # the compiler's own error types differ between platforms
        first = str(error).splitlines()[0]
        raise ValueError(f"aot.topology_devices: the compiler knows no topology {str(where)!r}: {first}") from error
