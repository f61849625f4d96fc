"""Docstrings of the house as sections that the reference shows: Layout, Cost and Source beside Args and Returns."""

from __future__ import annotations

import re
from typing import Any

import griffe

from docs.generate import papers

_SECTION = re.compile(r"(Args|Returns|Raises|Yields|Attributes|Example|Examples):\s*$")
_REMARK = re.compile(r"(Layout|Cost|Source): ?")


def separate_sections(text: str) -> str:
    """A docstring with an empty line above each of its sections, the one-line ones in bold, papers as links."""
    lines: list[str] = []
    for line in text.splitlines():
        remark = _REMARK.match(line)
        begins_section = remark is not None or _SECTION.match(line) is not None
        if begins_section and lines and lines[-1].strip():
            lines.append("")
        if remark is not None:
            line = f"**{remark[1]}:** {line[remark.end() :]}"
        if "arXiv:" in line:
            line = papers.link_papers(line)
        if line.startswith("Example:") and line.strip() == "Example:":  # griffe knows the plural
            line = "Examples:"
        lines.append(line)
    return "\n".join(lines)


class Sections(griffe.Extension):
    """Prepares each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for everything that is found in the package."""
        if obj.docstring:
            obj.docstring.value = separate_sections(obj.docstring.value)
