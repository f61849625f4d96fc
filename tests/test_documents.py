"""What is written for readers runs: docstrings. See also test_readme.py, test_manual.py and test_notebooks.py."""

import ast
import inspect
import re
from pathlib import Path

import pytest

from shardkit import collectives

pytestmark = pytest.mark.check
ROOT = Path(__file__).parents[1]
KERNELS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shift", "broadcast", "vary"]


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_say_layout_arguments_errors_and_cost(name):
    text = getattr(collectives, name).__doc__
    for section in ("Layout:", "Args:", "Returns:", "Raises:", "Cost:"):
        assert section in text, f"{name} has no {section}"
    for argument in inspect.signature(getattr(collectives, name)).parameters:
        assert f"{argument}:" in text, f"{name} does not describe {argument}"


def test_every_public_function_has_a_docstring_and_the_changelog_each_section_once():
    missing = []
    for path in sorted((ROOT / "shardkit").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            named = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            if named and not ast.get_docstring(node) and "overload" not in map(ast.unparse, node.decorator_list):
                missing.append(f"{path.name}: {node.name}")
    assert missing == []
    # A merge that keeps both sides of a section that was moved.
    for version in (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]:
        sections = re.findall(r"^### .*", version, re.M)
        assert len(sections) == len(set(sections)), version[:20]
