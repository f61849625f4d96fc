"""What binds a layout, what one change would buy, and why the usual layouts lose, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardkit.planner.candidates import Candidate, list_candidates
from shardkit.planner.layout import REMAT, Layout
from shardkit.planner.tables import format_gigabytes

Judge = Callable[[Layout], Candidate]  # `estimate` with all but the layout
_BAR = 24  # characters of the longest bar
_PASSES = (1, 2, 4, 8, 16, 32)  # microbatches that are tried with a usual layout


def explain(best: Candidate, judge: Judge) -> str:
    """Explains a layout: its bottleneck, the gain from each single change, and the usual layouts beside it.

    Args:
        best: a candidate of `search`.
        judge: `estimate` with all other arguments bound: it is called with `layout=`, as `partial(estimate, model,
            chip=...)`.

    Returns:
        Text of a few lines; its times are predictions.

    Example:
        >>> model = sk.planner.Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256)
        >>> job = dict(chip="v5e", batch=256, sequence=4096)
        >>> best = sk.planner.search(model, chips=64, **job)[0]
        >>> print(sk.planner.explain(best, lambda layout: sk.planner.estimate(model, layout, **job)))
        exposed communication binds: ...
    """
    [best] = list_candidates([best])
    if not callable(judge):
        raise TypeError(
            f"planner: judge must be a function of a layout; got {judge!r}. Pass for example partial(planner.estimate, "
            "model, chip='v5e', batch=256, sequence=4096)."
        )

    def judge_layout(layout: Layout) -> Candidate:
        [candidate] = list_candidates([judge(layout)])
        return candidate

    rows: list[tuple[str, Candidate | str]] = [("this layout", best), *_list_usual(best.layout, judge_layout)]
    lines = [_say_what_binds(best), *_list_faster(best, judge_layout)]
    return "\n".join([*lines, "", "the usual layouts, in seconds per step:", *_draw_bars(rows)])


def _draw_bars(rows: list[tuple[str, Candidate | str]]) -> list[str]:
    """A bar for each candidate, as long as its step; the reason for each layout that has none.

    Of two candidates of 2 and 4 seconds the first has half of the longest bar:

        this layout  ############              2.00
        data alone   ########################  4.00, does not fit: 126.62 of 72.00 GB
    """
    candidates = [result for _, result in rows if isinstance(result, Candidate)]
    longest = max(candidate.seconds for candidate in candidates)
    width = max(len(name) for name, _ in rows)
    lines = []
    for name, result in rows:
        if isinstance(result, str):
            lines.append(f"{name:{width}}  {'':{_BAR}}  {result}")
            continue
        bar = "#" * max(1, round(_BAR * result.seconds / longest))
        line = f"{name:{width}}  {bar:{_BAR}}  {result.seconds:.2f}"
        if not result.fits:
            line += f", does not fit: {_format_memory(result)}"
        lines.append(line)
    return lines


def _format_memory(candidate: Candidate) -> str:
    return f"{format_gigabytes(candidate.bytes)} of {format_gigabytes(candidate.usable_bytes)} GB"


def _say_what_binds(best: Candidate) -> str:
    """The largest part of the step, and how full the memory is."""
    compute = f"compute {best.compute_seconds:.2f} s"
    if best.bubble:
        compute += f" ({best.bubble:.0%} more than without the pipeline's waste)"
    hidden = f"hidden communication {best.hidden_seconds:.2f} s"
    exposed = f"exposed communication {best.exposed_seconds:.2f} s"
    if best.exposed_seconds > 0.2 * best.seconds:
        parts = f"exposed communication binds: {exposed}, {compute}, {hidden}"
    else:
        parts = f"compute binds: {compute}, {exposed}, {hidden}"
    axes = [f"{axis} {seconds:.2f} s" for axis, seconds in best.by_axis if seconds >= 0.005]
    if axes:
        parts += f" (on the wire: {', '.join(axes)})"
    return f"{parts}; {_format_memory(best)}"


def _list_faster(best: Candidate, judge: Judge) -> Iterator[str]:
    """Layouts that differ in one thing and are faster, though some do not fit."""
    for name, layout in _list_neighbours(best.layout):
        try:
            neighbour = judge(layout)
        except ValueError:  # it does not divide
            continue
        # A gain of less than half a percent is none: the estimate is less exact than that.
        if neighbour.seconds >= 0.995 * best.seconds:
            continue
        memory = _format_memory(neighbour)
        verdict = f"needs {memory}" if neighbour.fits else f"does not fit: {memory}"
        yield f"{name}: {neighbour.seconds:.2f} s instead of {best.seconds:.2f} s, {verdict}"


def _list_neighbours(layout: Layout) -> Iterator[tuple[str, Layout]]:
    for remat in REMAT[: REMAT.index(layout.remat)]:
        yield f"with remat {remat}", layout._replace(remat=remat)
    if layout.accumulate % 2 == 0:
        yield "with half the microbatches", layout._replace(accumulate=layout.accumulate // 2)
    yield "with twice the chips", layout._replace(data=2 * layout.data)
    if layout.stage > 1:
        yield "with twice the microbatches", layout._replace(microbatches=2 * layout.microbatches)


def _list_usual(layout: Layout, judge: Judge) -> Iterator[tuple[str, Candidate | str]]:
    """The layouts that people try first, on as many chips; why not of one that does not divide."""
    chips = layout.chips
    usual = {
        "data alone": Layout(data=chips),
        "fsdp alone": Layout(fsdp=chips),
        "fsdp, tensor 8": Layout(fsdp=chips // 8, tensor=8),
        "data, fsdp 8, tensor 8": Layout(data=chips // 64, fsdp=8, tensor=8),
    }
    for name, usual_layout in usual.items():
        # Where the chips do not divide by 8 or 64, `//` has rounded: that is a layout of fewer chips.
        if usual_layout.chips == chips:
            yield name, _judge_usual(usual_layout, judge)


def _judge_usual(layout: Layout, judge: Judge) -> Candidate | str:
    """The layout with the best of its microbatches and remat: the fastest that fits, or else the smallest."""
    candidates = []
    refusal = ""
    for remat in REMAT:
        for passes in _PASSES:
            variant = layout._replace(remat=remat, accumulate=passes)
            try:
                candidates.append(judge(variant))
            except ValueError as error:
                # The rule alone, without values and remedy: it stands in a line beside bars.
                refusal = str(error).removeprefix("planner: ").partition(";")[0]
    if not candidates:
        return refusal
    fitting = [candidate for candidate in candidates if candidate.fits]
    if fitting:
        return min(fitting, key=lambda candidate: candidate.seconds)
    return min(candidates, key=lambda candidate: candidate.bytes)
