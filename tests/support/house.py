"""How large the house is, and how it reads: a record that only prints. Nothing fails because a number is large.

    python tests/support/house.py                # rooms: files, lines, tokens of code, comments, mean width of a line
    python tests/support/house.py --names        # and the public names, commands and pages

A limit on lines stood here until it pressed code into fewer, denser lines. What counts is whether the next person
understands a function at first reading; CONTRIBUTING.md says how we write for that.
"""

import argparse
import ast
import io
import tokenize
from pathlib import Path
from typing import NamedTuple

import shardkit as sk
from shardkit import cli

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "shardkit"
_LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.COMMENT}


class Size(NamedTuple):
    """The size of a file or of a room.

    Attributes:
        files: how many files.
        lines: all lines.
        tokens: of code, without comments and docstrings.
        comments: lines with a comment.
        code: lines with code.
        characters: of these lines.
    """

    files: int = 0
    lines: int = 0
    tokens: int = 0
    comments: int = 0
    code: int = 0
    characters: int = 0

    def plus(self, other: "Size") -> "Size":
        """Both together."""
        return Size(*(x + y for x, y in zip(self, other, strict=True)))

    def __str__(self) -> str:
        width = self.characters / max(self.code, 1)
        return f"{self.files:6} {self.lines:7,} {self.tokens:9,} {self.comments:9,} {width:8.1f}"


def measure(path: Path) -> Size:
    """The size of a file."""
    text = path.read_text()
    documented = _docstring_lines(ast.parse(text))
    tokens = comments = 0
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments += 1
        elif token.type not in _LAYOUT and token.start[0] not in documented:
            tokens += 1
            code |= set(range(token.start[0], token.end[0] + 1))
    lines = text.splitlines()
    characters = sum(len(lines[number - 1].rstrip()) for number in code)
    return Size(1, len(lines), tokens, comments, len(code), characters)


def _docstring_lines(tree: ast.Module) -> set[int]:
    documented: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
            docstring = node.body[0]
            documented |= set(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return documented


def measure_rooms() -> dict[str, Size]:
    """The size of each folder of the package, and of the files beside them under ""."""
    sizes: dict[str, Size] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        room = parts[0] if len(parts) > 1 else ""
        sizes[room] = sizes.get(room, Size()).plus(measure(path))
    return sizes


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", action="store_true", help="list public names, commands and pages too")
    options = parser.parse_args()
    print(f"{'room':12} {'files':>6} {'lines':>7} {'tokens':>9} {'comments':>9} {'width':>8}")
    total = Size()
    for room, size in measure_rooms().items():
        print(f"{room or 'shardkit/':12} {size}")
        total = total.plus(size)
    print(f"{'all':12} {total}")
    pages = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
    listed = {"names of sk.": sorted(sk.__all__), "commands": sorted(cli.every_command()), "pages": pages}
    for title, names in listed.items():
        print(f"{title}: {len(names)}{': ' + ', '.join(names) if options.names else ''}")


if __name__ == "__main__":
    main()
