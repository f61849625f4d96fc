"""The notebooks teach: what each must have, and that what is stored in it is what it prints."""

import json
import re
import subprocess
import sys

import pytest

from support import notebooks
from support.notebooks import FOLDER, ROOT

pytestmark = pytest.mark.check
EVERY = notebooks.paths([])
each = pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)


def texts(path, kind):
    return [cell["source"] for cell in notebooks.read(path)["cells"] if cell["cell_type"] == kind]


@each
def test_it_begins_with_one_question(path):
    """A notebook that asks nothing, or several things, before its first code."""
    first = notebooks.read(path)["cells"][0]
    assert first["cell_type"] == "markdown" and re.match(r"# \S.*\n\n", first["source"])
    assert first["source"].count("?") == 1


@each
def test_its_outputs_are_stored_small_and_the_same_on_every_machine(path):
    """Cells that were edited and not run again, an error or a warning that is stored, and paths of one machine."""
    notebook = notebooks.read(path)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    assert [cell["id"] for cell in notebook["cells"]] == [f"cell-{i}" for i in range(len(notebook["cells"]))]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert outputs and not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"]
    assert path.stat().st_size < 250_000
    assert not re.findall(r"/(?:tmp|home|root|work|usr|opt|var|Users)/[^\s\"\\]*", json.dumps(outputs))
    assert not [cell["source"] for cell in code if not cell["source"].strip()]


@each
def test_it_shows_a_layout_and_leaves_asserts_to_the_tests(path):
    """A notebook without a picture or a table of what is where; one that verifies more than it teaches."""
    code = "\n".join(texts(path, "code"))
    assert re.search(r"\bdescribe\(|\bviz\.", code)
    assert code.count("assert ") <= 3
    assert max(len(cell.splitlines()) for cell in texts(path, "code")) <= 40


@each
def test_it_has_two_exercises_with_hidden_solutions(path):
    """An exercise without a solution, or a solution without code or without what it prints."""
    text = "\n".join(texts(path, "markdown"))
    assert re.findall(r"\*\*Exercise (\d)\.\*\*", text) == ["1", "2"]
    hidden = notebooks.SOLUTION.findall(text)
    assert len(hidden) == 2
    for each in hidden:
        assert each.startswith("\n<summary>Solution</summary>\n\n")  # Markdown is read again after the empty line
        assert all(out for _, out in notebooks.BLOCK.findall(each)) and notebooks.BLOCK.search(each)


@each
def test_its_links_are_there_and_the_last_goes_on(path):
    """A dead link, and a notebook at whose end the reader is left alone."""
    after = EVERY[EVERY.index(path) + 1 :]
    links = [link for text in texts(path, "markdown") for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text)]
    here = [link for link in links if not link.startswith("https://")]
    assert [link for link in here if not (FOLDER / link).exists()] == []
    last = notebooks.read(path)["cells"][-1]
    assert last["cell_type"] == "markdown"
    goes_on = [after[0].name] if after else re.findall(r"\.\./docs/[\w/]+\.md", last["source"])
    assert goes_on and f"]({goes_on[0]})" in last["source"]


def test_the_notebooks_are_numbered_and_what_counts_as_the_same_output():
    """A number that two have, or none: the order, and `make notebooks ONLY=...`, go by it."""
    assert [path.stem[:3] for path in EVERY] == [f"{number:02}_" for number in range(1, len(EVERY) + 1)]
    # A comparison that lets a wrong number of bytes pass, or fails for the last digit of a loss.
    assert notebooks.alike("loss 2.3541, 1,024 bytes", "loss 2.3539, 1,024 bytes")
    assert notebooks.alike("error 1.2e-08", "error 3.4e-08")
    assert notebooks.alike("1 x at cuts.py:57 (whole)", "1 x at cuts.py:177 (whole)")
    assert not notebooks.alike("1 x at cuts.py:57", "2 x at cuts.py:57")
    assert not notebooks.alike("loss 2.3541", "loss 2.4541")
    assert not notebooks.alike("1,024 bytes", "1,028 bytes")
    assert not notebooks.alike("all_gather 3", "all_reduce 3")


# proves F90 in part: every cell and every solution runs, and prints what is stored
@pytest.mark.deep
@each
def test_notebooks_print_what_is_stored(path):
    """A change of the library after which a notebook fails, or prints something else than readers see."""
    command = [sys.executable, str(ROOT / "tests/support/notebooks.py"), "--compare", path.stem[:2]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
