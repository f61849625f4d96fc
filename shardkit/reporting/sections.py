"""The parts of the page, each a function of the facts: the step as it is written, as it is compiled, what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from shardkit import cost, viz
from shardkit._arguments.checks import counted, sized
from shardkit.analysis.hlo.collectives import CompiledRow
from shardkit.analysis.hlo.differences import grouped
from shardkit.analysis.hlo.memory import Memory
from shardkit.analysis.hlo.report import size
from shardkit.analysis.jaxpr.census import CensusRow
from shardkit.reporting import pictures
from shardkit.reporting.html import Html, Part, bars, block, element, figures, joined, part, table
from shardkit.reporting.read import ArgumentLeaf, Facts
from shardkit.viz.bars import duration


def count(size: Fraction) -> str:
    """Bytes, exactly."""
    return f"{int(size):,}" if size.denominator == 1 else f"{float(size):,.1f}"


def times(number: int, unknown: bool) -> str:
    """How often a collective runs; a loop of unknown length counts once."""
    return f"{number}?" if unknown else f"{number}"


def over(axes: tuple[str, ...], n: int) -> str:
    """The axes of a collective and its devices."""
    return f"{','.join(axes)}={n}"


def place(source: str, branch: str) -> str:
    """The line of a collective, and the branch of a conditional in which it is."""
    return f"{source} [{branch}]" if branch else source


def pass_of(row: CensusRow) -> str:
    """The part of the step in which a collective runs."""
    return "backward" if row.backward else "update" if row.update else "forward"


def flops(number: int) -> str:
    """Floating-point operations in the unit that suits them, with three digits."""
    units = (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6))
    unit, scale = next((each for each in units if number >= each[1]), ("kFLOP", 1e3))
    return f"{number / scale:.3g} {unit}"


def summary(facts: Facts) -> Html:
    """The step in a few figures."""
    found, compiled = facts.found, facts.found.compiled
    pairs: list[tuple[str, object]] = [("mesh", sized(found.mesh.items())), ("compiled for", found.target)]
    if compiled:
        needed = f", {size(compiled.needed)} of {size(compiled.available)}" if compiled.needed else ""
        fits = element("span", f"{'yes' if compiled.fits else 'NO'}{needed}", class_="good" if compiled.fits else "bad")
        pairs.append(("fits, per device", fits))
    if facts.memory:
        pairs.append(("held between steps, per device", size(facts.memory.held)))
        pairs.append(("peak, per device", size(facts.memory.peak)))
    pairs.append(("sent per device per step, as written", size(found.census.sent())))
    if found.audit:
        pairs.append(("sent per device per step, as compiled", size(found.audit.sent())))
    if compiled and compiled.memory:
        pairs.append(("exposed time on the wire per step", duration(compiled.exposed_seconds)))
    broken = element("span", str(len(found.findings) or "none"), class_="bad" if found.findings else "good")
    pairs.append(("findings", broken))
    return figures(pairs)


def mesh(facts: Facts) -> Part:
    """The axes, and what goes over each."""
    found, audit = facts.found, facts.found.audit
    if not found.mesh:
        return part("Mesh", element("p", "The step runs on one device."))
    sent = {axis: found.census.sent(axis=axis) for axis in found.mesh}
    head = ("axis", "devices", "collectives", "bytes sent", *(("as compiled",) if audit else ()))
    rows = [
        (axis, n, found.census.count(axis=axis), count(sent[axis]), *((count(audit.sent(axis=axis)),) if audit else ()))
        for axis, n in found.mesh.items()
    ]
    caption = "What goes over each axis: collectives per step, bytes that a device sends per step"
    shown = table(caption, head, rows, numbers=head[1:], bars=bars(sent.values()))
    return part("Mesh", pictures.mesh(facts), shown)


def layout(facts: Facts) -> Part:
    """Where every leaf of every argument is, and why."""
    parts: list[object] = []
    if facts.plan:
        head, rows, total = facts.plan
        caption = "Layout of each parameter at rest and in the update, bytes per device of both, and why"
        parts = [
            element("h3", "Plan"),
            element("p", total),
            table(caption, head, rows, numbers=("bytes/device",), wide=("why",)),
        ]
    arguments: dict[str, list[ArgumentLeaf]] = {}
    for leaf in facts.found.leaves:
        arguments.setdefault(leaf.argument, []).append(leaf)
    for name, leaves in arguments.items():
        held = sum(leaf.bytes for leaf in leaves)
        leaf_head = ("leaf", "global", "dtype", "spec", "local", "devices", "bytes/device")
        cells = [(*leaf[1:7], f"{leaf.bytes:,}") for leaf in leaves]
        leaves_ = counted(len(leaves), "array")
        caption = f"{leaves_}, {held:,} bytes ({size(held)}) on each device"
        shown = table(caption, leaf_head, cells, numbers=leaf_head[5:], bars=bars([leaf.bytes for leaf in leaves]))
        parts += [element("h3", "Argument ", element("code", name)), shown]
    return part("Layout", *parts)


def pipeline(facts: Facts) -> Part | None:
    """The schedule of a pipeline; None of a step that is none."""
    if facts.schedule is None:
        return None
    timeline = facts.schedule.simulate()
    said = element("p", f"{viz.title(facts.schedule)}; {viz.facts(timeline)}.")
    grid = block("schedule", facts.schedule)
    return part("Pipeline", said, pictures.pipeline(facts.schedule, timeline), grid)


def census(facts: Facts) -> Part:
    """Every collective as written."""
    found = facts.found.census
    if not found.rows:
        return part("Collectives as written", element("p", "There are none: nothing is sent inside shard_map."))
    head = ("kind", "axes", "times", "bytes in", "bytes out", "sent/device", "pass", "source")
    rows = [
        (
            row.kind,
            over(row.axes, row.n),
            times(row.times, row.count is None),
            f"{row.bytes_in:,}",
            f"{row.bytes_out:,}",
            count(row.total),
            pass_of(row),
            place(row.source, row.branch),
        )
        for row in found.rows
    ]
    said = f"{counted(found.count(), 'collective')} per step; a device sends {count(found.sent())} bytes."
    caption = "Every collective of the traced program; bytes per device"
    shown = table(caption, head, rows, numbers=head[2:6], bars=bars([row.total for row in found.rows]))
    return part("Collectives as written", element("p", said), pictures.census(facts), shown)


def findings(facts: Facts) -> Part:
    """What breaks a rule, with the remedy; and the rules that were not tried."""
    found, audit = facts.found.findings, facts.found.audit
    items = []
    for each in found:
        rule, source = element("strong", each.rule), element("code", each.source)
        remedy = element("span", each.remedy, class_="quiet")
        at = " at " if each.source else ""
        items.append(element("li", rule, at, source, element("br"), each.message, element("br"), remedy))
    shown = element("ol", *items, class_="findings") if items else element("p", "No rule is broken.")
    left = [element("p", f"Not tried: {each}.", class_="quiet") for each in (audit.skipped if audit else ())]
    return part("Findings", shown, *left)


def made(command: str, about: dict[str, object]) -> Part:
    """Where the page is from."""
    rows = [(name, value) for name, value in about.items() if value not in (None, "")]
    return part(
        "How this page was made",
        block("command", command) if command else "",
        table("Versions and machine", ("what", "value"), rows),
    )


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
    return part(
        "As compiled",
        pictures.memory(facts),
        _memory(memory),
        pictures.overlap(facts),
        _collectives(facts),
        head,
        listed if changes else same,
    )


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
            [*left, *((hidden, duration(wire), duration(exposed)) if timed else ()), place(first.place, first.branch)]
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
                duration(alpha),
                duration(beta),
                duration(alpha + beta),
            )
        )
    head = ("kind", "axes", "times", "sent/device", "messages", "latency", "bytes", "both")
    caption = f"Time per step by the alpha-beta model: a ring over one link, {link}; {duration(sum(times_))} in all"
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
    rows = [(name, duration(each), peak) for name, (each, peak) in parts.items()]
    caption = (
        f"Roofline of {chip.name}: bound by {line.bound}, at least {duration(line.seconds)} per step; "
        f"{line.intensity:,.3g} FLOPs per byte, and from "
        f"{line.critical_intensity:,.3g} on compute takes longer than memory"
    )
    drawn = bars([each for each, _ in parts.values()])
    return table(caption, ("part", "at least", "at"), rows, numbers=("at least",), bars=drawn)
