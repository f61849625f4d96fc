"""What is written for readers runs: docstrings. See also test_readme.py, test_manual.py and test_notebooks.py."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

import shardkit as sk
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


def find_name(path):
    """What a path such as sk.bench.links, shardkit.models.blocks or shardkit.testing.one_device.Reference names."""
    first, *names = path.split(".")
    assert first in ("sk", "shardkit")
    value = sk
    module = "shardkit"
    for name in names:
        module = f"{module}.{name}"
        try:  # a function may have the name of the module in which it stands
            imported = importlib.import_module(module)
        except ModuleNotFoundError:
            imported = None
        if name == names[-1] or imported is None:
            value = getattr(value, name)
        else:
            value = imported
    return value


def test_the_changelog_names_a_replacement_of_all_that_left():
    """The row of `global_shape` named an exception, that of `execution_trace` nothing."""
    rows = re.findall(r"^\| (`.*) \| (.*) \|$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert len(rows) > 25
    for left, instead in rows:
        assert instead.strip(), left
        for path in re.findall(r"`((?:sk|shardkit)(?:\.\w+)+)", instead):
            find_name(path)
        for name in re.findall(r"^`(sk\.\w+)`", left):  # a face: what stays in a room is an attribute of its module
            assert name.removeprefix("sk.") not in sk.__all__, name
        for file in re.findall(r"\]\((examples/[\w.]+)\)", instead):
            assert (ROOT / file).is_file(), file
