"""Search: the layouts of a transformer that fit a machine, the fastest first.

    model = planner.Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256)
    found = planner.search(model, chip="v5e", chips=64, batch=256, sequence=4096)
    print(planner.table(found[:5]))
    print(planner.advise(model, planner.Layout(data=64), chip="v5e", batch=256, sequence=4096))

All figures are estimates of the model in `shardkit.planner.estimate`; the search is exhaustive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from shardkit import cost
from shardkit._arguments import checks
from shardkit.planner.candidates import REMAT, Candidate, Layout
from shardkit.planner.counted import Counted, search_counted
from shardkit.planner.estimate import check, check_most, estimate, tensor_divides
from shardkit.planner.model import Model


def search(
    model: Model | Counted,
    *,
    chip: str | cost.Chip,
    chips: int,
    batch: int,
    sequence: int | None = None,
    memory_share: float = 0.9,
    efficiency: float = 1.0,
    links: cost.Links | None = None,
) -> list[Candidate]:
    """Every layout that fits, the fastest first.

    Args:
        model: the sizes of a transformer; or any model, as `counted` returns it, whose layouts are dp, zero1 and fsdp.
        chip, batch, memory_share, efficiency: as for `estimate`; of a counted model `batch` is examples per step.
        sequence: tokens per sequence of a transformer; None: of a counted model.
        chips: number of chips, all used.
        links: as measured; see `estimate`.

    Returns:
        Candidates; empty if none fits (see `advise`). `table` prints them.

    Raises:
        ValueError: chips or batch below 1, no layout that divides, an unknown chip, or a share outside 0 to 1.

    Example:
        >>> model = sk.planner.Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256)
        >>> print(sk.planner.search(model, chip="v5e", chips=64, batch=256, sequence=4096)[0].layout)
        data=1 fsdp=32 tensor=2 accumulate=8 remat=selective
    """
    if isinstance(model, Counted):
        if sequence is not None:
            raise ValueError(
                f"planner: the examples of a counted model have the size that was counted; got sequence={sequence}. "
                "Leave it out."
            )
        return search_counted(model, cost.chip(chip), chips, batch, memory_share, efficiency, links)
    at: Any = sequence  # None is refused
    _, batch, sequence = check(model, Layout(), cost.chip(chip), batch, at, memory_share, efficiency)
    [chips] = checks.whole("planner", chips=chips)
    judged = partial(
        estimate,
        model,
        chip=chip,
        batch=batch,
        sequence=sequence,
        memory_share=memory_share,
        efficiency=efficiency,
        links=links,
    )
    found = list(map(judged, layouts(model, chip=chip, chips=chips, batch=batch)))
    if not found:
        raise ValueError(
            f"planner: a layout must divide the chips, the model and the batch, and none does; got {chips} chips, "
            f"{model.heads} heads and batch {batch}. Choose a batch that has more divisors in common with the chips."
        )
    return ranked(found)


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates that fit, the fastest first; of equally fast ones the simplest, then the smallest."""

    def order(candidate: Candidate) -> tuple[float, int, int, int, float]:
        _, _, tensor, accumulate, remat = candidate.layout
        return (candidate.seconds, tensor, accumulate, REMAT.index(remat), candidate.bytes)

    return sorted((candidate for candidate in candidates if candidate.fits), key=order)


def layouts(model: Model, *, chip: str | cost.Chip, chips: int, batch: int) -> Iterator[Layout]:
    """Every layout of the model on that many chips: the ways that divide the chips, the model and the batch."""
    it = cost.chip(chip)
    check_most(chips=chips, batch=batch)
    for tensor in _divisors(chips):
        for fsdp in _divisors(chips // tensor) if tensor_divides(model, it, tensor) else ():
            data = chips // (tensor * fsdp)
            if batch % (data * fsdp) == 0:
                for accumulate in _divisors(batch // (data * fsdp)):
                    yield from (Layout(data, fsdp, tensor, accumulate, remat) for remat in REMAT)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
