"""The files of examples/ as pages."""

from __future__ import annotations

import ast
import re
from pathlib import Path


def page(path: Path) -> str:
    """An example as Markdown: its docstring begins the page, and its first words are the heading."""
    source = path.read_text()
    module = ast.parse(source)
    text = ast.get_docstring(module) or path.stem
    first, _, rest = text.partition("\n\n")
    heading = re.split(r"[,:.] ", " ".join(first.split()))[0].rstrip(".")
    code = "\n".join(source.splitlines()[module.body[0].end_lineno :]).strip()
    parts = [f"# {heading}", first, rest, f"`examples/{path.name}`:", f"```python\n{code}\n```\n"]
    return "\n\n".join(part for part in parts if part)
