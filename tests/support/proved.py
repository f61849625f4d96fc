"""Which features the suite proves: reads the comments `proves S53, F9` of all tests, and says what none names.

    python tests/support/proved.py            # a line for each group of features
    python tests/support/proved.py --table    # for each feature, the files whose tests prove it

A comment stands on the line of a test's def, directly above the test, or inside it, and begins with the features. What
follows the word `in part` counts as begun, not as proved; nor does a test count that the default suite leaves out.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from tokenize import COMMENT
from typing import NamedTuple

TESTS = Path(__file__).parents[1]
FEATURES = Path(__file__).with_name("features.txt")
NAMED_ONLY = {"T": 9, "N": 67}  # groups whose members are reported where they are named, and not missed elsewhere
LEFT_OUT = {"deep", "skip"}  # marks of tests that the default suite does not run

_ONE = r"[A-Z]\d+(?:-[A-Z]?\d+)?\b"
_COMMENT = re.compile(rf"#\s*proves\b\s*(?P<ids>{_ONE}(?:\s*,\s*{_ONE})*)?(?P<rest>.*)")


class Claim(NamedTuple):
    """One comment: where it stands, what it names, and whether a test of the default suite stands behind it."""

    path: Path
    line: int
    names: tuple[str, ...]
    counts: bool


def features(text: str) -> dict[str, str]:
    """The title of each feature, from lines such as `S1 a config dataclass`."""
    return dict(line.split(" ", 1) for line in text.splitlines() if line)


def claims(path: Path, known: set[str]) -> tuple[list[Claim], list[str]]:
    """The comments of one file, and what is wrong with them."""
    text = path.read_text()
    tests = [*_tests(ast.parse(text), text.splitlines(), path.name.startswith("test_"))]
    found, wrong = [], []
    comments = {t.start[0]: t.string for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == COMMENT}
    for line, comment in comments.items():
        after = line
        while comment.endswith(",") and after + 1 in comments:  # the list goes on in the next line
            after += 1
            comment += " " + comments[after].removeprefix("#").strip()
        match = _COMMENT.fullmatch(comment)
        if match is None:
            continue
        where = f"{path}:{line}"
        names = [name for each in re.findall(_ONE, match["ids"] or "") for name in _range(each)]
        if not names or match["rest"].lstrip().startswith(","):
            wrong.append(f"{where}: `proves` must be followed by features, such as S53, F9; got {comment!r}.")
        wrong += [f"{where}: there is no feature {name}." for name in names if name not in known]
        around = [marks for first, last, marks in tests if first <= line <= last]
        if not around:
            wrong.append(f"{where}: a comment `proves` must stand at a test: on its def, directly above, or inside it.")
        counts = all(not marks & LEFT_OUT for marks in around) and not match["rest"].strip().startswith("in part")
        found.append(Claim(path, line, tuple(names), counts))
    return found, wrong


def _range(text: str) -> list[str]:
    """`S3` or `S3-S5` as single features."""
    first, _, last = text.partition("-")
    if not last:
        return [first]
    return [f"{first[0]}{i}" for i in range(int(first[1:]), int(last.lstrip(first[0])) + 1)] or [text]


def _tests(module: ast.Module, lines: list[str], is_test_file: bool) -> Iterator[tuple[int, int, set[str]]]:
    """First and last line of each test, the comment above it included, and its marks."""
    if not is_test_file:
        return
    common = {mark for node in module.body if _is_pytestmark(node) for mark in _marks(node.value)}  # type: ignore[attr-defined]
    todo: list[tuple[ast.AST, set[str]]] = [(node, common) for node in module.body]
    while todo:
        node, marks = todo.pop()
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            todo += [(each, marks | _decorators(node)) for each in node.body]
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            while first > 1 and lines[first - 2].lstrip().startswith("#"):
                first -= 1
            yield first, node.end_lineno or first, marks | _decorators(node)


def _is_pytestmark(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets)


def _decorators(node: ast.FunctionDef | ast.ClassDef) -> set[str]:
    # The marks of single rows stand deeper, inside parametrize(...).
    return {mark for each in node.decorator_list for mark in _marks(each)}


def _marks(node: ast.expr) -> set[str]:
    """The names of `pytest.mark.NAME`, `pytest.mark.NAME(...)`, or of a list of them."""
    if isinstance(node, ast.List | ast.Tuple):
        return {mark for each in node.elts for mark in _marks(each)}
    if isinstance(node, ast.Call):
        node = node.func
    is_mark = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "mark"
    return {node.attr} if is_mark else set()  # type: ignore[attr-defined]


def _listed(names: list[str]) -> str:
    return ", ".join(sorted(names, key=lambda name: int(name[1:])))


def summary(titles: dict[str, str], every: list[Claim]) -> Iterator[str]:
    """A line for each group."""
    proved = {name for claim in every if claim.counts for name in claim.names}
    begun = {name for claim in every for name in claim.names} - proved
    for group in dict.fromkeys(name[0] for name in titles):
        mine = [name for name in titles if name[0] == group]
        parts = [f"{group}: {sum(name in proved for name in mine)} of {len(mine)} proved"]
        some, none = [n for n in mine if n in begun], [n for n in mine if n not in proved | begun]
        parts += [f"in part, or outside the default suite: {_listed(some)}"] if some else []
        parts += [f"not proved: {_listed(none)}"] if none else []
        yield "; ".join(parts)
    for group in NAMED_ONLY:
        mine = [name for name in proved if name[0] == group]
        if mine:
            yield f"{group}: {_listed(mine)} proved"


def table(titles: dict[str, str], every: list[Claim], root: Path) -> Iterator[str]:
    """A line for each feature: its title, and the files that prove it."""
    files = defaultdict(set)
    for claim in every:
        for name in claim.names:
            files[name].add(claim.path.relative_to(root).as_posix() + ("" if claim.counts else " (in part)"))
    extra = sorted(set(files) - set(titles), key=lambda name: (name[0], int(name[1:])))
    for name in [*titles, *extra]:
        yield f"{name}  {titles.get(name, '')}".rstrip() + ": " + (", ".join(sorted(files[name])) or "NOT PROVED")


def main(argv: list[str] | None = None) -> int:
    """Prints the coverage; 1 where a comment is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="for each feature, the files whose tests prove it")
    parser.add_argument("--tests", type=Path, default=TESTS, help="the folder of the tests")
    parser.add_argument("--features", type=Path, default=FEATURES, help="the list of features")
    options = parser.parse_args(argv)
    titles = features(options.features.read_text())
    known = {*titles, *(f"{group}{i}" for group, most in NAMED_ONLY.items() for i in range(1, most + 1))}
    every, wrong = [], []
    for path in sorted(options.tests.rglob("*.py")):
        found, errors = claims(path, known)
        every += found
        wrong += errors
    print("\n".join([*(table(titles, every, options.tests) if options.table else ()), *summary(titles, every)]))
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
