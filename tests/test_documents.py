"""What is written for readers runs: README blocks and docstrings. See also test_manual.py and test_notebooks.py."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardkit as sk
from shardkit import collectives

ROOT = Path(__file__).parents[1]


def run(code):
    """Runs code in a fresh process, as a reader would, with every warning an error; compiled as conftest.py says."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


# proves F90
def test_the_readmes_python_runs():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert blocks
    code = "\n".join(blocks)
    assert "epochs=10" in code
    out = run(code.replace("epochs=10", "epochs=2"))  # 128 steps show what 640 do
    loss = re.fullmatch(r"loss (\S+) after 100 steps\n", out)
    assert loss and float(loss.group(1)) < 3


def public():
    return [name for name in sk.__all__ if not inspect.ismodule(getattr(sk, name))]


@pytest.mark.check
@pytest.mark.parametrize("name", public())
def test_public_names_have_docstrings(name):
    assert len((getattr(sk, name).__doc__ or "").strip()) > 20, f"{name} has no docstring"


KERNELS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shift", "broadcast", "vary"]


@pytest.mark.check
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_say_layout_arguments_errors_and_cost(name):
    text = getattr(collectives, name).__doc__
    for section in ("Layout:", "Args:", "Returns:", "Raises:", "Cost:"):
        assert section in text, f"{name} has no {section}"
    for argument in inspect.signature(getattr(collectives, name)).parameters:
        assert f"{argument}:" in text, f"{name} does not describe {argument}"


@pytest.mark.check
def test_the_readme_names_only_files_that_are_there():
    text = (ROOT / "README.md").read_text()
    named = re.findall(r"`((?:tests|benchmarks|notebooks|examples)/[\w/.]+)`", text)
    assert named and all((ROOT / name).exists() for name in named)


@pytest.mark.check
def test_every_public_function_and_class_has_a_docstring():
    missing = []
    for path in sorted((ROOT / "shardkit").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            named = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            if named and not ast.get_docstring(node):
                missing.append(f"{path.name}: {node.name}")
    assert missing == []
