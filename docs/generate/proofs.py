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
    known = {*titles, *(f"{group}{i}" for group, most in proved.NAMED_ONLY.items() for i in range(1, most + 1))}
    every = [claim for path in sorted(proved.TESTS.rglob("*.py")) for claim in proved.claims(path, known)[0]]
    rows: dict[str, list[str]] = {"proved.md": [], "proved_f.md": []}
    for line in proved.table(titles, every, root / "tests"):
        left, _, files = line.rpartition(": ")
        name, _, title = left.partition("  ")
        if title:  # groups that are named in comments alone have no titles
            listed = ", ".join(f"`tests/{file.removesuffix(' (in part)')}`" for file in files.split(", "))
            page = "proved.md" if name[0] == "S" else "proved_f.md"
            rows[page].append(f"| {name} | {title.replace('|', chr(92) + '|')} | {listed} |")
    head = (
        "Which test files prove what. A test names what it proves in a comment, `# proves S53`, and fails if that is "
        "taken away; `python tests/support/proved.py --table` prints this table. "
    )
    titled = {
        "proved.md": ("Proved by", "Those that begin with F are on a [page of their own](proved_f.md)."),
        "proved_f.md": ("Proved by, from F1 on", "Those that begin with S are on a [page of their own](proved.md)."),
    }
    table = ["| | feature | tests |", "|---|---|---|"]
    return {
        page: "\n".join([f"# {titled[page][0]}", "", head + titled[page][1], "", *table, *lines, ""])
        for page, lines in rows.items()
    }
