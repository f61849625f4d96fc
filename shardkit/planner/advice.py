"""How to change a layout that does not fit, and the largest batch of one that does."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, NamedTuple

from shardkit import cost
from shardkit.planner.candidates import REMAT, Candidate, Layout, gigabytes, table
from shardkit.planner.estimate import estimate
from shardkit.planner.model import Model
from shardkit.planner.search import estimates, ranked

_TARGET = 0.8  # share of the memory that the advised batch fills
_MOST = 10**6  # sequences of a microbatch


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
    links: cost.Links | None = None,
) -> Advice:
    """Changes that make a layout fit, each with its estimate, and the batch that fills about 80% of the memory.

    Args:
        model, layout, chip, batch, sequence, memory_share, efficiency: as for `estimate`.
        links: as measured; see `estimate`.

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
    job: Any = {"chip": chip, "batch": batch, "sequence": sequence, "links": links}
    job |= {"memory_share": memory_share, "efficiency": efficiency}
    given = estimate(model, layout, **job)

    def fitting(chips: int) -> list[Candidate]:
        return ranked(estimates(model, chips=chips, axes=("data", "fsdp", "tensor", "context"), **job))

    found: list[tuple[str, Candidate]] = []
    if not given.fits:
        chips = layout.chips
        every = fitting(chips)
        for name in ("fsdp", "context", "tensor", "accumulate", "remat"):
            found += [(name, c) for c in every if _change(layout, c.layout) == name][:1]
        if not found and every:
            found = [("together", every[0])]
        while not found and 2 * chips <= batch * model.heads:
            chips *= 2
            found = [("chips", c) for c in fitting(chips)[:1]]
    step = layout.parts

    def filling(local: int) -> Candidate:
        return estimate(model, layout, chip=chip, batch=local * step, sequence=sequence, memory_share=_TARGET)

    local = bisect_left(range(1, _MOST), True, key=lambda local: not filling(local).fits)
    most = local * step
    filled = filling(local) if most else None
    return Advice(given, tuple(found), most, filled)


def _change(a: Layout, b: Layout) -> str:
    """The one change that leads from one layout to another, as in `Advice.proposals`; "" if it takes several."""
    changed = {name for name in a._fields if getattr(a, name) != getattr(b, name)}
    if changed & {"context", "expert", "stage"}:
        return "context" if b.context > a.context and changed <= {"data", "fsdp", "context"} else ""
    if b.tensor > a.tensor and "remat" not in changed:
        # a microbatch of a replica has as many sequences
        alike = b.data * b.fsdp * b.accumulate == a.data * a.fsdp * a.accumulate
        return "tensor" if alike else ""
    if b.fsdp > a.fsdp and changed <= {"data", "fsdp"}:
        return "fsdp"
    if b.accumulate > a.accumulate and changed == {"accumulate"}:
        return "accumulate"
    return "remat" if changed == {"remat"} and REMAT.index(b.remat) > REMAT.index(a.remat) else ""
