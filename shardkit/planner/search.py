"""The planner: the layouts of a transformer that fit a machine, the fastest first, and what to do when one does not.

    model = planner.Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256)
    found = planner.search(model, chip="v5e", chips=64, batch=256, sequence=4096)
    print(planner.table(found[:5]))
    print(planner.advise(model, planner.Layout(data=64), chip="v5e", batch=256, sequence=4096))

All figures are estimates by the model that `shardkit.planner.estimate` states; a search tries every layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from shardkit import _check, cost
from shardkit._kinds import ITERABLE
from shardkit._typed import check_kind
from shardkit.planner.estimate import REMAT, Candidate, Layout, Model, check, estimate, of_kind, share, tensor_divides

_MOST = 10**9  # chips, and sequences in a step


def layouts(model: Model, *, chip: str | cost.Chip, chips: int, batch: int) -> Iterator[Layout]:
    """Every layout of the model on that many chips: what divides the chips, the model and the batch.

    Args:
        model: the sizes.
        chip: a chip or its name.
        chips: number of chips, all used.
        batch: sequences in a step.

    Returns:
        An iterator of Layout.

    Raises:
        ValueError: chips or batch below 1, or an unknown chip.
    """
    of_kind(model)
    it = cost.chip(chip)
    chips, batch = _check.whole("planner", chips=chips, batch=batch)
    for name, number in (("chips", chips), ("batch", batch)):
        if number > _MOST:  # all of its divisors are looked for
            raise ValueError(f"planner: {name} must be at most {_MOST:,}; got {number:.3g}. Correct {name}.")
    for tensor in _divisors(chips):
        for fsdp in _divisors(chips // tensor) if tensor_divides(model, it, tensor) else ():
            data = chips // (tensor * fsdp)
            if batch % (data * fsdp) == 0:
                for accumulate in _divisors(batch // (data * fsdp)):
                    yield from (Layout(data, fsdp, tensor, accumulate, remat) for remat in REMAT)


def search(
    model: Model,
    *,
    chip: str | cost.Chip,
    chips: int,
    batch: int,
    sequence: int,
    memory_share: float = 0.9,
    efficiency: float = 1.0,
) -> list[Candidate]:
    """Every layout that fits, the fastest first.

    Args:
        model: the sizes.
        chip: a chip or its name.
        chips: number of chips, all used.
        batch: sequences in a step, over all devices.
        sequence: tokens a sequence.
        memory_share: how much of the chip's memory may be used.
        efficiency: share of the peak that matmuls reach.

    Returns:
        Candidates; empty when none fits (`advise` says what would). `table` prints them.

    Raises:
        ValueError: chips or batch below 1, no layout that tensor_divides, an unknown chip, or a share outside 0 to 1.
    """
    of_kind(model)
    _, batch, sequence = check(model, Layout(), cost.chip(chip), batch, sequence, memory_share, efficiency)
    [chips] = _check.whole("planner", chips=chips)
    found = [
        estimate(
            model,
            layout,
            chip=chip,
            batch=batch,
            sequence=sequence,
            memory_share=memory_share,
            efficiency=efficiency,
        )
        for layout in layouts(model, chip=chip, chips=chips, batch=batch)
    ]
    if not found:
        raise ValueError(
            f"planner: a layout must divide the chips, the model and the batch, and none does; got {chips} chips, "
            f"{model.heads} heads and batch {batch}. Choose a batch that more of the chips divide."
        )
    return sorted((candidate for candidate in found if candidate.fits), key=_order)


class Advice(NamedTuple):
    """What to do with a layout; print it.

    Attributes:
        given: the layout asked about, estimated.
        proposals: (what changes, a candidate that fits), each the fastest of its kind. "fsdp": copies become shards;
            "tensor": more tensor ways in place of copies or shards, with microbatches as large as before; "accumulate"
            and "remat": more of it. Where none of these is enough, "together": the fastest of all layouts on as many
            chips; where that does not exist either, "chips": the fastest on the least doubling of the chips. Empty
            where the layout fits.
        batch: the largest number of sequences in a step that fills about 80% of the memory, or 0.
        batch_candidate: the layout with that batch, estimated; None where not one sequence fits.
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
            f"{given.layout} {verdict}: {_gb(given.bytes)} GB of the {_gb(given.usable_bytes)} GB that may be used",
            table([candidate for _, candidate in rows], names=[name for name, _ in rows]),
        ]
        if not given.fits and not self.proposals:
            lines.append("no layout of this batch fits, on any number of chips that it can use: shorten the sequence")
        if self.batch_candidate is not None:
            lines.append(
                f"batch {self.batch} fills {_gb(self.batch_candidate.bytes)} GB of the "
                f"{_gb(self.batch_candidate.usable_bytes)} GB that a target of about 80% leaves"
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
) -> Advice:
    """What would make a layout fit, each with its estimated bytes, and the batch that fills about 80% of the memory.

    Args:
        model: the sizes.
        layout: the layout that is asked about.
        chip: a chip or its name.
        batch: sequences in a step, over all devices.
        sequence: tokens a sequence.
        memory_share: how much of the chip's memory may be used.
        efficiency: share of the peak that matmuls reach.
        target: how much of the memory the advised batch may fill.

    Returns:
        Advice, which prints as a table.

    Raises:
        ValueError: as `estimate`.
    """
    of_kind(model, layout)

    def judged(layout: Layout) -> Candidate:
        return estimate(
            model,
            layout,
            chip=chip,
            batch=batch,
            sequence=sequence,
            memory_share=memory_share,
            efficiency=efficiency,
        )

    given = judged(layout)
    found: list[tuple[str, Candidate]] = []
    if not given.fits:
        every = [judged(other) for other in layouts(model, chip=chip, chips=layout.chips, batch=batch)]
        every = sorted((candidate for candidate in every if candidate.fits), key=_order)
        for name, belongs in _CHANGES.items():
            best = next((c for c in every if belongs(layout, c.layout)), None)
            if best is not None:
                found.append((name, best))
        if not found and every:
            found = [("together", every[0])]
        chips = layout.chips
        while not found and 2 * chips <= batch * model.heads:
            chips *= 2
            more = [judged(other) for other in layouts(model, chip=chip, chips=chips, batch=batch)]
            fitting = sorted((candidate for candidate in more if candidate.fits), key=_order)
            found = [("chips", fitting[0])] if fitting else []
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
    # more tensor ways take the place of copies or of shards; a replica's microbatch keeps its sequences
    "tensor": lambda a, b: (
        _changed("data", "fsdp", "tensor", "accumulate")(a, b)
        and b.tensor > a.tensor
        and b.data * b.fsdp * b.accumulate == a.data * a.fsdp * a.accumulate
    ),
    "accumulate": lambda a, b: _changed("accumulate")(a, b) and b.accumulate > a.accumulate,
    "remat": lambda a, b: _changed("remat")(a, b) and REMAT.index(b.remat) > REMAT.index(a.remat),
}


def batch_size(model: Model, layout: Layout, *, chip: str | cost.Chip, sequence: int, target: float = 0.8) -> int:
    """The most sequences in a step that fill at most that share of a device's memory.

    Activations are linear in the sequences of a microbatch, so that two estimates give the rest.

    Args:
        model: the sizes.
        layout: the layout; its accumulation stays.
        chip: a chip or its name.
        sequence: tokens a sequence.
        target: how much of the memory may be filled.

    Returns:
        Sequences in a step, over all devices; 0 where not one a microbatch fits.

    Raises:
        ValueError: as `estimate`.
    """
    of_kind(model, layout)
    share(target=target)
    step = layout.data * layout.fsdp * layout.accumulate
    one = estimate(model, layout, chip=chip, batch=step, sequence=sequence, memory_share=target)
    return max(0, math.floor((one.usable_bytes - one.state_bytes) / one.activation_bytes)) * step


def table(candidates: Iterable[Candidate], *, names: Iterable[str] = ()) -> str:
    """Candidates as aligned text: memory in GB (10^9 bytes) a device, times in ms a step, MFU in percent.

    Args:
        candidates: what to print, in order.
        names: a word for each row; none: no such column.

    Returns:
        The text.

    Raises:
        ValueError: names that are not one for each candidate.
    """
    check_kind("planner", "candidates", candidates, (ITERABLE,))
    check_kind("planner", "names", names, (ITERABLE,))
    candidates, names = list(candidates), list(names)
    for each in candidates:
        if not isinstance(each, Candidate):
            raise TypeError(f"planner: candidates must be those of search or estimate; got {each!r}. Pass them.")
    if names and len(names) != len(candidates):
        raise ValueError(
            f"planner: names must be one for each candidate; got {len(names)} for {len(candidates)}. Correct names."
        )
    head = (["", *Layout._fields] if names else list(Layout._fields)) + [
        "state GB",
        "activations GB",
        "compute ms",
        "hidden ms",
        "exposed ms",
        "step ms",
        "MFU %",
    ]
    rows = [head]
    for i, c in enumerate(candidates):
        figures = (c.compute_seconds, c.hidden_seconds, c.exposed_seconds, c.seconds)
        rows.append(
            ([names[i]] if names else [])
            + [str(value) for value in c.layout]
            + [_gb(c.state_bytes), _gb(c.activation_bytes)]
            + [f"{1e3 * seconds:.1f}" for seconds in figures]
            + [f"{100 * c.mfu:.1f}"]
        )
    widths = [max(len(row[k]) for row in rows) for k in range(len(head))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f}"


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _order(candidate: Candidate) -> tuple[float, int, int, int, float]:
    # of equally fast ones the plainest: fewer tensor ways, less accumulation, less remat; then the smallest
    _, _, tensor, accumulate, remat = candidate.layout
    return (candidate.seconds, tensor, accumulate, REMAT.index(remat), candidate.bytes)
