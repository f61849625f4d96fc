"""`shardkit doctor`: versions, devices, a self-test of every collective, missing packages."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, NamedTuple

from packaging.requirements import Requirement

from shardkit._arguments.extras import install
from shardkit.cli.options import WithJson
from shardkit.cli.output import console, write_json

EXAMPLES = {"shardkit doctor": "on this machine's devices, or eight simulated ones"}
_PACKAGES = ("shardkit", "jax", "jaxlib", "numpy", "optax")


@dataclass(frozen=True)
class Options(WithJson):
    """Options of `shardkit doctor`."""

    devices: int = 8
    """CPU devices to simulate without an accelerator."""


def doctor(options: Options) -> int:
    """Check this installation: versions, devices, every collective, optional packages.

    The exit code is 1 if a collective gives a wrong result.
    """
    from rich.table import Table
    from rich.text import Text

    import shardkit as sk
    from shardkit.cli.self_test import self_test
    from shardkit.meshes.simulated import offer_cpu_devices

    out = console()
    offer_cpu_devices(options.devices)
    versions = {name: version_of(name) or "missing" for name in _PACKAGES}
    texts = [f"python {platform.python_version()}"]
    texts += [f"{name} {version}" for name, version in versions.items()]
    out.print(", ".join(texts))
    mesh = sk.make_mesh(x=-1)
    out.print(sk.describe(mesh))

    differences = self_test(mesh)
    wrong = 0
    table = Table("collective", "result", "largest difference", title=f"self-test over {mesh.size} devices")
    for name, difference in differences.items():
        result = Text("ok")
        if difference != 0:  # NaN too
            result = Text("WRONG", "red")
            wrong += 1
        table.add_row(name, result, f"{difference:g}")
    out.print(table)

    extras = find_extras()
    for extra, needs in extras.items():
        out.print(describe_extra(extra, needs))
    if not extras:
        out.print(f"extras: not known, because shardkit is not installed; {install('cli')}")
    if wrong:
        out.print(f"collectives that are WRONG on this machine: {wrong}")
    else:
        out.print("all collectives are right")
    write_json(options.json, "doctor", _make_rows(differences, extras), packages=versions)
    return 1 if wrong else 0


def _make_rows(differences: Mapping[str, float], extras: Mapping[str, tuple[Need, ...]]) -> list[dict[str, Any]]:
    """The rows of `--json`: the collectives, then the extras."""
    rows: list[dict[str, Any]] = []
    for name, difference in differences.items():
        rows.append({"row": "collective", "name": name, "difference": difference, "right": difference == 0})
    for extra, needs in extras.items():
        packages = {}
        for need in needs:
            packages[need.package] = {"version": need.version, "needs": need.versions}
        is_complete = all(need.met for need in needs)
        rows.append({"row": "extra", "name": extra, "right": is_complete, "packages": packages})
    return rows


class Need(NamedTuple):
    """A package that an extra names: the versions that do, as ">=13", and the installed one, None if missing."""

    package: str
    versions: str
    version: str | None

    @property
    def met(self) -> bool:
        """Whether the package is there, in one of the versions."""
        needed = Requirement(f"{self.package}{self.versions}").specifier
        # By default, versions of `packaging` differ in whether an installed 0.13.0rc1 meets ">=0.10".
        return self.version is not None and needed.contains(self.version, prereleases=True)

    def __str__(self) -> str:
        if self.version is None:
            return self.package
        if self.met:
            return f"{self.package} {self.version}"
        return f"{self.package} {self.version} (needs {self.versions})"


def find_extras() -> dict[str, tuple[Need, ...]]:
    """Every extra with its packages; none if shardkit runs from a folder that is not installed."""
    try:
        names = metadata.metadata("shardkit").get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        return {}
    extras = {}
    for name in names:
        needs = set(_find_needs("shardkit", name))
        extras[name] = tuple(sorted(needs))
    return extras


def version_of(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def describe_extra(extra: str, needs: tuple[Need, ...]) -> str:
    """An extra as a line: what is there, what is missing, and how to install that."""
    met = []
    unmet = []
    for need in needs:
        if need.met:
            met.append(str(need))
        else:
            unmet.append(str(need))
    parts = []
    if met:
        parts.append(", ".join(met))
    if unmet:
        parts.append(f"missing {', '.join(unmet)}; {install(extra)}")
    return f"[{extra}]: {'; '.join(parts)}"


def _find_needs(package: str, extra: str) -> Iterator[Need]:
    """What an extra names; for another package's extra, such as jax[tpu], what that one names."""
    for need in map(Requirement, metadata.requires(package) or []):
        # What belongs to this extra alone has a marker that is true with the extra and false without it.
        marker = need.marker
        if marker is None or marker.evaluate({"extra": ""}) or not marker.evaluate({"extra": extra}):
            continue
        # jax is there without its extra too. Whether jax[tpu] is installed shows in what this extra adds, such as
        # libtpu.
        if need.extras and package == "shardkit" and version_of(need.name):
            for inner in need.extras:
                yield from _find_needs(need.name, inner)
            continue
        yield Need(need.name, str(need.specifier), version_of(need.name))
