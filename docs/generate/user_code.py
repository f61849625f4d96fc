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


def programs():
    """The Python of each page is one program."""
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        if blocks := re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.S | re.M):
            yield "_".join(page.relative_to(ROOT).with_suffix("").parts), "\n".join(blocks)
    yield from ((f"examples_{path.stem}", path.read_text()) for path in (ROOT / "examples").glob("*.py"))


def by_mypy(folder, *options):
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", "", "--ignore-missing-imports", *options]
    command += ["--no-error-summary", "--hide-error-context", "--cache-dir", ROOT / ".mypy_cache" / "users", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return [line for line in (done.stdout + done.stderr).splitlines() if ": note:" not in line]


def by_pyright(program, folder):
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    command = [program, "--pythonpath", sys.executable, "--outputjson", "--project", "."]
    for each in json.loads(subprocess.run(command, cwd=folder, capture_output=True).stdout)["generalDiagnostics"]:
        path, line = Path(each["file"]), each["range"]["start"]["line"]
        if OURS.search(path.read_text().splitlines()[line]):
            yield f"{path.name}:{line + 1}: {each['message']} [{each.get('rule')}]"


if __name__ == "__main__":
    found = [shutil.which(tool, path=Path(sys.executable).parent) for tool in ("basedpyright", "pyright")]
    pyright = next(filter(None, found), None)
    print("user code: by mypy" + (" and pyright" if pyright else "; pyright is not installed"))
    with tempfile.TemporaryDirectory() as pages, tempfile.TemporaryDirectory() as typed:
        for name, text in programs():
            Path(pages, f"{name}.py").write_text(text)
        shutil.copy(ROOT / "tests" / "support" / "user_program.py", typed)
        said = by_mypy(typed) + by_mypy(pages, *PAGES_MAY) + [*(by_pyright(pyright, Path(pages)) if pyright else ())]
    sys.exit("\n".join(line for line in said if not THEIRS.search(line)) or 0)
