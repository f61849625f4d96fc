"""What connects the devices of a mesh: links of a torus, a host's own, or the network between hosts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from shardkit._check import counted

# How a connection is drawn, by its kind.
_FULL, _DOTTED, _DASHED = "-", (0, (0.6, 0.9)), (0, (1.8, 1.2))
STYLES: dict[str, Any] = {"chip": _FULL, "link": _FULL, "host": _FULL, "hops": _DOTTED, "network": _DASHED}


class Link(NamedTuple):
    """What is between two devices: a key of `STYLES`, and in words."""

    kind: str
    words: str


_CHIP, _LINK = Link("chip", "one chip"), Link("link", "one link of the torus")
_HOST, _NETWORK = Link("host", "inside one host"), Link("network", "the network between hosts")


def coordinates(device: Any) -> tuple[int, ...]:
    """Where a device is on its torus; none where it is on none."""
    return tuple(getattr(device, "coords", None) or ())


def between(one: Any, other: Any) -> Link:
    """What connects two devices; hops are counted without links around a torus, which devices do not tell."""
    if (getattr(one, "slice_index", 0) or 0) != (getattr(other, "slice_index", 0) or 0):
        return Link("network", "the network between slices")
    here, there = coordinates(one), coordinates(other)
    if here and there:
        hops = sum(abs(a - b) for a, b in zip(here, there, strict=True))
        return (_CHIP, _LINK)[hops] if hops < 2 else Link("hops", f"{hops} links of the torus")
    return _HOST if one.process_index == other.process_index else _NETWORK


def along(mesh: Mesh) -> dict[str, tuple[list[str], list[str]]]:
    """For each axis what connects neighbors along it, and its last device with its first, each in words once."""
    out = {}
    for dim, (axis, size) in enumerate(mesh.shape.items()):
        if size < 2:
            continue
        lines = np.moveaxis(mesh.devices, dim, -1).reshape(-1, size)
        near = [between(a, b).words for line in lines for a, b in pairwise(line)]
        around = [between(line[-1], line[0]).words for line in lines] if size > 2 else []
        out[axis] = (list(dict.fromkeys(near)), list(dict.fromkeys(around)))
    return out


def described(mesh: Mesh) -> list[str]:
    """A line per axis: what its collectives run over; one for all that run over the same."""
    lines: dict[str, list[str]] = {}
    for axis, (near, around) in along(mesh).items():
        closing = f"; last to first: {_listed(around)}" if around and around != near else ""
        lines.setdefault(f"{_listed(near)}{closing}", []).append(axis)
    return [f"{', '.join(axes)}: {words}" for words, axes in lines.items()]


def _listed(words: Sequence[str]) -> str:
    return " or ".join(words[:3]) + (f" or {counted(len(words) - 3, 'other')}" if len(words) > 3 else "")
