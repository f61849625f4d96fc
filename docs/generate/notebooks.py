"""Notebooks as pages: their text, code and stored outputs. Nothing is executed."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_COLORS = re.compile(r"\x1b\[[0-9;]*m")


def page(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and the files that it shows.

    Args:
        path: the notebook.

    Returns:
        The text, and what its pictures hold by their names, which are relative to the page.
    """
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        source = _text(cell["source"])
        if cell["cell_type"] == "markdown":
            # Python-Markdown leaves what is inside of an HTML block alone unless told.
            parts.append(re.sub(r"<details>", '<details markdown="1">', source))
        elif source.strip():
            parts.append(f"```python\n{source.rstrip()}\n```")
        for output_number, output in enumerate(cell.get("outputs", ())):
            parts.append(_show_output(output, f"{path.stem}_{number}_{output_number}", pictures))
    return "\n\n".join(parts) + "\n", pictures


def _show_output(output: Mapping[str, Any], name: str, pictures: dict[str, bytes]) -> str:
    """An output as Markdown: as a picture if it has one, which joins `pictures`; else as HTML, else as text."""
    data = output.get("data", {})
    if "image/svg+xml" in data:
        pictures[f"{name}.svg"] = _text(data["image/svg+xml"]).encode()
        return _link_picture(f"{name}.svg")
    if "image/png" in data:
        pictures[f"{name}.png"] = base64.b64decode(_text(data["image/png"]))
        return _link_picture(f"{name}.png", "{ .on-white }")
    if "text/html" in data:
        return _text(data["text/html"])
    text = output.get("text", data.get("text/plain", output.get("traceback", "")))
    return f"```text\n{_COLORS.sub('', _text(text)).rstrip()}\n```"


def _link_picture(file: str, attributes: str = "") -> str:
    """A picture that opens alone, in its own size: on a phone its letters are small."""
    return f"[![What the code above draws]({file}){attributes}]({file})"


def _text(lines: str | list[str]) -> str:
    if isinstance(lines, str):
        return lines
    return "".join(lines)
