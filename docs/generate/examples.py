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
    return "\n\n".join(["# Examples", head, *map(section, paths)]) + "\n"


def section(path: Path) -> str:
    """An example: its docstring begins the section, and its first words are the heading."""
    source = path.read_text()
    module = ast.parse(source)
    text = ast.get_docstring(module) or path.stem
    first, _, rest = text.partition("\n\n")
    heading = re.split(r"[,:.] ", " ".join(first.split()))[0].rstrip(".")
    code = "\n".join(source.splitlines()[module.body[0].end_lineno :]).strip()
    parts = [f'<a id="{path.stem}"></a>\n\n## {heading}', first, rest]
    where = path.as_posix().rpartition("examples/")[2]
    return "\n\n".join([part for part in parts if part] + [f"`examples/{where}`:", f"```python\n{code}\n```"])
