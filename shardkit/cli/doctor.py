"""`shardkit doctor`: versions, devices, a self-test of every collective, missing packages."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
import tyro
from jax.sharding import Mesh, PartitionSpec
from packaging.requirements import Requirement
from rich.table import Table
from rich.text import Text

import shardkit as sk
from shardkit._arguments.extras import install
from shardkit.cli.output import WithJson, console, write_json
from shardkit.meshes.simulated import offer_cpu_devices

EXAMPLES = {"shardkit doctor": "on this machine's devices, or eight simulated ones"}


@dataclass(frozen=True)
class Options(WithJson):
    """Options of `shardkit doctor`."""

    devices: int = 8
    """CPU devices to simulate without an accelerator."""


def doctor(options: Annotated[Options, tyro.conf.arg(name="")]) -> int:
    """Check this installation: versions, devices, every collective, optional packages."""
    here = console()
    offer_cpu_devices(options.devices)
    versions = {name: version_of(name) or "missing" for name in ("shardkit", "jax", "jaxlib", "numpy", "optax")}
    here.print("python " + platform.python_version() + "".join(f", {k} {v}" for k, v in versions.items()))
    mesh = sk.make_mesh(x=-1)
    here.print(sk.describe(mesh))
    table = Table("collective", "result", "largest difference", title=f"self-test over {mesh.size} devices")
    failed = 0
    differences = self_test(mesh)
    for name, difference in differences.items():
        right = difference == 0
        failed += not right
        table.add_row(name, "ok" if right else Text("WRONG", "red"), f"{difference:g}")
    here.print(table)
    found = extras()
    for extra, needs in found.items():
        here.print(line(extra, needs))
    if not found:
        here.print(f"extras: not known, because shardkit is not installed; {install('cli')}")
    here.print("all collectives are right" if not failed else f"collectives that are WRONG on this machine: {failed}")
    rows: list[dict[str, Any]] = [
        {"row": "collective", "name": name, "difference": difference, "right": difference == 0}
        for name, difference in differences.items()
    ]
    for extra, needs in found.items():
        packages = {need.package: {"version": need.version, "needs": need.versions} for need in needs}
        rows.append({"row": "extra", "name": extra, "right": all(need.met for need in needs), "packages": packages})
    write_json(options.json, "doctor", rows, packages=versions)
    return 1 if failed else 0


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


class Need(NamedTuple):
    """A package that an extra names: the versions that do, as ">=13", and the installed one, None if missing."""

    package: str
    versions: str
    version: str | None

    @property
    def met(self) -> bool:
        """Whether the package is there, in one of the versions."""
        needed = Requirement(f"{self.package}{self.versions}").specifier
        return self.version is not None and needed.contains(self.version, prereleases=True)

    def __str__(self) -> str:
        if self.version is None or self.met:
            return f"{self.package} {self.version or ''}".strip()
        return f"{self.package} {self.version} (needs {self.versions})"


def extras() -> dict[str, tuple[Need, ...]]:
    """Every extra with its packages; none if shardkit runs from a folder that is not installed."""
    try:
        names = metadata.metadata("shardkit").get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        return {}
    return {name: tuple(sorted(set(_needs("shardkit", name)))) for name in names}


def version_of(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def line(extra: str, needs: tuple[Need, ...]) -> str:
    """An extra as a line: what is there, what is missing, and how to install that."""
    met = ", ".join(str(need) for need in needs if need.met)
    unmet = ", ".join(str(need) for need in needs if not need.met)
    remedy = f"missing {unmet}; {install(extra)}" if unmet else ""
    return f"[{extra}]: " + "; ".join(filter(None, (met, remedy)))


def _needs(package: str, extra: str) -> Iterator[Need]:
    """What an extra names; for another package's extra, such as jax[tpu], what that one names."""
    for need in map(Requirement, metadata.requires(package) or []):
        marker = need.marker
        if marker is None or marker.evaluate({"extra": ""}) or not marker.evaluate({"extra": extra}):
            continue
        if need.extras and package == "shardkit" and version_of(need.name):
            for each in need.extras:
                yield from _needs(need.name, each)
            continue
        yield Need(need.name, str(need.specifier), version_of(need.name))
