"""CPU seconds of the proof for all inputs of each row of the covering list, here and in another checkout.

    python -m benchmarks.covering_rows --against ../before --rows 0 4 9

A row is `test_every_row_of_the_covering_list` in tests/testing/exact/test_steps.py: one step of a plan on a mesh, with
some options, is proved equal to one device's. Each row runs in a process of its own, which pytest starts in the
checkout, so that nothing that one row traced is there for the next; only the test is timed, not the imports. The two
checkouts run in turn, row by row. A row whose test does not pass in one of them is printed, and left out of the ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

TEST = "tests/testing/exact/test_steps.py::test_every_row_of_the_covering_list"
HERE = Path(__file__).parents[1]
_MARK = "covering row: "  # before the line in which a child says what it measured


class Timer:
    """Measures the CPU seconds of the tests that pytest runs.

    Attributes:
        seconds: of the last test, without its fixtures.
        passed: whether it passed.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.passed = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        """Times a test; pytest calls it."""
        # CPU time: the clock would show what else runs on the machine for the minutes that a list of rows takes.
        start_time = time.process_time()
        try:
            result = yield
        finally:
            self.seconds = time.process_time() - start_time
        self.passed = True
        return result


class Counter:
    """Counts the tests that pytest collects.

    Attributes:
        count: how many there are.
    """

    def __init__(self) -> None:
        self.count = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Counts the tests; pytest calls it."""
        self.count = len(session.items)


def count_rows() -> int:
    """How many rows the covering list of this checkout has."""
    counter = Counter()
    with contextlib.redirect_stdout(io.StringIO()):  # pytest prints the name of each
        pytest.main(["-q", "-p", "no:cacheprovider", "-m", "", "-n", "0", "--collect-only", TEST], plugins=[counter])
    return counter.count


def time_row(row: int) -> None:
    """Runs one row in the current folder and prints what it took."""
    timer = Timer()
    # A row that is no quick one is marked deep, and would be left out.
    pytest.main(["-q", "-p", "no:cacheprovider", "-m", "", "-n", "0", f"{TEST}[{row}]"], plugins=[timer])
    print(_MARK + json.dumps({"seconds": timer.seconds, "passed": timer.passed}))


def measure_row(checkout: Path, row: int) -> dict[str, Any]:
    """CPU seconds of one row in a checkout, and whether its test passed: from a process of its own."""
    environment = {**os.environ, "PYTHONPATH": f"{checkout}{os.pathsep}{checkout / 'tests'}"}
    command = [sys.executable, __file__, "--child", str(row)]
    child = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=True)
    for line in child.stdout.splitlines():
        if line.startswith(_MARK):
            result: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            return result
    raise RuntimeError(f"row {row} measured nothing in {checkout}: {child.stderr[-2000:]}")


def format_result(result: dict[str, Any]) -> str:
    """A cell of the table."""
    seconds = f"{result['seconds']:.2f}"
    if result["passed"]:
        return seconds
    return f"{seconds}, did not pass"


def choose_rows(options: argparse.Namespace) -> list[int]:
    """The numbers of the rows that are measured."""
    if options.smoke:
        return [4]
    if options.rows:
        return list(options.rows)
    return list(range(count_rows()))


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table, and appends a record a row to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, of the state before")
    parser.add_argument("--rows", type=int, nargs="*", help="the numbers of the rows; default all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one JSON line a row")
    parser.add_argument("--smoke", action="store_true", help="one row, once")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child is not None:
        time_row(options.child)
        return
    checkouts = {"here": HERE}
    if options.against:
        checkouts["against"] = options.against.resolve()
    totals = dict.fromkeys(checkouts, 0.0)
    print(f"| row | {' | '.join(checkouts)} |\n|--:|{'--:|' * len(checkouts)}")
    for row in choose_rows(options):
        results = {}
        for name, checkout in checkouts.items():
            results[name] = measure_row(checkout, row)
        cells = [format_result(result) for result in results.values()]
        print(f"| {row} | {' | '.join(cells)} |", flush=True)
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps({"benchmark": "covering_rows", "row": row, **results}) + "\n")
        # A row that fails in one checkout may have ended early there.
        if all(result["passed"] for result in results.values()):
            for name, result in results.items():
                totals[name] += result["seconds"]
    summary = ", ".join(f"{name} {total:.1f}" for name, total in totals.items())
    print(f"CPU seconds of the rows that passed: {summary}")
    if options.against:
        print(f"here / against: {totals['here'] / totals['against']:.2f}")


if __name__ == "__main__":
    main()
