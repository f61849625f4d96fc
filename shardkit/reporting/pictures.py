"""Pictures of `shardkit.viz` inside the page, as images that hold their own SVG."""

from __future__ import annotations

from base64 import b64encode
from io import BytesIO
from typing import Any

from shardkit import viz
from shardkit.analysis.hlo.differences import Compiled
from shardkit.reporting.html import Html, element, joined
from shardkit.reporting.read import Facts
from shardkit.schedules import Schedule, Timeline
from shardkit.viz.style import svg_of

# A picture of more devices is larger than the rest of the page.
MOST = 128
# Bytes from which a picture stands as pixels: one of thousands of parts.
LARGEST = 100_000
# The memory of a chip is drawn if the program needs at least this share of it; else no bar would be seen.
FILLED = 0.05


def mesh(facts: Facts) -> Html:
    """Which device is where."""
    devices = facts.devices
    if devices is None or devices.size > MOST:
        return joined([])
    axes = " x ".join(f"{name}={size}" for name, size in devices.shape.items())
    return figure("mesh", viz.mesh(devices), f"The device at each coordinate of the mesh {axes}, by its id")


def census(facts: Facts) -> Html:
    """What goes over each axis, as written and as compiled."""
    found = facts.found
    several: dict[str, Any] = {"as written": found.census}
    if facts.memory:
        several["as compiled"] = Compiled(found.census, facts.rows, facts.memory)
    caption = "Bytes that a device sends per step over each axis, by kind of collective"
    return figure("census", viz.census(several), caption)


def memory(facts: Facts) -> Html:
    """What a device holds."""
    report, held = facts.found.compiled, facts.memory
    if report and not held:
        drawn = viz.memory({"needed": report.needed}, limit=report.available)
    else:
        near = report is not None and report.needed >= FILLED * report.available
        drawn = viz.memory(report if near else held, state=facts.state)
    return figure("memory", drawn, "Memory of a device by what it holds")


def pipeline(schedule: Schedule, timeline: Timeline) -> Html:
    """What each device of a pipeline does when."""
    caption = "The schedule of the pipeline: a backward pass takes twice as long as a forward pass, and sending no time"
    return figure("pipeline", viz.figure(schedule, timeline), caption)


def overlap(facts: Facts) -> Html:
    """How much of the collectives compute hides, by the schedule of the target's compiler."""
    report = facts.found.compiled
    if report is None or report.memory is None:
        return joined([])
    caption = "Compute and collectives of one step, as the compiler scheduled them, by the model of times"
    return figure("overlap", viz.overlap(report), caption)


def figure(name: str, picture: Any, caption: str) -> Html:
    """A picture with its caption, which is also read out to those who cannot see it."""
    picture.set_label(caption)
    kind, data = "svg+xml", svg_of(picture).encode()
    if len(data) > LARGEST:
        png = BytesIO()
        picture.savefig(png, format="png")
        kind, data = "png", png.getvalue()
    width = round(96 * picture.get_size_inches()[0])
    drawn = element("img", src=f"data:image/{kind};base64,{b64encode(data).decode()}", alt=caption, width=width)
    box = element("div", drawn, class_="picture", tabindex="0", role="region", aria_label=name)
    return element("figure", element("figcaption", caption), box)
