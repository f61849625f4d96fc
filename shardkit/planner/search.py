"""Search: the layouts of a transformer that fit a machine, the fastest first.

    model = planner.Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256)
    found = planner.search(model, chip="v5e", chips=64, batch=256, sequence=4096)
    print(planner.table(found[:5]))
    print(planner.advise(model, planner.Layout(data=64), chip="v5e", batch=256, sequence=4096))

All figures are estimates of the model in `shardkit.planner.estimate`; the search is exhaustive.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from typing import Any

from shardkit import cost
from shardkit._arguments import checks
from shardkit._arguments.typed import ITERABLE, check_kind
from shardkit.planner.candidates import Candidate, list_candidates
from shardkit.planner.counted import Counted, search_counted
from shardkit.planner.estimate import check_at_most_a_billion, check_job, estimate_checked, tensor_divides
from shardkit.planner.layout import REMAT, Layout
from shardkit.planner.machine import Machine
from shardkit.planner.model import Model
from shardkit.planner.share import find_misfit

AXES = ("data", "fsdp", "tensor", "context", "expert", "stage")
# With 8 microbatches a stage a pipeline idles for at most an eighth of its work. More of them are smaller, and take
# longer for the same tokens, which no estimate here says.
_MICROBATCHES_PER_STAGE = 8
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
    """Finds every layout that fits, the fastest first; pipelines with up to 8 microbatches a stage, and 4 chunks.

    Args:
        model: the sizes of a transformer; or any model, from `counted`: its layouts are dp, zero1 and fsdp.
        chip, batch, memory_share, efficiency: as for `estimate`. For a counted model `batch` is examples per step.
        sequence: tokens per sequence of a transformer; None for a counted model.
        chips: number of chips, all used.
        axes: the axes of `Layout` that may have more than one way; leave out axes that your model cannot use.
        links: measured links; see `estimate`.

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
        machine = Machine(cost.chip(chip), memory_share, efficiency, links)
        return search_counted(model, machine, chips, batch)
    tokens: Any = sequence  # None is refused
    estimates = list_estimates(
        model,
        chip=chip,
        chips=chips,
        batch=batch,
        sequence=tokens,
        axes=axes,
        memory_share=memory_share,
        efficiency=efficiency,
        links=links,
    )
    if not estimates:
        raise ValueError(
            f"planner: a layout must divide the chips, the model and the batch, and none does; got {chips} chips, "
            f"{model.heads} heads and batch {batch}. Choose a batch that has more divisors in common with the chips."
        )
    return rank(estimates)


def kinds(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Picks a candidate of each kind, the fastest first. A kind is a set of axes; "data" beside "fsdp" does not count.

    Among the candidates at most 1% slower than the fastest of its kind, it picks the one that sends for the shortest
    time. The estimate is not more exact than this, and a compiler may not hide what the estimate hides.

    Example:
        >>> model = sk.planner.Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256)
        >>> found = sk.planner.search(model, chip="v5e", chips=64, batch=256, sequence=4096)
        >>> [sorted(each.layout.axes) for each in sk.planner.kinds(found)][:2]
        [['context', 'fsdp', 'model'], ['fsdp', 'model']]
    """
    fastest_by_kind: dict[frozenset[str], list[Candidate]] = {}
    for candidate in sorted(list_candidates(candidates), key=_seconds_of):
        axes = set(candidate.layout.axes)
        # Layouts that replicate the parts of fsdp are of its kind: they differ in where the same bytes are sent.
        if "fsdp" in axes:
            axes.discard("data")
        # Sorted by time, so that the first of a kind is its fastest.
        fastest = fastest_by_kind.setdefault(frozenset(axes), [])
        if not fastest or candidate.seconds <= 1.01 * fastest[0].seconds:
            fastest.append(candidate)
    chosen = [min(fastest, key=_count_wire_seconds) for fastest in fastest_by_kind.values()]
    return sorted(chosen, key=_seconds_of)


def _seconds_of(candidate: Candidate) -> float:
    return candidate.seconds


def _count_wire_seconds(candidate: Candidate) -> float:
    return sum(seconds for _, seconds in candidate.by_axis)


def list_estimates(
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
    machine = Machine(cost.chip(chip), memory_share, efficiency, links)
    _, batch, sequence = check_job(model, Layout(), machine, batch, sequence)
    [chips] = checks.integers_from_one("planner", chips=chips)
    estimates = []
    for layout in list_layouts(model, chip=machine.chip, chips=chips, batch=batch, sequence=sequence, axes=axes):
        estimates.append(estimate_checked(model, layout, machine, batch, sequence))
    return estimates


def rank(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates that fit, the fastest first; of equally fast ones the simplest, then the smallest."""
    fitting = [candidate for candidate in candidates if candidate.fits]
    return sorted(fitting, key=_rank_key)


def _rank_key(candidate: Candidate) -> tuple[float, int, int, int, float]:
    layout = candidate.layout
    # Of layouts that are equally fast the one with fewer axes, and with less of what the estimate does not see:
    # matrices that are cut into narrow ones, and more sends of a pipeline.
    complexity = len(layout.axes) * layout.tensor * layout.chunks
    return (candidate.seconds, complexity, layout.accumulate, REMAT.index(layout.remat), candidate.bytes)


def list_layouts(
    model: Model, *, chip: str | cost.Chip, chips: int, batch: int, sequence: int, axes: Collection[str] = AXES
) -> Iterator[Layout]:
    """Every layout of the model on that many chips: the ways that divide the chips, the model and the batch."""
    described = cost.chip(chip)
    check_at_most_a_billion(chips=chips, batch=batch)
    check_kind("planner", "axes", axes, (ITERABLE,))
    for axis in axes:
        checks.one_of("planner", "axes", axis, AXES)
    for ways in _list_ways(chips, tuple(axis for axis in AXES if axis in axes)):
        layout = Layout(**ways)
        examples, remainder = divmod(batch, layout.parts)
        if remainder or not tensor_divides(model, described, layout.tensor):
            continue
        if not find_misfit(model, layout, sequence):
            yield from _divide_examples(model, layout, examples)


def _list_ways(chips: int, axes: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Every product of ways of these axes that is the number of chips.

    For example 4 chips over data and fsdp: 1 x 4, 2 x 2, 4 x 1.
    """
    if not axes:
        if chips == 1:
            yield {}
        return
    for first in _list_divisors(chips):
        for others in _list_ways(chips // first, axes[1:]):
            yield {axes[0]: first} | others


def _divide_examples(model: Model, layout: Layout, examples: int) -> Iterator[Layout]:
    """The layout with every number of microbatches that divides the examples of a device; a pipeline has its own."""
    for passes in _list_divisors(examples):
        for remat in REMAT:
            if layout.stage == 1:
                yield layout._replace(accumulate=passes, remat=remat)
                continue
            # With fewer microbatches most stages idle, with more none idles less.
            if not layout.stage <= passes <= _MICROBATCHES_PER_STAGE * layout.stage:
                continue
            for chunks in _list_divisors(model.layers // layout.stage):
                if chunks <= _CHUNKS:
                    yield layout._replace(microbatches=passes, chunks=chunks, remat=remat)


@lru_cache
def _list_divisors(n: int) -> tuple[int, ...]:
    return tuple(divisor for divisor in range(1, n + 1) if n % divisor == 0)
