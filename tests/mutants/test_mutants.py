"""The list of mutants is one that can be run: every mistake finds its place, and leaves a file that Python reads."""

import runpy
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# By its path: as a module, the list would have the name of this folder.
MUTANTS = runpy.run_path(str(Path(__file__).with_name("mutants.py")))["MUTANTS"]


def test_names_are_unique():
    assert [name for name, count in Counter(m.name for m in MUTANTS).items() if count > 1] == []


def test_there_are_many():
    assert len([m for m in MUTANTS if not m.equivalent]) >= 100


def test_every_folder_is_hit():
    folders = {path.parent for name in ("shardkit", "shardkit_command") for path in (ROOT / name).rglob("*.py")}
    assert folders == {(ROOT / m.file).parent for m in MUTANTS}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_it_applies(mutant):
    text = (ROOT / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    assert mutant.old.rstrip("\n").count("\n") == 0
    mutated = text.replace(mutant.old, mutant.new)
    assert mutated != text
    compile(mutated, mutant.file, "exec")
