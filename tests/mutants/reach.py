"""A pytest plugin for run.py: which test runs which line of the library, or which test was the first to fail.

With REACH_MAP in the environment it notes, for every test that passes, its seconds and the lines that it runs; with
REACH_REPORT, what began and what failed, as it happens, so that even a crash has a name.
"""

import json
import os
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path.cwd()
LIBRARY = ROOT / "shardkit"
_MAP, _REPORT = os.environ.get("REACH_MAP", ""), os.environ.get("REACH_REPORT", "")

spec = find_spec("shardkit")
if spec is None or Path(spec.origin or "").resolve().parent != LIBRARY.resolve():
    raise ImportError(f"mutants: the library must be the copy in {ROOT}; got {spec}. Run it through run.py.")

if _MAP:
    import coverage

    # The tracer in C: the one of newer interpreters, sys.monitoring, does not tell tests apart.
    os.environ["COVERAGE_CORE"] = "ctrace"
    cover = coverage.Coverage(data_file=None, source=[str(LIBRARY)], config_file=False, messages=False)
    cover.start()

_seconds: dict[str, float] = {}
_failed: set[str] = set()


def _note(what: str, test: str) -> None:
    with open(_REPORT, "a") as file:
        file.write(json.dumps([what, test]) + "\n")


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    _seconds[nodeid] = -time.monotonic()
    if _REPORT:
        _note("began", nodeid)
    elif _MAP:
        cover.switch_context(nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    if report.failed:
        _failed.add(report.nodeid)
        if _REPORT:
            _note("failed", report.nodeid)


def pytest_runtest_logfinish(nodeid: str, location: Any) -> None:
    _seconds[nodeid] += time.monotonic()
    if _MAP:
        cover.switch_context("")


def pytest_collectreport(report: Any) -> None:
    if report.failed and _REPORT:
        _note("failed", f"{report.nodeid} (collecting it)")


def pytest_sessionfinish(session: Any) -> None:
    # With workers, each writes a map of its own; their controller has run nothing.
    if not _MAP or not _seconds or session.config.pluginmanager.has_plugin("dsession"):
        return
    cover.stop()
    data = cover.get_data()
    passed = [test for test in _seconds if test not in _failed]
    number = {test: i for i, test in enumerate(passed)}
    lines: dict[str, dict[int, list[int]]] = {}
    for file in data.measured_files():
        contexts = data.contexts_by_lineno(file)
        name = str(Path(file).relative_to(ROOT))
        lines[name] = {line: sorted(number[t] for t in tests if t in number) for line, tests in contexts.items()}
    found = {"tests": [[test, _seconds[test]] for test in passed], "failed": sorted(_failed), "lines": lines}
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    Path(f"{_MAP}.{worker}").write_text(json.dumps(found))
