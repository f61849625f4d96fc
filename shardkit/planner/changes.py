"""What may make a compiled layout faster without another mesh: options of the chip's compiler, and forms of the step.

No estimate tells which of them helps: it depends on what the compiler overlaps, and on the shapes. So each is a change
to try, and the compiler has the word.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from shardkit import cost
from shardkit.planner.layout import Layout

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class StepChange(NamedTuple):
    """A change of a step that computes the same numbers.

    Attributes:
        name: the change in words.
        options: options of the compiler that it adds.
        fields: fields of the layout with other values.
    """

    name: str
    options: Mapping[str, bool | int] = _NOTHING
    fields: Mapping[str, Any] = _NOTHING

    def of_layout(self, layout: Layout) -> Layout:
        """The layout with the change."""
        return layout._replace(**self.fields)


_OFFLOADED = ("all_gather", "reduce_scatter", "all_reduce", "2d_all_gather", "3d_all_gather", "nd_reduce_scatter")
_SPARSE_CORE = {f"xla_tpu_enable_sparse_core_collective_offload_{kind}": True for kind in _OFFLOADED}
_MINOR_SHARDING = {"xla_tpu_use_minor_sharding_for_major_trivial_input": True}
_OVERLAP = {"xla_enable_async_all_gather": True, "xla_tpu_overlap_compute_collective_tc": True}
_TPU = (StepChange("overlap on the TensorCore", _OVERLAP), StepChange("minor sharding", _MINOR_SHARDING))
# In the order in which they are tried: those first that change most.
_OPTIONS = {
    # Its compiler runs every collective alone unless it is told to use the SparseCores.
    "v5p": (StepChange("SparseCore", _SPARSE_CORE), StepChange("minor sharding", _MINOR_SHARDING)),
    "v4": _TPU,
    "v5e": _TPU,
    "v6e": _TPU,
    "tpu7x": _TPU,
}


def list_changes(layout: Layout, chip: cost.Chip) -> list[StepChange]:
    """The changes that a layout has a use for: first options of the compiler, with which a form may help or not."""
    changes = list(_OPTIONS.get(chip.name, ()))
    if layout.tensor > 1:
        changes.append(StepChange("ring", fields={"impl": "ring"}))
        changes.append(StepChange("gather", fields={"impl": "gather"}))
    if layout.fsdp > 1 and layout.stage == 1:
        changes.append(StepChange("prefetch", fields={"prefetch": True}))
    return changes
