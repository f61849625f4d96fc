"""Search: the layouts of a transformer that fit a machine, the fastest first.

    model = planner.Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256)
    found = planner.search(model, chip="v5e", chips=64, batch=256, sequence=4096)
    print(planner.table(found[:5]))
    print(planner.advise(model, planner.Layout(data=64), chip="v5e", batch=256, sequence=4096))

All figures are estimates of the model in `shardkit.planner.estimate`; the search is exhaustive.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from shardkit import cost
from shardkit._arguments import checks
from shardkit._arguments.typed import ITERABLE, check_kind
from shardkit.planner.axes import why_not
from shardkit.planner.candidates import REMAT, Candidate, Layout, listed
from shardkit.planner.counted import Counted, search_counted
from shardkit.planner.estimate import check, check_most, judged, tensor_divides
from shardkit.planner.model import Model

AXES = ("data", "fsdp", "tensor", "context", "expert", "stage")
_PASSES = 8  # microbatches of a pipeline, for each stage
_CHUNKS = 4  # more divide layers ever finer for ever less bubble


def search(
    model: Model | Counted,
    *,
    chip: str | cost.Chip,
    chips: int,
    batch: int,
    sequence: int | None = None,
    axes: Collection[str] = AXES,
    memory_share: float = 0.9,
    efficiency: float = 1.0,
    links: cost.Links | None = None,
) -> list[Candidate]:
    """Every layout that fits, the fastest first; of pipelines those of up to 8 microbatches a stage, and 4 chunks.

    Args:
        model: the sizes of a transformer; or any model, as `counted` returns it, whose layouts are dp, zero1 and fsdp.
        chip, batch, memory_share, efficiency: as for `estimate`; of a counted model `batch` is examples per step.
        sequence: tokens per sequence of a transformer; None: of a counted model.
        chips: number of chips, all used.
        axes: the axes of `Layout` that may have more than one way; leave out what your model cannot do.
        links: as measured; see `estimate`.

    Returns:
        Candidates; empty if none fits (see `advise`). `table` prints them.

    Raises:
        ValueError: chips or batch below 1, no layout that divides, an unknown chip or axis, or a share outside 0 to 1.

    Example:
        >>> model = sk.planner.Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256)
        >>> print(sk.planner.search(model, chip="v5e", chips=64, batch=256, sequence=4096)[0].layout)
        data=1 fsdp=16 tensor=2 accumulate=16 remat=none context=2
    """
    if isinstance(model, Counted):
        if sequence is not None:
            raise ValueError(
                f"planner: the examples of a counted model have the size that was counted; got sequence={sequence}. "
                "Leave it out."
            )
        return search_counted(model, cost.chip(chip), chips, batch, memory_share, efficiency, links)
    at: Any = sequence  # None is refused
    job: Any = {"chip": chip, "chips": chips, "batch": batch, "sequence": at, "axes": axes}
    found = estimates(model, **job, memory_share=memory_share, efficiency=efficiency, links=links)
    if not found:
        raise ValueError(
            f"planner: a layout must divide the chips, the model and the batch, and none does; got {chips} chips, "
            f"{model.heads} heads and batch {batch}. Choose a batch that has more divisors in common with the chips."
        )
    return ranked(found)


def kinds(candidates: Iterable[Candidate]) -> list[Candidate]:
    """A candidate of each kind, the fastest first; those of one kind use the same axes, but for "data" beside "fsdp".

    Of those that take at most 1% longer than the fastest of its kind, it is the one that sends for the shortest time:
    the estimate is no better than that, and what compute hides here a compiler may not.

    Example:
        >>> model = sk.planner.Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256)
        >>> found = sk.planner.search(model, chip="v5e", chips=64, batch=256, sequence=4096)
        >>> [sorted(each.layout.axes) for each in sk.planner.kinds(found)][:2]
        [['context', 'fsdp', 'model'], ['fsdp', 'model']]
    """
    of_kind: dict[frozenset[str], list[Candidate]] = {}
    for candidate in sorted(listed(candidates), key=lambda each: each.seconds):
        used = set(candidate.layout.axes)
        kind = frozenset(used - {"data"} if "fsdp" in used else used)
        those = of_kind.setdefault(kind, [])
        if not those or candidate.seconds <= 1.01 * those[0].seconds:
            those.append(candidate)
    chosen = [min(those, key=_wire_seconds) for those in of_kind.values()]
    return sorted(chosen, key=lambda each: each.seconds)


def _wire_seconds(candidate: Candidate) -> float:
    return sum(seconds for _, seconds in candidate.by_axis)


def estimates(
    model: Model,
    *,
    chip: str | cost.Chip,
    chips: int,
    batch: int,
    sequence: int,
    axes: Collection[str] = AXES,
    memory_share: float = 0.9,
    efficiency: float = 1.0,
    links: cost.Links | None = None,
) -> list[Candidate]:
    """Every layout that divides, whether it fits or not; arguments as for `search`."""
    it = cost.chip(chip)
    _, batch, sequence = check(model, Layout(), it, batch, sequence, memory_share, efficiency)
    [chips] = checks.whole("planner", chips=chips)
    every = layouts(model, chip=it, chips=chips, batch=batch, sequence=sequence, axes=axes)
    return [judged(model, each, it, batch, sequence, memory_share, efficiency, links) for each in every]


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates that fit, the fastest first; of equally fast ones the simplest, then the smallest."""

    def order(candidate: Candidate) -> tuple[float, int, int, int, float]:
        layout = candidate.layout
        simple = len(layout.axes) * layout.tensor * layout.chunks
        return (candidate.seconds, simple, layout.accumulate, REMAT.index(layout.remat), candidate.bytes)

    return sorted((candidate for candidate in candidates if candidate.fits), key=order)


def layouts(
    model: Model, *, chip: str | cost.Chip, chips: int, batch: int, sequence: int, axes: Collection[str] = AXES
) -> Iterator[Layout]:
    """Every layout of the model on that many chips: the ways that divide the chips, the model and the batch."""
    it = cost.chip(chip)
    check_most(chips=chips, batch=batch)
    check_kind("planner", "axes", axes, (ITERABLE,))
    for axis in axes:
        checks.one_of("planner", "axes", axis, AXES)
    for data, fsdp, tensor, context, expert, stage in _ways(chips, [axis in axes for axis in AXES]):
        if tensor_divides(model, it, tensor) and batch % (data * fsdp * expert) == 0:
            ways = Layout(data, fsdp, tensor, context=context, expert=expert, stage=stage)
            if not why_not(model, ways, sequence):
                yield from _passes(model, ways, batch // (data * fsdp * expert))


def _passes(model: Model, ways: Layout, examples: int) -> Iterator[Layout]:
    """The layout with every number of microbatches that divides the examples of a device; a pipeline has its own."""
    for passes in _divisors(examples):
        for remat in REMAT:
            if ways.stage == 1:
                yield ways._replace(accumulate=passes, remat=remat)
            elif ways.stage <= passes <= _PASSES * ways.stage:  # with fewer most stages idle, with more no less
                for chunks in _divisors(model.layers // ways.stage):
                    if chunks <= _CHUNKS:
                        yield ways._replace(microbatches=passes, chunks=chunks, remat=remat)


def _ways(chips: int, used: Sequence[bool]) -> Iterator[tuple[int, ...]]:
    """Every product of ways that is the number of chips; 1 for the axes that are not used."""
    if not used:
        if chips == 1:
            yield ()
        return
    for first in _divisors(chips) if used[0] else (1,):
        for others in _ways(chips // first, used[1:]):
            yield (first, *others)


@lru_cache
def _divisors(n: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, n + 1) if n % d == 0)
