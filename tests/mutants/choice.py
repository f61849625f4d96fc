"""Which tests a mutant is to be run against, by the map that the plugin of reach.py wrote."""

import ast
import json
from pathlib import Path
from typing import NamedTuple

from mutants import Mutant


class Reach(NamedTuple):
    """What the default tier runs: the seconds of each test that passes, and by file and line the tests."""

    seconds: dict[str, float]
    lines: dict[str, dict[int, set[str]]]


def loaded(file: Path) -> Reach:
    """The map in a file, of all the workers that made it together."""
    seconds: dict[str, float] = {}
    lines: dict[str, dict[int, set[str]]] = {}
    for part in json.loads(file.read_text()):
        seconds |= dict(part["tests"])
        names = [test for test, _ in part["tests"]]
        for path, found in part["lines"].items():
            for line, tests in found.items():
                lines.setdefault(path, {}).setdefault(int(line), set()).update(names[i] for i in tests)
    return Reach(seconds, lines)


def mirrored(mutant: Mutant) -> Path:
    """The folder below tests/ that mirrors that of the mutant's file; the module of the command is tested in cli/."""
    folders = Path(mutant.file).parent.parts
    return Path(*folders[1:]) if folders else Path("cli")


def statement(text: bytes, line: int) -> range:
    """The lines of the smallest statement around a line, of a compound one its head alone."""
    found = range(line, line + 1)
    for node in ast.walk(ast.parse(text)):  # the outer ones come first
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            body = getattr(node, "body", None)
            end = body[0].lineno if isinstance(body, list) else (node.end_lineno or 0) + 1
            found = range(node.lineno, max(end, line + 1))
    return found


def chosen(mutant: Mutant, text: bytes, reach: Reach) -> tuple[list[str], list[str]]:
    """The tests that reach the line, and those to fall back on, the fastest first.

    jax traces a function once in a process, and what is imported runs before all tests: a test may depend on a line
    that it was not seen to run. So may a test with processes of its own. These are sought where the file's own are.
    """
    lines, at = reach.lines.get(mutant.file, {}), mutant.line(text)
    direct = lines.get(at) or set().union(*(lines.get(line, set()) for line in statement(text, at)))
    folder = mirrored(mutant)
    while folder != Path() and not any(test.startswith(f"tests/{folder}/") for test in reach.seconds):
        folder = folder.parent

    def near(test: str) -> bool:
        if test.startswith("tests/laws/"):
            return True
        return test.startswith(f"tests/{folder}/") if folder != Path() else test.count("/") == 1

    rest = {test for test in reach.seconds if near(test)} - direct
    first, second = (sorted(tests, key=lambda test: (reach.seconds[test], test)) for tests in (direct, rest))
    return first, second
