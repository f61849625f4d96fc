"""What binds a layout, what one change would buy, and why the usual layouts lose, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardkit.planner.candidates import REMAT, Candidate, Layout, gigabytes, listed

Judge = Callable[[Layout], Candidate]  # `estimate` with all but the layout
_BAR = 24  # characters of the longest bar


def explain(best: Candidate, judge: Judge) -> str:
    """Why this layout: what binds it, what one change would buy, and how the usual layouts compare.

    Args:
        best: a candidate of `search`.
        judge: `estimate` with every argument but the layout, as `partial(estimate, model, chip=...)` with `layout=`.

    Returns:
        Text of a few lines; its times are predictions.

    Example:
        >>> model = sk.planner.Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256)
        >>> job = dict(chip="v5e", batch=256, sequence=4096)
        >>> best = sk.planner.search(model, chips=64, **job)[0]
        >>> print(sk.planner.explain(best, lambda layout: sk.planner.estimate(model, layout, **job)))
        compute binds: ...
    """
    [best] = listed([best])
    if not callable(judge):
        raise TypeError(
            f"planner: judge must be a function of a layout; got {judge!r}. Pass for example partial(planner.estimate, "
            "model, chip='v5e', batch=256, sequence=4096)."
        )

    def judged(layout: Layout) -> Candidate:
        [found] = listed([judge(layout)])
        return found

    lines = [_binds(best), *_changes(best, judged), "", "the usual layouts, in seconds per step:"]
    rows: list[tuple[str, Candidate | str]] = [("this layout", best), *_usual(best.layout, judged)]
    known = [each for _, each in rows if isinstance(each, Candidate)]
    longest, wide = max(each.seconds for each in known), max(len(name) for name, _ in rows)
    for name, each in rows:
        if isinstance(each, str):
            lines.append(f"{name:{wide}}  {'':{_BAR}}  {each}")
            continue
        verdict = "" if each.fits else f", does not fit: {gigabytes(each.bytes)} of {gigabytes(each.usable_bytes)} GB"
        bar = "#" * max(1, round(_BAR * each.seconds / longest))
        lines.append(f"{name:{wide}}  {bar:{_BAR}}  {each.seconds:.2f}{verdict}")
    return "\n".join(lines)


def _binds(c: Candidate) -> str:
    """The largest part of the step, and how full the memory is."""
    compute = f"compute {c.compute_seconds:.2f} s"
    compute += f" ({c.bubble:.0%} more than without the pipeline's waste)" if c.bubble else ""
    hidden = f"hidden communication {c.hidden_seconds:.2f} s"
    exposed = f"exposed communication {c.exposed_seconds:.2f} s"
    named = ", ".join(f"{axis} {seconds:.2f} s" for axis, seconds in c.by_axis if seconds >= 0.005)
    wire = f" (on the wire: {named})" if named else ""
    if c.hidden_seconds > c.compute_seconds:
        first = f"the links bind: {hidden}, more than {compute}; {exposed}"
    elif c.exposed_seconds > 0.2 * c.seconds:
        first = f"exposed communication binds: {exposed}, {compute}, {hidden}"
    else:
        first = f"compute binds: {compute}, {exposed}, {hidden}"
    return f"{first}{wire}; {gigabytes(c.bytes)} of {gigabytes(c.usable_bytes)} GB"


def _changes(best: Candidate, judge: Judge) -> Iterator[str]:
    """Layouts that differ in one thing and are faster, though some do not fit."""
    for name, layout in _neighbours(best.layout):
        try:
            other = judge(layout)
        except ValueError:  # it does not divide
            continue
        if other.seconds < 0.995 * best.seconds:
            needs = f"{gigabytes(other.bytes)} of {gigabytes(other.usable_bytes)} GB"
            fits = f"needs {needs}" if other.fits else f"does not fit: {needs}"
            yield f"{name}: {other.seconds:.2f} s instead of {best.seconds:.2f} s, {fits}"


def _neighbours(layout: Layout) -> Iterator[tuple[str, Layout]]:
    for remat in REMAT[: REMAT.index(layout.remat)]:
        yield f"with remat {remat}", layout._replace(remat=remat)
    if layout.accumulate % 2 == 0:
        yield "with half the microbatches", layout._replace(accumulate=layout.accumulate // 2)
    yield "with twice the chips", layout._replace(data=2 * layout.data)
    if layout.stage > 1:
        yield "with twice the microbatches", layout._replace(microbatches=2 * layout.microbatches)


def _usual(layout: Layout, judge: Judge) -> Iterator[tuple[str, Candidate | str]]:
    """The layouts that people try first, on as many chips, each with the best of its microbatches and remat."""
    chips = layout.chips
    for name, ways in (
        ("data alone", Layout(data=chips)),
        ("fsdp alone", Layout(fsdp=chips)),
        ("fsdp, tensor 8", Layout(fsdp=chips // 8, tensor=8)),
        ("data, fsdp 8, tensor 8", Layout(data=chips // 64, fsdp=8, tensor=8)),
        ("fsdp, 4 stages, tensor 8", Layout(fsdp=chips // 32, tensor=8, stage=4)),
    ):
        if ways.chips != chips:
            continue
        found, refusal = [], ""
        for remat in REMAT:
            for passes in (1, 2, 4, 8, 16, 32):
                count = {"microbatches": passes} if ways.stage > 1 else {"accumulate": passes}
                try:
                    found.append(judge(ways._replace(remat=remat, **count)))
                except ValueError as error:
                    refusal = str(error).removeprefix("planner: ").partition(";")[0]
        if found:
            yield name, min(found, key=lambda each: (not each.fits, each.seconds if each.fits else each.bytes))
        else:
            yield name, refusal
