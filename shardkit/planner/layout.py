"""A layout: over how many devices each axis splits a step, in how many microbatches, and in which form it runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from shardkit.schedules import Schedule, interleaved, one_f_one_b

REMAT = ("none", "selective", "full")
IMPLS = ("auto", "gather", "ring", "bidirectional")
INSIDE = ("model", "context", "expert", "stage")  # mesh axes over which the model itself communicates


class Layout(NamedTuple):
    """The mesh sizes and the recomputation of a plan.

    Attributes:
        data: data-parallel ways, which replicate the state.
        fsdp: ways that shard parameters, gradients and optimizer state, layer by layer.
        tensor: tensor-parallel ways, with sequence parallelism.
        accumulate: microbatches per step.
        remat: the values that the backward recomputes: "none", "selective" (the attention scores) or "full" (each
            layer).
        context: ways that split each sequence, with ring attention in zigzag order.
        expert: ways that split the experts; they split the batch too.
        stage: stages of a pipeline. It runs 1F1B and recomputes each stage from its input.
        chunks: chunks of layers on each stage, which the pipeline interleaves.
        microbatches: microbatches of the pipeline, in each of the `accumulate` parts.
        impl: how matmuls over tensor ways communicate, as for `column_linear`. Estimates are those of "auto".
        prefetch: whether each layer is gathered while its neighbor computes, as by `scan_layers`. Estimates are those
            without it.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    accumulate: int = 1
    remat: str = "none"
    context: int = 1
    expert: int = 1
    stage: int = 1
    chunks: int = 1
    microbatches: int = 1
    impl: str = "auto"
    prefetch: bool = False

    @property
    def chips(self) -> int:
        """Number of chips."""
        return math.prod(self._mesh_sizes().values())

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the mesh axes, without axes of size 1 (but at least one axis); the last axis has the nearest
        chips."""
        sizes = {}
        for name, size in self._mesh_sizes().items():
            if size > 1:
                sizes[name] = size
        return sizes or {"data": 1}

    @property
    def parts(self) -> int:
        """The number of parts of a step's examples: over devices, and one after the other."""
        return self.data * self.fsdp * self.expert * self.accumulate * self.microbatches

    @property
    def schedule(self) -> Schedule | None:
        """The pipeline's schedule; None without stages."""
        if self.stage == 1:
            return None
        if self.chunks == 1:
            return one_f_one_b(self.stage, self.microbatches)
        return interleaved(self.stage, self.microbatches, self.chunks)

    def _mesh_sizes(self) -> dict[str, int]:
        # The last axis has the nearest chips: tensor ways, for which the next matmul waits, are last, and stages, which
        # send their results alone, are first.
        return {
            "stage": self.stage,
            "data": self.data,
            "fsdp": self.fsdp,
            "expert": self.expert,
            "context": self.context,
            "model": self.tensor,
        }

    def __str__(self) -> str:
        return " ".join(f"{name}={getattr(self, name)}" for name in list_columns([self]))


# Shown where a layout has another value than by default.
_SELDOM = {"context", "expert", "stage", "chunks", "microbatches", "impl", "prefetch"}


def list_columns(layouts: Sequence[Layout]) -> list[str]:
    """The fields by which layouts are shown: without what all of them do without."""
    names = layouts[0]._fields if layouts else Layout._fields
    columns = []
    for name in names:
        if name not in _SELDOM or any(getattr(layout, name) != Layout._field_defaults[name] for layout in layouts):
            columns.append(name)
    return columns
