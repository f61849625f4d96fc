"""Links that work in the repository, made to work in the manual, where notebooks and examples are pages."""

from __future__ import annotations

import posixpath
import re
from pathlib import PurePosixPath

# Files outside of docs/ that are pages of the manual.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "tests/README.md": "tests.md",
    "benchmarks/README.md": "benchmarks/cases.md",
}
# Headings of files that say too little among other pages.
TITLES = {"benchmarks/cases.md": "Cases in benchmarks/", "tests.md": "The tests"}
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)#\s]+)")


def page_of(file: str) -> str | None:
    """The page that shows a file of the repository, or None."""
    path = PurePosixPath(file)
    if file.startswith("docs/"):
        return file.removeprefix("docs/")
    if path.suffix == ".ipynb":
        return f"learn/{path.stem}.md"
    if path.parts[0] == "examples" and path.suffix == ".py":
        return f"examples.md#{path.stem}"
    return PAGES.get(file)


def rewritten(text: str, file: str, page: str) -> str:
    """The text of a page with its relative links as they are in the manual.

    Args:
        text: Markdown.
        file: where it stands in the repository, to which its links are relative.
        page: where it stands in the manual.

    Returns:
        The text; what is in a block of code, and links to files that are no pages, are as before.
    """

    def link(found: re.Match[str]) -> str:
        target = page_of(posixpath.normpath(posixpath.join(posixpath.dirname(file), found[1])))
        return posixpath.relpath(target, posixpath.dirname(page) or ".") if target else found[1]

    parts = re.split(r"(^```.*?^```$)", text, flags=re.S | re.M)
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in parts)


def titled(text: str, page: str) -> str:
    """The text of a file with the heading that it has as a page."""
    return re.sub(r"\A# .*", f"# {TITLES[page]}", text) if page in TITLES else text
