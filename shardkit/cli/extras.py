"""The extras of shardkit and the packages that they name, there or missing, as the installed metadata has them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata
from typing import NamedTuple

_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[([\w,.-]+)\])?\s*([^;]*)(?:;.*\bextra == ['\"]([\w-]+)['\"].*)?")


class Need(NamedTuple):
    """A package that an extra names: its least version if there is one, and the installed one, None if missing."""

    package: str
    least: str | None
    version: str | None

    @property
    def met(self) -> bool:
        """Whether the package is there, and new enough."""
        return self.version is not None and (self.least is None or _numbers(self.version) >= _numbers(self.least))

    def __str__(self) -> str:
        if self.version is None or self.met:
            return f"{self.package} {self.version or ''}".strip()
        return f"{self.package} {self.version} (needs {self.least})"


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
    for text in metadata.requires(package) or []:
        found = _REQUIREMENT.fullmatch(text.strip())
        if not found or found[4] != extra:
            continue
        name, of_other, versions = found[1], found[2], found[3]
        if of_other and package == "shardkit" and version_of(name):
            for each in of_other.split(","):
                yield from _needs(name, each)
            continue
        least = re.search(r">=\s*([\w.]+)", versions)
        yield Need(name, least[1] if least else None, version_of(name))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))
