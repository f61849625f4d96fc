"""How to change a layout that does not fit, and the largest batch of one that does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from shardkit import cost
from shardkit.planner.candidates import REMAT, Candidate, Layout, Model, gigabytes, of_kind, table
from shardkit.planner.estimate import estimate, share
from shardkit.planner.search import layouts, ranked


class Advice(NamedTuple):
    """How to make a layout fit; it prints as a table.

    Attributes:
        given: the estimate of the layout.
        proposals: (change, candidate) of candidates that fit, each the fastest with that change. "fsdp": more fsdp ways
            instead of data ways; "tensor": more tensor ways instead of either, with microbatches of the same size;
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
        given = self.given
        rows = [("given", given), *self.proposals]
        verdict = "fits" if given.fits else "does not fit"
        lines = [
            f"{given.layout} {verdict}: {gigabytes(given.bytes)} GB of {gigabytes(given.usable_bytes)} GB usable",
            table([candidate for _, candidate in rows], names=[name for name, _ in rows]),
        ]
        if not given.fits and not self.proposals:
            lines.append("no layout fits this batch on any number of chips that divides it: shorten the sequence")
        if self.batch_candidate is not None:
            lines.append(
                f"batch {self.batch} fills {gigabytes(self.batch_candidate.bytes)} GB of "
                f"{gigabytes(self.batch_candidate.usable_bytes)} GB, the target of about 80% of the memory"
            )
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
    target: float = 0.8,
    links: cost.Links | None = None,
) -> Advice:
    """Changes that make a layout fit, each with its estimate, and the batch that fills about 80% of the memory.

    Args:
        model, layout, chip, batch, sequence, memory_share, efficiency: as for `estimate`.
        target: share of the memory that the advised batch may fill.
        links: as measured; see `estimate`.

    Returns:
        Advice.

    Raises:
        ValueError: as `estimate`.

    Example:
        >>> model = sk.planner.Model(layers=8, hidden=1024, heads=16, vocabulary=32000)
        >>> print(sk.planner.advise(model, sk.planner.Layout(data=4), chip="v5e", batch=64, sequence=2048))
        data=4 fsdp=1 tensor=1 accumulate=1 remat=none does not fit: 61.92 GB of 15.46 GB usable
        ...
        remat ...
        batch 8 fills 10.65 GB of 13.74 GB, the target of about 80% of the memory
    """
    of_kind(model, layout)
    job: Any = {"chip": chip, "batch": batch, "sequence": sequence, "links": links}

    def judged(layout: Layout) -> Candidate:
        return estimate(model, layout, memory_share=memory_share, efficiency=efficiency, **job)

    def fitting(chips: int) -> list[Candidate]:
        return ranked(map(judged, layouts(model, chip=chip, chips=chips, batch=batch)))

    given = judged(layout)
    found: list[tuple[str, Candidate]] = []
    if not given.fits:
        chips = layout.chips
        every = fitting(chips)
        for name, belongs in _CHANGES.items():
            found += [(name, c) for c in every if belongs(layout, c.layout)][:1]
        if not found and every:
            found = [("together", every[0])]
        while not found and 2 * chips <= batch * model.heads:
            chips *= 2
            found = [("chips", c) for c in fitting(chips)[:1]]
    most = batch_size(model, layout, chip=chip, sequence=sequence, target=target)
    filled = None
    if most:
        filled = estimate(model, layout, chip=chip, batch=most, sequence=sequence, memory_share=target)
    return Advice(given, tuple(found), most, filled)


def _changed(*allowed: str) -> Callable[[Layout, Layout], bool]:
    def only(a: Layout, b: Layout) -> bool:
        return {name for name in a._fields if getattr(a, name) != getattr(b, name)} <= set(allowed)

    return only


_CHANGES: dict[str, Callable[[Layout, Layout], bool]] = {
    "fsdp": lambda a, b: _changed("data", "fsdp")(a, b) and b.fsdp > a.fsdp,
    # more tensor ways instead of data or fsdp ways; a microbatch of a replica has as many sequences
    "tensor": lambda a, b: (
        _changed("data", "fsdp", "tensor", "accumulate")(a, b)
        and b.tensor > a.tensor
        and b.data * b.fsdp * b.accumulate == a.data * a.fsdp * a.accumulate
    ),
    "accumulate": lambda a, b: _changed("accumulate")(a, b) and b.accumulate > a.accumulate,
    "remat": lambda a, b: _changed("remat")(a, b) and REMAT.index(b.remat) > REMAT.index(a.remat),
}


def batch_size(model: Model, layout: Layout, *, chip: str | cost.Chip, sequence: int, target: float = 0.8) -> int:
    """The most sequences per step that fill at most a share of a device's memory.

    Activations are linear in the sequences of a microbatch.

    Args:
        model, layout, chip, sequence: as for `estimate`; the layout's accumulation does not change.
        target: share of the memory that may be filled.

    Returns:
        Sequences per step, over all devices; 0 if not one per microbatch fits.

    Raises:
        ValueError: as `estimate`.

    Example:
        >>> model = sk.planner.Model(layers=8, hidden=1024, heads=16, vocabulary=32000)
        >>> sk.planner.batch_size(model, sk.planner.Layout(fsdp=4), chip="v5e", sequence=2048)
        12
    """
    of_kind(model, layout)
    share(target=target)
    step = layout.data * layout.fsdp * layout.accumulate
    one = estimate(model, layout, chip=chip, batch=step, sequence=sequence, memory_share=target)
    return max(0, math.floor((one.usable_bytes - one.state_bytes) / one.activation_bytes)) * step
