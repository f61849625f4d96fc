"""The parts of the page on the step as it is written, each a function of the facts."""

from __future__ import annotations

from shardkit import viz
from shardkit._check import counted, sized
from shardkit.analysis.hlo.report import size
from shardkit.reporting import pictures
from shardkit.reporting.html import Html, Part, bars, block, element, figures, part, table
from shardkit.reporting.read import Facts, Leaf
from shardkit.reporting.words import count, over, pass_of, place, seconds, times


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
        pairs.append(("exposed time on the wire per step", seconds(compiled.exposed_seconds)))
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
    arguments: dict[str, list[Leaf]] = {}
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
    return part("Layout", pictures.layout(facts), *parts)


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
        head = element("strong", each.rule), " at ", element("code", each.source)
        remedy = element("span", each.remedy, class_="quiet")
        items.append(element("li", *head, element("br"), each.message, element("br"), remedy))
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
