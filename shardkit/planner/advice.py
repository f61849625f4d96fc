"""How to change a layout that does not fit, and the largest batch of one that does."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from shardkit import cost
from shardkit.planner.candidates import Candidate
from shardkit.planner.estimate import estimate
from shardkit.planner.layout import REMAT, Layout
from shardkit.planner.model import Model
from shardkit.planner.search import list_estimates, rank
from shardkit.planner.tables import format_gigabytes, table

_TARGET = 0.8  # share of the memory that the advised batch fills
_MOST = 10**6  # sequences of a microbatch
_CHANGES = ("fsdp", "context", "tensor", "accumulate", "remat")
_ADVISED_AXES = ("data", "fsdp", "tensor", "context")

Proposals = list[tuple[str, Candidate]]


class Advice(NamedTuple):
    """How to make a layout fit; it prints as a table.

    Attributes:
        given: the estimate of the layout.
        proposals: (change, candidate) of candidates that fit, each the fastest with that change. "fsdp": more fsdp ways
            instead of data ways; "context": sequences split instead of examples; "tensor": more tensor ways instead of
            either, with microbatches of the same size;
            "accumulate" and "remat": more of it. If none of these is enough, "together": the fastest layout on the same
            number of chips; if none fits there, "chips": the fastest on the smallest number of chips, doubled from the
            layout's, that has one. Empty if the layout fits.
        batch: the most sequences per step that fill about 80% of the memory, or 0.
        batch_candidate: the estimate of the layout with that batch; None if not one sequence per microbatch fits.
    """

    given: Candidate
    proposals: tuple[tuple[str, Candidate], ...]
    batch: int
    batch_candidate: Candidate | None

    def __str__(self) -> str:
        first = self.given
        verdict = "fits" if first.fits else "does not fit"
        usable = format_gigabytes(first.usable_bytes)
        names = ["given"]
        candidates = [first]
        for name, candidate in self.proposals:
            names.append(name)
            candidates.append(candidate)
        lines = [
            f"{first.layout} {verdict}: {format_gigabytes(first.bytes)} GB of {usable} GB usable",
            table(candidates, names=names),
        ]
        if not first.fits and not self.proposals:
            lines.append("no layout fits this batch on any number of chips that divides it: shorten the sequence")
        if self.batch_candidate is not None:
            filled = format_gigabytes(self.batch_candidate.bytes)
            target = format_gigabytes(self.batch_candidate.usable_bytes)
            lines.append(f"batch {self.batch} fills {filled} GB of {target} GB, the target of about 80% of the memory")
        return "\n".join(lines)


def advise(
    model: Model,
    layout: Layout,
    *,
    chip: str | cost.Chip,
    batch: int,
    sequence: int,
    memory_share: float = 0.9,
    efficiency: float = 1.0,
    links: cost.Links | None = None,
) -> Advice:
    """Lists changes that make a layout fit, each with its estimate, and the batch that fills about 80% of the memory.

    Args:
        model, layout, chip, batch, sequence, memory_share, efficiency: as for `estimate`.
        links: measured links; see `estimate`.

    Returns:
        Advice.

    Raises:
        ValueError: as `estimate`.

    Example:
        >>> model = sk.planner.Model(layers=8, hidden=1024, heads=16, vocabulary=32000)
        >>> print(sk.planner.advise(model, sk.planner.Layout(data=4), chip="v5e", batch=64, sequence=2048))
        data=4 fsdp=1 tensor=1 accumulate=1 remat=none does not fit: 45.80 GB of 15.46 GB usable
        ...
        remat ...
        batch 16 fills 13.30 GB of 13.74 GB, the target of about 80% of the memory
    """
    job: Any = {
        "chip": chip,
        "batch": batch,
        "sequence": sequence,
        "links": links,
        "memory_share": memory_share,
        "efficiency": efficiency,
    }
    first = estimate(model, layout, **job)
    proposals: Proposals = []
    if not first.fits:
        most_chips = batch * model.heads
        proposals = _propose(layout, most_chips, partial(_rank_estimates, model, job))
    # The more sequences a microbatch has the more memory it takes, so that the largest that fits is found by bisection.
    fill = partial(_fill_target, model, layout, chip, sequence)
    # The index of the first size that does not fit. Sizes begin with 1, so that it is also the largest that fits, or 0.
    local = bisect_left(range(1, _MOST), True, key=lambda local: not fill(local).fits)
    filled = fill(local) if local else None
    return Advice(first, tuple(proposals), local * layout.parts, filled)


def _rank_estimates(model: Model, job: Any, chips: int) -> list[Candidate]:
    return rank(list_estimates(model, chips=chips, axes=_ADVISED_AXES, **job))


def _propose(layout: Layout, most_chips: int, rank_on: Callable[[int], list[Candidate]]) -> Proposals:
    """One change on the same chips; else any layout on these; else the fastest on twice as many, again and again."""
    candidates = rank_on(layout.chips)
    proposals = []
    for name in _CHANGES:
        for candidate in candidates:
            if _name_change(layout, candidate.layout) == name:
                proposals.append((name, candidate))
                break
    if proposals:
        return proposals
    if candidates:
        return [("together", candidates[0])]
    chips = 2 * layout.chips
    # Doubled and not counted up, because for each number of chips all layouts are tried.
    while chips <= most_chips:
        candidates = rank_on(chips)
        if candidates:
            return [("chips", candidates[0])]
        chips *= 2
    return []


def _fill_target(model: Model, layout: Layout, chip: str | cost.Chip, sequence: int, local: int) -> Candidate:
    """The layout with this many sequences in a microbatch of a device, of which the target's share is usable."""
    batch = local * layout.parts
    return estimate(model, layout, chip=chip, batch=batch, sequence=sequence, memory_share=_TARGET)


def _name_change(before: Layout, after: Layout) -> str:
    """The one change that leads from one layout to another, as in `Advice.proposals`; "" if it takes several.

    For example from data=8 to data=2, fsdp=4 it is "fsdp"; to data=4, tensor=2, accumulate=2 it is "tensor": a replica
    has twice as many examples, in twice as many microbatches. To fsdp=8 with remat="full" it takes two changes.
    """
    changed = set()  # the names of fields
    for name in before._fields:
        if getattr(before, name) != getattr(after, name):
            changed.add(name)
    if changed & {"context", "expert", "stage"}:
        if after.context > before.context and changed <= {"data", "fsdp", "context"}:
            return "context"
        return ""
    if after.tensor > before.tensor and "remat" not in changed:
        if _count_microbatches(after) == _count_microbatches(before):
            return "tensor"
        return ""
    if after.fsdp > before.fsdp and changed <= {"data", "fsdp"}:
        return "fsdp"
    if after.accumulate > before.accumulate and changed == {"accumulate"}:
        return "accumulate"
    if changed == {"remat"} and REMAT.index(after.remat) > REMAT.index(before.remat):
        return "remat"
    return ""


def _count_microbatches(layout: Layout) -> int:
    """Microbatches of a step over all replicas: with as many, each has as many sequences."""
    return layout.data * layout.fsdp * layout.accumulate
