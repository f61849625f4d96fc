"""Docstrings of the house as sections that the reference shows: Layout, Cost and Source beside Args and Returns."""

from __future__ import annotations

import re
from typing import Any

import griffe

from docs.generate import papers

_SECTION = re.compile(r"(Args|Returns|Raises|Yields|Attributes|Example|Examples):\s*$")
_REMARK = re.compile(r"(Layout|Cost|Source): ?")


def sections(text: str) -> str:
    """A docstring with an empty line above each of its sections, the one-line ones in bold, papers as links."""
    made: list[str] = []
    for line in text.splitlines():
        remark = _REMARK.match(line)
        if (remark or _SECTION.match(line)) and made and made[-1].strip():
            made.append("")
        if remark:
            line = f"**{remark[1]}:** {line[remark.end() :]}"
        line = papers.linked(line) if "arXiv:" in line else line
        made.append("Examples:" if line.strip() == "Example:" and line[0] != " " else line)
    return "\n".join(made)


class Sections(griffe.Extension):
    """Prepares each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for everything that is found in the package."""
        if obj.docstring:
            obj.docstring.value = sections(obj.docstring.value)
