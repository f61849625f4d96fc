"""The files of examples/ as a page."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path


def page(paths: Sequence[Path]) -> str:
    """All examples as Markdown."""
    head = (
        "Copy one of these files and change it. Each is in the folder `examples/`, and a test runs it. For your own "
        "project begin with the three files of `examples/research/`: a model, its training run, its tests."
    )
    sections = [make_section(path) for path in paths]
    return "\n\n".join(["# Examples", head, *sections]) + "\n"


def make_section(path: Path) -> str:
    """An example: its docstring begins the section, and its first words are the heading."""
    source = path.read_text()
    module = ast.parse(source)
    text = ast.get_docstring(module) or path.stem
    first, _, rest = text.partition("\n\n")
    first_line = " ".join(first.split())
    heading = re.split(r"[,:.] ", first_line)[0].rstrip(".")
    lines_below_docstring = source.splitlines()[module.body[0].end_lineno :]
    code = "\n".join(lines_below_docstring).strip()
    _, _, file = path.as_posix().rpartition("examples/")
    parts = [f'<a id="{path.stem}"></a>\n\n## {heading}', first]
    if rest:
        parts.append(rest)
    parts += [f"`examples/{file}`:", f"```python\n{code}\n```"]
    return "\n\n".join(parts)
