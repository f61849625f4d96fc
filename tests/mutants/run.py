"""Runs the mutants: `python tests/mutants/run.py [--only NAME ...] [--jobs N] [--shard i/n] [--baseline]`.

Nothing is changed in the checkout but table.md: each job has a copy of the files in a temporary directory, puts
one mistake into it, and runs the test that found it the last time, by table.md; if that passes, the tests of the file's
own name; if those pass, the tests that reach the line, until the first one fails.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from choice import Reach, chosen, line_of, loaded, mirrored

from mutants import MUTANTS, Mutant

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TABLE = HERE / "table.md"
MINE = HERE.relative_to(ROOT)
LIMIT = 300.0  # seconds for a mutant; where its tests alone take long, a multiple of their time:
SLOWER = 5
TIER = "not deep"  # the default tier
OPTIONS = ("-p", "reach", "-p", "no:cacheprovider", "-p", "no:randomly", "-q", "--no-header", f"--ignore={MINE}")
PYTEST = (sys.executable, "-m", "pytest", *OPTIONS)
HEAD = "| mutant | line | the mistake | killed by | seconds |\n| --- | --- | --- | --- | --- |\n"


class Result(NamedTuple):
    """What became of a mutant."""

    killed: bool
    words: str
    seconds: float
    broken: bool = False


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def sources() -> list[str]:
    """The files of the checkout as they are now: what git tracks or would add."""
    names = git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    return [name for name in dict.fromkeys(names) if name and (ROOT / name).is_file()]


def copied(to: Path) -> Path:
    for name in sources():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, to / name)
    return to


def environment(copy: Path, **more: str) -> dict[str, str]:
    """What tests and the processes that they start need to import the copy: the checkout itself may be installed.

    No bytecode: Python tells a changed file by its size and its second, and a mutant may have both of the file before.
    """
    return {**os.environ, "PYTHONPATH": f"{copy}{os.pathsep}{HERE}", "PYTHONDONTWRITEBYTECODE": "1", **more}


def ended(command: Iterable[str], copy: Path, log: Path, limit: float | None, **more: str) -> int | None:
    """The exit code of a command in a copy; None where it takes longer, and then all of its group is ended."""
    with log.open("wb") as file:
        env = environment(copy, **more)
        child = subprocess.Popen([*command], cwd=copy, env=env, stdout=file, stderr=file, start_new_session=True)
    try:
        return child.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def map_file() -> Path:
    """Where the map of this checkout is kept: outside of it, by its commit and by what its files hold."""
    found = 0
    for name in (name for name in sources() if not name.startswith(f"{MINE}/")):  # the table changes with every run
        found = zlib.crc32((ROOT / name).read_bytes(), zlib.crc32(name.encode(), found))
    commit = git("log", "-1", "--format=%h", "--", ".", f":!{MINE}").strip()
    return Path(tempfile.gettempdir()) / "shardkit-mutants" / f"{commit}-{found:08x}.json"


def built(file: Path, jobs: int) -> None:
    """Runs the default tier once under coverage and writes the map."""
    if find_spec("coverage") is None:
        sys.exit("mutants: the map needs the package coverage, which is not installed. Run pip install coverage.")
    print("running the default tier once, to see which test reaches which line", flush=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        copy, part = copied(Path(name)), Path(name) / "map"
        words = (*PYTEST, "-m", TIER, "tests", *(("-n", str(jobs)) if jobs > 1 else ()))
        code = ended(words, copy, file.with_suffix(".log"), None, REACH_MAP=str(part))
        parts = [json.loads(each.read_text()) for each in sorted(copy.glob("map.*"))]
    if code not in (0, 1) or not parts:
        sys.exit(f"mutants: the default tier could not be run; see {file.with_suffix('.log')}.")
    file.write_text(json.dumps(parts))
    for test in (test for each in parts for test in each["failed"]):
        print(f"left out, because it fails without any mistake: {test}")


def near(mutant: Mutant, reach: Reach) -> tuple[list[list[str]], float]:
    """The tests that a mutant is to be run against, in groups one after the other, and the limit of their time."""
    groups = list(chosen(mutant, (ROOT / mutant.file).read_text(), reach))
    return groups, max(LIMIT, SLOWER * sum(reach.seconds[test] for tests in groups for test in tests))


def last_killers(wanted: set[str]) -> dict[str, str]:
    """By mutant the test that killed it at its last run, where the default tier still has it and it passes."""
    found: dict[str, str] = {}
    for line in TABLE.read_text().splitlines() if TABLE.exists() else []:
        cells = [cell.replace("\\|", "|") for cell in re.split(r"(?<!\\) \| ", line.removeprefix("| "))]
        test = re.match(r"tests/.*?(?= \((?:equivalent|it hung|the process|collecting)|$)", "".join(cells[3:4]))
        if test and cells[0] in wanted:
            found[cells[0]] = test[0]
    if not found:
        return found
    print(f"running the {len(set(found.values()))} tests that killed mutants the last time, without one", flush=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        copy, log = copied(Path(name)), Path(name) / ".log"
        ended((*PYTEST, "-m", TIER, "--collect-only", "tests"), copy, log, None)
        there = set(log.read_text().splitlines())
        found = {mutant: test for mutant, test in found.items() if test in there}
        ids, report = Path(name) / ".ids", Path(name) / ".report"
        ids.write_text("\n".join(sorted(set(found.values()))) + "\n")
        report.write_text("")
        ended((*PYTEST, f"@{ids}"), copy, log, None, REACH_REPORT=str(report))
        notes = [json.loads(line) for line in report.read_text().splitlines()]
    began, failed = ({test for what, test in notes if what == kind} for kind in ("began", "failed"))
    return {mutant: test for mutant, test in found.items() if test in began - failed}


def namesakes(mutant: Mutant) -> list[str]:
    """The test files of the name of the mutant's file, in the folder that mirrors its own."""
    folder = ROOT / "tests" / mirrored(mutant)
    found = folder.glob(f"test_{Path(mutant.file).stem.strip('_')}*.py")
    return sorted(str(file.relative_to(ROOT)) for file in found)


def judged(mutant: Mutant, copy: Path, groups: Iterable[list[str]], limit: float) -> Result:
    """Puts one mistake into a copy, runs its tests, and takes it out again."""
    file, begin = copy / mutant.file, time.monotonic()
    text = file.read_text()
    if text.count(mutant.old) != 1:
        return Result(False, "its text does not stand exactly once in the file", 0.0, broken=True)
    if not any(groups):
        return Result(False, "no test is near", 0.0, broken=True)
    report, ids, log = (copy / f".mutant.{kind}" for kind in ("report", "ids", "log"))
    file.write_text(text.replace(mutant.old, mutant.new))
    try:
        for tests in filter(None, groups):
            report.write_text("")
            ids.write_text("\n".join(tests) + "\n")
            left = limit - (time.monotonic() - begin)
            code = ended((*PYTEST, "-m", TIER, "-x", f"@{ids}"), copy, log, left, REACH_REPORT=str(report))
            seconds = time.monotonic() - begin
            notes = [json.loads(line) for line in report.read_text().splitlines()]
            failed = next((test for what, test in notes if what == "failed"), None)
            last = notes[-1][1] if notes else "the start"
            if code is None:
                return Result(True, f"{last} (it hung)", seconds)
            if failed:
                return Result(True, failed, seconds)
            if code < 0 or (code and notes and code not in (4, 5)):
                return Result(True, f"{last} (the process died)", seconds)
            if code not in (0, 5):  # 5: none of them is of the default tier
                lines = log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
                return Result(False, f"pytest ended with {code}: {lines[-1]}", seconds, broken=True)
    finally:
        file.write_text(text)
    return Result(False, "", time.monotonic() - begin)


def row(mutant: Mutant, result: Result) -> str:
    words = result.words.replace("|", "\\|") if result.words else "**survived**"
    if mutant.equivalent:
        words = f"{words} (equivalent: {mutant.equivalent})"
    where = f"{mutant.file}:{line_of(mutant, (ROOT / mutant.file).read_text())}"
    return f"| {mutant.name} | {where} | {mutant.risk} | {words} | {result.seconds:.0f} |"


def write_table(rows: dict[str, str]) -> None:
    """The table in the order of the list: what was run now, and what was known of the others."""
    before = TABLE.read_text().splitlines() if TABLE.exists() else []
    known = {line.split(" | ")[0].removeprefix("| "): line for line in before if line.startswith("| ")} | rows
    TABLE.write_text(HEAD + "".join(f"{known[m.name]}\n" for m in MUTANTS if m.name in known))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Puts one mistake after the other into a copy, and runs the tests.")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants alone")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time, each in a copy of its own")
    parser.add_argument("--shard", metavar="i/n", default="1/1", help="every n-th mutant, beginning with the i-th")
    parser.add_argument(
        "--baseline", action="store_true", help="make the map of lines and tests anew, and nothing else"
    )
    parser.add_argument("--map", type=Path, help="a map made before, in place of this commit's own")
    return parser.parse_args()


def main() -> int:
    o = arguments()
    file = o.map or map_file()
    if o.baseline:
        built(file, o.jobs)
        print(f"the map is {file}")
        return 0
    unknown = sorted(set(o.only or ()) - {m.name for m in MUTANTS})
    if unknown:
        sys.exit(f"mutants: there is no mutant {unknown[0]!r}. See mutants.txt and reverts.py for their names.")
    first, step = map(int, o.shard.split("/"))
    wanted = [m for m in MUTANTS if not o.only or m.name in o.only][first - 1 :: step]
    results: dict[str, Result] = {}
    rows: dict[str, str] = {}
    lock = threading.Lock()
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as name:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for job in range(max(1, o.jobs)):
            copies.put(copied(Path(name) / str(job)))

        def one(mutant: Mutant, groups: list[list[str]], limit: float, last: bool) -> None:
            copy = copies.get()
            result = judged(mutant, copy, groups, limit)
            copies.put(copy)
            with lock:
                if not (last or result.killed or result.broken):
                    return
                results[mutant.name], rows[mutant.name] = result, row(mutant, result)
                word = "killed" if result.killed else "BROKEN" if result.broken else "SURVIVED"
                print(f"{len(results)}/{len(wanted)} {word} {mutant.name}: {result.words} ({result.seconds:.0f} s)")
                sys.stdout.flush()
                write_table(rows)

        def each(jobs: Iterable[tuple[Mutant, list[list[str]], float, bool]]) -> None:
            with ThreadPoolExecutor(max(1, o.jobs)) as pool:
                list(pool.map(lambda job: one(*job), jobs))

        killers = last_killers({m.name for m in wanted})
        each((m, [[killers[m.name]]], LIMIT, False) for m in wanted if m.name in killers)
        left = [m for m in wanted if m.name not in results]
        each((m, [namesakes(m)], LIMIT, False) for m in left if namesakes(m))
        left = [m for m in wanted if m.name not in results]
        if left:
            if not file.exists():
                built(file, o.jobs)
            reach = loaded(file)
            each((m, *near(m, reach), True) for m in left)
    killed = sum(result.killed for result in results.values())
    alive = [m.name for m in wanted if not results[m.name].killed and not m.equivalent]
    excused = sum(not results[m.name].killed and bool(m.equivalent) for m in wanted)
    for m in wanted:
        if m.equivalent and results[m.name].killed:
            print(f"{m.name} is listed as equivalent, and was killed: take the reason out")
    share = killed / max(1, len(wanted) - excused)
    print(f"{killed} of {len(wanted)} killed ({share:.1%} of those that are not equivalent); {excused} equivalent")
    print(f"alive: {', '.join(alive) or 'none'}")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
