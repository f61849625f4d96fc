"""The pages that say which test files prove which feature, from the comments `# proves`."""

from __future__ import annotations

import sys
from pathlib import Path


def pages(root: Path) -> dict[str, str]:
    """The Markdown of each page by its path: the features whose names begin with S, and all others."""
    if str(root / "tests") not in sys.path:
        sys.path.insert(0, str(root / "tests"))
    from support import proved

    titles = proved.features(proved.FEATURES.read_text())
    known = proved.list_known(titles)
    claims = []
    for path in sorted(proved.TESTS.rglob("*.py")):
        claims_of_file, _ = proved.read_claims(path, known)
        claims += claims_of_file
    rows: dict[str, list[str]] = {"proved.md": [], "proved_f.md": []}
    for line in proved.table(titles, claims, root / "tests"):
        feature, _, files = line.rpartition(": ")
        name, _, title = feature.partition("  ")
        if not title:  # groups that are named in comments alone have no titles
            continue
        title = title.replace("|", r"\|")
        links = [f"`tests/{file.removesuffix(' (in part)')}`" for file in files.split(", ")]
        page = "proved_f.md"
        if name.startswith("S"):
            page = "proved.md"
        rows[page].append(f"| {name} | {title} | {', '.join(links)} |")
    head = (
        "Which test files prove what. A test names what it proves in a comment, `# proves S53`, and fails if that is "
        "taken away; `python tests/support/proved.py --table` prints this table. "
    )
    headings = {
        "proved.md": ("Proved by", "Those that begin with F are on a [page of their own](proved_f.md)."),
        "proved_f.md": ("Proved by, from F1 on", "Those that begin with S are on a [page of their own](proved.md)."),
    }
    table = ["| | feature | tests |", "|---|---|---|"]
    texts = {}
    for page, lines in rows.items():
        heading, other_page = headings[page]
        texts[page] = "\n".join([f"# {heading}", "", head + other_page, "", *table, *lines, ""])
    return texts
