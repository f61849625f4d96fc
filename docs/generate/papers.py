"""The page of papers: every `Source:` of a docstring, and what follows it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

_SOURCE = re.compile(r"Source: (.*?)(?=\n\s*\n|\n\s*[A-Z]\w+:\s*\n|\Z)", re.S)
_ADDRESS = re.compile(r"(?<![(<])(https?://[^\s,;]+[^\s,;.])")
_ARXIV = re.compile(r"\barXiv:(\d{4}\.\d{4,5})")


def sources(package: Path) -> Iterator[tuple[str, str]]:
    """Where a source is named, as `folder/file.py: name`, and what it says."""
    for path in sorted(package.rglob("*.py")):
        where = path.relative_to(package).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                for found in _SOURCE.finditer(ast.get_docstring(node) or ""):
                    name = "" if isinstance(node, ast.Module) else node.name
                    yield f"`{where}`" + (f" `{name}`" if name else ""), " ".join(found[1].split())


def page(package: Path) -> str:
    """The Markdown of the page: a row for each source, with all that follow it."""
    rows: dict[str, list[str]] = {}
    for where, source in sources(package):
        rows.setdefault(source, []).append(where)
    lines = [f"| {_row(source)} | {', '.join(where)} |" for source, where in sorted(rows.items())]
    head = "The docstrings name what each algorithm and closed form follows; this page collects their `Source:` lines."
    return "\n".join(["# Papers", "", head, "", "| source | followed by |", "|---|---|", *lines, ""])


def linked(text: str) -> str:
    """A text with its papers on arXiv as links."""
    return _ARXIV.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def _row(text: str) -> str:
    return linked(_ADDRESS.sub(r"<\1>", text).replace("|", "\\|"))
