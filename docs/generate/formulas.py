"""Formulas as MathML, which browsers draw themselves: no script, and nothing from outside."""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert

_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.S)
_BLOCK = re.compile(r'<div class="arithmatex">\\\[(.*?)\\\]</div>', re.S)


def drawn(text: str) -> str:
    """The HTML of a page with every formula that arithmatex has marked as MathML."""
    text = _BLOCK.sub(lambda found: convert(html.unescape(found[1]).strip(), display="block"), text)
    return _INLINE.sub(lambda found: convert(html.unescape(found[1]).strip()), text)
