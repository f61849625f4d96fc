"""The parts of the page on the step as it is compiled, and on what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from shardkit import cost
from shardkit.analysis.hlo.collectives import CompiledRow
from shardkit.analysis.hlo.differences import grouped
from shardkit.analysis.hlo.memory import Memory
from shardkit.analysis.hlo.report import size
from shardkit.reporting import pictures
from shardkit.reporting.html import Html, Part, bars, block, element, joined, part, table
from shardkit.reporting.read import Facts
from shardkit.reporting.words import count, flops, over, place, seconds, times


def compiled(facts: Facts) -> Part:
    """The compiled program: memory, collectives, and what differs from what is written."""
    report, memory = facts.found.compiled, facts.memory
    if memory is None:
        message = block("the compiler's message", report.message if report else "")
        drawn = pictures.memory(facts) if report and report.needed else ""
        return part("As compiled", element("p", "The program does not fit:", class_="bad"), message, drawn)
    changes = facts.differences
    listed = element("ul", *(element("li", each) for each in changes))
    same = element("p", "Nothing: the program communicates as written.")
    head = element("h3", "What the compiler changed")
    shown = pictures.memory(facts), _memory(memory), pictures.overlap(facts), _collectives(facts)
    return part("As compiled", *shown, head, listed if changes else same)


def _memory(memory: Memory) -> Html:
    kinds = {
        "arguments: state and batch": memory.argument,
        "results outside of the arguments' buffers": memory.output - memory.alias,
        "temporaries": memory.temp,
        "program": memory.generated_code,
        "temporaries in host memory": memory.host_temp,
    }
    rows = [(name, f"{n:,}", size(n)) for name, n in kinds.items()]
    head = ("memory", "bytes", "rounded")
    caption = f"Memory per device by kind; the peak is {memory.peak:,} bytes ({size(memory.peak)})"
    return table(caption, head, rows, numbers=head[1:], bars=bars(kinds.values()))


def _collectives(facts: Facts) -> Html:
    if not facts.rows:
        return element("p", "The compiled program has no collectives.")
    timed = ("hidden by", "wire", "exposed") if facts.found.compiled else ()
    head = ("kind", "axes", "times", "arrays", "bytes in", "sent/device", "runs", *timed, "source")
    groups = grouped(facts.rows)
    rows = []
    for same in groups:
        first, runs = same[0], sum(r.times for r in same)
        hidden = flops(sum(r.hidden_flops * r.times for r in same)) if first.asynchronous else ""
        wire, exposed = sum(r.seconds * r.times for r in same), sum(r.exposed * r.times for r in same)
        left: list[object] = [first.kind, over(first.axes, first.n), times(runs, first.count is None), first.arrays]
        left += [f"{first.bytes_in:,}", count(sent(same)), "overlapped" if first.asynchronous else "synchronous"]
        rows.append(
            [*left, *((hidden, seconds(wire), seconds(exposed)) if timed else ()), place(first.place, first.branch)]
        )
    caption = "Every collective of the compiled program, equal ones together; bytes per device"
    numbers = ("times", "arrays", "bytes in", "sent/device", *timed)
    return table(caption, head, rows, numbers=numbers, bars=bars([sent(same) for same in groups]))


def sent(rows: Sequence[CompiledRow]) -> Fraction:
    """Bytes that a device sends per step in some collectives."""
    return sum((row.total for row in rows), Fraction(0))


def costs(facts: Facts) -> Part:
    """Time of each kind of collective by the alpha-beta model, and the roofline."""
    work, chip = facts.work, facts.chip
    done = f"Matmuls: {work.flops:,} FLOPs per device per step; memory traffic: {work.bytes:,} bytes."
    if not facts.found.audit:
        return part("Cost", element("p", "Not known: the program does not fit."))
    if chip is None:
        why = f"There are no figures of the links and the peak of {facts.found.target} devices: name chips as target."
        return part("Cost", element("p", done), element("p", why, class_="quiet"))
    link = cost.links(chip).link
    groups: dict[tuple[str, tuple[str, ...], int], list[CompiledRow]] = {}
    for row in facts.rows:
        groups.setdefault((row.kind, row.axes, row.n), []).append(row)
    rows, times_ = [], []
    for (kind, axes, n), same in groups.items():
        runs = sum(row.times for row in same)
        hops = runs * cost.wire(kind, 0, n).hops
        alpha, beta = hops * link.latency, float(sent(same)) / link.bandwidth
        times_.append(alpha + beta)
        rows.append(
            (
                kind,
                over(axes, n),
                runs,
                count(sent(same)),
                f"{hops:,}",
                seconds(alpha),
                seconds(beta),
                seconds(alpha + beta),
            )
        )
    head = ("kind", "axes", "times", "sent/device", "messages", "latency", "bytes", "both")
    caption = f"Time per step by the alpha-beta model: a ring over one link, {link}; {seconds(sum(times_))} in all"
    shown = table(caption, head, rows, numbers=head[2:], bars=bars(times_)) if rows else ""
    return part("Cost", element("p", done), _roofline(facts, chip), shown)


def _roofline(facts: Facts, chip: cost.Chip) -> Html:
    work, moved = facts.work, float(sent(facts.rows))
    if not work.flops + work.bytes + moved:
        return joined([])
    line = cost.roofline(work.flops, work.bytes, chip, sent=moved)
    parts = {
        "compute": (line.compute_seconds, f"{chip.flops / 1e12:g} TFLOP/s"),
        "memory": (line.memory_seconds, f"{chip.hbm_bandwidth / 1e9:g} GB/s"),
        "network": (line.network_seconds, f"{cost.group_bandwidth(chip) / 1e9:g} GB/s, one dimension both ways"),
    }
    rows = [(name, seconds(each), peak) for name, (each, peak) in parts.items()]
    caption = (
        f"Roofline of {chip.name}: bound by {line.bound}, at least {seconds(line.seconds)} per step; "
        f"{line.intensity:,.3g} FLOPs per byte, and from "
        f"{line.critical_intensity:,.3g} on compute takes longer than memory"
    )
    times_ = [each for each, _ in parts.values()]
    shown = table(caption, ("part", "at least", "at"), rows, numbers=("at least",), bars=bars(times_))
    return joined([pictures.roofline(line, chip), shown])
