"""What is published: files of sdist and wheel, and the wheel installed outside the clone, in an empty environment."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import shardkit as sk

ROOT = Path(__file__).parents[1]
PUBLISHED = ("shardkit/", "shardkit_pytest.py")
PLAIN = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS", "NPROC")}


def run(*command, cwd, code=0):
    """Runs a command as a user would, away from the clone; returns what it prints on both streams."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=PLAIN, text=True, timeout=500, **streams)
    assert code in (done.returncode, None), done.stdout
    return done.stdout


def tracked():
    """The files that git tracks, or would with `git add .`; none outside a clone."""
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    return {name for name in done.stdout.splitlines() if (ROOT / name).exists()} if done.returncode == 0 else set()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Path of sdist and of wheel, the latter built from the former."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    return next(folder.glob("*.tar.gz")), next(folder.glob("*.whl"))


def install(python, what):
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", what, cwd=python.parent)


# A target that was renamed, which only a server would notice.
@pytest.mark.check
def test_continuous_integration_calls_what_is_there():
    workflows = {path.name: path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")}
    assert set(workflows) == {"ci.yml", "docs.yml", "release.yml"}
    for text in workflows.values():
        assert yaml.safe_load(text)["permissions"] == {"contents": "read"}  # a job that writes asks for it by itself
    calls = "".join(workflows.values()) + (ROOT / ".ci" / "run").read_text()
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    called = re.findall(r"\bmake ([\w-]+)", calls)
    assert {"test", "docs", "package"} <= set(called) <= set(targets)
    assert "- run: .ci/run\n" in workflows["ci.yml"] and "- run: .ci/run\n" in workflows["release.yml"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


# A release of which one file still names the last.
@pytest.mark.check
def test_the_version_is_the_same_everywhere_and_all_is_every_extra_that_runs_anywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.M)[1]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1]
    assert project["version"] == sk.__version__ == cited == newest
    assert f"Version {sk.__version__} " in (ROOT / "README.md").read_text()
    # A new extra that [all] lacks, or one that drags the tools of the tests into it.
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [everything] = extras["all"]
    own = {"test", "docs", "all"}  # of this project's developers
    hardware = {"aot-gpu", "cuda", "tpu"}
    assert set(re.fullmatch(r"shardkit\[(.*)\]", everything)[1].split(",")) == set(extras) - own - hardware


# A file that the tests need is left out of the sdist, or one that nobody needs gets into the wheel.
@pytest.mark.deep
def test_the_sdist_has_all_files_and_the_wheel_has_the_packages(built):
    sdist, wheel = built
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        modules = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = archive.read(f"shardkit-{sk.__version__}.dist-info/METADATA").decode()
    files = tracked()
    if not files:
        pytest.skip("which files belong to the sdist is known only in a git clone")
    assert held == files | {"PKG-INFO"}
    assert modules == {name for name in files if name.startswith(PUBLISHED)}
    assert "shardkit/py.typed" in modules
    assert f"Version: {sk.__version__}\n" in metadata and "License-Expression: Apache-2.0\n" in metadata


# A file that the sdist lacks, or that a test finds only in a clone.
@pytest.mark.deep
def test_the_tests_run_from_the_sdist(built, tmp_path):
    with tarfile.open(built[0]) as archive:
        archive.extractall(tmp_path, filter="data")
    [folder] = tmp_path.iterdir()
    assert " passed" in run(sys.executable, "-m", "pytest", "-q", "-m", "check", "tests/test_package.py", cwd=folder)


# Without extras: an import that needs one, the README's program needing more than it says, a command that ends with a
# traceback. Then with those that the errors name: the command, a benchmark, the pytest plugin and the types.
@pytest.mark.deep
def test_the_wheel_works_where_nothing_else_is_installed(built, tmp_path):
    run(sys.executable, "-m", "venv", tmp_path / "env", cwd=tmp_path)
    python, command = tmp_path / "env" / "bin" / "python", tmp_path / "env" / "bin" / "shardkit"
    install(python, built[1])
    first = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    assert re.fullmatch(r"loss \S+ after 100 steps\n", run(python, "-W", "error", "-c", first, cwd=tmp_path))
    line = f"import shardkit.testing as t, shardkit as sk; print(sk.__file__.startswith({str(tmp_path)!r})); t.meshes"
    out = run(python, "-c", line, cwd=tmp_path, code=1).splitlines()
    text = "testing.meshes: hypothesis must be installed; it is not. Run pip install 'shardkit[pytest]'."
    assert out[0] == "True" and out[-1] == f"ImportError: {text}"
    assert run(command, "--version", cwd=tmp_path).startswith(f"shardkit {sk.__version__}")
    out = run(command, "doctor", cwd=tmp_path, code=2)
    assert "pip install 'shardkit[cli]'" in out and len(out.splitlines()) == 1

    install(python, "shardkit[cli,pytest]")  # as the errors say; pip keeps what is installed
    out = run(command, "bench", "comm", "data=2", "--quick", cwd=tmp_path)
    assert "all_reduce" in out and "busbw" in out
    (tmp_path / "test_own.py").write_text(
        "import pytest\nfrom hypothesis import given, settings\nfrom shardkit import testing\n\n"
        "@pytest.mark.meshes({'data': 8}, {'data': 2, 'model': 4})\ndef test_mesh(mesh):\n    assert mesh.size == 8\n\n"
        "@given(testing.meshes())\n@settings(max_examples=5, deadline=None)\ndef test_sizes(sizes):\n    assert sizes\n"
    )
    assert "3 passed" in run(python, "-m", "pytest", "-q", "test_own.py", cwd=tmp_path)
    (tmp_path / "user_program.py").write_text((ROOT / "tests" / "support" / "user_program.py").read_text())
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-optax.*]\nignore_missing_imports = true\n")
    strictly = ["--config-file", "mypy.ini", "--strict", "--python-executable", python, "user_program.py"]
    assert "no issues found" in run(sys.executable, "-m", "mypy", *strictly, cwd=tmp_path)
