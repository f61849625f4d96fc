"""The machine of a search: its chip, what of it is used, and the link that each axis of a layout has."""

from __future__ import annotations

import math
from typing import NamedTuple

from shardkit import cost
from shardkit.cost.links import Group, link_of_group
from shardkit.planner.layout import Layout

# Axes over which devices send to a neighbour alone: a ring of attention, and the stages of a pipeline.
_PERMUTED_AXES = ("context", "stage")


class Machine(NamedTuple):
    """What a step runs on.

    Attributes:
        chip: the chip.
        memory_share: usable share of the chip's memory.
        efficiency: share of the peak reached by matmuls.
        links: as measured, of the axes of `Layout` by name; None: as published for the chip.
    """

    chip: cost.Chip
    memory_share: float
    efficiency: float
    links: cost.Links | None

    @property
    def usable_bytes(self) -> float:
        """Bytes of memory that a step may take."""
        return self.memory_share * self.chip.hbm_bytes

    @property
    def platform(self) -> str:
        """The chip's platform, by which the kernels of layers are chosen: "tpu" for a torus, else "gpu"."""
        return "tpu" if self.chip.torus else "gpu"

    def find_link(self, layout: Layout, axis: str) -> cost.Link:
        """The link that a device has for the collectives over an axis of a layout, by its name in `Layout`."""
        if self.links is not None:
            return self.links.of(axis)
        kind = "ppermute" if axis in _PERMUTED_AXES else "all_gather"
        return link_of_group(self.chip, kind, _locate_group(self.chip, layout, axis))

    def count_dims(self, layout: Layout, axis: str) -> int:
        """The dims of a torus along which the members of an axis extend; 0 of GPUs."""
        if not self.chip.torus:
            return 0
        return _locate_group(self.chip, layout, axis).dims


def _locate_group(chip: cost.Chip, layout: Layout, axis: str) -> Group:
    """Where the members of an axis stand, of a layout over all chips: the last axis has the nearest ones.

    On a torus a group is taken to extend in a square or cube of all chips: 64 of 256 chips of a side of 16 along two
    dimensions, 16 of them along one. A group of GPUs is on one host if all members fit there; else each host has
    those members that are `stride` apart on it.

    Worked example: data=4, fsdp=4, tensor=4 on 64 GPUs of eight a host. Members of a tensor group are neighbours, four
    on one host. Those of fsdp are four apart: two on each of two hosts. Those of data are 16 apart: one on each of
    four.
    """
    ways, stride = _find_extent(layout, axis)
    if chip.torus:
        if ways == 1:
            return Group()
        side = layout.chips ** (1 / chip.torus)
        # Without the 1e-9, a logarithm that is off in its last digit, as 3.0000000000000004 for 3, would make a dim
        # more.
        dims = math.ceil(math.log(ways, side) - 1e-9)
        return Group(dims=min(dims, chip.torus))
    if stride * ways <= chip.host:
        return Group()
    return Group(members_on_a_host=max(1, chip.host // stride))


def _find_extent(layout: Layout, axis: str) -> tuple[int, int]:
    """The members of a group, and how many chips neighbours are apart."""
    inner = layout.tensor * layout.context * layout.expert
    # Gradients are summed over data, context and expert ways together, whose nearest members differ in context, or in
    # expert ways. fsdp ways between those of data are then left out.
    data_stride = layout.tensor
    if layout.context == layout.expert == 1:
        data_stride = layout.tensor * layout.fsdp
    extents = {
        "tensor": (layout.tensor, 1),
        "context": (layout.context, layout.tensor),
        "expert": (layout.expert, layout.tensor * layout.context),
        "fsdp": (layout.fsdp, inner),
        "data": (layout.data * layout.context * layout.expert, data_stride),
        "stage": (layout.stage, layout.chips // layout.stage),
    }
    return extents[axis]
