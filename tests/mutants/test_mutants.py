"""What the runner plants can be run: every mistake finds its place, and leaves a file that Python reads."""

import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.check

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))
drawn, mutants = __import__("drawn"), __import__("mutants")
sys.path.remove(str(Path(__file__).parent))


def applied(mutant):
    """The file with the mistake in it, compiled; whether it differs from the file as it is."""
    text = (ROOT / mutant.file).read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # a mistake may look like one
        compile(mutant.mutated(text), mutant.file, "exec")
    return mutant.mutated(text) != text


def test_reverts_apply_and_have_names_of_their_own():
    reverts = mutants.every_revert()
    assert [name for name, count in Counter(m.name for m in reverts).items() if count > 1] == []
    assert len(reverts) >= 100
    assert [m.name for m in reverts if not applied(m)] == []


def test_a_sample_applies_and_is_the_same_for_a_seed():
    found = drawn.sample(7, 15)
    assert found == drawn.sample(7, 15)
    assert found != drawn.sample(8, 15)
    assert len({(m.file, m.line((ROOT / m.file).read_bytes())) for m in found}) == 15
    assert [m.name for m in found if not applied(m)] == []
    assert all(m.file.startswith("shardkit/testing/exact/") for m in drawn.sample(7, 15, "shardkit/testing/exact"))


def test_every_room_and_kind_can_be_drawn():
    lines = [line for file in drawn.files() for line in drawn.by_line(file)]
    places = {each.file.split("/")[1] for line in lines for each in line}
    assert places == set(drawn.ROOMS)
    kinds = {each.kind for line in lines for each in line}
    assert kinds >= {"arguments swapped", "astype dropped", "a constant changed", "a statement dropped", "Sub for Add"}


def test_words_are_left_alone():
    """An error's text and an annotation change no number."""
    text = (
        'def f(x: tuple[int, 2]):\n    if x < 1:\n        raise ValueError(f"{x + 1} of {g(x, 2)}")\n    return x + 1\n'
    )
    found = [change.kind for change in drawn.changes(__import__("ast").parse(text))]
    assert found == ["LtE for Lt", "a constant changed", "Sub for Add", "a constant changed"]
