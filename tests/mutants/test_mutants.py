"""The list of mutants is one that can be run: every mistake finds its place, and leaves a file that Python reads."""

import json
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.check

ROOT = Path(__file__).parents[2]
# By its path: as a module, the list would have the name of this folder.
MUTANTS = runpy.run_path(str(Path(__file__).with_name("mutants.py")))["MUTANTS"]


def test_names_are_unique():
    assert [name for name, count in Counter(m.name for m in MUTANTS).items() if count > 1] == []


def test_there_are_many():
    assert len([m for m in MUTANTS if not m.equivalent]) >= 100


def test_every_folder_is_hit():
    folders = {path.parent for path in (ROOT / "shardkit").rglob("*.py")}
    assert folders == {(ROOT / m.file).parent for m in MUTANTS} - {ROOT}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_it_applies(mutant):
    text = (ROOT / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    assert mutant.old.rstrip("\n").count("\n") == 0
    mutated = text.replace(mutant.old, mutant.new)
    assert mutated != text
    compile(mutated, mutant.file, "exec")


def test_the_runner_finds_the_tests_of_every_file():
    """It alone would catch a runner that ends at the first mutant outside of shardkit/, as it once did."""
    code = "import json, run; print(json.dumps({m.file: run.namesakes(m) for m in run.MUTANTS}))"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "tests/mutants", capture_output=True, text=True)
    found = json.loads(said.stdout or f'{{"error": {json.dumps(said.stderr)}}}')
    assert found.keys() == {m.file for m in MUTANTS}
    assert found["shardkit/cli/doctor.py"] == ["tests/cli/test_doctor.py"]
