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
from collections.abc import Iterator
from pathlib import Path
from tokenize import COMMENT
from typing import NamedTuple

TESTS = Path(__file__).parents[1]
FEATURES = Path(__file__).with_name("features.txt")
NAMED_ONLY = {"T": 9, "N": 72}  # groups whose members are reported where they are named, and not missed elsewhere
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


def read_claims(path: Path, known: set[str]) -> tuple[list[Claim], list[str]]:
    """The comments of one file, and what is wrong with them."""
    text = path.read_text()
    tests = []
    if path.name.startswith("test_"):
        tests = list(_find_tests(ast.parse(text), text.splitlines()))
    comments = _read_comments(text)
    claims = []
    mistakes = []
    for line in comments:
        comment = _join_lines(comments, line)
        match = _COMMENT.fullmatch(comment)
        if match is None:
            continue
        place = f"{path}:{line}"
        names = []
        for words in re.findall(_ONE, match["ids"] or ""):
            names += _list_features(words)
        if not names or match["rest"].lstrip().startswith(","):
            mistakes.append(f"{place}: `proves` must be followed by features, such as S53, F9; got {comment!r}.")
        for name in names:
            if name not in known:
                mistakes.append(f"{place}: there is no feature {name}.")
        marks_of_tests = [marks for first, last, marks in tests if first <= line <= last]
        if not marks_of_tests:
            mistakes.append(
                f"{place}: a comment `proves` must stand at a test: on its def, directly above, or inside it."
            )
        runs_by_default = all(not marks & LEFT_OUT for marks in marks_of_tests)
        is_in_part = match["rest"].strip().startswith("in part")
        claims.append(Claim(path, line, tuple(names), runs_by_default and not is_in_part))
    return claims, mistakes


def _read_comments(text: str) -> dict[int, str]:
    """The comments of a file by their lines."""
    comments = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == COMMENT:
            line, _ = token.start
            comments[line] = token.string
    return comments


def _join_lines(comments: dict[int, str], line: int) -> str:
    """The comment on a line, with the lines below where its list goes on behind a comma."""
    comment = comments[line]
    while comment.endswith(",") and line + 1 in comments:
        line += 1
        comment += " " + comments[line].removeprefix("#").strip()
    return comment


def _list_features(text: str) -> list[str]:
    """`S3` or `S3-S5` as single features; a range that has none, as it is written."""
    first, _, last = text.partition("-")
    if not last:
        return [first]
    group = first[0]
    end = int(last.lstrip(group))
    names = [f"{group}{number}" for number in range(int(first[1:]), end + 1)]
    return names or [text]


def list_known(titles: dict[str, str]) -> set[str]:
    """The names of all features: those with a title, and those of the groups that are named in comments alone."""
    known = set(titles)
    for group, most in NAMED_ONLY.items():
        for number in range(1, most + 1):
            known.add(f"{group}{number}")
    return known


def _find_tests(module: ast.Module, lines: list[str]) -> Iterator[tuple[int, int, set[str]]]:
    """First and last line of each test, the comment above it included, and its marks."""
    module_marks: set[str] = set()
    for node in module.body:
        if _is_pytestmark(node):
            module_marks |= _read_marks(node.value)  # type: ignore[attr-defined]
    waiting: list[tuple[ast.AST, set[str]]] = [(node, module_marks) for node in module.body]
    while waiting:
        node, marks = waiting.pop()
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            marks = marks | _read_decorators(node)
            waiting += [(member, marks) for member in node.body]
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            while first > 1 and lines[first - 2].lstrip().startswith("#"):
                first -= 1
            yield first, node.end_lineno or first, marks | _read_decorators(node)


def _is_pytestmark(node: ast.stmt) -> bool:
    if not isinstance(node, ast.Assign):
        return False
    return any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets)


def _read_decorators(node: ast.FunctionDef | ast.ClassDef) -> set[str]:
    """The marks of a test or a class; those of single rows stand deeper, inside parametrize(...)."""
    marks: set[str] = set()
    for decorator in node.decorator_list:
        marks |= _read_marks(decorator)
    return marks


def _read_marks(node: ast.expr) -> set[str]:
    """The names of `pytest.mark.NAME`, `pytest.mark.NAME(...)`, or of a list of them."""
    if isinstance(node, ast.List | ast.Tuple):
        marks: set[str] = set()
        for element in node.elts:
            marks |= _read_marks(element)
        return marks
    if isinstance(node, ast.Call):
        node = node.func
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Attribute):
        return set()
    if node.value.attr != "mark":
        return set()
    return {node.attr}


def _number_of(name: str) -> int:
    return int(name[1:])


def _join_names(names: list[str]) -> str:
    return ", ".join(sorted(names, key=_number_of))


def summary(titles: dict[str, str], claims: list[Claim]) -> Iterator[str]:
    """A line for each group."""
    proved: set[str] = set()
    claimed: set[str] = set()
    for claim in claims:
        claimed.update(claim.names)
        if claim.counts:
            proved.update(claim.names)
    begun = claimed - proved
    groups: dict[str, list[str]] = {}
    for name in titles:
        groups.setdefault(name[0], []).append(name)
    for group, names in groups.items():
        proved_names = [name for name in names if name in proved]
        begun_names = [name for name in names if name in begun]
        missing_names = [name for name in names if name not in claimed]
        parts = [f"{group}: {len(proved_names)} of {len(names)} proved"]
        if begun_names:
            parts.append(f"in part, or outside the default suite: {_join_names(begun_names)}")
        if missing_names:
            parts.append(f"not proved: {_join_names(missing_names)}")
        yield "; ".join(parts)
    for group in NAMED_ONLY:
        names = [name for name in proved if name[0] == group]
        if names:
            yield f"{group}: {_join_names(names)} proved"


def table(titles: dict[str, str], claims: list[Claim], root: Path) -> Iterator[str]:
    """A line for each feature: its title, and the files that prove it."""
    files_of: dict[str, set[str]] = {}
    for claim in claims:
        file = claim.path.relative_to(root).as_posix()
        if not claim.counts:
            file += " (in part)"
        for name in claim.names:
            files_of.setdefault(name, set()).add(file)
    without_title = set(files_of) - set(titles)
    for name in [*titles, *sorted(without_title, key=lambda name: (name[0], _number_of(name)))]:
        feature = f"{name}  {titles.get(name, '')}".rstrip()
        files = ", ".join(sorted(files_of.get(name, ())))
        yield f"{feature}: {files or 'NOT PROVED'}"


def main(argv: list[str] | None = None) -> int:
    """Prints the coverage; 1 where a comment is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="for each feature, the files whose tests prove it")
    parser.add_argument("--tests", type=Path, default=TESTS, help="the folder of the tests")
    parser.add_argument("--features", type=Path, default=FEATURES, help="the list of features")
    options = parser.parse_args(argv)
    titles = features(options.features.read_text())
    known = list_known(titles)
    claims = []
    mistakes = []
    for path in sorted(options.tests.rglob("*.py")):
        claims_of_file, mistakes_of_file = read_claims(path, known)
        claims += claims_of_file
        mistakes += mistakes_of_file
    if options.table:
        for line in table(titles, claims, options.tests):
            print(line)
    for line in summary(titles, claims):
        print(line)
    for mistake in mistakes:
        print(mistake, file=sys.stderr)
    return 1 if mistakes else 0


if __name__ == "__main__":
    sys.exit(main())
