"""What the house has at its top, and that its size is told: `tests/support/house.py` prints it, and limits nothing."""

import subprocess
from pathlib import Path

import pytest

from shardkit import cli
from support import house

pytestmark = pytest.mark.check

ROOT = Path(__file__).parents[1]


def test_commands_and_pages():
    assert len(cli.every_command()) <= 13  # prove: of the three uses, proof had none
    pages = list((ROOT / "docs").rglob("*.md"))
    assert len(pages) <= 52, "pages that are written by hand; docs/generate makes the others"


def test_the_top_level():
    """Of what git tracks: what tests, builds and users leave beside it is no room."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout: git says which folders belong to the project")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    folders = {name.split("/")[0] for name in tracked if "/" in name and not name.startswith(".")}
    assert folders == {"shardkit", "tests", "benchmarks", "notebooks", "examples", "docs"}


def test_sizes_count_code_and_neither_comments_nor_docstrings(tmp_path):
    path = tmp_path / "room.py"
    path.write_text(
        '"""A docstring."""\n\n# a comment\nx = 1  # one more\n\n\ndef f():\n    """Another."""\n    return x\n'
    )
    assert house.measure(path) == house.Size(files=1, lines=9, tokens=10, comments=2, code=3, characters=37)
    assert str(house.Size(1, 9, 10, 2, 3, 37)).split() == ["1", "9", "10", "2", "12.3"]
    rooms = house.measure_rooms()
    assert "testing" in rooms and rooms["collectives"].plus(house.Size(lines=1)).lines == rooms["collectives"].lines + 1
