"""The page of papers: every `Source:` of a docstring, and what follows it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

_SOURCE = re.compile(r"Source: (.*?)(?=\n\s*\n|\n\s*[A-Z]\w+:\s*\n|\Z)", re.S)
_ADDRESS = re.compile(r"(?<![(<])(https?://[^\s,;]+[^\s,;.])")
_ARXIV = re.compile(r"\barXiv:(\d{4}\.\d{4,5})")


def find_sources(package: Path) -> Iterator[tuple[str, str]]:
    """Where a source is named, as `folder/file.py: name`, and what it says."""
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                continue
            place = f"`{file}`"
            if not isinstance(node, ast.Module):
                place += f" `{node.name}`"
            for source in _SOURCE.finditer(ast.get_docstring(node) or ""):
                yield place, " ".join(source[1].split())


def page(package: Path) -> str:
    """The Markdown of the page: a row for each source, with all that follow it."""
    rows: dict[str, list[str]] = {}
    for place, source in find_sources(package):
        rows.setdefault(source, []).append(place)
    lines = []
    for source, places in sorted(rows.items()):
        lines.append(f"| {_format_cell(source)} | {', '.join(places)} |")
    head = "The docstrings name what each algorithm and closed form follows; this page collects their `Source:` lines."
    return "\n".join(["# Papers", "", head, "", "| source | followed by |", "|---|---|", *lines, ""])


def link_papers(text: str) -> str:
    """A text with its papers on arXiv as links."""
    return _ARXIV.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def _format_cell(text: str) -> str:
    """A source in a table: its addresses are links, and its bars do not end the cell."""
    text = _ADDRESS.sub(r"<\1>", text)
    return link_papers(text.replace("|", "\\|"))
