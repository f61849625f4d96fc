"""Runs mutants: `python tests/mutants/run.py [--seed N --count K --under DIR | --reverts] [--only NAME ...]`.

Nothing is changed in the checkout: each job has a copy of the files in a temporary directory, puts one mistake into it,
and runs the tests that reach its line, the fastest first, until the first one fails.
"""

import argparse
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from choice import chosen, loaded
from drawn import sample

from mutants import HERE, ROOT, Mutant, every_revert

MINE = HERE.relative_to(ROOT)
LIMIT = 300.0  # seconds for a mutant; what has not failed by then counts as having passed
HANGS = 120.0  # a test that takes so much longer than without the mistake is hung
TIER = "not deep"  # the default tier
OPTIONS = ("-p", "reach", "-p", "no:cacheprovider", "-p", "no:randomly", "-q", "--no-header", f"--ignore={MINE}")
PYTEST = (sys.executable, "-m", "pytest", *OPTIONS)


class Result(NamedTuple):
    """What became of a mutant: "killed", "survived" or "broken", by what, and after how many seconds."""

    name: str
    fate: str
    words: str
    seconds: float


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


def kept(kind: str) -> Path:
    """A file outside of the checkout, by its commit and by what its files hold, so that a run can go on later."""
    found = 0
    for name in (name for name in sources() if not name.startswith(f"{MINE}/")):
        found = zlib.crc32((ROOT / name).read_bytes(), zlib.crc32(name.encode(), found))
    commit = git("log", "-1", "--format=%h", "--", ".", f":!{MINE}").strip()
    return Path(tempfile.gettempdir()) / "shardkit-mutants" / f"{commit}-{found:08x}.{kind}"


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


def judged(mutant: Mutant, copy: Path, groups: Iterable[list[str]], limit: float) -> Result:
    """Puts one mistake into a copy, runs its tests, and takes it out again."""
    file, begin = copy / mutant.file, time.monotonic()
    text = file.read_bytes()
    report, ids, log = (copy / f".mutant.{kind}" for kind in ("report", "ids", "log"))
    file.write_bytes(mutant.mutated(text))
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
            if failed:
                return Result(mutant.name, "killed", failed, seconds)
            if code is None and time.time() - report.stat().st_mtime > HANGS:
                return Result(mutant.name, "killed", f"{last} (it hung)", seconds)
            if code is None:
                break
            if code < 0 or (code and notes and code not in (4, 5)):
                return Result(mutant.name, "killed", f"{last} (the process died)", seconds)
            if code not in (0, 5):  # 5: none of them is of the default tier
                lines = log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
                return Result(mutant.name, "broken", f"pytest ended with {code}: {lines[-1]}", seconds)
    finally:
        file.write_bytes(text)
    return Result(mutant.name, "survived", "", time.monotonic() - begin)


def results(wanted: list[Mutant], tests: list[str], map_file: Path, jobs: int, limit: float) -> Iterator[Result]:
    """What becomes of each mutant, as it is known; against the tests that are given, else those that reach its line."""
    reach = None if tests else loaded(map_file)
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as name:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for job in range(jobs):
            copies.put(copied(Path(name) / str(job)))

        def one(mutant: Mutant) -> Result:
            copy = copies.get()
            text = (ROOT / mutant.file).read_bytes()
            try:
                return judged(mutant, copy, [tests] if reach is None else chosen(mutant, text, reach), limit)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(one, wanted)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Puts one mistake after the other into a copy, and runs the tests.")
    parser.add_argument("--seed", type=int, default=0, help="which mistakes are drawn")
    parser.add_argument("--count", type=int, default=300, help="how many")
    parser.add_argument("--under", default="", metavar="DIR", help="drawn from this folder of the core rooms alone")
    parser.add_argument("--reverts", action="store_true", help="the mends of reverts.txt taken back instead")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="those alone whose names hold one of these texts")
    parser.add_argument("--tests", nargs="+", default=[], metavar="ID", help="files or tests to run, without a map")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time, each in a copy of its own")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for each")
    parser.add_argument("--map", type=Path, help="a map of tests and lines made before, in place of this commit's own")
    return parser.parse_args()


def main() -> int:
    o = arguments()
    wanted = every_revert() if o.reverts else sample(o.seed, o.count, o.under)
    wanted = [m for m in wanted if not o.only or any(text in m.name for text in o.only)]
    if not wanted:
        sys.exit(f"mutants: no mutant's name holds {' or '.join(o.only)}; names are those that a run prints.")
    map_file, known = o.map or kept("map"), kept("results")
    if not (o.tests or map_file.exists()):
        built(map_file, o.jobs)
    known.parent.mkdir(parents=True, exist_ok=True)
    known.touch()
    done = {result.name: result for result in (Result(*json.loads(line)) for line in known.read_text().splitlines())}
    left = [m for m in wanted if m.name not in done or o.only]
    for result in results(left, o.tests, map_file, o.jobs, o.limit):
        done[result.name] = result
        print(f"{result.fate} {result.name}: {result.words} ({result.seconds:.0f} s)", flush=True)
        with known.open("a") as file:
            file.write(json.dumps(result) + "\n")
    alive = [m for m in wanted if done[m.name].fate != "killed"]
    for m in alive:
        text = (ROOT / m.file).read_bytes()
        print(f"{done[m.name].fate}: {m.name}\n  - {text[m.begin : m.end].decode()}\n  + {m.new}")
    print(f"{len(wanted) - len(alive)} of {len(wanted)} killed ({1 - len(alive) / len(wanted):.1%})")
    return 1 if alive and o.reverts else 0


if __name__ == "__main__":
    sys.exit(main())
