"""What type checkers say of code that uses shardkit: README's programs, the manual's, the examples, `user_program.py`.

Each is a file outside of the package, under `mypy --strict`; pages leave out annotations of functions of their own, and
use a name again for something else. Where basedpyright (which needs no download) or pyright is installed, it reads them
too, strictly but for what it cannot know of jax and others.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES_MAY = ("--allow-untyped-defs", "--allow-incomplete-defs", "--allow-untyped-calls", "--allow-redefinition")
THEIRS = re.compile(
    r"hk\.TransformedWithState\?"  # a type of haiku without its module
    r"|Variadic tuple unpacking"  # flax types nnx.split(node, filter, ...) as a tuple of any length
    r"|__getitem__|slice\[SupportsIndex"  # linen's apply may return a tuple
    r'|"(Array \| )?None" is not (indexable|subscriptable)'  # a layer of equinox may have no bias
    r"|TransformUpdateFn|ConvertibleToFloat"  # optax names an update's arguments, and schedules may be complex
    r"|\[report(Unknown|Missing|PossiblyUnbound|Unused)"  # what pyright does not know of jax, NumPy and the page
)
# In a line that pyright reports.
OURS = re.compile(r"\b(shardkit|sk|bench|runtime|schedules|testing|init|step|state)\b")


def find_programs():
    """Name and text of each program: the Python of a page is one, an example another."""
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.S | re.M)
        if blocks:
            name = "_".join(page.relative_to(ROOT).with_suffix("").parts)
            yield name, "\n".join(blocks)
    for path in (ROOT / "examples").glob("*.py"):
        yield f"examples_{path.stem}", path.read_text()


def check_by_mypy(folder, *options):
    """What mypy says of the files of a folder, a line for each mistake."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", "", "--ignore-missing-imports", *options]
    command += ["--no-error-summary", "--hide-error-context", "--cache-dir", ROOT / ".mypy_cache" / "users", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return [line for line in (done.stdout + done.stderr).splitlines() if ": note:" not in line]


def check_by_pyright(program, folder):
    """What pyright says of lines that use shardkit, a line for each mistake."""
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    command = [program, "--pythonpath", sys.executable, "--outputjson", "--project", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True)
    for diagnostic in json.loads(done.stdout)["generalDiagnostics"]:
        path = Path(diagnostic["file"])
        line = diagnostic["range"]["start"]["line"]
        if OURS.search(path.read_text().splitlines()[line]):
            yield f"{path.name}:{line + 1}: {diagnostic['message']} [{diagnostic.get('rule')}]"


def find_pyright():
    """The program of pyright in this environment; None if it is not installed."""
    for tool in ("basedpyright", "pyright"):
        program = shutil.which(tool, path=Path(sys.executable).parent)
        if program:
            return program
    return None


if __name__ == "__main__":
    pyright = find_pyright()
    if pyright is None:
        print("user code: by mypy; pyright is not installed")
    else:
        print("user code: by mypy and pyright")
    with tempfile.TemporaryDirectory() as pages, tempfile.TemporaryDirectory() as typed:
        for name, text in find_programs():
            Path(pages, f"{name}.py").write_text(text)
        shutil.copy(ROOT / "tests" / "support" / "user_program.py", typed)
        messages = check_by_mypy(typed) + check_by_mypy(pages, *PAGES_MAY)
        if pyright is not None:
            messages += check_by_pyright(pyright, Path(pages))
    mistakes = [message for message in messages if not THEIRS.search(message)]
    if mistakes:
        sys.exit("\n".join(mistakes))
