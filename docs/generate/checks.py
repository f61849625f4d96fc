"""What the built manual must hold: no link leads nowhere, and no page loads a file from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

_TAG = re.compile(r"<(a|link|script|img|iframe)\b[^>]*?\s(?:href|src)=[\"']?([^\"'\s>]+)")
_ANCHOR = re.compile(r"\s(?:id|name)=[\"']?([^\"'\s>]+)")


def faults(site: Path) -> list[str]:
    """A sentence for each link without a target and each file that would come from another host.

    Args:
        site: the folder of the built manual.
    """
    texts = {path: path.read_text() for path in sorted(site.rglob("*.html")) if path.name != "404.html"}
    anchors = {path: set(_ANCHOR.findall(text)) for path, text in texts.items()}
    found = []
    for path, text in texts.items():
        here = path.relative_to(site)
        for tag, address in dict.fromkeys(_TAG.findall(text)):
            parts = urlsplit(address.replace("&amp;", "&"))
            if parts.scheme or parts.netloc:
                found += [f"{here}: {tag} loads {address}."] if tag != "a" and parts.scheme != "data" else []
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file() and not (target / "index.html").is_file():
                found.append(f"{here}: {address} leads nowhere.")
            elif target in anchors and parts.fragment and unquote(parts.fragment) not in anchors[target]:
                found.append(f"{here}: {address} has no such anchor.")
    return found
