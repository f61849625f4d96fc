"""Formulas as MathML, which browsers draw themselves: no script, and nothing from outside."""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert

_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.S)
_BLOCK = re.compile(r'<div class="arithmatex">\\\[(.*?)\\\]</div>', re.S)


def draw_formulas(text: str) -> str:
    """The HTML of a page with every formula that arithmatex has marked as MathML."""
    return _INLINE.sub(_draw_inline, _BLOCK.sub(_draw_block, text))


def _draw_block(match: re.Match[str]) -> str:
    return str(convert(html.unescape(match[1]).strip(), display="block"))


def _draw_inline(match: re.Match[str]) -> str:
    return str(convert(html.unescape(match[1]).strip()))
