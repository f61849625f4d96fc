"""Pictures of `shardkit.viz` inside the page, as SVG with names of their own."""

from __future__ import annotations

import re
from io import BytesIO
from typing import Any

from shardkit import viz
from shardkit.reporting.html import Html, element, escaped, joined
from shardkit.reporting.read import Facts

# A picture of more devices is larger than the rest of the page.
MOST = 128


def mesh(facts: Facts) -> Html:
    """Which device is where."""
    devices = facts.devices
    if devices is None or devices.size > MOST:
        return joined([])
    axes = " x ".join(f"{name}={size}" for name, size in devices.shape.items())
    return _figure("mesh", viz.mesh(devices), f"The device at each coordinate of the mesh {axes}, by its id")


def _figure(name: str, picture: Any, caption: str) -> Html:
    """A picture with its caption, which is also its text for those who cannot see it."""
    out = BytesIO()
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "shardkit"}):
        picture.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    svg = inline(out.getvalue().decode(), name, caption)
    return element("figure", svg, element("figcaption", caption))


def inline(svg: str, name: str, caption: str) -> Html:
    """An SVG file as a part of a page: without its head, with ids that no other picture has."""
    body = svg[svg.index("<svg") :].strip()
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.S)
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'(xlink:href="#|href="#|url\(#)', rf"\g<1>{name}-", body)
    return Html(body.replace("<svg", f'<svg role="img" aria-label="{escaped(caption)}"', 1))
