"""`shardkit doctor`: versions, devices, a self-test of every collective, what its links are for, missing packages."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro
from jax.sharding import Mesh, PartitionSpec
from rich.console import Console
from rich.table import Table

import shardkit as sk
from shardkit import bench, cost
from shardkit.bench.measured import in_words
from shardkit.simulated import offer_cpu_devices

_EXTRAS = {
    "cli": ("rich", "tyro", "uniplot"),
    "pytest": ("pytest", "hypothesis"),
    "test": ("pytest-xdist", "chex", "ruff", "mypy"),
    "viz": ("matplotlib",),
    "checkpoint": ("orbax-checkpoint",),
    "data": ("grain",),
    "aot": ("libtpu",),
    "aot-gpu": ("jax-cuda13-plugin",),
}

EXAMPLES = {
    "shardkit doctor": "on this machine's devices, or eight simulated ones",
    "shardkit doctor --links comm.jsonl": "with links as bench comm measured them",
}


@dataclass(frozen=True)
class Options:
    """Options of `shardkit doctor`."""

    devices: int = 8
    """CPU devices to simulate without an accelerator."""
    links: Path | None = None
    """Results of `shardkit bench comm --json`, to choose by in place of the chip's published figures."""
    flops: float | None = None
    """FLOP/s of a device's matmuls, where the chip is not known."""


def doctor(options: Annotated[Options, tyro.conf.arg(name="")]) -> int:
    """Check this installation: versions, devices, every collective, links and what they are for, optional packages."""
    records = bench.read(options.links) if options.links else []
    measured = bench.links(records, flops=options.flops) if records else None
    console = Console(soft_wrap=True, highlight=False)
    offer_cpu_devices(options.devices)
    versions = {name: _version(name) or "missing" for name in ("shardkit", "jax", "jaxlib", "numpy", "optax")}
    console.print("python " + platform.python_version() + "".join(f", {k} {v}" for k, v in versions.items()))
    mesh = sk.make_mesh(x=-1)
    console.print(sk.describe(mesh))

    table = Table("collective", "result", "largest difference", title=f"self-test over {mesh.size} devices")
    failed = 0
    for name, difference in self_test(mesh).items():
        right = difference == 0
        failed += not right
        table.add_row(name, "ok" if right else "[red]WRONG[/red]", f"{difference:g}")
    console.print(table)
    console.print(links_of(mesh, measured, records), markup=False)
    for extra, needs in _EXTRAS.items():
        missing = [name for name in needs if _version(name) is None]
        console.print(
            f"[{extra}]: ok"
            if not missing
            else f"[{extra}]: missing {', '.join(missing)}; pip install 'shardkit[{extra}]'",
            markup=False,
        )
    console.print(
        "all collectives are right" if not failed else f"collectives that are WRONG on this machine: {failed}"
    )
    return 1 if failed else 0


def links_of(mesh: Mesh, measured: cost.Links | None, records: list[bench.Record]) -> str:
    """The links of this machine, as measured or as published for its chip, and the sizes that follow from them."""
    if measured is not None:
        axes = {r["axes"]: r["n"] for r in records if r.get("axes") in dict(measured.axes)}
        return in_words(measured, axes, bench.crossovers(records))
    kind = mesh.devices.flat[0].device_kind
    chip = cost.chip_of(kind)
    if chip is None:
        return f"links: no figures of {kind!r}; measure them: shardkit bench comm --json FILE, then doctor --links FILE"
    return in_words(cost.links(chip), dict(mesh.shape))


def self_test(mesh: Mesh) -> dict[str, float]:
    """Runs every collective over the mesh's one axis; the largest difference of each from NumPy over a list of blocks.

    The values are small whole numbers, whose sums are exact in any order: every difference must be 0.
    """
    (axis,) = mesh.axis_names
    n = mesh.size
    blocks = [(np.arange(n * n, dtype=np.float32) * (d + 1) % 7 - 3).reshape(n, n) for d in range(n)]
    whole = np.stack(blocks)

    def everywhere(x: Any) -> list[Any]:
        return [x] * n

    cases: dict[str, tuple[Callable[[jax.Array], jax.Array], list[Any]]] = {
        "all_reduce sum": (lambda x: sk.all_reduce(x, axis), everywhere(whole.sum(0))),
        "all_reduce mean": (lambda x: sk.all_reduce(x * n, axis, op="mean"), everywhere(whole.sum(0))),
        "all_reduce max": (lambda x: sk.all_reduce(x, axis, op="max"), everywhere(whole.max(0))),
        "all_reduce min": (lambda x: sk.all_reduce(x, axis, op="min"), everywhere(whole.min(0))),
        "all_gather": (lambda x: sk.all_gather(x, axis), everywhere(np.concatenate(blocks))),
        "reduce_scatter": (lambda x: sk.reduce_scatter(x, axis), np.split(whole.sum(0), n)),
        "all_to_all": (
            lambda x: sk.all_to_all(x, axis, split_dim=0, concat_dim=1),
            [np.concatenate([b[d : d + 1] for b in blocks], 1) for d in range(n)],
        ),
        "shift": (lambda x: sk.shift(x, axis), [blocks[d - 1] for d in range(n)]),
        "broadcast": (lambda x: sk.broadcast(x, axis, source=n - 1), everywhere(blocks[n - 1])),
        "axis_index": (lambda x: sk.axis_index(axis) + 0 * x[:1, 0].astype(int), [np.array([d]) for d in range(n)]),
    }
    spec = PartitionSpec(axis)
    x = sk.shard(np.concatenate(blocks), mesh, spec)
    out = {}
    for name, (kernel, expected) in cases.items():
        run = jax.jit(jax.shard_map(lambda b, k=kernel: sk.vary(k(b), axis), mesh=mesh, in_specs=spec, out_specs=spec))
        shards = sorted(run(x).addressable_shards, key=lambda s: s.index[0].start or 0)
        pairs = zip(shards, expected, strict=True)
        out[name] = max(float(np.max(np.abs(np.asarray(s.data) - e))) for s, e in pairs)
    return out


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
