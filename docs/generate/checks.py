"""What the built manual must hold: no link leads nowhere, and no page loads a file from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

_TAG = re.compile(r"<(a|link|script|img|iframe)\b[^>]*?\s(?:href|src)=[\"']?([^\"'\s>]+)")
_ANCHOR = re.compile(r"\s(?:id|name)=[\"']?([^\"'\s>]+)")


def find_faults(site: Path) -> list[str]:
    """A sentence for each link without a target and each file that would come from another host.

    Args:
        site: the folder of the built manual.
    """
    texts = {}
    anchors = {}
    for path in sorted(site.rglob("*.html")):
        if path.name == "404.html":
            continue
        texts[path] = path.read_text()
        anchors[path] = set(_ANCHOR.findall(texts[path]))
    faults = []
    for path, text in texts.items():
        page = path.relative_to(site)
        for tag, address in dict.fromkeys(_TAG.findall(text)):
            fault = _find_fault(path, tag, address, anchors)
            if fault:
                faults.append(f"{page}: {fault}")
    return faults


def _find_fault(path: Path, tag: str, address: str, anchors: Mapping[Path, set[str]]) -> str:
    """What is wrong with an address on a page; "" if nothing is."""
    parts = urlsplit(address.replace("&amp;", "&"))
    if parts.scheme or parts.netloc:
        # A reader may follow a link to another host; a page must not load anything from there.
        if tag == "a" or parts.scheme == "data":
            return ""
        return f"{tag} loads {address}."
    target = path
    if parts.path:
        target = (path.parent / unquote(parts.path)).resolve()
    if not target.is_file() and not (target / "index.html").is_file():
        return f"{address} leads nowhere."
    if target in anchors and parts.fragment and unquote(parts.fragment) not in anchors[target]:
        return f"{address} has no such anchor."
    return ""
