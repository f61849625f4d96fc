"""The extras of shardkit and the packages that they name, there or missing, as the installed metadata has them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from typing import NamedTuple

from packaging.requirements import Requirement


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
    remedy = f"missing {unmet}; pip install 'shardkit[{extra}]'" if unmet else ""
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
