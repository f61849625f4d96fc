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


def rewrite_links(text: str, file: str, page: str) -> str:
    """The text of a page with its relative links as they are in the manual.

    Args:
        text: Markdown.
        file: where it stands in the repository, to which its links are relative.
        page: where it stands in the manual.

    Returns:
        The text; what is in a block of code, and links to files that are no pages, are as before.
    """

    def rewrite(match: re.Match[str]) -> str:
        linked_file = posixpath.normpath(posixpath.join(posixpath.dirname(file), match[1]))
        target = page_of(linked_file)
        if target is None:
            return match[1]
        return posixpath.relpath(target, posixpath.dirname(page) or ".")

    parts = []
    for part in re.split(r"(^```.*?^```$)", text, flags=re.S | re.M):
        if not part.startswith("```"):
            part = _LINK.sub(rewrite, part)
        parts.append(part)
    return "".join(parts)


def change_title(text: str, page: str) -> str:
    """The text of a file with the heading that it has as a page."""
    if page not in TITLES:
        return text
    return re.sub(r"\A# .*", f"# {TITLES[page]}", text)
