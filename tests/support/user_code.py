"""What type checkers say of code that uses shardkit: README's programs, the manual's, the examples, `user_program.py`.

    python tests/support/user_code.py

Each is a file outside of the package, under `mypy --strict`; pages leave out annotations of functions of their own, and
use a name again for something else. Where basedpyright (which needs no download) or pyright is installed, it reads them
too, strictly but for what it cannot know of jax and others. `THEIRS` is what other packages get wrong.
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
THEIRS = (  # a part of what a checker says, and who
    ("hk.TransformedWithState?", "haiku's type has no module"),
    ("Variadic tuple unpacking", "flax types nnx.split(node, filter, ...) as a tuple of any length"),
    ("__getitem__", "linen's apply may return a tuple"),
    ("slice[SupportsIndex", "the same"),
    ("TransformUpdateFn", "optax: an update takes its arguments by name"),
    ("ConvertibleToFloat", "optax: a schedule may return a complex number"),
    ('"Array | None" is not indexable', "equinox: a layer may have no bias"),
    ('"None" is not subscriptable', "the same"),
)
# What pyright says is ours to mend where the line names us, but for what jax, NumPy and the page leave unknown.
OURS = re.compile(r"\b(shardkit|sk|bench|runtime|schedules|testing|init|step|state)\b")
UNKNOWN = re.compile(r"report(Unknown|Missing|PossiblyUnbound|Unused)")


def programs():
    """The name and the text of each: the Python of a page is one program."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        if blocks := re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.S | re.M):
            yield "_".join(page.relative_to(ROOT).with_suffix("").parts), "\n".join(blocks)
    for path in sorted((ROOT / "examples").glob("*.py")):
        yield f"examples_{path.stem}", path.read_text()


def by_mypy(folder, *options):
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", "", "--ignore-missing-imports"]
    command += ["--hide-error-context", "--no-error-summary", "--cache-dir", ROOT / ".mypy_cache" / "users", *options]
    done = subprocess.run([*command, "."], cwd=folder, capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if ": error:" in line] + done.stderr.splitlines()


def by_pyright(program, folder):
    (folder / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "strict"}))
    command = [program, "--pythonpath", sys.executable, "--outputjson", "--project", "."]
    found = json.loads(subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout)
    for each in found["generalDiagnostics"]:
        path, line = Path(each["file"]), each["range"]["start"]["line"]
        if OURS.search(path.read_text().splitlines()[line]) and not UNKNOWN.match(each["rule"]):
            yield f"{path.name}:{line + 1}: error: {each['message']}  [{each['rule']}]"


def main():
    with tempfile.TemporaryDirectory() as name:
        pages, typed = Path(name, "pages"), Path(name, "typed")
        pages.mkdir()
        typed.mkdir()
        for each, text in programs():
            (pages / f"{each}.py").write_text(text)
        shutil.copy(ROOT / "tests" / "support" / "user_program.py", typed)
        said = by_mypy(typed) + by_mypy(pages, *PAGES_MAY)
        tools = [shutil.which(tool, path=Path(sys.executable).parent) for tool in ("basedpyright", "pyright")]
        pyright = next(filter(None, tools), None)
        said += by_pyright(pyright, pages) if pyright else ()
        tools = " and pyright" if pyright else "; pyright is not installed"
        print(f"user code: {len(list(pages.glob('*.py')))} programs, by mypy{tools}")
    said = [line for line in said if not any(part in line for part, _ in THEIRS)]
    print(*said, sep="\n", end="\n" if said else "")
    sys.exit(bool(said))


if __name__ == "__main__":
    main()
